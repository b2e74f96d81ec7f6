//! Runs the test programs of the workspace, four at a time.
//!
//! `cargo test -p` cannot do it: for another choice of packages it settles their features anew, and builds most of
//! them again.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::fs::{self, File};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::step::Verdict;
use crate::workspace::Workspace;
use crate::{built, step};

/// The packages whose tests need servers; those first that take longest.
pub(crate) const STORES: [&str; 5] =
    ["simba-zookeeper", "simba-etcd", "simba-redis", "simba-mysql", "simba-postgres"];

/// How many programs at once: their tests wait for leases to end nearly all of the time, and use a tenth of a core.
const LANES: usize = 4;

/// How many tests of one program at once: more than there are cores, since most of them wait.
const AT_ONCE: (&str, &str) = ("RUST_TEST_THREADS", "8");

/// What to build. Not `--all-targets`, which would run the benchmarks too.
const WHAT: &str = "--locked --workspace --all-features --lib --bins --tests --examples";

/// What the other packages do on servers, by the names of the tests.
const ON_SERVERS: [&str; 3] = ["redis::row_", "postgres::row_", "on_servers::"];

/// What needs root, or programs that few machines have, by the names of the tests.
const ON_DEBIAN: [&str; 2] = ["as_root::", "with_tools::"];

/// How long one program may take; one that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// The variable with the file that cases which do not apply to a store are written to.
const SKIPS: &str = "SIMBA_TCK_SKIPS";

/// Test programs that are run as one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Group {
    /// The stores with servers.
    Stores,
    /// The command.
    Command,
    /// Everything else.
    Library,
}

impl Group {
    fn of(package: &str) -> Self {
        match package {
            "simba-cli" => Self::Command,
            package if STORES.contains(&package) => Self::Stores,
            _ => Self::Library,
        }
    }
}

/// One test program, known by its package and the file of its tests.
#[derive(Debug)]
struct Suite {
    package: String,
    name: String,
    program: PathBuf,
    /// Where cargo runs it.
    folder: PathBuf,
    /// What the names of its tests must contain to be run.
    filter: &'static str,
}

/// Builds all test programs.
pub(crate) fn build(workspace: &Workspace) -> Result<()> {
    programs(workspace).map(drop)
}

/// Runs the test programs of one group, without servers all that needs none; fails in the end if any of them did.
pub(crate) fn run(workspace: &Workspace, group: Group) -> Result<Verdict> {
    run_named(workspace, group, "")
}

/// Runs the tests of one group whose names contain `filter`.
pub(crate) fn run_named(workspace: &Workspace, group: Group, filter: &'static str) -> Result<Verdict> {
    let mut suites = programs(workspace)?;
    suites.retain(|suite| Group::of(&suite.package) == group);
    suites.iter_mut().for_each(|suite| suite.filter = filter);
    ensure!(!suites.is_empty(), "cargo named no test program of this step");
    let skips = workspace.scratch("tests").join(format!("{group:?}.skips"));
    // What an earlier run wrote.
    let _ = fs::remove_file(&skips);
    let mut ran = run_side_by_side(workspace, &skips, jobs(group, &suites));
    print_skips(&skips);
    ran.sort_by_key(|run| Reverse(run.took));
    eprintln!("the longest of {}:", ran.len());
    for Run { name, took, .. } in ran.iter().take(5) {
        eprintln!("  {:>6.1} s  {name}", took.as_secs_f64());
    }
    let failed: Vec<_> = ran.into_iter().filter_map(|run| run.failure).collect();
    ensure!(
        failed.is_empty(),
        "{} of {} test programs failed:\n{}",
        failed.len(),
        suites.len(),
        failed.join("\n")
    );
    Ok(Verdict::Passed)
}

/// A case that does not apply to a store counts as none that passed.
fn print_skips(file: &Path) {
    let skipped = fs::read_to_string(file).unwrap_or_default();
    eprintln!("{} cases skipped, since the store cannot do what they are about", skipped.lines().count());
    eprint!("{skipped}");
}

fn programs(workspace: &Workspace) -> Result<Vec<Suite>> {
    let mut words = format!("test --no-run {WHAT}");
    if workspace.is_quick() {
        words.extend(STORES.map(|package| format!(" --exclude {package}")));
    }
    Ok(suites(&built::messages(workspace, &words)?))
}

/// A program that ran.
struct Run {
    name: String,
    took: Duration,
    failure: Option<String>,
}

/// Splits the programs into those that must not run side by side. Tests of one store share servers that some of them
/// bring down, and those of the command are sensitive to each other's signals and terminals.
fn jobs(group: Group, suites: &[Suite]) -> VecDeque<Vec<&Suite>> {
    match group {
        Group::Library => suites.iter().map(|suite| vec![suite]).collect(),
        Group::Command => VecDeque::from([suites.iter().collect()]),
        Group::Stores => {
            let of = |package| suites.iter().filter(|suite| suite.package == package).collect();
            STORES.into_iter().map(of).collect()
        }
    }
}

fn run_side_by_side(workspace: &Workspace, skips: &Path, jobs: VecDeque<Vec<&Suite>>) -> Vec<Run> {
    let jobs = Mutex::new(jobs);
    let next = || jobs.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let lane = || {
        let mut ran = Vec::new();
        while let Some(job) = next() {
            ran.extend(run_in_turn(workspace, skips, job));
        }
        ran
    };
    thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES).map(|_| scope.spawn(lane)).collect();
        let ended = lanes.into_iter().map(|lane| lane.join().unwrap_or_else(|panic| resume_unwind(panic)));
        ended.flatten().collect()
    })
}

/// Runs one after the other; says of each that failed how to run it alone.
fn run_in_turn(workspace: &Workspace, skips: &Path, suites: Vec<&Suite>) -> Vec<Run> {
    let run = |suite: &Suite| {
        let name = format!("{} {}", suite.package, suite.name);
        let begun = Instant::now();
        let failure = suite.run(workspace, skips).err().map(|error| format!("{name}: {error:#}"));
        Run { name, took: begun.elapsed(), failure }
    };
    suites.into_iter().map(run).collect()
}

impl Suite {
    /// Into a file, since two at once must not mix, and printed at the end.
    fn run(&self, workspace: &Workspace, skips: &Path) -> Result<()> {
        let Self { package, name, folder, .. } = self;
        let log = self.log(workspace)?;
        eprintln!("--- {package} {name}: runs, and writes to {}", log.display());
        let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = self.command(workspace);
        command.env(SKIPS, skips);
        command.stdout(file.try_clone()?).stderr(file);
        let ended = step::run_within(LIMIT, &mut command);
        eprintln!("--- {package} {name}\n{}", String::from_utf8_lossy(&fs::read(&log)?));
        ended.with_context(|| format!("in {}", folder.display()))
    }

    fn command(&self, workspace: &Workspace) -> Command {
        let mut command = workspace.command(&self.program);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder).env(AT_ONCE.0, AT_ONCE.1);
        if !self.filter.is_empty() {
            command.arg(self.filter);
        }
        if workspace.is_quick() {
            command.args(ON_SERVERS.iter().chain(&ON_DEBIAN).flat_map(|name| ["--skip", name]));
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
        filter: "",
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
