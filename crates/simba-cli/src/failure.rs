//! How `simba` ends: an exit code, and one line of text for an error.

use std::io::{self, Write as _};
use std::process::ExitCode;

use simba_mutex::{Error, ErrorKind};

/// The exit codes that `simba` itself returns; a part of the interface.
pub(crate) mod code {
    pub(crate) const NOT_ACQUIRED: u8 = 1;
    pub(crate) const USAGE: u8 = 2;
    pub(crate) const UNAVAILABLE: u8 = 69;
    /// The output cannot be written.
    pub(crate) const OUTPUT: u8 = 74;
    pub(crate) const LOST: u8 = 75;
    pub(crate) const PROTOCOL: u8 = 76;
    pub(crate) const DENIED: u8 = 77;
    pub(crate) const CONFIG: u8 = 78;
    pub(crate) const MAX_HOLD: u8 = 124;
    pub(crate) const NOT_EXECUTABLE: u8 = 126;
    pub(crate) const NOT_FOUND: u8 = 127;
    /// Added to the number of the signal that ended the command, as a shell does.
    pub(crate) const SIGNAL: u8 = 128;
}

/// Why a call of `simba` failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    message: String,
    source: Option<Error>,
    /// The mutex must not be freed: the process exits without a release.
    pub(crate) abandons: bool,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), source: None, abandons: false }
    }

    /// Exits without a release: the mutex is held until its lease ends.
    pub(crate) fn abandoning(self) -> Self {
        Self { abandons: true, ..self }
    }

    /// Prints the message in one line, and the causes if `causes` is set.
    pub(crate) fn print(&self, causes: bool) {
        print_error(&self.message);
        for cause in self.causes().iter().filter(|_| causes) {
            let _ = writeln!(io::stderr(), "  caused by: {cause}");
        }
    }

    /// Returns the causes, the outermost first.
    fn causes(&self) -> Vec<String> {
        let mut causes = Vec::new();
        let mut next: Option<&dyn std::error::Error> =
            self.source.as_ref().and_then(|error| std::error::Error::source(error));
        while let Some(cause) = next {
            causes.push(cause.to_string());
            next = cause.source();
        }
        causes
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { code: code_of(error.kind()), message: error.to_string(), source: Some(error), abandons: false }
    }
}

fn code_of(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Invalid => code::USAGE,
        ErrorKind::Denied => code::DENIED,
        ErrorKind::Unavailable => code::UNAVAILABLE,
        ErrorKind::Protocol => code::PROTOCOL,
        ErrorKind::Timeout | ErrorKind::Reentered => code::NOT_ACQUIRED,
        ErrorKind::Lost => code::LOST,
        _ => code::CONFIG,
    }
}

/// Exits without a release, because processes of the command cannot be killed: the mutex is held until its lease ends.
pub(crate) fn exit_with_leftover_processes() -> ! {
    print_error("the command left processes that cannot be killed: the mutex is held until its lease ends");
    std::process::exit(code::LOST.into())
}

/// Prints a line to stderr. Ignores write errors.
pub(crate) fn print_error(text: &str) {
    let _ = writeln!(io::stderr(), "simba: {text}");
}

/// The result of a call of `simba`.
pub(crate) type Outcome = Result<ExitCode, Failure>;
