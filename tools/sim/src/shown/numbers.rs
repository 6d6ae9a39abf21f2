//! Numbers by name.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Results of a run, with their names.
pub(crate) type Results = Vec<(String, f64)>;

/// Names results that need no more than a word.
pub(crate) fn results<const N: usize>(of: [(&str, f64); N]) -> Results {
    of.map(|(name, value)| (name.to_owned(), value)).to_vec()
}

/// Returns `before|name`, or one of them if the other is empty.
pub(crate) fn join(before: &str, name: &str) -> String {
    match (before, name) {
        ("", one) | (one, "") => one.to_owned(),
        _ => format!("{before}|{name}"),
    }
}

/// Numbers by name: a run's are `label|label|result`, with a label for each axis.
pub(crate) type Numbers = BTreeMap<String, f64>;

/// Labels: those of an axis, or some.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(super) enum Items {
    Axis(String),
    Labels(Vec<String>),
}
