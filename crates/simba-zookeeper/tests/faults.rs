//! Rows of the fault matrix about ZooKeeper's sessions.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::peers::{
    Peer, WAIT_LIMIT, acquired, address, in_time, long, name, nodes, observes, short, with_raw, within,
};
use common::{Zookeeper, ZookeeperStore, raw};
use simba_core::ContenderId;
use simba_core::spi::{Answer, Backend as _, Claim, Holding, Ownership, Prior, Session};
use simba_core::{Clock as _, Lease, Loss, SystemClock};
use simba_servers::{Server, Setup, shared};
use simba_tck::{FaultProxy, Network as _, Proxies, SkewedClock, rounds};
use simba_test_support::QueueStore as _;
use simba_test_support::queue::{HandOver, answered, handed_over_after};
use simba_zookeeper::{ZookeeperBackend, ZookeeperConfig};
use tokio::time::sleep;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_48_after_the_server_ends_a_session_the_tenure_is_lost_and_a_new_session_starts() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    // A server sends nothing on a connection whose session was ended through another connection. A holder is notified
    // by the watch on its node. Without a watch yet, it detects the silence after a third of the session's timeout,
    // which is long before its deadline.
    let lease = Lease::new(Duration::from_secs(9), Duration::from_secs(6)).unwrap();
    for _ in 0..rounds() {
        let mutex = name();
        let leader = one.contend(&mutex, lease);
        let tenure = acquired(&leader).await;
        let next_leader = two.contend(&mutex, lease);
        observes(&next_leader, &tenure).await;
        let path = format!("/simba/{mutex}");
        with_raw(move |raw| {
            let mut nodes = raw.children(&path);
            nodes.sort_by_key(|node| node.rsplit('-').next().unwrap().to_owned());
            let node = format!("{path}/{}", nodes[0]);
            // The owner may reconnect first, so this repeats until the session has ended.
            while let Some(session) = raw.owner(&node) {
                raw::end(address(), session);
            }
        })
        .await;
        let loss = in_time("a holder is notified that its session has ended", tenure.lost()).await;
        assert!(matches!(loss, Loss::TakenBy(_) | Loss::Vanished), "{loss:?}");
        let next = acquired(&next_leader).await;
        assert!(next.token() > tenure.token());
        next_leader.stop().await.unwrap();
        let again = acquired(&leader).await;
        assert!(again.token() > next.token(), "a new session has a new node");
        leader.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_49_a_tenure_survives_a_short_disconnect() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    let mutex = name();
    let leader = one.contend(&mutex, long());
    let tenure = acquired(&leader).await;
    let next_leader = two.contend(&mutex, long());
    observes(&next_leader, &tenure).await;
    for _ in 0..rounds() {
        one.network.stall();
        sleep(Duration::from_secs(1)).await;
        one.network.heal();
    }
    one.network.cut();
    // The session is usable again.
    let other = in_time("a session outlives its connection", one.simba.locker(name()).lock()).await.unwrap();
    other.release().await.unwrap();
    assert_eq!(tenure.loss(), None, "broken: the same tenure continues");
    assert!(!next_leader.is_owner(), "broken: there is one leader");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_49_after_a_loss_the_node_is_deleted_and_the_next_token_is_greater() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    let mutex = name();
    let leader = one.contend(&mutex, short());
    let mut tenure = acquired(&leader).await;
    for round in 0..rounds() {
        let next_leader = (round % 2 == 1).then(|| two.contend(&mutex, short()));
        if let Some(next_leader) = &next_leader {
            observes(next_leader, &tenure).await;
        }
        one.network.stall();
        let loss = within(WAIT_LIMIT, "a leader without a network loses", tenure.lost()).await;
        assert_eq!(loss, Loss::Deadline);
        // A third of the session's timeout is left, so the node still exists.
        one.network.heal();
        let mut token = tenure.token();
        if let Some(next_leader) = next_leader {
            let next = acquired(&next_leader).await;
            assert!(next.token() > token, "broken: {} after {token}", next.token());
            token = next.token();
            next_leader.stop().await.unwrap();
        }
        let again = acquired(&leader).await;
        assert!(again.token() > token, "broken: {} after {token}", again.token());
        tenure = again;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_whose_session_has_expired_reconnects_as_a_waiter() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    let mutex = name();
    let leader = one.contend(&mutex, short());
    let tenure = acquired(&leader).await;
    let next_leader = two.contend(&mutex, short());
    observes(&next_leader, &tenure).await;
    one.network.stall();
    let next = acquired(&next_leader).await;
    sleep(short().total()).await;
    one.network.heal();
    observes(&leader, &next).await;
    next_leader.stop().await.unwrap();
    assert!(acquired(&leader).await.token() > next.token());
}

/// Returns a backend behind a proxy that can hold requests by their content.
async fn behind_proxy() -> (ZookeeperBackend, FaultProxy) {
    let proxy = FaultProxy::start(address()).await.unwrap();
    let url = format!("zookeeper://{}", proxy.address());
    let config = ZookeeperConfig::from_url(&url.parse().unwrap()).unwrap();
    (ZookeeperBackend::connect(config).await.unwrap(), proxy)
}

/// A renewal that needs a reconnect takes one round trip, not two.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_15_after_a_cut_a_renewal_is_answered_in_the_first_round_trip() {
    let (backend, proxy) = behind_proxy().await;
    let mutex = name();
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
    let mut session = backend.open(claim).await.unwrap();
    let Answer::Ours(first) = session.contend(Prior::Nothing).await.unwrap() else { panic!("it is free") };
    proxy.stall_replies();
    proxy.cut();
    let mut renewal = proxy.hold_next_request_with(&[&format!("/simba/{mutex}/")]);
    let sent = async {
        // The session is requested, and no answer arrives before the renewal was sent.
        renewal.caught().await;
        proxy.pass();
        renewal.deliver();
    };
    let renewed = answered(&mut *session, Prior::Held);
    let (renewed, ()) = in_time("a renewal is pipelined", async { tokio::join!(renewed, sent) }).await;
    let Answer::Ours(renewed) = renewed else { panic!("broken: a session outlives its connection") };
    assert_eq!(renewed.token, first.token);
}

/// An answer in the same read as the one that grants the session is handled without waiting for another read.
#[tokio::test]
async fn row_15_answers_in_one_read_are_all_handled() {
    let (backend, proxy) = behind_proxy().await;
    let mutex = name();
    // The answer to a ping would trigger another read. A ping is sent every nine seconds.
    let lease = Lease::new(Duration::from_secs(70), Duration::from_secs(40)).unwrap();
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), lease);
    let mut session = backend.open(claim).await.unwrap();
    session.contend(Prior::Nothing).await.unwrap();
    proxy.stall_replies();
    proxy.cut();
    let mut renewal = proxy.hold_next_request_with(&[&format!("/simba/{mutex}/")]);
    let blocked = async {
        renewal.caught().await;
        proxy.pass();
        renewal.deliver();
        // Block the only thread until both answers have arrived.
        std::thread::sleep(Duration::from_secs(1));
        SystemClock.now()
    };
    let renewed = async { (answered(&mut *session, Prior::Held).await, SystemClock.now()) };
    let ((answer, renewed), arrived) =
        in_time("a renewal is answered", async { tokio::join!(renewed, blocked) }).await;
    assert!(matches!(answer, Answer::Ours(_)));
    let (took, limit) = (renewed - arrived, Duration::from_secs(8));
    assert!(took < limit, "broken: an answer in the buffer is handled within {limit:?}, not after {took:?}");
}

/// The servers may execute the deletion at any time, and must not delete a node that holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_deletion_has_no_answer_is_not_used_again() {
    let (backend, proxy) = behind_proxy().await;
    for _ in 0..rounds() {
        let mutex = name();
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
        let mut session = backend.open(claim).await.unwrap();
        let Answer::Ours(first) = answered(&mut *session, Prior::Nothing).await else { panic!("it is free") };
        let mut deletion = proxy.hold_next_request_with(&[&format!("/simba/{mutex}/")]);
        tokio::select! {
            released = session.release(Holding::Unknown) => panic!("it has no answer: {released:?}"),
            () = in_time("the deletion is sent", deletion.caught()) => {}
        }
        proxy.cut();
        let answer = answered(&mut *session, Prior::Nothing).await;
        let Answer::Ours(next) = answer else { panic!("there is no other contender: {answer:?}") };
        assert!(next.token > first.token, "broken: a new tenure has a new node");
        assert_eq!(nodes(&mutex).await.len(), 1, "broken: the old node is deleted");
    }
}

/// A session is shared by contenders on any runtime.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_outlives_the_runtime_of_its_first_contender() {
    let (backend, _network) = Zookeeper::single().proxied().await;
    let open = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let opened = runtime.block_on(async {
            let claim = Claim::new(name(), ContenderId::generate(), long());
            let mut session = backend.open(claim).await.unwrap();
            let answer = answered(&mut *session, Prior::Nothing).await;
            (session, answer)
        });
        drop(runtime);
        (backend, opened)
    };
    let (_backend, (mut session, answer)) = tokio::task::spawn_blocking(open).await.unwrap();
    let Answer::Ours(first) = answer else { panic!("it is free: {answer:?}") };
    let answer = answered(&mut *session, Prior::Held).await;
    let Answer::Ours(renewed) = answer else { panic!("there is no other contender: {answer:?}") };
    assert_eq!(renewed.token, first.token, "broken: the same tenure continues");
}

/// A check that was sent before the client learns that its session has ended is repeated in the next session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_48_a_renewal_in_flight_of_an_ended_session_finds_no_node() {
    let (backend, network) = Zookeeper::single().proxied().await;
    for _ in 0..rounds() {
        let mutex = name();
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
        let mut session = backend.open(claim).await.unwrap();
        let Answer::Ours(first) = session.contend(Prior::Nothing).await.unwrap() else {
            panic!("it is free")
        };
        let path = format!("/simba/{mutex}");
        with_raw(move |raw| {
            let [node] = &raw.children(&path)[..] else { panic!("one node") };
            let node = format!("{path}/{node}");
            // The owner may reconnect first, so this repeats until the session has ended.
            while let Some(session) = raw.owner(&node) {
                raw::end(address(), session);
            }
        })
        .await;
        network.delay(Duration::from_millis(50), Duration::ZERO);
        network.cut();
        let answer = answered(&mut *session, Prior::Held).await;
        let Answer::Ours(next) = answer else { panic!("there is no other contender: {answer:?}") };
        assert!(next.token > first.token, "broken: a new session has a new node");
        network.heal();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_session_of_a_waiter_is_proven_before_its_turn_comes() {
    // So long that a recent proof suffices for a hand-over even if the machine pauses for two seconds.
    let lease = Lease::new(Duration::from_secs(14), Duration::from_secs(10)).unwrap();
    // By then the proof of the creation has ended, and its rest was too short for a hand-over long before.
    let all = ZookeeperStore::granted(&lease);
    let HandOver { granted, same_entry, .. } = handed_over_after::<ZookeeperStore>(lease, all).await;
    assert!(same_entry, "broken: a waiter keeps its node");
    assert!(granted < all, "broken: the hand-over waited for a quorum call");
    assert!(granted >= all / 2, "broken: {granted:?} of {all:?} is less than half a grant");
}

/// A quorum call does not restart the session's timeout at the leader. Only a reported ping does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_after_a_pause_grants_no_more_than_the_leader_certainly_keeps() {
    let clock = SkewedClock::new(SystemClock);
    let config = ZookeeperConfig::from_url(&shared("SIMBA_TCK_ZOOKEEPER").parse().unwrap()).unwrap();
    let backend = ZookeeperBackend::connect_with_clock(config, Arc::new(clock.clone())).await.unwrap();
    let lease = Lease::new(Duration::from_secs(36), Duration::from_secs(24)).unwrap();
    let mut session = backend.open(Claim::new(name(), ContenderId::generate(), lease)).await.unwrap();
    let mut granted = async |prior| match session.contend(prior).await.unwrap() {
        Answer::Ours(ours) => ours.remaining,
        other => panic!("there is no other contender: {other:?}"),
    };
    let all = lease.total() / 3 * 2;
    let first = granted(Prior::Nothing).await;
    assert!(first <= all && first > all * 9 / 10, "a new session is granted {all:?}, not {first:?}");
    let pause = lease.total() / 2;
    clock.jump(pause);
    let late = granted(Prior::Held).await;
    let most = lease.total() - pause;
    assert!(late <= most, "broken: {late:?} are granted, and the leader may end the session after {most:?}");
    // By then the ping after the pause is answered. It is reported to the leader within a quarter of the timeout.
    sleep(Duration::from_secs(4)).await;
    clock.jump(lease.total() / 4);
    let again = granted(Prior::Held).await;
    assert!(again > all * 9 / 10, "broken: {again:?} of {all:?} are granted after the report to the leader");
}

/// Returns a holder whose session was shortened by a reconnect, its ownership, the server and the network.
async fn shortened(short: Duration) -> (Box<dyn Session>, Ownership, Server, Arc<Proxies>) {
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
    within(WAIT_LIMIT, "a holder gets a hint", session.changed()).await.unwrap();
    (session, first, server, network)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proof_after_a_shorter_grant_is_not_limited_by_it() {
    const SHORT: Duration = Duration::from_secs(6);
    let (mut session, first, _server, _network) = shortened(SHORT).await;
    let over = SystemClock.now() + SHORT;
    while SystemClock.now() < over {
        // As a holder whose earlier calls were not answered.
        let answer = answered(&mut *session, Prior::Unknown).await;
        assert!(matches!(answer, Answer::Ours(_)), "{answer:?}");
        sleep(Duration::from_millis(500)).await;
    }
    let answer = answered(&mut *session, Prior::Held).await;
    let Answer::Ours(ours) = answer else { panic!("there is no other contender: {answer:?}") };
    assert!(!ours.remaining.is_zero(), "broken: a new proof has not ended");
    assert_eq!(ours.token, first.token);
}

/// A holder shortens its tenure without a server, since it may be cut off right after the shorter grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shorter_grant_shortens_the_tenure_without_another_answer() {
    const SHORT: Duration = Duration::from_secs(8);
    let (mut session, first, _server, network) = shortened(SHORT).await;
    network.stall();
    let answer = in_time("no server is needed for it", session.contend(Prior::Held)).await.unwrap();
    let Answer::Ours(ours) = answer else { panic!("there is no other contender: {answer:?}") };
    assert!(ours.remaining <= SHORT, "broken: {:?} are left of a session of {SHORT:?}", ours.remaining);
    assert_eq!(ours.token, first.token);
}
