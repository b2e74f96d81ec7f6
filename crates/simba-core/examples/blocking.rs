//! A program without async: the engine runs on a separate thread.
//!
//! `cargo run -p simba-core --example blocking`

#![allow(clippy::print_stdout)]

use std::thread;
use std::time::Duration;

use simba_core::{MemoryBackend, Result, blocking};

fn main() -> Result<()> {
    let simba = blocking::Simba::new(MemoryBackend::new())?;
    let locker = simba.locker("orders");
    let guard = locker.lock()?;
    println!("holding with token {}, {:?} without a renewal", guard.token(), guard.remaining());
    thread::sleep(Duration::from_millis(50));
    assert!(simba.locker("orders").try_lock()?.is_none());
    guard.release()?;
    simba.shutdown();
    Ok(())
}
