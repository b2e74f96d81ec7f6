//! The messages between `simba` and its guard, one per line.

use std::time::Duration;

use simba_mutex::Moment;

/// A message from `simba` to the guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The deadlines of the command: it gets TERM at the first, KILL at the second.
    Until { end: Moment, kill: Moment },
    /// Pass a signal on to the command.
    Signal(i32),
    /// Send TERM to the command now, and KILL at its deadline.
    End,
    /// Kill the command now: another may hold the mutex already.
    Kill,
}

/// A message from the guard to `simba`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// The command could not be started.
    Failed(i32),
    /// The command runs with this process id, and leads its own process group.
    Started(i32),
    /// The command is stopped.
    Stopped,
    /// The command has exited with this code.
    Exited(i32),
    /// The command was ended by this signal.
    Signaled(i32),
    /// No process of the command is left. `overdue`: the guard ended it because a deadline passed.
    Clean { overdue: bool },
    /// Processes are left that cannot be killed.
    Unclean,
}

impl Order {
    pub(crate) fn to_line(self) -> String {
        match self {
            Self::Until { end, kill } => format!("until {} {}\n", nanos(end), nanos(kill)),
            Self::Signal(signal) => format!("signal {signal}\n"),
            Self::End => "end\n".into(),
            Self::Kill => "kill\n".into(),
        }
    }

    pub(crate) fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        Some(match words[..] {
            ["until", end, kill] => Self::Until { end: moment(end)?, kill: moment(kill)? },
            ["signal", signal] => Self::Signal(signal.parse().ok()?),
            ["end"] => Self::End,
            ["kill"] => Self::Kill,
            _ => return None,
        })
    }
}

impl Report {
    pub(crate) fn to_line(self) -> String {
        match self {
            Self::Failed(errno) => format!("failed {errno}\n"),
            Self::Started(pid) => format!("started {pid}\n"),
            Self::Stopped => "stopped\n".into(),
            Self::Exited(code) => format!("exited {code}\n"),
            Self::Signaled(signal) => format!("signaled {signal}\n"),
            Self::Clean { overdue: false } => "clean\n".into(),
            Self::Clean { overdue: true } => "overdue\n".into(),
            Self::Unclean => "unclean\n".into(),
        }
    }

    pub(crate) fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        Some(match words[..] {
            ["failed", errno] => Self::Failed(errno.parse().ok()?),
            ["started", pid] => Self::Started(pid.parse().ok()?),
            ["stopped"] => Self::Stopped,
            ["exited", code] => Self::Exited(code.parse().ok()?),
            ["signaled", signal] => Self::Signaled(signal.parse().ok()?),
            ["clean"] => Self::Clean { overdue: false },
            ["overdue"] => Self::Clean { overdue: true },
            ["unclean"] => Self::Unclean,
            _ => return None,
        })
    }
}

/// Returns the time in nanoseconds. Both processes read the same clock.
fn nanos(at: Moment) -> u128 {
    (at - Moment::ZERO).as_nanos()
}

fn moment(text: &str) -> Option<Moment> {
    Some(Moment::ZERO + Duration::from_nanos(text.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_survives_formatting_and_parsing() {
        let at = |ms| Moment::ZERO + Duration::from_millis(ms);
        for order in [Order::Until { end: at(7), kill: at(9) }, Order::Signal(15), Order::End, Order::Kill] {
            assert_eq!(Order::parse(&order.to_line()), Some(order));
        }
        let reports = [
            Report::Failed(11),
            Report::Started(12),
            Report::Stopped,
            Report::Exited(3),
            Report::Signaled(9),
            Report::Clean { overdue: false },
            Report::Clean { overdue: true },
            Report::Unclean,
        ];
        for report in reports {
            assert_eq!(Report::parse(&report.to_line()), Some(report));
        }
        assert_eq!((Order::parse("until x"), Report::parse("")), (None, None));
    }
}
