//! Pool access by the CPU: bytes in memory of this process, filled and compared synchronously.

#![allow(
    unsafe_code,
    reason = "the pool is memory that devices write, reached by address and not by reference"
)]

use std::ptr::NonNull;

use gio_kernels::pattern;
use nvme_driver::DmaSlice;
use objstore::{BlockId, KvPool, Order, Row, Store, StoreError, Ticket};
use ripieno_stack::StackError;

use crate::problem::Problem;

use super::access::{Check, Item, Poll, PoolAccess};

/// Interval of polls for completions, in bytes filled, overwritten or compared.
const POLL_BYTES: usize = 256 << 10;

/// Pool access by the CPU.
#[derive(Debug, Clone)]
pub(crate) struct CpuAccess {
    base: NonNull<u8>,
    /// Keeps the bytes at `base` allocated.
    memory: DmaSlice,
}

// SAFETY: `base` is an address inside `memory`, which is Send + Sync. A pool has one access, and
// its user keeps transfers and comparisons of the same bytes apart.
unsafe impl Send for CpuAccess {}

impl CpuAccess {
    /// Gives access to the `len` bytes of `pool`.
    ///
    /// # Errors
    /// Returns [`StackError::Unfit`] if the CPU cannot access them.
    pub(crate) fn new(pool: &KvPool, len: usize) -> Result<Self, StackError> {
        let first = pool.offset(BlockId(0), Row(0)).unwrap_or(0) as usize;
        let memory = DmaSlice::new(pool.memory().clone(), first, len)?;
        let why = "the KV pool is not reachable for the CPU";
        let base = memory.host().ok_or_else(|| Problem::new(why, "").unfit())?;
        Ok(Self { base, memory })
    }

    /// Calls `act` with each item's index and first byte, and `poll` after every [`POLL_BYTES`].
    fn each(&self, items: &[Item], poll: Poll<'_>, mut act: impl FnMut(usize, NonNull<u8>)) {
        let mut since_poll = 0;
        for (index, item) in items.iter().enumerate() {
            let (at, len) = (item.at as usize, item.len as usize);
            let end = at.checked_add(len).filter(|end| *end <= self.memory.len());
            assert!(end.is_some(), "{len} bytes at {at} of a pool of {}", self.memory.len());
            // SAFETY: inside the memory, as asserted above.
            act(index, unsafe { self.base.add(at) });
            since_poll += len;
            if since_poll >= POLL_BYTES {
                since_poll = 0;
                poll();
            }
        }
    }
}

impl PoolAccess for CpuAccess {
    fn make(&mut self, items: &[Item], poll: Poll<'_>) -> anyhow::Result<()> {
        self.each(items, poll, |index, at| {
            let item = &items[index];
            // SAFETY: `each` gives `len` bytes of the pool; this is the CPU's only access to
            // them, and the engine waits for a block's transfers before it calls.
            unsafe { item.contents.write(at, item.offset as usize, item.len as usize) };
        });
        Ok(())
    }

    fn poison(&mut self, items: &[Item], poll: Poll<'_>) -> anyhow::Result<()> {
        self.each(items, poll, |index, at| {
            // SAFETY: same as in `make`.
            unsafe { pattern::poison(at, items[index].len as usize) };
        });
        Ok(())
    }

    fn order(&self) -> Order<'static> {
        // `make` and `poison` have completed on return.
        Order::Unordered
    }

    fn join(&mut self, _store: &mut Store, _ticket: &Ticket) -> Result<(), StoreError> {
        // The engine waits for the transfer before it compares.
        Ok(())
    }

    fn check(&mut self, items: Vec<Item>) -> anyhow::Result<Check> {
        let access = self.clone();
        // On demand: the bytes do not arrive earlier.
        Ok(Box::new(move |poll| {
            let mut found = Vec::new();
            access.each(&items, poll, |index, at| {
                let Item { contents, offset, len, .. } = items[index];
                // SAFETY: same as in `make`; no transfer writes while the engine compares.
                let same = unsafe { contents.check(at, offset as usize, len as usize) };
                found.extend(same.err().map(|difference| (index, difference)));
            });
            Ok(found)
        }))
    }
}
