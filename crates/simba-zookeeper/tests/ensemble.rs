//! Faults of an ensemble: its leader killed, a follower cut off.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::time::Duration;

use common::raw::{self, Raw};
use simba_core::{Backend as _, Claim, ContenderId, Holding, Prior};
use simba_core::{Clock, Contention, Lease, Moment, MutexName, Simba, SystemClock, Tenure};
use simba_servers::{Ensemble, EnsemblePlan};
use simba_tck::{FaultProxy, rounds};
use simba_zookeeper::{ZookeeperBackend, ZookeeperConfig};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

const PATIENCE: Duration = Duration::from_secs(30);

fn name() -> MutexName {
    let nonce: String = std::iter::repeat_with(fastrand::alphanumeric).take(12).collect();
    MutexName::new(format!("ensemble-{}", nonce.to_lowercase())).unwrap()
}

/// Long enough for an election.
fn patient() -> Lease {
    Lease::new(Duration::from_secs(18), Duration::from_secs(12)).unwrap()
}

async fn simba(url: &str) -> Simba {
    simba_tck::explain_failures();
    let config = ZookeeperConfig::from_url(&url.parse().unwrap()).unwrap();
    Simba::new(ZookeeperBackend::connect(config).await.unwrap())
}

fn contend(simba: &Simba, mutex: &MutexName, lease: Lease) -> Contention {
    let contention = simba.contend(mutex.clone()).with_lease(lease);
    contention.start().unwrap();
    contention
}

async fn leads(contention: &Contention) -> Tenure {
    timeout(PATIENCE, contention.acquired()).await.expect("broken: somebody leads").unwrap()
}

async fn sees(contention: &Contention, leader: &Tenure) {
    let seen = async {
        while !contention.owner().is_owner(leader.contender()) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, seen).await.expect("broken: a waiter sees the leader");
}

async fn start() -> Ensemble {
    spawn_blocking(|| Ensemble::start().unwrap()).await.unwrap()
}

/// Kills the server that leads the others, and gives the ensemble back with it.
async fn kill_leader(ensemble: Ensemble) -> (Ensemble, usize) {
    spawn_blocking(move || {
        let mut ensemble = ensemble;
        let at = ensemble.leader().unwrap();
        ensemble.server_mut(at).kill().unwrap();
        (ensemble, at)
    })
    .await
    .unwrap()
}

async fn restart(ensemble: Ensemble, at: usize) -> Ensemble {
    spawn_blocking(move || {
        let mut ensemble = ensemble;
        ensemble.server_mut(at).restart().unwrap();
        ensemble
    })
    .await
    .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_of_the_ensemble_is_killed_while_a_mutex_is_held() {
    let mut ensemble = start().await;
    let (one, two) = (simba(&ensemble.url()).await, simba(&ensemble.url()).await);
    let mutex = name();
    let holder = contend(&one, &mutex, patient());
    let tenure = leads(&holder).await;
    let waiter = contend(&two, &mutex, patient());
    sees(&waiter, &tenure).await;
    for _ in 0..rounds().min(3) {
        let (alive, at) = kill_leader(ensemble).await;
        let deadline = tenure.deadline();
        let renewed = async {
            while tenure.deadline() <= deadline {
                assert_eq!(
                    tenure.loss(),
                    None,
                    "broken: an election costs no holder: {:?}",
                    holder.last_error()
                );
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, renewed).await.expect("broken: a holder renews after an election");
        assert!(!waiter.is_owner(), "broken: nobody else holds");
        ensemble = restart(alive, at).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_of_the_ensemble_is_killed_while_a_mutex_is_waited_for() {
    let mut ensemble = start().await;
    let (one, two) = (simba(&ensemble.url()).await, simba(&ensemble.url()).await);
    for _ in 0..rounds().min(3) {
        let mutex = name();
        let holder = contend(&one, &mutex, patient());
        let tenure = leads(&holder).await;
        let waiter = contend(&two, &mutex, patient().with_poll(Duration::from_secs(60)).unwrap());
        sees(&waiter, &tenure).await;
        let (alive, at) = kill_leader(ensemble).await;
        timeout(PATIENCE, holder.stop()).await.expect("broken: a holder stops").unwrap();
        let next = leads(&waiter).await;
        assert!(next.token() > tenure.token(), "broken: tokens grow");
        waiter.stop().await.unwrap();
        ensemble = restart(alive, at).await;
    }
}

/// A lease that ends within a test, and survives a machine that stands still for a second.
fn short() -> Lease {
    Lease::new(Duration::from_millis(2_700), Duration::from_millis(1_800)).unwrap()
}

/// The first of three servers, whose ways to the others can be cut.
struct CutOff {
    ensemble: Ensemble,
    ways: Vec<FaultProxy>,
}

impl CutOff {
    async fn start() -> Self {
        let mut plan = EnsemblePlan::new(3).unwrap();
        let mut ways = Vec::new();
        for other in [1, 2] {
            let way = FaultProxy::start(plan.quorum_address(other)).await.unwrap();
            plan = plan.with_detour(0, other, way.address());
            ways.push(way);
        }
        // It is slow to notice that it is alone: for ten seconds it answers what it can.
        let plan = plan.with_setting(0, "syncLimit=50");
        let ensemble = spawn_blocking(|| plan.start().unwrap()).await.unwrap();
        let mut this = Self { ensemble, ways };
        while this.ensemble.leader().unwrap() == 0 {
            this.ensemble = restart(this.ensemble, 0).await;
        }
        this
    }

    fn cut(&self) {
        self.ways.iter().for_each(FaultProxy::stall);
    }

    fn heal(&self) {
        self.ways.iter().for_each(FaultProxy::pass);
    }

    fn url(&self, servers: &[usize]) -> String {
        let addresses: Vec<_> =
            servers.iter().map(|at| self.ensemble.server(*at).address().to_string()).collect();
        format!("zookeeper://{}", addresses.join(","))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_73_a_holder_at_a_follower_without_a_quorum_loses_before_another_leads() {
    let cut_off = CutOff::start().await;
    for _ in 0..rounds() {
        let (one, two) = (simba(&cut_off.url(&[0])).await, simba(&cut_off.url(&[1, 2])).await);
        let mutex = name();
        let holder = contend(&one, &mutex, short());
        let tenure = leads(&holder).await;
        let next_leader = contend(&two, &mutex, short());
        sees(&next_leader, &tenure).await;
        sleep(short().ttl().mul_f64(fastrand::f64())).await;
        cut_off.cut();
        let lost = async {
            tenure.lost().await;
            SystemClock.now()
        };
        let led = async { (leads(&next_leader).await, SystemClock.now()) };
        let (lost, (next, led)): (Moment, (Tenure, Moment)) =
            timeout(PATIENCE, async { tokio::join!(lost, led) }).await.expect("broken: somebody leads");
        assert!(
            led >= tenure.deadline(),
            "broken: two hold: {:?} before the deadline",
            tenure.deadline() - led
        );
        assert!(led >= lost, "broken: who loses learns of it first");
        assert!(next.token() > tenure.token(), "broken: tokens grow");
        cut_off.heal();
        next_leader.stop().await.unwrap();
        let again = leads(&holder).await;
        assert!(again.token() > next.token(), "broken: who was cut off comes back with a greater token");
        timeout(PATIENCE, holder.stop()).await.expect("broken: a contention stops").unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_three_servers_outlives_any_one_of_them() {
    let mut ensemble = start().await;
    let simba = simba(&ensemble.url()).await;
    for at in 0..3 {
        ensemble = spawn_blocking(move || {
            ensemble.server_mut(at).kill().unwrap();
            ensemble
        })
        .await
        .unwrap();
        let mutex = name();
        let holder = contend(&simba, &mutex, patient());
        leads(&holder).await;
        timeout(PATIENCE, holder.stop()).await.expect("broken: a contention stops").unwrap();
        ensemble = restart(ensemble, at).await;
    }
}

/// A holder's session goes to a server that grants less, and the holder is cut off right after.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reconnect_that_grants_a_shorter_session_shortens_the_tenure() {
    const SHORT: Duration = Duration::from_secs(8);
    let plan = EnsemblePlan::new(3).unwrap();
    let plan = plan.with_setting(1, format!("maxSessionTimeout={}", SHORT.as_millis()));
    let ensemble = spawn_blocking(|| plan.start().unwrap()).await.unwrap();
    let (generous, strict) = (
        FaultProxy::start(ensemble.server(0).address()).await.unwrap(),
        FaultProxy::start(ensemble.server(1).address()).await.unwrap(),
    );
    strict.refuse();
    let one = simba(&format!("zookeeper://{},{}", generous.address(), strict.address())).await;
    let two = simba(&ensemble.server(2).url()).await;
    let mutex = name();
    // No renewal is due within the test.
    let lease = Lease::new(Duration::from_secs(70), Duration::from_secs(40)).unwrap();
    let holder = contend(&one, &mutex, lease);
    let tenure = leads(&holder).await;
    let next_leader = contend(&two, &mutex, patient());
    sees(&next_leader, &tenure).await;
    let probe = simba(&ensemble.url()).await.operate().unwrap().probe().await.unwrap();
    let warned =
        probe.findings.iter().any(|finding| finding.problem.contains("a reconnect can shorten a lease"));
    assert!(warned, "broken: different bounds are reported: {probe:?}");
    let before = tenure.deadline();
    assert!(before - SystemClock.now() > PATIENCE, "a long session is granted first");
    strict.pass();
    generous.refuse();
    generous.cut();
    let shortened = async {
        while tenure.deadline() == before {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(SHORT, shortened).await.expect("broken: a holder hears that its session is shorter now");
    // The first server may report the session to the leader once more, for the longer time.
    sleep(Duration::from_secs(2)).await;
    strict.stall();
    let next = leads(&next_leader).await;
    assert!(!tenure.is_held(), "broken: two hold");
    assert!(next.token() > tenure.token(), "broken: tokens grow");
}

/// The server that has forwarded a creation goes away before it answers, and the next one hears of the creation late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_creation_that_is_committed_after_a_reconnect_leaves_no_node() {
    // The node is there for at least this long, and is seen even by a process that stands still for a while.
    const LATE: Duration = Duration::from_secs(2);
    let mut plan = EnsemblePlan::new(3).unwrap();
    let mut ways = Vec::new();
    for follower in [0, 1] {
        let way = FaultProxy::start(plan.quorum_address(2)).await.unwrap();
        plan = plan.with_detour(follower, 2, way.address());
        ways.push(way);
    }
    // No server gives up another one that is late.
    let plan = (0..3).fold(plan, |plan, server| plan.with_setting(server, "syncLimit=50"));
    let mut ensemble = spawn_blocking(|| plan.start().unwrap()).await.unwrap();
    while ensemble.leader().unwrap() != 2 {
        let at = ensemble.leader().unwrap();
        ensemble = restart(ensemble, at).await;
    }
    // After an election the followers take a moment to serve again.
    let followers = [0, 1].map(|at| ensemble.server(at).address());
    spawn_blocking(move || {
        while !followers.iter().all(|at| raw::four_letters(*at, "srvr").contains("Mode: follower")) {
            std::thread::sleep(Duration::from_millis(50));
        }
    })
    .await
    .unwrap();
    let (first, second) = (
        FaultProxy::start(ensemble.server(0).address()).await.unwrap(),
        FaultProxy::start(ensemble.server(1).address()).await.unwrap(),
    );
    second.refuse();
    let url = format!("zookeeper://{},{}", first.address(), second.address());
    let config = ZookeeperConfig::from_url(&url.parse().unwrap()).unwrap();
    let backend = ZookeeperBackend::connect(config).await.unwrap();
    // The session outlives the test.
    let lease = Lease::new(Duration::from_secs(70), Duration::from_secs(40)).unwrap();
    let mutex = name();
    let path = format!("/simba/{mutex}");
    let claim = || Claim::new(mutex.clone(), ContenderId::generate(), lease);
    let mut session = backend.open(claim()).await.unwrap();
    session.contend(Prior::Nothing).await.unwrap();
    session.release(Holding::Unknown).await.unwrap();
    let mut session = backend.open(claim()).await.unwrap();
    let leader = ensemble.server(2).address();
    let mut by_hand = spawn_blocking(move || Raw::connect(leader)).await.unwrap();
    // The first server forwards and hears nothing. The leader needs the second one to commit, three delays long.
    ways[0].stall_replies();
    ways[1].delay(LATE, Duration::ZERO);
    // The request that creates a node below it, not one about the mutex itself.
    let mut forwarded = ways[0].hold_next_request_with(&[&format!("{path}/")]);
    tokio::select! {
        () = forwarded.caught() => forwarded.deliver(),
        answer = session.contend(Prior::Nothing) => panic!("nobody answers yet: {answer:?}"),
    }
    drop(session);
    second.pass();
    first.refuse();
    first.cut();
    let seen_and_gone = spawn_blocking(move || {
        let mut poll = |wanted: bool| {
            let asked = SystemClock.now();
            while by_hand.children(&path).is_empty() == wanted {
                assert!(
                    SystemClock.now() - asked < PATIENCE,
                    "broken: the node is {}",
                    if wanted { "not created" } else { "left behind" }
                );
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        poll(true);
        poll(false);
    });
    seen_and_gone.await.unwrap();
}
