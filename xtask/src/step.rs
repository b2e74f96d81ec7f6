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
    /// Whether it belongs before every commit.
    pub(crate) quick: bool,
    pub(crate) run: fn(&Workspace) -> Result<Verdict>,
}

/// How a step that did not fail went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    NotChecked,
}

/// A line of the report.
#[derive(Debug)]
struct Line {
    name: &'static str,
    /// None for a step that was not reached.
    took: Option<Duration>,
    result: &'static str,
}

/// Takes the steps in turn up to the first that fails, then prints a table of all.
pub(crate) fn take<'a>(steps: impl IntoIterator<Item = &'a Step>, workspace: &Workspace) -> Result<()> {
    let mut failure = None;
    let mut lines = Vec::new();
    for step in steps {
        if failure.is_some() {
            lines.push(Line { name: step.name, took: None, result: "not run" });
            continue;
        }
        eprintln!("\n=== {}", step.name);
        let begun = Instant::now();
        let outcome = (step.run)(workspace);
        lines.push(Line { name: step.name, took: Some(begun.elapsed()), result: result(&outcome) });
        failure = outcome.with_context(|| format!("step `{}` failed", step.name)).err();
    }
    eprint!("\n{}", table(&lines));
    failure.map_or(Ok(()), Err)
}

fn result(outcome: &Result<Verdict>) -> &'static str {
    match outcome {
        Ok(Verdict::Passed) => "ok",
        Ok(Verdict::NotChecked) => "not checked",
        Err(_) => "FAILED",
    }
}

fn table(lines: &[Line]) -> String {
    let mut table = format!("{:<10} {:>8}  result\n", "step", "seconds");
    for Line { name, took, result } in lines {
        let seconds = took.map_or_else(String::new, |took| format!("{:.1}", took.as_secs_f64()));
        // Writing to a string cannot fail.
        let _ = writeln!(table, "{name:<10} {seconds:>8}  {result}");
    }
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
            Line { name: "fmt", took: Some(Duration::from_millis(1250)), result: "ok" },
            Line { name: "clippy", took: Some(Duration::from_secs(61)), result: "FAILED" },
            Line { name: "tests", took: None, result: "not run" },
        ];
        let expected = "step        seconds  result\n\
                        fmt             1.2  ok\n\
                        clippy         61.0  FAILED\n\
                        tests                not run\n";
        assert_eq!(table(&lines), expected);
    }

    #[test]
    fn the_first_failing_step_ends_the_chore() {
        let steps = [
            Step { name: "first", quick: true, run: |_| bail!("on purpose") },
            Step { name: "second", quick: true, run: |_| panic!("must not be reached") },
        ];
        let error = take(&steps, &Workspace::find().unwrap()).unwrap_err();
        assert_eq!(format!("{error:#}"), "step `first` failed: on purpose");
    }
}
