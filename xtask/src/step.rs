//! Runs commands, times steps, reports how they went.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;

/// One step of a chore.
pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Workspace) -> Result<Verdict>,
}

/// How a step that did not fail went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    NotChecked,
}

/// What became of the steps so far.
#[derive(Debug, Default)]
pub(crate) struct Report {
    lines: Vec<Line>,
    failures: Vec<String>,
}

/// A line of the report.
#[derive(Debug)]
struct Line {
    name: &'static str,
    took: Duration,
    result: &'static str,
}

impl Report {
    /// Takes all steps in turn. A step that fails does not keep the next ones from running.
    pub(crate) fn take(&mut self, steps: &[Step], workspace: &Workspace) {
        for step in steps {
            self.time(step.name, || (step.run)(workspace));
        }
    }

    /// Takes one step, and returns what it made unless it failed.
    pub(crate) fn time<T: Outcome>(
        &mut self,
        name: &'static str,
        act: impl FnOnce() -> Result<T>,
    ) -> Option<T> {
        eprintln!("\n=== {name}");
        let begun = Instant::now();
        let outcome = act();
        let (made, result) = match outcome {
            Ok(made) => {
                let word = made.word();
                (Some(made), word)
            }
            Err(error) => {
                eprintln!("\n{name}: {error:#}");
                self.failures.push(format!("{name}: {error:#}"));
                (None, "FAILED")
            }
        };
        self.lines.push(Line { name, took: begun.elapsed(), result });
        made
    }

    /// Prints a table of all steps; an error that repeats every failure if there was one.
    pub(crate) fn finish(self) -> Result<()> {
        eprint!("\n{}", table(&self.lines));
        let steps = if self.failures.len() == 1 { "step" } else { "steps" };
        if !self.failures.is_empty() {
            bail!("{} {steps} failed\n\n{}", self.failures.len(), self.failures.join("\n\n"));
        }
        Ok(())
    }
}

/// What a step gives when it does not fail, in a word of the table.
pub(crate) trait Outcome {
    fn word(&self) -> &'static str {
        "ok"
    }
}

impl Outcome for Verdict {
    fn word(&self) -> &'static str {
        match self {
            Self::Passed => "ok",
            Self::NotChecked => "not checked",
        }
    }
}

impl Outcome for () {}

impl<T> Outcome for Vec<T> {}

fn table(lines: &[Line]) -> String {
    let width = lines.iter().map(|line| line.name.len()).max().unwrap_or(0);
    let mut table = format!("{:<width$} {:>8}  result\n", "step", "seconds");
    for Line { name, took, result } in lines {
        // Writing to a string cannot fail.
        let _ = writeln!(table, "{name:<width$} {:>8.1}  {result}", took.as_secs_f64());
    }
    let total: Duration = lines.iter().map(|line| line.took).sum();
    let _ = writeln!(table, "{:<width$} {:>8.1}", "total", total.as_secs_f64());
    table
}

/// Runs a command to its end. Anything but success is an error that says how to run it alone.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    announce(command);
    let status = command.status().with_context(|| cannot_start(command))?;
    judge(command, status)
}

/// Runs a command to its end and gives what it wrote to stdout.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    announce(command);
    let output = command.stderr(Stdio::inherit()).output().with_context(|| cannot_start(command))?;
    judge(command, output.status)?;
    String::from_utf8(output.stdout).with_context(|| format!("the output of `{}`", line(command)))
}

/// Runs a command as [`run`] does, and kills it when the time is up.
pub(crate) fn run_within(limit: Duration, command: &mut Command) -> Result<()> {
    announce(command);
    let mut child = command.stdin(Stdio::null()).spawn().with_context(|| cannot_start(command))?;
    if let Some(status) = poll(limit, || Ok(child.try_wait()?))? {
        return judge(command, status);
    }
    child.kill()?;
    child.wait()?;
    bail!("no end after {limit:?}; to run it alone: {}", line(command))
}

/// Asks until there is an answer, or the time is up. The standard library has no wait with a limit.
pub(crate) fn poll<T>(limit: Duration, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<Option<T>> {
    const PAUSE: Duration = Duration::from_millis(20);
    let begun = Instant::now();
    loop {
        let answer = ask()?;
        if answer.is_some() || begun.elapsed() >= limit {
            return Ok(answer);
        }
        thread::sleep(PAUSE);
    }
}

fn announce(command: &Command) {
    eprintln!("$ {}", line(command));
}

fn judge(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("{status}; to run it alone: {}", line(command));
    }
    Ok(())
}

fn cannot_start(command: &Command) -> String {
    format!("cannot start `{}`", line(command))
}

/// The command as a person would type it.
pub(crate) fn line(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| {
        Some(format!("{}={}", name.to_string_lossy(), quote(value?.to_string_lossy())))
    });
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words = words.map(|word| quote(word.to_string_lossy()).into_owned());
    variables.chain(words).collect::<Vec<_>>().join(" ")
}

/// The word in quotes if a shell would change it otherwise.
fn quote(word: Cow<'_, str>) -> Cow<'_, str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=+,@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word;
    }
    Cow::Owned(format!("'{}'", word.replace('\'', r"'\''")))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_command_reads_as_typed() {
        let mut command = Command::new("cargo");
        command.env("RUSTDOCFLAGS", "-D warnings").env_remove("CARGO_PKG_NAME").args(["doc", "", "it's"]);
        assert_eq!(line(&command), r"RUSTDOCFLAGS='-D warnings' cargo doc '' 'it'\''s'");
    }

    #[test]
    fn a_failed_command_says_how_to_run_it_alone() {
        let error = run(Command::new("sh").args(["-c", "exit 3"])).unwrap_err();
        assert_eq!(error.to_string(), "exit status: 3; to run it alone: sh -c 'exit 3'");
    }

    #[test]
    fn a_command_that_is_not_there_is_named() {
        let error = run(&mut Command::new("no-such-program")).unwrap_err();
        assert_eq!(error.to_string(), "cannot start `no-such-program`");
    }

    #[test]
    fn the_output_of_a_command_can_be_had() {
        assert_eq!(capture(Command::new("echo").arg("hello")).unwrap(), "hello\n");
    }

    #[test]
    fn a_command_that_does_not_end_is_killed_and_named() {
        let error = run_within(Duration::from_millis(50), Command::new("sleep").arg("3600")).unwrap_err();
        assert_eq!(error.to_string(), "no end after 50ms; to run it alone: sleep 3600");
    }

    #[test]
    fn a_command_that_ends_in_time_is_judged_by_its_exit_code() {
        let limit = Duration::from_secs(60);
        run_within(limit, &mut Command::new("true")).unwrap();
        run_within(limit, &mut Command::new("false")).unwrap_err();
    }

    #[test]
    fn the_table_lines_up() {
        let lines = [
            Line { name: "fmt", took: Duration::from_millis(1250), result: "ok" },
            Line { name: "outside backend", took: Duration::from_secs(61), result: "FAILED" },
        ];
        let expected = "step             seconds  result\n\
                        fmt                  1.2  ok\n\
                        outside backend     61.0  FAILED\n\
                        total               62.2\n";
        assert_eq!(table(&lines), expected);
    }

    #[test]
    fn a_failing_step_does_not_keep_the_next_from_running() {
        static RAN: AtomicBool = AtomicBool::new(false);
        let steps = [
            Step { name: "first", run: |_| bail!("on purpose") },
            Step {
                name: "second",
                run: |_| {
                    RAN.store(true, Ordering::SeqCst);
                    Ok(Verdict::Passed)
                },
            },
        ];
        let mut report = Report::default();
        report.take(&steps, &Workspace::find().unwrap());
        assert_eq!(format!("{:#}", report.finish().unwrap_err()), "1 step failed\n\nfirst: on purpose");
        assert!(RAN.load(Ordering::SeqCst));
    }
}
