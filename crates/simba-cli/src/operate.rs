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

/// Frees a mutex without its holder.
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
        return Err(held_by_another(&mutex, owner));
    }
    let window = record.remaining.unwrap_or_default();
    confirm(args, &format!("`{owner}` may keep running for up to {}", brief(window)))?;
    match operate.evict(&mutex, condition).await? {
        Eviction::Freed { owner, window } => {
            print(&format!("freed; `{owner}` may run under `{mutex}` for up to {} more\n", brief(window)))
        }
        Eviction::Other(owner) => Err(held_by_another(&mutex, &owner)),
        _ => print(&format!("`{mutex}` is free\n")),
    }
}

/// Returns the failure for a condition that the holder does not satisfy.
fn held_by_another(mutex: &MutexName, owner: &ContenderId) -> Failure {
    Failure::new(code::NOT_ACQUIRED, format!("`{mutex}` is held by `{owner}`, and was not freed"))
}

fn condition(args: &ReleaseArgs) -> Result<EvictIf, Failure> {
    Ok(match (args.if_token, &args.if_owner) {
        (Some(token), _) => EvictIf::Token(FencingToken::new(token)),
        (None, Some(owner)) => EvictIf::Owner(ContenderId::foreign(owner)?),
        (None, None) => EvictIf::Any,
    })
}

/// Asks for confirmation on a terminal; elsewhere requires `--yes`.
fn confirm(args: &ReleaseArgs, warning: &str) -> Result<(), Failure> {
    if args.yes {
        return Ok(());
    }
    if !io::stdin().is_terminal() {
        return Err(Failure::new(code::USAGE, format!("{warning}: add `--yes` to confirm")));
    }
    write(&format!("{warning}. Free it? [y/N] "))?;
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    if read.is_ok() && matches!(answer.trim(), "y" | "Y" | "yes") {
        return Ok(());
    }
    Err(Failure::new(code::NOT_ACQUIRED, "not freed"))
}

/// Prints the statements that set up the store, or executes them.
pub(crate) async fn schema(simba: &Simba, args: &SchemaArgs) -> Outcome {
    let operate = simba.operate()?;
    if args.apply {
        operate.apply_schema().await?;
        return Ok(ExitCode::SUCCESS);
    }
    match operate.schema() {
        Some(schema) => print(&format!("{}\n", schema.trim_end())),
        None => print(&format!("-- {} needs none\n", simba.backend_name())),
    }
}

/// Checks the store, and recommends a lease.
pub(crate) async fn doctor(store: &Store, format: FormatArgs) -> Outcome {
    let probe = store.simba.operate()?.probe().await?;
    let advice = recommended(probe.round_trip);
    let unknown = &store.settings.unknown_variables;
    print(&if format.json {
        as_json(&probe, advice, unknown)
    } else {
        as_text(&store.simba, &probe, advice, unknown)
    })?;
    Ok(if probe.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(code::NOT_ACQUIRED) })
}

/// Returns the shortest ttl in whole seconds that leaves time for 100 calls, at most the default.
fn recommended(round_trip: Duration) -> Duration {
    let least = Duration::from_secs((round_trip * 100).as_secs() + 2);
    least.min(Lease::default().ttl())
}

fn as_text(simba: &Simba, probe: &Probe, advice: Duration, unknown: &[String]) -> String {
    let paint = Paint::for_stdout();
    let mut text = format!(
        "{}: {}, round trip {:.2} ms\nlease: default is fine; shortest advised: --ttl {}s --transition {}s\n",
        simba.backend_name(),
        probe.server,
        probe.round_trip.as_secs_f64() * 1e3,
        advice.as_secs(),
        (advice * 3 / 5).as_secs().max(1),
    );
    for variable in unknown {
        text.push_str(&format!("note: unknown variable {variable} is ignored\n"));
    }
    for finding in &probe.findings {
        text.push_str(&format!("{} {}\n  fix: {}\n", paint.yellow("!"), finding.problem, finding.fix));
    }
    if probe.findings.is_empty() {
        text.push_str(&format!("{} no problems found\n", paint.green("ok:")));
    }
    text
}

fn as_json(probe: &Probe, advice: Duration, unknown: &[String]) -> String {
    let findings: Vec<_> =
        probe.findings.iter().map(|found| json!({ "problem": found.problem, "fix": found.fix })).collect();
    let text = json!({
        "server": probe.server,
        "round_trip_us": u64::try_from(probe.round_trip.as_micros()).unwrap_or(u64::MAX),
        "recommended_ttl_ms": u64::try_from(advice.as_millis()).unwrap_or(u64::MAX),
        "findings": findings,
        "unknown_variables": unknown,
    });
    format!("{text:#}\n")
}
