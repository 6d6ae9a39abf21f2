//! The slack table: duration of a layer by the shape of its step, and costs of I/O.
//!
//! The paper looks windows up by input length and prefix length (section 3.3). A layer's duration
//! has a part proportional to the tokens of a step and one proportional to the tokens they attend
//! to; so a fit of three numbers explains most of it, after a few samples and for unseen shapes. A
//! cell of the table keeps the remainder for shapes that were seen.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cost::{CurveError, IoCosts};

/// Version of the table's file.
const VERSION: u32 = 1;
/// Samples per cell. Their median is the cell's time: a single outlier is ignored, and a change is
/// accepted after five samples.
const SAMPLES: usize = 9;
/// Maximum nanoseconds of a sample in a file: an hour. No layer takes as long.
const SAMPLE_MAX: u64 = 3_600_000_000_000;
/// Cells per octave, in each dimension of a shape.
const STEPS: f64 = 4.0;

/// Why a table cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TableError {
    /// The curve has no points, or its times do not rise with bytes.
    #[error(transparent)]
    Curve(#[from] CurveError),
    /// The file is no table.
    #[error("this is no slack table: {0}; profile again, or remove the file")]
    Syntax(#[from] serde_json::Error),
    /// The table has another format version.
    #[error("the slack table has version {found}, and {VERSION} can be read; profile again")]
    Version {
        /// Its version.
        found: u32,
    },
    /// The table is of another setting.
    #[error("the slack table is of {found:?}, and this is {wanted:?}; profile this setting")]
    Setting {
        /// The setting of the table.
        found: Box<Setting>,
        /// The requested setting.
        wanted: Box<Setting>,
    },
    /// An impossible value.
    #[error("the slack table has {what} of {value}; profile again, or remove the file")]
    Value {
        /// Its name.
        what: &'static str,
        /// The value.
        value: f64,
    },
}

/// The setting for which a table is valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// Name and parallelism of the model.
    pub model: String,
    /// Name of the GPU.
    pub gpu: String,
    /// Name and version of the engine.
    pub engine: String,
    /// Model numbers of the drives.
    pub drives: Vec<String>,
}

/// The shape of a step, as far as it determines its duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepShape {
    /// Computed tokens: the input, over all requests.
    pub tokens: u32,
    /// Attended tokens: for each computed token those before it.
    pub attended: u64,
    /// True when any request has more than one token.
    pub is_prefill: bool,
}

impl StepShape {
    /// Makes the shape of requests given as (tokens to compute, tokens cached): input length and
    /// prefix length.
    #[must_use]
    pub fn of(requests: impl IntoIterator<Item = (u32, u32)>) -> Self {
        let mut shape = Self::default();
        for (input, prefix) in requests {
            let (input, prefix) = (u64::from(input), u64::from(prefix));
            shape.tokens = shape.tokens.saturating_add(input as u32);
            let more = input * prefix + input * (input + 1) / 2;
            shape.attended = shape.attended.saturating_add(more);
            shape.is_prefill |= input > 1;
        }
        shape
    }

    /// Returns the terms of the fit, scaled to similar size.
    fn terms(self) -> Terms {
        [1.0, f64::from(self.tokens) / 1e3, self.attended as f64 / 1e7]
    }

    fn key(self) -> Key {
        key(self.is_prefill, self.tokens.into(), self.attended as f64)
    }
}

/// Key of a cell.
type Key = (bool, u8, u8);

fn key(is_prefill: bool, tokens: f64, attended: f64) -> Key {
    // The file's values are rounded: a value on a cell's border stays in the cell.
    let step = |number: f64| ((number.max(1.0).log2() + 1e-9) * STEPS) as u8;
    (is_prefill, step(tokens), step(attended / tokens.max(1.0)))
}

/// Constant, tokens and attended tokens.
type Terms = [f64; 3];

/// Samples of steps of similar shape.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Cell {
    is_prefill: bool,
    /// Mean of the samples' terms.
    terms: Terms,
    /// Nanoseconds of a layer, the latest last.
    samples: Vec<u64>,
    /// Median of the samples.
    #[serde(skip)]
    median: f64,
}

impl Cell {
    fn add(&mut self, terms: Terms, nanos: u64) {
        if self.samples.len() == SAMPLES {
            self.samples.remove(0);
        }
        self.samples.push(nanos);
        let part = 1.0 / self.samples.len() as f64;
        for (mean, term) in self.terms.iter_mut().zip(terms) {
            *mean += (term - *mean) * part;
        }
        self.find_median();
    }

    fn find_median(&mut self) {
        let mut sorted = [u64::MAX; SAMPLES];
        sorted[..self.samples.len()].copy_from_slice(&self.samples);
        sorted.sort_unstable();
        self.median = sorted[self.samples.len() / 2] as f64;
    }
}

/// Normal equations of the least squares: sums over cells, updated with each cell.
#[derive(Debug, Clone, Default)]
struct Sums {
    matrix: [[f64; 3]; 3],
    right: [f64; 3],
    updates: u32,
}

/// Number of updates after which the sums are recomputed, to limit rounding errors.
const ROUNDS: u32 = 1 << 12;

impl Sums {
    /// Adds a cell (`sign` 1) or removes it (-1), weighted for relative errors.
    fn add(&mut self, cell: &Cell, sign: f64) {
        let terms = cell.terms.map(|term| term / cell.median);
        for row in 0..3 {
            self.right[row] += sign * terms[row];
            (0..3).for_each(|column| self.matrix[row][column] += sign * terms[row] * terms[column]);
        }
    }
}

/// Nanoseconds per unit of each term.
#[derive(Debug, Clone, Copy, Default)]
struct Model([f64; 3]);

impl Model {
    /// Fits by the least relative error over cells, leaving out terms that would be negative.
    fn of(sums: &Sums) -> Self {
        /// Ridge penalty, for terms that the cells do not tell apart.
        const RIDGE: f64 = 1e-6;
        let Sums { mut matrix, mut right, .. } = *sums;
        // Scales the terms to the same size, whatever the GPU.
        let scale = [0, 1, 2].map(|at: usize| f64::sqrt(matrix[at][at]).max(f64::MIN_POSITIVE));
        for row in 0..3 {
            right[row] /= scale[row];
            (0..3).for_each(|column| matrix[row][column] /= scale[row] * scale[column]);
            matrix[row][row] += RIDGE;
        }
        let mut used = [true; 3];
        loop {
            let found = solve(matrix, right, used);
            let negative = (0..3).filter(|at| found[*at] < 0.0);
            match negative.min_by(|a, b| found[*a].total_cmp(&found[*b])) {
                Some(negative) => used[negative] = false,
                None => return Self([0, 1, 2].map(|at: usize| found[at] / scale[at])),
            }
        }
    }

    fn nanos(&self, terms: Terms) -> f64 {
        terms.iter().zip(self.0).map(|(term, weight)| term * weight).sum::<f64>().max(1.0)
    }
}

/// Solves a positive definite system for the unknowns in `used`; the others are zero.
fn solve(mut matrix: [[f64; 3]; 3], mut right: [f64; 3], used: [bool; 3]) -> [f64; 3] {
    for at in 0..3 {
        if !used[at] {
            (0..3).for_each(|other| (matrix[at][other], matrix[other][at]) = (0.0, 0.0));
            (matrix[at][at], right[at]) = (1.0, 0.0);
        }
    }
    for pivot in 0..3 {
        for row in (0..3).filter(|row| *row != pivot) {
            let factor = matrix[row][pivot] / matrix[pivot][pivot];
            let from = matrix[pivot];
            matrix[row].iter_mut().zip(from).for_each(|(to, from)| *to -= factor * from);
            right[row] -= factor * right[pivot];
        }
    }
    [0, 1, 2].map(|at: usize| right[at] / matrix[at][at])
}

/// Durations of layers and costs of I/O.
#[derive(Debug, Clone)]
pub struct SlackTable {
    setting: Setting,
    cells: BTreeMap<Key, Cell>,
    /// The fits of decode steps and of prefill steps.
    fits: [Fit; 2],
    /// I/O costs of the devices.
    pub costs: IoCosts,
}

#[derive(Debug, Clone, Default)]
struct Fit {
    sums: Sums,
    /// `None` before the first cell.
    model: Option<Model>,
}

/// The file format.
#[derive(Debug, Serialize, Deserialize)]
struct File {
    ripieno_slack: u32,
    setting: Setting,
    cells: Vec<Cell>,
    costs: IoCosts,
}

impl SlackTable {
    /// Makes an empty table.
    #[must_use]
    pub fn new(setting: Setting, costs: IoCosts) -> Self {
        Self { setting, cells: BTreeMap::new(), fits: Default::default(), costs }
    }

    /// Learns the duration of a layer of such a step, waits not included. Ignores a zero duration,
    /// which is a clock error.
    pub fn learn(&mut self, shape: StepShape, layer: Duration) {
        let nanos = u64::try_from(layer.as_nanos()).unwrap_or(u64::MAX);
        if nanos == 0 {
            return;
        }
        let cell = self.cells.entry(shape.key()).or_default();
        let Fit { sums, model } = &mut self.fits[usize::from(shape.is_prefill)];
        if !cell.samples.is_empty() {
            sums.add(cell, -1.0);
        }
        cell.is_prefill = shape.is_prefill;
        cell.add(shape.terms(), nanos);
        sums.add(cell, 1.0);
        sums.updates += 1;
        if sums.updates == ROUNDS {
            let cells = self.cells.values().filter(|cell| cell.is_prefill == shape.is_prefill);
            *sums = Sums::default();
            cells.for_each(|cell| sums.add(cell, 1.0));
        }
        *model = Some(Model::of(sums));
    }

    /// Returns the duration of a layer of such a step; `None` if no such step was seen.
    #[must_use]
    pub fn layer(&self, shape: StepShape) -> Option<Duration> {
        let model = self.fits[usize::from(shape.is_prefill)].model.as_ref()?;
        let terms = shape.terms();
        let nanos = match self.cells.get(&shape.key()) {
            // The shapes of a cell differ slightly.
            Some(cell) => cell.median * model.nanos(terms) / model.nanos(cell.terms),
            None => model.nanos(terms),
        };
        Some(Duration::from_nanos(nanos as u64))
    }

    /// Returns the duration by the fit alone, whether or not the shape was seen.
    #[must_use]
    pub fn fit(&self, shape: StepShape) -> Option<Duration> {
        let model = self.fits[usize::from(shape.is_prefill)].model.as_ref()?;
        Some(Duration::from_nanos(model.nanos(shape.terms()) as u64))
    }

    /// Returns the setting for which the table is valid.
    #[must_use]
    pub fn setting(&self) -> &Setting {
        &self.setting
    }

    /// Returns true when no layer was seen.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cells.is_empty()
    }

    /// Encodes the table as a file.
    #[must_use]
    pub fn to_json(&self) -> String {
        let (setting, costs) = (self.setting.clone(), self.costs.clone());
        let cells = self.cells.values().cloned().collect();
        let file = File { ripieno_slack: VERSION, setting, cells, costs };
        serde_json::to_string(&file).expect("numbers and names")
    }

    /// Decodes a file of the setting `wanted`.
    ///
    /// # Errors
    /// Returns [`TableError`] if the file has another version or setting, or is no table.
    pub fn from_json(text: &str, wanted: &Setting) -> Result<Self, TableError> {
        let table = Self::parse(text)?;
        if table.setting != *wanted {
            let (found, wanted) = (Box::new(table.setting), Box::new(wanted.clone()));
            return Err(TableError::Setting { found, wanted });
        }
        Ok(table)
    }

    /// Decodes a file of any setting.
    ///
    /// # Errors
    /// Returns [`TableError`] if the file has another version, or is no table.
    pub fn parse(text: &str) -> Result<Self, TableError> {
        #[derive(Deserialize)]
        struct Head {
            ripieno_slack: u32,
        }
        let found = serde_json::from_str::<Head>(text)?.ripieno_slack;
        if found != VERSION {
            return Err(TableError::Version { found });
        }
        let File { setting, cells, costs, .. } = serde_json::from_str(text)?;
        costs.check()?;
        let mut table = Self::new(setting, costs);
        for mut cell in cells {
            let [one, tokens, attended] = cell.terms;
            let value = |what, value| TableError::Value { what, value };
            if !(1..=SAMPLES).contains(&cell.samples.len()) {
                return Err(value("a cell's samples", cell.samples.len() as f64));
            }
            if let Some(bad) = cell.samples.iter().find(|it| !(1..=SAMPLE_MAX).contains(*it)) {
                return Err(value("a sample in nanoseconds", *bad as f64));
            }
            if let Some(bad) = cell.terms.into_iter().find(|term| !(0.0..1e15).contains(term)) {
                return Err(value("a cell's shape", bad));
            }
            if (one - 1.0).abs() > 1e-9 {
                return Err(value("a cell's constant", one));
            }
            let key = key(cell.is_prefill, tokens * 1e3, attended * 1e7);
            if table.cells.contains_key(&key) {
                return Err(value("a second cell of tokens", tokens * 1e3));
            }
            cell.find_median();
            let Fit { sums, model } = &mut table.fits[usize::from(cell.is_prefill)];
            sums.add(&cell, 1.0);
            *model = Some(Model::of(sums));
            table.cells.insert(key, cell);
        }
        Ok(table)
    }
}

#[cfg(test)]
mod tests;
