//! Deliberate bugs, one line each, that show that the checkers of the tests find them.
//!
//! They exist only in builds with `--cfg simba_bugs`, which the tests make. In other builds [`on`] is a constant
//! `false`. `docs/testing.md` lists which checker finds which bug.

/// A bug that can be enabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(simba_bugs), allow(unreachable_pub, reason = "public in the builds that have it"))]
pub enum Bug {
    /// The lease counts from the reply instead of from before the request.
    DeadlineFromReply,
    /// No tenure ends at its deadline.
    NoDeadline,
    /// The deadline is the end of the lease at the store.
    NoMargin,
    /// A failed renewal counts as successful.
    FailureRenews,
    /// A graceful end does not wait for the work.
    FreeBeforeWorkEnds,
    /// The holder is not notified before the loss.
    NoExpiring,
    /// A dropped lock future or guard keeps the mutex.
    LeakOnDrop,
    /// A contender that ends releases nothing.
    NoRelease,
    /// Calls to the store have no time limit.
    NoCallLimit,
    /// A schedule runs every tick that it missed.
    Burst,
    /// A tick starts without a check of the tenure.
    TickWithoutTenure,
    /// A renewal that is answered after the deadline makes the tenure valid again.
    Resurrect,
}

#[cfg(simba_bugs)]
thread_local! {
    static ACTIVE: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Enables one bug for this thread, or disables all.
#[cfg(simba_bugs)]
pub fn set(bug: Option<Bug>) {
    ACTIVE.set(bug);
}

/// Returns whether this bug is enabled.
#[cfg(simba_bugs)]
pub(crate) fn on(bug: Bug) -> bool {
    ACTIVE.get() == Some(bug)
}

/// Returns `false`: this build has no bugs to enable.
#[cfg(not(simba_bugs))]
pub(crate) const fn on(_: Bug) -> bool {
    false
}
