//! Arrays for other kernels on the ring's device: block tables for a kernel that copies objects.

use std::{marker::PhantomData, sync::Arc};

use nvme_driver::DevicePtr;

use crate::{arena::Block, shared::Plain};

/// What a [`DeviceArray`] can hold.
#[allow(private_bounds, reason = "only this crate says which types have no invalid bit patterns")]
pub trait DeviceScalar: Plain {}
impl DeviceScalar for u32 {}
impl DeviceScalar for u64 {}

/// An array in executor memory, aligned to 128 bytes or more, that only kernels write after it was
/// uploaded. Clones are the same array; the memory is recycled when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct DeviceArray<T> {
    block: Arc<Block>,
    len: usize,
    values: PhantomData<T>,
}

impl<T: DeviceScalar> DeviceArray<T> {
    /// Writes `values` into `block`, which has room for them.
    pub(crate) fn write(values: impl Iterator<Item = T>, block: Block) -> Self {
        let mut len = 0;
        for value in values {
            block.region().put(0, len, value);
            len += 1;
        }
        Self { block: Arc::new(block), len, values: PhantomData }
    }

    /// Address of element `at`, as a kernel on the device sees it.
    ///
    /// # Panics
    /// When `at` is above [`DeviceArray::len`].
    #[must_use]
    pub fn address(&self, at: usize) -> DevicePtr {
        assert!(at <= self.len, "element {at} of {}", self.len);
        DevicePtr(self.block.region().address(at * size_of::<T>()))
    }

    /// Element `at`. What a kernel wrote is there once it was seen that it is past that.
    ///
    /// # Panics
    /// When `at` is not below [`DeviceArray::len`].
    #[must_use]
    pub fn get(&self, at: usize) -> T {
        assert!(at < self.len, "element {at} of {}", self.len);
        self.block.region().read(at * size_of::<T>())
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none. Such an array has an address all the same.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
