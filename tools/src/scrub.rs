//! `ripieno scrub`: reads every file of a store through the normal path and compares checksums.
//!
//! The store itself drops a file that fails the comparison, as on any other retrieve. Closing the
//! store makes that durable; with `--report-only` it is not closed, but left as after a kill. At
//! the end the journal is read again, while its contents are in memory: if it is damaged, it is
//! rewritten.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use kv_catalog::{OnDevice, Superblock};
use nvme_driver::DmaSpace;
use objstore::{
    BlockId, Failure, FileId, KvPool, KvShape, Layer, Namespace, Order, Store, StoreConfig,
    StoreError, StoreOptions, StoredFile,
};
use ripieno_stack::{Devices, Executor, this_process};
use serde::Serialize;

use crate::inspect::InspectFlags;
use crate::interrupt::Interrupt;
use crate::machine::check_memory;
use crate::offline;
use crate::options::StoreFlags;
use crate::problem::{Problem, user_error};
use crate::progress::{Opening, Progress};
use crate::size::{self, Size, grouped};
use crate::table::{row, table};
use crate::terminal;

/// Bytes to read per batch; a batch has at least one file.
const BATCH_BYTES: u64 = 16 << 20;
/// Maximum number of files per batch.
const BATCH_FILES: u64 = 1024;
/// Number of damaged files in the table.
const SHOWN: usize = 32;
/// Sleep between two checks for Ctrl-C.
const NAP: Duration = Duration::from_millis(100);

/// Flags of `ripieno scrub`.
#[derive(Debug, Args)]
pub(crate) struct ScrubFlags {
    #[command(flatten)]
    options: StoreFlags<InspectFlags>,

    /// Leave damaged files in the catalog: a later retrieve will detect them again
    #[arg(long, alias = "dry-run")]
    report_only: bool,

    /// Maximum bytes to read a second [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = size::above_zero)]
    rate: Option<u64>,

    /// Print one JSON object on stdout instead of the table
    #[arg(long)]
    json: bool,
}

/// A corrupted file. Field names are the JSON keys.
#[derive(Debug, Serialize)]
struct Damaged {
    file: u32,
    namespace: u32,
    label: String,
    key: String,
    /// Layer in which the damage was detected.
    layer: u32,
    what: String,
}

/// Results of the scrub.
#[derive(Debug, Default, Serialize)]
struct Findings {
    store: String,
    files: u64,
    files_read: u64,
    bytes_read: u64,
    seconds: f64,
    /// True if damaged files become misses.
    dropped: bool,
    interrupted: bool,
    damaged: Vec<Damaged>,
    /// Damage of the journal; null if none.
    journal_damage: Option<String>,
}

/// Reads all files. Returns the exit code.
pub(crate) fn run(flags: &ScrubFlags) -> anyhow::Result<u8> {
    let mut interrupt = Interrupt::listen().context("listening for signals")?;
    let mut devices = offline::examine(&flags.options.config, !flags.report_only)?;
    let (store, blocks) = open(&mut devices, flags)?;
    interrupt.orderly();
    let mut findings = Findings { dropped: !flags.report_only, ..Findings::default() };
    scrub(&store, &blocks, flags, &mut interrupt, &mut findings)?;
    let damage = store.verify_journal(!flags.report_only).context("reading the journal again")?;
    findings.journal_damage = damage.map(|damage| damage.to_string());
    if flags.report_only {
        drop(store);
    } else {
        let closed = store.close().context("closing the store")?;
        for mut controller in closed.controllers {
            controller.shutdown().context("shutting a device down")?;
        }
    }
    drop(devices);
    terminal::report(&findings, flags.json, Findings::text)?;
    let is_clean = findings.damaged.is_empty() && findings.journal_damage.is_none();
    Ok(interrupt.end(is_clean, findings.interrupted))
}

/// Opens the store, with a pool to read into.
fn open(devices: &mut Devices, flags: &ScrubFlags) -> anyhow::Result<(Store, Vec<BlockId>)> {
    let refused = |error: StoreError| match error {
        StoreError::Format(_) | StoreError::Owned { .. } => {
            Problem::new(error.to_string(), "").into()
        }
        error => anyhow::Error::new(error).context("opening the store"),
    };
    let mut media = Store::media(devices.attached())?;
    let found = Superblock::read(&mut *media[0].io).map_err(|error| refused(error.into()))?;
    let OnDevice::Ours(superblock) = found else {
        let message = format!("{}: there is no store on it", media[0].io.name());
        bail!(Problem::new(message, "make one with ripieno format"));
    };
    if superblock.layout.words_per_file == 0 {
        bail!(Problem::new(
            format!(
                "store {} keeps no checksums, so wrong bytes look like others",
                superblock.store
            ),
            "format it again without --no-checksums; replay --verify full checks what it stored",
        ));
    }
    drop(media);
    let shape = superblock.layout.shape;
    let blocks = (BATCH_BYTES / shape.block_bytes()).clamp(2, BATCH_FILES) as u32;
    let clock = devices.clock();
    let (attached, space) = devices.take_attached().map_err(user_error)?;
    let (mut opening, start) = (Opening::new(!flags.json), Instant::now());
    let config = StoreConfig {
        devices: attached,
        executor: Executor::Host.factory(&clock, None),
        clock,
        shape,
        namespace: Namespace::default(),
        pool: pool(&*space, &shape, blocks)?,
        gpu: None,
        options: StoreOptions { owner: this_process()?, ..options(devices.is_read_only()) },
    };
    let store = Store::open_with(config, |done, all| opening.read(done, all, start.elapsed()));
    opening.finish();
    Ok((store.map_err(refused)?, (0..blocks).map(BlockId).collect()))
}

fn options(read_only: bool) -> StoreOptions {
    let writes = !read_only;
    StoreOptions { read_only, self_test: writes, deallocate: writes, ..StoreOptions::default() }
}

fn pool(space: &dyn DmaSpace, shape: &KvShape, blocks: u32) -> anyhow::Result<KvPool> {
    let stride = u64::from(shape.object_bytes);
    let tensor = stride * u64::from(blocks);
    let bytes = usize::try_from(tensor * u64::from(shape.rows()))?;
    // The superblock says how large a block is.
    let what = || format!("scrub reads {blocks} blocks at a time into {}", Size(bytes as u64));
    check_memory(bytes as u64, what, "scrub it on a machine with more memory")?;
    let memory = space.alloc(bytes).context("memory to read into")?;
    Ok(KvPool::contiguous(memory, shape, blocks)?)
}

fn scrub(
    store: &Store,
    blocks: &[BlockId],
    flags: &ScrubFlags,
    interrupt: &mut Interrupt,
    findings: &mut Findings,
) -> anyhow::Result<()> {
    let labels: BTreeMap<_, _> = store.namespaces().into_iter().collect();
    findings.store = store.superblock().store.to_string();
    findings.files = store.stats()?.files.stored.into();
    let progress = Progress::new("files", findings.files as usize, !flags.json);
    let start = Instant::now();
    let mut next = FileId(0);
    loop {
        let batch = store.stored_from(next, blocks.len());
        let Some(last) = batch.last() else { break };
        next = FileId(last.file.0 + 1);
        findings.files_read += batch.len() as u64;
        let damaged = verify(store, batch, blocks)?.into_iter();
        findings.damaged.extend(damaged.map(|(file, failure)| Damaged {
            file: file.file.0,
            namespace: file.namespace.0,
            label: labels.get(&file.namespace).cloned().unwrap_or_default(),
            key: file.key.0.iter().map(|byte| format!("{byte:02x}")).collect(),
            layer: failure.layer.0,
            what: failure.status.to_string(),
        }));
        findings.bytes_read = findings.files_read * store.shape().block_bytes();
        progress.read(findings.files_read, findings.files);
        progress.note(format!("{} damaged", findings.damaged.len()));
        if wait(flags.rate, findings.bytes_read, start, interrupt) {
            findings.interrupted = true;
            break;
        }
    }
    progress.finish();
    findings.seconds = start.elapsed().as_secs_f64();
    Ok(())
}

/// Sleeps to keep the rate at `rate` bytes a second. Returns true on an interrupt.
fn wait(rate: Option<u64>, bytes: u64, start: Instant, interrupt: &mut Interrupt) -> bool {
    let due = rate.map_or(Duration::ZERO, |rate| {
        Duration::from_secs_f64((bytes as f64 / rate as f64).min(1e9))
    });
    loop {
        let left = due.saturating_sub(start.elapsed());
        if interrupt.asked() || left.is_zero() {
            return interrupt.asked();
        }
        std::thread::sleep(left.min(NAP));
    }
}

/// Reads files, layer by layer, until all that remain are intact. Without a lookup, reads do not
/// count as uses: the eviction order stays the same.
fn verify(
    store: &Store,
    mut files: Vec<StoredFile>,
    blocks: &[BlockId],
) -> anyhow::Result<Vec<(StoredFile, Failure)>> {
    let (mut damaged, mut last) = (Vec::new(), None);
    loop {
        let numbers: Vec<FileId> = files.iter().map(|file| file.file).collect();
        let held = store.hold(&numbers)?;
        // The store has dropped the damaged files.
        let is_held = |file: &StoredFile| held.files().binary_search(&file.file).is_ok();
        let (good, bad): (Vec<_>, Vec<_>) = files.into_iter().partition(is_held);
        files = good;
        match last {
            Some(failure) if bad.is_empty() => return Err(StoreError::Transfer { failure }.into()),
            Some(failure) => damaged.extend(bad.into_iter().map(|file| (file, failure))),
            None => {}
        }
        if files.is_empty() {
            return Ok(damaged);
        }
        let load = store.retrieve(&held, &blocks[..held.len()])?;
        let read = |layer| store.wait(store.start(&load, layer, Order::Unordered)?);
        let mut layers = (0..store.shape().layers).map(Layer);
        match layers.find_map(|layer| read(layer).err()) {
            None => return Ok(damaged),
            Some(StoreError::Transfer { failure }) => last = Some(failure),
            Some(error) => return Err(error.into()),
        }
    }
}

impl Findings {
    fn text(&self) -> String {
        let read = format!("{} of {}", grouped(self.files_read), grouped(self.files));
        let seconds = self.seconds.max(1e-9);
        let bytes = Size(self.bytes_read);
        let rate = Size((self.bytes_read as f64 / seconds) as u64);
        let end = if self.interrupted { "; interrupted" } else { "" };
        let mut rows = vec![
            row("store", "", &self.store),
            row("files read", read, format!("{bytes} in {seconds:.2} s, {rate}/s{end}")),
        ];
        let note = match (self.damaged.is_empty(), self.dropped) {
            (true, _) => "every byte that was read is what was stored",
            (false, true) => "they are misses from now on",
            (false, false) => "they are as they were: nothing was dropped",
        };
        rows.push(row("damaged", grouped(self.damaged.len() as u64), note));
        if let Some(damage) = &self.journal_damage {
            let end = if self.dropped { "\nit was written anew" } else { "" };
            rows.push(row("journal", "damaged", format!("{damage}{end}")));
        }
        for damaged in self.damaged.iter().take(SHOWN) {
            let Damaged { file, namespace, label, key, layer, what } = damaged;
            let note = format!("namespace {namespace} {label}\nkey {key}\nlayer {layer}: {what}");
            rows.push(row("file", grouped((*file).into()), note));
        }
        if self.damaged.len() > SHOWN {
            let more = self.damaged.len() - SHOWN;
            rows.push(row("", format!("{more} more"), "--json has all of them"));
        }
        table(&rows)
    }
}
