//! `simba run`: one command under the mutex.

use std::process::ExitCode;
use std::time::Duration;

use simba_mutex::clock::Clock as _;
use simba_mutex::{ErrorKind, Guard, Lease, Locker, Loss, Simba, SystemClock, Tenure};

use crate::args::{LeaseArgs, RunArgs};
use crate::failure::{Failure, Outcome, code};
use crate::nested;
use crate::signals::Signals;
use crate::store::Store;
use crate::supervise::{Ended, Job};

/// How long to try to tell the store of the end once the mutex is lost: it may be the store that hangs.
const FAREWELL: Duration = Duration::from_secs(1);

/// Waits for the mutex, runs the command under it, gives its exit code.
pub(crate) async fn run(store: &Store, args: &RunArgs) -> Outcome {
    let lease = lease_of(store, args.lease)?;
    let mut signals = listen()?;
    nested::refuse(store, &args.mutex, args.conflict).await?;
    let locker = locker(&store.simba, args, lease);
    let taken = tokio::select! {
        biased;
        // Asked to end while it waits: nothing is started any more.
        signal = signals.end() => return Ok(by_signal(signal)),
        taken = take(&locker, args) => taken?,
    };
    let Some(guard) = taken else { return refused(store, &locker, args) };
    if let Some(signal) = signals.ended().await {
        return Ok(by_signal(signal));
    }
    let tenure = guard.tenure();
    tracing::debug!(%store, holder = %tenure.contender(), "acquired");
    let job = Job::new(&args.command, &tenure, lease).with_max_hold(args.max_hold);
    let ended = job.run(&mut signals).await.map_err(|error| no_process(&error))?;
    settle(guard, ended, args, &mut signals).await
}

fn locker(simba: &Simba, args: &RunArgs, lease: Lease) -> Locker {
    let locker = simba.locker(args.mutex.as_str()).with_lease(lease);
    let locker = locker.with_min_hold(args.min_hold.unwrap_or_default());
    match args.max_hold {
        Some(most) => locker.with_max_hold(most),
        None => locker,
    }
}

async fn take(locker: &Locker, args: &RunArgs) -> Result<Option<Guard>, Failure> {
    if args.nonblock {
        return Ok(locker.try_lock().await?);
    }
    let taken = match args.wait {
        Some(limit) => locker.lock_timeout(limit).await,
        None => locker.lock().await,
    };
    match taken {
        Err(error) if error.kind() == ErrorKind::Timeout => Ok(None),
        taken => Ok(Some(taken?)),
    }
}

fn refused(store: &Store, locker: &Locker, args: &RunArgs) -> Outcome {
    let holder = match &locker.last_holder().id {
        Some(id) => format!("`{id}`"),
        None => "another".into(),
    };
    let message = format!("`{}` is held by {holder} (on {store})", args.mutex);
    Err(Failure::new(args.conflict, message))
}

/// Frees the mutex, unless something of the command is left, and says how it went.
async fn settle(guard: Guard, ended: Ended, args: &RunArgs, signals: &mut Signals) -> Outcome {
    let tenure = guard.tenure();
    let held = tenure.is_held();
    if ended == Ended::Unclean {
        return Err(unclean(guard, &args.mutex));
    }
    let failure = failure(&tenure, ended, args);
    let freed = tokio::select! {
        biased;
        freed = guard.release() => freed,
        // The command is over, and who waits for us does not want to: what is held ends with its lease.
        signal = signals.end() => {
            let message = format!("`{}` is left to end with its lease", args.mutex);
            return Err(Failure::new(signal_code(signal), message).abandoning());
        }
        () = SystemClock.sleep_until(SystemClock.now() + FAREWELL), if !held => return Err(failure.abandoning()),
    };
    if let Err(error) = freed {
        tracing::debug!(%error, "the mutex is not freed");
    }
    match ended {
        Ended::Code(status) if held => Ok(ExitCode::from(u8::try_from(status & 0xff).unwrap_or(u8::MAX))),
        Ended::Signal(signal) if held => Ok(by_signal(signal)),
        _ => Err(failure),
    }
}

/// Nobody may work beside what is left: the mutex is kept until its lease ends.
pub(crate) fn unclean(held: impl Sized, mutex: &str) -> Failure {
    std::mem::forget(held);
    let message = format!("`{mutex}`: the command left processes behind that cannot be ended");
    Failure::new(code::LOST, message).abandoning()
}

/// Why the command was ended by us.
fn failure(tenure: &Tenure, ended: Ended, args: &RunArgs) -> Failure {
    let mutex = &args.mutex;
    match (args.max_hold, tenure.loss()) {
        (_, None) if ended == Ended::Unguarded => {
            let message =
                format!("`{mutex}`: the guard of the command was killed or hangs: the command was killed");
            Failure::new(code::LOST, message)
        }
        // The longest hold is what the deadline was set by.
        (Some(most), None | Some(Loss::MaxHold)) if tenure.deadline() >= tenure.acquired_at() + most => {
            let most = humantime::format_duration(most);
            Failure::new(code::MAX_HOLD, format!("`{mutex}`: the command took {most}, and was ended"))
        }
        (_, loss) => {
            let loss = loss.unwrap_or(Loss::Deadline);
            Failure::new(code::LOST, format!("`{mutex}` was lost and the command ended: {loss}"))
        }
    }
}

/// As a shell tells of a signal.
pub(crate) fn by_signal(signal: i32) -> ExitCode {
    ExitCode::from(signal_code(signal))
}

fn signal_code(signal: i32) -> u8 {
    code::SIGNAL.saturating_add(u8::try_from(signal).unwrap_or(u8::MAX))
}

/// The lease that was asked for, or else that of the configuration.
pub(crate) fn lease_of(store: &Store, args: LeaseArgs) -> Result<Lease, Failure> {
    let usual = store.settings.lease;
    let lease = match (args.ttl, args.transition) {
        (None, None) => usual,
        (ttl, transition) => {
            Lease::new(ttl.unwrap_or(usual.ttl()), transition.unwrap_or(usual.transition()))?
        }
    };
    Ok(match args.grace {
        Some(grace) => lease.with_grace(grace)?,
        None => lease,
    })
}

pub(crate) fn listen() -> Result<Signals, Failure> {
    Signals::listen()
        .map_err(|error| Failure::new(code::UNAVAILABLE, format!("cannot listen to signals: {error}")))
}

pub(crate) fn no_process(error: &std::io::Error) -> Failure {
    Failure::new(code::NOT_EXECUTABLE, format!("the system starts no process: {error}"))
}
