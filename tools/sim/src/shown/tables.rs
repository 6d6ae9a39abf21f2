//! Tables of the commands, from `tables.toml`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Listed, Numbers, Shown, join};
use crate::{outcome::Table, parameters::Parameters};

#[derive(Debug, Deserialize)]
struct Tables {
    texts: BTreeMap<String, String>,
    /// The tables of each command.
    #[serde(flatten)]
    commands: BTreeMap<String, Vec<Listed>>,
}

/// Returns the tables of a command, with the results of some runs in each row: numbers by the names
/// of their fields. `found` has others.
pub(crate) fn tables<T: Serialize>(
    command: &str,
    rows: &[(String, &[T])],
    mut found: Numbers,
) -> Vec<Table> {
    let tables = basic_toml::from_str::<Tables>(include_str!("../../tables.toml"));
    let Tables { texts, commands } = tables.expect("a test reads the file");
    for (row, runs) in rows {
        let mut all = BTreeMap::new();
        for run in *runs {
            flatten("", &serde_json::to_value(run).expect("numbers"), &mut all);
        }
        for (name, mut numbers) in all {
            numbers.sort_unstable_by(f64::total_cmp);
            let last = numbers.len() - 1;
            for (what, at) in [("least", 0), ("most", last), ("", numbers.len() / 2)] {
                found.insert(join(row, &join(what, &name)), numbers[at]);
            }
        }
    }
    let places = rows.iter().map(|(row, _)| (row.clone(), f64::NAN)).collect();
    let (ticks, parameters) = (&BTreeMap::from([("row", places)]), &Parameters::default());
    let shown = Shown { found: &found, parameters, texts: &texts, ticks };
    commands[command].iter().flat_map(|it| it.tables(&shown)).collect()
}

fn flatten(name: &str, value: &Value, all: &mut BTreeMap<String, Vec<f64>>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(field, value)| flatten(&join(name, field), value, all));
        }
        Value::Array(items) => (0..)
            .zip(items)
            .for_each(|(at, value): (usize, _)| flatten(&join(name, &at.to_string()), value, all)),
        // JSON has no infinity: a cost without a request that was served.
        _ => {
            let number = value.as_f64().unwrap_or(f64::INFINITY);
            all.entry(name.to_owned()).or_default().push(number);
        }
    }
}
