//! Batches of calls, and faults that they must not cause.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::collections::HashMap;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use common::{Admin, Store, long, soon};
use futures_util::future::join_all;
use simba_core::spi::{Answer, Backend as _, Claim, Holding, Intent, Operate as _, Prior, Session};
use simba_core::{ContenderId, ErrorKind, FencingToken, Lease, MutexName, Result};
use simba_redis::RedisBackend;
use simba_servers::Setup;

/// Enough for several batches.
const MANY: usize = 200;

fn store() -> Store {
    Store::private(Setup::redis())
}

fn mutex(n: usize) -> MutexName {
    MutexName::new(format!("many-{n}")).unwrap()
}

fn key(n: usize, suffix: &str) -> String {
    format!("simba:{{many-{n}}}{suffix}")
}

async fn sessions(backend: &RedisBackend) -> Vec<Box<dyn Session>> {
    sessions_with(backend, long()).await
}

async fn sessions_with(backend: &RedisBackend, lease: Lease) -> Vec<Box<dyn Session>> {
    let mut sessions = Vec::new();
    for n in 0..MANY {
        let claim = Claim::new(mutex(n), ContenderId::generate(), lease);
        sessions.push(backend.open(claim).await.unwrap());
    }
    sessions
}

async fn contend(sessions: &mut [Box<dyn Session>], prior: Prior) -> Vec<Result<Answer>> {
    join_all(sessions.iter_mut().map(|session| session.contend(prior))).await
}

async fn release(sessions: &mut [Box<dyn Session>], tokens: &[FencingToken]) -> Vec<Result<()>> {
    let calls = sessions.iter_mut().zip(tokens);
    join_all(calls.map(|(session, token)| session.release(Holding::Under(*token)))).await
}

async fn changed(sessions: &mut [Box<dyn Session>]) {
    let all = join_all(sessions.iter_mut().map(|session| session.changed()));
    soon("every session is notified", all).await.into_iter().for_each(|changed| changed.unwrap());
}

fn tokens(answers: Vec<Result<Answer>>) -> Vec<FencingToken> {
    let token = |answer: Result<Answer>| match answer.unwrap() {
        Answer::Ours(ours) => ours.token.unwrap(),
        other => panic!("it is free: {other:?}"),
    };
    answers.into_iter().map(token).collect()
}

/// Returns the number of script calls by digest.
fn calls(admin: &mut Admin) -> u64 {
    statistic(admin, "evalsha", "calls")
}

fn statistic(admin: &mut Admin, command: &str, name: &str) -> u64 {
    let (stats, command) = (admin.text(&["INFO", "commandstats"]).unwrap(), format!("cmdstat_{command}:"));
    let line = stats.lines().find_map(|line| line.strip_prefix(&command)).unwrap_or_default();
    let value = line.split(',').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
    value.map_or(0, |value| value.parse().unwrap())
}

fn held(admin: &mut Admin) -> usize {
    (0..MANY).filter(|n| admin.int(&["EXISTS", &key(*n, "")]) == 1).count()
}

#[tokio::test]
async fn concurrent_calls_are_batched() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    let before = calls(&mut admin);
    let first = tokens(contend(&mut sessions, Prior::Nothing).await);
    assert_eq!(held(&mut admin), MANY);
    let renewed = tokens(contend(&mut sessions, Prior::Held).await);
    assert_eq!(renewed, first);
    release(&mut sessions, &first).await.into_iter().for_each(|freed| freed.unwrap());
    assert_eq!(held(&mut admin), 0);
    let made = calls(&mut admin) - before;
    assert!(made < 3 * MANY as u64 / 5, "{made} calls for {} acquisitions, renewals and releases", 3 * MANY);
    let second = tokens(contend(&mut sessions, Prior::Nothing).await);
    assert!(first.iter().zip(&second).all(|(first, second)| first < second));
}

#[tokio::test]
async fn batched_renewal_sets_the_full_lease() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    tokens(contend(&mut sessions, Prior::Nothing).await);
    for n in 0..MANY {
        admin.call(&["PEXPIRE", &key(n, ""), "50000"]);
    }
    let began = Instant::now();
    tokens(contend(&mut sessions, Prior::Held).await);
    let full = i64::try_from(long().total().as_millis()).unwrap();
    for n in 0..MANY {
        let left = admin.int(&["PTTL", &key(n, "")]);
        // Less the elapsed time and the rounding of the clocks.
        let elapsed = i64::try_from(began.elapsed().as_millis()).unwrap() + 10;
        assert!((full - elapsed..=full).contains(&left), "{left} after {elapsed}");
        assert!(admin.int(&["PTTL", &key(n, ":fence")]) > 86_400_000);
    }
}

/// The fence of a mutex in use is kept for a day, although not every call extends it.
#[tokio::test]
async fn fence_in_use_does_not_expire() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    // The first renewal in 1000 s extends a fence. With this lease, every renewal does.
    let lease = Lease::new(Duration::from_secs(900), Duration::from_secs(600)).unwrap();
    let mut sessions = sessions_with(&backend, lease).await;
    tokens(contend(&mut sessions, Prior::Nothing).await);
    // Makes the fences look as if they were written years ago and are about to expire.
    let age = |admin: &mut Admin| {
        for n in 0..MANY {
            let fence = key(n, ":fence");
            let last = admin.text(&["GET", &fence]).unwrap();
            admin.call(&["SET", &fence, &format!("1600000000000000{}", &last[16..]), "PX", "100000"]);
        }
    };
    let least = |admin: &mut Admin| (0..MANY).map(|n| admin.int(&["PTTL", &key(n, ":fence")])).min().unwrap();
    let day = 86_400_000;
    assert!(least(&mut admin) > day);
    age(&mut admin);
    let old = tokens(contend(&mut sessions, Prior::Held).await);
    assert!(old.iter().all(|token| token.get() == 1_600_000_000_000_000));
    assert!(least(&mut admin) > day, "a renewal extends it");
    release(&mut sessions, &old).await.into_iter().for_each(|freed| freed.unwrap());
    age(&mut admin);
    let fresh = tokens(contend(&mut sessions, Prior::Nothing).await);
    assert!(fresh.iter().all(|token| token.get() > 1_600_000_000_000_000));
    assert!(least(&mut admin) > day, "an acquisition extends it");
    // Fences are overwritten in place, but nothing of a longer one must remain.
    release(&mut sessions, &fresh).await.into_iter().for_each(|freed| freed.unwrap());
    for n in (0..MANY).step_by(2) {
        admin.call(&["APPEND", &key(n, ":fence"), "-and-more"]);
    }
    let next = tokens(contend(&mut sessions, Prior::Nothing).await);
    assert!(statistic(&mut admin, "setrange", "calls") > 0);
    assert_eq!(tokens(contend(&mut sessions, Prior::Held).await), next);
}

/// A late release must not end a later hold of the same contender.
#[tokio::test]
async fn batched_release_with_an_old_token_releases_nothing() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    let old = tokens(contend(&mut sessions, Prior::Nothing).await);
    let again = sessions.iter_mut().zip(&old).map(|(session, token)| session.contend(Prior::Lapsed(*token)));
    let new = tokens(join_all(again).await);
    assert!(old.iter().zip(&new).all(|(old, new)| old < new));
    release(&mut sessions, &old).await.into_iter().for_each(|freed| freed.unwrap());
    assert_eq!(held(&mut admin), MANY);
    release(&mut sessions, &new).await.into_iter().for_each(|freed| freed.unwrap());
    assert_eq!(held(&mut admin), 0);
}

/// The server's clock was set back, or the fence is invalid.
#[tokio::test]
async fn tokens_grow_if_the_fence_is_ahead_or_invalid() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    let ahead = 4_102_444_800_000_000_u64;
    for n in 0..MANY {
        let (fence, last) =
            (key(n, ":fence"), format!("{} 0000000000000001 00000001000 someone", ahead + n as u64));
        match n % 4 {
            0 => admin.call(&["SET", &fence, &last]),
            // An expired reservation.
            1 => admin.call(&["SET", &fence, &format!("!1700000000000 {last}")]),
            2 => admin.call(&["HSET", &fence, "a", "b"]),
            _ => admin.call(&["SET", &fence, "nonsense"]),
        };
    }
    let first = tokens(contend(&mut sessions, Prior::Nothing).await);
    for (n, token) in first.iter().enumerate().filter(|(n, _)| n % 4 < 2) {
        assert_eq!(token.get(), ahead + n as u64 + 1);
    }
    release(&mut sessions, &first).await.into_iter().for_each(|freed| freed.unwrap());
    let second = tokens(contend(&mut sessions, Prior::Nothing).await);
    assert!(first.iter().zip(&second).all(|(first, second)| first < second));
}

#[tokio::test]
async fn batch_reports_other_holders_and_does_not_change_their_holds() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    for n in (0..MANY).step_by(2) {
        admin.call(&["SET", &key(n, ""), "peer@host", "PX", "60000"]);
    }
    let mut tokens = Vec::new();
    for (n, answer) in contend(&mut sessions, Prior::Nothing).await.into_iter().enumerate() {
        match answer.unwrap() {
            Answer::Held(seen) => assert_eq!((n % 2, seen.owner.as_str()), (0, "peer@host")),
            Answer::Ours(ours) => tokens.push(ours.token.unwrap()),
            Answer::Vacant => panic!("it is held"),
        }
    }
    assert_eq!(tokens.len(), MANY / 2);
    // Mutexes that another contender has acquired since are neither released nor renewed.
    for n in (1..MANY).step_by(2) {
        admin.call(&["SET", &key(n, ""), "peer@host", "PX", "60000"]);
    }
    let late = sessions.iter_mut().skip(1).step_by(2).zip(&tokens);
    join_all(late.map(|(session, token)| session.release(Holding::Under(*token)))).await;
    assert_eq!(held(&mut admin), MANY);
    for answer in contend(&mut sessions, Prior::Held).await {
        assert!(matches!(answer.unwrap(), Answer::Held(seen) if seen.owner.as_str() == "peer@host"));
    }
}

#[tokio::test]
async fn batched_release_wakes_waiters() {
    let store = store();
    let (backend, other) = (store.backend().await, store.backend().await);
    let (mut sessions, mut waiters) = (sessions(&backend).await, sessions(&other).await);
    let held = tokens(contend(&mut sessions, Prior::Nothing).await);
    for answer in contend(&mut waiters, Prior::Nothing).await {
        assert!(matches!(answer.unwrap(), Answer::Held(_)));
    }
    // The first wake-up is the confirmation of the subscription.
    changed(&mut waiters).await;
    for answer in contend(&mut waiters, Prior::Nothing).await {
        assert!(matches!(answer.unwrap(), Answer::Held(_)));
    }
    release(&mut sessions, &held).await.into_iter().for_each(|freed| freed.unwrap());
    changed(&mut waiters).await;
    tokens(contend(&mut waiters, Prior::Nothing).await);
}

/// Reserves the mutex of each fence for another contender for a second. Returns the end in the server's milliseconds.
const RESERVE: &str = "local now = redis.call('TIME')
    local ends = string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000) + 1000)
    for _, fence in ipairs(KEYS) do redis.call('SET', fence, '!' .. ends .. ' 1700000000000000 peer@host') end
    return ends";

#[tokio::test]
async fn batch_does_not_acquire_mutexes_reserved_for_another() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let reserved: Vec<usize> = (0..MANY).step_by(5).collect();
    let count = reserved.len().to_string();
    let fences: Vec<String> = reserved.iter().map(|n| key(*n, ":fence")).collect();
    let command: Vec<&str> =
        ["EVAL", RESERVE, &count].into_iter().chain(fences.iter().map(String::as_str)).collect();
    // Repeated, since the reservations may end before the calls if the machine pauses.
    for ends in std::iter::repeat_with(|| admin.text(&command).unwrap().parse::<u64>().unwrap()) {
        let mut sessions = sessions(&backend).await;
        let answers = contend(&mut sessions, Prior::Nothing).await;
        let mut tokens = HashMap::new();
        for (n, answer) in answers.into_iter().enumerate() {
            match answer.unwrap() {
                Answer::Ours(ours) => drop(tokens.insert(n, ours.token.unwrap())),
                Answer::Vacant => assert!(reserved.contains(&n)),
                Answer::Held(seen) => panic!("{n} is held by {}", seen.owner),
            }
        }
        for token in reserved.iter().filter_map(|n| tokens.get(n)) {
            assert!(
                token.get() / 1000 >= ends,
                "{} is before the end of the reservation, {ends}",
                token.get()
            );
        }
        if tokens.len() < MANY {
            return;
        }
        for (n, token) in tokens {
            sessions[n].release(Holding::Under(token)).await.unwrap();
        }
    }
}

/// Only releases with an observer are published.
#[tokio::test]
async fn batched_release_notifies_observers() {
    let store = store();
    let (backend, other, mut admin) = (store.backend().await, store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    let held = tokens(contend(&mut sessions, Prior::Nothing).await);
    let mut observers = Vec::new();
    for n in (0..MANY).step_by(5) {
        let claim = Claim::new(mutex(n), ContenderId::generate(), long()).with_intent(Intent::Observe);
        observers.push(other.open(claim).await.unwrap());
    }
    // The first two wake-ups are the confirmations of the two channels.
    changed(&mut observers).await;
    changed(&mut observers).await;
    for observer in &mut observers {
        assert!(observer.inspect().await.unwrap().is_some());
    }
    // Observers are also notified of the release of a hold that lapsed and was acquired again.
    let lapsed =
        sessions.iter_mut().zip(&held).map(|(session, token)| session.contend(Prior::Lapsed(*token)));
    let held = [tokens(join_all(lapsed.take(MANY / 2)).await), held[MANY / 2..].to_vec()].concat();
    let before = statistic(&mut admin, "publish", "calls");
    release(&mut sessions, &held).await.into_iter().for_each(|freed| freed.unwrap());
    changed(&mut observers).await;
    let events = statistic(&mut admin, "publish", "calls") - before;
    assert!(events <= (MANY / 2 + MANY / 10) as u64, "{events} events for {} observers", observers.len());
}

/// Each call of a mixed batch gets its own reply, also where the fast path does not apply.
#[tokio::test]
async fn calls_of_all_kinds_are_batched_together() {
    let store = store();
    let (backend, other, mut admin) = (store.backend().await, store.backend().await, store.admin());
    let (mut sessions, mut waiters) = (sessions(&backend).await, sessions(&other).await);
    // The kinds alternate. The fast path does not apply to some calls of each kind.
    let (renewed, released) = (|n: usize| n.is_multiple_of(3), |n: usize| n % 3 == 1);
    let slow = |n: usize| n.is_multiple_of(7);
    let held = |n: &usize| renewed(*n) || released(*n);
    let holders = sessions.iter_mut().enumerate().filter(|(n, _)| held(n));
    let first = tokens(join_all(holders.map(|(_, session)| session.contend(Prior::Nothing))).await);
    let first: HashMap<usize, FencingToken> = (0..MANY).filter(held).zip(first).collect();
    for n in (0..MANY).filter(|n| slow(*n)) {
        match n {
            n if released(n) => drop(waiters[n].contend(Prior::Nothing).await.unwrap()),
            n => drop(admin.call(&["SET", &key(n, ""), "peer@host", "PX", "60000"])),
        }
    }
    let before = calls(&mut admin);
    let all = sessions.iter_mut().enumerate().map(|(n, session)| {
        let token = first.get(&n).copied();
        async move {
            match token {
                Some(_) if renewed(n) => session.contend(Prior::Held).await.map(Some),
                Some(token) => session.release(Holding::Under(token)).await.map(|()| None),
                None => session.contend(Prior::Nothing).await.map(Some),
            }
        }
    });
    for (n, answer) in join_all(all).await.into_iter().enumerate() {
        match answer.unwrap() {
            None => assert!(released(n)),
            Some(Answer::Ours(ours)) if renewed(n) => assert_eq!(ours.token, first.get(&n).copied(), "{n}"),
            Some(Answer::Ours(ours)) => assert!(!slow(n) && ours.token.is_some(), "{n}"),
            Some(Answer::Held(seen)) => assert_eq!((slow(n), seen.owner.as_str()), (true, "peer@host")),
            Some(Answer::Vacant) => panic!("{n} is held"),
        }
    }
    let made = calls(&mut admin) - before;
    assert!(made < MANY as u64 / 2, "{made} calls for {MANY}");
    for n in (0..MANY).filter(|n| released(*n)) {
        let next = match slow(n) {
            true => waiters[n].contend(Prior::Nothing).await,
            false => contend_once(&other, n).await,
        };
        assert!(matches!(next.unwrap(), Answer::Ours(_)), "{n} is free for its waiter, or for any contender");
    }
}

async fn contend_once(backend: &RedisBackend, n: usize) -> Result<Answer> {
    let claim = Claim::new(mutex(n), ContenderId::generate(), long());
    backend.open(claim).await?.contend(Prior::Nothing).await
}

/// A batch does not change the order of two calls of one session.
#[tokio::test]
async fn release_after_a_dropped_acquisition_is_executed_after_it() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    for session in &mut sessions {
        let mut context = Context::from_waker(Waker::noop());
        assert!(pin!(session.contend(Prior::Nothing)).poll(&mut context).is_pending());
    }
    for freed in join_all(sessions.iter_mut().map(|session| session.release(Holding::Unknown))).await {
        freed.unwrap();
    }
    assert_eq!(held(&mut admin), 0);
}

/// A batch does not release mutexes with waiters, and the dropped caller cannot repeat the release alone.
#[tokio::test]
async fn release_that_is_dropped_twice_is_executed_although_there_are_waiters() {
    let store = store();
    let (backend, other, mut admin) = (store.backend().await, store.backend().await, store.admin());
    let (mut sessions, mut waiters) = (sessions(&backend).await, sessions(&other).await);
    let tokens = tokens(contend(&mut sessions, Prior::Nothing).await);
    for answer in contend(&mut waiters, Prior::Nothing).await {
        assert!(matches!(answer.unwrap(), Answer::Held(_)));
    }
    for _ in 0..2 {
        for (session, token) in sessions.iter_mut().zip(&tokens) {
            let mut context = Context::from_waker(Waker::noop());
            assert!(pin!(session.release(Holding::Under(*token))).poll(&mut context).is_pending());
        }
    }
    // Executed after all earlier calls of this connection.
    backend.operate().unwrap().read(&mutex(0)).await.unwrap();
    assert_eq!(held(&mut admin), 0);
}

/// The calls of a batch that is refused because of one of them are repeated alone.
#[tokio::test]
async fn mutex_without_rights_does_not_fail_other_calls_of_the_batch() {
    let store = store();
    let mut admin = store.admin();
    admin.create_user();
    let rights = "resetkeys ~simba:{many-?}* ~simba:{many-??}* ~simba:{many-1[0-8]?}*";
    let command: Vec<&str> = ["ACL", "SETUSER", common::USER].into_iter().chain(rights.split(' ')).collect();
    admin.call(&command);
    let backend = store.backend_as_is().await;
    let mut sessions = sessions(&backend).await;
    for (n, answer) in contend(&mut sessions, Prior::Nothing).await.into_iter().enumerate() {
        match answer {
            Ok(Answer::Ours(_)) => assert!(n < 190),
            Err(error) => assert_eq!((n >= 190, error.kind()), (true, ErrorKind::Denied)),
            other => panic!("{other:?}"),
        }
    }
}

/// The rights of an older version, which did not overwrite fences in place.
#[tokio::test]
async fn missing_right_to_setrange_only_reduces_speed() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    admin.call(&["ACL", "SETUSER", common::USER, "-setrange"]);
    let mut sessions = sessions(&backend).await;
    let mut last = Vec::new();
    for _ in 0..3 {
        let tokens = tokens(contend(&mut sessions, Prior::Nothing).await);
        assert!(tokens.iter().zip(&last).all(|(token, last)| token > last));
        let claim = Claim::new(mutex(0), ContenderId::generate(), long()).with_intent(Intent::Observe);
        assert!(backend.open(claim).await.unwrap().inspect().await.unwrap().is_some());
        release(&mut sessions, &tokens).await.into_iter().for_each(|freed| freed.unwrap());
        last = tokens;
    }
    assert_eq!(held(&mut admin), 0);
}

/// Returns whether the handle reports that keys are spread over servers.
async fn finds_spread_keys(backend: &RedisBackend) -> bool {
    let findings = backend.probe().await.unwrap().findings;
    findings.iter().any(|finding| finding.problem.contains("different servers"))
}

#[tokio::test]
async fn full_server_is_not_reported_as_several_servers() {
    let store = store().with_keys("ping=100ms");
    let mut admin = store.admin();
    admin.call(&["CONFIG", "SET", "maxmemory", "1"]);
    let backend = store.backend().await;
    assert!(!finds_spread_keys(&backend).await, "broken: refused writes are inconclusive");
    admin.call(&["CONFIG", "SET", "maxmemory", "0"]);
    let mut sessions = sessions(&backend).await;
    let batched = async {
        loop {
            let before = calls(&mut admin);
            let tokens = tokens(contend(&mut sessions, Prior::Nothing).await);
            release(&mut sessions, &tokens).await.into_iter().for_each(|freed| freed.unwrap());
            if calls(&mut admin) - before < 2 * MANY as u64 / 3 {
                return;
            }
        }
    };
    soon("calls are batched once the server has memory", batched).await;
}

#[tokio::test]
async fn user_without_rights_to_the_keys_of_the_probe_reports_no_spread_keys() {
    let store = store();
    let mut admin = store.admin();
    admin.create_user();
    admin.call(&["ACL", "SETUSER", common::USER, "resetkeys", "~simba:{row-*}*"]);
    let backend = store.backend_as_is().await;
    assert!(!finds_spread_keys(&backend).await, "broken: a missing right is inconclusive");
    let simba = common::simba(backend, long());
    simba.locker(common::name()).lock().await.unwrap().release().await.unwrap();
}

/// A server without memory refuses new keys, but can delete keys.
#[tokio::test]
async fn releases_are_executed_although_the_server_is_full() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    let (holders, others) = sessions.split_at_mut(MANY / 2);
    let held = tokens(contend(holders, Prior::Nothing).await);
    admin.call(&["CONFIG", "SET", "maxmemory", "1"]);
    let (freed, taken) = tokio::join!(release(holders, &held), contend(others, Prior::Nothing));
    freed.into_iter().for_each(|freed| freed.unwrap());
    assert!(taken.iter().any(Result::is_err), "the server is full");
    assert!((0..MANY / 2).all(|n| admin.int(&["EXISTS", &key(n, "")]) == 0));
}

#[tokio::test]
async fn flushed_scripts_are_loaded_again() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    admin.call(&["SCRIPT", "FLUSH", "SYNC"]);
    let before = statistic(&mut admin, "eval", "calls");
    let first = tokens(contend(&mut sessions, Prior::Nothing).await);
    release(&mut sessions, &first).await.into_iter().for_each(|freed| freed.unwrap());
    let sources = statistic(&mut admin, "eval", "calls");
    assert!(sources > before, "the scripts were missing");
    tokens(contend(&mut sessions, Prior::Nothing).await);
    assert_eq!(statistic(&mut admin, "eval", "calls"), sources, "the scripts are loaded");
}

/// A cluster refuses keys of several slots in one command.
#[tokio::test]
async fn cluster_of_one_node_works_with_a_standalone_url() {
    let setup = ["--cluster-enabled", "yes"].into_iter().fold(Setup::redis(), Setup::with_arg);
    let store = Store::private(setup);
    let mut admin = store.admin();
    admin.call(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    let up = |admin: &mut Admin| admin.text(&["CLUSTER", "INFO"]).unwrap().contains("cluster_state:ok");
    while !up(&mut admin) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let backend = store.backend().await;
    let mut sessions = sessions(&backend).await;
    let first = tokens(contend(&mut sessions, Prior::Nothing).await);
    assert_eq!(statistic(&mut admin, "eval", "rejected_calls"), 1, "the probe is refused");
    tokens(contend(&mut sessions, Prior::Held).await);
    release(&mut sessions, &first).await.into_iter().for_each(|freed| freed.unwrap());
    assert_eq!(held(&mut admin), 0);
    assert_eq!(statistic(&mut admin, "evalsha", "rejected_calls"), 0, "no other call is refused");
}
