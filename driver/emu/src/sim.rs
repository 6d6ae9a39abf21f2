//! The whole stack on one thread: deterministically in virtual time, or in real time.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, ThreadId},
};

use nvme_driver::{Clock, MonotonicClock, Nanos};

use crate::{emu::Emu, progress::Progress, random::SplitMix64};

/// A clock that advances only in [`Clock::pause`], where the registered controllers run.
///
/// The seed determines the order of the controllers, the amount of work per step, and its duration:
/// different seeds give different interleavings, and the same seed gives the same one as long as
/// one thread uses the clock. More threads are safe but not reproducible; nor is a GPU that copies
/// in real time ([`EmuDomain::with_copies`](crate::EmuDomain::with_copies)).
///
/// [`SimClock::real`] has the real time instead, and only the pauses of one thread run the
/// controllers.
#[derive(Debug)]
pub struct SimClock {
    state: Mutex<SimState>,
    real: Option<(MonotonicClock, ThreadId)>,
}

#[derive(Debug)]
struct SimState {
    now: Nanos,
    rng: SplitMix64,
    emus: Vec<Arc<Emu>>,
}

/// Longest duration of a step with results.
const STEP_NS_MAX: u64 = 1000;
/// Most commands fetched in one step.
const BUDGET_MAX: u64 = 32;
/// Most commands fetched in one step in real time.
const BUDGET_REAL: u32 = 256;
/// Fruitless polls before time jumps: a caller that just polled may have other work left.
const POLLS_BEFORE_JUMP: u32 = 2;
/// Powers of two by which jumps grow: the longest is about 200 days.
const JUMP_SHIFT_MAX: u32 = 44;

impl SimClock {
    /// Creates a clock at time 0 without controllers.
    #[must_use]
    pub fn new(seed: u64) -> Arc<Self> {
        let rng = SplitMix64::new(seed, 0);
        let state = SimState { now: Nanos::default(), rng, emus: Vec::new() };
        Arc::new(Self { state: Mutex::new(state), real: None })
    }

    /// Creates a clock of the real time. The controllers run when the calling thread, which also
    /// registers them, pauses: a command and its result change threads nowhere. While commands
    /// are outstanding a pause returns at once.
    #[must_use]
    pub fn real() -> Arc<Self> {
        let state =
            SimState { now: Nanos::default(), rng: SplitMix64::new(0, 0), emus: Vec::new() };
        let real = Some((MonotonicClock::default(), thread::current().id()));
        Arc::new(Self { state: Mutex::new(state), real })
    }

    /// Registers `emu` to be stepped from now on. Nothing else should step it.
    pub fn drive(&self, emu: Arc<Emu>) {
        if self.real.is_some() {
            emu.set_exclusive(true);
        }
        self.state().emus.push(emu);
    }

    /// Runs the controllers for `span` of virtual time.
    pub fn run_for(&self, span: Nanos) {
        let end = self.now() + span;
        let mut idle = 0;
        while self.now() < end {
            let moved = self.state().round(idle, end);
            idle = if moved { 0 } else { idle + 1 };
        }
    }

    fn state(&self) -> MutexGuard<'_, SimState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clock for SimClock {
    fn now(&self) -> Nanos {
        self.real.as_ref().map_or_else(|| self.state().now, |(clock, _)| clock.now())
    }

    fn pause(&self, idle: u32, until: Nanos) {
        let Some((clock, owner)) = &self.real else {
            self.state().round(idle, until);
            return;
        };
        let is_busy = thread::current().id() == *owner && self.state().step(clock.now());
        if !is_busy {
            clock.pause(idle, until);
        }
    }
}

impl SimState {
    /// Steps every controller once. Returns false if nothing moved and no command is outstanding.
    fn step(&self, now: Nanos) -> bool {
        let mut all = Progress::default();
        for emu in &self.emus {
            all.merge(emu.step(now, BUDGET_REAL));
        }
        all.work > 0 || all.outstanding > 0
    }

    /// Steps every controller once and advances time, at most to `until`. Returns false if idle.
    fn round(&mut self, idle: u32, until: Nanos) -> bool {
        let mut all = Progress::default();
        let count = self.emus.len() as u64;
        let first = usize::try_from(self.rng.below(count)).unwrap_or(0);
        for index in 0..self.emus.len() {
            let budget = u32::try_from(1 + self.rng.below(BUDGET_MAX)).unwrap_or(1);
            let emu = &self.emus[(first + index) % self.emus.len()];
            all.merge(emu.step(self.now, budget));
        }
        let small = Nanos(1 + self.rng.below(STEP_NS_MAX));
        let next = if all.work > 0 || idle < POLLS_BEFORE_JUMP {
            self.now + small
        } else if let Some(event) = all.next_event {
            event.max(self.now + Nanos(1))
        } else {
            // No event is known: a waiting caller will reach its deadline. Advance in growing
            // steps, so that minutes of virtual time take milliseconds, and years no longer.
            self.now + Nanos(STEP_NS_MAX << (idle / 64).min(JUMP_SHIFT_MAX))
        };
        self.now = self.now.max(next.min(until));
        all.work > 0
    }
}

#[cfg(test)]
mod tests;
