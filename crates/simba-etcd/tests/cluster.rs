//! Faults of a cluster: its leader killed or standing still, a leader without a quorum.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::time::Duration;

use common::connect;
use common::peer::{contend, name, sees};
use simba_core::{Backend as _, Claim, ContenderId, Contention, Lease, Prior, Simba, Tenure};
use simba_servers::Ensemble;
use simba_tck::rounds;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

const PATIENCE: Duration = Duration::from_secs(30);

/// Long enough for an election, and to find a member that has taken part in it.
fn patient() -> Lease {
    Lease::new(Duration::from_secs(5), Duration::from_secs(5)).unwrap()
}

async fn simba(url: &str) -> Simba {
    Simba::new(connect(url).await.unwrap())
}

async fn leads(contention: &Contention) -> Tenure {
    timeout(PATIENCE, contention.acquired()).await.expect("broken: somebody leads").unwrap()
}

async fn renewed(tenure: &Tenure) {
    let deadline = tenure.deadline();
    let renewed = async {
        while tenure.deadline() <= deadline {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, renewed).await.expect("broken: a holder renews after an election");
}

async fn start() -> Ensemble {
    spawn_blocking(|| Ensemble::start_etcd().unwrap()).await.unwrap()
}

/// How long a leader without followers stays leader in a cluster of [`start_slow`]: it keeps requests that it cannot carry
/// out meanwhile, and answers keep-alives by itself.
const ELECTION: Duration = Duration::from_secs(4);

async fn start_slow() -> Ensemble {
    let slow = |_, setup: simba_servers::Setup| {
        let election = format!("--election-timeout={}", ELECTION.as_millis());
        setup.with_setting("--heartbeat-interval=400").with_setting(election)
    };
    spawn_blocking(move || Ensemble::start_etcd_with(slow).unwrap()).await.unwrap()
}

/// Does something to the cluster, and gives it back.
async fn with<T: Send + 'static>(
    cluster: Ensemble,
    act: impl FnOnce(&mut Ensemble) -> T + Send + 'static,
) -> (Ensemble, T) {
    let work = move || {
        let mut cluster = cluster;
        let done = act(&mut cluster);
        (cluster, done)
    };
    spawn_blocking(work).await.unwrap()
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
    let holder = contend(&one, &mutex, patient());
    let tenure = leads(&holder).await;
    let waiter = contend(&two, &mutex, patient());
    sees(&waiter, &tenure).await;
    for _ in 0..rounds().min(3) {
        let (alive, at) = with(cluster, kill_leader).await;
        renewed(&tenure).await;
        assert_eq!(tenure.loss(), None, "broken: an election costs no holder");
        assert!(!waiter.is_owner(), "broken: nobody else holds");
        cluster = with(alive, move |cluster| cluster.server_mut(at).restart().unwrap()).await.0;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_53_the_leader_is_killed_while_a_mutex_is_waited_for() {
    let mut cluster = start().await;
    let (one, two) = (simba(&cluster.url()).await, simba(&cluster.url()).await);
    for _ in 0..rounds().min(3) {
        let mutex = name();
        let holder = contend(&one, &mutex, patient());
        let tenure = leads(&holder).await;
        let waiter = contend(&two, &mutex, patient().with_poll(Duration::from_secs(60)).unwrap());
        sees(&waiter, &tenure).await;
        let (alive, at) = with(cluster, kill_leader).await;
        timeout(PATIENCE, holder.stop()).await.expect("broken: a holder stops").unwrap();
        let next = leads(&waiter).await;
        assert!(next.token() > tenure.token(), "broken: tokens grow");
        waiter.stop().await.unwrap();
        cluster = with(alive, move |cluster| cluster.server_mut(at).restart().unwrap()).await.0;
    }
}

/// Whoever talks to it hears nothing, and no error either: the others elect another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_53_the_leader_stands_still_while_a_mutex_is_held() {
    let mut cluster = start().await;
    for _ in 0..rounds().min(3) {
        let one = simba(&cluster.url()).await;
        let holder = contend(&one, &name(), patient());
        let tenure = leads(&holder).await;
        let (stands, at) = with(cluster, |cluster| {
            let at = cluster.leader().unwrap();
            cluster.server_mut(at).pause().unwrap();
            at
        })
        .await;
        renewed(&tenure).await;
        assert_eq!(tenure.loss(), None, "broken: a leader that stands still costs no holder");
        cluster = with(stands, move |cluster| cluster.server_mut(at).resume().unwrap()).await.0;
        holder.stop().await.unwrap();
    }
}

/// What is asked for without a quorum is carried out when there is one again, when nobody wants it any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_that_is_made_late_does_not_stay() {
    // A leader that resigned would refuse the request at once.
    let mut cluster = start_slow().await;
    // Longer than the test: no end of a lease explains what follows.
    let long = Lease::new(Duration::from_secs(60), Duration::from_secs(30)).unwrap();
    for round in 0..rounds().clamp(2, 3) {
        let leader = cluster.leader().unwrap();
        let (one, mutex) = (connect(&cluster.server(leader).url()).await.unwrap(), name());
        let claim = |mutex| Claim::new(mutex, ContenderId::generate(), long);
        // The lease stands before.
        one.open(claim(name())).await.unwrap().contend(Prior::Nothing).await.unwrap();
        let mut session = one.open(claim(mutex.clone())).await.unwrap();
        let others: Vec<_> = (0..3).filter(|other| *other != leader).collect();
        let each = others.clone();
        let (alone, ()) = with(cluster, move |cluster| {
            each.iter().for_each(|other| cluster.server_mut(*other).pause().unwrap());
        })
        .await;
        let given_up = timeout(Duration::from_millis(100), session.contend(Prior::Nothing)).await;
        drop(session);
        assert!(
            given_up.is_err(),
            "broken: nobody gets a mutex without a quorum, but the answer is {given_up:?}"
        );
        if round % 2 == 1 {
            // So long that the connection is given up, and with it the hope for an answer.
            sleep(Duration::from_secs(3)).await;
        }
        (cluster, ()) = with(alone, move |cluster| {
            others.iter().for_each(|other| cluster.server_mut(*other).resume().unwrap());
        })
        .await;
        let two = simba(&cluster.url()).await;
        let taken = timeout(PATIENCE, two.locker(mutex).with_lease(long).lock()).await;
        taken.expect("broken: what came late does not stay").unwrap().release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_73_a_leader_without_a_quorum_renews_nothing() {
    let cluster = start_slow().await;
    let at = cluster.leader().unwrap();
    let one = simba(&cluster.server(at).url()).await;
    // No shorter one is granted by servers with elections this long.
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
    // What was under way when they stopped may have been confirmed.
    sleep(Duration::from_millis(200)).await;
    let deadline = tenure.deadline();
    timeout(PATIENCE, tenure.lost()).await.expect("broken: a holder without a quorum has lost");
    assert_eq!(tenure.deadline(), deadline, "broken: a leader without a quorum renewed a lease");
    with(cluster, move |cluster| {
        others.iter().for_each(|other| cluster.server_mut(*other).resume().unwrap());
    })
    .await;
}
