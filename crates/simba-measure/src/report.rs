//! The report: a table for people, JSON for programs.

use std::fmt;

use serde_json::{Value, json};

use crate::Effort;
use crate::target::Target;

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unit {
    /// Operations per second.
    PerSecond,
    /// Microseconds.
    Micros,
    /// Milliseconds.
    Millis,
    /// Bytes of memory.
    Bytes,
    /// A number without a unit.
    Count,
    /// Processor time in cores.
    Cores,
}

impl Unit {
    fn as_str(self) -> &'static str {
        match self {
            Self::PerSecond => "/s",
            Self::Micros => "µs",
            Self::Millis => "ms",
            Self::Bytes => "B",
            Self::Count => "",
            Self::Cores => "cores",
        }
    }

    fn show(self, value: f64) -> String {
        let digits = match self {
            Self::PerSecond | Self::Bytes | Self::Count => 0,
            Self::Micros | Self::Millis => 1,
            Self::Cores => 3,
        };
        format!("{value:.digits$} {}", self.as_str()).trim_end().to_owned()
    }
}

/// One figure, with its floor if there is one.
#[derive(Clone, Debug)]
pub struct Row {
    target: &'static str,
    measure: String,
    unit: Unit,
    ours: f64,
    floor: Option<f64>,
    goal: &'static str,
}

impl Row {
    /// Returns a figure without a floor.
    pub fn new(target: &dyn Target, measure: impl Into<String>, unit: Unit, ours: f64) -> Self {
        Self { target: target.name(), measure: measure.into(), unit, ours, floor: None, goal: "" }
    }

    /// Sets the floor: the same measurement without Simba.
    #[must_use]
    pub fn floor(self, floor: f64) -> Self {
        Self { floor: Some(floor), ..self }
    }

    /// Sets the goal of the design, as text: no measurement passes or fails.
    #[must_use]
    pub fn goal(self, goal: &'static str) -> Self {
        Self { goal, ..self }
    }

    /// Returns the figure and its floor in another unit.
    #[must_use]
    pub fn turned(&self, measure: &str, unit: Unit, convert: impl Fn(f64) -> f64) -> Self {
        let floor = self.floor.map(&convert);
        Self { measure: measure.to_owned(), unit, ours: convert(self.ours), floor, goal: "", ..self.clone() }
    }

    fn ratio(&self) -> Option<f64> {
        self.floor.filter(|floor| *floor != 0.0).map(|floor| self.ours / floor)
    }

    /// Returns the cells of the table: measure, ours, floor, ratio. A cell without a value is empty.
    #[must_use]
    pub fn cells(&self) -> [String; 4] {
        let ratio = |ratio| if ratio < 10.0 { format!("{ratio:.2}") } else { format!("{ratio:.0}") };
        [
            self.measure.clone(),
            self.unit.show(self.ours),
            self.floor.map_or_else(String::new, |floor| self.unit.show(floor)),
            self.ratio().map_or_else(String::new, ratio),
        ]
    }

    /// Returns the JSON object: `target`, `measure`, `unit`, `ours`, `floor`, `ratio`. A field without a value is null.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "target": self.target,
            "measure": self.measure,
            "unit": self.unit.as_str(),
            "ours": self.ours,
            "floor": self.floor,
            "ratio": self.ratio(),
        })
    }
}

/// The figures of a run.
#[derive(Debug)]
pub struct Report {
    effort: Effort,
    rows: Vec<Row>,
    notes: Vec<String>,
}

impl Report {
    /// Returns an empty report.
    #[must_use]
    pub fn new(effort: Effort) -> Self {
        Self { effort, rows: Vec::new(), notes: Vec::new() }
    }

    /// Adds rows.
    pub fn add(&mut self, rows: Vec<Row>) {
        self.rows.extend(rows);
    }

    /// Adds the note of a store, if it has one.
    pub fn note(&mut self, target: &dyn Target) {
        self.notes.extend(target.note().map(|note| format!("{}: {note}", target.name())));
    }

    /// Returns the report as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(Row::json).collect();
        json!({ "quick": self.effort == Effort::Quick, "rows": rows, "notes": self.notes })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = ["store", "measure", "ours", "floor", "ratio", "goal"].map(str::to_owned);
        let table: Vec<_> = std::iter::once(head).chain(self.rows.iter().map(line)).collect();
        write_table(f, &table)?;
        f.write_str("\nratio: ours to the floor, measured alternately in this run; it is more reliable than either figure.\n")?;
        f.write_str("bytes: growth of the resident set in whole pages, including the allocator, in a separate process.\n")?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}."))
    }
}

fn line(row: &Row) -> [String; 6] {
    let [measure, ours, floor, ratio] = row.cells();
    [row.target.to_owned(), measure, ours, floor, ratio, row.goal.to_owned()]
}

/// Writes aligned columns: text to the left, the three columns of figures to the right.
fn write_table<const N: usize>(f: &mut fmt::Formatter<'_>, table: &[[String; N]]) -> fmt::Result {
    let mut widths = [0; N];
    for row in table {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    for row in table {
        let mut line = String::new();
        for (n, (cell, width)) in row.iter().zip(widths).enumerate() {
            let figure = (2..5).contains(&n);
            line += &if figure { format!("{cell:>width$}  ") } else { format!("{cell:<width$}  ") };
        }
        writeln!(f, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::tests::Memory;

    fn report() -> Report {
        let memory = &Memory;
        let mut report = Report::new(Effort::Quick);
        report.add(vec![
            Row::new(memory, "pairs", Unit::PerSecond, 90.0).floor(120.0).goal("ratio >= 0.9"),
            Row::new(memory, "late renewals", Unit::Count, 0.0),
            Row::new(memory, "wait", Unit::Micros, 1234.56).floor(10.0),
        ]);
        report
    }

    #[test]
    fn columns_are_aligned_and_lines_have_no_trailing_spaces() {
        let text = report().to_string();
        let lines: Vec<&str> = text.lines().take(4).collect();
        assert_eq!(
            lines,
            [
                "store   measure             ours    floor  ratio  goal",
                "memory  pairs              90 /s   120 /s   0.75  ratio >= 0.9",
                "memory  late renewals          0",
                "memory  wait           1234.6 µs  10.0 µs    123",
            ]
        );
    }

    #[test]
    fn figures_in_json_are_not_rounded() {
        let json = report().json();
        assert_eq!(json["quick"], true);
        assert_eq!(json["rows"][0]["ratio"], 0.75);
        assert_eq!(json["rows"][1]["floor"], Value::Null);
        assert_eq!(json["rows"][2]["ours"], 1234.56);
    }
}
