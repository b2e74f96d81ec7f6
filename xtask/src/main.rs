//! The chores of this workspace, as `cargo xtask CHORE`.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that talks to people")]

mod args;
mod bench;
mod built;
mod deny;
mod downstream;
mod examples;
mod faults;
mod full;
mod servers;
mod simulation;
mod step;
mod suites;
mod test;
mod upgrade;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;

use args::{Chore, USAGE};
use workspace::Workspace;

/// What a caller gets who typed something we do not know; 1 is left for a chore that failed.
const MISUSE: u8 = 2;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match args::parse(&words) {
        Ok(chore) => exit_code(perform(chore)),
        Err(complaint) => {
            eprintln!("error: {complaint}; `cargo xtask --help` shows what there is");
            ExitCode::from(MISUSE)
        }
    }
}

fn perform(chore: Chore) -> Result<()> {
    match chore {
        Chore::Help => print!("{USAGE}"),
        Chore::Test { quick } => test::test(Workspace::find()?, quick)?,
        Chore::Full => full::full(&Workspace::find()?)?,
        Chore::ServersUp => print_exports(&servers::up(&Workspace::find()?)?),
        Chore::ServersDown => servers::down(&Workspace::find()?)?,
        Chore::Sim { seeds } => simulation::sweep(&Workspace::find()?, seeds)?,
        Chore::Deny => deny::step(&Workspace::find()?).map(drop)?,
        Chore::Faults { rounds } => faults::faults(Workspace::find()?, rounds)?,
        Chore::Upgrade => {
            servers::around(Workspace::find()?, |workspace| upgrade::step(workspace).map(drop))?;
        }
        Chore::Bench { words } => bench::bench(Workspace::find()?, &words)?,
    }
    Ok(())
}

/// Prints what a shell can `eval`; everything else these chores say goes to stderr.
fn print_exports(variables: &[workspace::Variable]) {
    for (name, value) in variables {
        println!("export {name}={value}");
    }
}

fn exit_code(outcome: Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}
