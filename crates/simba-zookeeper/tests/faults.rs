//! The rows of the fault matrix about ZooKeeper's sessions.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::peers::{PATIENCE, Peer, address, by_hand, leads, long, name, sees, soon, sturdy, within};
use common::{Zookeeper, raw};
use simba_core::{Answer, Backend as _, Claim, ContenderId, Holding, Ownership, Prior, Session};
use simba_core::{Clock as _, Lease, Loss, SystemClock};
use simba_servers::{Server, Setup, shared};
use simba_tck::{Network as _, Proxies, SkewedClock, rounds};
use simba_zookeeper::{ZookeeperBackend, ZookeeperConfig};
use tokio::time::sleep;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_48_a_session_that_the_server_ends_is_lost_and_begun_anew() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    // A server says nothing on a connection whose session was ended through another one. Who has held for a moment
    // hears it from the watch on its node; who has not, by the silence, after a third of the session's timeout.
    for _ in 0..rounds() {
        let mutex = name();
        let leader = one.contend(&mutex, sturdy());
        let tenure = leads(&leader).await;
        let next_leader = two.contend(&mutex, sturdy());
        sees(&next_leader, &tenure).await;
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
        let next = leads(&next_leader).await;
        assert!(next.token() > tenure.token());
        next_leader.stop().await.unwrap();
        let again = leads(&leader).await;
        assert!(again.token() > next.token(), "a new session has a new node");
        leader.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_49_a_short_disconnect_costs_no_tenure() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    let mutex = name();
    let leader = one.contend(&mutex, long());
    let tenure = leads(&leader).await;
    let next_leader = two.contend(&mutex, long());
    sees(&next_leader, &tenure).await;
    for _ in 0..rounds() {
        one.network.stall();
        sleep(Duration::from_secs(1)).await;
        one.network.heal();
    }
    one.network.cut();
    sleep(Duration::from_secs(1)).await;
    assert_eq!(tenure.loss(), None, "broken: the same tenure goes on");
    assert!(!next_leader.is_owner(), "broken: nobody else leads");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_49_after_a_loss_the_node_is_given_up_and_the_next_token_is_greater() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    let mutex = name();
    let leader = one.contend(&mutex, sturdy());
    let mut tenure = leads(&leader).await;
    for round in 0..rounds() {
        let next_leader = (round % 2 == 1).then(|| two.contend(&mutex, sturdy()));
        if let Some(next_leader) = &next_leader {
            sees(next_leader, &tenure).await;
        }
        one.network.stall();
        let loss = within(PATIENCE, "a leader out of reach loses", tenure.lost()).await;
        assert_eq!(loss, Loss::Deadline);
        // A third of the session's timeout is left: the node is still there.
        one.network.heal();
        let mut token = tenure.token();
        if let Some(next_leader) = next_leader {
            let next = leads(&next_leader).await;
            assert!(next.token() > token, "broken: {} after {token}", next.token());
            token = next.token();
            next_leader.stop().await.unwrap();
        }
        let again = leads(&leader).await;
        assert!(again.token() > token, "broken: {} after {token}", again.token());
        tenure = again;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_out_of_reach_for_long_comes_back_as_a_waiter() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    let mutex = name();
    let leader = one.contend(&mutex, sturdy());
    let tenure = leads(&leader).await;
    let next_leader = two.contend(&mutex, sturdy());
    sees(&next_leader, &tenure).await;
    one.network.stall();
    let next = leads(&next_leader).await;
    sleep(sturdy().total()).await;
    one.network.heal();
    sees(&leader, &next).await;
    next_leader.stop().await.unwrap();
    assert!(leads(&leader).await.token() > next.token());
}

/// How late every message is in the next one: far more than a noisy machine adds.
const LATE: Duration = Duration::from_millis(1_500);

/// A renewal that waits for a new connection of its session does not wait for two answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_15_after_a_cut_a_renewal_is_answered_in_the_first_round_trip() {
    let (backend, network) = Zookeeper::single().proxied().await;
    let claim = Claim::new(name(), ContenderId::generate(), long());
    let mut session = backend.open(claim).await.unwrap();
    let Answer::Ours(first) = session.contend(Prior::Nothing).await.unwrap() else { panic!("it is free") };
    network.delay(LATE, Duration::ZERO);
    network.cut();
    let cut = SystemClock.now();
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
    assert!(took < trip * 3 / 2, "broken: one round trip answers, not after {took:?}");
}

/// An answer that comes in one piece with the one that grants the session is not left lying until the next one.
#[tokio::test]
async fn row_15_answers_that_come_together_are_all_taken() {
    let (backend, network) = Zookeeper::single().proxied().await;
    // A ping, whose answer would bring the other one along, is sent in every nine seconds.
    let lease = Lease::new(Duration::from_secs(70), Duration::from_secs(40)).unwrap();
    let mut session = backend.open(Claim::new(name(), ContenderId::generate(), lease)).await.unwrap();
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
        SystemClock.now()
    };
    let renewed = async {
        loop {
            if let Ok(answer) = session.contend(Prior::Held).await {
                break (answer, SystemClock.now());
            }
        }
    };
    let ((answer, renewed), came) =
        soon("a renewal is answered", async { tokio::join!(renewed, stand_still) }).await;
    assert!(matches!(answer, Answer::Ours(_)));
    let (took, limit) = (renewed - came, Duration::from_secs(5));
    assert!(took < limit, "broken: what has come is taken at once, not after {took:?}");
}

/// A check that was sent before the server said that the session has ended is asked again in the next session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_48_a_renewal_on_its_way_to_a_session_that_has_ended_finds_nothing() {
    let (backend, network) = Zookeeper::single().proxied().await;
    for _ in 0..rounds() {
        let mutex = name();
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
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

/// Waits in one handle behind a holder in another for so long, then is handed the mutex. Gives what was granted, how
/// long ago the waiter joined, and how long all of a lease is.
async fn handed_over_after(lease: Lease, wait: Duration) -> (Duration, Duration, Duration) {
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
    let (granted, _, all) = handed_over_after(sturdy(), sturdy().total()).await;
    assert!(granted < all, "broken: the turn waited for a quorum call");
    assert!(granted >= all / 2, "broken: {granted:?} of {all:?} are too little to work under");
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

/// A quorum call does not restart the session's timeout at the leader. What was sent before a pause does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_after_a_pause_grants_no_more_than_the_leader_surely_keeps() {
    let clock = SkewedClock::new(SystemClock);
    let config = ZookeeperConfig::from_url(&shared("SIMBA_TCK_ZOOKEEPER").parse().unwrap()).unwrap();
    let backend = ZookeeperBackend::connect_with_clock(config, Arc::new(clock.clone())).await.unwrap();
    let lease = Lease::new(Duration::from_secs(36), Duration::from_secs(24)).unwrap();
    let mut session = backend.open(Claim::new(name(), ContenderId::generate(), lease)).await.unwrap();
    let mut granted = async |prior| match session.contend(prior).await.unwrap() {
        Answer::Ours(ours) => ours.remaining,
        other => panic!("nobody else wants it: {other:?}"),
    };
    let all = lease.total() / 3 * 2;
    let first = granted(Prior::Nothing).await;
    assert!(first <= all && first > all * 9 / 10, "a new session is granted {all:?}, not {first:?}");
    let pause = lease.total() / 2;
    clock.jump(pause);
    let late = granted(Prior::Held).await;
    let most = lease.total() - pause;
    assert!(late <= most, "broken: {late:?} are granted, and the leader may end the session after {most:?}");
    // The ping after the pause is reported to the leader within a quarter of the timeout.
    sleep(Duration::from_secs(2)).await;
    clock.jump(lease.total() / 4);
    let again = granted(Prior::Held).await;
    assert!(again > all * 9 / 10, "broken: {again:?} of {all:?} are granted once the leader has heard of it");
}

/// A holder whose session was granted for less at a reconnect, the server, and the network between them.
async fn granted_for_less(short: Duration) -> (Box<dyn Session>, Ownership, Server, Arc<Proxies>) {
    let server = Setup::zookeeper().start().unwrap();
    let (backend, network) = Zookeeper::at(server.url()).proxied().await;
    let lease = Lease::new(Duration::from_secs(70), Duration::from_secs(40)).unwrap();
    let mut session = backend.open(Claim::new(name(), ContenderId::generate(), lease)).await.unwrap();
    let Answer::Ours(first) = session.contend(Prior::Nothing).await.unwrap() else { panic!("it is free") };
    assert!(first.remaining > short * 2);
    let settings = server.dir().join("zoo.cfg");
    let text = std::fs::read_to_string(&settings).unwrap();
    std::fs::write(&settings, format!("{text}maxSessionTimeout={}\n", short.as_millis())).unwrap();
    let server = tokio::task::spawn_blocking(move || {
        let mut server = server;
        server.restart().unwrap();
        server
    })
    .await
    .unwrap();
    within(PATIENCE, "a holder gets a hint", session.changed()).await.unwrap();
    (session, first, server, network)
}

/// A fresh proof is not shortened by a cut from before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proof_after_a_shorter_grant_is_not_cut_by_it() {
    const SHORT: Duration = Duration::from_secs(6);
    let (mut session, first, _server, _network) = granted_for_less(SHORT).await;
    let over = SystemClock.now() + SHORT;
    while SystemClock.now() < over {
        // As a holder whose calls were not answered.
        let answer = soon("a holder is answered", session.contend(Prior::Unknown)).await.unwrap();
        assert!(matches!(answer, Answer::Ours(_)), "{answer:?}");
        sleep(Duration::from_millis(500)).await;
    }
    let answer = soon("a holder is answered", session.contend(Prior::Held)).await.unwrap();
    let Answer::Ours(ours) = answer else { panic!("nobody else wants it: {answer:?}") };
    assert!(!ours.remaining.is_zero(), "broken: a fresh proof lasts");
    assert_eq!(ours.token, first.token);
}

/// The first thing that a holder can do about it needs no server: it may be cut off right after the grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_was_granted_for_less_is_shorter_without_another_answer() {
    const SHORT: Duration = Duration::from_secs(8);
    let (mut session, first, _server, network) = granted_for_less(SHORT).await;
    network.stall();
    let answer = soon("a holder needs no server to know", session.contend(Prior::Held)).await.unwrap();
    let Answer::Ours(ours) = answer else { panic!("nobody else wants it: {answer:?}") };
    assert!(ours.remaining <= SHORT, "broken: {:?} are left of a session of {SHORT:?}", ours.remaining);
    assert_eq!(ours.token, first.token);
}
