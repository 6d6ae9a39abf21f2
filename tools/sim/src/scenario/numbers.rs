//! Numbers of a scenario, by name.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::parameters::Parameters;

/// Results of a run, with their names.
pub(super) type Results = Vec<(String, f64)>;

/// Names results that need no more than a word.
pub(super) fn results<const N: usize>(of: [(&str, f64); N]) -> Results {
    of.map(|(name, value)| (name.to_owned(), value)).to_vec()
}

/// Returns `before|name`, or the name if nothing comes before it.
pub(super) fn join(before: &str, name: &str) -> String {
    if before.is_empty() { name.to_owned() } else { format!("{before}|{name}") }
}

/// Numbers by name: a run's are `label|label|result`, with a label for each axis.
#[derive(Debug)]
pub(super) struct Numbers(BTreeMap<String, f64>);

impl Numbers {
    /// Begins with the paper's numbers, and the bandwidths of the Tutti paper's two drives.
    pub(super) fn new(parameters: &Parameters, given: &BTreeMap<String, f64>) -> Self {
        let mut found = Self(given.clone());
        let storage = parameters.storage(2, 1);
        for (name, lane) in [
            ("direct", storage.direct),
            ("gds", storage.gds),
            ("cpu", storage.cpu),
            ("host", storage.host),
        ] {
            found.extend(name, &results([("read", lane.read / 1e9), ("write", lane.write / 1e9)]));
        }
        found
    }

    pub(super) fn extend(&mut self, before: &str, results: &Results) {
        self.0.extend(results.iter().map(|(name, value)| (join(before, name), *value)));
    }

    pub(super) fn put(&mut self, name: String, value: f64) {
        self.0.insert(name, value);
    }

    pub(super) fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).copied()
    }

    /// Returns a number that is there.
    pub(super) fn of(&self, name: &str) -> f64 {
        self.get(name).unwrap_or_else(|| panic!("{name}: no such number"))
    }
}

/// Labels: those of an axis, or some.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(super) enum Items {
    Axis(String),
    Labels(Vec<String>),
}

/// A number to show: the one that `of` names, or its relation to `than`.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Figure {
    Number(String),
    Relation(Relation),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Relation {
    pub(super) of: String,
    pub(super) than: Option<String>,
    /// How the quotient of both is shown.
    #[serde(default)]
    pub(super) by: By,
    /// For several quotients: `{over}` stands for a label of each.
    pub(super) over: Option<Items>,
    /// Which one of these is shown.
    #[serde(default)]
    pub(super) pick: Pick,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum By {
    /// As it is.
    #[default]
    Times,
    /// In percent.
    Percent,
    /// By how many percent it is less than one.
    Less,
    /// By how many percent it is more than one.
    More,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Pick {
    #[default]
    Least,
    Most,
    Mean,
}

impl By {
    pub(super) fn of(self, quotient: f64) -> f64 {
        match self {
            Self::Times => quotient,
            Self::Percent => quotient * 100.0,
            Self::Less => (1.0 - quotient) * 100.0,
            Self::More => (quotient - 1.0) * 100.0,
        }
    }
}

impl Pick {
    pub(super) fn of(self, all: &[f64]) -> f64 {
        match self {
            Self::Least => all.iter().copied().fold(f64::INFINITY, f64::min),
            Self::Most => all.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            Self::Mean => all.iter().sum::<f64>() / all.len() as f64,
        }
    }
}
