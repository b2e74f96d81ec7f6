//! `simba tck`: the compatibility kit against the given store.

mod store;

use std::panic;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use simba_mutex::ConnectUrl;
use simba_tck::{CASE_LIMIT, Case, cases};
use tokio::runtime::Builder;
use tokio::task::JoinSet;

use crate::args::TckArgs;
use crate::failure::{Failure, Outcome, code};
use crate::output::{Paint, print};
use store::Store;

/// How many cases run at once: most of them wait for a lease to end.
const AT_ONCE: usize = 8;

/// Runs every case whose name has `filter` in it, and tells how each went.
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
    let (total, failed) = (wanted.len(), runtime.block_on(run_all(&store, wanted)));
    runtime.shutdown_background();
    print(&format!("{} of {total} kept\n", total - failed))?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(code::NOT_ACQUIRED) })
}

fn title(case: &Case) -> String {
    format!("{}::{}", case.group, case.name)
}

/// Runs them some at a time; how many failed.
async fn run_all(store: &Store, wanted: Vec<Case>) -> usize {
    let said = hush();
    let (mut running, mut waiting, mut failed) = (JoinSet::new(), wanted.into_iter(), 0);
    loop {
        while running.len() < AT_ONCE
            && let Some(case) = waiting.next()
        {
            running.spawn(one(case, store.clone()));
        }
        let Some(ended) = running.join_next().await else { return failed };
        match ended {
            Ok((case, Ok(()))) => tell(&case, "kept", None),
            Ok((case, Err(()))) => {
                failed += 1;
                let complaint = said.lock().unwrap_or_else(PoisonError::into_inner).pop();
                tell(&case, "BROKEN", complaint.as_deref());
            }
            // A task of ours neither panics nor is cancelled.
            Err(_) => failed += 1,
        }
    }
}

async fn one(case: Case, store: Store) -> (Case, Result<(), ()>) {
    let checked = tokio::spawn(async move { tokio::time::timeout(CASE_LIMIT, case.run(&store)).await });
    let kept = matches!(checked.await, Ok(Ok(())));
    (case, if kept { Ok(()) } else { Err(()) })
}

fn tell(case: &Case, verdict: &str, complaint: Option<&str>) {
    let paint = Paint::for_stdout();
    let verdict =
        if complaint.is_none() && verdict == "kept" { paint.green(verdict) } else { paint.red(verdict) };
    // Nobody may read along: the exit code tells too.
    let _ = print(&format!("{verdict}  {}\n", title(case)));
    if let Some(complaint) = complaint {
        let _ = print(&format!("        {complaint}\n"));
    }
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
