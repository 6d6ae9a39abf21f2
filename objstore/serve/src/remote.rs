//! A server's store, as engines use any store.

use std::{any::Any, io, time::Duration};

use nvme_driver::Nanos;
use objstore::{
    BlockId, BlockKey, CatalogCounts, Layer, Namespace, PinAnswer, Store, StoreError, StoreEvent,
    Usage,
};
use ripieno_stack::{ErrorKind, Fetched, KvPrefix, KvRequest, KvStore, StackError};

use crate::{
    client::{Client, Prefix, Request, SpaceId},
    error::{RefusalKind, ServeError},
};

/// A server's store, in one namespace. [`KvStore::close`] ends the session of its client.
#[derive(Debug, Clone)]
pub struct RemoteStore {
    client: Client,
    space: SpaceId,
}

impl RemoteStore {
    /// Makes a handle in a namespace.
    ///
    /// # Errors
    /// Same as [`Client::namespace`].
    pub fn new(client: Client, namespace: &Namespace) -> Result<Self, ServeError> {
        let space = client.namespace(namespace)?;
        Ok(Self { client, space })
    }
}

impl KvStore for RemoteStore {
    fn within(&self, namespace: &Namespace) -> Result<Box<dyn KvStore>, StackError> {
        Ok(Box::new(Self::new(self.client.clone(), namespace)?))
    }

    fn peek(&self, keys: &[BlockKey]) -> Result<usize, StackError> {
        Ok(self.client.peek(self.space, keys)?)
    }

    fn are_stored(&self, keys: &[BlockKey]) -> Result<Vec<bool>, StackError> {
        Ok(self.client.are_stored(self.space, keys)?)
    }

    fn lookup(&self, keys: &[BlockKey]) -> Result<Box<dyn KvPrefix>, StackError> {
        Ok(Box::new(self.client.lookup(self.space, keys)?))
    }

    fn retrieve(
        &self,
        prefix: &dyn KvPrefix,
        first: usize,
        blocks: &[BlockId],
    ) -> Result<Box<dyn KvRequest>, StackError> {
        let prefix = (prefix as &dyn Any).downcast_ref::<Prefix>();
        let prefix = prefix.ok_or_else(|| StoreError::foreign("prefix"))?;
        Ok(Box::new(self.client.retrieve(prefix, first, blocks)?))
    }

    fn store(
        &self,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<Box<dyn KvRequest>, StackError> {
        Ok(Box::new(self.client.allocate(self.space, keys, blocks)?))
    }

    fn fetch(&self, keys: &[BlockKey], blocks: &[BlockId]) -> Result<Fetched, StackError> {
        let (request, found) = self.client.fetch(self.space, keys, blocks, 0)?;
        Ok((Box::new(request), found))
    }

    fn load(&self, keys: &[BlockKey], blocks: &[BlockId]) -> Result<Vec<bool>, StackError> {
        Ok(self.client.load(self.space, keys, blocks)?)
    }

    fn save(&self, keys: &[BlockKey], blocks: &[BlockId]) -> Result<usize, StackError> {
        Ok(self.client.save(self.space, keys, blocks)?)
    }

    fn prefetch(&self, _keys: &[BlockKey], _within: Nanos) -> Result<usize, StackError> {
        Ok(0)
    }

    fn remove(&self, keys: &[BlockKey]) -> Result<u32, StackError> {
        Ok(self.client.remove(self.space, keys)?)
    }

    fn pin(
        &self,
        keys: &[BlockKey],
        ttl: Duration,
        bytes_max: Option<u64>,
        wait: bool,
    ) -> Result<PinAnswer, StackError> {
        Ok(self.client.pin(self.space, keys, ttl.as_secs(), bytes_max, wait)?)
    }

    fn unpin(&self, pin: u64) -> Result<bool, StackError> {
        Ok(self.client.unpin(Some(pin))?)
    }

    fn sync(&self) -> Result<(), StackError> {
        Ok(self.client.sync()?)
    }

    fn usage(&self) -> Result<Usage, StackError> {
        Ok(self.client.usage(self.space)?)
    }

    fn counts(&self) -> Result<CatalogCounts, StackError> {
        Ok(self.client.counts()?)
    }

    fn placement(&self) -> Result<String, StackError> {
        Ok(self.client.placement())
    }

    fn poll_events(&self) -> Result<Vec<StoreEvent>, StackError> {
        self.client.check()?;
        Ok(Vec::new())
    }

    fn own(&self) -> Result<&Store, StackError> {
        let message = "a server has this store, and its clients cannot do this: ask the server \
                       (ripieno ctl, or HTTP at its socket)";
        Err(StackError::Served { kind: ErrorKind::Unsupported, message: message.to_owned() })
    }

    fn close(&self) -> Result<(), StackError> {
        Ok(self.client.close()?)
    }
}

impl KvPrefix for Prefix {
    fn blocks(&self) -> usize {
        self.len()
    }
}

impl KvRequest for Request {
    fn accepted(&self) -> usize {
        Self::accepted(self)
    }

    fn start(&self, layer: Layer) -> Result<(), StackError> {
        Ok(Self::start(self, layer)?)
    }

    fn wait(&self, layer: Layer) -> Result<(), StackError> {
        Ok(Self::wait(self, layer)?)
    }

    fn poll(&self, layer: Layer) -> Result<bool, StackError> {
        Ok(Self::poll(self, layer)?)
    }

    fn move_all(&self) -> Result<(), StackError> {
        Ok(Self::move_all(self)?)
    }

    fn commit(self: Box<Self>) -> Result<usize, StackError> {
        Ok(Self::commit(*self)?.accepted)
    }
}

impl From<ServeError> for StackError {
    fn from(error: ServeError) -> Self {
        use io::ErrorKind::{ConnectionRefused, NotFound};
        let kind = match &error {
            ServeError::Socket { source, .. }
                if matches!(source.kind(), NotFound | ConnectionRefused) =>
            {
                ErrorKind::NotFound
            }
            ServeError::Shape { .. } => ErrorKind::Damaged,
            ServeError::Argument { .. } | ServeError::Unshared { .. } => ErrorKind::Invalid,
            ServeError::Lost { .. } | ServeError::Stale | ServeError::Answer { .. } => {
                ErrorKind::Lost
            }
            ServeError::Refused { kind, .. } => match kind {
                RefusalKind::Argument | RefusalKind::Missing => ErrorKind::Invalid,
                RefusalKind::Limit | RefusalKind::Conflict => ErrorKind::Busy,
                RefusalKind::Transfer => ErrorKind::Io,
                RefusalKind::ReadOnly => ErrorKind::ReadOnly,
                RefusalKind::Failed => ErrorKind::Lost,
                RefusalKind::Unsupported => ErrorKind::Unsupported,
                _ => ErrorKind::System,
            },
            ServeError::Stack(error) => error.kind(),
            _ => ErrorKind::System,
        };
        Self::Served { kind, message: error.to_string() }
    }
}
