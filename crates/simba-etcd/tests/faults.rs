//! The rows of the fault matrix about etcd's leases, keys and watches.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStringExt as _;
use std::time::Duration;

use common::peer::{Peer, leads, long, name, sees, soon};
use common::{Etcd, connect, ctl, lease};
use simba_core::operate::{EvictIf, Eviction, Operate as _};
use simba_core::{
    Answer, Backend as _, Claim, Clock as _, ContenderId, FencingToken, Holding, Lease, Loss, MutexName,
    Prior, Session, Simba, SystemClock,
};
use simba_servers::{Server, Setup, shared};
use simba_tck::{FaultProxy, Network as _, rounds};
use tokio::time::{sleep, timeout};

async fn by_hand(words: &[&str]) -> String {
    ctl(&shared("SIMBA_TCK_ETCD"), words).await
}

/// The keys of a mutex, in no order.
async fn keys(mutex: &MutexName) -> Vec<String> {
    let said = by_hand(&["get", "--prefix", "--keys-only", &format!("simba/{mutex}/")]).await;
    said.lines().filter(|line| !line.is_empty()).map(ToOwned::to_owned).collect()
}

/// The lease that a key has in its name.
fn lease_of(key: &str) -> &str {
    key.rsplit_once('/').unwrap().1.split_once('-').unwrap().0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_52_a_lease_that_is_revoked_is_lost_at_once_and_another_is_granted() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    for _ in 0..rounds() {
        let mutex = name();
        // Neither a renewal nor a poll comes in time to explain it.
        let leader = one.contend(&mutex, long());
        let tenure = leads(&leader).await;
        let [key] = &keys(&mutex).await[..] else { panic!("one key") };
        let heir = two.contend(&mutex, long());
        sees(&heir, &tenure).await;
        sleep(Duration::from_millis(fastrand::u64(0..800))).await;
        by_hand(&["lease", "revoke", lease_of(key)]).await;
        let loss = soon("who lost its lease learns of it", tenure.lost()).await;
        assert!(matches!(loss, Loss::TakenBy(_) | Loss::Vanished), "{loss:?}");
        let next = leads(&heir).await;
        assert!(next.token() > tenure.token());
        heir.stop().await.unwrap();
        assert!(leads(&leader).await.token() > next.token(), "a new lease has a new key");
        leader.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_52_a_waiter_whose_lease_is_revoked_takes_a_new_place() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    for _ in 0..rounds() {
        let mutex = name();
        let leader = one.contend(&mutex, long());
        let tenure = leads(&leader).await;
        let [first] = &keys(&mutex).await[..] else { panic!("one key") };
        let waiter = two.contend(&mutex, long());
        sees(&waiter, &tenure).await;
        let all = keys(&mutex).await;
        let waits = all.iter().find(|key| *key != first).unwrap();
        by_hand(&["lease", "revoke", lease_of(waits)]).await;
        leader.stop().await.unwrap();
        assert!(leads(&waiter).await.token() > tenure.token());
        waiter.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_is_deleted_is_lost_at_once() {
    let peer = Peer::connect().await;
    for _ in 0..rounds() * 2 {
        let mutex = name();
        let leader = peer.contend(&mutex, long());
        let tenure = leads(&leader).await;
        sleep(Duration::from_millis(fastrand::u64(0..800))).await;
        by_hand(&["del", "--prefix", &format!("simba/{mutex}/")]).await;
        let loss = soon("a leader without a key has lost", tenure.lost()).await;
        assert_eq!(loss, Loss::Vanished);
        assert!(leads(&leader).await.token() > tenure.token(), "a new key has a new token");
        leader.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_53_a_compaction_costs_no_waiter_its_turn() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    for round in 0..rounds().max(4) {
        let mutex = name();
        let leader = one.contend(&mutex, long());
        let tenure = leads(&leader).await;
        let heir = two.contend(&mutex, long());
        sees(&heir, &tenure).await;
        if round % 2 == 1 {
            // What happens meanwhile is forgotten before the waiter can ask for it.
            two.network.stall();
        }
        leader.stop().await.unwrap();
        compact(&mutex).await;
        two.network.heal();
        assert!(leads(&heir).await.token() > tenure.token());
        heir.stop().await.unwrap();
    }
}

/// A holder watches its key from when it was last seen, not from when it was made: that may be forgotten.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_whose_beginning_is_forgotten_costs_no_more_than_another() {
    let peer = Peer::connect().await;
    let mutex = name();
    let leader = peer.contend(&mutex, long());
    let tenure = leads(&leader).await;
    compact(&mutex).await;
    peer.network.cut();
    sleep(Duration::from_secs(2)).await;
    let before = peer.network.requests();
    sleep(Duration::from_secs(4)).await;
    let asked = peer.network.requests() - before;
    assert!(asked <= 8, "broken: nothing is asked again and again, but {asked} requests in four seconds");
    assert!(tenure.is_held());
    leader.stop().await.unwrap();
}

/// A watch that begins with what is forgotten tells so, and is begun anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_53_a_compaction_makes_no_holder_deaf() {
    let peer = Peer::connect().await;
    let mut held = Vec::new();
    // A hold is watched a moment after it began: of so many, some are not when the store forgets their beginning.
    for _ in 0..30 {
        let leader = peer.contend(&name(), long());
        held.push((leads(&leader).await, leader));
        sleep(Duration::from_millis(20)).await;
    }
    compact(&name()).await;
    sleep(Duration::from_secs(1)).await;
    for (tenure, leader) in held {
        by_hand(&["del", "--prefix", &format!("simba/{}/", tenure.mutex())]).await;
        let loss = soon("a leader without a key has lost", tenure.lost()).await;
        assert_eq!(loss, Loss::Vanished);
        leader.stop().await.unwrap();
    }
}

/// Lets the store forget all that was before this moment.
async fn compact(mutex: &MutexName) {
    // Who watches from the very revision that is compacted misses nothing yet.
    by_hand(&["put", &format!("other-{mutex}"), "x"]).await;
    let said = by_hand(&["put", &format!("other-{mutex}"), "y", "-w", "json"]).await;
    let revision = said.split("\"revision\":").nth(1).unwrap();
    let revision: String = revision.chars().take_while(char::is_ascii_digit).collect();
    let mut command = common::etcdctl(&shared("SIMBA_TCK_ETCD"));
    command.args(["compact", &revision]);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let refusal = String::from_utf8_lossy(&output.stderr);
    // Another test may have compacted up to here or further, which is as good.
    let is_compacted = output.status.success() || refusal.contains("required revision has been compacted");
    assert!(is_compacted, "etcd did not compact: {refusal}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_without_a_reply_is_one_key() {
    let peer = Peer::connect().await;
    let mutex = name();
    // The connection stands before the reply is lost, and so does the lease.
    peer.simba.locker(mutex.clone()).lock().await.unwrap().release().await.unwrap();
    for _ in 0..rounds() * 5 {
        let locker = peer.simba.locker(mutex.clone());
        peer.network.lose_next_reply();
        let guard = soon("what was won without a reply is adopted", locker.lock()).await.unwrap();
        assert_eq!(keys(&mutex).await.len(), 1, "one key for one contender");
        guard.release().await.unwrap();
        assert_eq!(keys(&mutex).await.len(), 0, "no key for nobody");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_that_is_given_up_leaves_no_key() {
    let (backend, network) = Etcd::single().proxied().await;
    let mutex = name();
    let claim = || Claim::new(mutex.clone(), ContenderId::generate(), long());
    backend.open(claim()).await.unwrap().contend(Prior::Nothing).await.unwrap();
    for round in 0..rounds() * 10 {
        let mut session = backend.open(claim()).await.unwrap();
        if round % 3 == 0 {
            network.lose_next_reply();
        }
        // Given up at any point, and the session with it; no end of a lease this long explains what follows.
        let patience = Duration::from_micros(fastrand::u64(0..3_000));
        let _ = timeout(patience, session.contend(Prior::Nothing)).await;
        drop(session);
    }
    // Also what came late is gone, a second later.
    for _ in 0..2 {
        soon("who gave up is gone", async {
            while !keys(&mutex).await.is_empty() {
                sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        sleep(Duration::from_secs(1)).await;
    }
    assert!(keys(&mutex).await.is_empty(), "broken: who gave up is gone for good");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_20_a_waiter_whose_watch_is_cut_off_looks_again() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    for _ in 0..rounds() {
        let mutex = name();
        let leader = one.contend(&mutex, long());
        let tenure = leads(&leader).await;
        let heir = two.contend(&mutex, long());
        sees(&heir, &tenure).await;
        // The watch is gone with the connection; its poll is far too long to explain what follows.
        two.network.cut();
        leader.stop().await.unwrap();
        assert!(leads(&heir).await.token() > tenure.token());
        heir.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_25_a_waiter_that_stands_still_blocks_for_a_lease_at_most() {
    let (one, two, three) = (Peer::connect().await, Peer::connect().await, Peer::connect().await);
    for _ in 0..rounds() {
        let mutex = name();
        let leader = one.contend(&mutex, long());
        let tenure = leads(&leader).await;
        let head = two.contend(&mutex, lease());
        sees(&head, &tenure).await;
        let next = three.contend(&mutex, long());
        sees(&next, &tenure).await;
        two.network.stall();
        leader.stop().await.unwrap();
        // The end of the head's lease wakes the next one: no other lease, and no poll, ends before the test gives up.
        leads(&next).await;
        two.network.heal();
        head.stop().await.unwrap();
        next.stop().await.unwrap();
    }
}

/// What a waiter was handed.
struct HandOver {
    granted: Duration,
    /// How long ago it joined.
    age: Duration,
    /// Whether its place is the one that it took first.
    same_place: bool,
}

/// Waits in one handle behind a holder in another for so long, then is handed the mutex.
async fn handed_over_after(lease: Lease, wait: Duration) -> HandOver {
    let (one, _network) = Etcd::single().proxied().await;
    let (two, _other_network) = Etcd::single().proxied().await;
    let mutex = name();
    let claim = || Claim::new(mutex.clone(), ContenderId::generate(), lease);
    let (mut holder, mut waiter) = (one.open(claim()).await.unwrap(), two.open(claim()).await.unwrap());
    assert!(matches!(holder.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
    assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
    let joined = SystemClock.now();
    let place = by_hand(&["get", "--prefix", &format!("simba/{mutex}/"), "-w", "json"]).await;
    let places = place.split("\"create_revision\":").skip(1);
    let place = places.map(|text| text.split(',').next().unwrap().parse::<u64>().unwrap()).max().unwrap();
    // The hint of a subscription, which is always given.
    waiter.changed().await.unwrap();
    sleep(wait).await;
    holder.release(Holding::Unknown).await.unwrap();
    soon("a release wakes the next", waiter.changed()).await.unwrap();
    let asked = SystemClock.now();
    let Answer::Ours(ours) = waiter.contend(Prior::Nothing).await.unwrap() else {
        panic!("broken: the one who was woken has it")
    };
    let same_place = ours.token.unwrap() == FencingToken::new(place);
    HandOver { granted: ours.remaining, age: asked - joined, same_place }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_grants_no_more_than_the_last_proof_left() {
    // Too short a wait for a renewal of the waiter's lease since it was granted.
    let HandOver { granted, age, .. } = handed_over_after(long(), Duration::from_secs(1)).await;
    let all = long().total();
    assert!(granted <= all - age, "broken: {granted:?} of {all:?} are granted on what was shown {age:?} ago");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_s_lease_is_renewed_before_its_turn_comes() {
    // After two lengths of the lease nothing is left of what the grant gave.
    let lease = Lease::new(Duration::from_secs(4), Duration::from_secs(2)).unwrap();
    let all = lease.total();
    let HandOver { granted, same_place, .. } = handed_over_after(lease, 2 * all).await;
    assert!(same_place, "broken: a waiter keeps its place");
    assert!(granted >= all / 2, "broken: {granted:?} of {all:?} are too little to work under");
}

async fn ours(session: &mut dyn Session, prior: Prior) -> FencingToken {
    match session.contend(prior).await.unwrap() {
        Answer::Ours(ours) => ours.token.unwrap(),
        other => panic!("broken: the first of the queue holds the mutex, but the answer is {other:?}"),
    }
}

/// No entry leads twice: a tenure that was lost locally while its lease lives on is followed by another entry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_holder_joins_again_behind_the_waiters_under_a_greater_token() {
    let backend = connect(&shared("SIMBA_TCK_ETCD")).await.unwrap();
    let mutex = name();
    let claim = || Claim::new(mutex.clone(), ContenderId::generate(), long());
    let (mut holder, mut waiter) =
        (backend.open(claim()).await.unwrap(), backend.open(claim()).await.unwrap());
    let lost = ours(&mut *holder, Prior::Nothing).await;
    assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
    // A session's first wake-up is immediate.
    waiter.changed().await.unwrap();
    let again = holder.contend(Prior::Lapsed(lost)).await.unwrap();
    assert!(matches!(again, Answer::Held(_)), "broken: the lost holder goes behind the waiter: {again:?}");
    soon("the waiter is woken", waiter.changed()).await.unwrap();
    let next = ours(&mut *waiter, Prior::Nothing).await;
    assert_eq!(keys(&mutex).await.len(), 2, "one entry for each contender");
    holder.changed().await.unwrap();
    waiter.release(Holding::Under(next)).await.unwrap();
    soon("the lost holder is woken", holder.changed()).await.unwrap();
    let last = ours(&mut *holder, Prior::Nothing).await;
    assert!(lost < next && next < last, "broken: tokens grow: {lost}, {next}, {last}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_was_out_of_reach_leads_again_under_a_greater_token() {
    let peer = Peer::connect().await;
    let leader = peer.contend(&name(), lease());
    let mut tenure = leads(&leader).await;
    for _ in 0..rounds() {
        peer.network.stall();
        assert_eq!(soon("a holder out of reach has lost", tenure.lost()).await, Loss::Deadline);
        // Its entry is still there, most likely: servers end leases up to half a second late.
        peer.network.heal();
        let next = leads(&leader).await;
        assert!(next.token() > tenure.token(), "broken: {} led twice", tenure.token());
        tenure = next;
    }
    leader.stop().await.unwrap();
}

/// How long a server may be silent follows from the leases in use, not from those that were used before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_lease_that_ended_does_not_shorten_the_patience_with_servers() {
    let peer = Peer::connect().await;
    peer.simba.locker(name()).with_lease(lease()).lock().await.unwrap().release().await.unwrap();
    let leader = peer.contend(&name(), long());
    leads(&leader).await;
    peer.network.stall();
    let other = peer.contend(&name(), long());
    // Twice the patience is the limit for a connection, and the error names it.
    let said = soon("a contender out of reach says why", async {
        loop {
            let error = other.last_error().map(|error| error.to_string()).unwrap_or_default();
            if error.contains("did not answer within") {
                return error;
            }
            sleep(Duration::from_millis(20)).await;
        }
    });
    let said = said.await;
    assert!(said.contains("within 4s"), "broken: the short lease still decides: {said}");
    peer.network.heal();
}

/// Only time in which this process could have read an answer counts as silence of the server.
#[tokio::test]
async fn a_process_that_stood_still_keeps_its_connection() {
    let url = shared("SIMBA_TCK_ETCD");
    let proxy = FaultProxy::start(url.trim_start_matches("etcd://")).await.unwrap().for_http2();
    let simba = Simba::new(connect(&format!("etcd://{}", proxy.address())).await.unwrap());
    proxy.delay(Duration::from_millis(300), Duration::ZERO);
    let locking = tokio::spawn(async move { simba.locker(name()).with_lease(long()).lock().await });
    sleep(Duration::from_millis(100)).await;
    // The only thread of the runtime: the first call of the lock is answered meanwhile, and nothing reads the answer.
    std::thread::sleep(Duration::from_secs(4));
    let _held = soon("the lock is taken", locking).await.unwrap().unwrap();
    assert_eq!(proxy.accepted(), 1, "broken: the server was not silent");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_of_several_pages_is_listed_in_order() {
    // More than a page of a list.
    const ENTRIES: usize = 1_100;
    let backend = connect(&shared("SIMBA_TCK_ETCD")).await.unwrap();
    let mutex = name();
    let claim = || Claim::new(mutex.clone(), ContenderId::generate(), long());
    let mut holder = backend.open(claim()).await.unwrap();
    let token = ours(&mut *holder, Prior::Nothing).await;
    let mut waiters = Vec::new();
    for _ in 1..ENTRIES {
        let mut waiter = backend.open(claim()).await.unwrap();
        assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
        waiters.push(waiter);
    }
    let record = backend.read(&mutex).await.unwrap();
    assert_eq!((record.token, record.waiters), (Some(token), Some(ENTRIES - 1)));
    let listed = backend.list().await.unwrap();
    let listed = listed.iter().find(|record| record.mutex == mutex).expect("it is listed");
    assert_eq!((listed.token, listed.waiters), (Some(token), Some(ENTRIES - 1)));
}

/// Other programs may use any bytes as a key, also ones that are no text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_whose_key_is_no_text_is_waited_for_and_evicted() {
    let peer = Peer::connect().await;
    for evicted in [false, true] {
        let mutex = name();
        let mut key = format!("simba/{mutex}/").into_bytes();
        key.push(0xff);
        let key = std::ffi::OsString::from_vec(key);
        by_hand_os(&["put".as_ref(), &key, "".as_ref()]).await;
        let waiter = peer.contend(&mutex, long());
        soon("a waiter sees the holder", async {
            while waiter.owner().id.is_none() {
                sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        let holder = waiter.owner().id.unwrap();
        assert!(holder.as_str().ends_with("\\xff"), "known by its key: {holder}");
        if evicted {
            let operate = peer.simba.operate().unwrap();
            let freed = operate.evict(&mutex, EvictIf::Any).await.unwrap();
            assert!(matches!(freed, Eviction::Freed { .. }), "{freed:?}");
        } else {
            by_hand_os(&["del".as_ref(), &key]).await;
        }
        // The poll is far too long to explain it.
        leads(&waiter).await;
        waiter.stop().await.unwrap();
    }
}

async fn by_hand_os(words: &[&OsStr]) {
    let mut command = common::etcdctl(&shared("SIMBA_TCK_ETCD"));
    command.args(words);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// How many wait in row 29, and how many hand-overs are counted.
const CROWD: usize = 1_000;
const HANDOVERS: usize = 50;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_29_a_release_among_a_thousand_costs_five_calls() {
    let server = Setup::etcd().start().unwrap();
    let (backend, _network) = Etcd::at(server.url()).proxied().await;
    let mutex = name();
    let mut sessions = VecDeque::new();
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
        // A leader listens for the loss of its key.
        let _ = timeout(Duration::from_millis(5), next.changed()).await;
    }
    let calls = received(&server) - before;
    assert!(
        calls <= 5 * HANDOVERS,
        "broken: at most five calls for a hand-over, not {calls} for {HANDOVERS}"
    );
}

/// How many messages came to a server so far.
fn received(server: &Server) -> usize {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(server.address()).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).unwrap();
    let counts = metrics.lines().filter(|line| line.starts_with("grpc_server_msg_received_total"));
    counts.map(|line| line.rsplit_once(' ').unwrap().1.parse::<usize>().unwrap()).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_survives_a_restart_of_the_server() {
    let mut server = Setup::etcd().start().unwrap();
    let peer = Peer::at(&Etcd::at(server.url())).await;
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
        let other = Peer::at(&Etcd::at(server.url())).await;
        assert!(other.simba.locker(mutex.clone()).try_lock().await.unwrap().is_none(), "it is still held");
        leader.stop().await.unwrap();
        let next = soon("the store works on", other.simba.locker(mutex.clone()).lock()).await.unwrap();
        assert!(next.token() > tenure.token(), "tokens survive a restart");
        next.release().await.unwrap();
    }
}
