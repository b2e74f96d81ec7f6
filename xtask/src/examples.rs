//! Executes every example, so that none of them can rot.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::step::{self, Verdict};
use crate::workspace::Workspace;

/// How long one example may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Builds all examples of all crates and executes each; it must end in time and with exit code 0.
pub(crate) fn run_all(workspace: &Workspace) -> Result<Verdict> {
    let examples = build(workspace)?;
    if examples.is_empty() {
        eprintln!("there are no examples");
    }
    for example in examples {
        step::run_within(LIMIT, &mut workspace.command(example))?;
    }
    Ok(Verdict::Passed)
}

/// One build for all: `cargo run --example` would settle the features anew for each package and build again.
fn build(workspace: &Workspace) -> Result<Vec<PathBuf>> {
    let words =
        "build --locked --workspace --all-features --examples --message-format json-render-diagnostics";
    executables(&step::capture(&mut workspace.cargo(words))?)
}

/// The executables of the examples in the messages of a cargo build, one JSON object on each line.
fn executables(messages: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line).with_context(|| format!("not JSON: {line}"))?;
        found.extend(executable(&message));
    }
    Ok(found)
}

fn executable(message: &Value) -> Option<PathBuf> {
    let is_example = message["target"]["kind"].as_array()?.iter().any(|kind| kind == "example");
    let path = message["executable"].as_str()?;
    is_example.then(|| PathBuf::from(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_executable_examples_are_found() {
        let messages = r#"{"reason":"compiler-artifact","target":{"kind":["lib"]},"executable":null}
{"reason":"compiler-artifact","target":{"kind":["example"],"name":"a"},"executable":"/t/examples/a"}
{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"b"},"executable":"/t/b"}
{"reason":"compiler-artifact","target":{"kind":["example"],"name":"library"},"executable":null}
{"reason":"compiler-artifact","target":{"kind":["example"],"name":"c"},"executable":"/t/examples/c"}
{"reason":"build-finished","success":true}"#;
        let expected = [PathBuf::from("/t/examples/a"), PathBuf::from("/t/examples/c")];
        assert_eq!(executables(messages).unwrap(), expected);
    }

    #[test]
    fn a_line_that_is_no_message_is_an_error() {
        assert!(executables("hello").unwrap_err().to_string().contains("hello"));
    }
}
