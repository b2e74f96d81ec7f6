//! Loss of a master behind sentinels and in a cluster, and migration of a slot.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::future_not_send, reason = "test code")]

mod common;

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use common::resp::Reply;
use common::{Admin, ELECTION, Group, PASSWORD, SILENCE, lead, long, name, simba, soon, until, within};
use simba_core::{Clock, Lease, Loss, MutexName, SystemClock};
use simba_redis::{RedisBackend, RedisConfig};
use simba_servers::Setup;
use simba_tck::rounds;

/// Milliseconds after which the servers treat a master as dead: more than a [`lease`], and more than a pause of the
/// machine.
const DOWN_AFTER: &str = "4000";

/// A lease that survives a machine that pauses for two seconds.
fn lease() -> Lease {
    Lease::new(Duration::from_millis(1500), Duration::from_secs(2)).unwrap()
}

impl Nodes for Group {}

/// Access to single nodes.
trait Nodes {
    /// Returns the process id of the node at this address.
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

/// Returns whether the server's replication info contains the text.
fn reports(address: SocketAddr, text: &str) -> bool {
    let info = Admin::at(address).text(&["INFO", "replication"]);
    info.is_some_and(|info| info.contains(text))
}

/// Stops the server that has the mutex. Checks that the holder loses in time, and that a contender leads soon after the
/// election of a new master, which `promoted` waits for.
async fn lose_master(
    group: &Group,
    mutex: &MutexName,
    old: SocketAddr,
    promoted: impl AsyncFn() -> SocketAddr,
) {
    // With the default timeout, since the stopped server has to be noticed.
    let connect = async || RedisBackend::connect(group.config("")).await.unwrap();
    let (one, two) = (simba(connect().await, lease()), simba(connect().await, lease()));
    let (leader, tenure) = lead(&one, mutex).await;
    let waiter = two.contend(mutex.clone());
    waiter.start().unwrap();
    until("a waiter sees the leader", || waiter.owner().is_owner(tenure.contender())).await;
    let pid = group.pid(old);
    signal(&pid, "-STOP");
    let lost = async {
        let loss = within(ELECTION, "a holder without a store loses", tenure.lost()).await;
        (loss, SystemClock.now() - tenure.deadline())
    };
    let elected = async {
        let new = within(ELECTION, "a new master is elected", promoted()).await;
        (new, Instant::now())
    };
    let ((loss, late), (new, since)) = tokio::join!(lost, elected);
    assert_eq!(loss, Loss::Deadline, "broken: a holder that cannot renew loses at the deadline");
    assert!(late < Duration::from_secs(4), "broken: a loss is reported on time, not {late:?} late");
    let next = async {
        tokio::select! {
            biased;
            next = leader.acquired() => next,
            next = waiter.acquired() => next,
        }
    };
    let next = soon("a contender leads at the new master", next).await.unwrap();
    let took = since.elapsed();
    assert!(next.token() > tenure.token(), "broken: tokens grow across a failover");
    println!("{old} -> {new}: new leader after {took:?}");
    signal(&pid, "-CONT");
    leader.stop().await.unwrap();
    waiter.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_of_the_sentinels_is_followed() {
    let setup = Setup::redis_sentinel().with_env("DOWN_AFTER", DOWN_AFTER);
    let group = Group::private(setup.with_env("FAILOVER_TIMEOUT", "1500"));
    for _ in 0..rounds() {
        let (mutex, old) = (name(), group.master());
        lose_master(&group, &mutex, old, async || {
            loop {
                let master = group.master();
                if master != old && reports(master, "role:master") {
                    return master;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        within(ELECTION, "the old master comes back as a replica", async {
            while !reports(group.master(), "state=online") {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await;
        // The sentinels start no other failover within twice the time of one.
        tokio::time::sleep(Duration::from_secs(3)).await;
    }
}

/// Returns the master of the mutex's slot, as the first node other than `except` sees it.
fn master_of(group: &Group, mutex: &MutexName, except: Option<SocketAddr>) -> Option<SocketAddr> {
    let queried = group.servers().into_iter().find(|server| Some(*server) != except)?;
    let mut admin = Admin::at(queried);
    let slot = admin.int(&["CLUSTER", "KEYSLOT", &format!("simba:{{{mutex}}}")]);
    let slots = admin.call(&["CLUSTER", "SLOTS"]);
    slots.array()?.iter().find_map(|range| {
        let [first, last, master, ..] = range.array()? else { return None };
        let [host, port, ..] = master.array()? else { return None };
        let here = (first.int()?..=last.int()?).contains(&slot);
        // All nodes are on this machine.
        let host = host.text().filter(|host| *host != "?").unwrap_or("127.0.0.1");
        here.then(|| format!("{host}:{}", port.int().unwrap_or(0)).parse().ok())?
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loss_of_a_cluster_node_is_survived() {
    let group = Group::private(Setup::redis_cluster().with_env("NODE_TIMEOUT", DOWN_AFTER));
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
            while !(reports(old, "master_link_status:up") && reports(master, "state=online")) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_keeps_its_mutex_while_its_slot_migrates() {
    migrate_slots(&Group::private(Setup::redis_cluster()), rounds()).await;
}

/// A cluster may name its nodes without a host, or by an unknown host name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_without_a_host_are_found() {
    let group = Group::private(Setup::redis_cluster());
    for endpoint in ["unknown-endpoint", "hostname"] {
        for server in group.servers() {
            let set = ["CONFIG", "SET", "cluster-preferred-endpoint-type", endpoint];
            assert_eq!(Admin::at(server).call(&set), Reply::Status("OK".into()));
        }
        migrate_slots(&group, 1).await;
    }
}

async fn migrate_slots(group: &Group, rounds: u32) {
    let seconds = Duration::from_secs;
    let simba = simba(group.backend().await, Lease::new(seconds(3), seconds(7)).unwrap());
    for _ in 0..rounds {
        let mutex = name();
        let (leader, tenure) = lead(&simba, &mutex).await;
        let from = master_of(group, &mutex, None).unwrap();
        let masters = group.servers().into_iter().filter(|server| reports(*server, "role:master"));
        let masters: Vec<_> = masters.collect();
        let to = *masters.iter().find(|master| **master != from).unwrap();
        let renewed = async |expectation: &str| {
            let deadline = tenure.deadline();
            until(expectation, || tenure.deadline() > deadline).await;
        };
        migrate_slot(&mutex, from, to, &masters, renewed).await;
        renewed("it is renewed at the new node").await;
        assert_eq!(tenure.loss(), None, "broken: a holder survives the migration of its slot");
        leader.stop().await.unwrap();
        assert_eq!(
            Admin::at(to).int(&["EXISTS", &format!("simba:{{{mutex}}}")]),
            0,
            "broken: it is released at the new node"
        );
    }
}

async fn migrate_slot(
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
    assert_eq!(target.call(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &source_id]), ok);
    assert_eq!(source.call(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &target_id]), ok);
    // A migration may be interrupted and stay in this state for longer than any lease.
    renewed("it is renewed before its keys migrate").await;
    let (host, port) = (to.ip().to_string(), to.port().to_string());
    let keys = source.call(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
    for key in keys.array().unwrap() {
        source.call(&["MIGRATE", &host, &port, key.text().unwrap(), "0", "5000"]);
    }
    renewed("it is renewed after its keys migrated").await;
    let nodes =
        [to, from].into_iter().chain(masters.iter().copied().filter(|node| *node != to && *node != from));
    for node in nodes {
        assert_eq!(Admin::at(node).call(&["CLUSTER", "SETSLOT", &slot, "NODE", &target_id]), ok);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_handle_has_one_connection_to_each_master() {
    let group = Group::shared("SIMBA_TCK_REDIS_CLUSTER");
    // Other tests use the same cluster, so a separate user identifies the connections of this one.
    let user = name().to_string();
    group.servers().into_iter().for_each(|server| Admin::at(server).create_user_as(&user));
    let url = group.url.to_string().replacen("://", &format!("://{user}:{PASSWORD}@"), 1);
    let config = RedisConfig::from_url(&url.parse().unwrap()).unwrap().with_timeout(SILENCE);
    let simba = simba(RedisBackend::connect(config).await.unwrap(), long());
    let mut guards = Vec::new();
    for _ in 0..200 {
        guards.push(soon("a free mutex is acquired", simba.locker(name()).lock()).await.unwrap());
    }
    let masters = group.servers().into_iter().filter(|server| reports(*server, "role:master")).count();
    // A connection that has just been closed may still be listed.
    until("200 mutexes need one connection to each master", || connections(&group, &user) == masters).await;
    for guard in guards {
        guard.release().await.unwrap();
    }
}

fn connections(group: &Group, user: &str) -> usize {
    let count = |server: SocketAddr| {
        let list = Admin::at(server).text(&["CLIENT", "LIST"]).unwrap_or_default();
        list.lines().filter(|line| line.contains(&format!("user={user}"))).count()
    };
    group.servers().into_iter().map(count).sum()
}
