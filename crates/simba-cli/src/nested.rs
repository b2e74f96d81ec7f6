//! Refuses a mutex that already protects this process: the command would wait for itself.

use std::collections::HashMap;
use std::env;

use rustix::process::{Pid, getppid};
use simba_mutex::MutexName;

use crate::failure::Failure;
use crate::guard::tree::parent_of;
use crate::store::Store;

/// Refuses a mutex under which this process runs.
pub(crate) async fn refuse(store: &Store, mutex: &str, code: u8) -> Result<(), Failure> {
    let above = enclosing_contenders(mutex);
    if above.is_empty() {
        return Ok(());
    }
    // The same name in another store, or a tenure that has ended, is not refused.
    let Ok(operate) = store.simba.operate() else { return Ok(()) };
    let holder = operate.read(&MutexName::new(mutex)?).await?.owner;
    match holder {
        Some(holder) if above.iter().any(|id| id == holder.as_str()) => {
            let message = format!(
                "`{mutex}` is held by `{holder}`, which runs this command, so it would wait for itself \
                 (on {store}): use another mutex, or none"
            );
            Err(Failure::new(code, message))
        }
        _ => Ok(()),
    }
}

/// Returns the contenders under which this process runs for the mutex: its own environment names the nearest, the
/// environments of its ancestors name the others.
fn enclosing_contenders(mutex: &str) -> Vec<String> {
    let own = env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let mut found: Vec<String> = contender(&own.collect(), mutex).into_iter().collect();
    let mut above = getppid();
    while let Some(pid) = above {
        found.extend(contender(&environment(pid), mutex));
        above = parent_of(pid);
    }
    found.dedup();
    found
}

fn contender(environment: &HashMap<String, String>, mutex: &str) -> Option<String> {
    let same = environment.get("SIMBA_MUTEX").is_some_and(|name| name == mutex);
    environment.get("SIMBA_CONTENDER_ID").filter(|_| same).cloned()
}

/// Returns the environment that a process was started with; empty if it belongs to another user.
fn environment(pid: Pid) -> HashMap<String, String> {
    let bytes = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let pairs =
        bytes.split(|byte| *byte == 0).filter_map(|pair| std::str::from_utf8(pair).ok()?.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}
