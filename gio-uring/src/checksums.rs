//! Checksums of a request's objects, stored or verified by the kernel.

use crate::{device_array::DeviceArray, map::BlockMap};

/// The CRC-32C (Castagnoli, as in RFC 3720) of every object of a map, over the bytes of the object
/// in memory, without its padding. Clones share the values; the memory is recycled when the last
/// clone is dropped and no operation uses it.
///
/// A write stores the checksums of its rows; a read compares its rows with them
/// ([`IoStatus::Checksum`](crate::IoStatus::Checksum)).
#[derive(Debug, Clone)]
pub struct Checksums {
    /// Row-major; each row in the map's uploaded order (the kernel's context index).
    values: DeviceArray<u32>,
    map: BlockMap,
    rows: u32,
}

impl Checksums {
    /// Wraps `values` for `rows` rows of `map`.
    pub(crate) fn new(values: DeviceArray<u32>, map: &BlockMap, rows: u32) -> Self {
        Self { values, map: map.clone(), rows }
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Returns one row's checksums in the caller's order, as of the last completion waited for.
    ///
    /// # Panics
    /// Panics if `row` is not below [`Checksums::rows`].
    #[must_use]
    pub fn row(&self, row: u32) -> Vec<u32> {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let count = self.map.len();
        let mut row_values = vec![0; count];
        for (at, &index) in self.map.order().iter().enumerate() {
            row_values[index as usize] = self.values.get(row as usize * count + at);
        }
        row_values
    }

    pub(crate) fn is_of(&self, map: &BlockMap) -> bool {
        self.map.is_same(map)
    }

    pub(crate) fn address(&self) -> u64 {
        self.values.address(0).0
    }
}
