//! The rows of the fault matrix about a bad network, round after round.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc)]

use std::sync::Arc;
use std::time::Duration;

use simba_core::{Contention, Lease, Loss, Moment, MutexName, Tenure};

use crate::fixture::usual_lease;
use crate::world::{Peer, STANDSTILL, kept, name, now, patience, release, sleep_until, until, within};
use crate::{Fixture, History, Network, Rule, What};

/// Returns how often each fault is repeated: `SIMBA_FAULT_ROUNDS`, or 3.
///
/// # Panics
///
/// If the variable is set to something else than a number of at least 1.
#[must_use]
pub fn rounds() -> u32 {
    let Some(rounds) = std::env::var_os("SIMBA_FAULT_ROUNDS") else { return 3 };
    let number = rounds.to_str().and_then(|rounds| rounds.parse().ok()).filter(|rounds| *rounds > 0);
    number.unwrap_or_else(|| panic!("SIMBA_FAULT_ROUNDS takes a number of at least 1, not {rounds:?}"))
}

/// Returns the source of all random times of one row. A failing test prints its seed; `SIMBA_FAULT_SEED` repeats it.
///
/// # Panics
///
/// If the variable is set to something else than a number.
#[allow(clippy::print_stdout)]
fn random() -> fastrand::Rng {
    let seed = match std::env::var("SIMBA_FAULT_SEED") {
        Ok(seed) => seed.parse().unwrap_or_else(|_| panic!("SIMBA_FAULT_SEED takes a number, not {seed:?}")),
        Err(_) => fastrand::u64(..),
    };
    println!("SIMBA_FAULT_SEED={seed} repeats the random times of this row");
    fastrand::Rng::with_seed(seed)
}

/// The longest that a row may take.
#[doc(hidden)]
#[must_use]
pub fn limit() -> Duration {
    Duration::from_secs(60) + Duration::from_secs(30) * rounds()
}

/// How much later than by the lease alone the next one may lead: twice a [`STANDSTILL`], and less than another
/// [`lease`].
pub(crate) const TAKE_OVER: Duration = Duration::from_secs(4);

/// Makes one `#[test]` of every row about the network, as [`suite!`](crate::suite) does of every case.
#[macro_export]
macro_rules! rows {
    ($fixture:expr) => {
        $crate::rows!(@each $fixture;
            row_11_a_leader_in_a_black_hole_steps_down_in_time
            row_12_a_leader_that_hears_no_reply_steps_down_in_time
            row_13_a_cut_in_every_lease_costs_no_leader
            row_14_a_store_away_for_half_the_transition_costs_no_leader
            row_15_a_slow_network_that_breaks_keeps_its_leader
            row_17_an_acquisition_without_a_reply_is_adopted
            row_30_a_store_that_comes_back_meets_no_storm
        );
    };
    (@each $fixture:expr; $($row:ident)*) => {
        $(#[test]
        fn $row() {
            let case = $crate::Case::new("rows", stringify!($row), |fixture| {
                Box::pin($crate::rows::$row(fixture))
            });
            $crate::run_within($crate::rows::limit(), || $fixture, case);
        })*
    };
}

/// Returns the longer one of the store's lease and the usual one, which survives a fault of half the transition and
/// a [`STANDSTILL`] after it.
pub(crate) fn lease(fixture: &dyn Fixture) -> Lease {
    let (own, usual) = (fixture.lease(), usual_lease());
    if own.total() > usual.total() { own } else { usual }
}

/// A contender that has started on a connection of its own.
struct Runner {
    peer: Peer,
    contention: Arc<Contention>,
}

impl Runner {
    async fn start(fixture: &dyn Fixture, mutex: &MutexName, lease: Lease) -> Self {
        let peer = Peer::connect(fixture).await;
        let contention = peer.simba.contend(mutex.clone()).with_lease(lease);
        contention.start().unwrap();
        Self { peer, contention: Arc::new(contention) }
    }

    async fn leads(&self, limit: Duration) -> Tenure {
        let tenure = within(limit, "somebody leads", self.contention.acquired()).await;
        kept("somebody leads", tenure)
    }

    async fn sees(&self, leader: &Tenure) {
        until("a waiter sees the leader", || self.contention.owner().is_owner(leader.contender())).await;
    }

    fn network(&self) -> &dyn Network {
        &*self.peer.network
    }
}

/// A leader, and one who waits for it to fall.
async fn leader_and_heir(fixture: &dyn Fixture, lease: Lease) -> (Runner, Tenure, Runner) {
    let mutex = name();
    let leader = Runner::start(fixture, &mutex, lease).await;
    let tenure = leader.leads(patience(fixture)).await;
    let heir = Runner::start(fixture, &mutex, lease).await;
    heir.sees(&tenure).await;
    (leader, tenure, heir)
}

/// Row 11: nothing passes in either direction, without an error, for the leader alone.
pub async fn row_11_a_leader_in_a_black_hole_steps_down_in_time(fixture: &dyn Fixture) {
    for _ in 0..rounds() {
        steps_down(fixture, |network| network.stall(), 1).await;
    }
}

/// Row 12: requests arrive, replies do not. What the store renews, the leader does not count on.
pub async fn row_12_a_leader_that_hears_no_reply_steps_down_in_time(fixture: &dyn Fixture) {
    for _ in 0..rounds() {
        // The last renewal that arrived may have been sent just before the deadline.
        steps_down(fixture, |network| network.stall_replies(), 2).await;
    }
}

/// Checks that the leader falls by its own deadline, and the heir leads after it and within that many leases.
async fn steps_down(fixture: &dyn Fixture, fault: fn(&dyn Network), leases: u32) {
    let lease = lease(fixture);
    let (leader, tenure, heir) = leader_and_heir(fixture, lease).await;
    let struck = now();
    fault(leader.network());
    let falls = async {
        let loss = tenure.lost().await;
        (loss, now() - tenure.deadline())
    };
    let rises = async { (heir.leads(patience(fixture)).await, now()) };
    let ((loss, late), (next, at)) = tokio::join!(falls, rises);
    let limit = lease.total() * leases + TAKE_OVER;
    assert_eq!(loss, Loss::Deadline, "broken: who cannot renew loses at the deadline");
    assert!(late <= STANDSTILL, "broken: a loss is told on time, not {late:?} late");
    assert!(at >= tenure.deadline(), "broken: nobody leads before the deadline of the one before");
    assert!(next.token() > tenure.token(), "broken: tokens grow");
    assert!(at - struck <= limit, "broken: the next one leads within {limit:?}, not after {:?}", at - struck);
}

/// Row 13: the connection breaks once in every ttl.
pub async fn row_13_a_cut_in_every_lease_costs_no_leader(fixture: &dyn Fixture) {
    let lease = lease(fixture);
    let (leader, tenure, heir) = leader_and_heir(fixture, lease).await;
    for _ in 0..rounds() * 2 {
        leader.network().cut();
        sleep_until(now() + lease.ttl()).await;
        still_leads(&tenure, &heir);
    }
}

/// Row 14: the store is away for half the transition, whenever that is. The next time comes once the leader has a whole
/// lease again: some stores count from what they heard before the fault for a while.
pub async fn row_14_a_store_away_for_half_the_transition_costs_no_leader(fixture: &dyn Fixture) {
    let lease = lease(fixture);
    let (leader, tenure, heir) = leader_and_heir(fixture, lease).await;
    let left = || tenure.deadline().saturating_since(now());
    let deadline = tenure.deadline();
    until("a leader renews", || tenure.deadline() > deadline).await;
    // A poll may see a renewal late.
    let whole = left().mul_f64(0.9);
    let mut random = random();
    for _ in 0..rounds() * 2 {
        sleep_until(now() + lease.ttl().mul_f64(random.f64())).await;
        leader.network().stall();
        sleep_until(now() + lease.transition() / 2).await;
        leader.network().heal();
        still_leads(&tenure, &heir);
        until("a leader renews after the fault", || left() > whole || tenure.loss().is_some()).await;
        still_leads(&tenure, &heir);
    }
}

fn still_leads(tenure: &Tenure, heir: &Runner) {
    assert_eq!(tenure.loss(), None, "broken: a fault that is over in time costs no leader");
    assert!(!heir.contention.is_owner(), "broken: nobody else leads");
}

/// How many contend in row 15.
const CROWD: usize = 5;

/// Row 15: every message takes 10 to 90 ms, and now and then a connection breaks. Nobody overlaps, and hardly
/// anybody loses.
pub async fn row_15_a_slow_network_that_breaks_keeps_its_leader(fixture: &dyn Fixture) {
    let (mutex, lease, history) = (name(), lease(fixture), History::new());
    let mut crowd = Vec::new();
    for at in 0..CROWD {
        let runner = Runner::start(fixture, &mutex, lease).await;
        let ms = Duration::from_millis;
        runner.network().delay(ms(10), ms(80));
        tokio::spawn(write_down(Arc::clone(&runner.contention), format!("c{at}"), history.clone()));
        crowd.push(runner);
    }
    let (end, mut random) = (now() + Duration::from_secs(5) * rounds(), random());
    while now() < end {
        sleep_until(now() + Duration::from_millis(100)).await;
        crowd.iter().filter(|_| random.f64() < 0.02).for_each(|runner| runner.network().cut());
    }
    let mut broken = history.check();
    broken.retain(|violation| matches!(violation.rule, Rule::Exclusion | Rule::Tokens));
    assert!(broken.is_empty(), "broken: {broken:?}\n{}", history.timeline());
    let tenures = history.events().iter().filter(|event| matches!(event.what, What::Acquired { .. })).count();
    // One change in half a minute is what so bad a network may cost.
    let most = 2 + usize::try_from(rounds() / 6).unwrap();
    assert!(
        (1..=most).contains(&tenures),
        "broken: a leader stays, but there were {tenures}\n{}",
        history.timeline()
    );
}

async fn write_down(contention: Arc<Contention>, who: String, history: History) {
    while let Ok(tenure) = contention.acquired().await {
        history.record(since_zero(now()), &who, What::Acquired { token: tenure.token() });
        tenure.expiring().await;
        history.record(since_zero(now()), &who, What::Expiring);
        let loss = tenure.lost().await;
        let valid_until = since_zero(tenure.deadline().min(now()));
        history.record(since_zero(now()), &who, What::Lost { loss, valid_until });
    }
}

fn since_zero(at: Moment) -> Duration {
    at - Moment::ZERO
}

/// Row 17: an acquisition is carried out and its reply is lost. Its contender finds that it has it, and stands
/// in no queue.
pub async fn row_17_an_acquisition_without_a_reply_is_adopted(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    release(one.lock(&name()).await).await;
    let lease = lease(fixture);
    // One after the other, so often that pauses which grow with each of them would show.
    for round in 0..rounds().max(8) {
        let mutex = name();
        let locker = one.locker(&mutex).with_lease(lease);
        if round % 2 == 1 {
            // Where a store first makes what it never saw, the call that takes is the first one only from now on.
            release(two.lock(&mutex).await).await;
        }
        one.network.lose_next_reply();
        let sent = now();
        let promise = "what was won without a reply is adopted";
        let guard = kept(promise, within(patience(fixture), promise, locker.lock()).await);
        let took = now() - sent;
        assert!(took < lease.total(), "broken: adopted before its lease ended, not after {took:?}");
        assert!(two.try_lock(&mutex).await.is_none(), "broken: what was adopted is held");
        two.finds_no_waiter_of(&mutex).await;
        release(guard).await;
        two.finds_nothing_of(&mutex).await;
    }
}

/// How many contenders meet again in row 30, and on how many connections.
const RETURNING: usize = 200;
const CONNECTIONS: usize = 10;

/// Row 30: a store is down for ten seconds. When it is back, two hundred contenders do not storm it, and one of
/// them leads soon.
pub async fn row_30_a_store_that_comes_back_meets_no_storm(fixture: &dyn Fixture) {
    // A lease as fleets have it: under one of a second, two hundred waiters ask that often by themselves.
    let lease = Lease::new(Duration::from_secs(3), Duration::from_secs(2)).unwrap();
    let mutex = name();
    let mut peers = Vec::new();
    for _ in 0..CONNECTIONS {
        peers.push(Peer::connect(fixture).await);
    }
    let contend = |at: usize| peers[at % CONNECTIONS].simba.contend(mutex.clone()).with_lease(lease);
    let contentions: Vec<_> = (0..RETURNING).map(contend).collect();
    contentions.iter().for_each(|contention| contention.start().unwrap());
    until("somebody leads", || contentions.iter().any(Contention::is_owner)).await;
    peers.iter().for_each(|peer| peer.network.refuse());
    sleep_until(now() + Duration::from_secs(10)).await;
    assert!(!contentions.iter().any(Contention::is_owner), "broken: nobody leads a store that is down");
    peers.iter().for_each(|peer| peer.network.heal());
    let leads = async {
        while !contentions.iter().any(Contention::is_owner) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let promise = "somebody leads within a lease of the return";
    let ((), peak) = tokio::join!(within(lease.total() + TAKE_OVER, promise, leads), peak(&peers));
    assert!(peak <= 2 * RETURNING, "broken: no storm at the return, not {peak} requests in a second");
}

/// The most requests in one of the next seconds.
async fn peak(peers: &[Peer]) -> usize {
    let requests = || peers.iter().map(|peer| peer.network.requests()).sum::<usize>();
    let mut peak = 0;
    for _ in 0..4 {
        let before = requests();
        tokio::time::sleep(Duration::from_secs(1)).await;
        peak = peak.max(requests() - before);
    }
    peak
}
