//! Faults of an ensemble: a killed leader, a follower without a quorum.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::time::Duration;

use common::raw::{self, Raw};
use simba_core::ContenderId;
use simba_core::spi::{Answer, Backend as _, Claim, Prior};
use simba_core::{Clock, Contention, Lease, Moment, Simba, SystemClock, Tenure};
use simba_servers::{Ensemble, EnsemblePlan};
use simba_tck::{FaultProxy, rounds};
use simba_test_support::{contend, name};
use simba_zookeeper::{ZookeeperBackend, ZookeeperConfig};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// Returns a lease that survives an election on a busy machine. It is renewed after nine seconds, so that no test waits
/// long for a renewal.
fn long() -> Lease {
    let lease = Lease::new(Duration::from_secs(36), Duration::from_secs(24)).unwrap();
    lease.with_renew_at(Duration::from_secs(9)).unwrap()
}

async fn simba(url: &str) -> Simba {
    simba_tck::explain_failures();
    let config = ZookeeperConfig::from_url(&url.parse().unwrap()).unwrap();
    Simba::new(ZookeeperBackend::connect(config).await.unwrap())
}

async fn acquired(contention: &Contention) -> Tenure {
    timeout(WAIT_LIMIT, contention.acquired()).await.expect("broken: the contender acquires").unwrap()
}

async fn observes(contention: &Contention, leader: &Tenure) {
    let observed = async {
        while !contention.owner().is_owner(leader.contender()) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(WAIT_LIMIT, observed).await.expect("broken: a waiter observes the leader");
}

async fn start() -> Ensemble {
    spawn_blocking(|| Ensemble::start().unwrap()).await.unwrap()
}

/// Kills the leader of the ensemble. Returns the ensemble and the index of the leader.
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
async fn a_tenure_survives_the_loss_of_the_ensemble_s_leader() {
    let mut ensemble = start().await;
    let (one, two) = (simba(&ensemble.url()).await, simba(&ensemble.url()).await);
    let mutex = name();
    let holder = contend(&one, &mutex, long());
    let tenure = acquired(&holder).await;
    let waiter = contend(&two, &mutex, long());
    observes(&waiter, &tenure).await;
    for _ in 0..rounds().min(3) {
        let (alive, at) = kill_leader(ensemble).await;
        let deadline = tenure.deadline();
        let renewed = async {
            while tenure.deadline() <= deadline {
                assert_eq!(
                    tenure.loss(),
                    None,
                    "broken: a tenure survives an election: {:?}",
                    holder.last_error()
                );
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(WAIT_LIMIT, renewed).await.expect("broken: a holder renews after an election");
        assert!(!waiter.is_owner(), "broken: there is one holder");
        ensemble = restart(alive, at).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_survives_the_loss_of_the_ensemble_s_leader() {
    let mut ensemble = start().await;
    let (one, two) = (simba(&ensemble.url()).await, simba(&ensemble.url()).await);
    for _ in 0..rounds().min(3) {
        let mutex = name();
        let holder = contend(&one, &mutex, long());
        let tenure = acquired(&holder).await;
        let waiter = contend(&two, &mutex, long().with_poll(Duration::from_secs(60)).unwrap());
        observes(&waiter, &tenure).await;
        let (alive, at) = kill_leader(ensemble).await;
        timeout(WAIT_LIMIT, holder.stop()).await.expect("broken: a holder stops").unwrap();
        let next = acquired(&waiter).await;
        assert!(next.token() > tenure.token(), "broken: tokens grow");
        waiter.stop().await.unwrap();
        ensemble = restart(alive, at).await;
    }
}

/// Returns a lease that ends within a test, and survives a machine that pauses for two seconds.
fn short() -> Lease {
    Lease::new(Duration::from_millis(4_500), Duration::from_secs(3)).unwrap()
}

/// An ensemble of three whose first server is connected to the others through proxies.
struct Partition {
    ensemble: Ensemble,
    links: Vec<FaultProxy>,
}

impl Partition {
    async fn start() -> Self {
        let mut plan = EnsemblePlan::new(3).unwrap();
        let mut links = Vec::new();
        for other in [1, 2] {
            let link = FaultProxy::start(plan.quorum_address(other)).await.unwrap();
            plan = plan.with_detour(0, other, link.address());
            links.push(link);
        }
        // The first server detects the partition after ten seconds, and answers reads until then.
        let plan = plan.with_setting(0, "syncLimit=50");
        let ensemble = spawn_blocking(|| plan.start().unwrap()).await.unwrap();
        let mut this = Self { ensemble, links };
        while this.ensemble.leader().unwrap() == 0 {
            this.ensemble = restart(this.ensemble, 0).await;
        }
        this
    }

    fn cut(&self) {
        self.links.iter().for_each(FaultProxy::stall);
    }

    fn heal(&self) {
        self.links.iter().for_each(FaultProxy::pass);
    }

    fn url(&self, servers: &[usize]) -> String {
        let addresses: Vec<_> =
            servers.iter().map(|at| self.ensemble.server(*at).address().to_string()).collect();
        format!("zookeeper://{}", addresses.join(","))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_73_a_holder_at_a_follower_without_a_quorum_loses_before_another_leads() {
    let partition = Partition::start().await;
    for _ in 0..rounds() {
        let (one, two) = (simba(&partition.url(&[0])).await, simba(&partition.url(&[1, 2])).await);
        let mutex = name();
        let holder = contend(&one, &mutex, short());
        let tenure = acquired(&holder).await;
        let next_leader = contend(&two, &mutex, short());
        observes(&next_leader, &tenure).await;
        sleep(short().ttl().mul_f64(fastrand::f64())).await;
        partition.cut();
        let lost = async {
            tenure.lost().await;
            SystemClock.now()
        };
        let led = async { (acquired(&next_leader).await, SystemClock.now()) };
        let (lost, (next, led)): (Moment, (Tenure, Moment)) =
            timeout(WAIT_LIMIT, async { tokio::join!(lost, led) }).await.expect("broken: it is handed over");
        assert!(
            led >= tenure.deadline(),
            "broken: two hold: {:?} before the deadline",
            tenure.deadline() - led
        );
        assert!(led >= lost, "broken: the holder is notified before the next one acquires");
        assert!(next.token() > tenure.token(), "broken: tokens grow");
        partition.heal();
        next_leader.stop().await.unwrap();
        let again = acquired(&holder).await;
        assert!(again.token() > next.token(), "broken: the next tenure of the holder has a greater token");
        timeout(WAIT_LIMIT, holder.stop()).await.expect("broken: a contention stops").unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_three_servers_survives_the_loss_of_any_one() {
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
        let holder = contend(&simba, &mutex, long());
        acquired(&holder).await;
        timeout(WAIT_LIMIT, holder.stop()).await.expect("broken: a contention stops").unwrap();
        ensemble = restart(ensemble, at).await;
    }
}

/// The session of a holder moves to a server that grants less, and the holder is cut off right after.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reconnect_that_grants_a_shorter_session_shortens_the_tenure() {
    const SHORT: Duration = Duration::from_secs(8);
    let plan = EnsemblePlan::new(3).unwrap();
    let plan = plan.with_setting(1, format!("maxSessionTimeout={}", SHORT.as_millis()));
    let ensemble = spawn_blocking(|| plan.start().unwrap()).await.unwrap();
    let (longer, shorter) = (
        FaultProxy::start(ensemble.server(0).address()).await.unwrap(),
        FaultProxy::start(ensemble.server(1).address()).await.unwrap(),
    );
    shorter.refuse();
    let one = simba(&format!("zookeeper://{},{}", longer.address(), shorter.address())).await;
    let two = simba(&ensemble.server(2).url()).await;
    let mutex = name();
    // No renewal is due within the test.
    let lease = Lease::new(Duration::from_secs(70), Duration::from_secs(40)).unwrap();
    let holder = contend(&one, &mutex, lease);
    let tenure = acquired(&holder).await;
    let next_leader = contend(&two, &mutex, long());
    observes(&next_leader, &tenure).await;
    let all = simba(&ensemble.url()).await;
    let warned = async {
        // A probe leaves out a server that does not return its bounds within a second.
        loop {
            let probe = all.operate().unwrap().probe().await.unwrap();
            let mut problems = probe.findings.iter().map(|finding| &finding.problem);
            if problems.any(|problem| problem.contains("a reconnect can shorten a lease")) {
                break;
            }
        }
    };
    timeout(WAIT_LIMIT, warned).await.expect("broken: different bounds are reported");
    let before = tenure.deadline();
    assert!(before - SystemClock.now() > WAIT_LIMIT, "a long session is granted first");
    shorter.pass();
    longer.refuse();
    longer.cut();
    let shortened = async {
        while tenure.deadline() >= before {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(SHORT, shortened).await.expect("broken: a shorter grant shortens the tenure");
    // The first server may report the session to the leader once more with the longer timeout. The second server has to
    // report it after that, and each report may be two seconds late.
    sleep(Duration::from_secs(5)).await;
    shorter.stall();
    let next = acquired(&next_leader).await;
    assert!(!tenure.is_held(), "broken: two hold");
    assert!(next.token() > tenure.token(), "broken: tokens grow");
}

/// The server that has forwarded a creation fails before it answers, and the next server receives the creation late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_creation_that_is_committed_after_a_reconnect_leaves_no_node() {
    // The node exists for at least this long, so that even a process that pauses observes it.
    const DELAY: Duration = Duration::from_secs(2);
    let (ensemble, links) = start_with_links().await;
    let (leader, followers) = roles(&ensemble).await;
    let (first, second) = (
        FaultProxy::start(ensemble.server(followers[0]).address()).await.unwrap(),
        FaultProxy::start(ensemble.server(followers[1]).address()).await.unwrap(),
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
    // A holder, since the servers delete the node of a mutex that nobody wants, and a creation below it would fail.
    let mut holder = backend.open(claim()).await.unwrap();
    let answer = holder.contend(Prior::Nothing).await.unwrap();
    assert!(matches!(answer, Answer::Ours(_)), "{answer:?}");
    let waiting = claim();
    let contender = waiting.contender.clone();
    let mut session = backend.open(waiting).await.unwrap();
    let leader_address = ensemble.server(leader).address();
    let mut raw = spawn_blocking(move || Raw::connect(leader_address)).await.unwrap();
    // The first server forwards requests and receives nothing. The leader needs the second server to commit, which
    // takes two delays.
    let to_leader = [&links[followers[0]][leader], &links[followers[1]][leader]];
    to_leader[0].stall_replies();
    to_leader[1].delay(DELAY, Duration::ZERO);
    // The request that creates the node: only that one contains the id.
    let mut forwarded = to_leader[0].hold_next_request_with(&[contender.as_str()]);
    tokio::select! {
        () = forwarded.caught() => forwarded.deliver(),
        answer = session.contend(Prior::Nothing) => panic!("no answer is expected yet: {answer:?}"),
    }
    drop(session);
    second.pass();
    first.refuse();
    first.cut();
    let created_and_deleted = spawn_blocking(move || {
        let mut poll = |nodes: usize| {
            let began = SystemClock.now();
            loop {
                let queue = raw.children(&path);
                if queue.len() == nodes {
                    return;
                }
                let waited = SystemClock.now() - began;
                assert!(waited < WAIT_LIMIT, "broken: not {nodes} nodes in the queue: {queue:?}");
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        poll(2);
        poll(1);
    });
    created_and_deleted.await.unwrap();
}

/// Starts three servers with a proxy for each of them in front of each other one: `links[follower][leader]`.
async fn start_with_links() -> (Ensemble, Vec<Vec<FaultProxy>>) {
    let mut plan = EnsemblePlan::new(3).unwrap();
    let mut links = Vec::new();
    for follower in 0..3 {
        let mut to_others = Vec::new();
        for leader in 0..3 {
            let link = FaultProxy::start(plan.quorum_address(leader)).await.unwrap();
            if leader != follower {
                plan = plan.with_detour(follower, leader, link.address());
            }
            to_others.push(link);
        }
        links.push(to_others);
    }
    // Delays of a few seconds do not end the connection of a follower.
    let plan = (0..3).fold(plan, |plan, server| plan.with_setting(server, "syncLimit=100"));
    (spawn_blocking(|| plan.start().unwrap()).await.unwrap(), links)
}

/// Returns the leader and its followers, once all of them serve clients.
async fn roles(ensemble: &Ensemble) -> (usize, [usize; 2]) {
    let modes = || [0, 1, 2].map(|at| raw::four_letters(ensemble.server(at).address(), "srvr"));
    let began = SystemClock.now();
    loop {
        let is = |mode: &str| modes().map(|answer| answer.contains(&format!("Mode: {mode}")));
        if let ([leader], [one, other]) = (&positions(is("leader"))[..], &positions(is("follower"))[..]) {
            return (*leader, [*one, *other]);
        }
        assert!(SystemClock.now() - began < WAIT_LIMIT, "the ensemble has no leader: {:?}", modes());
        sleep(Duration::from_millis(50)).await;
    }
}

fn positions(flags: [bool; 3]) -> Vec<usize> {
    (0..3).filter(|at| flags[*at]).collect()
}
