//! What a scenario found: tables, plots, and the numbers of a paper beside ours.

use serde::Serialize;

use crate::engine::Work;

/// Whether a number was used to set the model's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Basis {
    /// Yes: that it agrees says nothing.
    Calibrated,
    /// No.
    Predicted,
}

/// A number of a paper, and what the simulation has for it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// What it is.
    pub what: String,
    /// Its unit.
    pub unit: &'static str,
    /// The paper's.
    pub paper: f64,
    /// The simulation's; null where it has none.
    pub ours: Option<f64>,
    /// Whether it was free to differ.
    pub basis: Basis,
    /// Why it differs, where it does.
    pub note: &'static str,
}

impl Comparison {
    /// Ours by the paper's, less one.
    #[must_use]
    pub fn difference(&self) -> Option<f64> {
        self.ours.map(|ours| ours / self.paper - 1.0)
    }
}

/// A table: texts, the first column to the left.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Table {
    /// What it shows.
    pub title: String,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// As many texts each.
    pub rows: Vec<Vec<String>>,
}

/// A line of a plot.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// Its name.
    pub name: String,
    /// Its points, by x.
    pub points: Vec<(f64, f64)>,
}

/// A plot.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plot {
    /// What it shows.
    pub title: String,
    /// Name of the x axis, with its unit.
    pub x: String,
    /// Name of the y axis, with its unit.
    pub y: String,
    /// Its lines.
    pub lines: Vec<Line>,
}

/// Something that is done for a while.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bar {
    /// Its row, from 0 at the top.
    pub row: u32,
    /// When it begins.
    pub from: f64,
    /// When it has ended.
    pub to: f64,
}

/// What is done when, row by row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gantt {
    /// What it shows.
    pub title: String,
    /// Name of the x axis, with its unit.
    pub x: String,
    /// Name of the rows.
    pub y: String,
    /// What is done, by its kind.
    pub bars: Vec<(Work, Vec<Bar>)>,
}

/// What a scenario found.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// The scenario.
    pub name: String,
    /// What it is about.
    pub title: String,
    /// What was simulated: parameters, for who wants to do it again.
    pub setting: Vec<String>,
    /// Numbers.
    pub tables: Vec<Table>,
    /// The paper's numbers.
    pub comparisons: Vec<Comparison>,
    /// Plots.
    pub plots: Vec<Plot>,
    /// What is done when.
    pub gantts: Vec<Gantt>,
    /// What to make of it.
    pub notes: Vec<String>,
}
