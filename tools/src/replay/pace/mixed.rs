//! Bandwidth of reads and writes that are all submitted at the beginning: started in order of
//! arrival, and by the scheduler.

use std::collections::HashSet;
use std::time::Duration;

use gio_uring::Progress;
use kv_schedule::{Config, Flow, Kind, OpId};
use nvme_driver::{Clock as _, Nanos};
use nvme_emu::SimClock;
use objstore::{BlockId, BlockKey, Layer, PacedEnd, PacedStore};
use serde::Serialize;

use crate::model::TRACE_BLOCK_TOKENS;
use crate::pace::Medium;
use crate::trace::Request;

use super::RunSetup;
use super::engine::IDLE;

/// Batches of reads or writes; each has all layers of [`BLOCKS`] trace blocks.
const BATCHES: usize = 8;
const BLOCKS: usize = 16;

/// Bytes a second of reads and writes together. Field names are the JSON keys.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Mixed {
    /// Fraction of the bytes that are written.
    writes: f64,
    /// Bandwidth with the scheduler.
    slack_bytes_s: f64,
    /// Bandwidth if everything starts on arrival, reads and writes alternating.
    naive_bytes_s: f64,
    /// Bandwidth of one direction after the other, each at full speed.
    best_bytes_s: f64,
}

impl Mixed {
    /// Formats a row of a table.
    pub(super) fn cells(&self) -> [String; 5] {
        let mb = |bytes: f64| format!("{:.2}", bytes / 1e6);
        let Self { writes, slack_bytes_s, naive_bytes_s, best_bytes_s } = *self;
        let lost = format!("{:.1} %", 100.0 * (1.0 - naive_bytes_s / slack_bytes_s));
        let writes = format!("{:.1} %", 100.0 * writes);
        [writes, mb(naive_bytes_s), mb(slack_bytes_s), mb(best_bytes_s), lost]
    }
}

/// Returns the blocks stored before the measurement, and those stored during it.
pub(super) fn requests() -> Vec<Request> {
    let blocks = (BATCHES * BLOCKS) as u64;
    let request = |ids: std::ops::Range<u64>| Request {
        arrival: Duration::ZERO,
        input_tokens: blocks * u64::from(TRACE_BLOCK_TOKENS),
        output_tokens: 1,
        hash_ids: ids.collect(),
    };
    vec![request(0..blocks), request(blocks..2 * blocks)]
}

/// Operations over a store, until all have ended.
struct Mover<'a> {
    clock: &'a SimClock,
    store: PacedStore,
    left: HashSet<OpId>,
}

impl Mover<'_> {
    fn now(&self) -> Duration {
        self.clock.now().duration()
    }

    /// Polls the store. Returns its progress, and the latest time of the next call.
    fn poll(&mut self) -> anyhow::Result<(Progress, Option<Duration>)> {
        let now = self.now();
        let polled = self.store.poll(now)?;
        for (id, end) in self.store.ended() {
            self.left.remove(&id);
            if let PacedEnd::Failed(error) = end {
                return Err(error.into());
            }
        }
        Ok(polled)
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        self.store.drain();
        let mut idle = 0;
        loop {
            let (moved, wake) = self.poll()?;
            idle = if moved == Progress::Idle { idle + 1 } else { 0 };
            if self.left.is_empty() {
                break;
            }
            let idle = if self.store.in_flight() == 0 { IDLE } else { idle };
            let until = wake.map_or(Nanos::MAX, |wake| Nanos(wake.as_nanos() as u64));
            self.clock.pause(idle, until);
        }
        Ok(())
    }

    /// Reads or writes the blocks of all batches, layer by layer: stored blocks are read, others
    /// are stored. Returns the time taken.
    fn go(
        &mut self,
        layers: u32,
        batches: &[(&[BlockKey], &[BlockId])],
    ) -> anyhow::Result<Duration> {
        let (mut transfers, mut writings) = (Vec::new(), Vec::new());
        for (keys, blocks) in batches {
            let store = self.store.store();
            let prefix = store.lookup(keys)?;
            if prefix.is_empty() {
                writings.push(store.allocate(keys, blocks)?);
            } else {
                transfers.push(store.retrieve(&prefix, blocks)?);
            }
        }
        let begin = self.now();
        for layer in (0..layers).map(Layer) {
            for at in 0..batches.len() {
                let (now, flow) = (self.now(), Flow::default());
                if let Some(transfer) = transfers.get(at) {
                    let id = self.store.retrieve_layer(transfer, layer, flow, Kind::Soon, now)?;
                    self.left.insert(id);
                    self.poll()?;
                }
                if let Some(writing) = writings.get(at) {
                    self.left.insert(self.store.store_layer(writing, layer, flow, now)?);
                    self.poll()?;
                }
            }
        }
        self.finish()?;
        let took = self.now() - begin;
        for writing in writings {
            self.store.store().commit(writing)?;
        }
        Ok(took)
    }
}

impl RunSetup<'_> {
    /// Measures mixtures of reads and writes, for each number of batches that are writes.
    pub(super) fn mixed(&self) -> anyhow::Result<Vec<Mixed>> {
        let Medium { read, write, .. } = self.pace.medium;
        let all = self.args.shape.block_bytes() as f64 * self.plan.keys(0).len() as f64;
        let row = |count: usize| {
            let writes = count as f64 / BATCHES as f64;
            let [slack, naive] = [true, false].map(|it| self.moved(count, it));
            Ok(Mixed {
                writes,
                slack_bytes_s: all / slack?.as_secs_f64(),
                naive_bytes_s: all / naive?.as_secs_f64(),
                best_bytes_s: 1.0 / ((1.0 - writes) / read + writes / write),
            })
        };
        (0..=BATCHES).map(row).collect()
    }

    fn moved(&self, writes: usize, is_scheduled: bool) -> anyhow::Result<Duration> {
        let config = Config { backlog_bytes: u64::MAX, ..self.pace.config(is_scheduled) };
        let (took, _) = self.with_store(config, |clock, store, blocks| {
            let mut mover = Mover { clock, store, left: HashSet::new() };
            let layers = self.args.shape.layers;
            let each = self.plan.keys(0).len() / BATCHES;
            let keys = [0, 1].map(|request| self.plan.keys(request).chunks_exact(each));
            let all = keys.into_iter().flatten().zip(blocks.chunks_exact(each));
            let all: Vec<(&[BlockKey], &[BlockId])> = all.collect();
            mover.go(layers, &all[..BATCHES])?;
            let took = mover.go(layers, &all[writes..][..BATCHES])?;
            Ok((mover.store, took))
        })?;
        Ok(took)
    }
}
