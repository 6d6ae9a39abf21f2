//! The figures of a second, as JSON and as lines of at most 60 columns.

use std::fmt::Write as _;
use std::time::Duration;

use ripieno_stack::MetricsAddress;
use serde::Serialize;

use crate::size::{Size, grouped};

use super::scrape::Scrape;

/// Most devices with a line of their own.
const DEVICES_SHOWN: usize = 8;
/// Seconds of a day, and of an hour: less says nothing about a day.
const DAY: f64 = 86_400.0;
const HOUR: f64 = 3600.0;

/// The causes of waits, and their metrics.
const WAITS: [(&str, &str); 4] = [
    ("load", "load_wait_seconds_sum"),
    ("save", "save_wait_seconds_sum"),
    ("slot", "slot_wait_seconds_sum"),
    ("flush", "flush_seconds_sum"),
];

/// Figures of a store. Rates are of the last second, the rest since it was opened. Field names are
/// the JSON keys; a figure that the store does not have is null.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    healthy: bool,
    path: Option<String>,
    uptime_s: f64,
    pub(super) read_bytes_s: f64,
    write_bytes_s: f64,
    pub(super) commands_s: f64,
    command_errors: u64,
    recoveries: u64,
    pub(super) devices: Vec<Device>,
    /// Share of tokens that were found, in the last second and in all.
    pub(super) hit_rate_now: Option<f64>,
    pub(super) hit_rate: Option<f64>,
    used_blocks: Option<u64>,
    capacity_blocks: Option<u64>,
    layers_in_flight: u64,
    layers_waiting: u64,
    /// Seconds that callers waited for in the last second, by cause. Callers are added up.
    pub(super) waits: Vec<Wait>,
    pub(super) worth: Worth,
}

#[derive(Debug, Serialize)]
pub(super) struct Device {
    device: usize,
    read_bytes_s: f64,
    write_bytes_s: f64,
    commands_s: f64,
    pub(super) queue_depth: u64,
    errors: u64,
    /// By its SMART log, in percent of its rated life.
    pub(super) wear_percent: Option<f64>,
    media_errors: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(super) struct Wait {
    cause: &'static str,
    pub(super) seconds: f64,
}

/// Loading against computing, and bytes loaded against bytes written.
#[derive(Debug, Serialize)]
pub(super) struct Worth {
    loads: u64,
    load_s: f64,
    /// Time that computing would have taken; null if the engine has no model of it.
    compute_saved_s: Option<f64>,
    /// How many times as long computing would have taken.
    pub(super) speedup: Option<f64>,
    loaded_bytes: u64,
    written_bytes: u64,
    /// Null in the first hour.
    pub(super) written_bytes_day: Option<f64>,
    /// Writes of the whole capacity a day.
    pub(super) capacity_writes_day: Option<f64>,
}

fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

impl Figures {
    /// Computes the figures from two scrapes that are `apart`.
    pub(crate) fn new(before: &Scrape, now: &Scrape, apart: Duration) -> Self {
        let apart = apart.as_secs_f64();
        // A counter that is lower than before was started again.
        let more = |name: &str| {
            let (old, new) = (before.or_zero(name), now.or_zero(name));
            if new < old { new } else { new - old }
        };
        let rate = |name: &str| more(name) / apart;
        let device = |device: usize| {
            let name = |metric: &str| format!("device_{metric}{{device=\"{device}\"}}");
            Device {
                device,
                read_bytes_s: rate(&name("read_bytes_total")),
                write_bytes_s: rate(&name("written_bytes_total")),
                commands_s: rate(&name("commands_total")),
                queue_depth: now.count(&name("queue_depth")),
                errors: now.count(&name("command_errors_total")),
                wear_percent: now.get(&name("wear_percent")),
                media_errors: now.get(&name("media_errors_total")).map(|count| count as u64),
            }
        };
        let devices: Vec<_> = (0..now.devices()).map(device).collect();
        let (hits, asked) = ("hit_tokens_total", "lookup_tokens_total");
        Self {
            healthy: now.or_zero("healthy") > 0.0,
            path: now.label("path_info{route=\"").map(str::to_owned),
            uptime_s: now.or_zero("uptime_seconds"),
            read_bytes_s: devices.iter().map(|device| device.read_bytes_s).sum(),
            write_bytes_s: devices.iter().map(|device| device.write_bytes_s).sum(),
            commands_s: rate("commands_total"),
            command_errors: now.count("command_errors_total"),
            recoveries: now.count("recoveries_total"),
            devices,
            hit_rate_now: ratio(more(hits), more(asked)),
            hit_rate: ratio(now.or_zero(hits), now.or_zero(asked)),
            used_blocks: now.get("used_blocks").map(|count| count as u64),
            capacity_blocks: now.get("capacity_blocks").map(|count| count as u64),
            layers_in_flight: now.count("layers_in_flight"),
            layers_waiting: now.count("layers_waiting"),
            waits: WAITS.map(|(cause, name)| Wait { cause, seconds: rate(name) }).into(),
            worth: Worth::new(now),
        }
    }

    /// Formats the figures in lines of at most 60 columns.
    pub(crate) fn text(&self, address: &MetricsAddress) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{name:<9}{value}");
        };
        let shown: String = address.to_string().chars().take(48).collect();
        line("ripieno", shown);
        if !self.healthy {
            let state = if self.path.is_some() { "takes no writes" } else { "failed or closed" };
            line("store", format!("{state}; see the log of its process"));
            if self.path.is_none() {
                return text.trim_end().to_owned();
            }
        }
        let up = Duration::from_secs(self.uptime_s as u64).as_secs();
        let path = self.path.as_deref().unwrap_or("unknown");
        let [hours, minutes] = [up / 3600, up / 60 % 60];
        line("path", format!("{path}, open for {hours}:{minutes:02}:{:02}", up % 60));
        line("read", rates(self.read_bytes_s, "write", self.write_bytes_s));
        line("commands", format!("{}/s", grouped(self.commands_s as u64)));
        let errors = grouped(self.command_errors);
        line("errors", format!("{errors} ({} recoveries)", self.recoveries));
        for Device { device, read_bytes_s, write_bytes_s, queue_depth, errors, .. } in
            self.devices.iter().take(DEVICES_SHOWN)
        {
            let errors = if *errors > 0 { format!(" errors {errors}") } else { String::new() };
            let rates = rates(*read_bytes_s, "w", *write_bytes_s);
            line(&format!(" dev {device}"), format!("{rates} depth {queue_depth:>4}{errors}"));
        }
        if let Some(more) = self.devices.len().checked_sub(DEVICES_SHOWN + 1) {
            line("", format!("and {} more devices: --json", more + 1));
        }
        line("wear", self.wear());
        if let (Some(used), Some(capacity)) = (self.used_blocks, self.capacity_blocks) {
            let part = percent(ratio(used as f64, capacity as f64));
            line(
                "hits",
                format!("{} (now {})", percent(self.hit_rate), percent(self.hit_rate_now)),
            );
            line("blocks", format!("{} of {} ({part})", grouped(used), grouped(capacity)));
        }
        line(
            "layers",
            format!("{} in flight, {} waiting", self.layers_in_flight, self.layers_waiting),
        );
        let waits = self.waits.iter().map(|wait| format!("{} {:.2}", wait.cause, wait.seconds));
        line("waits", format!("{} s/s", waits.collect::<Vec<_>>().join(", ")));
        self.worth.lines(&mut line);
        text.trim_end().to_owned()
    }
}

impl Figures {
    /// Describes the most worn device, and the media errors of all.
    fn wear(&self) -> String {
        let worn = self.devices.iter().filter_map(|it| Some((it.wear_percent?, it.device)));
        let Some((wear, device)) = worn.max_by(|a, b| a.0.total_cmp(&b.0)) else {
            return "not reported".to_owned();
        };
        let errors: u64 = self.devices.iter().filter_map(|it| it.media_errors).sum();
        format!("{wear} % of dev {device}, media errors: {}", grouped(errors))
    }
}

impl Worth {
    fn new(now: &Scrape) -> Self {
        let load_s = now.or_zero("load_seconds_sum");
        let hits = now.or_zero("compute_saved_seconds_count");
        let compute_saved_s = now.get("compute_saved_seconds_sum").filter(|_| hits > 0.0);
        let written_bytes = now.count("written_bytes_total") + now.count("journal_bytes_total");
        let up = now.or_zero("uptime_seconds");
        let written_bytes_day = (up >= HOUR).then(|| written_bytes as f64 / (up / DAY));
        let capacity = now.or_zero("capacity_blocks") * now.or_zero("block_bytes");
        Self {
            loads: now.count("load_seconds_count"),
            load_s,
            compute_saved_s,
            speedup: compute_saved_s.and_then(|saved| ratio(saved, load_s)),
            loaded_bytes: now.count("loaded_bytes_total"),
            written_bytes,
            written_bytes_day,
            capacity_writes_day: written_bytes_day.and_then(|bytes| ratio(bytes, capacity)),
        }
    }

    fn lines(&self, line: &mut impl FnMut(&str, String)) {
        let Self { loads, load_s, loaded_bytes, written_bytes, .. } = self;
        line("worth", format!("{} loads took {load_s:.1} s", grouped(*loads)));
        let times = self.compute_saved_s.zip(self.speedup);
        let times = times.map(|(saved, more)| format!("{saved:.1} s, {more:.1} times as long"));
        line("", format!("computing: {}", times.as_deref().unwrap_or("not reported")));
        line("", format!("{} loaded for {} written", Size(*loaded_bytes), Size(*written_bytes)));
        let times = self.capacity_writes_day;
        let times = times.map(|times| format!(", {times:.1} times the capacity"));
        let day = self.written_bytes_day.map_or("not known in the first hour".to_owned(), |day| {
            format!("{}{}", Size(day as u64), times.unwrap_or_default())
        });
        line("", format!("written a day: {day}"));
    }
}

fn rates(first: f64, name: &str, second: f64) -> String {
    let [first, second] = [first, second].map(|rate| format!("{}/s", Size(rate as u64)));
    format!("{first:<13}{name} {second:<11}")
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".to_owned(), |share| format!("{:.1} %", 100.0 * share))
}
