//! Numbers of a scenario, by name.

use std::collections::BTreeMap;

use serde::Deserialize;

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
pub(super) type Numbers = BTreeMap<String, f64>;

/// Labels: those of an axis, or some.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(super) enum Items {
    Axis(String),
    Labels(Vec<String>),
}
