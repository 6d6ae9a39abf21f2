//! The GPU at the pool: bytes in its memory, made and compared in the order of the engine's stream.

#![allow(unsafe_code, reason = "lets kernels write the pool, which is reached by address only")]

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::bail;
use gio_kernels::cuda::{CudaPattern, PatternCheck, PatternItem};
use gio_kernels::pattern::Difference;
use nvme_driver::DevicePtr;
use objstore::{Order, Store, StoreError, Ticket};

use crate::gpu::Gpu;

use super::hand::{Check, Hand, Item, Poll};

/// How long a comparison may take: the engine has waited for its layer already.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Between two looks at a comparison.
const NAP: Duration = Duration::from_micros(50);

/// The GPU.
#[derive(Debug)]
pub(crate) struct GpuHand {
    pattern: CudaPattern,
    gpu: Arc<Gpu>,
    base: DevicePtr,
    len: u64,
    /// Keeps the bytes at `base` allocated.
    _owner: Arc<dyn Any + Send + Sync>,
}

impl GpuHand {
    /// Reaches `len` bytes at `base`, which `owner` keeps; for batches of up to `items` items. Made
    /// before an executor starts.
    ///
    /// # Errors
    /// When the GPU has no memory for that.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        base: DevicePtr,
        len: u64,
        owner: Arc<dyn Any + Send + Sync>,
        items: usize,
    ) -> anyhow::Result<Self> {
        Ok(Self { pattern: gpu.pattern(items)?, gpu: gpu.clone(), base, len, _owner: owner })
    }

    /// The items as the GPU has them.
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

impl Hand for GpuHand {
    fn make(&mut self, items: &[Item], _poll: Poll<'_>) -> anyhow::Result<()> {
        let items = self.lower(items);
        // SAFETY: the items are parts of the pool, as `lower` asserted, which `_owner` keeps; a
        // batch has each part once. The stream is the GPU's own, and the engine waits for a
        // block's transfers before it asks.
        Ok(unsafe { self.pattern.fill(self.gpu.stream(), &items) }?)
    }

    fn poison(&mut self, items: &[Item], _poll: Poll<'_>) -> anyhow::Result<()> {
        let items = self.lower(items);
        // SAFETY: as in `make`.
        Ok(unsafe { self.pattern.poison(self.gpu.stream(), &items) }?)
    }

    fn order(&self) -> Order<'static> {
        Order::AfterStream(self.gpu.stream())
    }

    fn join(&mut self, store: &mut Store, ticket: &Ticket) -> Result<(), StoreError> {
        store.join(ticket, self.gpu.stream())
    }

    fn check(&mut self, items: Vec<Item>) -> anyhow::Result<Box<dyn Check>> {
        let items = self.lower(&items);
        // SAFETY: as in `make`; the layer's transfer is over when the stream gets there.
        let check = unsafe { self.pattern.check(self.gpu.stream(), &items) }?;
        Ok(Box::new(GpuCheck(check)))
    }
}

/// Compares once the stream gets there.
struct GpuCheck(PatternCheck);

impl Check for GpuCheck {
    fn differences(self: Box<Self>, poll: Poll<'_>) -> anyhow::Result<Vec<(usize, Difference)>> {
        let start = Instant::now();
        while !self.0.is_done()? {
            if start.elapsed() > TIMEOUT {
                bail!("the GPU did not compare a layer within {} s", TIMEOUT.as_secs());
            }
            poll();
            std::thread::sleep(NAP);
        }
        Ok(self.0.differences()?)
    }
}
