//! The last step before the command: ties its life to the guard's, then becomes it.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::SigSet;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::failure::{code, say};
use crate::terminal::Terminal;

/// The hidden word that starts it: then the guard's process id, whether to wait for the terminal (not if
/// `0`), the command.
pub(crate) const WORD: &str = "__exec";

/// How long to wait for the terminal; without it the command would be stopped at its first read.
const PATIENCE: Duration = Duration::from_secs(1);

/// Becomes the command. Comes back only if that fails.
pub(crate) fn exec(words: &[OsString]) -> ExitCode {
    let [guard, foreground, program, args @ ..] = words else { return ExitCode::from(code::NOT_EXECUTABLE) };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return refuse(program, &error.into());
    }
    // Nobody would tell of a guard that ended before the line above.
    let guard = guard.to_str().and_then(|text| Pid::from_raw(text.parse().ok()?));
    if guard.is_none() || getppid() != guard {
        return ExitCode::from(code::NOT_EXECUTABLE);
    }
    if foreground != "0" {
        await_terminal(&Terminal::find());
    }
    // `simba` and the guard block signals, and a mask outlives an exec.
    let _ = SigSet::empty().thread_set_mask();
    refuse(program, &Command::new(program).args(args).exec())
}

/// `simba` gives the terminal to our group; to ask for it ourselves would stop us.
fn await_terminal(terminal: &Terminal) {
    let begun = Instant::now();
    while terminal.group().is_some() && !terminal.is_ours() && begun.elapsed() < PATIENCE {
        thread::sleep(Duration::from_micros(200));
    }
}

fn refuse(program: &OsString, error: &std::io::Error) -> ExitCode {
    let program = program.display();
    if error.kind() == ErrorKind::NotFound {
        say(&format!("`{program}` was not found: check the spelling, or give its path"));
        return ExitCode::from(code::NOT_FOUND);
    }
    say(&format!("`{program}` cannot be executed: {error}"));
    ExitCode::from(code::NOT_EXECUTABLE)
}
