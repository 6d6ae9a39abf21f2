//! Results of a command: rows of named values, in JSON, as tables, or as a page with plots.

use std::collections::BTreeMap;

use ripieno_sim::{Line, Outcome, Plot, Table};
use ripieno_stack::{Executor, Placement};
use serde::{Serialize, Serializer};

use super::{PageFlags, check};
use crate::config::OutputFlags;
use crate::devices::{Devices, EmuChoice};
use crate::interrupt::Interrupt;
use crate::machine;
use crate::outcome::{self, Fact, Facts, Value, shown};
use crate::sim::write_page;
use crate::table::{fitted, fold, row, table};
use crate::terminal;

/// Spread above which a measurement is noisy.
const NOISY: f64 = 0.2;

/// A measurement.
#[derive(Debug)]
pub(super) struct Row {
    /// Parameters.
    pub(super) of: Vec<Fact>,
    pub(super) figures: Vec<Fact>,
    /// Largest sample less the smallest, relative to the median.
    pub(super) spread: f64,
    /// Problems; a row with any shows no figures.
    pub(super) wrong: Vec<String>,
}

impl Row {
    fn all(&self) -> Vec<Fact> {
        let mut all = self.of.clone();
        if self.wrong.is_empty() {
            all.extend(self.figures.iter().cloned());
            all.push(("spread", "spread", Value::Percent(self.spread)));
        }
        all
    }

    fn heads(&self) -> Vec<&'static str> {
        shown(&self.of).chain(shown(&self.figures)).map(|it| it.1).collect()
    }

    pub(super) fn is_good(&self) -> bool {
        self.wrong.is_empty()
    }

    pub(super) fn name(&self) -> String {
        self.name_without("")
    }

    /// Returns the name of all parameters but the one with this JSON key.
    fn name_without(&self, key: &str) -> String {
        let parts = shown(&self.of).filter(|it| it.0 != key).map(|(_, head, value)| match value {
            Value::Text(text) => text.clone(),
            _ => format!("{head} {}", value.text()),
        });
        parts.collect::<Vec<_>>().join(", ")
    }

    /// Returns a value by its JSON key; `None` in a row without it, or that shows no figures.
    pub(super) fn value(&self, key: &str) -> Option<Value> {
        Some(self.all().into_iter().find(|it| it.0 == key)?.2)
    }

    /// Returns true if the text with a JSON key is this one.
    pub(super) fn has(&self, key: &str, text: &str) -> bool {
        self.value(key).is_some_and(|value| value.text() == text)
    }

    /// Returns the number with a JSON key; `None` as for [`Row::value`].
    pub(super) fn number(&self, key: &str) -> Option<f64> {
        serde_json::to_value(self.value(key)?).ok()?.as_f64()
    }
}

impl Serialize for Row {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut all = self.all();
        all.push(("wrong", "", Value::Json(serde_json::json!(self.wrong))));
        Facts(all).serialize(serializer)
    }
}

/// Returns the largest sample less the smallest, relative to the median.
pub(super) fn spread(samples: &[f64]) -> f64 {
    let most = samples.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let least = samples.iter().copied().fold(f64::INFINITY, f64::min);
    let median = ripieno_sim::median(samples.to_vec()).unwrap_or(0.0);
    if median > 0.0 { (most - least) / median } else { 0.0 }
}

/// Setting of all rows. Field names are the JSON keys.
#[derive(Debug, Serialize)]
pub(super) struct Setting {
    pub(super) device: String,
    pub(super) queues_per_device: u16,
    /// Executor of the I/O kernel.
    pub(super) executor: String,
    /// Route of the data: direct, staged or host.
    pub(super) path: &'static str,
    pub(super) memory: String,
    /// Bytes of a logical block; null for drives that a store has.
    pub(super) lba_bytes: Option<u32>,
    /// True if the devices' SMART logs count what is moved.
    #[serde(skip)]
    pub(super) is_logged: bool,
    /// Of the media's files; null for other media.
    pub(super) file_system: Option<String>,
    /// More about the I/O kernel, and about the time.
    #[serde(skip)]
    pub(super) notes: Vec<(&'static str, String)>,
}

impl Setting {
    pub(super) fn of(
        devices: &Devices,
        queues_per_device: u16,
        executor: Executor,
        placement: &Placement,
    ) -> Self {
        Self {
            device: devices.name(),
            queues_per_device,
            executor: executor.to_string(),
            path: placement.route.name(),
            memory: placement.memory(),
            lba_bytes: devices.emu().map(|emu| emu.lba_bytes),
            is_logged: check::is_logged(executor, devices.emu().is_none()),
            file_system: devices.emu().and_then(EmuChoice::dir).and_then(machine::file_system),
            notes: Vec::new(),
        }
    }

    fn rows(&self) -> Vec<[String; 3]> {
        let Self { device, queues_per_device, executor, path, memory, notes, .. } = self;
        let mut rows = vec![
            row("device", "", device),
            row("queues", queues_per_device, "on each device"),
            row("I/O kernel", executor, ""),
            row("path", path, format!("memory: {memory}")),
        ];
        rows.extend(notes.iter().map(|(name, note)| row(name, "", note)));
        rows
    }
}

/// Returns the rows of a setting as lines.
fn listed(rows: &[[String; 3]]) -> Vec<String> {
    let line = |[name, value, note]: &[String; 3]| {
        let comma = if value.is_empty() || note.is_empty() { "" } else { ", " };
        format!("{name}: {value}{comma}{note}")
    };
    rows.iter().map(line).collect()
}

/// Returns the head and the cells of rows with the same columns.
fn cells(rows: &[Row]) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let mut header = rows[0].heads();
    header.push("spread");
    let values = rows.iter().map(|row| {
        let mut values: Vec<Value> = shown(&row.all()).map(|it| it.2.clone()).collect();
        if !row.wrong.is_empty() {
            values.push(Value::Text("failed".to_owned()));
        }
        values.resize(header.len(), Value::Text(String::new()));
        values
    });
    let cells = outcome::cells(&values.collect::<Vec<_>>());
    (header, cells)
}

/// An axis of a plot: JSON key of the values, label, and the unit that divides the values.
pub(super) type Axis = (&'static str, &'static str, f64);

/// Results of a command. Field names are the JSON keys.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    version: &'static str,
    bench: &'static str,
    run: serde_json::Value,
    /// Media that are measured, if they are no drive.
    #[serde(skip)]
    pub(super) head: &'static str,
    pub(super) setting: Option<Setting>,
    pub(super) rows: Vec<Row>,
    pub(super) notes: Vec<String>,
    /// Results that compare rows with each other.
    #[serde(flatten)]
    pub(super) more: BTreeMap<&'static str, serde_json::Value>,
    /// Rows that did not pass their checks.
    failed: usize,
    pub(super) interrupted: bool,
    /// How the contents of rows that have figures were checked.
    #[serde(skip)]
    pub(super) checked: String,
    /// Plots: the first of these parameters that has several values, and figures over it.
    #[serde(skip)]
    pub(super) axes: (Vec<Axis>, Vec<Axis>),
}

impl Report {
    /// Returns a report without rows.
    pub(super) fn new(bench: &'static str) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            bench,
            run: machine::run(),
            head: "",
            setting: None,
            rows: Vec::new(),
            notes: Vec::new(),
            more: BTreeMap::new(),
            failed: 0,
            interrupted: false,
            checked: "a sample of the contents".to_owned(),
            axes: (Vec::new(), Vec::new()),
        }
    }

    /// Writes the page, if one is asked for, and the report to stdout. Returns the exit code.
    pub(super) fn finish(
        mut self,
        page: &PageFlags,
        output: &OutputFlags,
        interrupt: &Interrupt,
    ) -> anyhow::Result<u8> {
        self.failed = self.rows.iter().filter(|row| !row.is_good()).count();
        self.notes = self.all_notes();
        if let Some(page) = &page.html {
            write_page(page, &format!("ripieno bench {}", self.bench), &[self.outcome()])?;
        }
        terminal::report(&self, output.json, Self::text)?;
        Ok(interrupt.end(self.failed == 0, self.interrupted))
    }

    fn text(&self) -> String {
        let head = format!("ripieno {} bench {}{}", self.version, self.bench, self.head);
        let mut text = fold(&head, 0) + "\n";
        if let Some(setting) = &self.setting {
            text += &format!("\n{}\n", table(&setting.rows()));
        }
        for rows in self.tables() {
            let (header, cells) = cells(rows);
            text += &format!(
                "\n{}\n",
                fitted(&header, cells, 1..usize::MAX, shown(&rows[0].of).count())
            );
        }
        for note in &self.notes {
            text += &format!("\n{}", fold(note, 0));
        }
        text
    }

    /// Returns the rows of each table: those with the same columns.
    fn tables(&self) -> impl Iterator<Item = &[Row]> {
        self.rows.chunk_by(|a, b| a.heads() == b.heads())
    }

    /// Returns the report as a page's content.
    fn outcome(&self) -> Outcome {
        let (xs, ys) = &self.axes;
        let several = |x: &&Axis| {
            let of = |row: &Row| row.number(x.0);
            self.rows.iter().any(|row| of(row) != of(&self.rows[0]))
        };
        let x = xs.iter().find(several);
        let plots = x.into_iter().flat_map(|x| ys.iter().map(|y| self.plot(*x, *y)));
        let tables = self.tables().map(|rows| {
            let (header, rows) = cells(rows);
            Table::new("Measurements", header, rows)
        });
        Outcome {
            name: self.bench.to_owned(),
            title: "measured".to_owned(),
            setting: self.setting.as_ref().map_or(Vec::new(), |it| listed(&it.rows())),
            tables: tables.collect(),
            plots: plots.filter(|plot| !plot.lines.is_empty()).collect(),
            notes: self.notes.clone(),
            ..Outcome::default()
        }
    }

    /// Returns a plot with a line for each combination of the other parameters.
    fn plot(&self, (x, x_label, x_unit): Axis, (y, y_label, y_unit): Axis) -> Plot {
        let mut lines: Vec<Line> = Vec::new();
        for row in &self.rows {
            let (Some(at), Some(figure)) = (row.number(x), row.number(y)) else { continue };
            let (name, at) = (row.name_without(x), (at / x_unit, figure / y_unit));
            match lines.iter_mut().find(|line| line.name == name) {
                Some(line) => line.points.push(at),
                None => lines.push(Line::new(name, [at])),
            }
        }
        lines.iter_mut().for_each(|line| line.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
        lines.retain(|line| line.points.len() > 1);
        Plot::new(format!("{y_label}, by {x_label}"), x_label, y_label, lines)
    }

    fn all_notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for row in &self.rows {
            let name = row.name();
            let wrong = row.wrong.iter().take(3);
            notes.extend(wrong.map(|it| format!("error: {name}: no figures, because {it}")));
        }
        let good = || self.rows.iter().filter(|row| row.is_good());
        let noisy = good().filter(|row| row.spread > NOISY).count();
        if noisy > 0 {
            notes.push(format!(
                "noisy: {noisy} of {} measurements spread by more than {:.0} %: other programs \
                 ran, the device throttles, or the time is too short",
                good().count(),
                NOISY * 100.0
            ));
        }
        if good().count() > 0 && self.failed == 0 {
            let is_logged = self.setting.as_ref().is_none_or(|setting| setting.is_logged);
            let logs = "commands and bytes against the devices' SMART logs; ";
            notes.push(format!("checked: {}{}", if is_logged { logs } else { "" }, self.checked));
        }
        notes.extend(self.notes.iter().cloned());
        if self.interrupted {
            notes.push("interrupted: the rest was not measured".to_owned());
        }
        notes
    }
}

#[cfg(test)]
mod tests;
