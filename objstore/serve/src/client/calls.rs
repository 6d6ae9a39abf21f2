//! Calls of a client that move no data: about namespaces, keys, pins and counts.

use objstore::{BlockKey, CatalogCounts, Namespace, PinAnswer, Usage};

use kv_catalog::lock;

use super::{
    Client, answer,
    request::{Handle, Prefix, Reservation},
};
use crate::{
    error::{RefusalKind, ServeError},
    protocol::{Answer, Call, Keys, MESSAGE_BYTES_MAX},
};

/// The number of a namespace of a client, in all of its sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpaceId(pub usize);

/// A namespace that a client uses.
#[derive(Debug)]
pub(super) struct Space {
    named: Namespace,
    /// A session, and the namespace's number there.
    number: Option<(u64, u32)>,
    /// True if only this engine has it.
    is_private: bool,
}

/// Keys of a message, at most: fewer than a place has positions.
const KEYS_MAX: usize = MESSAGE_BYTES_MAX / 32 - 2;

/// Returns the leading keys of an engine's, as many as a message has room for: calls about a run of
/// leading keys treat others as not stored, or as not accepted.
fn leading(keys: &[BlockKey]) -> Keys {
    Keys(keys[..keys.len().min(KEYS_MAX)].to_vec())
}

impl Client {
    /// Returns the number that a namespace has in a session.
    fn number(&self, session: u64, SpaceId(at): SpaceId) -> Result<u32, ServeError> {
        let named = {
            let spaces = lock(&self.inner.spaces);
            let (given, expected) = (at as u64, spaces.len() as u64);
            let wrong = ServeError::Argument { what: "namespace below", given, expected };
            let space = spaces.get(at).ok_or(wrong)?;
            match space.number {
                Some((of, number)) if of == session => return Ok(number),
                _ => Call::Namespace(space.named.clone()),
            }
        };
        let number = answer!(self.call_in(session, &named), Answer::Number(number) => number)?;
        lock(&self.inner.spaces)[at].number = Some((session, number));
        Ok(number)
    }

    /// Registers a namespace, if the server is there: one that takes no more of them is.
    fn register(&self, space: SpaceId) -> Result<SpaceId, ServeError> {
        match self.live().and_then(|session| self.number(session, space)) {
            Err(error @ ServeError::Refused { kind: RefusalKind::Limit, .. }) => Err(error),
            Err(error) if !error.is_away() => Err(error),
            _ => Ok(space),
        }
    }

    /// Makes a call.
    fn ask(&self, call: &Call) -> Result<Answer, ServeError> {
        self.call_in(self.live()?, call)
    }

    /// Makes a call about a namespace.
    fn about(&self, space: SpaceId, call: impl FnOnce(u32) -> Call) -> Result<Answer, ServeError> {
        let session = self.live()?;
        let namespace = self.number(session, space)?;
        self.call_in(session, &call(namespace))
    }

    /// Returns a namespace, which is registered if it is new, or when the server is back. Clients
    /// that name the same one share its blocks.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`], also if the client has as many as it may use.
    pub fn namespace(&self, namespace: &Namespace) -> Result<SpaceId, ServeError> {
        let at = {
            let mut spaces = lock(&self.inner.spaces);
            let found = spaces.iter().position(|space| space.named == *namespace);
            found.unwrap_or_else(|| {
                let named = namespace.clone();
                spaces.push(Space { named, number: None, is_private: false });
                spaces.len() - 1
            })
        };
        self.register(SpaceId(at))
    }

    /// Returns how many leading keys are stored now, on all ranks.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`], [`ServeError::Argument`] or [`ServeError::Lost`].
    pub fn peek(&self, space: SpaceId, keys: &[BlockKey]) -> Result<usize, ServeError> {
        let call = |namespace| Call::Peek { namespace, keys: leading(keys) };
        answer!(self.about(space, call), Answer::Number(blocks) => blocks as usize)
    }

    /// Returns, for each key, if it is stored on all ranks.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn are_stored(&self, space: SpaceId, keys: &[BlockKey]) -> Result<Vec<bool>, ServeError> {
        let mut found = Vec::with_capacity(keys.len());
        for some in keys.chunks(KEYS_MAX) {
            let call = |namespace| Call::AreStored { namespace, keys: Keys(some.to_vec()) };
            let asked = self.about(space, call);
            let flags = answer!(asked, Answer::Flags(it) if it.0.len() == some.len() => it.0)?;
            found.extend(flags.into_iter().map(|flag| flag != 0));
        }
        Ok(found)
    }

    /// Returns the longest stored run of leading keys.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn lookup(&self, space: SpaceId, keys: &[BlockKey]) -> Result<Prefix, ServeError> {
        let session = self.live()?;
        let call = Call::Lookup { namespace: self.number(session, space)?, keys: leading(keys) };
        answer!(self.call_in(session, &call), Answer::Prefix { prefix, blocks } => {
            Prefix::new(Handle::new(self, session, prefix), blocks)
        })
    }

    /// Reserves room for blocks: as many leading ones as possible. Pass the whole prefix.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn reserve(&self, space: SpaceId, keys: &[BlockKey]) -> Result<Reservation, ServeError> {
        let session = self.live()?;
        let call = Call::Reserve { namespace: self.number(session, space)?, keys: leading(keys) };
        answer!(
            self.call_in(session, &call),
            Answer::Reserved { reservation, accepted, positions } => {
                Reservation::new(Handle::new(self, session, reservation), accepted, positions)
            }
        )
    }

    /// Drops keys for all clients of the namespace, including pinned ones and those in use. Returns
    /// how many were stored.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn remove(&self, space: SpaceId, keys: &[BlockKey]) -> Result<u32, ServeError> {
        let call = |namespace| Call::Remove { namespace, keys: Keys(keys.to_vec()) };
        answer!(self.about(space, call), Answer::Number(removed) => removed)
    }

    /// Pins the leading keys that are stored, on all ranks, for so many seconds; until the session
    /// or the server ends, at the latest. The limits are the server's: its answer says what it did.
    /// The arguments are those of [`Call::Pin`].
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn pin(
        &self,
        space: SpaceId,
        keys: &[BlockKey],
        ttl_s: u64,
        bytes_max: Option<u64>,
        wait: bool,
    ) -> Result<PinAnswer, ServeError> {
        let keys = Keys(keys.to_vec());
        let call = |namespace| Call::Pin { namespace, keys, ttl_s, bytes_max, wait };
        answer!(self.about(space, call), Answer::Pinned(answer) => answer)
    }

    /// Ends a pin of this session, or all of them (`None`). Returns false if there is none.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn unpin(&self, pin: Option<u64>) -> Result<bool, ServeError> {
        answer!(self.ask(&Call::Unpin { pin }), Answer::Number(ended) => ended > 0)
    }

    /// Drops all blocks of a namespace for this engine, whose weights change: others that have the
    /// old weights keep them, and from now on share none with it. `salt` is a random number.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`], also if the client has as many namespaces as it may use, or
    /// [`ServeError::Lost`] if the blocks could not be dropped.
    pub fn renew(&self, space: SpaceId, salt: [u8; 16]) -> Result<(), ServeError> {
        let is_private = |space: &Space| space.is_private;
        if lock(&self.inner.spaces).get(space.0).is_some_and(is_private) {
            let renewed = self.about(space, |namespace| Call::Renew { namespace });
            return answer!(renewed, Answer::Done => ());
        }
        // Blocks of the old weights are not this engine's any more.
        match self.unpin(None) {
            Err(error) if !error.is_away() => return Err(error),
            _ => {}
        }
        let mut spaces = lock(&self.inner.spaces);
        let (given, expected) = (space.0 as u64, spaces.len() as u64);
        let wrong = ServeError::Argument { what: "namespace below", given, expected };
        let own = spaces.get_mut(space.0).ok_or(wrong)?;
        own.named.tenant_salt.extend_from_slice(&salt);
        (own.number, own.is_private) = (None, true);
        drop(spaces);
        // A refusal is one of this call, and not of the next lookup.
        self.register(space).map(drop)
    }

    /// Returns the counts of a namespace, on the first rank.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn usage(&self, space: SpaceId) -> Result<Usage, ServeError> {
        let call = |namespace| Call::Usage { namespace };
        answer!(self.about(space, call), Answer::Usage(usage) => usage)
    }

    /// Returns the counts of the store's files.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn counts(&self) -> Result<CatalogCounts, ServeError> {
        answer!(self.ask(&Call::Counts), Answer::Counts(counts) => counts)
    }

    /// Makes all changes so far durable. Commits are durable when they return.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn sync(&self) -> Result<(), ServeError> {
        answer!(self.ask(&Call::Sync), Answer::Done => ())
    }
}
