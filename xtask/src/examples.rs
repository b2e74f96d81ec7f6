//! Runs every example, to detect the ones that are broken.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use serde_json::Value;

use crate::built;
use crate::step::{self, Verdict};
use crate::workspace::Workspace;

/// Time limit for one example.
const LIMIT: Duration = Duration::from_secs(60);

/// Builds all examples of all crates and runs each; it must end in time and with exit code 0.
pub(crate) fn run_all(workspace: &Workspace) -> Result<Verdict> {
    // One build for all: `cargo run --example` would resolve features again for each package and rebuild.
    let messages = built::messages(workspace, "build --locked --workspace --all-features --examples")?;
    let examples: Vec<_> = messages.iter().filter_map(executable).collect();
    if examples.is_empty() {
        eprintln!("no examples found");
    }
    for example in examples {
        step::run_within(LIMIT, &mut workspace.command(example))?;
    }
    Ok(Verdict::Passed)
}

/// Returns the path of the executable, if the message is about an example.
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
        let found: Vec<_> = built::parse(messages).unwrap().iter().filter_map(executable).collect();
        assert_eq!(found, expected);
    }
}
