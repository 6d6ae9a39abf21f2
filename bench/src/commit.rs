//! `bench commit`: the cost of making stored blocks durable. Measures the time from a block's last
//! written row to the acknowledged commit, with concurrent committers, and the bytes written to the
//! controllers per byte stored.

use std::{
    fs::File,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use nvme_emu::{EmuConfig, FileMedia, FileOptions};
use objstore::{BlockId, KeyChain, KvShape, StoreOptions};
use ripieno_testkit::{memory_drives, pattern};
use rustix::fs::OFlags;

use crate::{
    file::folder,
    report::{Aim, Ratio, Report},
    sample::{Samples, timed},
    stack::Stack,
};

/// 16 tokens of Llama-3-8B: 8 heads of 128 numbers of 2 bytes, keys and values separate.
const SHAPE: KvShape =
    KvShape { layers: 32, segments: 2, object_bytes: 32 << 10, block_tokens: 16 };
/// Blocks of the pool; the medium holds about twice as many, so the store evicts.
const BLOCKS: u32 = 64;
/// Bytes of a record in the baseline of plain system calls.
const RECORD_BYTES: usize = 4096;

/// Arguments of `commit`.
#[derive(clap::Args, Debug)]
pub struct CommitArgs {
    /// Directory of the files, on the file system to measure
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    dir: PathBuf,
    /// Numbers of concurrent committers, each with a block of 16 tokens of Llama-3-8B
    #[arg(long, value_delimiter = ',', default_value = "1,4,16",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(BLOCKS)))]
    committers: Vec<u32>,
    /// Total commits of each measurement
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..))]
    commits: u32,
}

/// Measures everything.
pub fn run(args: &CommitArgs) -> Result<Report> {
    let mut report = Report::new("commit");
    let folder = folder(&args.dir)?;
    let bytes = SHAPE.block_bytes() * u64::from(BLOCKS) * 2;
    let media = FileMedia::open(&folder.path().join("emu"), bytes, FileOptions::default())
        .context("opening a medium")?;
    let file = vec![EmuConfig::new("emu0").namespace(media, 4096)];
    let plain = plain(folder.path(), args.commits)?;
    let memory = |lba| memory_drives(1, bytes, lba);
    let sides = [("memory", memory(4096)), ("memory, LBA 512", memory(512)), ("file", file)];
    for (medium, configs) in sides {
        let format = ripieno_testkit::format(SHAPE);
        // All layers of all committers' blocks.
        let options = StoreOptions { iocbs: BLOCKS * SHAPE.layers, ..StoreOptions::default() };
        let mut stack = Stack::over(configs, &options, &format, BLOCKS, None, None)?;
        // The first write of a block costs the file system more.
        measure(&mut stack, 1, 2 * BLOCKS)?;
        let mut alone = None;
        for &committers in &args.committers {
            let name = format!("{medium}, committers: {committers}");
            report.progress(&name);
            let found = measure(&mut stack, committers, args.commits).context(name.clone())?;
            let written =
                Ratio::new(format!("bytes written, {name}"), "MiB", found.written, found.stored);
            report.ratios.push(written.aim(Aim::AtMost(1.02)));
            let against =
                if medium == "file" { &plain } else { &*alone.get_or_insert(found.us.clone()) };
            for (what, q) in [("p50", 0.5), ("p99", 0.99)] {
                let (us, against) = (found.us.quantile(q), against.quantile(q));
                report.ratios.push(Ratio::new(
                    format!("commit, {what}, {name}"),
                    "us",
                    us,
                    against,
                ));
            }
            let besides = (found.written / found.stored - 1.0) * f64::from(1 << 20);
            report.counts.push((format!("bytes written besides 1 MiB of data, {name}"), besides));
            report.counts.push((format!("commits a flush, {name}"), found.commits_a_flush));
        }
    }
    report.notes.push(
        "commit against: fdatasync, a write of 4 KiB and fdatasync, after as much was written past \
         the page cache; with memory media, the first number of committers"
            .into(),
    );
    Ok(report)
}

struct Found {
    /// Microseconds from the last written row to the end of the commit.
    us: Samples,
    /// MiB written to the controller; the next field is MiB of blocks.
    written: f64,
    stored: f64,
    commits_a_flush: f64,
}

fn measure(stack: &mut Stack, committers: u32, commits: u32) -> Result<Found> {
    let each = commits / committers;
    let before = (stack.emu().counters(), stack.store.stats()?.plane);
    let samples: Vec<Result<Vec<f64>>> = std::thread::scope(|scope| {
        let stack = &*stack;
        let run = |committer| move || commit(stack, (committer, committers), each);
        let threads: Vec<_> = (0..committers).map(|at| scope.spawn(run(at))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a committer does not panic"))
            .collect()
    });
    let mut us = Samples::default();
    for samples in samples {
        samples?.into_iter().for_each(|value| us.push(value));
    }
    let after = (stack.emu().counters(), stack.store.stats()?.plane);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    Ok(Found {
        us,
        written: mib(after.0.bytes_written - before.0.bytes_written),
        stored: mib(after.1.stored_bytes - before.1.stored_bytes),
        commits_a_flush: f64::from(each * committers) / (after.0.flushes - before.0.flushes) as f64,
    })
}

/// Stores and commits one block after the other. Returns the microseconds of each commit.
fn commit(stack: &Stack, (committer, committers): (u32, u32), count: u32) -> Result<Vec<f64>> {
    let store = stack.store.clone();
    // Keys that no earlier measurement used.
    let mut keys = KeyChain::new(format!("{committer} of {committers}, {count}").as_bytes());
    let block = BlockId(committer);
    let mut us = Vec::with_capacity(count as usize);
    for at in 0..count {
        let key = keys.next(&[at]);
        let save = store.allocate(&[key], &[block])?;
        ensure!(save.written() == 1, "the store is too small");
        store.move_all(&save)?;
        let (committed, took) = timed(|| store.commit(save));
        ensure!(committed?.written == 1, "nothing was committed");
        us.push(took.as_secs_f64() * 1e6);
    }
    Ok(us)
}

/// Measures the equivalent of a commit with plain system calls, in microseconds: after a block was
/// written with O_DIRECT, fdatasync, then a small write and fdatasync.
fn plain(folder: &Path, count: u32) -> Result<Samples> {
    let path = folder.join("plain");
    let flags = OFlags::DIRECT.bits().cast_signed();
    let file = File::options().write(true).create(true).custom_flags(flags).open(&path);
    let file = file.with_context(|| format!("making {}", path.display()))?;
    let block = SHAPE.block_bytes();
    // Direct I/O requires an aligned buffer.
    let memory = pattern(block as usize + RECORD_BYTES, 1);
    let bytes = &memory[memory.as_ptr().align_offset(RECORD_BYTES)..][..block as usize];
    let record = |at: u32| u64::from(at) * RECORD_BYTES as u64;
    let data = |at: u32| record(count) + u64::from(at % BLOCKS) * block;
    let mut us = Samples::default();
    for round in 0..2 {
        for at in 0..count {
            file.write_all_at(bytes, data(at))?;
            let (written, took) = timed(|| {
                file.sync_data()?;
                file.write_all_at(&bytes[..RECORD_BYTES], record(at))?;
                file.sync_data()
            });
            written?;
            // The first round allocates the file.
            if round > 0 {
                us.push(took.as_secs_f64() * 1e6);
            }
        }
    }
    Ok(us)
}
