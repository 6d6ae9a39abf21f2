//! Times batches of reads and writes through a store, alone and mixed.

use std::{ops::Deref, time::Duration};

use anyhow::ensure;
use nvme_driver::{Nanos, Waiter};
use objstore::{BlockId, KvShape, Layer, Order, StoreError, Ticket, Transfer};
use ripieno_sim::median;
use serde::Serialize;

use super::session::{self, Done, Session};
use crate::config::StoreArgs;
use crate::interrupt::Interrupt;
use crate::problem::{Interrupted, Problem};
use crate::progress::Progress;
use crate::timing::Medium;

/// Samples per batch; the median counts.
pub(super) const SAMPLES: u32 = 9;
/// Repetitions of a batch that is faster than a smaller one.
const AGAIN: u32 = 3;
/// Operations in flight in a mixture.
const SLOTS: u32 = 4;
/// Operations completed per mixture, at least.
const MIXED_OPS: u32 = 384;
/// Duration of a mixture, at least.
const MIXED_TIME: Nanos = Nanos::from_millis(1_000);
/// Upper limit of any wait.
const LONG: Nanos = Nanos::from_millis(600_000);

/// Parts of the data set: three are read, one is written.
const PARTS: u64 = 4;
/// Maximum bytes of a layer in the largest batch.
const BATCH_BYTES_MAX: u64 = 32 << 20;

/// Duration of a batch.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Point {
    /// Blocks.
    #[serde(skip)]
    pub(super) size: u32,
    pub(super) bytes: u64,
    /// Microseconds.
    pub(super) us: f64,
}

/// A mixture of reads and writes.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Mix {
    /// Fraction of the operations in flight that are reads.
    pub(super) reads: f64,
    /// Bytes a second of reads and writes together.
    pub(super) bytes_s: f64,
    pub(super) read_bytes_s: f64,
    pub(super) write_bytes_s: f64,
    /// Time of the same bytes, first all reads and then all writes, relative to the time together.
    pub(super) factor: f64,
}

/// All measurements. Field names are the JSON keys.
#[derive(Debug, Serialize)]
pub(super) struct Found {
    pub(super) read: Vec<Point>,
    pub(super) write: Vec<Point>,
    pub(super) mix: Vec<Mix>,
    /// Problems that the checks found.
    #[serde(skip)]
    pub(super) wrong: Vec<String>,
}

/// State of the measurements. The session has keys of four batches: three are read, one is written.
pub(super) struct Measure<'a, 'b> {
    pub(super) session: &'a mut Session<'b>,
    /// Blocks of the pool: four batches.
    pub(super) blocks: Vec<BlockId>,
    /// Blocks of the largest batch.
    pub(super) batch_max: u32,
    pub(super) progress: &'a Progress,
    pub(super) done: usize,
}

/// A request that moves the same blocks repeatedly.
type Job = Box<dyn Deref<Target = Transfer>>;

/// Returns the sizes of batches, in blocks.
pub(super) fn sizes(batch_max: u32) -> impl Iterator<Item = u32> {
    let powers = (0..32).map(|power| 1 << power).take_while(move |size| *size < batch_max);
    powers.chain(std::iter::once(batch_max))
}

/// Returns the blocks of the largest batch: a quarter of the pool, and one for each slot at least.
pub(super) fn batch_max(args: &StoreArgs) -> u32 {
    let layer_bytes = u64::from(args.shape.segments) * u64::from(args.shape.object_bytes);
    let default = (256 << 20) / args.shape.block_bytes() / 4;
    let pool = args.common.pool_blocks.map_or(default, |blocks| u64::from(blocks / 4));
    (BATCH_BYTES_MAX / layer_bytes).min(pool).clamp(SLOTS.into(), 1 << 20) as u32
}

/// Adds the next larger batch; `alone` measures one of so many blocks. If it takes less time than
/// the one before, both are measured again.
pub(super) fn add_rising(
    points: &mut Vec<Point>,
    size: u32,
    mut alone: impl FnMut(u32) -> anyhow::Result<Point>,
) -> anyhow::Result<()> {
    let mut point = alone(size)?;
    for _ in 0..AGAIN {
        let Some(last) = points.last_mut().filter(|last| last.us > point.us) else { break };
        *last = alone(last.size)?;
        point = alone(size)?;
    }
    points.push(point);
    Ok(())
}

impl Measure<'_, '_> {
    /// Has `work` measure on a store of its own. Its second argument is the commands that fit into
    /// all queues.
    pub(super) fn with<T>(
        args: &StoreArgs,
        medium: Option<Medium>,
        interrupt: &mut Interrupt,
        work: impl FnOnce(&mut Measure<'_, '_>, u32) -> anyhow::Result<T>,
    ) -> anyhow::Result<Done<T>> {
        let batch_max = batch_max(args);
        let hint = "use a smaller --pool-blocks, another --model, or --path DIR";
        session::with(args, u64::from(batch_max) * PARTS, medium, interrupt, hint, |session| {
            const LEAST: u32 = PARTS as u32 * SLOTS;
            let blocks = session.pool.take(session.pool.blocks());
            let count = blocks.len() as u32;
            if count < LEAST {
                let problem =
                    format!("a pool of {count} blocks: {PARTS} batches of {SLOTS} are more");
                return Err(Problem::new(problem, format!("give --pool-blocks {LEAST}")).into());
            }
            let batch_max = batch_max.min(count / PARTS as u32);
            let count = Self::count(batch_max);
            let progress = Progress::new("measurements", count, args.shows_progress());
            let progress = &progress;
            let mut measure = Measure { session, blocks, batch_max, progress, done: 0 };
            measure.prepare()?;
            let (queues, depth) = (args.queues(), args.depth());
            let measured = work(&mut measure, u32::from(queues) * depth * args.devices.count());
            progress.finish();
            measured
        })
    }

    /// Returns the number of measurements of [`Measure::all`].
    fn count(batch_max: u32) -> usize {
        2 * sizes(batch_max).count() + SLOTS as usize + 1
    }

    /// Stores the blocks that will be read. Devices have the speed of drives from then on.
    pub(super) fn prepare(&mut self) -> anyhow::Result<()> {
        let batch = self.batch_max as usize;
        for part in self.session.keys.chunks_exact(batch).take(3) {
            if !self.session.fill(part, &self.blocks[..batch])? {
                return Err(Interrupted(self.session.interrupt.exit_code()).into());
            }
            self.session.save(part, &self.blocks[..batch])?;
        }
        self.session.store.sync_journal()?;
        self.session.pace()
    }

    /// Takes all measurements. For mixtures, four batches fit into queues of `in_flight` entries.
    /// Returns `None` if interrupted.
    pub(super) fn all(&mut self, in_flight: u32) -> anyhow::Result<Option<Found>> {
        let before = self.session.counted()?;
        let (mut read, mut write) = (Vec::new(), Vec::new());
        for size in sizes(self.batch_max) {
            for is_read in [true, false] {
                if self.session.interrupt.asked() {
                    return Ok(None);
                }
                let points = if is_read { &mut read } else { &mut write };
                add_rising(points, size, |size| self.alone(size, is_read))?;
                self.advance();
            }
        }
        let Some(mix) = self.mixes(in_flight)? else { return Ok(None) };
        let mut wrong = self.session.problems(&before)?;
        wrong.extend(self.contents()?);
        Ok(Some(Found { read, write, mix, wrong }))
    }

    /// Measures mixtures from reads alone to writes alone, as [`Measure::all`] does.
    fn mixes(&mut self, in_flight: u32) -> anyhow::Result<Option<Vec<Mix>>> {
        let objects = in_flight / (2 * SLOTS);
        let size = (objects / self.shape().segments).clamp(1, self.batch_max);
        let mut mix = Vec::new();
        for reads in (0..=SLOTS).rev() {
            if self.session.interrupt.asked() {
                return Ok(None);
            }
            mix.push(self.together(size, reads)?);
            self.advance();
        }
        let [reads, writes] = [&mix[0], &mix[SLOTS as usize]].map(|alone| alone.bytes_s);
        for mix in &mut mix {
            mix.factor = mix.read_bytes_s / reads + mix.write_bytes_s / writes;
        }
        Ok(Some(mix))
    }

    /// Retrieves the first batch again, and compares a sample of it.
    fn contents(&mut self) -> anyhow::Result<Option<String>> {
        let batch = self.batch_max as usize;
        let keys = &self.session.keys[..batch];
        self.session.contents(keys, &self.blocks[..batch])
    }

    fn advance(&mut self) {
        self.done += 1;
        self.progress.shows(self.done, String::new);
    }

    fn shape(&self) -> KvShape {
        *self.session.args.shape
    }

    fn bytes(&self, size: u32) -> u64 {
        u64::from(size) * u64::from(self.shape().segments) * u64::from(self.shape().object_bytes)
    }

    fn layer(&self, number: u32) -> Layer {
        Layer(number % self.shape().layers)
    }

    /// Returns a job of `size` blocks in the `slot`-th part of the pool.
    fn job(&self, size: u32, slot: u32, is_read: bool) -> anyhow::Result<Job> {
        let (size, batch) = (size as usize, self.batch_max as usize);
        let blocks = &self.blocks[slot as usize * batch..][..size];
        if is_read {
            let prefix = self.session.store.lookup(&self.session.keys[..3 * batch])?;
            ensure!(prefix.len() == 3 * batch, "what was stored is not found");
            let first = (slot as usize % 3) * batch;
            return Ok(Box::new(self.session.store.retrieve_from(&prefix, first, blocks)?));
        }
        // In a mixture four slots share the batch; alone, a job uses all of it.
        let first = 3 * batch + (slot as usize * size) % (batch - size + 1);
        let save = self.session.store.allocate(&self.session.keys[first..][..size], blocks)?;
        ensure!(save.accepted() == size, "the store has no room for a batch");
        Ok(Box::new(save))
    }

    fn start(&self, job: &Job, layer: Layer) -> Result<Ticket, StoreError> {
        self.session.store.start(job, layer, Order::Unordered)
    }

    /// Measures one operation at a time.
    fn alone(&self, size: u32, is_read: bool) -> anyhow::Result<Point> {
        let job = self.job(size, 0, is_read)?;
        let mut times = Vec::new();
        for sample in 0..SAMPLES {
            let begin = self.session.clock.now();
            let ticket = self.start(&job, self.layer(sample))?;
            self.session.store.wait(ticket)?;
            times.push((self.session.clock.now() - begin).0 as f64 / 1e3);
        }
        let us = median(times).expect("there are samples");
        Ok(Point { size, bytes: self.bytes(size), us })
    }

    /// Measures four concurrent operations, `reads` of them reads.
    fn together(&self, size: u32, reads: u32) -> anyhow::Result<Mix> {
        // Concurrent writes need distinct blocks.
        let size = size.min(self.batch_max / SLOTS);
        let mut slots = Vec::new();
        for slot in 0..SLOTS {
            let is_read = slot < reads;
            let job = self.job(size, slot, is_read)?;
            let ticket = self.start(&job, self.layer(0))?;
            slots.push((job, ticket, is_read, 1));
        }
        let begin = self.session.clock.now();
        let mut ended = [0_u32; 2];
        let mut last = begin;
        let mut waiter = Waiter::new(&**self.session.clock, begin + LONG);
        while ended[0] + ended[1] < MIXED_OPS || last - begin < MIXED_TIME {
            let before = ended;
            for (job, ticket, is_read, layers) in &mut slots {
                if self.session.store.poll(ticket)?.is_some() {
                    ended[usize::from(!*is_read)] += 1;
                    last = self.session.clock.now();
                    *ticket = self.start(job, self.layer(*layers))?;
                    *layers += 1;
                }
            }
            if ended != before {
                waiter.moved();
            }
            ensure!(waiter.wait(), "reads and writes together do not end");
        }
        self.session.store.plane().drain()?;
        let took = Duration::from_nanos((last - begin).0).as_secs_f64();
        let rate = |ops: u32| f64::from(ops) * self.bytes(size) as f64 / took;
        let [read_bytes_s, write_bytes_s] = ended.map(rate);
        let bytes_s = read_bytes_s + write_bytes_s;
        let reads = f64::from(reads) / f64::from(SLOTS);
        Ok(Mix { reads, bytes_s, read_bytes_s, write_bytes_s, factor: 1.0 })
    }
}
