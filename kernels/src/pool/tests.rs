#![allow(unsafe_code, reason = "runs the kernels of gio_pool on memory of the tests")]
//! The kernels of gio_pool as run on the host, against simple models.

use std::ptr::NonNull;

use gio_uring::{IoStatus, MoveChecksums};
use nvme_driver::DevicePtr;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng, seq::SliceRandom as _};

use super::*;
use crate::{ffi, pattern::Pattern};

fn bytes(random: &mut SmallRng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    random.fill(&mut bytes[..]);
    bytes
}

fn one<T: Copy>(random: &mut SmallRng, of: &[T]) -> T {
    of[random.random_range(0..of.len())]
}

fn address<T>(of: &mut [T]) -> u64 {
    of.as_mut_ptr().expose_provenance() as u64
}

/// A pool and staging memory of some shape, aligned to some power of two or not at all.
struct Shape {
    object: usize,
    stride: usize,
    staging_row: usize,
    blocks: usize,
    map: Vec<u32>,
    /// Block of each position within a row of staging memory; empty: contiguous.
    staged: Vec<u32>,
    rows: Vec<usize>,
    staging: usize,
}

impl Shape {
    fn random(random: &mut SmallRng) -> Self {
        let unit = one(random, &[1, 2, 4, 8, 16, 512]);
        let most: usize = one(random, &[16, 700, 2048, 9000]);
        let object = (1 + random.random_range(0..most)).next_multiple_of(one(random, &[unit, 1]));
        let stride = (object + random.random_range(0..64)).next_multiple_of(unit);
        let blocks = 1 + random.random_range(0..12);
        // Blocks in any order, without repetition: a scatter writes each block once.
        let mut map: Vec<u32> = (0..blocks as u32).collect();
        map.shuffle(random);
        map.truncate(1 + random.random_range(0..blocks));
        let mut at = random.random_range(0..3) * unit;
        let mut rows = Vec::new();
        for _ in 0..1 + random.random_range(0..4) {
            rows.push(at);
            at = (at + blocks * stride + random.random_range(0..40)).next_multiple_of(unit);
        }
        let mut slots = map.len();
        let mut staged = Vec::new();
        if random.random() {
            slots += random.random_range(0..8);
            staged = (0..slots as u32).collect();
            staged.shuffle(random);
            staged.truncate(map.len());
        }
        let staging_row = (slots * object + random.random_range(0..50)).next_multiple_of(unit);
        Self {
            object,
            stride,
            staging_row,
            blocks,
            map,
            staged,
            rows,
            staging: random.random_range(0..3) * unit,
        }
    }

    fn pool_len(&self) -> usize {
        self.rows.last().expect("a row") + self.blocks * self.stride + 64
    }

    fn staging_len(&self) -> usize {
        self.staging + self.rows.len() * self.staging_row + 64
    }

    /// Returns each object's offset in staging memory and in the pool.
    fn objects(&self) -> impl Iterator<Item = (usize, usize)> {
        self.rows.iter().enumerate().flat_map(move |(i, row)| {
            self.map.iter().enumerate().map(move |(p, block)| {
                let at = self.staged.get(p).map_or(p, |at| *at as usize);
                let staging = self.staging + i * self.staging_row + at * self.object;
                (staging, row + *block as usize * self.stride)
            })
        })
    }

    fn run(&mut self, op: ScatterGatherOp, staging: &mut [u8], pool: &mut [u8], threads: u32) {
        self.run_with(op, staging, pool, threads, None);
    }

    fn run_with(
        &mut self,
        op: ScatterGatherOp,
        staging: &mut [u8],
        pool: &mut [u8],
        threads: u32,
        checksums: Option<MoveChecksums>,
    ) {
        let base = address(pool);
        let mut rows: Vec<u64> = self.rows.iter().map(|row| base + *row as u64).collect();
        let moves = ScatterGather {
            op,
            staging: DevicePtr(address(staging) + self.staging as u64),
            staging_row: self.staging_row as u64,
            staging_blocks: (!self.staged.is_empty()).then(|| DevicePtr(address(&mut self.staged))),
            rows: DevicePtr(address(&mut rows)),
            row_count: rows.len() as u32,
            blocks: DevicePtr(address(&mut self.map)),
            count: self.map.len() as u32,
            block_stride: self.stride as u64,
            object_bytes: self.object as u32,
            checksums,
        };
        let args = ScatterGatherArgs::from(&moves);
        // SAFETY: `Shape` keeps every object within the two slices; tables are ours.
        unsafe { ffi::gio_host_scatter_gather(&raw const args, threads) };
    }
}

#[test]
fn objects_go_where_they_belong_and_nothing_else_changes() {
    for seed in 0..300 {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut shape = Shape::random(&mut random);
        let threads = 32 * (1 + random.random_range(0..9)) as u32;
        let mut staging = bytes(&mut random, shape.staging_len());
        let mut pool = bytes(&mut random, shape.pool_len());
        let (old_staging, old_pool) = (staging.clone(), pool.clone());
        let object = shape.object;

        shape.run(ScatterGatherOp::Scatter, &mut staging, &mut pool, threads);
        let mut wanted = old_pool;
        for (from, to) in shape.objects() {
            wanted[to..to + object].copy_from_slice(&staging[from..from + object]);
        }
        assert!(staging == old_staging, "seed {seed}: staging memory was only read");
        assert!(pool == wanted, "seed {seed}: the pool");

        let mut other = bytes(&mut random, staging.len());
        let mut wanted = other.clone();
        for (to, from) in shape.objects() {
            wanted[to..to + object].copy_from_slice(&pool[from..from + object]);
        }
        let before = pool.clone();
        shape.run(ScatterGatherOp::Gather, &mut other, &mut pool, threads);
        assert!(pool == before, "seed {seed}: the pool was only read");
        assert!(other == wanted, "seed {seed}: staging memory");
    }
}

/// A gather stores each object's checksum, a scatter detects mismatches, and both copy the same
/// bytes as without checksums.
#[test]
fn checksums_are_stored_and_compared() {
    for seed in 0..200 {
        let mut random = SmallRng::seed_from_u64(seed + 1000);
        let mut shape = Shape::random(&mut random);
        let threads = 32 * (1 + random.random_range(0..9)) as u32;
        let (object, count) = (shape.object, shape.map.len());
        let mut staging = vec![0; shape.staging_len()];
        let mut pool = bytes(&mut random, shape.pool_len());
        let mut values = vec![0u32; shape.rows.len() * count];
        let (mut status, mut errors) = (vec![0u32; count], vec![40u64]);
        let checksums = Some(MoveChecksums {
            values: DevicePtr(address(&mut values)),
            status: DevicePtr(address(&mut status)),
            errors: DevicePtr(address(&mut errors)),
        });
        shape.run_with(ScatterGatherOp::Gather, &mut staging, &mut pool, threads, checksums);
        for ((to, from), value) in shape.objects().zip(&values) {
            assert!(staging[to..to + object] == pool[from..from + object], "seed {seed}");
            assert_eq!(*value, crc32c::crc32c(&pool[from..from + object]), "seed {seed}");
        }

        let mut wrong = vec![false; values.len()];
        for _ in 0..random.random_range(0..4) {
            let at = random.random_range(0..values.len());
            let (start, _) = shape.objects().nth(at).expect("an object");
            if !std::mem::replace(&mut wrong[at], true) {
                staging[start + random.random_range(0..object)] ^= 1 << random.random_range(0..8);
            }
        }
        pool.fill(0);
        let expected = values.clone();
        shape.run_with(ScatterGatherOp::Scatter, &mut staging, &mut pool, threads, checksums);
        for (from, to) in shape.objects() {
            assert!(staging[from..from + object] == pool[to..to + object], "seed {seed}");
        }
        assert_eq!(values, expected, "seed {seed}: a scatter only reads them");
        assert_eq!(errors[0] - 40, wrong.iter().filter(|wrong| **wrong).count() as u64);
        for (position, word) in status.iter().enumerate() {
            let differs = wrong.iter().skip(position).step_by(count).any(|wrong| *wrong);
            let expected = if differs { IoStatus::Checksum } else { IoStatus::Ok };
            assert_eq!(IoStatus::decode(*word), expected, "seed {seed}, position {position}");
        }
    }
}

#[test]
fn tiles_are_counted_without_overflow() {
    let args = |row_count, count, object_bytes| ScatterGatherArgs {
        row_count,
        count,
        object_bytes,
        ..ScatterGatherArgs::default()
    };
    assert_eq!(args(3, 5, 2048).tiles(), Some(15));
    assert_eq!(args(3, 5, 2049).tiles(), Some(30));
    assert_eq!(args(3, 5, 0).tiles(), Some(0));
    assert_eq!(args(0, 5, 1).tiles(), Some(0));
    assert_eq!(args(u32::MAX, u32::MAX, u32::MAX).tiles(), None);
}

fn run_pattern(mode: u32, items: &mut [PatternItem], threads: u32) -> Vec<u64> {
    let mut found = vec![PATTERN_NONE; items.len()];
    let longest = items.iter().map(|item| item.len).max().unwrap_or(0);
    let args = PatternArgs {
        items: address(items),
        found: address(&mut found),
        count: items.len() as u32,
        tiles: longest.div_ceil(TILE),
        mode,
        reserved: 0,
    };
    // SAFETY: items name parts of a test's own memory.
    unsafe { ffi::gio_host_pattern(&raw const args, threads) };
    found
}

/// Generates consecutive items with gaps, including lengths of zero and of several tiles.
fn items(random: &mut SmallRng, memory: &mut Vec<u64>) -> Vec<PatternItem> {
    let mut at = 0;
    let mut items: Vec<PatternItem> = (0..1 + random.random_range(0..9))
        .map(|_| {
            let most: usize = one(random, &[1, 9, 600, 2100]);
            let len = 4 * random.random_range(0..most);
            let start = at + 4 * random.random_range(0..6);
            at = start + len;
            let (seed, offset) = (random.random(), 8 * random.random_range(0..1000) as u32);
            PatternItem { at: start as u64, seed, offset, len: len as u32 }
        })
        .collect();
    *memory = (0..at.div_ceil(8) + 4).map(|_| random.random()).collect();
    let base = address(memory);
    items.iter_mut().for_each(|item| item.at += base);
    items
}

fn host_check(item: &PatternItem) -> u64 {
    let at = std::ptr::with_exposed_provenance_mut(item.at as usize);
    let at = NonNull::new(at).expect("an address");
    // SAFETY: an item names a part of the test's own memory.
    let checked =
        unsafe { Pattern::new(item.seed).check(at, item.offset as usize, item.len as usize) };
    checked.map_or_else(
        |difference| (difference.offset as u64) << 32 | u64::from(difference.found),
        |()| PATTERN_NONE,
    )
}

#[test]
fn a_launch_makes_and_finds_what_the_host_does() {
    for seed in 0..300 {
        let mut random = SmallRng::seed_from_u64(seed << 20);
        let mut memory = Vec::new();
        let mut all = items(&mut random, &mut memory);
        let threads = 32 * (1 + random.random_range(0..20)) as u32;
        let around = memory.clone();

        run_pattern(MODE_FILL, &mut all, threads);
        let good = all.iter().map(host_check).all(|found| found == PATTERN_NONE);
        assert!(good, "seed {seed}: filled");
        let found = run_pattern(MODE_CHECK, &mut all, threads);
        assert!(found.iter().all(|found| *found == PATTERN_NONE), "seed {seed}: {found:x?}");

        // Some wrong bytes, also several per item: only the first of each is reported.
        let base = address(&mut memory);
        for _ in 0..random.random_range(0..8) {
            let item = &all[random.random_range(0..all.len())];
            if item.len > 0 {
                let at = (item.at - base) as usize + random.random_range(0..item.len as usize);
                memory[at / 8] ^= 1 << (at % 8 * 8 + random.random_range(0..8));
            }
        }
        let wanted: Vec<u64> = all.iter().map(host_check).collect();
        assert_eq!(run_pattern(MODE_CHECK, &mut all, threads), wanted, "seed {seed}");

        run_pattern(MODE_POISON, &mut all, threads);
        let four = |at: usize| (memory[at / 8] >> (at % 8 * 8)) as u32;
        let within = |item: &PatternItem, at: usize| {
            (base + at as u64).checked_sub(item.at).is_some_and(|at| at < u64::from(item.len))
        };
        for at in (0..memory.len() * 8).step_by(4) {
            let inside = all.iter().any(|item| within(item, at));
            let before = (around[at / 8] >> (at % 8 * 8)) as u32;
            let wanted = if inside { 0xDEAD_BEEF } else { before };
            assert_eq!(four(at), wanted, "seed {seed}, at {at}: poison, and nothing around it");
        }
    }
}

#[test]
fn the_number_that_bindgen_cannot_read_is_the_headers() {
    let header = include_str!("../../include/pool/abi.h");
    assert!(header.contains(&format!("#define GIO_PATTERN_NONE {PATTERN_NONE:#x}ull")));
}
