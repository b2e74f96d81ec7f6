//! What an answer means: the protocol as a pure state machine, without I/O, clock or runtime.

use std::time::Duration;

use super::pacing::{Grant, Pacing};
use crate::backend::{Answer, Holding, Ownership, Prior};
use crate::clock::Moment;
use crate::seeded::{self, Bug};
use crate::tenure::Loss;
use crate::types::{ContenderId, FencingToken, Lease};

/// One contender's knowledge of one mutex.
#[derive(Debug)]
pub(crate) struct Machine {
    me: ContenderId,
    pacing: Pacing,
    prior: Prior,
    /// A call since the last answer may have changed what the store has of us.
    unanswered: bool,
    /// A call without an answer may still be under way, and may win at any time from now on.
    doubt: bool,
    held: Option<Grant>,
    /// The token of the last tenure. The next one begins under a greater token only.
    last: Option<FencingToken>,
    max_hold: Option<Duration>,
    /// The end of the longest allowed hold.
    cap: Option<Moment>,
    /// When the next call is due.
    due: Moment,
    /// When the last call was sent.
    sent: Moment,
    /// No hint brings the next call forward beyond this.
    not_before: Moment,
    failures: u32,
    looks: u32,
    fruitless: u32,
}

/// What the driver has to do about an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing changed for us.
    Keep,
    /// A tenure begins.
    Acquired(Grant),
    /// The tenure goes on until a later deadline.
    Renewed(Grant),
    /// The tenure is over.
    Lost(Loss),
    /// The tenure is over, and a new one begins with the same answer.
    Replaced(Loss, Grant),
    /// Ours, but with too little of the lease left to work under it.
    TooLate,
    /// Ours, but under a token that does not fence off the last tenure. No tenure begins; one that was is over.
    OldToken(FencingToken),
}

impl Machine {
    pub(crate) fn new(me: ContenderId, lease: Lease, max_hold: Option<Duration>, now: Moment) -> Self {
        Self {
            me,
            pacing: Pacing::new(lease),
            prior: Prior::Nothing,
            unanswered: false,
            doubt: false,
            held: None,
            last: None,
            max_hold,
            cap: None,
            due: now,
            sent: now,
            not_before: now,
            failures: 0,
            looks: 0,
            fruitless: 0,
        }
    }

    pub(crate) const fn me(&self) -> &ContenderId {
        &self.me
    }

    /// Returns the same contender under a new id, with nothing at the store and no call before `due`. The tokens of
    /// its tenures go on growing.
    pub(crate) fn renamed(&self, me: ContenderId, due: Moment) -> Self {
        Self { last: self.last, failures: self.failures, ..Self::new(me, *self.lease(), self.max_hold, due) }
    }

    /// A call goes out: what the session may have, and how long the call may take.
    pub(crate) fn send(&mut self, now: Moment) -> (Prior, Duration) {
        let prior = self.prior;
        if prior == Prior::Nothing {
            // From here to the answer, the call may have won.
            self.prior = Prior::Unknown;
        }
        self.sent = now;
        self.unanswered = true;
        let left = self.held.map(|held| held.deadline - now).filter(|_| !seeded::on(Bug::Resurrect));
        (prior, self.pacing.call_limit(left))
    }

    /// The answer to a call that was sent at `sent` with `prior`.
    pub(crate) fn observed(
        &mut self,
        sent: Moment,
        prior: Prior,
        now: Moment,
        answer: &Answer,
        roll: f64,
    ) -> Step {
        self.unanswered = false;
        match answer {
            Answer::Ours(ours) => self.ours(sent, prior, now, ours, roll),
            Answer::Held(other) => self.refused(now + self.pacing.wait(other.remaining, roll), other),
            Answer::Vacant => {
                let due = now + self.pacing.wait_vacant(self.looks, roll);
                self.looks = self.looks.saturating_add(1);
                self.not_ours(due).map_or(Step::Keep, |_| Step::Lost(Loss::Vanished))
            }
        }
    }

    fn ours(&mut self, sent: Moment, prior: Prior, now: Moment, ours: &Ownership, roll: f64) -> Step {
        let token = ours.token.unwrap_or(FencingToken::new(0));
        let sent = if seeded::on(Bug::DeadlineFromReply) { now } else { sent };
        let grant = self.pacing.grant(token, sent, ours.remaining, roll);
        let late = now >= grant.deadline.saturating_sub(grant.grace);
        match self.held {
            Some(held) if held.token == token => {
                self.hold(grant);
                Step::Renewed(grant)
            }
            // The lease ended here before the answer to its renewal came. What was lost stays lost: ask again,
            // with a prior that says so.
            None if prior == Prior::Held => {
                if self.prior != Prior::Lapsed(token) {
                    self.prior = Prior::Unknown;
                }
                self.due = now;
                Step::Keep
            }
            _ if self.last.is_some_and(|last| token <= last) => {
                self.held = None;
                self.prior = Prior::Lapsed(token);
                Step::OldToken(token)
            }
            // The store has more of ours than before the call: a release must free that as well.
            None if late => {
                self.prior = Prior::Unknown;
                Step::TooLate
            }
            before => {
                self.fruitless = 0;
                self.cap = self.max_hold.map(|max_hold| sent + max_hold);
                self.last = Some(token);
                self.hold(grant);
                before.map_or(Step::Acquired(grant), |_| Step::Replaced(Loss::Vanished, grant))
            }
        }
    }

    fn refused(&mut self, due: Moment, other: &Ownership) -> Step {
        self.looks = 0;
        match self.not_ours(due) {
            // What a store session of ours that is gone left behind.
            Some(_) if other.owner == self.me => Step::Lost(Loss::Vanished),
            Some(_) => Step::Lost(Loss::TakenBy(other.owner.clone())),
            None => Step::Keep,
        }
    }

    fn hold(&mut self, grant: Grant) {
        self.prior = Prior::Held;
        let deadline = self.cap.map_or(grant.deadline, |cap| grant.deadline.min(cap));
        self.held = Some(Grant { deadline, ..grant });
        self.due = grant.renew_at;
        self.looks = 0;
        self.failures = 0;
    }

    fn not_ours(&mut self, due: Moment) -> Option<Grant> {
        self.prior = if self.doubt { Prior::Unknown } else { Prior::Nothing };
        self.due = due;
        self.failures = 0;
        self.held.take()
    }

    /// A call failed or was not answered in time: neither a loss nor a renewal.
    pub(crate) fn failed(&mut self, now: Moment, transient: bool, roll: f64) {
        self.failures = self.failures.saturating_add(1);
        self.doubt |= self.unanswered;
        if let (true, Some(held)) = (seeded::on(Bug::FailureRenews), &mut self.held) {
            held.deadline = now + self.pacing.lease().total();
        }
        self.due = now
            + match self.held {
                Some(held) => self.pacing.retry_holding(self.failures, held.deadline - now, roll),
                None => self.pacing.retry_waiting(self.failures, transient, roll),
            };
        if !transient && self.held.is_none() {
            self.not_before = self.due;
        }
    }

    /// Makes the next call due at `at` at the latest.
    pub(crate) fn due_by(&mut self, at: Moment) {
        self.due = self.due.min(at);
    }

    /// Whether the deadline has passed. From then on the store may have what we have no more.
    pub(crate) fn expired(&mut self, now: Moment) -> bool {
        let expired = self.held.is_some_and(|held| now >= held.deadline) && !seeded::on(Bug::NoDeadline);
        if expired {
            self.forget(now);
        }
        expired
    }

    /// Gives the tenure up for lost here, whatever the store has of it.
    pub(crate) fn forget(&mut self, now: Moment) {
        if let Some(held) = self.held.take() {
            self.prior = Prior::Lapsed(held.token);
        }
        self.not_before = now;
        self.due = now;
    }

    /// A hint came: look early, but not more often than hints deserve.
    pub(crate) fn hinted(&mut self, now: Moment) {
        if now - self.sent >= self.pacing.hint_gap(u32::MAX) {
            self.fruitless = 0;
        }
        let at = (self.sent + self.pacing.hint_gap(self.fruitless)).max(now).max(self.not_before);
        if at < self.due {
            self.due = at;
            self.fruitless = self.fruitless.saturating_add(1);
        }
    }

    /// When to act next: the due call, or the deadline.
    pub(crate) fn due(&self) -> Moment {
        self.held.map_or(self.due, |held| self.due.min(held.deadline))
    }

    pub(crate) fn is_holding(&self) -> bool {
        self.held.is_some()
    }

    /// Returns what there is to release.
    pub(crate) fn holding(&self) -> Holding {
        match (self.held, self.prior) {
            // A renewal without an answer may have taken a mutex anew that the store had forgotten.
            _ if self.unanswered => Holding::Unknown,
            (Some(held), _) => Holding::Under(held.token),
            (None, Prior::Lapsed(token)) => Holding::Under(token),
            (None, Prior::Nothing) => Holding::Nothing,
            _ => Holding::Unknown,
        }
    }

    /// Whether the store surely has nothing of ours.
    pub(crate) fn has_nothing(&self) -> bool {
        self.prior == Prior::Nothing
    }

    /// Returns the token of the last tenure, or zero if there was none.
    pub(crate) fn last_token(&self) -> FencingToken {
        self.last.unwrap_or(FencingToken::new(0))
    }

    pub(crate) const fn max_hold(&self) -> Option<Duration> {
        self.max_hold
    }

    pub(crate) const fn pacing(&self) -> &Pacing {
        &self.pacing
    }

    pub(crate) const fn lease(&self) -> &Lease {
        self.pacing.lease()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(ms: u64) -> Moment {
        Moment::ZERO + Duration::from_millis(ms)
    }

    fn id(name: &str) -> ContenderId {
        ContenderId::new(name).unwrap()
    }

    /// ttl 600 ms, transition 400 ms: expiring at 790 ms, deadline at 990 ms.
    fn machine() -> Machine {
        let lease = Lease::new(Duration::from_millis(600), Duration::from_millis(400)).unwrap();
        Machine::new(id("me"), lease, None, at(0))
    }

    fn ownership(owner: &str, token: u64) -> Ownership {
        Ownership::new(id(owner), Some(FencingToken::new(token)), Duration::from_secs(1))
    }

    fn ours(token: u64) -> Answer {
        Answer::Ours(ownership("me", token))
    }

    fn ask(machine: &mut Machine, sent: u64, now: u64, answer: &Answer) -> Step {
        let (prior, _) = machine.send(at(sent));
        machine.observed(at(sent), prior, at(now), answer, 0.0)
    }

    fn held(token: u64) -> Machine {
        let mut machine = machine();
        assert!(matches!(ask(&mut machine, 0, 10, &ours(token)), Step::Acquired(_)));
        machine
    }

    #[test]
    fn the_deadline_counts_from_before_the_request() {
        let mut machine = machine();
        let Step::Acquired(grant) = ask(&mut machine, 100, 400, &ours(1)) else { panic!() };
        assert_eq!(grant.deadline, at(1_090));
        assert_eq!(machine.due(), at(500), "renewal at two thirds of the ttl");
    }

    #[test]
    fn a_renewal_keeps_the_token_and_moves_the_deadline() {
        let mut machine = held(1);
        let Step::Renewed(grant) = ask(&mut machine, 400, 410, &ours(1)) else { panic!() };
        assert_eq!((grant.token.get(), grant.deadline), (1, at(1_390)));
    }

    #[test]
    fn a_failure_is_neither_a_loss_nor_a_renewal() {
        let mut machine = held(1);
        machine.send(at(400));
        machine.failed(at(600), true, 0.0);
        assert!(machine.is_holding());
        assert!(!machine.expired(at(989)) && machine.expired(at(990)));
    }

    #[test]
    fn what_expired_comes_back_as_lapsed_only() {
        let mut machine = held(7);
        let (prior, _) = machine.send(at(400));
        assert_eq!(prior, Prior::Held);
        assert!(machine.expired(at(1_000)));
        // The answer to the renewal comes after all.
        assert_eq!(machine.observed(at(400), prior, at(1_001), &ours(7), 0.0), Step::Keep);
        assert_eq!(machine.send(at(1_001)).0, Prior::Lapsed(FencingToken::new(7)));
        assert!(matches!(
            machine.observed(at(1_001), Prior::Unknown, at(1_002), &ours(8), 0.0),
            Step::Acquired(_)
        ));
    }

    #[test]
    fn another_s_answer_is_a_loss_that_names_it() {
        let step = ask(&mut held(1), 400, 410, &Answer::Held(ownership("other", 2)));
        assert_eq!(step, Step::Lost(Loss::TakenBy(id("other"))));
        assert_eq!(ask(&mut held(1), 400, 410, &Answer::Vacant), Step::Lost(Loss::Vanished));
    }

    #[test]
    fn a_new_token_in_a_renewal_is_a_new_tenure() {
        assert!(matches!(ask(&mut held(1), 400, 410, &ours(2)), Step::Replaced(Loss::Vanished, _)));
    }

    #[test]
    fn a_call_without_an_answer_may_still_win_later() {
        let mut machine = machine();
        machine.send(at(0));
        machine.failed(at(200), true, 0.0);
        assert_eq!(ask(&mut machine, 300, 301, &Answer::Held(ownership("other", 1))), Step::Keep);
        assert_eq!(machine.send(at(400)).0, Prior::Unknown, "the first call may still arrive and win");
    }

    #[test]
    fn our_id_under_a_session_that_is_gone_is_a_loss_and_nobody_else() {
        let gone = Answer::Held(ownership("me", 1));
        assert_eq!(ask(&mut machine(), 0, 1, &gone), Step::Keep);
        assert_eq!(ask(&mut held(1), 400, 410, &gone), Step::Lost(Loss::Vanished));
    }

    #[test]
    fn no_tenure_begins_under_the_token_of_the_last_one() {
        let mut machine = held(7);
        assert!(machine.expired(at(1_000)));
        assert_eq!(ask(&mut machine, 1_001, 1_002, &ours(7)), Step::OldToken(FencingToken::new(7)));
        assert!(!machine.is_holding());
        assert_eq!(machine.holding(), Holding::Under(FencingToken::new(7)), "it is given back");
        // Under a new id too.
        let mut machine = machine.renamed(id("new"), at(1_100));
        assert_eq!(machine.holding(), Holding::Nothing);
        assert_eq!(ask(&mut machine, 1_100, 1_101, &ours(6)), Step::OldToken(FencingToken::new(6)));
        let mut machine = machine.renamed(id("newer"), at(1_200));
        assert!(matches!(ask(&mut machine, 1_200, 1_201, &ours(8)), Step::Acquired(_)));
    }

    #[test]
    fn a_renewal_under_a_smaller_token_ends_the_tenure() {
        let mut machine = held(7);
        assert_eq!(ask(&mut machine, 400, 410, &ours(6)), Step::OldToken(FencingToken::new(6)));
        assert!(!machine.is_holding());
    }

    #[test]
    fn an_answer_with_too_little_left_is_no_tenure() {
        assert_eq!(ask(&mut machine(), 0, 790, &ours(1)), Step::TooLate);
    }

    #[test]
    fn what_was_won_too_late_is_released() {
        let mut machine = held(7);
        assert!(machine.expired(at(1_000)));
        assert_eq!(ask(&mut machine, 1_000, 1_790, &ours(8)), Step::TooLate);
        assert_eq!(machine.holding(), Holding::Unknown, "and not under 7, which the store has no more");
        assert!(matches!(ask(&mut machine, 1_800, 1_801, &ours(8)), Step::Acquired(_)), "8 was never used");
    }

    #[test]
    fn what_a_renewal_took_anew_after_the_loss_is_released() {
        let mut machine = held(7);
        let (prior, _) = machine.send(at(400));
        assert!(machine.expired(at(1_000)));
        assert_eq!(machine.observed(at(400), prior, at(1_001), &ours(9), 0.0), Step::Keep);
        assert_eq!(machine.holding(), Holding::Unknown);
    }

    #[test]
    fn the_longest_hold_ends_the_tenure_whatever_is_granted() {
        let lease = *machine().lease();
        let mut machine = Machine::new(id("me"), lease, Some(Duration::from_millis(1_500)), at(0));
        ask(&mut machine, 0, 1, &ours(1));
        ask(&mut machine, 400, 401, &ours(1));
        ask(&mut machine, 800, 801, &ours(1));
        assert_eq!(machine.due(), at(1_200), "the renewal");
        ask(&mut machine, 1_200, 1_201, &ours(1));
        assert!(!machine.expired(at(1_499)) && machine.expired(at(1_500)));
    }

    #[test]
    fn no_hint_shortens_a_cooldown() {
        let mut machine = held(1).renamed(id("new"), at(60_000));
        machine.hinted(at(20));
        assert_eq!(machine.due(), at(60_000));
    }

    #[test]
    fn a_release_is_bound_to_the_token_where_it_is_sure() {
        let mut machine = held(5);
        assert_eq!(machine.holding(), Holding::Under(FencingToken::new(5)));
        machine.forget(at(300));
        assert_eq!(machine.holding(), Holding::Under(FencingToken::new(5)));
        machine.send(at(400));
        assert_eq!(machine.holding(), Holding::Unknown, "a call without an answer may have taken it anew");
        assert_eq!(machine.renamed(id("new"), at(500)).holding(), Holding::Nothing);
    }

    /// What a store, a network and a clock can do to a machine.
    #[derive(Clone, Debug)]
    enum Happening {
        Answered(u8, u64),
        Failed(bool),
        Hint,
        Time(u64),
    }

    fn happening() -> impl Strategy<Value = Happening> {
        prop_oneof![
            (0u8..5, 0u64..1_500).prop_map(|(answer, took)| Happening::Answered(answer, took)),
            any::<bool>().prop_map(Happening::Failed),
            Just(Happening::Hint),
            (0u64..2_000).prop_map(Happening::Time),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..Default::default() })]

        #[test]
        fn tenures_alternate_and_end_in_time(happenings in prop::collection::vec(happening(), 1..60), roll in 0.0..1.0) {
            let (mut machine, mut now, mut token, mut held) = (machine(), 0, 1, None::<Moment>);
            let mut last = None;
            for happening in happenings {
                if machine.expired(at(now)) {
                    prop_assert!(held.take().is_some_and(|deadline| at(now) >= deadline));
                }
                match happening {
                    Happening::Answered(kind, took) => {
                        let sent = now;
                        let (prior, limit) = machine.send(at(sent));
                        prop_assert!(limit <= Duration::from_millis(200));
                        now += took;
                        let answer = match kind {
                            0 => ours(token),
                            1 => { token += 1; ours(token) }
                            2 => Answer::Held(ownership("other", token)),
                            3 => ours(token / 2),
                            _ => Answer::Vacant,
                        };
                        if machine.expired(at(now)) {
                            held = None;
                        }
                        match machine.observed(at(sent), prior, at(now), &answer, roll) {
                            Step::Acquired(grant) => {
                                prop_assert!(held.is_none() && grant.deadline > at(now));
                                prop_assert!(grant.deadline < at(sent) + Duration::from_secs(1));
                                prop_assert!(Some(grant.token) > last, "every tenure has a greater token");
                                (held, last) = (Some(grant.deadline), Some(grant.token));
                            }
                            Step::Renewed(grant) => {
                                prop_assert!(held.is_some() && Some(grant.token) == last);
                                held = Some(grant.deadline);
                            }
                            Step::Replaced(_, grant) => {
                                prop_assert!(held.is_some() && Some(grant.token) > last);
                                (held, last) = (Some(grant.deadline), Some(grant.token));
                            }
                            Step::Lost(_) => prop_assert!(held.take().is_some()),
                            Step::OldToken(token) => {
                                prop_assert!(Some(token) <= last);
                                held = None;
                                machine = machine.renamed(id("me"), at(now));
                            }
                            Step::Keep | Step::TooLate => prop_assert!(held.is_none()),
                        }
                    }
                    Happening::Failed(transient) => {
                        machine.send(at(now));
                        machine.failed(at(now), transient, roll);
                    }
                    Happening::Hint => machine.hinted(at(now)),
                    Happening::Time(ms) => now += ms,
                }
                prop_assert_eq!(machine.is_holding(), held.is_some());
                prop_assert!(held.is_none_or(|deadline| machine.due() <= deadline));
            }
        }

        #[test]
        fn a_release_frees_whatever_the_store_has_of_us(events in prop::collection::vec(store_event(), 1..60)) {
            let (mut machine, mut store, mut now) = (machine(), Store::default(), 0);
            for event in events {
                machine.expired(at(now));
                match event {
                    StoreEvent::Call { arrives, answered, took } => {
                        let (sent, (prior, _)) = (now, machine.send(at(now)));
                        let answer = arrives.then(|| store.contend(prior));
                        now += took;
                        machine.expired(at(now));
                        match answer.filter(|_| answered) {
                            Some(answer) => {
                                let step = machine.observed(at(sent), prior, at(now), &answer, 0.0);
                                prop_assert!(!matches!(step, Step::OldToken(_)), "this store obeys: {step:?}");
                            }
                            None => machine.failed(at(now), true, 0.0),
                        }
                    }
                    StoreEvent::Forgets => store.ours = None,
                    StoreEvent::Other(holds) => {
                        store.ours = store.ours.filter(|_| !holds);
                        store.other = holds;
                    }
                    StoreEvent::Time(ms) => now += ms,
                }
                let mut freed = store.clone();
                freed.release(machine.holding());
                prop_assert_eq!(freed.ours, None, "left behind after {:?} of {:?}", machine.holding(), store);
            }
        }
    }

    /// A store that keeps the contract, as one contender sees it.
    #[derive(Clone, Debug, Default)]
    struct Store {
        ours: Option<u64>,
        other: bool,
        last: u64,
    }

    impl Store {
        fn contend(&mut self, prior: Prior) -> Answer {
            let lapsed = self.ours.is_some_and(|token| prior == Prior::Lapsed(FencingToken::new(token)));
            if self.other {
                return Answer::Held(ownership("other", self.last));
            }
            if self.ours.is_none() || lapsed {
                self.last += 1;
                self.ours = Some(self.last);
            }
            self.ours.map_or(Answer::Vacant, ours)
        }

        fn release(&mut self, holding: Holding) {
            self.ours = match holding {
                Holding::Nothing => self.ours,
                Holding::Unknown => None,
                Holding::Under(token) => self.ours.filter(|ours| *ours != token.get()),
            };
        }
    }

    #[derive(Clone, Debug)]
    enum StoreEvent {
        Call { arrives: bool, answered: bool, took: u64 },
        Forgets,
        Other(bool),
        Time(u64),
    }

    fn store_event() -> impl Strategy<Value = StoreEvent> {
        prop_oneof![
            4 => (any::<bool>(), any::<bool>(), 0u64..1_500)
                .prop_map(|(arrives, answered, took)| StoreEvent::Call { arrives, answered, took }),
            1 => Just(StoreEvent::Forgets),
            1 => any::<bool>().prop_map(StoreEvent::Other),
            1 => (0u64..2_000).prop_map(StoreEvent::Time),
        ]
    }
}
