//! The controller protocol: registers, admin commands, I/O queues, PRP and SGL walkers.
//!
//! [`Controller::step`] polls the media and the doorbells, executes delayed commands, fetches new
//! ones in round-robin order, and signals interrupts. A command is executed when it is fetched; it
//! is stored in a slab only while it waits for media, a delay or an event. Each part of the
//! protocol is a file with its own `impl Controller`.
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
mod complete;
mod faults;
mod fetch;
mod io;
mod lifecycle;
mod namespace;
mod placement;
mod queues;
mod registers;
mod transfer;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use nvme_driver::Nanos;
use nvme_spec::{identify::Sgls, reg};

use self::{
    admin::{Events, Features, Identity, Logs},
    command::{Slab, Wait},
    faults::DeviceFault,
    lifecycle::Lifecycle,
    namespace::Namespace,
    queues::Queues,
    registers::Registers,
    transfer::Rules,
};
use crate::{
    Doorbells, EmuConfig, EmuCounters, EmuDomain, FaultPlan, Interrupts, PlacementConfig,
    PowerSwitch, Progress, SglSupport, domain::SgList, fault::FaultEngine, media::MediaDone,
};

/// The controller as a step machine.
#[derive(Debug)]
pub struct Controller {
    // On the I/O path.
    doorbells: Doorbells,
    queues: Queues,
    rules: Rules,
    /// Largest transfer of one command in bytes.
    transfer_bytes_max: u64,
    namespaces: Vec<Namespace>,
    /// Empty lists kept for their capacity.
    spare: Vec<SgList>,
    counters: EmuCounters,
    /// Set if the fault plan has command rules.
    faulty: bool,
    faults: FaultEngine,
    commands: Slab,
    /// Delayed commands as (time, token), unordered: there are few.
    delayed: Vec<(Nanos, u64)>,
    /// Tokens of commands whose media operations have all ended.
    finished: Vec<u64>,
    done: Vec<MediaDone>,
    /// Completion queues with an interrupt to signal.
    signals: Vec<u16>,
    /// Position in the round robin of the submission queues.
    rr_index: usize,
    /// Next queue identifier to check for doorbells rung without a queue.
    unused_qid: u16,
    /// Fault of the whole device, applied once no DMA is in progress.
    pending_fault: Option<DeviceFault>,

    // Not on the I/O path.
    domain: Arc<EmuDomain>,
    interrupts: Interrupts,
    /// Vectors signalled while masked.
    withheld: u32,
    registers: Registers,
    lifecycle: Lifecycle,
    identity: Identity,
    features: Features,
    events: Events,
    logs: Logs,
    /// Submission queues being deleted.
    deletions: u32,
    /// Set if writes must reach stable media before they complete (no write cache).
    write_through: bool,
    placement: Option<PlacementConfig>,
    power: Option<PowerSwitch>,
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
        let registers = Registers::new(&config);
        let identity = Identity::new(&config);
        let features = Features::new(&config);
        let faults = FaultEngine::new(config.faults);
        let namespace = |config| Namespace::new(config, domain.copies());
        let namespaces = config.namespaces.into_iter().map(namespace).collect();
        let mut controller = Self {
            doorbells,
            queues: Queues::new(config.io_queues_max),
            rules: Rules { page_bytes: 4096, sgl: config.sgl, bit_bucket: config.bit_bucket },
            transfer_bytes_max: config.mdts_bytes.map_or(u64::MAX, u64::from),
            namespaces,
            spare: Vec::new(),
            counters: EmuCounters::default(),
            faulty: !faults.plan().rules.is_empty(),
            faults,
            commands: Slab::default(),
            delayed: Vec::new(),
            finished: Vec::new(),
            done: Vec::new(),
            signals: Vec::new(),
            rr_index: 0,
            unused_qid: 0,
            pending_fault: None,
            domain,
            interrupts,
            withheld: 0,
            registers,
            lifecycle: Lifecycle::default(),
            identity,
            features,
            events: Events::default(),
            logs: Logs::default(),
            deletions: 0,
            write_through: false,
            placement: config.placement,
            power: config.power,
        };
        controller.update_write_cache();
        controller
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
                let paused = self.faults.plan().registers.paused;
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
                self.signal_withheld();
            }
            _ => self.registers.write(offset, value),
        }
    }

    /// Performs the work due at `now`, fetching at most `budget` commands.
    pub fn step(&mut self, now: Nanos, budget: u32) -> Progress {
        self.check_power();
        let mut work = self.tick(now);
        work += self.poll_media(now);
        let paused = self.faults.plan().registers.paused;
        if !paused && self.lifecycle.serving() && self.observe_doorbells(now) {
            let domain = Arc::clone(&self.domain);
            let dma = domain.access();
            work += self.settle(&dma);
            work += self.run_delayed(&dma, now);
            work += self.fetch(&dma, now, budget);
            work += self.finish_deletions(&dma);
            work += self.report_events(&dma);
        }
        self.signal();
        work += self.apply_device_fault(now);
        work += self.advance_shutdown(now);
        Progress {
            work,
            outstanding: u32::try_from(self.commands.len().max(self.in_flight()))
                .unwrap_or(u32::MAX),
            next_event: self.next_event(),
            listening: self.lifecycle.serving() || self.lifecycle.shutting_down(),
        }
    }

    /// Sets whether only the calling thread steps the controller from now on.
    pub(crate) fn set_exclusive(&mut self, exclusive: bool) {
        self.namespaces.iter_mut().for_each(|namespace| namespace.set_exclusive(exclusive));
    }

    /// Returns the time of the next state change without a host access, if known.
    #[must_use]
    pub fn next_event(&self) -> Option<Nanos> {
        let delays = self.delayed.iter().map(|(time, _)| *time);
        let delays = delays.filter(|_| self.lifecycle.serving());
        let media = self.namespaces.iter().filter_map(|namespace| namespace.media_event()).min();
        // A transition that is due still waits for media.
        let phase = match self.in_flight() {
            0 => self.lifecycle.next_event(),
            _ => self.lifecycle.next_event().max(media).filter(|_| media.is_some()),
        };
        delays.chain(media).chain(phase).min()
    }

    /// Returns the number of operations in flight on media, including cancelled ones.
    fn in_flight(&self) -> usize {
        self.namespaces.iter().map(Namespace::in_flight).sum()
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> EmuCounters {
        let mut counters = self.counters;
        for (copies, batches) in self.namespaces.iter().map(Namespace::copies) {
            counters.copies += copies;
            counters.copy_batches += batches;
        }
        counters
    }

    /// Replaces the fault plan and restarts its counters.
    pub fn set_faults(&mut self, faults: FaultPlan) {
        self.faulty = !faults.rules.is_empty();
        self.faults = FaultEngine::new(faults);
        self.lifecycle.faults_changed(&self.faults.plan().registers);
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

    /// Counts an event of the power switch, if there is one. Returns whether the power is off: then
    /// nothing may happen any more, and the controller is gone once no memory is being accessed.
    #[inline]
    fn pass_moment(&mut self) -> bool {
        let off = self.power.as_ref().is_some_and(PowerSwitch::pass_moment);
        if off {
            self.pending_fault = Some(DeviceFault::Gone);
        }
        off
    }

    /// Unplugs the controller if the power is off.
    fn check_power(&mut self) {
        if !self.lifecycle.gone && self.power.as_ref().is_some_and(PowerSwitch::is_cut) {
            self.unplug();
        }
    }

    /// Returns SGLS of the identify data.
    fn sgls(&self) -> Sgls {
        let kinds = match self.rules.sgl {
            SglSupport::None => return Sgls(0),
            SglSupport::Byte => 1,
            SglSupport::Dword => 2,
        };
        Sgls(kinds | if self.rules.bit_bucket { Sgls::BIT_BUCKET } else { 0 })
    }
}
