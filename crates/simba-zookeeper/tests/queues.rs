//! Rows of the fault matrix about the nodes of a mutex: deleted parents, empty nodes, evictions.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::time::Duration;

use common::peers::{Peer, WAIT_LIMIT, acquired, in_time, long, name, short, with_raw, with_raw_at, within};
use common::{Zookeeper, raw};
use simba_core::Loss;
use simba_core::operate::{EvictIf, Eviction};
use simba_servers::Setup;
use simba_tck::rounds;
use tokio::time::{sleep, timeout};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_51_deleted_parents_are_created_again() {
    // A separate server: on the shared one, other mutexes keep `/simba` in use.
    let server = Setup::zookeeper().start().unwrap();
    let peer = Peer::at(&Zookeeper::at(server.url())).await;
    let mutex = name();
    for _ in 0..rounds() {
        let locker = peer.simba.locker(mutex.clone());
        let guard = in_time("a mutex without a node is locked", locker.lock()).await.unwrap();
        guard.release().await.unwrap();
        let path = format!("/simba/{mutex}");
        with_raw_at(server.address(), move |raw| {
            // Deleted here, unless the server has deleted it before.
            for node in [&*path, "/simba"] {
                let deleted = raw.delete(node);
                assert!([0, raw::NO_NODE].contains(&deleted), "{node} is not deleted: error {deleted}");
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_51_a_leader_keeps_its_tenure_when_the_server_deletes_empty_nodes() {
    let peer = Peer::connect().await;
    let mutex = name();
    let leader = peer.contend(&mutex, long());
    let tenure = acquired(&leader).await;
    let other = name();
    peer.simba.locker(other.clone()).lock().await.unwrap().release().await.unwrap();
    within(WAIT_LIMIT, "the server deletes an empty node", async {
        loop {
            if !with_raw(|raw| raw.children("/simba")).await.contains(&other.to_string()) {
                break;
            }
            sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
    assert!(tenure.is_held());
}

/// The timeout of the operator's session does not tell that of the holder's session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eviction_reports_the_longest_hold_that_the_servers_grant() {
    let server = Setup::zookeeper().with_setting("maxSessionTimeout=150000").start().unwrap();
    let (holder, operator) =
        (Peer::at(&Zookeeper::at(server.url())).await, Peer::at(&Zookeeper::at(server.url())).await);
    let mutex = name();
    let leader = holder.contend(&mutex, long());
    let tenure = acquired(&leader).await;
    let short = operator.simba.locker(name()).with_lease(short());
    let _own_session = short.lock().await.unwrap();
    let evicted = operator.simba.operate().unwrap().evict(&mutex, EvictIf::Any).await.unwrap();
    let Eviction::Freed { owner, window } = evicted else { panic!("it is held: {evicted:?}") };
    assert_eq!((&owner, window), (tenure.contender(), Duration::from_secs(100)));
    let loss = timeout(WAIT_LIMIT, tenure.lost()).await.expect("broken: an evicted holder loses its tenure");
    assert_eq!(loss, Loss::Vanished);
}
