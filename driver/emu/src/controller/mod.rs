//! The controller protocol: registers, admin commands, I/O queues, PRP and SGL walkers.

use std::sync::Arc;

use nvme_driver::Nanos;

use crate::{Doorbells, EmuConfig, EmuCounters, EmuDomain, FaultPlan, Interrupts, Progress};

/// The controller as a step machine.
#[derive(Debug)]
pub struct Controller {
    config: EmuConfig,
}

#[allow(missing_docs, unused_variables, reason = "placeholder: only the shape is settled here")]
impl Controller {
    pub fn new(
        config: EmuConfig,
        domain: Arc<EmuDomain>,
        doorbells: Doorbells,
        interrupts: Interrupts,
    ) -> Self {
        Self { config }
    }
    pub fn read32(&mut self, offset: u32, now: Nanos) -> u32 {
        0
    }
    pub fn write32(&mut self, offset: u32, value: u32, now: Nanos) {}
    pub fn step(&mut self, now: Nanos, budget: u32) -> Progress {
        Progress::default()
    }
    #[must_use]
    pub fn next_event(&self) -> Option<Nanos> {
        None
    }
    #[must_use]
    pub fn counters(&self) -> EmuCounters {
        EmuCounters::default()
    }
    pub fn set_faults(&mut self, faults: FaultPlan) {}
    pub fn power_loss(&mut self, now: Nanos) {}
    pub fn unplug(&mut self) {}
}
