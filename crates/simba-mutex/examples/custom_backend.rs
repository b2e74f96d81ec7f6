//! A store of one's own, contended for by three tasks: the backend of `examples/outside-backend`, which passes the
//! compatibility kit, behind the same handle as every other store.
//!
//! `cargo run -p simba-mutex --example custom_backend`

#![allow(clippy::print_stdout)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use outside_backend::TableBackend;
use simba_mutex::{Error, ErrorKind, Lease, Result, Simba};
use tokio::task::JoinSet;

#[path = "../../../examples/outside-backend/src/lib.rs"]
#[allow(unreachable_pub, reason = "a crate of its own, taken in as it stands")]
mod outside_backend;

/// How many are inside at this moment.
static INSIDE: AtomicU32 = AtomicU32::new(0);

#[tokio::main]
async fn main() -> Result<()> {
    let store = TableBackend::default();
    // It wakes nobody, so waiters look by themselves; a short lease makes them look often.
    let lease = Lease::new(Duration::from_millis(600), Duration::from_millis(400))?;
    let mut tasks = JoinSet::new();
    for n in 0..3 {
        // A handle each, as three processes would have.
        tasks.spawn(turn(n, Simba::new(store.clone()).with_lease(lease)));
    }
    while let Some(done) = tasks.join_next().await {
        done.map_err(|error| Error::new(ErrorKind::Unavailable, error.to_string()))??;
    }
    Ok(())
}

async fn turn(n: u32, simba: Simba) -> Result<()> {
    let guard = simba.locker("orders").lock().await?;
    assert_eq!(INSIDE.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
    println!("task {n} holds with token {}", guard.token());
    guard.run(tokio::time::sleep(Duration::from_millis(50))).await?;
    INSIDE.fetch_sub(1, Ordering::SeqCst);
    guard.release().await?;
    simba.shutdown().await;
    Ok(())
}
