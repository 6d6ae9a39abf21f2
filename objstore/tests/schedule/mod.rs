//! Schedulers for a store.
#![allow(dead_code, reason = "each test file uses its part")]

use std::time::Duration;

use kv_schedule::{Config, Curve, IoCosts, Scheduler, Setting, SlackTable};
use kv_tier::{LookaheadConfig, LookaheadCounts};
use objstore::Store;

/// Returns a scheduler for devices that take 80 us per batch and a nanosecond per byte.
pub fn scheduler(config: Config) -> Scheduler {
    let curve = || Curve::line(Duration::from_micros(80), 1e9).unwrap();
    let [model, gpu, engine] = ["test"; 3].map(str::to_owned);
    let setting = Setting { model, gpu, engine, drives: Vec::new() };
    let costs = IoCosts { read: curve(), write: curve(), mixed: 0.4 };
    Scheduler::new(config, SlackTable::new(setting, costs))
}

/// Paces a store, which reads ahead in batches of three blocks.
pub fn pace(store: &Store, config: Config) {
    let ahead = LookaheadConfig { batch_blocks: 3, ..Default::default() };
    store.plane().pace(scheduler(config), ahead).unwrap();
}

/// Returns the number of operations that wait or are in flight.
pub fn pending(store: &Store) -> usize {
    store.plane().with_scheduler(|it| it.pending()).unwrap().unwrap()
}

/// Returns the counts of the lookahead.
pub fn ahead(store: &Store) -> LookaheadCounts {
    store.plane().with_lookahead(|it| it.counts()).unwrap().unwrap()
}
