//! Several processes on one file.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use common::player::{Player, play};
use common::{SOON, Sqlite};
use simba_tck::rounds;

simba_tck::processes!(Sqlite);

#[test]
#[ignore = "the way into a process of a player"]
fn player() {
    play();
}

/// Under a poll of 30 s nothing but the bell explains it.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_in_one_process_wakes_a_waiter_in_another() {
    let store = Sqlite::new();
    let simba = store.simba().await;
    for _ in 0..rounds() {
        let mut holder = Player::start(store.path(), &["hold", "orders"]);
        assert!(holder.hear().starts_with("held"));
        let locker = simba.locker("orders");
        let waiting = tokio::spawn(async move { locker.lock().await });
        while simba.operate().unwrap().read(&"orders".parse().unwrap()).await.unwrap().waiters != Some(1) {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        let released = Instant::now();
        holder.tell();
        let guard = tokio::time::timeout(SOON, waiting).await.expect("the bell is heard").unwrap().unwrap();
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
    let program = std::env::current_exe().unwrap();
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
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    std::fs::create_dir(&state).unwrap();
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
