//! Fills, overwrites and compares bytes of the KV pool, wherever that is.

use std::fmt;

use gio_kernels::pattern::{Difference, Pattern};
use objstore::{Order, Store, StoreError, Ticket};

/// Parts that an object is checked in, at the most.
pub(crate) const PARTS_MAX: usize = 2;

/// A part of an object: offset and length in bytes.
pub(crate) type Part = (usize, usize);

/// A part of an object, and where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Item {
    /// Its first byte in the pool.
    pub(crate) at: u64,
    /// What the object holds.
    pub(crate) contents: Pattern,
    /// Bytes from the object's beginning.
    pub(crate) offset: u32,
    /// Length in bytes.
    pub(crate) len: u32,
}

/// Called after every 256 KiB or so of long work, to poll for completions.
pub(crate) type Poll<'a> = &'a mut dyn FnMut();

/// Makes, overwrites and compares bytes of the pool: a batch at a time, in the order it was asked.
///
/// No transfer may be using an item's block, but for [`Hand::check`].
pub(crate) trait Hand: fmt::Debug + Send {
    /// Makes the contents of objects, as a layer of the engine's model would.
    fn make(&mut self, items: &[Item], poll: Poll<'_>) -> anyhow::Result<()>;

    /// Overwrites parts with bytes that are wrong for every block.
    fn poison(&mut self, items: &[Item], poll: Poll<'_>) -> anyhow::Result<()>;

    /// Where in that order a transfer takes its place.
    fn order(&self) -> Order<'static>;

    /// What is asked for from now on comes after the transfer.
    fn join(&mut self, store: &mut Store, ticket: &Ticket) -> Result<(), StoreError>;

    /// Announces that parts are going to be compared.
    fn check(&mut self, items: Vec<Item>) -> anyhow::Result<Box<dyn Check>>;
}

/// A comparison that was announced.
pub(crate) trait Check {
    /// Which items differ, ascending, and where. To be asked when their transfer is done.
    fn differences(self: Box<Self>, poll: Poll<'_>) -> anyhow::Result<Vec<(usize, Difference)>>;
}
