//! Times batches of reads and writes through a store, alone and mixed.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use nvme_driver::{Clock, Nanos, Waiter};
use objstore::{
    BlockId, BlockKey, KvShape, Layer, LoadRequest, Store, StoreError, StoreRequest, Ticket,
};
use ripieno_sim::median;
use serde::Serialize;

use crate::interrupt::Interrupt;
use crate::progress::Progress;

/// Samples per batch; the median counts.
const SAMPLES: u32 = 9;
/// Operations in flight in a mixture.
const SLOTS: u32 = 4;
/// Operations completed per mixture.
const MIXED_OPS: u32 = 384;
/// Upper limit of any wait.
const LONG: Nanos = Nanos::from_millis(600_000);

/// Duration of a batch.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Point {
    pub(super) bytes: u64,
    /// Microseconds.
    pub(super) us: f64,
}

/// A mixture of reads and writes.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Mix {
    /// Fraction of the operations in flight that are reads.
    pub(super) reads: f64,
    /// Bytes a second of reads and writes together.
    pub(super) bytes_s: f64,
    pub(super) read_bytes_s: f64,
    pub(super) write_bytes_s: f64,
}

/// All measurements.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) read: Vec<Point>,
    pub(super) write: Vec<Point>,
    pub(super) mix: Vec<Mix>,
}

/// State of the measurements.
pub(super) struct Measure<'a> {
    pub(super) store: Store,
    pub(super) clock: &'a Arc<dyn Clock>,
    pub(super) shape: KvShape,
    /// Keys of four batches: three are read, one is written.
    pub(super) keys: &'a [BlockKey],
    /// Blocks of the pool: four batches.
    pub(super) blocks: Vec<BlockId>,
    /// Blocks of the largest batch.
    pub(super) batch_max: u32,
    pub(super) interrupt: &'a mut Interrupt,
    pub(super) progress: &'a Progress,
    pub(super) done: usize,
}

/// A request that moves the same blocks repeatedly.
enum Job {
    Read(LoadRequest),
    Write(StoreRequest),
}

impl Job {
    fn start(&self, store: &Store, layer: Layer) -> Result<Ticket, StoreError> {
        match self {
            Self::Read(load) => store.retrieve_layer(load, layer),
            Self::Write(save) => store.store_layer(save, layer),
        }
    }
}

/// Returns the sizes of batches, in blocks.
fn sizes(batch_max: u32) -> impl Iterator<Item = u32> {
    let powers = (0..32).map(|power| 1 << power).take_while(move |size| *size < batch_max);
    powers.chain(std::iter::once(batch_max))
}

impl Measure<'_> {
    /// Returns the number of measurements of [`Measure::all`].
    pub(super) fn count(batch_max: u32) -> usize {
        2 * sizes(batch_max).count() + SLOTS as usize + 1
    }

    /// Stores the blocks that will be read.
    pub(super) fn prepare(&mut self) -> anyhow::Result<()> {
        let batch = self.batch_max as usize;
        for part in self.keys.chunks_exact(batch).take(3) {
            let save = self.store.allocate(part, &self.blocks[..batch])?;
            ensure!(save.accepted() == batch, "the store has no room for a batch");
            for layer in (0..self.shape.layers).map(Layer) {
                self.store.wait(self.store.store_layer(&save, layer)?)?;
            }
            self.store.commit(save)?;
        }
        Ok(())
    }

    /// Takes all measurements. For mixtures, four batches fit into queues of `in_flight` entries.
    /// Returns `None` if interrupted.
    pub(super) fn all(&mut self, in_flight: u32) -> anyhow::Result<Option<Found>> {
        let (mut read, mut write, mut mix) = (Vec::new(), Vec::new(), Vec::new());
        for size in sizes(self.batch_max) {
            for is_read in [true, false] {
                if self.interrupt.asked() {
                    return Ok(None);
                }
                let point = self.alone(size, is_read)?;
                (if is_read { &mut read } else { &mut write }).push(point);
                self.advance();
            }
        }
        let objects = in_flight / (2 * SLOTS);
        let size = (objects / self.shape.segments).clamp(1, self.batch_max);
        for reads in (0..=SLOTS).rev() {
            if self.interrupt.asked() {
                return Ok(None);
            }
            mix.push(self.together(size, reads)?);
            self.advance();
        }
        Ok(Some(Found { read, write, mix }))
    }

    fn advance(&mut self) {
        self.done += 1;
        self.progress.advance(self.done, String::new);
    }

    fn bytes(&self, size: u32) -> u64 {
        u64::from(size) * u64::from(self.shape.segments) * u64::from(self.shape.object_bytes)
    }

    fn layer(&self, number: u32) -> Layer {
        Layer(number % self.shape.layers)
    }

    /// Returns a job of `size` blocks in the `slot`-th part of the pool.
    fn job(&self, size: u32, slot: u32, is_read: bool) -> anyhow::Result<Job> {
        let (size, batch) = (size as usize, self.batch_max as usize);
        let blocks = &self.blocks[slot as usize * batch..][..size];
        if is_read {
            let prefix = self.store.lookup(&self.keys[..3 * batch])?;
            ensure!(prefix.len() == 3 * batch, "what was stored is not found");
            let first = (slot as usize % 3) * batch;
            return Ok(Job::Read(self.store.retrieve_from(&prefix, first, blocks)?));
        }
        // In a mixture four slots share the batch; alone, a job uses all of it.
        let first = 3 * batch + (slot as usize * size) % (batch - size + 1).max(1);
        let save = self.store.allocate(&self.keys[first..][..size], blocks)?;
        ensure!(save.accepted() == size, "the store has no room for a batch");
        Ok(Job::Write(save))
    }

    /// Measures one operation at a time.
    fn alone(&self, size: u32, is_read: bool) -> anyhow::Result<Point> {
        let job = self.job(size, 0, is_read)?;
        let mut times = Vec::new();
        for sample in 0..SAMPLES {
            let begin = self.clock.now();
            let ticket = job.start(&self.store, self.layer(sample))?;
            self.store.wait(ticket)?;
            times.push((self.clock.now() - begin).0 as f64 / 1e3);
        }
        let us = median(times).expect("there are samples");
        Ok(Point { bytes: self.bytes(size), us })
    }

    /// Measures four concurrent operations, `reads` of them reads.
    fn together(&self, size: u32, reads: u32) -> anyhow::Result<Mix> {
        // Concurrent writes need distinct blocks.
        let size = size.min(self.batch_max / SLOTS).max(1);
        let mut slots = Vec::new();
        for slot in 0..SLOTS {
            let is_read = slot < reads;
            let job = self.job(size, slot, is_read)?;
            let ticket = job.start(&self.store, self.layer(0))?;
            slots.push((job, ticket, is_read, 1));
        }
        let begin = self.clock.now();
        let (mut ended, mut moved) = ([0_u32; 2], begin);
        let mut waiter = Waiter::new(&**self.clock, begin + LONG);
        while ended.iter().sum::<u32>() < MIXED_OPS {
            let before = ended;
            for (job, ticket, is_read, layers) in &mut slots {
                if self.store.poll(ticket)?.is_some() {
                    ended[usize::from(!*is_read)] += 1;
                    moved = self.clock.now();
                    *ticket = job.start(&self.store, self.layer(*layers))?;
                    *layers += 1;
                }
            }
            if ended != before {
                waiter.moved();
            }
            ensure!(waiter.wait(), "reads and writes together do not end");
        }
        self.store.drain()?;
        let took = Duration::from_nanos((moved - begin).0).as_secs_f64();
        let rate = |ops: u32| f64::from(ops) * self.bytes(size) as f64 / took;
        let [read_bytes_s, write_bytes_s] = ended.map(rate);
        let bytes_s = read_bytes_s + write_bytes_s;
        Ok(Mix { reads: f64::from(reads) / f64::from(SLOTS), bytes_s, read_bytes_s, write_bytes_s })
    }
}
