//! A job that runs on the leader only, at a fixed rate, until it has run three times.
//!
//! `cargo run -p simba-core --example scheduled`

#![allow(clippy::print_stdout)]

use std::time::Duration;

use simba_core::{MemoryBackend, Result, Schedule, Simba};
use tokio::sync::mpsc;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let simba = Simba::new(MemoryBackend::new());
    let (ran, mut runs) = mpsc::channel(1);
    let job =
        simba.scheduler("report").start(Schedule::fixed_rate(Duration::from_millis(50))?, move |tenure| {
            let ran = ran.clone();
            async move { ran.send(tenure.token()).await }
        })?;
    for run in 1..=3 {
        let token = runs.recv().await;
        println!("run {run} under token {}", token.map_or(0, |token| token.get()));
    }
    job.stop().await
}
