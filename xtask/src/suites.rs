//! Runs the test programs of the workspace, four at a time.
//!
//! `cargo test -p` cannot do it: for another set of packages it resolves features again, and rebuilds most of them.

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

/// The packages whose tests need servers, the slowest first.
pub(crate) const STORES: [&str; 5] =
    ["simba-zookeeper", "simba-etcd", "simba-redis", "simba-mysql", "simba-postgres"];

/// How many programs run at once. Their tests mostly wait for leases to end, and use a tenth of a core.
const WORKERS: usize = 4;

/// How many tests of one program run at once: more than there are cores, since most of them wait.
pub(crate) const AT_ONCE: (&str, &str) = ("RUST_TEST_THREADS", "8");

/// The build targets. Not `--all-targets`, which would also run the benchmarks.
const TARGETS: &str = "--locked --workspace --all-features --lib --bins --tests --examples";

/// Parts of the names of tests in other packages that need servers.
const ON_SERVERS: [&str; 3] = ["redis::row_", "postgres::row_", "on_servers::"];

/// Parts of the names of tests that need root, or programs that are not installed everywhere.
const ON_DEBIAN: [&str; 2] = ["as_root::", "with_tools::"];

/// Time limit for one program.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// The variable with the file for skipped cases.
const SKIPS: &str = "SIMBA_TCK_SKIPS";

/// Test programs that run as one step.
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

/// One test program, identified by its package and the file of its tests.
#[derive(Debug)]
struct Suite {
    package: String,
    name: String,
    program: PathBuf,
    /// The directory in which cargo runs it.
    directory: PathBuf,
    /// Part of the names of the tests to run.
    filter: &'static str,
}

/// Builds all test programs.
pub(crate) fn build(workspace: &Workspace) -> Result<()> {
    programs(workspace).map(drop)
}

/// Runs the test programs of one group. In quick mode, skips tests that need servers. Fails at the end if one failed.
pub(crate) fn run(workspace: &Workspace, group: Group) -> Result<Verdict> {
    run_named(workspace, group, "")
}

/// Runs the tests of one group whose names contain `filter`.
pub(crate) fn run_named(workspace: &Workspace, group: Group, filter: &'static str) -> Result<Verdict> {
    let mut suites = programs(workspace)?;
    suites.retain(|suite| Group::of(&suite.package) == group);
    suites.iter_mut().for_each(|suite| suite.filter = filter);
    ensure!(!suites.is_empty(), "cargo reported no test program for this step");
    let skips = workspace.scratch("tests").join(format!("{group:?}.skips"));
    // Remove the file of an earlier run.
    let _ = fs::remove_file(&skips);
    let mut ran = run_in_parallel(workspace, &skips, jobs(group, &suites));
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

/// Prints the skipped cases, so that they do not count as passed.
fn print_skips(file: &Path) {
    let skipped = fs::read_to_string(file).unwrap_or_default();
    eprintln!("{} cases skipped, because the store does not support them", skipped.lines().count());
    eprint!("{skipped}");
}

/// Builds the test programs and returns them.
fn programs(workspace: &Workspace) -> Result<Vec<Suite>> {
    let mut words = format!("test --no-run {TARGETS}");
    if workspace.is_quick() {
        words.extend(STORES.map(|package| format!(" --exclude {package}")));
    }
    Ok(suites(&built::messages(workspace, &words)?))
}

/// The result of one program.
struct Run {
    name: String,
    took: Duration,
    failure: Option<String>,
}

/// Splits the programs into those that may run in parallel. Tests of one store share servers that some of them stop,
/// and those of the command interfere by signals and terminals.
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

fn run_in_parallel(workspace: &Workspace, skips: &Path, jobs: VecDeque<Vec<&Suite>>) -> Vec<Run> {
    let jobs = Mutex::new(jobs);
    let next = || jobs.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let worker = || {
        let mut ran = Vec::new();
        while let Some(job) = next() {
            ran.extend(run_in_sequence(workspace, skips, job));
        }
        ran
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS).map(|_| scope.spawn(worker)).collect();
        let ended =
            workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)));
        ended.flatten().collect()
    })
}

/// Runs the programs one after the other. The message of a failure says how to run the program alone.
fn run_in_sequence(workspace: &Workspace, skips: &Path, suites: Vec<&Suite>) -> Vec<Run> {
    let run = |suite: &Suite| {
        let name = format!("{} {}", suite.package, suite.name);
        let begun = Instant::now();
        let failure = suite.run(workspace, skips).err().map(|error| format!("{name}: {error:#}"));
        Run { name, took: begun.elapsed(), failure }
    };
    suites.into_iter().map(run).collect()
}

impl Suite {
    /// Runs the program with its output in a file, which is printed at the end: two at once must not mix.
    fn run(&self, workspace: &Workspace, skips: &Path) -> Result<()> {
        let Self { package, name, directory, .. } = self;
        let log = self.log(workspace)?;
        eprintln!("--- {package} {name}: running, output in {}", log.display());
        let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = self.command(workspace);
        command.env(SKIPS, skips);
        command.stdout(file.try_clone()?).stderr(file);
        let ended = step::run_within(LIMIT, &mut command);
        eprintln!("--- {package} {name}\n{}", String::from_utf8_lossy(&fs::read(&log)?));
        ended.with_context(|| format!("in {}", directory.display()))
    }

    fn command(&self, workspace: &Workspace) -> Command {
        let mut command = workspace.command(&self.program);
        command
            .current_dir(&self.directory)
            .env("CARGO_MANIFEST_DIR", &self.directory)
            .env(AT_ONCE.0, AT_ONCE.1);
        if !self.filter.is_empty() {
            command.arg(self.filter);
        }
        if workspace.is_quick() {
            command.args(ON_SERVERS.iter().chain(&ON_DEBIAN).flat_map(|name| ["--skip", name]));
        }
        command
    }

    fn log(&self, workspace: &Workspace) -> Result<PathBuf> {
        let directory = workspace.scratch("tests");
        fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        Ok(directory.join(format!("{}-{}.log", self.package, self.name)))
    }
}

/// Returns the test programs that were built, sorted.
fn suites(messages: &[Value]) -> Vec<Suite> {
    let mut found: Vec<_> = messages.iter().filter_map(suite).collect();
    found.sort_by(|one, other| (&one.package, &one.name).cmp(&(&other.package, &other.name)));
    found
}

/// Returns the test program, if the message is about one.
fn suite(message: &Value) -> Option<Suite> {
    if message["profile"]["test"] != true {
        return None;
    }
    let directory = PathBuf::from(message["manifest_path"].as_str()?).parent()?.to_owned();
    let (kind, target) = (message["target"]["kind"][0].as_str()?, message["target"]["name"].as_str()?);
    let name = if kind == "test" { target.to_owned() } else { format!("{kind}-{target}") };
    Some(Suite {
        package: directory.file_name()?.to_str()?.to_owned(),
        name,
        program: PathBuf::from(message["executable"].as_str()?),
        directory,
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
        assert_eq!(found[1].directory, PathBuf::from("/w/crates/b"));
    }
}
