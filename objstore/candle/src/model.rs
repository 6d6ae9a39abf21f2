//! The model: RMSNorm, RoPE, grouped-query attention and SwiGLU, with random weights.

use candle_core::{D, Device, Result, Tensor};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

/// Number of layers of each kind.
pub const LAYERS: usize = 4;
/// Heads of K and V; each serves [`GROUP`] heads of Q.
pub const KV_HEADS: usize = 2;
const GROUP: usize = 2;
/// Elements of a head.
pub const HEAD: usize = 32;
const HIDDEN: usize = KV_HEADS * GROUP * HEAD;
const MLP: usize = 2 * HIDDEN;
/// Each byte is a token.
const VOCABULARY: usize = 256;

/// A Llama with random weights: the same weights for the same seed. Layers of several kinds take
/// turns.
#[derive(Debug)]
pub struct Llama {
    /// Of each kind: the number of tokens, including itself, that a token attends to; `None`: all.
    pub windows: Vec<Option<usize>>,
    embedding: Tensor,
    layers: Vec<Layer>,
    head: Tensor,
}

#[derive(Debug)]
struct Layer {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

impl Llama {
    /// # Errors
    /// Returns candle's errors.
    pub fn new(seed: u64, windows: &[Option<usize>]) -> Result<Self> {
        let mut chance = StdRng::seed_from_u64(seed);
        let mut random = |inputs: usize, outputs: usize, gain: f32| {
            let most = gain * (3.0 / inputs as f32).sqrt();
            let count = inputs * outputs;
            let values: Vec<f32> = (0..count).map(|_| chance.random_range(-most..most)).collect();
            Tensor::from_vec(values, (inputs, outputs), &Device::Cpu)
        };
        let kv = KV_HEADS * HEAD;
        let layers = (0..LAYERS * windows.len()).map(|_| {
            Ok(Layer {
                // Large enough for attention to prefer some tokens: else all answers are alike.
                q: random(HIDDEN, HIDDEN, 1.5)?,
                k: random(HIDDEN, kv, 1.5)?,
                v: random(HIDDEN, kv, 1.5)?,
                o: random(HIDDEN, HIDDEN, 1.5)?,
                gate: random(HIDDEN, MLP, 1.0)?,
                up: random(HIDDEN, MLP, 1.0)?,
                down: random(MLP, HIDDEN, 1.0)?,
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        let embedding = random(VOCABULARY, HIDDEN, (VOCABULARY as f32).sqrt())?;
        let head = random(HIDDEN, VOCABULARY, 1.0)?;
        Ok(Self { windows: windows.to_vec(), embedding, layers, head })
    }

    /// Returns the number of layers of all kinds.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Returns the input of the first layer: `[tokens, HIDDEN]`.
    ///
    /// # Errors
    /// Returns candle's errors.
    pub fn embed(&self, tokens: &[u32]) -> Result<Tensor> {
        self.embedding.index_select(&Tensor::new(tokens, &Device::Cpu)?, 0)
    }

    /// Computes a layer for the tokens from position `first` on. `cache` gets their Q, K and V,
    /// and returns K and V of all tokens that they attend to, in order, with their own as the last
    /// ones: `[tokens, heads, HEAD]` each.
    ///
    /// # Errors
    /// Returns errors of candle and of `cache`.
    pub fn layer(
        &self,
        layer: usize,
        x: &Tensor,
        first: usize,
        cache: impl FnOnce(&Tensor, &Tensor, &Tensor) -> anyhow::Result<(Tensor, Tensor)>,
    ) -> anyhow::Result<Tensor> {
        let window = self.windows[layer % self.windows.len()];
        let layer = &self.layers[layer];
        let tokens = x.dim(0)?;
        let normed = norm(x)?;
        let q = rotate(&normed.matmul(&layer.q)?.reshape((tokens, (), HEAD))?, first)?;
        let k = rotate(&normed.matmul(&layer.k)?.reshape((tokens, (), HEAD))?, first)?;
        let v = normed.matmul(&layer.v)?.reshape((tokens, (), HEAD))?;
        let (k, v) = cache(&q, &k, &v)?;
        let x = (x + attention(&q, &k, &v, window)?.matmul(&layer.o)?)?;
        let normed = norm(&x)?;
        let gated = (normed.matmul(&layer.gate)?.silu()? * normed.matmul(&layer.up)?)?;
        Ok((x + gated.matmul(&layer.down)?)?)
    }

    /// Returns the most likely token after the last one of `x`, the output of the last layer.
    ///
    /// # Errors
    /// Returns candle's errors.
    pub fn next_token(&self, x: &Tensor) -> Result<u32> {
        let last = norm(&x.narrow(0, x.dim(0)? - 1, 1)?)?;
        last.matmul(&self.head)?.argmax(D::Minus1)?.squeeze(0)?.to_scalar()
    }
}

/// Computes RMSNorm with weights of one.
fn norm(x: &Tensor) -> Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?.sqrt()?)
}

/// Applies RoPE to `[tokens, heads, HEAD]`, whose first token is at position `first`.
fn rotate(x: &Tensor, first: usize) -> Result<Tensor> {
    let (tokens, _, _) = x.dims3()?;
    let half = HEAD / 2;
    let frequency = |at: usize| 10_000_f32.powf(-(at as f32) / half as f32);
    let angles = (first..first + tokens).flat_map(|t| (0..half).map(move |at| (t, at)));
    let angles: Vec<f32> = angles.map(|(t, at)| t as f32 * frequency(at)).collect();
    let angles = Tensor::from_vec(angles, (tokens, 1, half), &Device::Cpu)?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
    let turned_a = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let turned_b = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
    Tensor::cat(&[turned_a, turned_b], 2)
}

/// Computes attention of tokens to themselves and those before them, of which K and V have some.
fn attention(q: &Tensor, k: &Tensor, v: &Tensor, window: Option<usize>) -> Result<Tensor> {
    let (tokens, all) = (q.dim(0)?, k.dim(0)?);
    let first = all - tokens;
    // The heads of Q that share one of K and V are rows of the same product.
    let q = q.transpose(0, 1)?.contiguous()?.reshape((KV_HEADS, GROUP * tokens, HEAD))?;
    let k = k.permute((1, 2, 0))?.contiguous()?;
    let v = v.transpose(0, 1)?.contiguous()?;
    let scores =
        (q.matmul(&k)? / (HEAD as f64).sqrt())?.reshape((KV_HEADS * GROUP, tokens, all))?;
    let sees = |row, at| at <= row && window.is_none_or(|window| row < at + window);
    let masked = |row| (0..all).map(move |at| if sees(row, at) { 0. } else { f32::NEG_INFINITY });
    let mask: Vec<f32> = (first..first + tokens).flat_map(masked).collect();
    let scores = scores.broadcast_add(&Tensor::from_vec(mask, (tokens, all), &Device::Cpu)?)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    let mixed = weights.reshape((KV_HEADS, GROUP * tokens, all))?.matmul(&v)?;
    mixed.reshape((KV_HEADS * GROUP, tokens, HEAD))?.transpose(0, 1)?.reshape((tokens, HIDDEN))
}
