//! Schedulers for a store.
#![allow(dead_code, reason = "each test file uses its part")]

use std::time::Duration;

use kv_schedule::{Config, Curve, IoCosts, Scheduler, Setting, SlackTable};
use kv_tier::LookaheadConfig;
use objstore::{PacedStore, Store};

/// Returns a scheduler for devices that take 80 us per batch and a nanosecond per byte.
pub fn scheduler(config: Config) -> Scheduler {
    let curve = || Curve::line(Duration::from_micros(80), 1e9).unwrap();
    let [model, gpu, engine] = ["test"; 3].map(str::to_owned);
    let setting = Setting { model, gpu, engine, drives: Vec::new() };
    let costs = IoCosts { read: curve(), write: curve(), mixed: 0.4 };
    Scheduler::new(config, SlackTable::new(setting, costs))
}

/// Returns a store that reads ahead in batches of three blocks.
pub fn looking_ahead(store: &Store) -> PacedStore {
    let [layers, link] = [(); 2].map(|()| scheduler(Config::default()));
    PacedStore::new(store.clone(), layers)
        .with_lookahead(link, LookaheadConfig { batch_blocks: 3, ..Default::default() })
}
