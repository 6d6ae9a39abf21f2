//! Placement handles: discovered on drives that have them, not needed on others.

use nvme_driver::{ControllerOptions, DescriptorPreference, Error, State, WriteOptions};
use nvme_emu::{EmuConfig, FaultAction, FaultPlan, PlacementConfig};
use nvme_spec::{
    admin::{AdminOpcode, FormatNvm},
    ids::{Lba, Nsid},
    nvm::NvmOpcode,
    status::Status,
};

use crate::{LBA, Rig, SEED, admin, always, io, once, pattern};

const NS: Nsid = Nsid(1);
const PLACEMENT: PlacementConfig = PlacementConfig { handles: 4, reclaim_unit_bytes: 8 << 20 };

fn config() -> EmuConfig {
    EmuConfig { placement: Some(PLACEMENT), ..EmuConfig::new("emu0") }
}

fn refuse(rules: impl IntoIterator<Item = nvme_emu::FaultRule>) -> Rig {
    let rules = rules.into_iter().collect();
    let faults = FaultPlan { seed: SEED, rules, ..FaultPlan::default() };
    Rig::new(EmuConfig { faults, ..config() })
}

fn status(status: Status) -> FaultAction {
    FaultAction::Status { code: status.0, dnr: true }
}

#[test]
fn handles_are_found_and_can_be_written_to() {
    for descriptors in [DescriptorPreference::Auto, DescriptorPreference::Prp] {
        let rig = Rig::new(config());
        let options = ControllerOptions { descriptors, ..Default::default() };
        let mut ctrl = rig.attach_with(options).unwrap();
        let namespace = &ctrl.namespaces()[0];
        assert_eq!((namespace.endurance_group, namespace.placement_handles()), (1, 4));
        assert_eq!(namespace.placement_ids, [0, 1, 2, 3]);
        assert_eq!(namespace.reclaim_unit_bytes, 8 << 20);
        let data = pattern(9000 * LBA, 1);
        for placement in [None, Some(0), Some(3)] {
            let options = WriteOptions { fua: true, placement };
            ctrl.write(NS, Lba(7), &data, options).unwrap();
            ctrl.write_dma(NS, Lba(20_000), &[rig.alloc(4096)], options).unwrap();
        }
        let mut back = vec![0; data.len()];
        ctrl.read(NS, Lba(7), &mut back).unwrap();
        assert!(back == data);
        let before = rig.emu.counters().commands;
        let beyond = WriteOptions { placement: Some(4), ..Default::default() };
        let error = ctrl.write(NS, Lba(0), &data, beyond).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("placement handle 4 of namespace 1, which has 4"));
        assert_eq!(rig.emu.counters().commands, before, "nothing was sent");
    }
}

#[test]
fn they_are_there_after_a_reset_and_a_format() {
    let rig = Rig::new(config());
    let mut ctrl = rig.attach();
    ctrl.reset().unwrap();
    assert_eq!(ctrl.namespaces()[0].placement_handles(), 4);
    ctrl.format(NS, FormatNvm { lbaf: 1, ..Default::default() }).unwrap();
    assert_eq!((ctrl.namespaces()[0].placement_handles(), ctrl.namespaces()[0].lba_shift), (4, 12));
}

#[test]
fn a_drive_without_them_is_asked_nothing_and_used() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let namespace = &ctrl.namespaces()[0];
    assert_eq!((namespace.placement_handles(), namespace.endurance_group), (0, 0));
    assert_eq!(namespace.deallocate_granularity_lbas, 1);
    let options = WriteOptions { placement: Some(0), ..Default::default() };
    let error = ctrl.write(NS, Lba(0), &[0; LBA], options).unwrap_err();
    assert!(error.to_string().contains("which has 0"), "{error}");
    assert_eq!(rig.emu.counters().errors, 0);
}

#[test]
fn a_drive_that_refuses_to_name_them_is_used_without() {
    let receive = NvmOpcode::IO_MANAGEMENT_RECEIVE.0;
    let feature = always(admin(AdminOpcode::GET_FEATURES.0), status(Status::INVALID_FIELD));
    let receive = always(io(receive), status(Status::FDP_DISABLED));
    for rule in [feature, receive] {
        let rig = refuse([rule]);
        let mut ctrl = rig.attach();
        assert_eq!(ctrl.namespaces()[0].placement_handles(), 0);
        ctrl.write(NS, Lba(0), &[1; LBA], true).unwrap();
    }
    let log = always(admin(AdminOpcode::GET_LOG_PAGE.0), status(Status::INVALID_LOG_PAGE));
    let ctrl = refuse([log]).attach();
    let namespace = &ctrl.namespaces()[0];
    assert_eq!((namespace.placement_handles(), namespace.reclaim_unit_bytes), (4, 0));
}

/// A lost answer costs a reset; attaching to a drive that never answers fails.
#[test]
fn a_drive_that_does_not_answer_ends_the_set_up() {
    let receive = io(NvmOpcode::IO_MANAGEMENT_RECEIVE.0);
    let rig = refuse([once(receive.clone(), FaultAction::Drop)]);
    assert_eq!(rig.attach().namespaces()[0].placement_handles(), 4);
    // Its queue cannot be recreated either: a reset for that would fail in the same way.
    let admin = [AdminOpcode::ABORT, AdminOpcode::DELETE_IO_SQ].map(|opcode| admin(opcode.0));
    let drop = |when| always(when, FaultAction::Drop);
    let rig = refuse(admin.map(drop).into_iter().chain([drop(receive)]));
    let error = rig.attach_with(ControllerOptions::default()).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert!(error.to_string().contains("reclaim unit handle status"), "{error}");
    // A drive that stops answering later fails: it was reset and could not be set up.
    let rig = Rig::new(config());
    let mut ctrl = rig.attach();
    rig.faults([always(io(NvmOpcode::IO_MANAGEMENT_RECEIVE.0), FaultAction::Drop)]);
    ctrl.rescan().unwrap_err();
    assert_eq!(ctrl.state(), State::Ready, "aborted, or its queue made anew");
    ctrl.reset().unwrap_err();
    assert!(matches!(ctrl.state(), State::Failed(_)));
}
