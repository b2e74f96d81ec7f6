//! Measures how long `simba run` takes to start a command, beside flock(1).

use std::env;
use std::io::{self, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use simba_measure::stats::percentile;
use simba_measure::{Effort, Row, Unit};

use super::subject::{Subject, mutex};
use crate::failure::{Failure, code};

/// Measures the time from the call to the first output of the command; the floor is flock(1), if it is installed.
pub(crate) async fn measure(subject: &Subject, effort: Effort) -> Result<Vec<Row>, Failure> {
    let (url, name) = (subject.url().to_string(), mutex("start", 0)?);
    let timed = tokio::task::spawn_blocking(move || {
        let program = env::current_exe()?;
        times(&program, &["--on", &url, "run", name.as_str(), "--"], effort.pick(20, 100))
    });
    let timed = timed.await.map_err(|error| io::Error::other(error.to_string())).and_then(|timed| timed);
    let Times { ours, flock } = timed.map_err(|error| start_failure(&error))?;
    let millis = |all: &[Duration], percent| percentile(all, percent).as_secs_f64() * 1e3;
    let row = |percent| {
        let name = format!("start of `simba run`, p{percent}, beside flock(1)");
        let row = Row::new(subject, name, Unit::Millis, millis(&ours, percent));
        if flock.is_empty() { row } else { row.floor(millis(&flock, percent)) }
    };
    Ok(vec![row(50), row(99)])
}

fn start_failure(error: &io::Error) -> Failure {
    Failure::new(code::NOT_EXECUTABLE, format!("the start of a command cannot be measured: {error}"))
}

/// Sorted times; those of flock(1) are empty if it is not installed.
struct Times {
    ours: Vec<Duration>,
    flock: Vec<Duration>,
}

/// Measures both alternately, so that load on the machine affects both; the first round warms up.
fn times(program: &Path, words: &[&str], rounds: usize) -> io::Result<Times> {
    let (mut ours, mut flock) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let our_time = first_output(Command::new(program).args(words))?;
        // flock(1) needs an existing file; the program is one.
        let flock_time = first_output(Command::new("flock").arg(program));
        if round > 0 {
            ours.push(our_time);
            flock.extend(flock_time);
        }
    }
    ours.sort_unstable();
    flock.sort_unstable();
    Ok(Times { ours, flock })
}

/// Returns the time until the command under the lock prints something.
fn first_output(lock: &mut Command) -> io::Result<Duration> {
    let begun = Instant::now();
    let lock = lock.args(["echo", "."]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = lock.spawn()?;
    let mut byte = [0];
    let read = match child.stdout.take() {
        Some(mut out) => out.read_exact(&mut byte),
        None => Err(io::ErrorKind::BrokenPipe.into()),
    };
    let time = begun.elapsed();
    child.wait()?;
    read.map(|()| time)
}
