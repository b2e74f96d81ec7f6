//! Several processes on one file.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::time::{Duration, Instant};

use common::player::{Player, play};
use common::{SOON, Sqlite};
use simba_core::{ErrorKind, Guard, Result, Simba};
use simba_sqlite::{SqliteBackend, SqliteConfig};
use simba_tck::rounds;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

simba_tck::processes!(Sqlite);

#[test]
#[ignore = "the way into a process of a player"]
fn player() {
    play();
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

/// Under a poll of 30 s nothing but the bell explains it.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_in_one_process_wakes_a_waiter_in_another() {
    let store = Sqlite::new();
    let simba = store.simba().await;
    for _ in 0..rounds() {
        let mut holder = Player::start(store.path(), &["hold", "orders"]);
        assert!(holder.hear().starts_with("held"));
        let waiting = wait_for(&simba);
        until_waiting(&simba, 1).await;
        let released = Instant::now();
        holder.tell();
        let guard = timeout(SOON, waiting).await.expect("the bell is heard").unwrap().unwrap();
        println!("handed over within {:?}", released.elapsed());
        guard.release().await.unwrap();
        holder.end();
    }
}

/// A step that is lost is two holders at once. Under a poll of 30 s, it also needs every wake-up.
#[test]
fn a_counter_of_many_processes_loses_no_step() {
    const PROCESSES: u64 = 4;
    const TIMES: u64 = 100;
    let store = Sqlite::new();
    let file = store.path().with_file_name("counter");
    std::fs::write(&file, "0").unwrap();
    let part = ["count", "orders", file.to_str().unwrap(), &TIMES.to_string()];
    let players: Vec<_> = (0..PROCESSES).map(|_| Player::start(store.path(), &part)).collect();
    for player in players {
        assert_eq!(player.hear(), "counted");
        player.end();
    }
    let counted: u64 = std::fs::read_to_string(&file).unwrap().parse().unwrap();
    assert_eq!(counted, PROCESSES * TIMES);
}

/// The entries of killed waiters last for 60 s: nothing but the end of their processes explains it.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_killed_in_the_queue_are_skipped() {
    for taken_by_try in [false, true] {
        let store = Sqlite::new();
        let (simba, other) = (store.simba().await, store.simba().await);
        let guard = simba.locker("orders").lock().await.unwrap();
        let mut killed: Vec<_> = (0..3).map(|_| Player::start(store.path(), &["hold", "orders"])).collect();
        until_waiting(&simba, 3).await;
        let waiting = (!taken_by_try).then(|| wait_for(&other));
        if !taken_by_try {
            until_waiting(&simba, 4).await;
            // In the queue is not subscribed yet.
            sleep(Duration::from_millis(50)).await;
        }
        killed.iter_mut().for_each(Player::kill);
        guard.release().await.unwrap();
        let next = match waiting {
            Some(waiting) => {
                timeout(SOON, waiting).await.expect("the next waiter is woken").unwrap().unwrap()
            }
            None => other.locker("orders").try_lock().await.unwrap().expect("nobody waits"),
        };
        until_waiting(&simba, 0).await;
        next.release().await.unwrap();
    }
}

/// A stopped process stands for one that is killed between its wake-up and its call.
#[tokio::test(flavor = "multi_thread")]
async fn waiter_killed_after_its_wake_up_is_found_by_the_next() {
    for _ in 0..rounds() {
        let store = Sqlite::new();
        let (simba, other) = (store.simba().await, store.simba().await);
        let guard = simba.locker("orders").lock().await.unwrap();
        let mut first = Player::start(store.path(), &["hold", "orders"]);
        until_waiting(&simba, 1).await;
        let waiting = wait_for(&other);
        until_waiting(&simba, 2).await;
        first.signal("STOP");
        guard.release().await.unwrap();
        sleep(Duration::from_secs(1)).await;
        assert!(!waiting.is_finished(), "a stopped waiter keeps its turn");
        first.kill();
        let killed = Instant::now();
        let next = timeout(SOON, waiting).await.expect("the next waiter finds it").unwrap().unwrap();
        println!("found within {:?}", killed.elapsed());
        next.release().await.unwrap();
    }
}

/// Without the journal a new process would see the mutexes as they were at the last checkpoint: free.
#[tokio::test(flavor = "multi_thread")]
async fn journal_removed_under_a_holder_lets_nobody_take_the_mutex() {
    for removed in [&["-wal", "-shm"][..], &["-wal"], &["-shm"]] {
        let store = Sqlite::new();
        let simba = store.simba().await;
        let guard = simba.locker("orders").lock().await.unwrap();
        for ending in removed {
            std::fs::remove_file(format!("{}{ending}", store.path().display())).unwrap();
        }
        let second = SqliteBackend::connect(SqliteConfig::new(store.path())).await;
        let error = second.expect_err("a second handle of this process is refused");
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("(-wal, -shm) was removed: stop every program"), "{error}");
        // Last, since a handle that is refused must not cost this process its locks.
        let second = Player::start(store.path(), &["try", "orders"]);
        assert_eq!(second.hear(), "config", "{removed:?}");
        second.end();
        let error = simba.locker("bills").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("in use: restart"), "{error}");
        guard.release().await.unwrap_err();
        simba.shutdown().await;
        drop(simba);
        let after = Player::start(store.path(), &["try", "orders"]);
        assert_eq!(after.hear(), "refused", "nothing was lost once every program has stopped: {removed:?}");
        after.end();
    }
}

/// What only root may do: other users, other namespaces.
mod as_root {
    use std::env;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::path::Path;
    use std::process::Command;

    use super::*;

    /// Clocks in another time namespace run ahead; leases must not.
    #[tokio::test(flavor = "multi_thread")]
    async fn processes_in_different_time_namespaces_exclude_each_other() {
        let elsewhere = |offset: &str| {
            let mut command = Command::new("unshare");
            command.args(["--time", "--boottime", offset, "--fork"]);
            command
        };
        let may = elsewhere("1").arg("true").status().unwrap();
        assert!(may.success(), "cannot make a time namespace: run this as root, where that is allowed");
        let program = env::current_exe().unwrap();
        let start = |offset: &str, store: &Sqlite, words: &[&str]| {
            let mut command = elsewhere(offset);
            command.arg(&program);
            Player::start_by(command, store.path(), words)
        };
        let store = Sqlite::new();
        let simba = store.simba().await;
        for offset in ["100000", "86400000"] {
            let mut holder = start(offset, &store, &["hold", "there"]);
            assert!(holder.hear().starts_with("held"));
            assert!(simba.locker("there").try_lock().await.unwrap().is_none(), "held by a clock ahead");
            let seen = simba.operate().unwrap().read(&"there".parse().unwrap()).await.unwrap();
            assert!(seen.remaining.unwrap() <= common::long().total(), "no clock makes a lease longer");
            holder.tell();
            holder.end();

            let guard = simba.locker("here").lock().await.unwrap();
            let other = start(offset, &store, &["try", "here"]);
            assert_eq!(other.hear(), "refused", "held for a clock ahead");
            other.end();
            guard.release().await.unwrap();
        }
    }

    /// Row 65: read and write on a folder are all that it takes; without them, access is denied.
    #[tokio::test(flavor = "multi_thread")]
    async fn row_65_a_plain_user_needs_a_folder_and_nothing_else() {
        let nobody = 65534;
        let folder = tempfile::tempdir().unwrap();
        let (program, state) = (folder.path().join("program"), folder.path().join("state"));
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        fs::copy(env::current_exe().unwrap(), &program).unwrap();
        fs::create_dir(&state).unwrap();
        chown(&state, Some(nobody), Some(nobody)).expect("run this as root, who can become a plain user");
        let start = |path: &Path, words: &[&str]| {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program);
            Player::start_by(command, path, words)
        };
        let theirs = Sqlite::at(state.join("simba.db"));
        let mut holder = start(theirs.path(), &["hold", "orders"]);
        assert!(holder.hear().starts_with("held"));
        let simba = theirs.simba().await;
        assert!(simba.locker("orders").try_lock().await.unwrap().is_none(), "root sees who holds");
        holder.tell();
        holder.end();
        simba.locker("orders").lock().await.unwrap().release().await.unwrap();
        simba.shutdown().await;
        let after = start(theirs.path(), &["try", "orders"]);
        assert_eq!(after.hear(), "free", "what root did, it did for the owner");
        after.end();

        let ours = Sqlite::at(folder.path().join("simba.db"));
        ours.simba().await.shutdown().await;
        let refused = start(ours.path(), &["open"]);
        assert_eq!(refused.hear(), "denied");
        refused.end();
    }

    /// A process id says nothing in another pid namespace: such a waiter must not be taken for a dead one.
    #[tokio::test(flavor = "multi_thread")]
    async fn waiter_in_another_pid_namespace_keeps_its_place() {
        for proc_of_its_own in [true, false] {
            let mut command = Command::new("unshare");
            command.args(["--pid", "--fork", "--kill-child"]);
            if proc_of_its_own {
                command.arg("--mount-proc");
            }
            command.arg(env::current_exe().unwrap());
            let store = Sqlite::new();
            let simba = store.simba().await;
            let guard = simba.locker("orders").lock().await.unwrap();
            let mut waiter = Player::start_by(command, store.path(), &["hold", "orders"]);
            until_waiting(&simba, 1).await;
            // In the queue is not subscribed yet.
            sleep(Duration::from_millis(100)).await;
            let waiting = wait_for(&simba);
            until_waiting(&simba, 2).await;
            guard.release().await.unwrap();
            assert!(waiter.hear().starts_with("held"), "it comes first");
            waiter.tell();
            waiter.end();
            let guard = timeout(SOON, waiting).await.expect("the bell is heard").unwrap().unwrap();
            guard.release().await.unwrap();
        }
    }
}
