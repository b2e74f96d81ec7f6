//! `simba run`: one command under the mutex.

use std::process::ExitCode;
use std::time::Duration;

use simba_mutex::clock::{Clock as _, within};
use simba_mutex::{ErrorKind, Guard, Lease, Locker, Loss, Simba, SystemClock, Tenure};

use crate::args::{LeaseArgs, RunArgs};
use crate::failure::{Failure, Outcome, code};
use crate::nested;
use crate::signals::Signals;
use crate::store::Store;
use crate::supervise::{Ended, Job};

/// Time limit for the release of a lost mutex, and after a signal: the store itself may hang.
pub(crate) const RELEASE_LIMIT: Duration = Duration::from_secs(1);

/// Waits for the mutex, runs the command under it, returns its exit code.
pub(crate) async fn run(store: &Store, args: &RunArgs) -> Outcome {
    let lease = lease_of(store, args.lease)?;
    let mut signals = listen()?;
    nested::refuse(store, &args.mutex, args.conflict).await?;
    let locker = locker(&store.simba, args, lease);
    let acquired = tokio::select! {
        biased;
        // A termination signal during the wait: do not start the command.
        signal = signals.termination() => return Ok(exit_code_of_signal(signal)),
        acquired = acquire(&locker, args) => acquired?,
    };
    let Some(guard) = acquired else { return refused(store, &locker, args) };
    if let Some(signal) = signals.pending_termination().await {
        return Ok(exit_code_of_signal(signal));
    }
    let tenure = guard.tenure();
    tracing::debug!(%store, holder = %tenure.contender(), "acquired");
    let job = Job::new(&args.command, &tenure, lease);
    let ended = job.run(&mut signals).await.map_err(|error| start_failure(&error))?;
    finish(guard, ended, args, &mut signals).await
}

/// Returns a locker with the limits of the arguments.
fn locker(simba: &Simba, args: &RunArgs, lease: Lease) -> Locker {
    let locker = simba.locker(args.mutex.as_str()).with_lease(lease);
    let locker = locker.with_min_hold(args.min_hold.unwrap_or_default());
    match args.max_hold {
        Some(max_hold) => locker.with_max_hold(max_hold),
        None => locker,
    }
}

/// Acquires the mutex as the arguments require. Returns `None` if another holds it.
async fn acquire(locker: &Locker, args: &RunArgs) -> Result<Option<Guard>, Failure> {
    if args.nonblock {
        return Ok(locker.try_lock().await?);
    }
    let acquired = match args.wait {
        Some(limit) => locker.lock_timeout(limit).await,
        None => locker.lock().await,
    };
    match acquired {
        Err(error) if error.kind() == ErrorKind::Timeout => Ok(None),
        acquired => Ok(Some(acquired?)),
    }
}

/// Returns the failure for a mutex that another holds.
fn refused(store: &Store, locker: &Locker, args: &RunArgs) -> Outcome {
    let holder = match &locker.last_holder().id {
        Some(id) => format!("`{id}`"),
        None => "another".into(),
    };
    let message = format!("`{}` is held by {holder} (on {store})", args.mutex);
    Err(Failure::new(args.conflict, message))
}

/// Frees the mutex, unless processes of the command are left, and returns the outcome.
async fn finish(guard: Guard, ended: Ended, args: &RunArgs, signals: &mut Signals) -> Outcome {
    let tenure = guard.tenure();
    let held = tenure.is_held();
    if ended == Ended::Unclean {
        return Err(leftover_processes(guard, &args.mutex));
    }
    let failure = failure(&tenure, ended, args);
    let freed = tokio::select! {
        biased;
        freed = unless_signaled(guard.release(), signals.termination()) => match freed {
            Ok(freed) => freed,
            Err(signal) => {
                let message = format!("`{}` stays held until its lease ends", args.mutex);
                return Err(Failure::new(signal_code(signal), message).abandoning());
            }
        },
        () = SystemClock.sleep_until(SystemClock.now() + RELEASE_LIMIT), if !held => {
            return Err(failure.abandoning());
        }
    };
    if let Err(error) = freed {
        tracing::debug!(%error, "the mutex was not released");
    }
    match ended {
        Ended::Code(status) if held => Ok(ExitCode::from(u8::try_from(status & 0xff).unwrap_or(u8::MAX))),
        Ended::Signal(signal) if held => Ok(exit_code_of_signal(signal)),
        _ => Err(failure),
    }
}

/// Waits for a release. Returns the signal if one arrives and the release then takes longer than [`RELEASE_LIMIT`]: the
/// command has ended, and the signal asks not to wait. The mutex is freed when its lease ends.
async fn unless_signaled<T>(
    release: impl Future<Output = T>,
    signal: impl Future<Output = i32>,
) -> Result<T, i32> {
    tokio::pin!(release);
    tokio::select! {
        biased;
        released = &mut release => Ok(released),
        signal = signal => within(&SystemClock, RELEASE_LIMIT, release).await.ok_or(signal),
    }
}

/// Keeps the mutex until its lease ends, because processes of the command are still running.
pub(crate) fn leftover_processes(held: impl Sized, mutex: &str) -> Failure {
    std::mem::forget(held);
    let message = format!("`{mutex}`: the command left processes that cannot be killed");
    Failure::new(code::LOST, message).abandoning()
}

/// Returns the failure for a command that `simba` ended.
fn failure(tenure: &Tenure, ended: Ended, args: &RunArgs) -> Failure {
    let mutex = &args.mutex;
    match (args.max_hold, tenure.loss()) {
        (_, None) if ended == Ended::Unguarded => {
            let message =
                format!("`{mutex}`: the guard of the command was killed or hangs: the command was killed");
            Failure::new(code::LOST, message)
        }
        // The deadline was set by the maximum hold.
        (Some(max_hold), None | Some(Loss::MaxHold))
            if tenure.deadline() >= tenure.acquired_at() + max_hold =>
        {
            let max_hold = humantime::format_duration(max_hold);
            Failure::new(
                code::MAX_HOLD,
                format!("`{mutex}`: the command was ended because of --max-hold {max_hold}"),
            )
        }
        (_, loss) => {
            let loss = loss.unwrap_or(Loss::Deadline);
            Failure::new(code::LOST, format!("`{mutex}` was lost and the command ended: {loss}"))
        }
    }
}

/// Returns the exit code that a shell returns for a command that this signal ended.
pub(crate) fn exit_code_of_signal(signal: i32) -> ExitCode {
    ExitCode::from(signal_code(signal))
}

fn signal_code(signal: i32) -> u8 {
    code::SIGNAL.saturating_add(u8::try_from(signal).unwrap_or(u8::MAX))
}

/// Returns the lease of the arguments; what they do not set comes from the configuration.
pub(crate) fn lease_of(store: &Store, args: LeaseArgs) -> Result<Lease, Failure> {
    let configured = store.settings.lease;
    let lease = match (args.ttl, args.transition) {
        (None, None) => configured,
        (ttl, transition) => {
            Lease::new(ttl.unwrap_or(configured.ttl()), transition.unwrap_or(configured.transition()))?
        }
    };
    Ok(match args.grace {
        Some(grace) => lease.with_grace(grace)?,
        None => lease,
    })
}

/// Starts to handle signals.
pub(crate) fn listen() -> Result<Signals, Failure> {
    Signals::listen()
        .map_err(|error| Failure::new(code::UNAVAILABLE, format!("cannot handle signals: {error}")))
}

/// Returns the failure for a process that cannot be started.
pub(crate) fn start_failure(error: &std::io::Error) -> Failure {
    Failure::new(code::NOT_EXECUTABLE, format!("cannot start a process: {error}"))
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test]
    async fn signal_does_not_cut_a_short_release_off() {
        assert_eq!(unless_signaled(tokio::task::yield_now(), ready(15)).await, Ok(()));
        assert_eq!(unless_signaled(pending::<()>(), ready(15)).await, Err(15));
    }
}
