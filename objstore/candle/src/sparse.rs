//! Decoding that attends to the best blocks of a prompt, whose KV lies in the store.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use candle_core::{D, Tensor};
use kv_swarm::{Cache, CacheConfig, Cluster, ClusterId, Clusters, Entry};
use objstore::{BlockId, ClusterCopies, KeyChain, Layer, Order, Store, StoredClusters};

use crate::{
    engine::{Engine, Sequence},
    model::{HEAD, KV_HEADS, LAYERS},
    pages::{BLOCK, Pages, SHAPE},
};

/// Costs of a read: those of a fast drive. All clusters have one block here, so that the cache
/// chooses by their activations alone.
const LATENCY: Duration = Duration::from_micros(80);
const TRANSFER: Duration = Duration::from_micros(2);

/// A sequence of which the pool has only some blocks: the latest ones, and for each layer `room`
/// others. A step reads those blocks from the store that it chose and that are not there.
#[derive(Debug)]
pub struct Offloaded {
    /// The tokens. Of the table, only blocks that are not in the store are still its own.
    pub sequence: Sequence,
    /// Blocks read from the store, one of a layer each.
    pub read: u64,
    /// The stored blocks, each a cluster of its own.
    stored: StoredClusters,
    layers: Vec<LayerBlocks>,
    top: usize,
}

/// The stored blocks of a layer.
#[derive(Debug)]
struct LayerBlocks {
    /// Mean K of each: `[blocks, KV_HEADS * HEAD]`.
    index: Vec<Vec<f32>>,
    cache: Cache,
    /// Those in the pool.
    resident: BTreeMap<Entry, BlockId>,
    free: Vec<BlockId>,
}

impl Engine {
    /// Leaves the stored blocks of a sequence to the store. Layers attend to `top` of them in each
    /// step; the pool keeps `room` of each layer.
    ///
    /// # Errors
    /// Returns an error if nothing of the sequence is stored (any more), or `top` is 0.
    pub fn offload(&self, sequence: Sequence, top: usize, room: usize) -> Result<Offloaded> {
        let blocks = sequence.stored / BLOCK;
        ensure!(blocks > 0, "the store has no block of the sequence: there is nothing to offload");
        ensure!(top > 0, "no block to attend to; name at least one");
        ensure!(self.model.layers() == LAYERS, "some layers have windows; open it without");
        let mut clusters = Clusters::default();
        for medoid in (0..blocks as u32).map(Entry) {
            clusters.open(Cluster { medoid, members: vec![medoid] });
        }
        let layers = (0..LAYERS)
            .map(|layer| LayerBlocks::new(&self.pages, layer, &sequence, &clusters, (top, room)));
        let layers = layers.collect::<Result<_>>()?;
        let keys = KeyChain::new(b"").keys(&sequence.tokens[..sequence.stored], SHAPE.block_tokens);
        let copies = ClusterCopies::new(self.store(), clusters, |block| keys[block.0 as usize]);
        let stored = copies.find(self.store())?;
        Ok(Offloaded { sequence, read: 0, stored, layers, top })
    }

    /// Same as [`Engine::decode`], with attention to the best stored blocks and all that are not
    /// stored.
    ///
    /// # Errors
    /// Returns an error if the pool is too small, the store has failed, or KV was damaged or is
    /// gone: [`Engine::prefill`] computes it again.
    pub fn decode_offloaded(&self, offloaded: &mut Offloaded, count: usize) -> Result<()> {
        for _ in 0..count {
            let Sequence { tokens, table, .. } = &offloaded.sequence;
            let (last, before) = tokens.split_last().context("an empty sequence")?;
            let first = before.len();
            ensure!(first / BLOCK < table.len(), "the pool is full");
            let mut x = self.model.embed(&[*last])?;
            for layer in 0..LAYERS {
                x = self.model.layer(layer, &x, first, |q, k, v| {
                    let table = &offloaded.sequence.table;
                    self.pages.write((layer, 0), table, first, k)?;
                    self.pages.write((layer, 1), table, first, v)?;
                    offloaded.attended(self, layer, q, first + 1)
                })?;
            }
            offloaded.sequence.tokens.push(self.model.next_token(&x)?);
        }
        Ok(())
    }
}

impl Offloaded {
    /// Returns K and V of a layer's best blocks for `q`, and of all tokens behind the stored ones.
    fn attended(
        &mut self,
        engine: &Engine,
        layer: usize,
        q: &Tensor,
        all: usize,
    ) -> Result<(Tensor, Tensor)> {
        let Self { sequence, read, stored, layers, top } = self;
        let own = &mut layers[layer];
        let mut chosen = own.best(stored.clusters(), q, *top)?;
        *read += own.load(engine.store(), stored, layer, &chosen)?;
        // In the order of the tokens.
        chosen.sort_unstable();
        let blocks = chosen.iter().map(|id| own.resident[&Entry(id.0)]);
        let tail = sequence.stored / BLOCK;
        let table: Vec<BlockId> = blocks.chain(sequence.table[tail..].iter().copied()).collect();
        let tokens = all - (tail - chosen.len()) * BLOCK;
        let k = engine.pages.read((layer, 0), &table, tokens)?;
        let v = engine.pages.read((layer, 1), &table, tokens)?;
        own.keep(stored.clusters(), &chosen);
        Ok((k, v))
    }
}

impl LayerBlocks {
    fn new(
        pages: &Pages,
        layer: usize,
        sequence: &Sequence,
        clusters: &Clusters,
        (top, room): (usize, usize),
    ) -> Result<Self> {
        let blocks = sequence.stored / BLOCK;
        let k = pages.read((layer, 0), &sequence.table, sequence.stored)?;
        let index = k.reshape((blocks, BLOCK, KV_HEADS * HEAD))?.mean(1)?.to_vec2()?;
        let config = CacheConfig { entries: room, latency: LATENCY, transfer: TRANSFER };
        let cache = Cache::new(config, clusters, vec![0; blocks]);
        let resident: BTreeMap<Entry, BlockId> =
            cache.iter().map(|id| (Entry(id.0), sequence.table[id.0 as usize])).collect();
        let given_up = sequence.table[..blocks].iter().enumerate();
        let given_up = given_up.filter(|(at, _)| !resident.contains_key(&Entry(*at as u32)));
        let free = given_up.map(|(_, block)| *block).take(top).collect();
        Ok(Self { index, cache, resident, free })
    }

    /// Returns the `top` blocks whose mean K has the largest product with `q`,
    /// `[1, heads, HEAD]`, summed over the heads.
    fn best(&self, clusters: &Clusters, q: &Tensor, top: usize) -> Result<Vec<ClusterId>> {
        let q = q.reshape((KV_HEADS, (), HEAD))?.sum(D::Minus2)?.flatten_all()?.to_vec1::<f32>()?;
        let score = |cluster: &Cluster| {
            let k = &self.index[cluster.medoid.0 as usize];
            q.iter().zip(k).map(|(q, k)| q * k).sum()
        };
        let mut left = top;
        Ok(clusters.select(score, |_| {
            left -= 1;
            left == 0
        }))
    }

    /// Reads those of the chosen blocks that are not in the pool, and returns their number.
    fn load(
        &mut self,
        store: &Store,
        stored: &StoredClusters,
        layer: usize,
        chosen: &[ClusterId],
    ) -> Result<u64> {
        let reads = stored.reads(chosen, |block| self.resident.contains_key(&block));
        let missing: Vec<Entry> = reads.iter().flatten().map(|read| read.entry).collect();
        if missing.is_empty() {
            return Ok(0);
        }
        let rest = self.free.len().checked_sub(missing.len()).context("no block of the pool")?;
        let blocks = self.free.split_off(rest);
        let loaded = stored.retrieve(store, &reads, &blocks).and_then(|load| {
            let ticket = store.start(&load, Layer(layer as u32), Order::Unordered)?;
            store.wait(ticket)
        });
        if let Err(error) = loaded {
            self.free.extend(blocks);
            return Err(error.into());
        }
        self.resident.extend(missing.iter().copied().zip(blocks));
        Ok(missing.len() as u64)
    }

    /// Gives up blocks that are worth less than others.
    fn keep(&mut self, clusters: &Clusters, chosen: &[ClusterId]) {
        self.cache.step(clusters, chosen);
        let kept: BTreeSet<Entry> = self.cache.iter().map(|id| Entry(id.0)).collect();
        let (resident, given_up): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut self.resident)
                .into_iter()
                .partition(|(block, _)| kept.contains(block));
        self.resident = resident;
        self.free.extend(given_up.into_values());
    }
}
