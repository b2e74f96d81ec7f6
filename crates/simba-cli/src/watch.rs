//! `simba watch`: prints a line for every change of owner.

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use serde_json::json;
use simba_mutex::clock::Clock as _;
use simba_mutex::{MutexName, Observer, Simba, SystemClock, View};
use tokio::sync::mpsc;

use crate::args::StatusArgs;
use crate::failure::{Failure, Outcome, code};
use crate::output::{Paint, is_closed, write};
use crate::run::listen;

/// How often to check whether stdout is closed.
const CLOSED_CHECK: Duration = Duration::from_secs(1);

/// Prints a line whenever an owner changes, until a signal asks to end.
pub(crate) async fn watch(simba: &Simba, args: &StatusArgs) -> Outcome {
    let mut signals = listen()?;
    let (lines, mut printed) = mpsc::channel(64);
    for name in names(simba, args).await? {
        tokio::spawn(send_lines(simba.observe(name)?, args.format.json, lines.clone()));
    }
    drop(lines);
    loop {
        tokio::select! {
            biased;
            _ = signals.termination() => return Ok(ExitCode::SUCCESS),
            line = printed.recv() => match line {
                Some(line) if write(&line)? => {}
                Some(_) => return Ok(ExitCode::SUCCESS),
                None => return Err(Failure::new(code::USAGE, "no mutex to watch: name one")),
            },
            // The reader may close stdout long before the next change.
            () = SystemClock.sleep_until(SystemClock.now() + CLOSED_CHECK) => if is_closed() {
                return Ok(ExitCode::SUCCESS);
            },
        }
    }
}

async fn names(simba: &Simba, args: &StatusArgs) -> Result<Vec<MutexName>, Failure> {
    if args.mutexes.is_empty() {
        return Ok(simba.operate()?.list().await?.into_iter().map(|record| record.mutex).collect());
    }
    Ok(args.mutexes.iter().map(MutexName::new).collect::<Result<_, _>>()?)
}

async fn send_lines(mut observer: Observer, json: bool, lines: mpsc::Sender<String>) {
    let paint = Paint::for_stdout();
    while let Ok(view) = observer.changed().await {
        let line =
            if json { as_json(observer.mutex(), &view) } else { as_text(observer.mutex(), &view, paint) };
        if lines.send(line).await.is_err() {
            return;
        }
    }
}

fn now() -> String {
    humantime::format_rfc3339_millis(SystemTime::now()).to_string()
}

fn as_text(mutex: &MutexName, view: &View, paint: Paint) -> String {
    let state = match view {
        View::Owned(owner) => {
            let id = owner.id.as_ref().map_or_else(String::new, ToString::to_string);
            let token = owner.token.map_or_else(String::new, |token| format!(", token {}", token.get()));
            format!("{} by {id}{token}", paint.red("held"))
        }
        View::Vacant => paint.green("free"),
        _ => paint.yellow("unknown"),
    };
    format!("{}  {mutex}  {state}\n", now())
}

fn as_json(mutex: &MutexName, view: &View) -> String {
    let (state, owner) = match view {
        View::Owned(owner) => ("held", Some(owner)),
        View::Vacant => ("free", None),
        _ => ("unknown", None),
    };
    let id = owner.and_then(|owner| owner.id.as_ref());
    let line = json!({
        "at": now(),
        "mutex": mutex.as_str(),
        "state": state,
        "owner": id.map(|id| id.as_str()),
        "host": id.and_then(|id| id.host()),
        "pid": id.and_then(|id| id.pid()),
        "token": owner.and_then(|owner| owner.token).map(|token| token.get()),
    });
    format!("{line}\n")
}
