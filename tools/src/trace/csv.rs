//! Rows of CSV: times and lengths. None of their fields has a comma.

use std::str;
use std::time::Duration;

use super::{Form, Place, Reading, Request};
use crate::problem::Problem;

/// Names of the columns with the time, the prompt's tokens and those of the answer.
const COLUMNS: [(Form, [&str; 3]); 2] = [
    (Form::Azure, ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]),
    (Form::BurstGpt, ["Timestamp", "Request tokens", "Response tokens"]),
];

/// Returns true if this is the first line of a trace, and notes its columns.
pub(super) fn recognise(head: &[u8], found: &mut Reading) -> bool {
    let head = str::from_utf8(head).unwrap_or_default();
    let names: Vec<&str> = head.trim_start_matches('\u{feff}').split(',').map(field).collect();
    for (form, columns) in COLUMNS {
        let at = columns.map(|wanted| names.iter().position(|name| *name == wanted));
        if let [Some(time), Some(input), Some(output)] = at {
            (found.form, found.columns) = (Some(form), [time, input, output]);
        }
    }
    found.form.is_some()
}

fn field(text: &str) -> &str {
    text.trim().trim_matches('"')
}

/// Adds a row.
pub(super) fn row(row: &[u8], found: &mut Reading, at: &Place<'_>) -> Result<(), Problem> {
    let form = found.form.expect("the first line has names");
    let (_, names) = COLUMNS.into_iter().find(|(of, _)| *of == form).expect("it has columns");
    let row = str::from_utf8(row).map_err(|_| at.problem("not UTF-8"))?;
    let fields: Vec<&str> = row.split(',').map(field).collect();
    let texts = found.columns.map(|column| fields.get(column).copied().unwrap_or_default());
    let wrong = |column: usize, wanted: &str| {
        let what = format!("{}: expected {wanted}, found {:?}", names[column], texts[column]);
        Problem::new(format!("{at}: {what}"), "correct the row, or leave it out")
    };
    let tokens = |column: usize| {
        let tokens = texts[column].parse().map_err(|_| wrong(column, "a number of tokens"))?;
        at.limit(names[column], tokens)
    };
    let [input_tokens, output_tokens] = [tokens(1)?, tokens(2)?];
    if form == Form::BurstGpt && (input_tokens == 0 || output_tokens == 0) {
        found.failed += 1;
        return Ok(());
    }
    let arrival = match form {
        Form::Azure => date(texts[0]).ok_or_else(|| {
            wrong(0, "a date of UTC such as 2023-11-16 18:15:46.680 or 2024-05-12 00:00:00+00:00")
        })?,
        _ => {
            let time = texts[0].parse().map_err(|_| wrong(0, "seconds"))?;
            at.time(names[0], time, form)?
        }
    };
    let own = found.requests.len() as u64;
    let request = Request { arrival, input_tokens, output_tokens, own, ..Request::default() };
    found.push(request, at)?;
    Ok(())
}

/// Returns the time since 1970 of a date and time of UTC.
fn date(text: &str) -> Option<Duration> {
    let (day, time) = text.split_once([' ', 'T'])?;
    let time = time.strip_suffix("+00:00").or(time.strip_suffix('Z')).unwrap_or(time);
    let numbers = |text: &str, by: char| -> Option<Vec<f64>> {
        text.split(by).map(|number| number.parse().ok()).collect()
    };
    let (&[year, month, day], &[hour, minute, second]) =
        (&numbers(day, '-')?[..], &numbers(time, ':')?[..])
    else {
        return None;
    };
    let is_one = (1970.0..3000.0).contains(&year)
        && (1.0..=12.0).contains(&month)
        && (1.0..=31.0).contains(&day)
        && (0.0..24.0).contains(&hour)
        && (0.0..60.0).contains(&minute)
        && (0.0..61.0).contains(&second);
    is_one.then(|| {
        // Years begin in March, so that a leap day is the last one.
        let (year, month) =
            if month > 2.0 { (year, month - 3.0) } else { (year - 1.0, month + 9.0) };
        let leap = (year / 4.0).floor() - (year / 100.0).floor() + (year / 400.0).floor();
        let days = year * 365.0 + leap + ((153.0 * month + 2.0) / 5.0).floor() + day - 719_469.0;
        let minutes = Duration::from_secs_f64((days * 24.0 + hour) * 3600.0 + minute * 60.0);
        minutes + Duration::from_secs_f64(second)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_seconds_since_1970() {
        for (text, seconds) in [
            ("1970-01-01 00:00:00", 0.0),
            ("2000-02-29T12:00:00Z", 951_825_600.0),
            ("2023-11-16 18:15:46.6805900", 1_700_158_546.680_59),
            ("2024-03-01 00:00:00+00:00", 1_709_251_200.0),
        ] {
            let found = date(text).unwrap().as_secs_f64();
            assert!((found - seconds).abs() < 1e-6, "{text}: {found}");
        }
        for wrong in [
            "",
            "2023-11-16",
            "2023-13-16 18:15:46",
            "2023-11-16 18:15",
            "1 2",
            "-1-1 x",
            "2023-11-16 18:15:46+01:00",
            "1e9-11-16 18:15:46",
            "2023-11-16 NaN:15:46",
        ] {
            assert_eq!(date(wrong), None, "{wrong}");
        }
    }
}
