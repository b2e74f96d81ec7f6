//! Quorum proofs: the time until which the servers keep a session for certain.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::Moment;

/// The proof that an answered quorum call gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SessionProof {
    /// The session that made the call.
    pub(super) session: i64,
    /// The servers keep the session until then, even if they receive nothing more from it.
    pub(super) until: Moment,
}

/// The latest proof of a session, shared by its holders and waiters.
#[derive(Debug, Default)]
pub(crate) struct Proofs {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: Option<SessionProof>,
    /// The end of all proofs that are older than the last shorter grant.
    shortened_until: Option<Moment>,
    /// The number of reconnects that granted a shorter timeout.
    shortenings: u32,
}

impl Proofs {
    /// Records a proof, unless the session has one that lasts longer.
    pub(super) fn add(&self, proof: SessionProof) {
        let last = &mut self.state().last;
        if last.is_none_or(|last| last.session != proof.session || last.until < proof.until) {
            *last = Some(proof);
        }
    }

    /// Returns the end of the session's last proof.
    pub(crate) fn until(&self, session: i64) -> Option<Moment> {
        self.state().last.filter(|proof| proof.session == session).map(|proof| proof.until)
    }

    /// Limits all proofs so far to this moment.
    pub(super) fn shorten(&self, until: Moment) {
        let mut state = self.state();
        state.shortened_until = Some(until);
        state.shortenings += 1;
        if let Some(last) = &mut state.last {
            last.until = last.until.min(until);
        }
    }

    /// Returns how often a reconnect granted a shorter timeout.
    pub(crate) fn shortenings(&self) -> u32 {
        self.state().shortenings
    }

    /// Returns the end of a proof that is older than the last shorter grant.
    pub(crate) fn shortened(&self, until: Moment) -> Moment {
        self.state().shortened_until.map_or(until, |limit| limit.min(until))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The earliest moment from which the leader of the ensemble counts the timeout of the session.
///
/// A quorum call shows that the leader has not ended the session, but does not restart its timeout at the leader. A
/// follower reports the sessions that it has received messages from when the leader pings it, every half tick. A
/// session lasts two ticks or more, so a message that a follower has received is reported within a quarter of the
/// timeout.
#[derive(Debug)]
pub(super) struct LeaderContact {
    /// The leader has a report of a message that was sent then, or later.
    since: Moment,
    /// Answered pings that may not be reported yet, each as (sent, answered).
    pings: VecDeque<(Moment, Moment)>,
}

impl LeaderContact {
    /// No call is in flight long enough to need an older ping.
    const MAX_PINGS: usize = 16;

    /// Starts with the handshake, which a follower forwards to the leader before it answers.
    pub(super) const fn new(handshake: Moment) -> Self {
        Self { since: handshake, pings: VecDeque::new() }
    }

    /// Records the answer to a ping.
    pub(super) fn answered(&mut self, sent: Moment, now: Moment) {
        if self.pings.len() == Self::MAX_PINGS {
            self.pings.pop_front();
        }
        self.pings.push_back((sent, now));
    }

    /// Returns the moment until which the servers keep the session, by an answered quorum call that was sent at `sent`.
    /// Must be called in the order in which the quorum calls were sent.
    pub(super) fn kept_until(&mut self, sent: Moment, timeout: Duration) -> Moment {
        let reported = sent.saturating_sub(timeout / 4);
        while let Some((ping, _)) = self.pings.front().filter(|(_, answered)| *answered <= reported) {
            self.since = self.since.max(*ping);
            self.pings.pop_front();
        }
        (sent + lease(timeout)).min(self.since + timeout)
    }
}

/// Returns the time for which a quorum call proves a session: two thirds of the timeout. The last report to the leader
/// may be a quarter of the timeout older than the call, and its ping another twelfth, since pings have that interval.
pub(crate) fn lease(timeout: Duration) -> Duration {
    timeout / 3 * 2
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(12);

    fn at(seconds: u64) -> Moment {
        Moment::ZERO + Duration::from_secs(seconds)
    }

    fn proof(session: i64, until: u64) -> SessionProof {
        SessionProof { session, until: at(until) }
    }

    #[test]
    fn the_longest_proof_counts() {
        let proofs = Proofs::default();
        assert_eq!(proofs.until(7), None, "nothing is proven yet");
        proofs.add(proof(7, 13));
        proofs.add(proof(7, 12));
        assert_eq!(proofs.until(7), Some(at(13)));
    }

    #[test]
    fn a_proof_of_one_session_does_not_count_for_another() {
        let proofs = Proofs::default();
        proofs.add(proof(7, 13));
        assert_eq!(proofs.until(8), None);
        proofs.add(proof(8, 11));
        assert_eq!((proofs.until(7), proofs.until(8)), (None, Some(at(11))));
    }

    #[test]
    fn shorten_limits_the_proofs_before_it_and_not_those_after_it() {
        let proofs = Proofs::default();
        proofs.add(proof(7, 13));
        proofs.shorten(at(6));
        assert_eq!(
            (proofs.shortenings(), proofs.shortened(at(13)), proofs.shortened(at(5))),
            (1, at(6), at(5))
        );
        assert_eq!(proofs.until(7), Some(at(6)));
        proofs.add(proof(7, 9));
        assert_eq!(proofs.until(7), Some(at(9)));
    }

    /// Returns a contact with a ping in every twelfth of the timeout, each answered immediately.
    fn pinged(from: u64, to: u64) -> LeaderContact {
        let mut contact = LeaderContact::new(at(from));
        for second in from..=to {
            contact.answered(at(second), at(second));
        }
        contact
    }

    #[test]
    fn with_regular_pings_a_call_proves_two_thirds_of_the_timeout() {
        for sent in [0, 1, 4, 20, 40] {
            assert_eq!(pinged(0, sent).kept_until(at(sent), TIMEOUT), at(sent + 8));
        }
    }

    #[test]
    fn after_a_pause_a_call_proves_only_what_was_reported_before_it() {
        // Nothing was sent from second 20 to second 29. The ping after it may not have been reported to the leader.
        let mut contact = pinged(0, 20);
        contact.answered(at(29), at(29));
        assert_eq!(contact.kept_until(at(29), TIMEOUT), at(32));
        assert_eq!(contact.kept_until(at(31), TIMEOUT), at(32));
        assert_eq!(contact.kept_until(at(32), TIMEOUT), at(40), "reported by now");
    }

    #[test]
    fn a_ping_counts_from_its_answer_on() {
        // Sent in time, but delivered after a network outage.
        let mut contact = pinged(0, 20);
        contact.answered(at(21), at(29));
        assert_eq!(contact.kept_until(at(29), TIMEOUT), at(32));
        assert_eq!(contact.kept_until(at(32), TIMEOUT), at(33));
    }
}
