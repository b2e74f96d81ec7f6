//! A program without async: three threads contend, each with its own handle, as three processes would.
//!
//! `cargo run -p simba-mutex --example without_async`

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use simba_mutex::blocking::Simba;

/// The number of threads that hold the mutex.
static HOLDERS: AtomicU32 = AtomicU32::new(0);

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let url = format!("sqlite:{}", folder.path().join("simba.db").display());
    let threads: Vec<_> = (0..3)
        .map(|n| {
            let url = url.clone();
            thread::spawn(move || contend(n, &url).map_err(|error| error.to_string()))
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| "a thread panicked")??;
    }
    Ok(())
}

fn contend(n: u32, url: &str) -> simba_mutex::Result<()> {
    let url = url.parse()?;
    let simba = Simba::connect(async move { simba_mutex::backend(&url).await })?;
    let guard = simba.locker("orders").lock_timeout(Duration::from_secs(30))?;
    assert_eq!(HOLDERS.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
    println!("thread {n} holds with token {}, for {:?} without a renewal", guard.token(), guard.remaining());
    thread::sleep(Duration::from_millis(20));
    HOLDERS.fetch_sub(1, Ordering::SeqCst);
    guard.release()?;
    simba.shutdown();
    Ok(())
}
