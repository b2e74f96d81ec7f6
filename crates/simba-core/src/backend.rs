//! The interface between the engine and a store: one small trait for each side of it.
//!
//! Everything a user sees is built above these traits, once, by the engine. A backend arbitrates and reports;
//! it decides nothing that depends on time here.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::Result;
use crate::operate::Operate;
use crate::types::{ContenderId, FencingToken, Lease, MutexName};

/// A store that can arbitrate mutexes. One value serves any number of them over a constant number of
/// connections.
///
/// # For implementors
///
/// Implement [`Session`] with four calls, then run the compatibility kit. The engine owns the timers, the
/// retries and the jitter of every session; what a backend needs to keep its own connections alive
/// (reconnecting, pinging, resubscribing) is one supervisor per value, on the engine's
/// [`Clock`](crate::Clock), which its constructor takes. After a reconnect every [`Session::changed`] completes
/// once, since anything may have been missed.
///
/// # Examples
///
/// [`MemoryBackend`](crate::MemoryBackend) is the reference implementation.
#[async_trait]
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// Short lower-case name for logs, metrics and errors: `"redis"`.
    fn name(&self) -> &'static str;

    /// Opens a session for one contender on one mutex. Takes nothing and queues nowhere yet.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) is tried again; any other kind is for a
    /// person to mend.
    ///
    /// # Cancel safety
    ///
    /// A dropped call leaves nothing behind.
    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>>;

    /// What operators need beyond contending: list, read, evict, probe, schema.
    fn operate(&self) -> Option<&dyn Operate> {
        None
    }

    /// Closes the connections. Sessions still open fail from now on.
    async fn close(&self) {}
}

/// One contender's standing with the store on one mutex.
///
/// # For implementors
///
/// The engine makes one call at a time, bounds each by a timeout, and may drop a call at any await point and
/// make the next; the reply to a dropped call must never be taken for the reply to the next. A session owns no
/// timer, no clock, no task and no retry. It is opened once and must outlive reconnects, failovers, and the end
/// of a session or lease at the store.
///
/// Dropping a session gives up what no lease would end (an ephemeral node, a queue entry), in the background.
/// It need not free a mutex whose lease ends by itself: that is what [`release`](Self::release) is for.
#[async_trait]
pub trait Session: Send + 'static {
    /// Takes the mutex if it is free, renews it if it is ours, and reports who owns it now.
    ///
    /// # For implementors
    ///
    /// - Atomic at the store, and safe to drop half-way and repeat.
    /// - [`Answer::Ours`]: ours through *this* session for at least `remaining`, counted by the store from a
    ///   moment after this call was made. The engine counts from before the call: an answer that comes from a
    ///   request sent earlier, such as a batch under way, would make its deadline too late and is never given.
    /// - The token of [`Answer::Ours`] is never absent, stays the same through renewals and strictly increases with
    ///   every acquisition, including one by the same session after a loss. It is the one that the store has
    ///   now, never a remembered one.
    /// - Free, and our turn: take it. Free, but promised to a live waiter before us: [`Answer::Vacant`].
    ///   With [`Intent::Queue`] keep our place in the queue; with [`Intent::Try`] leave no trace.
    /// - `prior` is what this session may have already, see [`Prior`]. With [`Prior::Nothing`], a hold under our
    ///   own id is not this session's: report [`Answer::Held`] and change nothing. With another prior,
    ///   [`Answer::Held`] with our own id names what a store session of ours that is gone left behind.
    ///
    /// # Errors
    ///
    /// An error says that the outcome is unknown, never that somebody else holds the mutex.
    async fn contend(&mut self, prior: Prior) -> Result<Answer>;

    /// Reports who owns the mutex, and changes nothing of that.
    ///
    /// # Errors
    ///
    /// The owner is unknown.
    async fn inspect(&mut self) -> Result<Option<Ownership>>;

    /// Gives up what `holding` says we have, leaves the queue, and wakes the next waiter.
    ///
    /// # For implementors
    ///
    /// - Idempotent, and never frees another's nor a later hold of our own, however late it arrives: see
    ///   [`Holding`].
    /// - Passes the baton: a waiter that was woken and does not want the mutex any more wakes the next one.
    /// - On the way of the calls before it, so that an acquisition still under way comes first.
    ///
    /// # Errors
    ///
    /// The outcome is unknown; the engine tries again for as long as the lease lasts.
    async fn release(&mut self, holding: Holding) -> Result<()>;

    /// Completes when an early [`contend`](Self::contend) or [`inspect`](Self::inspect) may pay off. A hint,
    /// never a fact: it may come late, twice, for nothing, or not at all.
    ///
    /// # For implementors
    ///
    /// - Subscribe in the first call, and complete once after every (re)subscription, since anything may have
    ///   been missed before it. So an uncontended mutex subscribes to nothing.
    /// - A session that holds the mutex only waits for signs that it may be gone. If the store gives none,
    ///   stay pending and subscribe to nothing.
    /// - The default never completes: the engine polls.
    ///
    /// # Errors
    ///
    /// No hints for now; the engine goes on polling and asks again after its next look.
    ///
    /// # Cancel safety
    ///
    /// Dropped often. A hint that arrived meanwhile must be kept for the next call.
    async fn changed(&mut self) -> Result<()> {
        std::future::pending().await
    }
}

/// What a contender asks of the store.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Claim {
    /// The mutex it is about.
    pub mutex: MutexName,
    /// The contender's id, which no other session has or had.
    pub contender: ContenderId,
    /// For how long at a time.
    pub lease: Lease,
    /// Whether to wait for it.
    pub intent: Intent,
}

impl Claim {
    /// A claim that waits its turn.
    #[must_use]
    pub fn new(mutex: MutexName, contender: ContenderId, lease: Lease) -> Self {
        Self { mutex, contender, lease, intent: Intent::Queue }
    }

    /// The same claim with another intent.
    #[must_use]
    pub fn with_intent(self, intent: Intent) -> Self {
        Self { intent, ..self }
    }
}

/// Whether a contender waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Intent {
    /// Never queues and never passes a live waiter: free but promised to another counts as not to be had.
    Try,
    /// Waits its turn.
    Queue,
    /// Only looks: such a session inspects, and its hints tell of every change of owner since its last look.
    Observe,
}

/// What the session may have at the store from the calls before this one.
///
/// With anything but [`Prior::Nothing`], our own id in the store is ours. A call may arrive late, after the
/// ones that followed it: only the token in [`Prior::Lapsed`] makes it change anything that is ours already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Prior {
    /// Nothing: every call so far was answered, and the last one did not win.
    Nothing,
    /// Unknown: a call before may have won without an answer. Adopt what is ours, with its token.
    Unknown,
    /// The mutex under this token, which was given up for lost here before the store's lease ended. If the
    /// store still has it under that very token, give that hold up and take the mutex anew with a greater token
    /// when it is our turn, so that what the lost tenure left behind is fenced off. The engine begins no tenure
    /// under a token that is not greater than the one before: it gives the mutex back and reports
    /// [`ErrorKind::Protocol`](crate::ErrorKind::Protocol).
    Lapsed(FencingToken),
    /// The mutex: the last answer said so. Renew it; its token stays.
    Held,
}

/// What a session gives up with [`Session::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Holding {
    /// No hold, surely: leave the queue and pass a wake-up on. A hold under our own id is not this session's.
    Nothing,
    /// A call may have won without an answer: free whatever stands under our id.
    Unknown,
    /// The hold under this token. A hold under any other is left alone.
    Under(FencingToken),
}

/// The store's answer to [`Session::contend`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Ours, taken or renewed.
    Ours(Ownership),
    /// Somebody else's.
    Held(Ownership),
    /// Nobody's, and not ours either: not our turn, or a lost race.
    Vacant,
}

/// Who owns a mutex and for how long, by the store's own clock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ownership {
    /// The owner.
    pub owner: ContenderId,
    /// Its fencing token; always known to the owner itself, to others where the store tells.
    pub token: Option<FencingToken>,
    /// How much longer it keeps others out without a renewal.
    pub remaining: Duration,
}

impl Ownership {
    /// An ownership as seen by others.
    #[must_use]
    pub fn new(owner: ContenderId, token: Option<FencingToken>, remaining: Duration) -> Self {
        Self { owner, token, remaining }
    }
}
