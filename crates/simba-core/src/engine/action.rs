//! The interface between the machine, which decides, and the driver, which performs.

use std::time::Duration;

use crate::backend::{Holding, Prior};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::tenure::Grant;
use crate::types::{Lease, Loss};

/// How long a contender contends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// One attempt without waiting, and at most one tenure.
    Try,
    /// Waits for one tenure. Fails after the store could not be reached for this long.
    Once(Duration),
    /// Contends again after every tenure, until stopped.
    Forever,
}

/// The settings of a contender.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) mode: Mode,
    pub(crate) lease: Lease,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) min_hold: Duration,
}

impl Settings {
    /// Returns settings without limits of the hold.
    pub(crate) const fn new(mode: Mode, lease: Lease) -> Self {
        Self { mode, lease, max_hold: None, min_hold: Duration::ZERO }
    }
}

/// What the handle requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Acquire the mutex and hold it.
    Hold,
    /// Release the mutex and do not contend for this long.
    StepDown(Duration),
    /// Release the mutex and end.
    Stop,
}

/// What the machine has to know of its handle before each action.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input {
    pub(crate) request: Request,
    /// A shutdown has begun, which no minimum hold delays.
    pub(crate) shutdown: bool,
    /// Work was started under the tenure, such as that of a guard.
    pub(crate) used: bool,
}

/// What the driver has to do. A duration is the time limit of the call.
#[derive(Debug)]
pub(crate) enum Action {
    /// Open the session, and report to [`opened`](super::machine::Machine::opened).
    Open(Duration),
    /// Inspect the mutex, and report to [`inspected`](super::machine::Machine::inspected).
    Inspect(Duration),
    /// Contend, and report to [`answered`](super::machine::Machine::answered).
    Contend(Prior, Duration),
    /// Wait, and report a hint to [`hinted`](super::machine::Machine::hinted).
    Wait(Wait),
    /// Announce the end of the tenure to its work.
    Announce(Loss),
    /// End the tenure at once.
    Lose(Loss),
    /// Accept the request. Announce the end of the tenure, if there is one, wait for its work, then end it.
    Close(Loss),
    /// Report the outcome to the handle: no further tenure begins.
    Conclude(Result<()>),
    /// Release, and report to [`released`](super::machine::Machine::released).
    Release(Holding, Duration),
    /// Drop the session and [start anew](super::machine::Machine::start_anew) under a new id. The error is that of the release.
    StartAnew(Result<()>),
    /// Drop the session, report to the handle that the contender has left the store, and end.
    Finish(Result<()>),
}

/// A wait for a moment, and what ends it earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wait {
    pub(crate) until: Moment,
    pub(crate) wake: Wake,
    /// Whether a hint of the session ends it.
    pub(crate) hints: bool,
    /// Whether it may end some milliseconds late, together with others.
    pub(crate) approximate: bool,
}

/// Which requests end a [`Wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// Any request of the handle, and a shutdown.
    Request,
    /// A shutdown.
    Shutdown,
    /// None.
    Never,
}

/// The reply to a call; `None` if there was none within the time limit.
pub(crate) type Reply<T> = Option<Result<T>>;

/// What the reply to a call changes. The loss comes first.
#[derive(Debug, Default)]
pub(crate) struct Step {
    /// The tenure has ended.
    pub(crate) lost: Option<Loss>,
    pub(crate) news: News,
}

/// What is new after the reply to a call.
#[derive(Debug, Default)]
pub(crate) enum News {
    /// Nothing for this contender.
    #[default]
    Nothing,
    /// A tenure begins.
    Acquired(Grant),
    /// The tenure continues with a later deadline.
    Renewed(Grant),
    /// The call failed, which is neither a loss nor a renewal.
    Failed(Error),
    /// The store gave the mutex under a token that does not fence off the last tenure. No tenure begins.
    OldToken(Error),
}

impl Step {
    pub(super) const fn new(news: News) -> Self {
        Self { lost: None, news }
    }
}
