//! `simba release`, `simba schema` and `simba doctor`.

use std::io::{self, BufRead as _, IsTerminal as _};
use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;
use simba_mutex::operate::{EvictIf, Eviction, Probe};
use simba_mutex::{ContenderId, FencingToken, Lease, MutexName, Simba};

use crate::args::{FormatArgs, ReleaseArgs, SchemaArgs};
use crate::failure::{Failure, Outcome, code};
use crate::output::{Paint, print, write};
use crate::records::brief;
use crate::store::Store;

/// Frees a mutex out of band.
pub(crate) async fn release(simba: &Simba, args: &ReleaseArgs) -> Outcome {
    let mutex = MutexName::new(&args.mutex)?;
    let operate = simba.operate()?;
    let record = operate.read(&mutex).await?;
    let Some(owner) = &record.owner else {
        return print(&format!("`{mutex}` is free\n"));
    };
    let condition = condition(args)?;
    // A store that does not show tokens compares them itself.
    let is_open = record.token.is_none() && matches!(condition, EvictIf::Token(_));
    if !is_open && !condition.holds_for(owner, record.token) {
        return Err(other(&mutex, owner));
    }
    let window = record.remaining.unwrap_or_default();
    confirm(args, &format!("`{owner}` may go on working in good faith for {}", brief(window)))?;
    match operate.evict(&mutex, condition).await? {
        Eviction::Freed { owner, window } => {
            print(&format!("freed; `{owner}` may believe for {} that it holds `{mutex}`\n", brief(window)))
        }
        Eviction::Other(owner) => Err(other(&mutex, &owner)),
        _ => print(&format!("`{mutex}` is free\n")),
    }
}

fn other(mutex: &MutexName, owner: &ContenderId) -> Failure {
    Failure::new(code::NOT_ACQUIRED, format!("`{mutex}` is held by `{owner}`, and was left alone"))
}

fn condition(args: &ReleaseArgs) -> Result<EvictIf, Failure> {
    Ok(match (args.if_token, &args.if_owner) {
        (Some(token), _) => EvictIf::Token(FencingToken::new(token)),
        (None, Some(owner)) => EvictIf::Owner(ContenderId::foreign(owner)?),
        (None, None) => EvictIf::Any,
    })
}

/// Asks on a terminal; elsewhere nobody can answer, so the answer must be given before.
fn confirm(args: &ReleaseArgs, warning: &str) -> Result<(), Failure> {
    if args.yes {
        return Ok(());
    }
    if !io::stdin().is_terminal() {
        return Err(Failure::new(code::USAGE, format!("{warning}: say `--yes` if that is meant")));
    }
    write(&format!("{warning}. Free it? [y/N] "))?;
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    if read.is_ok() && matches!(answer.trim(), "y" | "Y" | "yes") {
        return Ok(());
    }
    Err(Failure::new(code::NOT_ACQUIRED, "left alone"))
}

/// Prints what sets the store up, or carries it out.
pub(crate) async fn schema(simba: &Simba, args: &SchemaArgs) -> Outcome {
    let operate = simba.operate()?;
    if args.apply {
        operate.apply_schema().await?;
        return Ok(ExitCode::SUCCESS);
    }
    match operate.schema() {
        Some(schema) => print(&format!("{}\n", schema.trim_end())),
        None => print(&format!("-- {} needs none\n", simba.backend())),
    }
}

/// Checks the store, and recommends a lease.
pub(crate) async fn doctor(store: &Store, format: FormatArgs) -> Outcome {
    let probe = store.simba.operate()?.probe().await?;
    let advice = recommended(probe.round_trip);
    let unknown = &store.settings.unknown_variables;
    print(&if format.json {
        in_json(&probe, advice, unknown)
    } else {
        in_words(&store.simba, &probe, advice, unknown)
    })?;
    Ok(if probe.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(code::NOT_ACQUIRED) })
}

/// The shortest ttl in whole seconds that leaves room for a hundred calls, and the default at most.
fn recommended(round_trip: Duration) -> Duration {
    let least = Duration::from_secs((round_trip * 100).as_secs() + 2);
    least.min(Lease::default().ttl())
}

fn in_words(simba: &Simba, probe: &Probe, advice: Duration, unknown: &[String]) -> String {
    let paint = Paint::for_stdout();
    let mut text = format!(
        "{}: {}, round trip {:.2} ms\nlease: the default will do; --ttl {}s --transition {}s is the shortest to advise\n",
        simba.backend(),
        probe.server,
        probe.round_trip.as_secs_f64() * 1e3,
        advice.as_secs(),
        (advice * 3 / 5).as_secs().max(1),
    );
    for variable in unknown {
        text.push_str(&format!("note: the variable {variable} is set and has no meaning: ignored\n"));
    }
    for finding in &probe.findings {
        text.push_str(&format!("{} {}\n  cure: {}\n", paint.yellow("!"), finding.problem, finding.cure));
    }
    if probe.findings.is_empty() {
        text.push_str(&format!("{} nothing endangers mutexes here\n", paint.green("ok:")));
    }
    text
}

fn in_json(probe: &Probe, advice: Duration, unknown: &[String]) -> String {
    let findings: Vec<_> =
        probe.findings.iter().map(|found| json!({ "problem": found.problem, "cure": found.cure })).collect();
    let text = json!({
        "server": probe.server,
        "round_trip_us": u64::try_from(probe.round_trip.as_micros()).unwrap_or(u64::MAX),
        "recommended_ttl_ms": u64::try_from(advice.as_millis()).unwrap_or(u64::MAX),
        "findings": findings,
        "unknown_variables": unknown,
    });
    format!("{text:#}\n")
}
