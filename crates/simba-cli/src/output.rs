//! Text output: aligned tables, and colours.

use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::termios::tcgetwinsize;
use rustix::time::Timespec;

use crate::failure::{Failure, Outcome, code};

/// Prints to stdout, as the last step of a command.
pub(crate) fn print(text: &str) -> Outcome {
    write(text).map(|_| ExitCode::SUCCESS)
}

/// Prints to stdout. Returns false if the reader has closed it.
pub(crate) fn write(text: &str) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::new(code::OUTPUT, format!("the output cannot be written: {error}"))),
    }
}

/// Returns whether the reader of stdout has closed it.
pub(crate) fn is_closed() -> bool {
    let out = rustix::stdio::stdout();
    let mut fds = [PollFd::new(&out, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0) && fds[0].revents().contains(PollFlags::ERR)
}

/// Returns whether the user wants no colours, by the convention of <https://no-color.org>.
fn no_colour() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// Colours, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Paint {
    on: bool,
}

impl Paint {
    /// Returns colours for a terminal, unless `NO_COLOR` is set.
    pub(crate) fn for_stdout() -> Self {
        Self { on: io::stdout().is_terminal() && !no_colour() }
    }

    pub(crate) fn green(self, text: &str) -> String {
        self.paint("32", text)
    }

    pub(crate) fn yellow(self, text: &str) -> String {
        self.paint("33", text)
    }

    pub(crate) fn red(self, text: &str) -> String {
        self.paint("31", text)
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Rows of aligned cells. On a terminal that is too narrow, each row is a block of lines.
pub(crate) struct Table<const N: usize> {
    head: [&'static str; N],
    rows: Vec<[String; N]>,
    width: usize,
}

impl<const N: usize> Table<N> {
    pub(crate) fn new(head: [&'static str; N]) -> Self {
        let columns = tcgetwinsize(rustix::stdio::stdout()).ok().map(|size| usize::from(size.ws_col));
        Self { head, rows: Vec::new(), width: columns.filter(|width| *width > 0).unwrap_or(usize::MAX) }
    }

    pub(crate) fn push(&mut self, row: [String; N]) {
        self.rows.push(row);
    }

    fn widths(&self) -> [usize; N] {
        let mut widths = self.head.map(str::len);
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = visible(cell).max(*width);
            }
        }
        widths
    }

    fn fmt_blocks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widest = self.head.iter().map(|name| name.len()).max().unwrap_or(0);
        for (at, row) in self.rows.iter().enumerate() {
            if at > 0 {
                writeln!(f)?;
            }
            for (name, cell) in self.head.iter().zip(row) {
                writeln!(f, "{name:<widest$}  {cell}")?;
            }
        }
        Ok(())
    }
}

impl<const N: usize> fmt::Display for Table<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        if widths.iter().sum::<usize>() + 2 * (N - 1) > self.width {
            return self.fmt_blocks(f);
        }
        let head = self.head.map(str::to_owned);
        for row in std::iter::once(&head).chain(&self.rows) {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(widths) {
                line.push_str(cell);
                line.extend(std::iter::repeat_n(' ', width + 2 - visible(cell).min(width + 2)));
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Returns how many columns a cell takes, without its colour codes.
fn visible(cell: &str) -> usize {
    let mut count = 0;
    let mut inside = false;
    for c in cell.chars() {
        match (inside, c) {
            (false, '\x1b') => inside = true,
            (true, 'm') => inside = false,
            (false, _) => count += 1,
            (true, _) => {}
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(width: usize) -> Table<2> {
        let mut table = Table { head: ["mutex", "state"], rows: Vec::new(), width };
        table.push(["orders".into(), Paint { on: true }.red("held")]);
        table.push(["a".into(), "free".into()]);
        table
    }

    #[test]
    fn columns_are_aligned_with_and_without_colour() {
        let text = table(80).to_string();
        assert_eq!(text, "mutex   state\norders  \u{1b}[31mheld\u{1b}[0m\na       free\n");
    }

    #[test]
    fn narrow_terminal_gets_blocks() {
        let text = table(8).to_string();
        assert_eq!(text, "mutex  orders\nstate  \u{1b}[31mheld\u{1b}[0m\n\nmutex  a\nstate  free\n");
    }
}
