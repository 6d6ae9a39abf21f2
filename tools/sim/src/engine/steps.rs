//! Steps: their computation, loads and stores, and their progress by layer.

use std::time::Duration;

use kv_schedule::{StepId, StepShape};

use super::{Engine, Work, tiers::Tiers};

/// A step of the engine.
#[derive(Debug)]
pub(super) struct Step<S> {
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
    stores: Vec<S>,
}

impl<S> Step<S> {
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

impl<T: Tiers> Engine<'_, T> {
    /// Starts the next step if there is work.
    pub(super) fn plan(&mut self) -> Result<(), T::Error> {
        if self.step.is_some() {
            return Ok(());
        }
        self.aborted_end();
        self.make_room();
        self.admit()?;
        let mut left = self.setup.step_tokens;
        let mut parts = Vec::with_capacity(self.active.len());
        for (at, active) in self.active.iter().enumerate() {
            let wanted = if active.is_decoding() { 1 } else { active.prompt - active.computed };
            if active.loading == 0 && left > 0 {
                parts.push((at, wanted.min(left)));
                left -= wanted.min(left);
            }
        }
        if parts.is_empty() {
            return Ok(());
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
        self.plan_io(&mut step)?;
        if !shape.is_prefill && !step.is_layered() {
            let times = self.equal_steps(&step);
            step.times = if self.grow(times) { times } else { 1 };
        }
        self.step = Some(step);
        self.is_new = true;
        Ok(())
    }

    /// Plans the step's loads, and the stores of units that become full.
    fn plan_io(&mut self, step: &mut Step<T::Store>) -> Result<(), T::Error> {
        let Some(tiers) = &mut self.tiers else { return Ok(()) };
        tiers.step_begins(step.id, step.shape, step.took);
        for (at, tokens) in &step.parts {
            let active = &mut self.active[*at];
            if let (false, Some(held)) = (active.is_decoding(), &mut active.held) {
                let computed = active.computed + tokens;
                step.stores.extend(tiers.begin_store(held, active.request, computed)?);
            }
        }
        let mut missing = vec![0; self.setup.model.layers as usize];
        let mut any = !step.stores.is_empty();
        for (at, _) in &step.parts {
            let active = &mut self.active[*at];
            if let (false, Some(held)) = (active.is_decoding(), &mut active.held) {
                let bytes = tiers.load(held, active.request, step.id, &mut missing)?;
                active.loaded_bytes += bytes;
                any |= bytes > 0;
            }
        }
        if any {
            step.missing = missing;
        }
        Ok(())
    }

    /// Returns the number of equal decode-only steps that form one event.
    fn equal_steps(&self, step: &Step<T::Store>) -> u32 {
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
        left.min(until).min(T::EQUAL_STEPS)
    }

    /// Starts the next computation if its loads are complete.
    pub(super) fn go_on(&mut self) {
        let Some(step) = &mut self.step else { return };
        if step.ends.is_some() || step.missing.get(step.layer as usize).is_some_and(|it| *it > 0) {
            return;
        }
        let all = self.setup.model.layers * step.times;
        let took = if step.is_layered() { step.took } else { step.took * all };
        let waited = step.waits.take().map_or(Duration::ZERO, |since| self.now - since);
        self.report.bubble += waited;
        let ends = self.now + took;
        step.ends = Some(ends);
        self.report.compute += took;
        self.record.compute(self.now, ends);
        let mut requests = step.parts.iter().map(|(at, _)| self.active[*at].request);
        if step.is_layered() && requests.any(|request| self.record.is_watched(request)) {
            self.record.span(Work::Compute, step.layer, self.now, ends);
        }
        if let Some(tiers) = &mut self.tiers {
            tiers.layer_begins(step.id, step.layer, waited, took);
        }
    }

    pub(super) fn compute_ends(&mut self) -> Result<(), T::Error> {
        let Some(step) = &mut self.step else { return Ok(()) };
        if step.ends.is_none_or(|ends| ends > self.now) {
            return Ok(());
        }
        step.ends = None;
        if step.is_layered() {
            if let Some(tiers) = &mut self.tiers {
                let dropped = tiers.layer_ends(step.id, step.layer, &step.stores)?;
                self.report.blocks_dropped += dropped;
            }
            (step.layer, step.waits) = (step.layer + 1, Some(self.now));
            if step.layer < self.setup.model.layers {
                return Ok(());
            }
        }
        if let Some(step) = self.step.take() {
            self.step_ends(&step);
        }
        Ok(())
    }

    fn step_ends(&mut self, step: &Step<T::Store>) {
        if let Some(tiers) = &mut self.tiers {
            let first = (!step.is_layered()).then_some(step.began + step.took);
            tiers.step_ends(step.id, (self.now - step.began) / step.times, first);
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
