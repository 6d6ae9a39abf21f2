//! Requests: admitted, completed, and preempted for lack of memory.

use std::time::Duration;

use super::{
    Engine, Setup,
    hbm::Blocks,
    tiers::{Hit, Tiers},
};

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
pub(super) struct Active<H> {
    pub(super) request: usize,
    /// Tokens to compute before the next one is generated: the prompt, and the tokens generated
    /// before a preemption.
    pub(super) prompt: u32,
    /// Tokens of `prompt` whose keys and values are present, or loaded with its first step.
    pub(super) computed: u32,
    /// Generated tokens.
    pub(super) generated: u32,
    /// Set after its client disconnected: it ends when it has no loads in flight.
    is_aborted: bool,
    /// Bytes loaded for it.
    pub(super) loaded_bytes: u64,
    /// Pending loads outside of steps.
    pub(super) loading: u32,
    /// Its blocks in the GPU's memory.
    blocks: Blocks,
    /// Its state in the tiers; `None` without any.
    pub(super) held: Option<H>,
    /// Time of its first token.
    first: Duration,
}

impl<H> Active<H> {
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

impl<T: Tiers> Engine<'_, T> {
    /// Admits waiting requests while there is room.
    pub(super) fn admit(&mut self) -> Result<(), T::Error> {
        while self.active.len() < self.setup.requests_max
            && !self.is_full
            && let Some(first) = self.waiting.front().copied()
            && self.has_room(first.request)
        {
            self.is_full = !self.admit_one(first)?;
            if !self.is_full {
                self.waiting.pop_front();
            }
        }
        Ok(())
    }

    fn has_room(&self, number: usize) -> bool {
        let request = &self.requests[number];
        self.tiers.as_ref().is_none_or(|tiers| tiers.has_room(number, request))
    }

    /// Admits a request if its prompt's blocks fit into the GPU's memory.
    fn admit_one(&mut self, waiting: Waiting) -> Result<bool, T::Error> {
        let Waiting { request: number, generated, first } = waiting;
        let Setup { block_tokens, .. } = *self.setup;
        let request = &self.requests[number];
        let prompt = request.input + generated;
        let Some((blocks, cached)) = self.hbm.begin(number, request, prompt) else {
            return Ok(false);
        };
        // At least one token must be computed.
        let most = (prompt - 1) / block_tokens * block_tokens;
        let in_hbm = cached.min(most);
        let mut active = Active {
            request: number,
            prompt,
            computed: in_hbm,
            generated,
            is_aborted: false,
            loaded_bytes: 0,
            loading: 0,
            blocks,
            held: None,
            first,
        };
        let served = &mut self.report.served[number];
        if let Some(tiers) = &mut self.tiers {
            let found = tiers.begin(number, request, in_hbm, most)?;
            let Hit { tokens, host_tokens, peer_tokens, loading, loading_bytes, held } = found;
            active.computed += tokens;
            (active.loading, active.loaded_bytes) = (loading, loading_bytes);
            active.held = Some(held);
            if generated == 0 {
                (served.host_tokens, served.peer_tokens) = (host_tokens, peer_tokens);
            }
        }
        if generated == 0 {
            (served.hbm_tokens, served.loaded_tokens) = (in_hbm, active.computed - in_hbm);
        }
        self.active.push(active);
        Ok(true)
    }

    /// Reserves room for `tokens` more tokens of each decoding request; false if one has none.
    pub(super) fn grow(&mut self, tokens: u32) -> bool {
        (0..self.active.len()).all(|at| self.grow_one(at, tokens))
    }

    fn grow_one(&mut self, at: usize, tokens: u32) -> bool {
        let Self { active, hbm, requests, .. } = self;
        let active = &mut active[at];
        if !active.is_decoding() {
            return true;
        }
        let context = active.context(requests[active.request].input);
        // The last generated token has no keys and values yet.
        hbm.grow(active.request, &mut active.blocks, context - 1 + tokens)
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
    pub(super) fn leave(&mut self) -> Result<(), T::Error> {
        while let Some(&(time, number)) = self.leaving.first()
            && time <= self.now
        {
            self.leaving.pop_first();
            self.report.served[number].is_aborted = true;
            match self.waiting.iter().position(|waiting| waiting.request == number) {
                Some(at) => self.abort_waiting(at)?,
                None => self.abort_active(number),
            }
        }
        Ok(())
    }

    fn abort_waiting(&mut self, at: usize) -> Result<(), T::Error> {
        self.report.aborted_waiting += 1;
        let gone = self.waiting.remove(at).expect("it waits");
        // The next request may need less room.
        self.is_full &= at > 0;
        self.is_new = true;
        self.follow(gone.request);
        self.tiers.as_mut().map_or(Ok(()), |tiers| tiers.cancel_ahead(gone.request))
    }

    /// Lets started work complete: the step it is in, and loads into its blocks.
    fn abort_active(&mut self, number: usize) {
        self.report.aborted_running += 1;
        let mut active = self.active.iter_mut();
        let active = active.find(|active| active.request == number).expect("it waits, or runs");
        active.is_aborted = true;
        if let Some(tiers) = &mut self.tiers {
            let (loads, bytes) = tiers.cancel(number);
            active.loading -= loads;
            active.loaded_bytes -= bytes;
        }
        self.report.in_vain_bytes += active.in_vain();
    }

    /// Removes aborted requests between two steps.
    pub(super) fn aborted_end(&mut self) {
        let is_over = |it: &mut Active<T::Held>| it.is_aborted && it.loading == 0;
        let gone: Vec<_> = self.active.extract_if(.., is_over).collect();
        for active in gone {
            self.is_full = false;
            let number = active.request;
            self.let_go(active);
            self.follow(number);
        }
    }

    /// Unpins the request's blocks.
    fn let_go(&mut self, active: Active<T::Held>) {
        if let (Some(tiers), Some(held)) = (&mut self.tiers, active.held) {
            tiers.end(active.request, held);
        }
        self.hbm.end(active.blocks);
    }

    /// Announces waiting requests that run soon, to prefetch their blocks to host memory.
    pub(super) fn look_ahead(&mut self) -> Result<(), T::Error> {
        if !std::mem::take(&mut self.is_new) {
            return Ok(());
        }
        let Some(tiers) = &mut self.tiers else { return Ok(()) };
        let Some(steps_ahead) = tiers.steps_ahead() else { return Ok(()) };
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
            let after = (before / u64::from(self.setup.step_tokens)) as u32;
            if after >= steps_ahead {
                break;
            }
            let request = &self.requests[number];
            let in_hbm = self.hbm.find(request);
            let when = (next, after + until_room);
            let stored = tiers.announce(number, request, in_hbm, when)?;
            before += u64::from(request.input.saturating_sub(in_hbm.max(stored)));
        }
        tiers.plan_ahead();
        Ok(())
    }

    /// Handles the end of a prompt: the request has its first token.
    pub(super) fn prompt_ends(&mut self, at: usize) {
        let active = &mut self.active[at];
        active.generated += 1;
        if active.generated == 1 {
            active.first = self.now;
            let served = &mut self.report.served[active.request];
            served.ttft = self.now - served.arrival;
        }
        if let (Some(tiers), Some(held)) = (&mut self.tiers, &mut active.held) {
            tiers.loaded(held);
        }
        self.hbm.computed(&mut active.blocks);
    }

    /// Removes requests that have all their tokens.
    pub(super) fn requests_end(&mut self) {
        let requests = self.requests;
        let is_done = |it: &mut Active<T::Held>| it.generated >= requests[it.request].output.max(1);
        let done: Vec<_> = self.active.extract_if(.., is_done).collect();
        for active in done {
            self.is_full = false;
            self.report.served[active.request].decode = self.now - active.first;
            let (number, arrival) = (active.request, self.report.served[active.request].arrival);
            let leaves = requests[number].leaves;
            leaves.inspect(|after| _ = self.leaving.remove(&(arrival + *after, number)));
            self.let_go(active);
            self.follow(number);
        }
    }
}
