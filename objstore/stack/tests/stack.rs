//! A store in a directory, with KV memory owned by the test.

#![allow(unsafe_code, reason = "the memory of an engine, as the store sees it: by its address")]

use std::{ops::Range, path::Path, process::Command, ptr::NonNull, sync::Arc};

use nvme_driver::{ControllerOptions, DescriptorPreference};
use objstore::{BlockId, Codec, Format, KvShape, Layer, StoreError, StoreId, StoreOptions};
use ripieno_stack::{
    Builder, EngineMemory, Executor, PoolLayout, PoolMemory, Request, Stack, StackConfig,
    StackError, StoreDir, StoreDirMedia, StoreDirOptions,
};
use ripieno_testkit::{is_without_io_uring, keys, pattern, without_io_uring};

const SHAPE: KvShape = KvShape { layers: 3, segments: 2, object_bytes: 4096, block_tokens: 16 };
const BLOCKS: u32 = 8;
/// Bytes before the pool, and between objects.
const GAP: usize = 13;

/// An engine's memory; it begins at an odd address.
struct Engine {
    memory: EngineMemory,
    base: NonNull<u8>,
    layout: PoolLayout,
}

impl Engine {
    fn new(shift: usize) -> Self {
        let stride = SHAPE.object_bytes as usize + shift;
        let tensor = stride * BLOCKS as usize;
        let bytes = tensor * SHAPE.rows() as usize;
        let memory: &'static mut [u8] = Box::leak(vec![0; bytes + 4096 + shift].into_boxed_slice());
        let base = NonNull::from(memory).cast::<u8>();
        let base = base.map_addr(|at| {
            at.checked_add(at.get().next_multiple_of(4) - at.get() + shift).unwrap()
        });
        // SAFETY: leaked, and accessed by address only.
        let memory = unsafe { EngineMemory::new(base, bytes, Arc::new(())) };
        let rows = (0..u64::from(SHAPE.rows())).map(|row| row * tensor as u64).collect();
        let layout = PoolLayout { rows, block_stride: stride as u64, blocks: BLOCKS };
        Self { memory, base, layout }
    }

    fn object(&self, block: u32, row: u32) -> NonNull<u8> {
        let offset = self.layout.rows[row as usize] + u64::from(block) * self.layout.block_stride;
        // SAFETY: inside the memory.
        unsafe { self.base.add(offset as usize) }
    }

    fn expected(seed: u64, row: u32) -> Vec<u8> {
        pattern(SHAPE.object_bytes as usize, seed << 8 | u64::from(row))
    }

    fn fill(&self, block: u32, seed: u64) {
        for row in 0..SHAPE.rows() {
            let bytes = Self::expected(seed, row);
            let from = NonNull::from(&*bytes).cast::<u8>();
            // SAFETY: an object has that many bytes; no device uses it now.
            unsafe { self.object(block, row).copy_from_nonoverlapping(from, bytes.len()) };
        }
    }

    fn holds(&self, block: u32, row: u32, seed: u64) -> bool {
        let mut found = vec![0; SHAPE.object_bytes as usize];
        let to = NonNull::from(&mut *found).cast::<u8>();
        // SAFETY: as in `fill`.
        unsafe { to.copy_from_nonoverlapping(self.object(block, row), found.len()) };
        found == Self::expected(seed, row)
    }
}

fn config(store_dir: StoreDir, engine: &Engine, descriptors: DescriptorPreference) -> Builder {
    by(None, store_dir, engine, descriptors)
}

fn by(
    executor: Option<Executor>,
    store_dir: StoreDir,
    engine: &Engine,
    descriptors: DescriptorPreference,
) -> Builder {
    let pool = PoolMemory::Engine { memory: engine.memory.clone(), layout: engine.layout.clone() };
    let controller = ControllerOptions { descriptors, ..ControllerOptions::default() };
    let config = StackConfig { executor, ..StackConfig::default() };
    Builder::new(config, SHAPE).on(store_dir).pool(pool).controller(controller)
}

fn created(dir: &Path, engine: &Engine, descriptors: DescriptorPreference) -> Stack {
    let media = StoreDirMedia::Files { count: 2, bytes: 64 << 20 };
    let store_dir =
        StoreDir::create(dir, &StoreDirOptions { id: 7, media, lba_bytes: 4096 }).unwrap();
    let format = Format::new(StoreId([7; 16]), SHAPE);
    config(store_dir, engine, descriptors).format(format).open().unwrap()
}

fn reopened(dir: &Path, engine: &Engine, descriptors: DescriptorPreference) -> Stack {
    config(StoreDir::open(dir).unwrap(), engine, descriptors).open().unwrap()
}

fn blocks(range: Range<u32>) -> Vec<BlockId> {
    range.map(BlockId).collect()
}

fn layers() -> impl Iterator<Item = Layer> {
    (0..SHAPE.layers).map(Layer)
}

/// Stores the keys of `range` from the blocks 0, 1, ...
fn store(stack: &Stack, engine: &Engine, range: Range<u32>) {
    let count = range.len() as u32;
    (0..count).zip(range.clone()).for_each(|(block, key)| engine.fill(block, key.into()));
    let request = Request::store(stack.store(), &keys(range), &blocks(0..count)).unwrap();
    assert_eq!(request.accepted(), Some((count as usize, count as usize)));
    for layer in layers() {
        request.start(layer).unwrap();
        request.wait(layer).unwrap();
    }
    let committed = request.commit().unwrap();
    assert_eq!((committed.accepted, committed.written), (count as usize, count as usize));
}

/// Retrieves the keys of `range` into other blocks, and compares every byte.
fn retrieve(stack: &Stack, engine: &Engine, range: Range<u32>) {
    let count = range.len() as u32;
    let prefix = stack.store().lookup(&keys(range.clone())).unwrap();
    assert_eq!(prefix.len() as u32, count);
    let targets = blocks(BLOCKS - count..BLOCKS);
    targets.iter().for_each(|block| engine.fill(block.0, 0xEE));
    let request = Request::retrieve(stack.store(), &prefix, 0, &targets).unwrap();
    layers().for_each(|layer| request.start(layer).unwrap());
    for layer in layers() {
        if layer.0 == 1 {
            while request.poll(layer).unwrap().is_none() {}
        } else {
            assert_eq!(request.wait(layer).unwrap().objects, u64::from(2 * count));
        }
        for (block, key) in targets.iter().zip(range.clone()) {
            for row in SHAPE.layer_rows(layer) {
                assert!(engine.holds(block.0, row, key.into()), "block {block}, row {row}");
            }
        }
    }
}

fn survives(shift: usize, descriptors: DescriptorPreference, bounced: bool) {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("store");
    let engine = Engine::new(shift);
    let stack = created(&dir, &engine, descriptors);
    assert_eq!(stack.is_bounced(), bounced);
    store(&stack, &engine, 0..3);
    retrieve(&stack, &engine, 0..3);
    stack.close().unwrap();
    let again = reopened(&dir, &engine, descriptors);
    retrieve(&again, &engine, 0..3);
    store(&again, &engine, 3..7);
    retrieve(&again, &engine, 3..7);
    again.close().unwrap();
}

#[test]
fn blocks_survive_in_a_store_dir() {
    survives(0, DescriptorPreference::Auto, false);
}

/// All tests of this file, in a process for which it is forbidden: in most containers it is.
#[test]
fn a_store_in_a_directory_needs_no_io_uring() {
    if is_without_io_uring() {
        let place = tempfile::tempdir().unwrap();
        let engine = Engine::new(0);
        created(place.path(), &engine, DescriptorPreference::default()).close().unwrap();
        let dir = StoreDir::open(place.path()).unwrap();
        let stack = by(None, dir, &engine, DescriptorPreference::default()).open().unwrap();
        let executor = stack.store().stats().unwrap().plane.executor;
        assert_eq!(executor, "file (threads: io_uring is forbidden)");
        return stack.close().unwrap();
    }
    let mut tests = Command::new(std::env::current_exe().unwrap());
    let done = without_io_uring(&mut tests).output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && !said.contains(" 0 passed"), "{said}");
}

/// Both compute where an object is, on two files.
#[test]
fn each_executor_finds_what_the_other_has_stored() {
    let descriptors = DescriptorPreference::default();
    for [first, second] in [[Executor::File, Executor::Host], [Executor::Host, Executor::File]] {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("store");
        let engine = Engine::new(0);
        created(&dir, &engine, descriptors).close().unwrap();
        let open = |executor| {
            by(Some(executor), StoreDir::open(&dir).unwrap(), &engine, descriptors).open().unwrap()
        };
        let stack = open(first);
        store(&stack, &engine, 0..4);
        stack.close().unwrap();
        let stack = open(second);
        retrieve(&stack, &engine, 0..4);
        stack.close().unwrap();
    }
}

#[test]
fn an_odd_address_is_no_obstacle_to_sgls() {
    survives(GAP, DescriptorPreference::Auto, false);
}

#[test]
fn blocks_at_odd_addresses_bounce_where_prps_cannot_name_them() {
    survives(0, DescriptorPreference::Prp, false);
    survives(4, DescriptorPreference::Prp, false);
    survives(GAP, DescriptorPreference::Prp, true);
}

#[test]
fn a_block_is_not_read_into_twice_with_bounce_buffers_either() {
    for shift in [0, GAP] {
        let place = tempfile::tempdir().unwrap();
        let engine = Engine::new(shift);
        let stack = created(place.path(), &engine, DescriptorPreference::Prp);
        store(&stack, &engine, 0..2);
        let prefix = stack.store().lookup(&keys(0..2)).unwrap();
        let twice = Request::retrieve(stack.store(), &prefix, 0, &[BlockId(3), BlockId(3)]);
        let error = twice.unwrap_err();
        assert!(error.to_string().contains("block 3 is the destination of two blocks"), "{error}");
        drop(prefix);
        retrieve(&stack, &engine, 0..2);
        stack.close().unwrap();
    }
}

#[test]
fn bounce_buffers_come_back_with_their_request() {
    let place = tempfile::tempdir().unwrap();
    let engine = Engine::new(GAP);
    let stack = created(place.path(), &engine, DescriptorPreference::Prp);
    for round in 0..4 {
        let begin = |first: u32, count: u32| {
            let first = 100 * round + first;
            Request::store(stack.store(), &keys(first..first + count), &blocks(0..count))
        };
        let (first, second) = (begin(0, 5).unwrap(), begin(5, 3).unwrap());
        let none = begin(8, 1).unwrap_err();
        assert!(
            matches!(none, StackError::Store(StoreError::Bounce { wanted: 1, free: 0, all: 8 })),
            "{none}"
        );
        // One with a layer in flight, one without.
        first.start(Layer(0)).unwrap();
        drop((first, second));
    }
    stack.close().unwrap();
}

#[test]
fn all_layers_move_where_fewer_may_be_in_flight() {
    let place = tempfile::tempdir().unwrap();
    let engine = Engine::new(0);
    created(place.path(), &engine, DescriptorPreference::Auto).close().unwrap();
    let store_dir = StoreDir::open(place.path()).unwrap();
    let options = StoreOptions { iocbs: 2, ..StoreOptions::default() };
    let config = config(store_dir, &engine, DescriptorPreference::Auto).options(options);
    let stack = config.open().unwrap();
    (0..4).for_each(|key| engine.fill(key, key.into()));
    // If this thread is preempted, a layer may have ended meanwhile.
    let has_waited = (0..100).any(|_| {
        let request = Request::store(stack.store(), &keys(0..4), &blocks(0..4)).unwrap();
        request.move_all().unwrap();
        stack.store().plane().stats().unwrap().times.slot_waits.count > 0
    });
    assert!(has_waited, "three layers are in flight at a time");
    let request = Request::store(stack.store(), &keys(0..4), &blocks(0..4)).unwrap();
    request.move_all().unwrap();
    request.commit().unwrap();
    let prefix = stack.store().lookup(&keys(0..4)).unwrap();
    let request = Request::retrieve(stack.store(), &prefix, 0, &blocks(4..8)).unwrap();
    request.move_all().unwrap();
    for (block, row) in (4..8).flat_map(|block| (0..SHAPE.rows()).map(move |row| (block, row))) {
        assert!(engine.holds(block, row, u64::from(block) - 4), "block {block}, row {row}");
    }
    // Fails in the request itself: a layer that was not waited for is in flight.
    request.start(Layer(0)).unwrap();
    assert!(request.move_all().is_err());
    drop((request, prefix));
    stack.close().unwrap();
}

#[test]
fn a_home_whose_files_were_swapped_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let engine = Engine::new(0);
    created(place.path(), &engine, DescriptorPreference::Auto).close().unwrap();
    let name = |at: u32| place.path().join(format!("device-{at}.img"));
    let spare = place.path().join("spare");
    for (from, to) in [(name(0), spare.clone()), (name(1), name(0)), (spare, name(1))] {
        std::fs::rename(from, to).unwrap();
    }
    let store_dir = StoreDir::open(place.path()).unwrap();
    let opened = config(store_dir, &engine, DescriptorPreference::Auto).open();
    let error = opened.unwrap_err();
    assert!(matches!(error, StackError::Store(StoreError::Format(_))), "{error}");
    assert!(error.to_string().contains("device-"), "{error}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let engine = Engine::new(0);
    let stack = created(place.path(), &engine, DescriptorPreference::Auto);
    store(&stack, &engine, 0..2);
    let prefix = stack.store().lookup(&keys(0..2)).unwrap();
    let request = Request::retrieve(stack.store(), &prefix, 0, &blocks(0..2)).unwrap();
    for layer in [Layer(0), Layer(99)] {
        assert!(matches!(
            request.wait(layer),
            Err(StackError::Store(StoreError::NotStarted { .. }))
        ));
        assert!(matches!(
            request.poll(layer),
            Err(StackError::Store(StoreError::NotStarted { .. }))
        ));
    }
    assert!(request.start(Layer(99)).is_err());
    request.start(Layer(0)).unwrap();
    assert!(matches!(request.commit(), Err(StackError::NotWriting)));
    let mut short = engine.layout.clone();
    short.blocks += 1;
    drop(prefix);
    stack.close().unwrap();
    let config = config(StoreDir::open(place.path()).unwrap(), &engine, DescriptorPreference::Auto);
    let pool = PoolMemory::Engine { memory: engine.memory.clone(), layout: short };
    let error = config.pool(pool).open().unwrap_err();
    assert!(error.to_string().contains("objects of"), "{error}");
}

/// An example: as `cargo test` has built it beside the tests, or run by cargo if only one test was
/// built. Cargo alone would build the crates again, with other features.
fn example(name: &str) -> Command {
    let tests = std::env::current_exe().unwrap();
    let built = tests.ancestors().nth(2).unwrap().join("examples").join(name);
    if built.exists() {
        return Command::new(built);
    }
    let mut cargo = Command::new(env!("CARGO"));
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    cargo.args(["run", "--quiet", "--offline", "--manifest-path", manifest, "--example", name]);
    cargo
}

#[test]
fn the_example_finds_its_block_in_a_second_run() {
    let place = tempfile::tempdir().unwrap();
    let run = || {
        let done = example("hello").current_dir(place.path()).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{said}");
        String::from_utf8(done.stdout).unwrap()
    };
    assert_eq!(run(), "stored; run it again\n");
    assert_eq!(run(), "found: 0xab\n");
}

/// The scalars of an engine's block, of four exponents.
fn bf16(seed: u64) -> Vec<u8> {
    let mut bytes = pattern(SHAPE.block_bytes() as usize, seed);
    bytes.iter_mut().skip(1).step_by(2).for_each(|byte| *byte = 0xBC | (*byte & 1));
    bytes
}

#[test]
fn a_directory_with_a_codec_is_one_for_every_executor() {
    let place = tempfile::tempdir().unwrap();
    let made = StackConfig {
        capacity: Some(32 << 20),
        lba: Some(512),
        codec: Some(Codec::Exp3),
        ..StackConfig::at(place.path().join("kv"))
    };
    let keys = keys(0..6);
    for (at, executor) in [None, Some(Executor::Host), Some(Executor::Inline)].iter().enumerate() {
        let config = StackConfig { executor: *executor, ..made.clone() };
        let stack = Builder::new(config, SHAPE).open().unwrap();
        let found = stack.load(&keys, &blocks(8..14)).unwrap();
        assert_eq!(found.iter().filter(|found| **found).count(), 2 * at);
        for block in (0..2 * at as u32).map(BlockId) {
            let seen = stack.read(BlockId(8 + block.0)).unwrap();
            assert_eq!(seen, bf16(block.0.into()), "block {block}");
        }
        (0..6).for_each(|block| stack.write(BlockId(block), &bf16(block.into())).unwrap());
        let count = 2 * (at + 1);
        assert_eq!(stack.save(&keys[..count], &blocks(0..count as u32)).unwrap(), count);
        let stats = stack.store().stats().unwrap();
        assert_eq!(stats.file_bytes, SHAPE.block_bytes() * 3 / 4);
        assert_eq!(stats.plane.stored_bytes, 2 * stats.file_bytes);
        stack.close().unwrap();
    }
    // Without the option it is what it is, and with another one it is refused.
    let any = Builder::new(StackConfig { codec: None, ..made.clone() }, SHAPE).open().unwrap();
    assert_eq!(any.load(&keys, &blocks(8..14)).unwrap(), [true; 6]);
    any.close().unwrap();
    let raw = Builder::new(StackConfig { codec: Some(Codec::None), ..made }, SHAPE).open();
    let refused = raw.unwrap_err().to_string();
    assert!(refused.contains("with codec exp3, and codec none was asked for"), "{refused}");
    let coarse = StackConfig {
        capacity: Some(32 << 20),
        codec: Some(Codec::Exp3),
        ..StackConfig::at(place.path().join("coarse"))
    };
    let refused = Builder::new(coarse, SHAPE).open().unwrap_err().to_string();
    assert!(refused.contains("codec exp3 saves nothing: objects of 4096 bytes"), "{refused}");
}
