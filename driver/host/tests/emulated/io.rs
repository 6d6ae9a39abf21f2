//! Blocking reads and writes in every descriptor mode.

use nvme_driver::{ControllerOptions, DescriptorPreference, Error, LbaRange, WaitMode};
use nvme_emu::{EmuConfig, SglSupport};
use nvme_spec::ids::{Lba, Nsid};

use crate::{LBA, LBAS, Rig, bytes, fill, pattern};

const NS: Nsid = Nsid(1);

fn prp() -> ControllerOptions {
    ControllerOptions { descriptors: DescriptorPreference::Prp, ..Default::default() }
}

#[test]
fn round_trips_of_many_sizes() {
    for options in [ControllerOptions::default(), prp()] {
        let rig = Rig::good();
        let mut ctrl = rig.attach_with(options).unwrap();
        for (i, blocks) in [1, 2, 7, 8, 9, 64, 512, 1024, 1025, 9000].into_iter().enumerate() {
            let data = pattern(blocks * LBA, i as u64);
            let lba = Lba(i as u64 * 3);
            ctrl.write(NS, lba, &data, i % 2 == 0).unwrap();
            let mut back = vec![0; data.len()];
            ctrl.read(NS, lba, &mut back).unwrap();
            assert!(back == data, "{blocks} blocks");
        }
        ctrl.flush(NS).unwrap();
    }
}

#[test]
fn a_transfer_is_split_at_mdts() {
    let rig = Rig::new(EmuConfig { mdts_bytes: Some(16 << 10), ..EmuConfig::new("emu0") });
    let mut ctrl = rig.attach();
    let before = rig.emu.counters().writes;
    ctrl.write(NS, Lba(0), &pattern(1 << 20, 1), false).unwrap();
    assert_eq!(rig.emu.counters().writes - before, 64);
    let before = rig.emu.counters().writes;
    ctrl.write_dma(NS, Lba(0), &[rig.alloc(1 << 20)], false).unwrap();
    assert_eq!(rig.emu.counters().writes - before, 64);
}

#[test]
fn scattered_odd_addresses_with_sgls() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let pool = rig.alloc(1 << 20);
    // 401 parts at odd addresses: more than a 4 KiB segment holds, so segments are chained.
    let mut parts: Vec<_> = (0..400).map(|i| pool.slice(i * 2000 + 1, 1023).unwrap()).collect();
    let rest = (800 * LBA).checked_sub(400 * 1023).unwrap();
    parts.push(pool.slice(900_001, rest).unwrap());
    let data = pattern(800 * LBA, 5);
    let mut at = 0;
    for part in &parts {
        fill(part, &data[at..at + part.len()]);
        at += part.len();
    }
    ctrl.write_dma(NS, Lba(100), &parts, false).unwrap();
    let mut back = vec![0; data.len()];
    ctrl.read(NS, Lba(100), &mut back).unwrap();
    assert!(back == data);
    for part in &parts {
        fill(part, &vec![0; part.len()]);
    }
    ctrl.read_dma(NS, Lba(100), &parts).unwrap();
    let gathered: Vec<u8> = parts.iter().flat_map(bytes).collect();
    assert!(gathered == data);
}

#[test]
fn scattered_pages_with_prps() {
    let rig = Rig::new(EmuConfig { mdts_bytes: None, ..EmuConfig::new("emu0") });
    let mut ctrl = rig.attach_with(prp()).unwrap();
    let pool = rig.alloc(8 << 20);
    // Every other page: 700 entries, so the list is chained. The first begins inside its page.
    let mut parts = vec![pool.slice(512, 3584).unwrap()];
    parts.extend((1..700).map(|i| pool.slice(i * 8192, 4096).unwrap()));
    parts.push(pool.slice(700 * 8192, 512).unwrap());
    let len: usize = parts.iter().map(|p| p.len()).sum();
    let data = pattern(len, 6);
    ctrl.write(NS, Lba(0), &data, false).unwrap();
    let before = rig.emu.counters().reads;
    ctrl.read_dma(NS, Lba(0), &parts).unwrap();
    assert_eq!(rig.emu.counters().reads - before, 1, "one command");
    let gathered: Vec<u8> = parts.iter().flat_map(bytes).collect();
    assert!(gathered == data);

    let odd = [pool.slice(1, 512).unwrap()];
    assert!(matches!(ctrl.read_dma(NS, Lba(0), &odd), Err(Error::Descriptor { .. })));
    ctrl.flush(NS).unwrap();
}

#[test]
fn dword_sgls_refuse_odd_addresses() {
    let rig = Rig::new(EmuConfig { sgl: SglSupport::Dword, ..EmuConfig::new("emu0") });
    let mut ctrl = rig.attach();
    let pool = rig.alloc(4096);
    ctrl.read_dma(NS, Lba(0), &[pool.slice(4, 512).unwrap()]).unwrap();
    let error = ctrl.read_dma(NS, Lba(0), &[pool.slice(2, 512).unwrap()]).unwrap_err();
    assert!(matches!(error, Error::Descriptor { .. }), "{error}");
}

#[test]
fn arguments_that_do_not_fit_are_not_sent() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    let before = rig.emu.counters().commands;
    let mut block = [0; LBA];
    for lba in [LBAS, LBAS + 1, u64::MAX] {
        assert!(matches!(ctrl.read(NS, Lba(lba), &mut block), Err(Error::Range { .. })));
        assert!(matches!(ctrl.write(NS, Lba(lba), &block, false), Err(Error::Range { .. })));
    }
    assert!(matches!(ctrl.read(NS, Lba(0), &mut block[..100]), Err(Error::Range { .. })));
    let range = LbaRange { lba: Lba(1), lbas: u64::MAX };
    assert!(matches!(ctrl.deallocate(NS, &[range]), Err(Error::Range { .. })));
    ctrl.read(NS, Lba(LBAS), &mut []).unwrap();
    assert_eq!(rig.emu.counters().commands, before);
}

#[test]
fn deallocate_and_write_zeroes() {
    let rig = Rig::good();
    let mut ctrl = rig.attach();
    ctrl.write(NS, Lba(0), &pattern(600 * LBA, 1), false).unwrap();
    let ranges: Vec<_> =
        (0..300).map(|i| LbaRange { lba: Lba(i * 2), lbas: u64::from(i != 7) }).collect();
    ctrl.deallocate(NS, &ranges).unwrap();
    let range = LbaRange { lba: Lba(1), lbas: 1 };
    ctrl.write_zeroes(NS, range, true).unwrap();
    let mut back = vec![1; 600 * LBA];
    ctrl.read(NS, Lba(0), &mut back).unwrap();
    let zero = |lba: usize| back[lba * LBA..(lba + 1) * LBA].iter().all(|b| *b == 0);
    assert!(ctrl.namespaces()[0].deallocated_reads_zero);
    assert!(zero(0) && zero(1) && zero(598) && !zero(14) && !zero(3));
}

#[test]
fn interrupts_wake_the_blocking_calls() {
    let rig = Rig::good();
    let options = ControllerOptions { wait: WaitMode::Interrupt, ..Default::default() };
    let mut ctrl = rig.attach_with(options).unwrap();
    let data = pattern(64 * LBA, 9);
    ctrl.write(NS, Lba(5), &data, true).unwrap();
    let mut back = vec![0; data.len()];
    ctrl.read(NS, Lba(5), &mut back).unwrap();
    assert!(back == data);
}
