//! CPU time of the engine's thread in `retrieve_layer`, for few and for many blocks.
//!
//! Measured twice. *Held*: all layers are issued ahead and wait for an event, as in an engine that
//! runs ahead of its GPU; nothing else competes for the processors. *Running*: the I/O starts
//! immediately, so with few processors the threads of the I/O kernel and of the software controller
//! evict the caller's data from its cache and the caller from its processor.
//!
//! The first layer of a request wakes the host executor's sleeping thread: a system call, and on a
//! virtual machine tens of microseconds. It is measured separately, as it is paid once per burst
//! and has no counterpart on a GPU.

use std::{hint::black_box, time::Duration};

use anyhow::Result;
use gio_uring::Wait;
use objstore::{BlockId, KvShape, Layer};

use crate::{
    sample::{Samples, Sides, thread_cpu},
    stack::Stack,
};

/// Blocks of the small request.
pub const FEW: u32 = 64;
/// Blocks of the large request.
pub const MANY: u32 = 8192;
const LAYERS: u32 = 32;
/// Passes over all layers of one sample: thread CPU time is read only around them.
const PASSES: u32 = 8;
/// Long enough for the executor's threads to fall asleep, whatever the number of blocks.
const IDLE: Duration = Duration::from_millis(2);
/// Bytes read before each pass, so that both sides start with the same cold cache: an engine does
/// other work between two layers, and the larger request must not be charged for the cache lines of
/// its I/O.
const CACHE_BYTES: usize = 16 << 20;

/// Start of the I/O.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Io {
    /// After an event.
    Held,
    /// Immediately.
    Running,
}

/// Nanoseconds per call.
pub struct Found {
    /// With [`MANY`] blocks, and with [`FEW`].
    pub ns: Sides,
    /// The first call of a burst, which wakes the executor.
    pub wake: Samples,
}

/// Measures [`MANY`] and [`FEW`] alternately.
pub fn measure(io: Io, rounds: u32) -> Result<Found> {
    let shape = KvShape { layers: LAYERS, segments: 2, object_bytes: 512, block_tokens: 16 };
    let mut stack = Stack::filled(shape, MANY)?;
    let other = vec![1u8; CACHE_BYTES];
    let mut wake = Samples::default();
    let ns = Sides::measure(rounds, |round| -> Result<_> {
        let [many, few] =
            [call_ns(&mut stack, &other, io, MANY)?, call_ns(&mut stack, &other, io, FEW)?];
        if round > 0 {
            wake.push(few.first);
            wake.push(many.first);
        }
        Ok((many.rest, few.rest))
    })?;
    Ok(Found { ns, wake })
}

/// Mean CPU time of one call in nanoseconds.
struct Call {
    first: f64,
    rest: f64,
}

/// Retrieves all layers of `blocks` blocks, [`PASSES`] times.
fn call_ns(stack: &mut Stack, other: &[u8], io: Io, blocks: u32) -> Result<Call> {
    let (mut first, mut rest) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..PASSES {
        let event = stack.store.event()?;
        let wait = Wait { event: event.clone(), value: u32::from(io == Io::Held) };
        let prefix = stack.store.lookup(&stack.keys[..blocks as usize])?;
        let ids: Vec<BlockId> = (0..blocks).map(BlockId).collect();
        let load = stack.store.retrieve(&prefix, &ids)?;
        let mut tickets = Vec::with_capacity(LAYERS as usize);
        std::thread::sleep(IDLE);
        black_box(other.iter().step_by(64).map(|byte| u64::from(*byte)).sum::<u64>());
        let start = thread_cpu();
        tickets.push(stack.store.retrieve_layer_on(&load, Layer(0), &wait)?);
        let woken = thread_cpu();
        for layer in 1..LAYERS {
            tickets.push(stack.store.retrieve_layer_on(&load, Layer(layer), &wait)?);
        }
        rest += thread_cpu() - woken;
        first += woken - start;
        event.set(1);
        for ticket in tickets {
            stack.store.wait(ticket)?;
        }
    }
    let mean = |time: Duration, calls: u32| time.as_nanos() as f64 / f64::from(calls);
    Ok(Call { first: mean(first, PASSES), rest: mean(rest, PASSES * (LAYERS - 1)) })
}
