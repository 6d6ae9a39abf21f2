//! Checksums of a request's objects, which the kernel stores and compares.

use crate::{device_array::DeviceArray, map::BlockMap};

/// The CRC-32C (Castagnoli, as in RFC 3720) of every object of a map, over the bytes of the object
/// in memory and not over its padding. Clones are the same values; the memory is recycled when the
/// last clone is dropped and no operation uses it.
///
/// A write stores those of its rows, and a read compares its rows with them
/// ([`IoStatus::Checksum`](crate::IoStatus::Checksum)).
#[derive(Debug, Clone)]
pub struct Checksums {
    /// Row after row, each in the map's uploaded order: what the kernel calls an IOCTX.
    values: DeviceArray<u32>,
    map: BlockMap,
    rows: u32,
}

impl Checksums {
    /// Of `values` for `rows` rows of `map`.
    pub(crate) fn new(values: DeviceArray<u32>, map: &BlockMap, rows: u32) -> Self {
        Self { values, map: map.clone(), rows }
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Those of one row, in the caller's order of the map: as of the operations waited for.
    ///
    /// # Panics
    /// When `row` is not below [`Checksums::rows`].
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
