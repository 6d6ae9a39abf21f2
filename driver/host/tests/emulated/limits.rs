//! Limits and boundaries of single commands.

use nvme_driver::{Controller, LbaRange};
use nvme_emu::{EmuConfig, FaultPlan, IdentifyOverrides, IdentifyPatch};
use nvme_spec::{
    identify::IdentifyNvmController,
    ids::{Lba, Nsid},
};
use zerocopy::IntoBytes;

use crate::{LBA, Rig, bytes, pattern};

const NS: Nsid = Nsid(1);

fn patched(cns: u8, offset: u16, bytes: &[u8]) -> Rig {
    let patches = vec![IdentifyPatch { cns, offset, bytes: bytes.to_vec() }];
    let identify = IdentifyOverrides { patches, ..Default::default() };
    Rig::new(EmuConfig::new("emu0").faults(FaultPlan { identify, ..FaultPlan::default() }))
}

/// Returns the number of commands that `work` took.
fn commands(rig: &Rig, ctrl: &mut Controller, work: impl FnOnce(&mut Controller)) -> u64 {
    let before = rig.emu.counters().commands;
    work(ctrl);
    rig.emu.counters().commands - before
}

#[test]
fn write_zeroes_and_deallocate_stay_within_their_limits() {
    let limits =
        IdentifyNvmController { wzsl: 1, dmrl: 3, dmrsl: 10, dmsl: 25, ..Default::default() };
    let rig = patched(6, 0, limits.as_bytes());
    let mut ctrl = rig.attach();
    ctrl.write(NS, Lba(0), &pattern(400 * LBA, 1), false).unwrap();
    let range = LbaRange { lba: Lba(8), lbas: 128 };
    let count = commands(&rig, &mut ctrl, |c| c.write_zeroes(NS, range, false).unwrap());
    assert_eq!(count, 8, "64 KiB, 8 KiB each");
    // LBAs per command: 10 + 10 + 5, 10 + 10 + 5, 1 + 1 + 1, 1.
    let mut ranges = vec![LbaRange { lba: Lba(200), lbas: 50 }];
    ranges.extend((0..4).map(|i| LbaRange { lba: Lba(300 + 2 * i), lbas: 1 }));
    let count = commands(&rig, &mut ctrl, |c| c.deallocate(NS, &ranges).unwrap());
    assert_eq!(count, 4);
    let mut back = vec![0; 400 * LBA];
    ctrl.read(NS, Lba(0), &mut back).unwrap();
    let is_zero = |lba: u64| back[lba as usize * LBA..][..LBA].iter().all(|byte| *byte == 0);
    let expected = |lba: u64| {
        (8..136).contains(&lba) || (200..250).contains(&lba) || [300, 302, 304, 306].contains(&lba)
    };
    assert!((0..400).all(|lba| is_zero(lba) == expected(lba)));
}

#[test]
fn no_command_crosses_the_optimal_boundary() {
    let rig = patched(0, 46, &100u16.to_le_bytes());
    let mut ctrl = rig.attach();
    let data = pattern(1000 * LBA, 2);
    let count = commands(&rig, &mut ctrl, |c| c.write(NS, Lba(50), &data, false).unwrap());
    assert_eq!(count, 11);
    let slice = rig.alloc(data.len()).slice(0, data.len()).unwrap();
    let into = std::slice::from_ref(&slice);
    let count = commands(&rig, &mut ctrl, |c| c.read_dma(NS, Lba(50), into).unwrap());
    assert_eq!(count, 11);
    assert!(bytes(&slice) == data);
    let qid = ctrl.create_queue_pair(16).unwrap();
    assert_eq!(ctrl.grant(qid, NS).unwrap().boundary_lbas, 100);
}
