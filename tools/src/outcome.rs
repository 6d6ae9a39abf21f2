//! The outcome of a command: values that are named once, and are its JSON and its tables.

use serde::{Serialize, Serializer, ser::SerializeMap as _};

use crate::size::{Size, grouped};
use crate::table::grid;

/// Names of times and of bytes by unit, from the smallest, and how many times larger the next is.
const MICROS: (&[&str], f64) = (&["us", "ms", "s"], 1000.0);
const BYTES: (&[&str], f64) = (&["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024.0);

/// Formats a number with three digits, in the same unit as the others of its column: that of the
/// smallest which is not zero, or a larger one if the largest had more than five digits.
fn in_unit_of(column: &[f64], number: f64, (names, step): (&[&str], f64)) -> String {
    let all = || column.iter().copied().chain([number]);
    let least = all().filter(|it| *it > 0.0).fold(f64::INFINITY, f64::min);
    let most = all().fold(0.0, f64::max);
    let (mut at, mut unit) = (0, 1.0);
    // Not 1000 in the smaller unit.
    while at + 1 < names.len() && most > 0.0 && (least / unit >= 999.5 || most / unit >= 1e5) {
        (at, unit) = (at + 1, unit * step);
    }
    match number / unit {
        it if it >= 99.95 => format!("{} {}", grouped(it.round() as u64), names[at]),
        it if it >= 9.995 => format!("{it:.1} {}", names[at]),
        it => format!("{it:.2} {}", names[at]),
    }
}

/// Formats a fraction of 1 in percent, with a digit behind the point.
pub(crate) fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

/// Returns `a / b`, or 0 if `b` is 0.
pub(crate) fn ratio(a: u64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { a as f64 / b as f64 }
}

/// A value, with the unit in which people read it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub(crate) enum Value {
    Text(String),
    Count(u64),
    Bytes(u64),
    BytesPerSecond(f64),
    Micros(f64),
    /// A number without decimals.
    Whole(f64),
    /// A number with two decimals.
    Ratio(f64),
    /// Seconds with three decimals.
    Seconds(f64),
    /// A fraction of 1, in whole percent.
    Percent(f64),
    /// A fraction of 1 with a digit more; `None` if it is not known.
    Part(Option<f64>),
    Spread(Spread),
    /// Anything else, which no table shows.
    Json(serde_json::Value),
}

impl Value {
    pub(crate) fn text(&self) -> String {
        self.text_in(&[])
    }

    /// Formats a value of a column with these times or bandwidths.
    fn text_in(&self, column: &[f64]) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Count(count) => grouped(*count),
            Self::Bytes(bytes) => Size(*bytes).to_string(),
            Self::BytesPerSecond(rate) => in_unit_of(column, *rate, BYTES) + "/s",
            Self::Micros(micros) => in_unit_of(column, *micros, MICROS),
            Self::Whole(number) => grouped(number.round() as u64),
            Self::Ratio(ratio) => format!("{ratio:.2}"),
            Self::Seconds(seconds) => format!("{seconds:.3}"),
            Self::Percent(part) => format!("{:.0} %", 100.0 * part),
            Self::Part(part) => part.map_or_else(|| "-".to_owned(), percent),
            Self::Spread(Spread { mean, p50, p99, .. }) => format!("{mean:.1}, {p50:.1}, {p99:.1}"),
            Self::Json(value) => value.to_string(),
        }
    }
}

/// Returns the cells of rows with the same columns. Times and bandwidths of a column have one unit.
pub(crate) fn cells(rows: &[Vec<Value>]) -> Vec<Vec<String>> {
    let number = |value: &Value| match value {
        Value::Micros(number) | Value::BytesPerSecond(number) => Some(*number),
        _ => None,
    };
    let column = |at| rows.iter().filter_map(|row| number(row.get(at)?)).collect::<Vec<_>>();
    let cell = |(at, value): (usize, &Value)| value.text_in(&column(at));
    rows.iter().map(|row| row.iter().enumerate().map(cell).collect()).collect()
}

/// Distribution of times in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Spread {
    mean: f64,
    p50: f64,
    p99: f64,
    max: f64,
}

impl Spread {
    pub(crate) fn of(times: impl IntoIterator<Item = std::time::Duration>) -> Self {
        let mut ms: Vec<f64> = times.into_iter().map(|it| it.as_secs_f64() * 1e3).collect();
        if ms.is_empty() {
            return Self::default();
        }
        ms.sort_unstable_by(f64::total_cmp);
        let mean = ms.iter().sum::<f64>() / ms.len() as f64;
        let [p50, p99, max] = [50, 99, 100].map(|part| ripieno_sim::percentile(&ms, part));
        Self { mean, p50, p99, max }
    }
}

/// A value with its JSON key, and its name in tables. Without a key it is only in tables, and
/// without a name only in the JSON.
pub(crate) type Fact = (&'static str, &'static str, Value);

/// Named values in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Facts(pub(crate) Vec<Fact>);

/// Returns the facts that a table shows.
pub(crate) fn shown(facts: &[Fact]) -> impl Iterator<Item = &Fact> {
    facts.iter().filter(|(_, name, _)| !name.is_empty())
}

/// Formats a table of rows with the same names; see [`grid`].
pub(crate) fn rows(rows: &[Facts], left: usize) -> String {
    let header: Vec<&str> =
        rows.first().map_or(Vec::new(), |row| shown(&row.0).map(|it| it.1).collect());
    let rows: Vec<_> =
        rows.iter().map(|row| shown(&row.0).map(|it| it.2.clone()).collect()).collect();
    grid(&header, cells(&rows), left)
}

impl Serialize for Facts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (key, _, value) in self.0.iter().filter(|(key, ..)| !key.is_empty()) {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

/// Returns [`Facts`] for the JSON alone: of fields with any values that can be serialized.
macro_rules! facts {
    ($($key:ident: $value:expr),* $(,)?) => {
        $crate::outcome::Facts(vec![
            $((stringify!($key), "", $crate::outcome::Value::Json(serde_json::json!($value)))),*
        ])
    };
}
pub(crate) use facts;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_has_one_unit() {
        let row = |us: f64, rate: f64| vec![Value::Micros(us), Value::BytesPerSecond(rate)];
        let rows = [row(78.64, 33e6), vec![Value::Text("failed".to_owned())], row(29_670.0, 3e9)];
        let wanted = [&["78.6 us", "31.5 MiB/s"][..], &["failed"], &["29,670 us", "2,861 MiB/s"]];
        assert_eq!(cells(&rows), wanted);
        let all = [0.0, 451.0, 471_073.0];
        let text = all.map(|number| in_unit_of(&all, number, MICROS));
        assert_eq!(text, ["0.00 ms", "0.45 ms", "471 ms"]);
        assert_eq!([999.6, 0.0].map(|it| Value::Micros(it).text()), ["1.00 ms", "0.00 us"]);
    }
}
