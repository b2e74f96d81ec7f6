//! Two contenders, one mutex: the second waits and acquires when the first releases.
//!
//! `cargo run -p simba-core --example hand_over`

#![allow(clippy::print_stdout)]

use std::time::{Duration, Instant};

use simba_core::{MemoryBackend, Result, Simba};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let store = MemoryBackend::new();
    // One handle each, like two processes.
    let (one, two) = (Simba::new(store.clone()), Simba::new(store));
    let began = Instant::now();
    tokio::try_join!(work("one", one, began), work("two", two, began))?;
    Ok(())
}

async fn work(name: &str, simba: Simba, began: Instant) -> Result<()> {
    let guard = simba.locker("orders").lock().await?;
    println!("{:>4} ms  {name} holds `orders` with token {}", began.elapsed().as_millis(), guard.token());
    guard.run(tokio::time::sleep(Duration::from_millis(200))).await?;
    println!("{:>4} ms  {name} is done", began.elapsed().as_millis());
    guard.release().await?;
    simba.shutdown().await;
    Ok(())
}
