//! A store in this process, or at a server: `ripieno.Store`.

use std::{path::PathBuf, sync::RwLock, time::Duration};

use pyo3::{
    prelude::*,
    types::{PyBytes, PyDict, PyTuple},
};
use ripieno_serve::RemoteStore;
use ripieno_stack::{Builder, Fetched, KvPrefix, KvRequest, KvStore, Own, OwnStore, StackError};

use crate::{
    arguments::{self, OrRaise as _, unpoisoned},
    error::closed,
    events,
};

/// A store: keys, data and registered memory. Handles of one store share it, each in its own
/// namespace. Dropping the last handle, request and hold of it closes it.
///
/// Opens the store in a directory. options: see docs/reference/options.md. With a capacity (in
/// bytes or as "100GiB"), it is created first if there is none. Opening uses part of the pool for
/// tests and restores its contents.
#[pyclass(frozen)]
#[derive(Debug)]
pub struct Store {
    store: Own<Box<dyn KvStore>>,
    layers: u32,
}

/// Blocks that are being loaded or stored, layer by layer. Ending it (end(), or as a context)
/// waits for transfers in flight.
#[pyclass(frozen)]
#[derive(Debug)]
pub struct Request {
    /// `None` once it was ended.
    request: Own<RwLock<Option<Box<dyn KvRequest>>>>,
    layers: u32,
    /// Number of blocks that it covers.
    #[pyo3(get)]
    blocks: usize,
    /// Of a load, for each key: True if it is stored, and its block is loaded.
    #[pyo3(get)]
    found: Vec<bool>,
}

/// The longest stored prefix of some keys: its blocks are not evicted before end().
#[pyclass(frozen)]
#[derive(Debug)]
pub struct Held {
    /// `None` once it was ended.
    prefix: Own<RwLock<Option<Box<dyn KvPrefix>>>>,
    /// Number of blocks.
    #[pyo3(get)]
    blocks: usize,
}

impl Store {
    fn of(store: Box<dyn KvStore>, layers: u32) -> Self {
        Self { store: Own::new(store), layers }
    }

    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl Send + FnOnce(&dyn KvStore) -> Result<T, StackError>,
    ) -> PyResult<T> {
        let store = self.store.get().or_raise()?;
        py.detach(|| act(&**store)).or_raise()
    }

    /// Returns the store of this process.
    fn own(&self) -> PyResult<&objstore::Store> {
        self.store.get().or_raise()?.own().or_raise()
    }

    fn request(
        &self,
        py: Python<'_>,
        make: impl Send + FnOnce(&dyn KvStore) -> Result<Fetched, StackError>,
    ) -> PyResult<Request> {
        let (request, found) = self.with(py, make)?;
        let (blocks, layers) = (request.accepted(), self.layers);
        Ok(Request { request: Own::new(RwLock::new(Some(request))), layers, blocks, found })
    }
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (path, shape, pool, *, namespace = None, **options))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        shape: arguments::Shape,
        pool: arguments::Pool,
        namespace: Option<arguments::Namespace>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        events::start(py)?;
        let config = arguments::config(path, options)?;
        let namespace = namespace.map_or(Ok(Default::default()), arguments::Namespace::check)?;
        let shape = shape.check()?;
        let builder = Builder::new(config, shape).namespace(namespace).pool(pool.memory()?);
        let stack = py.detach(|| builder.open()).or_raise()?;
        Ok(Self::of(Box::new(OwnStore::new(stack)), shape.layers))
    }

    /// Connects to the store of a server (`ripieno serve`), by its socket. pool: memory that the
    /// server shares, with its file (see SharedMemory), whose objects are whole pages; or memory of
    /// a GPU that the server reaches, too, whose blocks no kernel may use while they are moved.
    ///
    /// While the server is away, calls raise LostError; they connect to it again when it is back.
    /// Blocks of a load that was lost are undefined, and no transfer uses them once it was ended.
    #[staticmethod]
    #[pyo3(signature = (socket, shape, pool, *, namespace = None))]
    fn connect(
        py: Python<'_>,
        socket: PathBuf,
        shape: arguments::Shape,
        pool: arguments::Pool,
        namespace: Option<arguments::Namespace>,
    ) -> PyResult<Self> {
        events::start(py)?;
        let namespace = namespace.map_or(Ok(Default::default()), arguments::Namespace::check)?;
        let (shape, pool) = (shape.check()?, pool.shared()?);
        let store = py.detach(|| {
            let client = pool.join(socket, shape, None)?;
            RemoteStore::new(client, &namespace)
        });
        Ok(Self::of(Box::new(store.or_raise()?), shape.layers))
    }

    /// Same as Plane.placement.
    #[getter]
    fn placement(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |store| store.placement())
    }

    /// Returns a handle of the same store that works in another namespace.
    fn within(&self, py: Python<'_>, namespace: arguments::Namespace) -> PyResult<Self> {
        let namespace = namespace.check()?;
        Ok(Self::of(self.with(py, |store| store.within(&namespace))?, self.layers))
    }

    /// Returns how many leading keys are stored. Has no side effects, and waits for nothing but the
    /// answer of a server.
    fn lookup(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let keys = arguments::keys(keys)?;
        self.with(py, |store| store.peek(&keys))
    }

    /// Returns, for each key, True if it is stored. Like lookup().
    fn are_stored(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let keys = arguments::keys(keys)?;
        self.with(py, |store| store.are_stored(&keys))
    }

    /// Starts reading the longest stored prefix of the keys into the memory of dram, except
    /// blocks already there; a load that follows copies them from there. They are held for it for
    /// `within` seconds, and are ordinary blocks after that. Returns how many leading blocks are
    /// there or in flight; 0 without such memory, as with a server. Never blocks. Prefetches in
    /// flight delay later transfers: prefetch only for the requests that run next.
    #[pyo3(signature = (keys, within = 10.0))]
    fn prefetch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, within: f64) -> PyResult<usize> {
        let keys = arguments::keys(keys)?;
        let within = arguments::seconds("within", within)?;
        self.with(py, |store| store.prefetch(&keys, within))
    }

    /// Looks up the longest stored prefix of the keys, and protects it from eviction until the
    /// result is ended, or this process. Waits like lookup().
    fn hold(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Held> {
        let keys = arguments::keys(keys)?;
        let prefix = self.with(py, |store| store.lookup(&keys))?;
        let blocks = prefix.blocks();
        Ok(Held { prefix: Own::new(RwLock::new(Some(prefix))), blocks })
    }

    /// Loads those of the keys that are stored, each into its block: the request says which, in
    /// found, and moves them. An engine that needs only a prefix passes the keys that lookup()
    /// finds.
    fn load(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, blocks: Vec<u32>) -> PyResult<Request> {
        let (keys, blocks) = (arguments::keys(keys)?, arguments::blocks(blocks));
        self.request(py, |store| store.fetch(&keys, &blocks))
    }

    /// Stores blocks under keys, as many leading ones as there is room for. Lookups do not find
    /// them until the request is committed.
    fn store(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        blocks: Vec<u32>,
    ) -> PyResult<Request> {
        let (keys, blocks) = (arguments::keys(keys)?, arguments::blocks(blocks));
        self.request(py, |store| Ok((store.store(&keys, &blocks)?, Vec::new())))
    }

    /// Same as Catalog.pin(), until the store is closed at most.
    #[pyo3(signature = (keys, seconds, *, bytes_max = None, wait = false))]
    fn pin(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        seconds: u64,
        bytes_max: Option<u64>,
        wait: bool,
    ) -> PyResult<arguments::Pinned> {
        let (keys, ttl) = (arguments::keys(keys)?, Duration::from_secs(seconds));
        self.with(py, |store| store.pin(&keys, ttl, bytes_max, wait)).map(arguments::pinned)
    }

    /// Same as Catalog.unpin().
    fn unpin(&self, py: Python<'_>, pin: u64) -> PyResult<bool> {
        self.with(py, |store| store.unpin(pin))
    }

    /// Drops those of these keys that are stored. Returns their number.
    fn remove(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<u32> {
        let keys = arguments::keys(keys)?;
        self.with(py, |store| store.remove(&keys))
    }

    /// Returns the keys of the namespace that were evicted, removed or lost since the last call,
    /// by any handle; not those dropped by clear() and bump_epoch(). They are collected from the
    /// first call on. Keys of other namespaces are discarded.
    fn take_dropped<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let dropped = self.own()?.take_dropped();
        Ok(dropped.iter().map(|key| PyBytes::new(py, &key.0)).collect())
    }

    /// Drops all blocks of the namespace.
    fn clear(&self) -> PyResult<()> {
        self.own()?.clear().or_raise()
    }

    /// Evicts up to this many files of the namespace. Returns the number evicted.
    fn evict(&self, files: u32) -> PyResult<u32> {
        self.own()?.evict(files).or_raise()
    }

    /// Permanently drops all blocks of the namespace. Returns the new epoch, which is durable when
    /// the next sync() has returned.
    fn bump_epoch(&self) -> PyResult<u64> {
        self.own()?.bump_epoch().or_raise()
    }

    /// Makes all earlier evictions, removals and clears durable. Commits are durable when
    /// they return.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |store| store.sync())
    }

    /// Returns the device events since the last call, as for Plane. Call it about once a second;
    /// after requested, close the store: the process that wants the device back waits for that.
    fn poll_events(&self, py: Python<'_>) -> PyResult<Vec<(u32, &'static str)>> {
        Ok(arguments::events(&self.with(py, |store| store.poll_events())?))
    }

    /// Returns the namespace's counts.
    fn usage<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        arguments::counts(py, "Usage", self.with(py, |store| store.usage())?)
    }

    /// Returns the counts of all namespaces.
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        arguments::counts(py, "CatalogStats", self.with(py, |store| store.counts())?)
    }

    /// Returns the counters since opening, and the current contents, by the names of
    /// docs/reference/metrics.md without "ripieno_". Not with a server.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        arguments::samples(py, self.with(py, |store| store.stats())?)
    }

    /// Makes all changes durable, and releases the directory, or leaves the server, and the pool.
    /// Every later call of any handle, request or hold raises ClosedError, except end() and another
    /// close(). In a forked process every call raises it, except these, which do nothing there.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(store) = self.store.get() else { return Ok(()) };
        py.detach(|| store.close()).or_raise()
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }
}

#[pymethods]
impl Held {
    /// Ends the protection.
    fn end(&self, py: Python<'_>) {
        let held = self.prefix.get().ok().and_then(|prefix| unpoisoned(prefix.write()).take());
        py.detach(|| drop(held));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.end(py);
    }
}

impl Request {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl Send + FnOnce(&dyn KvRequest) -> Result<T, StackError>,
    ) -> PyResult<T> {
        let request = self.request.get().or_raise()?;
        py.detach(|| act(&**unpoisoned(request.read()).as_ref().ok_or_else(closed)?).or_raise())
    }
}

#[pymethods]
impl Request {
    /// Starts a layer.
    fn start(&self, py: Python<'_>, layer: u32) -> PyResult<()> {
        let layer = arguments::layer(layer, self.layers)?;
        self.with(py, |request| request.start(layer))
    }

    /// Waits for a layer that was started. Raises TransferError if it failed; then the contents of
    /// the layer's blocks are undefined. Either way, no transfer uses them any more; after a
    /// LostError, that is so when the request has ended.
    fn wait(&self, py: Python<'_>, layer: u32) -> PyResult<()> {
        let layer = arguments::layer(layer, self.layers)?;
        self.with(py, |request| request.wait(layer))
    }

    /// Same as wait(), without blocking: False while the layer is in flight.
    fn poll(&self, py: Python<'_>, layer: u32) -> PyResult<bool> {
        let layer = arguments::layer(layer, self.layers)?;
        self.with(py, |request| request.poll(layer))
    }

    /// Moves all layers, and waits for them.
    fn move_all(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |request| request.move_all())
    }

    /// Makes the stored blocks durable and visible. Returns how many leading keys lookups now find.
    fn commit(&self, py: Python<'_>) -> PyResult<usize> {
        let request = self.request.get().or_raise()?;
        py.detach(|| unpoisoned(request.write()).take().ok_or_else(closed)?.commit().or_raise())
    }

    /// Waits for transfers in flight, and discards uncommitted blocks.
    fn end(&self, py: Python<'_>) {
        let Ok(request) = self.request.get() else { return };
        py.detach(|| drop(unpoisoned(request.write()).take()));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.end(py);
    }
}
