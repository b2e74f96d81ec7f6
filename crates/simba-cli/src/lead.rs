//! `simba lead`: runs a command while this process leads.

use std::sync::Arc;
use std::time::Duration;

use simba_mutex::{Contention, Lease, Tenure};

use crate::args::LeadArgs;
use crate::drain::{self, Drained};
use crate::failure::{Outcome, code};
use crate::health;
use crate::nested;
use crate::run::{lease_of, listen};
use crate::signals::Signals;
use crate::store::Store;
use crate::supervise::{Ended, Job};

/// How long a leader does not contend after its command has ended, so that another can lead.
const COOLDOWN: Duration = Duration::from_secs(1);

/// Contends until a signal asks to end; runs the command under every tenure.
pub(crate) async fn lead(store: &Store, args: &LeadArgs) -> Outcome {
    let lease = lease_of(store, args.service.lease)?;
    let mut signals = listen()?;
    nested::refuse(store, &args.mutex, code::NOT_ACQUIRED).await?;
    let contention = store.simba.contend(args.mutex.as_str()).with_lease(lease);
    let contention = contention.with_initial_delay(store.settings.initial_delay);
    let contention = Arc::new(contention);
    if let Some(address) = args.service.metrics {
        let leader = Arc::clone(&contention);
        health::serve(address, Arc::new(move || leader.is_owner())).await?;
    }
    contention.start()?;
    let drained = loop {
        tokio::select! {
            biased;
            _ = signals.termination() => break None,
            tenure = contention.acquired() => {
                let drained = run_once(&contention, &tenure?, lease, args, &mut signals).await;
                if drained.is_some() {
                    break drained;
                }
            }
        }
    };
    drain::finish(&args.mutex, drained, contention.stop()).await
}

/// Runs the command for one tenure and passes signals on. Returns how it ended if one of them asked it to.
async fn run_once(
    contention: &Contention,
    tenure: &Tenure,
    lease: Lease,
    args: &LeadArgs,
    signals: &mut Signals,
) -> Option<Drained> {
    let job = Job::new(&args.service.command, tenure, lease);
    let ended = tenure.run(job.run_or_exit(signals)).await;
    let held = tenure.is_held();
    match &ended {
        Ok(Ok(Ended::Code(code))) => tracing::info!(mutex = %args.mutex, code, "the command ended"),
        Ok(Ok(ended)) => tracing::info!(mutex = %args.mutex, %ended, "the command was ended"),
        Ok(Err(error)) => tracing::error!(mutex = %args.mutex, %error, "the command was not started"),
        Err(error) => tracing::warn!(mutex = %args.mutex, %error, "the command was cancelled"),
    }
    let drained = Drained::of(signals.termination_signals(), &ended.unwrap_or(Ok(Ended::Lost)), held);
    if drained.is_none() && held {
        contention.step_down(COOLDOWN);
        tenure.lost().await;
    }
    drained
}
