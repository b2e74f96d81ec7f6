//! `simba status` and `simba ls`.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use simba_mutex::operate::MutexRecord;
use simba_mutex::{MutexName, Simba};

use crate::args::{FormatArgs, StatusArgs};
use crate::failure::Outcome;
use crate::output::{Paint, Table, print};

/// Prints the named mutexes, or all.
pub(crate) async fn status(simba: &Simba, args: &StatusArgs) -> Outcome {
    let operate = simba.operate()?;
    let mut records = Vec::new();
    for name in &args.mutexes {
        records.push(operate.read(&MutexName::new(name)?).await?);
    }
    if args.mutexes.is_empty() {
        records = operate.list().await?;
    }
    show(&records, args.format)
}

/// Prints all mutexes in the store.
pub(crate) async fn ls(simba: &Simba, format: FormatArgs) -> Outcome {
    show(&simba.operate()?.list().await?, format)
}

fn show(records: &[MutexRecord], format: FormatArgs) -> Outcome {
    if format.json {
        let records: Vec<Value> = records.iter().map(to_json).collect();
        return print(&format!("{:#}\n", Value::from(records)));
    }
    let paint = Paint::for_stdout();
    let mut table = Table::new(["mutex", "state", "owner", "token", "held for", "left", "waiters"]);
    for record in records {
        table.push(cells(record, paint));
    }
    print(&table.to_string())
}

fn cells(record: &MutexRecord, paint: Paint) -> [String; 7] {
    let held_for = record.acquired_at.and_then(|at| SystemTime::now().duration_since(at).ok());
    let state = match (&record.owner, record.in_transition) {
        (None, _) => paint.green("free"),
        (Some(_), Some(true)) => paint.yellow("held, late"),
        (Some(_), _) => paint.red("held"),
    };
    [
        record.mutex.to_string(),
        state,
        record.owner.as_ref().map_or_else(dash, ToString::to_string),
        record.token.map_or_else(dash, |token| token.get().to_string()),
        held_for.map_or_else(dash, brief),
        record.remaining.map_or_else(dash, brief),
        record.waiters.map_or_else(dash, |waiters| waiters.to_string()),
    ]
}

fn dash() -> String {
    "-".to_owned()
}

/// Formats a duration with at most two units and no needless digits.
pub(crate) fn brief(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{:.1}s", time.as_secs_f64()),
        60..3_600 => format!("{}m {}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h {}m", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{}d {}h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

fn to_json(record: &MutexRecord) -> Value {
    let owner = record.owner.as_ref();
    json!({
        "mutex": record.mutex.as_str(),
        "state": if owner.is_some() { "held" } else { "free" },
        "owner": owner.map(|owner| owner.as_str()),
        "host": owner.and_then(|owner| owner.host()),
        "pid": owner.and_then(|owner| owner.pid()),
        "token": record.token.map(|token| token.get()),
        "acquired_at": record.acquired_at.map(|at| humantime::format_rfc3339_millis(at).to_string()),
        "expires_in_ms": record.remaining.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
        "in_transition": record.in_transition,
        "waiters": record.waiters,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duration_has_at_most_two_units() {
        let brief = |seconds: f64| super::brief(Duration::from_secs_f64(seconds));
        assert_eq!(brief(0.04), "0.0s");
        assert_eq!(brief(9.96), "10.0s");
        assert_eq!(brief(61.0), "1m 1s");
        assert_eq!(brief(7_265.0), "2h 1m");
        assert_eq!(brief(90_000.0), "1d 1h");
    }

    #[test]
    fn unknown_value_is_null() {
        let json = to_json(&MutexRecord::free(MutexName::new("orders").unwrap()));
        assert_eq!((json["state"].as_str(), json["mutex"].as_str()), (Some("free"), Some("orders")));
        let unknown =
            ["owner", "host", "pid", "token", "acquired_at", "expires_in_ms", "in_transition", "waiters"];
        assert!(unknown.iter().all(|field| json.get(field) == Some(&Value::Null)), "{json}");
    }
}
