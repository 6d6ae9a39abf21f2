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
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Builds an answer whose capabilities follow a header of 24 bytes.
    fn answer(caps: &[(u16, Vec<u8>)]) -> Answer {
        let mut bytes = vec![0xEE; 24];
        for (index, (id, body)) in caps.iter().enumerate() {
            let next = bytes.len() + HEADER_BYTES + body.len();
            let next = if index + 1 == caps.len() { 0 } else { next as u32 };
            bytes.extend(id.to_ne_bytes());
            bytes.extend(1u16.to_ne_bytes());
            bytes.extend(next.to_ne_bytes());
            bytes.extend(body);
        }
        Answer { bytes, first: if caps.is_empty() { 0 } else { 24 } }
    }

    fn list(count: u32, pairs: &[(u64, u64)]) -> Vec<u8> {
        let mut body = count.to_ne_bytes().to_vec();
        body.extend([0; 4]);
        for (a, b) in pairs {
            body.extend(a.to_ne_bytes());
            body.extend(b.to_ne_bytes());
        }
        body
    }

    #[test]
    fn iommu_info() {
        // Reported by a kernel on an Intel IOMMU with 39 address bits; MSI addresses are left out.
        let pairs = [(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)];
        let info = answer(&[
            (2, vec![0; 24]),
            (1, list(2, &pairs)),
            (3, 65_535u32.to_ne_bytes().to_vec()),
        ]);
        let spans = info.iova_spans().unwrap();
        assert_eq!(spans, pairs.map(|(first, last)| IovaSpan { first, last }));
        assert_eq!(info.dma_available(), Some(65_535));
        // Identifiers depend on the answer: 1 is also the id of sparse areas.
        assert!(answer(&[(3, vec![])]).sparse_areas().is_none());
    }

    #[test]
    fn nothing_there() {
        assert_eq!(Answer::default().iova_spans(), None);
        assert_eq!(answer(&[]).dma_available(), None);
        assert_eq!(answer(&[(9, vec![])]).iova_spans(), None);
    }

    #[test]
    fn lies() {
        // More entries than the answer has bytes for, and ranges that end before they begin.
        let info = answer(&[(1, list(u32::MAX, &[(5, 3), (7, 9)]))]);
        assert_eq!(info.iova_spans(), Some(vec![IovaSpan { first: 7, last: 9 }]));
        // A chain that points to itself.
        let mut looped = answer(&[(2, vec![])]);
        looped.bytes[28..32].copy_from_slice(&24u32.to_ne_bytes());
        assert_eq!(looped.dma_available(), None);
        // Truncated in a header, and in a body.
        for cut in 24..looped.bytes.len() {
            let bytes = looped.bytes[..cut].to_vec();
            assert_eq!(Answer { bytes, first: 24 }.iova_spans(), None);
        }
    }

    #[test]
    fn sparse_bar() {
        // The MSI-X table is in the third page.
        let info = answer(&[(1, list(2, &[(0, 0x2000), (0x3000, 0x1000)])), (3, vec![])]);
        assert!(info.msix_mappable());
        let areas = mappable(0x4000, info.sparse_areas(), 4096);
        let area = |offset, len| Area { offset, len };
        assert_eq!(areas, [area(0, 0x2000), area(0x3000, 0x1000)]);
        // Adjacent areas are merged; partial pages and anything outside the BAR are cut off.
        let touching = vec![area(0x1000, 0x1000), area(0, 0x1000), area(0x2800, 0x9000)];
        assert_eq!(mappable(0x4000, Some(touching), 4096), [area(0, 0x2000), area(0x3000, 0x1000)]);
        assert_eq!(mappable(0x4000, None, 4096), [area(0, 0x4000)]);
        assert_eq!(mappable(0x4000, Some(vec![]), 4096), []);
        assert_eq!(mappable(0x800, None, 4096), []);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..96),
            first in 0u32..128,
        ) {
            let answer = Answer { bytes, first };
            answer.iova_spans();
            answer.dma_available();
            answer.sparse_areas();
            answer.msix_mappable();
        }

        #[test]
        fn mappable_parts_are_pages_of_what_was_offered(
            size in 0u64..0x2_0000,
            offered in prop::option::of(
                prop::collection::vec((0u64..0x2_4000, 0u64..0x9000), 0..6)
            ),
        ) {
            let offered: Option<Vec<Area>> = offered
                .map(|all| all.into_iter().map(|(offset, len)| Area { offset, len }).collect());
            let inside = |at: u64| at < size && offered.as_ref().is_none_or(|all| {
                all.iter().any(|a| (a.offset..a.offset + a.len).contains(&at))
            });
            let areas = mappable(size, offered.clone(), 4096);
            for area in &areas {
                prop_assert!(area.len > 0 && area.offset % 4096 == 0 && area.len % 4096 == 0);
                for at in (area.offset..area.offset + area.len).step_by(512) {
                    prop_assert!(inside(at));
                }
            }
            prop_assert!(areas.windows(2).all(|w| w[0].offset + w[0].len < w[1].offset));
            // A page that one area fully covers is never left out.
            for page in (0..size / 4096).map(|n| n * 4096) {
                let whole = offered.as_ref().is_none_or(|all| all.iter().any(|a| {
                    a.offset <= page && page + 4096 <= a.offset + a.len
                }));
                let mapped = areas.iter().any(|a| (a.offset..a.offset + a.len).contains(&page));
                prop_assert_eq!(whole, mapped || (whole && page + 4096 > size));
            }
        }
    }
}
