//! Files of one prefix are adjacent, and adjacent files are one command: even in a store that has
//! been evicting for a long time.

use crate::stack;

use objstore::{BlockId, BlockKey, Format, KeyChain, KvShape, Layer, Order, StoreOptions};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use ripieno_testkit::format;
use stack::{Plan, Stack};

/// A layer of Llama-3-8B with blocks of 16 tokens, all sizes divided by [`SCALE`].
const SHAPE: KvShape =
    KvShape { layers: 1, segments: 2, object_bytes: (32 << 10) / SCALE, block_tokens: 16 };
const SCALE: u32 = 8;
/// Blocks of the long prompt.
const LONG: u32 = 8192;
const FILES: u64 = 2 * LONG as u64;

fn stack() -> Stack {
    let plan = Plan::default();
    let run_bytes = StoreOptions::default().run_bytes / SCALE;
    let capacity_bytes = Some(FILES * SHAPE.block_bytes());
    Stack::new(&Plan {
        devices: 4,
        device_bytes: 64 << 20,
        shape: SHAPE,
        format: Format { capacity_bytes, ..format(SHAPE) },
        blocks: LONG,
        options: StoreOptions { run_bytes, ..plan.options.clone() },
        ..plan
    })
}

/// Returns the keys of a conversation.
fn conversation(number: u32, blocks: u32) -> Vec<BlockKey> {
    let mut chain = KeyChain::new(&number.to_le_bytes());
    (0..blocks).map(|block| chain.next(&[block])).collect()
}

/// Stores those of `keys` that are not stored; returns the numbers of blocks and commands.
fn put(stack: &Stack, keys: &[BlockKey]) -> (u64, u64) {
    let before = stack.store.stats().unwrap();
    let blocks: Vec<BlockId> = (0..keys.len() as u32).map(BlockId).collect();
    let save = stack.store.allocate(keys, &blocks).unwrap();
    assert_eq!(save.accepted(), keys.len());
    stack.store.wait(stack.store.start(&save, Layer(0), Order::Unordered).unwrap()).unwrap();
    let written = stack.store.commit(save).unwrap().written;
    (
        written as u64,
        stack.store.stats().unwrap().plane.ring.total.commands - before.plane.ring.total.commands,
    )
}

/// Retrieves all of `keys`; returns the number of commands.
fn get(stack: &Stack, keys: &[BlockKey]) -> u64 {
    let before = stack.store.stats().unwrap();
    let prefix = stack.store.lookup(keys).unwrap();
    assert_eq!(prefix.len(), keys.len());
    // In random order, like an engine's free blocks.
    let mut blocks: Vec<BlockId> = (0..LONG).map(BlockId).collect();
    let mut random = StdRng::seed_from_u64(7);
    (0..keys.len()).for_each(|at| blocks.swap(at, random.random_range(at..LONG as usize)));
    let load = stack.store.retrieve(&prefix, &blocks[..keys.len()]).unwrap();
    stack.store.wait(stack.store.start(&load, Layer(0), Order::Unordered).unwrap()).unwrap();
    stack.store.stats().unwrap().plane.ring.total.commands - before.plane.ring.total.commands
}

fn objects(blocks: u64) -> u64 {
    blocks * u64::from(SHAPE.rows())
}

#[test]
fn a_long_prompt_takes_few_commands() {
    let stack = stack();
    let keys = conversation(0, LONG);
    let (blocks, stored) = put(&stack, &keys);
    let retrieved = get(&stack, &keys);
    assert_eq!(blocks, u64::from(LONG));
    let least = objects(blocks) / 8;
    assert!(
        stored == least && retrieved == least,
        "{stored} and {retrieved} commands, not {least}"
    );
}

#[test]
fn churn_leaves_long_runs() {
    let stack = stack();
    let mut random = StdRng::seed_from_u64(3);
    let (mut stored, mut late, mut commands) = (0, 0, 0);
    for round in 0..1_500u32 {
        // One of the latest conversations continues, or a new one begins.
        let number = match random.random_range(0..3) {
            0 => round,
            _ => round.saturating_sub(random.random_range(0..150)),
        };
        let (blocks, took) = put(&stack, &conversation(number, random.random_range(20..400)));
        stored += blocks;
        if stored > 4 * FILES {
            (late, commands) = (late + blocks, commands + took);
        }
    }
    let evictions = stack.store.stats().unwrap().files.evicted;
    assert!(evictions > 4 * FILES, "{evictions}");
    assert!(4 * commands <= objects(late), "{commands} commands for {late} blocks");
    let keys = conversation(u32::MAX, LONG);
    let (blocks, stored) = put(&stack, &keys);
    let retrieved = get(&stack, &keys);
    for commands in [stored, retrieved] {
        assert!(5 * commands <= objects(blocks), "{commands} commands for {blocks} blocks");
    }
}
