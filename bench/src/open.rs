//! `bench open`: time to open a store, by number of files: superblock, journal, catalog.
//!
//! The journal holds the state of a full store, as a compaction leaves it, and is read from memory
//! and from an uncached file. The baseline is a plain sequential read of the same bytes.

mod medium;

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, bail};
use kv_catalog::{
    BlockIo, BlockKey, Catalog, CatalogConfig, DeviceIdentity, FileId, Journal, KvShape,
    NamespaceId, OnDevice, Plan, Record, Region, StoreId, Superblock, format_devices,
};
use nvme_spec::ids::Lba;

use self::medium::Medium;
use crate::{
    catalog::eviction,
    report::{Ratio, Report},
    sample::{Samples, timed},
};

/// Arguments of `open`.
#[derive(clap::Args, Debug)]
pub struct OpenArgs {
    /// Numbers of files
    #[arg(long, value_delimiter = ',', default_value = "1000000,10000000")]
    files: Vec<u32>,
    /// Checksums per file: one per object
    #[arg(long, value_delimiter = ',', default_value = "0,32")]
    checksums: Vec<u32>,
    /// Media of the journal
    #[arg(long, value_enum, value_delimiter = ',', default_value = "memory,file")]
    media: Vec<Kind>,
    /// Directory of the file: on a disk, and not in memory
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    dir: PathBuf,
    /// Rounds of each measurement
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Memory of this process
    Memory,
    /// File on a disk
    File,
}

/// Bytes per read of the plain sequential read.
const PLAIN_READ_BYTES: usize = 8 << 20;

/// Measures everything and prints it.
///
/// # Errors
/// Returns an error if the medium cannot be created, or stored keys are not found.
pub fn run(args: &OpenArgs) -> Result<()> {
    let mut report = Report::new("open");
    for &kind in &args.media {
        for &files in &args.files {
            for &checksums in &args.checksums {
                let what = format!("{files} files, {checksums} checksums each, {kind:?}");
                report.progress(&what);
                measure(args, kind, files, checksums, &mut report).context(what)?;
            }
        }
    }
    report.notes.push("against: the same bytes, read one after the other and not looked at".into());
    report.print(args.json)
}

fn measure(
    args: &OpenArgs,
    kind: Kind,
    files: u32,
    checksums: u32,
    report: &mut Report,
) -> Result<()> {
    let plan = plan(files, checksums);
    let bytes = plan[0].region.bytes();
    let medium = match kind {
        Kind::Memory => Medium::memory(bytes),
        Kind::File => Medium::file(&args.dir, bytes)?,
    };
    let (written, area) = fill(&medium, plan, files, checksums)?;
    let [mut catalog, mut journal, mut plain] = [(); 3].map(|()| Samples::default());
    for _ in 0..args.rounds {
        medium.forget()?;
        catalog.push(open_catalog(&medium, files, checksums)?.as_secs_f64() * 1e3);
        medium.forget()?;
        let nothing = |_: Record<'_>| Ok::<_, String>(());
        let (opened, took) = timed(|| open(&medium, nothing));
        opened?;
        journal.push(took.as_secs_f64() * 1e3);
        medium.forget()?;
        plain.push(read(&medium, area, written)?.as_secs_f64() * 1e3);
    }
    let what = format!("{files} files, {checksums} checksums each, {kind:?}");
    let name = format!("opening, {what}");
    report.ratios.push(Ratio::new(name, "ms", catalog.median(), plain.median()));
    let name = format!("journal alone, {what}");
    report.ratios.push(Ratio::new(name, "ms", journal.median(), plain.median()));
    report.counts.push((format!("MiB of journal, {what}"), written as f64 / f64::from(1 << 20)));
    Ok(())
}

/// Returns the superblocks of a catalog without data, for `files` files.
fn plan(files: u32, checksums: u32) -> Vec<Superblock> {
    let lba_bytes = 4096;
    // Far more than needed: unwritten space is not allocated.
    let namespace_lbas = 1 << 28;
    let (model, serial, nguid, eui64) = ([b' '; 40], [b' '; 20], [0; 16], [1; 8]);
    let identity =
        DeviceIdentity { model, serial, nsid: 1, nguid, eui64, lba_bytes, namespace_lbas };
    let region = Region { first: Lba(0), lbas: namespace_lbas, lba_shift: 12 };
    let layers = checksums.max(1);
    let plan = Plan {
        store: StoreId(*b"ripieno bench op"),
        rank: 0,
        ranks: 1,
        devices: &[(identity, region)],
        shape: KvShape { layers, segments: 1, object_bytes: 4096, block_tokens: 16 },
        catalog: true,
        data: false,
        checksums: checksums > 0,
        namespaces_max: 16,
        files_max: Some(files),
        capacity_bytes: None,
        group: None,
    };
    let mut superblocks = plan.superblocks().expect("a file of 1 TiB holds it");
    // The medium ends with the journal.
    let area = superblocks[0].journal.expect("it carries the catalog");
    let superblock = &mut superblocks[0];
    superblock.region.lbas = (area.offset + 2 * area.half_bytes) >> 12;
    superblocks
}

/// Formats the medium and writes the state of a full store by a compaction. Returns its length and
/// offset.
fn fill(
    medium: &Medium,
    mut superblocks: Vec<Superblock>,
    files: u32,
    checksums: u32,
) -> Result<(u64, u64)> {
    format_devices(&mut [&mut medium.clone()], &mut superblocks)?;
    let mut journal = open(medium, |_| Ok::<_, String>(()))?;
    let mut words: Vec<u32> = (0..checksums).collect();
    let mut records = Vec::new();
    let (digest, label) = ([1; 32], "bench");
    let (id, epoch, quota_files, weight) = (NamespaceId(0), 0, None, 100);
    Record::Namespace { id, digest, epoch, quota_files, weight, label }.encode(&mut records);
    journal.begin_compaction()?;
    for file in 0..files {
        if let Some(first) = words.first_mut() {
            *first = file;
        }
        let record = Record::Commit {
            file: FileId(file),
            namespace: NamespaceId(0),
            key: key(file),
            checksums: words.as_slice().into(),
        };
        // Fill groups up to their maximum length.
        if records.len() + 48 + 4 * words.len() > journal.payload_bytes_max() {
            journal.copy(&records, 0)?;
            records.clear();
        }
        record.encode(&mut records);
    }
    journal.copy(&records, 0)?;
    journal.finish_compaction()?;
    journal.close()?;
    let OnDevice::Ours(superblock) = Superblock::read(&mut medium.clone())? else {
        bail!("what was formatted is not there");
    };
    let area = superblock.journal.context("it carries the catalog")?;
    Ok((area.certain_bytes, area.offset + area.half_bytes))
}

/// Returns keys that are as random as digests.
fn key(file: u32) -> BlockKey {
    let mut key = [0; 32];
    for (at, part) in (1u64..).zip(key.chunks_exact_mut(8)) {
        let mut z = (u64::from(file) << 3 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        part.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes());
    }
    BlockKey(key)
}

fn open<E: std::fmt::Display>(
    medium: &Medium,
    apply: impl FnMut(Record<'_>) -> Result<(), E>,
) -> Result<Journal> {
    let OnDevice::Ours(superblock) = Superblock::read(&mut medium.clone())? else {
        bail!("what was formatted is not there");
    };
    Ok(Journal::open(Box::new(medium.clone()), *superblock, apply, |_, _| {})?)
}

/// Opens the catalog as a store does. The time ends when it is usable.
fn open_catalog(medium: &Medium, files: u32, checksums: u32) -> Result<Duration> {
    let config =
        CatalogConfig { words_per_file: checksums, journal: true, ..eviction::config(files) };
    let (catalog, took) = timed(|| -> Result<Catalog> {
        let mut catalog = Catalog::new(config);
        open(medium, |record| catalog.apply(&record))?;
        catalog.recovered();
        Ok(catalog)
    });
    let catalog = catalog?;
    for file in [0, files / 2, files - 1] {
        anyhow::ensure!(catalog.lookup(NamespaceId(0), &[key(file)])? == 1, "file {file} is lost");
    }
    Ok(took)
}

/// Reads `bytes` bytes from `offset` on and discards them.
fn read(medium: &Medium, offset: u64, bytes: u64) -> Result<Duration> {
    let (mut medium, mut buffer) = (medium.clone(), vec![0; PLAIN_READ_BYTES]);
    let (result, took) = timed(|| -> Result<()> {
        for at in (0..bytes).step_by(PLAIN_READ_BYTES) {
            let part = (bytes - at).min(PLAIN_READ_BYTES as u64) as usize;
            medium.read(offset + at, &mut buffer[..part])?;
        }
        Ok(())
    });
    result.map(|()| took)
}
