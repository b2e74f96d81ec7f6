//! How soon `simba run` starts a command, beside flock(1).

use std::env;
use std::io::{self, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use simba_measure::stats::percentile;
use simba_measure::{Effort, Row, Unit};

use super::subject::{Subject, mutex};
use crate::failure::{Failure, code};

/// From the call to the first word of the command; the floor is flock(1), where it is installed.
pub(crate) async fn measure(subject: &Subject, effort: Effort) -> Result<Vec<Row>, Failure> {
    let (url, name) = (subject.url().to_string(), mutex("start", 0)?);
    let timed = tokio::task::spawn_blocking(move || {
        let program = env::current_exe()?;
        times(&program, &["--on", &url, "run", name.as_str(), "--"], effort.pick(20, 100))
    });
    let timed = timed.await.map_err(|error| io::Error::other(error.to_string())).and_then(|timed| timed);
    let Times { ours, flock } = timed.map_err(|error| no_start(&error))?;
    let millis = |all: &[Duration], percent| percentile(all, percent).as_secs_f64() * 1e3;
    let row = |percent| {
        let name = format!("start of `simba run`, p{percent}, beside flock(1)");
        let row = Row::new(subject, name, Unit::Millis, millis(&ours, percent));
        if flock.is_empty() { row } else { row.floor(millis(&flock, percent)) }
    };
    Ok(vec![row(50), row(99)])
}

fn no_start(error: &io::Error) -> Failure {
    Failure::new(code::NOT_EXECUTABLE, format!("the start of a command cannot be measured: {error}"))
}

/// In order; those of flock(1) are none if there is no flock(1).
struct Times {
    ours: Vec<Duration>,
    flock: Vec<Duration>,
}

/// In turns, so that a busy moment of the machine hits both; the first round warms up.
fn times(program: &Path, words: &[&str], rounds: usize) -> io::Result<Times> {
    let (mut ours, mut flock) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let our_time = first_word(Command::new(program).args(words))?;
        // Any file will do, and this one is there already.
        let its_time = first_word(Command::new("flock").arg(program));
        if round > 0 {
            ours.push(our_time);
            flock.extend(its_time);
        }
    }
    ours.sort_unstable();
    flock.sort_unstable();
    Ok(Times { ours, flock })
}

/// How long it takes until the command under the lock says something.
fn first_word(lock: &mut Command) -> io::Result<Duration> {
    let begun = Instant::now();
    let lock = lock.args(["echo", "."]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = lock.spawn()?;
    let mut word = [0];
    let heard = match child.stdout.take() {
        Some(mut out) => out.read_exact(&mut word),
        None => Err(io::ErrorKind::BrokenPipe.into()),
    };
    let time = begun.elapsed();
    child.wait()?;
    heard.map(|()| time)
}
