//! Bandwidth of reads and writes that are all submitted at the beginning: started in order of
//! arrival, and by the scheduler.

use std::time::Duration;

use kv_schedule::Config;
use objstore::BlockKey;
use serde::Serialize;

use crate::model::TRACE_BLOCK_TOKENS;
use crate::outcome::percent;
use crate::progress::Progress;
use crate::table::Column;
use crate::timing::Medium;
use crate::trace::Request;

use super::RunSetup;

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

pub(super) const COLUMNS: [Column<Mixed>; 5] = [
    ("writes", |it| percent(it.writes)),
    ("MB/s: naive", |it| format!("{:.2}", it.naive_bytes_s / 1e6)),
    ("slack", |it| format!("{:.2}", it.slack_bytes_s / 1e6)),
    ("at best", |it| format!("{:.2}", it.best_bytes_s / 1e6)),
    ("lost by naive", |it| percent(1.0 - it.naive_bytes_s / it.slack_bytes_s)),
];

/// Returns the blocks stored before the measurement, and those stored during it.
pub(super) fn requests() -> Vec<Request> {
    let blocks = (BATCHES * BLOCKS) as u64;
    let request = |ids: std::ops::Range<u64>| Request {
        input_tokens: blocks * u64::from(TRACE_BLOCK_TOKENS),
        output_tokens: 1,
        hash_ids: ids.collect(),
        ..Request::default()
    };
    vec![request(0..blocks), request(blocks..2 * blocks)]
}

impl RunSetup<'_> {
    /// Measures mixtures of reads and writes, for each number of batches that are writes.
    pub(super) fn mixed(&self) -> anyhow::Result<Vec<Mixed>> {
        let Medium { read, write, .. } = self.timing.medium;
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
        let config = Config { backlog_bytes: u64::MAX, ..self.timing.config(is_scheduled) };
        let progress = Progress::new("", 0, false);
        let (took, _) = self.with_store(config, &progress, |mut tiers| {
            let each = self.plan.keys(0).len() / BATCHES;
            let keys = [0, 1].map(|request| self.plan.keys(request).chunks_exact(each));
            let all: Vec<&[BlockKey]> = keys.into_iter().flatten().collect();
            tiers.move_all(&all[..BATCHES])?;
            let took = tiers.move_all(&all[writes..][..BATCHES])?;
            Ok((tiers, took))
        })?;
        Ok(took)
    }
}
