//! A job on the leader only: two services schedule it, the leader runs it, and the other takes over when it stops.
//!
//! `cargo run -p simba-mutex --example scheduler`

#![allow(clippy::print_stdout)]

use std::time::Duration;

use simba_mutex::{Error, Job, Result, Schedule, Simba};
use tokio::sync::mpsc;

/// Receives the service and the token of each run.
type Runs = mpsc::UnboundedSender<(&'static str, u64)>;

fn start(simba: &Simba, service: &'static str, runs: Runs) -> Result<Job> {
    let every = Schedule::fixed_rate(Duration::from_millis(50))?;
    // In production, for example: Schedule::cron("30 2 * * *")?.with_time_zone("Europe/Berlin")?
    simba.scheduler("report").start(every, move |tenure| {
        let runs = runs.clone();
        async move {
            // A long run checks `tenure.is_held()` before every critical step.
            let _ = runs.send((service, tenure.token().get()));
            Ok::<_, Error>(())
        }
    })
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let url = format!("sqlite:{}", folder.path().join("simba.db").display());
    // One handle for each service, as for two processes.
    let (one, two) = (simba_mutex::connect(&url).await?, simba_mutex::connect(&url).await?);
    let (runs, mut received) = mpsc::unbounded_channel();
    let first = start(&one, "one", runs.clone())?;
    first.acquired().await?;
    let second = start(&two, "two", runs)?;
    for _ in 0..3 {
        let run = received.recv().await;
        println!("{run:?}");
        assert_eq!(run.map(|(service, _)| service), Some("one"));
    }
    first.stop().await?;
    second.acquired().await?;
    loop {
        // The channel may still contain runs of the first service.
        let Some((service, token)) = received.recv().await else { break };
        println!("{service} under token {token}");
        if service == "two" {
            break;
        }
    }
    second.stop().await?;
    one.shutdown().await;
    two.shutdown().await;
    Ok(())
}
