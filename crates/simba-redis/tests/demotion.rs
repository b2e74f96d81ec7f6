//! Failover behind one address: new connections reach the new master, old ones stay at the demoted one.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::resp::Reply;
use common::{Admin, SILENCE, Store, lead, long, name, simba, soon, until, wait, with_user};
use simba_core::Lease;
use simba_redis::RedisBackend;
use simba_servers::Setup;
use tokio::net::{TcpListener, TcpStream};

/// An address in front of a server, like a virtual IP or a Kubernetes Service.
struct VirtualAddress {
    address: SocketAddr,
    target: Arc<Mutex<SocketAddr>>,
}

impl VirtualAddress {
    async fn of(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, target) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(target)));
        let current = Arc::clone(&target);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let target = *current.lock().unwrap();
                tokio::spawn(async move {
                    let mut server = TcpStream::connect(target).await?;
                    tokio::io::copy_bidirectional(&mut client, &mut server).await
                });
            }
        });
        Self { address, target }
    }

    /// Directs new connections to another server.
    fn redirect(&self, target: SocketAddr) {
        *self.target.lock().unwrap() = target;
    }
}

fn server(args: &[&str]) -> Store {
    let no_delay = ["--repl-diskless-sync-delay", "0"];
    Store::private(with_user(
        args.iter().chain(&no_delay).fold(Setup::redis(), |setup, arg| setup.with_arg(arg)),
    ))
}

fn replicate(admin: &mut Admin, of: Option<SocketAddr>) {
    let of = of.map(|of| [of.ip().to_string(), of.port().to_string()]);
    let [host, port] = of.unwrap_or_else(|| ["NO", "ONE"].map(String::from));
    assert_eq!(admin.call(&["REPLICAOF", &host, &port]), Reply::Status("OK".into()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handle_leaves_a_demoted_server_behind_the_same_address() {
    let old = server(&[]);
    let new = server(&["--replicaof", "127.0.0.1", &old.address.port().to_string()]);
    let mut admin = old.admin();
    until("the replica is in sync", || {
        admin.call(&["SET", "last-write", "1"]);
        admin.int(&["WAIT", "1", "100"]) == 1
    })
    .await;
    let address = VirtualAddress::of(old.address).await;
    let config = || old.config(address.address).with_timeout(SILENCE);
    let connect = async || RedisBackend::connect(config()).await.unwrap();
    let seconds = Duration::from_secs;
    let lease = Lease::new(seconds(6), seconds(4)).and_then(|lease| lease.with_poll(seconds(60))).unwrap();
    let (one, two, mutex) = (simba(connect().await, lease), simba(connect().await, lease), name());
    let (leader, tenure) = lead(&one, &mutex).await;
    let waiter = wait(&two, &mutex, &mut admin).await;
    // `WAIT` covers the writes of its own connection, and this write comes after the queue entry.
    admin.call(&["SET", "last-write", "2"]);
    assert_eq!(admin.int(&["WAIT", "1", "10000"]), 1, "the replica has the queue");

    replicate(&mut new.admin(), None);
    replicate(&mut admin, Some(new.address));
    address.redirect(new.address);
    let deadline = tenure.deadline();
    until("a leader renews at the new master", || tenure.deadline() > deadline).await;
    assert_eq!(tenure.loss(), None, "broken: a leader survives a failover behind one address");

    leader.stop().await.unwrap();
    let next = soon("a waiter acquires at the new master", waiter.acquired()).await.unwrap();
    assert!(next.token() > tenure.token());
    waiter.stop().await.unwrap();

    // The subscriptions must be at the new master too: otherwise it would skip the waiter as dead.
    // The leader's lease is too long to be the cause of the hand-over.
    let (leader, _) = lead(&one.with_lease(long()), &mutex).await;
    let waiter = wait(&two, &mutex, &mut new.admin()).await;
    let channel = format!("simba:{{{mutex}}}:{}", waiter.id().unwrap());
    let mut admin = new.admin();
    until("a waiter is subscribed at the new master", || {
        let reply = admin.call(&["PUBSUB", "NUMSUB", &channel]);
        reply.array().and_then(|parts| parts[1].int()) == Some(1)
    })
    .await;
    leader.stop().await.unwrap();
    soon("a waiter is woken at the new master", waiter.acquired()).await.unwrap();
}
