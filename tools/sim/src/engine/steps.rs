//! Steps: their computation, loads and stores, and their progress by layer.

use std::time::Duration;

use kv_schedule::{StepId, StepShape};

use super::{
    Run, Work,
    below::{Load, Stores},
};

/// A step of the engine.
#[derive(Debug)]
pub(super) struct Step {
    id: StepId,
    shape: StepShape,
    /// For each request, by index among the active ones: the tokens it computes.
    parts: Vec<(usize, u32)>,
    /// Pending loads of each layer; empty if the step is a single event.
    missing: Vec<u32>,
    /// Layers of the model.
    layers: u32,
    /// Current layer.
    layer: u32,
    /// Compute time of a layer.
    took: Duration,
    /// Start time of the step.
    began: Duration,
    /// Time since when it waits.
    waits: Option<Duration>,
    /// End of the current computation.
    ends: Option<Duration>,
    /// Number of equal decode-only steps that it stands for.
    times: u32,
    /// Its writes to the tiers.
    stores: Vec<Stores>,
}

/// Limit of equal steps in one event: contexts grow, and steps get slower.
const EQUAL_STEPS: u32 = 64;

impl Step {
    pub(super) fn ends(&self) -> Option<Duration> {
        self.ends
    }

    /// Returns the end of the step if its loads are in time.
    pub(super) fn expected_end(&self, now: Duration) -> Duration {
        match self.ends {
            Some(ends) if !self.is_layered() => ends,
            Some(ends) => ends + self.took * (self.layers - self.layer - 1),
            None => now + self.took * (self.layers - self.layer) * self.times,
        }
    }

    /// Counts a completed load of a layer.
    pub(super) fn loaded(&mut self, layer: u32) {
        self.missing[layer as usize] -= 1;
    }

    fn is_layered(&self) -> bool {
        !self.missing.is_empty()
    }
}

impl Run<'_> {
    /// Starts the next step if there is work.
    pub(super) fn plan(&mut self) {
        if self.step.is_some() {
            return;
        }
        self.aborted_end();
        self.make_room();
        self.admit();
        let mut left = self.setup.step_tokens;
        let (mut parts, mut loads) = (Vec::with_capacity(self.active.len()), Vec::new());
        for (at, active) in self.active.iter_mut().enumerate() {
            let wanted = if active.is_decoding() { 1 } else { active.prompt - active.computed };
            if active.loading == 0 && left > 0 {
                parts.push((at, wanted.min(left)));
                left -= wanted.min(left);
                if !active.to_load.is_none() {
                    loads.push((at, std::mem::take(&mut active.to_load)));
                }
            }
        }
        if parts.is_empty() {
            return;
        }
        let shape = StepShape::of(parts.iter().map(|(at, tokens)| {
            let active = &self.active[*at];
            (*tokens, active.context(self.requests[active.request].input))
        }));
        self.steps += 1;
        let mut step = Step {
            id: StepId(self.steps),
            shape,
            missing: Vec::new(),
            layers: self.setup.model.layers,
            layer: 0,
            took: self.setup.layer(shape),
            began: self.now,
            waits: Some(self.now),
            ends: None,
            times: 1,
            stores: Vec::new(),
            parts,
        };
        self.plan_io(&mut step, &loads);
        if !shape.is_prefill && !step.is_layered() {
            let times = self.equal_steps(&step);
            step.times = if self.grow(times) { times } else { 1 };
        }
        self.step = Some(step);
        self.is_new = true;
    }

    /// Plans the step's loads, and the stores of units that become full.
    fn plan_io(&mut self, step: &mut Step, loads: &[(usize, Load)]) {
        let Some(below) = &mut self.below else { return };
        let layers = self.setup.model.layers;
        below.way.scheduler.announce(step.id, step.shape, self.now);
        if let Some(host) = &mut below.host {
            host.link.scheduler.announce(step.id, step.shape, self.now);
        }
        for (at, tokens) in &step.parts {
            let active = &mut self.active[*at];
            if active.is_decoding() {
                continue;
            }
            let full = |tokens: u32| (tokens / below.tier.unit_tokens) as usize;
            let units = full(active.computed + tokens).min(active.units.len());
            let offered = std::mem::replace(&mut active.offered, units);
            if units > 0
                && let Some(stores) =
                    below.begin_store(&active.units[..units], offered, active.request)
            {
                step.stores.push(stores);
            }
        }
        if !loads.is_empty() || !step.stores.is_empty() {
            step.missing = vec![0; layers as usize];
        }
        for (at, load) in loads {
            let active = &mut self.active[*at];
            active.loaded_bytes = below.bytes(*load);
            below.load_step(*load, step.id, active.request, &mut step.missing, self.now);
        }
    }

    /// Returns the number of equal decode-only steps that form one event.
    fn equal_steps(&self, step: &Step) -> u32 {
        if self.active.iter().any(|active| active.loading > 0) {
            return 1;
        }
        let left = step.parts.iter().map(|(at, _)| {
            let active = &self.active[*at];
            self.requests[active.request].output.saturating_sub(active.generated)
        });
        let left = left.min().unwrap_or(1).max(1);
        let took = step.took * self.setup.model.layers;
        let until = self.next_client().map_or(u32::MAX, |next| {
            let wait = next.saturating_sub(self.now).as_secs_f64();
            (wait / took.as_secs_f64()).ceil().max(1.0) as u32
        });
        left.min(until).min(EQUAL_STEPS)
    }

    /// Starts the next computation if its loads are complete.
    pub(super) fn go_on(&mut self) {
        let Some(step) = &mut self.step else { return };
        if step.ends.is_some() || step.missing.get(step.layer as usize).is_some_and(|it| *it > 0) {
            return;
        }
        let all = self.setup.model.layers * step.times;
        let took = if step.is_layered() { step.took } else { step.took * all };
        if let Some(since) = step.waits.take() {
            self.report.bubble += self.now - since;
        }
        let ends = self.now + took;
        step.ends = Some(ends);
        self.report.compute += took;
        self.record.compute(self.now, ends);
        let mut requests = step.parts.iter().map(|(at, _)| self.active[*at].request);
        if step.is_layered() && requests.any(|request| self.record.is_watched(request)) {
            self.record.span(Work::Compute, step.layer, self.now, ends);
        }
        if let Some(below) = &mut self.below {
            below.way.scheduler.layer_begins(step.id, step.layer, self.now);
            if let Some(host) = &mut below.host {
                host.link.scheduler.layer_begins(step.id, step.layer, self.now);
            }
        }
    }

    pub(super) fn compute_ends(&mut self) {
        let Some(step) = &mut self.step else { return };
        if step.ends.is_none_or(|ends| ends > self.now) {
            return;
        }
        step.ends = None;
        if step.is_layered() {
            if let Some(below) = &mut self.below {
                below.way.scheduler.layer_ends(step.id, self.now);
                if let Some(host) = &mut below.host {
                    host.link.scheduler.layer_ends(step.id, self.now);
                }
                for stores in &step.stores {
                    self.report.blocks_dropped += below.store(*stores, step.layer, self.now);
                }
            }
            (step.layer, step.waits) = (step.layer + 1, Some(self.now));
            if step.layer < self.setup.model.layers {
                return;
            }
        }
        if let Some(step) = self.step.take() {
            self.step_ends(&step);
        }
    }

    fn step_ends(&mut self, step: &Step) {
        if let Some(below) = &mut self.below {
            below.way.scheduler.step_ends(step.id);
            if let Some(host) = &mut below.host {
                host.link.scheduler.step_ends(step.id);
                let took = self.now - step.began;
                host.iteration(took / step.times);
            }
        }
        for (at, tokens) in &step.parts {
            let active = &mut self.active[*at];
            if active.is_decoding() {
                active.generated += step.times;
                continue;
            }
            active.computed += tokens;
            if active.is_decoding() {
                self.prompt_ends(*at);
            }
        }
        self.requests_end();
    }
}
