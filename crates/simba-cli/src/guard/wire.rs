//! What `simba` and its guard tell each other, a line each.

use std::time::Duration;

use simba_mutex::Moment;

/// From `simba` to the guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Until when the command may run: told to end at the first moment, killed at the second.
    Until { end: Moment, kill: Moment },
    /// Pass a signal on to the command.
    Signal(i32),
    /// Tell the command to end, and kill it when the time is up.
    End,
    /// Kill the command now: another may hold the mutex already.
    Kill,
}

/// From the guard to `simba`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// The system gave no process for the command.
    Failed(i32),
    /// The command runs, as this process, which leads a group of its own.
    Started(i32),
    /// The command stands still.
    Stopped,
    /// The command has ended with this code, or by a signal.
    Exited(i32),
    Signaled(i32),
    /// Nothing of it is left: whether the guard had to end it itself because the time was up.
    Clean {
        overdue: bool,
    },
    /// Something of it is left that nobody can end.
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

/// Both processes read the same clock.
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
    fn every_line_says_the_same_at_both_ends() {
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
