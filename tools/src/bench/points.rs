//! Measurements of `ripieno bench raw` as rows, and what they say together.

use serde_json::json;

use super::check::Checks;
use super::load::{Found, Load, WINDOWS};
use super::report::{Report, Row};
use crate::outcome::{Value, ratio};
use crate::size::Size;

/// Part of the highest IOPS at the knee of a sweep.
const KNEE: f64 = 0.9;
/// Bytes of a submission queue entry and of a completion, and of a doorbell.
const ENTRY_BYTES: u64 = 64 + 16;
const DOORBELL_BYTES: u64 = 4;

/// Returns the row of a measurement.
pub(super) fn row(load: &Load, found: &Found, checks: Checks) -> Row {
    let windows = found.windows.map(|bytes| bytes as f64);
    let most = windows.iter().fold(0.0_f64, |most, bytes| most.max(*bytes));
    let least = windows.iter().fold(f64::INFINITY, |least, bytes| least.min(*bytes));
    let mean = windows.iter().sum::<f64>() / WINDOWS as f64;
    let transfers = (found.reads + found.writes) as f64;
    let rate = |transfers: u64| transfers as f64 * f64::from(load.bytes) / found.seconds;
    let bytes_s = rate(found.reads) + rate(found.writes);
    let counters = &found.counters;
    let doorbells = counters.sq_doorbells + counters.cq_doorbells;
    let us = |nanos: u64| Value::Micros(nanos as f64 / 1e3);
    let at = |quantile| us(found.latency.value_at_quantile(quantile));
    let cpu_s_gb = found.cpu_seconds / (bytes_s * found.seconds).max(1.0) * 1e9;
    let caller_us = found.caller_seconds / transfers.max(1.0) * 1e6;
    let each = ratio(counters.commands, counters.sq_doorbells);
    let queue_bytes = counters.commands * ENTRY_BYTES + doorbells * DOORBELL_BYTES;
    Row {
        of: vec![
            ("rw", "pattern", Value::Text(load.rw.name())),
            ("read_percent", "", Value::Count(load.rw.read_percent().into())),
            ("bs_bytes", "size", Value::Bytes(load.bytes.into())),
            ("iodepth", "depth", Value::Count(load.depth.into())),
            ("together", "", Value::Count(load.together().into())),
        ],
        figures: vec![
            ("iops", "IOPS", Value::Whole(transfers / found.seconds)),
            ("bytes_s", "bandwidth", Value::BytesPerSecond(bytes_s)),
            ("p50_us", "p50", at(0.5)),
            ("p99_us", "p99", at(0.99)),
            ("p99.9_us", "p99.9", at(0.999)),
            ("p99.99_us", "p99.99", at(0.9999)),
            ("cpu_s_gb", "CPU s/GB", Value::Ratio(cpu_s_gb)),
            ("commands_per_doorbell", "cmd/bell", Value::Ratio(each)),
            ("seconds", "", Value::Ratio(found.seconds)),
            ("read_bytes_s", "", Value::BytesPerSecond(rate(found.reads))),
            ("write_bytes_s", "", Value::BytesPerSecond(rate(found.writes))),
            ("min_us", "", us(found.latency.min())),
            ("mean_us", "", Value::Micros(found.latency.mean() / 1e3)),
            ("p90_us", "", at(0.9)),
            ("max_us", "", us(found.latency.max())),
            ("commands", "", Value::Count(counters.commands)),
            ("queue_bytes", "", Value::Bytes(queue_bytes)),
            ("caller_us", "", Value::Micros(caller_us)),
            ("compared_bytes", "", Value::Bytes(checks.compared)),
            ("zeros", "", Value::Percent(ratio(checks.zeros, checks.sampled))),
        ],
        spread: if mean > 0.0 { (most - least) / mean } else { 0.0 },
        wrong: checks.wrong,
    }
}

/// Completes a report of such rows: plots, knees, mixtures, and notes.
pub(super) fn summarise(report: &mut Report) {
    report.axes = (
        vec![("iodepth", "depth of a queue", 1.0), ("bs_bytes", "KiB of a transfer", 1024.0)],
        vec![
            ("iops", "1000 IOPS", 1e3),
            ("bytes_s", "MiB/s", f64::from(1 << 20)),
            ("p99_us", "p99, us", 1.0),
        ],
    );
    let rows = &report.rows;
    let (knees, mut notes): (Vec<_>, Vec<_>) = rows.iter().filter_map(|it| knee(rows, it)).unzip();
    let mixed: (Vec<_>, Vec<_>) = rows.iter().filter_map(|it| mixed(rows, it)).unzip();
    notes.extend(mixed.1);
    let number = |row: &Row, key| row.number(key).unwrap_or(0.0);
    for row in rows {
        let zeros = number(row, "zeros");
        if zeros > 0.5 {
            notes.push(format!(
                "warning: {}: {:.0} % of the compared blocks hold zeros only; a drive answers \
                 reads of blocks that were never written without reading, so write them first",
                row.name(),
                zeros * 100.0
            ));
        }
    }
    let compared: f64 = rows.iter().map(|row| number(row, "compared_bytes")).sum();
    report.checked = match compared as u64 {
        0 => "contents were not compared: this process cannot read the buffers, or too few bytes \
              of the devices are used"
            .to_owned(),
        compared => format!("{} of contents", Size(compared)),
    };
    report.notes.extend(notes);
    report.more.extend([("knees", json!(knees)), ("mixed", json!(mixed.0))]);
}

/// Returns the smallest depth with nearly the highest IOPS, and a note that says so, if this is the
/// first row of a sweep over three or more depths.
fn knee(rows: &[Row], row: &Row) -> Option<(serde_json::Value, String)> {
    let (rw, size) = (row.value("rw")?.text(), row.value("bs_bytes")?.text());
    let is_same = |it: &&Row| it.number("bs_bytes") == row.number("bs_bytes") && it.has("rw", &rw);
    let sweep: Vec<&Row> = rows.iter().filter(is_same).collect();
    let mut found: Vec<(u64, f64, &Row)> = sweep
        .iter()
        .filter_map(|it| Some((it.number("iodepth")? as u64, it.number("iops")?, *it)))
        .collect();
    if !std::ptr::eq(sweep[0], row) || found.len() < 3 {
        return None;
    }
    found.sort_by_key(|(depth, ..)| *depth);
    let highest = found.iter().map(|it| it.1).fold(0.0, f64::max);
    let (depth, iops, at) = found.into_iter().find(|it| it.1 >= KNEE * highest)?;
    let (of_highest, p99) = (iops / highest, at.value("p99_us")?);
    let note = format!(
        "knee: {rw} of {size} has {} IOPS, {:.0} % of the highest, at depth {depth}; p99 {}",
        at.value("iops")?.text(),
        of_highest * 100.0,
        p99.text(),
    );
    let (bytes, p99) = (row.number("bs_bytes"), at.number("p99_us"));
    let json = json!({
        "rw": rw, "bs_bytes": bytes, "iodepth": depth, "iops": iops, "of_highest": of_highest,
        "p99_us": p99,
    });
    Some((json, note))
}

/// Compares a mixture with the reads and writes alone of the same size and depth: the time of the
/// same bytes one after the other, relative to the time together.
fn mixed(rows: &[Row], row: &Row) -> Option<(serde_json::Value, String)> {
    let (rw, percent) = (row.value("rw")?.text(), row.number("read_percent")?);
    let alone = |percent: f64| {
        let is_alone = |it: &&Row| {
            ["bs_bytes", "iodepth"].iter().all(|key| it.number(key) == row.number(key))
                && it.value("rw").is_some_and(|it| it.text().starts_with("rand"))
                    == rw.starts_with("rand")
                && it.number("read_percent") == Some(percent)
        };
        rows.iter().find(is_alone)?.number("bytes_s")
    };
    if percent == 0.0 || percent == 100.0 {
        return None;
    }
    let of = |key| row.number(key);
    let factor = of("read_bytes_s")? / alone(100.0)? + of("write_bytes_s")? / alone(0.0)?;
    let (size, depth) = (row.value("bs_bytes")?.text(), row.value("iodepth")?.text());
    let note = format!(
        "mixed: {rw} of {size} at depth {depth}, {percent} % reads: together {factor:.2} times as \
         fast as one after the other"
    );
    let (bytes, depth) = (row.number("bs_bytes"), row.number("iodepth"));
    Some((json!({ "rw": rw, "bs_bytes": bytes, "iodepth": depth, "factor": factor }), note))
}
