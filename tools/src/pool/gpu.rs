//! Pool access by the GPU: bytes in its memory, filled and compared in the engine's stream.

#![allow(unsafe_code, reason = "lets kernels write the pool, which is reached by address only")]

use std::time::{Duration, Instant};

use anyhow::bail;
use gio_kernels::cuda::{CudaPattern, CudaStream, PatternItem};
use gio_uring::RawStream;
use nvme_driver::DevicePtr;
use objstore::{BlockId, KvPool, Order, Row, Store, StoreError, Ticket};
use ripieno_stack::{Gpu, StackError};

use crate::problem::Problem;

use super::access::{Check, Item, Poll, PoolAccess};

/// Timeout of a comparison: its layer has arrived by then.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Sleep between two polls of a comparison.
const NAP: Duration = Duration::from_micros(50);

/// Pool access by the GPU.
#[derive(Debug)]
pub(crate) struct GpuAccess {
    pattern: CudaPattern,
    /// The engine's stream: below the I/O kernel's priority, on all SMs.
    stream: CudaStream,
    base: DevicePtr,
    len: u64,
    /// Keeps the bytes at `base` allocated.
    _pool: KvPool,
}

impl GpuAccess {
    /// Gives access to the `len` bytes of `pool`, for batches of up to `items` items. Must be
    /// called before an executor starts.
    ///
    /// # Errors
    /// Returns [`StackError::Cuda`] if the GPU is out of memory.
    pub(crate) fn new(
        gpu: &Gpu,
        pool: &KvPool,
        len: u64,
        items: usize,
    ) -> Result<Self, StackError> {
        let pattern = CudaPattern::with_items(gpu.device(), items)?;
        let stream = CudaStream::lowest(gpu.device())?;
        let why = "the KV pool is not reachable for the GPU";
        let base = pool.device(BlockId(0), Row(0));
        let base = base.ok_or_else(|| Problem::new(why, "").unfit())?;
        Ok(Self { pattern, stream, base, len, _pool: pool.clone() })
    }

    fn stream(&self) -> RawStream {
        // SAFETY: a stream of the store's GPU, which lives as long as the pool.
        unsafe { RawStream::new(self.stream.raw()) }
    }

    /// Converts items to the GPU's format.
    fn lower(&self, items: &[Item]) -> Vec<PatternItem> {
        let lower = |item: &Item| {
            let Item { at, contents, offset, len } = *item;
            let end = at.checked_add(u64::from(len)).filter(|end| *end <= self.len);
            assert!(end.is_some(), "{len} bytes at {at} of a pool of {}", self.len);
            PatternItem { at: DevicePtr(self.base.0 + at), seed: contents.seed(), offset, len }
        };
        items.iter().map(lower).collect()
    }
}

impl PoolAccess for GpuAccess {
    fn make(&mut self, items: &[Item], _poll: Poll<'_>) -> anyhow::Result<()> {
        let items = self.lower(items);
        // SAFETY: the items are parts of the pool, as `lower` asserted, which `_pool` keeps alive;
        // a batch has each part once. The stream is the GPU's own, and the engine waits for a
        // block's transfers before it calls.
        Ok(unsafe { self.pattern.fill(self.stream(), &items) }?)
    }

    fn poison(&mut self, items: &[Item], _poll: Poll<'_>) -> anyhow::Result<()> {
        let items = self.lower(items);
        // SAFETY: same as in `make`.
        Ok(unsafe { self.pattern.poison(self.stream(), &items) }?)
    }

    fn order(&self) -> Order<'static> {
        Order::AfterStream(self.stream())
    }

    fn join(&mut self, store: &mut Store, ticket: &Ticket) -> Result<(), StoreError> {
        store.join(ticket, self.stream())
    }

    fn check(&mut self, items: Vec<Item>) -> anyhow::Result<Check> {
        let items = self.lower(&items);
        // SAFETY: same as in `make`; the layer's transfer is complete when the stream gets there.
        let check = unsafe { self.pattern.check(self.stream(), &items) }?;
        // Complete when the stream reaches it.
        Ok(Box::new(move |poll| {
            let start = Instant::now();
            while !check.is_done()? {
                if start.elapsed() > TIMEOUT {
                    bail!("the GPU did not compare a layer within {} s", TIMEOUT.as_secs());
                }
                poll();
                std::thread::sleep(NAP);
            }
            Ok(check.differences()?)
        }))
    }
}
