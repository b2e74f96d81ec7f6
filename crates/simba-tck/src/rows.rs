//! The rows of the fault matrix about network faults, in several rounds.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc)]

use std::sync::Arc;
use std::time::Duration;

use simba_core::{Contention, Lease, Loss, MutexName, Tenure};

use crate::fixture::default_lease;
use crate::world::{
    MAX_DELAY, MAX_PAUSE, Peer, assert_ok, lease_limit, name, now, release, since_zero, sleep_until, until,
    within,
};
use crate::{Fixture, History, Network, Rule, What};

/// Returns how often each fault is repeated: `SIMBA_FAULT_ROUNDS`, or 3.
///
/// # Panics
///
/// If the variable is set, but not to a number of at least 1.
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
/// If the variable is set, but not to a number.
#[allow(clippy::print_stdout)]
fn random() -> fastrand::Rng {
    let seed = match std::env::var("SIMBA_FAULT_SEED") {
        Ok(seed) => seed.parse().unwrap_or_else(|_| panic!("SIMBA_FAULT_SEED takes a number, not {seed:?}")),
        Err(_) => fastrand::u64(..),
    };
    println!("SIMBA_FAULT_SEED={seed} repeats the random times of this row");
    fastrand::Rng::with_seed(seed)
}

/// Returns the time limit for a row.
#[doc(hidden)]
#[must_use]
pub fn limit() -> Duration {
    Duration::from_secs(60) + Duration::from_secs(30) * rounds()
}

/// How much later than after the lease alone the next one may lead: twice a [`MAX_PAUSE`], and less than another
/// [`lease`].
pub(crate) const TAKE_OVER: Duration = Duration::from_secs(4);

/// Expands to one `#[test]` per row about the network, like [`suite!`](crate::suite) for the cases.
#[macro_export]
macro_rules! rows {
    ($fixture:expr) => {
        $crate::rows!(@each $fixture;
            row_11_a_leader_without_network_steps_down_in_time
            row_12_a_leader_without_replies_steps_down_in_time
            row_13_a_cut_in_every_lease_causes_no_loss
            row_14_an_outage_of_half_the_transition_causes_no_loss
            row_15_a_slow_network_with_cuts_keeps_its_leader
            row_17_an_acquisition_without_a_reply_is_adopted
            row_30_reconnecting_contenders_do_not_overload_the_store
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

/// Returns the longer one of the store's lease and the default, which survives a fault of half the transition and a
/// [`MAX_PAUSE`] after it.
pub(crate) fn lease(fixture: &dyn Fixture) -> Lease {
    let (own, default) = (fixture.lease(), default_lease());
    if own.total() > default.total() { own } else { default }
}

/// Returns that lease with a longer transition, for a machine that is paused during a fault: the end of the fault then
/// comes late, and the leader still has time to renew.
pub(crate) fn longer_lease(fixture: &dyn Fixture, more: Duration) -> Lease {
    let short = lease(fixture);
    assert_ok("a longer lease is valid", Lease::new(short.ttl(), short.transition() + more))
}

/// A contender that has started on its own connection.
struct RunningContender {
    peer: Peer,
    contention: Arc<Contention>,
}

impl RunningContender {
    async fn start(fixture: &dyn Fixture, mutex: &MutexName, lease: Lease) -> Self {
        let peer = Peer::connect(fixture).await;
        let contention = peer.simba.contend(mutex.clone()).with_lease(lease);
        contention.start().unwrap();
        Self { peer, contention: Arc::new(contention) }
    }

    async fn leads(&self, limit: Duration) -> Tenure {
        let tenure = within(limit, "a contender leads", self.contention.acquired()).await;
        assert_ok("a contender leads", tenure)
    }

    async fn sees(&self, leader: &Tenure) {
        until("a waiter sees the leader", || self.contention.owner().is_owner(leader.contender())).await;
    }

    fn network(&self) -> &dyn Network {
        &*self.peer.network
    }
}

/// Starts a leader and a waiter.
async fn leader_and_waiter(
    fixture: &dyn Fixture,
    lease: Lease,
) -> (RunningContender, Tenure, RunningContender) {
    let mutex = name();
    let leader = RunningContender::start(fixture, &mutex, lease).await;
    let tenure = leader.leads(lease_limit(fixture)).await;
    let waiter = RunningContender::start(fixture, &mutex, lease).await;
    waiter.sees(&tenure).await;
    (leader, tenure, waiter)
}

/// Row 11: the leader's network is blocked in both directions, without an error.
pub async fn row_11_a_leader_without_network_steps_down_in_time(fixture: &dyn Fixture) {
    for _ in 0..rounds() {
        assert_steps_down(fixture, |network| network.stall(), 1).await;
    }
}

/// Row 12: requests arrive, replies do not. The leader does not count on renewals without a reply.
pub async fn row_12_a_leader_without_replies_steps_down_in_time(fixture: &dyn Fixture) {
    for _ in 0..rounds() {
        // The last renewal that arrived may have been sent just before the deadline.
        assert_steps_down(fixture, |network| network.stall_replies(), 2).await;
    }
}

/// Checks that the leader loses at its own deadline, and the waiter leads after it and within that many leases.
async fn assert_steps_down(fixture: &dyn Fixture, fault: fn(&dyn Network), leases: u32) {
    let lease = lease(fixture);
    let (leader, tenure, waiter) = leader_and_waiter(fixture, lease).await;
    let failed_at = now();
    fault(leader.network());
    let losing = async {
        let loss = tenure.lost().await;
        (loss, now() - tenure.deadline())
    };
    let acquiring = async { (waiter.leads(lease_limit(fixture)).await, now()) };
    let ((loss, late), (next, at)) = tokio::join!(losing, acquiring);
    let limit = lease.total() * leases + TAKE_OVER;
    assert_eq!(loss, Loss::Deadline, "broken: a leader that cannot renew loses at the deadline");
    assert!(late <= MAX_DELAY, "broken: a loss is notified on time, not {late:?} late");
    assert!(at >= tenure.deadline(), "broken: no other leads before the deadline");
    assert!(next.token() > tenure.token(), "broken: tokens grow");
    assert!(
        at - failed_at <= limit,
        "broken: the next one leads within {limit:?}, not after {:?}",
        at - failed_at
    );
}

/// Row 13: the connection is cut once in every ttl.
pub async fn row_13_a_cut_in_every_lease_causes_no_loss(fixture: &dyn Fixture) {
    let lease = lease(fixture);
    let (leader, tenure, waiter) = leader_and_waiter(fixture, lease).await;
    for _ in 0..rounds() * 2 {
        leader.network().cut();
        sleep_until(now() + lease.ttl()).await;
        still_leads(&tenure, &waiter);
    }
}

/// Row 14: the store is unreachable for half the transition, at random times. The next outage comes once the leader has
/// a whole lease again. That takes up to half a lease: some stores count from the last message before the fault until
/// all their servers know of a later one, and a renewal meanwhile extends nothing.
pub async fn row_14_an_outage_of_half_the_transition_causes_no_loss(fixture: &dyn Fixture) {
    let lease = longer_lease(fixture, MAX_PAUSE);
    let (leader, tenure, waiter) = leader_and_waiter(fixture, lease).await;
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
        still_leads(&tenure, &waiter);
        sleep_until(now() + lease.total() / 2).await;
        until("a leader renews after the fault", || left() > whole || tenure.loss().is_some()).await;
        still_leads(&tenure, &waiter);
    }
}

fn still_leads(tenure: &Tenure, waiter: &RunningContender) {
    assert_eq!(tenure.loss(), None, "broken: a fault that ends in time causes no loss");
    assert!(!waiter.contention.is_owner(), "broken: no other leads");
}

/// The number of contenders in row 15.
const CONTENDERS: usize = 5;

/// Row 15: every message takes 10 to 90 ms, and connections are cut at random. There is no overlap, and at most
/// one change of the leader, plus one in every 30 s.
pub async fn row_15_a_slow_network_with_cuts_keeps_its_leader(fixture: &dyn Fixture) {
    let (mutex, lease, history) = (name(), lease(fixture), History::new());
    let mut contenders = Vec::new();
    for at in 0..CONTENDERS {
        let contender = RunningContender::start(fixture, &mutex, lease).await;
        let ms = Duration::from_millis;
        contender.network().delay(ms(10), ms(80));
        tokio::spawn(record(Arc::clone(&contender.contention), format!("c{at}"), history.clone()));
        contenders.push(contender);
    }
    let (end, mut random) = (now() + Duration::from_secs(5) * rounds(), random());
    while now() < end {
        sleep_until(now() + Duration::from_millis(100)).await;
        contenders.iter().filter(|_| random.f64() < 0.02).for_each(|contender| contender.network().cut());
    }
    let mut broken = history.check();
    broken.retain(|violation| matches!(violation.rule, Rule::Exclusion | Rule::Tokens));
    assert!(broken.is_empty(), "broken: {broken:?}\n{}", history.timeline());
    let tenures = history.events().iter().filter(|event| matches!(event.what, What::Acquired { .. })).count();
    // One change of the leader is accepted, and one more in every 30 s.
    let max_tenures = 2 + usize::try_from(rounds() / 6).unwrap();
    assert!(
        (1..=max_tenures).contains(&tenures),
        "broken: the leader stays, but there were {tenures} tenures\n{}",
        history.timeline()
    );
}

async fn record(contention: Arc<Contention>, who: String, history: History) {
    while let Ok(tenure) = contention.acquired().await {
        history.record(since_zero(now()), &who, What::Acquired { token: tenure.token() });
        tenure.expiring().await;
        history.record(since_zero(now()), &who, What::Expiring);
        let loss = tenure.lost().await;
        let valid_until = since_zero(tenure.deadline().min(now()));
        history.record(since_zero(now()), &who, What::Lost { loss, valid_until });
    }
}

/// Row 17: an acquisition is executed and its reply is lost. Its contender adopts it, and is not queued.
pub async fn row_17_an_acquisition_without_a_reply_is_adopted(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    release(one.lock(&name()).await).await;
    let lease = lease(fixture);
    // In sequence, often enough to detect delays that grow with each.
    for round in 0..rounds().max(8) {
        let mutex = name();
        let locker = one.locker(&mutex).with_lease(lease);
        if round % 2 == 1 {
            // On a store that first creates an unknown mutex, only a known mutex makes the acquisition the first call.
            release(two.lock(&mutex).await).await;
        }
        one.network.lose_next_reply();
        let sent = now();
        let guarantee = "an acquisition without a reply is adopted";
        let guard = assert_ok(guarantee, within(lease_limit(fixture), guarantee, locker.lock()).await);
        let took = now() - sent;
        assert!(took < lease.total(), "broken: it is adopted before its lease ends, not after {took:?}");
        assert!(two.try_lock(&mutex).await.is_none(), "broken: an adopted mutex is held");
        two.assert_no_waiters(&mutex).await;
        release(guard).await;
        two.assert_free(&mutex).await;
    }
}

/// How many contenders reconnect in row 30, and on how many connections.
const RECONNECTING: usize = 200;
const CONNECTIONS: usize = 10;

/// Row 30: a store is down for ten seconds. When it is back, two hundred contenders do not overload it, and one of them
/// leads within a lease.
pub async fn row_30_reconnecting_contenders_do_not_overload_the_store(fixture: &dyn Fixture) {
    // With a lease of one second, the polls of two hundred waiters alone would reach the limit.
    let lease = Lease::new(Duration::from_secs(3), Duration::from_secs(2)).unwrap();
    let mutex = name();
    let mut peers = Vec::new();
    for _ in 0..CONNECTIONS {
        peers.push(Peer::connect(fixture).await);
    }
    let contend = |at: usize| peers[at % CONNECTIONS].simba.contend(mutex.clone()).with_lease(lease);
    let contentions: Vec<_> = (0..RECONNECTING).map(contend).collect();
    contentions.iter().for_each(|contention| contention.start().unwrap());
    until("a contender leads", || contentions.iter().any(Contention::is_owner)).await;
    peers.iter().for_each(|peer| peer.network.refuse());
    sleep_until(now() + Duration::from_secs(10)).await;
    assert!(
        !contentions.iter().any(Contention::is_owner),
        "broken: no contender leads while the store is down"
    );
    peers.iter().for_each(|peer| peer.network.heal());
    let leads = async {
        while !contentions.iter().any(Contention::is_owner) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let guarantee = "a contender leads within a lease after the reconnect";
    let ((), peak) = tokio::join!(within(lease.total() + TAKE_OVER, guarantee, leads), peak(&peers));
    assert!(peak <= 2 * RECONNECTING, "broken: no overload after the reconnect, but {peak} requests/s");
}

/// Returns the maximum number of requests per second in the next seconds.
async fn peak(peers: &[Peer]) -> usize {
    let requests = || peers.iter().map(|peer| peer.network.requests()).sum::<usize>();
    let mut peak = 0;
    for _ in 0..4 {
        let (before, began) = (requests(), now());
        tokio::time::sleep(Duration::from_secs(1)).await;
        let made = requests() - before;
        // On a busy machine the sleep may take longer than a second.
        let pause = (now() - began).max(Duration::from_secs(1));
        peak = peak.max(made * 1_000 / pause.as_millis() as usize);
    }
    peak
}
