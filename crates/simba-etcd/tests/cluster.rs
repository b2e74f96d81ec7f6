//! Faults of a cluster: its leader killed or paused, a leader without a quorum.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::time::Duration;

use common::{connect, contend, name, sees};
use simba_core::spi::{Backend as _, Claim, Prior};
use simba_core::{Clock as _, ContenderId, Contention, Lease, Simba};
use simba_core::{SystemClock, Tenure};
use simba_servers::Ensemble;
use simba_tck::{FaultProxy, rounds};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

const LIMIT: Duration = Duration::from_secs(30);

/// Returns a lease that outlasts an election on a busy machine and the search for a member that took part in it. It is
/// renewed after three seconds, so that no test waits long for a renewal.
fn election_lease() -> Lease {
    let lease = Lease::new(Duration::from_secs(12), Duration::from_secs(8)).unwrap();
    lease.with_renew_at(Duration::from_secs(3)).unwrap()
}

async fn simba(url: &str) -> Simba {
    simba_tck::explain_failures();
    Simba::new(connect(url).await.unwrap())
}

async fn leads(contention: &Contention) -> Tenure {
    timeout(LIMIT, contention.acquired()).await.expect("broken: a contender acquires the mutex").unwrap()
}

async fn renewed(tenure: &Tenure) {
    let deadline = tenure.deadline();
    let is_renewed = async {
        while tenure.deadline() <= deadline {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(LIMIT, is_renewed).await.expect("broken: a holder renews after an election");
}

async fn start() -> Ensemble {
    spawn_blocking(|| Ensemble::start_etcd().unwrap()).await.unwrap()
}

/// The time that a leader without followers stays leader in a cluster of [`start_with_slow_elections`]. Until then it
/// keeps requests that it cannot execute, and answers keep-alives on its own.
const ELECTION: Duration = Duration::from_secs(4);

async fn start_with_slow_elections() -> Ensemble {
    let slow = |_, setup: simba_servers::Setup| {
        let election = format!("--election-timeout={}", ELECTION.as_millis());
        setup.with_setting("--heartbeat-interval=400").with_setting(election)
    };
    spawn_blocking(move || Ensemble::start_etcd_with(slow).unwrap()).await.unwrap()
}

/// Runs `act` on the cluster in a blocking thread, and returns both.
async fn with<T: Send + 'static>(
    cluster: Ensemble,
    act: impl FnOnce(&mut Ensemble) -> T + Send + 'static,
) -> (Ensemble, T) {
    let task = move || {
        let mut cluster = cluster;
        let done = act(&mut cluster);
        (cluster, done)
    };
    spawn_blocking(task).await.unwrap()
}

fn kill_leader(cluster: &mut Ensemble) -> usize {
    let at = cluster.leader().unwrap();
    cluster.server_mut(at).kill().unwrap();
    at
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_53_the_leader_is_killed_while_a_mutex_is_held() {
    let mut cluster = start().await;
    let (one, two) = (simba(&cluster.url()).await, simba(&cluster.url()).await);
    let mutex = name();
    let holder = contend(&one, &mutex, election_lease());
    let tenure = leads(&holder).await;
    let waiter = contend(&two, &mutex, election_lease());
    sees(&waiter, &tenure).await;
    for _ in 0..rounds().min(3) {
        let (alive, at) = with(cluster, kill_leader).await;
        renewed(&tenure).await;
        assert_eq!(tenure.loss(), None, "broken: an election costs no holder");
        assert!(!waiter.is_owner(), "broken: the mutex has one holder");
        cluster = with(alive, move |cluster| cluster.server_mut(at).restart().unwrap()).await.0;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_53_the_leader_is_killed_while_a_mutex_is_waited_for() {
    let mut cluster = start().await;
    let (one, two) = (simba(&cluster.url()).await, simba(&cluster.url()).await);
    for _ in 0..rounds().min(3) {
        let mutex = name();
        let holder = contend(&one, &mutex, election_lease());
        let tenure = leads(&holder).await;
        let waiter = contend(&two, &mutex, election_lease().with_poll(Duration::from_secs(60)).unwrap());
        sees(&waiter, &tenure).await;
        let (alive, at) = with(cluster, kill_leader).await;
        timeout(LIMIT, holder.stop()).await.expect("broken: a holder stops").unwrap();
        let next = leads(&waiter).await;
        assert!(next.token() > tenure.token(), "broken: tokens grow");
        waiter.stop().await.unwrap();
        cluster = with(alive, move |cluster| cluster.server_mut(at).restart().unwrap()).await.0;
    }
}

/// A paused leader sends neither an answer nor an error. The other members elect another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_53_the_leader_is_paused_while_a_mutex_is_held() {
    let mut cluster = start().await;
    for _ in 0..rounds().min(3) {
        let one = simba(&cluster.url()).await;
        let holder = contend(&one, &name(), election_lease());
        let tenure = leads(&holder).await;
        let (paused, at) = with(cluster, |cluster| {
            let at = cluster.leader().unwrap();
            cluster.server_mut(at).pause().unwrap();
            at
        })
        .await;
        renewed(&tenure).await;
        assert_eq!(tenure.loss(), None, "broken: a paused leader costs no holder");
        cluster = with(paused, move |cluster| cluster.server_mut(at).resume().unwrap()).await.0;
        holder.stop().await.unwrap();
    }
}

/// A request without a quorum is executed when the quorum is back, after its session was dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_entry_that_is_created_late_is_deleted() {
    // A leader that resigned would refuse the request immediately.
    let mut cluster = start_with_slow_elections().await;
    // Longer than the test: the end of a lease cannot delete the entry.
    let long = Lease::new(Duration::from_secs(60), Duration::from_secs(30)).unwrap();
    for round in 0..rounds().clamp(2, 3) {
        let leader = cluster.leader().unwrap();
        let proxy = FaultProxy::start(cluster.server(leader).address()).await.unwrap().for_http2();
        let (one, mutex) = (connect(&format!("etcd://{}", proxy.address())).await.unwrap(), name());
        let claim = |mutex| Claim::new(mutex, ContenderId::generate(), long);
        // The lease is granted before.
        one.open(claim(name())).await.unwrap().contend(Prior::Nothing).await.unwrap();
        let mut session = one.open(claim(mutex.clone())).await.unwrap();
        let others: Vec<_> = (0..3).filter(|other| *other != leader).collect();
        let each = others.clone();
        let (alone, ()) = with(cluster, move |cluster| {
            each.iter().for_each(|other| cluster.server_mut(*other).pause().unwrap());
        })
        .await;
        let (requests, connections) = (proxy.requests(), proxy.accepted());
        let sent = async {
            proxy.until(|counts| counts.requests > requests).await;
            sleep(Duration::from_millis(100)).await;
        };
        tokio::select! {
            biased;
            answer = session.contend(Prior::Nothing) => {
                panic!("broken: no contender acquires without a quorum, but the answer is {answer:?}")
            }
            () = sent => {}
        }
        drop(session);
        if round % 2 == 1 {
            // The connection is given up, and the request is never answered.
            let again = proxy.until(|counts| counts.accepted > connections);
            timeout(LIMIT, again).await.expect("broken: a server without an answer is given up");
        }
        (cluster, _) = with(alone, move |cluster| {
            others.iter().for_each(|other| cluster.server_mut(*other).resume().unwrap());
            // On a busy machine the leader may have resigned meanwhile.
            cluster.leader().unwrap()
        })
        .await;
        let two = simba(&cluster.url()).await;
        let taken = timeout(LIMIT, two.locker(mutex).with_lease(long).lock()).await;
        taken.expect("broken: an entry that is created late is deleted").unwrap().release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_73_a_leader_without_a_quorum_renews_nothing() {
    let cluster = start_with_slow_elections().await;
    let at = cluster.leader().unwrap();
    let one = simba(&cluster.server(at).url()).await;
    // Servers with elections this long grant no shorter lease.
    let lease = Lease::new(Duration::from_secs(3), Duration::from_secs(3)).unwrap();
    let holder = contend(&one, &name(), lease);
    let tenure = leads(&holder).await;
    renewed(&tenure).await;
    let others: Vec<_> = (0..3).filter(|other| *other != at).collect();
    let each = others.clone();
    let (cluster, ()) = with(cluster, move |cluster| {
        each.iter().for_each(|other| cluster.server_mut(*other).pause().unwrap());
    })
    .await;
    let alone = SystemClock.now();
    timeout(LIMIT, tenure.lost()).await.expect("broken: a holder without a quorum has lost");
    // A deadline counts from before its call. A call in flight when the members were paused may have been confirmed.
    let first_without_quorum = alone + (lease.total() - lease.margin());
    assert!(tenure.deadline() < first_without_quorum, "broken: a leader without a quorum renewed a lease");
    with(cluster, move |cluster| {
        others.iter().for_each(|other| cluster.server_mut(*other).resume().unwrap());
    })
    .await;
}
