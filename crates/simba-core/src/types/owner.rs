use std::time::Duration;

use crate::backend::Ownership;
use crate::clock::Moment;
use crate::types::{ContenderId, FencingToken, Lease};

/// The last known owner of a mutex and the end of its lease, in moments of the local clock.
///
/// A plain value: its predicates take the current moment, so that two of them can use the same one.
/// It describes other contenders. Only [`Tenure::is_held`](crate::Tenure::is_held) says whether this one may work.
///
/// # Examples
///
/// ```
/// use simba_core::{MutexOwner, Moment};
///
/// let owner = MutexOwner::none();
/// assert!(!owner.has_owner(Moment::ZERO));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MutexOwner {
    /// The owner's id; `None` if the mutex has no owner.
    pub id: Option<ContenderId>,
    /// The owner's fencing token, if the store reports it to others.
    pub token: Option<FencingToken>,
    /// When it was first observed as the owner.
    pub acquired_at: Moment,
    /// When its `ttl` ends unless it renews.
    pub ttl_at: Moment,
    /// When its `transition` ends and others may acquire the mutex.
    pub transition_at: Moment,
}

impl MutexOwner {
    /// Returns the value for a mutex without an owner.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            id: None,
            token: None,
            acquired_at: Moment::ZERO,
            ttl_at: Moment::ZERO,
            transition_at: Moment::ZERO,
        }
    }

    /// Converts the store's answer to a request sent at `sent` to moments of the local clock.
    pub(crate) fn observed(ownership: &Ownership, sent: Moment, lease: &Lease) -> Self {
        let transition_at = sent + ownership.remaining;
        Self {
            id: Some(ownership.owner.clone()),
            token: ownership.token,
            acquired_at: sent,
            ttl_at: transition_at.saturating_sub(lease.transition()),
            transition_at,
        }
    }

    /// Keeps `acquired_at` of `earlier` if both are the same owner.
    pub(crate) fn since(mut self, earlier: &Self) -> Self {
        if self.id.is_some() && self.id == earlier.id && self.token == earlier.token {
            self.acquired_at = earlier.acquired_at;
        }
        self
    }

    /// Returns whether this contender is the owner, without a check of the time: see [`is_in_ttl`](Self::is_in_ttl).
    #[must_use]
    pub fn is_owner(&self, contender: &ContenderId) -> bool {
        self.id.as_ref() == Some(contender)
    }

    /// Returns whether the owner is within its `ttl`.
    #[must_use]
    pub fn is_in_ttl(&self, now: Moment) -> bool {
        self.id.is_some() && now < self.ttl_at
    }

    /// Returns whether the owner is within its `transition`, in which only the owner may renew.
    #[must_use]
    pub fn is_in_transition(&self, now: Moment) -> bool {
        self.id.is_some() && self.ttl_at <= now && now < self.transition_at
    }

    /// Returns whether the mutex has an owner within its `ttl` or `transition`.
    #[must_use]
    pub fn has_owner(&self, now: Moment) -> bool {
        self.id.is_some() && now < self.transition_at
    }

    /// Returns the time until the owner's lease ends without a renewal.
    #[must_use]
    pub fn remaining(&self, now: Moment) -> Duration {
        if self.id.is_some() { self.transition_at.saturating_since(now) } else { Duration::ZERO }
    }
}

/// A change of ownership: the owner before and after.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MutexState {
    /// The owner before the change.
    pub before: MutexOwner,
    /// The owner after it.
    pub after: MutexOwner,
}

impl MutexState {
    /// Returns the value for no owner before and after.
    #[must_use]
    pub const fn none() -> Self {
        Self { before: MutexOwner::none(), after: MutexOwner::none() }
    }

    /// Creates a change from one owner to another.
    #[must_use]
    pub const fn new(before: MutexOwner, after: MutexOwner) -> Self {
        Self { before, after }
    }

    /// Returns whether the owner has changed.
    #[must_use]
    pub fn is_changed(&self) -> bool {
        self.before.id != self.after.id
    }

    /// Returns whether this contender acquired the mutex by the change.
    #[must_use]
    pub fn is_acquired(&self, contender: &ContenderId) -> bool {
        self.is_changed() && self.after.is_owner(contender)
    }

    /// Returns whether this contender released or lost the mutex by the change.
    #[must_use]
    pub fn is_released(&self, contender: &ContenderId) -> bool {
        self.is_changed() && self.before.is_owner(contender)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(id: &str, ttl_ms: u64, transition_ms: u64) -> MutexOwner {
        MutexOwner {
            id: Some(ContenderId::new(id).unwrap()),
            ttl_at: Moment::ZERO + Duration::from_millis(ttl_ms),
            transition_at: Moment::ZERO + Duration::from_millis(transition_ms),
            ..MutexOwner::none()
        }
    }

    #[test]
    fn transition_follows_the_ttl() {
        let owner = owner("a", 100, 150);
        let at = |ms| Moment::ZERO + Duration::from_millis(ms);
        let windows = |now| (owner.is_in_ttl(now), owner.is_in_transition(now), owner.has_owner(now));
        assert_eq!(windows(at(99)), (true, false, true));
        assert_eq!(windows(at(100)), (false, true, true));
        assert_eq!(windows(at(150)), (false, false, false));
        assert_eq!(owner.remaining(at(120)), Duration::from_millis(30));
    }

    #[test]
    fn a_change_is_acquired_by_one_and_released_by_the_other() {
        let [a, b] = ["a", "b"].map(|id| ContenderId::new(id).unwrap());
        let state = MutexState::new(owner("a", 1, 2), owner("b", 1, 2));
        assert!(state.is_changed() && state.is_released(&a) && state.is_acquired(&b));
        assert!(!state.is_acquired(&a) && !state.is_released(&b));
        assert!(!MutexState::new(owner("a", 1, 2), owner("a", 5, 6)).is_changed());
    }
}
