//! The engine: prompts in, tokens out, and its use of the store.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use objstore::{BlockId, BlockKey, KeyChain, Layer, Namespace, Store};
use ripieno_stack::{Builder, ErrorKind, Request, Stack, StackError};

use crate::{
    model::{LAYERS, Llama},
    pages::{BLOCKS, Pages, SHAPE},
};

/// Identifies the weights; those of a real model have a digest.
const SEED: u64 = 11;

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
    /// Its blocks in the pool.
    pub table: Vec<BlockId>,
    /// Tokens that were not computed: the store had their KV.
    pub found: usize,
    /// Tokens whose KV is in the store now.
    pub stored: usize,
    /// Time from the call to the first token.
    pub first_token: Duration,
}

/// Returns the namespace: KV is reused only if all of this is equal, besides the tokens.
fn namespace() -> Namespace {
    let mut weights = [0; 32];
    weights[..8].copy_from_slice(&SEED.to_le_bytes());
    Namespace {
        weights,
        layout: "tokens, heads, elements".to_owned(),
        dtype: "float32".to_owned(),
        block_tokens: SHAPE.block_tokens,
        ..Namespace::default()
    }
}

/// Returns the keys of a prompt's blocks, without the last token: the model must compute that one.
fn keys(prompt: &[u32]) -> Vec<BlockKey> {
    let before = prompt.split_last().map_or(prompt, |(_, before)| before);
    KeyChain::new(b"").keys(before, SHAPE.block_tokens)
}

impl Engine {
    /// Opens the store in `dir`, or creates one of 64 MiB.
    ///
    /// # Errors
    /// Returns an error if the store cannot be opened.
    pub fn open(dir: &Path) -> Result<Self> {
        let pages = Pages::new();
        let builder = Builder::new(dir, SHAPE).capacity(64 << 20).devices(2);
        let stack = builder.namespace(namespace()).pool(pages.memory()).open()?;
        Ok(Self { model: Llama::new(SEED)?, pages, stack })
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
        let store = self.store();
        let keys = if use_store { keys(prompt) } else { Vec::new() };
        // Any order works: an engine's blocks are scattered over the pool.
        let table: Vec<BlockId> = (0..BLOCKS).rev().map(BlockId).collect();
        let room = table.len() * SHAPE.block_tokens as usize;
        let tokens = prompt.len();
        ensure!((1..=room).contains(&tokens), "{tokens} tokens; 1 to {room} are possible");

        let prefix = store.lookup(&keys)?;
        let hits = prefix.len();
        let load = Request::retrieve(store, &prefix, 0, &table[..hits])?;
        let save = Request::store(store, &keys[hits..], &table[hits..keys.len()])?;
        for layer in 0..LAYERS as u32 {
            load.start(Layer(layer))?;
        }
        let found = hits * SHAPE.block_tokens as usize;
        let mut x = self.model.embed(&prompt[found..])?;
        for layer in 0..LAYERS {
            // The layer's KV is loaded now; later layers load while this one is computed.
            load.wait(Layer(layer as u32))?;
            x = self.compute(layer, &x, &table, found)?;
            save.start(Layer(layer as u32))?;
        }
        let token = self.model.next_token(&x)?;
        let first_token = start.elapsed();
        // Waits for the layers. Afterwards lookups find the blocks; if the store is full, not all.
        let accepted = save.commit()?.accepted;
        let tokens = [prompt, &[token]].concat();
        let stored = found + accepted * SHAPE.block_tokens as usize;
        Ok(Sequence { tokens, table, found, stored, first_token })
    }

    /// Generates `count` more tokens.
    ///
    /// # Errors
    /// Returns an error if the pool is too small.
    pub fn decode(&self, sequence: &mut Sequence, count: usize) -> Result<()> {
        let Sequence { tokens, table, .. } = sequence;
        for _ in 0..count {
            let (last, before) = tokens.split_last().context("an empty sequence")?;
            ensure!(before.len() / (SHAPE.block_tokens as usize) < table.len(), "the pool is full");
            let mut x = self.model.embed(&[*last])?;
            for layer in 0..LAYERS {
                x = self.compute(layer, &x, table, before.len())?;
            }
            tokens.push(self.model.next_token(&x)?);
        }
        Ok(())
    }

    /// Computes a layer for the tokens from `first` on; K and V of earlier ones are in the pages.
    fn compute(
        &self,
        layer: usize,
        x: &candle_core::Tensor,
        table: &[BlockId],
        first: usize,
    ) -> Result<candle_core::Tensor> {
        let (pages, all) = (&self.pages, first + x.dim(0)?);
        self.model.layer(layer, x, first, |_, k, v| {
            pages.write((layer, 0), table, first, k)?;
            pages.write((layer, 1), table, first, v)?;
            Ok((pages.read((layer, 0), table, all)?, pages.read((layer, 1), table, all)?))
        })
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
