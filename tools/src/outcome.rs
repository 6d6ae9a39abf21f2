//! The outcome of a command: values that are named once, and are its JSON and its tables.

use serde::{Serialize, Serializer, ser::SerializeMap as _};

use crate::size::{Size, grouped};
use crate::table::grid;

/// Formats microseconds with three digits.
fn us(us: f64) -> String {
    match us {
        us if us >= 1e5 => format!("{:.0} ms", us / 1e3),
        us if us >= 1e3 => format!("{:.2} ms", us / 1e3),
        us if us >= 100.0 => format!("{us:.0} us"),
        us => format!("{us:.1} us"),
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
        match self {
            Self::Text(text) => text.clone(),
            Self::Count(count) => grouped(*count),
            Self::Bytes(bytes) => Size(*bytes).to_string(),
            Self::BytesPerSecond(rate) => format!("{}/s", Size(*rate as u64)),
            Self::Micros(micros) => us(*micros),
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
    let cells = rows.iter().map(|row| shown(&row.0).map(|it| it.2.text()).collect());
    grid(&header, cells.collect(), left)
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
