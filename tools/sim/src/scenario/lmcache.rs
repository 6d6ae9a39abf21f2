//! The LMCache paper's messages, and its free pages with copies.

use std::time::Duration;

use kv_schedule::{Direction, OpId};
use serde::Deserialize;

use super::{
    served::mean,
    testbed::{BLOCK_TOKENS, Testbed},
};
use crate::{
    lane::{GBPS, Lane, LaneModel},
    parameters::Parameters,
    shown::{Results, results},
    summary::percentile,
    workload::Workload,
};

/// Tokens of a page of vLLM.
const PAGE_TOKENS: u64 = 16;

/// Throughput of messages of one size, one after another.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Messages {
    bytes: u64,
    /// True for copies from host memory, instead of the network.
    #[serde(default)]
    is_copy: bool,
}

impl Messages {
    pub(super) fn run(&self, parameters: &Parameters) -> Results {
        const COUNT: u64 = 1000;
        let model = match self.is_copy {
            true => LaneModel {
                set_up: parameters.micros("copy.page"),
                ..parameters.storage(1, 1).host
            },
            false => parameters.net(parameters.value("net.bandwidth")),
        };
        let mut lane = Lane::new(model);
        let push = |id| lane.push(Duration::ZERO, OpId(id), Direction::Read, self.bytes, 1);
        (0..COUNT).for_each(push);
        let throughput = (self.bytes * COUNT) as f64 / lane.ends().as_secs_f64();
        // 19 of 20 parts of the time of such a message are those of its bytes.
        let saturates = 19.0 * model.read * model.set_up.as_secs_f64() / 1e6;
        results([
            ("GB/s", throughput / 1e9),
            ("Gbps", throughput / GBPS),
            ("MB for 95 %", saturates),
        ])
    }
}

/// Free pages that are copied to host memory before they are needed, and requests that take them.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FreePages {
    machine: Testbed,
    /// Requests a second.
    rate: f64,
    /// Percentage of the GPU's memory that has copies.
    window: f64,
}

/// Free pages, of which the first `window` get a copy in host memory; an allocation takes the first
/// ones, and waits for copies of those that have none.
#[derive(Debug, Clone, Copy)]
struct Copied {
    window: f64,
    /// Pages copied in a second.
    rate: f64,
    /// Pages from the start pointer to the current pointer.
    copied: f64,
    now: f64,
}

impl Copied {
    fn new(window: f64, rate: f64) -> Self {
        Self { window, rate, copied: window, now: 0.0 }
    }

    /// Takes `pages` at the time `at` in seconds. Returns the number of copies it waits for. The
    /// end pointer moves on by as many pages.
    fn take(&mut self, at: f64, pages: f64) -> f64 {
        // An earlier allocation may still wait.
        let idle = (at - self.now).max(0.0);
        self.copied = (self.copied + idle * self.rate).min(self.window);
        let missing = (pages - self.copied).max(0.0);
        self.copied = (self.copied - pages).max(0.0);
        self.now = self.now.max(at) + missing / self.rate;
        missing
    }
}

impl FreePages {
    pub(super) fn run(&self, parameters: &Parameters) -> Results {
        let setup = self.machine.setup(parameters);
        let page = PAGE_TOKENS * setup.model.token_bytes();
        let pages = setup.kv_bytes / page;
        let rate = setup.storage.host.write / page as f64;
        let requests = Workload::documents("l-eval").requests(self.rate, BLOCK_TOKENS, 1);
        let mut pool = Copied::new(pages as f64 * self.window / 100.0, rate);
        let waits = requests.iter().map(|it| {
            let at = it.arrival.as_secs_f64();
            let pages = f64::from(it.input + it.output) / PAGE_TOKENS as f64;
            pool.take(at, pages.ceil());
            (pool.now - at).max(0.0) * 1e3
        });
        let mut waits: Vec<f64> = waits.collect();
        waits.sort_unstable_by(f64::total_cmp);
        let waiting = waits.iter().filter(|ms| **ms > 0.0).count();
        results([
            ("waiting", waiting as f64 / waits.len() as f64 * 100.0),
            ("mean", mean(waits.iter().copied())),
            ("p99", percentile(&waits, 99)),
            ("pages", pages as f64),
            ("copies of three", Copied::new(1.0, rate).take(1.0, 3.0)),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_waits_for_copies_of_what_it_takes() {
        let mut pool = Copied::new(4.0, 2.0);
        // Two more are copied in a second, and four are the window.
        let waited = [(0.0, 3.0), (1.0, 3.0), (1.5, 3.0), (9.0, 4.0), (9.0, 1.0), (9.1, 1.0)]
            .map(|(at, pages)| pool.take(at, pages));
        assert_eq!(waited, [0.0, 0.0, 2.0, 0.0, 1.0, 1.0]);
    }
}
