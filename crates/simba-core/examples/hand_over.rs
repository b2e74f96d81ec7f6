//! Two contenders, one mutex: the second waits, then gets it the moment the first is done.
//!
//! `cargo run -p simba-core --example hand_over`

#![allow(clippy::print_stdout)]

use std::time::{Duration, Instant};

use simba_core::{MemoryBackend, Result, Simba};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let store = MemoryBackend::new();
    // A handle each, as two processes would have.
    let (one, two) = (Simba::new(store.clone()), Simba::new(store));
    let began = Instant::now();
    tokio::try_join!(work("one", one, began), work("two", two, began))?;
    Ok(())
}

async fn work(who: &str, simba: Simba, began: Instant) -> Result<()> {
    let guard = simba.locker("orders").lock().await?;
    println!("{:>4} ms  {who} holds `orders` with token {}", began.elapsed().as_millis(), guard.token());
    guard.run(tokio::time::sleep(Duration::from_millis(200))).await?;
    println!("{:>4} ms  {who} is done", began.elapsed().as_millis());
    guard.release().await?;
    simba.shutdown().await;
    Ok(())
}
