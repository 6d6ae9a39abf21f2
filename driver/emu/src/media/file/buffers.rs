//! Bounce buffers allocated from large pages.

use std::{io, ptr::NonNull, sync::Arc};

use crate::memory::{self, HostMap, LARGE_BYTES};

/// Allocator of buffers. Direct I/O pins each page and lists it for the device: with pages of 4
/// KiB, that takes longer than the read.
#[derive(Default)]
pub(super) struct Buffers {
    /// Current chunk, and the offset of the next buffer in it.
    chunk: Option<(Arc<HostMap>, usize)>,
}

/// A part of a mapping that lives as long as any of its buffers.
pub(super) struct Buffer {
    map: Arc<HostMap>,
    start: usize,
    len: usize,
}

impl Buffers {
    /// Allocates a page-aligned buffer of at least `len` bytes.
    pub(super) fn make(&mut self, len: usize) -> io::Result<Buffer> {
        // Powers of two: a series of growing requests takes at most twice the memory of the last.
        let len = memory::page_ceil(len)
            .and_then(usize::checked_next_power_of_two)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let (map, start) = match self.chunk.take() {
            Some((map, start)) if start + len <= map.len() => (map, start),
            _ => (Arc::new(HostMap::anonymous(len.max(LARGE_BYTES))?), 0),
        };
        self.chunk = Some((map.clone(), start + len));
        Ok(Buffer { map, start, len })
    }
}

impl Buffer {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the byte at `offset`, checking that `len` bytes from it are inside the buffer.
    pub(super) fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "outside the buffer");
        self.map.at(self.start + offset, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_do_not_overlap() {
        let mut buffers = Buffers::default();
        let lens = [1, 4096, 4097, 256 << 10, 3 << 20, 9 << 20, 100, 1 << 20, 5 << 20];
        let made = lens.map(|len| (len, buffers.make(len).unwrap()));
        let mut ranges: Vec<_> = made
            .iter()
            .map(|(len, buffer)| {
                assert!(buffer.len() >= *len);
                let start = buffer.at(0, buffer.len()).as_ptr().addr();
                assert!(start.is_multiple_of(4096), "direct I/O asks for that");
                start..start + buffer.len()
            })
            .collect();
        ranges.sort_by_key(|range| range.start);
        assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
    }

    #[test]
    #[should_panic(expected = "outside the buffer")]
    fn a_neighbour_is_out_of_reach() {
        let mut buffers = Buffers::default();
        let first = buffers.make(4096).unwrap();
        let _second = buffers.make(4096).unwrap();
        first.at(4096, 1);
    }
}
