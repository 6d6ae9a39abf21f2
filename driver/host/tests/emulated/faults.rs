//! Commands that fail, time out, or complete wrongly.

use std::sync::{Arc, Mutex};

use nvme_driver::{
    Clock, Controller, ControllerOptions, Error, FailCause, Nanos, State, TimeoutOutcome,
};
use nvme_emu::{Emu, FaultAction, FaultPlan, FaultWhen, LbaRange, RegisterFaults, SimClock};
use nvme_spec::{
    admin::{AdminOpcode, FeatureId, FormatNvm},
    ids::{Lba, Nsid, QueueId},
    nvm::NvmOpcode,
    status::Status,
};

use crate::{LBA, Rig, admin, always, io, once, pattern};

const NS: Nsid = Nsid(1);
const READ: u8 = NvmOpcode::READ.0;

fn outcome(error: &Error) -> TimeoutOutcome {
    match error {
        Error::Timeout { outcome, .. } => *outcome,
        other => panic!("expected a timeout, found: {other}"),
    }
}

#[test]
fn an_error_status_names_the_command() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let lbas = Some(LbaRange { first: 1030, count: 1 });
    let status = Status::UNRECOVERED_READ_ERROR;
    let then = FaultAction::Status { code: status.0, dnr: true };
    rig.faults([always(FaultWhen { lbas, ..io(READ) }, then)]);
    let mut back = vec![0; 4096 * LBA];
    let error = ctrl.read(NS, Lba(0), &mut back).unwrap_err();
    assert_eq!(error.status().map(Status::code), Some(status));
    let command = error.command().unwrap();
    assert_eq!((command.qid, command.nsid), (QueueId(1), NS));
    let (lba, lbas) = command.range.unwrap();
    assert!(lba.0 <= 1030 && 1030 < lba.0 + lbas, "{error}");
    let text = error.to_string();
    assert!(text.contains("emu0") && text.contains("Unrecovered Read Error"), "{text}");
    // The others were waited for, and the controller is still healthy.
    assert_eq!(ctrl.state(), State::Ready);
    rig.faults([]);
    ctrl.read(NS, Lba(0), &mut back).unwrap();
}

#[test]
fn a_lost_completion_climbs_the_ladder() {
    // Each case removes one more step: a held command can be aborted, a lost one cannot, and so on.
    let held = FaultAction::Delay { ns: 60_000_000_000 };
    let lost = FaultAction::Drop;
    let drop_always = |opcode: AdminOpcode| always(admin(opcode.0), FaultAction::Drop);
    let cases = [
        (held, vec![], TimeoutOutcome::Aborted),
        (lost, vec![], TimeoutOutcome::QueueRecreated),
        (
            held,
            vec![always(
                admin(AdminOpcode::ABORT.0),
                FaultAction::Status { code: Status::ABORT_LIMIT_EXCEEDED.0, dnr: false },
            )],
            TimeoutOutcome::QueueRecreated,
        ),
        (held, vec![drop_always(AdminOpcode::ABORT)], TimeoutOutcome::QueueRecreated),
        (
            held,
            vec![drop_always(AdminOpcode::ABORT), drop_always(AdminOpcode::DELETE_IO_SQ)],
            TimeoutOutcome::ControllerReset,
        ),
    ];
    for (case, (then, rungs, expected)) in cases.into_iter().enumerate() {
        let rig = Rig::good();
        let mut ctrl = rig.attach();
        ctrl.write(NS, Lba(0), &pattern(LBA, 3), false).unwrap();
        rig.faults(rungs.into_iter().chain([once(io(READ), then)]));
        let mut back = vec![0; LBA];
        let error = ctrl.read(NS, Lba(0), &mut back).unwrap_err();
        assert_eq!(outcome(&error), expected, "case {case}: {error}");
        assert_eq!(ctrl.state(), State::Ready, "case {case}");
        ctrl.read(NS, Lba(0), &mut back).unwrap();
        assert!(back == pattern(LBA, 3), "case {case}");
    }
}

#[test]
fn when_even_the_reset_fails_memory_is_kept() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let data = rig.alloc(4096);
    let range = data.iova();
    rig.emu.set_faults(FaultPlan {
        rules: vec![
            always(io(READ), FaultAction::Drop),
            always(admin(AdminOpcode::ABORT.0), FaultAction::Drop),
            always(admin(AdminOpcode::DELETE_IO_SQ.0), FaultAction::Drop),
        ],
        registers: RegisterFaults {
            rdy_never_clears: true,
            no_function_reset: true,
            ..Default::default()
        },
        ..FaultPlan::default()
    });
    let error = ctrl.read_dma(NS, Lba(0), std::slice::from_ref(&data)).unwrap_err();
    assert_eq!(outcome(&error), TimeoutOutcome::ControllerFailed);
    assert!(matches!(ctrl.state(), State::Failed(FailCause::NotReady { ready: 0, .. })));
    drop(data);
    drop(ctrl);
    let mapped = rig.domain.mapped();
    assert!(mapped.iter().any(|part| part.iova == range), "the caller's memory stays mapped");
}

#[test]
fn memory_of_a_dropped_controller_is_unmapped() {
    let rig = Rig::good();
    let before = rig.domain.mapped().len();
    let mut ctrl = rig.attach();
    ctrl.write(NS, Lba(0), &pattern(LBA, 1), false).unwrap();
    ctrl.create_queue_pair(64).unwrap();
    assert!(rig.domain.mapped().len() > before);
    drop(ctrl);
    assert_eq!(rig.domain.mapped().len(), before);
}

#[test]
fn a_late_completion_is_not_taken_for_another_ones() {
    let rig = Rig::good();
    let options = ControllerOptions {
        command_timeout: Nanos::from_millis(100),
        abort_grace: Nanos::from_millis(10),
        ..Default::default()
    };
    let mut ctrl = rig.attach_with(options).unwrap();
    let then = FaultAction::Delay { ns: 5_000_000_000 };
    rig.faults([once(io(READ), then)]);
    let mut back = vec![0; LBA];
    let error = ctrl.read(NS, Lba(0), &mut back).unwrap_err();
    assert_ne!(outcome(&error), TimeoutOutcome::ControllerFailed);
    for i in 0..50 {
        ctrl.write(NS, Lba(i), &pattern(LBA, i), false).unwrap();
        ctrl.read(NS, Lba(i), &mut back).unwrap();
        assert!(back == pattern(LBA, i));
        rig.clock.run_for(Nanos::from_millis(200));
    }
    assert_eq!(ctrl.state(), State::Ready);
}

#[test]
fn completions_that_cannot_be_right_fail_the_controller() {
    for then in [FaultAction::WrongCid, FaultAction::WrongSqhd, FaultAction::WrongSqid] {
        let rig = Rig::good();
        let mut ctrl = rig.attach();
        rig.faults([once(io(READ), then)]);
        let mut back = vec![0; LBA];
        let error = ctrl.read(NS, Lba(0), &mut back).unwrap_err();
        assert!(matches!(error, Error::Misbehaved { .. }), "{then:?}: {error}");
        assert!(matches!(ctrl.state(), State::Failed(FailCause::Misbehaved(_))), "{then:?}");
        let error = ctrl.read(NS, Lba(0), &mut back).unwrap_err();
        assert!(matches!(error, Error::Failed { .. }), "{error}");
        ctrl.reset().unwrap();
        ctrl.read(NS, Lba(0), &mut back).unwrap();
    }
}

#[test]
fn a_duplicate_completion_is_noticed() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    rig.faults([once(io(READ), FaultAction::Duplicate)]);
    let mut back = vec![0; LBA];
    // This call or a later one must see the duplicate.
    let found = (0..10).find_map(|_| ctrl.read(NS, Lba(0), &mut back).err());
    assert!(matches!(found, Some(Error::Misbehaved { .. })), "{found:?}");
}

#[test]
fn an_invisible_completion_is_a_timeout() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    rig.faults([once(io(READ), FaultAction::WrongPhase)]);
    let mut back = vec![0; LBA];
    let error = ctrl.read(NS, Lba(0), &mut back).unwrap_err();
    outcome(&error);
    assert_eq!(ctrl.state(), State::Ready);
    ctrl.read(NS, Lba(0), &mut back).unwrap();
}

#[test]
fn a_dead_controller_is_noticed_long_before_the_timeout() {
    for (then, cause) in
        [(FaultAction::Gone, FailCause::Gone), (FaultAction::FatalStatus, FailCause::Fatal)]
    {
        let rig = Rig::good();
        let mut ctrl = rig.attach();
        rig.faults([once(io(READ), then)]);
        let start = rig.clock.now();
        let mut back = vec![0; LBA];
        let error = ctrl.read(NS, Lba(0), &mut back).unwrap_err();
        assert!(matches!(error, Error::Gone { .. } | Error::Fatal { .. }), "{error}");
        assert_eq!(ctrl.state(), State::Failed(cause));
        assert!(rig.clock.now() - start < Nanos::from_millis(1_000));
        if cause == FailCause::Fatal {
            ctrl.reset().unwrap();
            ctrl.read(NS, Lba(0), &mut back).unwrap();
        } else {
            assert!(matches!(ctrl.reset(), Err(Error::Gone { .. })));
        }
    }
}

/// Cases: an admin command that is held or lost, and the outcome.
#[test]
fn an_admin_command_without_an_answer_is_no_reason_to_reset() {
    let held = FaultAction::Delay { ns: 1_000_000_000_000 };
    let lost = FaultAction::Drop;
    let cases = [
        (AdminOpcode::GET_LOG_PAGE, held, TimeoutOutcome::Aborted),
        (AdminOpcode::GET_LOG_PAGE, lost, TimeoutOutcome::Abandoned),
        (AdminOpcode::SET_FEATURES, held, TimeoutOutcome::Aborted),
        // Its effect is unknown.
        (AdminOpcode::SET_FEATURES, lost, TimeoutOutcome::ControllerReset),
        // Stopping halfway would leave the namespace unusable.
        (AdminOpcode::FORMAT_NVM, held, TimeoutOutcome::Abandoned),
    ];
    for (opcode, then, expected) in cases {
        let rig = Rig::good();
        let mut ctrl = rig.attach();
        let resets = rig.emu.counters().resets;
        rig.faults([once(admin(opcode.0), then)]);
        let error = match opcode {
            AdminOpcode::GET_LOG_PAGE => ctrl.smart_log().map(|_| ()),
            AdminOpcode::FORMAT_NVM => ctrl.format(NS, FormatNvm::default()),
            _ => ctrl.set_feature(FeatureId::ARBITRATION, Nsid(0), 2).map(|_| ()),
        };
        assert_eq!(outcome(&error.unwrap_err()), expected, "{opcode}");
        assert_eq!(ctrl.state(), State::Ready);
        let reset = expected == TimeoutOutcome::ControllerReset;
        assert_eq!(rig.emu.counters().resets - resets, u64::from(reset), "{opcode}");
        // The page that the command may still write is not reused.
        ctrl.smart_log().unwrap();
    }
}

#[test]
fn the_page_of_an_abandoned_command_is_kept_until_a_reset() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let mapped = rig.domain.mapped().len();
    rig.faults([once(admin(AdminOpcode::GET_LOG_PAGE.0), FaultAction::Drop)]);
    assert_eq!(outcome(&ctrl.smart_log().unwrap_err()), TimeoutOutcome::Abandoned);
    assert_eq!(rig.domain.mapped().len(), mapped + 1, "one more, for the commands to come");
    ctrl.smart_log().unwrap();
    ctrl.reset().unwrap();
    assert_eq!(rig.domain.mapped().len(), mapped);
}

#[test]
fn an_admin_command_that_is_only_slow_is_waited_for() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let refused = FaultAction::Status { code: Status::ABORT_LIMIT_EXCEEDED.0, dnr: true };
    rig.faults([
        once(admin(AdminOpcode::GET_LOG_PAGE.0), FaultAction::Delay { ns: 60_500_000_000 }),
        always(admin(AdminOpcode::ABORT.0), refused),
    ]);
    assert!(ctrl.smart_log().unwrap().temperature_kelvin() > 0);
}

#[test]
fn a_controller_that_answers_no_admin_command_is_reset_in_the_end() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    rig.faults([always(admin(AdminOpcode::GET_LOG_PAGE.0), FaultAction::Drop)]);
    let outcomes: Vec<_> = (0..9).map(|_| outcome(&ctrl.smart_log().unwrap_err())).collect();
    assert_eq!(outcomes[..8], [TimeoutOutcome::Abandoned; 8]);
    assert_eq!(outcomes[8], TimeoutOutcome::ControllerReset);
}

/// Virtual time in which the controller is paused until a certain point.
#[derive(Debug)]
struct Pausing {
    clock: Arc<SimClock>,
    emu: Arc<Emu>,
    until: Mutex<Nanos>,
}

impl Clock for Pausing {
    fn now(&self) -> Nanos {
        self.clock.now()
    }

    fn pause(&self, idle: u32, until: Nanos) {
        let paused = self.now() < *self.until.lock().unwrap();
        let registers = RegisterFaults { paused, ..Default::default() };
        self.emu.set_faults(FaultPlan { registers, ..FaultPlan::default() });
        self.clock.pause(idle, until);
    }
}

#[test]
fn a_pause_of_the_controller_does_not_count_against_deadlines_for_a_minute() {
    for (seconds, is_patient) in [(50, true), (500, false)] {
        let rig = Rig::good();
        let (clock, emu) = (rig.clock.clone(), rig.emu.clone());
        let clock = Arc::new(Pausing { clock, emu, until: Mutex::default() });
        let options = ControllerOptions::default();
        let mut ctrl = Controller::attach(rig.emu.bus(), clock.clone(), options).unwrap();
        let until = clock.now() + Nanos::from_millis(seconds * 1_000);
        *clock.until.lock().unwrap() = until;
        let result = ctrl.read(NS, Lba(0), &mut [0; LBA]);
        assert_eq!(result.is_ok(), is_patient, "{seconds} s: {result:?}");
    }
}

#[test]
fn attach_ends_when_admin_commands_do_not() {
    for opcode in [AdminOpcode::IDENTIFY, AdminOpcode::SET_FEATURES, AdminOpcode::CREATE_IO_SQ] {
        let rig = Rig::good();
        rig.faults([always(admin(opcode.0), FaultAction::Drop)]);
        let error = rig.attach_with(ControllerOptions::default()).unwrap_err();
        assert_eq!(outcome(&error), TimeoutOutcome::ControllerFailed, "{opcode}");
        rig.faults([]);
        rig.attach();
    }
}
