//! The controller protocol: registers, admin commands, I/O queues, PRP and SGL walkers.
//!
//! [`Controller::step`] polls the media and the doorbells, executes delayed commands, fetches new
//! ones in round-robin order, and signals interrupts. A command is executed when it is fetched, and
//! stored only while it waits for media, a delay or an event.
//!
//! Each part of the controller is a type with its own state: `Queues` with doorbells and
//! interrupts, waiting `Commands`, `Storage` with its media, `Features`, `Logs` with events,
//! `Faults`, `Registers`. Only a change of several of them is a function of [`Controller`]:
//! `lifecycle.rs` (enable to removal), `execute.rs` (fetch to completion) and `admin.rs`.
//!
//! # Not implemented
//!
//! Compare, Verify, Write Uncorrectable and fused commands; metadata; weighted round robin.
//! Interrupts are signalled once per queue and step instead of being coalesced by time. Abort stops
//! only commands that have not begun, not those in progress on a medium or a GPU.
//!
//! # Sources
//!
//! Checks cite the section of the NVMe Base Specification 2.1 that requires them, or of the NVM
//! Command Set Specification 1.1 as "NVM".

mod admin;
mod command;
mod create_queue;
mod events;
mod execute;
mod faults;
mod features;
mod identify;
mod io;
mod lifecycle;
mod logs;
mod namespace;
mod placement;
mod queues;
mod registers;
mod relay;
mod storage;
mod transfer;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use nvme_driver::Nanos;
use nvme_spec::reg;

use self::{
    command::Commands,
    faults::{DeviceFault, Faults},
    features::Features,
    identify::Identity,
    lifecycle::Lifecycle,
    logs::Logs,
    namespace::Namespace,
    queues::Queues,
    registers::Registers,
    storage::Storage,
    transfer::Rules,
};
use crate::{Doorbells, EmuConfig, EmuCounters, EmuDomain, FaultPlan, Interrupts, Progress};

/// The controller as a step machine.
#[derive(Debug)]
pub struct Controller {
    // On the I/O path.
    queues: Queues,
    commands: Commands,
    storage: Storage,
    rules: Rules,
    faults: Faults,
    features: Features,
    logs: Logs,

    // Not on the I/O path.
    domain: Arc<EmuDomain>,
    registers: Registers,
    lifecycle: Lifecycle,
    identity: Identity,
}

impl Controller {
    /// Powers a controller on.
    #[must_use]
    pub fn new(
        config: EmuConfig,
        domain: Arc<EmuDomain>,
        doorbells: Doorbells,
        interrupts: Interrupts,
    ) -> Self {
        Self {
            queues: Queues::new(config.io_queues_max, doorbells, interrupts),
            commands: Commands::default(),
            rules: Rules {
                page_bytes: 4096,
                sgl: config.sgl,
                bit_bucket: config.bit_bucket,
                bytes_max: config.mdts_bytes.map_or(u64::MAX, u64::from),
            },
            features: Features::new(&config),
            logs: Logs::default(),
            registers: Registers::new(&config),
            lifecycle: Lifecycle::default(),
            identity: Identity::new(&config),
            storage: Storage::new(
                config.namespaces,
                config.placement,
                config.drive,
                domain.copies(),
            ),
            faults: Faults::new(config.faults, config.power),
            domain,
        }
    }

    /// Reads the 32-bit register at `offset`; a 64-bit register takes two reads.
    pub fn read32(&mut self, offset: u32, now: Nanos) -> u32 {
        self.check_power();
        if !self.lifecycle.answers(now) {
            return reg::ALL_ONES;
        }
        self.tick(now);
        match offset {
            reg::CSTS => {
                let paused = self.faults.registers().paused;
                self.lifecycle.status().with_pp(paused.into()).0
            }
            _ => self.registers.read(offset),
        }
    }

    /// Writes the 32-bit register at `offset`.
    pub fn write32(&mut self, offset: u32, value: u32, now: Nanos) {
        self.check_power();
        if !self.lifecycle.answers(now) {
            return;
        }
        self.tick(now);
        match offset {
            reg::CC => self.write_cc(value, now),
            reg::NSSR if value == reg::NSSR_NVME && self.registers.cap.nssrs() == 1 => {
                self.reset_subsystem(now);
            }
            // "Interrupt Mask Set" and "Clear": only ones have an effect.
            reg::INTMS => self.registers.masked |= value,
            reg::INTMC => {
                self.registers.masked &= !value;
                self.queues.signal_withheld(self.registers.masked, &mut self.logs.counters);
            }
            _ => self.registers.write(offset, value),
        }
    }

    /// Performs the work due at `now`, fetching at most `budget` commands.
    pub fn step(&mut self, now: Nanos, budget: u32) -> Progress {
        self.check_power();
        let mut work = self.tick(now);
        work += self.poll_media(now);
        let paused = self.faults.registers().paused;
        if !paused && self.lifecycle.serving() && self.observe(now) {
            let domain = Arc::clone(&self.domain);
            let dma = domain.access();
            work += self.settle(&dma);
            work += self.run_delayed(&dma, now);
            work += self.fetch(&dma, now, budget);
            work += self.finish_deletions(&dma);
            work += self.report_events(&dma);
        }
        self.queues.signal(self.registers.masked, &mut self.logs.counters);
        work += self.apply_device_fault(now);
        work += self.advance_shutdown(now);
        Progress {
            work,
            outstanding: u32::try_from(self.commands.len().max(self.storage.in_flight()))
                .unwrap_or(u32::MAX),
            next_event: self.next_event(),
            listening: self.lifecycle.serving() || self.lifecycle.shutting_down(),
        }
    }

    /// Reads new doorbell values. Returns whether there may be work for this step.
    fn observe(&mut self, now: Nanos) -> bool {
        let ready = self.commands.ready(now);
        self.queues.observe(&mut self.logs) || ready || self.logs.events.waiting()
    }

    /// Applies the pending fault of the device.
    fn apply_device_fault(&mut self, now: Nanos) -> u32 {
        match self.faults.pending.take() {
            None => return 0,
            Some(DeviceFault::PowerLoss) => self.power_loss(now),
            Some(DeviceFault::Gone) => self.unplug(),
            Some(DeviceFault::LinkLoss(span)) => self.lose_link(now, span),
            Some(DeviceFault::GpuLost) => self.fail("a GPU whose memory it moves data to is lost"),
        }
        1
    }

    /// Sets whether only the calling thread steps the controller from now on.
    pub(crate) fn set_exclusive(&mut self, exclusive: bool) {
        self.storage.set_exclusive(exclusive);
    }

    /// Returns the time of the next state change without a host access, if known.
    #[must_use]
    pub fn next_event(&self) -> Option<Nanos> {
        let delay = self.commands.next_delay().filter(|_| self.lifecycle.serving());
        let media = self.storage.next_event();
        // A transition that is due still waits for media.
        let phase = match self.storage.in_flight() {
            0 => self.lifecycle.next_event(),
            _ => self.lifecycle.next_event().max(media).filter(|_| media.is_some()),
        };
        [delay, media, phase].into_iter().flatten().min()
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> EmuCounters {
        let mut counters = self.logs.counters;
        for (copies, batches) in self.storage.namespaces.iter().map(Namespace::copies) {
            counters.copies += copies;
            counters.copy_batches += batches;
        }
        counters
    }

    /// Replaces the fault plan and restarts its counters.
    ///
    /// # Panics
    /// Panics if a condition of `faults` has a value without a meaning, such as `nth: 0`.
    pub fn set_faults(&mut self, faults: FaultPlan) {
        self.faults.set_plan(faults);
        self.lifecycle.faults_changed(self.faults.registers());
    }

    /// Cuts the power and restores it.
    pub fn power_loss(&mut self, _now: Nanos) {
        if !self.lifecycle.gone {
            self.lose_power();
            self.logs.power_cycle();
        }
    }

    /// Removes the controller from its slot, which also cuts its power.
    pub fn unplug(&mut self) {
        self.lose_power();
        self.lifecycle.gone = true;
    }

    /// Unplugs the controller if the power is off.
    fn check_power(&mut self) {
        if !self.lifecycle.gone && self.faults.power_is_cut() {
            self.unplug();
        }
    }
}
