//! Tables of numbers for whoever else works with the ring's memory: a kernel that moves objects.

use std::sync::Arc;

use crate::{arena::Block, shared::Plain};

/// A number that a [`Numbers`] can hold.
#[allow(private_bounds, reason = "nobody else may say which bit patterns are numbers")]
pub trait Number: Plain {}
impl Number for u32 {}
impl Number for u64 {}

/// Numbers in executor memory, aligned to 128 bytes or more. Clones are the same numbers; the
/// memory is recycled when the last clone is gone.
#[derive(Debug, Clone)]
pub struct Numbers {
    block: Arc<Block>,
    len: usize,
}

impl Numbers {
    /// Writes `values` into `block`, which has room for them.
    pub(crate) fn write<T: Number>(values: impl ExactSizeIterator<Item = T>, block: Block) -> Self {
        let len = values.len();
        for (at, value) in values.enumerate() {
            block.region().put(0, at, value);
        }
        Self { block: Arc::new(block), len }
    }

    /// Address of the first one, as the kernel (and any other one on its device) sees it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.block.region().address(0)
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none. Such a table has an address all the same.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
