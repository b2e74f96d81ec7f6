//! Several processes on one file.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::time::{Duration, Instant};

use common::process::{ChildProcess, run_child};
use common::{SOON, Sqlite};
use simba_core::{ErrorKind, Guard, Result, Simba};
use simba_sqlite::{SqliteBackend, SqliteConfig};
use simba_tck::rounds;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

simba_tck::processes!(Sqlite);

#[test]
#[ignore = "the entry point of child processes"]
fn child_process() {
    run_child();
}

fn wait_for(simba: &Simba) -> JoinHandle<Result<Guard>> {
    let locker = simba.locker("orders");
    tokio::spawn(async move { locker.lock().await })
}

/// Waits until that many sessions are in the queue.
async fn until_waiting(simba: &Simba, waiters: usize) {
    let (operate, mutex) = (simba.operate().unwrap(), "orders".parse().unwrap());
    while operate.read(&mutex).await.unwrap().waiters != Some(waiters) {
        sleep(Duration::from_millis(5)).await;
    }
}

/// The poll is ten minutes, so only the wakeup file explains the hand-over.
#[tokio::test(flavor = "multi_thread")]
async fn release_in_one_process_wakes_a_waiter_in_another() {
    let store = Sqlite::new();
    let simba = store.simba().await;
    for _ in 0..rounds() {
        let mut holder = ChildProcess::start(store.path(), &["hold", "orders"]);
        assert!(holder.line().starts_with("held"));
        let waiting = wait_for(&simba);
        until_waiting(&simba, 1).await;
        let released = Instant::now();
        holder.finish();
        let guard = timeout(SOON, waiting).await.expect("the waiter is woken").unwrap().unwrap();
        println!("handed over within {:?}", released.elapsed());
        guard.release().await.unwrap();
        holder.wait();
    }
}

/// A lost increment means two holders at once. The poll is ten minutes, so every wakeup is needed as well.
#[test]
fn counter_of_many_processes_loses_no_increment() {
    const PROCESSES: u64 = 4;
    const TIMES: u64 = 100;
    let store = Sqlite::new();
    let file = store.path().with_file_name("counter");
    std::fs::write(&file, "0").unwrap();
    let command = ["count", "orders", file.to_str().unwrap(), &TIMES.to_string()];
    let children: Vec<_> = (0..PROCESSES).map(|_| ChildProcess::start(store.path(), &command)).collect();
    for child in children {
        assert_eq!(child.line(), "counted");
        child.wait();
    }
    let counted: u64 = std::fs::read_to_string(&file).unwrap().parse().unwrap();
    assert_eq!(counted, PROCESSES * TIMES);
}

/// The entries of killed waiters last for 20 minutes, so only the end of their processes explains it.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_killed_in_the_queue_are_skipped() {
    for taken_by_try in [false, true] {
        let store = Sqlite::new();
        let (simba, other) = (store.simba().await, store.simba().await);
        let guard = simba.locker("orders").lock().await.unwrap();
        let start = || ChildProcess::start(store.path(), &["hold", "orders"]);
        let mut killed: Vec<_> = (0..3).map(|_| start()).collect();
        until_waiting(&simba, 3).await;
        let waiting = (!taken_by_try).then(|| wait_for(&other));
        if !taken_by_try {
            until_waiting(&simba, 4).await;
            // A session queues before it subscribes.
            store.until_watched().await;
        }
        killed.iter_mut().for_each(ChildProcess::kill);
        guard.release().await.unwrap();
        let next = match waiting {
            Some(waiting) => {
                timeout(SOON, waiting).await.expect("the next waiter is woken").unwrap().unwrap()
            }
            None => other.locker("orders").try_lock().await.unwrap().expect("no live waiter"),
        };
        until_waiting(&simba, 0).await;
        next.release().await.unwrap();
    }
}

/// A stopped process represents one that is killed between its wakeup and its call.
#[tokio::test(flavor = "multi_thread")]
async fn waiter_killed_after_its_wakeup_is_detected_by_the_next() {
    for _ in 0..rounds() {
        let store = Sqlite::new();
        let (simba, other) = (store.simba().await, store.simba().await);
        let guard = simba.locker("orders").lock().await.unwrap();
        let mut first = ChildProcess::start(store.path(), &["hold", "orders"]);
        until_waiting(&simba, 1).await;
        let waiting = wait_for(&other);
        until_waiting(&simba, 2).await;
        first.stop(store.path());
        guard.release().await.unwrap();
        sleep(Duration::from_secs(1)).await;
        let record = simba.operate().unwrap().read(&"orders".parse().unwrap()).await.unwrap();
        assert_eq!((record.owner, record.waiters), (None, Some(2)), "a stopped waiter keeps its turn");
        first.kill();
        let killed = Instant::now();
        let next = timeout(SOON, waiting).await.expect("the next waiter acquires").unwrap().unwrap();
        println!("detected within {:?}", killed.elapsed());
        next.release().await.unwrap();
    }
}

/// Without the journal a new process would see the mutexes as they were at the last checkpoint: free.
#[tokio::test(flavor = "multi_thread")]
async fn held_mutex_is_not_acquired_after_its_journal_was_removed() {
    for removed in [&["-wal", "-shm"][..], &["-wal"], &["-shm"]] {
        let store = Sqlite::new();
        let simba = store.simba().await;
        let guard = simba.locker("orders").lock().await.unwrap();
        for suffix in removed {
            std::fs::remove_file(format!("{}{suffix}", store.path().display())).unwrap();
        }
        let second = SqliteBackend::connect(SqliteConfig::new(store.path())).await;
        let error = second.expect_err("a second handle of this process is refused");
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("(-wal, -shm) was removed: stop every program"), "{error}");
        // Last, since a refused handle must not drop the locks of this process.
        let second = ChildProcess::start(store.path(), &["try", "orders"]);
        assert_eq!(second.line(), "config", "{removed:?}");
        second.wait();
        let error = simba.locker("bills").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("in use: restart"), "{error}");
        guard.release().await.unwrap_err();
        simba.shutdown().await;
        drop(simba);
        let after = ChildProcess::start(store.path(), &["try", "orders"]);
        assert_eq!(after.line(), "refused", "nothing was lost once every program has stopped: {removed:?}");
        after.wait();
    }
}

/// Tests that need root: other users, other namespaces.
mod as_root {
    use std::env;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::path::Path;
    use std::process::Command;

    use super::*;

    /// Clocks in another time namespace are ahead; leases must not be.
    #[tokio::test(flavor = "multi_thread")]
    async fn processes_in_different_time_namespaces_exclude_each_other() {
        let elsewhere = |offset: &str| {
            let mut command = Command::new("unshare");
            command.args(["--time", "--boottime", offset, "--fork"]);
            command
        };
        let allowed = elsewhere("1").arg("true").status().unwrap();
        assert!(allowed.success(), "cannot create a time namespace: run this as root, where that is allowed");
        let program = env::current_exe().unwrap();
        let start = |offset: &str, store: &Sqlite, words: &[&str]| {
            let mut command = elsewhere(offset);
            command.arg(&program);
            ChildProcess::start_with(command, store.path(), words)
        };
        let store = Sqlite::new();
        let simba = store.simba().await;
        for offset in ["100000", "86400000"] {
            let mut holder = start(offset, &store, &["hold", "there"]);
            assert!(holder.line().starts_with("held"));
            assert!(simba.locker("there").try_lock().await.unwrap().is_none(), "held in that namespace");
            let seen = simba.operate().unwrap().read(&"there".parse().unwrap()).await.unwrap();
            assert!(seen.remaining.unwrap() <= common::long().total(), "the lease is not longer");
            holder.finish();
            holder.wait();

            let guard = simba.locker("here").lock().await.unwrap();
            let other = start(offset, &store, &["try", "here"]);
            assert_eq!(other.line(), "refused", "held in that namespace, too");
            other.wait();
            guard.release().await.unwrap();
        }
    }

    /// Row 65: the rights to read and write a folder are sufficient; without them, access is denied.
    #[tokio::test(flavor = "multi_thread")]
    async fn row_65_unprivileged_user_needs_only_a_folder() {
        let nobody = 65534;
        let folder = tempfile::tempdir().unwrap();
        let (program, state) = (folder.path().join("program"), folder.path().join("state"));
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        fs::copy(env::current_exe().unwrap(), &program).unwrap();
        fs::create_dir(&state).unwrap();
        chown(&state, Some(nobody), Some(nobody)).expect("run this as root, which can change the user");
        let start = |path: &Path, words: &[&str]| {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program);
            ChildProcess::start_with(command, path, words)
        };
        let theirs = Sqlite::at(state.join("simba.db"));
        let mut holder = start(theirs.path(), &["hold", "orders"]);
        assert!(holder.line().starts_with("held"));
        let simba = theirs.simba().await;
        assert!(simba.locker("orders").try_lock().await.unwrap().is_none(), "root sees the holder");
        holder.finish();
        holder.wait();
        simba.locker("orders").lock().await.unwrap().release().await.unwrap();
        simba.shutdown().await;
        let after = start(theirs.path(), &["try", "orders"]);
        assert_eq!(after.line(), "free", "files that root created belong to the owner of the database");
        after.wait();

        let ours = Sqlite::at(folder.path().join("simba.db"));
        ours.simba().await.shutdown().await;
        let refused = start(ours.path(), &["open"]);
        assert_eq!(refused.line(), "denied");
        refused.wait();
    }

    /// A process id of another pid namespace cannot be checked, so such a waiter must not count as dead.
    #[tokio::test(flavor = "multi_thread")]
    async fn waiter_in_another_pid_namespace_keeps_its_entry() {
        for mount_proc in [true, false] {
            let mut command = Command::new("unshare");
            command.args(["--pid", "--fork", "--kill-child"]);
            if mount_proc {
                command.arg("--mount-proc");
            }
            command.arg(env::current_exe().unwrap());
            let store = Sqlite::new();
            let simba = store.simba().await;
            let guard = simba.locker("orders").lock().await.unwrap();
            let mut waiter = ChildProcess::start_with(command, store.path(), &["hold", "orders"]);
            until_waiting(&simba, 1).await;
            // A session queues before it subscribes.
            sleep(Duration::from_millis(100)).await;
            let waiting = wait_for(&simba);
            until_waiting(&simba, 2).await;
            guard.release().await.unwrap();
            assert!(waiter.line().starts_with("held"), "it is first in the queue");
            waiter.finish();
            waiter.wait();
            let guard = timeout(SOON, waiting).await.expect("the waiter is woken").unwrap().unwrap();
            guard.release().await.unwrap();
        }
    }
}
