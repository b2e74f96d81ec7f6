//! The tasks of this workspace, as `cargo xtask TASK`.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line program")]

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

use args::{Task, USAGE};
use workspace::Workspace;

/// The exit code for wrong arguments; 1 is for a task that failed.
const MISUSE: u8 = 2;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match args::parse(&words) {
        Ok(task) => exit_code(run(task)),
        Err(message) => {
            eprintln!("error: {message}; see `cargo xtask --help`");
            ExitCode::from(MISUSE)
        }
    }
}

fn run(task: Task) -> Result<()> {
    match task {
        Task::Help => print!("{USAGE}"),
        Task::Test { quick } => test::test(Workspace::find()?, quick)?,
        Task::Full => full::full(&Workspace::find()?)?,
        Task::ServersUp => print_exports(&servers::up(&Workspace::find()?)?),
        Task::ServersDown => servers::down(&Workspace::find()?)?,
        Task::Sim { seeds } => simulation::sweep(&Workspace::find()?, seeds)?,
        Task::Deny => deny::step(&Workspace::find()?).map(drop)?,
        Task::Faults { rounds } => faults::faults(Workspace::find()?, rounds)?,
        Task::Upgrade => {
            servers::with_servers(Workspace::find()?, |workspace| upgrade::step(workspace).map(drop))?;
        }
        Task::Bench { words } => bench::bench(Workspace::find()?, &words)?,
    }
    Ok(())
}

/// Prints lines for a shell to `eval`; all other output of these tasks goes to stderr.
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
