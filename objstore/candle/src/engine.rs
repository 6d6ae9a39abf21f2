//! The engine: prompts in, tokens out, and its use of the store.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use candle_core::Tensor;
use objstore::{BlockId, BlockKey, KeyChain, Layer, Namespace, Prefix, Store};
use ripieno_stack::{Builder, DeviceChoice, ErrorKind, Request, Stack, StackConfig, StackError};

use crate::{
    model::Llama,
    pages::{BLOCK, BLOCKS, Pages, SHAPE},
};

/// Identifies the weights; those of a real model have a digest.
const SEED: u64 = 11;
/// Tokens that a token attends to in a layer with a sliding window.
const WINDOW: usize = 40;

/// A model, its KV pool, and a store that the pool is registered with.
#[derive(Debug)]
pub struct Engine {
    pub(crate) model: Llama,
    /// The KV pool.
    pub pages: Arc<Pages>,
    stack: Stack,
}

/// A prompt and the tokens generated after it.
#[derive(Debug)]
pub struct Sequence {
    /// The prompt's tokens, and those generated.
    pub tokens: Vec<u32>,
    /// Its blocks in the pool. With several kinds of layers, each has a block for one of these.
    pub table: Vec<BlockId>,
    /// Tokens that were not computed: the store had their KV.
    pub found: usize,
    /// Tokens whose KV is in the store now.
    pub stored: usize,
    /// Time from the call to the first token.
    pub first_token: Duration,
}

/// Returns the namespace: KV is reused only if all of this is equal, besides the tokens.
fn namespace(windows: &[Option<usize>]) -> Namespace {
    let mut weights = [0; 32];
    weights[..8].copy_from_slice(&SEED.to_le_bytes());
    Namespace {
        weights,
        layout: format!("tokens, heads, elements; windows: {windows:?}"),
        dtype: "float32".to_owned(),
        block_tokens: SHAPE.block_tokens,
        ..Namespace::default()
    }
}

/// Returns the keys of a prompt's blocks, without the last token: the model must compute that one.
fn keys(prompt: &[u32], window: Option<usize>) -> Vec<BlockKey> {
    let before = prompt.split_last().map_or(prompt, |(_, before)| before);
    let kind = window.map_or(Vec::new(), |window| window.to_le_bytes().to_vec());
    KeyChain::new(&kind).keys(before, SHAPE.block_tokens)
}

/// Returns the first block that a token at position `at` attends to.
fn first_seen(window: Option<usize>, at: usize) -> usize {
    window.map_or(0, |window| (at + 1).saturating_sub(window) / BLOCK)
}

impl Engine {
    /// Opens a store, or creates one of 64 MiB in two files. With `windows`, every other layer has
    /// a sliding window.
    ///
    /// # Errors
    /// Returns an error if the store cannot be opened.
    pub fn open(config: StackConfig, windows: bool) -> Result<Self> {
        let windows: &[_] = if windows { &[Some(WINDOW), None] } else { &[None] };
        let pages = Pages::new();
        let devices = Some(DeviceChoice::Files(2));
        let config = StackConfig { capacity: Some(64 << 20), devices, ..config };
        let builder = Builder::new(config, SHAPE);
        let stack = builder.namespace(namespace(windows)).pool(pages.memory()).open()?;
        Ok(Self { model: Llama::new(SEED, windows)?, pages, stack })
    }

    /// Returns the store.
    #[must_use]
    pub fn store(&self) -> &Store {
        self.stack.store()
    }

    /// Computes a prompt's first token. With the store, KV that it has is loaded instead of
    /// computed, and the rest is stored.
    ///
    /// # Errors
    /// Returns an error if the pool is too small, or the store has failed. Lost or damaged KV is no
    /// error: it is computed.
    pub fn prefill(&self, prompt: &[u32], use_store: bool) -> Result<Sequence> {
        let start = Instant::now();
        // After a failure the lookup finds fewer blocks; the last attempt does without the store.
        for attempt in 0..3 {
            match self.try_prefill(prompt, use_store && attempt < 2, start) {
                Err(error) if is_lost(&error) => continue,
                done => return done,
            }
        }
        unreachable!("without the store nothing is lost")
    }

    fn try_prefill(&self, prompt: &[u32], use_store: bool, start: Instant) -> Result<Sequence> {
        let (store, windows) = (self.store(), &self.model.windows);
        let kinds = windows.len();
        let keys: Vec<Vec<BlockKey>> = windows.iter().map(|window| keys(prompt, *window)).collect();
        let blocks = if use_store { keys[0].len() } else { 0 };
        // Any order works: an engine's blocks are scattered over the pool.
        let table: Vec<BlockId> = (0..BLOCKS / kinds as u32).rev().map(BlockId).collect();
        let (room, tokens) = (table.len() * BLOCK, prompt.len());
        ensure!((1..=room).contains(&tokens), "{tokens} tokens; 1 to {room} are possible");

        // Layers without a window come last.
        let shared = keys.last().map_or(0, |keys| store.peek(&keys[..blocks]));
        let (hits, prefixes) = self.find(&keys, blocks)?;
        let (mut loads, mut saves) = (Vec::new(), Vec::new());
        for (kind, (first, prefix)) in prefixes.iter().enumerate() {
            let own = self.table(&table, kind);
            loads.push(Request::retrieve(store, prefix, 0, &own[*first..hits])?);
            // Of a window the end of the prompt, and the end of a prefix that another prompt has.
            let seen = [shared, blocks].map(|end| first_seen(windows[kind], end * BLOCK)..end);
            let wanted = (hits..blocks).filter(|at| seen.iter().any(|seen| seen.contains(at)));
            let wanted: Vec<usize> = wanted.collect();
            let (new, own): (Vec<_>, Vec<_>) =
                wanted.iter().map(|at| (keys[kind][*at], own[*at])).unzip();
            saves.push((Request::store(store, &new, &own)?, wanted));
        }
        let row = |layer| (layer % kinds, Layer((layer / kinds) as u32));
        for (kind, layer) in (0..self.model.layers()).map(row) {
            loads[kind].start(layer)?;
        }
        let found = hits * BLOCK;
        let mut x = self.model.embed(&prompt[found..])?;
        for at in 0..self.model.layers() {
            let (kind, layer) = row(at);
            // The layer's KV is loaded now; later layers load while this one is computed.
            loads[kind].wait(layer)?;
            x = self.compute(at, &x, &table, found)?;
            saves[kind].0.start(layer)?;
        }
        let token = self.model.next_token(&x)?;
        let first_token = start.elapsed();
        let mut stored = blocks * BLOCK;
        for (save, wanted) in saves {
            // Waits for the layers. Afterwards lookups find the blocks; if the store is full, not
            // all.
            let accepted = save.commit()?.accepted;
            stored = wanted.get(accepted).map_or(stored, |missing| stored.min(missing * BLOCK));
        }
        let tokens = [prompt, &[token]].concat();
        Ok(Sequence { tokens, table, found, stored, first_token })
    }

    /// Returns how many of a prompt's leading `blocks` need not be computed, and of each kind of
    /// layers the first block to load for that, and those from there on. keys: those of each kind.
    fn find(&self, keys: &[Vec<BlockKey>], blocks: usize) -> Result<(usize, Vec<(usize, Prefix)>)> {
        let mut hits = blocks;
        loop {
            let found = self.model.windows.iter().zip(keys).map(|(window, keys)| {
                let first = first_seen(*window, hits * BLOCK);
                Ok((first, self.store().lookup(&keys[first..hits])?))
            });
            let found: Vec<(usize, Prefix)> = found.collect::<Result<_>>()?;
            let end = found.iter().map(|(first, prefix)| first + prefix.len()).min().unwrap_or(0);
            if end == hits {
                return Ok((hits, found));
            }
            // No longer hit is possible: its window would have the missing block, too.
            hits = end;
        }
    }

    /// Returns the blocks of a sequence for one kind of layers.
    fn table(&self, table: &[BlockId], kind: usize) -> Vec<BlockId> {
        let kinds = self.model.windows.len() as u32;
        table.iter().map(|block| BlockId(block.0 * kinds + kind as u32)).collect()
    }

    /// Generates `count` more tokens.
    ///
    /// # Errors
    /// Returns an error if the pool is too small.
    pub fn decode(&self, sequence: &mut Sequence, count: usize) -> Result<()> {
        let Sequence { tokens, table, .. } = sequence;
        for _ in 0..count {
            let (last, before) = tokens.split_last().context("an empty sequence")?;
            ensure!(before.len() / BLOCK < table.len(), "the pool is full");
            let mut x = self.model.embed(&[*last])?;
            for layer in 0..self.model.layers() {
                x = self.compute(layer, &x, table, before.len())?;
            }
            tokens.push(self.model.next_token(&x)?);
        }
        Ok(())
    }

    /// Computes a layer for the tokens from `first` on; K and V of earlier ones are in the pages.
    /// It does so a block at a time: results do not depend on what was found, to the last bit.
    fn compute(&self, layer: usize, x: &Tensor, table: &[BlockId], first: usize) -> Result<Tensor> {
        let (pages, kinds) = (&self.pages, self.model.windows.len());
        let (kind, row) = (layer % kinds, layer / kinds);
        let (own, tokens) = (self.table(table, kind), x.dim(0)?);
        let parts = (0..tokens).step_by(BLOCK).map(|at| {
            let (count, at) = (BLOCK.min(tokens - at), first + at);
            self.model.layer(layer, &x.narrow(0, at - first, count)?, at, |_, k, v| {
                pages.write((row, 0), &own, at, k)?;
                pages.write((row, 1), &own, at, v)?;
                let seen = first_seen(self.model.windows[kind], at);
                let (own, all) = (&own[seen..], at + count - seen * BLOCK);
                Ok((pages.read((row, 0), own, all)?, pages.read((row, 1), own, all)?))
            })
        });
        Ok(Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
    }

    /// Makes everything permanent and unregisters the pages.
    ///
    /// # Errors
    /// Same as [`Stack::close`].
    pub fn close(self) -> Result<()> {
        Ok(self.stack.close()?)
    }
}

/// Returns true if KV was damaged or is gone. The store has dropped it by now.
fn is_lost(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref().map(StackError::kind);
    matches!(kind, Some(ErrorKind::Io | ErrorKind::Stale))
}
