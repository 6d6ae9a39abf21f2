//! Results of a scenario: tables, plots, and a paper's numbers next to ours.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engine::Work;

/// Role of a number in setting the model's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Basis {
    /// A parameter itself, or arithmetic of the paper's own numbers: nothing is simulated.
    Input,
    /// Used to calibrate the model: agreement proves nothing.
    Calibrated,
    /// Not used.
    Predicted,
}

impl Basis {
    /// Returns its name in tables.
    pub(crate) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// A paper's number next to the simulation's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Name of the quantity.
    pub what: String,
    /// Unit.
    pub unit: String,
    /// The paper's number.
    pub paper: f64,
    /// The simulation's number; null if it has none.
    pub ours: Option<f64>,
    /// Role of the number in the calibration.
    pub basis: Basis,
    /// Reason for a difference.
    pub note: String,
}

impl Comparison {
    /// Returns the relative difference: ours by the paper's, minus one.
    pub fn difference(&self) -> Option<f64> {
        self.ours.map(|ours| ours / self.paper - 1.0)
    }
}

/// A table of texts, with the first column left-aligned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Table {
    /// Title.
    pub title: String,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// Rows, with one text per column.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table.
    pub fn new<C: Into<String>>(
        title: impl Into<String>,
        columns: impl IntoIterator<Item = C>,
        rows: impl IntoIterator<Item = Vec<String>>,
    ) -> Self {
        let columns = columns.into_iter().map(Into::into).collect();
        Self { title: title.into(), columns, rows: rows.into_iter().collect() }
    }
}

/// Formats a number with at least three digits.
pub(crate) fn number(number: f64) -> String {
    let digits = if number.abs() >= 100.0 {
        0
    } else if number.abs() >= 10.0 {
        1
    } else {
        2
    };
    format!("{number:.digits$}")
}

/// Formats bytes in the largest unit that gives a whole number; else in gigabytes.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] =
        [("TiB", 1 << 40), ("GiB", 1 << 30), ("TB", 1_000_000_000_000), ("GB", 1_000_000_000)];
    match UNITS.iter().find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit)) {
        Some((name, unit)) => format!("{} {name}", bytes / unit),
        None => format!("{} GB", number(bytes as f64 / 1e9)),
    }
}

/// Formats a time with all its digits: 2.5us.
pub(crate) fn time(time: Duration) -> String {
    format!("{time:?}").replace('µ', "u")
}

/// A line of a plot.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// Name.
    pub name: String,
    /// Points in order of x.
    pub points: Vec<(f64, f64)>,
}

impl Line {
    /// Creates a line.
    pub fn new(name: impl Into<String>, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        Self { name: name.into(), points: points.into_iter().collect() }
    }
}

/// A plot.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plot {
    /// Title.
    pub title: String,
    /// Name of the x axis, with its unit.
    pub x: String,
    /// Name of the y axis, with its unit.
    pub y: String,
    /// Lines.
    pub lines: Vec<Line>,
}

impl Plot {
    /// Creates a plot.
    pub fn new(
        title: impl Into<String>,
        x: impl Into<String>,
        y: impl Into<String>,
        lines: impl IntoIterator<Item = Line>,
    ) -> Self {
        let lines = lines.into_iter().collect();
        Self { title: title.into(), x: x.into(), y: y.into(), lines }
    }
}

/// A period of work.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bar {
    /// Its row, from 0 at the top.
    pub row: u32,
    /// Start.
    pub from: f64,
    /// End.
    pub to: f64,
}

/// Work over time, in rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gantt {
    /// Title.
    pub title: String,
    /// Name of the x axis, with its unit.
    pub x: String,
    /// Name of the rows.
    pub y: String,
    /// Bars by kind of work.
    pub bars: Vec<(Work, Vec<Bar>)>,
}

/// Results of a scenario.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Name of the scenario.
    pub name: String,
    /// Title of the scenario.
    pub title: String,
    /// Parameters of the simulation, to reproduce it.
    pub setting: Vec<String>,
    /// Tables.
    pub tables: Vec<Table>,
    /// Comparisons with the paper's numbers.
    pub comparisons: Vec<Comparison>,
    /// Plots.
    pub plots: Vec<Plot>,
    /// Timelines.
    pub gantts: Vec<Gantt>,
    /// Conclusions.
    pub notes: Vec<String>,
}
