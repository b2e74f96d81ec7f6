//! Files that are not ours, places where none can be, disks that are full: a typed error that names the cause
//! and the cure, and nothing touched.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use common::Sqlite;
use rusqlite::Connection;
use simba_core::{Error, ErrorKind};
use simba_sqlite::{SqliteBackend, SqliteConfig};
use tempfile::TempDir;

async fn refusal(path: &Path) -> Error {
    match SqliteBackend::connect(SqliteConfig::new(path)).await {
        Ok(_) => panic!("{} was taken", path.display()),
        Err(error) => error,
    }
}

async fn takes_a_mutex(store: &Sqlite) {
    store.simba().await.locker("orders").lock().await.unwrap().release().await.unwrap();
}

/// All files of a folder and what is in them.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
}

/// Checks that the file is refused, and that nothing in its folder has changed.
async fn is_left_alone(folder: &TempDir, kind: ErrorKind, cause: &str) {
    let before = contents(folder.path());
    let error = refusal(&folder.path().join("simba.db")).await;
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(cause), "{error}");
    assert_eq!(error.backend(), Some("sqlite"));
    assert!(contents(folder.path()) == before, "a file that is not ours is left as it is: {error}");
}

fn folder_with(make: impl FnOnce(&Path)) -> TempDir {
    let folder = TempDir::new().unwrap();
    make(&folder.path().join("simba.db"));
    folder
}

#[tokio::test]
async fn a_file_that_is_no_database_is_left_alone() {
    for content in ["short", &"a longer text that is no database either\n".repeat(1000)] {
        let folder = folder_with(|path| fs::write(path, content).unwrap());
        is_left_alone(&folder, ErrorKind::Protocol, "no SQLite database").await;
    }
}

#[tokio::test]
async fn a_database_of_another_program_is_left_alone() {
    for setup in [
        "CREATE TABLE orders (id INTEGER)",
        "PRAGMA journal_mode = WAL; CREATE TABLE orders (id INTEGER)",
        "PRAGMA application_id = 7",
        "PRAGMA user_version = 7",
    ] {
        let folder = folder_with(|path| Connection::open(path).unwrap().execute_batch(setup).unwrap());
        is_left_alone(&folder, ErrorKind::Protocol, "another program").await;
    }
}

#[tokio::test]
async fn a_database_that_its_program_has_open_is_left_alone() {
    let folder = TempDir::new().unwrap();
    let other = Connection::open(folder.path().join("simba.db")).unwrap();
    other.execute_batch("PRAGMA journal_mode = WAL; CREATE TABLE a (b); INSERT INTO a VALUES (1)").unwrap();
    is_left_alone(&folder, ErrorKind::Protocol, "").await;
    // In a transaction with a journal beside it.
    let folder = TempDir::new().unwrap();
    let other = Connection::open(folder.path().join("simba.db")).unwrap();
    other.execute_batch("CREATE TABLE a (b); BEGIN; INSERT INTO a VALUES (1)").unwrap();
    is_left_alone(&folder, ErrorKind::Protocol, "another program").await;
}

#[tokio::test]
async fn a_file_of_a_newer_version_is_left_alone() {
    let store = Sqlite::new();
    drop(store.simba().await);
    let folder = folder_with(|path| {
        fs::copy(store.path(), path).unwrap();
        Connection::open(path).unwrap().execute_batch("PRAGMA user_version = 99").unwrap();
    });
    is_left_alone(&folder, ErrorKind::Config, "upgrade").await;
}

#[tokio::test]
async fn a_damaged_file_is_left_alone() {
    let store = Sqlite::new();
    drop(store.simba().await);
    let whole = fs::read(store.path()).unwrap();
    let mut torn = whole.clone();
    torn.truncate(whole.len() - 512);
    let mut scratched = whole;
    scratched[100..900].fill(0xa5);
    for content in [torn, scratched] {
        let folder = folder_with(|path| fs::write(path, content).unwrap());
        is_left_alone(&folder, ErrorKind::Protocol, "damaged").await;
    }
}

#[tokio::test]
async fn a_table_of_another_shape_is_named_and_left_alone() {
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
async fn a_table_that_was_dropped_is_made_anew() {
    let store = Sqlite::new();
    let simba = store.simba().await;
    simba.locker("orders").lock().await.unwrap().release().await.unwrap();
    simba.shutdown().await;
    store.raw().execute_batch("DROP TABLE simba_waiter").unwrap();
    takes_a_mutex(&store).await;
}

#[tokio::test]
async fn what_is_no_plain_file_is_refused() {
    let folder = TempDir::new().unwrap();
    let error = refusal(folder.path()).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("is a folder: name a file"), "{error}");
    let error = refusal(Path::new("/dev/null")).await;
    assert!(error.to_string().contains("no plain file"), "{error}");
    let error = refusal(Path::new("")).await;
    assert!(error.to_string().contains("name one"), "{error}");
    let error = refusal(&folder.path().join("x".repeat(600))).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    fs::write(folder.path().join("file"), "").unwrap();
    let error = refusal(&folder.path().join("file").join("simba.db")).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

#[tokio::test]
async fn a_file_system_that_is_not_local_is_refused_by_its_name_and_untouched() {
    let error = refusal(Path::new("/proc/sys/kernel/simba/simba.db")).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("`proc`") && error.to_string().contains("local disk"), "{error}");
}

#[tokio::test]
async fn an_empty_file_becomes_ours() {
    let folder = folder_with(|path| fs::write(path, "").unwrap());
    let store = Sqlite::at(folder.path().join("simba.db"));
    takes_a_mutex(&store).await;
    let folder = folder_with(|path| Connection::open(path).unwrap().execute_batch("VACUUM").unwrap());
    takes_a_mutex(&Sqlite::at(folder.path().join("simba.db"))).await;
}

#[tokio::test]
async fn folder_and_files_are_for_their_owner_alone() {
    let folder = TempDir::new().unwrap();
    let store = Sqlite::at(folder.path().join("a/b/simba.db"));
    let simba = store.simba().await;
    let _guard = simba.locker("orders").lock().await.unwrap();
    // The bell is rung after the answer; the next answer comes after that.
    simba.locker("orders").try_lock().await.unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder.path().join("a")), 0o700);
    assert_eq!(mode(&folder.path().join("a/b")), 0o700);
    let folder = fs::read_dir(store.path().parent().unwrap()).unwrap();
    let files: Vec<_> = folder.map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 4, "the file, its journal, the index of that, and the bell: {files:?}");
    for file in files {
        assert_eq!(mode(&file), 0o600, "{}", file.display());
    }
}

#[tokio::test]
async fn a_link_leads_to_the_same_mutexes_and_a_second_name_is_refused() {
    let store = Sqlite::new();
    let simba = store.simba().await;
    let _guard = simba.locker("orders").lock().await.unwrap();
    let folder = TempDir::new().unwrap();
    let link = folder.path().join("simba.db");
    symlink(store.path(), &link).unwrap();
    let linked = Sqlite::at(&link).simba().await;
    assert!(linked.locker("orders").try_lock().await.unwrap().is_none());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing lies beside the link");

    let second = store.path().with_file_name("second.db");
    fs::hard_link(store.path(), &second).unwrap();
    let error = refusal(&second).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("hard links"), "{error}");

    symlink(folder.path().join("nowhere"), folder.path().join("dangling")).unwrap();
    let error = refusal(&folder.path().join("dangling")).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

/// What only root may do: mount.
mod as_root {
    use std::process::Command;

    use simba_servers::SmallDisk;

    use super::*;

    /// A file that is mounted, and unmounted in the end.
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
    async fn a_file_that_is_mounted_without_its_folder_is_refused() {
        let (store, folder) = (Sqlite::new(), TempDir::new().unwrap());
        drop(store.simba().await);
        let target = folder.path().join("simba.db");
        fs::write(&target, "").unwrap();
        let _bind = Bind::new(store.path(), &target);
        let error = refusal(&target).await;
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("mount its folder"), "{error}");
    }

    #[tokio::test]
    async fn a_disk_that_cannot_be_written_is_denied() {
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
    async fn a_full_disk_is_told_and_costs_nothing_that_was_there() {
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
        let unmade = refusal(&folder.path().join("another.db")).await;
        assert_eq!(unmade.kind(), ErrorKind::Unavailable, "{unmade}");
        assert!(held.is_held(), "what is held is held");
        assert!(
            other.locker("held").try_lock().await.map_or(true, |guard| guard.is_none()),
            "for others, too"
        );

        disk.make_room().unwrap();
        assert!(other.locker("held").try_lock().await.unwrap().is_none(), "nothing is lost");
        let after = simba.locker("after").lock().await.expect("it goes on by itself");
        after.release().await.unwrap();
        held.release().await.unwrap();
        assert!(other.locker("held").try_lock().await.unwrap().is_some());
    }
}
