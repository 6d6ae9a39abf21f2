#![allow(unsafe_code, reason = "describes memory that nothing ever touches")]

use std::{collections::HashMap, ptr::NonNull};

use nvme_driver::{DevicePtr, IovaRange};
use proptest::prelude::*;

use super::*;

/// Addresses without memory behind them: registration is arithmetic.
#[derive(Debug)]
struct Addresses(Vec<IovaRange>);

// SAFETY: the lengths add up and never change; there is no host or device address to promise.
unsafe impl DmaMemory for Addresses {
    fn len(&self) -> usize {
        self.0.iter().map(|range| range.len as usize).sum()
    }
    fn host(&self) -> Option<NonNull<u8>> {
        None
    }
    fn device(&self) -> Option<DevicePtr> {
        None
    }
    fn segments(&self) -> &[IovaRange] {
        &self.0
    }
}

fn memory(lens: &[u64]) -> Arc<dyn DmaMemory> {
    let mut iova = Iova(0x1_0000_0000);
    let ranges = lens.iter().map(|&len| {
        let range = IovaRange { iova, len };
        iova = iova.offset(len + 0x10_0000);
        range
    });
    Arc::new(Addresses(ranges.collect()))
}

fn layout(rows: &[u64], block_stride: u64, blocks: u32) -> PoolLayout {
    PoolLayout { rows: rows.to_vec(), block_stride, blocks }
}

fn shape(layers: u32, segments: u32, object_bytes: u32) -> KvShape {
    KvShape { layers, segments, object_bytes, block_tokens: 16 }
}

proptest! {
    #[test]
    fn accepted_exactly_when_no_byte_is_shared(
        offsets in proptest::collection::vec(0u64..400, 1..5),
        object in 1u32..20, extra in 0u64..60, blocks in 1u32..6,
    ) {
        let stride = u64::from(object) + extra;
        let mut owner: HashMap<u64, usize> = HashMap::new();
        let mut shared = false;
        for (row, offset) in offsets.iter().enumerate() {
            for block in 0..u64::from(blocks) {
                for byte in 0..u64::from(object) {
                    shared |= owner.insert(offset + block * stride + byte, row).is_some();
                }
            }
        }
        let shape = shape(offsets.len() as u32, 1, object);
        let pool = KvPool::new(memory(&[4096]), &shape, layout(&offsets, stride, blocks));
        match pool {
            Err(RegistrationError(why)) => {
                prop_assert!(shared && why.contains("overlap"), "{}", why);
            }
            Ok(pool) => {
                prop_assert!(!shared);
                let (block, row) = (BlockId(blocks - 1), Row(0));
                let offset = pool.offset(block, row).unwrap();
                prop_assert_eq!(offset, offsets[0] + u64::from(blocks - 1) * stride);
                prop_assert_eq!(pool.iova(block, row), Some(Iova(0x1_0000_0000 + offset)));
                prop_assert_eq!(pool.iova(BlockId(blocks), row), None);
                prop_assert_eq!(pool.offset(block, Row(offsets.len() as u32)), None);
            }
        }
    }
}

#[test]
fn every_row_has_to_be_in_one_segment_but_rows_may_differ() {
    let shape = shape(2, 1, 1024);
    let pool = KvPool::contiguous(memory(&[8192, 8192]), &shape, 8).unwrap();
    assert_eq!(pool.row_iova, [Iova(0x1_0000_0000), Iova(0x1_0010_2000)]);
    let split = KvPool::contiguous(memory(&[4096, 12288]), &shape, 8).unwrap_err();
    assert!(split.0.starts_with("row 0, 8192 bytes at offset 0, cannot be"), "{split}");
}

#[test]
fn rows_outside_and_shapes_that_disagree_are_refused() {
    let two = shape(1, 2, 1024);
    let short = KvPool::contiguous(memory(&[4095]), &two, 2).unwrap_err();
    assert!(short.0.starts_with("row 1, "), "{short}");
    let few = KvPool::new(memory(&[4096]), &two, layout(&[0], 1024, 1)).unwrap_err();
    assert!(few.0.contains("1 row offsets were given, the shape has 2 rows"), "{few}");
    for (stride, blocks) in [(1023, 1), (1024, 0), (u64::MAX, 3)] {
        let error =
            KvPool::new(memory(&[4096]), &two, layout(&[0, 1024], stride, blocks)).unwrap_err();
        assert!(error.0.contains("the stride has to be"), "{error}");
    }
}

#[test]
fn interleaved_segments() {
    // Block-major: K and V of a block side by side.
    let shape = shape(1, 2, 4096 + 512);
    let pool = KvPool::new(memory(&[1 << 20]), &shape, layout(&[0, 8192], 16384, 8)).unwrap();
    assert_eq!(pool.iova(BlockId(3), Row(1)), Some(Iova(0x1_0000_0000 + 3 * 16384 + 8192)));
}
