//! Report of a replay: one JSON object for programs, tables for people.

use objstore::{DramStats, KvShape, StoreStats};
use ripieno_stack::NotTaken;
use serde::Serialize;

use crate::gpu::GpuReport;
use crate::model::Shape;
use crate::size::{Size, grouped};
use crate::table::{row, table};

use super::Limits;
use super::verify::Mismatch;

/// A route that was tried and not taken. Field names are the JSON keys.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct RouteNotTaken {
    pub(crate) route: &'static str,
    pub(crate) why: String,
    /// Remedy.
    pub(crate) fix: String,
}

impl RouteNotTaken {
    pub(crate) fn new(not: &NotTaken) -> Self {
        let NotTaken { route, why, fix } = not;
        Self { route: route.name(), why: why.clone(), fix: fix.clone() }
    }

    fn text(&self) -> String {
        let Self { why, fix, .. } = self;
        if fix.is_empty() { why.clone() } else { format!("{why}; {fix}") }
    }
}

/// The whole report of a replay. Field names are the JSON keys.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Version of this program.
    pub(crate) version: &'static str,
    /// Route of the data: host, staged or direct.
    pub(crate) path: String,
    /// Better routes that were not taken, with the reasons.
    pub(crate) routes_not_taken: Vec<RouteNotTaken>,
    /// Executor of the I/O kernel.
    pub(crate) executor: String,
    /// GPU of the executor; null if none.
    pub(crate) gpu: Option<GpuReport>,
    /// Kind of devices: emu, or PCI addresses of VFIO drives.
    pub(crate) device: String,
    /// Number of devices.
    pub(crate) devices: u32,
    /// Storage behind the software controllers; null for drives.
    pub(crate) media: Option<String>,
    /// Memory for queues, descriptors and the KV pool.
    pub(crate) memory: String,
    #[serde(flatten)]
    pub(crate) limits: Limits,
    pub(crate) queues_per_device: u16,
    pub(crate) queue_depth: u32,
    /// Size in bytes up to which adjacent objects were merged.
    pub(crate) coalesce_bytes: u32,
    pub(crate) descriptors: String,

    #[serde(flatten)]
    pub(crate) shape: Shape,
    pub(crate) pool_blocks: u32,

    /// The trace file; null for the synthetic workload.
    pub(crate) trace: Option<String>,
    pub(crate) seed: u64,
    /// Requests replayed; the next field counts all requests.
    pub(crate) requests: u64,
    pub(crate) requests_planned: u64,
    /// Trace blocks of the replayed requests; the next field counts those of all requests.
    pub(crate) trace_blocks: u64,
    pub(crate) trace_blocks_planned: u64,
    /// Leading trace blocks found.
    pub(crate) trace_blocks_hit: u64,
    pub(crate) hit_ratio: f64,
    /// Hits of an unlimited cache, over all planned requests.
    pub(crate) trace_blocks_hit_unlimited: u64,

    /// "scratch"; with --keep, "made" or "opened".
    pub(crate) store: &'static str,
    /// Blocks in the store when it was opened.
    pub(crate) files_found: u32,
    /// Milliseconds to open the store, including its self-test.
    pub(crate) open_ms: f64,
    /// Capacity of the store over all devices.
    pub(crate) capacity_bytes: u64,
    /// Capacity at which the whole workload evicts nothing.
    pub(crate) needed_bytes: u64,
    pub(crate) stored_bytes: u64,
    pub(crate) retrieved_bytes: u64,
    /// Objects stored and retrieved.
    pub(crate) objects: u64,
    #[serde(flatten)]
    pub(crate) written: Written,
    pub(crate) evicted_files: u64,
    /// Store blocks that the store had no room for.
    pub(crate) blocks_left_out: u64,

    pub(crate) verify: String,
    pub(crate) verified_bytes: u64,
    pub(crate) mismatches: u64,
    /// The first mismatches.
    pub(crate) mismatches_shown: Vec<Mismatch>,
    /// Stored blocks that were retrieved and checked at the end, and their bytes.
    pub(crate) final_check_blocks: u64,
    pub(crate) final_check_bytes: u64,
    /// Failed transfers.
    pub(crate) io_errors: u64,
    /// Controller recoveries.
    pub(crate) recoveries: u64,
    #[serde(flatten)]
    pub(crate) dram: Dram,

    pub(crate) retrieve_gib_s: f64,
    pub(crate) store_gib_s: f64,
    pub(crate) memcpy_gib_s: f64,
    pub(crate) retrieve_s: f64,
    pub(crate) store_s: f64,
    pub(crate) commands: u64,
    pub(crate) sq_doorbells: u64,
    pub(crate) cq_doorbells: u64,
    pub(crate) commands_per_sq_doorbell: f64,
    pub(crate) objects_per_sq_doorbell: f64,
    pub(crate) objects_per_command: f64,
    /// Seconds from the first request to the last, without the final check.
    pub(crate) wall_s: f64,
    /// True if the user ended the replay early.
    pub(crate) interrupted: bool,
}

/// Statistics of the DRAM cache.
#[derive(Debug, Serialize)]
pub(crate) struct Dram {
    dram_bytes: u64,
    /// Store blocks that were retrieved from it; the next field counts those from the devices.
    dram_hits: u64,
    dram_misses: u64,
    dram_retrieved_bytes: u64,
    dram_blocks: u32,
    dram_evictions: u64,
}

impl Dram {
    pub(crate) fn new(dram_bytes: u64, stats: &DramStats) -> Self {
        Self {
            dram_bytes,
            dram_hits: stats.hits,
            dram_misses: stats.misses,
            dram_retrieved_bytes: stats.retrieved_bytes,
            dram_blocks: stats.blocks,
            dram_evictions: stats.evictions,
        }
    }

    fn row(&self) -> [String; 3] {
        let blocks = self.dram_hits + self.dram_misses;
        row(
            "from DRAM",
            Size(self.dram_retrieved_bytes),
            format!(
                "{} of {} blocks, {:.1} %; the devices served the rest; {} evicted",
                grouped(self.dram_hits),
                grouped(blocks),
                100.0 * ratio(self.dram_hits, blocks),
                grouped(self.dram_evictions)
            ),
        )
    }
}

/// Bytes written to the devices.
#[derive(Debug, Serialize)]
pub(crate) struct Written {
    /// Objects with padding, and the journal.
    written_bytes: u64,
    journal_bytes: u64,
    written_per_stored: f64,
    written_per_retrieved: f64,
}

impl Written {
    pub(crate) fn new(stats: &StoreStats, shape: &KvShape, stored: u64, retrieved: u64) -> Self {
        let files = stored / shape.block_bytes();
        let written_bytes = files * stats.file_bytes + stats.journal_bytes;
        Self {
            written_bytes,
            journal_bytes: stats.journal_bytes,
            written_per_stored: ratio(written_bytes, stored),
            written_per_retrieved: ratio(written_bytes, retrieved),
        }
    }
}

/// Returns `a / b`, or 0 if `b` is 0.
pub(crate) fn ratio(a: u64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { a as f64 / b as f64 }
}

impl Report {
    /// Returns true if there were no mismatches and no failed transfers.
    pub(crate) fn is_clean(&self) -> bool {
        self.mismatches == 0 && self.io_errors == 0
    }

    /// Formats the report for people.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("ripieno {} replay\n\n", self.version);
        text += &table(&self.setting());
        text += "\n\n";
        text += &table(&self.results());
        text += "\n";
        for mismatch in &self.mismatches_shown {
            text += &format!("\n  {mismatch}");
        }
        let hidden = self.mismatches - self.mismatches_shown.len() as u64;
        if hidden > 0 {
            text += &format!("\n  ... and {} more", grouped(hidden));
        }
        text + "\n" + &self.verdict()
    }

    fn setting(&self) -> Vec<[String; 3]> {
        let workload =
            self.trace.clone().unwrap_or_else(|| format!("synthetic, seed {}", self.seed));
        let merged = match self.coalesce_bytes {
            bytes if bytes < 2 * self.shape.object_bytes => "no merging".to_owned(),
            bytes => format!("merged up to {}", Size(u64::from(bytes))),
        };
        let mut rows = vec![
            row("workload", workload, format!("{} requests", grouped(self.requests_planned))),
            row(
                "model",
                self.shape.model,
                format!(
                    "{} layers x {} segments, {} tokens a block, objects of {}",
                    self.shape.layers,
                    self.shape.segments,
                    self.shape.block_tokens,
                    Size(u64::from(self.shape.object_bytes))
                ),
            ),
            row("path", &self.path, self.path_note()),
            row("I/O kernel", &self.executor, self.kernel_note()),
            row("devices", format!("{} x {}", self.devices, self.kind()), self.facts()),
            row(
                "queues",
                format!("{} x {}", u32::from(self.queues_per_device) * self.devices, "1 warp"),
                format!("depth {}, descriptors: {}, {merged}", self.queue_depth, self.descriptors),
            ),
            row(
                "capacity",
                Size(self.capacity_bytes),
                format!("the whole workload needs {}", Size(self.needed_bytes)),
            ),
        ];
        if self.store != "scratch" {
            let found = format!("{} blocks", grouped(self.files_found.into()));
            let note = format!("at opening, which took {:.0} ms", self.open_ms);
            rows.push(row(&format!("store {}", self.store), found, note));
        }
        let instead = self.routes_not_taken.iter();
        rows.extend(instead.map(|not| row("no better path", not.route, not.text())));
        rows
    }

    fn path_note(&self) -> String {
        match &self.gpu {
            Some(gpu) => format!("{}\n{}", gpu.device_words(), self.memory),
            None => format!("no GPU is involved; memory: {}", self.memory),
        }
    }

    fn kernel_note(&self) -> String {
        match &self.gpu {
            Some(gpu) => gpu.kernel_words(),
            None if self.executor == "inline" => "the calling thread".to_owned(),
            None => "threads of this machine's CPU".to_owned(),
        }
    }

    fn kind(&self) -> &'static str {
        if self.media.is_some() { "emu" } else { "drive" }
    }

    fn facts(&self) -> String {
        let limit =
            self.limits.mdts_bytes.map_or("no limit".to_owned(), |bytes| Size(bytes).to_string());
        let what = match &self.media {
            Some(media) => format!("software controllers, media: {media}"),
            None => self.device.clone(),
        };
        format!("{what}, LBA {} bytes, MDTS {limit}", self.limits.lba_bytes)
    }

    fn results(&self) -> Vec<[String; 3]> {
        let rate = |rate: f64| {
            let share = if self.memcpy_gib_s > 0.0 { rate / self.memcpy_gib_s } else { 0.0 };
            format!("{} while in flight, {share:.2} of memcpy", per_second(rate))
        };
        let mut rows = vec![
            row(
                "requests",
                grouped(self.requests),
                format!(
                    "in {:.2} s{}",
                    self.wall_s,
                    if self.interrupted { ", ended early" } else { "" }
                ),
            ),
            row(
                "hits",
                format!("{} of {}", grouped(self.trace_blocks_hit), grouped(self.trace_blocks)),
                format!(
                    "{:.1} % of trace blocks; without limits {}",
                    100.0 * self.hit_ratio,
                    grouped(self.trace_blocks_hit_unlimited)
                ),
            ),
            row("retrieved", Size(self.retrieved_bytes), rate(self.retrieve_gib_s)),
            row("stored", Size(self.stored_bytes), rate(self.store_gib_s)),
            row(
                "written",
                Size(self.written.written_bytes),
                format!(
                    "{:.3} for each byte stored, {:.3} for each retrieved; journal included",
                    self.written.written_per_stored, self.written.written_per_retrieved
                ),
            ),
            row(
                "memcpy",
                per_second(self.memcpy_gib_s),
                "one thread, scattered objects of the same size".to_owned(),
            ),
            row(
                "commands",
                grouped(self.commands),
                format!("{:.1} objects a command", self.objects_per_command),
            ),
            row(
                "doorbells",
                format!("{} SQ, {} CQ", grouped(self.sq_doorbells), grouped(self.cq_doorbells)),
                format!(
                    "{:.1} commands, {:.1} objects an SQ doorbell",
                    self.commands_per_sq_doorbell, self.objects_per_sq_doorbell
                ),
            ),
            row(
                "evicted",
                format!("{} files", grouped(self.evicted_files)),
                format!("{} blocks found no room", grouped(self.blocks_left_out)),
            ),
        ];
        if self.dram.dram_bytes > 0 {
            rows.push(self.dram.row());
        }
        if self.final_check_blocks > 0 {
            rows.push(row(
                "final check",
                format!("{} blocks", grouped(self.final_check_blocks)),
                format!("{}: everything still stored", Size(self.final_check_bytes)),
            ));
        }
        rows
    }

    /// Formats the integrity result in one line.
    pub(crate) fn verdict(&self) -> String {
        let verified = Size(self.verified_bytes);
        let moved = Size(self.retrieved_bytes + self.final_check_bytes);
        if !self.is_clean() {
            return format!(
                "Integrity: FAILED: {} wrong objects, {} failed transfers; {verified} of {moved} \
                 retrieved were checked",
                grouped(self.mismatches),
                grouped(self.io_errors)
            );
        }
        match self.verify.as_str() {
            "off" => {
                format!("Integrity: not checked (--verify off); {moved} retrieved, no I/O failed")
            }
            "full" => format!("Integrity: OK: every retrieved byte was checked, {verified}"),
            _ => format!(
                "Integrity: OK: {verified} of {moved} retrieved were checked (--verify sampled)"
            ),
        }
    }
}

fn per_second(gib_s: f64) -> String {
    format!("{}/s", Size((gib_s * (1u64 << 30) as f64) as u64))
}
