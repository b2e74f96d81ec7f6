//! A rolling upgrade: the previous version and this one contend for one mutex on each store.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::step::{self, Verdict};
use crate::workspace::Workspace;

/// The previous version.
const PREVIOUS: &str = "07c5288b24ed7a8934bbc2a9866e3576a0dd08a9";
/// How long both contend on each store.
const PERIOD: Duration = Duration::from_secs(60);
/// How many processes of each version contend at a time.
const EACH: usize = 3;
/// One in this many runs is killed.
const KILLED: u64 = 3;
/// The exit code of a version that refuses the data in the store.
const REFUSED: i32 = 78;

/// The stores, by the variable with their address.
const STORES: [&str; 6] = [
    "SIMBA_TCK_REDIS",
    "SIMBA_TCK_REDIS_CLUSTER",
    "SIMBA_TCK_MARIADB",
    "SIMBA_TCK_POSTGRES",
    "SIMBA_TCK_ZOOKEEPER",
    "SIMBA_TCK_ETCD",
];

/// The command under the mutex: a file lock that is already taken shows two holders, and tokens are written in the
/// order of the holds.
const WORK: &str = "flock -n -E 99 lock sh -c 'echo $SIMBA_FENCING_TOKEN $0 >> tokens; sleep 0.02' $0; \
     [ $? -ne 99 ] || echo $0 >> overlaps";

/// Builds the previous version, then lets both versions contend on every store, with kills. Fails if two hold at once,
/// if a token does not grow, or if a version never acquires. The new version may refuse the store instead.
pub(crate) fn step(workspace: &Workspace) -> Result<Verdict> {
    let (old, new) = (build_previous(workspace)?, build_current(workspace)?);
    let stores =
        STORES.iter().map(|name| workspace.variable(name).context(*name)).collect::<Result<Vec<_>>>()?;
    let directory = workspace.scratch("upgrade").join("runs");
    let file = format!("sqlite:{}", directory.join("simba.db").display());
    fs::create_dir_all(&directory)?;
    let mut broken = Vec::new();
    for url in stores.into_iter().chain([file]) {
        if let Err(error) = contend(&directory, &url, [&old, &new]) {
            broken.push(format!("{url}: {error:#}"));
        }
    }
    ensure!(broken.is_empty(), "{}", broken.join("\n"));
    Ok(Verdict::Passed)
}

fn build_previous(workspace: &Workspace) -> Result<PathBuf> {
    let source = workspace.scratch("upgrade").join("before");
    if !source.is_dir() {
        step::run(workspace.command("git").args(["worktree", "prune"]))?;
        step::run(workspace.command("git").args(["worktree", "add", "--detach"]).arg(&source).arg(PREVIOUS))?;
    }
    let mut command = workspace.cargo("build --locked -p simba-cli");
    step::run(command.current_dir(&source).env("CARGO_TARGET_DIR", source.join("target")))?;
    Ok(source.join("target/debug/simba"))
}

fn build_current(workspace: &Workspace) -> Result<PathBuf> {
    step::run(&mut workspace.cargo("build --locked -p simba-cli"))?;
    Ok(workspace.scratch("debug").join("simba"))
}

/// Counts the runs of one version.
#[derive(Debug, Default)]
struct Count {
    ended: AtomicU32,
    killed: AtomicU32,
    refused: AtomicU32,
}

fn contend(directory: &Path, url: &str, programs: [&Path; 2]) -> Result<()> {
    let directory = directory.join(url.split([':', '+']).next().unwrap_or_default());
    // Remove the files of an earlier run.
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory)?;
    if url.starts_with("mysql") || url.starts_with("postgres") {
        // An installation of the previous version, which the new one must accept or refuse.
        step::run(Command::new(programs[0]).args(["--on", url, "schema", "--apply"]))?;
    }
    let (end, counts) = (Instant::now() + PERIOD, [Count::default(), Count::default()]);
    thread::scope(|scope| {
        let (directory, counts) = (&directory, &counts);
        let workers: Vec<_> = (0..2 * EACH)
            .map(|at| scope.spawn(move || work(directory, url, programs[at % 2], at, end, &counts[at % 2])))
            .collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().unwrap_or_else(|_| bail!("a worker panicked")))
    })?;
    judge(&directory, url, &counts)
}

/// Runs the command under the mutex repeatedly, and kills `simba` in one of [`KILLED`] runs.
fn work(directory: &Path, url: &str, program: &Path, at: usize, end: Instant, count: &Count) -> Result<()> {
    let mut random = Random(at as u64 + 1);
    let name = if at.is_multiple_of(2) { "old" } else { "new" };
    while Instant::now() < end {
        let mut command = Command::new(program);
        command.args(["--on", url, "run", "--ttl", "2s", "--transition", "2s", "-w", "20s", "upgrade", "--"]);
        command
            .args(["sh", "-c", WORK, name])
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let mut child = command.stderr(Stdio::null()).spawn().context("cannot start simba")?;
        if random.next().is_multiple_of(KILLED) {
            thread::sleep(Duration::from_millis(random.next() % 300));
            child.kill()?;
            child.wait()?;
            count.killed.fetch_add(1, Ordering::SeqCst);
            continue;
        }
        match child.wait()?.code() {
            Some(REFUSED) => {
                count.refused.fetch_add(1, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(200));
            }
            _ => {
                count.ended.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
    Ok(())
}

fn judge(directory: &Path, url: &str, [old, new]: &[Count; 2]) -> Result<()> {
    let overlaps = fs::read_to_string(directory.join("overlaps")).unwrap_or_default();
    let tokens = fs::read_to_string(directory.join("tokens")).unwrap_or_default();
    let holds: Vec<(u64, &str)> = tokens
        .lines()
        .map(|line| {
            let (token, name) = line.split_once(' ').context("a line without a token")?;
            Ok((token.parse()?, name))
        })
        .collect::<Result<_>>()?;
    let won = |version: &str| holds.iter().filter(|(_, name)| *name == version).count();
    let load = |count: &AtomicU32| count.load(Ordering::SeqCst);
    eprintln!(
        "{url}: {} holds by the old version, {} by the new one, {} + {} killed, {} + {} refused, {} overlaps",
        won("old"),
        won("new"),
        load(&old.killed),
        load(&new.killed),
        load(&old.refused),
        load(&new.refused),
        overlaps.lines().count(),
    );
    ensure!(overlaps.is_empty(), "{} commands ran at the same time as another", overlaps.lines().count());
    if let Some(at) = holds.windows(2).position(|pair| pair[0].0 >= pair[1].0) {
        bail!("token {} came after {}", holds[at + 1].0, holds[at].0);
    }
    ensure!(won("old") > 0, "the old version never held the mutex");
    ensure!(won("new") > 0 || load(&new.refused) > 0, "the new version neither held the mutex nor refused");
    Ok(())
}

/// A generator of the same numbers in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}
