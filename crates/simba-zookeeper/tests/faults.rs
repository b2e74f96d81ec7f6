//! The rows of the fault matrix about ZooKeeper's sessions and nodes.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use common::raw::{self, Raw};
use common::{Zookeeper, lease};
use simba_core::{Clock, Contention, Lease, Loss, MutexName, Simba, SystemClock, Tenure};
use simba_servers::{Server, Setup, shared};
use simba_tck::{Network, Proxies, StolenTime, rounds};
use tokio::time::{sleep, timeout};

/// Far more than anything takes that takes no time, and far less than a [`long`] lease.
const SOON: Duration = Duration::from_secs(10);

fn long() -> Lease {
    let lease = Lease::new(Duration::from_secs(30), Duration::from_secs(20)).unwrap();
    lease.with_poll(Duration::from_secs(30)).unwrap()
}

fn name() -> MutexName {
    let nonce: String = std::iter::repeat_with(fastrand::alphanumeric).take(12).collect();
    MutexName::new(format!("row-{}", nonce.to_lowercase())).unwrap()
}

fn address() -> SocketAddr {
    shared("SIMBA_TCK_ZOOKEEPER").strip_prefix("zookeeper://").unwrap().parse().unwrap()
}

/// One process at the store.
struct Peer {
    simba: Simba,
    network: Arc<Proxies>,
}

impl Peer {
    async fn connect() -> Self {
        Self::at(&Zookeeper::single()).await
    }

    async fn at(store: &Zookeeper) -> Self {
        let (backend, network) = store.proxied().await;
        Self { simba: Simba::builder(Arc::new(backend)).lease(lease()).build(), network }
    }

    fn contend(&self, mutex: &MutexName, lease: Lease) -> Contention {
        let contention = self.simba.contend(mutex.clone()).with_lease(lease);
        contention.start().unwrap();
        contention
    }
}

async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    timeout(SOON, future).await.unwrap_or_else(|_| panic!("broken: {what} (not within {SOON:?})"))
}

async fn leads(contention: &Contention) -> Tenure {
    soon("somebody leads", contention.acquired()).await.unwrap()
}

/// Waits for a renewal that the server has answered. Who was cut off may still lose the tenure that it has.
async fn renews(leader: &Contention) {
    let renewed = async |tenure: &Tenure| {
        let deadline = tenure.deadline();
        while tenure.deadline() == deadline {
            sleep(Duration::from_millis(1)).await;
        }
    };
    soon("a leader renews", async {
        loop {
            let tenure = leads(leader).await;
            tokio::select! {
                () = renewed(&tenure) => return,
                _ = tenure.lost() => {}
            }
        }
    })
    .await;
}

async fn sees(contention: &Contention, leader: &Tenure) {
    soon("a waiter sees the leader", async {
        while !contention.owner().is_owner(leader.contender()) {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_48_a_session_that_the_server_ends_is_lost_and_begun_anew() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    // A server says nothing on a connection whose session was ended through another one. Who has held for a moment
    // hears it from the watch on its node; who has not, by the silence, after a third of the session's timeout.
    let short = Lease::new(Duration::from_secs(6), Duration::from_secs(4)).unwrap();
    for _ in 0..rounds() {
        let mutex = name();
        let leader = one.contend(&mutex, short);
        let tenure = leads(&leader).await;
        let heir = two.contend(&mutex, short);
        sees(&heir, &tenure).await;
        let path = format!("/simba/{mutex}");
        by_hand(move |raw| {
            let mut nodes = raw.children(&path);
            nodes.sort_by_key(|node| node.rsplit('-').next().unwrap().to_owned());
            let node = format!("{path}/{}", nodes[0]);
            // Its owner may be faster; not for ever.
            while let Some(session) = raw.owner(&node) {
                raw::end(address(), session);
            }
        })
        .await;
        let loss = soon("who lost its session learns of it", tenure.lost()).await;
        assert!(matches!(loss, Loss::TakenBy(_) | Loss::Vanished), "{loss:?}");
        let next = leads(&heir).await;
        assert!(next.token() > tenure.token());
        heir.stop().await.unwrap();
        let again = leads(&leader).await;
        assert!(again.token() > next.token(), "a new session has a new node");
        leader.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_49_after_half_a_timeout_the_same_node_leads_again() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    let mutex = name();
    let leader = one.contend(&mutex, lease());
    let tenure = leads(&leader).await;
    let heir = two.contend(&mutex, lease());
    sees(&heir, &tenure).await;
    for _ in 0..rounds() * 3 {
        // The server's half begins with what it last heard.
        renews(&leader).await;
        one.network.stall();
        sleep(lease().total() / 2).await;
        one.network.heal();
        let again = leads(&leader).await;
        assert_eq!(again.token(), tenure.token(), "the same node leads again");
        assert!(!heir.is_owner(), "nobody else leads");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_out_of_reach_for_long_comes_back_as_a_waiter() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    let mutex = name();
    let leader = one.contend(&mutex, lease());
    let tenure = leads(&leader).await;
    let heir = two.contend(&mutex, lease());
    sees(&heir, &tenure).await;
    one.network.stall();
    let next = leads(&heir).await;
    sleep(lease().total()).await;
    one.network.heal();
    sees(&leader, &next).await;
    heir.stop().await.unwrap();
    assert!(leads(&leader).await.token() > next.token());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_50_a_creation_without_a_reply_leaves_one_node() {
    let peer = Peer::connect().await;
    let mutex = name();
    // The session stands before the reply is lost, and the node of the mutex is there.
    peer.simba.locker(mutex.clone()).lock().await.unwrap().release().await.unwrap();
    for _ in 0..rounds() * 5 {
        let locker = peer.simba.locker(mutex.clone());
        peer.network.lose_next_reply();
        let guard = soon("what was won without a reply is adopted", locker.lock()).await.unwrap();
        assert_eq!(nodes(&mutex).await.len(), 1, "one node for one contender");
        guard.release().await.unwrap();
        assert_eq!(nodes(&mutex).await.len(), 0, "no node for nobody");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_creation_that_is_given_up_leaves_no_node() {
    use simba_core::{Backend as _, Claim, ContenderId, Prior};
    let (backend, network) = Zookeeper::single().proxied().await;
    let mutex = name();
    let claim = || Claim::new(mutex.clone(), ContenderId::generate(), long());
    backend.open(claim()).await.unwrap().contend(Prior::Nothing).await.unwrap();
    for round in 0..rounds() * 10 {
        let mut session = backend.open(claim()).await.unwrap();
        if round % 3 == 0 {
            network.lose_next_reply();
        }
        // Given up at any point, and the session with it; no timeout of a session this long explains what follows.
        let patience = Duration::from_micros(fastrand::u64(0..3_000));
        let _ = timeout(patience, session.contend(Prior::Nothing)).await;
        drop(session);
    }
    let mut session = backend.open(claim()).await.unwrap();
    // Sent, and surely not answered yet.
    assert!(futures_util::FutureExt::now_or_never(session.contend(Prior::Nothing)).is_none());
    drop(session);
    soon("who gave up is gone", async {
        while !nodes(&mutex).await.is_empty() {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

/// The nodes under a mutex, in no order.
async fn nodes(mutex: &MutexName) -> Vec<String> {
    let path = format!("/simba/{mutex}");
    by_hand(move |raw| raw.children(&path)).await
}

/// Does something by hand.
async fn by_hand<T: Send + 'static>(act: impl FnOnce(&mut Raw) -> T + Send + 'static) -> T {
    let work = move || {
        let mut raw = Raw::connect(address());
        let done = act(&mut raw);
        raw.close();
        done
    };
    tokio::task::spawn_blocking(work).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_51_a_node_that_is_deleted_is_lost_at_once() {
    let peer = Peer::connect().await;
    // The connection stands: what wakes everybody when it comes is over.
    let locker = peer.simba.locker(name()).with_lease(long());
    locker.lock().await.unwrap().release().await.unwrap();
    for round in 0..rounds() * 2 {
        let mutex = name();
        // Neither a renewal nor a poll comes in time to explain it.
        let leader = peer.contend(&mutex, long());
        let tenure = leads(&leader).await;
        if round % 2 == 1 {
            // A waiter comes, which a leader hears of.
            let waiter = peer.contend(&mutex, long());
            sees(&waiter, &tenure).await;
            waiter.stop().await.unwrap();
        }
        sleep(Duration::from_millis(fastrand::u64(0..200))).await;
        let path = format!("/simba/{mutex}");
        by_hand(move |raw| {
            let [node] = &raw.children(&path)[..] else { panic!("one node") };
            assert_eq!(raw.delete(&format!("{path}/{node}")), 0);
        })
        .await;
        let loss = soon("a leader without a node has lost", tenure.lost()).await;
        assert_eq!(loss, Loss::Vanished);
        assert!(leads(&leader).await.token() > tenure.token(), "a new node has a new token");
        leader.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_51_parents_that_are_swept_are_made_again() {
    let peer = Peer::connect().await;
    let mutex = name();
    for _ in 0..rounds() {
        let locker = peer.simba.locker(mutex.clone());
        let guard = soon("a mutex without a node is locked", locker.lock()).await.unwrap();
        guard.release().await.unwrap();
        let path = format!("/simba/{mutex}");
        by_hand(move |raw| {
            // By the server, or by a hand that is faster.
            raw.delete(&path);
            raw.delete("/simba");
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_51_a_leader_survives_a_sweep_of_empty_nodes() {
    let peer = Peer::connect().await;
    let mutex = name();
    let leader = peer.contend(&mutex, lease());
    let tenure = leads(&leader).await;
    let other = name();
    peer.simba.locker(other.clone()).lock().await.unwrap().release().await.unwrap();
    soon("an empty node is swept by the server", async {
        loop {
            if !by_hand(|raw| raw.children("/simba")).await.contains(&other.to_string()) {
                break;
            }
            sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
    assert!(tenure.is_held());
}

/// How late every message is in the next one: far more than a noisy machine adds.
const LATE: Duration = Duration::from_millis(300);

/// A renewal that waits for a new connection of its session does not wait for two answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_15_after_a_cut_a_renewal_is_answered_in_the_first_round_trip() {
    use simba_core::{Answer, Backend as _, Claim, ContenderId, Prior};
    let (backend, network) = Zookeeper::single().proxied().await;
    let claim = Claim::new(name(), ContenderId::generate(), long());
    let mut session = backend.open(claim).await.unwrap();
    let Answer::Ours(first) = session.contend(Prior::Nothing).await.unwrap() else { panic!("it is free") };
    network.delay(LATE, Duration::ZERO);
    network.cut();
    let (cut, stolen) = (SystemClock.now(), StolenTime::mark());
    let renewed = soon("a renewal is answered", async {
        loop {
            if let Ok(answer) = session.contend(Prior::Held).await {
                break answer;
            }
        }
    });
    let Answer::Ours(renewed) = renewed.await else { panic!("broken: a session outlives its connection") };
    assert_eq!(renewed.token, first.token);
    let (took, trip) = (SystemClock.now() - cut, LATE * 2);
    assert!(took >= trip, "an answer takes a round trip: {took:?}");
    assert!(took < trip * 3 / 2 + stolen.so_far(), "broken: one round trip answers, not after {took:?}");
}

/// An answer that comes in one piece with the one that grants the session is not left lying until the next one.
#[tokio::test]
async fn row_15_answers_that_come_together_are_all_taken() {
    use simba_core::{Answer, Backend as _, Claim, ContenderId, Prior};
    let (backend, network) = Zookeeper::single().proxied().await;
    let mut session = backend.open(Claim::new(name(), ContenderId::generate(), long())).await.unwrap();
    session.contend(Prior::Nothing).await.unwrap();
    network.delay(Duration::from_millis(50), Duration::ZERO);
    let sent = network.requests();
    network.cut();
    // It is noticed, so that the renewal waits for the next connection.
    sleep(Duration::from_millis(10)).await;
    let stand_still = async {
        while network.requests() < sent + 2 {
            sleep(Duration::from_millis(1)).await;
        }
        // Nothing runs here until both answers have come.
        std::thread::sleep(Duration::from_millis(300));
        (SystemClock.now(), StolenTime::mark())
    };
    let renewed = async {
        loop {
            if let Ok(answer) = session.contend(Prior::Held).await {
                break (answer, SystemClock.now());
            }
        }
    };
    let ((answer, renewed), (came, stolen)) =
        soon("a renewal is answered", async { tokio::join!(renewed, stand_still) }).await;
    assert!(matches!(answer, Answer::Ours(_)));
    let (took, limit) = (renewed - came, Duration::from_secs(1) + stolen.so_far());
    assert!(took < limit, "broken: what has come is taken at once, not after {took:?}");
}

/// A check that was sent before the server said that the session has ended is asked again in the next session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_48_a_renewal_on_its_way_to_a_session_that_has_ended_finds_nothing() {
    use simba_core::{Answer, Backend as _, Claim, ContenderId, Prior};
    let (backend, network) = Zookeeper::single().proxied().await;
    for _ in 0..rounds() {
        let mutex = name();
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), lease());
        let mut session = backend.open(claim).await.unwrap();
        let Answer::Ours(first) = session.contend(Prior::Nothing).await.unwrap() else {
            panic!("it is free")
        };
        let path = format!("/simba/{mutex}");
        by_hand(move |raw| {
            let [node] = &raw.children(&path)[..] else { panic!("one node") };
            let node = format!("{path}/{node}");
            // Its owner may be faster; not for ever.
            while let Some(session) = raw.owner(&node) {
                raw::end(address(), session);
            }
        })
        .await;
        network.delay(Duration::from_millis(50), Duration::ZERO);
        network.cut();
        let answer = soon("a renewal is answered", async {
            loop {
                match session.contend(Prior::Held).await {
                    Ok(answer) => break answer,
                    Err(error) => assert!(error.is_transient(), "broken: {error}"),
                }
            }
        });
        let Answer::Ours(next) = answer.await else { panic!("nobody else wants it") };
        assert!(next.token > first.token, "broken: a new session has a new node");
        network.heal();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_20_a_waiter_whose_watch_is_cut_off_looks_again() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    for _ in 0..rounds() {
        let mutex = name();
        let leader = one.contend(&mutex, long());
        let tenure = leads(&leader).await;
        let heir = two.contend(&mutex, long());
        sees(&heir, &tenure).await;
        // The watch is gone with the connection; its poll is far too long to explain what follows.
        two.network.cut();
        leader.stop().await.unwrap();
        assert!(leads(&heir).await.token() > tenure.token());
        heir.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_25_a_waiter_that_stands_still_blocks_for_a_session_at_most() {
    let (one, two, three) = (Peer::connect().await, Peer::connect().await, Peer::connect().await);
    for _ in 0..rounds() {
        let mutex = name();
        let leader = one.contend(&mutex, lease());
        let tenure = leads(&leader).await;
        let head = two.contend(&mutex, lease());
        sees(&head, &tenure).await;
        let next = three.contend(&mutex, lease());
        sees(&next, &tenure).await;
        two.network.stall();
        leader.stop().await.unwrap();
        let (freed, stolen) = (SystemClock.now(), StolenTime::mark());
        leads(&next).await;
        let took = SystemClock.now() - freed;
        let limit = lease().total() + Duration::from_secs(1) + stolen.so_far();
        assert!(took <= limit, "broken: the next one leads within {limit:?}, not after {took:?}");
        two.network.heal();
        head.stop().await.unwrap();
        next.stop().await.unwrap();
    }
}

/// Waits in one handle behind a holder in another for so long, then is handed the mutex. Gives what was granted, how
/// long ago the waiter joined, and how long all of a lease is.
async fn handed_over_after(lease: Lease, wait: Duration) -> (Duration, Duration, Duration) {
    use simba_core::{Answer, Backend as _, Claim, ContenderId, Holding, Prior};
    let (one, _network) = Zookeeper::single().proxied().await;
    let (two, _other_network) = Zookeeper::single().proxied().await;
    let mutex = name();
    let claim = || Claim::new(mutex.clone(), ContenderId::generate(), lease);
    let (mut holder, mut waiter) = (one.open(claim()).await.unwrap(), two.open(claim()).await.unwrap());
    assert!(matches!(holder.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
    assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
    let joined = SystemClock.now();
    // The hint of a subscription, which is always given.
    waiter.changed().await.unwrap();
    sleep(wait).await;
    holder.release(Holding::Unknown).await.unwrap();
    soon("a release wakes the next", waiter.changed()).await.unwrap();
    let asked = SystemClock.now();
    let Answer::Ours(ours) = waiter.contend(Prior::Nothing).await.unwrap() else {
        panic!("broken: the one who was woken has it")
    };
    (ours.remaining, asked - joined, lease.total() / 3 * 2)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_grants_no_more_than_the_last_quorum_call_left() {
    // Too short a wait for another call than the waiter's own creation.
    let (granted, age, all) = handed_over_after(long(), Duration::from_secs(1)).await;
    assert!(
        granted <= all - age,
        "broken: {granted:?} of {all:?} are granted on what was proven {age:?} ago"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_s_session_is_proven_before_its_turn_comes() {
    // After so long nothing is left of what the creation proved, and too little of it for a hand-over long before.
    let (granted, _, all) = handed_over_after(lease(), lease().total()).await;
    assert!(granted < all, "broken: the turn waited for a quorum call");
    assert!(granted >= all / 2, "broken: {granted:?} of {all:?} are too little to work under");
}

/// How many wait in row 29, and how many hand-overs are counted.
const CROWD: usize = 1_000;
const HANDOVERS: usize = 50;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_29_a_release_among_a_thousand_costs_five_calls() {
    use simba_core::{Answer, Backend as _, Claim, ContenderId, Holding, Prior};
    let server = Setup::zookeeper().start().unwrap();
    let (backend, _network) = Zookeeper::at(server.url()).proxied().await;
    let mutex = name();
    let mut sessions = std::collections::VecDeque::new();
    for at in 0..CROWD {
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
        let mut session = backend.open(claim).await.unwrap();
        let answer = session.contend(Prior::Nothing).await.unwrap();
        assert_eq!(matches!(answer, Answer::Ours(_)), at == 0, "{answer:?}");
        if at > 0 {
            session.changed().await.unwrap();
        }
        sessions.push_back(session);
    }
    let before = received(&server);
    for _ in 0..HANDOVERS {
        let mut leader = sessions.pop_front().unwrap();
        leader.release(Holding::Unknown).await.unwrap();
        let next = &mut sessions[0];
        soon("a release wakes the next", next.changed()).await.unwrap();
        let answer = next.contend(Prior::Nothing).await.unwrap();
        assert!(matches!(answer, Answer::Ours(_)), "broken: the one who was woken has it: {answer:?}");
        // A leader listens for the loss of its node.
        let _ = timeout(Duration::from_millis(5), next.changed()).await;
    }
    let calls = received(&server) - before;
    assert!(
        calls <= 5 * HANDOVERS,
        "broken: at most five calls for a hand-over, not {calls} for {HANDOVERS}"
    );
}

/// How many requests came to a server so far.
fn received(server: &Server) -> usize {
    let said = raw::four_letters(server.address(), "srvr");
    let count = said.lines().find_map(|line| line.strip_prefix("Received: "));
    count.unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_survives_a_restart_of_the_server() {
    let mut server = Setup::zookeeper().start().unwrap();
    let peer = Peer::at(&Zookeeper::at(server.url())).await;
    let mutex = name();
    for kill in [false, true] {
        let leader = peer.contend(&mutex, long());
        let tenure = leads(&leader).await;
        let mut moved = server;
        server = tokio::task::spawn_blocking(move || {
            if kill {
                moved.kill().unwrap();
            }
            moved.restart().unwrap();
            moved
        })
        .await
        .unwrap();
        assert!(tenure.is_held());
        let other = Peer::at(&Zookeeper::at(server.url())).await;
        assert!(other.simba.locker(mutex.clone()).try_lock().await.unwrap().is_none(), "it is still held");
        leader.stop().await.unwrap();
        let next = soon("the store works on", other.simba.locker(mutex.clone()).lock()).await.unwrap();
        assert!(next.token() > tenure.token(), "tokens survive a restart");
        next.release().await.unwrap();
    }
}
