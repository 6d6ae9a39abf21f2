//! Logical pages, the pages of flash that hold them, and the garbage collection.

use std::collections::VecDeque;

use super::{FtlCounters, FtlOptions};

/// Bytes of a page: what is mapped, and what is programmed at once.
pub(super) const PAGE_BYTES: u64 = 4096;
/// No page, or no block.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct Mapping {
    block_pages: u32,
    /// The page of flash of each logical page.
    physical: Vec<u32>,
    /// The logical page in each page of flash; `NONE` when that is not needed.
    logical: Vec<u32>,
    blocks: Vec<Block>,
    /// Erased blocks, the one that has been longest first.
    erased: VecDeque<u32>,
    /// The block that each handle writes to, and as the last that of the garbage collection.
    open: Vec<u32>,
    pub(super) counters: FtlCounters,
}

#[derive(Debug, Clone, Copy, Default)]
struct Block {
    /// Pages that were programmed since it was erased.
    programmed: u32,
    /// Of these, pages that are needed.
    needed: u32,
}

/// Blocks that the garbage collection needs beside those that hold data: its own, one to go on
/// with, and one so that there is always a block with pages that are not needed.
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

    /// The host writes `page` with a placement handle; one that does not exist stands for 0.
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

    /// `page` is not needed any more.
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

    /// Moves what is needed of the full block with least of it, and erases that.
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
