//! Encoded objects: every byte comes back, damage does not reach the engine's blocks, and what does
//! not fit is not stored.

use crate::{shelf::Shelf, stack};

use gio_uring::Wait;
use kv_catalog::{OnDevice, Superblock};
use nvme_driver::Nanos;
use nvme_emu::FaultAction;
use objstore::{
    BlockId, BlockKey, Codec, DramMode, KvShape, Layer, Order, Row, Salvage, Store, StoreConfig,
    StoreError, StoreOptions,
};
use ripieno_testkit::{KvMemory, object, pattern};
use stack::{READ, READ_ERROR, Stack, WRITE, WRITE_FAULT, blocks, keys, on};

/// Objects of four LBAs, which are three when they are encoded.
const SHAPE: KvShape = KvShape { layers: 3, segments: 2, object_bytes: 16 << 10, block_tokens: 16 };
/// Bytes of a block on the devices.
const STORED: u64 = 6 * (12 << 10);

fn shelf(codec: Codec) -> Shelf {
    let mut shelf = Shelf::new(2, SHAPE);
    shelf.format.codec = codec;
    shelf.make();
    shelf
}

fn made(options: &StoreOptions) -> (Shelf, Stack) {
    let shelf = shelf(Codec::Exp3);
    let stack = shelf.open(options);
    (shelf, stack)
}

fn rows() -> impl Iterator<Item = Row> {
    (0..SHAPE.rows()).map(Row)
}

fn layers() -> impl Iterator<Item = Layer> {
    (0..SHAPE.layers).map(Layer)
}

/// Stores blocks from `first` on as they are.
fn store(stack: &mut Stack, keys: &[BlockKey], first: u32) {
    let save = stack.store.allocate(keys, &blocks(first, keys.len())).unwrap();
    stack.write_all(&save).unwrap();
    assert_eq!(stack.store.commit(save).unwrap().accepted, keys.len());
}

fn config_error(opened: Result<Store, StoreError>) -> String {
    opened.unwrap_err().to_string()
}

#[test]
fn every_byte_comes_back_from_three_quarters_of_the_bytes() {
    let (shelf, mut stack) = made(&StoreOptions::default());
    let keys = keys(0..20);
    stack.put(&keys, 0);
    assert_eq!(stack.get(&keys, 30), 20);
    let stats = stack.store.stats().unwrap();
    assert_eq!(stats.file_bytes, STORED);
    assert_eq!((stats.plane.stored_bytes, stats.plane.retrieved_bytes), (20 * STORED, 20 * STORED));
    assert_eq!(stats.plane.ring.total.bytes_written, 21 * STORED, "with the self-test");
    let raw = 20 * SHAPE.block_bytes();
    let codec = stats.plane.codec;
    assert_eq!((codec.encoded_bytes, codec.decoded_bytes, codec.unfit_blocks), (raw, raw, 0));
    assert_eq!((codec.encodes.count, codec.decodes.count), (3, 3));
    // Each of the first blocks, beside a whole layer.
    let prefix = stack.store.lookup(&keys[..4]).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(50, 4)).unwrap();
    let ticket = stack.store.start(&load, Layer(1), Order::Unordered).unwrap();
    let done = stack.store.wait(ticket).unwrap();
    assert_eq!((done.objects, done.bytes, done.device_bytes), (8, 8 << 14, 8 * (12 << 10)));
    drop(load);
    drop(prefix);

    // Another process, which learns nothing from this one.
    drop(stack);
    for codec in [None, Some(Codec::Exp3)] {
        let mut again = shelf.open(&StoreOptions { codec, ..StoreOptions::default() });
        assert_eq!(again.get(&keys, 30), 20);
    }
    let raw = self::shelf(Codec::None).open(&StoreOptions::default());
    let (files, least) = (stats.files.files, raw.store.stats().unwrap().files.files * 13 / 10);
    assert!(files >= least, "{files} files, not {least}");
}

#[test]
fn a_store_with_another_codec_is_refused_in_words() {
    let shelf = shelf(Codec::None);
    let powered = shelf.power_on();
    let kv = KvMemory::new(&*powered.domain, SHAPE, 4);
    let options = StoreOptions { codec: Some(Codec::Exp3), ..StoreOptions::default() };
    let refused = config_error(Store::open(StoreConfig {
        devices: powered.devices,
        clock: powered.clock.clone(),
        executor: ripieno_testkit::inline_executor(powered.clock.clone()),
        shape: SHAPE,
        namespace: objstore::Namespace::default(),
        pool: kv.pool.clone(),
        gpu: None,
        options: StoreOptions { virtual_time: true, ..options },
    }));
    assert!(refused.contains("with codec none, and codec exp3 was asked for"), "{refused}");
}

/// Returns where the object's bytes are: its device, and their offset there.
fn place(shelf: &Shelf, stack: &Stack, file: objstore::FileId, row: Row) -> (usize, u64) {
    let superblock = stack.store.superblock();
    let place = superblock.geometry().unwrap().object(file, row);
    let slots = superblock.data.unwrap().offset;
    assert_eq!(shelf.bytes.len(), 2);
    (place.device.0 as usize, slots + place.slot.0 * (12 << 10))
}

#[test]
fn damage_anywhere_in_an_object_never_reaches_the_engine() {
    let (shelf, mut stack) = made(&StoreOptions::default());
    let keys = keys(0..3);
    // From the first byte to the last: whatever the codec has there.
    let places = (0..12).map(|part| part * 1117).chain([12_287]);
    let mut refused = 0;
    for at in places {
        stack.put(&keys, 0);
        let prefix = stack.store.lookup(&keys).unwrap();
        assert_eq!(prefix.len(), 3, "byte {at}");
        let (device, object) = place(&shelf, &stack, prefix.files()[1], Row(3));
        let mut byte = [0];
        shelf.bytes[device].peek(object + at, &mut byte).unwrap();
        shelf.bytes[device].poke(object + at, &[byte[0] ^ 0x10]).unwrap();
        if stack.read(&prefix, 30).is_ok() {
            // Nothing uses the byte.
            assert!(stack.holds(BlockId(31), keys[1]), "byte {at}");
            continue;
        }
        refused += 1;
        let mut found = vec![0; SHAPE.object_bytes as usize];
        stack.kv.read(BlockId(31), Row(3), &mut found);
        assert!(found.iter().all(|byte| *byte == 0xEE), "byte {at}: it was written over");
        drop(prefix);
        assert_eq!(stack.get(&keys, 40), 1, "a miss from now on");
    }
    assert!(refused > 8, "{refused}");
    assert_eq!(stack.refused_dma(), 0);
}

#[test]
fn blocks_that_do_not_fit_are_not_stored_and_the_others_are() {
    let (shelf, mut stack) = made(&StoreOptions::default());
    let keys = keys(0..6);
    keys.iter().zip(blocks(0, 6)).for_each(|(key, block)| stack.fill(block, *key));
    // In one layer of block 2, and in all of block 4.
    let random = |row: Row| pattern(SHAPE.object_bytes as usize, row.0.into());
    stack.kv.write(BlockId(2), Row(2), &random(Row(2)));
    rows().for_each(|row| stack.kv.write(BlockId(4), row, &random(row)));
    store(&mut stack, &keys, 0);
    let stored = |stack: &Stack| stack.store.are_stored(&keys).unwrap();
    assert_eq!(stored(&stack), [true, true, false, true, false, true]);
    assert_eq!(stack.store.stats().unwrap().plane.codec.unfit_blocks, 2);
    // Lost are those that cannot be read.
    for (at, key) in keys.iter().enumerate().filter(|(at, _)| ![2, 4].contains(at)) {
        assert_eq!(stack.get(&[*key], 30 + at as u32), 1);
    }
    // Nobody else's bytes are in their places, and the next try is a new one.
    stack.put(&keys, 10);
    assert_eq!(stack.get(&keys, 30), 6);
    drop(stack);
    assert_eq!(shelf.open(&StoreOptions::default()).get(&keys, 30), 6);
}

#[test]
fn the_dram_cache_has_encoded_blocks() {
    // Eight of them have the room of six raw ones.
    let options = StoreOptions { dram: 6 * SHAPE.block_bytes(), ..StoreOptions::default() };
    let (_shelf, mut stack) = made(&options);
    let keys = keys(0..20);
    stack.put(&keys[..8], 0);
    stack.faults(Some(on(READ, READ_ERROR)));
    assert_eq!(stack.get(&keys[..8], 30), 8);
    stack.faults(None);
    let stats = stack.store.stats().unwrap().plane;
    assert_eq!((stats.dram.blocks, stats.dram.retrieved_bytes), (8, 8 * STORED));
    assert_eq!((stats.retrieved_bytes, stats.codec.decoded_bytes), (0, 8 * SHAPE.block_bytes()));
    // Hits and misses in one request, then what the misses left in the cache.
    stack.put(&keys, 0);
    assert_eq!(stack.get(&keys, 30), 20);
    let before = stack.store.stats().unwrap().plane;
    assert!(before.retrieved_bytes >= 12 * STORED);
    assert_eq!(stack.get(&keys[..8], 30), 8);
    assert_eq!(stack.get(&keys[..8], 40), 8);
    let after = stack.store.stats().unwrap().plane;
    assert!(after.dram.hits > before.dram.hits);
    // Read ahead as they are.
    let soon = Nanos::from_millis(1000);
    stack.put(&keys, 0);
    assert_eq!(stack.store.prefetch(&keys[..4], soon).unwrap(), 4);
    stack.store.plane().drain().unwrap();
    stack.faults(Some(on(READ, READ_ERROR)));
    assert_eq!(stack.get(&keys[..4], 30), 4);
    stack.faults(None);
    assert_eq!(stack.refused_dma(), 0);
}

#[test]
fn damage_read_ahead_is_found_before_it_is_used() {
    let (dram, dram_mode) = (6 * SHAPE.block_bytes(), DramMode::ReadAhead);
    let options = StoreOptions { dram, dram_mode, ..StoreOptions::default() };
    let (shelf, mut stack) = made(&options);
    let keys = keys(0..3);
    stack.put(&keys, 0);
    let prefix = stack.store.lookup(&keys[..1]).unwrap();
    let (device, object) = place(&shelf, &stack, prefix.files()[0], Row(0));
    shelf.bytes[device].poke(object + 5000, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    assert_eq!(stack.store.prefetch(&keys[..1], Nanos::from_millis(1000)).unwrap(), 1);
    stack.store.plane().drain().unwrap();
    let mut found = vec![0; SHAPE.object_bytes as usize];
    for _ in 0..2 {
        // From the cache, then from the device.
        stack.read(&prefix, 40).unwrap_err();
        stack.kv.read(BlockId(40), Row(0), &mut found);
        assert!(found.iter().all(|byte| *byte == 0xEE));
    }
    drop(prefix);
    assert_eq!(stack.store.lookup(&keys[..1]).unwrap().len(), 0);
}

/// Requests that need more staging memory than there is wait for each other, in any order.
#[test]
fn more_layers_than_staging_memory_wait_for_room() {
    let (_shelf, mut stack) = made(&StoreOptions::default());
    let keys = keys(0..60);
    stack.put(&keys, 0);
    let prefix = stack.store.lookup(&keys).unwrap();
    let loads: Vec<_> =
        (0..4).map(|_| stack.store.retrieve(&prefix, &blocks(0, 60)).unwrap()).collect();
    let mut tickets = Vec::new();
    for layer in layers() {
        for load in &loads {
            tickets.push(stack.store.start(load, layer, Order::Unordered).unwrap());
        }
    }
    for ticket in tickets {
        assert_eq!(stack.store.wait(ticket).unwrap().objects, 120);
    }
    for (key, block) in keys.iter().zip(blocks(0, 60)) {
        assert!(stack.holds(block, *key));
    }
}

/// More failures than there are units of staging memory, in both directions.
#[test]
fn layers_that_fail_give_their_staging_memory_back() {
    let (_shelf, mut stack) = made(&StoreOptions::default());
    let keys = keys(0..60);
    for (then, times) in [(READ_ERROR, 10), (FaultAction::Drop, 3)] {
        for _ in 0..times {
            stack.put(&keys, 0);
            let prefix = stack.store.lookup(&keys).unwrap();
            stack.faults(Some(on(READ, then).limit(1)));
            stack.read(&prefix, 0).unwrap_err();
        }
    }
    stack.faults(None);
    // Nobody waits for these.
    stack.put(&keys, 0);
    for _ in 0..10 {
        let prefix = stack.store.lookup(&keys).unwrap();
        let load = stack.store.retrieve(&prefix, &blocks(0, 60)).unwrap();
        layers().for_each(|layer| _ = stack.store.start(&load, layer, Order::Unordered).unwrap());
    }
    for _ in 0..10 {
        let save = stack.store.allocate(&stack::keys(100..160), &blocks(0, 60)).unwrap();
        stack.faults(Some(on(WRITE, WRITE_FAULT).limit(1)));
        stack.write_all(&save).unwrap_err();
    }
    stack.faults(None);
    stack.put(&keys, 0);
    assert_eq!(stack.get(&keys, 0), 60);
    assert_eq!(stack.refused_dma(), 0);
}

#[test]
fn pools_of_other_engines_share_the_codec() {
    let (_shelf, mut stack) = made(&StoreOptions::default());
    let keys = keys(0..4);
    stack.put(&keys, 0);
    let mut other = KvMemory::new(&*stack.domain, SHAPE, 8);
    let pool = stack.store.plane().add_pool(other.pool.clone()).unwrap();
    let theirs = stack.store.with_pool(pool);
    let prefix = theirs.lookup(&keys).unwrap();
    let load = theirs.retrieve(&prefix, &blocks(2, 4)).unwrap();
    for layer in layers() {
        let ticket = theirs.start(&load, layer, Order::Unordered).unwrap();
        theirs.wait(ticket).unwrap();
    }
    drop(load);
    let mut found = vec![0; SHAPE.object_bytes as usize];
    for (key, block) in keys.iter().zip(blocks(2, 4)) {
        for row in rows() {
            other.read(block, row, &mut found);
            assert_eq!(found, object(*key, 0, row, SHAPE.object_bytes));
        }
    }
    let more = stack::keys(10..11);
    rows()
        .for_each(|row| other.write(BlockId(7), row, &object(more[0], 0, row, SHAPE.object_bytes)));
    let save = theirs.allocate(&more, &[BlockId(7)]).unwrap();
    for layer in layers() {
        let ticket = theirs.start(&save, layer, Order::Unordered).unwrap();
        theirs.wait(ticket).unwrap();
    }
    theirs.commit(save).unwrap();
    assert_eq!(stack.get(&more, 20), 1);
    drop(prefix);
    drop(theirs);
    stack.store.plane().remove_pool(pool).unwrap();
}

#[test]
fn a_layer_cannot_wait_for_an_event() {
    let (_shelf, mut stack) = made(&StoreOptions::default());
    let keys = keys(0..1);
    stack.put(&keys, 0);
    let prefix = stack.store.lookup(&keys).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(1, 1)).unwrap();
    let event = stack.store.plane().event().unwrap();
    let order = Order::AfterEvent(&Wait { event, value: 1 });
    let refused = stack.store.start(&load, Layer(0), order).unwrap_err().to_string();
    assert!(refused.starts_with("codec: with it, no layer can wait for an event"), "{refused}");
}

#[test]
fn salvage_compares_what_is_decoded() {
    let (shelf, mut stack) = made(&StoreOptions::default());
    let keys = keys(0..5);
    stack.put(&keys, 0);
    let prefix = stack.store.lookup(&keys).unwrap();
    let (device, object) = place(&shelf, &stack, prefix.files()[3], Row(5));
    shelf.bytes[device].poke(object + 3000, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    drop(prefix);
    drop(stack);
    let mut media = Store::media(&shelf.power_on().devices).unwrap();
    let OnDevice::Ours(superblock) = Superblock::read(&mut *media[0].io).unwrap() else { panic!() };
    let mut salvage = Salvage::read(&mut media[0], &superblock, |_, _| {}).unwrap();
    salvage.verify(&mut media, &superblock, |_, _| {}).unwrap();
    assert_eq!((salvage.kept(), salvage.lost().len()), (4, 1));
}
