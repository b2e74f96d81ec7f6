//! Runs commands, times steps, reports their results.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;

/// One step of a task.
pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Workspace) -> Result<Verdict>,
}

/// The result of a step that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    NotChecked,
}

/// The results of the steps so far.
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
    /// Runs all steps in order. A failed step does not prevent the next ones.
    pub(crate) fn run(&mut self, steps: &[Step], workspace: &Workspace) {
        for step in steps {
            self.time(step.name, || (step.run)(workspace));
        }
    }

    /// Runs one step. Returns its value unless it failed.
    pub(crate) fn time<T: Outcome>(
        &mut self,
        name: &'static str,
        act: impl FnOnce() -> Result<T>,
    ) -> Option<T> {
        eprintln!("\n=== {name}");
        let begun = Instant::now();
        let outcome = act();
        let (value, result) = match outcome {
            Ok(value) => {
                let result = value.result();
                (Some(value), result)
            }
            Err(error) => {
                eprintln!("\n{name}: {error:#}");
                self.failures.push(format!("{name}: {error:#}"));
                (None, "FAILED")
            }
        };
        self.lines.push(Line { name, took: begun.elapsed(), result });
        value
    }

    /// Prints a table of all steps. Returns an error with every failure if there was one.
    pub(crate) fn finish(self) -> Result<()> {
        eprint!("\n{}", table(&self.lines));
        let steps = if self.failures.len() == 1 { "step" } else { "steps" };
        if !self.failures.is_empty() {
            bail!("{} {steps} failed\n\n{}", self.failures.len(), self.failures.join("\n\n"));
        }
        Ok(())
    }
}

/// The value of a step that did not fail, with its text in the table.
pub(crate) trait Outcome {
    fn result(&self) -> &'static str {
        "ok"
    }
}

impl Outcome for Verdict {
    fn result(&self) -> &'static str {
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

/// Runs a command to its end. Any other result than success is an error that says how to run the command alone.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    print_command(command);
    let status = command.status().with_context(|| cannot_start(command))?;
    check_status(command, status)
}

/// Runs a command to its end and returns its stdout.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    print_command(command);
    let output = command.stderr(Stdio::inherit()).output().with_context(|| cannot_start(command))?;
    check_status(command, output.status)?;
    String::from_utf8(output.stdout).with_context(|| format!("the output of `{}`", line(command)))
}

/// Runs a command like [`run`], and kills it after `limit`.
pub(crate) fn run_within(limit: Duration, command: &mut Command) -> Result<()> {
    print_command(command);
    let mut child = command.stdin(Stdio::null()).spawn().with_context(|| cannot_start(command))?;
    if let Some(status) = poll(limit, || Ok(child.try_wait()?))? {
        return check_status(command, status);
    }
    child.kill()?;
    child.wait()?;
    bail!("not finished after {limit:?}; to run it alone: {}", line(command))
}

/// Polls until there is a value, or until `limit`. The standard library has no wait with a limit.
pub(crate) fn poll<T>(limit: Duration, mut check: impl FnMut() -> Result<Option<T>>) -> Result<Option<T>> {
    const PAUSE: Duration = Duration::from_millis(20);
    let begun = Instant::now();
    loop {
        let value = check()?;
        if value.is_some() || begun.elapsed() >= limit {
            return Ok(value);
        }
        thread::sleep(PAUSE);
    }
}

fn print_command(command: &Command) {
    eprintln!("$ {}", line(command));
}

fn check_status(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("{status}; to run it alone: {}", line(command));
    }
    Ok(())
}

fn cannot_start(command: &Command) -> String {
    format!("cannot start `{}`", line(command))
}

/// Returns the command as a user would type it in a shell.
pub(crate) fn line(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| {
        Some(format!("{}={}", name.to_string_lossy(), quote(value?.to_string_lossy())))
    });
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words = words.map(|word| quote(word.to_string_lossy()).into_owned());
    variables.chain(words).collect::<Vec<_>>().join(" ")
}

/// Returns the word in quotes if a shell would change it otherwise.
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
    fn command_is_printed_as_typed() {
        let mut command = Command::new("cargo");
        command.env("RUSTDOCFLAGS", "-D warnings").env_remove("CARGO_PKG_NAME").args(["doc", "", "it's"]);
        assert_eq!(line(&command), r"RUSTDOCFLAGS='-D warnings' cargo doc '' 'it'\''s'");
    }

    #[test]
    fn error_of_a_failed_command_says_how_to_run_it_alone() {
        let error = run(Command::new("sh").args(["-c", "exit 3"])).unwrap_err();
        assert_eq!(error.to_string(), "exit status: 3; to run it alone: sh -c 'exit 3'");
    }

    #[test]
    fn missing_program_is_named() {
        let error = run(&mut Command::new("no-such-program")).unwrap_err();
        assert_eq!(error.to_string(), "cannot start `no-such-program`");
    }

    #[test]
    fn output_of_a_command_is_captured() {
        assert_eq!(capture(Command::new("echo").arg("hello")).unwrap(), "hello\n");
    }

    #[test]
    fn command_that_exceeds_its_limit_is_killed_and_named() {
        let error = run_within(Duration::from_millis(50), Command::new("sleep").arg("3600")).unwrap_err();
        assert_eq!(error.to_string(), "not finished after 50ms; to run it alone: sleep 3600");
    }

    #[test]
    fn command_that_ends_in_time_is_judged_by_its_exit_code() {
        let limit = Duration::from_secs(60);
        run_within(limit, &mut Command::new("true")).unwrap();
        run_within(limit, &mut Command::new("false")).unwrap_err();
    }

    #[test]
    fn table_is_aligned() {
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
    fn failed_step_does_not_prevent_the_next() {
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
        report.run(&steps, &Workspace::find().unwrap());
        assert_eq!(format!("{:#}", report.finish().unwrap_err()), "1 step failed\n\nfirst: on purpose");
        assert!(RAN.load(Ordering::SeqCst));
    }
}
