//! Logs, features, events, format.

use nvme_driver::{ControllerEvent, Error, FailCause, Nanos, State, platform::ring::Doorbell};
use nvme_emu::{FaultAction, FaultPlan, IdentifyOverrides, RegisterFaults};
use nvme_spec::{
    admin::FormatNvm,
    ids::{Lba, Nsid},
    nvm::NvmOpcode,
};

use crate::{LBA, Rig, io, once, pattern};

const NS: Nsid = Nsid(1);

#[test]
fn logs_and_identity() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    ctrl.write(NS, Lba(0), &pattern(4096 * LBA, 1), false).unwrap();
    assert!(ctrl.smart_log().unwrap().temperature_kelvin() > 0);
    ctrl.error_log().unwrap();
    ctrl.firmware_slot_log().unwrap();
    assert_eq!(ctrl.identify_namespace(NS).unwrap().nsze, ctrl.namespaces()[0].lbas);
}

#[test]
fn a_quiet_controller_has_no_events() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    assert_eq!(ctrl.poll_events().unwrap(), []);
    rig.emu.report_pcie_error();
    assert_eq!(ctrl.poll_events().unwrap(), [ControllerEvent::PcieError]);
    assert_eq!(ctrl.poll_events().unwrap(), []);
    rig.emu.unplug();
    assert!(matches!(ctrl.poll_events(), Err(Error::Gone { .. })));
    assert!(matches!(ctrl.state(), State::Failed(_)));
}

#[test]
fn one_poll_tells_what_the_bus_knows() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    rig.emu.request();
    assert_eq!(ctrl.poll_events().unwrap(), [ControllerEvent::Requested]);
    assert_eq!(ctrl.poll_events().unwrap(), [], "once");
    rig.emu.set_faults(FaultPlan {
        registers: RegisterFaults { paused: true, ..Default::default() },
        ..FaultPlan::default()
    });
    assert_eq!(ctrl.poll_events().unwrap(), [ControllerEvent::Paused]);
    rig.emu.set_faults(FaultPlan::default());
    assert_eq!(ctrl.poll_events().unwrap(), [ControllerEvent::Resumed]);
    rig.faults([once(io(NvmOpcode::FLUSH.0), FaultAction::FatalStatus)]);
    ctrl.flush(NS).unwrap_err();
    assert!(matches!(ctrl.poll_events(), Err(Error::Failed { cause: FailCause::Fatal, .. })));
}

#[test]
fn a_namespace_that_changed_makes_its_grants_stale() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let qid = ctrl.create_queue_pair(16).unwrap();
    ctrl.grant(qid, NS).unwrap();
    assert!(ctrl.stale_grants().is_empty());
    let identify = IdentifyOverrides { nsze: Some(77), ..Default::default() };
    rig.emu.set_faults(FaultPlan { identify, ..FaultPlan::default() });
    ctrl.rescan().unwrap();
    assert_eq!((ctrl.namespaces()[0].lbas, ctrl.stale_grants()), (77, vec![qid]));
}

#[test]
fn an_event_is_reported_and_asked_for_again() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    // More events than outstanding requests, so each must be replaced, and each event cleared.
    for tail in 1..=20 {
        // A doorbell of a nonexistent queue: the controller reports an error event.
        let bell = Doorbell::new(ctrl.bus(), 2 * 9).unwrap();
        bell.ring(tail);
        rig.clock.run_for(Nanos::from_millis(5));
        let events = ctrl.poll_events().unwrap();
        assert_eq!(events, [ControllerEvent::Error { info: 0 }], "{tail}");
        assert_eq!(ctrl.poll_events().unwrap(), []);
    }
    assert_eq!(ctrl.state(), State::Ready);
}

#[test]
fn format_loses_the_data_and_looks_again() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    ctrl.write(NS, Lba(0), &pattern(LBA, 1), false).unwrap();
    ctrl.format(NS, FormatNvm::default()).unwrap();
    let mut back = vec![1; LBA];
    ctrl.read(NS, Lba(0), &mut back).unwrap();
    assert!(back.iter().all(|b| *b == 0));
    assert_eq!(ctrl.namespaces().len(), 1);
}

/// A grant holds the LBA size, which a format may change.
#[test]
fn a_format_beside_a_granted_queue_is_refused() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let data = pattern(LBA, 1);
    ctrl.write(NS, Lba(0), &data, false).unwrap();
    let qid = ctrl.create_queue_pair(16).unwrap();
    ctrl.grant(qid, NS).unwrap();
    let error = ctrl.format(NS, FormatNvm::default()).unwrap_err().to_string();
    assert!(error.contains("is granted; reclaim() it before formatting"), "{error}");
    let mut back = vec![0; LBA];
    ctrl.read(NS, Lba(0), &mut back).unwrap();
    assert!(back == data, "nothing was formatted");
}
