//! A store in one process: `ripieno.Store`.

use std::{
    path::PathBuf,
    sync::{Arc, RwLock},
    time::Duration,
};

use objstore::{NewPin, PinLimits};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyDict, PyTuple},
};
use ripieno_stack::{Builder, Own, Stack, StackError};

use crate::{
    arguments::{self, OrRaise as _, dataclass, unpoisoned, usage},
    error::{closed, invalid},
    events,
};

/// A store that its handles, requests and holds keep open, until it is closed.
type Opened = Arc<RwLock<Option<Stack>>>;

/// A store in one process: keys, data and registered memory. Handles of one store share it, each in
/// its own namespace. Dropping the last handle, request and hold of it closes it.
///
/// Opens the store in a directory. options: see docs/reference/options.md. With a capacity (in
/// bytes or as "100GiB"), it is created first if there is none. Opening uses part of the pool for
/// tests and restores its contents.
#[pyclass(frozen)]
#[derive(Debug)]
pub struct Store {
    opened: Own<(objstore::Store, Opened)>,
}

/// Blocks that are being loaded or stored, layer by layer. Ending it (end(), or as a context)
/// waits for transfers in flight.
#[pyclass(frozen)]
#[derive(Debug)]
pub struct Request {
    /// `None` once it was ended. Dropped in this order.
    request: Own<RwLock<Option<(ripieno_stack::Request, Opened)>>>,
    layers: u32,
    /// Number of blocks that it covers.
    #[pyo3(get)]
    blocks: usize,
}

/// The longest stored prefix of some keys: its blocks are not evicted before end().
#[pyclass(frozen)]
#[derive(Debug)]
pub struct Held {
    /// `None` once it was ended. Dropped in this order.
    prefix: Own<RwLock<Option<(objstore::Prefix, Opened)>>>,
    /// Number of blocks.
    #[pyo3(get)]
    blocks: usize,
}

/// Refuses a closed store, whose catalog and counters would still answer from memory.
fn check_open(opened: &Opened) -> PyResult<()> {
    unpoisoned(opened.read()).as_ref().map(|_| ()).ok_or_else(closed)
}

impl Store {
    fn open(&self) -> PyResult<(&objstore::Store, &Opened)> {
        let (handle, opened) = self.opened.get().or_raise()?;
        check_open(opened)?;
        Ok((handle, opened))
    }

    fn handle(&self) -> PyResult<&objstore::Store> {
        Ok(self.open()?.0)
    }

    fn request(
        &self,
        py: Python<'_>,
        make: impl Send
        + FnOnce(&objstore::Store) -> Result<(ripieno_stack::Request, usize), StackError>,
    ) -> PyResult<Request> {
        let (handle, opened) = self.open()?;
        py.detach(|| {
            let (request, blocks) = make(handle).or_raise()?;
            let layers = handle.shape().layers;
            let request = Own::new(RwLock::new(Some((request, opened.clone()))));
            Ok(Request { request, layers, blocks })
        })
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
        let builder = Builder::new(config, shape.check()?).namespace(namespace);
        let builder = builder.pool(pool.memory()?);
        let stack = py.detach(|| builder.open()).or_raise()?;
        let handle = stack.store().clone();
        Ok(Self { opened: Own::new((handle, Arc::new(RwLock::new(Some(stack))))) })
    }

    /// Same as Plane.placement.
    #[getter]
    fn placement(&self) -> PyResult<String> {
        let (_, opened) = self.opened.get().or_raise()?;
        Ok(unpoisoned(opened.read()).as_ref().ok_or_else(closed)?.placement().to_string())
    }

    /// Returns a handle of the same store that works in another namespace.
    fn within(&self, namespace: arguments::Namespace) -> PyResult<Self> {
        let (handle, opened) = self.open()?;
        let handle = handle.within(&namespace.check()?).or_raise()?;
        Ok(Self { opened: Own::new((handle, opened.clone())) })
    }

    /// Returns how many leading keys are stored. Has no side effects, and never blocks.
    fn lookup(&self, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(self.handle()?.peek(&arguments::keys(keys)?))
    }

    /// Starts reading the longest stored prefix of the keys into the memory of dram, except
    /// blocks already there; a load that follows copies them from there. They are held for it for
    /// `within` seconds, and are ordinary blocks after that. Returns how many leading blocks are
    /// there or in flight; 0 without such memory. Never blocks. Prefetches in flight delay later
    /// transfers: prefetch only for the requests that run next.
    #[pyo3(signature = (keys, within = 10.0))]
    fn prefetch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, within: f64) -> PyResult<usize> {
        let keys = arguments::keys(keys)?;
        let within = arguments::seconds("within", within)?;
        let handle = self.handle()?;
        py.detach(|| handle.prefetch(&keys, within)).or_raise()
    }

    /// Looks up the longest stored prefix of the keys, and protects it from eviction until the
    /// result is ended, or this process. Never blocks.
    fn hold(&self, keys: &Bound<'_, PyAny>) -> PyResult<Held> {
        let (handle, opened) = self.open()?;
        let prefix = handle.lookup(&arguments::keys(keys)?).or_raise()?;
        let blocks = prefix.len();
        Ok(Held { prefix: Own::new(RwLock::new(Some((prefix, opened.clone())))), blocks })
    }

    /// Loads the longest stored prefix of the keys into the leading ones of these blocks. The
    /// request has their number, and moves them.
    fn load(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, blocks: Vec<u32>) -> PyResult<Request> {
        let (keys, blocks) = (arguments::keys(keys)?, arguments::blocks(blocks));
        if keys.len() != blocks.len() {
            let (keys, blocks) = (keys.len(), blocks.len());
            return Err(invalid(format!("{keys} keys and {blocks} blocks; give one for each")));
        }
        self.request(py, |handle| {
            let prefix = handle.lookup(&keys)?;
            let blocks = &blocks[..prefix.len()];
            let request = ripieno_stack::Request::retrieve(handle, &prefix, 0, blocks)?;
            Ok((request, blocks.len()))
        })
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
        self.request(py, |handle| {
            let request = ripieno_stack::Request::store(handle, &keys, &blocks)?;
            let accepted = request.accepted().map_or(0, |(accepted, _)| accepted);
            Ok((request, accepted))
        })
    }

    /// Same as Catalog.pin(), until the store is closed at most.
    #[pyo3(signature = (keys, seconds, *, bytes_max = None, wait = false))]
    fn pin(
        &self,
        keys: &Bound<'_, PyAny>,
        seconds: u64,
        bytes_max: Option<u64>,
        wait: bool,
    ) -> PyResult<arguments::Pinned> {
        let handle = self.handle()?;
        let (namespaces, ttl) = (&[handle.namespace()], Duration::from_secs(seconds));
        let keys = &arguments::keys(keys)?[..];
        let new = NewPin { owner: 0, namespaces, keys, ttl, bytes_max, wait };
        handle.pin_for(&new, &PinLimits::default()).or_raise().map(arguments::pinned)
    }

    /// Same as Catalog.unpin().
    fn unpin(&self, pin: u64) -> PyResult<bool> {
        Ok(self.handle()?.end_pins(Some(pin), None).is_some())
    }

    /// Drops those of these keys that are stored. Returns their number.
    fn remove(&self, keys: &Bound<'_, PyAny>) -> PyResult<u32> {
        self.handle()?.remove(&arguments::keys(keys)?).or_raise()
    }

    /// Returns the keys of the namespace that were evicted, removed or lost since the last call,
    /// by any handle; not those dropped by clear() and bump_epoch(). They are collected from the
    /// first call on. Keys of other namespaces are discarded.
    fn take_dropped<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let dropped = self.handle()?.take_dropped();
        Ok(dropped.iter().map(|key| PyBytes::new(py, &key.0)).collect())
    }

    /// Drops all blocks of the namespace.
    fn clear(&self) -> PyResult<()> {
        self.handle()?.clear().or_raise()
    }

    /// Evicts up to this many files of the namespace. Returns the number evicted.
    fn evict(&self, files: u32) -> PyResult<u32> {
        self.handle()?.evict(files).or_raise()
    }

    /// Permanently drops all blocks of the namespace. Returns the new epoch, which is durable when
    /// the next sync() has returned.
    fn bump_epoch(&self) -> PyResult<u64> {
        self.handle()?.bump_epoch().or_raise()
    }

    /// Makes all earlier evictions, removals and clears durable. Commits are durable when
    /// they return.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        let handle = self.handle()?;
        py.detach(|| handle.sync_journal()).or_raise()
    }

    /// Returns the device events since the last call, as for Plane. Call it about once a second;
    /// after requested, close the store: the process that wants the device back waits for that.
    fn poll_events(&self, py: Python<'_>) -> PyResult<Vec<(u32, &'static str)>> {
        let handle = self.handle()?;
        Ok(arguments::events(&py.detach(|| handle.plane().poll_events()).or_raise()?))
    }

    /// Returns the namespace's counts.
    fn usage<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        usage!(py, self.handle()?.usage().or_raise()?)
    }

    /// Returns counters since opening, and the current contents.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let handle = self.handle()?;
        let stats = py.detach(|| handle.stats()).or_raise()?;
        dataclass!(
            py,
            "StoreStats",
            stats,
            [
                files,
                files_free,
                files_stored,
                file_bytes,
                blocks_looked_up,
                blocks_hit,
                evictions,
                files_lost,
                stored_bytes,
                retrieved_bytes,
                journal_bytes,
                recoveries
            ],
            route = stats.path.name(),
            dram = arguments::dram_stats(py, &stats.dram)?
        )
    }

    /// Makes all changes durable, and releases the directory and the pool. Every later call of any
    /// handle, request or hold raises ClosedError, except end() and another close(). In a forked
    /// process every call raises it, except these, which do nothing there.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Ok((_, opened)) = self.opened.get() else { return Ok(()) };
        py.detach(|| {
            let stack = unpoisoned(opened.write()).take();
            stack.map_or(Ok(()), Stack::close).or_raise()
        })
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
        act: impl Send + FnOnce(&ripieno_stack::Request) -> Result<T, StackError>,
    ) -> PyResult<T> {
        let request = self.request.get().or_raise()?;
        py.detach(|| {
            let request = unpoisoned(request.read());
            let (request, opened) = request.as_ref().ok_or_else(closed)?;
            check_open(opened)?;
            act(request).or_raise()
        })
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
    /// the layer's blocks are undefined. Either way, no transfer uses them any more.
    fn wait(&self, py: Python<'_>, layer: u32) -> PyResult<()> {
        let layer = arguments::layer(layer, self.layers)?;
        self.with(py, |request| request.wait(layer)).map(|_| ())
    }

    /// Same as wait(), without blocking: False while the layer is in flight.
    fn poll(&self, py: Python<'_>, layer: u32) -> PyResult<bool> {
        let layer = arguments::layer(layer, self.layers)?;
        Ok(self.with(py, |request| request.poll(layer))?.is_some())
    }

    /// Moves all layers, and waits for them.
    fn move_all(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, ripieno_stack::Request::move_all)
    }

    /// Makes the stored blocks durable and visible. Returns how many leading keys lookups now find.
    fn commit(&self, py: Python<'_>) -> PyResult<usize> {
        let request = self.request.get().or_raise()?;
        py.detach(|| {
            let (request, opened) = unpoisoned(request.write()).take().ok_or_else(closed)?;
            check_open(&opened)?;
            Ok(request.commit().or_raise()?.accepted)
        })
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
