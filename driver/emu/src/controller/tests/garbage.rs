//! A host that writes garbage: commands, lists, doorbells and registers, each as a seed or a fuzzer
//! says.
//!
//! There must be no panic, a bounded amount of work in a step, no access outside the memory that
//! was named, and a controller that works after a reset. `RIPIENO_SOAK=N` runs N seeds instead of a
//! few hundred, `RIPIENO_SEED=S` repeats seed S.

use std::panic::catch_unwind;

use bolero::check;
use nvme_spec::sgl::{SglDescriptor, SglKind};
use rand::{Rng, RngCore};

use super::{
    choices::{Choices, Draws},
    *,
};
use crate::{EmuCounters, Latency, SimMedia, SimOptions};

const SEEDS: u64 = 300;
const EVENTS: u32 = 400;
const QUEUES: u16 = 4;
const MDTS: u32 = 64 << 10;
/// Pages of the memory that commands, lists and queues are in.
const PAGES: u64 = 64;

const ADMIN: [AdminOpcode; 11] = [
    AdminOpcode::IDENTIFY,
    AdminOpcode::CREATE_IO_CQ,
    AdminOpcode::CREATE_IO_SQ,
    AdminOpcode::DELETE_IO_CQ,
    AdminOpcode::DELETE_IO_SQ,
    AdminOpcode::SET_FEATURES,
    AdminOpcode::GET_FEATURES,
    AdminOpcode::ABORT,
    AdminOpcode::ASYNC_EVENT_REQUEST,
    AdminOpcode::GET_LOG_PAGE,
    AdminOpcode::FORMAT_NVM,
];
const NVM: [NvmOpcode; 5] = [
    NvmOpcode::READ,
    NvmOpcode::WRITE,
    NvmOpcode::FLUSH,
    NvmOpcode::WRITE_ZEROES,
    NvmOpcode::DATASET_MANAGEMENT,
];

struct Garbage {
    rng: Draws,
    host: Host,
    memory: Arc<dyn DmaMemory>,
    /// Mapped, and never named.
    untouched: Arc<dyn DmaMemory>,
}

impl Garbage {
    fn new(choices: &Choices) -> Self {
        let mut rng = choices.draws();
        let latency = Latency { min_ns: 100, mean_ns: 5_000, ..Latency::default() };
        let (read, write, flush) = (latency, latency, latency);
        let options =
            SimOptions { seed: rng.random(), read, write, flush, ..SimOptions::default() };
        let slow: bool = rng.random();
        let host = Host::off(|mut config| {
            config.mdts_bytes = Some(MDTS);
            if slow {
                config.namespaces.clear();
                config = config.namespace(SimMedia::new(media(1 << 20), options), 512);
            }
            config.namespace(media(1 << 20), 4096)
        });
        let memory = host.alloc(PAGES as usize * PAGE);
        let untouched = host.alloc(PAGE);
        host.write(at(&untouched), &[0x5a; PAGE]);
        Self { rng, host, memory, untouched }
    }

    /// Small most of the time, else anything.
    fn number(&mut self) -> u32 {
        match self.rng.random_range(0..8) {
            0 => self.rng.next_u32(),
            1 => 0,
            2 => u32::MAX,
            _ => self.rng.random_range(0..20),
        }
    }

    /// In the memory most of the time, and mostly aligned.
    fn address(&mut self) -> u64 {
        match self.rng.random_range(0..16) {
            0 => self.rng.next_u64(),
            1 => 0,
            2 => at(&self.memory).0 + self.rng.random_range(0..PAGES * PAGE as u64),
            _ => at(&self.memory).0 + self.rng.random_range(0..PAGES) * PAGE as u64,
        }
    }

    fn descriptor(&mut self) -> SglDescriptor {
        let (address, pages) = (self.address(), self.rng.random_range(1..5));
        match self.rng.random_range(0..6) {
            0 => SglDescriptor::last_segment(address, pages * 16),
            1 => SglDescriptor {
                identifier: self.rng.random_range(0..6) << 4
                    | u8::from(self.rng.random_ratio(1, 8)),
                length: self.number(),
                address,
                ..SglDescriptor::default()
            },
            2 => SglDescriptor {
                identifier: SglKind::SEGMENT.0 << 4,
                ..SglDescriptor::last_segment(address, pages * 16)
            },
            _ => SglDescriptor::data_block(address, pages * 512),
        }
    }

    fn sqe(&mut self, qid: u16) -> Sqe {
        let opcode = match (self.rng.random_range(0..16), qid) {
            (0, _) => self.rng.random(),
            (_, 0) => ADMIN[self.rng.random_range(0..ADMIN.len())].0,
            _ => NVM[self.rng.random_range(0..NVM.len())].0,
        };
        let sqe = Sqe::new(opcode, Cid(self.rng.random_range(0..40)), Nsid(1));
        let mut sqe = match self.rng.random_range(0..3) {
            0 if qid > 0 => sqe.with_sgl(self.descriptor()),
            _ => sqe.with_prps(self.address(), self.address()),
        };
        if self.rng.random() {
            sqe.nsid = self.number();
        }
        (sqe.cdw10, sqe.cdw11) = (self.number(), self.number());
        sqe.cdw12 = self.number() & if self.rng.random() { 0x7f } else { u32::MAX };
        if qid == 0 && self.rng.random() {
            // Queues that could be: an identifier and a size, contiguous, with interrupts.
            let (qid, size) = (self.rng.random_range(1..=QUEUES), self.rng.random_range(1..20));
            (sqe.cdw10, sqe.cdw11) = (size << 16 | u32::from(qid), u32::from(qid) << 16 | 3);
        }
        if self.rng.random_ratio(1, 8) {
            let bytes = sqe.as_mut_bytes();
            let place = self.rng.random_range(0..bytes.len());
            bytes[place] = self.rng.random();
        }
        sqe
    }

    fn write_register(&mut self) {
        let offset = match self.rng.random_range(0..4) {
            0 => self.rng.random_range(0..0x1000) & !3,
            1 => reg::AQA,
            _ => reg::CC,
        };
        let value = match (offset, self.rng.random_range(0..4)) {
            (reg::CC, 0) => Host::good_cc().with_en(0).0,
            (reg::CC, 1) => Host::good_cc().with_shn(self.rng.random_range(0..4)).0,
            (reg::CC, 2) => Host::good_cc().0,
            _ => self.number(),
        };
        self.host.set(offset, value);
    }

    /// One step, whose work is bounded by its budget and by what was in the controller already.
    fn step(&mut self) {
        let before = self.host.controller.counters();
        let refused = self.host.domain.refused();
        let held = self.host.controller.commands.len() as u64;
        let budget = self.rng.random_range(1..65);
        let progress = self.host.controller.step(self.host.now, budget);
        let after = self.host.controller.counters();
        let commands = after.commands - before.commands;
        assert!(commands <= u64::from(budget), "{commands} commands with a budget of {budget}");
        // Event requests, of which there are four, are held elsewhere.
        let ended = after.completions - before.completions;
        assert!(
            ended <= held + commands + 4,
            "{ended} completions of {held} and {commands} commands"
        );
        let bytes = |of: EmuCounters| of.bytes_read + of.bytes_written;
        assert!(bytes(after) - bytes(before) <= ended * u64::from(MDTS));
        let refused = self.host.domain.refused() - refused;
        assert!(refused <= commands + ended + 1, "{refused} refusals of {commands} commands");
        assert!(u64::from(progress.outstanding) <= 64 * (u64::from(QUEUES) + 1));
    }

    fn event(&mut self) {
        self.host.now = self.host.now + Nanos(self.rng.random_range(0..2000));
        let qid = self.rng.random_range(0..=QUEUES);
        let there = self.host.queues[usize::from(qid)].is_some();
        match self.rng.random_range(0..100) {
            0..40 if there => {
                let sqe = self.sqe(qid);
                self.host.post_as(qid, sqe);
                self.host.ring_sq(qid);
            }
            40..50 if there => drop(self.host.reap_all(qid)),
            50..58 => {
                let value = self.number();
                self.host.store_bell(self.rng.random_range(0..2 * (QUEUES + 1)), value);
            }
            58..65 => {
                let entries: Vec<_> = (0..8).map(|_| self.descriptor()).collect();
                let page = self.rng.random_range(0..PAGES) * PAGE as u64;
                self.host.write(at(&self.memory).offset(page), entries.as_bytes());
            }
            65..72 => {
                let entries: Vec<u64> = (0..32).map(|_| self.address()).collect();
                let page = self.rng.random_range(0..PAGES) * PAGE as u64;
                self.host.write(at(&self.memory).offset(page), entries.as_bytes());
            }
            72 => self.write_register(),
            73 => self.host.controller.power_loss(self.host.now),
            74 => drop(self.host.controller.read32(self.rng.next_u32() & 0xffc, self.host.now)),
            75 | 76 => self.make_good(),
            _ => self.step(),
        }
    }

    /// Resets, and sets queues up; expects that this works.
    fn make_good(&mut self) {
        self.host.disable();
        for _ in 0..100 {
            self.host.now = self.host.now + Nanos(100);
            self.host.step();
        }
        assert_eq!((self.host.csts().rdy(), self.host.csts().cfs()), (0, 0), "a reset ends");
        self.host.enable(ADMIN_ENTRIES, ADMIN_ENTRIES);
        (1..=QUEUES).for_each(|qid| self.host.create_pair(qid, 16, 16));
    }

    /// A reset helps, and the data path works.
    fn check(&mut self) {
        self.make_good();
        let (from, to) = (self.host.alloc(PAGE), self.host.alloc(PAGE));
        self.host.write(at(&from), &pattern(PAGE, 3));
        for (opcode, buffer) in [(NvmOpcode::WRITE, &from), (NvmOpcode::READ, &to)] {
            let sqe = Sqe { nsid: 2, ..nvm(opcode, 7, 1).with_prps(at(buffer).0, 0) };
            // A format may have made smaller blocks.
            assert_eq!(self.host.io(sqe), Status::SUCCESS);
        }
        assert_eq!(self.host.read(at(&to), 512), pattern(512, 3));
        assert_eq!(self.host.read(at(&self.untouched), PAGE), [0x5a; PAGE], "never named");
    }
}

fn run(choices: &Choices, events: u32) -> EmuCounters {
    let mut garbage = Garbage::new(choices);
    garbage.make_good();
    (0..events).for_each(|_| garbage.event());
    garbage.check();
    garbage.host.controller.counters()
}

#[test]
fn garbage_does_bounded_work_and_a_reset_helps() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    let one = number("RIPIENO_SEED");
    let seeds = one.map_or(0..number("RIPIENO_SOAK").unwrap_or(SEEDS), |seed| seed..seed + 1);
    let (mut right, mut wrong) = (0, 0);
    for seed in seeds {
        let counters = catch_unwind(|| run(&Choices::of(seed), EVENTS));
        let counters = counters.unwrap_or_else(|_| panic!("RIPIENO_SEED={seed} repeats it"));
        right += counters.completions - counters.errors;
        wrong += counters.errors;
    }
    let least = if one.is_some() { 0 } else { 5_000 };
    assert!(right > least && wrong > least, "{right} right and {wrong} wrong prove little");
}

/// Runs fewer events than with a seed alone, so that more inputs are tried.
#[test]
fn guest() {
    check!(name = "guest").with_type::<Choices>().with_iterations(1500).for_each(|choices| {
        run(choices, EVENTS / 4);
    });
}
