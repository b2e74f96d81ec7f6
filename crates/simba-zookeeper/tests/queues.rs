//! The rows of the fault matrix about the nodes of a mutex: creations, deletions, watches, waiters.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::time::Duration;

use common::peers::{PATIENCE, Peer, by_hand, by_hand_at, leads, long, name, nodes, sees, soon, sturdy};
use common::{Zookeeper, raw};
use simba_core::operate::{EvictIf, Eviction};
use simba_core::{Answer, Backend as _, Claim, ContenderId, Holding, Prior};
use simba_core::{Clock as _, Loss, SystemClock};
use simba_servers::{Server, Setup};
use simba_tck::{Network as _, rounds};
use tokio::time::{sleep, timeout};

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
    // A server of its own: elsewhere other mutexes keep `/simba` alive.
    let server = Setup::zookeeper().start().unwrap();
    let peer = Peer::at(&Zookeeper::at(server.url())).await;
    let mutex = name();
    for _ in 0..rounds() {
        let locker = peer.simba.locker(mutex.clone());
        let guard = soon("a mutex without a node is locked", locker.lock()).await.unwrap();
        guard.release().await.unwrap();
        let path = format!("/simba/{mutex}");
        by_hand_at(server.address(), move |raw| {
            // Deleted here, unless the server was faster.
            for node in [&*path, "/simba"] {
                let deleted = raw.delete(node);
                assert!([0, raw::NO_NODE].contains(&deleted), "{node} is not deleted: error {deleted}");
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_51_a_leader_survives_a_sweep_of_empty_nodes() {
    let peer = Peer::connect().await;
    let mutex = name();
    let leader = peer.contend(&mutex, long());
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_20_a_waiter_whose_watch_is_cut_off_looks_again() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    for _ in 0..rounds() {
        let mutex = name();
        let leader = one.contend(&mutex, long());
        let tenure = leads(&leader).await;
        let next_leader = two.contend(&mutex, long());
        sees(&next_leader, &tenure).await;
        // The watch is gone with the connection; its poll is far too long to explain what follows.
        two.network.cut();
        leader.stop().await.unwrap();
        assert!(leads(&next_leader).await.token() > tenure.token());
        next_leader.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_25_a_waiter_that_stands_still_blocks_for_a_session_at_most() {
    let (one, two, three) = (Peer::connect().await, Peer::connect().await, Peer::connect().await);
    for _ in 0..rounds() {
        let mutex = name();
        let leader = one.contend(&mutex, sturdy());
        let tenure = leads(&leader).await;
        let head = two.contend(&mutex, sturdy());
        sees(&head, &tenure).await;
        let next = three.contend(&mutex, sturdy());
        sees(&next, &tenure).await;
        two.network.stall();
        leader.stop().await.unwrap();
        let freed = SystemClock.now();
        leads(&next).await;
        let (took, limit) = (SystemClock.now() - freed, sturdy().total() * 2);
        assert!(took <= limit, "broken: the next one leads within {limit:?}, not after {took:?}");
        two.network.heal();
        head.stop().await.unwrap();
        next.stop().await.unwrap();
    }
}

/// How many wait in row 29, and how many hand-overs are counted.
const CROWD: usize = 1_000;
const HANDOVERS: usize = 50;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_29_a_release_among_a_thousand_costs_five_calls() {
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

/// The operator's own session says nothing about the holder's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eviction_reports_the_longest_hold_that_the_servers_grant() {
    let server = Setup::zookeeper().with_setting("maxSessionTimeout=60000").start().unwrap();
    let (holder, operator) =
        (Peer::at(&Zookeeper::at(server.url())).await, Peer::at(&Zookeeper::at(server.url())).await);
    let mutex = name();
    let leader = holder.contend(&mutex, long());
    let tenure = leads(&leader).await;
    let short = operator.simba.locker(name()).with_lease(sturdy());
    let _own_session = short.lock().await.unwrap();
    let evicted = operator.simba.operate().unwrap().evict(&mutex, EvictIf::Any).await.unwrap();
    let Eviction::Freed { owner, window } = evicted else { panic!("it is held: {evicted:?}") };
    assert_eq!((&owner, window), (tenure.contender(), Duration::from_secs(40)));
    let loss = tokio::time::timeout(PATIENCE, tenure.lost()).await.expect("broken: an evicted holder loses");
    assert_eq!(loss, Loss::Vanished);
}
