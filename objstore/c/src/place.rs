//! The places of a store: this process, or a server to which it is connected.

use std::{io, mem::ManuallyDrop, sync::Arc, time::Duration};

use objstore::{BlockId, BlockKey, Layer, NewPin, Outcome, PinAnswer, PinLimits, Usage};
use ripieno_serve::{Client, RefusalKind, ServeError, SpaceId};
use ripieno_stack::{Own, Stack};

use crate::{
    config::Owner,
    status::{Failure, Status},
};

/// A handle of a store in one namespace. Any number of threads may use it, and a store may have any
/// number of handles.
#[derive(Debug)]
pub struct Store(Own<AnyStore>);

/// Blocks found by a lookup. They are not evicted until the prefix is released.
#[derive(Debug)]
pub struct Prefix(Own<AnyPrefix>);

/// A retrieval or storing of blocks.
#[derive(Debug)]
pub struct Request(Own<AnyRequest>);

/// Target of a caller's pointer. Only the process uses it that made it.
pub(crate) trait Handle: From<Own<Self::Of>> + Into<Own<Self::Of>> {
    /// Type of the value.
    type Of;
    /// Returns the value.
    fn own(&self) -> &Own<Self::Of>;
}

macro_rules! handle {
    ($handle:ident, $of:ident) => {
        impl Handle for $handle {
            type Of = $of;
            fn own(&self) -> &Own<$of> {
                &self.0
            }
        }
        impl From<Own<$of>> for $handle {
            fn from(own: Own<$of>) -> Self {
                Self(own)
            }
        }
        impl From<$handle> for Own<$of> {
            fn from(handle: $handle) -> Self {
                handle.0
            }
        }
    };
}

handle!(Store, AnyStore);
handle!(Prefix, AnyPrefix);
handle!(Request, AnyRequest);

/// A store, in one namespace.
#[derive(Debug)]
pub(crate) enum AnyStore {
    /// Of this process. The stack is shared by the handles of a store; closed with the last one.
    Own(objstore::Store, Arc<Stack>),
    /// Of a server, with the engine's memory, which it uses until the session ends.
    Served(SpaceId, Arc<Session>),
}

/// A session with a server, shared by the handles of a store.
#[derive(Debug)]
pub struct Session {
    pub(crate) client: Client,
    pub(crate) owner: Owner,
}

/// Blocks found by a lookup.
#[derive(Debug)]
pub(crate) enum AnyPrefix {
    /// In a store of this process.
    Own(objstore::Prefix),
    /// In that of a server.
    Served(ripieno_serve::Prefix),
}

/// A retrieval or storing of blocks.
#[derive(Debug)]
pub(crate) enum AnyRequest {
    /// In a store of this process.
    Own(ripieno_stack::Request),
    /// In that of a server.
    Served(ripieno_serve::Request),
}

/// Evaluates an expression with the value of either place.
macro_rules! either {
    ($it:expr, $value:ident => $act:expr) => {
        match $it {
            Self::Own($value) => $act,
            Self::Served($value) => $act,
        }
    };
}

impl AnyStore {
    /// Returns a store of this process.
    pub(crate) fn own(&self) -> Result<(&objstore::Store, &Stack), Failure> {
        match self {
            Self::Own(store, stack) => Ok((store, stack)),
            Self::Served(..) => Err(Failure::new(
                Status::Unsupported,
                "a server has this store, and its clients cannot do this: ask the server (ripieno \
                 ctl, or HTTP at its socket)",
            )),
        }
    }

    pub(crate) fn within(&self, namespace: &objstore::Namespace) -> Result<Self, Failure> {
        Ok(match self {
            Self::Own(store, stack) => Self::Own(store.within(namespace)?, stack.clone()),
            Self::Served(_, session) => {
                Self::Served(session.client.namespace(namespace)?, session.clone())
            }
        })
    }

    /// Releases a handle. The last one closes the store.
    pub(crate) fn close(self) -> Result<(), Failure> {
        match self {
            Self::Own(_, stack) => {
                Arc::into_inner(stack).map_or(Ok(()), |stack| Ok(stack.close()?))
            }
            Self::Served(_, session) => {
                let Some(Session { client, owner }) = Arc::into_inner(session) else {
                    return Ok(());
                };
                // It stays the server's if that does not say that it has ended.
                let owner = ManuallyDrop::new(owner);
                client.close()?;
                drop(ManuallyDrop::into_inner(owner));
                Ok(())
            }
        }
    }

    pub(crate) fn peek(&self, keys: &[BlockKey]) -> Result<usize, Failure> {
        match self {
            Self::Own(store, _) => Ok(store.peek(keys)),
            Self::Served(space, session) => Ok(session.client.peek(*space, keys)?),
        }
    }

    pub(crate) fn lookup(&self, keys: &[BlockKey]) -> Result<AnyPrefix, Failure> {
        match self {
            Self::Own(store, _) => Ok(AnyPrefix::Own(store.lookup(keys)?)),
            Self::Served(space, session) => {
                Ok(AnyPrefix::Served(session.client.lookup(*space, keys)?))
            }
        }
    }

    pub(crate) fn retrieve(
        &self,
        prefix: &AnyPrefix,
        first: usize,
        blocks: &[BlockId],
    ) -> Result<AnyRequest, Failure> {
        match (self, prefix) {
            (Self::Own(store, _), AnyPrefix::Own(prefix)) => {
                Ok(AnyRequest::Own(ripieno_stack::Request::retrieve(store, prefix, first, blocks)?))
            }
            (Self::Served(_, session), AnyPrefix::Served(prefix)) => {
                Ok(AnyRequest::Served(session.client.retrieve(prefix, first, blocks)?))
            }
            _ => Err(Failure::invalid("prefix: it was found in another store")),
        }
    }

    /// Prepares to store blocks. Returns the number of leading ones with room for them, too.
    pub(crate) fn store(
        &self,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<(AnyRequest, usize), Failure> {
        match self {
            Self::Own(store, _) => {
                let request = ripieno_stack::Request::store(store, keys, blocks)?;
                let accepted = request.accepted().map_or(0, |(accepted, _)| accepted);
                Ok((AnyRequest::Own(request), accepted))
            }
            Self::Served(space, session) => {
                let request = session.client.allocate(*space, keys, blocks)?;
                let accepted = request.accepted();
                Ok((AnyRequest::Served(request), accepted))
            }
        }
    }

    pub(crate) fn remove(&self, keys: &[BlockKey]) -> Result<u32, Failure> {
        match self {
            Self::Own(store, _) => Ok(store.remove(keys)?),
            Self::Served(space, session) => Ok(session.client.remove(*space, keys)?),
        }
    }

    /// Pins the leading keys that are stored for a time. Returns the pin and its blocks; zeros if
    /// there are none.
    pub(crate) fn pin_for(&self, keys: &[BlockKey], seconds: u32) -> Result<(u64, u64), Failure> {
        let answer = match self {
            Self::Own(store, _) => {
                let namespaces = [store.namespace()];
                let ttl = Duration::from_secs(seconds.into());
                let (owner, bytes_max, wait) = (0, None, false);
                let new = NewPin { owner, namespaces: &namespaces, keys, ttl, bytes_max, wait };
                store.pin_for(&new, &PinLimits::default())?
            }
            Self::Served(space, session) => session.client.pin(*space, keys, seconds.into())?,
        };
        match answer {
            PinAnswer { pin: Some(pin), .. } => Ok((pin.pin, pin.blocks)),
            PinAnswer { outcome: Outcome::Missing, .. } => Ok((0, 0)),
            PinAnswer { reason, .. } => {
                Err(Failure::new(Status::Busy, reason.unwrap_or_else(|| "it was refused".into())))
            }
        }
    }

    /// Ends a pin that [`AnyStore::pin_for`] returned, if it has not ended.
    pub(crate) fn end_pin(&self, pin: u64) -> Result<(), Failure> {
        match self {
            Self::Own(store, _) => {
                store.end_pins(Some(pin), None);
            }
            Self::Served(_, session) => {
                session.client.unpin(pin)?;
            }
        }
        Ok(())
    }

    pub(crate) fn sync(&self) -> Result<(), Failure> {
        match self {
            Self::Own(store, _) => Ok(store.sync_journal()?),
            Self::Served(_, session) => Ok(session.client.sync()?),
        }
    }

    pub(crate) fn usage(&self) -> Result<Usage, Failure> {
        match self {
            Self::Own(store, _) => Ok(store.usage()?),
            Self::Served(space, session) => Ok(session.client.usage(*space)?),
        }
    }
}

impl AnyPrefix {
    pub(crate) fn len(&self) -> usize {
        either!(self, prefix => prefix.len())
    }
}

impl AnyRequest {
    pub(crate) fn start(&self, layer: Layer) -> Result<(), Failure> {
        either!(self, request => Ok(request.start(layer)?))
    }

    pub(crate) fn wait(&self, layer: Layer) -> Result<(), Failure> {
        either!(self, request => Ok(request.wait(layer).map(|_| ())?))
    }

    pub(crate) fn poll(&self, layer: Layer) -> Result<bool, Failure> {
        match self {
            Self::Own(request) => Ok(request.poll(layer)?.is_some()),
            Self::Served(request) => Ok(request.poll(layer)?),
        }
    }

    pub(crate) fn move_all(&self) -> Result<(), Failure> {
        either!(self, request => Ok(request.move_all()?))
    }

    /// Returns the number of leading blocks that lookups find now.
    pub(crate) fn commit(self) -> Result<usize, Failure> {
        either!(self, request => Ok(request.commit()?.accepted))
    }
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Self {
        use io::ErrorKind::{ConnectionRefused, NotFound};
        let status = match &error {
            ServeError::Socket { source, .. }
                if matches!(source.kind(), NotFound | ConnectionRefused) =>
            {
                Status::NotFound
            }
            ServeError::Shape { .. } => Status::Damaged,
            ServeError::Argument { .. } | ServeError::Unshared { .. } => Status::Invalid,
            ServeError::Lost { .. } | ServeError::Stale | ServeError::Answer { .. } => {
                Status::Failed
            }
            ServeError::Refused { kind, .. } => match kind {
                RefusalKind::Argument | RefusalKind::Missing => Status::Invalid,
                RefusalKind::Limit | RefusalKind::Conflict => Status::Busy,
                RefusalKind::Transfer => Status::Io,
                RefusalKind::ReadOnly => Status::ReadOnly,
                RefusalKind::Failed => Status::Failed,
                RefusalKind::Unsupported => Status::Unsupported,
                _ => Status::System,
            },
            _ => Status::System,
        };
        Self::new(status, error.to_string())
    }
}
