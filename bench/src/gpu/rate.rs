//! Commands a second that the CUDA executor builds and reaps, against a controller that completes
//! immediately and runs on other SMs of the same GPU.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use gio_kernels::cuda::{CudaOptions, LaunchMode, StreamKind};
use gio_uring::{Affine, AffineOp, BlockMap, Direction, PoolDesc, PoolHandle, Uring, UringOptions};
use nvme_driver::{Clock, Iova, MonotonicClock, Nanos};

use super::{device::Gpu, drive::Drive};
use crate::{instant::LBA_SHIFT, sample::Samples};

/// Objects, and so commands, per warp and row of a long operation.
const SHARE: u32 = 2048;
/// The same for a small operation: one batch, one doorbell.
const SMALL_SHARE: u32 = 32;
const OBJECT: u32 = 1 << LBA_SHIFT;
const GROUP: u32 = 32;
const ROWS_MAX: u32 = 4096;
/// Operations per sample.
const REPEATS: u32 = 3;
const TIMEOUT: Nanos = Nanos::from_millis(20_000);

/// A measured configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// SMs of the I/O kernel.
    pub sms: u32,
    /// Queue pairs, and so warps, on each SM.
    pub warps: u32,
    /// True for a launch per operation instead of a resident kernel.
    pub per_batch: bool,
}

/// Results.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// Millions of commands a second.
    pub rate: Samples,
    /// Microseconds of a small operation, from issue to completion.
    pub operation_us: Samples,
    /// Commands per submission doorbell.
    pub per_doorbell: Samples,
    /// Fraction of idle polls of the controller.
    pub controller_idle: Samples,
    /// SMs granted to the kernel.
    pub granted: u32,
    /// SMs that the controller ran on.
    pub controller_sms: usize,
    /// Reason why the partition is not a green context.
    pub instead: Option<String>,
}

/// Measures a case once with long operations, or meaningless short ones, and adds it to `found`.
pub fn measure(gpu: &Arc<Gpu>, case: Case, tiny: bool, found: &mut Found) -> Result<()> {
    let rate = driven(gpu, case, SHARE, found, |run, ring| run.sample(ring, tiny))?;
    found.rate.push(rate);
    Ok(())
}

/// Like [`measure`], with `repeats` consecutive operations of one batch per warp: the fixed cost of
/// an operation, and how it grows with the number of warps.
pub fn measure_small(gpu: &Arc<Gpu>, case: Case, repeats: u32, found: &mut Found) -> Result<()> {
    let spent = driven(gpu, case, SMALL_SHARE, found, |run, ring| {
        run.once(ring, 1)?;
        let mut spent = Duration::ZERO;
        for _ in 0..repeats {
            spent += run.once(ring, 1)?;
        }
        Ok((spent, u64::from(repeats + 1) * u64::from(run.count)))
    })?;
    found.operation_us.push(spent.as_secs_f64() * 1e6 / f64::from(repeats));
    Ok(())
}

/// Calls `work` with a ring of this case. It returns its measurement and the number of commands it
/// issued, each of which must have been completed exactly once.
fn driven<T>(
    gpu: &Arc<Gpu>,
    case: Case,
    share: u32,
    found: &mut Found,
    work: impl FnOnce(&Run, &mut Uring) -> Result<(T, u64)>,
) -> Result<T> {
    // One block runs on one SM, whatever a partition's granularity: so one block requests a single
    // SM. Only a launch per batch can set the number of blocks.
    let per_batch = case.sms == 1 || case.per_batch;
    let mode = if per_batch { LaunchMode::PerBatch } else { LaunchMode::Resident };
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let options = CudaOptions { mode, sms: Some(case.sms), ..CudaOptions::default() };
    let executor = gpu.executor(options, clock.clone())?;
    let partition = executor.report().partition;
    found.granted = if case.sms == 1 { 1 } else { partition.granted };
    if let StreamKind::Priority { instead, .. } = partition.kind {
        found.instead = instead;
    }
    let mut drive = Drive::new(gpu, case.sms * case.warps, Some(case.sms))?;
    let options = UringOptions {
        command_timeout: Nanos::from_millis(5_000),
        arena_bytes: 8 << 20,
        ..UringOptions::default()
    };
    let mut ring = Uring::init_queue(4, Box::new(executor), clock, &drive.grants(), options)?;
    let run = Run::new(&mut ring, case, share)?;
    drive.start(Duration::from_secs(60))?;
    let timed = work(&run, &mut ring);
    let proof = ring.stop(ring.now() + TIMEOUT)?;
    let seen = drive.stop(&proof)?;
    let (measured, expected) = timed?;
    let total = ring.counters().total;
    ensure!(
        seen.completed == total.commands && total.commands == expected && total.errors == 0,
        "{expected} commands were asked for, {} sent, {} completed, {} failed",
        total.commands,
        seen.completed,
        total.errors
    );
    found.per_doorbell.push(total.commands as f64 / total.sq_doorbells as f64);
    found.controller_idle.push(seen.idle);
    found.controller_sms = seen.sms;
    Ok(measured)
}

/// An operation of any number of rows, without merging.
struct Run {
    map: BlockMap,
    pool: PoolHandle,
    count: u32,
    sms: u32,
}

impl Run {
    fn new(ring: &mut Uring, case: Case, share: u32) -> Result<Self> {
        let count = share * case.sms * case.warps;
        let entries: Vec<Affine> = (0..count).map(|i| Affine { block: i, file: i }).collect();
        let map = ring.upload_map(&entries, 1)?;
        let pool = ring.register_pool(&PoolDesc {
            // No data is moved, so the memory need not exist.
            row_iova: vec![Iova(1 << 32); ROWS_MAX as usize],
            row_memory: Vec::new(),
            data_lba: vec![0],
            block_stride: u64::from(OBJECT),
            blocks: count,
            files: count,
            group: GROUP,
            object_bytes: OBJECT,
            slot_bytes: OBJECT,
            run_bytes: OBJECT,
            pad_read: None,
            pad_write: None,
        })?;
        Ok(Self { map, pool, count, sms: case.sms })
    }

    /// Returns the time of an operation of `rows` rows.
    fn once(&self, ring: &mut Uring, rows: u32) -> Result<Duration> {
        let op = AffineOp::new(Direction::Read, &self.map, &self.pool, 0..rows);
        let start = Instant::now();
        let id = ring.submit(&AffineOp { sms: self.sms, ..op })?;
        let done = ring.wait_completion(id, ring.now() + TIMEOUT)?;
        let took = start.elapsed();
        let expected = u64::from(rows) * u64::from(self.count);
        ensure!(
            done.errors == 0 && done.objects == expected,
            "{} of {expected} commands were done, {} failed: {:?}",
            done.objects,
            done.errors,
            done.error
        );
        Ok(took)
    }

    /// Returns millions of commands a second over [`REPEATS`] operations, after two warm-up
    /// operations that determine their length, and the total number of commands.
    fn sample(&self, ring: &mut Uring, tiny: bool) -> Result<(f64, u64)> {
        let (seconds, rows_max) = if tiny { (2e-3, 2) } else { (30e-3, ROWS_MAX) };
        self.once(ring, 1)?;
        let row = self.once(ring, 1)?.as_secs_f64().max(1e-6);
        let rows = ((seconds / row) as u32).clamp(1, rows_max);
        let mut spent = Duration::ZERO;
        for _ in 0..REPEATS {
            spent += self.once(ring, rows)?;
        }
        let timed = u64::from(REPEATS * rows) * u64::from(self.count);
        let all = timed + 2 * u64::from(self.count);
        Ok((timed as f64 / spent.as_secs_f64() / 1e6, all))
    }
}
