//! Attention to the best blocks, with their KV in the store: answers and reads.

use candle_core::{Device, Tensor};
use objstore::{BlockId, StoreError};
use ripieno_candle::{Engine, Offloaded, SHAPE, Sequence};
use ripieno_stack::{Executor, StackConfig};

const BLOCK: usize = SHAPE.block_tokens as usize;
/// Tokens of the prompt: 18 blocks, which are stored, and 12 tokens.
const TOKENS: usize = 300;
const BLOCKS: usize = TOKENS / BLOCK;
const ANSWER: usize = 20;
const ALL: usize = usize::MAX;

fn prompt() -> Vec<u32> {
    (0..TOKENS).map(|at| u32::from(b'a') + (at * at / 7 % 26) as u32).collect()
}

fn prefilled(engine: &Engine) -> Sequence {
    let sequence = engine.prefill(&prompt(), true).unwrap();
    assert_eq!(sequence.stored, BLOCKS * BLOCK);
    sequence
}

/// Overwrites the stored blocks of a sequence in the pool.
fn wipe(engine: &Engine, table: &[BlockId]) {
    let nothing = Tensor::full(1e30_f32, (BLOCKS * BLOCK, 64), &Device::Cpu).unwrap();
    for row in (0..SHAPE.layers as usize).flat_map(|layer| [(layer, 0), (layer, 1)]) {
        engine.pages.write(row, table, 0, &nothing).unwrap();
    }
}

/// The tokens of an answer, and K and V of all layers behind the prompt's blocks.
#[derive(PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    kv: Vec<f32>,
}

impl Answer {
    fn new(engine: &Engine, sequence: &Sequence) -> Self {
        let tail = &sequence.table[BLOCKS..];
        let rows = (0..SHAPE.layers as usize).flat_map(|layer| [(layer, 0), (layer, 1)]);
        let kv = rows.flat_map(|row| {
            let all = engine.pages.read(row, tail, TOKENS - BLOCKS * BLOCK + ANSWER).unwrap();
            all.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        });
        Self { kv: kv.collect(), tokens: sequence.tokens[TOKENS..].to_vec() }
    }
}

/// Decodes with `top` blocks of the prompt, `room` of them in memory.
fn decode(engine: &Engine, top: usize, room: usize) -> (Answer, Offloaded) {
    let sequence = prefilled(engine);
    let table = sequence.table.clone();
    let mut offloaded = engine.offload(sequence, top, room).unwrap();
    if room == 0 {
        wipe(engine, &table);
    }
    engine.decode_offloaded(&mut offloaded, ANSWER).unwrap();
    (Answer::new(engine, &offloaded.sequence), offloaded)
}

/// Commands and data units of 512,000 bytes that the devices have read.
fn counted(engine: &Engine) -> [u64; 2] {
    let logs = engine.store().plane().controllers().unwrap().into_iter();
    let logs = logs.map(|controller| controller.lock().smart_log().unwrap());
    logs.fold([0; 2], |[commands, units], log| {
        let low = |wide: [u8; 16]| u128::from_le_bytes(wide) as u64;
        [commands + low(log.host_reads), units + low(log.data_units_read)]
    })
}

#[test]
fn answers_are_those_of_the_same_blocks_in_memory_and_reads_are_what_was_chosen() {
    let place = tempfile::tempdir().unwrap();
    // Software controllers count by themselves what passes through them.
    let executor = Some(Executor::Host);
    let config = StackConfig { executor, ..StackConfig::at(place.path()) };
    let engine = Engine::open(config, false).unwrap();
    let mut dense = prefilled(&engine);
    engine.decode(&mut dense, ANSWER).unwrap();
    let dense = Answer::new(&engine, &dense);
    for top in [1, 4, BLOCKS] {
        let (expected, in_memory) = decode(&engine, top, ALL);
        assert_eq!(in_memory.read, 0);
        assert!((expected == dense) == (top == BLOCKS), "{top} blocks");
        for room in [0, 3, 9] {
            let sequence = prefilled(&engine);
            let (stats, before) = (engine.store().stats().unwrap().plane, counted(&engine));
            drop(sequence);
            let (answer, offloaded) = decode(&engine, top, room);
            assert_eq!(answer.tokens, expected.tokens, "{top} blocks, {room} in memory");
            assert!(answer == expected, "{top} blocks, {room} in memory");
            let chosen = ANSWER * SHAPE.layers as usize * top;
            match room {
                0 => assert_eq!(offloaded.read, chosen as u64),
                _ => assert!(offloaded.read < chosen as u64, "{} of {chosen}", offloaded.read),
            }
            // K and V of each block, and the blocks that the prefill loaded.
            let layer = 2 * u64::from(SHAPE.object_bytes);
            let bytes = (offloaded.read + BLOCKS as u64 * u64::from(SHAPE.layers)) * layer;
            let now = engine.store().stats().unwrap().plane;
            assert_eq!(now.retrieved_bytes - stats.retrieved_bytes, bytes);
            let [commands, units] = counted(&engine);
            assert_eq!(commands - before[0], now.ring.total.commands - stats.ring.total.commands);
            // One batch for each of two devices: of a step's layers, and of the prefill's.
            let layers = (ANSWER + 1) * SHAPE.layers as usize;
            let doorbells = now.ring.total.sq_doorbells - stats.ring.total.sq_doorbells;
            assert!(doorbells <= 2 * layers as u64);
            // Each device rounds up or down.
            assert!((units - before[1]).abs_diff(bytes / 512_000) <= 2, "{units} for {bytes}");
        }
    }
    engine.close().unwrap();
}

#[test]
fn a_block_that_is_gone_is_an_error_and_the_prompt_is_computed_again() {
    let place = tempfile::tempdir().unwrap();
    let engine = Engine::open(StackConfig::at(place.path()), false).unwrap();
    let (expected, offloaded) = decode(&engine, 4, 0);
    assert!(engine.offload(offloaded.sequence, 0, 0).is_err());
    let sequence = prefilled(&engine);
    engine.store().clear().unwrap();
    // Its blocks are not in the store any more.
    let error = engine.offload(sequence, 4, 0).unwrap_err();
    let error = error.downcast::<StoreError>().unwrap();
    assert!(error.to_string().starts_with("0 blocks were given for"), "{error}");
    // Nor are those of one that is offloaded.
    let sequence = prefilled(&engine);
    let mut offloaded = engine.offload(sequence, 4, 0).unwrap();
    engine.store().clear().unwrap();
    let error = engine.decode_offloaded(&mut offloaded, ANSWER).unwrap_err();
    let error = error.downcast::<StoreError>().unwrap();
    assert!(matches!(error, StoreError::Stale { .. }), "{error}");
    assert_eq!(offloaded.sequence.tokens.len(), TOKENS + 1, "no token of wrong bytes");
    drop(offloaded);
    let (again, _) = decode(&engine, 4, 0);
    assert!(again == expected);
    engine.close().unwrap();
}
