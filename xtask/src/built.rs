//! The output of a build, as cargo reports it.

use anyhow::{Context, Result};
use serde_json::Value;

use crate::step;
use crate::workspace::Workspace;

/// Builds, with `words` as the arguments of cargo, separated by spaces. Returns cargo's messages.
pub(crate) fn messages(workspace: &Workspace, words: &str) -> Result<Vec<Value>> {
    let words = format!("{words} --message-format json-render-diagnostics");
    parse(&step::capture(&mut workspace.cargo(&words))?)
}

/// Parses one JSON object per line.
pub(crate) fn parse(messages: &str) -> Result<Vec<Value>> {
    let message = |line| serde_json::from_str(line).with_context(|| format!("not JSON: {line}"));
    messages.lines().map(message).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_that_is_no_message_is_an_error() {
        assert!(parse("{}\nhello").unwrap_err().to_string().contains("hello"));
    }
}
