//! `simba bench`: what the given store does, measured with the program that will use it.

mod place;
mod progress;
mod start;
mod subject;

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use simba_measure::held::{Held, punctuality};
use simba_measure::{Effort, Row, Target as _, Unit, handover, pairs};
use simba_mutex::clock::within;
use simba_mutex::{Backend, Error, Guard, Lease, Settings, Simba, SystemClock};
use tokio::runtime::Builder;

use crate::args::BenchArgs;
use crate::failure::{Failure, Outcome, code};
use crate::output::{Table, print};
use crate::run::by_signal;
use crate::signals::Signals;
use place::Place;
use progress::Progress;
use subject::{Subject, mutex};

/// How long to take leave of the store.
const FAREWELL: Duration = Duration::from_secs(5);

/// Measures the store, and tells what was found.
pub(crate) fn bench(settings: &Settings, args: &BenchArgs) -> Outcome {
    // As many threads as a service has.
    let runtime = Builder::new_multi_thread().enable_all().build();
    let runtime = runtime
        .map_err(|error| Failure::new(code::UNAVAILABLE, format!("the system gives no runtime: {error}")))?;
    let outcome = runtime.block_on(alone(settings, args));
    runtime.shutdown_background();
    outcome
}

/// Two at once would measure each other, and on the same names: so it runs under a mutex itself.
async fn alone(settings: &Settings, args: &BenchArgs) -> Outcome {
    let mut signals = Signals::hear()
        .map_err(|error| Failure::new(code::UNAVAILABLE, format!("cannot listen to signals: {error}")))?;
    // The store that is meant must be there, whatever is measured instead of it.
    let backend = simba_mutex::backend(&settings.url).await?;
    let place = Place::of(&settings.url)?;
    let backend = if place.url == settings.url {
        backend
    } else {
        within(&SystemClock, FAREWELL, backend.close()).await;
        simba_mutex::backend(&place.url).await?
    };
    let subject = Subject::new(&place.url, &*backend, args);
    let simba = Simba::builder(Arc::clone(&backend)).build();
    let locker = simba.locker(mutex("alone", 0)?);
    let Some(guard) = locker.try_lock().await? else {
        let message = format!("another `simba bench` measures {} already: wait for it", settings.url);
        return Err(Failure::new(code::NOT_ACQUIRED, message));
    };
    let outcome = tokio::select! {
        biased;
        signal = signals.end() => Ok(by_signal(signal)),
        told = under(&guard, &*backend, &subject, settings, args) => told,
    };
    // Whatever was cut off gives back what it holds.
    within(&SystemClock, FAREWELL, subject.shut_down()).await;
    drop(guard);
    within(&SystemClock, FAREWELL, simba.shutdown()).await;
    outcome
}

async fn under(
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

/// Below the table.
const FOOT: &str = "\
pairs: lock and release, uncontended; the floor is the same store without the engine, in turns with ours
hand-over: from the call of release to the return of the next waiter's lock
";

async fn measure(backend: &dyn Backend, subject: &Subject, args: &BenchArgs) -> Result<Vec<Row>, Failure> {
    let effort = if args.quick { Effort::Quick } else { Effort::Full };
    let progress = Progress::new(5);
    let mut rows = Vec::new();
    progress.tell(1, "a round trip");
    rows.extend(round_trip(backend, subject).await);
    // Before the others leave memory behind that they have freed.
    progress.tell(2, "many held mutexes");
    rows.extend(held(subject, effort).await.map_err(failure)?);
    progress.tell(3, "uncontended pairs");
    rows.extend(pairs::measure(subject, effort).await.map_err(failure)?);
    progress.tell(4, "hand-over");
    rows.extend(handover::measure(subject, effort).await.map_err(failure)?);
    if subject.is_embedded() {
        progress.tell(5, "the start of a command");
        rows.extend(start::measure(subject, effort).await?);
    }
    Ok(rows)
}

/// What the store takes for one question, if it answers it.
async fn round_trip(backend: &dyn Backend, subject: &Subject) -> Option<Row> {
    let probe = backend.operate()?.probe().await.ok()?;
    Some(Row::new(subject, "round trip", Unit::Micros, probe.round_trip.as_secs_f64() * 1e6))
}

/// Memory of each, and with more effort how punctual the renewals of a short lease are.
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
