//! Failed commands that are retried.

use nvme_driver::{Clock, Nanos};
use nvme_emu::{FaultAction, FaultPlan, IdentifyOverrides, IdentifyPatch};
use nvme_spec::{
    admin::AdminOpcode,
    ids::{Lba, Nsid},
    nvm::NvmOpcode,
    status::Status,
};

use crate::{LBA, Rig, SEED, admin, always, io, pattern};

const NS: Nsid = Nsid(1);
const READ: u8 = NvmOpcode::READ.0;

fn not_ready(dnr: bool) -> FaultAction {
    FaultAction::Status { code: Status::NAMESPACE_NOT_READY.0, dnr }
}

#[test]
fn what_may_be_retried_is_retried_and_not_for_ever() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let data = pattern(4096 * LBA, 3);
    ctrl.write(NS, Lba(0), &data, false).unwrap();
    let mut back = vec![0; data.len()];
    // Number of failures, Do Not Retry, expected success, number of failed commands.
    for (failures, dnr, expected, sent) in
        [(3, false, true, 3), (100, false, false, 5), (100, true, false, 1)]
    {
        let one = nvme_emu::LbaRange { first: 100, count: 1 };
        let when = nvme_emu::FaultWhen { lbas: Some(one), ..io(READ) };
        rig.faults([always(when, not_ready(dnr)).limit(failures)]);
        let before = rig.emu.counters().faults;
        let result = ctrl.read(NS, Lba(0), &mut back);
        assert_eq!(result.is_ok(), expected, "{failures}, {dnr}: {result:?}");
        assert_eq!(rig.emu.counters().faults - before, sent, "{failures}, {dnr}");
        if expected {
            assert!(back == data);
        }
    }
    rig.faults([]);
    ctrl.read(NS, Lba(0), &mut back).unwrap();
    assert!(back == data);
}

#[test]
fn admin_commands_too() {
    let rig = Rig::good();
    rig.faults([always(admin(AdminOpcode::IDENTIFY.0), not_ready(false)).limit(4)]);
    let mut ctrl = rig.attach();
    rig.faults([always(admin(AdminOpcode::GET_LOG_PAGE.0), not_ready(false))]);
    let before = rig.emu.counters().admin_commands;
    assert!(ctrl.smart_log().unwrap_err().status().is_some());
    assert_eq!(rig.emu.counters().admin_commands - before, 5);
}

#[test]
fn the_controller_says_how_long_to_wait() {
    // Command Retry Delay Times 1 to 3: 0.1 s, 2 s, 0.3 s.
    let bytes = [1u16, 20, 3].iter().flat_map(|time| time.to_le_bytes()).collect();
    let patches = vec![IdentifyPatch { cns: 1, offset: 128, bytes }];
    let identify = IdentifyOverrides { patches, ..Default::default() };
    let code = Status::NAMESPACE_NOT_READY.0 | 2 << 11;
    let then = FaultAction::Status { code, dnr: false };
    let rules = vec![always(io(READ), then).limit(1)];
    let rig = Rig::good();
    rig.emu.set_faults(FaultPlan { seed: SEED, identify, rules, ..FaultPlan::default() });
    let mut ctrl = rig.attach();
    let before = rig.clock.now();
    ctrl.read(NS, Lba(0), &mut [0; LBA]).unwrap();
    let waited = rig.clock.now() - before;
    assert!(waited >= Nanos::from_millis(2_000), "{waited:?}");
}
