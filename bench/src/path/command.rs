//! Cost of submitting and reaping one command, against a controller that completes immediately. The
//! controller's own time is not included.

use std::sync::{Arc, Mutex};

use anyhow::{Result, ensure};
use gio_kernels::InlineExecutor;
use gio_uring::{
    Direction, ExecutorError, IoExecutor, Progress, SharedMemory, Uring, UringOptions,
    abi::{Args, IoCtx},
};
use nvme_driver::{Clock, GrantEpoch, MonotonicClock, Nanos, Place, Quiesced, queue::QueuePair};
use nvme_spec::{
    ids::{Cid, Lba, Lbas, Nsid},
    nvm::{BlockRange, NvmOpcode},
    sgl::SglDescriptor,
    sqe::Sqe,
};

use crate::{
    instant::{Instant, QID},
    sample::{Samples, ticks},
};

const DEPTH: u32 = 256;
const BATCH: u32 = 32;
const BATCHES: u32 = 4096;
const CONTEXTS: u32 = 2048;
const OPERATIONS: u32 = 64;

/// Measures the host's queue pair: build SQEs, post, one doorbell for 32, reap 32, one doorbell.
pub fn host_queue(rounds: u32) -> Result<Samples> {
    let mut device = Instant::new(DEPTH)?;
    let (sq, cq) = device.queues();
    let mut queue = QueuePair::new(&device.bus(), QID, DEPTH, sq, cq)?;
    let mut samples = Samples::default();
    for round in 0..=rounds {
        let mut spent = 0;
        for batch in 0..BATCHES {
            let start = ticks();
            for index in 0..BATCH {
                let at = u64::from(batch * BATCH + index);
                let range = BlockRange::new(Lba(at), Lbas(1)).expect("one block is allowed");
                let data = SglDescriptor::data_block(0x1000 + at * 4096, 4096);
                let mut sqe = Sqe::new(NvmOpcode::READ.0, Cid(0), Nsid(1)).with_sgl(data);
                range.write_to(&mut sqe);
                queue.post(&sqe, at)?;
            }
            queue.update_tail();
            spent += ticks() - start;
            device.complete()?;
            let start = ticks();
            let mut failed = 0;
            let count = queue.reap(BATCH, |done| failed += u32::from(!done.status.is_success()))?;
            spent += ticks() - start;
            ensure!(count == BATCH && failed == 0, "{count} completions, {failed} failed");
        }
        if round > 0 {
            samples.push(spent as f64 / f64::from(BATCH * BATCHES));
        }
    }
    Ok(samples)
}

/// Measures the I/O kernel compiled for the host: explicit contexts of 4 KiB, 2,048 per IOCB, SGLs.
pub fn kernel(rounds: u32) -> Result<Samples> {
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let device = Instant::new(DEPTH)?;
    let grant = device.grant()?;
    let meter = Arc::new(Mutex::new(Meter { device, spent: 0 }));
    let executor = Metered { inner: InlineExecutor::new(clock.clone()), meter: meter.clone() };
    let queues = [(0, grant)];
    let mut ring =
        Uring::init_queue(4, Box::new(executor), clock, &queues, UringOptions::default())?;
    let contexts: Vec<IoCtx> = (0..u64::from(CONTEXTS))
        .map(|at| IoCtx { iova: 0x1000 + at * 4096, lba: at * 2, bytes: 4096, device: 0 })
        .collect();
    let mut samples = Samples::default();
    for round in 0..=rounds {
        let read = |meter: &Mutex<Meter>| -> (u64, u64) {
            let meter = meter.lock().expect("nobody panicked");
            (meter.spent, meter.device.completed())
        };
        let before = read(&meter);
        for _ in 0..OPERATIONS {
            let id = ring.submit_explicit(Direction::Read, false, &contexts)?;
            let done = ring.wait_completion(id, Nanos::MAX)?;
            ensure!(done.errors == 0, "{} commands failed", done.errors);
        }
        let after = read(&meter);
        if round > 0 {
            samples.push((after.0 - before.0) as f64 / (after.1 - before.1) as f64);
        }
    }
    ring.stop(Nanos::MAX)?;
    Ok(samples)
}

#[derive(Debug)]
struct Meter {
    device: Instant,
    spent: u64,
}

/// Times each poll of the executor, and lets the controller complete between polls.
#[derive(Debug)]
struct Metered {
    inner: InlineExecutor,
    meter: Arc<Mutex<Meter>>,
}

impl IoExecutor for Metered {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn alloc(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        self.inner.alloc(len)
    }

    fn address(&self, place: &Place) -> Option<u64> {
        self.inner.address(place)
    }

    fn start(&mut self, args: Args, grants: &[GrantEpoch]) -> Result<(), ExecutorError> {
        self.inner.start(args, grants)
    }

    fn submitted(&mut self, tail: u32, sms: u32) -> Result<(), ExecutorError> {
        self.inner.submitted(tail, sms)
    }

    fn poll(&mut self) -> Result<Progress, ExecutorError> {
        let mut meter = self.meter.lock().expect("nobody panicked");
        let start = ticks();
        let progress = self.inner.poll();
        meter.spent += ticks() - start;
        meter.device.complete().map_err(|error| ExecutorError::Failed {
            executor: self.inner.name(),
            cause: error.to_string(),
        })?;
        progress
    }

    fn stop(&mut self, deadline: Nanos) -> Result<Quiesced, ExecutorError> {
        self.inner.stop(deadline)
    }
}
