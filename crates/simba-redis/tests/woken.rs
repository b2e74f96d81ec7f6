//! Wake-ups by a release, and the reservation of the mutex for the woken waiter.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use common::{Admin, Store, long, name, soon};
use simba_core::spi::{Answer, Backend as _, Claim, Holding, Intent, Prior, Session};
use simba_core::{ContenderId, FencingToken, MutexName};
use simba_redis::RedisBackend;
use simba_servers::Setup;

/// A mutex on a private server.
struct TestMutex {
    admin: Admin,
    backend: RedisBackend,
    mutex: MutexName,
    _store: Store,
}

/// A holder or waiter of the mutex.
struct Contender {
    session: Box<dyn Session>,
    id: ContenderId,
}

impl TestMutex {
    async fn new() -> Self {
        let store = Store::private(Setup::redis());
        let (admin, backend) = (store.admin(), store.backend().await);
        Self { admin, backend, mutex: name(), _store: store }
    }

    fn key(&self, suffix: &str) -> String {
        format!("simba:{{{}}}{suffix}", self.mutex)
    }

    async fn contender(&self) -> Contender {
        let id = ContenderId::generate();
        let claim = Claim::new(self.mutex.clone(), id.clone(), long());
        Contender { session: self.backend.open(claim).await.unwrap(), id }
    }

    async fn holder(&self) -> (Contender, FencingToken) {
        let mut holder = self.contender().await;
        let token = holder.acquire().await;
        (holder, token)
    }

    async fn waiter(&mut self) -> Contender {
        let mut waiter = self.contender().await;
        waiter.assert_refused().await;
        assert!(self.is_queued(&waiter));
        waiter
    }

    fn is_queued(&mut self, contender: &Contender) -> bool {
        let queue = self.key(":contender");
        self.admin.text(&["ZSCORE", &queue, contender.id.as_str()]).is_some()
    }

    /// Returns the contender that the mutex is reserved for.
    fn reserved_for(&mut self) -> Option<String> {
        let fence = self.admin.text(&["GET", &self.key(":fence")])?;
        let reservation = fence.strip_prefix('!')?;
        reservation.splitn(3, ' ').nth(2).map(String::from)
    }

    /// Deletes the holder and reserves the mutex for a contender, whether it waits or not.
    fn reserve(&mut self, ends: u64, token: u64, contender: &Contender) {
        let fence = format!("!{ends} {token} {}", contender.id);
        self.admin.call(&["DEL", &self.key("")]);
        self.admin.call(&["SET", &self.key(":fence"), &fence, "PX", "100000"]);
    }

    /// Returns a time in the server's milliseconds at which a reservation made now has not ended.
    fn future_ms(&mut self) -> u64 {
        let reply = self.admin.call(&["TIME"]);
        let part = |at: usize| reply.array().unwrap()[at].text().unwrap().parse::<u64>().unwrap();
        part(0) * 1000 + part(1) / 1000 + 900
    }
}

impl Contender {
    async fn acquire(&mut self) -> FencingToken {
        match self.session.contend(Prior::Nothing).await.unwrap() {
            Answer::Ours(ours) => ours.token.unwrap(),
            other => panic!("it is free: {other:?}"),
        }
    }

    async fn assert_refused(&mut self) {
        let answer = self.session.contend(Prior::Nothing).await.unwrap();
        assert!(!matches!(answer, Answer::Ours(_)), "it is not free: {answer:?}");
    }

    async fn release(&mut self, token: FencingToken) {
        self.session.release(Holding::Under(token)).await.unwrap();
    }
}

#[tokio::test]
async fn woken_waiter_acquires_and_leaves_no_queue_entry() {
    let mut test = TestMutex::new().await;
    let (mut holder, token) = test.holder().await;
    let mut waiter = test.waiter().await;
    holder.release(token).await;
    assert_eq!(test.reserved_for().as_deref(), Some(waiter.id.as_str()));
    assert!(!test.is_queued(&waiter));
    assert!(waiter.acquire().await > token);
    for key in [":contender", ":alive"].map(|suffix| test.key(suffix)) {
        assert_eq!(test.admin.int(&["EXISTS", &key]), 0, "{key}");
    }
}

/// A peer acquires the reserved mutex, so the waiter is queued again. Then the mutex is reserved for it once more.
#[tokio::test]
async fn requeued_waiter_that_acquires_has_no_queue_entry() {
    let mut test = TestMutex::new().await;
    let (mut holder, token) = test.holder().await;
    let mut waiter = test.waiter().await;
    holder.release(token).await;
    test.admin.call(&["SET", &test.key(""), "peer@host", "PX", "60000"]);
    waiter.assert_refused().await;
    assert!(test.is_queued(&waiter));
    let ends = test.future_ms();
    test.reserve(ends, token.get(), &waiter);
    waiter.acquire().await;
    assert!(!test.is_queued(&waiter));
}

#[tokio::test]
async fn reservation_keeps_a_token_ahead_of_the_clock() {
    let mut test = TestMutex::new().await;
    let (_holder, _) = test.holder().await;
    let mut waiter = test.waiter().await;
    let (ends, ahead) = (test.future_ms(), 4_102_444_800_000_000);
    test.reserve(ends, ahead, &waiter);
    assert_eq!(waiter.acquire().await.get(), ahead + 1);
}

/// A waiter that is too late for its reservation queues again.
#[tokio::test]
async fn expired_reservation_gives_no_precedence() {
    let mut test = TestMutex::new().await;
    let (_holder, token) = test.holder().await;
    let (mut first, mut second) = (test.waiter().await, test.waiter().await);
    test.reserve(1_700_000_000_000, token.get(), &second);
    second.assert_refused().await;
    assert_eq!(test.reserved_for().as_deref(), Some(first.id.as_str()));
    first.acquire().await;
}

/// A server whose clock was set back must not block the mutex until the old time.
#[tokio::test]
async fn reservation_of_more_than_a_second_is_ignored() {
    let mut test = TestMutex::new().await;
    let (holder, token) = test.holder().await;
    let hour = test.future_ms() + 3_600_000;
    test.reserve(hour, token.get(), &holder);
    test.contender().await.acquire().await;
}

#[tokio::test]
async fn waiter_with_an_expired_entry_is_not_woken() {
    let mut test = TestMutex::new().await;
    let (mut holder, token) = test.holder().await;
    let (stopped, next) = (test.waiter().await, test.waiter().await);
    test.admin.call(&["ZADD", &test.key(":alive"), "1700000000000.5", stopped.id.as_str()]);
    holder.release(token).await;
    assert_eq!(test.reserved_for().as_deref(), Some(next.id.as_str()));
}

/// A waiter that could not subscribe in time polls: it is not treated as dead.
#[tokio::test]
async fn waiter_without_a_subscription_keeps_its_turn() {
    let mut test = TestMutex::new().await;
    let (mut holder, token) = test.holder().await;
    test.admin.call(&["ACL", "SETUSER", common::USER, "-subscribe"]);
    let mut unsubscribed = test.waiter().await;
    holder.release(token).await;
    assert_eq!(test.reserved_for().as_deref(), Some(unsubscribed.id.as_str()));
    unsubscribed.acquire().await;
}

/// A woken waiter that leaves passes the reservation on, or ends it if there is no other waiter.
#[tokio::test]
async fn unused_reservation_is_passed_on_or_ended() {
    let mut test = TestMutex::new().await;
    let (mut holder, token) = test.holder().await;
    let (mut first, mut second) = (test.waiter().await, test.waiter().await);
    holder.release(token).await;
    assert_eq!(test.reserved_for().as_deref(), Some(first.id.as_str()));
    first.session.release(Holding::Nothing).await.unwrap();
    assert_eq!(test.reserved_for().as_deref(), Some(second.id.as_str()));
    second.session.release(Holding::Nothing).await.unwrap();
    assert!(test.contender().await.acquire().await > token, "the mutex is free");
}

/// A JVM peer with the same id acquires the mutex that was reserved for us. It does not write the fence.
#[tokio::test]
async fn hold_of_a_jvm_peer_with_the_same_id_is_not_adopted() {
    let mut test = TestMutex::new().await;
    let (mut holder, token) = test.holder().await;
    let mut waiter = test.waiter().await;
    holder.release(token).await;
    test.admin.call(&["SET", &test.key(""), waiter.id.as_str(), "PX", "60000"]);
    let answer = waiter.session.contend(Prior::Unknown).await.unwrap();
    assert!(matches!(&answer, Answer::Held(seen) if seen.owner == waiter.id), "{answer:?}");
    waiter.session.release(Holding::Unknown).await.unwrap();
    assert_eq!(test.admin.int(&["EXISTS", &test.key("")]), 1, "the peer still holds it");
}

/// One release notifies the waiter and the observers.
#[tokio::test]
async fn release_with_a_waiter_notifies_observers_too() {
    let mut test = TestMutex::new().await;
    let (mut holder, token) = test.holder().await;
    let mut waiter = test.waiter().await;
    let claim = Claim::new(test.mutex.clone(), ContenderId::generate(), long());
    let mut observer = test.backend.open(claim.with_intent(Intent::Observe)).await.unwrap();
    for channel in ["its releases", "its acquisitions"] {
        soon(channel, observer.changed()).await.unwrap();
    }
    assert!(observer.inspect().await.unwrap().is_some());
    // The observer's mark in the fence survives a renewal.
    assert!(matches!(holder.session.contend(Prior::Held).await.unwrap(), Answer::Ours(_)));
    holder.release(token).await;
    soon("the observer is notified", observer.changed()).await.unwrap();
    assert_eq!(test.reserved_for().as_deref(), Some(waiter.id.as_str()));
    waiter.acquire().await;
}

#[tokio::test]
async fn mutex_is_released_although_the_waiters_cannot_be_read() {
    let mut test = TestMutex::new().await;
    let (mut holder, token) = test.holder().await;
    let _waiter = test.waiter().await;
    test.admin.call(&["SET", &test.key(":alive"), "of another kind"]);
    let result = holder.session.release(Holding::Under(token)).await;
    assert_eq!(test.admin.int(&["EXISTS", &test.key("")]), 0, "{result:?}");
}

#[tokio::test]
async fn waiter_is_woken_although_the_server_is_full() {
    let mut test = TestMutex::new().await;
    let (mut holder, token) = test.holder().await;
    let mut waiter = test.waiter().await;
    soon("it is subscribed", waiter.session.changed()).await.unwrap();
    test.admin.call(&["CONFIG", "SET", "maxmemory", "1"]);
    holder.release(token).await;
    soon("it is woken", waiter.session.changed()).await.unwrap();
    test.admin.call(&["CONFIG", "SET", "maxmemory", "0"]);
    waiter.acquire().await;
}
