//! Allocator of I/O virtual addresses. Pure bookkeeping without system calls, except that the
//! addresses of PCI devices are read once ([`pci_windows`]).

use std::collections::BTreeMap;

use nvme_pci::Root;

use super::capability::IovaSpan;
use crate::dma::Iova;

/// Lowest address used: an access at 0 or in the first pages is a bug, which the IOMMU should
/// catch.
const FLOOR: u64 = 1 << 20;
/// Sizes of IOMMU pages worth aligning to, largest first.
const LARGE_PAGES: [u64; 2] = [1 << 30, 2 << 20];

/// Returns the bus addresses of PCI functions and bridge windows, in any order. A switch whose
/// ports do not redirect peer traffic to the IOMMU routes by these addresses, and so does a root
/// port for its own window: an I/O virtual address in such a range reaches the peer instead of the
/// memory mapped there. The kernel excludes them for some IOMMUs only.
pub(super) fn pci_windows(root: &Root) -> Vec<IovaSpan> {
    /// `IORESOURCE_MEM`.
    const MEMORY: u64 = 0x200;
    let hex = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let mut windows = Vec::new();
    for name in root.names("/sys/bus/pci/devices") {
        let path = format!("/sys/bus/pci/devices/{name}/resource");
        for line in root.text(path).unwrap_or_default().lines() {
            let fields: Vec<u64> = line.split_whitespace().filter_map(hex).collect();
            if let [first, last, flags] = fields[..]
                && flags & MEMORY != 0
                && first < last
            {
                windows.push(IovaSpan { first, last });
            }
        }
    }
    windows
}

/// Removes `holes` from `spans` (ascending, not overlapping), in whole pages.
pub(super) fn without(spans: Vec<IovaSpan>, holes: &[IovaSpan], page: u64) -> Vec<IovaSpan> {
    let mask = page - 1;
    let mut left = spans;
    for hole in holes {
        let (first, last) = (hole.first & !mask, hole.last | mask);
        left = left
            .into_iter()
            .flat_map(|span| {
                let below = (span.first < first)
                    .then(|| IovaSpan { first: span.first, last: span.last.min(first - 1) });
                let above = (span.last > last)
                    .then(|| IovaSpan { first: span.first.max(last + 1), last: span.last });
                [below, above]
            })
            .flatten()
            .collect();
    }
    left
}

/// First-fit allocator of contiguous ranges inside the ranges that the IOMMU can translate.
///
/// At least one page between two regions stays unmapped, so that the IOMMU stops a device that runs
/// past the end of one.
#[derive(Debug)]
pub(super) struct IovaAllocator {
    valid: Vec<IovaSpan>,
    /// Length by first address.
    taken: BTreeMap<u64, u64>,
    page: u64,
}

impl IovaAllocator {
    /// Creates an allocator for `valid` ranges (ascending, disjoint) in pages of `page` bytes.
    pub(super) fn new(valid: Vec<IovaSpan>, page: u64) -> Self {
        Self { valid, taken: BTreeMap::new(), page }
    }

    /// Replaces the ranges after a group joined or left. If a region lies outside the new ranges,
    /// returns the first such region and changes nothing.
    pub(super) fn set_valid(&mut self, valid: Vec<IovaSpan>, page: u64) -> Result<(), IovaSpan> {
        for (&first, &len) in &self.taken {
            let last = first + (len - 1);
            if !valid.iter().any(|span| span.first <= first && last <= span.last) {
                return Err(IovaSpan { first, last });
            }
        }
        (self.valid, self.page) = (valid, page);
        Ok(())
    }

    /// Returns the translatable ranges.
    pub(super) fn valid(&self) -> &[IovaSpan] {
        &self.valid
    }

    /// Returns the page size in bytes; addresses and lengths are multiples of it.
    pub(super) fn page(&self) -> u64 {
        self.page
    }

    /// Allocates `len` bytes, a multiple of the page size, for memory with the physical layout of
    /// `like`. If `len` is at least a large page and there is room, the result is congruent to
    /// `like` modulo the large page, which the IOMMU needs to use large pages.
    pub(super) fn allocate(&mut self, len: u64, like: u64) -> Option<Iova> {
        if len == 0 || !len.is_multiple_of(self.page) {
            return None;
        }
        let large = LARGE_PAGES.into_iter().filter(|large| *large <= len && *large > self.page);
        let found = large
            .map(|align| (align, like % align / self.page * self.page))
            .chain([(self.page, 0)])
            .find_map(|(align, phase)| self.find(len, align, phase))?;
        self.taken.insert(found, len);
        Some(Iova(found))
    }

    /// Returns the first free address congruent to `phase` modulo `align`.
    fn find(&self, len: u64, align: u64, phase: u64) -> Option<u64> {
        // Ranges may end with the address space; 128 bits cannot overflow.
        let (len, align, phase) = (u128::from(len), u128::from(align), u128::from(phase));
        let guard = u128::from(self.page);
        let place = |from: u128| {
            let base = from / align * align + phase;
            if base >= from { base } else { base + align }
        };
        for span in &self.valid {
            let end = u128::from(span.last) + 1;
            let mut at = place(u128::from(span.first.max(FLOOR)));
            // The guard page may follow a region before this range.
            let before = self.taken.range(..span.first.max(FLOOR)).next_back();
            let after = self.taken.range(span.first.max(FLOOR)..);
            for (&first, &taken) in before.into_iter().chain(after) {
                let (first, taken_end) = (u128::from(first), u128::from(first) + u128::from(taken));
                if at + len + guard <= first {
                    break;
                }
                at = at.max(place(taken_end + guard));
            }
            if at + len <= end {
                return u64::try_from(at).ok();
            }
        }
        None
    }

    /// Frees the range that begins at `iova` and returns its length.
    pub(super) fn release(&mut self, iova: Iova) -> Option<u64> {
        self.taken.remove(&iova.0)
    }
}

#[cfg(test)]
mod tests;
