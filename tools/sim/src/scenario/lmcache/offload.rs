//! Free pages that are copied before they are needed: figure 4.

use super::{LLAMA_3_8B, PAGE_TOKENS, input, mean, setup};
use crate::{
    engine::Request,
    outcome::{Outcome, Table, row},
    parallel::each,
    parameters::Parameters,
    summary::percentile,
    workload::L_EVAL,
};

/// Part of the pool that has copies, in percent.
const WINDOWS: [f64; 8] = [0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 100.0];

/// Free pages, of which the first `window` get a copy in host memory; an allocation takes the first
/// ones, and waits for copies of those that have none.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pool {
    window: f64,
    /// Pages copied in a second.
    rate: f64,
    /// Pages from the start pointer to the current pointer.
    copied: f64,
    now: f64,
}

impl Pool {
    pub(super) fn new(window: f64, rate: f64) -> Self {
        Self { window, rate, copied: window, now: 0.0 }
    }

    /// Takes `pages` at the time `at` in seconds. Returns the number of copies it waits for. The
    /// end pointer moves on by as many pages.
    pub(super) fn take(&mut self, at: f64, pages: f64) -> f64 {
        // An earlier allocation may still wait.
        let idle = (at - self.now).max(0.0);
        self.copied = (self.copied + idle * self.rate).min(self.window);
        let missing = (pages - self.copied).max(0.0);
        self.copied = (self.copied - pages).max(0.0);
        self.now = self.now.max(at) + missing / self.rate;
        missing
    }
}

/// Returns the milliseconds that each request waits for copies, sorted.
fn waits(requests: &[Request], window: f64, rate: f64) -> Vec<f64> {
    let mut pool = Pool::new(window, rate);
    let wait = |it: &Request| {
        let at = it.arrival.as_secs_f64();
        let pages = f64::from(it.input + it.output) / PAGE_TOKENS as f64;
        pool.take(at, pages.ceil());
        (pool.now - at).max(0.0) * 1e3
    };
    let mut waits: Vec<f64> = requests.iter().map(wait).collect();
    waits.sort_unstable_by(f64::total_cmp);
    waits
}

pub(in crate::scenario) fn figure_4(parameters: &Parameters) -> Outcome {
    const RATES: [f64; 3] = [1.0, 2.0, 4.0];
    let setup = setup(parameters, "H100", (LLAMA_3_8B, 1), parameters.net(1.0));
    let page = PAGE_TOKENS * setup.model.token_bytes();
    let pages = setup.kv_bytes / page;
    let rate = setup.storage.host.write / page as f64;
    let mut outcome = Outcome::of(vec![format!(
        "Llama 3 8B on one H100: {pages} pages of 16 tokens, copied to host memory at {} GB/s; \
             L-Eval as in the Tutti scenarios, with Poisson arrivals. All free pages hold keys and \
             values, and a request takes all its pages when it comes",
        setup.storage.host.write / 1e9
    )]);
    let rows = |arrivals: f64| -> Vec<Vec<String>> {
        let requests = L_EVAL.requests(arrivals, setup.block_tokens, 1);
        let of = |percent: &f64| {
            let waits = waits(&requests, pages as f64 * percent / 100.0, rate);
            let waiting = waits.iter().filter(|ms| **ms > 0.0).count();
            let part = waiting as f64 / waits.len() as f64 * 100.0;
            let p99 = percentile(&waits, 99);
            row(format!("{percent} %"), [part, mean(waits.iter().copied()), p99])
        };
        each(&WINDOWS, of)
    };
    let columns = ["pages with a copy", "allocations that wait, %", "mean wait, ms", "p99, ms"];
    for arrivals in RATES {
        let title = format!("{arrivals} requests a second");
        outcome.tables.push(Table::new(title, columns, rows(arrivals)));
    }
    let waited = Pool::new(1.0, rate).take(1.0, 3.0);
    let what = "copies that 3 pages wait for, one of them copied";
    outcome.comparisons.push(input(what, "pages", 2.0, waited, ""));
    outcome.notes.push(
        "The paper has no other number of this. A window of some percent of the memory is enough: \
         a wait is at most what a prompt takes over the link, and that is short beside its \
         computation. Our store writes each block once, when it is computed: all free pages have \
         their copy below, and an allocation never waits."
            .to_owned(),
    );
    outcome
}
