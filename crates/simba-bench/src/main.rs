//! What Simba costs on top of a store, as ratios to the same store with nothing of ours in between.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that talks to people")]

mod args;
mod held;
mod stores;

use std::process::ExitCode;

use anyhow::Result;
use tokio::runtime::Runtime;

use args::{Command, USAGE};
use simba_measure::{Effort, Report, handover, pairs};

/// What a caller gets who typed something we do not know; 1 is left for a measure that failed.
const MISUSE: u8 = 2;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let outcome = match args::parse(&words) {
        Ok(command) => perform(command),
        Err(complaint) => {
            eprintln!("error: {complaint}\n\n{USAGE}");
            return ExitCode::from(MISUSE);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(command: Command) -> Result<()> {
    match command {
        Command::Help => print!("{USAGE}"),
        Command::Measure { effort, json, stores } => {
            let report = Runtime::new()?.block_on(measure(effort, &stores))?;
            if json { println!("{}", report.json()) } else { print!("{report}") }
        }
        Command::Held(trial) => println!("{}", Runtime::new()?.block_on(held::try_out(trial))?),
    }
    Ok(())
}

/// Measures the stores of these names, or all.
async fn measure(effort: Effort, names: &[&str]) -> Result<Report> {
    let mut report = Report::new(effort);
    let wanted = |name| names.is_empty() || names.contains(&name);
    for target in stores::STORES.iter().filter(|store| wanted(store.name())) {
        let progress = |measure: &str| eprintln!("measuring {}: {measure} …", target.name());
        progress("uncontended pairs");
        report.add(pairs::measure(*target, effort).await?);
        progress("hand-over");
        report.add(handover::measure(*target, effort).await?);
        progress("many held mutexes");
        report.add(held::measure(*target, effort).await?);
        report.note(*target);
    }
    Ok(report)
}
