//! Checksums by the I/O kernel on a GPU, of objects at GPU addresses that differ from the host's.

use std::sync::Arc;

use cuda_mock::{self as mock, Level, isolated};
use gio_kernels::cuda::{CudaDevice, LaunchMode};
use gio_uring::{
    Affine, AffineOp, Checksums, Completion, Direction, Error, IoStatus, Uring, UringOptions,
};
use nvme_emu::{FaultAction, FaultPlan, FaultRule, FaultWhen};

use crate::rig::{self, Pool, Rig, soon};

/// Runs every row of a map, one operation per row.
fn all_rows(
    ring: &mut Uring,
    pool: &Pool,
    direction: Direction,
    (map, checksums): (&gio_uring::BlockMap, &Checksums),
) -> Vec<Completion> {
    let submit = |row| {
        let op = AffineOp::new(direction, map, &pool.handle, row..row + 1);
        ring.submit(&AffineOp { checksums: Some(checksums), ..op }).expect("submitted")
    };
    let ids: Vec<_> = (0..pool.rows).map(submit).collect();
    let deadline = soon(ring);
    let wait = |id| ring.wait_completion(id, deadline).expect("done in time");
    ids.into_iter().map(wait).collect()
}

/// Corruption by a drive is detected, without false positives.
fn corrupt_reads(device: &Arc<CudaDevice>, mode: LaunchMode) {
    let mut rig = Rig::new(device.clone(), 2, 2, 32);
    let memory = rig.pinned_pool(6, 64);
    let mut ring = rig.ring(rig::options(mode), UringOptions::default());
    let mut pool = rig.pool_in(&mut ring, memory, 6, 64);
    pool.fill(7);
    let entries: Vec<Affine> = (0..64).map(|i| Affine { block: i * 37 % 64, file: i }).collect();
    let map = ring.upload_map(&entries, 2).expect("a map");
    let stored = ring.new_checksums(&map, 6).expect("room");
    for done in all_rows(&mut ring, &pool, Direction::Write, (&map, &stored)) {
        assert!(done.is_ok(), "{done:?}");
    }
    let crcs = |pool: &Pool, row| -> Vec<u32> {
        entries.iter().map(|entry| pool.crc(row, entry.block)).collect()
    };
    for row in 0..6 {
        assert_eq!(stored.row(row), crcs(&pool, row), "row {row}");
    }
    let when = FaultWhen { opcode: Some(2), every: Some(5), ..FaultWhen::default() };
    let rules = vec![FaultRule::new(when, FaultAction::CorruptRead)];
    for emu in &rig.emus {
        emu.set_faults(FaultPlan { seed: 1, rules: rules.clone(), ..FaultPlan::default() });
    }
    pool.fill(99);
    let mut wrong = 0;
    let done = all_rows(&mut ring, &pool, Direction::Read, (&map, &stored));
    for (row, done) in (0..6).zip(done) {
        let pairs = crcs(&pool, row).into_iter().zip(stored.row(row));
        let differ = pairs.filter(|(found, expected)| found != expected).count() as u32;
        assert_eq!((done.errors, done.objects), (differ, u64::from(64 - differ)), "row {row}");
        let kind = done.error.map(|(status, _)| status);
        assert_eq!(kind, (differ > 0).then_some(IoStatus::Checksum));
        wrong += differ;
    }
    assert!(wrong > 0, "nothing was corrupted");
    rig.end(&mut ring);
}

#[test]
fn what_a_drive_corrupts_is_found() {
    isolated("checksums::what_a_drive_corrupts_is_found", Level::Full, &[], || {
        let device = rig::gpu();
        for mode in [LaunchMode::PerBatch, LaunchMode::Resident] {
            corrupt_reads(&device, mode);
        }
        drop(device);
        mock::assert_clean();
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_a_drive_corrupts_is_found_on_a_gpu() {
    let device = rig::only_gpu();
    for mode in [LaunchMode::PerBatch, LaunchMode::Resident] {
        corrupt_reads(&device, mode);
    }
}

/// Memory reachable only by the CPU and the drives: the pool works, but not its checksums.
#[test]
fn memory_that_the_gpu_cannot_reach_has_no_checksums() {
    let name = "checksums::memory_that_the_gpu_cannot_reach_has_no_checksums";
    isolated(name, Level::Full, &[], || {
        let device = rig::gpu();
        let mut rig = Rig::new(device.clone(), 1, 1, 32);
        let mut ring = rig.ring(rig::options(LaunchMode::PerBatch), UringOptions::default());
        let pool = rig.pool(&mut ring, 2, 16);
        let map = ring.upload_map(&[Affine { block: 0, file: 0 }], 1).expect("a map");
        let checksums = ring.new_checksums(&map, 2).expect("room");
        let op = AffineOp::new(Direction::Write, &map, &pool.handle, 0..1);
        let refused = ring.submit(&AffineOp { checksums: Some(&checksums), ..op });
        assert!(matches!(refused, Err(Error::Checksums { .. })), "{refused:?}");
        rig.end(&mut ring);
    });
}
