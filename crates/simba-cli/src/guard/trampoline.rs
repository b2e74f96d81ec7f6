//! The last step before the command: makes the kernel kill the command when the guard dies, then executes it.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Duration;

use nix::sys::signal::SigSet;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::failure::{code, print_error};
use crate::terminal::Terminal;

/// The hidden subcommand. Its arguments: the process id of the guard, the group of `simba` if that gives the terminal to
/// the command (otherwise `0`), the command.
pub(crate) const SUBCOMMAND: &str = "__exec";

/// Executes the command in this process. Returns only if that fails.
pub(crate) fn exec(words: &[OsString]) -> ExitCode {
    let [guard, foreground, program, args @ ..] = words else { return ExitCode::from(code::NOT_EXECUTABLE) };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return fail(program, &error.into());
    }
    // A guard that ended before the line above would not be noticed.
    let id = |text: &OsString| Pid::from_raw(text.to_str()?.parse().ok()?);
    let guard = id(guard);
    if guard.is_none() || getppid() != guard {
        return ExitCode::from(code::NOT_EXECUTABLE);
    }
    if let Some(group) = id(foreground) {
        await_terminal(&Terminal::find(), group);
    }
    // `simba` and the guard block signals, and exec keeps the mask.
    let _ = SigSet::empty().thread_set_mask();
    fail(program, &Command::new(program).args(args).exec())
}

/// Waits until the group of `simba` does not have the terminal any more: taking it ourselves would stop this process, and
/// so would the first read without it. If `simba` is stopped or killed, the guard ends this process.
fn await_terminal(terminal: &Terminal, simba: Pid) {
    while terminal.group() == Some(simba) {
        thread::sleep(Duration::from_micros(200));
    }
}

fn fail(program: &OsString, error: &std::io::Error) -> ExitCode {
    let program = program.display();
    if error.kind() == ErrorKind::NotFound {
        print_error(&format!("`{program}` was not found: check the spelling, or give its path"));
        return ExitCode::from(code::NOT_FOUND);
    }
    print_error(&format!("`{program}` cannot be executed: {error}"));
    ExitCode::from(code::NOT_EXECUTABLE)
}
