//! Arrays for other kernels on the ring's device, for example block tables of a copy kernel.

use std::{marker::PhantomData, sync::Arc};

use nvme_driver::DevicePtr;

use crate::{arena::Block, executor::ExecutorError, shared::Plain};

/// An element type of a [`DeviceArray`].
#[allow(private_bounds, reason = "only this crate says which types have no invalid bit patterns")]
pub trait DeviceScalar: Plain {}
impl DeviceScalar for u32 {}
impl DeviceScalar for u64 {}

/// An array in executor memory, aligned to at least 128 bytes. Only kernels write it after the
/// upload. Clones share the array; the memory is recycled when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct DeviceArray<T> {
    block: Arc<Block>,
    len: usize,
    values: PhantomData<T>,
}

impl<T: DeviceScalar> DeviceArray<T> {
    /// Writes `values` into `block`, which must be large enough.
    pub(crate) fn write(values: impl Iterator<Item = T>, block: Block) -> Self {
        let mut len = 0;
        for value in values {
            block.region().put(0, len, value);
            len += 1;
        }
        Self { block: Arc::new(block), len, values: PhantomData }
    }

    /// Makes the values visible to operations that are submitted afterwards.
    pub(crate) fn push(&self) -> Result<(), ExecutorError> {
        self.block.region().push()
    }

    /// Returns the address of element `at`, as a kernel on the device sees it.
    ///
    /// # Panics
    /// Panics if `at` is above [`DeviceArray::len`].
    #[must_use]
    pub fn address(&self, at: usize) -> DevicePtr {
        assert!(at <= self.len, "element {at} of {}", self.len);
        DevicePtr(self.block.region().address(at * size_of::<T>()))
    }

    /// Returns element `at` of an array in memory that the host reads. A kernel's write is visible
    /// once the kernel is known to be past it.
    ///
    /// # Panics
    /// Panics if `at` is not below [`DeviceArray::len`].
    #[must_use]
    pub fn get(&self, at: usize) -> T {
        assert!(at < self.len, "element {at} of {}", self.len);
        self.block.region().read(at * size_of::<T>())
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no elements. An empty array still has an address.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
