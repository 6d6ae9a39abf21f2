//! Pins of a client: blocks that stay stored for a time.

use objstore::{BlockKey, PinAnswer};

use super::{Client, SpaceId, unexpected};
use crate::{
    error::ServeError,
    protocol::{Answer, Call, Keys},
};

impl Client {
    /// Pins the leading keys that are stored for so many seconds; until the session or the server
    /// ends, at the latest. The limits are the server's: its answer says what it did.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn pin(
        &self,
        space: SpaceId,
        keys: &[BlockKey],
        ttl_s: u64,
    ) -> Result<PinAnswer, ServeError> {
        let (namespace, keys) = (space.number, Keys(keys.to_vec()));
        let call = Call::Pin { namespace, keys, ttl_s, bytes_max: None, wait: false };
        match self.call_in(space.generation, &call)? {
            Answer::Pinned(answer) => Ok(answer),
            other => Err(unexpected(&other)),
        }
    }

    /// Ends a pin of this session. Returns false if it has ended.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn unpin(&self, pin: u64) -> Result<bool, ServeError> {
        let generation = self.links().generation;
        Ok(self.number(generation, &Call::Unpin { pin: Some(pin) })? > 0)
    }
}
