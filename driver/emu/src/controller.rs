//! The controller protocol: registers, admin commands, I/O queues, PRP and SGL walkers.
//!
//! [`Controller::step`] polls the doorbells, takes what media and copies have finished, executes
//! delayed commands, fetches new ones in round-robin order, signals interrupts, and starts a batch
//! of copies if there is data for a GPU's memory. A command is executed when it is fetched; only
//! what media, copies, delays or events hold back lives in a slab until later.
//! Each part of the protocol is a file with an `impl Controller` of its own.
//!
//! # Not implemented
//!
//! Compare, Verify, Write Uncorrectable and fused commands; metadata; weighted round robin; NVM
//! Subsystem Reset. Interrupts are signalled once per queue and step instead of being coalesced by
//! time. Abort stops what has not begun, and nothing that a medium works on or a GPU copies.
//!
//! # Sources
//!
//! Checks name the section of the NVMe Base Specification 2.1 that asks for them, or of the NVM
//! Command Set Specification 1.1 as "NVM".

mod admin;
mod command;
mod complete;
mod faults;
mod ferry;
mod fetch;
mod io;
mod lifecycle;
mod namespace;
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
    ferry::Ferry,
    lifecycle::Lifecycle,
    namespace::Namespace,
    queues::Queues,
    registers::Registers,
    transfer::Rules,
};
use crate::{
    Doorbells, EmuConfig, EmuCounters, EmuDomain, FaultPlan, Interrupts, Progress, SglSupport,
    domain::SgList, fault::FaultEngine, media::MediaDone,
};

/// The controller as a step machine.
#[derive(Debug)]
pub struct Controller {
    // On the I/O path.
    doorbells: Doorbells,
    queues: Queues,
    rules: Rules,
    /// Bytes one command may move.
    transfer_bytes_max: u64,
    namespaces: Vec<Namespace>,
    /// Empty lists whose capacity is used again.
    spare: Vec<SgList>,
    counters: EmuCounters,
    /// Whether the fault plan has command rules at all.
    faulty: bool,
    faults: FaultEngine,
    commands: Slab,
    /// Commands that wait for a time, as (time, token), unordered: there are few.
    delayed: Vec<(Nanos, u64)>,
    /// Tokens of commands whose media operations have all ended.
    finished: Vec<u64>,
    done: Vec<MediaDone>,
    /// Operations with memory that only a GPU addresses.
    ferry: Ferry,
    /// Completion queues with an interrupt to signal.
    signals: Vec<u16>,
    /// Place in the round robin of the submission queues.
    rr_index: usize,
    /// Queue identifier checked next for doorbells rung without a queue.
    unused_qid: u16,
    /// Fault of the whole device, applied as soon as no DMA is going on.
    pending_fault: Option<DeviceFault>,

    // Not on the I/O path.
    domain: Arc<EmuDomain>,
    interrupts: Interrupts,
    /// Vectors that were signalled while masked.
    withheld: u32,
    registers: Registers,
    lifecycle: Lifecycle,
    identity: Identity,
    features: Features,
    events: Events,
    logs: Logs,
    /// Submission queues being deleted.
    deletions: u32,
    /// Whether writes have to be on stable media before they complete (no write cache).
    write_through: bool,
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
        let mut controller = Self {
            doorbells,
            queues: Queues::new(config.io_queues_max),
            rules: Rules { page_bytes: 4096, sgl: config.sgl, bit_bucket: config.bit_bucket },
            transfer_bytes_max: config.mdts_bytes.map_or(u64::MAX, u64::from),
            namespaces: config.namespaces.into_iter().map(Namespace::new).collect(),
            spare: Vec::new(),
            counters: EmuCounters::default(),
            faulty: !faults.plan().rules.is_empty(),
            faults,
            commands: Slab::default(),
            delayed: Vec::new(),
            finished: Vec::new(),
            done: Vec::new(),
            ferry: Ferry::new(domain.copies().cloned()),
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
        };
        controller.update_write_cache();
        controller
    }

    /// Reads the 32-bit register at `offset`; 64-bit registers are two of them.
    pub fn read32(&mut self, offset: u32, now: Nanos) -> u32 {
        if self.lifecycle.gone {
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
        if self.lifecycle.gone {
            return;
        }
        self.tick(now);
        match offset {
            reg::CC => self.write_cc(value, now),
            // "Interrupt Mask Set" and "Clear": ones act, zeroes do not.
            reg::INTMS => self.registers.masked |= value,
            reg::INTMC => {
                self.registers.masked &= !value;
                self.signal_withheld();
            }
            _ => self.registers.write(offset, value),
        }
    }

    /// Does what there is to do at `now`, fetching at most `budget` commands.
    pub fn step(&mut self, now: Nanos, budget: u32) -> Progress {
        if self.lifecycle.gone {
            return self.after_life(now);
        }
        let mut work = self.tick(now);
        work += self.take_finished(now);
        let paused = self.faults.plan().registers.paused;
        if !paused && self.lifecycle.serving() && self.observe_doorbells(now) {
            let domain = Arc::clone(&self.domain);
            let dma = domain.access();
            work += self.settle(&dma);
            self.heed_loss();
            work += self.run_delayed(&dma, now);
            work += self.fetch(&dma, now, budget);
            work += self.finish_deletions(&dma);
            work += self.report_events(&dma);
        }
        self.signal();
        work += self.sail(now);
        work += self.apply_device_fault(now);
        work += self.advance_shutdown(now);
        Progress {
            work,
            outstanding: u32::try_from(self.commands.len()).unwrap_or(u32::MAX),
            next_event: self.next_event(),
            listening: self.lifecycle.serving() || self.lifecycle.shutting_down(),
        }
    }

    /// When something will happen by itself, if that is known.
    #[must_use]
    pub fn next_event(&self) -> Option<Nanos> {
        let copies = self.ferry.next_event();
        if self.lifecycle.gone {
            return copies;
        }
        let delays = self.delayed.iter().map(|(time, _)| *time);
        let media = self.namespaces.iter().filter_map(|namespace| namespace.media_event());
        // A transition that is due waits for copies only.
        let phase =
            self.lifecycle.next_event().map(|at| copies.map_or(at, |copies| at.max(copies)));
        delays.chain(media).chain(phase).chain(copies).min()
    }

    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> EmuCounters {
        self.counters
    }

    /// Replaces what is wrong with it; counting starts anew.
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

    /// Pulls it out of its slot, and so out of its power.
    pub fn unplug(&mut self) {
        self.lose_power();
        self.lifecycle.gone = true;
    }

    /// SGLS of the identify data.
    fn sgls(&self) -> Sgls {
        let kinds = match self.rules.sgl {
            SglSupport::None => return Sgls(0),
            SglSupport::Byte => 1,
            SglSupport::Dword => 2,
        };
        Sgls(kinds | if self.rules.bit_bucket { Sgls::BIT_BUCKET } else { 0 })
    }
}
