//! A Rust engine whose KV cache outlives it: a small Llama with random weights on candle, and a
//! store for its KV blocks. To be copied from. docs/start/rust.md says how to run it.
//!
//! # Architecture
//! - [`Llama`] (`model.rs`): the model. It knows neither pages nor stores: a layer hands over its
//!   new K and V, and gets back those of the whole sequence.
//! - [`Pages`] (`pages.rs`): the KV pool, in one allocation that is registered with the store. What
//!   the model reads and writes is what the devices read and write.
//! - [`Engine`] (`engine.rs`): what ties them together. **Start here**: [`Engine::prefill`] is all
//!   that an engine does with a store.
//!
//! # Invariants
//! - A layer's pages are read and written only after the layer was waited for, and before it is
//!   stored.
//! - What was stored is bytes of whole blocks, which are never written again.
//!
//! # Not implemented
//! - What does not concern the store: batches, sampling, a tokenizer (tokens are bytes), kernels
//!   that read pages in place.

mod engine;
mod model;
mod pages;

pub use engine::{Engine, Sequence};
pub use model::Llama;
pub use pages::{Pages, SHAPE};
