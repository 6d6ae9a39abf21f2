//! The GPU's memory: blocks of the requests being served, and as a cache those of earlier ones.

use kv_catalog::{BlockKey, PolicyKind, ReferenceId, WriteId};

use super::{Index, Request, Setup, keys};

/// The GPU's memory.
#[derive(Debug)]
pub(super) struct Hbm {
    /// `None` for unlimited memory.
    pub(super) index: Option<Index>,
    block_tokens: u32,
    /// True if blocks stay after their request has ended.
    keeps: bool,
}

/// Blocks of a request.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// Their keys, including those of the output so far.
    keys: Vec<BlockKey>,
    /// The prompt's, while they are computed.
    computing: Option<WriteId>,
    /// Those that are complete: the prompt's, visible to other requests, and of the output.
    held: Vec<ReferenceId>,
}

/// Returns a name for a block that no other request has.
fn own(number: usize, at: usize) -> u64 {
    !((number as u64) << 24 | at as u64)
}

impl Hbm {
    pub(super) fn new(setup: &Setup, keeps: bool) -> Self {
        let Setup { model, kv_bytes, block_tokens, .. } = *setup;
        let block_bytes = model.token_bytes() * u64::from(block_tokens);
        // LRU, as engines use it.
        let index = || Index::new(kv_bytes, block_bytes, PolicyKind::Lru);
        Self { index: (kv_bytes < u64::MAX).then(index), block_tokens, keeps }
    }

    /// Returns how many leading tokens of a request's shared blocks are present.
    pub(super) fn find(&self, request: &Request) -> u32 {
        let find = |index: &Index| index.find(&keys(request.blocks.iter().copied())) as u32;
        self.index.as_ref().map_or(0, find) * self.block_tokens
    }

    /// Reserves room for a prompt. Returns its blocks, and how many leading tokens are present in
    /// full blocks; `None` without room.
    pub(super) fn begin(
        &mut self,
        number: usize,
        request: &Request,
        prompt: u32,
    ) -> Option<(Blocks, u32)> {
        let Some(index) = &mut self.index else { return Some((Blocks::default(), 0)) };
        let shared = &request.blocks;
        let total = prompt.div_ceil(self.block_tokens) as usize;
        let own = (shared.len()..total).map(|at| own(number, at));
        let keys = keys(shared.iter().copied().chain(own));
        let full = &keys[..((prompt / self.block_tokens) as usize).min(keys.len())];
        let cached = if self.keeps { index.find(full) } else { 0 };
        let (write, room, _) = index.begin(&keys);
        if room < keys.len() {
            index.abort(write);
            return None;
        }
        let blocks = Blocks { keys, computing: Some(write), held: Vec::new() };
        Some((blocks, cached as u32 * self.block_tokens))
    }

    /// Reserves room for `tokens` tokens of a request; false if there is none.
    pub(super) fn grow(&mut self, number: usize, blocks: &mut Blocks, tokens: u32) -> bool {
        let there = blocks.keys.len();
        let wanted = tokens.div_ceil(self.block_tokens) as usize;
        let Some(index) = self.index.as_mut().filter(|_| wanted > there) else { return true };
        let names = keys((there..wanted).map(|at| own(number, at)));
        let (write, room, _) = index.begin(&names);
        if room < names.len() {
            index.abort(write);
            return false;
        }
        index.commit(write);
        blocks.held.push(index.hold(&names));
        blocks.keys.extend(names);
        true
    }

    /// Makes a computed prompt's blocks visible.
    pub(super) fn computed(&mut self, blocks: &mut Blocks) {
        if let (Some(index), Some(write)) = (&mut self.index, blocks.computing.take()) {
            index.commit(write);
            blocks.held.push(index.hold(&blocks.keys));
        }
    }

    /// Unpins a request's blocks.
    pub(super) fn end(&mut self, blocks: Blocks) {
        let Some(index) = &mut self.index else { return };
        blocks.computing.into_iter().for_each(|write| index.abort(write));
        blocks.held.into_iter().for_each(|held| index.release(held));
        if !self.keeps {
            index.remove(&blocks.keys);
        }
    }
}
