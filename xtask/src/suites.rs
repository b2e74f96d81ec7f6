//! Runs the test programs of the workspace: those that wait most of the time side by side, all others one after the
//! other.
//!
//! `cargo test -p` cannot do it: for another choice of packages it settles their features anew, and builds most of
//! them again.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::workspace::Workspace;
use crate::{built, step};

/// The packages whose tests need servers.
pub(crate) const STORES: [&str; 5] =
    ["simba-zookeeper", "simba-etcd", "simba-redis", "simba-mysql", "simba-postgres"];

/// The packages whose tests wait most of the time, for a lease to end; those first that take longest.
const WAITING: [&str; 7] = [
    "simba-zookeeper",
    "simba-etcd",
    "simba-redis",
    "simba-mysql",
    "simba-postgres",
    "simba-sqlite",
    "simba-tck",
];

/// How many of them at once. Tests of one package share servers that some of them bring down, so those never run side
/// by side.
const LANES: usize = 2;

/// How many tests of one program at once: more than there are cores, since most of them wait.
pub(crate) const AT_ONCE: (&str, &str) = ("RUST_TEST_THREADS", "8");

/// What to build. Not `--all-targets`, which would run the benchmarks too.
const WHAT: &str = "--locked --workspace --all-features --lib --bins --tests --examples";

/// What the other packages do on servers, by the names of the tests.
const ON_SERVERS: [&str; 3] = ["redis::row_", "postgres::row_", "on_servers::"];

/// How long one program may take; one that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// One test program, known by its package and the file of its tests.
#[derive(Debug)]
struct Suite {
    package: String,
    name: String,
    program: PathBuf,
    /// Where cargo runs it.
    folder: PathBuf,
}

/// Builds all and runs all, without servers all that needs none; fails in the end if any of them did.
pub(crate) fn run_all(workspace: &Workspace) -> Result<()> {
    let mut words = format!("test --no-run {WHAT}");
    if !workspace.has_variables() {
        words.extend(STORES.map(|package| format!(" --exclude {package}")));
    }
    let suites = suites(&built::messages(workspace, &words)?);
    let (waiting, busy): (Vec<_>, Vec<_>) =
        suites.iter().partition(|suite| WAITING.contains(&suite.package.as_str()));
    ensure!(!waiting.is_empty() && !busy.is_empty(), "cargo told of {} test programs only", suites.len());
    let mut failed = run_in_turn(workspace, busy);
    failed.extend(run_side_by_side(workspace, &waiting));
    ensure!(
        failed.is_empty(),
        "{} of {} test programs failed:\n{}",
        failed.len(),
        suites.len(),
        failed.join("\n")
    );
    Ok(())
}

fn run_side_by_side(workspace: &Workspace, suites: &[&Suite]) -> Vec<String> {
    let packages = Mutex::new(VecDeque::from(WAITING));
    let next = || packages.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let lane = || {
        let mut failed = Vec::new();
        while let Some(package) = next() {
            let its_own = suites.iter().copied().filter(|suite| suite.package == package).collect();
            failed.extend(run_in_turn(workspace, its_own));
        }
        failed
    };
    thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES).map(|_| scope.spawn(lane)).collect();
        let ended = lanes.into_iter().map(|lane| lane.join().unwrap_or_else(|panic| resume_unwind(panic)));
        ended.flatten().collect()
    })
}

/// Runs one after the other; tells of each that failed, and how to run it alone.
fn run_in_turn(workspace: &Workspace, suites: Vec<&Suite>) -> Vec<String> {
    let failure = |suite: &Suite| {
        let error = suite.run(workspace).err()?;
        Some(format!("{} {}: {error:#}", suite.package, suite.name))
    };
    suites.into_iter().filter_map(failure).collect()
}

impl Suite {
    /// Into a file, since two at once must not mix, and printed at the end.
    fn run(&self, workspace: &Workspace) -> Result<()> {
        let Self { package, name, folder, .. } = self;
        let log = self.log(workspace)?;
        eprintln!("--- {package} {name}: runs, and writes to {}", log.display());
        let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = self.command(workspace);
        command.stdout(file.try_clone()?).stderr(file);
        let ended = step::run_within(LIMIT, &mut command);
        eprintln!("--- {package} {name}\n{}", String::from_utf8_lossy(&fs::read(&log)?));
        ended.with_context(|| format!("in {}", folder.display()))
    }

    fn command(&self, workspace: &Workspace) -> Command {
        let mut command = workspace.command(&self.program);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder).env(AT_ONCE.0, AT_ONCE.1);
        if !workspace.has_variables() {
            command.args(ON_SERVERS.iter().flat_map(|name| ["--skip", name]));
        }
        command
    }

    fn log(&self, workspace: &Workspace) -> Result<PathBuf> {
        let folder = workspace.scratch("tests");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(folder.join(format!("{}-{}.log", self.package, self.name)))
    }
}

/// The test programs that were built, in order.
fn suites(messages: &[Value]) -> Vec<Suite> {
    let mut found: Vec<_> = messages.iter().filter_map(suite).collect();
    found.sort_by(|one, other| (&one.package, &one.name).cmp(&(&other.package, &other.name)));
    found
}

/// What to run, if the message is about a test program.
fn suite(message: &Value) -> Option<Suite> {
    if message["profile"]["test"] != true {
        return None;
    }
    let folder = PathBuf::from(message["manifest_path"].as_str()?).parent()?.to_owned();
    let (kind, target) = (message["target"]["kind"][0].as_str()?, message["target"]["name"].as_str()?);
    let name = if kind == "test" { target.to_owned() } else { format!("{kind}-{target}") };
    Some(Suite {
        package: folder.file_name()?.to_str()?.to_owned(),
        name,
        program: PathBuf::from(message["executable"].as_str()?),
        folder,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_found_in_order_and_nothing_else() {
        let messages = r#"{"reason":"compiler-artifact","manifest_path":"/w/crates/b/Cargo.toml","target":{"kind":["test"],"name":"tck"},"profile":{"test":true},"executable":"/t/tck-1"}
{"reason":"compiler-artifact","manifest_path":"/w/crates/b/Cargo.toml","target":{"kind":["lib"],"name":"b"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","manifest_path":"/w/crates/b/Cargo.toml","target":{"kind":["example"],"name":"e"},"profile":{"test":false},"executable":"/t/e"}
{"reason":"compiler-artifact","manifest_path":"/w/crates/a/Cargo.toml","target":{"kind":["lib"],"name":"a"},"profile":{"test":true},"executable":"/t/a-1"}
{"reason":"build-finished","success":true}"#;
        let found = suites(&built::parse(messages).unwrap());
        let names: Vec<_> = found.iter().map(|suite| (suite.package.as_str(), suite.name.as_str())).collect();
        assert_eq!(names, [("a", "lib-a"), ("b", "tck")]);
        assert_eq!(found[1].program, PathBuf::from("/t/tck-1"));
        assert_eq!(found[1].folder, PathBuf::from("/w/crates/b"));
    }
}
