//! Many calls that go to the server as one, and what must not come of that.

#![allow(clippy::unwrap_used, reason = "a test, by hand")]

mod common;

use std::collections::HashMap;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use common::{Admin, Store, long, soon};
use futures_util::future::join_all;
use simba_core::{
    Answer, Backend as _, Claim, ContenderId, ErrorKind, FencingToken, Holding, Intent, Lease, MutexName,
    Operate as _, Prior, Result, Session,
};
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
    soon("everyone is told", all).await.into_iter().for_each(|changed| changed.unwrap());
}

fn tokens(answers: Vec<Result<Answer>>) -> Vec<FencingToken> {
    let token = |answer: Result<Answer>| match answer.unwrap() {
        Answer::Ours(ours) => ours.token.unwrap(),
        other => panic!("nobody else has it: {other:?}"),
    };
    answers.into_iter().map(token).collect()
}

/// How often the server was asked to run a script by its name.
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
async fn many_calls_at_once_are_few_for_the_server() {
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
async fn a_lease_is_whole_after_a_shared_renewal() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    tokens(contend(&mut sessions, Prior::Nothing).await);
    for n in 0..MANY {
        admin.ask(&["PEXPIRE", &key(n, ""), "5000"]);
    }
    tokens(contend(&mut sessions, Prior::Held).await);
    let whole = i64::try_from(long().total().as_millis()).unwrap();
    for n in 0..MANY {
        let left = admin.int(&["PTTL", &key(n, "")]);
        assert!(left > whole - 2000 && left <= whole, "{left}");
        assert!(admin.int(&["PTTL", &key(n, ":fence")]) > 86_400_000);
    }
}

/// The fence of a mutex in use lasts for a day, though not each call extends it.
#[tokio::test]
async fn a_fence_in_use_lasts() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    // The first renewal in a thousand seconds extends a fence: with such a lease, every renewal.
    let lease = Lease::new(Duration::from_secs(900), Duration::from_secs(600)).unwrap();
    let mut sessions = sessions_with(&backend, lease).await;
    tokens(contend(&mut sessions, Prior::Nothing).await);
    // As if it had been written years ago, and were about to end.
    let age = |admin: &mut Admin| {
        for n in 0..MANY {
            let fence = key(n, ":fence");
            let last = admin.text(&["GET", &fence]).unwrap();
            admin.ask(&["SET", &fence, &format!("1600000000000000{}", &last[16..]), "PX", "100000"]);
        }
    };
    let last = |admin: &mut Admin| (0..MANY).map(|n| admin.int(&["PTTL", &key(n, ":fence")])).min().unwrap();
    let day = 86_400_000;
    assert!(last(&mut admin) > day);
    age(&mut admin);
    let old = tokens(contend(&mut sessions, Prior::Held).await);
    assert!(old.iter().all(|token| token.get() == 1_600_000_000_000_000));
    assert!(last(&mut admin) > day, "a renewal extends it");
    release(&mut sessions, &old).await.into_iter().for_each(|freed| freed.unwrap());
    age(&mut admin);
    let fresh = tokens(contend(&mut sessions, Prior::Nothing).await);
    assert!(fresh.iter().all(|token| token.get() > 1_600_000_000_000_000));
    assert!(last(&mut admin) > day, "an acquisition extends it");
    // In place, but nothing of a longer one is left over.
    release(&mut sessions, &fresh).await.into_iter().for_each(|freed| freed.unwrap());
    for n in (0..MANY).step_by(2) {
        admin.ask(&["APPEND", &key(n, ":fence"), "-and-more"]);
    }
    let next = tokens(contend(&mut sessions, Prior::Nothing).await);
    assert!(statistic(&mut admin, "setrange", "calls") > 0);
    assert_eq!(tokens(contend(&mut sessions, Prior::Held).await), next);
}

/// A release that comes late leaves a later hold of its own contender alone.
#[tokio::test]
async fn a_shared_release_under_an_old_token_frees_nothing() {
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

/// A clock that went back, and a fence of another kind: tokens grow all the same.
#[tokio::test]
async fn tokens_grow_where_the_fence_is_ahead_or_broken() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    let ahead = 4_102_444_800_000_000_u64;
    for n in 0..MANY {
        let (fence, last) =
            (key(n, ":fence"), format!("{} 0000000000000001 00000001000 someone", ahead + n as u64));
        match n % 4 {
            0 => admin.ask(&["SET", &fence, &last]),
            // A promise that was not kept.
            1 => admin.ask(&["SET", &fence, &format!("!1700000000000 {last}")]),
            2 => admin.ask(&["HSET", &fence, "a", "b"]),
            _ => admin.ask(&["SET", &fence, "nonsense"]),
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
async fn what_another_has_is_left_alone_and_told() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    for n in (0..MANY).step_by(2) {
        admin.ask(&["SET", &key(n, ""), "peer@host", "PX", "60000"]);
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
    // And what another took meanwhile is neither freed nor renewed.
    for n in (1..MANY).step_by(2) {
        admin.ask(&["SET", &key(n, ""), "peer@host", "PX", "60000"]);
    }
    let late = sessions.iter_mut().skip(1).step_by(2).zip(&tokens);
    join_all(late.map(|(session, token)| session.release(Holding::Under(*token)))).await;
    assert_eq!(held(&mut admin), MANY);
    for answer in contend(&mut sessions, Prior::Held).await {
        assert!(matches!(answer.unwrap(), Answer::Held(seen) if seen.owner.as_str() == "peer@host"));
    }
}

/// Whoever waits is woken, also by a release that found company.
#[tokio::test]
async fn a_shared_release_wakes_who_waits() {
    let store = store();
    let (backend, other) = (store.backend().await, store.backend().await);
    let (mut sessions, mut waiters) = (sessions(&backend).await, sessions(&other).await);
    let held = tokens(contend(&mut sessions, Prior::Nothing).await);
    for answer in contend(&mut waiters, Prior::Nothing).await {
        assert!(matches!(answer.unwrap(), Answer::Held(_)));
    }
    // The first change is that there will be more.
    changed(&mut waiters).await;
    for answer in contend(&mut waiters, Prior::Nothing).await {
        assert!(matches!(answer.unwrap(), Answer::Held(_)));
    }
    release(&mut sessions, &held).await.into_iter().for_each(|freed| freed.unwrap());
    changed(&mut waiters).await;
    tokens(contend(&mut waiters, Prior::Nothing).await);
}

/// Promises the mutex of each fence to another for a tenth of a second; its end, in the server's milliseconds.
const PROMISE: &str = "local now = redis.call('TIME')
    local ends = string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000) + 100)
    for _, fence in ipairs(KEYS) do redis.call('SET', fence, '!' .. ends .. ' 1700000000000000 peer@host') end
    return ends";

/// What is promised to one is not to be had by another, also where many look at once.
#[tokio::test]
async fn what_is_promised_to_another_is_left_to_it() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let promised: Vec<usize> = (0..MANY).step_by(5).collect();
    let count = promised.len().to_string();
    let fences: Vec<String> = promised.iter().map(|n| key(*n, ":fence")).collect();
    let words: Vec<&str> =
        ["EVAL", PROMISE, &count].into_iter().chain(fences.iter().map(String::as_str)).collect();
    // A machine that stands still lets the promises end before anybody looks.
    for left in std::iter::repeat_with(|| admin.text(&words).unwrap().parse::<u64>().unwrap()) {
        let mut sessions = sessions(&backend).await;
        let answers = contend(&mut sessions, Prior::Nothing).await;
        let mut tokens = HashMap::new();
        for (n, answer) in answers.into_iter().enumerate() {
            match answer.unwrap() {
                Answer::Ours(ours) => drop(tokens.insert(n, ours.token.unwrap())),
                Answer::Vacant => assert!(promised.contains(&n)),
                Answer::Held(seen) => panic!("{n} is held by {}", seen.owner),
            }
        }
        for token in promised.iter().filter_map(|n| tokens.get(n)) {
            assert!(token.get() / 1000 >= left, "{} is before the end of the promise, {left}", token.get());
        }
        if tokens.len() < MANY {
            return;
        }
        for (n, token) in tokens {
            sessions[n].release(Holding::Under(token)).await.unwrap();
        }
    }
}

/// Whoever watches is told of a shared release, and nobody else is.
#[tokio::test]
async fn a_shared_release_tells_who_watches() {
    let store = store();
    let (backend, other, mut admin) = (store.backend().await, store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    let held = tokens(contend(&mut sessions, Prior::Nothing).await);
    let mut watchers = Vec::new();
    for n in (0..MANY).step_by(5) {
        let claim = Claim::new(mutex(n), ContenderId::generate(), long()).with_intent(Intent::Observe);
        watchers.push(other.open(claim).await.unwrap());
    }
    // The first changes are that there will be more, one for each of the two channels.
    changed(&mut watchers).await;
    changed(&mut watchers).await;
    for watcher in &mut watchers {
        assert!(watcher.inspect().await.unwrap().is_some());
    }
    // A hold that lapsed and was taken anew is the same to them.
    let lapsed =
        sessions.iter_mut().zip(&held).map(|(session, token)| session.contend(Prior::Lapsed(*token)));
    let held = [tokens(join_all(lapsed.take(MANY / 2)).await), held[MANY / 2..].to_vec()].concat();
    let before = statistic(&mut admin, "publish", "calls");
    release(&mut sessions, &held).await.into_iter().for_each(|freed| freed.unwrap());
    changed(&mut watchers).await;
    let told = statistic(&mut admin, "publish", "calls") - before;
    assert!(told <= (MANY / 2 + MANY / 10) as u64, "{told} events for {} watchers", watchers.len());
}

/// Renewals, releases and first looks at once: each gets its own reply, and each its own exception.
#[tokio::test]
async fn calls_of_every_kind_share_a_script() {
    let store = store();
    let (backend, other, mut admin) = (store.backend().await, store.backend().await, store.admin());
    let (mut sessions, mut waiters) = (sessions(&backend).await, sessions(&other).await);
    // Those of each kind come one by one between those of the others; some of each are not the usual case.
    let (renewed, left) = (|n: usize| n.is_multiple_of(3), |n: usize| n % 3 == 1);
    let strange = |n: usize| n.is_multiple_of(7);
    let held = |n: &usize| renewed(*n) || left(*n);
    let holders = sessions.iter_mut().enumerate().filter(|(n, _)| held(n));
    let first = tokens(join_all(holders.map(|(_, session)| session.contend(Prior::Nothing))).await);
    let first: HashMap<usize, FencingToken> = (0..MANY).filter(held).zip(first).collect();
    for n in (0..MANY).filter(|n| strange(*n)) {
        match n {
            n if left(n) => drop(waiters[n].contend(Prior::Nothing).await.unwrap()),
            n => drop(admin.ask(&["SET", &key(n, ""), "peer@host", "PX", "60000"])),
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
            None => assert!(left(n)),
            Some(Answer::Ours(ours)) if renewed(n) => assert_eq!(ours.token, first.get(&n).copied(), "{n}"),
            Some(Answer::Ours(ours)) => assert!(!strange(n) && ours.token.is_some(), "{n}"),
            Some(Answer::Held(seen)) => assert_eq!((strange(n), seen.owner.as_str()), (true, "peer@host")),
            Some(Answer::Vacant) => panic!("{n} is held"),
        }
    }
    let made = calls(&mut admin) - before;
    assert!(made < MANY as u64 / 2, "{made} calls for {MANY}");
    for n in (0..MANY).filter(|n| left(*n)) {
        let next = match strange(n) {
            true => waiters[n].contend(Prior::Nothing).await,
            false => other_than(&other, n).await,
        };
        assert!(matches!(next.unwrap(), Answer::Ours(_)), "{n} is free for who waited, or for anybody");
    }
}

async fn other_than(backend: &RedisBackend, n: usize) -> Result<Answer> {
    let claim = Claim::new(mutex(n), ContenderId::generate(), long());
    backend.open(claim).await?.contend(Prior::Nothing).await
}

/// The order of two calls of one session is theirs, whatever they are sent with.
#[tokio::test]
async fn a_release_after_a_dropped_acquisition_comes_after_it() {
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

/// What a shared release leaves to one of its own is made though nobody hears that it is to be.
#[tokio::test]
async fn a_release_that_is_dropped_twice_is_made_though_others_wait() {
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
    // Behind all that was sent on this connection.
    backend.operate().unwrap().read(&mutex(0)).await.unwrap();
    assert_eq!(held(&mut admin), 0);
}

/// What is refused because of one is asked for by each.
#[tokio::test]
async fn one_mutex_without_rights_keeps_nobody_else_out() {
    let store = store();
    let mut admin = store.admin();
    admin.admit();
    let rights = "resetkeys ~simba:{many-?}* ~simba:{many-??}* ~simba:{many-1[0-8]?}*";
    let words: Vec<&str> = ["ACL", "SETUSER", common::USER].into_iter().chain(rights.split(' ')).collect();
    admin.ask(&words);
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

/// Rights of an older version, which wrote each fence anew.
#[tokio::test]
async fn a_right_that_is_missing_costs_speed_alone() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    admin.ask(&["ACL", "SETUSER", common::USER, "-setrange"]);
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

/// Returns whether the handle believes that keys are spread over servers.
async fn finds_spread_keys(backend: &RedisBackend) -> bool {
    let findings = backend.probe().await.unwrap().findings;
    findings.iter().any(|finding| finding.problem.contains("different servers"))
}

#[tokio::test]
async fn a_server_that_was_full_at_the_connect_is_not_taken_for_several() {
    let store = store().with_keys("ping=100ms");
    let mut admin = store.admin();
    admin.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    let backend = store.backend().await;
    assert!(!finds_spread_keys(&backend).await, "broken: refused writes show nothing");
    admin.ask(&["CONFIG", "SET", "maxmemory", "0"]);
    let mut sessions = sessions(&backend).await;
    let shares = async {
        loop {
            let before = calls(&mut admin);
            let tokens = tokens(contend(&mut sessions, Prior::Nothing).await);
            release(&mut sessions, &tokens).await.into_iter().for_each(|freed| freed.unwrap());
            if calls(&mut admin) - before < 2 * MANY as u64 / 3 {
                return;
            }
        }
    };
    soon("calls share a script once the server has room", shares).await;
}

#[tokio::test]
async fn a_user_without_a_right_to_the_keys_of_the_probe_finds_no_spread_keys() {
    let store = store();
    let mut admin = store.admin();
    admin.admit();
    admin.ask(&["ACL", "SETUSER", common::USER, "resetkeys", "~simba:{row-*}*"]);
    let backend = store.backend_as_is().await;
    assert!(!finds_spread_keys(&backend).await, "broken: a missing right shows nothing");
    let simba = common::simba(backend, long());
    simba.locker(common::name()).lock().await.unwrap().release().await.unwrap();
}

/// A server without memory takes no new key, and frees what it has.
#[tokio::test]
async fn releases_are_made_though_the_server_is_full() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    let (holders, others) = sessions.split_at_mut(MANY / 2);
    let held = tokens(contend(holders, Prior::Nothing).await);
    admin.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    let (freed, taken) = tokio::join!(release(holders, &held), contend(others, Prior::Nothing));
    freed.into_iter().for_each(|freed| freed.unwrap());
    assert!(taken.iter().any(Result::is_err), "the server is full");
    assert!((0..MANY / 2).all(|n| admin.int(&["EXISTS", &key(n, "")]) == 0));
}

#[tokio::test]
async fn a_server_that_forgot_the_scripts_is_told_again() {
    let store = store();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mut sessions = sessions(&backend).await;
    admin.ask(&["SCRIPT", "FLUSH", "SYNC"]);
    let before = statistic(&mut admin, "eval", "calls");
    let first = tokens(contend(&mut sessions, Prior::Nothing).await);
    release(&mut sessions, &first).await.into_iter().for_each(|freed| freed.unwrap());
    let sources = statistic(&mut admin, "eval", "calls");
    assert!(sources > before, "it had forgotten them");
    tokens(contend(&mut sessions, Prior::Nothing).await);
    assert_eq!(statistic(&mut admin, "eval", "calls"), sources, "it knows them again");
}

/// One address, and a cluster behind it that refuses keys of several slots in one command.
#[tokio::test]
async fn a_cluster_of_one_behind_a_plain_address_works() {
    let setup = ["--cluster-enabled", "yes"].into_iter().fold(Setup::redis(), Setup::with_arg);
    let store = Store::private(setup);
    let mut admin = store.admin();
    admin.ask(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    let up = |admin: &mut Admin| admin.text(&["CLUSTER", "INFO"]).unwrap().contains("cluster_state:ok");
    while !up(&mut admin) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let backend = store.backend().await;
    let mut sessions = sessions(&backend).await;
    let first = tokens(contend(&mut sessions, Prior::Nothing).await);
    assert_eq!(statistic(&mut admin, "eval", "rejected_calls"), 1, "it refuses the probe");
    tokens(contend(&mut sessions, Prior::Held).await);
    release(&mut sessions, &first).await.into_iter().for_each(|freed| freed.unwrap());
    assert_eq!(held(&mut admin), 0);
    assert_eq!(statistic(&mut admin, "evalsha", "rejected_calls"), 0, "nothing else is refused");
}
