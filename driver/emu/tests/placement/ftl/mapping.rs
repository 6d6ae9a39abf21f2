//! Mapping of logical pages to flash pages, and garbage collection.

use std::collections::VecDeque;

use super::{FtlCounters, FtlOptions};

/// Bytes of a page, the unit of mapping and programming.
pub(super) const PAGE_BYTES: u64 = 4096;
/// No page, or no block.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct Mapping {
    block_pages: u32,
    /// Flash page of each logical page.
    physical: Vec<u32>,
    /// Logical page of each flash page; `NONE` if that is invalid.
    logical: Vec<u32>,
    blocks: Vec<Block>,
    /// Erased blocks, oldest first.
    erased: VecDeque<u32>,
    /// Block that each handle writes to; the last entry is that of garbage collection.
    open: Vec<u32>,
    pub(super) counters: FtlCounters,
}

#[derive(Debug, Clone, Copy, Default)]
struct Block {
    /// Pages programmed since the last erasure.
    programmed: u32,
    /// Valid pages among them.
    needed: u32,
}

/// Blocks that garbage collection needs in addition to data: its own, one to continue with, and one
/// so that a block with invalid pages always exists.
const SPARE_BLOCKS: u64 = 3;

impl Mapping {
    pub(super) fn new(bytes: u64, options: FtlOptions) -> Self {
        let block_pages = u64::from(options.block_bytes).div_ceil(PAGE_BYTES).max(1);
        let pages = bytes.div_ceil(PAGE_BYTES);
        let extra = pages * u64::from(options.over_provisioning_percent) / 100;
        let handles = u64::from(options.handles.max(1));
        let least = pages.div_ceil(block_pages) + handles + SPARE_BLOCKS;
        let blocks = (pages + extra).div_ceil(block_pages).max(least);
        let flash = u32::try_from(blocks * block_pages).expect("at most u32::MAX pages of flash");
        Self {
            block_pages: block_pages as u32,
            physical: vec![NONE; pages as usize],
            logical: vec![NONE; flash as usize],
            blocks: vec![Block::default(); blocks as usize],
            erased: (0..blocks as u32).collect(),
            open: vec![NONE; handles as usize + 1],
            counters: FtlCounters::default(),
        }
    }

    pub(super) fn is_mapped(&self, page: u64) -> bool {
        self.physical[page as usize] != NONE
    }

    /// Writes `page` for the host with a placement handle; an invalid handle means 0.
    pub(super) fn write(&mut self, page: u64, handle: u16) {
        let handles = self.open.len() - 1;
        let handle = if usize::from(handle) < handles { usize::from(handle) } else { 0 };
        if self.open[handle] == NONE {
            while self.erased.len() < 2 {
                self.collect();
            }
        }
        self.program(page as u32, handle);
    }

    /// Invalidates `page`.
    pub(super) fn unmap(&mut self, page: u64) {
        let held = std::mem::replace(&mut self.physical[page as usize], NONE);
        if held != NONE {
            self.logical[held as usize] = NONE;
            self.blocks[(held / self.block_pages) as usize].needed -= 1;
        }
    }

    /// Programs the next page of the open block `stream` with a logical page.
    fn program(&mut self, page: u32, stream: usize) {
        if self.open[stream] == NONE {
            self.open[stream] = self.erased.pop_front().expect("collecting takes one block");
        }
        self.unmap(page.into());
        let index = self.open[stream];
        let block = &mut self.blocks[index as usize];
        let at = index * self.block_pages + block.programmed;
        block.programmed += 1;
        block.needed += 1;
        if block.programmed == self.block_pages {
            self.open[stream] = NONE;
        }
        self.physical[page as usize] = at;
        self.logical[at as usize] = page;
        self.counters.media_bytes += PAGE_BYTES;
    }

    /// Moves the valid pages of the full block with the fewest, and erases that block.
    fn collect(&mut self) {
        let full = |(_, block): &(usize, &Block)| block.programmed == self.block_pages;
        let candidates = self.blocks.iter().enumerate().filter(full);
        let (index, victim) = candidates.min_by_key(|(_, block)| block.needed).expect("blocks");
        assert!(victim.needed < self.block_pages, "there is more flash than logical pages");
        let (first, stream) = (index * self.block_pages as usize, self.open.len() - 1);
        for at in first..first + self.block_pages as usize {
            if self.logical[at] != NONE {
                self.program(self.logical[at], stream);
            }
        }
        self.blocks[index] = Block::default();
        self.erased.push_back(index as u32);
        self.counters.erases += 1;
    }
}
