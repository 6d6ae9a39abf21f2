//! The known-pattern round trip: data only, also for memory not mapped in this process.
#![allow(unsafe_code, reason = "memory and copies by address")]

use std::sync::Mutex;

use nvme_driver::{
    CopyDirection, CopyEngine, CopyError, CopyFence, DescriptorMode, DeviceCopy, DevicePtr, State,
};

use super::*;

const AT: Lba = Lba(300);

/// Like [`Elsewhere`], without an address in this process: the "GPU's" memory is the real one.
#[derive(Debug)]
struct Remote(DmaSlice);

impl Remote {
    fn slice(of: DmaSlice) -> DmaSlice {
        DmaSlice::whole(Arc::new(Self(of))).unwrap()
    }
}

// SAFETY: as the memory that it keeps; only `Engine` dereferences the device address.
unsafe impl DmaMemory for Remote {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn host(&self) -> Option<NonNull<u8>> {
        None
    }
    fn device(&self) -> Option<DevicePtr> {
        self.0.host().map(|p| DevicePtr(p.as_ptr().expose_provenance() as u64))
    }
    fn segments(&self) -> &[IovaRange] {
        self.0.memory().segments()
    }
}

/// Defect of a copy engine.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ill {
    Not,
    /// Reports copies as done without doing those in this direction.
    Skips(CopyDirection),
    /// Never finishes a copy.
    Stuck,
    Lost,
    NoMemory,
}

#[derive(Debug)]
struct Engine {
    domain: Arc<EmuDomain>,
    ill: Ill,
    /// Batches, and the number of fence polls: every third one reports completion.
    state: Mutex<(Vec<Vec<DeviceCopy>>, u64)>,
}

impl Engine {
    fn new(ill: Ill) -> Self {
        Self { domain: EmuDomain::new("engine"), ill, state: Mutex::default() }
    }
}

impl CopyEngine for Engine {
    fn host_memory(&self, len: usize) -> Result<ExternalMemory, CopyError> {
        if self.ill == Ill::NoMemory {
            return Err(CopyError { cause: "out of memory".into() });
        }
        let memory = self.domain.alloc(len).unwrap();
        let (host, len) = (memory.host(), memory.len());
        // SAFETY: the owner keeps the bytes; the address has no other users.
        Ok(unsafe { ExternalMemory::new(host, None, len, Arc::new(memory)) })
    }

    unsafe fn submit(&self, copies: &[DeviceCopy]) -> Result<CopyFence, CopyError> {
        if self.ill == Ill::Lost {
            return Err(CopyError { cause: "the GPU fell off the bus".into() });
        }
        let (batches, _) = &mut *self.state.lock().unwrap();
        batches.push(copies.to_vec());
        Ok(CopyFence(batches.len() as u64))
    }

    fn is_done(&self, fence: CopyFence) -> Result<bool, CopyError> {
        let (batches, asked) = &mut *self.state.lock().unwrap();
        *asked += 1;
        if self.ill == Ill::Stuck || !asked.is_multiple_of(3) {
            return Ok(false);
        }
        for copy in batches[..fence.0 as usize].iter_mut().flat_map(std::mem::take) {
            if self.ill == Ill::Skips(copy.direction) {
                continue;
            }
            let device = std::ptr::with_exposed_provenance_mut::<u8>(copy.device.0 as usize);
            let host = copy.host.as_ptr();
            let (from, to) = match copy.direction {
                CopyDirection::HostToDevice => (host, device),
                CopyDirection::DeviceToHost => (device, host),
            };
            // SAFETY: both are as long as the copy, by `submit`'s contract.
            unsafe { std::ptr::copy_nonoverlapping(from, to, copy.len) };
        }
        Ok(true)
    }
}

impl Rig {
    fn memory(&self, len: usize) -> DmaSlice {
        DmaSlice::whole(self.domain.alloc(len).unwrap()).unwrap()
    }
}

#[test]
fn host_memory_makes_the_round_trip() {
    for descriptors in [DescriptorPreference::Prp, DescriptorPreference::Sgl] {
        let mut rig = Rig::with(512, descriptors);
        let memory = rig.memory(96 << 10);
        let (mut before, mut after) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        rig.controller.read(NSID, Lba(0), &mut before).unwrap();
        let report = p2p::round_trip(&mut rig.controller, NSID, AT, &memory, None).unwrap();
        let works = |check| (check, Outcome::Works);
        assert_eq!(report.checks, [RouteCheck::ToMedium, RouteCheck::FromMedium].map(works));
        rig.controller.read(NSID, Lba(0), &mut after).unwrap();
        let (begin, end) = (300 * 512, 300 * 512 + (96 << 10));
        assert!(before[..begin] == after[..begin] && before[end..] == after[end..]);
        assert!(before[begin..end] != after[begin..end]);
    }
}

#[test]
fn gpu_memory_makes_the_round_trip_through_copies() {
    let mut rig = Rig::new();
    let memory = Remote::slice(rig.memory(64 << 10));
    let engine = Engine::new(Ill::Not);
    // Twice, because data left in memory and on the medium by the first must prove nothing.
    for _ in 0..2 {
        let report =
            p2p::round_trip(&mut rig.controller, NSID, AT, &memory, Some(&engine)).unwrap();
        assert!(report.is_ok(), "{report}");
        assert_eq!(report.checks.len(), 3);
    }
    let error = p2p::round_trip(&mut rig.controller, NSID, AT, &memory, None).unwrap_err();
    assert!(error.to_string().contains("copy engine"), "{error}");
}

#[test]
fn data_that_lands_elsewhere_is_seen_in_each_direction() {
    let mut rig = Rig::new();
    let (real, other) = (rig.memory(8192), rig.memory(8192));
    let memory = Elsewhere::slice(real.memory().clone(), other.memory().clone());
    let report = p2p::round_trip(&mut rig.controller, NSID, AT, &memory, None).unwrap();
    let why = report.why().unwrap();
    assert!(why.contains("to the drive") && why.contains("did not arrive"), "{why}");
    let engine = Engine::new(Ill::Not);
    let memory = Remote::slice(memory);
    let report = p2p::round_trip(&mut rig.controller, NSID, AT, &memory, Some(&engine)).unwrap();
    assert!(!report.is_ok(), "{report}");
    // Only reads go astray: the medium has the data, and a read reports success without moving any.
    let when = FaultWhen { opcode: Some(NvmOpcode::READ.0), ..FaultWhen::default() };
    let status = FaultAction::Status { code: 0, dnr: false };
    let rule = FaultRule { when: FaultWhen { nth: Some(2), ..when }, then: status, limit: Some(1) };
    rig.emu.set_faults(FaultPlan { seed: SEED, rules: vec![rule], ..FaultPlan::default() });
    let good = rig.memory(8192);
    let report = p2p::round_trip(&mut rig.controller, NSID, AT, &good, None).unwrap();
    let why = report.why().unwrap();
    assert!(why.contains("from the drive") && why.contains("did not arrive"), "{why}");
}

#[test]
fn what_an_earlier_proof_left_proves_nothing() {
    let mut rig = Rig::new();
    let memory = rig.memory(8192);
    // The n-th write reports success without effect. First the driver's second write, which leaves
    // the pattern of the first direction on the medium; then the write of that direction itself.
    for (nth, expected) in [(3, "from the drive"), (2, "to the drive")] {
        let when = FaultWhen { opcode: Some(NvmOpcode::WRITE.0), ..FaultWhen::default() };
        let when = FaultWhen { nth: Some(nth), ..when };
        let then = FaultAction::Status { code: 0, dnr: false };
        let rule = FaultRule { when, then, limit: Some(1) };
        rig.emu.set_faults(FaultPlan { seed: SEED, rules: vec![rule], ..FaultPlan::default() });
        let report = p2p::round_trip(&mut rig.controller, NSID, AT, &memory, None).unwrap();
        let why = report.why().unwrap();
        assert!(why.contains(expected), "{nth}: {why}");
    }
}

#[test]
fn an_engine_that_does_not_copy_is_found_out_in_time() {
    let mut rig = Rig::new();
    let all = [
        (Ill::Skips(CopyDirection::HostToDevice), "came back changed"),
        (Ill::Skips(CopyDirection::DeviceToHost), "came back changed"),
        (Ill::Stuck, "leaked"),
        (Ill::Lost, "fell off"),
    ];
    for (ill, expected) in all {
        let memory = Remote::slice(rig.memory(4096));
        let engine = Engine::new(ill);
        let report =
            p2p::round_trip(&mut rig.controller, NSID, AT, &memory, Some(&engine)).unwrap();
        let why = report.why().unwrap();
        assert!(why.contains(expected) && why.contains("GPU"), "{ill:?}: {why}");
        assert_eq!(report.checks.len(), 1, "nothing was written to the drive");
        let kept = Arc::strong_count(memory.memory()) > 1;
        assert_eq!(kept, ill == Ill::Stuck, "what may still be copied to stays");
    }
    let memory = Remote::slice(rig.memory(4096));
    let engine = Engine::new(Ill::NoMemory);
    let error = p2p::round_trip(&mut rig.controller, NSID, AT, &memory, Some(&engine));
    assert!(matches!(error, Err(Error::Dma { .. })));
}

#[test]
fn a_command_that_never_ends_does_not_hang_it_and_granted_queues_go_on() {
    let mut rig = Rig::new();
    let qid = rig.controller.create_queue_pair(16).unwrap();
    let grant = rig.controller.grant(qid, NSID).unwrap();
    assert!(matches!(grant.descriptor_mode, DescriptorMode::Sgl { .. }));
    let when = FaultWhen { opcode: Some(NvmOpcode::READ.0), ..FaultWhen::default() };
    let when = FaultWhen { nth: Some(2), ..when };
    let rule = FaultRule { when, then: FaultAction::Drop, limit: Some(1) };
    rig.emu.set_faults(FaultPlan { seed: SEED, rules: vec![rule], ..FaultPlan::default() });
    let memory = rig.memory(4096);
    let report = p2p::round_trip(&mut rig.controller, NSID, AT, &memory, None).unwrap();
    let why = report.why().unwrap();
    assert!(why.contains("from the drive") && why.contains("not answered"), "{why}");
    assert_eq!(rig.controller.state(), State::Ready);
    let report = p2p::round_trip(&mut rig.controller, NSID, AT, &memory, None).unwrap();
    assert!(report.is_ok(), "{report}");
    // No reset took the granted queue: reclaiming it deletes it on the device.
    // SAFETY: the grant is unused.
    let stopped = unsafe { nvme_driver::Quiesced::assert([grant.epoch]) };
    rig.controller.reclaim(qid, &stopped).unwrap();
}

#[test]
fn arguments_that_do_not_fit_touch_nothing() {
    let mut rig = Rig::new();
    let writes = rig.emu.counters().writes;
    for (memory, lba) in
        [(rig.memory(4096).slice(0, 100).unwrap(), AT), (rig.memory(4096), Lba(u64::MAX))]
    {
        let error = p2p::round_trip(&mut rig.controller, NSID, lba, &memory, None).unwrap_err();
        assert!(matches!(error, Error::Range { .. }), "{error}");
    }
    assert_eq!(rig.emu.counters().writes, writes);
}
