//! The progress of a benchmark, on a terminal.

use std::io::{self, IsTerminal as _, Write as _};

/// One line that is overwritten. Prints nothing if stderr is not a terminal.
pub(crate) struct Progress {
    on: bool,
    steps: usize,
}

impl Progress {
    pub(crate) fn new(steps: usize) -> Self {
        Self { on: io::stderr().is_terminal(), steps }
    }

    /// Shows what is measured now.
    pub(crate) fn show(&self, step: usize, what: &str) {
        if self.on {
            let _ = write!(io::stderr(), "\r\x1b[K{step}/{} measuring {what} …", self.steps);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.on {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
