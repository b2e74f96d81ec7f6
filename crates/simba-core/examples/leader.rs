//! Leader election with callbacks: acquire, step down, acquire again, stop.
//!
//! `cargo run -p simba-core --example leader`

#![allow(clippy::print_stdout)]

use std::time::Duration;

use simba_core::{Contender, MemoryBackend, MutexState, Result, Simba, Tenure};

struct Leader;

impl Contender for Leader {
    async fn on_acquired(&mut self, tenure: &Tenure, _: &MutexState) {
        println!("leading with token {}", tenure.token());
    }

    async fn on_released(&mut self, tenure: &Tenure, _: &MutexState) {
        println!("not leading any more, token {} is over", tenure.token());
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let simba = Simba::new(MemoryBackend::new());
    let contention = simba.contend("leader").with_contender(Leader);
    contention.start()?;
    let first = contention.acquired().await?;
    contention.step_down(Duration::from_millis(100));
    first.lost().await;
    let second = contention.acquired().await?;
    assert!(first.token() < second.token());
    contention.stop().await
}
