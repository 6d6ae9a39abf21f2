//! The halves of an engine that uses a server's store: `ripieno.ServedCatalog` and
//! `ripieno.ServedPlane`.

use std::{path::PathBuf, sync::RwLock};

use objstore::{BlockKey, Direction};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyTuple},
};
use ripieno_serve::{Client, Finder, Mover, RefusalKind, ServeError};
use ripieno_stack::Own;

use crate::{
    arguments::{self, OrRaise as _, catalog_stats, dataclass, unpoisoned, usage},
    catalog::{Reference, Write},
    error::{BusyError, DeviceError, LostError, ReadOnlyError, TransferError, closed, invalid},
    events,
    plane::Report,
};

/// Converts an error of a server or its client into its exception.
fn refused(error: ServeError) -> PyErr {
    let message = error.to_string();
    match error {
        ServeError::Lost { .. } | ServeError::Stale | ServeError::Socket { .. } => {
            LostError::new_err(message)
        }
        ServeError::Refused { kind, .. } => match kind {
            RefusalKind::Limit => BusyError::new_err(message),
            RefusalKind::Transfer => TransferError::new_err(message),
            RefusalKind::ReadOnly => ReadOnlyError::new_err(message),
            RefusalKind::Failed => LostError::new_err(message),
            RefusalKind::Denied => DeviceError::new_err(message),
            _ => invalid(message),
        },
        ServeError::Memory { .. } => DeviceError::new_err(message),
        _ => invalid(message),
    }
}

/// Returns the shape of the blocks of the server that listens on a socket.
#[pyfunction]
pub fn server_shape(py: Python<'_>, socket: PathBuf) -> PyResult<Bound<'_, PyAny>> {
    let shape = py.detach(|| Client::shape_at(&socket)).map_err(refused)?;
    dataclass!(py, "Shape", shape, [layers, segments, object_bytes, block_tokens])
}

/// The scheduler's half of an engine that uses the store of a server (`ripieno serve`): the calls
/// of a Catalog. Any number of engines share a store; ranks need no devices of their own.
///
/// Connects to the server's socket, which another process listens on. shape: that of a block on
/// each rank, which is the server's. engine: a name that scheduler and ranks of one engine have in
/// common, and no other engine of the user. ranks: their number.
///
/// Files are numbers that only ranks of this engine may use. While the server is away, lookups find
/// nothing and begin() accepts nothing; it is connected to again when it is back. Files and writes
/// of before are unknown then.
#[pyclass(frozen)]
#[derive(Debug)]
pub struct ServedCatalog {
    finder: Own<RwLock<Option<Finder>>>,
}

impl ServedCatalog {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl Send + FnOnce(&Finder) -> Result<T, ServeError>,
    ) -> PyResult<T> {
        let finder = self.finder.get().or_raise()?;
        py.detach(|| {
            let finder = unpoisoned(finder.read());
            act(finder.as_ref().ok_or_else(closed)?).map_err(refused)
        })
    }

    fn keys<T: Send>(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        act: impl Send + FnOnce(&Finder, Vec<BlockKey>) -> Result<T, ServeError>,
    ) -> PyResult<T> {
        let keys = arguments::keys(keys)?;
        self.with(py, |finder| act(finder, keys))
    }
}

#[pymethods]
impl ServedCatalog {
    #[new]
    #[pyo3(signature = (socket, shape, *, engine, ranks = 1))]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        shape: arguments::Shape,
        engine: String,
        ranks: u32,
    ) -> PyResult<Self> {
        events::start(py)?;
        let shape = shape.check()?;
        let finder = py.detach(|| Finder::connect(socket, shape, engine, ranks));
        Ok(Self { finder: Own::new(RwLock::new(Some(finder.map_err(refused)?))) })
    }

    /// Same as Catalog.namespace().
    fn namespace(&self, py: Python<'_>, namespace: arguments::Namespace) -> PyResult<usize> {
        let namespace = namespace.check()?;
        self.with(py, |finder| finder.namespace(&namespace))
    }

    /// Returns how many leading keys are stored, on all ranks.
    fn lookup(&self, py: Python<'_>, namespace: usize, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.keys(py, keys, |finder, keys| finder.look_up(namespace, keys))
    }

    /// Returns a byte for each key: 1 if it is stored on all ranks, else 0.
    fn are_stored<'py>(
        &self,
        py: Python<'py>,
        namespace: usize,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let flags = self.keys(py, keys, |finder, keys| finder.are_stored(namespace, keys))?;
        Ok(PyBytes::new(py, &flags))
    }

    /// Looks up the longest stored prefix of the keys, and references it until it is released.
    fn acquire(
        &self,
        py: Python<'_>,
        namespace: usize,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<Reference> {
        let found = self.keys(py, keys, |finder, keys| finder.acquire(namespace, keys))?;
        Ok(Reference { id: found.number, files: found.places })
    }

    /// Releases a reference. Call it when all ranks have reported.
    fn release(&self, py: Python<'_>, reference: u64) -> PyResult<()> {
        self.with(py, |finder| {
            finder.release(reference);
            Ok(())
        })
    }

    /// Drops keys for all engines of the namespace, including pinned ones and those in use. Returns
    /// the number of keys that were stored. While the server is away, returns 0 and drops nothing,
    /// then or later.
    fn remove(&self, py: Python<'_>, namespace: usize, keys: &Bound<'_, PyAny>) -> PyResult<u32> {
        self.keys(py, keys, |finder, keys| finder.remove(namespace, keys))
    }

    /// Same as Catalog.pin(), on all ranks. Pins end with the server, too.
    #[pyo3(signature = (namespace, keys, seconds, *, bytes_max = None, wait = false))]
    fn pin(
        &self,
        py: Python<'_>,
        namespace: usize,
        keys: &Bound<'_, PyAny>,
        seconds: u64,
        bytes_max: Option<u64>,
        wait: bool,
    ) -> PyResult<arguments::Pinned> {
        let pin = |finder: &Finder, keys| finder.pin(namespace, keys, seconds, bytes_max, wait);
        self.keys(py, keys, pin).map(arguments::pinned)
    }

    /// Same as Catalog.unpin().
    fn unpin(&self, py: Python<'_>, pin: u64) -> PyResult<bool> {
        self.with(py, |finder| finder.unpin(Some(pin)))
    }

    /// Returns no checksums: the server has them, and compares.
    #[expect(unused_variables, reason = "they are those of Catalog.checksums()")]
    fn checksums<'py>(
        &self,
        py: Python<'py>,
        files: Vec<u64>,
        rank: u32,
    ) -> PyResult<Bound<'py, PyBytes>> {
        self.with(py, |_| Ok(()))?;
        Ok(PyBytes::new(py, b""))
    }

    /// Allocates files for new blocks, on all ranks. Pass the whole prefix, including the stored
    /// part.
    fn begin(&self, py: Python<'_>, namespace: usize, keys: &Bound<'_, PyAny>) -> PyResult<Write> {
        let room = self.keys(py, keys, |finder, keys| finder.reserve(namespace, keys))?;
        Ok(Write {
            id: room.number,
            accepted: room.accepted,
            positions: room.positions,
            files: room.places,
            // The server waits for its journal where that frees files.
            is_short: false,
        })
    }

    /// Same as Catalog.written(). The server has the checksums.
    #[expect(unused_variables, reason = "they are those of Catalog.written()")]
    fn written(
        &self,
        py: Python<'_>,
        write: u64,
        rank: u32,
        checksums: &[u8],
    ) -> PyResult<Option<bool>> {
        self.with(py, |finder| finder.report(write, rank, true))
    }

    /// Same as Catalog.failed().
    fn failed(&self, py: Python<'_>, write: u64, rank: u32) -> PyResult<Option<bool>> {
        self.with(py, |finder| finder.report(write, rank, false))
    }

    /// Makes the blocks of a write visible to lookups of all engines. They are durable when this
    /// returns if that is asked for, or else after the next sync(). Returns False if the server is
    /// away, began anew, or takes no writes any more: then they may be lost.
    #[pyo3(signature = (write, *, durable = false))]
    fn commit(&self, py: Python<'_>, write: u64, durable: bool) -> PyResult<bool> {
        self.with(py, |finder| finder.publish(write, durable))
    }

    /// Ends a write. None of it becomes visible.
    fn abort(&self, py: Python<'_>, write: u64) -> PyResult<()> {
        self.release(py, write)
    }

    /// Does nothing: the server has marked files that could not be read.
    #[expect(unused_variables, reason = "they are those of Catalog.lost()")]
    fn lost(&self, py: Python<'_>, files: Vec<u64>) -> PyResult<()> {
        self.with(py, |_| Ok(()))
    }

    /// Drops all blocks of a namespace for this engine, whose weights change. Other engines keep
    /// them, and share none with this engine from now on. Returns a new epoch, a random number.
    fn bump_epoch(&self, py: Python<'_>, namespace: usize) -> PyResult<u64> {
        let salt = arguments::random()?;
        self.with(py, |finder| finder.renew(namespace, salt))?;
        let [a, b, c, d, ..] = salt;
        Ok(u64::from(u32::from_le_bytes([a, b, c, d])))
    }

    /// Returns the namespace's counts, on the first rank.
    fn usage<'py>(&self, py: Python<'py>, namespace: usize) -> PyResult<Bound<'py, PyAny>> {
        let usage = self.with(py, |finder| finder.usage(namespace))?;
        usage!(py, usage)
    }

    /// Returns the counts of the server's store.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let counts = self.with(py, Finder::counts)?;
        catalog_stats!(py, counts)
    }

    /// Makes all earlier commits durable. While the server is away, does nothing: commits from
    /// before its end may be lost. Those with durable=True are not.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, Finder::sync)
    }

    /// Same as sync(), and leaves the server. Every later call raises ClosedError, except another
    /// close(). In a forked process every call raises it, and close() does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(finder) = self.finder.get() else { return Ok(()) };
        py.detach(|| {
            let finder = unpoisoned(finder.write()).take();
            finder.map_or(Ok(()), |finder| finder.sync()).map_err(refused)
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

/// A rank's half of an engine that uses the store of a server: the calls of a Plane.
///
/// Connects to the server's socket. pool: memory that the server shares, with its file (see
/// SharedMemory); objects are whole pages. engine, ranks: same as for ServedCatalog. rank: the
/// number of this rank.
///
/// While the server is away, begin_load() and begin_store() raise LostError, and end() reports that
/// jobs failed: blocks that were being loaded are zeros then, and no transfer uses them any more.
#[pyclass(frozen)]
#[derive(Debug)]
pub struct ServedPlane {
    mover: Own<RwLock<Option<Mover>>>,
    layers: u32,
    placement: String,
}

impl ServedPlane {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl Send + FnOnce(&Mover) -> Result<T, ServeError>,
    ) -> PyResult<T> {
        let mover = self.mover.get().or_raise()?;
        py.detach(|| {
            let mover = unpoisoned(mover.read());
            act(mover.as_ref().ok_or_else(closed)?).map_err(refused)
        })
    }

    fn begin(
        &self,
        py: Python<'_>,
        direction: Direction,
        files: &[u64],
        blocks: Vec<u32>,
    ) -> PyResult<u64> {
        if files.len() != blocks.len() {
            let (files, blocks) = (files.len(), blocks.len());
            return Err(invalid(format!("{files} files and {blocks} blocks; give one for each")));
        }
        self.with(py, |mover| mover.begin(direction, files, arguments::blocks(blocks)))
    }
}

#[pymethods]
impl ServedPlane {
    #[new]
    #[pyo3(signature = (socket, shape, pool, *, engine, ranks = 1, rank = 0))]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        shape: arguments::Shape,
        pool: arguments::Pool,
        engine: String,
        ranks: u32,
        rank: u32,
    ) -> PyResult<Self> {
        events::start(py)?;
        let (shape, (layout, file)) = (shape.check()?, pool.shared()?);
        let placement = format!("the server at {}", socket.display());
        let part = (engine, ranks, rank);
        let mover = py.detach(|| Mover::connect(socket, shape, part, layout, file));
        let mover = Own::new(RwLock::new(Some(mover.map_err(refused)?)));
        Ok(Self { mover, layers: shape.layers, placement })
    }

    /// False: the server's devices reach the shared memory.
    #[getter]
    fn is_bounced(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |_| Ok(false))
    }

    /// Names the server.
    #[getter]
    fn placement(&self, py: Python<'_>) -> PyResult<&str> {
        self.with(py, |_| Ok(&*self.placement))
    }

    /// True if the server decides when layers start: loads before stores, of all engines.
    #[getter]
    fn is_paced(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |mover| Ok(mover.is_paced()))
    }

    /// Prepares to store blocks of the pool in files of a write. Returns the job.
    fn begin_store(&self, py: Python<'_>, files: Vec<u64>, blocks: Vec<u32>) -> PyResult<u64> {
        self.begin(py, Direction::Write, &files, blocks)
    }

    /// Prepares to load files of a reference into blocks of the pool. Returns the job. The other
    /// arguments are those of Plane.begin_load(), and without effect.
    #[pyo3(signature = (files, blocks, checksums = None, *, request = 0, step = None))]
    #[expect(unused_variables, reason = "they are those of Plane.begin_load()")]
    fn begin_load(
        &self,
        py: Python<'_>,
        files: Vec<u64>,
        blocks: Vec<u32>,
        checksums: Option<&[u8]>,
        request: u64,
        step: Option<u64>,
    ) -> PyResult<u64> {
        self.begin(py, Direction::Read, &files, blocks)
    }

    /// Same as Plane.hurry().
    fn hurry(&self, py: Python<'_>, job: u64) -> PyResult<()> {
        self.with(py, |mover| mover.hurry(job))
    }

    /// Starts layers of a job, by one message.
    #[pyo3(signature = (job, layer, *, layers = 1))]
    fn start(&self, py: Python<'_>, job: u64, layer: u32, layers: u32) -> PyResult<()> {
        let first = arguments::layer(layer, self.layers)?.0;
        self.with(py, |mover| mover.start(job, first..first.saturating_add(layers)))
    }

    /// Waits for a layer that was started. Raises TransferError if it failed, and LostError if the
    /// server died: transfers may use its blocks until end() returns.
    fn wait(&self, py: Python<'_>, job: u64, layer: u32) -> PyResult<()> {
        let layer = arguments::layer(layer, self.layers)?;
        self.with(py, |mover| mover.wait(job, layer.0..layer.0 + 1))
    }

    /// Same as wait(), without blocking: False while the layer is in flight.
    fn poll(&self, py: Python<'_>, job: u64, layer: u32) -> PyResult<bool> {
        let layer = arguments::layer(layer, self.layers)?;
        self.with(py, |mover| mover.poll(job, layer))
    }

    /// Ends jobs: waits for their layers in flight, and makes stored data durable. A layer that was
    /// never started is an error of its job, and so is a server that died.
    fn end(&self, py: Python<'_>, jobs: Vec<u64>) -> PyResult<Vec<Report>> {
        let reports = self.with(py, |mover| mover.end(&jobs))?;
        let report = |report: ripieno_serve::JobReport| Report {
            job: report.job,
            error: report.error,
            is_mismatch: report.is_mismatch,
            checksums: Vec::new(),
        };
        Ok(reports.into_iter().map(report).collect())
    }

    /// Returns files that could not be read since the last call. The server has marked them.
    fn take_lost(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.with(py, |mover| Ok(mover.take_lost()))
    }

    /// Leaves the server, after transfers in flight. Every later call raises ClosedError, except
    /// another close(). In a forked process every call raises it, and close() does nothing.
    fn close(&self, py: Python<'_>) {
        let Ok(mover) = self.mover.get() else { return };
        py.detach(|| drop(unpoisoned(mover.write()).take()));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }
}
