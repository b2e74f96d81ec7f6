//! Files and programs of the first release together with those of this one.

#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{SOON, Sqlite};
use rusqlite::Connection;
use simba_core::Simba;
use tokio::time::{sleep, timeout};

/// The tables of the first release.
const TABLES: &str = "
PRAGMA journal_mode = WAL;
PRAGMA application_id = 0x53696d62;
PRAGMA user_version = 1;
CREATE TABLE IF NOT EXISTS simba_mutex (
    mutex TEXT NOT NULL PRIMARY KEY, owner TEXT, session INTEGER, boot TEXT, ttl_at INTEGER, until INTEGER,
    token INTEGER NOT NULL, acquired_at INTEGER
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS simba_waiter (
    mutex TEXT NOT NULL, place INTEGER NOT NULL, session INTEGER NOT NULL, boot TEXT NOT NULL,
    until INTEGER NOT NULL, PRIMARY KEY (mutex, place), UNIQUE (mutex, session)
) STRICT, WITHOUT ROWID;
";

/// The queue statements of the first release.
const HEAD: &str = "SELECT session, boot, until FROM simba_waiter WHERE mutex = ?1 ORDER BY place LIMIT 1";
const EXTEND_ENTRY: &str =
    "UPDATE simba_waiter SET until = ?5 WHERE mutex = ?1 AND session = ?2 AND boot = ?3 AND until > ?4";
const ENQUEUE: &str = "INSERT OR REPLACE INTO simba_waiter (mutex, place, session, boot, until)
SELECT ?1, ifnull(max(place), 0) + 1, ?2, ?3, ?4 FROM simba_waiter WHERE mutex = ?1";
const LEAVE: &str = "DELETE FROM simba_waiter WHERE mutex = ?1 AND session = ?2";

/// A connection of a program of the first release, with its statements prepared.
struct FirstRelease {
    connection: Connection,
    boot: String,
}

impl FirstRelease {
    const SESSION: i64 = 7;

    fn open(store: &Sqlite) -> Self {
        // Closed once, since the first release renames a finished file into place.
        store.raw().execute_batch(TABLES).unwrap();
        let connection = store.raw();
        for statement in [HEAD, EXTEND_ENTRY, ENQUEUE, LEAVE] {
            connection.prepare_cached(statement).unwrap();
        }
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned();
        Self { connection, boot }
    }

    fn enqueue(&self) {
        let values = ("orders", Self::SESSION, &self.boot, i64::MAX);
        assert_eq!(self.connection.prepare_cached(ENQUEUE).unwrap().execute(values).unwrap(), 1);
        let values = ("orders", Self::SESSION, &self.boot, 0, i64::MAX);
        assert_eq!(self.connection.prepare_cached(EXTEND_ENTRY).unwrap().execute(values).unwrap(), 1);
    }

    fn head(&self) -> i64 {
        self.connection.prepare_cached(HEAD).unwrap().query_row(["orders"], |row| row.get(0)).unwrap()
    }

    fn leave(&self) {
        let values = ("orders", Self::SESSION);
        assert_eq!(self.connection.prepare_cached(LEAVE).unwrap().execute(values).unwrap(), 1);
    }
}

async fn until_waiting(simba: &Simba, waiters: usize) {
    let (operate, mutex) = (simba.operate().unwrap(), "orders".parse().unwrap());
    while operate.read(&mutex).await.unwrap().waiters != Some(waiters) {
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn file_of_the_first_release_is_upgraded_in_use() {
    let store = Sqlite::new();
    let first = FirstRelease::open(&store);
    first.enqueue();
    let simba = store.simba().await;
    assert!(
        simba.locker("orders").try_lock().await.unwrap().is_none(),
        "a waiter of the first release is ahead in the queue"
    );
    assert_eq!(first.head(), FirstRelease::SESSION, "and keeps its entry");
    first.leave();
    let guard = simba.locker("orders").lock().await.unwrap();
    first.enqueue();
    guard.release().await.unwrap();
    assert_eq!(first.head(), FirstRelease::SESSION, "the statements of the first release still work");
    let (mark, rows): (i32, i32) = first
        .connection
        .query_row(
            "SELECT user_version, (SELECT count(*) FROM simba_waiter) FROM pragma_user_version",
            [],
            |row| Ok((row.get(0)?, row.get(1)?)),
        )
        .unwrap();
    assert_eq!((mark, rows), (1, 1), "a program of the first release can still open it");
}

#[tokio::test(flavor = "multi_thread")]
async fn waiter_of_this_release_waits_behind_one_of_the_first() {
    let store = Sqlite::new();
    let simba = store.simba().await;
    let first = FirstRelease::open(&store);
    first.enqueue();
    let locker = simba.locker("orders");
    let waiting = tokio::spawn(async move { locker.lock().await });
    until_waiting(&simba, 2).await;
    sleep(Duration::from_secs(1)).await;
    assert!(!waiting.is_finished(), "a waiter of the first release cannot be checked");
    first.leave();
    let guard = timeout(SOON, waiting).await.expect("the next waiter acquires").unwrap().unwrap();
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn many_programs_upgrade_a_file_at_once() {
    for _ in 0..10 {
        let store = Sqlite::new();
        drop(FirstRelease::open(&store));
        let opened = (0..8).map(|_| {
            let path = store.path().to_owned();
            tokio::spawn(async move { Sqlite::at(path).backend().await })
        });
        for opened in opened.collect::<Vec<_>>() {
            opened.await.unwrap();
        }
    }
}
