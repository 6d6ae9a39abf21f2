//! The driver on the software controller, on one thread in virtual time.

mod attach;
mod choices;
mod evil;
mod faults;
mod grants;
mod health;
mod io;
mod limits;
mod link;
mod placement;
mod remarks;
mod retry;
mod seams;
mod soak;

use std::sync::Arc;

use nvme_driver::{Controller, ControllerOptions, DmaSlice, Error, platform::buffer::Buffer};
use nvme_emu::{Emu, EmuConfig, EmuDomain, FaultAction, FaultPlan, FaultRule, FaultWhen};
use nvme_emu::{MemoryMedia, SimClock};
use rand::{RngCore as _, SeedableRng as _, rngs::SmallRng};

const SEED: u64 = 0x5EED;
const LBA: usize = 512;
const LBAS: u64 = 64 << 10;

/// A software controller with its clock and address space.
#[derive(Debug)]
struct Rig {
    clock: Arc<SimClock>,
    domain: Arc<EmuDomain>,
    emu: Arc<Emu>,
}

impl Rig {
    fn new(config: EmuConfig) -> Self {
        let media = MemoryMedia::new(LBAS * LBA as u64).unwrap();
        let clock = SimClock::new(SEED);
        let domain = EmuDomain::new("test");
        let emu = Emu::new(domain.clone(), config.namespace(media, LBA as u32)).unwrap();
        clock.drive(emu.clone());
        Self { clock, domain, emu }
    }

    fn good() -> Self {
        Self::new(EmuConfig::new("emu0"))
    }

    fn attach_with(&self, options: ControllerOptions) -> Result<Controller, Error> {
        Controller::attach(self.emu.bus(), self.clock.clone(), options)
    }

    fn attach(&self) -> Controller {
        self.attach_with(ControllerOptions::default()).expect("a good controller attaches")
    }

    fn alloc(&self, bytes: usize) -> DmaSlice {
        use nvme_driver::DmaSpace;
        DmaSlice::whole(self.domain.alloc(bytes).unwrap()).unwrap()
    }

    fn faults(&self, rules: impl IntoIterator<Item = FaultRule>) {
        let rules = rules.into_iter().collect();
        self.emu.set_faults(FaultPlan { seed: SEED, rules, ..FaultPlan::default() });
    }
}

fn bytes(slice: &DmaSlice) -> Vec<u8> {
    let mut all = vec![0; slice.len()];
    Buffer::new(slice.clone()).unwrap().read(0, &mut all).unwrap();
    all
}

fn fill(slice: &DmaSlice, data: &[u8]) {
    Buffer::new(slice.clone()).unwrap().write(0, data).unwrap();
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut pattern = vec![0; len];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut pattern);
    pattern
}

fn io(opcode: u8) -> FaultWhen {
    FaultWhen { admin: Some(false), opcode: Some(opcode), ..FaultWhen::default() }
}

fn admin(opcode: u8) -> FaultWhen {
    FaultWhen { admin: Some(true), opcode: Some(opcode), ..FaultWhen::default() }
}

fn once(when: FaultWhen, then: FaultAction) -> FaultRule {
    FaultRule::new(when, then).limit(1)
}

fn always(when: FaultWhen, then: FaultAction) -> FaultRule {
    FaultRule::new(when, then)
}
