//! The rows of the fault matrix about calls, events and the store itself.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::time::Duration;

use common::resp::Reply;
use common::{Store, admitting, case, lead, lease, long, name, simba, soon, until, wait, within};
use simba_core::{Answer, Backend as _, Claim, ContenderId, ErrorKind, Holding, Lease, Loss, Prior};
use simba_redis::{RedisBackend, RedisConfig};
use simba_servers::Setup;
use simba_tck::{Connection, FaultProxy, Fixture, Profile, async_trait, rounds};

fn store() -> Store {
    Store::private(Setup::redis())
}

/// A server that is killed and comes back.
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
        server.restart().expect("a server comes back");
        true
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_18_an_acquisition_that_arrives_after_the_stop_ends_with_its_lease() {
    for _ in 0..rounds() {
        case(&store(), "faults", "a_late_request_is_undone").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_19_a_renewal_under_way_does_not_outlive_the_release() {
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
        assert_eq!(admin.int(&["EXISTS", &format!("simba:{{{mutex}}}")]), 0, "broken: a release frees");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_20_a_lost_subscription_is_made_again_and_everyone_looks() {
    let store = store();
    let mut admin = store.admin();
    let (one, two) = (simba(store.backend().await, long()), simba(store.backend().await, long()));
    for _ in 0..rounds() {
        let mutex = name();
        let (leader, _) = lead(&one, &mutex).await;
        let waiter = wait(&two, &mutex, &mut admin).await;
        // The wake-up falls into the gap: only the look after the subscription finds the mutex free.
        assert!(admin.int(&["CLIENT", "KILL", "TYPE", "pubsub"]) >= 1);
        leader.stop().await.unwrap();
        soon("who subscribes again looks again", waiter.acquired()).await.unwrap();
        waiter.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_21_without_any_wake_up_the_poll_hands_over() {
    let store = store();
    let (one, two) = (simba(store.backend().await, lease()), simba(store.backend().await, lease()));
    assert_eq!(
        store.admin().ask(&["ACL", "SETUSER", common::USER, "-subscribe"]),
        Reply::Status("OK".into())
    );
    for _ in 0..rounds() {
        let mutex = name();
        let (leader, tenure) = lead(&one, &mutex).await;
        let waiter = two.contend(mutex);
        waiter.start().unwrap();
        until("a waiter sees the leader", || waiter.owner().is_owner(tenure.contender())).await;
        leader.stop().await.unwrap();
        let limit = lease().poll() + Duration::from_secs(2);
        within(limit, "the poll hands over", waiter.acquired()).await.unwrap();
        waiter.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_22_no_event_changes_who_holds() {
    let store = store();
    let mut admin = store.admin();
    let (one, two) = (simba(store.backend().await, long()), simba(store.backend().await, long()));
    let mutex = name();
    let (leader, tenure) = lead(&one, &mutex).await;
    let waiter = wait(&two, &mutex, &mut admin).await;
    let (me, other) = (leader.id().unwrap(), waiter.id().unwrap());
    let key = format!("simba:{{{mutex}}}");
    for _ in 0..rounds() * 20 {
        for who in [me.as_str(), other.as_str(), "somebody@else"] {
            for channel in
                [key.clone(), format!("{key}:{me}"), format!("{key}:{other}"), format!("{key}:owner")]
            {
                admin.int(&["PUBLISH", &channel, &format!("acquired@@{who}")]);
                admin.int(&["PUBLISH", &channel, &format!("released@@{who}")]);
            }
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert_eq!(tenure.loss(), None, "broken: no event takes what is held");
        assert!(leader.is_owner() && !waiter.is_owner(), "broken: no event gives what is not");
    }
    assert_eq!(leader.tenure().unwrap().token(), tenure.token(), "broken: no event begins a tenure");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_31_a_restart_without_memory_costs_the_holder_and_no_token() {
    for _ in 0..rounds() {
        let store = Store::private(admitting(Setup::redis()));
        let fixture = Restarting { store, survives: false };
        case(&fixture, "faults", "a_restart_of_the_store_is_survived").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_32_a_restart_with_memory_keeps_the_holder() {
    for _ in 0..rounds() {
        let durable = ["--appendonly", "yes", "--appendfsync", "always"];
        let setup = durable.into_iter().fold(Setup::redis(), Setup::with_arg);
        let fixture = Restarting { store: Store::private(admitting(setup)), survives: true };
        case(&fixture, "faults", "a_restart_of_the_store_is_survived").await;
    }
}

/// A master, and a replica behind a link that can be broken.
async fn pair() -> (Store, Store, FaultProxy) {
    // Else it waits five seconds for other replicas.
    let at_once = ["--repl-diskless-sync-delay", "0"].into_iter().fold(Setup::redis(), Setup::with_arg);
    let master = Store::private(at_once);
    let link = FaultProxy::start(master.address).await.expect("a proxy");
    let port = link.address().port().to_string();
    let replica = ["--replicaof", "127.0.0.1", &port].into_iter().fold(Setup::redis(), Setup::with_arg);
    (master, Store::private(replica), link)
}

/// Waits until the replica says that it has a write. To its master it is online before that, while it still loads.
async fn caught_up(master: &Store) {
    let mut admin = master.admin();
    until("the replica is in step", || {
        assert_eq!(admin.ask(&["SET", "written-at-last", "1"]), Reply::Status("OK".into()));
        admin.int(&["WAIT", "1", "100"]) == 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_33_a_failover_that_loses_writes_loses_no_token() {
    for _ in 0..rounds() {
        let (master, replica, link) = pair().await;
        caught_up(&master).await;
        let mutex = name();
        let before = simba(master.backend().await, long());
        link.stall();
        let lost = before.locker(mutex.clone()).lock().await.unwrap().token();
        master.server().kill().unwrap();
        let mut admin = replica.admin();
        assert_eq!(admin.ask(&["REPLICAOF", "NO", "ONE"]), Reply::Status("OK".into()));
        let after = simba(replica.backend().await, long());
        let next = soon("the new master serves", after.locker(mutex).lock()).await.unwrap();
        assert!(next.token() > lost, "broken: tokens grow over a failover that lost the last one");
    }
}

/// Whose acquisitions count when a replica has them, once there is one in step.
async fn waiting_for_a_replica(master: &Store) -> RedisBackend {
    caught_up(master).await;
    master.admin().admit();
    let waiting = master.clone().with_keys("wait_replicas=1&wait_timeout=1s");
    RedisBackend::connect(waiting.config(master.address)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_33_an_acquisition_that_no_replica_has_is_given_back() {
    let (master, _replica, link) = pair().await;
    let simba = simba(waiting_for_a_replica(&master).await, long());
    for _ in 0..rounds() {
        let mutex = name();
        let locker = simba.locker(mutex.clone()).with_patience(Duration::ZERO);
        soon("a replica in step has it", locker.lock()).await.unwrap().release().await.unwrap();
        link.stall();
        let error = soon("a cut replica is told", locker.try_lock()).await.unwrap_err();
        link.pass();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "broken: {error}");
        assert!(error.to_string().contains("0 of 1 replicas"), "broken: the cause is told: {error}");
        let key = format!("simba:{{{mutex}}}");
        assert_eq!(master.admin().int(&["EXISTS", &key]), 0, "broken: what failed is given back");
        caught_up(&master).await;
    }
}

/// A call that was given up may have taken the mutex: who finds that out waits for the replicas all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_33_an_acquisition_that_is_found_later_needs_its_replicas_too() {
    let store = store();
    store.admin().admit();
    let waiting = store.clone().with_keys("wait_replicas=1&wait_timeout=50ms");
    let backend = RedisBackend::connect(waiting.config(store.address)).await.unwrap();
    let (mutex, mut admin) = (name(), store.admin());
    let key = format!("simba:{{{mutex}}}");
    let mut session = backend.open(Claim::new(mutex, ContenderId::generate(), long())).await.unwrap();
    let taken = async {
        while admin.int(&["EXISTS", &key]) == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        biased;
        () = taken => {}
        answer = session.contend(Prior::Nothing) => panic!("there is no replica: {answer:?}"),
    }
    let error = session.contend(Prior::Unknown).await.unwrap_err();
    assert!(error.to_string().contains("0 of 1 replicas"), "broken: {error}");
    assert_eq!(store.admin().int(&["EXISTS", &key]), 0, "broken: what failed is given back");
}

/// The fence of a holder is lost, and a renewal makes a new one that no replica has: its holder is at work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_33_a_renewal_that_no_replica_has_is_not_given_back() {
    let (master, _replica, link) = pair().await;
    let backend = waiting_for_a_replica(&master).await;
    let (mutex, mut admin) = (name(), master.admin());
    let key = format!("simba:{{{mutex}}}");
    let mut session = backend.open(Claim::new(mutex, ContenderId::generate(), long())).await.unwrap();
    assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
    link.stall();
    assert_eq!(admin.int(&["DEL", &format!("{key}:fence")]), 1);
    assert!(matches!(session.contend(Prior::Held).await.unwrap(), Answer::Ours(_)), "broken: it is renewed");
    assert_eq!(admin.int(&["EXISTS", &key]), 1, "broken: what is held is not given back");
}

/// Without a replica every acquisition waits for `wait_timeout`; forty of them must not keep a renewal waiting for their
/// sum, which is longer than the lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_33_acquisitions_that_wait_for_replicas_cost_no_leader() {
    let (master, _replica, link) = pair().await;
    caught_up(&master).await;
    master.admin().admit();
    let waiting = master.clone().with_keys("wait_replicas=1&wait_timeout=500ms");
    let backend = RedisBackend::connect(waiting.config(master.address)).await.unwrap();
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
    assert_eq!(tenure.loss(), None, "broken: calls that wait for replicas cost no leader");
    leader.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_34_forgotten_scripts_cost_no_leader() {
    let store = store();
    let mut admin = store.admin();
    let simba = simba(store.backend().await, lease());
    let (leader, tenure) = lead(&simba, &name()).await;
    for _ in 0..rounds() * 3 {
        let deadline = tenure.deadline();
        assert_eq!(admin.ask(&["SCRIPT", "FLUSH"]), Reply::Status("OK".into()));
        until("a leader renews", || tenure.deadline() > deadline).await;
    }
    assert_eq!(tenure.loss(), None, "broken: forgotten scripts cost no leader");
    leader.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_35_a_holder_whose_key_is_gone_learns_of_it() {
    let store = store();
    let mut admin = store.admin();
    let simba = simba(store.backend().await, lease());
    for _ in 0..rounds() {
        let faults: [fn(&str) -> Vec<String>; 3] = [
            |_| vec!["FLUSHALL".into()],
            |key| vec!["DEL".into(), key.into()],
            |key| ["SET", key, "7:7@stranger", "PX", "5000"].map(Into::into).to_vec(),
        ];
        for (at, fault) in faults.into_iter().enumerate() {
            let mutex = name();
            let (leader, tenure) = lead(&simba, &mutex).await;
            let words = fault(&format!("simba:{{{mutex}}}"));
            admin.ask(&words.iter().map(String::as_str).collect::<Vec<_>>());
            let loss = within(lease().renew_at() + Duration::from_secs(1), "it is told", tenure.lost()).await;
            match at {
                2 => assert!(matches!(&loss, Loss::TakenBy(id) if id.as_str() == "7:7@stranger"), "{loss:?}"),
                _ => assert_eq!(loss, Loss::Vanished, "broken: what is gone is told as such"),
            }
            if at < 2 {
                let again = soon("it is acquired anew", leader.acquired()).await.unwrap();
                assert!(again.token() > tenure.token(), "broken: tokens grow");
            }
            leader.stop().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_58_two_equal_labels_never_share_a_hold() {
    let store = store();
    let (one, two) = (simba(store.backend().await, long()), simba(store.backend().await, long()));
    for _ in 0..rounds() {
        let mutex = name();
        let first = one.contend(mutex.clone()).with_label("chosen");
        first.start().unwrap();
        let tenure = soon("the first one leads", first.acquired()).await.unwrap();
        let locker = two.locker(mutex).with_label("chosen");
        let refused = soon("the second is answered", locker.try_lock()).await.unwrap();
        assert!(refused.is_none(), "broken: two hold");
        let error = locker.lock_timeout(Duration::from_millis(300)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "broken: {error}");
        assert_eq!(error.holder(), Some(tenure.contender()), "broken: the holder is named");
        assert_eq!(tenure.loss(), None, "broken: the first keeps what it has");
        first.stop().await.unwrap();
        let guard = soon("the second one's turn", locker.lock()).await.unwrap();
        assert!(guard.token() > tenure.token());
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_65_the_documented_rights_are_enough() {
    let store = store();
    let mut admin = store.admin();
    admin.admit();
    let url = format!("redis://{}:{}@{}", common::USER, common::PASSWORD, store.address);
    let config = RedisConfig::from_url(&url.parse().unwrap()).unwrap();
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
    let denied = admin.ask(&["ACL", "LOG"]);
    assert_eq!(denied, Reply::Array(vec![]), "broken: nothing was refused");
}
