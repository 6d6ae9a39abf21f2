//! A Rust engine whose KV cache outlives it: a small Llama with random weights on candle, and a
//! store for its KV blocks. Meant as a template; docs/start/rust.md tells how to run it.
//!
//! # Architecture
//! - [`Llama`] (`model.rs`): the model. It knows neither pages nor stores: each layer passes its
//!   Q and new K and V to a callback, which returns K and V of all that it attends to.
//! - [`Pages`] (`pages.rs`): the KV pool, one allocation that is registered with the store. The
//!   devices read and write the same memory as the model.
//! - [`Engine`] (`engine.rs`): connects them. **Start here**: [`Engine::prefill`] contains the
//!   whole use of a store.
//! - [`Offloaded`] (`sparse.rs`): attention to the best blocks of a sequence, read from the store
//!   when they are chosen ([`Engine::offload`]).
//!
//! # Invariants
//! - A layer's pages are read and written only after its load was waited for, and before it is
//!   stored.
//! - Stored data consists of whole blocks, which are never overwritten.
//! - Layers with a sliding window and those without have blocks of their own, in one pool and one
//!   store. Of a prompt the store has all blocks of the latter, and the last ones of the former.
//!
//! # Not implemented
//! - Reading a layer's blocks before its query is known; chosen entries instead of whole blocks.
//! - Features that do not involve the store: batches, sampling, a tokenizer (tokens are bytes),
//!   kernels that read pages in place.

mod engine;
mod model;
mod pages;
mod sparse;

pub use engine::{Engine, Sequence};
pub use model::Llama;
pub use pages::{Pages, SHAPE};
pub use sparse::Offloaded;
