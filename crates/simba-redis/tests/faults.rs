//! Fault matrix: calls, events and the store itself.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use common::resp::Reply;
use common::{Encrypted, SILENCE, Store, case, lead, lease, long, name, simba, soon, until, wait, with_user};
use simba_core::spi::{Answer, Backend as _, Claim, Holding, Prior};
use simba_core::{ContenderId, ErrorKind, Lease, Loss};
use simba_redis::{RedisBackend, RedisConfig};
use simba_servers::Setup;
use simba_tck::{Connection, FaultProxy, Fixture, Network, Profile, async_trait, rounds};
use tokio::sync::mpsc;

fn store() -> Store {
    Store::private(Setup::redis()).with_long_timeout()
}

/// A server that is killed and restarted.
struct Restarting {
    store: Store,
    survives: bool,
}

#[async_trait]
impl Fixture for Restarting {
    async fn connect(&self) -> Connection {
        self.store.connect().await
    }

    fn profile(&self) -> Profile {
        Profile::default().with_survives_restart(self.survives)
    }

    async fn restart(&self) -> bool {
        let mut server = self.store.server();
        server.kill().expect("a server can be killed");
        server.restart().expect("a server can be restarted");
        true
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_18_acquisition_executed_after_the_stop_ends_with_its_lease() {
    for _ in 0..rounds() {
        case(&store(), "faults", "a_late_request_is_undone").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_19_renewal_in_flight_does_not_outlive_the_release() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    for _ in 0..rounds() * 100 {
        let mutex = name();
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
        let mut session = backend.open(claim).await.unwrap();
        session.contend(Prior::Nothing).await.unwrap();
        // Sent, and dropped before its reply.
        tokio::select! {
            biased;
            _ = session.contend(Prior::Held) => {}
            () = std::future::ready(()) => {}
        }
        session.release(Holding::Unknown).await.unwrap();
        assert_eq!(admin.int(&["EXISTS", &format!("simba:{{{mutex}}}")]), 0, "broken: the mutex is released");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_20_waiters_are_woken_after_a_resubscription() {
    let store = store();
    let mut admin = store.admin();
    let (two, network) = store.proxied().await;
    let (one, two) = (simba(store.backend().await, long()), simba(two, long()));
    for _ in 0..rounds() {
        let mutex = name();
        let (leader, _) = lead(&one, &mutex).await;
        let waiter = wait(&two, &mutex, &mut admin).await;
        // The message is published while there is no subscription: only the call after the resubscription can acquire.
        Network::refuse(&*network);
        let channels = format!("simba:{{{mutex}}}:*");
        until("the subscription is lost", || {
            admin.call(&["PUBSUB", "CHANNELS", &channels]) == Reply::Array(vec![])
        })
        .await;
        leader.stop().await.unwrap();
        network.pass();
        soon("a resubscribed waiter contends again", waiter.acquired()).await.unwrap();
        waiter.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_21_without_any_wake_up_the_poll_hands_over() {
    let store = store();
    let (one, two) = (simba(store.backend().await, lease()), simba(store.backend().await, lease()));
    assert_eq!(
        store.admin().call(&["ACL", "SETUSER", common::USER, "-subscribe"]),
        Reply::Status("OK".into())
    );
    for _ in 0..rounds() {
        let mutex = name();
        let (leader, tenure) = lead(&one, &mutex).await;
        let waiter = two.contend(mutex);
        waiter.start().unwrap();
        until("a waiter sees the leader", || waiter.owner().is_owner(tenure.contender())).await;
        leader.stop().await.unwrap();
        soon("the poll hands over", waiter.acquired()).await.unwrap();
        waiter.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_22_no_event_changes_the_holder() {
    let store = store();
    let mut admin = store.admin();
    let (one, two) = (simba(store.backend().await, long()), simba(store.backend().await, long()));
    let mutex = name();
    let (leader, tenure) = lead(&one, &mutex).await;
    let waiter = wait(&two, &mutex, &mut admin).await;
    let (holder, other) = (leader.id().unwrap(), waiter.id().unwrap());
    let key = format!("simba:{{{mutex}}}");
    for _ in 0..rounds() * 20 {
        for id in [holder.as_str(), other.as_str(), "stranger@host"] {
            for channel in
                [key.clone(), format!("{key}:{holder}"), format!("{key}:{other}"), format!("{key}:owner")]
            {
                admin.int(&["PUBLISH", &channel, &format!("acquired@@{id}")]);
                admin.int(&["PUBLISH", &channel, &format!("released@@{id}")]);
            }
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert_eq!(tenure.loss(), None, "broken: no event ends a tenure");
        assert!(leader.is_owner() && !waiter.is_owner(), "broken: no event changes the holder");
    }
    assert_eq!(leader.tenure().unwrap().token(), tenure.token(), "broken: no event starts a tenure");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_31_restart_without_persistence_loses_the_holder_and_no_token() {
    for _ in 0..rounds() {
        let store = Store::private(with_user(Setup::redis())).with_long_timeout();
        let fixture = Restarting { store, survives: false };
        case(&fixture, "faults", "a_restart_of_the_store_is_survived").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_32_restart_with_persistence_keeps_the_holder() {
    for _ in 0..rounds() {
        let durable = ["--appendonly", "yes", "--appendfsync", "always"];
        let setup = durable.into_iter().fold(Setup::redis(), Setup::with_arg);
        let fixture =
            Restarting { store: Store::private(with_user(setup)).with_long_timeout(), survives: true };
        case(&fixture, "faults", "a_restart_of_the_store_is_survived").await;
    }
}

/// Starts a master, and a replica behind a proxy.
async fn pair() -> (Store, Store, FaultProxy) {
    // By default the master waits five seconds for other replicas.
    let no_delay = ["--repl-diskless-sync-delay", "0"].into_iter().fold(Setup::redis(), Setup::with_arg);
    let master = Store::private(no_delay);
    let link = FaultProxy::start(master.address).await.expect("a proxy");
    let port = link.address().port().to_string();
    let replica = ["--replicaof", "127.0.0.1", &port].into_iter().fold(Setup::redis(), Setup::with_arg);
    (master, Store::private(replica), link)
}

/// Waits until the replica confirms a write. For its master it is online earlier, while it is still loading.
async fn caught_up(master: &Store) {
    let mut admin = master.admin();
    until("the replica is in sync", || {
        assert_eq!(admin.call(&["SET", "last-write", "1"]), Reply::Status("OK".into()));
        admin.int(&["WAIT", "1", "100"]) == 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_33_tokens_grow_across_a_failover_that_loses_writes() {
    for _ in 0..rounds() {
        let (master, replica, link) = pair().await;
        caught_up(&master).await;
        let mutex = name();
        let before = simba(master.backend().await, long());
        link.stall();
        let lost = before.locker(mutex.clone()).lock().await.unwrap().token();
        master.server().kill().unwrap();
        let mut admin = replica.admin();
        assert_eq!(admin.call(&["REPLICAOF", "NO", "ONE"]), Reply::Status("OK".into()));
        let after = simba(replica.backend().await, long());
        let next = soon("the new master serves", after.locker(mutex).lock()).await.unwrap();
        assert!(next.token() > lost, "broken: tokens grow across a failover that lost the last one");
    }
}

/// Connects a backend whose acquisitions need one replica, after the replica is in sync.
async fn backend_with_wait_replicas(master: &Store) -> RedisBackend {
    caught_up(master).await;
    // A replica that pauses for two seconds still confirms in time.
    master.clone().with_keys("wait_replicas=1&wait_timeout=2250ms").backend().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_33_acquisition_that_no_replica_has_is_released() {
    let (master, _replica, link) = pair().await;
    let simba = simba(backend_with_wait_replicas(&master).await, long());
    for _ in 0..rounds() {
        let mutex = name();
        let locker = simba.locker(mutex.clone()).with_patience(Duration::ZERO);
        soon("a replica in sync has it", locker.lock()).await.unwrap().release().await.unwrap();
        link.stall();
        let error = soon("a disconnected replica is reported", locker.try_lock()).await.unwrap_err();
        link.pass();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "broken: {error}");
        assert!(error.to_string().contains("0 of 1 replicas"), "broken: the error names the cause: {error}");
        let key = format!("simba:{{{mutex}}}");
        assert_eq!(master.admin().int(&["EXISTS", &key]), 0, "broken: the failed acquisition is released");
        caught_up(&master).await;
    }
}

/// A dropped call may have acquired the mutex. The call that finds it held must wait for the replicas too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_33_acquisition_by_a_dropped_call_needs_its_replicas_too() {
    let store = store();
    let backend = store.clone().with_keys("wait_replicas=1&wait_timeout=50ms").backend().await;
    let (mutex, mut admin) = (name(), store.admin());
    let key = format!("simba:{{{mutex}}}");
    let mut session = backend.open(Claim::new(mutex, ContenderId::generate(), long())).await.unwrap();
    let acquired = async {
        while admin.int(&["EXISTS", &key]) == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        biased;
        () = acquired => {}
        answer = session.contend(Prior::Nothing) => panic!("there is no replica: {answer:?}"),
    }
    let error = session.contend(Prior::Unknown).await.unwrap_err();
    assert!(error.to_string().contains("0 of 1 replicas"), "broken: {error}");
    assert_eq!(store.admin().int(&["EXISTS", &key]), 0, "broken: the failed acquisition is released");
}

/// The fence of a holder is lost. A renewal would write a new token that no replica has. The holder's work is running,
/// so the mutex stays held until the deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_33_renewal_without_a_fence_neither_acquires_nor_releases() {
    let (master, _replica, link) = pair().await;
    let backend = backend_with_wait_replicas(&master).await;
    let (mutex, mut admin) = (name(), master.admin());
    let key = format!("simba:{{{mutex}}}");
    let fence = format!("{key}:fence");
    let mut session = backend.open(Claim::new(mutex, ContenderId::generate(), long())).await.unwrap();
    let Answer::Ours(before) = session.contend(Prior::Nothing).await.unwrap() else { panic!("it was free") };
    link.stall();
    assert_eq!(admin.int(&["DEL", &fence]), 1);
    let error = session.contend(Prior::Held).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(admin.int(&["EXISTS", &fence]), 0, "broken: no token is written that no replica has");
    assert_eq!(admin.int(&["EXISTS", &key]), 1, "broken: a held mutex is not released");
    link.pass();
    let lapsed = session.contend(Prior::Lapsed(before.token.unwrap())).await.unwrap();
    assert!(matches!(lapsed, Answer::Ours(after) if after.token > before.token), "it is acquired anew");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_33_renewal_of_a_missing_key_does_not_acquire() {
    let (master, _replica, link) = pair().await;
    let backend = backend_with_wait_replicas(&master).await;
    let (mutex, mut admin) = (name(), master.admin());
    let key = format!("simba:{{{mutex}}}");
    let mut session = backend.open(Claim::new(mutex, ContenderId::generate(), long())).await.unwrap();
    let Answer::Ours(before) = session.contend(Prior::Nothing).await.unwrap() else { panic!("it was free") };
    link.stall();
    assert_eq!(admin.int(&["DEL", &key]), 1);
    let renewed = soon("a renewal is answered", session.contend(Prior::Held)).await.unwrap();
    assert_eq!(renewed, Answer::Vacant, "broken: no replica would have the acquisition");
    assert_eq!(admin.int(&["EXISTS", &key]), 0, "broken: a renewal acquires nothing");
    link.pass();
    let again = soon("it is acquired again", session.contend(Prior::Nothing)).await.unwrap();
    assert!(matches!(again, Answer::Ours(after) if after.token > before.token), "broken: tokens grow");
}

/// The holder learns of the loss from the renewal. It leads again, with a greater token, once a replica has that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_33_leader_whose_key_is_missing_acquires_again_with_its_replicas() {
    let (master, _replica, link) = pair().await;
    caught_up(&master).await;
    let backend = master.clone().with_keys("wait_replicas=1&wait_timeout=250ms").backend().await;
    let (simba, mutex, mut admin) = (simba(backend, often_renewed()), name(), master.admin());
    let (leader, tenure) = lead(&simba, &mutex).await;
    link.stall();
    assert_eq!(admin.int(&["DEL", &format!("simba:{{{mutex}}}")]), 1);
    assert_eq!(soon("the loss is reported", tenure.lost()).await, Loss::Vanished);
    let alone = tokio::time::timeout(Duration::from_secs(1), leader.acquired()).await;
    assert!(alone.is_err(), "broken: it leads under a token that no replica has");
    link.pass();
    let again = soon("it is acquired again", leader.acquired()).await.unwrap();
    assert!(again.token() > tenure.token(), "broken: tokens grow");
    leader.stop().await.unwrap();
}

/// Without a replica every acquisition waits for `wait_timeout`. Forty of them must not delay a renewal by the sum,
/// which is longer than the lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_33_leader_survives_acquisitions_that_wait_for_replicas() {
    let (master, _replica, link) = pair().await;
    caught_up(&master).await;
    let backend = master.clone().with_keys("wait_replicas=1&wait_timeout=500ms").backend().await;
    let seconds = Duration::from_secs;
    let simba = simba(backend, Lease::new(seconds(6), seconds(4)).unwrap());
    let (leader, tenure) = lead(&simba, &name()).await;
    link.stall();
    let locks = (0..40).map(|_| {
        let locker = simba.locker(name());
        async move { locker.try_lock().await.err().map(|error| error.kind()) }
    });
    let kinds = soon("calls without a replica fail", futures_util::future::join_all(locks)).await;
    assert_eq!(kinds, vec![Some(ErrorKind::Unavailable); 40], "there is no replica");
    let deadline = tenure.deadline();
    until("a leader renews", || tenure.deadline() > deadline).await;
    assert_eq!(tenure.loss(), None, "broken: a leader survives calls that wait for replicas");
    leader.stop().await.unwrap();
}

fn is_waiting_for_replicas(master: &Store) -> bool {
    let clients = master.admin().text(&["INFO", "clients"]).unwrap();
    clients.lines().any(|line| line == "blocked_clients:1")
}

/// The renewals are answered while the server executes a `WAIT`, so none of them is behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_33_renewals_are_answered_while_acquisitions_wait_for_replicas() {
    let (master, _replica, link) = pair().await;
    let backend = std::sync::Arc::new(backend_with_wait_replicas(&master).await);
    let open = async || backend.open(Claim::new(name(), ContenderId::generate(), long())).await.unwrap();
    let mut held = Vec::new();
    for _ in 0..10 {
        let mut session = open().await;
        assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
        held.push(session);
    }
    link.stall();
    let mut locks = tokio::task::JoinSet::new();
    for _ in 0..40 {
        let mut session = open().await;
        locks.spawn(async move { session.contend(Prior::Nothing).await });
    }
    until("an acquisition waits for a replica", || is_waiting_for_replicas(&master)).await;
    for session in &mut held {
        let renewed = soon("a renewal is answered", session.contend(Prior::Held)).await.unwrap();
        assert!(matches!(renewed, Answer::Ours(_)));
    }
    assert!(locks.try_join_next().is_none(), "broken: a renewal was behind the wait of an acquisition");
    assert!(is_waiting_for_replicas(&master), "broken: a renewal was behind the wait of an acquisition");
    link.pass();
    while let Some(lock) = soon("all locks are answered", locks.join_next()).await {
        assert!(matches!(lock.unwrap().unwrap(), Answer::Ours(_)));
    }
}

/// An acquisition that the server has not executed yet, because it is behind a `WAIT`, is undone by the release that
/// follows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_33_acquisition_dropped_behind_a_wait_for_replicas_is_released() {
    let (master, _replica, link) = pair().await;
    let backend = backend_with_wait_replicas(&master).await;
    let open = async |mutex| backend.open(Claim::new(mutex, ContenderId::generate(), long())).await.unwrap();
    let (mutex, mut other) = (name(), open(name()).await);
    link.stall();
    let waiting = tokio::spawn(async move { other.contend(Prior::Nothing).await });
    until("an acquisition waits for a replica", || is_waiting_for_replicas(&master)).await;
    let mut session = open(mutex.clone()).await;
    let sent = Duration::from_millis(100);
    assert!(
        tokio::time::timeout(sent, session.contend(Prior::Nothing)).await.is_err(),
        "it is behind the wait"
    );
    let released = tokio::spawn(async move { session.release(Holding::Unknown).await });
    tokio::time::sleep(sent).await;
    link.pass();
    assert!(matches!(waiting.await.unwrap().unwrap(), Answer::Ours(_)));
    soon("the release is answered", released).await.unwrap().unwrap();
    let key = format!("simba:{{{mutex}}}");
    assert_eq!(master.admin().int(&["EXISTS", &key]), 0, "broken: the dropped acquisition is released");
}

/// Forwards connections to a server, and reports for each one whether its client has reset it.
fn start_relay(server: SocketAddr) -> (SocketAddr, mpsc::UnboundedReceiver<bool>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (address, (report, reports)) = (listener.local_addr().unwrap(), mpsc::unbounded_channel());
    // Ends with the process.
    thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            let (mut server, report) = (TcpStream::connect(server).unwrap(), report.clone());
            let (mut replies, mut to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            thread::spawn(move || std::io::copy(&mut replies, &mut to_client));
            thread::spawn(move || {
                let ended = std::io::copy(&mut client, &mut server);
                let _ = server.shutdown(Shutdown::Both);
                report.send(ended.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset))
            });
        }
    });
    (address, reports)
}

/// After a graceful close, the kernel would still deliver an acquisition whose caller gave up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connection_with_calls_in_flight_is_reset() {
    let store = Store::shared();
    store.admin().create_user();
    for encrypted in [false, true] {
        let server = if encrypted { Encrypted::shared().address() } else { store.address };
        let (relay, mut reports) = start_relay(server);
        let proxy = FaultProxy::start(relay).await.unwrap();
        let keys = "&tls_server_name=localhost&connect_timeout=10s";
        let config = match encrypted {
            true => RedisConfig::from_url(&Encrypted::url(proxy.address(), keys)).unwrap(),
            false => store.config(proxy.address()),
        };
        let backend = RedisBackend::connect(config.with_timeout(Duration::from_secs(3))).await.unwrap();
        let mut session = backend.open(Claim::new(name(), ContenderId::generate(), long())).await.unwrap();
        assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
        proxy.stall_replies();
        let error = soon("a call without a reply fails", session.contend(Prior::Unknown)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        let was_reset = soon("the connection ends", reports.recv()).await.unwrap();
        assert!(was_reset, "broken: a connection with calls in flight is reset, encrypted {encrypted}");
        proxy.pass();
        soon("the backend reconnects", session.release(Holding::Unknown)).await.unwrap();
        while reports.try_recv().is_ok() {}
        backend.close().await;
        let was_reset = soon("the connection ends", reports.recv()).await.unwrap();
        assert!(!was_reset, "broken: a handle is closed gracefully, encrypted {encrypted}");
    }
}

/// A lease that is renewed often, and that survives a pause of the machine.
fn often_renewed() -> Lease {
    lease().with_renew_at(Duration::from_millis(400)).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_34_leader_survives_flushed_scripts() {
    let store = store();
    let mut admin = store.admin();
    let simba = simba(store.backend().await, often_renewed());
    let (leader, tenure) = lead(&simba, &name()).await;
    for _ in 0..rounds() * 3 {
        let deadline = tenure.deadline();
        assert_eq!(admin.call(&["SCRIPT", "FLUSH"]), Reply::Status("OK".into()));
        until("a leader renews", || tenure.deadline() > deadline).await;
    }
    assert_eq!(tenure.loss(), None, "broken: a leader survives flushed scripts");
    leader.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_35_holder_notices_a_missing_or_overwritten_key() {
    let store = store();
    let mut admin = store.admin();
    let simba = simba(store.backend().await, often_renewed());
    for _ in 0..rounds() {
        let faults: [fn(&str) -> Vec<String>; 3] = [
            |_| vec!["FLUSHALL".into()],
            |key| vec!["DEL".into(), key.into()],
            |key| ["SET", key, "7:7@stranger", "PX", "60000"].map(Into::into).to_vec(),
        ];
        for (at, fault) in faults.into_iter().enumerate() {
            let mutex = name();
            let (leader, tenure) = lead(&simba, &mutex).await;
            let command = fault(&format!("simba:{{{mutex}}}"));
            admin.call(&command.iter().map(String::as_str).collect::<Vec<_>>());
            // Reported by the next renewal, with a reason that differs from the deadline's.
            let loss = soon("the loss is reported", tenure.lost()).await;
            match at {
                2 => assert!(matches!(&loss, Loss::TakenBy(id) if id.as_str() == "7:7@stranger"), "{loss:?}"),
                _ => assert_eq!(loss, Loss::Vanished, "broken: a missing key is reported as such"),
            }
            if at < 2 {
                let again = soon("it is acquired again", leader.acquired()).await.unwrap();
                assert!(again.token() > tenure.token(), "broken: tokens grow");
            }
            leader.stop().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_58_contenders_with_equal_labels_never_share_a_hold() {
    let store = store();
    let (one, two) = (simba(store.backend().await, long()), simba(store.backend().await, long()));
    for _ in 0..rounds() {
        let mutex = name();
        let first = one.contend(mutex.clone()).with_label("chosen");
        first.start().unwrap();
        let tenure = soon("the first one leads", first.acquired()).await.unwrap();
        let locker = two.locker(mutex).with_label("chosen");
        let refused = soon("the second is answered", locker.try_lock()).await.unwrap();
        assert!(refused.is_none(), "broken: two holders");
        // Long enough for a reply of the store.
        let error = locker.lock_timeout(Duration::from_secs(3)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "broken: {error}");
        assert_eq!(error.holder(), Some(tenure.contender()), "broken: the holder is named");
        assert_eq!(tenure.loss(), None, "broken: the first keeps its hold");
        first.stop().await.unwrap();
        let guard = soon("the second one's turn", locker.lock()).await.unwrap();
        assert!(guard.token() > tenure.token());
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_65_documented_rights_are_sufficient() {
    let store = store();
    let mut admin = store.admin();
    admin.create_user();
    let url = format!("redis://{}:{}@{}", common::USER, common::PASSWORD, store.address);
    let config = RedisConfig::from_url(&url.parse().unwrap()).unwrap().with_timeout(SILENCE);
    let (one, two) =
        (RedisBackend::connect(config.clone()).await.unwrap(), RedisBackend::connect(config).await.unwrap());
    let (one, two, mutex) = (simba(one, long()), simba(two, long()), name());
    let (leader, _) = lead(&one, &mutex).await;
    let waiter = wait(&two, &mutex, &mut admin).await;
    let operate = two.operate().unwrap();
    assert_eq!(operate.list().await.unwrap().len(), 1);
    assert!(!operate.probe().await.unwrap().server.is_empty());
    leader.stop().await.unwrap();
    soon("a waiter is woken", waiter.acquired()).await.unwrap();
    let denied = admin.call(&["ACL", "LOG"]);
    assert_eq!(denied, Reply::Array(vec![]), "broken: no command was refused");
}
