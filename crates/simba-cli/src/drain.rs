//! How `simba lead` and `simba schedule` end when a termination signal arrives while their command runs.
//!
//! The signal is passed on, the lease is renewed until the command has ended, and then the mutex is released.

use std::io;
use std::process::ExitCode;

use simba_mutex::SystemClock;
use simba_mutex::clock::within;

use crate::failure::{Failure, Outcome, code, print_error};
use crate::run::{RELEASE_LIMIT, start_failure};
use crate::signals::name;
use crate::supervise::Ended;

/// A command that got a termination signal, and how it ended.
#[derive(Debug)]
pub(crate) struct Drained {
    /// The termination signals that were passed on, at least one.
    signals: Vec<i32>,
    ended: Result<Ended, Failure>,
}

impl Drained {
    /// Returns how a command ended under a mutex, or `None` if it got no termination signal.
    pub(crate) fn of(signals: &[i32], ended: &io::Result<Ended>, held: bool) -> Option<Self> {
        let ended = match ended {
            Ok(Ended::Code(_) | Ended::Signal(_)) if !held => Ok(Ended::Lost),
            Ok(ended) => Ok(*ended),
            Err(error) => Err(start_failure(error)),
        };
        (!signals.is_empty()).then(|| Self { signals: signals.to_vec(), ended })
    }

    /// Returns the outcome. An end because of the signal is success; everything else has its own exit code.
    fn outcome(self, mutex: &str) -> Outcome {
        let signal = self.signals.first().copied().map(name).unwrap_or_default();
        let failure = |code: u8, how: &str| {
            Err(Failure::new(code, format!("`{mutex}`: {signal} was passed on, and the command {how}")))
        };
        let number = match self.ended? {
            Ended::Code(code) => code,
            Ended::Signal(signal) => i32::from(code::SIGNAL) + signal,
            Ended::Unguarded => return failure(code::LOST, "was killed: its guard was killed or hangs"),
            Ended::Lost | Ended::Unclean => {
                return failure(code::LOST, "was ended before it was done: the mutex was lost");
            }
        };
        // A shell or a runtime may turn the signal into the code that a shell returns for it.
        if number == 0 || self.signals.contains(&(number - i32::from(code::SIGNAL))) {
            let text = format!("`{mutex}`: {signal} was passed on, the command ended, the mutex is released");
            print_error(&text);
            return Ok(ExitCode::SUCCESS);
        }
        failure(u8::try_from(number & 0xff).unwrap_or(u8::MAX), &format!("exited with {number}"))
    }

    fn is_lost(&self) -> bool {
        !matches!(self.ended, Ok(Ended::Code(_) | Ended::Signal(_)))
    }
}

/// Stops contending, and returns the outcome of the command if it was running.
pub(crate) async fn finish(
    mutex: &str,
    drained: Option<Drained>,
    stop: impl Future<Output = simba_mutex::Result<()>>,
) -> Outcome {
    let Some(drained) = drained else {
        stop.await?;
        return Ok(ExitCode::SUCCESS);
    };
    if drained.is_lost() {
        let _ = within(&SystemClock, RELEASE_LIMIT, stop).await;
        return drained.outcome(mutex);
    }
    let stopped = stop.await;
    let outcome = drained.outcome(mutex)?;
    stopped?;
    Ok(outcome)
}
