//! KV cache shapes of models, and the size of one object of the store.

use std::ops::Deref;

use objstore::KvShape;

use crate::problem::{Problem, nearest};

/// Tokens of one block of a Mooncake trace.
pub(crate) const TRACE_BLOCK_TOKENS: u32 = 512;

/// The KV cache of a model in bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Model {
    /// Name for `--model`.
    pub(crate) name: &'static str,
    /// Attention layers.
    pub(crate) layers: u32,
    /// Separate tensors per layer: 2 for K and V, 1 where they are combined (MLA).
    pub(crate) segments: u32,
    /// Bytes of one token in one segment of one layer.
    pub(crate) token_bytes: u32,
    /// Default of `--block-tokens`.
    pub(crate) block_tokens: u32,
    /// Default of `--lba`, in bytes.
    pub(crate) lba_bytes: u32,
    /// Factor by which its objects are smaller than those of a real model.
    pub(crate) scale: u32,
}

/// Default model.
pub(crate) const DEFAULT: &str = "llama-3-8b";

/// Llama-3-8B: 8 KV heads of 128 elements of 2 bytes.
const LLAMA: Model = Model {
    name: DEFAULT,
    layers: 32,
    segments: 2,
    token_bytes: 8 * 128 * 2,
    block_tokens: 64,
    lba_bytes: 4096,
    scale: 1,
};

/// Llama-3-8B with a 1024th of its bytes, for virtual time.
const MINI: Model = Model {
    name: "mini",
    token_bytes: 2,
    block_tokens: TRACE_BLOCK_TOKENS,
    lba_bytes: 512,
    scale: 1024,
    ..LLAMA
};

/// All models.
pub(crate) static MODELS: [Model; 5] = [
    // Not a real model: 1 KiB objects, so that a long trace fits into the memory of a laptop.
    Model { name: "tiny", layers: 2, ..MINI },
    MINI,
    LLAMA,
    Model { name: "qwen3-32b", layers: 64, ..LLAMA },
    // Multi-head latent attention: one latent of 512 and one rotary key of 64 elements.
    Model { name: "deepseek-v3-mla", layers: 61, segments: 1, token_bytes: 576 * 2, ..LLAMA },
];

/// Parses `--model`: one of [`MODELS`], also in capitals and behind an organisation.
pub(crate) fn named(given: &str) -> Result<&'static Model, String> {
    let name = given.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
    MODELS.iter().find(|model| model.name == name).ok_or_else(|| {
        let names = MODELS.map(|model| model.name);
        let nearest = nearest(&name, names.into_iter());
        format!("no such model; choose one of {}{nearest}", names.join(", "))
    })
}

/// Parses `--shape`.
pub(crate) fn shape(text: &str) -> Result<KvShape, String> {
    let numbers: Result<Vec<u32>, _> = text.split(',').map(str::parse).collect();
    let Ok(&[layers, segments, object_bytes, block_tokens]) = numbers.as_deref() else {
        return Err("expected four whole numbers, such as 32,1,262144,64".to_owned());
    };
    let shape = KvShape { layers, segments, object_bytes, block_tokens };
    shape.validate().map(|()| shape).map_err(|error| error.to_string())
}

/// A model cut into blocks: the shape of everything that is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// The model's name.
    pub(crate) model: &'static str,
    kv: KvShape,
}

impl Deref for Shape {
    type Target = KvShape;

    fn deref(&self) -> &KvShape {
        &self.kv
    }
}

impl Shape {
    /// Divides `model` into blocks of `block_tokens` tokens.
    pub(crate) fn new(model: &Model, block_tokens: u32) -> Result<Self, Problem> {
        if block_tokens == 0 || !TRACE_BLOCK_TOKENS.is_multiple_of(block_tokens) {
            return Err(Problem::new(
                format!(
                    "--block-tokens {block_tokens}: a trace block of {TRACE_BLOCK_TOKENS} tokens \
                     cannot be cut into blocks of that size"
                ),
                format!("choose a power of two from 1 to {TRACE_BLOCK_TOKENS}"),
            ));
        }
        let object_bytes = model.token_bytes * block_tokens;
        if !object_bytes.is_multiple_of(4) {
            return Err(Problem::new(
                format!(
                    "--block-tokens {block_tokens}: an object of model {} would have \
                     {object_bytes} bytes, which is not a multiple of 4",
                    model.name
                ),
                format!("choose at least {} tokens", 4 / model.token_bytes),
            ));
        }
        let Model { name, layers, segments, .. } = *model;
        Ok(Self { model: name, kv: KvShape { layers, segments, object_bytes, block_tokens } })
    }

    /// Returns the bytes of one block on devices with LBAs of `lba_bytes`, including padding.
    pub(crate) fn file_bytes(&self, lba_bytes: u32) -> u64 {
        u64::from(self.rows()) * u64::from(self.object_bytes.next_multiple_of(lba_bytes))
    }

    /// Returns the number of store blocks in a trace block.
    pub(crate) fn subs(&self) -> u32 {
        TRACE_BLOCK_TOKENS / self.block_tokens
    }
}

#[cfg(test)]
mod tests;
