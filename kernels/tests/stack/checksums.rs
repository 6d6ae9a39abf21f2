//! Checksums through driver, ring and software controller, with either executor.

use std::time::Instant;

use gio_kernels::{HostExecutor, HostOptions, InlineExecutor};
use gio_uring::{
    Affine, AffineOp, BlockMap, Checksums, Completion, Direction, IoExecutor, IoStatus, Uring,
    UringOptions,
};
use nvme_emu::{FaultAction, FaultRule, FaultWhen, SimClock};
use ripieno_testkit::{WATCHDOG_NS, set_faults};

use crate::rig::{Pool, Stack};

/// Runs rows `rows` of a map; returns the number of failed objects.
fn run(
    ring: &mut Uring,
    pool: &Pool,
    direction: Direction,
    map: &BlockMap,
    checksums: Option<&Checksums>,
) -> Vec<Completion> {
    let submit = |row| {
        let op = AffineOp::new(direction, map, &pool.handle, row..row + 1);
        ring.submit(&AffineOp { checksums, ..op }).expect("submitted")
    };
    let ids: Vec<_> = (0..pool.rows).map(submit).collect();
    let deadline = ring.now() + WATCHDOG_NS;
    let wait = |id| ring.wait_completion(id, deadline).expect("done in time");
    ids.into_iter().map(wait).collect()
}

/// Returns the CRC of an object's bytes in memory.
fn crc(pool: &Pool, row: u32, block: u32) -> u32 {
    let object = row as usize * pool.blocks as usize + block as usize;
    let mut bytes = vec![0; pool.object_bytes as usize];
    pool.memory.read(object * bytes.len(), &mut bytes).expect("in the pool");
    crc32c::crc32c(&bytes)
}

/// Drives corrupt data on read, in commands of one object and of many: exactly those objects are
/// detected.
fn corrupt_reads(mut stack: Stack, executor: Box<dyn IoExecutor>, options: UringOptions) {
    let mut ring = stack.ring(executor, options);
    let mut pool = stack.pool(&mut ring, 12, 96, 8192);
    pool.fill(7);
    let n = pool.blocks;
    let entries: Vec<Affine> = (0..n).map(|i| Affine { block: i * 37 % n, file: i }).collect();
    let devices = ring.devices();
    let map = ring.upload_map(&entries, devices).expect("a map");
    let stored = ring.new_checksums(&map, pool.rows).expect("room");
    for done in run(&mut ring, &pool, Direction::Write, &map, Some(&stored)) {
        assert!(done.is_ok(), "{done:?}");
    }
    for row in 0..pool.rows {
        let expected: Vec<u32> = entries.iter().map(|e| crc(&pool, row, e.block)).collect();
        assert_eq!(stored.row(row), expected, "row {row}");
    }

    let when =
        FaultWhen { opcode: Some(2), admin: Some(false), every: Some(5), ..FaultWhen::default() };
    set_faults(&stack.drives.emus, Some(FaultRule::new(when, FaultAction::CorruptRead)));
    pool.fill(99);
    let done = run(&mut ring, &pool, Direction::Read, &map, Some(&stored));
    set_faults(&stack.drives.emus, None);
    let mut differ = vec![false; entries.len()];
    for (row, done) in done.iter().enumerate() {
        let found = stored.row(row as u32);
        let wrong = |(at, entry): (usize, &Affine)| {
            let wrong = crc(&pool, row as u32, entry.block) != found[at];
            differ[at] |= wrong;
            u32::from(wrong)
        };
        let wrong: u32 = entries.iter().enumerate().map(wrong).sum();
        assert_eq!((done.errors, done.objects), (wrong, u64::from(n - wrong)), "row {row}");
        let kind = done.error.map(|(status, _)| status);
        assert_eq!(kind, (wrong > 0).then_some(IoStatus::Checksum));
    }
    assert!(differ.contains(&true) && differ.contains(&false), "{differ:?}");
    for (status, differs) in map.statuses().into_iter().zip(differ) {
        assert_eq!(status, if differs { IoStatus::Checksum } else { IoStatus::Ok });
    }

    // The media are unchanged.
    let map = ring.upload_map(&entries, devices).expect("a map");
    let expected: Vec<Vec<u32>> = (0..pool.rows).map(|row| stored.row(row)).collect();
    let expected = |row: u32, entry: u32| expected[row as usize][entry as usize];
    let expected = ring.upload_checksums(&map, pool.rows, expected).expect("room");
    for done in run(&mut ring, &pool, Direction::Read, &map, Some(&expected)) {
        assert!(done.is_ok(), "{done:?}");
    }
    ring.stop(ring.now() + WATCHDOG_NS).expect("stops");
}

#[test]
fn host_threads_find_what_drives_corrupt() {
    for (devices, parts, threads) in [(1, 1, 1), (2, 2, 2)] {
        let stack = Stack::new(devices, parts, 32, 64 << 20, None);
        let options = HostOptions { threads: Some(threads) };
        let executor = HostExecutor::new(options, stack.drives.clock.clone());
        corrupt_reads(stack, Box::new(executor), UringOptions::default());
    }
}

#[test]
fn inline_in_virtual_time_finds_what_drives_corrupt() {
    for seed in [1, 2, 3] {
        let sim = SimClock::new(seed);
        let stack = Stack::new(3, 1, 16, 64 << 20, Some(&sim));
        let executor = InlineExecutor::new(stack.drives.clock.clone());
        let options = UringOptions { virtual_time: true, ..UringOptions::default() };
        corrupt_reads(stack, Box::new(executor), options);
    }
}

/// The fastest of several passes.
struct Best(f64);

impl Best {
    fn time(&mut self, work: impl FnOnce()) {
        let start = Instant::now();
        work();
        self.0 = self.0.min(start.elapsed().as_secs_f64());
    }
}

/// 128 KiB objects through the whole stack, without and with checksums, compared with the machine's
/// own memcpy of the same size; the best of several interleaved passes, because other load on the
/// machine only ever adds time:
/// `cargo test --release -p gio-kernels --test stack -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn throughput_against_memcpy() {
    const OBJECT: usize = 128 << 10;
    const BYTES: usize = 16 * 256 * OBJECT;
    const PASSES: usize = 8;
    let mut stack = Stack::new(1, 1, 256, 1 << 30, None);
    let executor = HostExecutor::new(HostOptions::default(), stack.drives.clock.clone());
    let mut ring = stack.ring(Box::new(executor), UringOptions::default());
    let mut pool = stack.pool(&mut ring, 16, 256, OBJECT as u32);
    pool.fill(1);
    let entries: Vec<Affine> = (0..256).map(|i| Affine { block: i * 37 % 256, file: i }).collect();
    let map = ring.upload_map(&entries, 1).expect("a map");
    let sums = ring.new_checksums(&map, pool.rows).expect("room");
    let (from, mut to) = (vec![1u8; BYTES], vec![2u8; BYTES]);
    let [mut copied, mut plain, mut checked, mut written, mut summed] =
        std::array::from_fn(|_| Best(f64::MAX));
    for _ in 0..PASSES {
        let mut all = |direction, checksums| {
            let done = run(&mut ring, &pool, direction, &map, checksums);
            assert!(done.iter().all(Completion::is_ok));
        };
        written.time(|| all(Direction::Write, None));
        summed.time(|| all(Direction::Write, Some(&sums)));
        plain.time(|| all(Direction::Read, None));
        checked.time(|| all(Direction::Read, Some(&sums)));
        copied.time(|| {
            for (to, from) in to.chunks_mut(OBJECT).zip(from.chunks(OBJECT)) {
                to.copy_from_slice(from);
            }
        });
    }
    let rate = |best: &Best| BYTES as f64 / best.0 / 1e9;
    println!(
        "memcpy {:.2} GB/s, read {:.2}, with checksums {:.2} (ratio {:.2}); write {:.2}, with \
         checksums {:.2} (ratio {:.2})",
        rate(&copied),
        rate(&plain),
        rate(&checked),
        plain.0 / checked.0,
        rate(&written),
        rate(&summed),
        written.0 / summed.0,
    );
    assert_eq!(to, from);
}
