//! `simba schedule`: runs a command repeatedly, on the leader only.

use std::ffi::OsString;
use std::io;
use std::sync::Arc;

use simba_mutex::{Lease, Schedule, Tenure};
use tokio::sync::watch;

use crate::args::ScheduleArgs;
use crate::drain::{self, Drained};
use crate::failure::{Failure, Outcome, code};
use crate::health;
use crate::nested;
use crate::run::{lease_of, listen};
use crate::signals::{self, Relay, Signals};
use crate::store::Store;
use crate::supervise::{Ended, Job};

/// Runs the command on its schedule until a signal asks to end.
pub(crate) async fn schedule(store: &Store, args: &ScheduleArgs) -> Outcome {
    let lease = lease_of(store, args.service.lease)?;
    let mut signals = listen()?;
    nested::refuse(store, &args.mutex, code::NOT_ACQUIRED).await?;
    let runs = Arc::new(Runs::new());
    let command: Arc<[OsString]> = args.service.command.clone().into();
    let scheduler = store.simba.scheduler(args.mutex.as_str()).with_lease(lease);
    let begun = Arc::clone(&runs);
    let job = scheduler.start(schedule_of(args)?, move |tenure| {
        run_once(Arc::clone(&command), tenure, lease, Runs::begin(&begun))
    })?;
    let job = Arc::new(job);
    if let Some(address) = args.service.metrics {
        let leader = Arc::clone(&job);
        health::serve(address, Arc::new(move || leader.is_leading())).await?;
    }
    let drained = runs.drain(&mut signals).await;
    drain::finish(&args.mutex, drained, job.stop()).await
}

/// The runs of the command, of which at most one is active.
struct Runs {
    state: watch::Sender<State>,
    relay: Relay,
}

#[derive(Debug, Default)]
struct State {
    /// No further run is started.
    draining: bool,
    running: bool,
    /// How the active run ended after a signal.
    drained: Option<Drained>,
}

/// An active run. Ends when it is dropped.
struct Run {
    runs: Arc<Runs>,
    signals: Signals,
    ended: io::Result<Ended>,
    held: bool,
}

impl Runs {
    fn new() -> Self {
        Self { state: watch::Sender::new(State::default()), relay: signals::relay() }
    }

    /// Starts a run. Returns `None` after a termination signal.
    fn begin(runs: &Arc<Self>) -> Option<Run> {
        // Subscribe before the state is read, so that a signal after it reaches the run.
        let signals = Signals::of(&runs.relay);
        let begun = runs.state.send_if_modified(|state| {
            state.running |= !state.draining;
            !state.draining
        });
        // `Lost` unless it is overwritten: a run that is dropped before its end was cancelled.
        begun.then(|| Run { runs: Arc::clone(runs), signals, ended: Ok(Ended::Lost), held: false })
    }

    /// Waits for a termination signal, then for the active run. Returns how that run ended.
    async fn drain(&self, signals: &mut Signals) -> Option<Drained> {
        let signal = signals.termination_relaying(&self.relay).await;
        self.state.send_modify(|state| state.draining = true);
        let _ = self.relay.send(signal);
        let mut state = self.state.subscribe();
        // Does not fail, because this struct holds the sender.
        let _ = signals.relaying(&self.relay, state.wait_for(|state| !state.running)).await;
        let mut drained = None;
        self.state.send_modify(|state| drained = state.drained.take());
        drained
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let drained = Drained::of(self.signals.termination_signals(), &self.ended, self.held);
        self.runs.state.send_modify(|state| {
            state.running = false;
            state.drained = drained;
        });
    }
}

/// Returns the schedule of the arguments.
fn schedule_of(args: &ScheduleArgs) -> Result<Schedule, Failure> {
    let schedule = match (args.every, args.delay, &args.cron) {
        (Some(every), ..) => Schedule::fixed_rate(every)?,
        (_, Some(delay), _) => Schedule::fixed_delay(delay)?,
        (.., cron) => Schedule::cron(cron.as_deref().unwrap_or_default())?,
    };
    Ok(match &args.tz {
        Some(zone) => schedule.with_time_zone(zone)?,
        None => schedule,
    })
}

/// Runs the command once. Without a `run`, waits for the end of the tenure.
async fn run_once(
    command: Arc<[OsString]>,
    tenure: Tenure,
    lease: Lease,
    run: Option<Run>,
) -> Result<(), String> {
    let Some(mut run) = run else {
        // A termination signal has arrived: the schedule stops as soon as the active run has ended.
        tenure.expiring().await;
        return Ok(());
    };
    run.ended = Job::new(&command, &tenure, lease).run_or_exit(&mut run.signals).await;
    run.held = tenure.is_held();
    // The scheduler logs the error.
    match &run.ended {
        Ok(Ended::Code(0)) => Ok(()),
        Ok(ended) => Err(format!("the command failed: {ended}")),
        Err(error) => Err(format!("the command was not started: {error}")),
    }
}
