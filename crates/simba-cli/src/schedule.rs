//! `simba schedule`: a command again and again, on the leader only.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use simba_mutex::{Lease, Schedule, Tenure};

use crate::args::ScheduleArgs;
use crate::failure::{Failure, Outcome, code};
use crate::health;
use crate::nested;
use crate::run::{lease_of, listen};
use crate::signals::{self, Signals};
use crate::store::Store;
use crate::supervise::{Ended, Job};

/// Runs the command on its schedule until it is told to end.
pub(crate) async fn schedule(store: &Store, args: &ScheduleArgs) -> Outcome {
    let lease = lease_of(store, args.service.lease)?;
    let mut signals = listen()?;
    nested::refuse(store, &args.mutex, code::NOT_ACQUIRED).await?;
    let relay = signals::relay();
    let ticks = relay.clone();
    let command: Arc<[OsString]> = args.service.command.clone().into();
    let scheduler = store.simba.scheduler(args.mutex.as_str()).with_lease(lease);
    let job = scheduler.start(when(args)?, move |tenure| {
        once(Arc::clone(&command), tenure, lease, Signals::Relayed(ticks.subscribe()))
    })?;
    let job = Arc::new(job);
    if let Some(address) = args.service.metrics {
        let leader = Arc::clone(&job);
        health::serve(address, Arc::new(move || leader.is_leading())).await?;
    }
    signals.end_relaying(&relay).await;
    signals.relaying(&relay, job.stop()).await?;
    Ok(ExitCode::SUCCESS)
}

fn when(args: &ScheduleArgs) -> Result<Schedule, Failure> {
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

/// One run of the command.
async fn once(
    command: Arc<[OsString]>,
    tenure: Tenure,
    lease: Lease,
    mut signals: Signals,
) -> Result<(), String> {
    let ended = Job::new(&command, &tenure, lease).run_or_exit(&mut signals).await;
    let mutex = tenure.mutex();
    match ended {
        Ok(Ended::Code(0)) => Ok(()),
        Ok(ended) => {
            tracing::warn!(%mutex, ?ended, "the command failed");
            Err(format!("the command failed: {ended:?}"))
        }
        Err(error) => {
            tracing::error!(%mutex, %error, "the command was not started");
            Err(error.to_string())
        }
    }
}
