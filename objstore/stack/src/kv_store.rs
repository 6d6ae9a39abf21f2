//! A store as engines use it, wherever it is: in this process, or at a server.

use std::{
    any::Any,
    fmt::Debug,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use nvme_driver::Nanos;
use objstore::{
    BlockId, BlockKey, CatalogCounts, Layer, Namespace, NewPin, PinAnswer, PinLimits, Prefix,
    Store, StoreError, StoreEvent, Usage,
};

use crate::{
    error::StackError,
    found::KvPrefix,
    metrics::{SampleValue, samples},
    request::Request,
    stack::Stack,
};

/// A handle of a store, in one namespace. Any number of threads may use it. Errors are the ones of
/// [`Store`], or of a server and its client: [`crate::ErrorKind::Lost`] while the server is away.
#[expect(clippy::missing_errors_doc, reason = "they are above")]
pub trait KvStore: Debug + Send + Sync {
    /// Returns a handle of the same store in another namespace.
    fn within(&self, namespace: &Namespace) -> Result<Box<dyn KvStore>, StackError>;

    /// Returns how many leading keys are stored now.
    fn peek(&self, keys: &[BlockKey]) -> Result<usize, StackError>;

    /// Returns, for each key, if it is stored now.
    fn are_stored(&self, keys: &[BlockKey]) -> Result<Vec<bool>, StackError>;

    /// Returns the longest stored run of leading keys.
    fn lookup(&self, keys: &[BlockKey]) -> Result<Box<dyn KvPrefix>, StackError>;

    /// Prepares to load the positions of a prefix from `first` on.
    fn retrieve(
        &self,
        prefix: &dyn KvPrefix,
        first: usize,
        blocks: &[BlockId],
    ) -> Result<Box<dyn KvRequest>, StackError>;

    /// Prepares to store blocks, as many leading ones as there is room for.
    fn store(
        &self,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<Box<dyn KvRequest>, StackError>;

    /// Prepares to load those of the keys that are stored ([`crate::find`]), each into its block.
    /// Returns which they are.
    fn fetch(&self, keys: &[BlockKey], blocks: &[BlockId]) -> Result<Fetched, StackError>;

    /// Loads those of the keys that are stored, each into its block. Returns which they are.
    fn load(&self, keys: &[BlockKey], blocks: &[BlockId]) -> Result<Vec<bool>, StackError> {
        let (request, found) = self.fetch(keys, blocks)?;
        request.move_all()?;
        Ok(found)
    }

    /// Stores blocks under keys, as many leading ones as there is room for, and returns their
    /// number. They are durable then.
    fn save(&self, keys: &[BlockKey], blocks: &[BlockId]) -> Result<usize, StackError> {
        let request = self.store(keys, blocks)?;
        request.move_all()?;
        request.commit()
    }

    /// Starts reading ahead ([`Store::prefetch`]). Returns 0 at a server, which does that only when
    /// its control asks for it.
    fn prefetch(&self, keys: &[BlockKey], within: Nanos) -> Result<usize, StackError>;

    /// Drops keys, including pinned ones and those in use. Returns how many were stored.
    fn remove(&self, keys: &[BlockKey]) -> Result<u32, StackError>;

    /// Pins the leading keys that are stored for a time, up to this many bytes. `wait`: the others
    /// are pinned when they are stored.
    fn pin(
        &self,
        keys: &[BlockKey],
        ttl: Duration,
        bytes_max: Option<u64>,
        wait: bool,
    ) -> Result<PinAnswer, StackError>;

    /// Ends a pin. Returns false if it has ended.
    fn unpin(&self, pin: u64) -> Result<bool, StackError>;

    /// Makes all changes so far durable. Commits are durable when they return.
    fn sync(&self) -> Result<(), StackError>;

    /// Returns the counts of the namespace.
    fn usage(&self) -> Result<Usage, StackError>;

    /// Returns the counts of the store's files.
    fn counts(&self) -> Result<CatalogCounts, StackError>;

    /// Returns the samples of the store, over all namespaces ([`samples`]).
    fn stats(&self) -> Result<Vec<(String, SampleValue)>, StackError> {
        let store = self.own()?;
        Ok(samples(store.plane(), Some(store))?)
    }

    /// Describes where the store is, and the route of its data.
    fn placement(&self) -> Result<String, StackError>;

    /// Returns the events of the devices since the last call; at a server none, or the error that
    /// the connection is lost.
    fn poll_events(&self) -> Result<Vec<StoreEvent>, StackError>;

    /// Returns the store if it is in this process, for what only its owner may do; else
    /// [`crate::ErrorKind::Unsupported`].
    fn own(&self) -> Result<&Store, StackError>;

    /// Closes the store for all of its handles, or leaves the server.
    fn close(&self) -> Result<(), StackError>;
}

/// A retrieval or storing of blocks, layer by layer. Dropping it waits for its layers in flight,
/// and frees what was not committed. Errors are the ones of [`Request`], or of a server.
#[expect(clippy::missing_errors_doc, reason = "they are above")]
pub trait KvRequest: Debug + Send + Sync {
    /// Returns how many leading blocks will be found after the commit; of a load, its blocks.
    fn accepted(&self) -> usize;

    /// Starts a layer.
    fn start(&self, layer: Layer) -> Result<(), StackError>;

    /// Waits for a started layer.
    fn wait(&self, layer: Layer) -> Result<(), StackError>;

    /// Returns true if a started layer has ended.
    fn poll(&self, layer: Layer) -> Result<bool, StackError>;

    /// Moves all layers, and waits for them.
    fn move_all(&self) -> Result<(), StackError>;

    /// Makes the stored blocks durable and visible. Returns the number of leading blocks that
    /// lookups find now.
    fn commit(self: Box<Self>) -> Result<usize, StackError>;
}

/// A request that loads, and for each of its keys if it is stored.
pub type Fetched = (Box<dyn KvRequest>, Vec<bool>);

/// A store that its handles and prefixes keep open, until it is closed.
type Open = Arc<RwLock<Option<Stack>>>;

/// A store of this process. Dropping the last handle and prefix of it closes it.
#[derive(Debug, Clone)]
pub struct OwnStore {
    store: Store,
    open: Open,
}

impl OwnStore {
    /// Makes a handle in the stack's namespace.
    #[must_use]
    pub fn new(stack: Stack) -> Self {
        Self { store: stack.store().clone(), open: Arc::new(RwLock::new(Some(stack))) }
    }

    fn open(&self) -> Result<&Store, StackError> {
        check_open(&self.open).map(|()| &self.store)
    }
}

/// Refuses calls after the store was closed.
fn check_open(open: &Open) -> Result<(), StackError> {
    // A thread that panicked leaves a stack that is whole.
    let open = open.read().unwrap_or_else(PoisonError::into_inner);
    open.as_ref().map(|_| ()).ok_or(StackError::Closed)
}

impl KvStore for OwnStore {
    fn within(&self, namespace: &Namespace) -> Result<Box<dyn KvStore>, StackError> {
        let store = self.open()?.within(namespace)?;
        Ok(Box::new(Self { store, open: self.open.clone() }))
    }

    fn peek(&self, keys: &[BlockKey]) -> Result<usize, StackError> {
        Ok(self.open()?.peek(keys))
    }

    fn are_stored(&self, keys: &[BlockKey]) -> Result<Vec<bool>, StackError> {
        Ok(self.open()?.are_stored(keys)?)
    }

    fn lookup(&self, keys: &[BlockKey]) -> Result<Box<dyn KvPrefix>, StackError> {
        let part = self.open()?.lookup(keys)?;
        Ok(Box::new(OwnPart { blocks: part.len(), part, open: self.open.clone() }))
    }

    fn retrieve(
        &self,
        prefix: &dyn KvPrefix,
        first: usize,
        blocks: &[BlockId],
    ) -> Result<Box<dyn KvRequest>, StackError> {
        let own = (prefix as &dyn Any).downcast_ref::<OwnPart<Prefix>>();
        let own = own.ok_or_else(|| StoreError::foreign("prefix"))?;
        let part = Request::retrieve(self.open()?, &own.part, first, blocks)?;
        Ok(Box::new(OwnPart { part, blocks: blocks.len(), open: self.open.clone() }))
    }

    fn store(
        &self,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<Box<dyn KvRequest>, StackError> {
        let part = Request::store(self.open()?, keys, blocks)?;
        let blocks = part.accepted().map_or(0, |(accepted, _)| accepted);
        Ok(Box::new(OwnPart { part, blocks, open: self.open.clone() }))
    }

    fn fetch(&self, keys: &[BlockKey], blocks: &[BlockId]) -> Result<Fetched, StackError> {
        let (part, found) = Request::fetch(self.open()?, keys, blocks)?;
        let blocks = found.iter().filter(|is_found| **is_found).count();
        Ok((Box::new(OwnPart { part, blocks, open: self.open.clone() }), found))
    }

    fn prefetch(&self, keys: &[BlockKey], within: Nanos) -> Result<usize, StackError> {
        Ok(self.open()?.prefetch(keys, within)?)
    }

    fn remove(&self, keys: &[BlockKey]) -> Result<u32, StackError> {
        Ok(self.open()?.remove(keys)?)
    }

    fn pin(
        &self,
        keys: &[BlockKey],
        ttl: Duration,
        bytes_max: Option<u64>,
        wait: bool,
    ) -> Result<PinAnswer, StackError> {
        let store = self.open()?;
        let namespaces = &[store.namespace()];
        let new = NewPin { owner: 0, namespaces, keys, ttl, bytes_max, wait };
        Ok(store.pin_for(&new, &PinLimits::default())?)
    }

    fn unpin(&self, pin: u64) -> Result<bool, StackError> {
        Ok(self.open()?.end_pins(Some(pin), None).is_some())
    }

    fn sync(&self) -> Result<(), StackError> {
        Ok(self.open()?.sync_journal()?)
    }

    fn usage(&self) -> Result<Usage, StackError> {
        Ok(self.open()?.usage()?)
    }

    fn counts(&self) -> Result<CatalogCounts, StackError> {
        Ok(self.open()?.counts()?)
    }

    fn placement(&self) -> Result<String, StackError> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.as_ref().map(|stack| stack.placement().to_string()).ok_or(StackError::Closed)
    }

    fn poll_events(&self) -> Result<Vec<StoreEvent>, StackError> {
        Ok(self.open()?.plane().poll_events()?)
    }

    fn own(&self) -> Result<&Store, StackError> {
        self.open()
    }

    fn close(&self) -> Result<(), StackError> {
        let stack = self.open.write().unwrap_or_else(PoisonError::into_inner).take();
        stack.map_or(Ok(()), Stack::close)
    }
}

/// A prefix or request, which keeps the store open. Dropped in this order.
#[derive(Debug)]
struct OwnPart<T> {
    part: T,
    blocks: usize,
    open: Open,
}

impl KvPrefix for OwnPart<Prefix> {
    fn blocks(&self) -> usize {
        self.blocks
    }
}

impl OwnPart<Request> {
    fn open(&self) -> Result<&Request, StackError> {
        check_open(&self.open).map(|()| &self.part)
    }
}

impl KvRequest for OwnPart<Request> {
    fn accepted(&self) -> usize {
        self.blocks
    }

    fn start(&self, layer: Layer) -> Result<(), StackError> {
        self.open()?.start(layer)
    }

    fn wait(&self, layer: Layer) -> Result<(), StackError> {
        self.open()?.wait(layer).map(drop)
    }

    fn poll(&self, layer: Layer) -> Result<bool, StackError> {
        Ok(self.open()?.poll(layer)?.is_some())
    }

    fn move_all(&self) -> Result<(), StackError> {
        self.open()?.move_all()
    }

    fn commit(self: Box<Self>) -> Result<usize, StackError> {
        self.open()?;
        Ok(self.part.commit()?.accepted)
    }
}
