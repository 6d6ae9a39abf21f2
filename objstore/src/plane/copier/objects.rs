//! The objects of a pool that the CPU reaches.

use std::ops::Range;

use kv_catalog::{BlockId, Row};
use nvme_driver::{DmaSlice, platform::buffer::Buffer};

use crate::registration::KvPool;

/// The smallest page size.
const PAGE_BYTES: usize = 4 << 10;

/// The bytes of a pool.
#[derive(Debug)]
pub(super) struct Objects {
    bytes: Buffer,
    pub(super) pool: KvPool,
}

impl Objects {
    pub(super) fn new(pool: &KvPool) -> Option<Self> {
        let bytes = DmaSlice::whole(pool.memory().clone()).ok().and_then(Buffer::new)?;
        Some(Self { bytes, pool: pool.clone() })
    }

    /// Has the system provide all pages now: it takes longer to clear a page than to copy to it,
    /// and later requests would wait for that.
    pub(super) fn touch(&mut self) {
        for at in (0..self.bytes.len()).step_by(PAGE_BYTES) {
            self.bytes.write(at, &[0]).expect("it is inside");
        }
    }

    /// Copies rows of a block from `at` of another pool. `words` are its checksums, if there are
    /// any. Returns true if the bytes match them.
    pub(super) fn copy_from(
        &mut self,
        block: BlockId,
        (from, at): (&Self, BlockId),
        mut rows: Range<u32>,
        words: &[u32],
    ) -> bool {
        let bytes = from.pool.object_bytes() as usize;
        rows.all(|row| {
            let offset = |pool: &KvPool, block| pool.offset(block, Row(row)).expect("checked");
            let (to, at) = (offset(&self.pool, block), offset(&from.pool, at));
            let (expected, mut crc) = (words.get(row as usize), 0);
            let see = |piece: &[u8]| {
                if expected.is_some() {
                    crc = crc32c::crc32c_append(crc, piece);
                }
            };
            let copied = self.bytes.copy_from(to as usize, &from.bytes, at as usize, bytes, see);
            copied.expect("the pools were checked");
            expected.is_none_or(|expected| *expected == crc)
        })
    }

    /// Reads an object.
    pub(super) fn read(&self, block: BlockId, row: Row, into: &mut [u8]) {
        let offset = self.pool.offset(block, row).expect("checked");
        self.bytes.read(offset as usize, into).expect("the pool was checked");
    }

    /// Overwrites an object.
    pub(super) fn write(&mut self, block: BlockId, row: Row, from: &[u8]) {
        let offset = self.pool.offset(block, row).expect("checked");
        self.bytes.write(offset as usize, from).expect("the pool was checked");
    }
}
