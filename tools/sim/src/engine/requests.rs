//! Requests: taken on, and done.

use std::time::Duration;

use kv_catalog::{BlockKey, ReferenceId, WriteId};
use kv_schedule::Kind;

use super::{Request, Run, Setup, below::Purpose, keys};
use crate::policy::Loads;

/// A request that is served.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) request: usize,
    /// Tokens of the prompt whose keys and values are there.
    pub(super) computed: u32,
    /// Tokens that were generated.
    pub(super) generated: u32,
    /// Tokens that the first step of the request loads.
    pub(super) to_load: u32,
    /// Whether it waits for its loads, outside of steps.
    pub(super) is_loading: bool,
    /// Keys of all its blocks, those of its output too.
    keys: Vec<BlockKey>,
    /// Keys of the tier's units of its prompt.
    pub(super) units: Vec<BlockKey>,
    /// Its blocks in the GPU's memory.
    hbm: Hbm,
    /// What it loads must not be evicted before.
    held: Option<ReferenceId>,
    /// When its first token came.
    first: Duration,
}

#[derive(Debug, Clone, Copy)]
enum Hbm {
    /// They are being computed.
    Computing(WriteId),
    /// They may be found.
    Held(ReferenceId),
}

impl Run<'_> {
    /// Takes on what waits, as far as there is room.
    pub(super) fn admit(&mut self) {
        while self.active.len() < self.setup.requests_max
            && !self.is_full
            && let Some(request) = self.waiting.front().copied()
        {
            self.is_full = !self.admit_one(request);
            if !self.is_full {
                self.waiting.pop_front();
            }
        }
    }

    /// Takes a request on, if its blocks fit into the GPU's memory.
    fn admit_one(&mut self, number: usize) -> bool {
        let Setup { block_tokens, .. } = *self.setup;
        let request = &self.requests[number];
        let Request { input, output, blocks, .. } = request;
        let total = (input + output).div_ceil(block_tokens) as usize;
        // Names of its own for what nobody else has.
        let own = (blocks.len()..total).map(|at| !((number as u64) << 24 | at as u64));
        let names = keys(blocks.iter().copied().chain(own));
        let cached = if self.policy.keeps_hbm { self.hbm.find(&names[..blocks.len()]) } else { 0 };
        let (write, room, _) = self.hbm.begin(&names);
        if room < names.len() {
            self.hbm.abort(write);
            return false;
        }
        // One token has to be computed.
        let most = (input - 1) / block_tokens * block_tokens;
        let in_hbm = (cached as u32 * block_tokens).min(most);
        let mut active = Active {
            request: number,
            computed: in_hbm,
            generated: 0,
            to_load: 0,
            is_loading: false,
            keys: names,
            units: Vec::new(),
            hbm: Hbm::Computing(write),
            held: None,
            first: Duration::ZERO,
        };
        if let Some(below) = &mut self.below {
            active.units = below.units(request, block_tokens);
            let found = below.index.find(&active.units);
            let loaded = (found as u32 * below.tier.unit_tokens).min(most).saturating_sub(in_hbm);
            if loaded > 0 {
                active.held = Some(below.index.hold(&active.units[..found]));
                active.computed += loaded;
                if below.tier.loads == Loads::Whole {
                    let size = (below.units_of(loaded), self.setup.model.layers);
                    below.add(Purpose::Whole, Kind::Soon, number, size, self.now);
                    active.is_loading = true;
                } else {
                    active.to_load = loaded;
                }
            }
        }
        let served = &mut self.report.served[number];
        (served.hbm_tokens, served.loaded_tokens) = (in_hbm, active.computed - in_hbm);
        self.active.push(active);
        true
    }

    /// A request has its first token.
    pub(super) fn prompt_ends(&mut self, at: usize) {
        let active = &mut self.active[at];
        (active.generated, active.first) = (1, self.now);
        let arrival = self.requests[active.request].arrival;
        self.report.served[active.request].ttft = self.now - arrival;
        if let (Some(held), Some(below)) = (active.held.take(), &mut self.below) {
            below.index.release(held);
        }
        if let Hbm::Computing(write) = active.hbm {
            self.hbm.commit(write);
            active.hbm = Hbm::Held(self.hbm.hold(&active.keys));
        }
    }

    /// Lets go of requests that have all their tokens.
    pub(super) fn requests_end(&mut self) {
        let requests = self.requests;
        let is_done = |it: &mut Active| it.generated >= requests[it.request].output.max(1);
        for active in self.active.extract_if(.., is_done) {
            self.is_full = false;
            self.report.served[active.request].decode = self.now - active.first;
            if let Hbm::Held(held) = active.hbm {
                self.hbm.release(held);
            }
            if !self.policy.keeps_hbm {
                self.hbm.remove(&active.keys);
            }
        }
    }
}
