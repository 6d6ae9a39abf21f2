//! Parser of the capability chains that the kernel appends to its answers.
//!
//! No offset and no count is trusted: a chain that goes backward, leaves the buffer or claims more
//! entries than fit ends early.

use vfio_bindings::bindings::vfio::{
    VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE, VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL,
    VFIO_REGION_INFO_CAP_MSIX_MAPPABLE, VFIO_REGION_INFO_CAP_SPARSE_MMAP,
};

/// Bytes of `vfio_info_cap_header`: id (2), version (2), offset of the next one (4).
const HEADER_BYTES: usize = 8;
/// Bytes before the entries of a capability that is a list: header, count (4), reserved (4).
const LIST_BYTES: usize = 16;

/// An answer of the kernel with its capabilities.
#[derive(Debug, Clone, Default)]
pub(super) struct Answer {
    /// The whole answer; capability offsets are relative to its first byte.
    pub(super) bytes: Vec<u8>,
    /// Offset of the first capability; 0 if there is none.
    pub(super) first: u32,
}

/// First and last I/O virtual address of a usable range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IovaSpan {
    /// First address.
    pub first: u64,
    /// Last address, inclusive: a range may extend to the end of the address space.
    pub last: u64,
}

/// Part of a BAR, in bytes from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Area {
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Answer {
    /// Returns the capability `id`, from its header to the end of the answer.
    fn find(&self, id: u32) -> Option<&[u8]> {
        let mut at = self.first as usize;
        loop {
            let here = self.bytes.get(at..).filter(|rest| at != 0 && rest.len() >= HEADER_BYTES)?;
            if u32::from(u16::from_ne_bytes([here[0], here[1]])) == id {
                return Some(here);
            }
            let next = word(here, 4)? as usize;
            // The kernel builds the chain front to back; going backward would be a loop.
            at = if next > at { next } else { return None };
        }
    }

    /// Parses a list of pairs of 64-bit numbers.
    fn pairs(&self, id: u32) -> Option<Vec<(u64, u64)>> {
        let list = self.find(id)?;
        let count = word(list, HEADER_BYTES)? as usize;
        let entries = list.get(LIST_BYTES..)?.as_chunks::<16>().0;
        let number = |bytes: &[u8]| bytes.first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
        Some(entries.iter().take(count).map(|e| (number(&e[..8]), number(&e[8..]))).collect())
    }

    /// Returns the address ranges that a container may map, in ascending order, or `None` if the
    /// kernel does not report them (before 5.4).
    pub(super) fn iova_spans(&self) -> Option<Vec<IovaSpan>> {
        let pairs = self.pairs(VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE)?;
        let good = pairs.into_iter().filter(|(first, last)| first <= last);
        let mut spans: Vec<_> = good.map(|(first, last)| IovaSpan { first, last }).collect();
        spans.sort_by_key(|span| span.first);
        Some(spans)
    }

    /// Returns how many more mappings a container may have; `None` if unreported (before 5.10).
    pub(super) fn dma_available(&self) -> Option<u32> {
        word(self.find(VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL)?, HEADER_BYTES)
    }

    /// Returns the mappable parts of a region, if that is not all of it.
    pub(super) fn sparse_areas(&self) -> Option<Vec<Area>> {
        let pairs = self.pairs(VFIO_REGION_INFO_CAP_SPARSE_MMAP)?;
        Some(pairs.into_iter().map(|(offset, len)| Area { offset, len }).collect())
    }

    /// Returns whether the page with the MSI-X table is mappable, too (since 4.16).
    pub(super) fn msix_mappable(&self) -> bool {
        self.find(VFIO_REGION_INFO_CAP_MSIX_MAPPABLE).is_some()
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Returns the mappable parts of a BAR of `size` bytes: whole pages, in ascending order, not
/// overlapping, adjacent ones merged.
pub(super) fn mappable(size: u64, sparse: Option<Vec<Area>>, page: u64) -> Vec<Area> {
    let mut areas = sparse.unwrap_or_else(|| vec![Area { offset: 0, len: size }]);
    areas.sort_by_key(|area| area.offset);
    let mut joined: Vec<Area> = Vec::new();
    for area in areas {
        let end = area.offset.saturating_add(area.len).min(size) / page * page;
        let done = joined.last().map_or(0, |last| last.offset + last.len);
        let Some(begin) = area.offset.checked_next_multiple_of(page) else { continue };
        let begin = begin.max(done);
        if begin >= end {
            continue;
        }
        match joined.last_mut() {
            Some(last) if done == begin => last.len += end - begin,
            _ => joined.push(Area { offset: begin, len: end - begin }),
        }
    }
    joined
}

#[cfg(test)]
mod tests;
