//! A job on the leader only: two services schedule it, one runs it, and the other goes on when that one stops.
//!
//! `cargo run -p simba-mutex --example scheduler`

#![allow(clippy::print_stdout)]

use std::time::Duration;

use simba_mutex::{Error, Job, Result, Schedule, Simba};
use tokio::sync::mpsc;

/// What a run tells of itself: which service, under which token.
type Runs = mpsc::UnboundedSender<(&'static str, u64)>;

fn start(simba: &Simba, service: &'static str, runs: Runs) -> Result<Job> {
    let every = Schedule::fixed_rate(Duration::from_millis(50))?;
    // In production rather: Schedule::cron("30 2 * * *")?.with_time_zone("Europe/Berlin")?
    simba.scheduler("report").start(every, move |tenure| {
        let runs = runs.clone();
        async move {
            // A run that takes long asks `tenure.is_held()` before every step that counts.
            let _ = runs.send((service, tenure.token().get()));
            Ok::<_, Error>(())
        }
    })
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let url = format!("sqlite:{}", folder.path().join("simba.db").display());
    // A handle each, as two processes would have.
    let (one, two) = (simba_mutex::connect(&url).await?, simba_mutex::connect(&url).await?);
    let (runs, mut seen) = mpsc::unbounded_channel();
    let first = start(&one, "one", runs.clone())?;
    first.acquired().await?;
    let second = start(&two, "two", runs)?;
    for _ in 0..3 {
        let run = seen.recv().await;
        println!("{run:?}");
        assert_eq!(run.map(|(service, _)| service), Some("one"));
    }
    first.stop().await?;
    second.acquired().await?;
    loop {
        // What the first still ran is read before.
        let Some((service, token)) = seen.recv().await else { break };
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
