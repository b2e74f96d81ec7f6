//! When a quorum last showed that the session lives.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use simba_core::Moment;

/// The last quorum call that was answered.
#[derive(Clone, Copy, Debug)]
struct Proof {
    session: i64,
    /// Before it was sent: what it proves holds from some moment after.
    sent: Moment,
}

/// What a session's holders and waiters share: one proof is as good for all of them.
#[derive(Debug, Default)]
pub(super) struct Proofs {
    last: Mutex<Option<Proof>>,
}

impl Proofs {
    /// A quorum has carried out a request of this session that was sent then.
    pub(super) fn add(&self, session: i64, sent: Moment) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.session != session || last.sent < sent) {
            *last = Some(Proof { session, sent });
        }
    }

    /// How much a lease of this length, counted from the last proof, has left at this moment.
    pub(super) fn left(&self, session: i64, at: Moment, lease: Duration) -> Duration {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match last {
            Some(proof) if proof.session == session => lease.saturating_sub(at.saturating_since(proof.sent)),
            _ => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(10);

    fn at(seconds: u64) -> Moment {
        Moment::ZERO + Duration::from_secs(seconds)
    }

    #[test]
    fn a_lease_counts_from_before_the_last_proof_was_asked_for() {
        let proofs = Proofs::default();
        assert_eq!(proofs.left(7, at(1), LEASE), Duration::ZERO, "nothing is proven yet");
        proofs.add(7, at(3));
        proofs.add(7, at(2));
        assert_eq!(proofs.left(7, at(5), LEASE), Duration::from_secs(8));
        assert_eq!(proofs.left(7, at(60), LEASE), Duration::ZERO);
    }

    #[test]
    fn what_is_proven_of_one_session_says_nothing_of_another() {
        let proofs = Proofs::default();
        proofs.add(7, at(3));
        assert_eq!(proofs.left(8, at(4), LEASE), Duration::ZERO);
        proofs.add(8, at(1));
        assert_eq!(proofs.left(7, at(4), LEASE), Duration::ZERO);
        assert_eq!(proofs.left(8, at(4), LEASE), Duration::from_secs(7));
    }
}
