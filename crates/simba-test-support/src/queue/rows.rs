//! The rows that are the same for every store whose mutexes are queues.

use std::collections::VecDeque;
use std::time::Duration;

use simba_core::spi::{Answer, Backend as _, Claim, Holding, Prior};
use simba_core::{Clock as _, ContenderId, ErrorKind, Loss, SystemClock};
use simba_servers::shared;
use simba_tck::{Network as _, rounds};
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};

use super::{HandOver, Peer, QueueServer, QueueStore, answered, connect, handed_over_after, leads};
use crate::{SOON, long, name, sees, soon};

/// Expands to one test per row that is the same for every [`QueueStore`](crate::QueueStore).
#[macro_export]
macro_rules! queue_rows {
    ($store:ty) => {
        $crate::queue_rows!(@each $store;
            row_20_a_waiter_whose_watch_is_cut_off_reads_the_queue_again
            row_25_a_paused_waiter_blocks_the_queue_for_one_lease_at_most
            row_29_a_release_among_a_thousand_costs_five_calls
            row_50_an_entry_whose_reply_is_lost_is_created_once
            row_51_a_holder_whose_entry_is_deleted_loses_without_a_renewal
            a_dropped_join_leaves_no_entry
            a_hand_over_grants_no_more_than_the_rest_of_the_last_confirmed_renewal
            a_hold_survives_a_restart_of_the_server
            a_closed_port_a_silent_server_and_an_unknown_host_are_unavailable
            a_closed_backend_returns_closed
        );
    };
    (@each $store:ty; $($row:ident)*) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $row() {
            $crate::queue::rows::$row::<$store>().await;
        })*
    };
}

/// Row 20: a connection breaks while the waiter watches. After the reconnect, the waiter reads the queue again.
pub async fn row_20_a_waiter_whose_watch_is_cut_off_reads_the_queue_again<S: QueueStore>() {
    let (one, two) = (Peer::<S>::connect().await, Peer::<S>::connect().await);
    for _ in 0..rounds() {
        let mutex = name();
        let leader = one.contend(&mutex, long());
        let tenure = leads::<S>(&leader).await;
        let waiter = two.contend(&mutex, long());
        sees(&waiter, &tenure).await;
        // The watch ends with the connection. The poll interval is too long to explain the acquisition.
        two.network.cut();
        leader.stop().await.unwrap();
        assert!(leads::<S>(&waiter).await.token() > tenure.token());
        waiter.stop().await.unwrap();
    }
}

/// Row 25: the first waiter is paused. The next one acquires when the lease of the first one has ended.
pub async fn row_25_a_paused_waiter_blocks_the_queue_for_one_lease_at_most<S: QueueStore>() {
    let (one, two, three) =
        (Peer::<S>::connect().await, Peer::<S>::connect().await, Peer::<S>::connect().await);
    for _ in 0..rounds() {
        let mutex = name();
        let leader = one.contend(&mutex, long());
        let tenure = leads::<S>(&leader).await;
        let head = two.contend(&mutex, S::short());
        sees(&head, &tenure).await;
        let next = three.contend(&mutex, long());
        sees(&next, &tenure).await;
        two.network.stall();
        leader.stop().await.unwrap();
        let freed = SystemClock.now();
        // The end of the head's lease wakes the next one: no other lease ends, and no poll is due, within the limit.
        leads::<S>(&next).await;
        let took = SystemClock.now() - freed;
        assert!(took <= SOON, "broken: the next waiter acquires within {SOON:?}, not after {took:?}");
        two.network.heal();
        head.stop().await.unwrap();
        next.stop().await.unwrap();
    }
}

/// The number of sessions in row 29, and the number of hand-overs that are counted.
const SESSIONS: usize = 1_000;
const HANDOVERS: usize = 50;

/// Row 29: a release among a thousand sessions wakes one waiter, and needs at most five calls.
pub async fn row_29_a_release_among_a_thousand_costs_five_calls<S: QueueStore>() {
    let server = S::setup().start().unwrap();
    let (backend, _network) = QueueServer::<S>::at(server.url()).proxied().await;
    let mutex = name();
    let mut sessions = VecDeque::new();
    for at in 0..SESSIONS {
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
        let mut session = backend.open(claim).await.unwrap();
        let answer = answered(&mut *session, Prior::Nothing).await;
        assert_eq!(matches!(answer, Answer::Ours(_)), at == 0, "{answer:?}");
        if at > 0 {
            session.changed().await.unwrap();
        }
        sessions.push_back(session);
    }
    let before = S::received(&server);
    for _ in 0..HANDOVERS {
        let mut leader = sessions.pop_front().unwrap();
        leader.release(Holding::Unknown).await.unwrap();
        let next = &mut sessions[0];
        soon("a release wakes the next waiter", next.changed()).await.unwrap();
        let answer = answered(&mut **next, Prior::Nothing).await;
        assert!(matches!(answer, Answer::Ours(_)), "broken: the waiter that was woken acquires: {answer:?}");
        // A holder watches its entry.
        let _ = timeout(Duration::from_millis(5), next.changed()).await;
    }
    let calls = S::received(&server) - before;
    assert!(calls <= 5 * HANDOVERS, "broken: at most five calls per hand-over, not {calls} for {HANDOVERS}");
}

/// Row 50: the reply to the creation of an entry is lost. The session adopts the entry and creates no other.
pub async fn row_50_an_entry_whose_reply_is_lost_is_created_once<S: QueueStore>() {
    let peer = Peer::<S>::connect().await;
    let mutex = name();
    // Connects and gets its session before a reply is lost.
    peer.simba.locker(mutex.clone()).lock().await.unwrap().release().await.unwrap();
    for _ in 0..rounds() * 5 {
        let locker = peer.simba.locker(mutex.clone());
        peer.network.lose_next_reply();
        let guard = soon("an acquisition without a reply is adopted", locker.lock()).await.unwrap();
        assert_eq!(S::entries(&mutex).await.len(), 1, "one entry for one contender");
        guard.release().await.unwrap();
        assert_eq!(S::entries(&mutex).await.len(), 0, "no entry without a contender");
    }
}

/// Row 51: an operator deletes the entry of the holder. The holder is notified before its next renewal.
pub async fn row_51_a_holder_whose_entry_is_deleted_loses_without_a_renewal<S: QueueStore>() {
    let peer = Peer::<S>::connect().await;
    // Establishes the connection first: a new connection notifies all subscribers.
    peer.simba.locker(name()).lock().await.unwrap().release().await.unwrap();
    for round in 0..rounds() * 2 {
        let mutex = name();
        // Neither a renewal nor a poll is due in time to explain the loss.
        let leader = peer.contend(&mutex, long());
        let tenure = leads::<S>(&leader).await;
        if round % 2 == 1 {
            // The leader may be notified of a waiter that joins.
            let waiter = peer.contend(&mutex, long());
            sees(&waiter, &tenure).await;
            waiter.stop().await.unwrap();
        }
        sleep(Duration::from_millis(fastrand::u64(0..800))).await;
        S::delete_entry(&mutex).await;
        let loss = soon("a leader without an entry loses", tenure.lost()).await;
        assert_eq!(loss, Loss::Vanished);
        assert!(leads::<S>(&leader).await.token() > tenure.token(), "a new entry has a new token");
        leader.stop().await.unwrap();
    }
}

/// A session that is dropped while it joins leaves nothing in the queue, at any point of the join.
pub async fn a_dropped_join_leaves_no_entry<S: QueueStore>() {
    let (backend, network) = QueueServer::<S>::single().proxied().await;
    let mutex = name();
    let claim = || Claim::new(mutex.clone(), ContenderId::generate(), long());
    backend.open(claim()).await.unwrap().contend(Prior::Nothing).await.unwrap();
    for round in 0..rounds() * 10 {
        let mut session = backend.open(claim()).await.unwrap();
        if round % 3 == 0 {
            network.lose_next_reply();
        }
        // Dropped at any point. The lease is so long that its end does not explain the deletion.
        let limit = Duration::from_micros(fastrand::u64(0..3_000));
        let _ = timeout(limit, session.contend(Prior::Nothing)).await;
        drop(session);
    }
    // A lost reply breaks the connection, and a reply that is still to be lost would break the next.
    network.heal();
    let mut other = backend.open(Claim::new(name(), ContenderId::generate(), long())).await.unwrap();
    answered(&mut *other, Prior::Nothing).await;
    let mut session = backend.open(claim()).await.unwrap();
    // The request is sent, and its reply does not arrive.
    network.stall_replies();
    assert!(timeout(Duration::ZERO, session.contend(Prior::Nothing)).await.is_err());
    drop(session);
    network.heal();
    // Entries that are created late are deleted too: none exists one and two seconds later.
    for _ in 0..3 {
        soon("the entry of a dropped session is deleted", async {
            while !S::entries(&mutex).await.is_empty() {
                sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        sleep(Duration::from_secs(1)).await;
    }
}

/// A grant counts from the last time that a quorum confirmed the waiter's session.
pub async fn a_hand_over_grants_no_more_than_the_rest_of_the_last_confirmed_renewal<S: QueueStore>() {
    // The wait is too short for another confirmation than that of the waiter's own entry.
    let HandOver { granted, age, .. } = handed_over_after::<S>(long(), Duration::from_secs(1)).await;
    let all = S::granted(&long());
    assert!(granted <= all - age, "broken: {granted:?} of {all:?} are granted, confirmed {age:?} ago");
}

/// A hold survives the end of the server's process, whether it is terminated or killed.
pub async fn a_hold_survives_a_restart_of_the_server<S: QueueStore>() {
    let mut server = S::setup().start().unwrap();
    let peer = Peer::at(&QueueServer::<S>::at(server.url())).await;
    let mutex = name();
    for kill in [false, true] {
        let leader = peer.contend(&mutex, long());
        let tenure = leads::<S>(&leader).await;
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
        let other = Peer::at(&QueueServer::<S>::at(server.url())).await;
        assert!(other.simba.locker(mutex.clone()).try_lock().await.unwrap().is_none(), "it is still held");
        leader.stop().await.unwrap();
        let next = soon("the server works again", other.simba.locker(mutex.clone()).lock()).await.unwrap();
        assert!(next.token() > tenure.token(), "tokens survive a restart");
        next.release().await.unwrap();
    }
}

/// A connect to a server that cannot be reached ends with `Unavailable`.
pub async fn a_closed_port_a_silent_server_and_an_unknown_host_are_unavailable<S: QueueStore>() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = listener.local_addr().unwrap();
    for address in ["127.0.0.1:1".to_owned(), silent.to_string(), "no-such-host.invalid".to_owned()] {
        let url = format!("{}://{address}", S::SCHEME);
        let error = soon("a connect ends", connect::<S>(&url)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    }
}

/// A closed backend refuses every call.
pub async fn a_closed_backend_returns_closed<S: QueueStore>() {
    let backend = connect::<S>(&shared(S::SHARED)).await.unwrap();
    backend.close().await;
    let error = backend.operate().unwrap().list().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
}
