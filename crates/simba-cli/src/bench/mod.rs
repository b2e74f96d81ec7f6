//! `simba bench`: measures the given store with the program that will use it.

mod location;
mod progress;
mod start;
mod subject;

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use simba_measure::held::{Held, punctuality};
use simba_measure::{Effort, Row, Target as _, Unit, handover, pairs};
use simba_mutex::clock::within;
use simba_mutex::spi::Backend;
use simba_mutex::{Error, Guard, Lease, Settings, Simba, SystemClock};
use tokio::runtime::Builder;

use crate::args::BenchArgs;
use crate::failure::{Failure, Outcome, code};
use crate::output::{Table, print};
use crate::run::exit_code_of_signal;
use crate::signals::Signals;
use location::Location;
use progress::Progress;
use subject::{Subject, mutex};

/// Time limit for closing the store.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);

/// Measures the store and prints the results.
pub(crate) fn bench(settings: &Settings, args: &BenchArgs) -> Outcome {
    // As many threads as a service uses.
    let runtime = Builder::new_multi_thread().enable_all().build();
    let runtime = runtime
        .map_err(|error| Failure::new(code::UNAVAILABLE, format!("cannot create a runtime: {error}")))?;
    let outcome = runtime.block_on(run_alone(settings, args));
    runtime.shutdown_background();
    outcome
}

/// Runs the benchmark under its own mutex: two benchmarks at once would disturb each other, and use the same names.
async fn run_alone(settings: &Settings, args: &BenchArgs) -> Outcome {
    let mut signals = Signals::listen_without_reaping()
        .map_err(|error| Failure::new(code::UNAVAILABLE, format!("cannot handle signals: {error}")))?;
    // The given store must be reachable, even if another file is measured instead.
    let backend = simba_mutex::backend(&settings.url).await?;
    let location = Location::of(&settings.url)?;
    let backend = if location.url == settings.url {
        backend
    } else {
        within(&SystemClock, SHUTDOWN_LIMIT, backend.close()).await;
        simba_mutex::backend(&location.url).await?
    };
    let subject = Subject::new(&location.url, &*backend, args);
    let simba = Simba::builder(Arc::clone(&backend)).build();
    let locker = simba.locker(mutex("alone", 0)?);
    let Some(guard) = locker.try_lock().await? else {
        let message = format!("another `simba bench` already measures {}: wait for it", settings.url);
        return Err(Failure::new(code::NOT_ACQUIRED, message));
    };
    let outcome = tokio::select! {
        biased;
        signal = signals.termination() => Ok(exit_code_of_signal(signal)),
        outcome = measure_under(&guard, &*backend, &subject, settings, args) => outcome,
    };
    // A cancelled measurement releases what it holds.
    within(&SystemClock, SHUTDOWN_LIMIT, subject.shut_down()).await;
    drop(guard);
    within(&SystemClock, SHUTDOWN_LIMIT, simba.shutdown()).await;
    outcome
}

async fn measure_under(
    guard: &Guard,
    backend: &dyn Backend,
    subject: &Subject,
    settings: &Settings,
    args: &BenchArgs,
) -> Outcome {
    let store = &settings.url;
    let rows = guard.run(measure(backend, subject, args)).await??;
    if args.format.json {
        let rows: Vec<Value> = rows.iter().map(Row::json).collect();
        let report = json!({ "store": store.to_string(), "quick": args.quick, "rows": rows });
        return print(&format!("{report:#}\n"));
    }
    let mut table = Table::new(["measure", "ours", "floor", "ratio"]);
    rows.iter().for_each(|row| table.push(row.cells()));
    print(&format!("{}: {store}\n\n{table}\n{FOOT}", subject.name()))
}

/// The text below the table.
const FOOT: &str = "\
pairs: uncontended lock/unlock cycles; the floor is the same store without the engine, measured alternately
hand-over: from the call of release to the return of the next waiter's lock
";

async fn measure(backend: &dyn Backend, subject: &Subject, args: &BenchArgs) -> Result<Vec<Row>, Failure> {
    let effort = if args.quick { Effort::Quick } else { Effort::Full };
    let progress = Progress::new(5);
    let mut rows = Vec::new();
    progress.show(1, "a round trip");
    rows.extend(round_trip(backend, subject).await);
    // Measure memory first: memory that another measurement freed would be reused, and not be counted.
    progress.show(2, "many held mutexes");
    rows.extend(held(subject, effort).await.map_err(failure)?);
    progress.show(3, "uncontended lock/unlock cycles");
    rows.extend(pairs::measure(subject, effort).await.map_err(failure)?);
    progress.show(4, "hand-over");
    rows.extend(handover::measure(subject, effort).await.map_err(failure)?);
    if subject.is_embedded() {
        progress.show(5, "the start of a command");
        rows.extend(start::measure(subject, effort).await?);
    }
    Ok(rows)
}

/// Measures one call to the store; `None` if the store has no probe.
async fn round_trip(backend: &dyn Backend, subject: &Subject) -> Option<Row> {
    let probe = backend.operate()?.probe().await.ok()?;
    Some(Row::new(subject, "round trip", Unit::Micros, probe.round_trip.as_secs_f64() * 1e6))
}

/// Measures the memory of each mutex and, in a full run, whether the renewals of a short lease are on time.
async fn held(subject: &Subject, effort: Effort) -> anyhow::Result<Vec<Row>> {
    let (count, rounds) = (subject.many(), effort.pick(0, 3));
    let lease = Lease::new(Duration::from_secs(3), Duration::from_secs(2))?;
    let simba = subject.handle(&subject.connect().await?).with_lease(lease);
    let held = Held::take(subject, &simba, count).await?;
    let seen = held.watch(rounds).await?;
    held.release().await;
    simba.shutdown().await;
    let mut rows = vec![Row::new(subject, format!("{count} held: memory each"), Unit::Bytes, seen.bytes)];
    if rounds > 0 {
        rows.extend(punctuality(subject, count, "3 s + 2 s lease", &seen));
    }
    Ok(rows)
}

fn failure(error: anyhow::Error) -> Failure {
    match error.downcast::<Error>() {
        Ok(error) => error.into(),
        Err(error) => Failure::new(code::UNAVAILABLE, format!("{error:#}")),
    }
}
