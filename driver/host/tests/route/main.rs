//! The proof that a controller can access memory, on the software controller: it must not succeed
//! if the bytes went elsewhere.
#![allow(unsafe_code, reason = "memory that lies about where it is")]

mod round_trip;

use std::{ptr::NonNull, sync::Arc};

use nvme_driver::{
    Controller, ControllerOptions, DescriptorPreference, DmaMemory, DmaSlice, DmaSpace, Error,
    ExternalMemory, Iova, IovaRange,
    platform::{
        p2p::{self, Outcome, RouteCheck},
        window::Window,
    },
};
use nvme_emu::{
    Emu, EmuConfig, EmuDomain, FaultAction, FaultPlan, FaultRule, FaultWhen, MemoryMedia, SimClock,
};
use nvme_spec::{
    ids::{Lba, Nsid},
    nvm::NvmOpcode,
};

const SEED: u64 = 0x5EED;
const NSID: Nsid = Nsid(1);

struct Rig {
    domain: Arc<EmuDomain>,
    emu: Arc<Emu>,
    controller: Controller,
}

impl Rig {
    fn with(lba_bytes: u32, descriptors: DescriptorPreference) -> Self {
        let media = MemoryMedia::new(64 << 20).unwrap();
        let clock = SimClock::new(SEED);
        let domain = EmuDomain::new("test");
        let config = EmuConfig::new("emu0").namespace(media, lba_bytes);
        let emu = Emu::new(domain.clone(), config).unwrap();
        clock.drive(emu.clone());
        let options = ControllerOptions { descriptors, ..ControllerOptions::default() };
        let mut controller = Controller::attach(emu.bus(), clock, options).unwrap();
        let data: Vec<u8> = (0..1 << 20).map(|i: u32| (i / 251 + i) as u8).collect();
        controller.write(NSID, Lba(0), &data, false).unwrap();
        Self { domain, emu, controller }
    }

    fn new() -> Self {
        Self::with(512, DescriptorPreference::Auto)
    }

    fn scratch(&self) -> DmaSlice {
        let memory = self.domain.alloc(p2p::scratch_bytes(&self.controller)).unwrap();
        DmaSlice::whole(memory).unwrap()
    }
}

/// Memory that has the device address of other memory.
#[derive(Debug)]
struct Elsewhere {
    real: Arc<dyn DmaMemory>,
    _other: Arc<dyn DmaMemory>,
    range: [IovaRange; 1],
}

impl Elsewhere {
    fn slice(real: Arc<dyn DmaMemory>, other: Arc<dyn DmaMemory>) -> DmaSlice {
        let range = [IovaRange { iova: other.segments()[0].iova, len: real.len() as u64 }];
        assert!(other.len() >= real.len());
        DmaSlice::whole(Arc::new(Self { real, _other: other, range })).unwrap()
    }
}

// SAFETY: the host address is that of `real`, the device address that of `_other`; both are kept,
// never change, and are long enough. They differ on purpose.
unsafe impl DmaMemory for Elsewhere {
    fn len(&self) -> usize {
        self.real.len()
    }
    fn host(&self) -> Option<NonNull<u8>> {
        self.real.host()
    }
    fn device(&self) -> Option<nvme_driver::DevicePtr> {
        None
    }
    fn segments(&self) -> &[IovaRange] {
        &self.range
    }
}

#[test]
fn good_memory_is_proven_and_the_medium_untouched() {
    for lba_bytes in [512, 4096] {
        for descriptors in [DescriptorPreference::Prp, DescriptorPreference::Sgl] {
            let mut rig = Rig::with(lba_bytes, descriptors);
            let (mut before, mut after) = (vec![0; 1 << 20], vec![0; 1 << 20]);
            rig.controller.read(NSID, Lba(0), &mut before).unwrap();
            let queues = rig.controller.queue_ids().count();
            let scratch = rig.scratch();
            let report = p2p::prove(&mut rig.controller, NSID, &scratch).unwrap();
            assert!(report.is_ok(), "{report}");
            let checks = &report.checks;
            for check in [RouteCheck::AdminData, RouteCheck::Queues, RouteCheck::Read] {
                assert!(checks.contains(&(check, Outcome::Works)), "{report}");
            }
            assert_eq!(checks.len(), 4);
            rig.controller.read(NSID, Lba(0), &mut after).unwrap();
            assert!(before == after);
            assert_eq!(rig.controller.queue_ids().count(), queues, "its queue is gone again");
            drop(scratch);
            rig.controller.shutdown().unwrap();
        }
    }
}

#[test]
fn imported_memory_is_proven_in_any_part() {
    let mut rig = Rig::new();
    let own = EmuDomain::new("lender").alloc(1 << 20).unwrap();
    let (host, len) = (own.host(), own.len());
    // SAFETY: `own` keeps the bytes, and only windows access them.
    let memory = unsafe { ExternalMemory::new(host, None, len, Arc::new(own)) };
    let memory = rig.domain.import(memory).unwrap();
    let part = DmaSlice::new(memory.clone(), 64 << 10, p2p::scratch_bytes(&rig.controller));
    let report = p2p::prove(&mut rig.controller, NSID, &part.unwrap()).unwrap();
    assert!(report.is_ok(), "{report}");
    assert_eq!(report.place.iova, memory.segments()[0].iova.offset(64 << 10));
    let short = DmaSlice::new(memory, 0, 8192).unwrap();
    assert!(matches!(p2p::prove(&mut rig.controller, NSID, &short), Err(Error::Dma { .. })));
}

#[test]
fn dma_that_lands_elsewhere_is_not_taken_for_a_route() {
    let mut rig = Rig::new();
    let bytes = p2p::scratch_bytes(&rig.controller);
    let (real, other) = (rig.domain.alloc(bytes).unwrap(), rig.domain.alloc(bytes).unwrap());
    let scratch = Elsewhere::slice(real, other.clone());
    let report = p2p::prove(&mut rig.controller, NSID, &scratch).unwrap();
    let why = report.why().unwrap();
    assert!(why.contains("did not arrive") && why.contains("IOMMU"), "{why}");
    assert!(report.to_string().contains("does not work"));
    // Checks the proof itself: the bytes are in the other memory.
    let mut vendor = [0; 2];
    let window = Window::new(DmaSlice::whole(other).unwrap()).unwrap();
    window.read(3 * 4096, &mut vendor).unwrap();
    assert_eq!(u16::from_le_bytes(vendor), rig.controller.info().vendor);
    // The controller is still healthy.
    let scratch = rig.scratch();
    assert!(p2p::prove(&mut rig.controller, NSID, &scratch).unwrap().is_ok());
}

#[test]
fn unmapped_memory_is_not_taken_for_a_route() {
    let mut rig = Rig::new();
    let bytes = p2p::scratch_bytes(&rig.controller);
    let real = rig.domain.alloc(bytes).unwrap();
    let foreign = EmuDomain::new("other space").alloc(bytes).unwrap();
    let scratch = Elsewhere::slice(real, foreign);
    // Both spaces begin at the same address; go far beyond all mappings.
    let far = Iova(scratch.iova().0 + (1 << 40));
    let gone = Arc::new(Elsewhere {
        real: rig.domain.alloc(bytes).unwrap(),
        _other: scratch.memory().clone(),
        range: [IovaRange { iova: far, len: bytes as u64 }],
    });
    let scratch = DmaSlice::whole(gone).unwrap();
    match p2p::prove(&mut rig.controller, NSID, &scratch) {
        Ok(report) => assert!(!report.is_ok(), "{report}"),
        Err(error) => assert!(matches!(error, Error::Fatal { .. } | Error::Failed { .. })),
    }
    rig.controller.reset().unwrap();
    let scratch = rig.scratch();
    assert!(p2p::prove(&mut rig.controller, NSID, &scratch).unwrap().is_ok());
}

#[test]
fn a_queue_that_never_answers_ends_in_time() {
    let mut rig = Rig::new();
    let when = FaultWhen { opcode: Some(NvmOpcode::FLUSH.0), ..FaultWhen::default() };
    let rule = FaultRule { when, then: FaultAction::Drop, limit: Some(1) };
    let plan = FaultPlan { seed: SEED, rules: vec![rule], ..FaultPlan::default() };
    rig.emu.set_faults(plan);
    let scratch = rig.scratch();
    let report = p2p::prove(&mut rig.controller, NSID, &scratch).unwrap();
    let why = report.why().unwrap();
    assert!(why.contains("no completion"), "{why}");
    let report = p2p::prove(&mut rig.controller, NSID, &scratch).unwrap();
    assert!(report.is_ok(), "the queue was deleted, everything works again: {report}");
}
