//! Many mutexes and many handles: a constant number of threads and files, all leases renewed.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::DirEntry;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::Sqlite;
use simba_core::{Lease, Simba};
use tokio::sync::{Mutex, MutexGuard};

/// Serializes the tests: they count the threads and files of the whole process.
static SERIAL: Mutex<()> = Mutex::const_new(());

/// Waits for the tests before this one, and for their threads, which end shortly after them.
async fn serial() -> MutexGuard<'static, ()> {
    let serial = SERIAL.lock().await;
    while threads() > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    serial
}

fn entries(what: &str) -> impl Iterator<Item = DirEntry> {
    std::fs::read_dir(format!("/proc/self/{what}")).unwrap().flatten()
}

/// Returns the number of threads that the backends of this process use.
fn threads() -> usize {
    let ours = |task: &DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        name.starts_with("simba-sqlite") || name.starts_with("notify")
    };
    entries("task").filter(ours).count()
}

/// Returns the numbers of open files of the store and of threads in this process.
fn in_use(store: &Sqlite) -> (usize, usize) {
    let folder = store.path().parent().unwrap();
    let ours = |link: &Path| link.starts_with(folder) || link.ends_with("anon_inode:inotify");
    let files = entries("fd").filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|link| ours(&link)));
    (files.count(), threads())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_held_mutexes_use_no_more_files_and_threads_than_one() {
    const MANY: usize = 10_000;
    let _serial = serial().await;
    let store = Sqlite::new();
    let lease = Lease::new(Duration::from_secs(12), Duration::from_secs(60)).unwrap();
    let simba = Simba::builder(Arc::new(store.backend().await)).with_lease(lease).build();
    let first = simba.locker("first").lock().await.unwrap();
    // The wakeup file is written after the reply, but before the next one.
    simba.locker("first").try_lock().await.unwrap();
    let before = in_use(&store);
    assert_eq!(before, (4, 1), "the file, its journal, the journal's index, the wakeup file; one thread");
    let mut guards = Vec::new();
    for number in 0..MANY {
        guards.push(simba.locker(format!("mutex-{number}")).lock().await.unwrap());
    }
    // All mutexes are renewed once in this time.
    tokio::time::sleep(lease.ttl()).await;
    assert_eq!(in_use(&store), before);
    assert!(guards.iter().all(simba_core::Guard::is_held), "all are renewed");
    assert!(first.is_held());
    let records = simba.operate().unwrap().list().await.unwrap();
    assert_eq!(records.iter().filter(|record| record.owner.is_some()).count(), MANY + 1);
    drop((guards, first));
    simba.shutdown().await;
}

/// Handles of one process share only the file. A lost increment means two holders at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_handles_in_one_process_exclude_each_other() {
    const HANDLES: usize = 20;
    const TURNS: usize = 5;
    let _serial = serial().await;
    let (store, counter) = (Sqlite::new(), Arc::new(AtomicUsize::new(0)));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..HANDLES {
        let (simba, counter) = (store.simba().await, Arc::clone(&counter));
        tasks.spawn(async move {
            for _ in 0..TURNS {
                let guard = simba.locker("orders").lock().await.unwrap();
                let before = counter.load(Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(1)).await;
                counter.store(before + 1, Ordering::SeqCst);
                guard.release().await.unwrap();
            }
            simba.shutdown().await;
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    assert_eq!(counter.load(Ordering::SeqCst), HANDLES * TURNS);
}

/// The last handle that closes leaves only the file and the wakeup file.
#[tokio::test]
async fn closed_handle_leaves_no_journal_and_no_thread() {
    let _serial = serial().await;
    let store = Sqlite::new();
    for _ in 0..3 {
        let (simba, other) = (store.simba().await, store.simba().await);
        let guard = simba.locker("orders").lock().await.unwrap();
        let locker = other.locker("orders");
        let waiting = tokio::spawn(async move { locker.lock().await.unwrap().release().await });
        store.until_watched().await;
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap();
        simba.shutdown().await;
        other.shutdown().await;
    }
    assert!(!store.path().with_file_name("simba.db-wal").exists());
    // A thread ends shortly after its last work.
    let unused = async {
        while in_use(&store) != (0, 0) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(common::SOON, unused).await.expect("nothing is left in use");
}

/// The system drops all locks of a process on a file when it closes any descriptor of it. SQLite avoids that. All other
/// code that reads the file must avoid it, too: otherwise another process removes the journal that is in use.
#[tokio::test]
async fn second_handle_does_not_drop_the_locks_of_the_first() {
    // The bytes that every open connection locks. Others are locked for a moment, to open another connection for example.
    const SHARED: &str = " 1073741826 1073742335";
    let _serial = serial().await;
    let store = Sqlite::new();
    let locks = || {
        let inode =
            format!(":{} ", std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(store.path()).unwrap()));
        let owner = format!(" {} ", std::process::id());
        let all = std::fs::read_to_string("/proc/locks").unwrap();
        let is_held = |line: &&str| line.contains(&inode) && line.contains(&owner) && line.ends_with(SHARED);
        all.lines().filter(is_held).count()
    };
    let first = store.simba().await;
    let guard = first.locker("orders").lock().await.unwrap();
    assert_eq!(locks(), 1, "an open file is locked");
    for _ in 0..3 {
        let second = store.simba().await;
        assert_eq!(locks(), 1);
        second.shutdown().await;
        assert_eq!(locks(), 1);
    }
    drop(guard);
    first.shutdown().await;
}
