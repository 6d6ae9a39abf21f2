//! Layer times that an engine wrote (`layer_times` of the vLLM connector): reads them, makes a
//! table of them, and reports its error and that of another table.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kv_schedule::{Curve, IoCosts, Setting, SlackTable, StepShape};
use ripieno_sim::median;
use serde::{Deserialize, Serialize};

use crate::file::read_text;
use crate::outcome::{Facts, Value, rows};
use crate::problem::Problem;

/// Key that identifies a header line: the version.
const HEADER: &str = "ripieno_layer_times";
/// Version of the file format.
const VERSION: u32 = 1;
/// Maximum size of a slack table in bytes; real ones have at most a few hundred thousand.
pub(crate) const TABLE_BYTES_MAX: u64 = 16 << 20;
/// Maximum size of a file in bytes: several days of an engine's output.
const BYTES_MAX: u64 = 256 << 20;
/// Exclusive limit of a request's tokens, and of a layer's microseconds.
const MOST: u32 = 1 << 30;

/// Header: the first line, and one for each engine that appended to the file.
#[derive(Debug, Deserialize)]
struct Header {
    ripieno_layer_times: u32,
    model: String,
    gpu: String,
    engine: String,
}

/// A step: any other line.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// For each request, the tokens to compute and those before them.
    requests: Vec<(u32, u32)>,
    layer_us: f64,
}

/// A step of an engine.
#[derive(Debug, Clone, Copy)]
struct Step {
    shape: StepShape,
    /// Tokens before the computed ones, over all requests.
    prefix: u64,
    layer: Duration,
}

/// Steps of one setting, in order.
#[derive(Debug)]
pub(crate) struct Steps {
    /// Setting without drives.
    setting: Setting,
    steps: Vec<Step>,
}

impl Steps {
    /// Reads the files.
    pub(crate) fn read(paths: &[PathBuf]) -> Result<Self, Problem> {
        let mut found: Option<Self> = None;
        for path in paths {
            let text = read_text(path, BYTES_MAX).map_err(|error| {
                let what = format!("--layer-times {}: {error}", path.display());
                Problem::new(what, "name files of layer times")
            })?;
            Self::take(&mut found, path, &text)?;
        }
        let names = || paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
        found.filter(|found| !found.steps.is_empty()).ok_or_else(|| {
            let hint = "let the engine serve with the option layer_times, or run \
                        python -m ripieno.vllm.profile";
            Problem::new(format!("{}: there is no step in it", names().join(", ")), hint)
        })
    }

    /// Parses the text of a file.
    fn take(found: &mut Option<Self>, path: &Path, text: &str) -> Result<(), Problem> {
        let mut lines = text.split_inclusive('\n').enumerate();
        let bad = |at: usize, what: String, hint: &str| {
            Problem::new(format!("{}:{}: {what}", path.display(), at + 1), hint)
        };
        let header = |at: usize, line: &str| {
            setting(line).map_err(|what| bad(at, what, "name files that layer_times wrote"))
        };
        if let Some((at, line)) = lines.next() {
            let setting = header(at, line)?;
            let found = found.get_or_insert_with(|| Self { setting, steps: Vec::new() });
            found.same(header(at, line)?).map_err(|what| bad(at, what, "read them one by one"))?;
            for (at, line) in lines {
                if line.contains(HEADER) {
                    let hint = "remove the lines of the others, or name another file there";
                    found.same(header(at, line)?).map_err(|what| bad(at, what, hint))?;
                    continue;
                }
                match step(line) {
                    Ok(step) => found.steps.push(step),
                    // The engine is still writing this line.
                    Err(_) if !line.ends_with('\n') => {}
                    Err(what) => return Err(bad(at, what, "remove the line")),
                }
            }
        }
        Ok(())
    }

    fn same(&self, other: Setting) -> Result<(), String> {
        if self.setting == other {
            return Ok(());
        }
        Err(format!("times of {} follow those of {}", name(&other), name(&self.setting)))
    }

    /// Returns the setting of the measurements, with these drives.
    pub(crate) fn setting(&self, drives: Vec<String>) -> Setting {
        Setting { drives, ..self.setting.clone() }
    }

    /// Adds the steps to a table.
    pub(crate) fn teach(&self, table: &mut SlackTable) {
        self.steps.iter().for_each(|step| table.learn(step.shape, step.layer));
    }

    /// Reports what a table learns from the steps, and how far off `against` is.
    pub(crate) fn report(&self, against: Option<(&Path, &SlackTable)>) -> Layers {
        let mut table = empty(self.setting.clone());
        let mut ahead = Vec::new();
        for step in &self.steps {
            ahead.extend(table.layer(step.shape).map(|said| Off::by(step, said)));
            table.learn(step.shape, step.layer);
        }
        let all = |says: &dyn Fn(StepShape) -> Option<Duration>| {
            Off::of(self.steps.iter().filter_map(|step| Some(Off::by(step, says(step.shape)?))))
        };
        let says = against.map(|(_, table)| table);
        let mut groups: BTreeMap<_, Vec<Step>> = BTreeMap::new();
        for step in &self.steps {
            groups.entry(step.group()).or_default().push(*step);
        }
        Layers {
            steps: self.steps.len(),
            ahead: Off::of(ahead),
            fit: all(&|shape| table.fit(shape)),
            against: against.map(|(path, _)| path.to_owned()),
            against_off: says.map(|says| all(&|shape| says.layer(shape))),
            shapes: groups.values().map(|steps| group(steps, &table, says)).collect(),
        }
    }
}

impl Step {
    /// Returns the group in the report: steps with similar numbers of tokens and prefix tokens.
    fn group(&self) -> (bool, u32, u32) {
        let octave = |number: f64| number.log2().round() as u32;
        let StepShape { is_prefill, tokens, .. } = self.shape;
        (!is_prefill, octave(tokens.into()), octave(self.prefix.max(32) as f64))
    }
}

/// Parses the setting in a header.
fn setting(line: &str) -> Result<Setting, String> {
    let Header { ripieno_layer_times, model, gpu, engine } =
        serde_json::from_str(line).map_err(|error| format!("no header of layer times: {error}"))?;
    if ripieno_layer_times != VERSION {
        let found = ripieno_layer_times;
        return Err(format!("layer times of version {found}, and {VERSION} can be read"));
    }
    Ok(Setting { model, gpu, engine, drives: Vec::new() })
}

fn step(line: &str) -> Result<Step, String> {
    let Line { requests, layer_us } = serde_json::from_str(line).map_err(|e| e.to_string())?;
    let is_right = |&(input, prefix): &(u32, u32)| (1..MOST).contains(&input) && prefix < MOST;
    if requests.is_empty() || requests.len() > 1 << 20 || !requests.iter().all(is_right) {
        return Err("requests: no engine computes such a step".to_owned());
    }
    if !(layer_us > 0.0 && layer_us < f64::from(MOST)) {
        return Err(format!("layer_us of {layer_us}: no layer takes that long"));
    }
    let prefix = requests.iter().map(|(_, prefix)| u64::from(*prefix)).sum();
    let layer = Duration::from_secs_f64(layer_us * 1e-6);
    Ok(Step { shape: StepShape::of(requests), prefix, layer })
}

/// Returns a table for layer times only.
pub(crate) fn empty(setting: Setting) -> SlackTable {
    let none = || Curve::line(Duration::ZERO, 1e9).expect("a line rises");
    SlackTable::new(setting, IoCosts { read: none(), write: none(), mixed: 1.0 })
}

/// Returns true for a table's file, and for one that cannot be looked at: reading it says why.
pub(crate) fn is_there(path: &Path) -> bool {
    path.try_exists().unwrap_or(true)
}

/// A flag that names a slack table, its file, and the hint if that cannot be used.
#[derive(Clone, Copy)]
pub(crate) struct TableFile<'a>(pub(crate) &'static str, pub(crate) &'a Path, pub(crate) &'a str);

impl TableFile<'_> {
    fn wrong(&self, why: impl Display) -> Problem {
        let Self(flag, path, hint) = *self;
        Problem::new(format!("{flag} {}: {why}", path.display()), hint)
    }

    /// Reads a table of any setting.
    pub(crate) fn read(&self) -> Result<SlackTable, Problem> {
        let text = read_text(self.1, TABLE_BYTES_MAX).map_err(|error| self.wrong(error))?;
        SlackTable::parse(&text).map_err(|error| self.wrong(error))
    }

    /// Rejects a table of another setting.
    pub(crate) fn check(&self, table: &SlackTable, wanted: &Setting) -> Result<(), Problem> {
        let found = table.setting();
        if found == wanted {
            return Ok(());
        }
        let text = |it: &Setting| match found.drives == wanted.drives {
            true => name(it),
            false => format!("{}, of the drives [{}]", name(it), it.drives.join(", ")),
        };
        Err(self.wrong(format!("it is of {}, and not of {}", text(found), text(wanted))))
    }
}

/// Reads the table in a file, or makes one from the layer times in it, for the flag `flag`.
pub(crate) fn table(flag: &'static str, path: &Path) -> Result<SlackTable, Problem> {
    let file = TableFile(flag, path, "name a slack table, or a file of layer times");
    let text = read_text(path, BYTES_MAX).map_err(|error| file.wrong(error))?;
    let table = if text.lines().next().is_some_and(|line| line.contains(HEADER)) {
        let steps = Steps::read(&[path.to_owned()])?;
        let mut table = empty(steps.setting.clone());
        steps.teach(&mut table);
        table
    } else {
        SlackTable::parse(&text).map_err(|error| file.wrong(error))?
    };
    if table.is_empty() {
        return Err(file.wrong("no layer time is in it"));
    }
    Ok(table)
}

/// Same as [`table`], for the setting of `steps`.
pub(crate) fn against(path: &Path, steps: &Steps) -> Result<SlackTable, Problem> {
    let table = table("--against", path)?;
    let wanted = steps.setting(table.setting().drives.clone());
    let hint = "compare what the same model, GPU and engine did";
    TableFile("--against", path, hint).check(&table, &wanted)?;
    Ok(table)
}

/// Formats model, GPU and engine.
fn name(setting: &Setting) -> String {
    let Setting { model, gpu, engine, .. } = setting;
    format!("{model} on {gpu} with {engine}")
}

/// Median relative error of predictions.
#[derive(Debug, Serialize)]
struct Off {
    prefill: Option<f64>,
    decode: Option<f64>,
}

impl Off {
    fn by(step: &Step, said: Duration) -> (bool, f64) {
        let off = said.as_secs_f64() / step.layer.as_secs_f64() - 1.0;
        (step.shape.is_prefill, off.abs())
    }

    fn of(all: impl IntoIterator<Item = (bool, f64)>) -> Self {
        let (prefill, decode): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(is_prefill, _)| *is_prefill);
        let [prefill, decode] =
            [prefill, decode].map(|part| median(part.into_iter().map(|(_, off)| off).collect()));
        Self { prefill, decode }
    }

    fn text(&self) -> String {
        let parts =
            [(self.prefill, "prefill"), (self.decode, "decode")].map(|(off, of)| match off {
                Some(off) => format!("{:.1} % ({of})", 100.0 * off),
                None => format!("not known ({of})"),
            });
        parts.join(", ")
    }
}

/// Report on layer times. Field names are the JSON keys.
#[derive(Debug, Serialize)]
pub(crate) struct Layers {
    pub(crate) steps: usize,
    /// Error of a table that has learned only the steps before each.
    ahead: Off,
    /// Error of the three-parameter fit to all steps (the last nine of each shape).
    fit: Off,
    against: Option<PathBuf>,
    against_off: Option<Off>,
    shapes: Vec<Facts>,
}

/// Returns the medians of steps with similar shapes, with the predictions of the three-parameter
/// fit to all steps (the last nine of each shape), and of another table.
fn group(steps: &[Step], table: &SlackTable, against: Option<&SlackTable>) -> Facts {
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let some = |of: &dyn Fn(&Step) -> Option<f64>| median(steps.iter().filter_map(of).collect());
    let each = |of: &dyn Fn(&Step) -> f64| some(&|step| Some(of(step))).unwrap_or(0.0);
    let is_prefill = steps[0].shape.is_prefill;
    let kind = if is_prefill { "prefill" } else { "decode" };
    let layer_us = each(&|step| us(step.layer));
    let mut all = vec![
        ("is_prefill", "", Value::Json(is_prefill.into())),
        ("", "step", Value::Text(kind.to_owned())),
        // Tokens to compute over all requests; the next value counts those before them.
        ("input", "input", Value::Count(each(&|step| step.shape.tokens.into()) as u64)),
        ("prefix", "prefix", Value::Count(each(&|step| step.prefix as f64) as u64)),
        ("steps", "steps", Value::Count(steps.len() as u64)),
        ("layer_us", "layer, us", Value::Whole(layer_us)),
    ];
    let fit = some(&|step| table.fit(step.shape).map(us));
    let other = some(&|step| against?.layer(step.shape).map(us));
    let named = [("fit_us", "fit, us", "off", fit), ("against_us", "against, us", "off", other)];
    for (at, (key, name, off, said)) in named.into_iter().enumerate() {
        all.push((key, "", Value::Json(said.into())));
        if at == 0 || against.is_some() {
            let part = said.map_or_else(String::new, |said| {
                format!("{:+.0} %", 100.0 * (said / layer_us - 1.0))
            });
            let said = said.map_or(Value::Text(String::new()), Value::Whole);
            all.extend([("", name, said), ("", off, Value::Text(part))]);
        }
    }
    Facts(all)
}

impl Layers {
    pub(crate) fn text(&self) -> String {
        let table = rows(&self.shapes, 1);
        let mut text = format!(
            "{table}\n\nOff by, in the median of {} steps:\n  learned from the steps before each: \
             {}\n  the three numbers (fit): {}",
            self.steps,
            self.ahead.text(),
            self.fit.text(),
        );
        if let (Some(path), Some(off)) = (&self.against, &self.against_off) {
            text += &format!("\n  {}: {}", path.display(), off.text());
        }
        text
    }
}

#[cfg(test)]
mod tests;
