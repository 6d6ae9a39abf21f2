//! Passthrough commands.

use nvme_driver::{Error, Nanos, PassthroughData, State};
use nvme_spec::{
    admin::{AdminOpcode, Cns, FeatureId, GetLogPage, Identify, LogPageId, SetFeatures},
    ids::{Cid, Lba, Lbas, Nsid},
    nvm::{BlockRange, NvmOpcode},
    sqe::Sqe,
};

use crate::{LBA, Rig, pattern};

const NS: Nsid = Nsid(1);
const TIMEOUT: Nanos = Nanos::from_millis(10_000);

fn sqe(opcode: AdminOpcode) -> Sqe {
    Sqe::new(opcode.0, Cid(0), Nsid(0))
}

#[test]
fn admin_commands_reach_the_controller_as_they_are() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let mut identify = sqe(AdminOpcode::IDENTIFY);
    Identify { cns: Cns::CONTROLLER, ..Default::default() }.write_to(&mut identify);
    let mut page = [0; 4096];
    ctrl.admin_passthrough(identify, PassthroughData::In(&mut page), TIMEOUT).unwrap();
    assert_eq!(&page[24..27], &ctrl.info().model.as_bytes()[..3]);
    let mut feature = sqe(AdminOpcode::GET_FEATURES);
    feature.cdw10 = FeatureId::VOLATILE_WRITE_CACHE.0.into();
    assert_eq!(ctrl.admin_passthrough(feature, PassthroughData::None, TIMEOUT).unwrap() & 1, 1);
    // More pages than fit in PRP1 and PRP2.
    let mut log = sqe(AdminOpcode::GET_LOG_PAGE);
    GetLogPage { lid: LogPageId::ERROR, numd_z: 0x3fff, ..Default::default() }.write_to(&mut log);
    let mut page = vec![0xa5; 64 << 10];
    ctrl.admin_passthrough(log, PassthroughData::In(&mut page), TIMEOUT).unwrap();
    assert!(page[8192..].iter().all(|byte| *byte == 0));
    // The controller rejects unknown opcodes, not the driver.
    let error = ctrl.admin_passthrough(sqe(AdminOpcode(0xc0)), PassthroughData::None, TIMEOUT);
    assert!(error.unwrap_err().status().is_some());
}

#[test]
fn what_is_the_drivers_is_refused() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let feature = |fid| {
        let mut sqe = sqe(AdminOpcode::SET_FEATURES);
        SetFeatures { fid, ..Default::default() }.write_to(&mut sqe);
        sqe
    };
    let cases = [
        sqe(AdminOpcode::CREATE_IO_CQ),
        sqe(AdminOpcode::CREATE_IO_SQ),
        sqe(AdminOpcode::DELETE_IO_CQ),
        sqe(AdminOpcode::DELETE_IO_SQ),
        sqe(AdminOpcode::ASYNC_EVENT_REQUEST),
        sqe(AdminOpcode::ABORT),
        sqe(AdminOpcode::FORMAT_NVM),
        sqe(AdminOpcode::IDENTIFY),
        sqe(AdminOpcode::GET_LOG_PAGE),
        feature(FeatureId::NUMBER_OF_QUEUES),
        feature(FeatureId::ASYNC_EVENT_CONFIG),
        feature(FeatureId::HOST_MEMORY_BUFFER),
        Sqe { mptr: 4096, ..sqe(AdminOpcode(0xc0)) },
        sqe(AdminOpcode(0xc0)).with_prps(4096, 0),
    ];
    let before = rig.emu.counters().commands;
    for sqe in cases {
        let error = ctrl.admin_passthrough(sqe, PassthroughData::None, TIMEOUT).unwrap_err();
        assert!(matches!(error, Error::Passthrough { .. }), "{sqe:?}: {error}");
    }
    // Data in the wrong direction, not in dwords, or longer than a command may transfer.
    let read = sqe(AdminOpcode(0xc2));
    let wrong = [&mut [0; 6][..], &mut [0; 1 << 20]];
    for data in wrong {
        let error = ctrl.admin_passthrough(read, PassthroughData::In(data), TIMEOUT).unwrap_err();
        assert!(matches!(error, Error::Passthrough { .. }), "{error}");
    }
    let error = ctrl.admin_passthrough(read, PassthroughData::Out(&[0; 8]), TIMEOUT).unwrap_err();
    assert!(matches!(error, Error::Passthrough { .. }), "{error}");
    assert_eq!(rig.emu.counters().commands, before);
    assert_eq!(ctrl.state(), State::Ready);
}

#[test]
fn io_commands_on_the_drivers_own_queue() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let command = |opcode: NvmOpcode, lbas| {
        let mut sqe = Sqe::new(opcode.0, Cid(0), NS);
        BlockRange::new(Lba(7), Lbas(lbas)).unwrap().write_to(&mut sqe);
        sqe
    };
    let data = pattern(8 * LBA, 4);
    let write = command(NvmOpcode::WRITE, 8);
    ctrl.io_passthrough(write, PassthroughData::Out(&data), TIMEOUT).unwrap();
    let mut back = vec![0; data.len()];
    let read = command(NvmOpcode::READ, 8);
    ctrl.io_passthrough(read, PassthroughData::In(&mut back), TIMEOUT).unwrap();
    assert!(back == data);
    let short = command(NvmOpcode::READ, 9);
    let error = ctrl.io_passthrough(short, PassthroughData::In(&mut back), TIMEOUT).unwrap_err();
    assert!(error.to_string().contains("4608 bytes"), "{error}");
    let error = ctrl.io_passthrough(write, PassthroughData::None, TIMEOUT).unwrap_err();
    assert!(matches!(error, Error::Passthrough { .. }), "{error}");
    let elsewhere = Sqe { nsid: 9, ..read };
    let error = ctrl.io_passthrough(elsewhere, PassthroughData::None, TIMEOUT).unwrap_err();
    assert!(matches!(error, Error::Namespace { .. }), "{error}");
}
