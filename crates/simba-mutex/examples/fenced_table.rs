//! A table that refuses writes of a stale holder by its fencing token, which a lease alone cannot do.
//!
//! `cargo run -p simba-mutex --example fenced_table`

#![allow(clippy::print_stdout)]

use std::error::Error;

use rusqlite::Connection;
use simba_mutex::operate::EvictIf;
use simba_mutex::{FencingToken, MutexName};

/// A table of accounts, each with the greatest token of its writers.
struct Accounts {
    database: Connection,
}

impl Accounts {
    fn open() -> rusqlite::Result<Self> {
        let database = Connection::open_in_memory()?;
        database.execute_batch(
            "CREATE TABLE account (name TEXT PRIMARY KEY, balance INTEGER NOT NULL, fence INTEGER NOT NULL);
             INSERT INTO account VALUES ('alice', 0, 0);",
        )?;
        Ok(Self { database })
    }

    /// Writes with a token. Returns false if a greater token was used before: the writer is stale and must stop.
    fn set(&self, name: &str, balance: i64, token: FencingToken) -> Result<bool, Box<dyn Error>> {
        // One statement, so that no other write happens between the check and the write.
        let statement = "UPDATE account SET balance = ?1, fence = ?2 WHERE name = ?3 AND fence <= ?2";
        let changed = self.database.execute(statement, (balance, i64::try_from(token.get())?, name))?;
        Ok(changed == 1)
    }

    fn balance(&self, name: &str) -> rusqlite::Result<i64> {
        self.database.query_row("SELECT balance FROM account WHERE name = ?1", [name], |row| row.get(0))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let url = format!("sqlite:{}", folder.path().join("simba.db").display());
    let (one, other) = (simba_mutex::connect(&url).await?, simba_mutex::connect(&url).await?);
    let accounts = Accounts::open()?;

    let stale = one.locker("accounts").lock().await?;
    assert!(accounts.set("alice", 10, stale.token())?);

    // The holder is paused, and an operator frees the mutex: the holder does not know that it lost it.
    one.operate()?.evict(&MutexName::new("accounts")?, EvictIf::Any).await?;
    let current = other.locker("accounts").lock().await?;
    assert!(current.token() > stale.token());
    assert!(accounts.set("alice", 20, current.token())?);

    let accepted = accounts.set("alice", 11, stale.token())?;
    println!("the stale write is accepted: {accepted}; the balance is {}", accounts.balance("alice")?);
    assert!(!accepted);
    assert_eq!(accounts.balance("alice")?, 20);
    current.release().await?;
    drop(stale);
    one.shutdown().await;
    other.shutdown().await;
    Ok(())
}
