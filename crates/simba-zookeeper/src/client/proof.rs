//! Until when the servers surely keep a session.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::Moment;

/// What a quorum call that was answered shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Proof {
    /// The session that made the call.
    pub(crate) session: i64,
    /// The servers keep the session until then, even if they hear nothing more of it.
    pub(crate) until: Moment,
}

/// The latest proof of a session, shared by its holders and waiters.
#[derive(Debug)]
pub(super) struct Proofs {
    state: Mutex<State>,
    /// How often a reconnect granted a shorter timeout.
    cuts: AtomicU32,
}

#[derive(Debug)]
struct State {
    last: Option<Proof>,
    /// The end of all proofs that are older than the last cut.
    cut: Moment,
}

impl Default for Proofs {
    fn default() -> Self {
        Self { state: Mutex::new(State { last: None, cut: Moment::ZERO }), cuts: AtomicU32::new(0) }
    }
}

impl Proofs {
    /// Records a proof, unless the session has one that lasts longer.
    pub(super) fn add(&self, proof: Proof) {
        let last = &mut self.state().last;
        if last.is_none_or(|last| last.session != proof.session || last.until < proof.until) {
            *last = Some(proof);
        }
    }

    /// Returns how much is left at this moment of what the session's last proof shows.
    pub(super) fn left(&self, session: i64, at: Moment) -> Duration {
        match self.state().last {
            Some(proof) if proof.session == session => proof.until.saturating_since(at),
            _ => Duration::ZERO,
        }
    }

    /// Ends all proofs made so far at this moment at the latest.
    pub(super) fn cut(&self, until: Moment) {
        let mut state = self.state();
        state.cut = until;
        if let Some(last) = &mut state.last {
            last.until = last.until.min(until);
        }
        self.cuts.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns how many cuts there were.
    pub(super) fn cuts(&self) -> u32 {
        self.cuts.load(Ordering::SeqCst)
    }

    /// Returns when proofs from before the last cut end.
    pub(super) fn cut_at(&self) -> Moment {
        self.state().cut
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// From when the leader of the ensemble counts the timeout of our session, at the earliest.
///
/// A quorum call shows that the leader has not ended the session, but does not restart its timeout there. A follower
/// reports which sessions it has heard of when the leader pings it, every half tick. A session lasts two ticks or
/// more, so whatever a follower has received is reported a quarter of the timeout later at the latest.
#[derive(Debug)]
pub(super) struct LeaderContact {
    /// The leader has heard of the session from a message that was sent then, or later.
    since: Moment,
    /// Pings with their answers, each as (sent, answered), that may not be reported yet.
    pings: VecDeque<(Moment, Moment)>,
}

impl LeaderContact {
    /// No call waits for its answer long enough to need an older ping.
    const MOST_PINGS: usize = 16;

    /// Starts with the handshake, which a follower passes on to the leader before it is answered.
    pub(super) const fn new(handshake: Moment) -> Self {
        Self { since: handshake, pings: VecDeque::new() }
    }

    /// Records that a server has answered a ping.
    pub(super) fn answered(&mut self, sent: Moment, now: Moment) {
        if self.pings.len() == Self::MOST_PINGS {
            self.pings.pop_front();
        }
        self.pings.push_back((sent, now));
    }

    /// Returns until when the servers keep the session, by a quorum call that was sent then and is answered. Calls
    /// are given in the order in which they were sent.
    pub(super) fn kept_until(&mut self, sent: Moment, timeout: Duration) -> Moment {
        let reported = sent.saturating_sub(timeout / 4);
        while let Some((ping, _)) = self.pings.front().filter(|(_, answered)| *answered <= reported) {
            self.since = self.since.max(*ping);
            self.pings.pop_front();
        }
        (sent + lease(timeout)).min(self.since + timeout)
    }
}

/// Returns how long a holder may count on a session from a quorum call on: two thirds of the timeout. The leader may
/// have heard of the session a quarter of the timeout before the call, from a ping, and one is sent in every twelfth.
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

    fn proof(session: i64, until: u64) -> Proof {
        Proof { session, until: at(until) }
    }

    #[test]
    fn the_proof_that_lasts_longest_counts() {
        let proofs = Proofs::default();
        assert_eq!(proofs.left(7, at(1)), Duration::ZERO, "nothing is proven yet");
        proofs.add(proof(7, 13));
        proofs.add(proof(7, 12));
        assert_eq!(proofs.left(7, at(5)), Duration::from_secs(8));
        assert_eq!(proofs.left(7, at(60)), Duration::ZERO);
    }

    #[test]
    fn what_is_proven_of_one_session_says_nothing_of_another() {
        let proofs = Proofs::default();
        proofs.add(proof(7, 13));
        assert_eq!(proofs.left(8, at(4)), Duration::ZERO);
        proofs.add(proof(8, 11));
        assert_eq!(proofs.left(7, at(4)), Duration::ZERO);
        assert_eq!(proofs.left(8, at(4)), Duration::from_secs(7));
    }

    #[test]
    fn a_cut_ends_the_proofs_before_it_and_not_those_after_it() {
        let proofs = Proofs::default();
        proofs.add(proof(7, 13));
        proofs.cut(at(6));
        assert_eq!((proofs.cuts(), proofs.cut_at()), (1, at(6)));
        assert_eq!(proofs.left(7, at(5)), Duration::from_secs(1));
        proofs.add(proof(7, 9));
        assert_eq!(proofs.left(7, at(5)), Duration::from_secs(4));
    }

    /// Pings once in every twelfth of the timeout, answered at once, from the handshake to the end.
    fn pinged(from: u64, to: u64) -> LeaderContact {
        let mut contact = LeaderContact::new(at(from));
        for second in from..=to {
            contact.answered(at(second), at(second));
        }
        contact
    }

    #[test]
    fn with_pings_in_time_a_call_shows_two_thirds_of_the_timeout() {
        for sent in [0, 1, 4, 20, 40] {
            assert_eq!(pinged(0, sent).kept_until(at(sent), TIMEOUT), at(sent + 8));
        }
    }

    #[test]
    fn after_a_pause_a_call_shows_what_the_leader_heard_before_it() {
        // Nothing was sent from second 20 to second 29. What was sent then may not have been reported to the leader.
        let mut contact = pinged(0, 20);
        contact.answered(at(29), at(29));
        assert_eq!(contact.kept_until(at(29), TIMEOUT), at(32));
        assert_eq!(contact.kept_until(at(31), TIMEOUT), at(32));
        assert_eq!(contact.kept_until(at(32), TIMEOUT), at(40), "reported by now");
    }

    #[test]
    fn a_ping_counts_from_its_answer_on() {
        // Sent in time, and delivered when the network was back.
        let mut contact = pinged(0, 20);
        contact.answered(at(21), at(29));
        assert_eq!(contact.kept_until(at(29), TIMEOUT), at(32));
        assert_eq!(contact.kept_until(at(32), TIMEOUT), at(33));
    }
}
