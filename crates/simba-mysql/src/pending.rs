//! One call in progress: which write it sends, and what a row means for it. Sends nothing itself.

use std::time::Duration;

use simba_core::spi::{Answer, Holding, Ownership, Prior};
use simba_core::{ContenderId, MutexName};

use crate::calls::{Call, Request, SessionState};
use crate::error::{Fault, LOCKED, NAME, unavailable};
use crate::own_hold::OwnHold;
use crate::row::Row;
use crate::shared::Shared;
use crate::statements::{Kind, Target};

/// A call that is being carried out.
pub(crate) struct Pending<'a> {
    pub(crate) session: &'a SessionState,
    request: Request,
    /// The write to send next.
    planned: Option<Write>,
    /// A write that may not have been carried out, and the server's time that it returned.
    unresolved: Option<(Write, Option<u64>)>,
    /// There is no row, and it was not inserted yet.
    is_missing: bool,
    /// The row was inserted, by this call or by a peer before.
    is_inserted: bool,
    /// The table may spell the name differently, and the collation ignore the difference: only a statement that names
    /// no other row can read it.
    pub(crate) is_read_alone: bool,
    pub(crate) reply: Option<Result<Answer, Fault>>,
}

/// A conditional write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Write {
    kind: Kind,
    /// The version at which it has an effect.
    version: u64,
}

/// Returns the write by which a session with this `prior` takes or keeps a row, or `None` if it is another's. Forgets
/// the remembered hold unless the row is in the same tenure. Never claims a hold whose lease has ended.
fn decide(prior: Prior, own_hold: &mut OwnHold, contender: &ContenderId, row: &Row) -> Option<Kind> {
    if row.is_free() {
        return Some(Kind::Take);
    }
    let is_ours = prior != Prior::Nothing && row.is_held_by(contender);
    match prior {
        Prior::Lapsed(token) if is_ours && own_hold.token() == Some(token) => return Some(Kind::Retake),
        _ if is_ours && own_hold.accounts_for(row.version) => {}
        // Another's, in the last millisecond of its lease, or ours by a write without a reply: the version of the
        // next write becomes the token.
        _ => own_hold.forget(),
    }
    is_ours.then_some(Kind::Renew)
}

impl<'a> Pending<'a> {
    pub(crate) fn new(call: &'a Call, shared: &Shared) -> Self {
        let mut pending = Self {
            session: &call.session,
            request: call.request,
            planned: None,
            unresolved: None,
            is_missing: false,
            is_inserted: false,
            is_read_alone: false,
            reply: None,
        };
        pending.planned = pending.first_write(shared);
        pending
    }

    /// Returns the write that needs no read before it, if there is one: about the remembered hold, or a take at
    /// the version at which this handle saw the mutex free.
    fn first_write(&mut self, shared: &Shared) -> Option<Write> {
        let mut own_hold = self.session.own_hold();
        let (token, version) = (own_hold.token(), own_hold.version());
        // After an unanswered write the row is read first. A renewal that named several versions could be carried out
        // after its successor, and set the lease back to the time at which it was sent.
        let known = |kind| version.map(|version| Write { kind, version });
        match self.request {
            Request::Contend(Prior::Nothing) => {
                own_hold.forget();
                let version = shared.wakeups.take_free_version(self.mutex());
                version.map(|version| Write { kind: Kind::Take, version })
            }
            Request::Contend(Prior::Lapsed(lapsed)) if token == Some(lapsed) => known(Kind::Retake),
            Request::Contend(_) => known(Kind::Renew),
            Request::Release(Holding::Under(released)) if token == Some(released) => known(Kind::Free),
            Request::Release(Holding::Unknown) | Request::Inspect => None,
            Request::Release(_) => {
                self.reply = Some(Ok(Answer::Vacant));
                None
            }
        }
    }

    pub(crate) fn mutex(&self) -> &'a MutexName {
        &self.session.claim.mutex
    }

    /// Returns the kind of the write to send next.
    pub(crate) fn planned_write(&self) -> Option<Kind> {
        self.planned.as_ref().filter(|_| self.reply.is_none()).map(|write| write.kind)
    }

    /// Returns the row that the planned write is about.
    pub(crate) fn target(&self) -> Option<Target<'a>> {
        let claim = &self.session.claim;
        self.planned.as_ref().map(|write| Target {
            mutex: claim.mutex.as_str(),
            owner: claim.contender.as_str(),
            version: write.version,
        })
    }

    /// Records that the planned write is being sent.
    pub(crate) fn sent(&self) {
        let mut own_hold = self.session.own_hold();
        match self.planned_write() {
            Some(Kind::Renew | Kind::Free) => own_hold.sent(),
            // The new tenure has no token until its reply arrives.
            Some(Kind::Take | Kind::Retake) => own_hold.forget(),
            _ => {}
        }
    }

    /// Records that the planned write failed. Without a fault it is sent again.
    pub(crate) fn write_failed(&mut self, fault: Option<&Fault>) {
        if !fault.is_some_and(Fault::outcome_unknown) {
            self.not_applied(self.planned_write());
        }
        if let Some(fault) = fault {
            self.fail(fault);
        }
    }

    fn not_applied(&self, kind: Option<Kind>) {
        if let Some(Kind::Renew | Kind::Free) = kind {
            self.session.own_hold().not_applied();
        }
    }

    pub(crate) fn fail(&mut self, fault: &Fault) {
        self.reply = Some(Err(fault.clone()));
    }

    /// Records that the statement of the planned write changed fewer rows than it names.
    pub(crate) fn unresolved(&mut self, number: Option<u64>) {
        self.unresolved = self.planned.take().map(|write| (write, number));
    }

    /// Records that the planned write was carried out.
    pub(crate) fn applied(&mut self, shared: &Shared) {
        let Some(write) = self.planned.take() else { return };
        let claim = &self.session.claim;
        let mut own_hold = self.session.own_hold();
        let version = write.version.saturating_add(1);
        match write.kind {
            Kind::Renew if own_hold.token().is_some() => own_hold.applied(version),
            Kind::Renew | Kind::Take | Kind::Retake => own_hold.begin(version),
            Kind::Free | Kind::Fence => own_hold.forget(),
        }
        let token = own_hold.token();
        drop(own_hold);
        match write.kind {
            Kind::Take | Kind::Retake => {
                shared.note_version(&claim.mutex, version);
                shared.wakeups.acquired(&claim.mutex, claim.contender.as_str());
            }
            Kind::Free => shared.wakeups.released(&claim.mutex, version, shared.clock.now()),
            Kind::Renew | Kind::Fence => {}
        }
        self.reply = Some(Ok(match write.kind {
            Kind::Free | Kind::Fence => Answer::Vacant,
            _ => {
                // Another can take the row only from the millisecond after the lease on, so the whole lease is
                // ours although the server truncates times to milliseconds.
                let lease = Duration::from_millis(self.session.terms().total);
                Answer::Ours(Ownership::new(claim.contender.clone(), token, lease))
            }
        }));
    }

    /// Resolves the last write by the row that was read after it, and plans the next one or replies. A write
    /// that would be repeated as it was found a locked row.
    pub(crate) fn decide(&mut self, row: Option<&Row>, shared: &Shared) {
        let last = self.unresolved.take();
        if let Some((write, number)) = &last {
            if row.is_some_and(|row| self.is_applied(write, *number, row)) {
                self.planned = Some(*write);
                return self.applied(shared);
            }
            self.not_applied(Some(write.kind));
        }
        let next = match self.request {
            Request::Inspect => self.reply_with_owner(row),
            Request::Release(holding) => self.decide_release(holding, row, shared),
            Request::Contend(prior) => self.decide_contend(prior, row),
        };
        if next.is_some() && next == last.map(|(write, _)| write) {
            self.fail(&Fault::Locked(unavailable(LOCKED)));
        }
        self.planned = next;
    }

    /// Returns whether the row is as this write leaves it. The server's time tells it from an earlier write.
    fn is_applied(&self, write: &Write, number: Option<u64>, row: &Row) -> bool {
        let is_ours = row.owner == self.session.claim.contender.as_str();
        row.version.checked_sub(1) == Some(write.version)
            && match write.kind {
                Kind::Renew => {
                    is_ours && number.map(|now| now + self.session.terms().ttl) == Some(row.ttl_at)
                }
                Kind::Take | Kind::Retake => is_ours && Some(row.acquired_at) == number,
                Kind::Free => row.owner.is_empty(),
                Kind::Fence => !is_ours,
            }
    }

    fn decide_contend(&mut self, prior: Prior, row: Option<&Row>) -> Option<Write> {
        let Some(row) = row else {
            self.is_missing = !self.is_inserted;
            return None;
        };
        let kind = decide(prior, &mut self.session.own_hold(), &self.session.claim.contender, row);
        match kind {
            Some(kind) => Some(Write { kind, version: row.version }),
            None => self.reply_with_owner(Some(row)),
        }
    }

    /// Processes that a read of several rows did not return the row: it is missing or spelled differently. A row that
    /// may have been written is read alone next. One that was never used is inserted before, together with others.
    pub(crate) fn not_returned(&mut self, shared: &Shared) {
        let is_first = self.unresolved.is_none() && !self.is_inserted;
        if is_first && matches!(self.request, Request::Contend(Prior::Nothing)) {
            self.decide(None, shared);
        } else {
            self.is_read_alone = true;
        }
    }

    /// Returns whether the row has to be inserted.
    pub(crate) fn is_missing(&self) -> bool {
        self.is_missing && self.reply.is_none()
    }

    /// Records that the row was inserted, by this statement or by a peer before.
    pub(crate) fn inserted(&mut self) {
        (self.is_missing, self.is_inserted) = (false, true);
        self.planned = Some(Write { kind: Kind::Take, version: 0 });
    }

    /// Frees the row if it is ours: any row with our id if the holding is unknown, else the tenure that our own
    /// writes account for.
    fn decide_release(&mut self, holding: Holding, row: Option<&Row>, shared: &Shared) -> Option<Write> {
        let mut own_hold = self.session.own_hold();
        let is_unknown = holding == Holding::Unknown;
        let is_ours = |row: &Row| {
            let is_meant = is_unknown || own_hold.accounts_for(row.version);
            is_meant && row.owner == self.session.claim.contender.as_str()
        };
        match row {
            Some(row) if is_ours(row) => return Some(Write { kind: Kind::Free, version: row.version }),
            // A take of ours may still be in flight: change the version so that it has no effect.
            Some(row) if is_unknown && row.is_free() => {
                return Some(Write { kind: Kind::Fence, version: row.version });
            }
            // An earlier release of ours, which was unanswered, may have freed it.
            Some(row) if row.is_free() => {
                shared.wakeups.released(self.mutex(), row.version, shared.clock.now());
            }
            _ => {}
        }
        own_hold.forget();
        self.reply = Some(Ok(Answer::Vacant));
        None
    }

    fn reply_with_owner(&mut self, row: Option<&Row>) -> Option<Write> {
        let owner = row.map_or(Ok(None), Row::ownership);
        let answer = owner.map(|owner| owner.map_or(Answer::Vacant, Answer::Held));
        self.reply = Some(answer.map_err(|error| Fault::Refused(error.with_backend(NAME))));
        None
    }

    /// Returns the reply. Without one, every write lost a race.
    pub(crate) fn into_reply(self) -> Result<Answer, Fault> {
        self.reply.unwrap_or_else(|| match self.request {
            Request::Contend(_) => Ok(Answer::Vacant),
            _ => Err(Fault::Refused(unavailable("the row changes faster than it can be freed"))),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Weak};

    use simba_core::spi::Claim;
    use simba_core::{FencingToken, Lease, Moment, SystemClock};

    use super::*;
    use crate::config::MySqlConfig;

    fn row(owner: &str, transition_at: u64, version: u64) -> Row {
        Row::from(("m".into(), 0, 0, transition_at, owner.into(), version, 1_000))
    }

    fn id() -> ContenderId {
        ContenderId::new("me").unwrap()
    }

    fn held(version: u64) -> OwnHold {
        let mut own_hold = OwnHold::default();
        own_hold.begin(version);
        own_hold
    }

    const LAPSED: Prior = Prior::Lapsed(FencingToken::new(7));
    const PRIORS: [Prior; 4] = [Prior::Nothing, Prior::Unknown, Prior::Held, LAPSED];

    /// Returns the decision about a row with our id that is held, and the token that it leaves.
    fn decide_held(prior: Prior, own_hold: &OwnHold, version: u64) -> (Option<Kind>, Option<u64>) {
        let mut own_hold = own_hold.clone();
        let kind = decide(prior, &mut own_hold, &id(), &row("me", 2_000, version));
        (kind, own_hold.token().map(FencingToken::get))
    }

    #[test]
    fn a_free_row_is_taken_and_a_foreign_one_refused_whatever_the_prior() {
        for prior in PRIORS {
            let decide = |row: Row| decide(prior, &mut held(7), &id(), &row);
            assert_eq!(decide(row("", 0, 9)), Some(Kind::Take));
            assert_eq!(decide(row("other", 2_000, 9)), None);
            assert_eq!(decide(row("me", 1_000, 9)), None, "the last millisecond of the lease");
        }
    }

    #[test]
    fn an_own_lease_that_has_ended_is_no_hold() {
        assert_eq!(decide(Prior::Held, &mut held(7), &id(), &row("me", 999, 7)), Some(Kind::Take));
    }

    #[test]
    fn a_row_of_another_session_with_our_id_is_refused() {
        assert_eq!(decide_held(Prior::Nothing, &OwnHold::default(), 7), (None, None));
    }

    #[test]
    fn an_unanswered_own_renewal_keeps_the_tenure_and_other_writes_begin_a_new_one() {
        let mut own_hold = held(7);
        own_hold.sent();
        for prior in [Prior::Held, Prior::Unknown] {
            assert_eq!(decide_held(prior, &own_hold, 8), (Some(Kind::Renew), Some(7)));
            assert_eq!(decide_held(prior, &own_hold, 9), (Some(Kind::Renew), None));
        }
        assert_eq!(decide_held(Prior::Unknown, &OwnHold::default(), 8), (Some(Kind::Renew), None));
    }

    #[test]
    fn a_renewal_names_one_version_and_follows_a_read_after_an_unanswered_one() {
        let shared = shared();
        let call = call(Request::Contend(Prior::Held));
        call.session.own_hold().begin(7);
        assert_eq!(Pending::new(&call, &shared).planned_write(), Some(Kind::Renew));
        call.session.own_hold().sent();
        let mut pending = Pending::new(&call, &shared);
        assert_eq!(pending.planned_write(), None, "the unanswered one may be carried out at any time");
        pending.decide(Some(&row("me", 2_000, 8)), &shared);
        assert_eq!(version(&pending), 8);
    }

    #[test]
    fn only_the_token_that_lapsed_is_replaced() {
        assert_eq!(decide_held(LAPSED, &held(7), 7).0, Some(Kind::Retake));
        assert_eq!(decide_held(LAPSED, &held(8), 8), (Some(Kind::Renew), Some(8)));
    }

    /// A row of this version that is held by `owner` until 20 s, with a ttl that ends at `ttl_at`.
    fn held_row(owner: &str, ttl_at: u64, version: u64) -> Row {
        Row::from(("m".into(), 0, ttl_at, 20_000, owner.into(), version, 1_000))
    }

    fn call(request: Request) -> Call {
        let mutex = MutexName::new("m").unwrap();
        let claim = Claim::new(mutex, id(), Lease::default());
        Call { session: Arc::new(SessionState::new(claim, &shared())), request, caller: Weak::new() }
    }

    fn renewal(version: u64) -> Call {
        let call = call(Request::Contend(Prior::Held));
        call.session.own_hold().begin(version);
        call
    }

    fn shared() -> Shared {
        Shared::new(MySqlConfig::new("h", "db"), Arc::new(SystemClock))
    }

    fn version(pending: &Pending<'_>) -> u64 {
        pending.target().unwrap().version
    }

    #[test]
    fn renewal_is_resolved_by_the_time_of_its_row_and_a_repeated_write_found_a_locked_row() {
        let shared = shared();
        for (version, ttl_at, is_renewed) in [(8, 11_000, true), (7, 10_999, false)] {
            let call = renewal(7);
            let mut pending = Pending::new(&call, &shared);
            pending.sent();
            // The statement wrote other rows at 1 s, by the server's clock.
            pending.unresolved(Some(1_000));
            pending.decide(Some(&held_row("me", ttl_at, version)), &shared);
            match pending.into_reply() {
                Ok(Answer::Ours(ours)) => {
                    assert!(is_renewed && ours.token == Some(FencingToken::new(7)));
                }
                Err(Fault::Locked(_)) => assert!(!is_renewed),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn take_that_lost_a_race_names_the_holder() {
        let (call, shared) = (call(Request::Contend(Prior::Nothing)), shared());
        shared.wakeups.released(&call.session.claim.mutex, 3, Moment::ZERO);
        let mut pending = Pending::new(&call, &shared);
        assert_eq!((pending.planned_write(), version(&pending)), (Some(Kind::Take), 3));
        pending.sent();
        pending.unresolved(None);
        pending.decide(Some(&held_row("other", 11_000, 4)), &shared);
        let reply = pending.into_reply();
        assert!(matches!(&reply, Ok(Answer::Held(held)) if held.owner.as_str() == "other"), "{reply:?}");
    }

    #[test]
    fn unanswered_release_that_freed_the_row_counts_as_a_release() {
        let (call, shared) = (call(Request::Release(Holding::Under(FencingToken::new(7)))), shared());
        call.session.own_hold().begin(7);
        call.session.own_hold().sent();
        let mut pending = Pending::new(&call, &shared);
        assert_eq!(pending.planned_write(), None, "the row is read first");
        pending.decide(Some(&row("", 0, 8)), &shared);
        assert!(matches!(pending.into_reply(), Ok(Answer::Vacant)));
        assert_eq!(shared.wakeups.take_free_version(&call.session.claim.mutex), Some(8));
    }

    #[test]
    fn missing_row_is_inserted_and_then_read_alone() {
        let (call, shared) = (call(Request::Contend(Prior::Nothing)), shared());
        let mut pending = Pending::new(&call, &shared);
        assert_eq!(pending.planned_write(), None);
        pending.not_returned(&shared);
        assert!(pending.is_missing() && !pending.is_read_alone);
        pending.inserted();
        assert_eq!(version(&pending), 0);
        pending.unresolved(None);
        pending.not_returned(&shared);
        assert!(!pending.is_missing() && pending.is_read_alone);
    }

    #[test]
    fn row_that_may_have_been_written_is_read_alone_before_a_decision() {
        let shared = shared();
        let requests = [
            Request::Contend(Prior::Unknown),
            Request::Contend(Prior::Held),
            Request::Inspect,
            Request::Release(Holding::Unknown),
        ];
        for request in requests {
            let call = call(request);
            let mut pending = Pending::new(&call, &shared);
            pending.not_returned(&shared);
            assert!(pending.is_read_alone && !pending.is_missing() && pending.reply.is_none(), "{request:?}");
        }
        // The statement of a take that was carried out wrote other rows too.
        let call = call(Request::Contend(Prior::Nothing));
        shared.wakeups.released(&call.session.claim.mutex, 3, Moment::ZERO);
        let mut pending = Pending::new(&call, &shared);
        pending.sent();
        pending.unresolved(Some(1_000));
        pending.not_returned(&shared);
        assert!(pending.is_read_alone && pending.reply.is_none());
        pending.decide(Some(&Row::from(("M".into(), 1_000, 2_000, 20_000, "me".into(), 4, 1_000))), &shared);
        assert!(matches!(pending.into_reply(), Ok(Answer::Ours(_))));
    }
}
