//! A master that goes, behind sentinels and in a cluster; a slot that moves.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::future_not_send, reason = "a test, by hand")]

mod common;

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use common::resp::Reply;
use common::{Admin, Group, lead, lease, name, simba, soon, until, within};
use simba_core::{Clock, Lease, Loss, MutexName, SystemClock};
use simba_servers::Setup;
use simba_tck::rounds;

/// How long the servers may take to agree on a new master.
const ELECTION: Duration = Duration::from_secs(30);

impl Nodes for Group {}

/// What a test does to single nodes.
trait Nodes {
    /// The process of the node at this address.
    fn pid(&self, address: SocketAddr) -> String {
        let info = Admin::at(address).text(&["INFO", "server"]).expect("a server");
        let pid = info.lines().find_map(|line| line.strip_prefix("process_id:")).expect("a pid");
        pid.trim().into()
    }
}

fn signal(pid: &str, signal: &str) {
    let status = Command::new("kill").args([signal, pid]).status().expect("kill");
    assert!(status.success(), "{pid} runs");
}

/// Whether the server says so much about its replication.
fn says(address: SocketAddr, words: &str) -> bool {
    let info = Admin::at(address).text(&["INFO", "replication"]);
    info.is_some_and(|info| info.contains(words))
}

/// Stops the server that has the mutex; the holder loses in time, and somebody leads soon after there is a new
/// one. `promoted` waits for that one.
async fn lose_master(
    group: &Group,
    mutex: &MutexName,
    old: SocketAddr,
    promoted: impl AsyncFn() -> SocketAddr,
) {
    let (one, two) = (simba(group.backend().await, lease()), simba(group.backend().await, lease()));
    let (leader, tenure) = lead(&one, mutex).await;
    let waiter = two.contend(mutex.clone());
    waiter.start().unwrap();
    until("a waiter sees the leader", || waiter.owner().is_owner(tenure.contender())).await;
    let pid = group.pid(old);
    signal(&pid, "-STOP");
    let falls = async {
        let loss = within(ELECTION, "a holder without a store loses", tenure.lost()).await;
        (loss, SystemClock.now() - tenure.deadline())
    };
    let rises = async {
        let new = within(ELECTION, "a new master is chosen", promoted()).await;
        (new, Instant::now())
    };
    let ((loss, late), (new, since)) = tokio::join!(falls, rises);
    assert_eq!(loss, Loss::Deadline, "broken: who cannot renew loses at the deadline");
    assert!(late < Duration::from_secs(4), "broken: a loss is told on time, not {late:?} late");
    let next = async {
        tokio::select! {
            biased;
            next = leader.acquired() => next,
            next = waiter.acquired() => next,
        }
    };
    let next = soon("somebody leads at the new master", next).await.unwrap();
    let took = since.elapsed();
    assert!(next.token() > tenure.token(), "broken: tokens grow over a failover");
    println!("{old} -> {new}: led again after {took:?}");
    signal(&pid, "-CONT");
    leader.stop().await.unwrap();
    waiter.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_of_the_sentinels_is_followed() {
    let setup = Setup::redis_sentinel().with_env("DOWN_AFTER", "1500").with_env("FAILOVER_TIMEOUT", "1500");
    let group = Group::private(setup);
    for _ in 0..rounds() {
        let (mutex, old) = (name(), group.master());
        lose_master(&group, &mutex, old, async || {
            loop {
                let master = group.master();
                if master != old && says(master, "role:master") {
                    return master;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        within(ELECTION, "the old master comes back as a replica", async {
            while !says(group.master(), "state=online") {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await;
        // The sentinels start no other failover within twice the time of one.
        tokio::time::sleep(Duration::from_secs(3)).await;
    }
}

/// The master of the mutex's slot, as the node that answers first sees it.
fn master_of(group: &Group, mutex: &MutexName, but: Option<SocketAddr>) -> Option<SocketAddr> {
    let asked = group.servers().into_iter().find(|server| Some(*server) != but)?;
    let mut admin = Admin::at(asked);
    let slot = admin.int(&["CLUSTER", "KEYSLOT", &format!("simba:{{{mutex}}}")]);
    let slots = admin.ask(&["CLUSTER", "SLOTS"]);
    slots.array()?.iter().find_map(|range| {
        let [first, last, master, ..] = range.array()? else { return None };
        let [host, port, ..] = master.array()? else { return None };
        let here = (first.int()?..=last.int()?).contains(&slot);
        // Its nodes are all on this machine.
        let host = host.text().filter(|host| *host != "?").unwrap_or("127.0.0.1");
        here.then(|| format!("{host}:{}", port.int().unwrap_or(0)).parse().ok())?
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_loss_of_a_node_of_a_cluster_is_survived() {
    let group = Group::private(Setup::redis_cluster().with_env("NODE_TIMEOUT", "1500"));
    for _ in 0..rounds() {
        let mutex = name();
        let old = master_of(&group, &mutex, None).unwrap();
        lose_master(&group, &mutex, old, async || {
            loop {
                match master_of(&group, &mutex, Some(old)) {
                    Some(master) if master != old => return master,
                    _ => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        })
        .await;
        let master = master_of(&group, &mutex, Some(old)).unwrap();
        within(ELECTION, "the old master comes back as a replica", async {
            while !(says(old, "master_link_status:up") && says(master, "state=online")) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moves_takes_its_holder_along() {
    slots_move(&Group::private(Setup::redis_cluster()), rounds()).await;
}

/// A cluster may name its nodes by no host, or by a name that they do not have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_without_a_host_are_found() {
    let group = Group::private(Setup::redis_cluster());
    for endpoint in ["unknown-endpoint", "hostname"] {
        for server in group.servers() {
            let set = ["CONFIG", "SET", "cluster-preferred-endpoint-type", endpoint];
            assert_eq!(Admin::at(server).ask(&set), Reply::Status("OK".into()));
        }
        slots_move(&group, 1).await;
    }
}

async fn slots_move(group: &Group, rounds: u32) {
    let seconds = Duration::from_secs;
    let simba = simba(group.backend().await, Lease::new(seconds(3), seconds(2)).unwrap());
    for _ in 0..rounds {
        let mutex = name();
        let (leader, tenure) = lead(&simba, &mutex).await;
        let from = master_of(group, &mutex, None).unwrap();
        let masters = group.servers().into_iter().filter(|server| says(*server, "role:master"));
        let masters: Vec<_> = masters.collect();
        let to = *masters.iter().find(|master| **master != from).unwrap();
        let renewed = async |promise: &str| {
            let deadline = tenure.deadline();
            until(promise, || tenure.deadline() > deadline).await;
        };
        move_slot(&mutex, from, to, &masters, renewed).await;
        renewed("it is renewed where it is now").await;
        assert_eq!(tenure.loss(), None, "broken: a slot that moves costs no holder");
        leader.stop().await.unwrap();
        assert_eq!(
            Admin::at(to).int(&["EXISTS", &format!("simba:{{{mutex}}}")]),
            0,
            "broken: it is freed there"
        );
    }
}

async fn move_slot(
    mutex: &MutexName,
    from: SocketAddr,
    to: SocketAddr,
    masters: &[SocketAddr],
    renewed: impl AsyncFn(&str),
) {
    let (mut source, mut target) = (Admin::at(from), Admin::at(to));
    let slot = source.int(&["CLUSTER", "KEYSLOT", &format!("simba:{{{mutex}}}")]).to_string();
    let id = |admin: &mut Admin| admin.text(&["CLUSTER", "MYID"]).unwrap();
    let (source_id, target_id) = (id(&mut source), id(&mut target));
    let ok = Reply::Status("OK".into());
    assert_eq!(target.ask(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &source_id]), ok);
    assert_eq!(source.ask(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &target_id]), ok);
    // A move may be interrupted and stay like this for longer than any lease.
    renewed("it is renewed before its keys move").await;
    let (host, port) = (to.ip().to_string(), to.port().to_string());
    let keys = source.ask(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
    for key in keys.array().unwrap() {
        source.ask(&["MIGRATE", &host, &port, key.text().unwrap(), "0", "5000"]);
    }
    renewed("it is renewed after its keys moved").await;
    let nodes =
        [to, from].into_iter().chain(masters.iter().copied().filter(|node| *node != to && *node != from));
    for node in nodes {
        assert_eq!(Admin::at(node).ask(&["CLUSTER", "SETSLOT", &slot, "NODE", &target_id]), ok);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_is_reached_by_one_connection_to_each_master() {
    let group = Group::shared("SIMBA_TCK_REDIS_CLUSTER");
    let before = connections(&group);
    let simba = simba(group.backend().await, lease());
    let mut guards = Vec::new();
    for _ in 0..200 {
        guards.push(soon("a free mutex is acquired", simba.locker(name()).lock()).await.unwrap());
    }
    let opened = connections(&group).saturating_sub(before);
    // Other tests use the same cluster; far fewer than mutexes all the same.
    assert!(opened < 50, "broken: 200 mutexes take a connection to each master, not {opened}");
    for guard in guards {
        guard.release().await.unwrap();
    }
}

fn connections(group: &Group) -> usize {
    let count = |server: SocketAddr| {
        let list = Admin::at(server).text(&["CLIENT", "LIST"]).unwrap_or_default();
        list.lines().filter(|line| line.contains(&format!("user={}", common::USER))).count()
    };
    group.servers().into_iter().map(count).sum()
}
