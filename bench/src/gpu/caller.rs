//! CPU time of the engine's thread per layer, launch per batch and resident, for few and for many
//! blocks.
//!
//! The host route measures the cost of issuing: all layers of a request are issued ahead and wait
//! for an event, so no I/O competes for the processors. The staged route adds the cost of the move
//! to the GPU's memory, ordered with a stream as an engine does it: each layer starts after the
//! stream's earlier work, and later work waits for it.

use std::{hint::black_box, sync::Arc, time::Duration};

use anyhow::Result;
use gio_kernels::cuda::CudaStream;
use gio_uring::Wait;
use objstore::{BlockId, Layer, Order, Route};

use super::{device::Gpu, stack::Plan};
use crate::{
    sample::{Sides, thread_cpu},
    stack::Stack,
};

/// Passes over all layers of one sample: thread CPU time is read only around them.
const PASSES: u32 = 2;
/// Bytes read before each pass to flush the cache: an engine does other work between two layers,
/// and the larger request must not be charged for the cache lines of its I/O.
const CACHE_BYTES: usize = 16 << 20;
/// Sleep in place of a layer's computation.
const IDLE: Duration = Duration::from_millis(1);

/// Measures requests of all blocks and of `few` alternately. Returns nanoseconds a call.
pub fn measure(gpu: &Arc<Gpu>, plan: Plan, few: u32, rounds: u32) -> Result<Sides> {
    // Created before a resident kernel runs: in some drivers, creating a stream waits for kernels.
    let engine = CudaStream::new(&gpu.device, None)?;
    let stack = plan.stack(gpu)?;
    let other = vec![1u8; CACHE_BYTES];
    let call = |blocks| call_ns(&stack, (&engine, &other), plan, blocks);
    let sides = Sides::measure(rounds, |_| -> Result<_> { Ok((call(plan.blocks)?, call(few)?)) })?;
    stack.close()?;
    Ok(sides)
}

/// Returns the mean CPU time of one call in nanoseconds.
fn call_ns(
    stack: &Stack,
    (engine, other): (&CudaStream, &[u8]),
    plan: Plan,
    blocks: u32,
) -> Result<f64> {
    let ids: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let (mut spent, mut calls) = (Duration::ZERO, 0u32);
    for _ in 0..PASSES {
        let prefix = stack.store.lookup(&stack.keys[..blocks as usize])?;
        let load = stack.store.retrieve(&prefix, &ids)?;
        let layers: Vec<u32> = (0..stack.layers()).collect();
        for burst in layers.chunks(plan.burst()) {
            let event = stack.store.plane().event()?;
            let wait = Wait { event: event.clone(), value: 1 };
            let order = match plan.route {
                Route::Host | Route::Direct => Order::AfterEvent(&wait),
                Route::Staged => Order::InStream(Gpu::raw(engine)),
            };
            let mut tickets = Vec::with_capacity(burst.len());
            std::thread::sleep(IDLE);
            black_box(other.iter().step_by(64).map(|byte| u64::from(*byte)).sum::<u64>());
            let start = thread_cpu();
            for &layer in burst {
                tickets.push(stack.store.start(&load, Layer(layer), order)?);
            }
            spent += thread_cpu() - start;
            calls += burst.len() as u32;
            event.set(1);
            for ticket in tickets {
                stack.store.wait(ticket)?;
            }
        }
    }
    Ok(spent.as_nanos() as f64 / f64::from(calls))
}
