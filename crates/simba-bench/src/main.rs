//! Measures the cost of Simba on each store, as ratios to the raw client of the same store.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command line program")]

mod args;
mod held;
mod stores;

use std::process::ExitCode;

use anyhow::Result;
use tokio::runtime::Runtime;

use args::{Command, USAGE};
use simba_measure::{Effort, Report, handover, pairs};

/// The exit code for invalid arguments; 1 means that a measurement failed.
const USAGE_ERROR: u8 = 2;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match args::parse(&args) {
        Ok(command) => run(command),
        Err(message) => {
            eprintln!("error: {message}\n\n{USAGE}");
            return ExitCode::from(USAGE_ERROR);
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

fn run(command: Command) -> Result<()> {
    match command {
        Command::Help => print!("{USAGE}"),
        Command::Measure { effort, json, stores } => {
            let report = Runtime::new()?.block_on(measure(effort, &stores))?;
            if json { println!("{}", report.json()) } else { print!("{report}") }
        }
        Command::Held(trial) => println!("{}", Runtime::new()?.block_on(held::run(trial))?),
    }
    Ok(())
}

/// Measures the stores with these names, or all stores.
async fn measure(effort: Effort, names: &[&str]) -> Result<Report> {
    let mut report = Report::new(effort);
    let selected = |name| names.is_empty() || names.contains(&name);
    for target in stores::STORES.iter().filter(|store| selected(store.name())) {
        let progress = |measure: &str| eprintln!("measuring {}: {measure} …", target.name());
        progress("uncontended lock/unlock cycles");
        report.add(pairs::measure(*target, effort).await?);
        progress("hand-over");
        report.add(handover::measure(*target, effort).await?);
        progress("many held mutexes");
        report.add(held::measure(*target, effort).await?);
        report.note(*target);
    }
    Ok(report)
}
