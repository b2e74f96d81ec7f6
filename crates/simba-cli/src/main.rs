//! The command `simba`: flock(1) for a fleet.

mod args;
mod bench;
mod drain;
mod failure;
mod guard;
mod health;
mod lead;
mod log;
mod nested;
mod operate;
mod output;
mod records;
mod redact;
mod run;
mod schedule;
mod signals;
mod store;
mod supervise;
mod tck;
mod terminal;
mod watch;

use std::ffi::OsString;
use std::io;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::error::{ContextKind, ErrorKind};
use clap::{CommandFactory as _, Parser as _};
use clap_complete::Shell;

use args::{Cli, Command};
use failure::{Failure, Outcome, print_error};
use simba_mutex::SystemClock;
use simba_mutex::clock::within;
use store::Store;
use tokio::runtime::Runtime;

/// Time limit for closing the store, so that a store that hangs does not block the exit.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    match words.first().and_then(|word| word.to_str()) {
        Some(guard::process::SUBCOMMAND) => guard::guard(&words[1..]),
        Some(guard::trampoline::SUBCOMMAND) => guard::trampoline::exec(&words[1..]),
        _ => match Cli::try_parse() {
            Ok(cli) => run_command(&cli),
            Err(error) => usage(&error, &words),
        },
    }
}

/// Prints a usage error in one line. Redacts the password of a URL that was typed in the wrong place.
fn usage(error: &clap::Error, words: &[OsString]) -> ExitCode {
    // Help as clap formats it: to stdout for `--help`, to stderr for a call without arguments.
    if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
    } else {
        let message = missing_separator(error, words)
            .unwrap_or_else(|| format!("{}: see --help", one_line(&error.render().to_string())));
        print_error(&redact::redact(&message, words));
    }
    ExitCode::from(if error.use_stderr() { failure::code::USAGE } else { 0 })
}

/// Returns the message for a command to run that has no `--` before it.
fn missing_separator(error: &clap::Error, words: &[OsString]) -> Option<String> {
    let runs_a_command = words.iter().any(|word| word == "run" || word == "lead" || word == "schedule");
    if error.kind() != ErrorKind::UnknownArgument || !runs_a_command || words.iter().any(|word| word == "--")
    {
        return None;
    }
    let argument = error.get(ContextKind::InvalidArg)?;
    Some(format!(
        "unexpected argument '{argument}': put `--` before the command, as in `simba run m -- true`"
    ))
}

/// Returns clap's message and tip in one line, without the usage that `--help` shows.
fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let message = lines.filter(|line| !line.is_empty() && !line.starts_with("For more information"));
    let message = message.collect::<Vec<_>>().join(" ").replace(" tip: ", "; ");
    message.strip_prefix("error: ").unwrap_or(&message).to_owned()
}

fn run_command(cli: &Cli) -> ExitCode {
    terminal::block_sigttou();
    // The conformance suite loses mutexes on purpose.
    let quiet = matches!(cli.command, Command::Tck(_));
    log::init(cli.verbose, quiet);
    let runtime = match start() {
        Ok(runtime) => runtime,
        Err(error) => {
            print_error(&format!("cannot start a thread: {error}: raise the limit of processes (ulimit -u)"));
            return ExitCode::from(failure::code::UNAVAILABLE);
        }
    };
    let outcome = match &cli.command {
        // These commands create their own runtime.
        Command::Tck(args) => store::settings(cli).and_then(|settings| tck::tck(&settings.url, args)),
        Command::Bench(args) => store::settings(cli).and_then(|settings| bench::bench(&settings, args)),
        _ => runtime.block_on(execute(cli)),
    };
    // Does not wait for threads that are blocked in a store that hangs.
    runtime.shutdown_background();
    match outcome {
        Ok(code) => code,
        Err(failure) => {
            failure.print(cli.verbose > 0);
            ExitCode::from(failure.code)
        }
    }
}

/// Creates a runtime. Starts one thread first, because clocks and stores start theirs where no error can be reported.
fn start() -> io::Result<Runtime> {
    thread::Builder::new().spawn(|| {})?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

async fn execute(cli: &Cli) -> Outcome {
    match &cli.command {
        Command::Completions { shell } => return completions(*shell),
        Command::Man { command } => return manual(command.as_deref()),
        _ => {}
    }
    let store = Store::open(cli).await?;
    let simba = &store.simba;
    let outcome = match &cli.command {
        Command::Run(args) => run::run(&store, args).await,
        Command::Lead(args) => lead::lead(&store, args).await,
        Command::Schedule(args) => schedule::schedule(&store, args).await,
        Command::Status(args) => records::status(simba, args).await,
        Command::Ls(format) => records::ls(simba, *format).await,
        Command::Watch(args) => watch::watch(simba, args).await,
        Command::Release(args) => operate::release(simba, args).await,
        Command::Schema(args) => operate::schema(simba, args).await,
        Command::Doctor(format) => operate::doctor(&store, *format).await,
        Command::Completions { .. } | Command::Man { .. } | Command::Tck(_) | Command::Bench(_) => {
            Ok(ExitCode::SUCCESS)
        }
    };
    if let Err(failure) = &outcome
        && failure.abandons
    {
        // The mutex must not be freed: exit without a shutdown and without dropping anything.
        failure.print(cli.verbose > 0);
        std::process::exit(failure.code.into());
    }
    within(&SystemClock, SHUTDOWN_LIMIT, simba.shutdown()).await;
    outcome
}

fn completions(shell: Shell) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "simba", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}

/// Prints the manual page of the program, or of one of its commands.
fn manual(of: Option<&str>) -> Outcome {
    let mut cli = Cli::command();
    cli.build();
    let command = match of {
        None => cli,
        Some(name) => {
            let found = cli
                .find_subcommand(name)
                .cloned()
                .ok_or_else(|| Failure::new(failure::code::USAGE, "unknown command: see `simba --help`"))?;
            let title: &'static str = Box::leak(format!("simba-{name}").into_boxed_str());
            found.name(title)
        }
    };
    let mut page = Vec::new();
    // Writing to memory does not fail.
    let _ = clap_mangen::Man::new(command).render(&mut page);
    output::print(&String::from_utf8_lossy(&page))
}
