//! Requests: admitted, completed, and preempted for lack of memory.

use std::time::Duration;

use kv_catalog::{BlockKey, ReferenceId, WriteId};

use super::{
    Run, Setup,
    below::{Below, Found, Load},
    keys,
};
use crate::policy::Loads;

/// A waiting request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waiting {
    pub(super) request: usize,
    /// Tokens it had when it was preempted; they are recomputed with its prompt.
    generated: u32,
    /// Time of its first token.
    first: Duration,
}

impl Waiting {
    pub(super) fn new(request: usize) -> Self {
        Self { request, generated: 0, first: Duration::ZERO }
    }
}

/// A request being served.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) request: usize,
    /// Tokens to compute before the next one is generated: the prompt, and the tokens generated
    /// before a preemption.
    pub(super) prompt: u32,
    /// Tokens of `prompt` whose keys and values are present.
    pub(super) computed: u32,
    /// Generated tokens.
    pub(super) generated: u32,
    /// Set after its client disconnected: it ends when it has no loads in flight.
    is_aborted: bool,
    /// Bytes loaded for it.
    pub(super) loaded_bytes: u64,
    /// Loads of its first step.
    pub(super) to_load: Load,
    /// Pending loads outside of steps.
    pub(super) loading: u32,
    /// Number of units that were offered to host memory.
    pub(super) offered: usize,
    /// Keys of its blocks, including those of its output so far.
    keys: Vec<BlockKey>,
    /// Keys of its prompt's units in the tier.
    pub(super) units: Vec<BlockKey>,
    /// Its prompt's blocks in the GPU's memory.
    hbm: Hbm,
    /// Blocks of its output, added later.
    grown: Vec<ReferenceId>,
    /// Blocks to load.
    found: Found,
    /// Time of its first token.
    first: Duration,
}

#[derive(Debug, Clone, Copy)]
enum Hbm {
    /// Being computed.
    Computing(WriteId),
    /// Complete, and visible to other requests.
    Held(ReferenceId),
}

impl Active {
    /// Returns the number of tokens before the next one.
    pub(super) fn context(&self, input: u32) -> u32 {
        // Tokens generated before a preemption are a part of the prompt.
        self.computed + self.generated - (self.prompt - input)
    }

    /// Returns the bytes loaded in vain if it ends now.
    fn in_vain(&self) -> u64 {
        if self.is_decoding() { 0 } else { self.loaded_bytes }
    }

    pub(super) fn is_decoding(&self) -> bool {
        self.computed >= self.prompt
    }
}

/// Returns a name for a block that no other request has.
fn own(number: usize, at: usize) -> u64 {
    !((number as u64) << 24 | at as u64)
}

impl Run<'_> {
    /// Admits waiting requests while there is room.
    pub(super) fn admit(&mut self) {
        while self.active.len() < self.setup.requests_max
            && !self.is_full
            && let Some(first) = self.waiting.front().copied()
        {
            self.is_full = !self.admit_one(first);
            if !self.is_full {
                self.waiting.pop_front();
            }
        }
    }

    /// Admits a request if its prompt's blocks fit into the GPU's memory.
    fn admit_one(&mut self, waiting: Waiting) -> bool {
        let Waiting { request: number, generated, first } = waiting;
        let Setup { block_tokens, .. } = *self.setup;
        let request = &self.requests[number];
        let prompt = request.input + generated;
        let shared = &request.blocks;
        let total = prompt.div_ceil(block_tokens) as usize;
        let own = (shared.len()..total).map(|at| own(number, at));
        let names = keys(shared.iter().copied().chain(own));
        // At least one token must be computed.
        let most = (prompt - 1) / block_tokens * block_tokens;
        let full = &names[..((prompt / block_tokens) as usize).min(names.len())];
        let cached = if self.policy.keeps_hbm { self.hbm.find(full) } else { 0 };
        let (write, room, _) = self.hbm.begin(&names);
        if room < names.len() {
            self.hbm.abort(write);
            return false;
        }
        let in_hbm = (cached as u32 * block_tokens).min(most);
        let mut active = Active {
            request: number,
            prompt,
            computed: in_hbm,
            generated,
            is_aborted: false,
            loaded_bytes: 0,
            to_load: Load::default(),
            loading: 0,
            offered: 0,
            keys: names,
            units: Vec::new(),
            hbm: Hbm::Computing(write),
            grown: Vec::new(),
            found: Found::default(),
            first,
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
                active.loaded_bytes = below.bytes(load);
            } else {
                active.to_load = load;
            }
            if generated == 0 {
                let from_host = (load.host as u32 * below.tier.unit_tokens).min(tokens);
                self.report.served[number].host_tokens = from_host;
            }
        }
        if generated == 0 {
            let served = &mut self.report.served[number];
            (served.hbm_tokens, served.loaded_tokens) = (in_hbm, active.computed - in_hbm);
        }
        self.active.push(active);
        true
    }

    /// Reserves room for `tokens` more tokens of each decoding request; false if one has none.
    pub(super) fn grow(&mut self, tokens: u32) -> bool {
        (0..self.active.len()).all(|at| self.grow_one(at, tokens))
    }

    fn grow_one(&mut self, at: usize, tokens: u32) -> bool {
        let Self { active, hbm, requests, setup, .. } = self;
        let active = &mut active[at];
        if !active.is_decoding() {
            return true;
        }
        let context = active.context(requests[active.request].input);
        let there = active.keys.len();
        // The last generated token has no keys and values yet.
        let wanted = (context - 1 + tokens).div_ceil(setup.block_tokens) as usize;
        if wanted <= there {
            return true;
        }
        let names = keys((there..wanted).map(|at| own(active.request, at)));
        let (write, room, _) = hbm.begin(&names);
        if room < names.len() {
            hbm.abort(write);
            return false;
        }
        hbm.commit(write);
        active.grown.push(hbm.hold(&names));
        active.keys.extend(names);
        true
    }

    /// Reserves room for a token of every decoding request, and preempts the latest requests to get
    /// it: they restart before all waiting requests (vLLM's recomputation).
    pub(super) fn make_room(&mut self) {
        let mut at = 0;
        while at < self.active.len() {
            if self.grow_one(at, 1) {
                at += 1;
                continue;
            }
            // A request with loads in flight is not preempted; the one that needs room has none.
            let last = self.active.iter().rposition(|active| active.loading == 0);
            self.preempt(last.expect("who wants room does not load"));
        }
    }

    fn preempt(&mut self, at: usize) {
        let active = self.active.remove(at);
        self.report.in_vain_bytes += active.in_vain();
        let Active { request, generated, first, .. } = active;
        self.waiting.push_front(Waiting { request, generated, first });
        self.report.preemptions += 1;
        self.let_go(active);
        // No admissions until a request ends: the freed blocks are for the running requests.
        self.is_full = !self.active.is_empty();
    }

    /// Handles disconnected clients.
    pub(super) fn leave(&mut self) {
        while let Some(&(time, number)) = self.leaving.first()
            && time <= self.now
        {
            self.leaving.pop_first();
            self.report.served[number].is_aborted = true;
            match self.waiting.iter().position(|waiting| waiting.request == number) {
                Some(at) => self.abort_waiting(at),
                None => self.abort_active(number),
            }
        }
    }

    fn abort_waiting(&mut self, at: usize) {
        self.report.aborted_waiting += 1;
        let gone = self.waiting.remove(at).expect("it waits");
        // The next request may need less room.
        self.is_full &= at > 0;
        self.is_new = true;
        if let Some(Below { host: Some(host), way, .. }) = &mut self.below {
            host.aborted(gone.request, &mut way.scheduler);
        }
    }

    /// Lets started work complete: the step it is in, and loads into its blocks.
    fn abort_active(&mut self, number: usize) {
        self.report.aborted_running += 1;
        let mut active = self.active.iter_mut();
        let active = active.find(|active| active.request == number).expect("it waits, or runs");
        active.is_aborted = true;
        if let Some(below) = &mut self.below {
            let (loads, bytes) = below.cancel_whole(number);
            active.loading -= loads;
            active.loaded_bytes -= bytes;
        }
        self.report.in_vain_bytes += active.in_vain();
    }

    /// Removes aborted requests between two steps.
    pub(super) fn aborted_end(&mut self) {
        let is_over = |it: &mut Active| it.is_aborted && it.loading == 0;
        let gone: Vec<Active> = self.active.extract_if(.., is_over).collect();
        for active in gone {
            self.is_full = false;
            self.let_go(active);
        }
    }

    /// Unpins the request's blocks.
    fn let_go(&mut self, mut active: Active) {
        if let Some(below) = &mut self.below {
            below.release(&mut active.found);
        }
        match active.hbm {
            Hbm::Computing(write) => self.hbm.abort(write),
            Hbm::Held(held) => self.hbm.release(held),
        }
        active.grown.into_iter().for_each(|held| self.hbm.release(held));
        if !self.policy.keeps_hbm {
            self.hbm.remove(&active.keys);
        }
    }

    /// Announces waiting requests that run soon, to prefetch their blocks to host memory.
    pub(super) fn look_ahead(&mut self) {
        if !std::mem::take(&mut self.is_new) {
            return;
        }
        let Some(below) = &mut self.below else { return };
        let Some(Some(window)) = self.policy.host.map(|host| host.lookahead) else { return };
        let Setup { block_tokens, step_tokens, .. } = *self.setup;
        let left = self.active.iter().map(|it| u64::from(it.prompt.saturating_sub(it.computed)));
        let mut before: u64 = left.sum();
        let next = self.step.as_ref().map_or(self.now, |step| step.expected_end(self.now));
        // Without other admissions: steps until the first request has all its tokens.
        let is_full = self.is_full || self.active.len() >= self.setup.requests_max;
        let tokens = self
            .active
            .iter()
            .map(|it| self.requests[it.request].output.saturating_sub(it.generated));
        let until_room = if is_full { tokens.min().unwrap_or_default() } else { 0 };
        for number in self.waiting.iter().map(|waiting| waiting.request) {
            // Steps needed for the tokens before it, after the current step.
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

    /// Handles the end of a prompt: the request has its first token.
    pub(super) fn prompt_ends(&mut self, at: usize) {
        let active = &mut self.active[at];
        active.generated += 1;
        if active.generated == 1 {
            active.first = self.now;
            let arrival = self.requests[active.request].arrival;
            self.report.served[active.request].ttft = self.now - arrival;
        }
        if let Some(below) = &mut self.below {
            below.release(&mut active.found);
        }
        if let Hbm::Computing(write) = active.hbm {
            self.hbm.commit(write);
            active.hbm = Hbm::Held(self.hbm.hold(&active.keys));
        }
    }

    /// Removes requests that have all their tokens.
    pub(super) fn requests_end(&mut self) {
        let requests = self.requests;
        let is_done = |it: &mut Active| it.generated >= requests[it.request].output.max(1);
        let done: Vec<Active> = self.active.extract_if(.., is_done).collect();
        for active in done {
            self.is_full = false;
            self.report.served[active.request].decode = self.now - active.first;
            let leaves = requests[active.request].leaves(active.request);
            leaves.inspect(|leaves| _ = self.leaving.remove(leaves));
            self.let_go(active);
        }
    }
}
