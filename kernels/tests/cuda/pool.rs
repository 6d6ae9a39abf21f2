//! The kernels of gio_pool: contents generated and checked on the GPU, objects copied between
//! staging memory and blocks, and the words that order the copies.
#![allow(unsafe_code, reason = "puts kernels on streams, over memory of the tests")]

use cuda_mock::{self as mock, Level, each, isolated};
use std::{ptr::NonNull, sync::Arc, time::Duration};

use gio_kernels::{
    cuda::{
        CudaDevice, CudaError, CudaModule, CudaPattern, CudaStream, CudaStreams, DeviceMemory,
        LaunchMode, PatternItem, PinnedMemory,
    },
    pattern::{Difference, Pattern},
    ptx,
};
use gio_uring::{
    IoExecutor, IoStatus, MoveChecksums, RawStream, ScatterGather, ScatterGatherOp, StreamOps,
};
use nvme_driver::{DevicePtr, platform::mmio};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng, seq::SliceRandom as _};
use ripieno_testkit::{WATCHDOG, WATCHDOG_NS, until};

use crate::rig::{self, bare, set_stop};

fn bytes(random: &mut SmallRng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    random.fill(&mut bytes[..]);
    bytes
}

fn raw(stream: &CudaStream) -> RawStream {
    // SAFETY: the tests keep their streams until they are idle.
    unsafe { RawStream::new(stream.raw()) }
}

fn settle(stream: &CudaStream) {
    until("the stream ends", || stream.is_idle().expect("a GPU"));
}

fn contents(memory: &DeviceMemory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).expect("inside");
    bytes
}

/// Checks the same bytes on the host.
fn host_check(item: &PatternItem, bytes: &mut [u8]) -> Result<(), Difference> {
    let len = item.len as usize;
    assert_eq!(bytes.len(), len);
    let at = NonNull::from(bytes).cast();
    // SAFETY: the slice's own bytes.
    unsafe { Pattern::new(item.seed).check(at, item.offset as usize, len) }
}

/// Returns consecutive items in `memory`, aligned to 4 or more, of many lengths.
fn items(memory: &DeviceMemory, random: &mut SmallRng, count: usize) -> Vec<PatternItem> {
    let mut at = 0;
    let mut items = Vec::new();
    for _ in 0..count {
        at += [0, 0, 4, 8, 12][random.random_range(0..5)];
        let longest = if count > 1000 { 20 } else { 3000 };
        let most = [2, 40, 300, longest][random.random_range(0..4)];
        let len = 4 * random.random_range(0..most);
        let start = DevicePtr(memory.device().0 + at as u64);
        let (seed, offset) = (random.random(), 8 * random.random_range(0..5000) as u32);
        items.push(PatternItem { at: start, seed, offset, len: len as u32 });
        at += len;
    }
    assert!(at <= memory.len(), "{at}");
    items
}

fn part<'a>(memory: &DeviceMemory, item: &PatternItem, bytes: &'a mut [u8]) -> &'a mut [u8] {
    let at = (item.at.0 - memory.device().0) as usize;
    &mut bytes[at..at + item.len as usize]
}

/// Fill, check, corrupt some bytes, check again, poison: host and GPU agree each time.
fn host_and_gpu_agree(device: &Arc<CudaDevice>, rounds: u64) {
    let memory = device.allocate(2 << 20).expect("memory");
    let stream = CudaStream::new(device, None).expect("a stream");
    let pattern = CudaPattern::new(device).expect("compiles");
    for round in 0..rounds {
        let mut random = SmallRng::seed_from_u64(round);
        // More than one launch takes, in every other round.
        let all = items(&memory, &mut random, [700, 2600][round as usize % 2]);
        // SAFETY: the items are parts of `memory`, which outlives the stream's work.
        let check = unsafe {
            pattern.fill(raw(&stream), &all).expect("enqueued");
            pattern.check(raw(&stream), &all).expect("enqueued")
        };
        check.wait(WATCHDOG).expect("in time");
        assert_eq!(check.differences().expect("done"), [], "round {round}");
        let mut bytes = contents(&memory);
        for (index, item) in all.iter().enumerate() {
            let seen = host_check(item, part(&memory, item, &mut bytes));
            assert_eq!(seen, Ok(()), "round {round}, item {index}");
        }
        for _ in 0..100 {
            let at = random.random_range(0..bytes.len());
            bytes[at] ^= 1 << random.random_range(0..8);
        }
        memory.write(0, &bytes).expect("inside");
        // SAFETY: as above.
        let check = unsafe { pattern.check(raw(&stream), &all) }.expect("enqueued");
        check.wait(WATCHDOG).expect("in time");
        let mut wanted = Vec::new();
        for (index, item) in all.iter().enumerate() {
            let seen = host_check(item, part(&memory, item, &mut bytes));
            wanted.extend(seen.err().map(|difference| (index, difference)));
        }
        assert!(!wanted.is_empty());
        assert_eq!(check.differences().expect("done"), wanted, "round {round}");
        // SAFETY: as above.
        unsafe { pattern.poison(raw(&stream), &all) }.expect("enqueued");
        settle(&stream);
        let mut bytes = contents(&memory);
        for item in &all {
            let mut poisoned = part(&memory, item, &mut bytes).chunks(4);
            assert!(poisoned.all(|four| four == [0xEF, 0xBE, 0xAD, 0xDE]));
        }
    }
}

#[test]
fn contents_are_made_and_checked_on_the_gpu() {
    isolated("pool::contents_are_made_and_checked_on_the_gpu", Level::Full, &[], || {
        let device = rig::gpu();
        host_and_gpu_agree(&device, 4);
        drop(device);
        mock::assert_clean();
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn contents_are_made_and_checked_on_a_gpu() {
    host_and_gpu_agree(&rig::only_gpu(), 20);
}

/// One item of 4096 bytes.
fn item(memory: &DeviceMemory) -> PatternItem {
    PatternItem { at: memory.device(), seed: 5, offset: 0, len: 4096 }
}

#[test]
fn a_check_is_not_done_before_its_stream_is_past_it() {
    isolated("pool::a_check_is_not_done_before_its_stream_is_past_it", Level::Full, &[], || {
        let device = rig::gpu();
        let memory = device.allocate(4096).expect("memory");
        let stream = CudaStream::new(&device, None).expect("a stream");
        let pattern = CudaPattern::with_items(&device, 1).expect("compiles");
        mock::hang(true);
        // SAFETY: the memory outlives the stream's work.
        let check = unsafe { pattern.check(raw(&stream), &[item(&memory)]) }.expect("enqueued");
        std::thread::sleep(Duration::from_millis(20));
        assert!(!check.is_done().expect("a GPU"));
        assert!(matches!(check.differences(), Err(CudaError::Argument(_))));
        let late = check.wait(Duration::from_millis(5)).expect_err("it hangs").to_string();
        assert!(late.contains("1 items did not end within 0.005 s"), "{late}");
        // A dropped check is not awaited; its slot is reused once it has ended.
        let before = mock::count("cuMemHostAlloc");
        drop(check);
        mock::hang(false);
        settle(&stream);
        for _ in 0..5 {
            // SAFETY: as above.
            let check = unsafe { pattern.check(raw(&stream), &[item(&memory)]) };
            check.expect("enqueued").wait(WATCHDOG).expect("in time");
        }
        assert_eq!(mock::count("cuMemHostAlloc"), before);
        drop((pattern, memory, stream, device));
        mock::assert_clean();
    });
}

#[test]
fn items_that_cannot_be_right_are_refused_and_none_is_launched() {
    let test = "pool::items_that_cannot_be_right_are_refused_and_none_is_launched";
    isolated(test, Level::Full, &[], || {
        let device = rig::gpu();
        let memory = device.allocate(4096).expect("memory");
        let stream = CudaStream::new(&device, None).expect("a stream");
        let pattern = CudaPattern::new(&device).expect("compiles");
        let good = item(&memory);
        let odd = DevicePtr(good.at.0 + 2);
        for bad in [
            PatternItem { at: odd, len: 8, ..good },
            PatternItem { offset: 4, len: 8, ..good },
            PatternItem { len: 6, ..good },
            PatternItem { offset: u32::MAX - 7, len: 8, ..good },
        ] {
            // SAFETY: nothing is enqueued.
            let refused = unsafe { pattern.fill(raw(&stream), &[good, bad]) };
            let text = refused.expect_err("cannot be right").to_string();
            assert!(text.contains("item 1"), "{text}");
        }
        assert_eq!(mock::count("cuLaunchKernel"), 0);
        // SAFETY: no items.
        let none = unsafe { pattern.check(raw(&stream), &[]) }.expect("nothing to do");
        assert_eq!(none.differences().expect("done at once"), []);
        mock::inject("cuLaunchKernel", 0, 701);
        // SAFETY: the memory outlives the stream's work.
        let refused = unsafe { pattern.fill(raw(&stream), &[good]) }.expect_err("not launched");
        assert_eq!(refused.code().map(|code| code.0), Some(701));
        drop((none, pattern, memory, stream, device));
        mock::assert_clean();
    });
}

#[test]
fn a_lost_gpu_ends_the_waiting() {
    each("pool::a_lost_gpu_ends_the_waiting", Level::Full, &[&[], &[]], |case| {
        let device = rig::gpu();
        let memory = device.allocate(4096).expect("memory");
        let stream = CudaStream::new(&device, None).expect("a stream");
        let pattern = CudaPattern::new(&device).expect("compiles");
        // A host address makes the kernel fault. In the other case the GPU falls off the bus.
        let host = DevicePtr(device.pinned(4096).expect("memory").host().as_ptr().addr() as u64);
        let wrong =
            if case == 0 { PatternItem { at: host, ..item(&memory) } } else { item(&memory) };
        mock::hang(true);
        // SAFETY: the mock checks addresses before it uses them.
        let check = unsafe { pattern.check(raw(&stream), &[wrong]) }.expect("enqueued");
        if case == 1 {
            mock::lose(719);
        }
        mock::hang(false);
        let error = check.wait(WATCHDOG).expect_err("the GPU is lost");
        assert_eq!(error.code().map(|code| code.0), Some([700, 719][case]), "{error}");
        device.healthy().expect_err("lost");
        // SAFETY: as above.
        unsafe { pattern.fill(raw(&stream), &[item(&memory)]) }.expect_err("lost");
        drop((check, pattern, memory, stream, device));
        mock::assert_thread_clean();
    });
}

#[test]
fn nothing_is_allocated_while_an_executor_runs() {
    isolated("pool::nothing_is_allocated_while_an_executor_runs", Level::Full, &[], || {
        let device = rig::gpu();
        let memory = device.allocate(4096).expect("memory");
        let stream = CudaStream::new(&device, None).expect("a stream");
        let pattern = CudaPattern::with_items(&device, 2049).expect("compiles");
        let (mut executor, page, args) = bare(&device, LaunchMode::Resident);
        executor.start(args, &[]).expect("starts");
        let before = mock::count("cuMemHostAlloc");
        // Two slots: two checks are kept, so there is no room for a third.
        // SAFETY: the memory outlives the stream's work.
        let check = || unsafe { pattern.check(raw(&stream), &[item(&memory)]) };
        let kept = [check().expect("enqueued"), check().expect("enqueued")];
        let text = check().expect_err("no room").to_string();
        assert!(text.contains("with_items"), "{text}");
        // Dropped checks in flight are awaited.
        drop(kept);
        for _ in 0..6 {
            drop(check().expect("enqueued"));
        }
        assert_eq!(mock::count("cuMemHostAlloc"), before);
        set_stop(&page);
        executor.stop(WATCHDOG_NS).expect("stops");
        // Now more is allocated.
        let many: Vec<_> = (0..5).map(|_| check().expect("enqueued")).collect();
        assert!(mock::count("cuMemHostAlloc") > before);
        many.iter().for_each(|check| check.wait(WATCHDOG).expect("in time"));
        drop((many, pattern, memory, stream, executor, page, device));
        mock::assert_clean();
    });
}

#[test]
fn what_a_kernel_still_uses_is_leaked() {
    each("pool::what_a_kernel_still_uses_is_leaked", Level::Full, &[&[], &[]], |case| {
        let device = rig::gpu();
        let memory = device.allocate(4096).expect("memory");
        let stream = CudaStream::new(&device, None).expect("a stream");
        mock::hang(true);
        if case == 0 {
            let pattern = CudaPattern::new(&device).expect("compiles");
            // SAFETY: the memory is never freed.
            unsafe { pattern.fill(raw(&stream), &[item(&memory)]) }.expect("enqueued");
        } else {
            let streams = CudaStreams::new(&device).expect("compiles");
            // SAFETY: as above.
            let stream = unsafe { RawStream::new(streams.stream().raw()) };
            // SAFETY: as above; the mock's kernel is suspended.
            unsafe { streams.scatter_gather(stream, &one_object(&memory)) }.expect("enqueued");
        }
        // The pattern has an empty stream.
        let streams = if case == 0 { 1 } else { 0 };
        for (call, freed) in
            [("cuMemFreeHost", 0), ("cuModuleUnload", 0), ("cuStreamDestroy", streams)]
        {
            assert_eq!(mock::count(call), freed, "{call}");
        }
        std::mem::forget((memory, stream));
    });
}

/// Tables and staging memory included, within 4096 bytes.
fn one_object(memory: &DeviceMemory) -> ScatterGather {
    let at = memory.device();
    ScatterGather {
        op: ScatterGatherOp::Scatter,
        staging: at,
        staging_row: 0,
        staging_blocks: None,
        rows: DevicePtr(at.0 + 1024),
        row_count: 1,
        blocks: DevicePtr(at.0 + 2048),
        count: 1,
        block_stride: 64,
        object_bytes: 64,
        checksums: None,
    }
}

/// A pool on the GPU, staging memory on the host, and the tables of a request.
struct Pool {
    memory: DeviceMemory,
    staging: PinnedMemory,
    tables: PinnedMemory,
}

/// Layout of a pool and its staging memory.
struct Shape {
    object: usize,
    stride: usize,
    staging_row: usize,
    rows: Vec<usize>,
    map: Vec<u32>,
    /// Block of each position within a row of staging memory; empty: contiguous.
    staged: Vec<u32>,
}

impl Shape {
    fn random(random: &mut SmallRng) -> Self {
        let unit = [1, 4, 8, 16, 1024][random.random_range(0..5)];
        let most: usize = [30, 600, 2048, 6000][random.random_range(0..4)];
        let object = (1 + random.random_range(0..most)).next_multiple_of(unit);
        let stride = (object + random.random_range(0..200)).next_multiple_of(unit);
        let blocks = 1 + random.random_range(0..20);
        let mut map: Vec<u32> = (0..blocks as u32).collect();
        map.shuffle(random);
        map.truncate(1 + random.random_range(0..blocks));
        let row = (blocks * stride + random.random_range(0..100)).next_multiple_of(unit);
        let rows = (0..1 + random.random_range(0..3)).map(|i| i * row).collect();
        let mut staged: Vec<u32> = Vec::new();
        if random.random() {
            staged = (0..blocks as u32).collect();
            staged.shuffle(random);
            staged.truncate(map.len());
        }
        let staging_row = (blocks * object).next_multiple_of(unit);
        Self { object, stride, staging_row, rows, map, staged }
    }

    /// Offsets of each object in staging memory and in the pool.
    fn objects(&self) -> impl Iterator<Item = (usize, usize)> {
        self.rows.iter().enumerate().flat_map(move |(i, row)| {
            self.map.iter().enumerate().map(move |(p, block)| {
                let at = self.staged.get(p).map_or(p, |at| *at as usize);
                let staged = i * self.staging_row + at * self.object;
                (staged, row + *block as usize * self.stride)
            })
        })
    }
}

impl Pool {
    fn new(device: &Arc<CudaDevice>) -> Self {
        Self {
            memory: device.allocate(512 << 10).expect("memory"),
            staging: device.pinned(512 << 10).expect("memory"),
            tables: device.pinned(4096).expect("memory"),
        }
    }

    fn moves(&self, shape: &Shape, op: ScatterGatherOp) -> ScatterGather {
        let tables = self.tables.host();
        for (i, row) in shape.rows.iter().enumerate() {
            let row = self.memory.device().0 + *row as u64;
            // SAFETY: at most 3 rows, at the beginning of the page.
            unsafe { tables.cast::<u64>().add(i).write_volatile(row) };
        }
        for (i, block) in shape.map.iter().enumerate() {
            // SAFETY: at most 20 blocks, from 1024 on.
            unsafe { tables.byte_add(1024).cast::<u32>().add(i).write_volatile(*block) };
        }
        for (i, block) in shape.staged.iter().enumerate() {
            // SAFETY: at most 20 blocks, from 1536 on.
            unsafe { tables.byte_add(1536).cast::<u32>().add(i).write_volatile(*block) };
        }
        let staged = DevicePtr(self.tables.device().0 + 1536);
        ScatterGather {
            op,
            staging: self.staging.device(),
            staging_row: shape.staging_row as u64,
            staging_blocks: (!shape.staged.is_empty()).then_some(staged),
            rows: self.tables.device(),
            row_count: shape.rows.len() as u32,
            blocks: DevicePtr(self.tables.device().0 + 1024),
            count: shape.map.len() as u32,
            block_stride: shape.stride as u64,
            object_bytes: shape.object as u32,
            checksums: None,
        }
    }

    fn write_staging(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.staging.len());
        // SAFETY: inside the memory, which no kernel uses now.
        unsafe { bytes.as_ptr().copy_to(self.staging.host().as_ptr(), bytes.len()) };
    }

    fn read_staging(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.staging.len()];
        // SAFETY: as above.
        unsafe { bytes.as_mut_ptr().copy_from(self.staging.host().as_ptr(), bytes.len()) };
        bytes
    }
}

/// Scatters and gathers of random shapes, checked against a model.
fn objects_move(device: &Arc<CudaDevice>, rounds: u64) {
    let streams = CudaStreams::new(device).expect("compiles");
    let other = CudaStream::new(device, None).expect("a stream");
    let pool = Pool::new(device);
    for round in 0..rounds {
        let mut random = SmallRng::seed_from_u64(round << 8);
        let shape = Shape::random(&mut random);
        let (stream, raw) = match round % 2 {
            0 => (streams.stream(), streams.own_stream()),
            _ => (&other, raw(&other)),
        };
        let staged = bytes(&mut random, pool.staging.len());
        let mut wanted = bytes(&mut random, pool.memory.len());
        pool.write_staging(&staged);
        pool.memory.write(0, &wanted).expect("inside");
        // SAFETY: the pool outlives the stream's work, which is waited for.
        unsafe { streams.scatter_gather(raw, &pool.moves(&shape, ScatterGatherOp::Scatter)) }
            .expect("moves");
        settle(stream);
        for (from, to) in shape.objects() {
            wanted[to..to + shape.object].copy_from_slice(&staged[from..from + shape.object]);
        }
        assert!(contents(&pool.memory) == wanted, "round {round}: to the pool");
        assert!(pool.read_staging() == staged, "round {round}: only read");

        let mut staged = bytes(&mut random, pool.staging.len());
        pool.write_staging(&staged);
        let moves = pool.moves(&shape, ScatterGatherOp::Gather);
        // SAFETY: as above.
        unsafe { streams.scatter_gather(raw, &moves) }.expect("moves");
        settle(stream);
        for (to, from) in shape.objects() {
            staged[to..to + shape.object].copy_from_slice(&wanted[from..from + shape.object]);
        }
        assert!(pool.read_staging() == staged, "round {round}: to staging memory");
        assert!(contents(&pool.memory) == wanted, "round {round}: only read");
    }
}

/// A gather stores checksums of the pool's bytes; a scatter detects a mismatched object.
fn checked_objects_move(device: &Arc<CudaDevice>, rounds: u64) {
    let streams = CudaStreams::new(device).expect("compiles");
    let raw = streams.own_stream();
    let pool = Pool::new(device);
    let tables = pool.tables.device().0;
    let (values, status, errors) = (tables + 2048, tables + 3072, tables + 4032);
    let word = |address: u64| {
        // SAFETY: inside the tables' page, which no kernel uses when this is called.
        unsafe { pool.tables.host().byte_add((address - tables) as usize).cast::<u32>() }
    };
    for round in 0..rounds {
        let mut random = SmallRng::seed_from_u64(round << 8 | 1);
        let shape = Shape::random(&mut random);
        let objects = bytes(&mut random, pool.memory.len());
        pool.memory.write(0, &objects).expect("inside");
        // SAFETY: as above: the page is ours.
        unsafe { word(values).write_bytes(0, (4096 - 2048) / 4) };
        let checksums = MoveChecksums {
            values: DevicePtr(values),
            status: DevicePtr(status),
            errors: DevicePtr(errors),
        };
        let moves = |op| ScatterGather { checksums: Some(checksums), ..pool.moves(&shape, op) };
        // SAFETY: the pool outlives the stream's work, which is waited for.
        unsafe { streams.scatter_gather(raw, &moves(ScatterGatherOp::Gather)) }.expect("moves");
        settle(streams.stream());
        let all: Vec<_> = shape.objects().collect();
        for (i, (_, at)) in all.iter().enumerate() {
            // SAFETY: at most 60 objects, of 4 bytes each.
            let found = unsafe { word(values).add(i).read_volatile() };
            assert_eq!(found, crc32c::crc32c(&objects[*at..at + shape.object]), "round {round}");
        }

        let wrong = random.random_range(0..all.len());
        let mut staged = pool.read_staging();
        staged[all[wrong].0 + random.random_range(0..shape.object)] ^= 0x10;
        pool.write_staging(&staged);
        // SAFETY: as above.
        unsafe { streams.scatter_gather(raw, &moves(ScatterGatherOp::Scatter)) }.expect("moves");
        settle(streams.stream());
        let wrong = wrong % shape.map.len();
        for position in 0..shape.map.len() {
            // SAFETY: at most 20 positions, of 4 bytes each.
            let found = IoStatus::decode(unsafe { word(status).add(position).read_volatile() });
            let expected = if position == wrong { IoStatus::Checksum } else { IoStatus::Ok };
            assert_eq!(found, expected, "round {round}, position {position}");
        }
        // SAFETY: near the end of the page.
        assert_eq!(unsafe { word(errors).read_volatile() }, 1, "round {round}");
    }
}

#[test]
fn moved_objects_are_checked() {
    isolated("pool::moved_objects_are_checked", Level::Full, &[], || {
        let device = rig::gpu();
        checked_objects_move(&device, 40);
        drop(device);
        mock::assert_clean();
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn moved_objects_are_checked_on_a_gpu() {
    checked_objects_move(&rig::only_gpu(), 200);
}

#[test]
fn objects_are_scattered_and_gathered() {
    isolated("pool::objects_are_scattered_and_gathered", Level::Full, &[], || {
        let device = rig::gpu();
        objects_move(&device, 40);
        drop(device);
        mock::assert_clean();
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn objects_are_scattered_and_gathered_on_a_gpu() {
    objects_move(&rig::only_gpu(), 200);
}

/// A copy queued behind a word sees everything written before the word is set, and a word written
/// after the copy signals its completion.
fn words_order_moves(device: &Arc<CudaDevice>) {
    let streams = CudaStreams::new(device).expect("compiles");
    let pool = Pool::new(device);
    let words = device.pinned(4096).expect("memory");
    let (ready, done) = (words.device(), DevicePtr(words.device().0 + 64));
    let host = words.host().cast::<u32>();
    // SAFETY: inside the page.
    let host_done = unsafe { host.byte_add(64) };
    let shape = Shape {
        object: 4096,
        stride: 8192,
        staging_row: 8 * 4096,
        rows: vec![0],
        map: (0..8).rev().collect(),
        staged: Vec::new(),
    };
    let stream = streams.own_stream();
    for value in 1..6u32 {
        let mut random = SmallRng::seed_from_u64(u64::from(value) << 40);
        // SAFETY: pool and words outlive the stream's work.
        unsafe {
            streams.wait_word(stream, ready, value).expect("waits");
            let moves = pool.moves(&shape, ScatterGatherOp::Scatter);
            streams.scatter_gather(stream, &moves).expect("moves");
            streams.write_word(stream, done, value).expect("writes");
        }
        std::thread::sleep(Duration::from_millis(5));
        // SAFETY: words of the page.
        assert!(unsafe { mmio::load_acquire32(host_done) } < value, "nothing was ready");
        let staged = bytes(&mut random, 8 * 4096);
        pool.write_staging(&staged);
        // SAFETY: as above.
        unsafe { mmio::store_release32(host, value) };
        // SAFETY: as above.
        until("the word comes", || unsafe { mmio::load_acquire32(host_done) } == value);
        let bytes = contents(&pool.memory);
        for (from, to) in shape.objects() {
            assert!(bytes[to..to + 4096] == staged[from..from + 4096], "value {value}");
        }
    }
    settle(streams.stream());
}

#[test]
fn moves_are_in_the_order_of_the_words_around_them() {
    isolated("pool::moves_are_in_the_order_of_the_words_around_them", Level::Full, &[], || {
        let device = rig::gpu();
        assert!(CudaStreams::new(&device).expect("compiles").orders_peer_writes());
        words_order_moves(&device);
        drop(device);
        mock::assert_clean();
    });
}

/// Attribute 98: waits can flush. 118: ordering of peers' writes.
#[test]
fn waits_flush_what_peers_wrote_where_the_gpu_can() {
    let (flush, unordered) =
        ([("MOCK_CUDA_ATTRIBUTE", "98:1")], [("MOCK_CUDA_ATTRIBUTE", "118:0")]);
    let cases = [&[][..], &flush, &unordered];
    each("pool::waits_flush_what_peers_wrote_where_the_gpu_can", Level::Full, &cases, |case| {
        let device = rig::gpu();
        let word = device.pinned(4096).expect("memory");
        let streams = CudaStreams::new(&device).expect("compiles");
        // SAFETY: the word outlives the stream's work; it is there already.
        unsafe { streams.wait_word(streams.own_stream(), word.device(), 0) }.expect("waits");
        settle(streams.stream());
        assert_eq!(mock::count("waits that flush"), [0, 1, 0][case]);
        assert_eq!(streams.orders_peer_writes(), case != 2);
        drop((streams, word, device));
        mock::assert_clean();
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn moves_are_in_the_order_of_the_words_around_them_on_a_gpu() {
    words_order_moves(&rig::only_gpu());
}

#[test]
fn what_a_stream_does_not_take_is_an_error_with_its_cause() {
    isolated(
        "pool::what_a_stream_does_not_take_is_an_error_with_its_cause",
        Level::Full,
        &[],
        || {
            let device = rig::gpu();
            let memory = device.allocate(4096).expect("memory");
            let streams = CudaStreams::new(&device).expect("compiles");
            let stream = streams.own_stream();
            let nothing = [
                ScatterGather { count: 0, ..one_object(&memory) },
                ScatterGather { row_count: 0, ..one_object(&memory) },
                ScatterGather { object_bytes: 0, ..one_object(&memory) },
            ];
            for moves in nothing {
                // SAFETY: nothing is moved.
                unsafe { streams.scatter_gather(stream, &moves) }.expect("nothing to do");
            }
            let huge = ScatterGather {
                count: u32::MAX,
                row_count: u32::MAX,
                object_bytes: u32::MAX,
                ..one_object(&memory)
            };
            // SAFETY: rejected.
            unsafe { streams.scatter_gather(stream, &huge) }.expect_err("more than there is");
            assert_eq!(mock::count("cuLaunchKernel"), 0);
            for call in ["cuLaunchKernel", "cuStreamWaitValue32", "cuStreamWriteValue32"] {
                mock::inject(call, 0, 801);
            }
            let word = memory.device();
            // SAFETY: each is rejected.
            let refused = unsafe {
                [
                    streams.scatter_gather(stream, &one_object(&memory)),
                    streams.wait_word(stream, word, 1),
                    streams.write_word(stream, word, 1),
                ]
            };
            for error in refused {
                let cause = error.expect_err("refused").cause;
                assert!(cause.contains("801"), "{cause}");
            }
            drop((streams, memory, device));
            mock::assert_clean();
        },
    );
}

#[test]
fn modules_and_functions_are_compared_with_the_program() {
    isolated("pool::modules_and_functions_are_compared_with_the_program", Level::Full, &[], || {
        let device = rig::gpu();
        let module = CudaModule::compile(&device, ptx::POOL_PTX, "some kernels").expect("compiles");
        let error = module.function("gio_kernel").expect_err("in another module").to_string();
        assert!(error.contains("gio_kernel") && error.contains("some kernels"), "{error}");
        let function = module.function(ptx::SCATTER_GATHER_ENTRY).expect("is there");
        drop(module);
        let stream = CudaStream::new(&device, None).expect("a stream");
        // SAFETY: rejected before it reaches the driver.
        let refused = unsafe { function.launch(raw(&stream), 1, 32, [0u64; 3]) };
        let text = refused.expect_err("another argument").to_string();
        assert!(text.contains("88 bytes") && text.contains("24"), "{text}");
        assert_eq!(mock::count("cuLaunchKernel"), 0);
        // Nothing to copy, so nothing is accessed. The function keeps its module loaded.
        // SAFETY: the argument's type has the size of `gio_scatter_gather_args`, and names nothing.
        unsafe { function.launch(raw(&stream), 1, 32, [0u64; 11]) }.expect("launched");
        settle(&stream);
        assert_eq!(mock::count("launched gio_scatter_gather"), 1);
        let text = CudaModule::compile(&device, "nonsense", "odd ones").expect_err("no PTX");
        assert!(text.to_string().contains("the PTX of odd ones"), "{text}");
        drop((function, stream, device));
        mock::assert_clean();
    });
}
