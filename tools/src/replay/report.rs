//! Report of a replay: one JSON object for programs, tables for people.

use objstore::DramStats;
use ripieno_stack::{Executor, NotTaken};
use serde::{Serialize, Serializer};
use serde_json::json;

use crate::config::{self, StoreArgs, Verify};
use crate::devices::EmuChoice;
use crate::outcome::{Facts, facts, ratio};
use crate::size::{Size, grouped};
use crate::sizing::Sizing;
use crate::table::{row, table};

use super::engine::Tally;
use super::rate::Meter;
use super::verify::Findings;
use super::{Limits, Outcome, Setting};

/// Data of a report, from which its JSON and its tables follow.
#[derive(Debug)]
pub(crate) struct Report {
    pub(super) args: StoreArgs,
    pub(super) sizing: Sizing,
    /// Requests of the workload, and their trace blocks.
    pub(super) planned: [u64; 2],
    /// Hits of an unlimited cache, over all planned requests.
    pub(super) ideal_hits: u64,
    pub(crate) setting: Setting,
    pub(crate) outcome: Outcome,
}

/// Returns why a route was not taken, and the remedy.
fn why(not: &NotTaken) -> String {
    let NotTaken { why, fix, .. } = not;
    if fix.is_empty() { why.clone() } else { format!("{why}; {fix}") }
}

impl Report {
    pub(crate) fn tally(&self) -> &Tally {
        &self.outcome.tally
    }

    /// Returns true if there were no mismatches and no failed transfers.
    pub(crate) fn is_clean(&self) -> bool {
        self.tally().findings.mismatches == 0 && self.tally().io_errors == 0
    }

    /// Returns the objects that were stored and retrieved, and those of them that devices moved.
    fn objects(&self) -> [u64; 2] {
        let Outcome { tally, stats, .. } = &self.outcome;
        let object = u64::from(self.args.shape.object_bytes);
        let all = (tally.retrieve.bytes() + tally.store.bytes()) / object;
        [all, all - stats.plane.dram.retrieved_bytes / object]
    }

    /// Returns the bytes written to the devices: objects with padding, and the journal.
    fn written_bytes(&self) -> u64 {
        let Outcome { tally, stats, .. } = &self.outcome;
        let files = tally.store.bytes() / self.args.shape.block_bytes();
        files * stats.file_bytes + stats.journal_bytes
    }

    /// Returns what was asked for: the first values of the JSON object.
    fn asked(&self) -> Facts {
        let Self { args, sizing, setting, outcome, .. } = self;
        let Setting { limits, placement, gpu, .. } = setting;
        let not_taken =
            |not: &NotTaken| json!({ "route": not.route.name(), "why": not.why, "fix": not.fix });
        facts! {
            version: env!("CARGO_PKG_VERSION"),
            path: outcome.stats.plane.path.to_string(),
            routes_not_taken: placement.not_taken.iter().map(not_taken).collect::<Vec<_>>(),
            executor: outcome.stats.plane.executor,
            gpu: gpu,
            device: args.devices.to_string(),
            devices: args.devices.count(),
            media: args.devices.emu().map(EmuChoice::media),
            memory: placement.memory(),
            lba_bytes: limits.lba_bytes,
            mdts_bytes: limits.mdts_bytes,
            queues_per_device: args.queues(),
            queue_depth: args.depth(),
            coalesce_bytes: args.coalesce(),
            descriptors: config::name(args.common.descriptors),
            model: args.shape.model,
            layers: args.shape.layers,
            segments: args.shape.segments,
            block_tokens: args.shape.block_tokens,
            object_bytes: args.shape.object_bytes,
            pool_blocks: sizing.pool_blocks,
            trace: self.trace(),
            seed: args.common.seed,
        }
    }

    /// Returns the results.
    fn found(&self) -> Facts {
        let Self { args, sizing, setting, outcome, .. } = self;
        let Outcome { tally, stats, .. } = outcome;
        let ring = &stats.plane.ring.total;
        let opening = &setting.opening;
        let (retrieved, stored) = (tally.retrieve.bytes(), tally.store.bytes());
        let (written, [objects, moved]) = (self.written_bytes(), self.objects());
        facts! {
            requests: tally.requests,
            requests_planned: self.planned[0],
            trace_blocks: tally.trace_blocks,
            trace_blocks_planned: self.planned[1],
            trace_blocks_hit: tally.trace_blocks_hit,
            hit_ratio: ratio(tally.trace_blocks_hit, tally.trace_blocks),
            trace_blocks_hit_unlimited: self.ideal_hits,
            store: opening.how,
            files_found: opening.files,
            open_ms: opening.ms,
            capacity_bytes: sizing.capacity_bytes(),
            needed_bytes: sizing.needed_bytes,
            stored_bytes: stored,
            retrieved_bytes: retrieved,
            objects: objects,
            written_bytes: written,
            journal_bytes: stats.journal_bytes,
            written_per_stored: ratio(written, stored),
            written_per_retrieved: ratio(written, retrieved),
            evicted_files: stats.files.evicted,
            blocks_left_out: tally.blocks_left_out,
            verify: config::name(args.flags.verify),
            verified_bytes: tally.findings.bytes,
            mismatches: tally.findings.mismatches,
            mismatches_shown: tally.findings.shown,
            final_check_blocks: tally.blocks_checked,
            final_check_bytes: tally.final_check.bytes(),
            io_errors: tally.io_errors,
            recoveries: stats.plane.recoveries,
            dram_bytes: args.dram(),
            dram_hits: stats.plane.dram.hits,
            dram_misses: stats.plane.dram.misses,
            dram_retrieved_bytes: stats.plane.dram.retrieved_bytes,
            dram_blocks: stats.plane.dram.blocks,
            dram_evictions: stats.plane.dram.evictions,
            retrieve_gib_s: tally.retrieve.gib_s(),
            store_gib_s: tally.store.gib_s(),
            memcpy_gib_s: outcome.memcpy_gib_s,
            retrieve_s: tally.retrieve.busy_s(),
            store_s: tally.store.busy_s(),
            commands: ring.commands,
            sq_doorbells: ring.sq_doorbells,
            cq_doorbells: ring.cq_doorbells,
            commands_per_sq_doorbell: ratio(ring.commands, ring.sq_doorbells),
            objects_per_sq_doorbell: ratio(moved, ring.sq_doorbells),
            objects_per_command: ratio(moved, ring.commands),
            wall_s: outcome.wall_s,
            interrupted: outcome.interrupted,
        }
    }

    /// Returns the trace file; `None` for the synthetic workload.
    fn trace(&self) -> Option<String> {
        self.args.common.trace.as_ref().map(|path| path.display().to_string())
    }

    /// Formats the report for people.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("ripieno {} replay\n\n", env!("CARGO_PKG_VERSION"));
        text += &table(&self.settings());
        text += "\n\n";
        text += &table(&self.results());
        text += "\n";
        let Findings { mismatches, shown, .. } = &self.tally().findings;
        for mismatch in shown {
            text += &format!("\n  {mismatch}");
        }
        let hidden = mismatches - shown.len() as u64;
        if hidden > 0 {
            text += &format!("\n  ... and {} more", grouped(hidden));
        }
        text + "\n" + &self.verdict()
    }

    fn settings(&self) -> Vec<[String; 3]> {
        let Self { args, sizing, setting, .. } = self;
        let (shape, opening, devices) = (&args.shape, &setting.opening, args.devices.count());
        let workload =
            self.trace().unwrap_or_else(|| format!("synthetic, seed {}", args.common.seed));
        let merged = match args.coalesce() {
            bytes if bytes < 2 * shape.object_bytes => "no merging".to_owned(),
            bytes => format!("merged up to {}", Size(u64::from(bytes))),
        };
        let (depth, descriptors) = (args.depth(), config::name(args.common.descriptors));
        let mut rows = vec![
            row("workload", workload, format!("{} requests", grouped(self.planned[0]))),
            row(
                "model",
                shape.model,
                format!(
                    "{} layers x {} segments, {} tokens a block, objects of {}",
                    shape.layers,
                    shape.segments,
                    shape.block_tokens,
                    Size(u64::from(shape.object_bytes))
                ),
            ),
            row("path", self.outcome.stats.plane.path, self.path_note()),
            row("I/O kernel", self.outcome.stats.plane.executor, self.kernel_note()),
            row("devices", format!("{devices} x {}", self.kind()), self.facts_of_devices()),
            row(
                "queues",
                format!("{} x {}", u32::from(args.queues()) * devices, "1 warp"),
                format!("depth {depth}, descriptors: {descriptors}, {merged}"),
            ),
            row(
                "capacity",
                Size(sizing.capacity_bytes()),
                format!("the whole workload needs {}", Size(sizing.needed_bytes)),
            ),
        ];
        if opening.how != "scratch" {
            let found = format!("{} blocks", grouped(opening.files.into()));
            let note = format!("at opening, which took {:.0} ms", opening.ms);
            rows.push(row(&format!("store {}", opening.how), found, note));
        }
        let instead = setting.placement.not_taken.iter();
        rows.extend(instead.map(|not| row("no better path", not.route.name(), why(not))));
        rows
    }

    fn path_note(&self) -> String {
        let memory = self.setting.placement.memory();
        match &self.setting.gpu {
            Some(gpu) => format!("{}\n{memory}", gpu.device_words()),
            None => format!("no GPU is involved; memory: {memory}"),
        }
    }

    fn kernel_note(&self) -> String {
        match &self.setting.gpu {
            Some(gpu) => gpu.kernel_words(),
            None if self.args.executor == Executor::File => {
                "none: the executor file reads and writes the files".to_owned()
            }
            None if self.args.executor == Executor::Inline => "the calling thread".to_owned(),
            None => "threads of this machine's CPU".to_owned(),
        }
    }

    fn kind(&self) -> &'static str {
        if self.args.devices.emu().is_some() { "emu" } else { "drive" }
    }

    fn facts_of_devices(&self) -> String {
        let Limits { lba_bytes, mdts_bytes } = self.setting.limits;
        let limit = mdts_bytes.map_or("no limit".to_owned(), |bytes| Size(bytes).to_string());
        let what = match self.args.devices.emu().map(EmuChoice::media) {
            Some(media) if self.args.executor == Executor::File => {
                return format!("files, media: {media}, blocks of {lba_bytes} bytes");
            }
            Some(media) => format!("software controllers, media: {media}"),
            None => self.args.devices.to_string(),
        };
        format!("{what}, LBA {lba_bytes} bytes, MDTS {limit}")
    }

    /// Returns the hits without limits. In a store that was there before there are more.
    fn ideal(&self, hits: u64) -> String {
        let ideal = grouped(self.ideal_hits);
        if hits > self.ideal_hits { String::new() } else { format!("; without limits {ideal}") }
    }

    fn results(&self) -> Vec<[String; 3]> {
        let Outcome { tally, stats, wall_s, memcpy_gib_s, interrupted } = &self.outcome;
        let ring = &stats.plane.ring.total;
        let rate = |meter: &Meter| {
            let rate = meter.gib_s();
            let share = if *memcpy_gib_s > 0.0 { rate / memcpy_gib_s } else { 0.0 };
            format!("{} while in flight, {share:.2} of memcpy", per_second(rate))
        };
        let (retrieved, stored) = (tally.retrieve.bytes(), tally.store.bytes());
        let (written, [_, moved]) = (self.written_bytes(), self.objects());
        let (hit, asked) = (tally.trace_blocks_hit, tally.trace_blocks);
        let copied = "one thread, scattered objects of the same size";
        let mut rows = vec![
            row(
                "requests",
                grouped(tally.requests),
                format!("in {wall_s:.2} s{}", if *interrupted { ", ended early" } else { "" }),
            ),
            row(
                "hits",
                format!("{} of {}", grouped(hit), grouped(asked)),
                format!("{:.1} % of trace blocks{}", 100.0 * ratio(hit, asked), self.ideal(hit)),
            ),
            row("retrieved", Size(retrieved), rate(&tally.retrieve)),
            row("stored", Size(stored), rate(&tally.store)),
            row(
                "written",
                Size(written),
                format!(
                    "{:.3} for each byte stored, {:.3} for each retrieved; journal included",
                    ratio(written, stored),
                    ratio(written, retrieved)
                ),
            ),
            row("memcpy", per_second(*memcpy_gib_s), copied),
            row(
                "commands",
                grouped(ring.commands),
                format!("{:.1} objects a command", ratio(moved, ring.commands)),
            ),
            row(
                "doorbells",
                format!("{} SQ, {} CQ", grouped(ring.sq_doorbells), grouped(ring.cq_doorbells)),
                format!(
                    "{:.1} commands, {:.1} objects an SQ doorbell",
                    ratio(ring.commands, ring.sq_doorbells),
                    ratio(moved, ring.sq_doorbells)
                ),
            ),
            row(
                "evicted",
                format!("{} files", grouped(stats.files.evicted)),
                format!("{} blocks found no room", grouped(tally.blocks_left_out)),
            ),
        ];
        if self.args.dram() > 0 {
            rows.push(dram_row(&stats.plane.dram));
        }
        if tally.blocks_checked > 0 {
            rows.push(row(
                "final check",
                format!("{} blocks", grouped(tally.blocks_checked)),
                format!("{}: everything still stored", Size(tally.final_check.bytes())),
            ));
        }
        rows
    }

    /// Formats the integrity result in one line.
    pub(crate) fn verdict(&self) -> String {
        let tally = self.tally();
        let verified = Size(tally.findings.bytes);
        let moved = Size(tally.retrieve.bytes() + tally.final_check.bytes());
        if !self.is_clean() {
            return format!(
                "Integrity: FAILED: {} wrong objects, {} failed transfers; {verified} of {moved} \
                 retrieved were checked",
                grouped(tally.findings.mismatches),
                grouped(tally.io_errors)
            );
        }
        match self.args.flags.verify {
            Verify::Off => {
                format!("Integrity: not checked (--verify off); {moved} retrieved, no I/O failed")
            }
            Verify::Full => format!("Integrity: OK: every retrieved byte was checked, {verified}"),
            Verify::Sampled => format!(
                "Integrity: OK: {verified} of {moved} retrieved were checked (--verify sampled)"
            ),
        }
    }
}

impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut all = self.asked();
        all.0.extend(self.found().0);
        all.serialize(serializer)
    }
}

fn dram_row(stats: &DramStats) -> [String; 3] {
    let DramStats { hits, misses, retrieved_bytes, evictions, .. } = *stats;
    let note = format!(
        "{} of {} blocks, {:.1} %; the devices served the rest; {} evicted",
        grouped(hits),
        grouped(hits + misses),
        100.0 * ratio(hits, hits + misses),
        grouped(evictions)
    );
    row("from DRAM", Size(retrieved_bytes), note)
}

fn per_second(gib_s: f64) -> String {
    format!("{}/s", Size((gib_s * (1u64 << 30) as f64) as u64))
}
