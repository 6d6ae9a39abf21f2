//! All metrics of a store by name, with their samples and their text in the OpenMetrics format.
//!
//! The table has no counters of its own: each entry reads one that the store or its plane keeps, so
//! the I/O path does no work for it. It also names the counters of the connector for vLLM, so that
//! a dashboard needs one set of names.

use std::fmt::{self, Write as _};

use kv_catalog::lock;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gio_uring::QueueCounters;
use nvme_driver::Nanos;
use nvme_spec::log::SmartLog;
use objstore::{
    DURATION_LIMITS_US, Durations, Plane, PlaneStats, SharedController, Store, StoreError,
    StoreStats,
};

mod endpoint;

pub use endpoint::Endpoint;

/// Time for which a device's SMART log is not read again.
const HEALTH_EVERY: Nanos = Nanos::from_millis(60_000);

/// Type of a metric, in the words of OpenMetrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// A current value.
    Gauge,
    /// A property, as a label.
    Info,
    /// Durations, as the connector for vLLM has them under these names.
    Histogram,
}

impl MetricKind {
    /// Returns the word of OpenMetrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Info => "info",
            Self::Histogram => "histogram",
        }
    }
}

/// A metric.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Name, without the prefix `ripieno_` and a counter's suffix `_total`. The unit comes last.
    pub name: &'static str,
    /// Type.
    pub kind: MetricKind,
    /// Meaning, in one sentence.
    pub help: &'static str,
    source: Source,
}

/// Where the value of a metric is found.
#[derive(Debug, Clone, Copy)]
enum Source {
    Plane(fn(&PlaneStats) -> u64),
    Times(fn(&PlaneStats) -> Durations),
    /// Added up for each device.
    Device(fn(&QueueCounters) -> u64),
    /// Of each device, by its SMART log.
    Smart(fn(&SmartLog) -> u64),
    Executor,
    Route,
    /// Only with a catalog in the same process. The second argument is the tokens of a block.
    Store(fn(&StoreStats, u64) -> u64),
    ComputeSaved,
    Uptime,
    Healthy,
    /// Counted by the connector for vLLM.
    Connector,
}

impl Metric {
    /// Returns the unit: `bytes`, `seconds`, or nothing for a number.
    #[must_use]
    pub fn unit(&self) -> &'static str {
        let units = ["bytes", "seconds"];
        units.into_iter().find(|unit| self.name.ends_with(unit)).unwrap_or("")
    }

    /// Returns true if only the connector for vLLM has it.
    #[must_use]
    pub fn is_of_connector(&self) -> bool {
        matches!(self.source, Source::Connector)
    }
}

macro_rules! metrics {
    ($($kind:ident $name:literal $source:expr => $help:literal;)*) => {
        &[$(Metric { name: $name, kind: MetricKind::$kind, help: $help, source: $source }),*]
    };
}

use Source::{
    ComputeSaved as Saved, Connector, Device, Executor, Healthy, Plane as Of, Route, Store as Kept,
};
use Source::{Smart, Times, Uptime};

/// All metrics.
pub static METRICS: &[Metric] = metrics! {
    Gauge "healthy" Healthy => "0 when the store has failed, was closed or takes no writes.";
    Gauge "uptime_seconds" Uptime => "Time since the store was opened.";
    Info "path" Route => "The data path: direct, staged or host.";
    Info "executor" Executor => "Who moves the data, and if files are not moved by io_uring, why.";
    Gauge "bounced" Of(|plane| plane.is_bounced.into()) =>
        "1 when blocks are copied through bounce buffers: devices cannot describe their addresses.";
    Counter "loaded_bytes" Of(|plane| plane.retrieved_bytes + plane.dram.retrieved_bytes) =>
        "Bytes that were loaded, from devices and DRAM, without padding.";
    Counter "read_bytes" Of(|plane| plane.retrieved_bytes) =>
        "Bytes that were loaded from devices, without padding.";
    Counter "stored_bytes" Of(|plane| plane.stored_bytes) =>
        "Bytes that were stored, without padding.";
    Counter "written_bytes" Of(|plane| plane.ring.total.bytes_written) =>
        "Bytes that devices wrote for blocks, with padding, without the journal.";
    Counter "commands" Of(|plane| plane.ring.total.commands) => "NVMe commands.";
    Counter "command_errors" Of(|plane| plane.ring.total.errors) => "NVMe commands that failed.";
    Counter "late_completions" Of(|plane| plane.ring.total.late) =>
        "NVMe commands that completed after their timeout.";
    Counter "sq_doorbells" Of(|plane| plane.ring.total.sq_doorbells) =>
        "Doorbells of submission queues.";
    Counter "cq_doorbells" Of(|plane| plane.ring.total.cq_doorbells) =>
        "Doorbells of completion queues.";
    Counter "recoveries" Of(|plane| plane.recoveries) =>
        "Recoveries of the controllers from a timeout or a fault.";
    Gauge "layers_in_flight" Of(|plane| plane.layers_in_flight.into()) =>
        "Layers that are moved now.";
    Gauge "layers_waiting" Of(|plane| plane.layers_waiting.into()) =>
        "Layers that wait for their turn.";
    Histogram "load_seconds" Times(|plane| plane.times.loads) =>
        "Time of loads, from the start to the last layer.";
    Histogram "save_seconds" Times(|plane| plane.times.saves) =>
        "Time of saves, from the start to the last layer (vLLM: to the flush).";
    Histogram "load_wait_seconds" Times(|plane| plane.times.load_waits) =>
        "Time that the engine waited for layers of loads.";
    Histogram "save_wait_seconds" Times(|plane| plane.times.save_waits) =>
        "Time that the engine waited for layers of saves.";
    Histogram "slot_wait_seconds" Times(|plane| plane.times.slot_waits) =>
        "Time that the engine waited to start a layer: too much was in flight.";
    Histogram "flush_seconds" Times(|plane| plane.times.flushes) =>
        "Time of flushes of the devices' volatile caches.";
    Histogram "compute_saved_seconds" Saved =>
        "Time that computing loaded tokens would have taken, by the engine's model.";
    Counter "dram_loaded_bytes" Of(|plane| plane.dram.retrieved_bytes) =>
        "Bytes that were loaded from DRAM.";
    Counter "dram_hit_blocks" Of(|plane| plane.dram.hits) =>
        "Loaded blocks that were found in DRAM.";
    Counter "dram_miss_blocks" Of(|plane| plane.dram.misses) =>
        "Loaded blocks that were not in DRAM.";
    Gauge "dram_used_blocks" Of(|plane| plane.dram.blocks.into()) => "Blocks in DRAM.";
    Counter "dram_evicted_blocks" Of(|plane| plane.dram.evictions) =>
        "Blocks that were evicted from DRAM.";
    Counter "dram_prefetched_bytes" Of(|plane| plane.dram.prefetched_bytes) =>
        "Bytes that were read ahead into DRAM.";
    Counter "dram_wasted_bytes" Of(|plane| plane.dram.wasted_bytes) =>
        "Bytes of these that were gone before a load.";
    Counter "codec_encoded_bytes" Of(|plane| plane.codec.encoded_bytes) =>
        "Bytes before they were encoded, of what was stored.";
    Counter "codec_decoded_bytes" Of(|plane| plane.codec.decoded_bytes) =>
        "Bytes after they were decoded, of what was loaded.";
    Counter "codec_unfit_blocks" Of(|plane| plane.codec.unfit_blocks) =>
        "Blocks that were not stored because they do not fit the codec.";
    Histogram "codec_encode_seconds" Times(|plane| plane.codec.encodes) =>
        "Time to encode the layers of saves.";
    Histogram "codec_decode_seconds" Times(|plane| plane.codec.decodes) =>
        "Time to decode the layers of loads.";
    Counter "device_commands" Device(|queue| queue.counters.commands) =>
        "NVMe commands of a device, since its queues were made.";
    Counter "device_command_errors" Device(|queue| queue.counters.errors) =>
        "NVMe commands of a device that failed, since its queues were made.";
    Counter "device_read_bytes" Device(|queue| queue.counters.bytes_read) =>
        "Bytes that a device read, with padding and tests, since its queues were made.";
    Counter "device_written_bytes" Device(|queue| queue.counters.bytes_written) =>
        "Bytes that a device wrote, with padding, without journal, since its queues were made.";
    Gauge "device_queue_depth" Device(|queue| queue.outstanding.into()) =>
        "NVMe commands in flight on a device.";
    Gauge "device_wear_percent" Smart(|log| log.percentage_used.into()) =>
        "Rated life of a device that is used, in percent; above 100 it is exceeded.";
    Gauge "device_spare_percent" Smart(|log| log.available_spare.into()) =>
        "Spare blocks of a device that are left, in percent.";
    Counter "device_media_errors" Smart(|log| u128::from_le_bytes(log.media_errors) as u64) =>
        "Data that a device could not read or write correctly, over its life.";
    Counter "lookups" Kept(|store, _| store.lookups.calls) => "Lookups.";
    Counter "lookup_tokens" Kept(|store, tokens| store.lookups.blocks * tokens) =>
        "Tokens that were looked up (vLLM: once for each request that got blocks).";
    Counter "hit_tokens" Kept(|store, tokens| store.lookups.hits * tokens) =>
        "Tokens of these that were found.";
    Gauge "capacity_blocks" Kept(|store, _| store.files.files.into()) =>
        "Blocks that the store has room for.";
    Gauge "used_blocks" Kept(|store, _| store.files.stored.into()) => "Blocks it holds.";
    Gauge "free_blocks" Kept(|store, _| store.files_free().into()) => "Room that is free.";
    Gauge "free_runs" Kept(|store, _| store.files.free_runs.into()) =>
        "Runs of adjacent free blocks: 1 without fragmentation.";
    Gauge "pending_blocks" Kept(|store, _| store.files.writing.into()) =>
        "Blocks that are on their way to the store.";
    Gauge "active_blocks" Kept(|store, _| store.files.active.into()) =>
        "Blocks in use, which are not evicted.";
    Gauge "block_bytes" Kept(|store, _| store.file_bytes) =>
        "Bytes of a block on the devices, with padding.";
    Counter "evicted_blocks" Kept(|store, _| store.files.evicted) =>
        "Blocks that were evicted for others.";
    Counter "lost_blocks" Kept(|store, _| store.lookups.files_lost) =>
        "Blocks that could not be read, and were dropped.";
    Counter "journal_bytes" Kept(|store, _| store.journal_bytes) =>
        "Bytes that were written to the journal, with padding.";
    Counter "deallocated_bytes" Kept(|store, _| store.deallocated_bytes) =>
        "Bytes that drives were told to deallocate.";
    Gauge "deallocation_refusals" Kept(|store, _| store.deallocations_failed) =>
        "Drives that refused to deallocate.";
    Counter "loaded_blocks" Connector => "Blocks that were loaded.";
    Counter "stored_blocks" Connector => "Blocks that were stored.";
    Counter "dropped_blocks" Connector =>
        "Blocks that were not stored: too much was on its way, or no file was free.";
    Counter "missed_tokens" Connector =>
        "Tokens that were looked up and are not loaded, by `reason` (docs/reference/vllm.md).";
    Counter "load_failures" Connector => "Loads with blocks that did not arrive.";
    Counter "save_failures" Connector => "Saves that failed on a rank.";
    Counter "checksum_mismatches" Connector =>
        "Blocks that were not what was stored, of all ranks.";
};

/// Time that an engine did not have to compute: one entry for each hit.
#[derive(Debug, Default)]
pub struct ComputeSaved {
    hits: Mutex<Durations>,
}

impl ComputeSaved {
    /// Counts a hit whose tokens would have taken this long to compute.
    pub fn add(&self, time: Duration) {
        lock(&self.hits).add(Nanos(time.as_nanos() as u64));
    }

    fn get(&self) -> Durations {
        *lock(&self.hits)
    }
}

/// The devices' SMART logs, which change slowly and take a command each to read.
#[derive(Debug, Default)]
struct Health {
    logs: Vec<Option<SmartLog>>,
    next: Nanos,
}

impl Health {
    /// Reads the logs if they are old. A device that does not answer has none.
    fn refresh(&mut self, plane: &Plane) -> Result<(), StoreError> {
        let now = plane.now();
        if now >= self.next {
            let read = |controller: &SharedController| controller.lock().smart_log().ok();
            self.logs = plane.controllers()?.iter().map(read).collect();
            self.next = now + HEALTH_EVERY;
        }
        Ok(())
    }
}

/// Format of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TextFormat {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' own, version 0.0.4: it has no infos and no units.
    Prometheus,
}

impl TextFormat {
    /// Returns the format for the `Accept` of a request: Prometheus' own if only that is named.
    fn of_accept(accept: &str) -> Self {
        let accept = accept.to_ascii_lowercase();
        // "q=0" refuses a kind.
        let is_refused = |part: &str| {
            let weight = part.split(';').find_map(|it| it.trim().strip_prefix("q="));
            weight.is_some_and(|weight| weight.trim_matches(['0', '.']).is_empty())
        };
        let accepts = |kind| accept.split(',').any(|part| part.contains(kind) && !is_refused(part));
        match accepts("text/plain") && !accepts("openmetrics") {
            true => Self::Prometheus,
            false => Self::OpenMetrics,
        }
    }

    fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// The text of a store's metrics, for a server that has more than this page.
#[derive(Debug)]
pub struct MetricsPage {
    plane: Plane,
    store: Option<Store>,
    since: Nanos,
    compute_saved: Arc<ComputeSaved>,
    health: Health,
}

impl MetricsPage {
    /// Makes the page of a store, whose time begins now.
    #[must_use]
    pub fn of_store(store: &Store) -> Self {
        Self::of(store.plane().clone(), Some(store.clone()))
    }

    pub(crate) fn of(plane: Plane, store: Option<Store>) -> Self {
        let since = plane.now();
        Self { plane, store, since, compute_saved: Arc::default(), health: Health::default() }
    }

    /// Returns content type and text, for the value of a request's `Accept`: OpenMetrics, or
    /// Prometheus' own format if only that is named.
    pub fn text(&mut self, accept: &str) -> (&'static str, String) {
        let Self { plane, store, since, compute_saved, health } = self;
        let format = TextFormat::of_accept(accept);
        let taken = health.refresh(plane).and_then(|()| Snapshot::take(plane, store.as_ref()));
        let mut values = taken.unwrap_or_default();
        if values.plane.is_some() {
            values.smart.clone_from(&health.logs);
            values.uptime = Some(plane.now() - *since);
        }
        values.compute_saved = Some(compute_saved.get());
        (format.content_type(), values.text(format))
    }
}

/// Returns the samples of a store, or of a plane without one, by their names on the page of the
/// metrics without the prefix `ripieno_`. Health of devices and times of an endpoint are not
/// counted by them.
///
/// # Errors
/// Returns [`StoreError::Failed`], or the error of a recovery from an earlier fault.
pub fn samples(
    plane: &Plane,
    store: Option<&Store>,
) -> Result<Vec<(String, SampleValue)>, StoreError> {
    plane.sync()?;
    let values = Snapshot::take(plane, store)?;
    let named = |metric: &'static Metric| {
        let all = values.samples(metric).into_iter();
        all.map(|(suffix, value)| (format!("{}{suffix}", metric.name), value))
    };
    Ok(METRICS.iter().flat_map(named).collect())
}

/// The value of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampleValue {
    /// A number.
    Count(u64),
    /// A time, in seconds.
    Seconds(Nanos),
}

impl From<SampleValue> for f64 {
    fn from(value: SampleValue) -> Self {
        match value {
            SampleValue::Count(count) => count as Self,
            SampleValue::Seconds(time) => time.0 as Self / 1e9,
        }
    }
}

impl fmt::Display for SampleValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Count(count) => count.fmt(f),
            Self::Seconds(_) => f64::from(*self).fmt(f),
        }
    }
}

/// Suffix of a sample, with its labels, and its value.
type Sample = (String, SampleValue);

/// Returns the samples of a histogram: each bucket has those below it, too.
fn histogram(Durations { count, sum, buckets, .. }: Durations) -> Vec<Sample> {
    let mut below = 0;
    let buckets = DURATION_LIMITS_US.iter().zip(buckets).map(|(limit, bucket)| {
        below += bucket;
        let seconds = *limit as f64 / 1e6;
        (format!("_bucket{{le=\"{seconds:?}\"}}"), SampleValue::Count(below))
    });
    let all =
        ["_bucket{le=\"+Inf\"}", "_count"].map(|it| (it.to_owned(), SampleValue::Count(count)));
    buckets.chain(all).chain([("_sum".to_owned(), SampleValue::Seconds(sum))]).collect()
}

/// The values at one time. Without a plane: it has failed, or was closed.
#[derive(Debug, Default)]
struct Snapshot {
    plane: Option<PlaneStats>,
    store: Option<StoreStats>,
    is_writable: bool,
    block_tokens: u64,
    /// Only on a page, as the next two.
    smart: Vec<Option<SmartLog>>,
    uptime: Option<Nanos>,
    compute_saved: Option<Durations>,
}

impl Snapshot {
    /// Reads the counters. Nothing is locked for longer than that.
    fn take(plane: &Plane, store: Option<&Store>) -> Result<Self, StoreError> {
        let store = store.map(Store::stats_now).transpose()?;
        Ok(Self {
            plane: Some(match &store {
                Some(store) => store.plane.clone(),
                None => plane.stats()?,
            }),
            store,
            is_writable: plane.check_writable().is_ok(),
            block_tokens: plane.shape().block_tokens.into(),
            ..Self::default()
        })
    }

    fn samples(&self, metric: &Metric) -> Vec<Sample> {
        let total = if metric.kind == MetricKind::Counter { "_total" } else { "" };
        let one = |value| vec![(total.to_owned(), value)];
        let number = |value: Option<u64>| value.map(|it| one(SampleValue::Count(it)));
        let of_device = |(device, value): (usize, u64)| {
            (format!("{total}{{device=\"{device}\"}}"), SampleValue::Count(value))
        };
        let info = |label, value: &dyn fmt::Display| {
            vec![(format!("_info{{{label}=\"{value}\"}}"), SampleValue::Count(1))]
        };
        let plane = self.plane.as_ref();
        let found = match metric.source {
            Source::Healthy => number(Some(self.is_writable.into())),
            Source::Plane(get) => number(plane.map(get)),
            Source::Store(get) => {
                number(self.store.as_ref().map(|store| get(store, self.block_tokens)))
            }
            Source::Uptime => self.uptime.map(|it| one(SampleValue::Seconds(it))),
            Source::ComputeSaved => self.compute_saved.map(histogram),
            Source::Times(get) => plane.map(get).map(histogram),
            Source::Route => plane.map(|plane| info("route", &plane.path)),
            Source::Executor => plane.map(|plane| info("executor", &plane.executor)),
            Source::Device(get) => plane.map(|plane| {
                let queues = &plane.ring.queues;
                let devices = queues.iter().map(|queue| queue.device + 1).max().unwrap_or(0);
                let sum = |device| {
                    let queues = queues.iter().filter(|queue| queue.device == device);
                    (device as usize, queues.map(get).sum())
                };
                (0..devices).map(sum).map(of_device).collect()
            }),
            Source::Smart(get) => {
                let logs = self.smart.iter().enumerate();
                let logs = logs.filter_map(|(device, log)| Some((device, get(log.as_ref()?))));
                Some(logs.map(of_device).collect())
            }
            Source::Connector => None,
        };
        found.unwrap_or_default()
    }

    /// Returns the text of all metrics that have a value.
    fn text(&self, format: TextFormat) -> String {
        let is_open = format == TextFormat::OpenMetrics;
        let mut text = String::new();
        for metric in METRICS {
            let samples = self.samples(metric);
            if samples.is_empty() {
                continue;
            }
            let (name, kind) = (metric.name, metric.kind.name());
            // In Prometheus' own format, a type is that of the samples.
            let (suffix, kind) = match metric.kind {
                MetricKind::Counter if !is_open => ("_total", kind),
                MetricKind::Info if !is_open => ("_info", "gauge"),
                _ => ("", kind),
            };
            // Writing to a string does not fail.
            let _ = writeln!(text, "# TYPE ripieno_{name}{suffix} {kind}");
            if is_open && !metric.unit().is_empty() {
                let _ = writeln!(text, "# UNIT ripieno_{name} {}", metric.unit());
            }
            let _ = writeln!(text, "# HELP ripieno_{name}{suffix} {}", metric.help);
            for (suffix, value) in samples {
                let _ = writeln!(text, "ripieno_{name}{suffix} {value}");
            }
        }
        text + if is_open { "# EOF\n" } else { "" }
    }
}

#[cfg(test)]
mod tests;
