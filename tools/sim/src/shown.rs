//! Texts, tables, plots and comparisons of numbers that have names, as files describe them.

mod formula;
mod numbers;
mod tables;

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{
    outcome::{Basis, Comparison, Line, Plot, Table, number},
    parameters::Parameters,
    swarm::LAW,
};
use numbers::Items;
pub(crate) use numbers::{Numbers, Results, join, results};
pub(crate) use tables::tables;

/// A table, or one for each of several labels.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Listed {
    title: String,
    /// A table for each of these: `{each}`.
    each: Option<Items>,
    /// Title of the column of names.
    #[serde(default)]
    first: String,
    /// A row for each of these: `{row}`.
    rows: Items,
    columns: Vec<Series>,
}

/// A column of a table or a line of a plot, or one for each of several labels.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Series {
    /// One for each of these: `{column}` or `{line}`.
    each: Option<Items>,
    title: String,
    cell: String,
    #[serde(default)]
    form: Form,
}

/// Form of a column's numbers.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Form {
    /// Three digits at least.
    #[default]
    Usual,
    /// With a sign, and a digit behind the point.
    Signed,
    /// No digits behind the point.
    Whole,
    /// Two.
    Hundredths,
    /// Three.
    Fine,
    /// Three digits at least, and a dash for none.
    Some,
    /// A text with numbers in it.
    Text,
}

/// A plot, or one for each of several labels.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Drawn {
    title: String,
    /// A plot for each of these: `{each}`.
    each: Option<Items>,
    /// Titles of the axes.
    x: String,
    y: String,
    /// A point of each line for each of these: `{x}`.
    points: Items,
    lines: Vec<Series>,
}

/// A paper's number, and where ours is; or one for each of several labels.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Compared {
    /// `{each}`. Those that follow one another with the same labels are shown label by label.
    each: Option<Items>,
    what: String,
    #[serde(default)]
    unit: String,
    /// If it has other labels than this one, there is no such comparison.
    paper: ByLabel<f64>,
    /// Nothing, if it is not simulated.
    ours: Option<String>,
    /// `predicted`, if there is none.
    basis: Option<ByLabel<Basis>>,
    note: Option<ByLabel<String>>,
}

/// A value for all labels, or one for each of some.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum ByLabel<T> {
    All(T),
    Some(BTreeMap<String, T>),
}

impl<T: Clone> ByLabel<T> {
    fn of(&self, label: &str) -> Option<T> {
        match self {
            Self::All(value) => Some(value.clone()),
            Self::Some(values) => values.get(label).cloned(),
        }
    }
}

/// The labels of each axis, with their places in a plot.
pub(crate) type Ticks<'a> = BTreeMap<&'a str, Vec<(String, f64)>>;

/// The numbers, and what names stand for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shown<'a> {
    pub(crate) found: &'a Numbers,
    pub(crate) parameters: &'a Parameters,
    pub(crate) texts: &'a BTreeMap<String, String>,
    pub(crate) ticks: &'a Ticks<'a>,
}

/// Names in braces and their values, such as a row's label.
type Labels<'a> = [(&'a str, &'a str)];

/// Replaces names in braces.
fn fill(text: &str, of: impl Fn(&str) -> String) -> String {
    let mut parts = text.split('{');
    let mut filled = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part.split_once('}').unwrap_or_else(|| panic!("{text}: no brace"));
        filled += &of(name);
        filled += rest;
    }
    filled
}

impl Shown<'_> {
    /// Replaces names in braces: of texts, parameters and numbers, with `:` and the digits behind
    /// the point, or `:n` for three digits at least.
    pub(crate) fn text(&self, text: &str) -> String {
        self.text_of(text, &[("law", &format!("{LAW:?}"))])
    }

    fn text_of(&self, text: &str, labels: &Labels<'_>) -> String {
        fill(text, |name| {
            if let Some((_, label)) = labels.iter().find(|(known, _)| *known == name) {
                return (*label).to_owned();
            }
            let (name, digits) = name.rsplit_once(':').unwrap_or((name, ""));
            let value = match (self.texts.get(name), self.found.get(name), digits) {
                (Some(formula), ..) if formula.starts_with('=') => self.figure(formula, labels),
                (Some(text), ..) => return self.text_of(text, labels),
                (None, Some(value), _) => *value,
                (None, None, "") => return self.parameters.text(name),
                (None, None, _) => self.parameters.scaled(name),
            };
            match digits {
                "" => value.to_string(),
                "n" => number(value),
                digits => format!("{value:.*}", digits.parse().expect("a number of digits")),
            }
        })
    }

    /// Returns a formula with those that it names in braces.
    fn expanded(&self, formula: &str) -> String {
        fill(formula, |name| match self.texts.get(name) {
            Some(inner) => format!("({})", self.expanded(inner.trim_start_matches('='))),
            None => format!("{{{name}}}"),
        })
    }

    /// Replaces formulas among the parameters of a run by their values.
    pub(crate) fn calculate(&self, set: &mut Map<String, Value>) {
        for value in set.values_mut() {
            match value {
                Value::String(text) if text.starts_with('=') => {
                    *value = self.figure(text, &[]).into();
                }
                Value::Object(more) => self.calculate(more),
                _ => {}
            }
        }
    }

    /// Returns a number of this name, whose labels are filled in, or a parameter.
    fn number(&self, pattern: &str, labels: &Labels<'_>) -> f64 {
        let of = |name: &str| {
            let label = labels.iter().rev().find(|(known, _)| *known == name);
            label.unwrap_or_else(|| panic!("{pattern}: {name} is not known here")).1.to_owned()
        };
        let name = fill(pattern, of);
        self.found.get(&name).copied().unwrap_or_else(|| self.parameters.value(&name))
    }

    fn items(&self, items: &Items) -> Vec<(String, f64)> {
        let all = |axis: &str| {
            self.ticks.get(axis).unwrap_or_else(|| panic!("{axis}: no such axis")).clone()
        };
        let place = |label: &String| {
            let mut ticks = self.ticks.values().flatten();
            let place = ticks.find(|(known, _)| known == label).map_or(f64::NAN, |(_, x)| *x);
            (label.clone(), place)
        };
        match items {
            Items::Axis(name) => all(name),
            Items::Labels(labels) => labels.iter().map(place).collect(),
        }
    }

    /// Returns each column or line, with its label.
    fn series<'a>(&self, all: &'a [Series]) -> Vec<(String, &'a Series)> {
        let of = |it: &'a Series| {
            let labels = self.each(it.each.as_ref());
            labels.into_iter().map(move |(label, _)| (label, it))
        };
        all.iter().flat_map(of).collect()
    }

    /// Returns the labels of some items; one that is empty, if there are none.
    fn each(&self, each: Option<&Items>) -> Vec<(String, f64)> {
        each.map_or_else(|| vec![(String::new(), 0.0)], |each| self.items(each))
    }
}

impl Listed {
    pub(crate) fn tables(&self, shown: &Shown<'_>) -> Vec<Table> {
        let each = shown.each(self.each.as_ref());
        each.iter().map(|(each, _)| self.table(shown, each)).collect()
    }

    fn table(&self, shown: &Shown<'_>, each: &str) -> Table {
        let columns = shown.series(&self.columns);
        let row = |(row, _): &(String, f64)| {
            let cells = columns.iter().map(|(column, of)| {
                let labels = [("each", each), ("row", row), ("column", column)];
                if let Form::Text = of.form {
                    return shown.text_of(&of.cell, &labels);
                }
                let value = shown.figure(&of.cell, &labels);
                match of.form {
                    Form::Some if value == 0.0 => "-".to_owned(),
                    Form::Whole => format!("{value:.0}"),
                    Form::Hundredths => format!("{value:.2}"),
                    Form::Usual | Form::Some | Form::Text => number(value),
                    Form::Signed => format!("{value:+.1}"),
                    Form::Fine => format!("{value:.3}"),
                }
            });
            std::iter::once(row.clone()).chain(cells).collect()
        };
        let titles = columns.iter().map(|(label, of)| of.title.replace("{column}", label));
        Table::new(
            shown.text_of(&self.title, &[("each", each)]),
            std::iter::once(self.first.clone()).chain(titles),
            shown.items(&self.rows).iter().map(row),
        )
    }
}

impl Drawn {
    pub(crate) fn plots(&self, shown: &Shown<'_>) -> Vec<Plot> {
        let each = shown.each(self.each.as_ref());
        each.iter().map(|(each, _)| self.plot(shown, each)).collect()
    }

    fn plot(&self, shown: &Shown<'_>, each: &str) -> Plot {
        let points = shown.items(&self.points);
        let lines = shown.series(&self.lines).into_iter().map(|(line, of)| {
            let point = |(x, place): &(String, f64)| {
                (*place, shown.figure(&of.cell, &[("each", each), ("line", &line), ("x", x)]))
            };
            Line::new(of.title.replace("{line}", &line), points.iter().map(point))
        });
        Plot::new(shown.text_of(&self.title, &[("each", each)]), &self.x, &self.y, lines)
    }
}

impl Compared {
    /// Returns the comparisons in order.
    pub(crate) fn all(of: &[Self], shown: &Shown<'_>) -> Vec<Comparison> {
        let mut all = Vec::new();
        for some in of.chunk_by(|one, other| one.each == other.each) {
            for (each, _) in shown.each(some[0].each.as_ref()) {
                all.extend(some.iter().filter_map(|it| it.comparison(shown, &each)));
            }
        }
        all
    }

    fn comparison(&self, shown: &Shown<'_>, each: &str) -> Option<Comparison> {
        let labels = [("each", each)];
        let note = self.note.as_ref().and_then(|note| note.of(each)).unwrap_or_default();
        let basis = self.basis.as_ref().and_then(|basis| basis.of(each));
        Some(Comparison {
            what: shown.text_of(&self.what, &labels),
            unit: self.unit.clone(),
            paper: self.paper.of(each)?,
            ours: self.ours.as_ref().map(|ours| shown.figure(ours, &labels)),
            basis: basis.unwrap_or(Basis::Predicted),
            note: shown.text_of(&note, &labels),
        })
    }
}
