//! CPU time that the engine's thread spends in `retrieve_layer`, for few and for many blocks.

use std::time::Duration;

use anyhow::Result;
use objstore::{BlockId, KvShape, Layer};

use super::stack::Stack;
use crate::sample::{Samples, thread_cpu};

/// Blocks of the small request.
const FEW: u32 = 64;
/// Blocks of the large one.
pub const MANY: u32 = 8192;
const LAYERS: u32 = 32;
/// Passes over all layers of one sample: thread CPU time is read only around them.
const PASSES: u32 = 8;
/// Long enough for the executor's threads to fall asleep: the first call of each pass then wakes
/// one, whatever the number of blocks.
const IDLE: Duration = Duration::from_millis(2);

/// Nanoseconds a call.
pub struct Found {
    /// With [`MANY`] blocks.
    pub many: Samples,
    /// With [`FEW`] blocks.
    pub few: Samples,
    /// Round by round.
    pub ratio: Samples,
}

/// Measures both in turn.
pub fn measure(rounds: u32) -> Result<Found> {
    let shape = KvShape { layers: LAYERS, segments: 2, object_bytes: 512, block_tokens: 16 };
    let mut stack = Stack::filled(shape, MANY)?;
    let mut found =
        Found { many: Samples::default(), few: Samples::default(), ratio: Samples::default() };
    for round in 0..=rounds {
        let many = call_ns(&mut stack, MANY)?;
        let few = call_ns(&mut stack, FEW)?;
        if round > 0 {
            found.many.push(many);
            found.few.push(few);
            found.ratio.push(many / few);
        }
    }
    Ok(found)
}

/// Mean nanoseconds of CPU time of one `retrieve_layer` over `blocks` blocks.
fn call_ns(stack: &mut Stack, blocks: u32) -> Result<f64> {
    let mut spent = Duration::ZERO;
    for _ in 0..PASSES {
        let prefix = stack.store.lookup(&stack.keys[..blocks as usize])?;
        let ids: Vec<BlockId> = (0..blocks).map(BlockId).collect();
        let transfer = stack.store.retrieve(&prefix, &ids)?;
        let mut tickets = Vec::with_capacity(LAYERS as usize);
        std::thread::sleep(IDLE);
        let start = thread_cpu();
        for layer in 0..LAYERS {
            tickets.push(stack.store.retrieve_layer(&transfer, Layer(layer))?);
        }
        spent += thread_cpu() - start;
        for ticket in tickets {
            stack.store.wait(ticket)?;
        }
    }
    Ok(spent.as_nanos() as f64 / f64::from(PASSES * LAYERS))
}
