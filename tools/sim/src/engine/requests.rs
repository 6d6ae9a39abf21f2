//! Requests: taken on, and done.

use std::time::Duration;

use kv_catalog::{BlockKey, ReferenceId, WriteId};

use super::{
    Request, Run, Setup,
    below::{Found, Load},
    keys,
};
use crate::policy::Loads;

/// A request that is served.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) request: usize,
    /// Tokens of the prompt whose keys and values are there.
    pub(super) computed: u32,
    /// Tokens that were generated.
    pub(super) generated: u32,
    /// What the first step of the request loads.
    pub(super) to_load: Load,
    /// Loads that it waits for, outside of steps.
    pub(super) loading: u32,
    /// Units that host memory was asked to take.
    pub(super) offered: usize,
    /// Keys of all its blocks, those of its output too.
    keys: Vec<BlockKey>,
    /// Keys of the tier's units of its prompt.
    pub(super) units: Vec<BlockKey>,
    /// Its blocks in the GPU's memory.
    hbm: Hbm,
    /// What it loads.
    found: Found,
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
            to_load: Load::default(),
            loading: 0,
            offered: 0,
            keys: names,
            units: Vec::new(),
            hbm: Hbm::Computing(write),
            found: Found::default(),
            first: Duration::ZERO,
        };
        if let Some(below) = &mut self.below {
            active.units = below.units(request, block_tokens);
            if let Some(host) = &mut below.host {
                host.runs(number, &mut below.way.scheduler);
            }
            active.found = below.take(&active.units, in_hbm, most);
            let Found { load, tokens, .. } = active.found;
            active.computed += tokens;
            if below.tier.loads == Loads::Whole {
                active.loading = below.load_whole(load, number, self.now);
            } else {
                active.to_load = load;
            }
            let from_host = (load.host as u32 * below.tier.unit_tokens).min(tokens);
            self.report.served[number].host_tokens = from_host;
        }
        let served = &mut self.report.served[number];
        (served.hbm_tokens, served.loaded_tokens) = (in_hbm, active.computed - in_hbm);
        self.active.push(active);
        true
    }

    /// Announces what waits and runs soon, and has what it needs brought to host memory.
    pub(super) fn look_ahead(&mut self) {
        if !std::mem::take(&mut self.is_new) {
            return;
        }
        let Some(below) = &mut self.below else { return };
        let Some(Some(window)) = self.policy.host.map(|host| host.lookahead) else { return };
        let Setup { block_tokens, step_tokens, .. } = *self.setup;
        let left = self
            .active
            .iter()
            .map(|it| u64::from(self.requests[it.request].input.saturating_sub(it.computed)));
        let mut before: u64 = left.sum();
        let next = self.step.as_ref().map_or(self.now, |step| step.expected_end(self.now));
        // If nobody else is taken on: until one has all its tokens.
        let is_full = self.is_full || self.active.len() >= self.setup.requests_max;
        let tokens = self
            .active
            .iter()
            .map(|it| self.requests[it.request].output.saturating_sub(it.generated));
        let until_room = if is_full { tokens.min().unwrap_or_default() } else { 0 };
        for number in self.waiting.iter().copied() {
            // Steps that compute what is before it, after the one that runs.
            let after = (before / u64::from(step_tokens)) as u32;
            if after >= window.drives_window {
                break;
            }
            let request = &self.requests[number];
            let units = below.units(request, block_tokens);
            let [in_tier, all] = below.find(&units);
            let blocks = keys(request.blocks.iter().copied());
            let in_hbm = self.hbm.find(&blocks) as u32 * block_tokens;
            let first = (in_hbm / below.tier.unit_tokens) as usize;
            if let Some(host) = &mut below.host
                && first < in_tier
            {
                let when = (next, after + until_room);
                host.announce(number, &units[first..in_tier], when, self.now);
            }
            let there = in_hbm.max(all as u32 * below.tier.unit_tokens);
            before += u64::from(request.input.saturating_sub(there));
        }
        if let Some(host) = &mut below.host {
            host.plan(&mut below.way.scheduler, self.now);
        }
    }

    /// A request has its first token.
    pub(super) fn prompt_ends(&mut self, at: usize) {
        let active = &mut self.active[at];
        (active.generated, active.first) = (1, self.now);
        let arrival = self.requests[active.request].arrival;
        self.report.served[active.request].ttft = self.now - arrival;
        if let Some(below) = &mut self.below {
            below.release(&mut active.found);
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
