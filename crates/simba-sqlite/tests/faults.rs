//! The rows of the fault matrix that apply to a file.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use common::process::{ChildProcess, run_child};
use common::{SOON, Sqlite};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use simba_core::clock::Sleep;
use simba_core::spi::{Answer, Backend, Claim, Prior};
use simba_core::{
    Clock, ContenderId, Contention, ErrorKind, FencingToken, Lease, Moment, MutexName, Result, Simba,
    SystemClock,
};
use simba_sqlite::{SqliteBackend, SqliteConfig};
use simba_tck::rounds;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

simba_tck::rows!(Sqlite::new());

#[test]
#[ignore = "the entry point of child processes"]
fn child_process() {
    run_child();
}

/// Returns a lease that survives a pause of the machine of two seconds.
fn lease() -> Lease {
    Lease::new(Duration::from_secs(2), Duration::from_secs(3)).unwrap()
}

async fn contention(store: &Sqlite, lease: Lease) -> Contention {
    let contention = store.simba().await.contend("orders").with_lease(lease);
    contention.start().unwrap();
    contention
}

/// Row 55, first half: another program keeps the file locked for longer than a lease.
#[tokio::test(flavor = "multi_thread")]
async fn row_55_file_that_stays_locked_costs_a_lease_and_no_exclusion() {
    for _ in 0..rounds() {
        let store = Sqlite::new();
        let leader = contention(&store, lease()).await;
        let tenure = timeout(SOON, leader.acquired()).await.unwrap().unwrap();
        let waiter = contention(&store, lease()).await;
        let writer = store.raw();
        writer.execute_batch("BEGIN IMMEDIATE").unwrap();
        let locked = SystemClock.now();
        let failed = async {
            // The last call before the deadline times out without a cause.
            loop {
                match leader.last_error() {
                    Some(error) if error.to_string().contains("locked") => return error,
                    _ => sleep(Duration::from_millis(2)).await,
                }
            }
        };
        let error = timeout(SOON, failed).await.expect("a failed call reports the cause");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        SystemClock.sleep_until(locked + lease().total() + Duration::from_secs(1)).await;
        assert!(!tenure.is_held(), "the tenure ends with the lease");
        assert!(!leader.is_owner() && !waiter.is_owner(), "no contender acquires while the file is locked");
        writer.execute_batch("ROLLBACK").unwrap();
        let next = async {
            tokio::select! { biased; next = leader.acquired() => next, next = waiter.acquired() => next }
        };
        let next = timeout(SOON, next).await.expect("a contender leads again").unwrap();
        assert!(next.token() > tenure.token(), "tokens grow");
    }
}

/// Row 55, second half: a process is killed between its writes and its commit.
#[tokio::test(flavor = "multi_thread")]
async fn row_55_transaction_of_a_killed_process_has_no_effect() {
    // Renewed often, and long enough that killing the writer, however slow, loses nothing.
    let lease = Lease::new(Duration::from_secs(2), Duration::from_secs(30)).unwrap();
    for _ in 0..rounds() {
        let store = Sqlite::new();
        let leader = contention(&store, lease).await;
        let tenure = timeout(SOON, leader.acquired()).await.unwrap().unwrap();
        let mut writer = ChildProcess::start(store.path(), &["write"]);
        assert_eq!(writer.line(), "writing");
        writer.kill();
        let deadline = tenure.deadline();
        while tenure.deadline() == deadline && tenure.is_held() {
            sleep(Duration::from_millis(2)).await;
        }
        assert!(tenure.is_held(), "the leader keeps its mutex");
        let other = store.simba().await;
        assert!(other.locker("orders").try_lock().await.unwrap().is_none(), "other handles see the owner");
    }
}

/// A wall clock that jumps by an hour, pseudo-randomly ahead or back at every call.
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
        let calls = self.0.fetch_add(1, Ordering::Relaxed);
        match calls.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 {
            0 => SystemTime::now() + hour,
            _ => SystemTime::now() - hour,
        }
    }
}

/// Row 45: leases do not depend on the wall clock, and tokens grow even if it is set back.
#[tokio::test(flavor = "multi_thread")]
async fn row_45_jumps_of_the_wall_clock_change_no_lease_and_no_token_order() {
    let store = Sqlite::new();
    let connect =
        || SqliteBackend::connect_with_clock(SqliteConfig::new(store.path()), Arc::<Jumping>::default());
    let simba = Simba::builder(Arc::new(connect().await.unwrap())).with_lease(lease()).build();
    let held = simba.locker("orders").lock().await.unwrap();
    let other = Simba::builder(Arc::new(connect().await.unwrap())).with_lease(lease()).build();
    let mut last = 0;
    for _ in 0..100 {
        let guard = other.locker("bills").lock().await.unwrap();
        assert!(guard.token().get() > last, "tokens grow");
        last = guard.token().get();
        guard.release().await.unwrap();
        sleep(Duration::from_millis(10)).await;
    }
    assert!(held.is_held(), "a holder keeps its mutex");
    // A longer lease gives the call more time.
    let locker = other.locker("orders").with_lease(common::long());
    assert!(locker.try_lock().await.unwrap().is_none(), "no other handle acquires it");
}

/// No holder or waiter of another boot is alive, even if its lease has not ended.
#[tokio::test(flavor = "multi_thread")]
async fn reboot_ends_leases_and_queue_entries_and_keeps_the_token() {
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
            Answer::Vacant => panic!("the mutex is held"),
        }
        sessions.push(session);
    }
    let boot = "UPDATE simba_mutex SET boot = 'another'; UPDATE simba_waiter SET boot = 'another';";
    store.raw().execute_batch(boot).unwrap();
    let record = backend.operate().unwrap().read(&mutex).await.unwrap();
    assert_eq!((record.owner, record.waiters), (None, Some(0)));
    let guard = store.simba().await.locker("orders").try_lock().await.unwrap().expect("it is free");
    assert!(Some(guard.token()) > before, "tokens grow");
}

/// A power cut under `synchronous = NORMAL` may lose the last commits, and the token with them.
#[tokio::test(flavor = "multi_thread")]
async fn token_grows_after_commits_were_lost() {
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

/// Row 44: a token exceeds the limits that versions have on other stores; at the end of its own column it is an error.
#[tokio::test(flavor = "multi_thread")]
async fn row_44_token_at_the_end_of_its_column_is_an_error_and_never_wraps() {
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

/// Two files under one name would have two owners, so calls of a handle that has the old one open fail.
#[tokio::test(flavor = "multi_thread")]
async fn removed_or_replaced_file_is_an_error() {
    for replaced in [false, true] {
        let store = Sqlite::new();
        let simba = store.simba().await;
        let guard = simba.locker("orders").lock().await.unwrap();
        fs::remove_file(store.path()).unwrap();
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

/// An event after which a name stands for another file than before, or for none.
#[derive(Clone, Copy, Debug)]
enum Event {
    Removed,
    Renamed,
    Replaced,
    Exchanged,
    FolderRenamed,
    FolderReplaced,
}

impl Event {
    fn happen(self, file: &Path) {
        let (folder, other) = (file.parent().unwrap(), file.with_extension("other"));
        match self {
            Self::Removed => fs::remove_file(file).unwrap(),
            Self::Renamed => fs::rename(file, other).unwrap(),
            Self::Replaced => {
                fs::write(&other, "").unwrap();
                fs::rename(other, file).unwrap();
            }
            Self::Exchanged => {
                fs::write(&other, "").unwrap();
                renameat_with(CWD, &other, CWD, file, RenameFlags::EXCHANGE).unwrap();
            }
            Self::FolderRenamed => fs::rename(folder, folder.with_extension("other")).unwrap(),
            Self::FolderReplaced => {
                fs::rename(folder, folder.with_extension("other")).unwrap();
                fs::create_dir(folder).unwrap();
                for entry in fs::read_dir(folder.with_extension("other")).unwrap().flatten() {
                    fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
                }
            }
        }
    }
}

/// A file whose handle has checked its names so long after their creation that only a change of the folder makes it
/// check them again.
async fn settled(folder: &TempDir) -> (Sqlite, Simba) {
    let store = Sqlite::at(folder.path().join("a/simba.db"));
    let simba = store.simba().await;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(4) {
        lock_and_release(&simba).await.unwrap();
        sleep(Duration::from_millis(20)).await;
    }
    (store, simba)
}

async fn lock_and_release(simba: &Simba) -> Result<()> {
    simba.locker("bills").lock().await?.release().await
}

/// Every event on each of the three files, long after they were created: the very next call fails.
#[tokio::test(flavor = "multi_thread")]
async fn change_of_a_name_is_noticed_by_the_next_call() {
    use Event::*;
    let mut cases = JoinSet::new();
    for suffix in ["", "-wal", "-shm"] {
        for event in [Removed, Renamed, Replaced, Exchanged, FolderRenamed, FolderReplaced] {
            cases.spawn(async move {
                let folder = TempDir::new().unwrap();
                let (store, simba) = settled(&folder).await;
                event.happen(Path::new(&format!("{}{suffix}", store.path().display())));
                let error = lock_and_release(&simba).await.expect_err(&format!("{event:?} {suffix}"));
                assert_eq!(error.kind(), ErrorKind::Config, "{event:?} {suffix}: {error}");
                assert!(error.to_string().contains("in use: restart"), "{event:?} {suffix}: {error}");
            });
        }
    }
    while let Some(case) = cases.join_next().await {
        case.unwrap();
    }
}

/// The change time of the folder is that of a moment ago, or even the same.
#[tokio::test(flavor = "multi_thread")]
async fn change_of_a_name_is_noticed_directly_after_another_change_of_the_folder() {
    let folder = TempDir::new().unwrap();
    let (store, simba) = settled(&folder).await;
    fs::write(store.path().with_file_name("unrelated"), "").unwrap();
    lock_and_release(&simba).await.unwrap();
    fs::remove_file(format!("{}-shm", store.path().display())).unwrap();
    assert_eq!(lock_and_release(&simba).await.unwrap_err().kind(), ErrorKind::Config);
}

#[tokio::test(flavor = "multi_thread")]
async fn change_of_the_folder_that_keeps_the_files_is_no_error() {
    let folder = TempDir::new().unwrap();
    let (store, simba) = settled(&folder).await;
    let (path, other) = (store.path(), store.path().with_extension("other"));
    fs::rename(path, &other).unwrap();
    lock_and_release(&simba).await.unwrap_err();
    fs::rename(&other, path).unwrap();
    lock_and_release(&simba).await.expect("the same file has its name again");
    fs::write(path.with_file_name("unrelated"), "").unwrap();
    lock_and_release(&simba).await.expect("only another file was created");
}

/// An operator may remove the wakeup file at any time: it is created again, and waiters are woken through it.
#[tokio::test(flavor = "multi_thread")]
async fn removed_wakeup_file_is_created_again() {
    let store = Sqlite::new();
    let (one, two) = (store.simba().await, store.simba().await);
    let wakeup_file = store.wakeup_file();
    for _ in 0..3 {
        let guard = one.locker("orders").lock().await.unwrap();
        let locker = two.locker("orders");
        let waiting = tokio::spawn(async move { locker.lock().await });
        while one.operate().unwrap().read(&"orders".parse().unwrap()).await.unwrap().waiters != Some(1) {
            sleep(Duration::from_millis(2)).await;
        }
        // A session queues before it subscribes.
        store.until_watched().await;
        fs::remove_file(&wakeup_file).unwrap();
        // The watcher notices the removal, and the worker creates the file again.
        store.until_watched().await;
        guard.release().await.unwrap();
        let next = timeout(SOON, waiting).await.expect("the waiter is woken").unwrap().unwrap();
        next.release().await.unwrap();
    }
}

/// The poll of a waiter is ten minutes, so only the poll of its handle explains it.
#[tokio::test(flavor = "multi_thread")]
async fn waiter_is_woken_by_its_handle_if_the_wakeup_file_cannot_be_watched() {
    let store = Sqlite::new();
    fs::create_dir(store.wakeup_file()).unwrap();
    let (one, two) = (store.simba().await, store.simba().await);
    let guard = one.locker("orders").lock().await.unwrap();
    let locker = two.locker("orders");
    let waiting = tokio::spawn(async move { locker.lock().await });
    while one.operate().unwrap().read(&"orders".parse().unwrap()).await.unwrap().waiters != Some(1) {
        sleep(Duration::from_millis(2)).await;
    }
    // A session queues before it subscribes.
    sleep(Duration::from_millis(500)).await;
    guard.release().await.unwrap();
    let next = timeout(SOON, waiting).await.expect("the handle polls").unwrap().unwrap();
    next.release().await.unwrap();
}

/// The entry of a waiter lasts for 20 minutes: without a retry it would block all others for as long.
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
    // A call waits for the file for at most a second.
    sleep(Duration::from_secs(2)).await;
    let waiters = || async { simba.operate().unwrap().read(&mutex).await.unwrap().waiters };
    assert_eq!(waiters().await, Some(1), "the first attempt has failed");
    writer.execute_batch("ROLLBACK").unwrap();
    let left = async {
        while waiters().await != Some(0) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, left).await.expect("a retry deletes the entry");
    guard.release().await.unwrap();
    let next = simba.locker("orders").try_lock().await.unwrap().expect("no waiter is left");
    next.release().await.unwrap();
}
