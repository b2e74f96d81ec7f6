//! Who is woken by a release, and what comes of the promise.

#![allow(clippy::unwrap_used, reason = "a test, by hand")]

mod common;

use common::{Admin, Store, long, name, soon};
use simba_core::{
    Answer, Backend as _, Claim, ContenderId, FencingToken, Holding, Intent, MutexName, Prior, Session,
};
use simba_redis::RedisBackend;
use simba_servers::Setup;

/// One mutex, and those who want it.
struct Scene {
    admin: Admin,
    backend: RedisBackend,
    mutex: MutexName,
    _store: Store,
}

/// One who has the mutex or waits for it.
struct One {
    session: Box<dyn Session>,
    id: ContenderId,
}

impl Scene {
    async fn new() -> Self {
        let store = Store::private(Setup::redis());
        let (admin, backend) = (store.admin(), store.backend().await);
        Self { admin, backend, mutex: name(), _store: store }
    }

    fn key(&self, suffix: &str) -> String {
        format!("simba:{{{}}}{suffix}", self.mutex)
    }

    async fn one(&self) -> One {
        let id = ContenderId::generate();
        let claim = Claim::new(self.mutex.clone(), id.clone(), long());
        One { session: self.backend.open(claim).await.unwrap(), id }
    }

    async fn holder(&self) -> (One, FencingToken) {
        let mut holder = self.one().await;
        let token = holder.takes().await;
        (holder, token)
    }

    async fn waiter(&mut self) -> One {
        let mut waiter = self.one().await;
        waiter.is_refused().await;
        assert!(self.is_queued(&waiter));
        waiter
    }

    fn is_queued(&mut self, one: &One) -> bool {
        let queue = self.key(":contender");
        self.admin.text(&["ZSCORE", &queue, one.id.as_str()]).is_some()
    }

    /// Whom the mutex is promised to.
    fn promised(&mut self) -> Option<String> {
        let fence = self.admin.text(&["GET", &self.key(":fence")])?;
        let promise = fence.strip_prefix('!')?;
        promise.splitn(3, ' ').nth(2).map(String::from)
    }

    /// Promises the free mutex to somebody until then, whether anybody waits or not.
    fn promise(&mut self, ends: u64, token: u64, whom: &One) {
        let words = format!("!{ends} {token} {}", whom.id);
        self.admin.ask(&["DEL", &self.key("")]);
        self.admin.ask(&["SET", &self.key(":fence"), &words, "PX", "100000"]);
    }

    /// A moment within that of a promise that is made now, in the server's milliseconds.
    fn soon(&mut self) -> u64 {
        let reply = self.admin.ask(&["TIME"]);
        let part = |at: usize| reply.array().unwrap()[at].text().unwrap().parse::<u64>().unwrap();
        part(0) * 1000 + part(1) / 1000 + 90
    }
}

impl One {
    async fn takes(&mut self) -> FencingToken {
        match self.session.contend(Prior::Nothing).await.unwrap() {
            Answer::Ours(ours) => ours.token.unwrap(),
            other => panic!("it is to be had: {other:?}"),
        }
    }

    async fn is_refused(&mut self) {
        let answer = self.session.contend(Prior::Nothing).await.unwrap();
        assert!(!matches!(answer, Answer::Ours(_)), "it is not to be had: {answer:?}");
    }

    async fn releases(&mut self, token: FencingToken) {
        self.session.release(Holding::Under(token)).await.unwrap();
    }
}

#[tokio::test]
async fn a_woken_waiter_takes_the_mutex_and_leaves_nothing_in_the_queue() {
    let mut scene = Scene::new().await;
    let (mut holder, token) = scene.holder().await;
    let mut waiter = scene.waiter().await;
    holder.releases(token).await;
    assert_eq!(scene.promised().as_deref(), Some(waiter.id.as_str()));
    assert!(!scene.is_queued(&waiter));
    assert!(waiter.takes().await > token);
    for key in [":contender", ":alive"].map(|suffix| scene.key(suffix)) {
        assert_eq!(scene.admin.int(&["EXISTS", &key]), 0, "{key}");
    }
}

/// A peer took what was promised, so the waiter went back to its place; then it comes to its turn all the same.
#[tokio::test]
async fn a_waiter_that_was_passed_and_wins_has_no_place_any_more() {
    let mut scene = Scene::new().await;
    let (mut holder, token) = scene.holder().await;
    let mut waiter = scene.waiter().await;
    holder.releases(token).await;
    scene.admin.ask(&["SET", &scene.key(""), "peer@host", "PX", "60000"]);
    waiter.is_refused().await;
    assert!(scene.is_queued(&waiter));
    let ends = scene.soon();
    scene.promise(ends, token.get(), &waiter);
    waiter.takes().await;
    assert!(!scene.is_queued(&waiter));
}

#[tokio::test]
async fn a_promise_keeps_a_token_that_is_ahead_of_the_clock() {
    let mut scene = Scene::new().await;
    let (_holder, _) = scene.holder().await;
    let mut waiter = scene.waiter().await;
    let (ends, ahead) = (scene.soon(), 4_102_444_800_000_000);
    scene.promise(ends, ahead, &waiter);
    assert_eq!(waiter.takes().await.get(), ahead + 1);
}

/// Whoever came too late for its promise waits its turn again.
#[tokio::test]
async fn a_promise_that_is_over_lets_nobody_pass() {
    let mut scene = Scene::new().await;
    let (_holder, token) = scene.holder().await;
    let (mut first, mut second) = (scene.waiter().await, scene.waiter().await);
    scene.promise(1_700_000_000_000, token.get(), &second);
    second.is_refused().await;
    assert_eq!(scene.promised().as_deref(), Some(first.id.as_str()));
    first.takes().await;
}

/// A server whose clock was set back does not keep everybody out until it has caught up.
#[tokio::test]
async fn a_promise_is_never_long() {
    let mut scene = Scene::new().await;
    let (gone, token) = scene.holder().await;
    let hour = scene.soon() + 3_600_000;
    scene.promise(hour, token.get(), &gone);
    scene.one().await.takes().await;
}

#[tokio::test]
async fn a_waiter_whose_place_is_over_is_not_woken() {
    let mut scene = Scene::new().await;
    let (mut holder, token) = scene.holder().await;
    let (stopped, next) = (scene.waiter().await, scene.waiter().await);
    scene.admin.ask(&["ZADD", &scene.key(":alive"), "1700000000000.5", stopped.id.as_str()]);
    holder.releases(token).await;
    assert_eq!(scene.promised().as_deref(), Some(next.id.as_str()));
}

/// It could not subscribe in time, and looks by itself: it is not taken for dead.
#[tokio::test]
async fn a_waiter_that_does_not_listen_keeps_its_turn() {
    let mut scene = Scene::new().await;
    let (mut holder, token) = scene.holder().await;
    scene.admin.ask(&["ACL", "SETUSER", common::USER, "-subscribe"]);
    let mut deaf = scene.waiter().await;
    holder.releases(token).await;
    assert_eq!(scene.promised().as_deref(), Some(deaf.id.as_str()));
    deaf.takes().await;
}

/// A waiter that was woken and goes away passes the promise on, or takes it back.
#[tokio::test]
async fn a_promise_that_nobody_wants_any_more_goes_on_or_ends() {
    let mut scene = Scene::new().await;
    let (mut holder, token) = scene.holder().await;
    let (mut first, mut second) = (scene.waiter().await, scene.waiter().await);
    holder.releases(token).await;
    assert_eq!(scene.promised().as_deref(), Some(first.id.as_str()));
    first.session.release(Holding::Nothing).await.unwrap();
    assert_eq!(scene.promised().as_deref(), Some(second.id.as_str()));
    second.session.release(Holding::Nothing).await.unwrap();
    assert!(scene.one().await.takes().await > token, "it is free for anybody");
}

/// A peer of the other kind that has our id, and says nothing in the fence: it was ours to take, and it was not us.
#[tokio::test]
async fn what_a_twin_took_after_a_promise_is_not_adopted() {
    let mut scene = Scene::new().await;
    let (mut holder, token) = scene.holder().await;
    let mut waiter = scene.waiter().await;
    holder.releases(token).await;
    scene.admin.ask(&["SET", &scene.key(""), waiter.id.as_str(), "PX", "60000"]);
    let answer = waiter.session.contend(Prior::Unknown).await.unwrap();
    assert!(matches!(&answer, Answer::Held(seen) if seen.owner == waiter.id), "{answer:?}");
    waiter.session.release(Holding::Unknown).await.unwrap();
    assert_eq!(scene.admin.int(&["EXISTS", &scene.key("")]), 1, "it is the twin's");
}

/// One release tells both: who waits, and who only wants to know.
#[tokio::test]
async fn a_release_with_a_waiter_tells_watchers_too() {
    let mut scene = Scene::new().await;
    let (mut holder, token) = scene.holder().await;
    let mut waiter = scene.waiter().await;
    let claim = Claim::new(scene.mutex.clone(), ContenderId::generate(), long());
    let mut watcher = scene.backend.open(claim.with_intent(Intent::Observe)).await.unwrap();
    for channel in ["its releases", "its acquisitions"] {
        soon(channel, watcher.changed()).await.unwrap();
    }
    assert!(watcher.inspect().await.unwrap().is_some());
    // A mark outlives a renewal.
    assert!(matches!(holder.session.contend(Prior::Held).await.unwrap(), Answer::Ours(_)));
    holder.releases(token).await;
    soon("the watcher is told", watcher.changed()).await.unwrap();
    assert_eq!(scene.promised().as_deref(), Some(waiter.id.as_str()));
    waiter.takes().await;
}

#[tokio::test]
async fn a_mutex_is_freed_though_nobody_can_tell_who_waits() {
    let mut scene = Scene::new().await;
    let (mut holder, token) = scene.holder().await;
    let _waiter = scene.waiter().await;
    scene.admin.ask(&["SET", &scene.key(":alive"), "of another kind"]);
    let told = holder.session.release(Holding::Under(token)).await;
    assert_eq!(scene.admin.int(&["EXISTS", &scene.key("")]), 0, "{told:?}");
}

#[tokio::test]
async fn a_waiter_is_woken_though_the_server_is_full() {
    let mut scene = Scene::new().await;
    let (mut holder, token) = scene.holder().await;
    let mut waiter = scene.waiter().await;
    soon("it hears", waiter.session.changed()).await.unwrap();
    scene.admin.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    holder.releases(token).await;
    soon("it is woken", waiter.session.changed()).await.unwrap();
    scene.admin.ask(&["CONFIG", "SET", "maxmemory", "0"]);
    waiter.takes().await;
}
