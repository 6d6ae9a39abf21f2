//! The KV pool: pages of K and V, in one allocation that is registered with the store.

#![allow(unsafe_code, reason = "registers memory with a store, by its address")]

use std::{
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use candle_core::{Device, Result, Tensor};
use objstore::{BlockId, KvShape};
use ripieno_stack::{EngineMemory, PoolLayout, PoolMemory};

use crate::model::{HEAD, KV_HEADS, LAYERS};

/// Elements of K, or of V, of a token in a layer.
const TOKEN: usize = KV_HEADS * HEAD;
/// Tokens of a block.
pub(crate) const BLOCK: usize = 16;
/// Shape of a block: K and V of each layer of a kind, 16 tokens of f32.
pub const SHAPE: KvShape = KvShape {
    layers: LAYERS as u32,
    segments: 2,
    object_bytes: (BLOCK * TOKEN * size_of::<f32>()) as u32,
    block_tokens: BLOCK as u32,
};
/// Blocks of the pool: 4,096 tokens, or with two kinds of layers 2,048.
pub const BLOCKS: u32 = 256;

/// The pool: `[layers x (K, V), blocks, tokens of a block, heads of K and V, elements of a head]`.
///
/// Not a tensor: candle makes references to all of a tensor's memory, and Rust allows none to
/// memory that a device writes to. So elements are atomics, and a layer's K and V are gathered into
/// a tensor. On a GPU, the pool is a tensor, and the attention kernel reads the pages in place.
#[derive(Debug)]
pub struct Pages {
    elements: Box<[AtomicU32]>,
}

impl Pages {
    /// Returns pages of zeros.
    #[must_use]
    pub fn new() -> Arc<Self> {
        let count = SHAPE.block_bytes() as usize / size_of::<f32>() * BLOCKS as usize;
        Arc::new(Self { elements: (0..count).map(|_| AtomicU32::new(0)).collect() })
    }

    /// Returns the memory to register with a store, which keeps it alive until it is closed.
    #[must_use]
    pub fn memory(self: &Arc<Self>) -> PoolMemory {
        let base = NonNull::from(&*self.elements).cast::<u8>();
        // SAFETY: the memory lives as long as the pages, and references to atomics allow other
        // writers.
        let memory = unsafe { EngineMemory::new(base, size_of_val(&*self.elements), self.clone()) };
        PoolMemory::Engine { memory, layout: PoolLayout::contiguous(&SHAPE, BLOCKS) }
    }

    /// Writes K (segment 0) or V (segment 1) of a layer for a sequence's tokens from `first` on.
    /// `table` lists the sequence's blocks.
    ///
    /// # Errors
    /// Returns candle's errors.
    pub fn write(
        &self,
        row: (usize, usize),
        table: &[BlockId],
        first: usize,
        x: &Tensor,
    ) -> Result<()> {
        let x = x.flatten_all()?.to_vec1::<f32>()?;
        for (token, values) in (first..).zip(x.chunks(TOKEN)) {
            for (element, value) in self.token(row, table, token).iter().zip(values) {
                element.store(value.to_bits(), Relaxed);
            }
        }
        Ok(())
    }

    /// Returns K or V of a layer for the first `tokens` tokens of a sequence.
    ///
    /// # Errors
    /// Returns candle's errors.
    pub fn read(&self, row: (usize, usize), table: &[BlockId], tokens: usize) -> Result<Tensor> {
        let elements = (0..tokens).flat_map(|token| self.token(row, table, token));
        let values = elements.map(|element| f32::from_bits(element.load(Relaxed))).collect();
        Tensor::from_vec(values, (tokens, KV_HEADS, HEAD), &Device::Cpu)
    }

    /// Returns the elements of a token of a sequence.
    fn token(
        &self,
        (layer, segment): (usize, usize),
        table: &[BlockId],
        token: usize,
    ) -> &[AtomicU32] {
        let row = layer * SHAPE.segments as usize + segment;
        let block = table[token / BLOCK].0 as usize;
        let at = ((row * BLOCKS as usize + block) * BLOCK + token % BLOCK) * TOKEN;
        &self.elements[at..at + TOKEN]
    }
}
