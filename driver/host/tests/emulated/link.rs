//! PCIe errors that the platform recovers from: the link is down for a while, and back without the
//! function's BARs.

use nvme_driver::{Clock, Controller, ControllerEvent, Error, FailCause, Nanos, State};
use nvme_emu::FaultAction;
use nvme_spec::{
    ids::{Lba, Nsid},
    nvm::NvmOpcode,
};

use crate::{LBA, Rig, io, once, pattern};

const NS: Nsid = Nsid(1);

/// Returns a controller whose next read takes the link down, and what is stored on it.
fn rig(down: Nanos) -> (Rig, Controller, Vec<u8>) {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let data = pattern(64 * LBA, 3);
    ctrl.write(NS, Lba(0), &data, false).unwrap();
    rig.faults([once(io(NvmOpcode::READ.0), FaultAction::LinkLoss { ns: down.0 })]);
    (rig, ctrl, data)
}

fn works(ctrl: &mut Controller, data: &[u8]) {
    assert_eq!(ctrl.state(), State::Ready);
    let mut back = vec![0; data.len()];
    ctrl.read(NS, Lba(0), &mut back).unwrap();
    assert!(back == data);
}

/// The driver's own command finds the registers all ones, before or after the platform says why.
#[test]
fn a_link_that_is_down_when_it_is_looked_at_is_waited_for() {
    let (rig, mut ctrl, data) = rig(Nanos::from_millis(200));
    let error = ctrl.read(NS, Lba(0), &mut [0; LBA]).unwrap_err();
    assert!(matches!(error, Error::Gone { .. }), "{error}");
    let before = rig.clock.now();
    ctrl.reset().unwrap();
    let waited = rig.clock.now() - before;
    assert!(waited > Nanos::from_millis(50) && waited < Nanos::from_millis(1_000), "{waited:?}");
    works(&mut ctrl, &data);
}

/// Takes the link down with a command that nobody waits for, and lets this much time pass.
fn lost(down: u64, passed: u64) -> (Rig, Controller, Vec<u8>) {
    let (rig, ctrl, data) = rig(Nanos::from_millis(1));
    rig.faults([]);
    rig.emu.lose_link(Nanos::from_millis(down));
    rig.clock.run_for(Nanos::from_millis(passed));
    (rig, ctrl, data)
}

#[test]
fn an_error_is_an_event_whether_the_link_is_down_or_back() {
    for passed in [50, 500] {
        let (_rig, mut ctrl, data) = lost(200, passed);
        let events = ctrl.poll_events().unwrap();
        assert_eq!(events, [ControllerEvent::PcieError], "after {passed} ms");
        ctrl.reset().unwrap();
        works(&mut ctrl, &data);
        assert_eq!(ctrl.poll_events().unwrap(), [], "once");
    }
}

/// Registers are all ones before the kernel's handler has run.
#[test]
fn an_error_that_is_reported_late_is_not_a_removal() {
    let (_rig, mut ctrl, data) = lost(200, 5);
    assert!(matches!(ctrl.poll_events(), Err(Error::Gone { .. })));
    assert!(matches!(ctrl.state(), State::Failed(FailCause::Gone)));
    ctrl.reset().unwrap();
    works(&mut ctrl, &data);
}

#[test]
fn a_link_that_does_not_come_back_is_waited_for_10_s() {
    let (rig, mut ctrl, _) = lost(60_000, 50);
    assert_eq!(ctrl.poll_events().unwrap(), [ControllerEvent::PcieError]);
    let before = rig.clock.now();
    assert!(matches!(ctrl.reset(), Err(Error::Gone { .. })));
    let waited = rig.clock.now() - before;
    assert!(waited >= Nanos::from_millis(10_000) && waited < Nanos::from_millis(11_000));
}

#[test]
fn a_drive_that_was_pulled_out_is_waited_for_1_s() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    rig.emu.unplug();
    assert!(matches!(ctrl.poll_events(), Err(Error::Gone { .. })));
    let before = rig.clock.now();
    assert!(matches!(ctrl.reset(), Err(Error::Gone { .. })));
    let waited = rig.clock.now() - before;
    assert!(waited >= Nanos::from_millis(1_000) && waited < Nanos::from_millis(2_000));
}
