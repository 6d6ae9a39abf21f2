//! The seam between the engine and what holds and moves its keys and values: the model of this
//! crate, or a store.

use std::time::Duration;

use kv_schedule::{StepId, StepShape};

use super::Request;

/// Purpose of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Load of a layer for the current step.
    Layer(u32),
    /// Load for a request that joins a step after all its loads.
    Whole,
    /// A layer of a write.
    Store {
        /// Number of the write.
        number: u64,
        /// The layer.
        layer: u32,
    },
    /// Prefetch to host memory.
    Ahead,
}

/// A place of keys and values below the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The tier.
    Tier,
    /// The host memory cache above it.
    Host,
    /// The tier of another engine.
    Peer,
}

/// A completed transfer.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    /// Its purpose.
    pub purpose: Purpose,
    /// Number of the request that it was for.
    pub request: usize,
    /// Where the bytes came from, or went to.
    pub place: Place,
    /// Bytes moved.
    pub bytes: u64,
    /// Start time.
    pub began: Duration,
}

/// Stored blocks that a request uses.
#[derive(Debug)]
pub struct Hit<H> {
    /// Tokens to load.
    pub tokens: u32,
    /// Those of them in the host memory cache.
    pub host_tokens: u32,
    /// Those of them in the tier of another engine.
    pub peer_tokens: u32,
    /// Loads that have begun: the request joins a step when they have ended.
    pub loading: u32,
    /// Bytes of those loads.
    pub loading_bytes: u64,
    /// State of the request in the tiers.
    pub held: H,
}

/// Tiers below the GPU's memory, and the clock.
///
/// Requests have the numbers of their order. After an error, serving cannot continue.
#[allow(clippy::missing_errors_doc, reason = "the errors are those of the tiers")]
pub trait Tiers {
    /// State of a request that is being served: the blocks to load, pinned, and those to store.
    type Held;
    /// A write of a step.
    type Store: Copy;
    /// Error after which serving cannot continue.
    type Error;

    /// Maximum number of equal decode-only steps that form one event.
    const EQUAL_STEPS: u32;

    /// Returns false while a request has to wait for room, beside that in the GPU's memory.
    fn has_room(&self, number: usize, request: &Request) -> bool;

    /// Pins what an admitted request loads beyond the first `in_hbm` tokens, which are on the GPU,
    /// up to `most` tokens.
    fn begin(
        &mut self,
        number: usize,
        request: &Request,
        in_hbm: u32,
        most: u32,
    ) -> Result<Hit<Self::Held>, Self::Error>;

    /// Unpins what was loaded for a request whose prompt is computed.
    fn loaded(&mut self, held: &mut Self::Held);

    /// Ends a request that was admitted, with all tokens or without.
    fn end(&mut self, number: usize, held: Self::Held);

    /// Cancels the loads of a running request that have not started. Returns their number and
    /// bytes.
    fn cancel(&mut self, number: usize) -> (u32, u64);

    /// Cancels the prefetches of a waiting request.
    fn cancel_ahead(&mut self, number: usize) -> Result<(), Self::Error>;

    /// Returns how many steps ahead blocks are prefetched; `None` for no prefetching.
    fn steps_ahead(&self) -> Option<u32>;

    /// Announces a waiting request with `in_hbm` tokens on the GPU. It is expected to run `when.1`
    /// steps after the time `when.0`. Returns how many of its tokens are stored in any tier.
    fn announce(
        &mut self,
        number: usize,
        request: &Request,
        in_hbm: u32,
        when: (Duration, u32),
    ) -> Result<u32, Self::Error>;

    /// Plans the prefetches of all announced requests.
    fn plan_ahead(&mut self);

    /// Records that a step begins whose layers take `layer` each.
    fn step_begins(&mut self, step: StepId, shape: StepShape, layer: Duration);

    /// Adds the loads of a request in its first step; counts those of each layer in `missing`.
    /// Returns their bytes: 0 if it has none.
    fn load(
        &mut self,
        held: &mut Self::Held,
        number: usize,
        step: StepId,
        missing: &mut [u32],
    ) -> Result<u64, Self::Error>;

    /// Reserves room for the new blocks among those that are full when `tokens` tokens of a prompt
    /// are computed. Returns `None` if none of them is new.
    fn begin_store(
        &mut self,
        held: &mut Self::Held,
        number: usize,
        tokens: u32,
    ) -> Result<Option<Self::Store>, Self::Error>;

    /// Records that a layer begins, for which the GPU `waited`, and that the computation up to the
    /// next event takes `takes`.
    fn layer_begins(&mut self, step: StepId, layer: u32, waited: Duration, takes: Duration);

    /// Records that a layer ends, and stores it. Returns the number of blocks dropped because of
    /// it.
    fn layer_ends(
        &mut self,
        step: StepId,
        layer: u32,
        stores: &[Self::Store],
    ) -> Result<u64, Self::Error>;

    /// Records that a step ends which took so long. One without loads and stores is computed at
    /// once: its first layer ended at the time `first`.
    fn step_ends(&mut self, step: StepId, took: Duration, first: Option<Duration>);

    /// Returns the transfers that have ended.
    fn ended(&mut self) -> Result<Vec<Ended>, Self::Error>;

    /// Starts all transfers that may start.
    fn pump(&mut self) -> Result<(), Self::Error>;

    /// Waits for an event of the tiers, at most until the time `until`. Returns the time then,
    /// which all other methods use, or `None` if there is nothing to wait for.
    fn wait(&mut self, until: Option<Duration>) -> Option<Duration>;
}
