//! Results of the measurements through a store: rows of named values, in JSON or as tables.

use ripieno_sim::{Line, Outcome, Plot, Table};
use serde::{Serialize, Serializer, ser::SerializeMap as _};

use crate::config::{self, StoreArgs};
use crate::devices::Devices;
use crate::size::{Size, grouped};
use crate::stack::Stack;
use crate::table::{figures, fold, row, table};
use crate::terminal;

/// Spread above which a measurement is noisy.
pub(super) const NOISY: f64 = 0.2;

/// Formats microseconds with three digits.
pub(super) fn us(us: f64) -> String {
    match us {
        us if us >= 1e5 => format!("{:.0} ms", us / 1e3),
        us if us >= 1e3 => format!("{:.2} ms", us / 1e3),
        us if us >= 100.0 => format!("{us:.0} us"),
        us => format!("{us:.1} us"),
    }
}

/// A value, with the unit in which people read it.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub(super) enum Value {
    Text(String),
    Count(u64),
    Bytes(u64),
    BytesPerSecond(f64),
    Micros(f64),
    /// A number with two decimals.
    Ratio(f64),
    Percent(f64),
}

impl Value {
    fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Count(count) => grouped(*count),
            Self::Bytes(bytes) => Size(*bytes).to_string(),
            Self::BytesPerSecond(rate) => format!("{}/s", Size(*rate as u64)),
            Self::Micros(micros) => us(*micros),
            Self::Ratio(ratio) => format!("{ratio:.2}"),
            Self::Percent(part) => format!("{:.0} %", 100.0 * part),
        }
    }
}

/// A value with its JSON key and the head of its column.
pub(super) type Cell = (&'static str, &'static str, Value);

/// A measurement.
#[derive(Debug)]
pub(super) struct Row {
    /// Parameters.
    pub(super) of: Vec<Cell>,
    pub(super) figures: Vec<Cell>,
    /// Largest sample less the smallest, relative to the median.
    pub(super) spread: f64,
    /// Problems; a row with any shows no figures.
    pub(super) wrong: Vec<String>,
}

impl Row {
    fn all(&self) -> Vec<Cell> {
        let mut all = self.of.clone();
        if self.wrong.is_empty() {
            all.extend(self.figures.iter().cloned());
            all.push(("spread", "spread", Value::Percent(self.spread)));
        }
        all
    }

    fn heads(&self) -> Vec<&'static str> {
        self.of.iter().chain(&self.figures).map(|it| it.1).collect()
    }

    fn name(&self) -> String {
        let parts = self.of.iter().map(|(_, head, value)| format!("{head} {}", value.text()));
        parts.collect::<Vec<_>>().join(", ")
    }

    /// Returns the name of the line over the number of tokens that the row belongs to.
    fn line(&self) -> String {
        let parts = self.of.iter().filter(|(key, ..)| *key != "tokens");
        let parts = parts.map(|(_, head, value)| match value {
            Value::Text(text) => text.clone(),
            _ => format!("{head} {}", value.text()),
        });
        parts.collect::<Vec<_>>().join(", ")
    }

    /// Returns the number with a JSON key; `None` in a row that shows no figures.
    fn number(&self, key: &str) -> Option<f64> {
        let all = self.all();
        match all.iter().find(|it| it.0 == key)?.2 {
            Value::Count(count) => Some(count as f64),
            Value::BytesPerSecond(rate) => Some(rate),
            _ => None,
        }
    }
}

impl Serialize for Row {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (key, _, value) in self.all() {
            map.serialize_entry(key, &value)?;
        }
        map.serialize_entry("wrong", &self.wrong)?;
        map.end()
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
#[derive(Debug, Default, Serialize)]
pub(super) struct Setting {
    device: String,
    queues_per_device: u16,
    executor: String,
    path: String,
    memory: String,
}

impl Setting {
    pub(super) fn of(args: &StoreArgs, stack: &Stack) -> Self {
        let devices = &args.devices;
        let placement = stack.placement();
        Self {
            device: match devices {
                Devices::Emu(emu) => format!("{} x {devices}, media {}", emu.count, emu.media),
                Devices::Vfio(_) => devices.to_string(),
            },
            queues_per_device: args.common.queues,
            executor: config::name(args.flags.path.executor),
            path: placement.route.name().to_owned(),
            memory: placement.memory(),
        }
    }

    fn rows(&self) -> [[String; 3]; 4] {
        let Self { device, queues_per_device, executor, path, memory } = self;
        [
            row("device", "", device),
            row("queues", queues_per_device, "on each device"),
            row("I/O kernel", executor, ""),
            row("path", path, format!("memory: {memory}")),
        ]
    }
}

/// Returns the rows of a setting as lines.
pub(super) fn listed(rows: &[[String; 3]]) -> Vec<String> {
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
    let cells = rows.iter().map(|row| {
        let mut cells: Vec<String> = row.all().iter().map(|it| it.2.text()).collect();
        if !row.wrong.is_empty() {
            cells.push("failed".to_owned());
        }
        cells.resize(header.len(), String::new());
        cells
    });
    let cells = cells.collect();
    (header, cells)
}

/// Results of a command. Field names are the JSON keys.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    version: &'static str,
    bench: &'static str,
    setting: Setting,
    rows: Vec<Row>,
    notes: Vec<String>,
    /// Rows that did not pass their checks.
    failed: usize,
    interrupted: bool,
}

impl Report {
    pub(super) fn new(
        bench: &'static str,
        setting: Setting,
        rows: Vec<Row>,
        notes: Vec<String>,
        interrupted: bool,
    ) -> Self {
        let failed = rows.iter().filter(|row| !row.wrong.is_empty()).count();
        let version = env!("CARGO_PKG_VERSION");
        Self { version, bench, setting, rows, notes, failed, interrupted }
    }

    /// Returns true if every row passed its checks.
    pub(super) fn is_good(&self) -> bool {
        self.failed == 0
    }

    /// Writes the report to stdout.
    ///
    /// # Errors
    /// Returns an error if stdout cannot be written to.
    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        terminal::print(if json { serde_json::to_string(self)? } else { self.text() })
    }

    fn text(&self) -> String {
        let mut text = format!("ripieno {} bench {}\n", self.version, self.bench);
        if !self.rows.is_empty() {
            text += &format!("\n{}\n", table(&self.setting.rows()));
        }
        for rows in self.tables() {
            let (header, cells) = cells(rows);
            text += &format!("\n{}\n", figures(&header, cells, rows[0].of.len()));
        }
        for note in self.all_notes() {
            text += &format!("\n{}", fold(&note));
        }
        text
    }

    /// Returns the rows of each table: those with the same columns.
    fn tables(&self) -> impl Iterator<Item = &[Row]> {
        self.rows.chunk_by(|a, b| a.heads() == b.heads())
    }

    /// Returns the report as a page's content, with the bandwidths by number of tokens.
    pub(super) fn outcome(&self) -> Outcome {
        let mut lines: Vec<Line> = Vec::new();
        for row in &self.rows {
            let (Some(tokens), Some(rate)) = (row.number("tokens"), row.number("bytes_s")) else {
                continue;
            };
            let name = row.line();
            if !lines.iter().any(|line| line.name == name) {
                lines.push(Line { name: name.clone(), points: Vec::new() });
            }
            let at = (tokens, rate / f64::from(1 << 30));
            lines.iter_mut().filter(|line| line.name == name).for_each(|it| it.points.push(at));
        }
        lines.retain(|line| line.points.len() > 1);
        let [title, x, y] = ["GiB/s, by tokens", "tokens", "GiB/s"].map(str::to_owned);
        let tables = self.tables().map(|rows| {
            let (header, rows) = cells(rows);
            let columns = header.into_iter().map(str::to_owned).collect();
            Table { title: "Measurements".to_owned(), columns, rows }
        });
        Outcome {
            name: self.bench.to_owned(),
            title: "through a store".to_owned(),
            setting: listed(&self.setting.rows()),
            tables: tables.collect(),
            plots: if lines.is_empty() { Vec::new() } else { vec![Plot { title, x, y, lines }] },
            notes: self.all_notes(),
            ..Outcome::default()
        }
    }

    fn all_notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for row in &self.rows {
            let name = row.name();
            notes.extend(
                row.wrong
                    .iter()
                    .take(3)
                    .map(|wrong| format!("error: {name}: no figures, because {wrong}")),
            );
        }
        let good = || self.rows.iter().filter(|row| row.wrong.is_empty());
        let noisy = good().filter(|row| row.spread > NOISY).count();
        if noisy > 0 {
            notes.push(format!(
                "noisy: {noisy} of {} measurements spread by more than {:.0} %: other programs \
                 ran, or the device throttles",
                good().count(),
                NOISY * 100.0
            ));
        }
        if !self.rows.is_empty() && self.is_good() {
            notes.push(
                "checked: commands and bytes against the devices' SMART logs, and a sample of the \
                 contents"
                    .to_owned(),
            );
        }
        notes.extend(self.notes.iter().cloned());
        if self.interrupted {
            notes.push("interrupted: the rest was not measured".to_owned());
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_is_wrong_has_no_figures() {
        let row = |wrong: &[&str]| Row {
            of: vec![("size", "size", Value::Count(7))],
            figures: vec![("bytes_s", "bandwidth", Value::BytesPerSecond(2048.0))],
            spread: spread(&[1.0, 2.0, 1.5]),
            wrong: wrong.iter().map(|it| (*it).to_owned()).collect(),
        };
        let rows = vec![row(&[]), row(&["of a reason"])];
        let report = Report::new("x", Setting::default(), rows, Vec::new(), false);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["rows"][0]["bytes_s"], 2048.0);
        assert!(json["rows"][1].get("bytes_s").is_none() && json["failed"] == 1, "{json}");
        let text = report.text();
        assert!(text.matches("2 KiB/s").count() == 1 && text.contains("failed"), "{text}");
        assert!(text.contains("error: size 7: no figures, because of a reason"), "{text}");
        assert!(text.contains("noisy: 1 of 1") && !text.contains("checked:"), "{text}");
        assert!(!report.is_good());
    }
}
