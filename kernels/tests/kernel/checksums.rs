//! Checksums: a write stores the checksums of its objects, a read detects every mismatched object
//! and no other, however objects are merged, split and padded.

use std::collections::BTreeSet;

use gio_uring::abi::{self, Affine, IoCtx, Pool};

use crate::{
    device::Mischief,
    moves::{map, random_rig},
    rig::{Config, Done, Kv, Rig, Shape},
};

/// Value of a checksum that was never stored.
const UNSET: u32 = 0x5a5a_5a5a;

/// A pool, a map, and space for the checksums of all objects.
struct Case {
    rig: Rig,
    kv: Kv,
    map: Vec<Affine>,
    checksums: u64,
}

impl Case {
    /// Creates a case with up to `most` entries.
    fn new(config: Config, shape: Shape, seed: u64, most: usize) -> Self {
        println!("seed {seed}, {config:?}, {shape:?}");
        let mut rig = Rig::new(config, seed);
        let kv = rig.kv(shape);
        let mut random = rig.random.clone();
        let map = map(&kv, &mut random, most);
        rig.random = random;
        let checksums = rig.memory.place(&vec![UNSET; map.len() * shape.rows as usize]);
        Self { rig, kv, map, checksums }
    }

    fn checksum(&self, row: u32, entry: usize) -> u32 {
        let at = row as usize * self.map.len() + entry;
        self.rig.memory.peek(self.checksums + at as u64 * 4)
    }

    /// Returns the CRC of an object's current bytes in memory.
    fn crc(&self, row: u32, entry: usize) -> u32 {
        let mut bytes = vec![0; self.kv.shape.object_bytes as usize];
        let at = self.kv.memory.at(self.kv.offset(row, self.map[entry].block));
        self.rig.memory.read(at, &mut bytes);
        crc32c::crc32c(&bytes)
    }

    fn issue(&mut self, op: u32, rows: [u32; 2]) {
        let mut iocb = self.rig.affine(&self.kv, op, &mut self.map, rows);
        iocb.checksums = self.checksums;
        self.rig.issue(iocb);
    }

    fn run(&mut self, op: u32, rows: [u32; 2]) -> Done {
        self.issue(op, rows);
        let done = self.rig.finish(1).remove(0);
        self.rig.assert_at_rest();
        done
    }

    /// Writes all rows, one operation per row, and poisons the pool.
    fn write_all(&mut self) {
        let rows = self.kv.shape.rows;
        for row in 0..rows {
            self.issue(abi::OP_WRITE, [row, row + 1]);
        }
        for done in self.rig.finish(rows as usize) {
            assert_eq!((done.iocb.errors, done.iocb.objects), (0, self.map.len() as u64));
        }
        let poison = vec![0xee; self.kv.memory.len as usize];
        self.rig.memory.write(self.kv.memory.address, &poison);
    }

    /// Flips a bit of the object on the medium, `at` bytes from its start.
    fn flip(&mut self, row: u32, entry: usize, at: u64, bit: u64) {
        let shift = self.rig.config.lba_shift;
        let (device, lba) = self.kv.place(self.map[entry].file, row, shift);
        self.rig.devices[device].media[((lba << shift) + at) as usize] ^= 1 << bit;
    }

    /// Asserts that a read of `rows` reports exactly the mismatched objects `wrong` (row, entry).
    fn assert_finds(&mut self, rows: [u32; 2], wrong: &BTreeSet<(u32, usize)>) {
        let done = self.run(abi::OP_READ, rows);
        let here: Vec<_> =
            wrong.iter().filter(|(row, _)| (rows[0]..rows[1]).contains(row)).collect();
        let all = self.map.len() as u64 * u64::from(rows[1] - rows[0]);
        let found = (done.iocb.errors as usize, done.iocb.objects);
        assert_eq!(found, (here.len(), all - here.len() as u64));
        for (entry, status) in done.statuses.iter().enumerate() {
            let differs = here.iter().any(|(_, other)| *other == entry);
            let expected = if differs { abi::STATUS_CHECKSUM } else { 0 };
            assert_eq!(*status, expected, "entry {entry} of {here:?}");
        }
        let (kind, entry) = ((done.iocb.error >> 32) as u32, done.iocb.error as u32 as usize);
        if here.is_empty() {
            assert_eq!(done.iocb.error, 0);
        } else {
            assert_eq!(kind, abi::STATUS_CHECKSUM);
            assert!(here.iter().any(|(_, other)| *other == entry));
        }
    }
}

/// Writes, reads correct data, then corrupted data.
fn round_trip(config: Config, shape: Shape, seed: u64) {
    let mut case = Case::new(config, shape, seed, usize::MAX);
    let (rows, entries) = (shape.rows, case.map.len());
    // The first operation sorts the map; later code refers to entries in that order.
    case.run(abi::OP_WRITE, [0, 1]);
    for row in 0..rows {
        for entry in 0..entries {
            let expected = if row == 0 { case.crc(row, entry) } else { UNSET };
            assert_eq!(case.checksum(row, entry), expected, "row {row}, entry {entry}");
        }
    }
    let expected: Vec<u32> = (0..rows)
        .flat_map(|row| (0..entries).map(move |e| (row, e)))
        .map(|(r, e)| case.crc(r, e))
        .collect();
    case.write_all();
    for (at, expected) in expected.iter().enumerate() {
        assert_eq!(case.checksum((at / entries) as u32, at % entries), *expected);
    }
    case.assert_finds([0, rows], &BTreeSet::new());

    let mut random = case.rig.random.clone();
    let mut wrong = BTreeSet::new();
    for _ in 0..1 + random.below(4) {
        let (row, entry) =
            (random.below(rows.into()) as u32, random.below(entries as u64) as usize);
        if wrong.insert((row, entry)) {
            case.flip(row, entry, random.below(shape.object_bytes.into()), random.below(8));
        }
    }
    let padding = u64::from(shape.slot_bytes - shape.object_bytes);
    if padding > 0 {
        let entry = random.below(entries as u64) as usize;
        case.flip(0, entry, u64::from(shape.object_bytes) + random.below(padding), 0);
    }
    case.assert_finds([0, rows], &wrong);
    for row in 0..rows {
        case.assert_finds([row, row + 1], &wrong);
    }
}

#[test]
fn random_rigs_find_what_differs() {
    for seed in 100..180 {
        let (config, shape) = random_rig(seed);
        round_trip(config, shape, seed);
    }
}

/// Merged objects of one command fail individually.
#[test]
fn one_object_of_a_merged_command() {
    let mut case = Case::new(Config::default(), Shape::default(), 1, 16);
    case.map = (0..16).map(|i| Affine { block: 15 - i, file: i }).collect();
    case.write_all();
    let before = case.rig.warp(0).commands;
    case.flip(1, 6, 4095, 7);
    case.assert_finds([1, 2], &BTreeSet::from([(1, 6)]));
    assert_eq!(case.rig.warp(0).commands, before + 1);
    assert_eq!(case.rig.warp(0).errors, 1);
    assert_eq!(case.rig.warp(0).objects, 3 * 16 + 15);
}

/// Rows share a doorbell: it does not wait for the checksums, nor are they computed between rows.
#[test]
fn a_write_rings_as_few_doorbells_as_without_them() {
    let shape = Shape { run_bytes: 4096, ..Shape::default() };
    let mut case = Case::new(Config::default(), shape, 1, 10);
    case.map = (0..10).map(|i| Affine { block: i, file: i }).collect();
    case.run(abi::OP_WRITE, [0, 3]);
    assert_eq!((case.rig.warp(0).commands, case.rig.warp(0).sq_doorbells), (30, 1));
    for (row, entry) in (0..3).flat_map(|row| (0..10).map(move |entry| (row, entry))) {
        assert_eq!(case.checksum(row, entry), case.crc(row, entry), "row {row}, entry {entry}");
    }
}

/// Objects of several commands that end in any order: verified once, when the last one ended.
#[test]
fn objects_of_several_commands() {
    let shape = Shape { object_bytes: 20_000, slot_bytes: 20_480, gap: 4, ..Shape::default() };
    for seed in 0..40 {
        // With boundaries, some objects take one command fewer than others.
        let boundary_lbas = [0, 3, 4][seed as usize % 3];
        let depth_log2 = 1 + seed as u32 % 6;
        let config = Config {
            transfer_bytes_max: 8192,
            boundary_lbas,
            depth_log2,
            parts: 1 + seed as u32 % 2,
            ..Config::default()
        };
        round_trip(config, Shape { blocks: 20, files: 20, ..shape }, seed);
    }
}

/// An object's last split may be empty while the queue is full before it: the object is complete
/// nevertheless.
#[test]
fn an_object_before_an_empty_split() {
    let shape = Shape { object_bytes: 12288, slot_bytes: 12288, ..Shape::default() };
    let config =
        Config { transfer_bytes_max: 8192, boundary_lbas: 4, depth_log2: 5, ..Config::default() };
    for seed in 0..30 {
        let mut case = Case::new(config, shape, seed, 20);
        case.map = (0..20).map(|i| Affine { block: i, file: i }).collect();
        case.write_all();
        // The eleventh object ends with the chunk of 32 splits, three per object, and is submitted
        // with the commands that fill the queue.
        case.flip(0, 10, 5000, 2);
        let iova = case.rig.memory.iova(case.kv.memory.at(case.kv.offset(2, 0)));
        let mut list = [IoCtx { iova, lba: 0, bytes: 4096, device: 0 }; 9];
        let others = case.rig.explicit(abi::OP_READ, &mut list);
        case.rig.devices[0].stalled = true;
        case.rig.issue(others);
        case.rig.settle();
        case.issue(abi::OP_READ, [0, 1]);
        case.rig.settle();
        assert_eq!(case.rig.warp(0).outstanding, 31);
        case.rig.devices[0].stalled = false;
        let done = case.rig.finish(2).into_iter().find(|done| done.iocb.checksums != 0);
        let statuses = done.expect("one of two").statuses;
        assert_eq!(statuses.iter().filter(|status| **status != 0).count(), 1);
        assert_eq!(statuses[10], abi::STATUS_CHECKSUM);
    }
}

/// A failed command has its own status. None of its objects is verified.
#[test]
fn what_did_not_arrive_is_not_looked_at() {
    let status = abi::STATUS_NVME | 0x281;
    for (transfer_bytes_max, lost) in [(4096, 1), (1 << 17, 8)] {
        let shape = Shape { object_bytes: 16384, slot_bytes: 16384, ..Shape::default() };
        for failing in 0..32 {
            let config = Config { transfer_bytes_max, depth_log2: 4, ..Config::default() };
            let mut case = Case::new(config, Shape { run_bytes: 1 << 17, ..shape }, failing, 8);
            case.map = (0..8).map(|i| Affine { block: i, file: i }).collect();
            case.write_all();
            let commands = if lost == 1 { failing } else { 0 };
            let mischief = &mut case.rig.devices[0].queues[0].mischief;
            mischief.clear();
            mischief.extend((0..commands).map(|_| None));
            mischief.push_back(Some(Mischief::Status(0x281)));
            let done = case.run(abi::OP_READ, [0, 1]);
            assert_eq!((done.iocb.errors, done.iocb.objects), (1, 8 - lost), "command {commands}");
            let found = done.statuses.iter().filter(|found| **found == status).count();
            assert_eq!(found as u64, lost);
            assert!(done.statuses.iter().all(|found| [0, status].contains(found)));
        }
    }
}

/// Operations with and without checksums share the window without interference.
#[test]
fn not_all_operations_have_checksums() {
    let mut case =
        Case::new(Config { depth_log2: 3, ..Config::default() }, Shape::default(), 3, 40);
    case.write_all();
    case.flip(0, 5, 100, 3);
    case.flip(1, 6, 200, 3);
    let plain = case.rig.affine(&case.kv, abi::OP_READ, &mut case.map, [1, 2]);
    case.issue(abi::OP_READ, [0, 1]);
    let unchecked = case.rig.issue(plain);
    case.issue(abi::OP_READ, [2, 3]);
    for done in case.rig.finish(3) {
        let wrong = usize::from(done.iocb.row_first == 0);
        assert_eq!(done.statuses.iter().filter(|status| **status != 0).count(), wrong);
        assert!(wrong == 0 || done.statuses[5] == abi::STATUS_CHECKSUM);
        assert_eq!(done.iocb.checksums == 0, done.id == unchecked);
    }
}

/// Checksums of a pool unreachable for the kernel: no command is sent.
#[test]
fn what_is_out_of_reach_is_refused() {
    let mut case = Case::new(Config::default(), Shape::default(), 1, 8);
    let pool: Pool = case.rig.memory.peek(case.kv.address);
    case.kv.address = case.rig.memory.place(&[Pool { row_base: 0, ..pool }]);
    let done = case.run(abi::OP_WRITE, [0, 3]);
    assert_eq!(done.statuses, vec![abi::STATUS_INVALID; case.map.len()]);
    assert_eq!(done.iocb.objects, 0);
    let iova = case.rig.memory.iova(case.kv.memory.address);
    let mut list = [IoCtx { iova, lba: 0, bytes: 4096, device: 0 }];
    let mut iocb = case.rig.explicit(abi::OP_READ, &mut list);
    iocb.checksums = case.checksums;
    case.rig.issue(iocb);
    let done = case.rig.finish(1).remove(0);
    assert_eq!((done.statuses, done.iocb.objects), (vec![abi::STATUS_INVALID], 0));
    assert_eq!(case.rig.warp(0).commands, 0);
}
