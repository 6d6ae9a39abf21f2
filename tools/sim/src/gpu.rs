//! Compute time on a GPU: by FLOPs and bytes (a roofline), with calibrated factors.

use std::time::Duration;

use kv_schedule::StepShape;

/// A dense transformer with grouped-query attention and 16-bit numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Model {
    /// Name.
    pub name: &'static str,
    /// Layers.
    pub layers: u32,
    /// Size of a token's hidden state.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// Key-value heads.
    pub kv_heads: u32,
    /// Size of a head.
    pub head_dim: u32,
    /// Size of the feed-forward state.
    pub inner: u32,
}

/// Llama-3-8B.
pub const LLAMA_3_8B: Model = Model {
    name: "llama-3-8b",
    layers: 32,
    hidden: 4096,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    inner: 14336,
};

/// Llama-3-70B.
pub const LLAMA_3_70B: Model =
    Model { name: "llama-3-70b", layers: 80, hidden: 8192, heads: 64, inner: 28672, ..LLAMA_3_8B };

/// Qwen3-32B.
pub const QWEN3_32B: Model =
    Model { name: "qwen3-32b", layers: 64, hidden: 5120, heads: 64, inner: 25600, ..LLAMA_3_8B };

/// GLM-4-9B-Chat-1M.
pub const GLM_4_9B_1M: Model =
    Model { name: "glm-4-9b-chat-1m", layers: 40, kv_heads: 4, inner: 13696, ..LLAMA_3_8B };

impl Model {
    /// All models.
    pub const ALL: &[Self] = &[LLAMA_3_8B, LLAMA_3_70B, QWEN3_32B, GLM_4_9B_1M];

    /// Returns the number of weights of a layer.
    pub fn layer_weights(&self) -> f64 {
        let Self { hidden, heads, kv_heads, head_dim, inner, .. } = *self;
        let attention = 2.0 * f64::from(heads + kv_heads) * f64::from(head_dim);
        f64::from(hidden) * (attention + 3.0 * f64::from(inner))
    }

    /// Returns the bytes of a token's keys and values in a layer.
    pub fn token_layer_bytes(&self) -> u64 {
        u64::from(self.kv_heads) * u64::from(self.head_dim) * 2 * 2
    }

    /// Returns the bytes of a token's keys and values.
    pub fn token_bytes(&self) -> u64 {
        self.token_layer_bytes() * u64::from(self.layers)
    }
}

/// A GPU, or several with tensor parallelism.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gpu {
    /// Name.
    pub name: &'static str,
    /// Number of GPUs, for tensor parallelism.
    pub count: u32,
    /// Bytes of memory per GPU.
    pub bytes: u64,
    /// Peak dense 16-bit FLOP/s per GPU.
    pub flops: f64,
    /// Memory bandwidth per GPU in bytes a second.
    pub bandwidth: f64,
    /// Fraction of the peak that matrix products reach.
    pub linear: f64,
    /// Fraction of the peak that attention reaches.
    pub attention: f64,
    /// Fraction of the memory bandwidth that decoding reaches.
    pub memory: f64,
    /// Time per layer besides the computation: kernel launches.
    pub layer_overhead: Duration,
}

impl Gpu {
    /// Names of all GPUs with parameters. The factors of all are calibrated for the first one.
    pub const NAMES: [&str; 4] = ["H100", "H200", "A100", "B200"];

    /// Returns the compute time of a layer of a step.
    pub fn layer(&self, model: &Model, step: StepShape) -> Duration {
        let count = f64::from(self.count);
        let (weights, attended) = (model.layer_weights(), step.attended as f64);
        let linear = 2.0 * weights * f64::from(step.tokens) / (self.flops * self.linear);
        let width = f64::from(model.heads * model.head_dim);
        let attention = 4.0 * width * attended / (self.flops * self.attention);
        let read = if step.is_prefill { 0.0 } else { attended * model.token_layer_bytes() as f64 };
        let memory = (2.0 * weights + read) / (self.bandwidth * self.memory);
        let seconds = (linear + attention).max(memory) / count;
        self.layer_overhead + Duration::from_secs_f64(seconds)
    }
}
