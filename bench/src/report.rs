//! Results for people and scripts.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, anyhow};
use comfy_table::{Cell, Table, presets};
use ripieno_sim::{Plot, svg};
use serde::Serialize;

use crate::sample::{Samples, Sides};

/// A ratio of two measurements.
#[derive(Debug, Serialize)]
pub struct Ratio {
    /// Name of the measurement.
    pub name: String,
    /// The measured value.
    pub value: f64,
    /// The value to compare with.
    pub against: f64,
    /// Source of the other value: this run, or a publication.
    pub source: &'static str,
    /// Unit of both.
    pub unit: &'static str,
    /// `value / against`.
    pub ratio: f64,
    /// The aim for the ratio.
    pub aim: Aim,
    /// Lowest and highest ratio of a single round; `None` for a published value.
    pub spread: Option<(f64, f64)>,
}

/// Target of a ratio.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Aim {
    /// At least the first value; preferably the second.
    AtLeast(f64, f64),
    /// At most this value.
    AtMost(f64),
    /// No target.
    Open,
}

impl Aim {
    fn text(self) -> String {
        match self {
            Self::AtLeast(floor, aim) => format!(">= {aim}, not under {floor}"),
            Self::AtMost(limit) => format!("<= {limit}"),
            Self::Open => "-".into(),
        }
    }

    fn verdict(self, ratio: f64) -> &'static str {
        match self {
            Self::AtLeast(_, aim) if ratio >= aim => "met",
            Self::AtLeast(floor, _) if ratio >= floor => "between",
            Self::AtMost(limit) if ratio <= limit => "met",
            Self::Open => "",
            _ => "missed",
        }
    }
}

impl Ratio {
    /// Returns the ratio of `value` to `against`.
    pub fn new(name: impl Into<String>, unit: &'static str, value: f64, against: f64) -> Self {
        Self {
            name: name.into(),
            value,
            against,
            source: "this run",
            unit,
            ratio: if against > 0.0 { value / against } else { f64::NAN },
            aim: Aim::Open,
            spread: None,
        }
    }

    /// Returns the median of the ratios in each round, with the lowest and highest: disturbances of
    /// a round affect both of its sides.
    pub fn rounds(name: impl Into<String>, unit: &'static str, sides: &Sides) -> Self {
        let ratio = sides.ours.ratios(&sides.theirs).median();
        Self { ratio, ..Self::sides(name, unit, sides) }
    }

    /// Returns the ratio of the medians, with the lowest and highest ratio of a round.
    pub fn sides(name: impl Into<String>, unit: &'static str, sides: &Sides) -> Self {
        let Sides { ours, theirs } = sides;
        Self::new(name, unit, ours.median(), theirs.median()).spread(&ours.ratios(theirs))
    }

    /// Adds the lowest and highest ratio of the rounds.
    pub fn spread(self, rounds: &Samples) -> Self {
        Self { spread: Some((rounds.quantile(0.0), rounds.quantile(1.0))), ..self }
    }

    /// Sets the target.
    pub fn aim(self, aim: Aim) -> Self {
        Self { aim, ..self }
    }

    /// Marks the other value as published.
    pub fn published(self, source: &'static str) -> Self {
        Self { source, ..self }
    }
}

/// Results of one benchmark.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Name of the benchmark.
    pub benchmark: &'static str,
    /// Number of available processors.
    pub processors: usize,
    /// The GPU and its driver; `None` for a benchmark without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// True if a mock ran the kernels: the code was executed, but the figures are meaningless.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub mock: bool,
    /// The ratios.
    pub ratios: Vec<Ratio>,
    /// Other counts, by name.
    pub counts: Vec<(String, f64)>,
    /// Paths of the plots.
    pub plots: Vec<String>,
    /// Notes needed to interpret the figures.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Failed parts, with the reasons.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<String>,
}

impl Report {
    /// Returns an empty report.
    pub fn new(benchmark: &'static str) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self { benchmark, processors, ..Self::default() }
    }

    /// Draws a plot into a file of this directory, which is made.
    pub fn plot(&mut self, directory: &Path, file: &str, plot: &Plot) -> Result<()> {
        let path = directory.join(file);
        let name = path.display().to_string();
        let svg = svg(plot).map_err(|error| anyhow!("drawing {name}: {error}"))?;
        fs::create_dir_all(directory)
            .with_context(|| format!("making the folder {}", directory.display()))?;
        fs::write(&path, svg).with_context(|| format!("writing {name}"))?;
        self.plots.push(name);
        Ok(())
    }

    /// Prints progress on stderr: a later measurement may not end.
    #[allow(clippy::print_stderr, reason = "for who waits, and for the log")]
    pub fn progress(&self, text: &str) {
        eprintln!("{}: {text}", self.benchmark);
    }

    /// Prints to stdout.
    #[allow(clippy::print_stdout, reason = "the result is what the program prints")]
    pub fn print(&self, json: bool) -> Result<()> {
        if json {
            println!("{}", serde_json::to_string(self)?);
            return Ok(());
        }
        let mut table = Table::new();
        table.load_preset(presets::UTF8_FULL_CONDENSED);
        table.set_header(["measured", "ours", "against", "unit", "ratio", "spread", "aim", ""]);
        for ratio in &self.ratios {
            let spread = ratio.spread.map_or("-".into(), |(a, b)| format!("{a:.2} - {b:.2}"));
            table.add_row([
                Cell::new(&ratio.name),
                Cell::new(format!("{:.2}", ratio.value)),
                Cell::new(format!("{:.2} ({})", ratio.against, ratio.source)),
                Cell::new(ratio.unit),
                Cell::new(format!("{:.2}", ratio.ratio)),
                Cell::new(spread),
                Cell::new(ratio.aim.text()),
                Cell::new(ratio.aim.verdict(ratio.ratio)),
            ]);
        }
        println!("{table}");
        for (name, value) in &self.counts {
            println!("{name}: {value:.1}");
        }
        if let Some(gpu) = &self.gpu {
            println!("gpu: {gpu}");
        }
        println!("processors: {}; medians of interleaved rounds", self.processors);
        for note in &self.notes {
            println!("note: {note}");
        }
        for failed in &self.failed {
            println!("FAILED: {failed}");
        }
        if self.mock {
            println!(
                "MOCK: a stand-in ran the kernels on this machine's processor; no figure above \
                 means anything"
            );
        }
        for plot in &self.plots {
            println!("plot: {plot}");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
