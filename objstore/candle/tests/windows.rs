//! A model in which every other layer has a sliding window: of these the store has only the end.

use std::path::Path;

use candle_core::{Device, Tensor};
use objstore::BlockId;
use ripieno_candle::{Engine, SHAPE, Sequence};
use ripieno_stack::StackConfig;

const BLOCK: usize = SHAPE.block_tokens as usize;
/// Tokens of the prompt: 18 blocks, which are stored, and 12 tokens.
const TOKENS: usize = 300;
const BLOCKS: usize = TOKENS / BLOCK;
/// Blocks with the 39 tokens before one: a window of 40.
const TAIL: usize = 3;
const ANSWER: usize = 8;

fn prompt() -> Vec<u32> {
    (0..TOKENS).map(|at| u32::from(b'a') + (at * at / 7 % 26) as u32).collect()
}

/// Returns the same prompt, except for the tokens from a block on.
fn other(from: usize, token: u8) -> Vec<u32> {
    let mut prompt = prompt();
    prompt[from * BLOCK..].fill(u32::from(token));
    prompt
}

fn open(dir: &Path) -> Engine {
    let engine = Engine::open(StackConfig::at(dir), true).unwrap();
    // Pages that are neither computed nor loaded have no numbers.
    let pool: Vec<BlockId> = (0..256).map(BlockId).collect();
    let nothing = Tensor::full(f32::NAN, (pool.len() * BLOCK, 64), &Device::Cpu).unwrap();
    for row in (0..SHAPE.layers as usize).flat_map(|layer| [(layer, 0), (layer, 1)]) {
        engine.pages.write(row, &pool, 0, &nothing).unwrap();
    }
    engine
}

/// The tokens of an answer, and the bits of K and V behind the prompt's blocks, in all layers.
fn answer(engine: &Engine, mut sequence: Sequence) -> (Vec<u32>, Vec<u32>) {
    let tokens = sequence.tokens.len() - 1;
    engine.decode(&mut sequence, ANSWER).unwrap();
    let rows = (0..SHAPE.layers as usize).flat_map(|layer| [(layer, 0), (layer, 1)]);
    let kv = rows.flat_map(|row| {
        // Layers of each kind have a block of the pool in turn.
        let tail = sequence.table[BLOCKS..][..3].iter();
        let tail: Vec<BlockId> =
            tail.flat_map(|block| [0, 1].map(|kind| BlockId(block.0 * 2 + kind))).collect();
        let all = engine.pages.read(row, &tail, tail.len() * BLOCK).unwrap();
        all.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    });
    let kv = kv.map(f32::to_bits).collect();
    (sequence.tokens[tokens..].to_vec(), kv)
}

/// Computes a prompt with the store. Returns its tokens that were found, bytes retrieved and
/// stored, in blocks, and the answer, which must be as computed without the store.
fn asked(engine: &Engine, prompt: &[u32]) -> (usize, [u64; 2], Vec<u32>) {
    let before = engine.store().stats().unwrap().plane;
    let sequence = engine.prefill(prompt, true).unwrap();
    let (found, stored) = (sequence.found, sequence.stored);
    assert_eq!(stored, BLOCKS * BLOCK);
    let (tokens, kv) = answer(engine, sequence);
    let now = engine.store().stats().unwrap().plane;
    let (expected, bits) = answer(engine, engine.prefill(prompt, false).unwrap());
    assert_eq!(tokens, expected);
    assert!(kv == bits, "to the last bit");
    let moved =
        [now.retrieved_bytes - before.retrieved_bytes, now.stored_bytes - before.stored_bytes];
    (found / BLOCK, moved.map(|bytes| bytes / SHAPE.block_bytes()), tokens)
}

#[test]
fn windows_store_and_load_their_end_only() {
    let place = tempfile::tempdir().unwrap();
    let all = (BLOCKS + TAIL) as u64;
    let engine = open(place.path());
    let (found, moved, expected) = asked(&engine, &prompt());
    assert_eq!((found, moved), (0, [0, all]));
    engine.close().unwrap();
    let engine = open(place.path());
    assert_eq!(asked(&engine, &prompt()), (BLOCKS, [all, 0], expected.clone()));

    // Nine blocks of the layers without a window are not enough: the windows before the tenth are
    // missing, and are stored for the next prompt that begins so.
    let (found, moved, answer) = asked(&engine, &other(9, b'!'));
    assert_eq!((found, moved), (0, [0, (BLOCKS - 9 + 2 * TAIL) as u64]));
    assert_ne!(answer, expected);
    assert_eq!(asked(&engine, &other(9, b'!')), (BLOCKS, [all, 0], answer));
    let (found, moved, _) = asked(&engine, &other(9, b'?'));
    assert_eq!((found, moved), (9, [9 + TAIL as u64, (BLOCKS - 9 + TAIL) as u64]));
    engine.close().unwrap();
}

#[test]
fn other_layers_see_all_and_other_models_find_nothing() {
    let place = tempfile::tempdir().unwrap();
    let engine = open(place.path());
    let (.., expected) = asked(&engine, &prompt());
    let mut early = prompt();
    early[0] += 1;
    assert_ne!(asked(&engine, &early).2, expected, "the answer depends on the first token");
    assert!(engine.offload(engine.prefill(&prompt(), true).unwrap(), 4, 0).is_err());
    engine.close().unwrap();
    let dense = Engine::open(StackConfig::at(place.path()), false).unwrap();
    let sequence = dense.prefill(&prompt(), true).unwrap();
    assert_eq!(sequence.found, 0, "it has other layers");
    dense.close().unwrap();
}
