//! The rows of the fault matrix that a file can meet.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use common::player::{Player, play};
use common::{SOON, Sqlite};
use simba_core::clock::Sleep;
use simba_core::{
    Answer, Backend, Claim, Clock, ContenderId, Contention, ErrorKind, FencingToken, Lease, Moment,
    MutexName, Prior, Simba, SystemClock,
};
use simba_sqlite::{SqliteBackend, SqliteConfig};
use simba_tck::rounds;
use tokio::time::{sleep, timeout};

simba_tck::rows!(Sqlite::new());

#[test]
#[ignore = "the way into a process of a player"]
fn player() {
    play();
}

/// Survives two seconds in which the machine stands still.
fn lease() -> Lease {
    Lease::new(Duration::from_secs(2), Duration::from_secs(3)).unwrap()
}

async fn contention(store: &Sqlite) -> Contention {
    let contention = store.simba().await.contend("orders").with_lease(lease());
    contention.start().unwrap();
    contention
}

/// Row 55, the first half: somebody keeps the file locked for longer than any lease lasts.
#[tokio::test(flavor = "multi_thread")]
async fn row_55_a_writer_that_keeps_the_file_costs_a_lease_and_no_exclusion() {
    for _ in 0..rounds() {
        let store = Sqlite::new();
        let leader = contention(&store).await;
        let tenure = timeout(SOON, leader.acquired()).await.unwrap().unwrap();
        let heir = contention(&store).await;
        let writer = store.raw();
        writer.execute_batch("BEGIN IMMEDIATE").unwrap();
        let kept = SystemClock.now();
        let told = async {
            // The last try before the deadline has no time for an answer.
            loop {
                match leader.last_error() {
                    Some(error) if error.to_string().contains("locked") => return error,
                    _ => sleep(Duration::from_millis(2)).await,
                }
            }
        };
        let error = timeout(SOON, told).await.expect("a failed call says what is wrong");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        SystemClock.sleep_until(kept + lease().total() + Duration::from_secs(1)).await;
        assert!(!tenure.is_held(), "nobody holds past the lease");
        assert!(!leader.is_owner() && !heir.is_owner(), "nobody gains what cannot be written");
        writer.execute_batch("ROLLBACK").unwrap();
        let next = async {
            tokio::select! { biased; next = leader.acquired() => next, next = heir.acquired() => next }
        };
        let next = timeout(SOON, next).await.expect("somebody leads again").unwrap();
        assert!(next.token() > tenure.token(), "tokens grow");
    }
}

/// Row 55, the second half: a process is killed between its writes and its commit.
#[tokio::test(flavor = "multi_thread")]
async fn row_55_a_process_killed_in_a_transaction_leaves_nothing_of_it() {
    for _ in 0..rounds() {
        let store = Sqlite::new();
        let leader = contention(&store).await;
        let tenure = timeout(SOON, leader.acquired()).await.unwrap().unwrap();
        let mut writer = Player::start(store.path(), &["write"]);
        assert_eq!(writer.hear(), "writing");
        writer.kill();
        let deadline = tenure.deadline();
        while tenure.deadline() == deadline && tenure.is_held() {
            sleep(Duration::from_millis(2)).await;
        }
        assert!(tenure.is_held(), "what was not committed never was: the leader keeps its mutex");
        let other = store.simba().await;
        assert!(other.locker("orders").try_lock().await.unwrap().is_none(), "and others see it");
    }
}

/// A wall clock that jumps by an hour, back and forth, without a pattern.
#[derive(Debug, Default)]
struct Jumping(AtomicU64);

impl Clock for Jumping {
    fn now(&self) -> Moment {
        SystemClock.now()
    }

    fn sleep_until(&self, at: Moment) -> Sleep {
        SystemClock.sleep_until(at)
    }

    fn wall(&self) -> SystemTime {
        let hour = Duration::from_secs(3600);
        let look = self.0.fetch_add(1, Ordering::Relaxed);
        match look.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 {
            0 => SystemTime::now() + hour,
            _ => SystemTime::now() - hour,
        }
    }
}

/// Row 45: leases do not look at the wall clock, and tokens grow whatever it says.
#[tokio::test(flavor = "multi_thread")]
async fn row_45_a_wall_clock_that_jumps_changes_nothing() {
    let store = Sqlite::new();
    let connect =
        || SqliteBackend::connect_with_clock(SqliteConfig::new(store.path()), Arc::<Jumping>::default());
    let simba = Simba::builder(Arc::new(connect().await.unwrap())).lease(lease()).build();
    let held = simba.locker("orders").lock().await.unwrap();
    let other = Simba::builder(Arc::new(connect().await.unwrap())).lease(lease()).build();
    let mut last = 0;
    for _ in 0..100 {
        let guard = other.locker("bills").lock().await.unwrap();
        assert!(guard.token().get() > last, "tokens grow");
        last = guard.token().get();
        guard.release().await.unwrap();
        sleep(Duration::from_millis(10)).await;
    }
    assert!(held.is_held(), "a holder keeps its mutex");
    assert!(other.locker("orders").try_lock().await.unwrap().is_none(), "and keeps others out");
}

/// Nobody of another boot is alive, whatever its lease says.
#[tokio::test(flavor = "multi_thread")]
async fn a_reboot_voids_leases_and_places_and_keeps_the_token() {
    let store = Sqlite::new();
    let backend = store.backend().await;
    let mutex = MutexName::new("orders").unwrap();
    let mut sessions = Vec::new();
    let mut before = None;
    for _ in 0..3 {
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), common::long());
        let mut session = backend.open(claim).await.unwrap();
        match session.contend(Prior::Nothing).await.unwrap() {
            Answer::Ours(ours) => before = ours.token,
            Answer::Held(_) => {}
            Answer::Vacant => panic!("somebody holds it"),
        }
        sessions.push(session);
    }
    let boot = "UPDATE simba_mutex SET boot = 'another'; UPDATE simba_waiter SET boot = 'another';";
    store.raw().execute_batch(boot).unwrap();
    let record = backend.operate().unwrap().read(&mutex).await.unwrap();
    assert_eq!((record.owner, record.waiters), (None, Some(0)));
    let guard = store.simba().await.locker("orders").try_lock().await.unwrap().expect("nobody holds it");
    assert!(Some(guard.token()) > before, "tokens grow");
}

/// What a power cut may do under `synchronous = NORMAL`: the last commits are gone, and the token with them.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_grows_past_commits_that_were_lost() {
    let store = Sqlite::new();
    let simba = store.simba().await;
    let mut before = FencingToken::new(0);
    for _ in 0..3 {
        let guard = simba.locker("orders").lock().await.unwrap();
        before = guard.token();
        guard.release().await.unwrap();
    }
    store.raw().execute_batch("UPDATE simba_mutex SET token = 1").unwrap();
    let after = simba.locker("orders").lock().await.unwrap().token();
    assert!(after > before, "{after} after {before}");
}

/// Row 44: a token goes past the ends that a version has elsewhere; at the end of its own column it is an error.
#[tokio::test(flavor = "multi_thread")]
async fn row_44_a_token_at_its_end_is_told_and_never_wraps() {
    let store = Sqlite::new();
    let simba = store.simba().await;
    for end in [(1 << 31) - 2, (1_i64 << 32) - 2, i64::MAX] {
        simba.locker("orders").lock().await.unwrap().release().await.unwrap();
        store.raw().execute("UPDATE simba_mutex SET token = ?1", [end]).unwrap();
        let taken = simba.locker("orders").try_lock().await;
        if end < i64::MAX {
            assert!(taken.unwrap().unwrap().token().get() > end as u64, "tokens grow");
            continue;
        }
        let error = taken.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("at the end of its column"), "{error}");
    }
}

/// Two files under one name would have two owners: whoever has the old one open is told.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_taken_away_is_an_error_and_no_answer() {
    for replaced in [false, true] {
        let store = Sqlite::new();
        let simba = store.simba().await;
        let guard = simba.locker("orders").lock().await.unwrap();
        std::fs::remove_file(store.path()).unwrap();
        if replaced {
            Sqlite::at(store.path()).backend().await;
        }
        let error = simba.locker("bills").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("in use: restart"), "{error}");
        let error = guard.release().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }
}

/// Somebody tidied up: the bell is put up anew, and waiters are woken by it.
#[tokio::test(flavor = "multi_thread")]
async fn a_bell_that_is_taken_away_is_put_up_again() {
    let store = Sqlite::new();
    let (one, two) = (store.simba().await, store.simba().await);
    let bell = store.path().with_file_name("simba.db-bell");
    for _ in 0..3 {
        let guard = one.locker("orders").lock().await.unwrap();
        let locker = two.locker("orders");
        let waiting = tokio::spawn(async move { locker.lock().await });
        while one.operate().unwrap().read(&"orders".parse().unwrap()).await.unwrap().waiters != Some(1) {
            sleep(Duration::from_millis(2)).await;
        }
        // Queued is not subscribed yet.
        sleep(Duration::from_millis(50)).await;
        std::fs::remove_file(&bell).unwrap();
        // The watcher sees it go and puts another one up.
        timeout(SOON, async {
            while !bell.exists() {
                sleep(Duration::from_millis(2)).await
            }
        })
        .await
        .unwrap();
        sleep(Duration::from_millis(20)).await;
        guard.release().await.unwrap();
        let next = timeout(SOON, waiting).await.expect("the new bell is heard").unwrap().unwrap();
        next.release().await.unwrap();
    }
}

/// The poll of a waiter is 30 s: nothing but the poll of its handle explains it.
#[tokio::test(flavor = "multi_thread")]
async fn waiter_that_cannot_watch_the_bell_is_woken_by_its_handle() {
    let store = Sqlite::new();
    std::fs::create_dir(store.path().with_file_name("simba.db-bell")).unwrap();
    let (one, two) = (store.simba().await, store.simba().await);
    let guard = one.locker("orders").lock().await.unwrap();
    let locker = two.locker("orders");
    let waiting = tokio::spawn(async move { locker.lock().await });
    while one.operate().unwrap().read(&"orders".parse().unwrap()).await.unwrap().waiters != Some(1) {
        sleep(Duration::from_millis(2)).await;
    }
    // In the queue is not subscribed yet.
    sleep(Duration::from_millis(500)).await;
    guard.release().await.unwrap();
    let next = timeout(SOON, waiting).await.expect("the handle polls").unwrap().unwrap();
    next.release().await.unwrap();
}

/// The entry of a waiter lasts for 60 s: without another try it would keep everybody else out for as long.
#[tokio::test(flavor = "multi_thread")]
async fn dropped_session_leaves_the_queue_once_the_file_is_no_longer_locked() {
    let store = Sqlite::new();
    let (simba, backend) = (store.simba().await, store.backend().await);
    let guard = simba.locker("orders").lock().await.unwrap();
    let mutex = MutexName::new("orders").unwrap();
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), common::long());
    let mut session = backend.open(claim).await.unwrap();
    assert!(matches!(session.contend(Prior::Nothing).await, Ok(Answer::Held(_))));
    let writer = store.raw();
    writer.execute_batch("BEGIN IMMEDIATE").unwrap();
    drop(session);
    // A call waits for the file for 200 ms at the most.
    sleep(Duration::from_secs(1)).await;
    let waiters = || async { simba.operate().unwrap().read(&mutex).await.unwrap().waiters };
    assert_eq!(waiters().await, Some(1), "the first try has failed");
    writer.execute_batch("ROLLBACK").unwrap();
    let left = async {
        while waiters().await != Some(0) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, left).await.expect("the entry is deleted by another try");
    guard.release().await.unwrap();
    let next = simba.locker("orders").try_lock().await.unwrap().expect("nobody waits");
    next.release().await.unwrap();
}
