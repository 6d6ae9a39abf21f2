//! Batches that are read without a store: for a slack table of drives that are not written.

use anyhow::{Context as _, ensure};
use gio_uring::abi;

use super::check::Checks;
use super::load::Load;
use super::measure::{self, Found, Point, SAMPLES};
use super::{Pattern, Raw, RawFlags, Rw, check};
use crate::config::{self, StoreArgs};
use crate::interrupt::Interrupt;
use crate::problem::{Interrupted, Problem, user_error};
use crate::progress::Progress;
use ripieno_sim::median;
use ripieno_stack::StackConfig;

/// Transfers in flight while the contents are sampled.
const DEPTH: u32 = 8;
/// Problem of drives that were never written.
const ZEROS: &str = "most of what was compared holds zeros only; a drive answers reads of blocks \
    that were never written without reading, so write them first (ripieno bench raw --rw write)";
/// Largest LBA that transfers are multiples of, in bytes.
const LBA_MAX: u32 = 4096;

/// Returns the parts, by device and bytes, of a batch of `size` blocks of a layer in a new store:
/// each device has adjacent ones of its objects, and reads them in commands of at most `run` bytes.
fn pieces(args: &StoreArgs, size: u32, slot: u32, run: u32) -> Vec<(u32, u32)> {
    let devices = args.devices.count();
    let mut all = Vec::new();
    for segment in 0..args.shape.segments {
        for turn in 0..devices.min(size) {
            let objects = size / devices + u32::from(turn < size % devices);
            let mut left = u64::from(objects) * u64::from(slot);
            while left > 0 {
                let bytes = left.min(run.into()) as u32;
                all.push(((turn + segment) % devices, bytes));
                left -= u64::from(bytes);
            }
        }
    }
    all
}

/// Measures reads of the sizes that [`measure::Measure`] has, from the first bytes of each device.
/// Returns them, and the models; `None` if interrupted.
pub(super) fn measure(
    args: &StoreArgs,
    interrupt: &mut Interrupt,
) -> anyhow::Result<Option<(Found, Vec<String>)>> {
    let gpu = args.executor.gpu().map_err(user_error)?;
    let most = measure::batch_max(args);
    let transfer = args.coalesce().next_multiple_of(LBA_MAX);
    let flags = RawFlags::of_reads(args, transfer, DEPTH);
    let mut raw = Raw::check(&flags)?;
    (raw.contexts, raw.entries) = (abi::IOCTX_MAX, args.depth());
    raw.check_room()?;
    interrupt.orderly();
    let mut bench = raw.open(gpu.as_ref())?;
    let lba = bench.areas.iter().map(|area| 1 << area.lba_shift).max().unwrap_or(LBA_MAX);
    let slot = args.shape.object_bytes.next_multiple_of(lba);
    let run = (transfer / slot).max(1) * slot;
    let measured = raw.fill(&mut bench, interrupt).and_then(|()| {
        let sizes: Vec<u32> = measure::sizes(most).collect();
        let progress = Progress::new("measurements", sizes.len(), args.shows_progress());
        let before = check::counted(&mut bench)?;
        let mut read: Vec<Point> = Vec::new();
        for (at, size) in sizes.into_iter().enumerate() {
            if interrupt.asked() {
                return Ok(None);
            }
            progress.shows(at, String::new);
            let count = pieces(args, size, slot, run).len();
            ensure!(
                count <= abi::IOCTX_MAX as usize,
                Problem::new(
                    format!(
                        "a batch of {size} blocks takes {count} transfers, one operation {}",
                        abi::IOCTX_MAX
                    ),
                    "use a smaller --pool-blocks, or leave --coalesce out",
                )
            );
            measure::add_rising(&mut read, size, |size| {
                let pieces = pieces(args, size, slot, run);
                let mut times = Vec::new();
                for _ in 0..SAMPLES {
                    let took = bench.batch(&pieces, interrupt).context("reading a batch")?;
                    let took = took.ok_or_else(|| Interrupted(interrupt.exit_code()))?;
                    times.push(took.as_secs_f64() * 1e6);
                }
                let us = median(times).expect("there are samples");
                let objects = u64::from(size) * u64::from(args.shape.segments);
                let bytes = objects * u64::from(args.shape.object_bytes);
                Ok(Point { size, bytes, us })
            })?;
        }
        progress.finish();
        let load =
            Load { rw: Rw { pattern: Pattern::Read, mix: 100 }, bytes: transfer, depth: DEPTH };
        let Some(sample) = bench.sample(&load, interrupt)? else { return Ok(None) };
        let Checks { mut wrong, zeros, sampled, .. } =
            check::check(&mut bench, &load, &before, &sample)?;
        if zeros * 2 > sampled {
            wrong.push(ZEROS.to_owned());
        }
        Ok(Some(Found { read, write: Vec::new(), mix: Vec::new(), wrong }))
    });
    let models =
        bench.stack.ring.controllers().map(|(it, _)| it.lock().info().model.clone()).collect();
    let closed = bench.close();
    let found = measured?;
    closed?;
    Ok(found.map(|found| (found, models)))
}

impl RawFlags {
    /// Returns flags that read these devices in transfers of up to `bytes` bytes.
    fn of_reads(args: &StoreArgs, bytes: u32, depth: u32) -> Self {
        let (common, executor) = (&args.common, Some(args.executor));
        let config = StackConfig { executor, queues: Some(args.queues()), ..args.config.clone() };
        Self {
            rw: vec![Pattern::Read],
            bs: vec![bytes],
            iodepth: vec![depth],
            seed: common.seed,
            mdts: common.mdts,
            options: config.into(),
            descriptors: common.descriptors,
            path: args.flags.path.clone(),
            output: common.output.clone(),
            ..config::flags("").expect("no flag is required")
        }
    }
}

#[cfg(test)]
mod tests;
