//! The figures, for people and for programs.

use std::fmt;

use serde_json::{Value, json};

use crate::Effort;
use crate::target::Target;

/// What a figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unit {
    /// So many a second.
    PerSecond,
    /// Millionths of a second.
    Micros,
    /// Thousandths of a second.
    Millis,
    /// Of memory.
    Bytes,
    /// Things.
    Count,
    /// Of one core.
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

/// One figure, beside its floor.
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
    /// A figure without a floor.
    pub fn new(target: &dyn Target, measure: impl Into<String>, unit: Unit, ours: f64) -> Self {
        Self { target: target.name(), measure: measure.into(), unit, ours, floor: None, goal: "" }
    }

    /// The same, measured with nothing of ours in between.
    #[must_use]
    pub fn floor(self, floor: f64) -> Self {
        Self { floor: Some(floor), ..self }
    }

    /// What the design asks for, in words: nothing here passes or fails.
    #[must_use]
    pub fn goal(self, goal: &'static str) -> Self {
        Self { goal, ..self }
    }

    /// The same figure in another unit, of both sides.
    #[must_use]
    pub fn turned(&self, measure: &str, unit: Unit, turn: impl Fn(f64) -> f64) -> Self {
        let floor = self.floor.map(&turn);
        Self { measure: measure.to_owned(), unit, ours: turn(self.ours), floor, goal: "", ..self.clone() }
    }

    fn ratio(&self) -> Option<f64> {
        self.floor.filter(|floor| *floor != 0.0).map(|floor| self.ours / floor)
    }

    /// For people: what was measured, ours, the floor, the ratio; empty where there is none.
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

    /// For programs: `target`, `measure`, `unit`, `ours`, `floor`, `ratio`; what there is not is null.
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

/// All figures of a run.
#[derive(Debug)]
pub struct Report {
    effort: Effort,
    rows: Vec<Row>,
    notes: Vec<String>,
}

impl Report {
    /// None yet.
    #[must_use]
    pub fn new(effort: Effort) -> Self {
        Self { effort, rows: Vec::new(), notes: Vec::new() }
    }

    /// Takes these in too.
    pub fn add(&mut self, rows: Vec<Row>) {
        self.rows.extend(rows);
    }

    /// Adds what a reader has to know about a store.
    pub fn note(&mut self, target: &dyn Target) {
        self.notes.extend(target.note().map(|note| format!("{}: {note}", target.name())));
    }

    /// All of them for programs.
    #[must_use]
    pub fn json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(Row::json).collect();
        json!({ "quick": self.effort == Effort::Quick, "rows": rows, "notes": self.notes })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = ["store", "measure", "ours", "floor", "ratio", "to reach"].map(str::to_owned);
        let table: Vec<_> = std::iter::once(head).chain(self.rows.iter().map(line)).collect();
        write_table(f, &table)?;
        f.write_str("\nratio: ours to the floor, both measured in turns in this run; trust it more than either figure.\n")?;
        f.write_str("bytes: growth of the resident set in whole pages, allocator included, in a process of its own.\n")?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}."))
    }
}

fn line(row: &Row) -> [String; 6] {
    let [measure, ours, floor, ratio] = row.cells();
    [row.target.to_owned(), measure, ours, floor, ratio, row.goal.to_owned()]
}

/// Aligned columns: words to the left, the three columns of figures to the right.
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
    fn columns_are_aligned_and_lines_have_no_tail() {
        let text = report().to_string();
        let lines: Vec<&str> = text.lines().take(4).collect();
        assert_eq!(
            lines,
            [
                "store   measure             ours    floor  ratio  to reach",
                "memory  pairs              90 /s   120 /s   0.75  ratio >= 0.9",
                "memory  late renewals          0",
                "memory  wait           1234.6 µs  10.0 µs    123",
            ]
        );
    }

    #[test]
    fn a_program_gets_the_figures_as_they_are() {
        let json = report().json();
        assert_eq!(json["quick"], true);
        assert_eq!(json["rows"][0]["ratio"], 0.75);
        assert_eq!(json["rows"][1]["floor"], Value::Null);
        assert_eq!(json["rows"][2]["ours"], 1234.56);
    }
}
