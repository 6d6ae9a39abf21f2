//! Requests: taken on, done, and put back for want of memory.

use std::time::Duration;

use kv_catalog::{BlockKey, ReferenceId, WriteId};

use super::{
    Run, Setup,
    below::{Below, Found, Load},
    keys,
};
use crate::policy::Loads;

/// A request that waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waiting {
    pub(super) request: usize,
    /// Tokens that it had when it was preempted: they are computed again, with its prompt.
    generated: u32,
    /// When the first of them came.
    first: Duration,
}

impl Waiting {
    pub(super) fn new(request: usize) -> Self {
        Self { request, generated: 0, first: Duration::ZERO }
    }
}

/// A request that is served.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) request: usize,
    /// Tokens that are computed before the next one is generated: the prompt, and what was
    /// generated before it was preempted.
    pub(super) prompt: u32,
    /// Those of them whose keys and values are there.
    pub(super) computed: u32,
    /// Tokens that were generated.
    pub(super) generated: u32,
    /// Its client has gone away: it ends when nothing moves for it.
    is_aborted: bool,
    /// Bytes that are loaded for it.
    pub(super) loaded_bytes: u64,
    /// What the first step of the request loads.
    pub(super) to_load: Load,
    /// Loads that it waits for, outside of steps.
    pub(super) loading: u32,
    /// Units that host memory was asked to take.
    pub(super) offered: usize,
    /// Keys of its blocks, those of its output too as far as they are there.
    keys: Vec<BlockKey>,
    /// Keys of the tier's units of its prompt.
    pub(super) units: Vec<BlockKey>,
    /// Blocks of its prompt in the GPU's memory.
    hbm: Hbm,
    /// Those of its output that came later.
    grown: Vec<ReferenceId>,
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

impl Active {
    /// Tokens that the next one follows.
    pub(super) fn context(&self, input: u32) -> u32 {
        // Some of what was generated was computed as a part of the prompt.
        self.computed + self.generated - (self.prompt - input)
    }

    /// Bytes that were loaded for nothing if it ends now.
    fn in_vain(&self) -> u64 {
        if self.is_decoding() { 0 } else { self.loaded_bytes }
    }

    pub(super) fn is_decoding(&self) -> bool {
        self.computed >= self.prompt
    }
}

/// The name of a block that nobody else has.
fn own(number: usize, at: usize) -> u64 {
    !((number as u64) << 24 | at as u64)
}

impl Run<'_> {
    /// Takes on what waits, as far as there is room.
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

    /// Takes a request on, if the blocks of its prompt fit into the GPU's memory.
    fn admit_one(&mut self, waiting: Waiting) -> bool {
        let Waiting { request: number, generated, first } = waiting;
        let Setup { block_tokens, .. } = *self.setup;
        let request = &self.requests[number];
        let prompt = request.input + generated;
        let shared = &request.blocks;
        let total = prompt.div_ceil(block_tokens) as usize;
        let own = (shared.len()..total).map(|at| own(number, at));
        let names = keys(shared.iter().copied().chain(own));
        // One token has to be computed.
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

    /// Room for so many more tokens of each request that decodes; false if there is none for one.
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
        // The token that was generated last has no keys and values yet.
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

    /// Gives every request that decodes room for a token, and preempts those that came last for
    /// it: they begin again, before all others that wait (vLLM's recomputation).
    pub(super) fn make_room(&mut self) {
        let mut at = 0;
        while at < self.active.len() {
            if self.grow_one(at, 1) {
                at += 1;
                continue;
            }
            // Not one with loads on their way; the one that wants room has none.
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
        // Until somebody leaves: what was freed is for those that go on.
        self.is_full = !self.active.is_empty();
    }

    /// Clients go away.
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
        // The next one may need less room.
        self.is_full &= at > 0;
        self.is_new = true;
        if let Some(Below { host: Some(host), way, .. }) = &mut self.below {
            host.aborted(gone.request, &mut way.scheduler);
        }
    }

    /// What has begun ends: the step that it is in, and loads into its blocks.
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

    /// Lets go of requests whose clients have gone, between two steps.
    pub(super) fn aborted_end(&mut self) {
        let is_over = |it: &mut Active| it.is_aborted && it.loading == 0;
        let gone: Vec<Active> = self.active.extract_if(.., is_over).collect();
        for active in gone {
            self.is_full = false;
            self.let_go(active);
        }
    }

    /// Its blocks may be evicted.
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

    /// Announces what waits and runs soon, and has what it needs brought to host memory.
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
        // If nobody else is taken on: until one has all its tokens.
        let is_full = self.is_full || self.active.len() >= self.setup.requests_max;
        let tokens = self
            .active
            .iter()
            .map(|it| self.requests[it.request].output.saturating_sub(it.generated));
        let until_room = if is_full { tokens.min().unwrap_or_default() } else { 0 };
        for number in self.waiting.iter().map(|waiting| waiting.request) {
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

    /// A request has all of its prompt, and so a token.
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

    /// Lets go of requests that have all their tokens.
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
