//! Attaching to a controller, and controllers for which it fails.

use nvme_driver::{
    Clock, Controller, ControllerOptions, DescriptorMode, DescriptorPreference, Error, LbaRange,
    NamespaceError, Nanos, Quiesced, State,
};
use nvme_emu::{
    EmuConfig, FaultAction, FaultPlan, FaultWhen, IdentifyOverrides, IdentifyPatch, MemoryMedia,
    RegisterFaults, SglSupport,
};
use nvme_spec::{
    admin::AdminOpcode,
    ids::{Lba, Nsid},
    status::Status,
};

use crate::{LBAS, Rig, SEED, admin, always, once};

fn refused(faults: FaultPlan) -> Error {
    let rig = Rig::new(EmuConfig::new("emu0").faults(faults));
    rig.attach_with(ControllerOptions::default()).expect_err("it must be refused")
}

fn identify(identify: IdentifyOverrides) -> FaultPlan {
    FaultPlan { seed: SEED, identify, ..FaultPlan::default() }
}

#[test]
fn a_good_drive_is_ready() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    assert_eq!(ctrl.state(), State::Ready);
    let info = ctrl.info();
    assert_eq!(info.model, "Ripieno software controller");
    assert_eq!(info.mdts_bytes, Some(512 << 10));
    assert_eq!(info.entries_max, 1024);
    assert!(info.vwc && info.io_queues >= 1);
    assert_eq!(info.descriptor_mode, DescriptorMode::Sgl { bit_bucket: true, granularity: 1 });
    let [namespace] = ctrl.namespaces() else { panic!("one namespace") };
    assert_eq!((namespace.nsid, namespace.lbas, namespace.lba_shift), (Nsid(1), LBAS, 9));
    ctrl.shutdown().unwrap();
    assert_eq!(ctrl.state(), State::Shutdown);
    assert!(matches!(ctrl.flush(Nsid(1)), Err(Error::Closed { .. })));
    assert!(matches!(ctrl.reset(), Err(Error::Closed { .. })));
    drop(ctrl);
    // It can be attached to again.
    rig.attach();
}

#[test]
fn descriptor_modes_follow_the_drive() {
    let mode = |sgl, descriptors| {
        let rig = Rig::new(EmuConfig { sgl, ..EmuConfig::new("emu0") });
        let options = ControllerOptions { descriptors, ..Default::default() };
        rig.attach_with(options).map(|ctrl| ctrl.info().descriptor_mode)
    };
    let prp = DescriptorMode::Prp { page_bytes: 4096 };
    assert_eq!(mode(SglSupport::None, DescriptorPreference::Auto).unwrap(), prp);
    assert_eq!(mode(SglSupport::Byte, DescriptorPreference::Prp).unwrap(), prp);
    assert!(matches!(
        mode(SglSupport::Dword, DescriptorPreference::Auto).unwrap(),
        DescriptorMode::Sgl { granularity: 4, .. }
    ));
    assert!(mode(SglSupport::None, DescriptorPreference::Sgl).is_err());
}

#[test]
fn registers_that_do_not_answer() {
    let stuck = RegisterFaults { stuck_rdy: true, ..Default::default() };
    let error = refused(FaultPlan { registers: stuck, ..FaultPlan::default() });
    assert!(matches!(error, Error::NotReady { ready: 1, .. }), "{error}");

    let rig = Rig::good();
    rig.emu.unplug();
    let error = rig.attach_with(ControllerOptions::default()).unwrap_err();
    assert!(matches!(error, Error::Gone { .. }), "{error}");
}

#[test]
fn a_reset_that_does_not_end_fails_the_controller() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let registers =
        RegisterFaults { rdy_never_clears: true, no_function_reset: true, ..Default::default() };
    rig.emu.set_faults(FaultPlan { registers, ..FaultPlan::default() });
    let error = ctrl.reset().unwrap_err();
    assert!(matches!(error, Error::NotReady { ready: 0, .. }), "{error}");
    assert!(matches!(ctrl.state(), State::Failed(_)));
    assert!(matches!(ctrl.flush(Nsid(1)), Err(Error::Failed { .. })));
    // Once it behaves again, a reset revives it.
    rig.emu.set_faults(FaultPlan::default());
    ctrl.reset().unwrap();
    ctrl.flush(Nsid(1)).unwrap();
}

/// CC.EN alone does not recover it.
#[test]
fn a_stuck_controller_is_reset_from_outside() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let registers = RegisterFaults { rdy_never_clears: true, ..Default::default() };
    rig.emu.set_faults(FaultPlan { registers, ..FaultPlan::default() });
    ctrl.reset().unwrap();
    ctrl.flush(Nsid(1)).unwrap();
}

/// Other controllers of the subsystem may be healthy and in use.
#[test]
fn the_subsystem_is_reset_only_when_somebody_asks_for_it() {
    let rig = Rig::new(EmuConfig { subsystem_reset: true, ..EmuConfig::new("emu0") });
    let mut ctrl = rig.attach();
    let registers =
        RegisterFaults { rdy_never_clears: true, no_function_reset: true, ..Default::default() };
    rig.emu.set_faults(FaultPlan { registers, ..FaultPlan::default() });
    assert!(matches!(ctrl.reset(), Err(Error::NotReady { ready: 0, .. })));
    assert!(ctrl.recover(&Quiesced::default()).is_err());
    drop(ctrl);
    rig.attach_with(ControllerOptions::default()).unwrap_err();
    assert_eq!(rig.emu.counters().subsystem_resets, 0, "nobody asked");
    let before = rig.clock.now();
    Controller::reset_subsystem(&*rig.emu.bus(), &*rig.clock).unwrap();
    assert_eq!(rig.emu.counters().subsystem_resets, 1);
    let waited = rig.clock.now() - before;
    assert!(waited >= Nanos::from_millis(400), "the link is down for a while: {waited:?}");
    rig.emu.set_faults(FaultPlan::default());
    rig.attach().flush(Nsid(1)).unwrap();
}

#[test]
fn a_subsystem_reset_needs_a_controller_that_has_one() {
    let rig = Rig::good();
    let error = Controller::reset_subsystem(&*rig.emu.bus(), &*rig.clock).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    rig.emu.unplug();
    let error = Controller::reset_subsystem(&*rig.emu.bus(), &*rig.clock).unwrap_err();
    assert!(matches!(error, Error::Gone { .. }), "{error}");
}

#[test]
fn what_goes_wrong_once_in_a_reset_is_tried_again() {
    for opcode in [AdminOpcode::IDENTIFY, AdminOpcode::SET_FEATURES, AdminOpcode::CREATE_IO_CQ] {
        for then in [FaultAction::Drop, FaultAction::WrongCid, FaultAction::FatalStatus] {
            let rig = Rig::good();
            let mut ctrl = rig.attach();
            rig.faults([once(admin(opcode.0), then)]);
            ctrl.reset().unwrap_or_else(|error| panic!("{opcode}, {then:?}: {error}"));
            ctrl.flush(Nsid(1)).unwrap();
        }
    }
}

#[test]
fn known_drives_are_treated_as_they_need() {
    // Huawei, by the vendor in Identify: SGLs are advertised but not used.
    let patch = IdentifyPatch { cns: 1, offset: 0, bytes: 0x19e5u16.to_le_bytes().to_vec() };
    let plan = identify(IdentifyOverrides { patches: vec![patch], ..Default::default() });
    let rig = Rig::new(EmuConfig::new("emu0").faults(plan));
    let mode = rig.attach().info().descriptor_mode;
    assert_eq!(mode, DescriptorMode::Prp { page_bytes: 4096 });
    // Samsung, by PCI identifiers: one waits after a reset, the other has no Write Zeroes.
    let of = |device| EmuConfig { pci_id: Some((0x144d, device)), ..EmuConfig::new("emu0") };
    let rig = Rig::new(of(0xa822));
    let mut ctrl = rig.attach();
    let before = rig.clock.now();
    ctrl.reset().unwrap();
    assert!(rig.clock.now() - before >= Nanos::from_millis(2_300));
    let mut ctrl = Rig::new(of(0xa80b)).attach();
    let range = LbaRange { lba: Lba(0), lbas: 1 };
    let error = ctrl.write_zeroes(Nsid(1), range, false).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}

#[test]
fn a_slow_drive_is_waited_for() {
    let registers = RegisterFaults { slow_rdy_ns: Some(2_000_000_000), ..Default::default() };
    let plan = FaultPlan { registers, ..FaultPlan::default() };
    let rig = Rig::new(EmuConfig::new("emu0").faults(plan));
    rig.attach();
}

#[test]
fn lies_about_the_controller_are_refused() {
    let lie = |overrides: IdentifyOverrides| {
        let error = refused(identify(overrides));
        assert!(matches!(error, Error::Implausible { .. }), "{error}");
    };
    lie(IdentifyOverrides { mdts: Some(200), ..Default::default() });
    lie(IdentifyOverrides { sqes: Some(0x77), ..Default::default() });
    // An active namespace list that is not ascending.
    let bytes = [9u32, 9].iter().flat_map(|n| n.to_le_bytes()).collect();
    let patches = vec![IdentifyPatch { cns: 2, offset: 0, bytes }];
    lie(IdentifyOverrides { patches, ..Default::default() });
    // A list that never ends: every page is full.
    let bytes = (1..=1024u32).flat_map(u32::to_le_bytes).collect();
    let patches = vec![IdentifyPatch { cns: 2, offset: 0, bytes }];
    lie(IdentifyOverrides { patches, ..Default::default() });
}

#[test]
fn any_identify_page_is_an_answer() {
    // Pages of one repeated byte: an error or a controller, never a panic.
    for byte in [0x00, 0x01, 0x44, 0x7F, 0x80, 0xFF] {
        for cns in [0u8, 1, 2, 3] {
            let patches = vec![IdentifyPatch { cns, offset: 0, bytes: vec![byte; 4096] }];
            let plan = identify(IdentifyOverrides { patches, ..Default::default() });
            let rig = Rig::new(EmuConfig::new("emu0").faults(plan));
            let _ = rig.attach_with(ControllerOptions::default());
        }
    }
}

/// The emulator's list has an EUI64 (12 bytes), an NGUID (20), and the command set.
#[test]
fn a_namespace_of_another_command_set_is_refused_in_words() {
    for (csi, words) in [
        (1u8, "it is a key value namespace"),
        (2, "it is a zoned namespace"),
        (9, "it is a namespace of the command set 0x09"),
    ] {
        let patches = vec![IdentifyPatch { cns: 3, offset: 32, bytes: vec![4, 1, 0, 0, csi] }];
        let plan = identify(IdentifyOverrides { patches, ..Default::default() });
        let rig = Rig::new(EmuConfig::new("emu0").faults(plan));
        let ctrl = rig.attach();
        assert_eq!(ctrl.namespaces(), []);
        let (nsid, why) = &ctrl.refused_namespaces()[0];
        assert_eq!(*nsid, Nsid(1));
        assert!(why.to_string().starts_with(words), "{why}");
        let error = ctrl.namespace(Nsid(1)).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    // Without descriptors it is an ordinary one.
    let patches = vec![IdentifyPatch { cns: 3, offset: 0, bytes: vec![0; 4096] }];
    let plan = identify(IdentifyOverrides { patches, ..Default::default() });
    let rig = Rig::new(EmuConfig::new("emu0").faults(plan));
    assert_eq!(rig.attach().namespaces().len(), 1);
}

#[test]
fn one_namespace_that_cannot_be_identified_spares_the_others() {
    let config = EmuConfig::new("emu0").namespace(MemoryMedia::new(1 << 20).unwrap(), 512);
    let rig = Rig::new(config);
    let code = Status::INTERNAL_ERROR.0;
    let when = FaultWhen { nsid: Some(1), ..admin(AdminOpcode::IDENTIFY.0) };
    rig.faults([always(when, FaultAction::Status { code, dnr: true })]);
    let mut ctrl = rig.attach();
    assert!(matches!(ctrl.refused_namespaces(), [(Nsid(1), NamespaceError::Identify { .. })]));
    ctrl.flush(Nsid(2)).unwrap();
}

#[test]
fn unusable_namespaces_say_why() {
    let why = |overrides: IdentifyOverrides| {
        let rig = Rig::new(EmuConfig::new("emu0").faults(identify(overrides)));
        let mut ctrl = rig.attach();
        assert!(ctrl.namespaces().is_empty());
        match ctrl.read(Nsid(1), Lba(0), &mut [0; 512]).unwrap_err() {
            Error::Namespace { source, .. } => source,
            other => panic!("{other}"),
        }
    };
    assert_eq!(
        why(IdentifyOverrides { nsze: Some(0), ..Default::default() }),
        NamespaceError::Empty
    );
    assert_eq!(
        why(IdentifyOverrides { lbads: Some(40), ..Default::default() }),
        NamespaceError::LbaSize { lbads: 40 }
    );
    let rig = Rig::good();
    let error = rig.attach().flush(Nsid(77)).unwrap_err();
    assert!(matches!(error, Error::Namespace { source: NamespaceError::Unknown, .. }), "{error}");
}
