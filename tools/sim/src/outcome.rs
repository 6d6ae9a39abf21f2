//! Results of a scenario: tables, plots, and a paper's numbers next to ours.

use serde::Serialize;

use crate::engine::Work;

/// Role of a number in setting the model's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
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
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Calibrated => "calibrated",
            Self::Predicted => "predicted",
        }
    }
}

/// A paper's number next to the simulation's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Name of the quantity.
    pub what: String,
    /// Unit.
    pub unit: &'static str,
    /// The paper's number.
    pub paper: f64,
    /// The simulation's number; null if it has none.
    pub ours: Option<f64>,
    /// Role of the number in the calibration.
    pub basis: Basis,
    /// Reason for a difference.
    pub note: &'static str,
}

impl Comparison {
    /// Returns the relative difference: ours by the paper's, minus one.
    #[must_use]
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

/// A line of a plot.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// Name.
    pub name: String,
    /// Points in order of x.
    pub points: Vec<(f64, f64)>,
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
