//! `simba tck`: the compatibility kit against the given store.

mod store;

use std::collections::HashMap;
use std::fmt;
use std::panic;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::json;
use simba_mutex::ConnectUrl;
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

/// Runs every case whose name has `filter` in it, and tells how each came out.
pub(crate) fn tck(url: &ConnectUrl, args: &TckArgs) -> Outcome {
    // The cases are made for a runtime with more than one thread.
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime
        .map_err(|error| Failure::new(code::UNAVAILABLE, format!("the system gives no runtime: {error}")))?;
    let wanted: Vec<Case> =
        cases().iter().copied().filter(|case| title(case).contains(&args.filter)).collect();
    if wanted.is_empty() {
        return Err(Failure::new(code::USAGE, format!("no case has `{}` in its name", args.filter)));
    }
    // One connection first, so that a store out of reach is one error and not a hundred.
    let store = runtime.block_on(Store::find(url))?;
    let results = runtime.block_on(run_all(&store, wanted, !args.format.json));
    runtime.shutdown_background();
    print(&if args.format.json { in_json(&results) } else { format!("{}\n", Counts::of(&results)) })?;
    Ok(ExitCode::from(if Counts::of(&results).broken == 0 { 0 } else { code::NOT_ACQUIRED }))
}

/// How a case came out.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Kept,
    /// Nothing was checked, for this reason.
    Skipped(&'static str),
    /// With what the case said.
    Broken(String),
}

impl Verdict {
    fn word(&self) -> &'static str {
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
            Self::Broken(complaint) => Some(complaint),
        }
    }
}

/// How many cases came out how.
struct Counts {
    total: usize,
    kept: usize,
    skipped: usize,
    broken: usize,
}

impl Counts {
    fn of(results: &[(Case, Verdict)]) -> Self {
        let count = |word| results.iter().filter(|(_, verdict)| verdict.word() == word).count();
        Self { total: results.len(), kept: count("kept"), skipped: count("skipped"), broken: count("broken") }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { total, kept, skipped, broken } = self;
        write!(f, "{kept} of {total} kept, {skipped} skipped, {broken} broken")
    }
}

fn in_json(results: &[(Case, Verdict)]) -> String {
    let Counts { kept, skipped, broken, .. } = Counts::of(results);
    let case = |(case, verdict): &(Case, Verdict)| json!({ "case": title(case), "outcome": verdict.word(), "reason": verdict.reason() });
    let cases: Vec<_> = results.iter().map(case).collect();
    format!("{:#}\n", json!({ "kept": kept, "skipped": skipped, "broken": broken, "cases": cases }))
}

fn title(case: &Case) -> String {
    format!("{}::{}", case.group, case.name)
}

/// Runs them some at a time, and shows each as it ends if wanted.
async fn run_all(store: &Store, wanted: Vec<Case>, shown: bool) -> Vec<(Case, Verdict)> {
    let said = hush();
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
        let (task, verdict) = judge(ended, &said);
        if let Some(case) = running.remove(&task) {
            if shown {
                show(&case, &verdict);
            }
            results.push((case, verdict));
        }
    }
    results
}

/// How the task of a case ended: on time or not, by a panic, or cancelled.
type Ended = Result<(Id, Result<simba_tck::Outcome, Elapsed>), JoinError>;

/// Judges the case of a task. One without a result is broken.
fn judge(ended: Ended, said: &Mutex<Vec<String>>) -> (Id, Verdict) {
    match ended {
        Ok((task, Ok(simba_tck::Outcome::Skipped(reason)))) => (task, Verdict::Skipped(reason)),
        Ok((task, Ok(_))) => (task, Verdict::Kept),
        Ok((task, Err(_))) => {
            (task, Verdict::Broken(format!("it does not end within {} s", CASE_LIMIT.as_secs())))
        }
        Err(error) if error.is_panic() => {
            let complaint = said.lock().unwrap_or_else(PoisonError::into_inner).pop();
            (error.id(), Verdict::Broken(complaint.unwrap_or_else(|| "it panicked".into())))
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
        Verdict::Broken(complaint) => format!("{}  {title}\n        {complaint}\n", paint.red("BROKEN")),
    };
    // Nobody may read along: the exit code tells too.
    let _ = print(&text);
}

/// Keeps what broken promises say, instead of printing it in between.
fn hush() -> Arc<Mutex<Vec<String>>> {
    let said = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&said);
    panic::set_hook(Box::new(move |info| {
        let (text, payload) = ("it panicked", info.payload());
        let text = payload.downcast_ref::<&str>().copied().unwrap_or(text);
        let text = payload.downcast_ref::<String>().map_or(text, String::as_str).to_owned();
        kept.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }));
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_case_that_panics_or_is_cancelled_is_broken() {
        let said = Mutex::new(vec!["a promise is broken".to_owned()]);
        let mut tasks = JoinSet::<Result<simba_tck::Outcome, Elapsed>>::new();
        let panicked = tasks.spawn(async { panic!("a promise is broken") }).id();
        let ended = tasks.join_next_with_id().await.unwrap_or_else(|| panic!("it runs"));
        assert_eq!(judge(ended, &said), (panicked, Verdict::Broken("a promise is broken".into())));
        let cancelled = tasks.spawn(std::future::pending());
        cancelled.abort();
        let ended = tasks.join_next_with_id().await.unwrap_or_else(|| panic!("it runs"));
        assert_eq!(judge(ended, &said), (cancelled.id(), Verdict::Broken("it was cancelled".into())));
    }
}
