//! Deliberate bugs, one line each where they would be made, that prove the checkers.
//!
//! They exist in builds with `--cfg simba_bugs` alone, which the tests make; elsewhere [`on`] is a constant
//! `false` and nothing of them is left. `docs/testing.md` tells which checker catches which.

/// A bug that can be switched on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(simba_bugs), allow(unreachable_pub, reason = "public in the builds that have it"))]
pub enum Bug {
    /// The lease counts from the reply instead of from before the request.
    DeadlineFromReply,
    /// Nothing ends with the deadline.
    NoDeadline,
    /// The deadline lies at the very end of the store's lease.
    NoMargin,
    /// A failed renewal counts as one that succeeded.
    FailureRenews,
    /// A graceful end does not wait for the work.
    FreeBeforeWorkEnds,
    /// The holder is not told before it loses.
    NoExpiring,
    /// A lock future or guard that is dropped goes on holding.
    LeakOnDrop,
    /// A contender that ends gives nothing back.
    NoRelease,
    /// A call to the store is waited for without end.
    NoCallLimit,
    /// A schedule makes up for every tick that it missed.
    Burst,
    /// A tick starts whether the tenure is valid or not.
    TickWithoutTenure,
    /// A renewal that is answered after the deadline brings the tenure back.
    Resurrect,
}

#[cfg(simba_bugs)]
thread_local! {
    static ACTIVE: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Switches one bug on for this thread, or all off.
#[cfg(simba_bugs)]
pub fn set(bug: Option<Bug>) {
    ACTIVE.set(bug);
}

/// Whether this bug is on.
#[cfg(simba_bugs)]
pub(crate) fn on(bug: Bug) -> bool {
    ACTIVE.get() == Some(bug)
}

/// Whether this bug is on: never.
#[cfg(not(simba_bugs))]
pub(crate) const fn on(_: Bug) -> bool {
    false
}
