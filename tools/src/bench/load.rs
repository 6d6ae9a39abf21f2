//! The load of a measurement: commands in flight, their times, and what was moved.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use gio_uring::{Counters, IoCtx, IocbId, Progress, abi};
use hdrhistogram::Histogram;
use nvme_driver::platform::buffer::Buffer;
use nvme_driver::{DmaSlice, Iova};
use objstore::{BlockId, Direction, KvPool, RawRing, Row};
use rand::rngs::SmallRng;
use rand::{Rng as _, RngCore as _, SeedableRng as _};
use ripieno_stack::{RawStack, StackError};
use rustix::time::{ClockId, clock_gettime};

use super::Rw;
use crate::interrupt::Interrupt;

/// Parts of a measurement, whose bandwidths are compared with each other.
pub(super) const WINDOWS: usize = 10;
/// Time without any completion after which a measurement fails.
const STUCK: Duration = Duration::from_secs(60);
/// Such a time after an interrupt.
const INTERRUPT_TIMEOUT: Duration = Duration::from_secs(1);
/// Operations that a warp of the I/O kernel works on at a time. Deeper queues take several
/// transfers for each.
pub(super) const OPERATIONS: u32 = abi::WINDOW as u32;
/// Longest latency that is told apart, in nanoseconds.
const LATENCY_MAX: u64 = 100_000_000_000;
/// Bytes of a write while a device is filled.
pub(super) const FILL_BYTES: u32 = 1 << 20;

/// One measurement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    pub(super) rw: Rw,
    /// Bytes of a transfer.
    pub(super) bytes: u32,
    /// Transfers in flight on each queue.
    pub(super) depth: u32,
}

impl Load {
    /// Returns the most transfers of an operation on a queue.
    pub(super) fn together(&self) -> u32 {
        self.depth.div_ceil(OPERATIONS)
    }
}

/// Part of a device that is read or written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Area {
    pub(super) first_lba: u64,
    pub(super) lba_shift: u8,
    pub(super) bytes: u64,
}

impl Area {
    /// Returns the first LBA of a place, in units of `bytes`.
    pub(super) fn lba(&self, place: u64, bytes: u32) -> u64 {
        let offset = place * u64::from(bytes);
        self.first_lba + (offset >> self.lba_shift)
    }
}

/// A transfer: which bytes of a device, in which buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sampled {
    pub(super) device: u32,
    /// Number of the transfer's place, in units of its size.
    pub(super) place: u64,
    pub(super) buffer: u32,
    pub(super) is_read: bool,
}

/// Result of a measurement.
#[derive(Debug)]
pub(super) struct Found {
    /// Seconds that were measured.
    pub(super) seconds: f64,
    pub(super) reads: u64,
    pub(super) writes: u64,
    /// Bytes by window.
    pub(super) windows: [u64; WINDOWS],
    /// Nanoseconds from submission to completion of an operation.
    pub(super) latency: Histogram<u64>,
    /// CPU seconds of the whole process.
    pub(super) cpu_seconds: f64,
    /// CPU seconds of the thread that submits and reaps.
    pub(super) caller_seconds: f64,
    /// The I/O kernel's counters over the measured time.
    pub(super) counters: Counters,
}

/// An operation in flight: one or more transfers for each queue of a device.
struct Slot {
    id: IocbId,
    since: Instant,
    is_read: bool,
    count: u64,
}

/// Devices, ring and buffers.
pub(super) struct Bench {
    pub(super) stack: RawStack,
    pub(super) areas: Vec<Area>,
    /// Paths of the files or block devices that the devices are; none of drives and memory.
    pub(super) files: Vec<String>,
    /// True if their SMART logs count the transfers.
    pub(super) is_logged: bool,
    pub(super) queues: u32,
    pool: KvPool,
    /// The buffers' bytes; `None` if this process cannot access them.
    host: Option<Buffer>,
    /// Number of buffers of each direction: writes use the second half.
    buffers: u32,
    seed: u64,
    random: SmallRng,
    /// Next place of each device, by direction.
    next: Vec<[u64; 2]>,
    /// The transfers of the sample, while it is submitted.
    sample: Option<Vec<Sampled>>,
    /// Set if the user has interrupted while operations did not end.
    pub(super) is_stuck: bool,
}

/// Returns the CPU seconds of this thread, or of the process.
pub(super) fn cpu(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

impl Bench {
    pub(super) fn new(
        stack: RawStack,
        size: Option<u64>,
        queues: u32,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let (pool, regions) = (stack.pool().clone(), stack.ring.regions());
        let areas: Vec<Area> = regions
            .iter()
            .map(|region| Area {
                first_lba: region.first.0,
                lba_shift: region.lba_shift,
                bytes: size.map_or(region.bytes(), |size| size.min(region.bytes())),
            })
            .collect();
        let host = Buffer::new(DmaSlice::whole(pool.memory().clone())?);
        let buffers = pool.blocks() / 2;
        let random = SmallRng::seed_from_u64(seed);
        let next = vec![[0; 2]; areas.len()];
        let (sample, is_stuck) = (None, false);
        let mut bench = Self {
            stack,
            areas,
            files: Vec::new(),
            is_logged: true,
            queues,
            pool,
            host,
            buffers,
            seed,
            random,
            next,
            sample,
            is_stuck,
        };
        bench.fill_buffers()?;
        Ok(bench)
    }

    /// Releases the buffers, and shuts the devices down.
    pub(super) fn close(self) -> Result<(), StackError> {
        let Self { stack, pool, host, .. } = self;
        drop((pool, host));
        stack.close()
    }

    /// Returns true if this process can read the buffers.
    pub(super) fn has_contents(&self) -> bool {
        self.host.is_some()
    }

    /// Returns the bytes that a write from `buffer` leaves.
    pub(super) fn written(&self, buffer: u32, bytes: u32) -> Vec<u8> {
        let mut contents = vec![0; bytes as usize];
        SmallRng::seed_from_u64(self.seed ^ u64::from(buffer) << 32).fill_bytes(&mut contents);
        contents
    }

    /// Returns the first bytes of a buffer; `None` if this process cannot read it.
    pub(super) fn contents(&self, buffer: u32, bytes: u32) -> anyhow::Result<Option<Vec<u8>>> {
        let Some(host) = &self.host else { return Ok(None) };
        let mut contents = vec![0; bytes as usize];
        host.read(self.offset(buffer) as usize, &mut contents)?;
        Ok(Some(contents))
    }

    fn offset(&self, buffer: u32) -> u64 {
        self.pool.offset(BlockId(buffer), Row(0)).expect("there are that many")
    }

    fn iova(&self, buffer: u32) -> Iova {
        self.pool.iova(BlockId(buffer), Row(0)).expect("there are that many, and not staged")
    }

    /// Fills the buffers of writes with bytes that no device can compress.
    fn fill_buffers(&mut self) -> anyhow::Result<()> {
        for buffer in self.buffers..2 * self.buffers {
            let contents = self.written(buffer, self.pool.object_bytes());
            let offset = self.offset(buffer) as usize;
            if let Some(host) = &mut self.host {
                host.write(offset, &contents)?;
            }
        }
        Ok(())
    }

    /// Writes all areas once, one after the other, until an interrupt.
    pub(super) fn fill(
        &mut self,
        interrupt: &mut Interrupt,
        tick: &mut dyn FnMut(u64),
    ) -> anyhow::Result<()> {
        let most = FILL_BYTES.max(self.pool.object_bytes());
        let mut done = 0;
        for (device, area) in self.areas.clone().into_iter().enumerate() {
            // Then what is left of the last one, by LBAs.
            let mut from = 0;
            for bytes in [most, 1 << area.lba_shift] {
                let load = Load { rw: Rw::WRITE, bytes, depth: OPERATIONS };
                self.next[device][0] = from / u64::from(bytes);
                let transfers = (area.bytes - from) / u64::from(bytes);
                self.write(&load, device, transfers, interrupt, &mut |count| {
                    done += count * u64::from(bytes);
                    tick(done);
                })?;
                from += transfers * u64::from(bytes);
            }
        }
        self.next.iter_mut().for_each(|next| *next = [0; 2]);
        Ok(())
    }

    /// Writes the next transfers of a device.
    fn write(
        &mut self,
        load: &Load,
        device: usize,
        transfers: u64,
        interrupt: &mut Interrupt,
        tick: &mut dyn FnMut(u64),
    ) -> anyhow::Result<()> {
        let mut left = transfers;
        let (mut slots, mut idle) = (Vec::new(), Idle::new());
        while left > 0 && !interrupt.asked() {
            while left > 0 && slots.len() < load.depth as usize {
                let slot = self.submit(load, device + slots.len() * self.areas.len(), left)?;
                left -= slot.count;
                slots.push(slot);
            }
            tick(self.reap(&mut slots, None, &mut idle, &mut |_, _| {})?);
        }
        self.drain(&mut slots, interrupt, &mut |slot, _| tick(slot.count))?;
        Ok(())
    }

    /// Returns the number of operations in flight.
    fn slots(&self, load: &Load) -> usize {
        load.depth.min(OPERATIONS) as usize * self.areas.len()
    }

    /// Keeps the load in flight for a time that does not count, and for one that does. `tick` is
    /// called now and then with the time and the transfers so far. Returns `None` if interrupted.
    pub(super) fn run(
        &mut self,
        load: &Load,
        (ramp, runtime): (Duration, Duration),
        interrupt: &mut Interrupt,
        tick: &mut dyn FnMut(f64, u64),
    ) -> anyhow::Result<Option<Found>> {
        let mut slots: Vec<Slot> = Vec::new();
        for at in 0..self.slots(load) {
            slots.push(self.submit(load, at, u64::MAX)?);
        }
        let mut idle = Idle::new();
        let begin = Instant::now();
        let mut found = None;
        loop {
            let now = Instant::now();
            if found.is_none() && now - begin >= ramp {
                found = Some((now, Measured::start(&mut self.stack.ring)?));
            }
            if let Some((start, measured)) = &mut found {
                let elapsed = now - *start;
                // Rates of nothing at all would be no measurement.
                let has_any = measured.found.reads + measured.found.writes > 0;
                if elapsed >= runtime && has_any {
                    measured.end(&mut self.stack.ring, elapsed)?;
                    break;
                }
                let window = elapsed.as_secs_f64() / runtime.as_secs_f64();
                measured.window = ((window * WINDOWS as f64) as usize).min(WINDOWS - 1);
            }
            let mut count = |slot: &Slot, took: Duration| {
                if let Some((_, measured)) = &mut found {
                    measured.count(slot, load, took);
                }
            };
            let ended = self.reap(&mut slots, Some(load), &mut idle, &mut count)?;
            if interrupt.asked() {
                break;
            }
            if ended == 0 {
                continue;
            }
            if let Some((start, measured)) = &found {
                tick(start.elapsed().as_secs_f64(), measured.found.reads + measured.found.writes);
            }
        }
        let has_ended = self.drain(&mut slots, interrupt, &mut |_, _| {})?;
        let found = found.map(|(_, measured)| measured.found);
        // Without seconds it was interrupted.
        Ok(found.filter(|found| has_ended && found.seconds > 0.0))
    }

    /// Waits for operations. Returns false if the user has interrupted and they do not end: the
    /// ring ends them when it is closed.
    fn drain(
        &mut self,
        slots: &mut Vec<Slot>,
        interrupt: &mut Interrupt,
        count: &mut dyn FnMut(&Slot, Duration),
    ) -> anyhow::Result<bool> {
        let mut idle = Idle::new();
        while !slots.is_empty() {
            self.is_stuck = interrupt.asked() && idle.since.elapsed() > INTERRUPT_TIMEOUT;
            if self.is_stuck {
                return Ok(false);
            }
            self.reap(slots, None, &mut idle, count)?;
        }
        Ok(true)
    }

    /// Submits each operation of a load once more, and waits. Returns transfers whose contents are
    /// known: none writes to another one's place. Returns `None` if interrupted while nothing ends.
    pub(super) fn sample(
        &mut self,
        load: &Load,
        interrupt: &mut Interrupt,
    ) -> anyhow::Result<Option<Vec<Sampled>>> {
        self.sample = Some(Vec::new());
        let mut slots = Vec::new();
        // As many as have places of their own.
        let places = self.areas.iter().map(|area| area.bytes / u64::from(load.bytes)).min();
        let turns = places.unwrap_or(0) / u64::from(self.queues * load.together());
        let turns = usize::try_from(turns).unwrap_or(usize::MAX).max(1);
        for at in 0..self.slots(load).min(turns.saturating_mul(self.areas.len())) {
            slots.push(self.submit(load, at, u64::MAX)?);
        }
        let has_ended = self.drain(&mut slots, interrupt, &mut |_, _| {})?;
        let mut all = self.sample.take().unwrap_or_default();
        let mut users: HashMap<(u32, u64), u32> = HashMap::new();
        for transfer in &all {
            *users.entry((transfer.device, transfer.place)).or_default() += 1;
        }
        all.retain(|transfer| users[&(transfer.device, transfer.place)] == 1);
        Ok(has_ended.then_some(all))
    }

    /// Reads parts, of a device and so many bytes each, by one operation, and returns the time it
    /// took. Returns `None` if interrupted while it does not end.
    pub(super) fn batch(
        &mut self,
        pieces: &[(u32, u32)],
        interrupt: &mut Interrupt,
    ) -> anyhow::Result<Option<Duration>> {
        let mut contexts = Vec::with_capacity(pieces.len());
        for (&(device, bytes), index) in pieces.iter().zip(0..) {
            let area = self.areas[device as usize];
            // In bytes here; from the beginning again at the end.
            let next = &mut self.next[device as usize][1];
            let at = if *next + u64::from(bytes) > area.bytes { 0 } else { *next };
            *next = at + u64::from(bytes);
            contexts.push(IoCtx {
                iova: self.iova(index % self.buffers).0,
                lba: area.lba(at, 1),
                bytes,
                device,
            });
        }
        let begin = Instant::now();
        let id = self
            .stack
            .ring
            .submit(Direction::Read, &contexts)
            .context("submitting an operation")?;
        let count = contexts.len() as u64;
        let mut slots = vec![Slot { id, since: begin, is_read: true, count }];
        let mut took = Duration::ZERO;
        let has_ended = self.drain(&mut slots, interrupt, &mut |_, time| took = time)?;
        Ok(has_ended.then_some(took))
    }

    /// Takes completions; with a load, submits as many operations again. Returns the number of
    /// transfers that ended.
    fn reap(
        &mut self,
        slots: &mut Vec<Slot>,
        again: Option<&Load>,
        idle: &mut Idle,
        count: &mut dyn FnMut(&Slot, Duration),
    ) -> anyhow::Result<u64> {
        let (mut transfers, mut at) = (0, 0);
        while at < slots.len() {
            let Some(done) = self.stack.ring.try_completion(slots[at].id)? else {
                at += 1;
                continue;
            };
            let slot = &slots[at];
            count(slot, slot.since.elapsed());
            transfers += slot.count;
            if let Some((status, _)) = done.error {
                let what = if slot.is_read { "reads" } else { "writes" };
                bail!("{} of {} {what} failed: {status}", done.errors, slot.count);
            }
            if let Some(load) = again {
                slots[at] = self.submit(load, at, u64::MAX)?;
                at += 1;
            } else {
                slots.swap_remove(at);
            }
        }
        if transfers > 0 {
            idle.moved();
        } else {
            idle.wait(&mut self.stack.ring)?;
        }
        Ok(transfers)
    }

    /// Submits an operation of at most `limit` transfers, with the buffers of slot `at`.
    fn submit(&mut self, load: &Load, at: usize, limit: u64) -> anyhow::Result<Slot> {
        let device = at % self.areas.len();
        let is_read = self.random.random_range(0..100) < load.rw.read_percent();
        // The first operations have the remainder.
        let operations = load.depth.min(OPERATIONS);
        let turn = (at / self.areas.len()) as u32;
        let first = turn * (load.depth / operations) + turn.min(load.depth % operations);
        let each = load.depth / operations + u32::from(turn < load.depth % operations);
        let first = (device as u32 * load.depth + first) * self.queues;
        let width = self.queues * each;
        // Writes that fill a device use several buffers each.
        let span = load.bytes.div_ceil(self.pool.object_bytes());
        let mut contexts = Vec::with_capacity(width as usize);
        for index in 0..width.min(u32::try_from(limit).unwrap_or(u32::MAX)) {
            let half = if is_read { 0 } else { self.buffers };
            let buffer = half + (first + index) * span % (self.buffers - span + 1);
            let place = self.place(load, device, is_read);
            let area = self.areas[device];
            contexts.push(IoCtx {
                iova: self.iova(buffer).0,
                lba: area.lba(place, load.bytes),
                bytes: load.bytes,
                device: device as u32,
            });
            let device = device as u32;
            self.sample
                .iter_mut()
                .for_each(|it| it.push(Sampled { device, place, buffer, is_read }));
        }
        let direction = if is_read { Direction::Read } else { Direction::Write };
        let since = Instant::now();
        let id = self.stack.ring.submit(direction, &contexts).context("submitting an operation")?;
        Ok(Slot { id, since, is_read, count: contexts.len() as u64 })
    }

    fn place(&mut self, load: &Load, device: usize, is_read: bool) -> u64 {
        let places = (self.areas[device].bytes / u64::from(load.bytes)).max(1);
        if load.rw.is_random() {
            return self.random.random_range(0..places);
        }
        let next = &mut self.next[device][usize::from(is_read)];
        let place = *next % places;
        *next = place + 1;
        place
    }
}

/// A measurement in progress.
struct Measured {
    found: Found,
    window: usize,
    /// CPU seconds and counters at the start.
    cpu: [f64; 2],
    counters: Counters,
}

impl Measured {
    fn start(ring: &mut RawRing) -> anyhow::Result<Self> {
        let found = Found {
            seconds: 0.0,
            reads: 0,
            writes: 0,
            windows: [0; WINDOWS],
            latency: Histogram::new_with_bounds(1, LATENCY_MAX, 3).context("three digits fit")?,
            cpu_seconds: 0.0,
            caller_seconds: 0.0,
            counters: Counters::default(),
        };
        let cpu = [ClockId::ProcessCPUTime, ClockId::ThreadCPUTime].map(cpu);
        Ok(Self { found, window: 0, cpu, counters: ring.counters()?.total })
    }

    fn count(&mut self, slot: &Slot, load: &Load, took: Duration) {
        let Found { reads, writes, windows, latency, .. } = &mut self.found;
        *(if slot.is_read { reads } else { writes }) += slot.count;
        windows[self.window] += slot.count * u64::from(load.bytes);
        latency.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    fn end(&mut self, ring: &mut RawRing, elapsed: Duration) -> anyhow::Result<()> {
        let [process, caller] = [ClockId::ProcessCPUTime, ClockId::ThreadCPUTime].map(cpu);
        self.found.seconds = elapsed.as_secs_f64();
        self.found.cpu_seconds = process - self.cpu[0];
        self.found.caller_seconds = caller - self.cpu[1];
        self.found.counters = ring.counters()?.total - self.counters;
        Ok(())
    }
}

/// A wait for completions, with pauses, and an end.
struct Idle {
    polls: u32,
    since: Instant,
}

impl Idle {
    fn new() -> Self {
        Self { polls: 0, since: Instant::now() }
    }

    fn moved(&mut self) {
        *self = Self::new();
    }

    fn wait(&mut self, ring: &mut RawRing) -> anyhow::Result<()> {
        if ring.poll()? == Progress::Moved {
            return Ok(());
        }
        ring.pause(self.polls);
        self.polls = self.polls.saturating_add(1);
        ensure!(self.since.elapsed() < STUCK, "nothing completed in {} s", STUCK.as_secs());
        Ok(())
    }
}
