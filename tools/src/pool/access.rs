//! Fills, overwrites and compares bytes of the KV pool, on the CPU or the GPU.

use std::fmt;

use gio_kernels::pattern::{Difference, Pattern};
use objstore::{Order, Store, StoreError, Ticket};

/// Maximum number of parts that an object is checked in.
pub(crate) const PARTS_MAX: usize = 2;

/// A part of an object: offset and length in bytes.
pub(crate) type Part = (usize, usize);

/// A part of an object in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Item {
    /// Offset of its first byte in the pool.
    pub(crate) at: u64,
    /// Contents of the object.
    pub(crate) contents: Pattern,
    /// Offset in the object, in bytes.
    pub(crate) offset: u32,
    /// Length in bytes.
    pub(crate) len: u32,
}

/// Callback after every 256 KiB or so of long work, to poll for completions.
pub(crate) type Poll<'a> = &'a mut dyn FnMut();

/// Fills, overwrites and compares bytes of the pool: in batches, in the order of the calls.
///
/// No transfer may be using an item's block, except for [`PoolAccess::check`].
pub(crate) trait PoolAccess: fmt::Debug + Send {
    /// Fills in the contents of objects, as a layer of the engine's model would.
    fn make(&mut self, items: &[Item], poll: Poll<'_>) -> anyhow::Result<()>;

    /// Overwrites parts with bytes that are wrong for every block.
    fn poison(&mut self, items: &[Item], poll: Poll<'_>) -> anyhow::Result<()>;

    /// Returns the ordering of a transfer that follows the calls so far.
    fn order(&self) -> Order<'static>;

    /// Orders later calls after the transfer.
    fn join(&mut self, store: &mut Store, ticket: &Ticket) -> Result<(), StoreError>;

    /// Announces a comparison of parts.
    fn check(&mut self, items: Vec<Item>) -> anyhow::Result<Check>;
}

/// An announced comparison: returns the items that differ, ascending. Must be called after their
/// transfer is done.
pub(crate) type Check = Box<dyn FnOnce(Poll<'_>) -> anyhow::Result<Vec<(usize, Difference)>>>;
