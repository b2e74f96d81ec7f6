//! A history as readable text.

use std::fmt::Write as _;

use super::{Event, Violation, What};

/// Renders one line per event: time, contender, event; and the violations between them.
pub(super) fn render(events: &[Event], violations: &[Violation]) -> String {
    let width = events.iter().map(|event| event.who.len()).max().unwrap_or(0);
    let mut text = String::new();
    let mut violations = violations.iter().peekable();
    for event in events {
        while let Some(violation) = violations.next_if(|violation| violation.at < event.at) {
            let _ = writeln!(text, "{:>14}  !!! {violation}", "");
        }
        let Event { at, who, what } = event;
        let _ = writeln!(text, "{:>12.6} s  {who:<width$}  {}", at.as_secs_f64(), describe(what));
    }
    for violation in violations {
        let _ = writeln!(text, "{:>14}  !!! {violation}", "");
    }
    text
}

fn describe(what: &What) -> String {
    match what {
        What::Acquired { token } => format!("acquired, token {token}"),
        What::Expiring => "expiring".into(),
        What::Lost { loss, valid_until } => {
            format!("lost: {loss}; was valid until {:.6} s", valid_until.as_secs_f64())
        }
        What::Revived { token } => format!("valid again under token {token}"),
        What::WorkStarted { token } => format!("work starts under token {token}"),
        What::WorkEnded => "work ends".into(),
        What::Tick { token, .. } => format!("tick under token {token}"),
        What::Paused => "process is paused".into(),
        What::Resumed => "process continues".into(),
        What::Crashed => "process is killed".into(),
        What::Note(note) => note.clone(),
    }
}
