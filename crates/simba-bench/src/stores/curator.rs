//! A peer on ZooKeeper: the mutex of Curator, in a JVM.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use simba_servers::curator_classpath;

const SOURCE: &str = include_str!("../../java/CuratorMutex.java");

/// Measures `samples` hand-overs between two clients that hold the mutex for `hold` each.
pub(super) fn handovers(servers: &str, samples: usize, hold: Duration) -> Result<Vec<Duration>> {
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("CuratorMutex.java"), SOURCE)?;
    output(
        Command::new("javac").args(["-cp", &curator_classpath(dir.path()), "CuratorMutex.java"]),
        dir.path(),
    )?;
    let path = format!("/peer-{}", std::process::id());
    let mut java = Command::new("java");
    java.args([
        "-XX:+UseSerialGC",
        "-Xmx64m",
        "-cp",
        &curator_classpath(dir.path()),
        "CuratorMutex",
        servers,
        &path,
    ]);
    let printed = output(java.args([samples.to_string(), hold.as_millis().to_string()]), dir.path())?;
    printed.lines().map(|line| Ok(Duration::from_nanos(line.parse()?))).collect()
}

/// Returns the standard output of a program that exits with 0.
fn output(command: &mut Command, dir: &Path) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.current_dir(dir).stderr(Stdio::inherit()).output().context(program.clone())?;
    if !output.status.success() {
        bail!("{program} ended with {}", output.status);
    }
    Ok(String::from_utf8(output.stdout)?)
}
