//! `simba tck`: runs the conformance suite against the given store.

mod store;

use std::collections::HashMap;
use std::fmt;
use std::panic;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::json;
use simba_mutex::spi::ConnectUrl;
use simba_tck::{CASE_LIMIT, Case, cases};
use tokio::runtime::Builder;
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::error::Elapsed;

use crate::args::TckArgs;
use crate::failure::{Failure, Outcome, code};
use crate::output::{Paint, print};
use store::Store;

/// How many cases run at once: most of them wait for a lease to end.
const AT_ONCE: usize = 8;

/// Runs every case whose name contains `filter`, and prints the result of each.
pub(crate) fn tck(url: &ConnectUrl, args: &TckArgs) -> Outcome {
    // The cases need a runtime with more than one thread.
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime
        .map_err(|error| Failure::new(code::UNAVAILABLE, format!("cannot create a runtime: {error}")))?;
    let wanted: Vec<Case> =
        cases().iter().copied().filter(|case| title(case).contains(&args.filter)).collect();
    if wanted.is_empty() {
        return Err(Failure::new(code::USAGE, format!("no case name contains `{}`", args.filter)));
    }
    // Connect once first, so that an unreachable store is one error and not a hundred.
    let store = runtime.block_on(Store::find(url))?;
    let results = runtime.block_on(run_all(&store, wanted, !args.format.json));
    runtime.shutdown_background();
    print(&if args.format.json { as_json(&results) } else { format!("{}\n", Counts::of(&results)) })?;
    Ok(ExitCode::from(if Counts::of(&results).broken == 0 { 0 } else { code::NOT_ACQUIRED }))
}

/// The result of a case.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Kept,
    /// Nothing was checked, for this reason.
    Skipped(&'static str),
    /// The case failed with this message.
    Broken(String),
}

impl Verdict {
    fn as_str(&self) -> &'static str {
        match self {
            Self::Kept => "kept",
            Self::Skipped(_) => "skipped",
            Self::Broken(_) => "broken",
        }
    }

    fn reason(&self) -> Option<&str> {
        match self {
            Self::Kept => None,
            Self::Skipped(reason) => Some(reason),
            Self::Broken(message) => Some(message),
        }
    }
}

/// How many cases had which result.
struct Counts {
    total: usize,
    kept: usize,
    skipped: usize,
    broken: usize,
}

impl Counts {
    fn of(results: &[(Case, Verdict)]) -> Self {
        let count = |outcome| results.iter().filter(|(_, verdict)| verdict.as_str() == outcome).count();
        Self { total: results.len(), kept: count("kept"), skipped: count("skipped"), broken: count("broken") }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { total, kept, skipped, broken } = self;
        write!(f, "{kept} of {total} kept, {skipped} skipped, {broken} broken")
    }
}

fn as_json(results: &[(Case, Verdict)]) -> String {
    let Counts { kept, skipped, broken, .. } = Counts::of(results);
    let case = |(case, verdict): &(Case, Verdict)| json!({ "case": title(case), "outcome": verdict.as_str(), "reason": verdict.reason() });
    let cases: Vec<_> = results.iter().map(case).collect();
    format!("{:#}\n", json!({ "kept": kept, "skipped": skipped, "broken": broken, "cases": cases }))
}

fn title(case: &Case) -> String {
    format!("{}::{}", case.group, case.name)
}

/// Runs the cases, some at a time. Prints each result at once if `shown` is set.
async fn run_all(store: &Store, wanted: Vec<Case>, shown: bool) -> Vec<(Case, Verdict)> {
    let messages = capture_panics();
    let (mut tasks, mut running, mut results) = (JoinSet::new(), HashMap::new(), Vec::new());
    let mut waiting = wanted.into_iter();
    loop {
        while tasks.len() < AT_ONCE
            && let Some(case) = waiting.next()
        {
            let store = store.clone();
            let run = async move { tokio::time::timeout(CASE_LIMIT, case.run(&store)).await };
            running.insert(tasks.spawn(run).id(), case);
        }
        let Some(ended) = tasks.join_next_with_id().await else { break };
        let (task, verdict) = judge(ended, &messages);
        if let Some(case) = running.remove(&task) {
            if shown {
                show(&case, &verdict);
            }
            results.push((case, verdict));
        }
    }
    results
}

/// How the task of a case ended: in time or not, by a panic, or cancelled.
type Ended = Result<(Id, Result<simba_tck::Outcome, Elapsed>), JoinError>;

/// Returns the verdict for a task. A case without a result is broken.
fn judge(ended: Ended, messages: &Mutex<Vec<String>>) -> (Id, Verdict) {
    match ended {
        Ok((task, Ok(simba_tck::Outcome::Skipped(reason)))) => (task, Verdict::Skipped(reason)),
        Ok((task, Ok(_))) => (task, Verdict::Kept),
        Ok((task, Err(_))) => (task, Verdict::Broken(format!("no result within {} s", CASE_LIMIT.as_secs()))),
        Err(error) if error.is_panic() => {
            let message = messages.lock().unwrap_or_else(PoisonError::into_inner).pop();
            (error.id(), Verdict::Broken(message.unwrap_or_else(|| "it panicked".into())))
        }
        Err(error) => (error.id(), Verdict::Broken("it was cancelled".into())),
    }
}

fn show(case: &Case, verdict: &Verdict) {
    let paint = Paint::for_stdout();
    let title = title(case);
    let text = match verdict {
        Verdict::Kept => format!("{}  {title}\n", paint.green("kept")),
        Verdict::Skipped(reason) => format!("{}  {title}: {reason}\n", paint.yellow("skipped")),
        Verdict::Broken(message) => format!("{}  {title}\n        {message}\n", paint.red("BROKEN")),
    };
    // stdout may be closed: the exit code reports the result, too.
    let _ = print(&text);
}

/// Collects the messages of panics instead of printing them among the results.
fn capture_panics() -> Arc<Mutex<Vec<String>>> {
    let messages = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&messages);
    panic::set_hook(Box::new(move |info| {
        let (text, payload) = ("it panicked", info.payload());
        let text = payload.downcast_ref::<&str>().copied().unwrap_or(text);
        let text = payload.downcast_ref::<String>().map_or(text, String::as_str).to_owned();
        kept.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }));
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn case_that_panics_or_is_cancelled_is_broken() {
        let messages = Mutex::new(vec!["a guarantee is broken".to_owned()]);
        let mut tasks = JoinSet::<Result<simba_tck::Outcome, Elapsed>>::new();
        let panicked = tasks.spawn(async { panic!("a guarantee is broken") }).id();
        let ended = tasks.join_next_with_id().await.unwrap_or_else(|| panic!("no task"));
        assert_eq!(judge(ended, &messages), (panicked, Verdict::Broken("a guarantee is broken".into())));
        let cancelled = tasks.spawn(std::future::pending());
        cancelled.abort();
        let ended = tasks.join_next_with_id().await.unwrap_or_else(|| panic!("no task"));
        assert_eq!(judge(ended, &messages), (cancelled.id(), Verdict::Broken("it was cancelled".into())));
    }
}
