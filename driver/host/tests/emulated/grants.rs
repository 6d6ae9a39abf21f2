//! Queue pairs for executors: grant, reclaim, recovery.

use nvme_driver::{
    Controller, ControllerOptions, DescriptorMode, DescriptorPreference, Error, FailCause,
    QueueMemory, Quiesced, Recovered, RecoveryLevel, State, TimeoutOutcome,
    queue::{Completion, QueuePair},
};
use nvme_emu::{EmuConfig, FaultAction, FaultPlan, FaultWhen, RegisterFaults};
use nvme_spec::{
    admin::AdminOpcode,
    ids::{Cid, Lba, Nsid, QueueId},
    nvm::NvmOpcode,
    sqe::Sqe,
    status::Status,
};

use crate::{LBAS, Rig, admin, always, io};

const NS: Nsid = Nsid(1);

#[allow(unsafe_code, reason = "the tests' executors are plain calls, which have returned")]
pub(crate) fn quiesced(ctrl: &Controller) -> Quiesced {
    // SAFETY: no other thread was given a grant.
    unsafe { Quiesced::assert(ctrl.grants().map(|grant| grant.epoch)) }
}

fn recover(ctrl: &mut Controller) -> Result<Recovered, Error> {
    let proof = quiesced(ctrl);
    ctrl.recover(&proof)
}

fn reclaim(ctrl: &mut Controller, qid: QueueId) -> Result<QueueMemory, Error> {
    let proof = quiesced(ctrl);
    ctrl.reclaim(qid, &proof)
}

/// A minimal executor: a queue pair over memory chosen by the test.
struct Executor {
    memory: QueueMemory,
    pair: QueuePair,
}

impl Executor {
    fn memory(rig: &Rig, depth: usize) -> QueueMemory {
        QueueMemory {
            sq: rig.alloc(depth * 64).slice(0, depth * 64).unwrap(),
            cq: rig.alloc(depth * 16),
            descriptors: rig.alloc(depth * 4096),
        }
    }

    fn new(rig: &Rig, ctrl: &mut Controller, depth: usize) -> Self {
        let memory = Self::memory(rig, depth);
        let qid = ctrl.create_queue_pair_in(memory.clone()).unwrap();
        Self::start(ctrl, qid, memory)
    }

    fn start(ctrl: &mut Controller, qid: QueueId, memory: QueueMemory) -> Self {
        let grant = ctrl.grant(qid, NS).unwrap();
        let (sq, cq) = (memory.sq.clone(), memory.cq.clone());
        let pair = QueuePair::new(ctrl.bus(), grant.qid, grant.depth, sq, cq).unwrap();
        Self { memory, pair }
    }

    fn flush(&mut self, ctrl: &Controller) -> Option<Completion> {
        self.pair.post(&Sqe::new(NvmOpcode::FLUSH.0, Cid(0), NS), 42).unwrap();
        self.pair.update_tail();
        let mut found = None;
        for idle in 0..200 {
            self.pair.reap(8, |completion| found = Some(completion)).unwrap();
            if found.is_some() {
                break;
            }
            ctrl.clock().pause(idle, nvme_driver::Nanos::MAX);
        }
        found
    }
}

#[test]
fn a_grant_has_what_an_executor_needs() {
    let rig = Rig::new(EmuConfig { dstrd: 2, ..EmuConfig::new("emu0") });
    let mut ctrl = rig.attach();
    let qid = ctrl.create_queue_pair(128).unwrap();
    let grant = ctrl.grant(qid, NS).unwrap();
    assert_eq!((grant.depth, grant.lbas, grant.lba_shift), (128, LBAS, 9));
    assert_eq!((grant.descriptor_bytes, grant.transfer_bytes_max), (4096, 512 << 10));
    assert_eq!(grant.descriptor_mode, DescriptorMode::Sgl { bit_bucket: true, granularity: 1 });
    let base = ctrl.bus().doorbells().host().as_ptr().expose_provenance() as u64;
    assert_eq!(grant.sq_doorbell.host, Some(base + u64::from(qid.0) * 2 * 16));
    assert_eq!(grant.cq_doorbell.host, Some(base + (u64::from(qid.0) * 2 + 1) * 16));
    assert!(matches!(ctrl.grant(qid, NS), Err(Error::QueueState { .. })), "granted once");
    assert!(matches!(ctrl.shutdown(), Err(Error::QueueState { .. })), "granted");
    reclaim(&mut ctrl, qid).unwrap();
    assert!(matches!(ctrl.grant(qid, NS), Err(Error::QueueState { .. })), "deleted");
    ctrl.shutdown().unwrap();
}

#[test]
fn a_proof_takes_back_only_the_grants_it_names() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let executor = Executor::new(&rig, &mut ctrl, 32);
    let qid = executor.pair.qid();
    let first = quiesced(&ctrl);
    let other = ctrl.create_queue_pair(16).unwrap();
    ctrl.grant(other, NS).unwrap();
    let refused = |result: Result<(), Error>| {
        assert!(matches!(result, Err(Error::QueueState { .. })), "{result:?}");
    };
    // Neither another queue's proof nor one from before a new grant.
    refused(ctrl.reclaim(other, &first).map(|_| ()));
    refused(ctrl.recover(&first).map(|_| ()));
    refused(ctrl.reclaim(qid, &Quiesced::default()).map(|_| ()));
    assert_eq!(ctrl.grants().count(), 2);
    recover(&mut ctrl).unwrap();
    let mut executor = Executor::start(&mut ctrl, qid, executor.memory);
    refused(ctrl.reclaim(qid, &first).map(|_| ()));
    assert!(executor.flush(&ctrl).unwrap().status.is_success());
    // A queue that was never granted needs no proof.
    ctrl.reclaim(other, &Quiesced::default()).unwrap();
    reclaim(&mut ctrl, qid).unwrap();
}

#[test]
fn a_reset_that_cannot_make_queues_anew_ends() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    ctrl.create_queue_pair(16).unwrap();
    let when = FaultWhen { every: Some(2), ..admin(AdminOpcode::CREATE_IO_CQ.0) };
    rig.faults([always(when, FaultAction::Drop)]);
    let error = ctrl.reset().unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert!(matches!(ctrl.state(), State::Failed(FailCause::AdminTimeout { .. })));
    rig.faults([]);
    ctrl.reset().unwrap();
    ctrl.flush(NS).unwrap();
}

#[test]
fn prp_grants_are_limited_by_their_area() {
    let rig = Rig::new(EmuConfig { mdts_bytes: None, ..EmuConfig::new("emu0") });
    let options = ControllerOptions {
        descriptors: DescriptorPreference::Prp,
        descriptor_bytes: 128,
        ..Default::default()
    };
    let mut ctrl = rig.attach_with(options).unwrap();
    let qid = ctrl.create_queue_pair(0).unwrap();
    let grant = ctrl.grant(qid, NS).unwrap();
    assert_eq!((grant.descriptor_bytes, grant.transfer_bytes_max), (128, 16 * 4096));
    assert_eq!(grant.depth, 256, "depth 0 means the option's");
    reclaim(&mut ctrl, qid).unwrap();
}

#[test]
fn depths_and_memory_are_checked() {
    let rig = Rig::new(EmuConfig { mqes: 100, ..EmuConfig::new("emu0") });
    let mut ctrl = rig.attach();
    for depth in [1, 3, 128, 1 << 20] {
        let error = ctrl.create_queue_pair(depth).unwrap_err();
        assert!(matches!(error, Error::QueueState { .. }), "{depth}: {error}");
    }
    let qid = ctrl.create_queue_pair(0).unwrap();
    assert_eq!(ctrl.grant(qid, NS).unwrap().depth, 64, "cut to MQES");
    let good = Executor::memory(&rig, 64);
    let sq = good.sq.memory().clone();
    let misaligned =
        QueueMemory { sq: nvme_driver::DmaSlice::new(sq, 64, 32 * 64).unwrap(), ..good.clone() };
    assert!(matches!(ctrl.create_queue_pair_in(misaligned), Err(Error::QueueState { .. })));
    let short = QueueMemory { cq: good.cq.slice(0, 100).unwrap(), ..good.clone() };
    assert!(matches!(ctrl.create_queue_pair_in(short), Err(Error::QueueState { .. })));
    let bare = QueueMemory { descriptors: good.descriptors.slice(0, 64).unwrap(), ..good };
    assert!(matches!(ctrl.create_queue_pair_in(bare), Err(Error::QueueState { .. })));
    reclaim(&mut ctrl, qid).unwrap();
}

#[test]
fn queues_run_out_and_come_back() {
    let rig = Rig::good();
    let options = ControllerOptions { io_queues: 3, ..Default::default() };
    let mut ctrl = rig.attach_with(options).unwrap();
    let qids: Vec<_> = (0..3).map(|_| ctrl.create_queue_pair(16).unwrap()).collect();
    assert!(matches!(ctrl.create_queue_pair(16), Err(Error::QueueState { .. })));
    reclaim(&mut ctrl, qids[1]).unwrap();
    assert_eq!(ctrl.create_queue_pair(16).unwrap(), qids[1]);
}

#[test]
fn a_refused_queue_leaves_nothing_behind() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let before = rig.domain.mapped().len();
    let then = FaultAction::Status { code: Status::INVALID_QUEUE_SIZE.0, dnr: true };
    for opcode in [AdminOpcode::CREATE_IO_CQ, AdminOpcode::CREATE_IO_SQ] {
        rig.faults([always(admin(opcode.0), then)]);
        let error = ctrl.create_queue_pair(64).unwrap_err();
        assert_eq!(error.status().map(Status::code), Some(Status::INVALID_QUEUE_SIZE));
        assert_eq!(rig.domain.mapped().len(), before);
        rig.faults([]);
        let qid = ctrl.create_queue_pair(64).unwrap();
        reclaim(&mut ctrl, qid).unwrap();
        assert_eq!(rig.domain.mapped().len(), before);
    }
}

#[test]
fn recovery_deletes_queues_and_grants_them_anew() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let mut executor = Executor::new(&rig, &mut ctrl, 32);
    assert!(executor.flush(&ctrl).unwrap().status.is_success());
    rig.faults([always(io(NvmOpcode::FLUSH.0), FaultAction::Drop)]);
    assert!(executor.flush(&ctrl).is_none());
    let Executor { memory, pair } = executor;
    let qid = pair.qid();
    drop(pair);
    let recovered = recover(&mut ctrl).unwrap();
    assert_eq!((recovered.level, recovered.queues), (RecoveryLevel::Queues, vec![qid]));
    rig.faults([]);
    let mut executor = Executor::start(&mut ctrl, qid, memory);
    for _ in 0..100 {
        assert!(executor.flush(&ctrl).unwrap().status.is_success());
    }
    ctrl.flush(NS).unwrap();
}

#[test]
fn a_recovery_survives_any_one_admin_command_that_goes_wrong() {
    let busy = FaultAction::Status { code: Status::INTERNAL_ERROR.0, dnr: true };
    for then in [FaultAction::Drop, busy, FaultAction::WrongCid, FaultAction::FatalStatus] {
        for nth in 1..=12 {
            let rig = Rig::good();
            let mut ctrl = rig.attach();
            let executor = Executor::new(&rig, &mut ctrl, 32);
            let (qid, memory) = (executor.pair.qid(), executor.memory);
            let when = FaultWhen { admin: Some(true), nth: Some(nth), ..FaultWhen::default() };
            rig.faults([always(when, then)]);
            let recovered = recover(&mut ctrl);
            recovered.unwrap_or_else(|error| panic!("{then:?} of command {nth}: {error}"));
            let mut executor = Executor::start(&mut ctrl, qid, memory);
            assert!(executor.flush(&ctrl).unwrap().status.is_success());
        }
    }
}

#[test]
fn recovery_resets_when_queues_cannot_be_deleted() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let executor = Executor::new(&rig, &mut ctrl, 32);
    rig.faults([always(admin(AdminOpcode::DELETE_IO_SQ.0), FaultAction::Drop)]);
    let qid = executor.pair.qid();
    let recovered = recover(&mut ctrl).unwrap();
    assert_eq!((recovered.level, recovered.queues), (RecoveryLevel::Controller, vec![qid]));
    rig.faults([]);
    let mut executor = Executor::start(&mut ctrl, qid, executor.memory);
    assert!(executor.flush(&ctrl).unwrap().status.is_success());
    ctrl.write(NS, Lba(0), &[7; 512], true).unwrap();
}

#[test]
fn a_stuck_queue_keeps_its_memory_until_recovery() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let executor = Executor::new(&rig, &mut ctrl, 32);
    let (qid, sq) = (executor.pair.qid(), executor.memory.sq.iova());
    let kept = |rig: &Rig| rig.domain.mapped().iter().any(|part| part.iova == sq);
    drop(executor);
    rig.faults([always(admin(AdminOpcode::DELETE_IO_SQ.0), FaultAction::Drop)]);
    assert!(matches!(reclaim(&mut ctrl, qid), Err(Error::Failed { .. })));
    assert_eq!(ctrl.state(), State::Failed(FailCause::QueueStuck { qid }));
    assert!(kept(&rig));
    rig.faults([]);
    assert_eq!(recover(&mut ctrl).unwrap().level, RecoveryLevel::Controller);
    reclaim(&mut ctrl, qid).unwrap();
    assert!(!kept(&rig));
}

#[test]
fn memory_is_not_handed_out_after_a_recovery_that_failed() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let executor = Executor::new(&rig, &mut ctrl, 32);
    let (qid, sq) = (executor.pair.qid(), executor.memory.sq.iova());
    drop(executor);
    rig.emu.set_faults(FaultPlan {
        rules: vec![always(admin(AdminOpcode::DELETE_IO_SQ.0), FaultAction::Drop)],
        registers: RegisterFaults {
            rdy_never_clears: true,
            no_function_reset: true,
            ..Default::default()
        },
        ..FaultPlan::default()
    });
    recover(&mut ctrl).unwrap_err();
    assert!(matches!(reclaim(&mut ctrl, qid), Err(Error::Failed { .. })));
    drop(ctrl);
    let mapped = rig.domain.mapped();
    assert!(mapped.iter().any(|part| part.iova == sq), "the device may still use the queue");
}

#[test]
fn a_reset_behind_an_executors_back_voids_its_grant() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let executor = Executor::new(&rig, &mut ctrl, 32);
    let idle = ctrl.create_queue_pair(16).unwrap();
    let qid = executor.pair.qid();
    rig.faults([
        always(io(NvmOpcode::READ.0), FaultAction::Drop),
        always(admin(AdminOpcode::ABORT.0), FaultAction::Drop),
        always(admin(AdminOpcode::DELETE_IO_SQ.0), FaultAction::Drop),
    ]);
    let error = ctrl.read(NS, Lba(0), &mut [0; 512]).unwrap_err();
    let reset = TimeoutOutcome::ControllerReset;
    assert!(matches!(error, Error::Timeout { outcome, .. } if outcome == reset), "{error}");
    rig.faults([]);
    ctrl.grant(idle, NS).unwrap();
    let recovered = recover(&mut ctrl).unwrap();
    assert_eq!(recovered.level, RecoveryLevel::Queues);
    assert_eq!(recovered.queues, [qid, idle]);
    let mut executor = Executor::start(&mut ctrl, qid, executor.memory);
    assert!(executor.flush(&ctrl).unwrap().status.is_success());
}

#[test]
fn grants_that_were_not_taken_back_keep_their_memory() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let executor = Executor::new(&rig, &mut ctrl, 32);
    let sq = executor.memory.sq.iova();
    drop(executor);
    drop(ctrl);
    assert!(rig.domain.mapped().iter().any(|part| part.iova == sq));
}

#[test]
fn the_smallest_queue_gives_every_entry_back() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let mut executor = Executor::new(&rig, &mut ctrl, 2);
    for _ in 0..10 {
        assert!(executor.flush(&ctrl).unwrap().status.is_success());
    }
    assert_eq!(rig.emu.counters().cq_full_waits, 0);
}

#[test]
fn a_shutdown_deletes_the_queues_first() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    ctrl.create_queue_pair(16).unwrap();
    for opcode in [AdminOpcode::DELETE_IO_SQ, AdminOpcode::DELETE_IO_CQ] {
        // A delay of 1 ns only counts the commands.
        rig.faults([always(admin(opcode.0), FaultAction::Delay { ns: 1 })]);
        let before = rig.emu.counters().faults;
        ctrl.shutdown().unwrap();
        assert_eq!(rig.emu.counters().faults - before, 2, "{opcode}");
        rig.faults([]);
        ctrl = rig.attach();
        ctrl.create_queue_pair(16).unwrap();
    }
}

#[test]
fn a_queue_pair_wraps_around_many_times() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let mut executor = Executor::new(&rig, &mut ctrl, 8);
    let flush = Sqe::new(NvmOpcode::FLUSH.0, Cid(0), NS);
    let (mut posted, mut seen, mut idle) = (0u64, 0u64, 0);
    while seen < 2000 {
        while posted < 2000 && executor.pair.post(&flush, posted).is_ok() {
            posted += 1;
        }
        assert!(executor.pair.outstanding() <= 7);
        executor.pair.update_tail();
        let count = executor.pair.reap(8, |completion| {
            assert!(completion.status.is_success() && !completion.late);
            seen += 1;
        });
        idle = if count.unwrap() > 0 { 0 } else { idle + 1 };
        ctrl.clock().pause(idle, nvme_driver::Nanos::MAX);
    }
    assert_eq!((posted, executor.pair.outstanding()), (2000, 0));
}
