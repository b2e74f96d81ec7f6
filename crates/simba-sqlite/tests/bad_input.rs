//! Files of other programs, unusable locations, full disks: a typed error that names the cause and the fix, and no
//! change.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::Sqlite;
use rusqlite::Connection;
use simba_core::spi::{Answer, Backend, Claim, Holding, Prior};
use simba_core::{ContenderId, Error, ErrorKind, MutexName};
use simba_sqlite::{SqliteBackend, SqliteConfig};
use tempfile::TempDir;

async fn refusal(path: &Path) -> Error {
    match SqliteBackend::connect(SqliteConfig::new(path)).await {
        Ok(_) => panic!("{} was accepted", path.display()),
        Err(error) => error,
    }
}

async fn lock_and_release(store: &Sqlite) {
    store.simba().await.locker("orders").lock().await.unwrap().release().await.unwrap();
}

/// Returns all files of a folder with their content.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
}

/// Checks that the file is refused, and that nothing in its folder has changed.
async fn assert_refused(folder: &TempDir, kind: ErrorKind, cause: &str) {
    let before = contents(folder.path());
    let error = refusal(&folder.path().join("simba.db")).await;
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(cause), "{error}");
    assert_eq!(error.backend(), Some("sqlite"));
    assert!(contents(folder.path()) == before, "a refused file is not changed: {error}");
}

fn folder_with(make: impl FnOnce(&Path)) -> TempDir {
    let folder = TempDir::new().unwrap();
    make(&folder.path().join("simba.db"));
    folder
}

#[tokio::test]
async fn file_that_is_no_database_is_refused() {
    for content in ["short", &"a longer text that is no database either\n".repeat(1000)] {
        let folder = folder_with(|path| fs::write(path, content).unwrap());
        assert_refused(&folder, ErrorKind::Protocol, "no SQLite database").await;
    }
}

#[tokio::test]
async fn database_of_another_program_is_refused() {
    for setup in [
        "CREATE TABLE orders (id INTEGER)",
        "PRAGMA journal_mode = WAL; CREATE TABLE orders (id INTEGER)",
        "PRAGMA application_id = 7",
        "PRAGMA user_version = 7",
    ] {
        let folder = folder_with(|path| Connection::open(path).unwrap().execute_batch(setup).unwrap());
        assert_refused(&folder, ErrorKind::Protocol, "another program").await;
    }
}

#[tokio::test]
async fn database_that_another_program_has_open_is_refused() {
    let folder = TempDir::new().unwrap();
    let other = Connection::open(folder.path().join("simba.db")).unwrap();
    other.execute_batch("PRAGMA journal_mode = WAL; CREATE TABLE a (b); INSERT INTO a VALUES (1)").unwrap();
    assert_refused(&folder, ErrorKind::Protocol, "").await;
    // In a transaction with a journal.
    let folder = TempDir::new().unwrap();
    let other = Connection::open(folder.path().join("simba.db")).unwrap();
    other.execute_batch("CREATE TABLE a (b); BEGIN; INSERT INTO a VALUES (1)").unwrap();
    assert_refused(&folder, ErrorKind::Protocol, "another program").await;
}

#[tokio::test]
async fn file_of_a_newer_version_is_refused() {
    let store = Sqlite::new();
    drop(store.simba().await);
    let folder = folder_with(|path| {
        fs::copy(store.path(), path).unwrap();
        Connection::open(path).unwrap().execute_batch("PRAGMA user_version = 99").unwrap();
    });
    assert_refused(&folder, ErrorKind::Config, "upgrade").await;
}

#[tokio::test]
async fn damaged_file_is_refused() {
    let store = Sqlite::new();
    drop(store.simba().await);
    let whole = fs::read(store.path()).unwrap();
    let mut truncated = whole.clone();
    truncated.truncate(whole.len() - 512);
    let mut overwritten = whole;
    overwritten[100..900].fill(0xa5);
    for content in [truncated, overwritten] {
        let folder = folder_with(|path| fs::write(path, content).unwrap());
        assert_refused(&folder, ErrorKind::Protocol, "damaged").await;
    }
}

#[tokio::test]
async fn table_of_another_shape_is_refused() {
    let folder = folder_with(|path| {
        let setup = "PRAGMA journal_mode = WAL; PRAGMA application_id = 0x53696d62; PRAGMA user_version = 1;
                     CREATE TABLE simba_mutex (name TEXT)";
        Connection::open(path).unwrap().execute_batch(setup).unwrap();
    });
    let error = refusal(&folder.path().join("simba.db")).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("another shape"), "{error}");
}

#[tokio::test]
async fn dropped_table_is_created_again() {
    let store = Sqlite::new();
    let simba = store.simba().await;
    simba.locker("orders").lock().await.unwrap().release().await.unwrap();
    simba.shutdown().await;
    store.raw().execute_batch("DROP TABLE simba_waiter").unwrap();
    lock_and_release(&store).await;
}

#[tokio::test]
async fn path_that_is_no_regular_file_is_refused() {
    let folder = TempDir::new().unwrap();
    let error = refusal(folder.path()).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("is a folder: name a file"), "{error}");
    let error = refusal(Path::new("/dev/null")).await;
    assert!(error.to_string().contains("no regular file"), "{error}");
    let error = refusal(Path::new("")).await;
    assert!(error.to_string().contains("name one"), "{error}");
    let error = refusal(&folder.path().join("x".repeat(600))).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    fs::write(folder.path().join("file"), "").unwrap();
    let error = refusal(&folder.path().join("file").join("simba.db")).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

#[tokio::test]
async fn file_system_that_is_not_local_is_refused_by_its_name() {
    let error = refusal(Path::new("/proc/sys/kernel/simba/simba.db")).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("`proc`") && error.to_string().contains("local disk"), "{error}");
}

#[tokio::test]
async fn empty_file_is_accepted() {
    let folder = folder_with(|path| fs::write(path, "").unwrap());
    let store = Sqlite::at(folder.path().join("simba.db"));
    lock_and_release(&store).await;
    let folder = folder_with(|path| Connection::open(path).unwrap().execute_batch("VACUUM").unwrap());
    lock_and_release(&Sqlite::at(folder.path().join("simba.db"))).await;
}

#[tokio::test]
async fn only_the_owner_can_access_folder_and_files() {
    let folder = TempDir::new().unwrap();
    let store = Sqlite::at(folder.path().join("a/b/simba.db"));
    let simba = store.simba().await;
    let _guard = simba.locker("orders").lock().await.unwrap();
    // The wakeup file is written after the reply, but before the next one.
    simba.locker("orders").try_lock().await.unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder.path().join("a")), 0o700);
    assert_eq!(mode(&folder.path().join("a/b")), 0o700);
    let folder = fs::read_dir(store.path().parent().unwrap()).unwrap();
    let files: Vec<_> = folder.map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 4, "the file, its journal, the journal's index, the wakeup file: {files:?}");
    for file in files {
        assert_eq!(mode(&file), 0o600, "{}", file.display());
    }
}

#[tokio::test]
async fn symbolic_link_is_followed_and_a_hard_link_is_refused() {
    let store = Sqlite::new();
    let simba = store.simba().await;
    let _guard = simba.locker("orders").lock().await.unwrap();
    let folder = TempDir::new().unwrap();
    let link = folder.path().join("simba.db");
    symlink(store.path(), &link).unwrap();
    let linked = Sqlite::at(&link).simba().await;
    assert!(linked.locker("orders").try_lock().await.unwrap().is_none());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no companion files of the link");

    let second = store.path().with_file_name("second.db");
    fs::hard_link(store.path(), &second).unwrap();
    let error = refusal(&second).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("hard links"), "{error}");

    symlink(folder.path().join("nowhere"), folder.path().join("dangling")).unwrap();
    let error = refusal(&folder.path().join("dangling")).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

/// A refused row is not changed, and neither is the queue.
#[tokio::test]
async fn waiter_keeps_its_entry_when_the_token_is_at_its_end() {
    let store = Sqlite::new();
    let backend = store.backend().await;
    let mutex = MutexName::new("orders").unwrap();
    let open = || backend.open(Claim::new(mutex.clone(), ContenderId::generate(), common::long()));
    let (mut holder, mut waiter) = (open().await.unwrap(), open().await.unwrap());
    assert!(matches!(holder.contend(Prior::Nothing).await, Ok(Answer::Ours(_))));
    assert!(matches!(waiter.contend(Prior::Nothing).await, Ok(Answer::Held(_))));
    holder.release(Holding::Unknown).await.unwrap();
    store.raw().execute("UPDATE simba_mutex SET token = ?1", [i64::MAX]).unwrap();
    assert_eq!(waiter.contend(Prior::Nothing).await.unwrap_err().kind(), ErrorKind::Config);
    assert_eq!(backend.operate().unwrap().read(&mutex).await.unwrap().waiters, Some(1));
}

/// Tests that need root: mounts.
mod as_root {
    use std::process::Command;

    use simba_servers::SmallDisk;

    use super::*;

    /// A bind mount, unmounted when it is dropped.
    struct Bind(PathBuf);

    impl Bind {
        fn new(from: &Path, at: &Path) -> Self {
            let mounted = Command::new("mount").arg("--bind").args([from, at]).status().unwrap();
            assert!(mounted.success(), "cannot mount: run this as root, where mounting is allowed");
            Self(at.to_owned())
        }
    }

    impl Drop for Bind {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
        }
    }

    #[tokio::test]
    async fn file_that_is_mounted_without_its_folder_is_refused() {
        let (store, folder) = (Sqlite::new(), TempDir::new().unwrap());
        drop(store.simba().await);
        let target = folder.path().join("simba.db");
        fs::write(&target, "").unwrap();
        let _bind = Bind::new(store.path(), &target);
        let error = refusal(&target).await;
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("mount its folder"), "{error}");
    }

    /// A mount changes no folder, so only the check of all files explains it.
    #[tokio::test]
    async fn file_that_is_mounted_over_one_in_use_is_noticed() {
        let (store, folder) = (Sqlite::new(), TempDir::new().unwrap());
        let simba = store.simba().await;
        let lock = || async { simba.locker("orders").lock().await?.release().await };
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(4) {
            lock().await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let other = folder.path().join("other");
        fs::write(&other, "").unwrap();
        let _bind = Bind::new(&other, Path::new(&format!("{}-wal", store.path().display())));
        let noticed = async {
            loop {
                if let Err(error) = lock().await {
                    return error;
                }
            }
        };
        let error = tokio::time::timeout(common::SOON, noticed).await.expect("a call fails");
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("replaced while it was in use"), "{error}");
    }

    #[tokio::test]
    async fn read_only_disk_is_denied() {
        let folder = TempDir::new().unwrap();
        let _disk = SmallDisk::mount(folder.path(), 1).unwrap();
        let store = Sqlite::at(folder.path().join("simba.db"));
        let simba = store.simba().await;
        simba.shutdown().await;
        let remount = Command::new("mount").args(["-o", "remount,ro"]).arg(folder.path()).status().unwrap();
        assert!(remount.success());
        let error = refusal(store.path()).await;
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(error.to_string().contains("writable"), "{error}");
        let error = refusal(&folder.path().join("new/simba.db")).await;
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    }

    #[tokio::test]
    async fn full_disk_is_an_error_and_loses_no_held_mutex() {
        let folder = TempDir::new().unwrap();
        let disk = SmallDisk::mount(folder.path(), 1).unwrap();
        let store = Sqlite::at(folder.path().join("simba.db"));
        let (simba, other) = (store.simba().await, store.simba().await);
        let held = simba.locker("held").lock().await.unwrap();
        disk.fill().unwrap();
        let mut error = None;
        let mut guards = Vec::new();
        for number in 0..2_000 {
            match simba.locker(format!("mutex-{number}")).try_lock().await {
                Ok(guard) => guards.push(guard),
                Err(full) => {
                    error = Some(full);
                    break;
                }
            }
        }
        let error = error.expect("a full disk is an error");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("make room"), "{error}");
        let refused = refusal(&folder.path().join("another.db")).await;
        assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
        assert!(held.is_held(), "the holder keeps its mutex");
        assert!(
            other.locker("held").try_lock().await.map_or(true, |guard| guard.is_none()),
            "no other handle acquires it"
        );

        disk.make_room().unwrap();
        assert!(other.locker("held").try_lock().await.unwrap().is_none(), "still held");
        let after = simba.locker("after").lock().await.expect("it works again without a restart");
        after.release().await.unwrap();
        held.release().await.unwrap();
        assert!(other.locker("held").try_lock().await.unwrap().is_some());
    }
}

#[tokio::test]
async fn row_that_cannot_be_read_is_omitted_from_the_list_and_reported_by_its_own_calls() {
    let store = Sqlite::new();
    let simba = store.simba().await;
    for mutex in ["bills", "orders"] {
        simba.locker(mutex).lock().await.unwrap().release().await.unwrap();
    }
    let guard = simba.locker("foreign").lock().await.unwrap();
    store
        .raw()
        .execute_batch("UPDATE simba_mutex SET owner = CAST(x'ff' AS TEXT) WHERE owner IS NOT NULL")
        .unwrap();
    let operate = simba.operate().unwrap();
    let listed: Vec<_> = operate.list().await.unwrap().into_iter().map(|record| record.mutex).collect();
    assert_eq!(listed, ["bills", "orders"].map(|mutex| MutexName::new(mutex).unwrap()));
    let error = operate.read(guard.tenure().mutex()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(error.to_string().contains("did not write"), "{error}");
}
