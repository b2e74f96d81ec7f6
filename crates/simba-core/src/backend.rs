//! The interface between the engine and a store: one trait for the store, one for a session.
//!
//! The engine builds the whole user interface on these traits. A backend arbitrates and reports. It takes no decision
//! that depends on the local time.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::Result;
use crate::operate::Operate;
use crate::types::{ContenderId, FencingToken, Lease, MutexName};

/// A store that can arbitrate mutexes. One value serves any number of mutexes over a constant number of
/// connections.
///
/// # For implementors
///
/// Implement the four calls of [`Session`], then run the conformance suite. The engine owns the timers, the
/// retries and the jitter of every session. A backend keeps its own connections alive (reconnect, ping, resubscribe)
/// with one supervisor per value, on the engine's [`Clock`](crate::Clock), which its constructor takes. After a
/// reconnect every [`Session::changed`] completes once, since any message may have been missed.
///
/// # Examples
///
/// [`MemoryBackend`](crate::MemoryBackend) is the reference implementation.
#[async_trait]
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// Returns a short lower-case name for logs, metrics and errors, such as `"redis"`.
    fn name(&self) -> &'static str;

    /// Opens a session for one contender on one mutex. Neither acquires nor queues.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) is retried. Every other kind is permanent until the
    /// cause is fixed.
    ///
    /// # Cancel safety
    ///
    /// A dropped call leaves nothing behind.
    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>>;

    /// Returns the operators' calls: list, read, evict, probe, schema. `None` if the backend has none.
    fn operate(&self) -> Option<&dyn Operate> {
        None
    }

    /// Closes the connections. Open sessions fail from then on.
    async fn close(&self) {}
}

/// Forwards to the shared backend. The future of the inner call is passed on, so it is boxed once.
impl<B: Backend + ?Sized> Backend for Arc<B> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn open<'a, 'b>(&'a self, claim: Claim) -> BoxFuture<'b, Result<Box<dyn Session>>>
    where
        'a: 'b,
        Self: 'b,
    {
        (**self).open(claim)
    }

    fn operate(&self) -> Option<&dyn Operate> {
        (**self).operate()
    }

    fn close<'a, 'b>(&'a self) -> BoxFuture<'b, ()>
    where
        'a: 'b,
        Self: 'b,
    {
        (**self).close()
    }
}

/// The return type of an async method in an object-safe trait.
type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// One contender's session with the store on one mutex.
///
/// # For implementors
///
/// The engine makes one call at a time, with a timeout for each. It may drop a call at any await point and make the
/// next. The reply to a dropped call must never be taken for the reply to the next one. A session owns no
/// timer, no clock, no task and no retry. It is opened once and must survive reconnects, failovers, and the end
/// of a session or lease at the store.
///
/// Dropping a session deletes, in the background, what no lease would end (an ephemeral node, a queue entry).
/// It need not free a mutex whose lease ends anyway: [`release`](Self::release) does that.
#[async_trait]
pub trait Session: Send + 'static {
    /// Acquires the mutex if it is free, renews it if this session holds it, and returns the owner.
    ///
    /// # For implementors
    ///
    /// - The call is atomic at the store. It can be dropped half-way and repeated.
    /// - [`Answer::Ours`]: *this* session holds the mutex for at least `remaining`, counted by the store from a
    ///   moment after this call was made. The engine counts from before the call. Never answer from a request that was
    ///   sent before the call, such as a batch in flight: the engine's deadline would be too late.
    /// - The token of [`Answer::Ours`] is never absent, stays the same through renewals and strictly increases with
    ///   every acquisition, including one by the same session after a loss. It is the token that the store has
    ///   now, never a cached one.
    /// - If the mutex is free and no live waiter is before this session, acquire it. If a live waiter is before it,
    ///   return [`Answer::Vacant`]. With [`Intent::Queue`] keep the entry in the queue; with [`Intent::Try`] write
    ///   nothing.
    /// - `prior` is what this session may have already, see [`Prior`]. With [`Prior::Nothing`], a hold under the
    ///   session's own id is not this session's: return [`Answer::Held`] and change nothing. With another prior,
    ///   [`Answer::Held`] with the own id names a hold that an ended store session left behind.
    ///
    /// # Errors
    ///
    /// An error says that the outcome is unknown, never that another contender holds the mutex.
    async fn contend(&mut self, prior: Prior) -> Result<Answer>;

    /// Returns the owner of the mutex, and does not change it.
    ///
    /// # Errors
    ///
    /// The owner is unknown.
    async fn inspect(&mut self) -> Result<Option<Ownership>>;

    /// Releases the hold that `holding` names, leaves the queue, and wakes the next waiter.
    ///
    /// # For implementors
    ///
    /// - Idempotent. Never frees a hold of another contender or a later hold of this one, however late it arrives: see
    ///   [`Holding`].
    /// - Passes a wake-up on: a waiter that was woken and leaves instead of acquiring wakes the next one.
    /// - Sent on the same path as the calls before it, so that an acquisition in flight is processed first.
    ///
    /// # Errors
    ///
    /// The outcome is unknown; the engine retries for as long as the lease lasts.
    async fn release(&mut self, holding: Holding) -> Result<()>;

    /// Completes when a [`contend`](Self::contend) or [`inspect`](Self::inspect) is worthwhile before the next poll.
    /// A hint, never a fact: it may come late, twice, without a change, or not at all.
    ///
    /// # For implementors
    ///
    /// - Subscribe in the first call, and complete once after every (re)subscription, since any change before it may
    ///   have been missed. So an uncontended mutex subscribes to nothing.
    /// - A session that holds the mutex only waits for signs that the hold may be lost. If the store has none,
    ///   stay pending and subscribe to nothing.
    /// - The default never completes: the engine polls.
    ///
    /// # Errors
    ///
    /// No hints for now. The engine keeps polling and calls this again after its next poll.
    ///
    /// # Cancel safety
    ///
    /// Dropped often. A hint that arrived meanwhile must be kept for the next call.
    async fn changed(&mut self) -> Result<()> {
        std::future::pending().await
    }
}

/// A contender's claim on a mutex: the parameters of a session.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Claim {
    /// The mutex.
    pub mutex: MutexName,
    /// The contender's id, which no other session has or had.
    pub contender: ContenderId,
    /// The lease that every acquisition and renewal requests.
    pub lease: Lease,
    /// Whether the session queues.
    pub intent: Intent,
}

impl Claim {
    /// Creates a claim that queues.
    #[must_use]
    pub fn new(mutex: MutexName, contender: ContenderId, lease: Lease) -> Self {
        Self { mutex, contender, lease, intent: Intent::Queue }
    }

    /// Returns the same claim with another intent.
    #[must_use]
    pub fn with_intent(self, intent: Intent) -> Self {
        Self { intent, ..self }
    }
}

/// Whether a session queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Intent {
    /// Never queues and never overtakes a live waiter: a free mutex with a live waiter is not acquired.
    Try,
    /// Waits in the queue.
    Queue,
    /// Never contends: such a session only inspects, and gets a hint after every change of owner since its last
    /// inspection.
    Observe,
}

/// What the session may have at the store from earlier calls.
///
/// With anything but [`Prior::Nothing`], a hold under the own id is this session's. A call may arrive late, after the
/// calls that followed it: only the token in [`Prior::Lapsed`] makes it replace a hold that this session already has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Prior {
    /// Nothing: every call so far was answered, and the last one did not acquire.
    Nothing,
    /// Unknown: an unanswered call may have acquired. Adopt a hold under the own id, with its token.
    Unknown,
    /// The mutex under this token, whose tenure ended here before the store's lease did. If the store still has the
    /// hold under this token, replace it with a hold under a greater token, so that late writes of the lost tenure are
    /// fenced off. A backend may free the hold and let an earlier waiter acquire instead; this session then queues. The
    /// engine begins no tenure under a token that is not greater than the last one: it releases the mutex and reports
    /// [`ErrorKind::Protocol`](crate::ErrorKind::Protocol).
    Lapsed(FencingToken),
    /// The mutex, according to the last answer. Renew it; its token stays.
    Held,
}

/// The hold that [`Session::release`] releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Holding {
    /// Certainly none: leave the queue and pass a wake-up on. A hold under the own id is not this session's.
    Nothing,
    /// An unanswered call may have acquired: free any hold under the own id.
    Unknown,
    /// The hold under this token. A hold under any other token is not changed.
    Under(FencingToken),
}

/// The store's answer to [`Session::contend`].
///
/// Exhaustive, unlike the other enums of this module: code that passes answers on or changes them, such as a fault
/// injector, handles every one. A wildcard there would hide a new answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// This session holds the mutex, acquired or renewed.
    Ours(Ownership),
    /// Another session holds the mutex.
    Held(Ownership),
    /// The mutex is free and was not acquired: another waiter is first, or the call lost a race.
    Vacant,
}

/// The owner of a mutex and the rest of its lease, by the store's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ownership {
    /// The owner.
    pub owner: ContenderId,
    /// Its fencing token. Always known to the owner itself; known to others if the store reports it.
    pub token: Option<FencingToken>,
    /// The time until its lease ends without a renewal.
    pub remaining: Duration,
}

impl Ownership {
    /// Creates an ownership.
    #[must_use]
    pub fn new(owner: ContenderId, token: Option<FencingToken>, remaining: Duration) -> Self {
        Self { owner, token, remaining }
    }
}
