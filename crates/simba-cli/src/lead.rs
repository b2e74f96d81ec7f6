//! `simba lead`: a command wherever the mutex is.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use simba_mutex::{Contention, Lease, Tenure};

use crate::args::LeadArgs;
use crate::failure::{Outcome, code};
use crate::health;
use crate::nested;
use crate::run::{lease_of, listen};
use crate::signals::{self, Signals};
use crate::store::Store;
use crate::supervise::{Ended, Job};

/// A leader whose command has ended leaves the lead to others for this long.
const COOLDOWN: Duration = Duration::from_secs(1);

/// Contends until it is told to end; runs the command under every tenure.
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
    loop {
        tokio::select! {
            biased;
            _ = signals.end() => break,
            tenure = contention.acquired() => {
                if tenure_ends(&contention, &tenure?, lease, args, &mut signals).await {
                    break;
                }
            }
        }
    }
    contention.stop().await?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the command for one tenure; whether we were told to end meanwhile.
async fn tenure_ends(
    contention: &Contention,
    tenure: &Tenure,
    lease: Lease,
    args: &LeadArgs,
    signals: &mut Signals,
) -> bool {
    let job = Job::new(&args.service.command, tenure, lease);
    let relay = signals::relay();
    let mut relayed = Signals::Relayed(relay.subscribe());
    let work = tenure.run(job.run_or_exit(&mut relayed));
    tokio::pin!(work);
    let (ended, told) = tokio::select! {
        biased;
        ended = &mut work => (ended, false),
        // The stop announces the end, which ends the command, which the stop waits for.
        _ = signals.end_relaying(&relay) => {
            let both = async { tokio::join!(&mut work, contention.stop()).0 };
            (signals.relaying(&relay, both).await, true)
        }
    };
    match ended {
        Ok(Ok(Ended::Code(code))) => tracing::info!(mutex = %args.mutex, code, "the command ended"),
        Ok(Ok(ended)) => tracing::info!(mutex = %args.mutex, ?ended, "the command was ended"),
        Ok(Err(error)) => tracing::error!(mutex = %args.mutex, %error, "the command was not started"),
        Err(error) => tracing::warn!(mutex = %args.mutex, %error, "the command was cut off"),
    }
    if !told && tenure.is_held() {
        contention.step_down(COOLDOWN);
        tenure.lost().await;
    }
    told
}
