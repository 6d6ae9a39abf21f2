//! The halves of an engine that uses a server's store: `ripieno.ServedCatalog` and
//! `ripieno.ServedPlane`.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, RwLock},
};

use objstore::{CatalogCounts, Direction, Usage};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyTuple},
};
use ripieno_serve::{
    Client, Prefix, RefusalKind, Request, Reservation, ServeError, SpaceId, protocol::Member,
};
use ripieno_stack::Own;

use crate::{
    arguments::{self, OrRaise as _, dataclass, unpoisoned},
    catalog::{Reference, Write},
    error::{closed, invalid, refused},
    events,
    plane::Report,
};

/// Returns the shape of the blocks of the server that listens on a socket.
#[pyfunction]
pub fn server_shape(py: Python<'_>, socket: PathBuf) -> PyResult<Bound<'_, PyAny>> {
    let shape = py.detach(|| Client::shape_at(&socket)).or_raise()?;
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
    scheduler: Own<RwLock<Option<Scheduler>>>,
}

/// A client, and what it holds, by number.
#[derive(Debug)]
struct Scheduler {
    client: Client,
    found: Mutex<HashMap<u64, Prefix>>,
    reserved: Mutex<HashMap<u64, Arc<Reservation>>>,
}

/// Returns true if the store takes no writes any more.
fn is_read_only(error: &ServeError) -> bool {
    matches!(error, ServeError::Refused { kind: RefusalKind::ReadOnly, .. })
}

/// Acts on a value that was not closed.
fn with<O: Send + Sync, T: Send>(
    py: Python<'_>,
    open: &Own<RwLock<Option<O>>>,
    act: impl Send + FnOnce(&O) -> Result<T, ServeError>,
) -> PyResult<T> {
    let open = open.get().or_raise()?;
    py.detach(|| act(unpoisoned(open.read()).as_ref().ok_or_else(closed)?).or_raise())
}

impl ServedCatalog {
    /// Makes a call whose answer is nothing while the server is away.
    fn ask<T: Default + Send>(
        &self,
        py: Python<'_>,
        act: impl Send + FnOnce(&Scheduler) -> Result<T, ServeError>,
    ) -> PyResult<T> {
        with(py, &self.scheduler, |scheduler| match act(scheduler) {
            Err(error) if error.is_away() => Ok(T::default()),
            answered => answered,
        })
    }

    fn report(
        &self,
        py: Python<'_>,
        write: u64,
        rank: u32,
        is_filled: bool,
    ) -> PyResult<Option<bool>> {
        with(py, &self.scheduler, |it| {
            let reservation = unpoisoned(it.reserved.lock()).get(&write).cloned();
            let Some(reservation) = reservation else { return Ok(Some(false)) };
            let reported = match reservation.report(rank, is_filled) {
                Err(error) if error.is_away() => Some(false),
                reported => reported?,
            };
            if reported == Some(false) {
                unpoisoned(it.reserved.lock()).remove(&write);
            }
            Ok(reported)
        })
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
        let (shape, member) = (shape.check()?, Member { engine, ranks, rank: None, copy: 0 });
        let client = py.detach(|| Client::join(socket, shape, Some(member), None)).or_raise()?;
        let (found, reserved) = (Mutex::default(), Mutex::default());
        let scheduler = Scheduler { client, found, reserved };
        Ok(Self { scheduler: Own::new(RwLock::new(Some(scheduler))) })
    }

    /// Same as Catalog.namespace().
    fn namespace(&self, py: Python<'_>, namespace: arguments::Namespace) -> PyResult<usize> {
        let namespace = namespace.check()?;
        with(py, &self.scheduler, |it| it.client.namespace(&namespace)).map(|space| space.0)
    }

    /// Returns how many leading keys are stored, on all ranks.
    fn lookup(&self, py: Python<'_>, namespace: usize, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let keys = arguments::keys(keys)?;
        self.ask(py, |it| it.client.peek(SpaceId(namespace), &keys))
    }

    /// Returns, for each key, True if it is stored on all ranks.
    fn are_stored(
        &self,
        py: Python<'_>,
        namespace: usize,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<bool>> {
        let keys = arguments::keys(keys)?;
        let mut found = self.ask(py, |it| it.client.are_stored(SpaceId(namespace), &keys))?;
        // While the server is away.
        found.resize(keys.len(), false);
        Ok(found)
    }

    /// Looks up the longest stored prefix of the keys, and references it until it is released.
    fn acquire(
        &self,
        py: Python<'_>,
        namespace: usize,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<Reference> {
        let keys = arguments::keys(keys)?;
        self.ask(py, |it| {
            let found = it.client.lookup(SpaceId(namespace), &keys)?;
            let (id, files) = (found.number(), found.places());
            unpoisoned(it.found.lock()).insert(id, found);
            Ok(Reference { id, files })
        })
    }

    /// Releases a reference. Call it when all ranks have reported.
    fn release(&self, py: Python<'_>, reference: u64) -> PyResult<()> {
        with(py, &self.scheduler, |it| {
            let released = unpoisoned(it.found.lock()).remove(&reference);
            // Makes the call.
            drop(released);
            Ok(())
        })
    }

    /// Drops keys for all engines of the namespace, including pinned ones and those in use. Returns
    /// the number of keys that were stored. While the server is away, returns 0 and drops nothing,
    /// then or later.
    fn remove(&self, py: Python<'_>, namespace: usize, keys: &Bound<'_, PyAny>) -> PyResult<u32> {
        let keys = arguments::keys(keys)?;
        self.ask(py, |it| it.client.remove(SpaceId(namespace), &keys))
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
        let keys = arguments::keys(keys)?;
        let space = SpaceId(namespace);
        let pin = |it: &Scheduler| it.client.pin(space, &keys, seconds, bytes_max, wait);
        let away = || ("missing", Some("the server is away".to_owned()), None);
        Ok(self.ask(py, |it| pin(it).map(Some))?.map_or_else(away, arguments::pinned))
    }

    /// Same as Catalog.unpin().
    fn unpin(&self, py: Python<'_>, pin: u64) -> PyResult<bool> {
        self.ask(py, |it| it.client.unpin(Some(pin)))
    }

    /// Returns no checksums: the server has them, and compares.
    #[expect(unused_variables, reason = "they are those of Catalog.checksums()")]
    fn checksums<'py>(
        &self,
        py: Python<'py>,
        files: Vec<u64>,
        rank: u32,
    ) -> PyResult<Bound<'py, PyBytes>> {
        with(py, &self.scheduler, |_| Ok(()))?;
        Ok(PyBytes::new(py, b""))
    }

    /// Allocates files for new blocks, on all ranks. Pass the whole prefix, including the stored
    /// part.
    fn begin(&self, py: Python<'_>, namespace: usize, keys: &Bound<'_, PyAny>) -> PyResult<Write> {
        let keys = arguments::keys(keys)?;
        self.ask(py, |it| {
            let room = match it.client.reserve(SpaceId(namespace), &keys) {
                Err(error) if is_read_only(&error) => return Ok(Write::default()),
                room => room?,
            };
            let (id, accepted, files) = (room.number(), room.accepted(), room.places());
            let positions = room.positions().to_vec();
            unpoisoned(it.reserved.lock()).insert(id, Arc::new(room));
            // The server waits for its journal where that frees files.
            Ok(Write { id, accepted, positions, files, is_short: false })
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
        self.report(py, write, rank, true)
    }

    /// Same as Catalog.failed().
    fn failed(&self, py: Python<'_>, write: u64, rank: u32) -> PyResult<Option<bool>> {
        self.report(py, write, rank, false)
    }

    /// Makes the blocks of a write visible to lookups of all engines. They are durable when this
    /// returns if that is asked for, or else after the next sync(). Returns False if the server is
    /// away, began anew, or takes no writes any more: then they may be lost.
    #[pyo3(signature = (write, *, durable = false))]
    fn commit(&self, py: Python<'_>, write: u64, durable: bool) -> PyResult<bool> {
        with(py, &self.scheduler, |it| {
            let reservation = unpoisoned(it.reserved.lock()).remove(&write);
            let Some(reservation) = reservation else { return Ok(false) };
            match reservation.publish(durable) {
                Err(error) if error.is_away() || is_read_only(&error) => Ok(false),
                published => published.map(|()| true),
            }
        })
    }

    /// Ends a write. None of it becomes visible.
    fn abort(&self, py: Python<'_>, write: u64) -> PyResult<()> {
        with(py, &self.scheduler, |it| {
            let ended = unpoisoned(it.reserved.lock()).remove(&write);
            // Makes the call.
            drop(ended);
            Ok(())
        })
    }

    /// Does nothing: the server has marked files that could not be read.
    #[expect(unused_variables, reason = "they are those of Catalog.lost()")]
    fn lost(&self, py: Python<'_>, files: Vec<u64>) -> PyResult<()> {
        with(py, &self.scheduler, |_| Ok(()))
    }

    /// Drops all blocks of a namespace for this engine, whose weights change. Other engines keep
    /// them, and share none with this engine from now on. Returns a new epoch, a random number.
    fn bump_epoch(&self, py: Python<'_>, namespace: usize) -> PyResult<u64> {
        let salt = arguments::random()?;
        with(py, &self.scheduler, |it| it.client.renew(SpaceId(namespace), salt))?;
        let [a, b, c, d, ..] = salt;
        Ok(u64::from(u32::from_le_bytes([a, b, c, d])))
    }

    /// Returns the namespace's counts, on the first rank.
    fn usage<'py>(&self, py: Python<'py>, namespace: usize) -> PyResult<Bound<'py, PyAny>> {
        let usage: Usage = self.ask(py, |it| it.client.usage(SpaceId(namespace)))?;
        arguments::counts(py, "Usage", usage)
    }

    /// Returns the counts of the server's store.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let counts: CatalogCounts = self.ask(py, |it| it.client.counts())?;
        arguments::counts(py, "CatalogStats", counts)
    }

    /// Makes all earlier commits durable. While the server is away, does nothing: commits from
    /// before its end may be lost. Those with durable=True are not.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.ask(py, |it| it.client.sync())
    }

    /// Same as sync(), and leaves the server. Every later call raises ClosedError, except another
    /// close(). In a forked process every call raises it, and close() does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(scheduler) = self.scheduler.get() else { return Ok(()) };
        py.detach(|| {
            let scheduler = unpoisoned(scheduler.write()).take();
            match scheduler.map_or(Ok(()), |it| it.client.sync()) {
                Err(error) if !error.is_away() => Err(refused(error)),
                _ => Ok(()),
            }
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
/// SharedMemory), whose objects are whole pages; or memory of a GPU, which the server maps and has
/// to reach: one allocation of cudaMalloc. engine, ranks: same as for ServedCatalog. rank: the
/// number of this rank. copy: that of this client, if several of a rank load the same blocks; one
/// of them stores them.
///
/// While the server is away, begin_load() and begin_store() raise LostError, and end() reports that
/// jobs failed: blocks that were being loaded are zeros then, or undefined on a GPU, and no
/// transfer uses them any more.
#[pyclass(frozen)]
#[derive(Debug)]
pub struct ServedPlane {
    rank: Own<RwLock<Option<Rank>>>,
    layers: u32,
    placement: String,
}

/// A client, and its jobs.
#[derive(Debug)]
struct Rank {
    client: Client,
    /// By number.
    jobs: Mutex<HashMap<u64, Arc<Request>>>,
    /// Files that could not be read.
    lost: Mutex<Vec<u64>>,
}

/// A job without blocks. No request has this number.
const NOTHING: u64 = 0;

impl Rank {
    fn job(&self, job: u64) -> Result<Arc<Request>, ServeError> {
        let found = unpoisoned(self.jobs.lock()).get(&job).cloned();
        found.ok_or(ServeError::Argument { what: "job", given: job, expected: 0 })
    }

    fn end(&self, jobs: &[u64]) -> Result<Vec<Report>, ServeError> {
        let (empty, moving): (Vec<u64>, Vec<u64>) = jobs.iter().partition(|job| **job == NOTHING);
        let requests: Vec<Arc<Request>> =
            moving.iter().map(|job| self.job(*job)).collect::<Result<_, _>>()?;
        moving.iter().for_each(|job| drop(unpoisoned(self.jobs.lock()).remove(job)));
        let ended = self.client.end(&requests.iter().map(|it| &**it).collect::<Vec<&Request>>())?;
        let lost = requests.iter().zip(&ended);
        let lost = lost.filter_map(|(request, ended)| Some(request.place(ended.lost?)));
        unpoisoned(self.lost.lock()).extend(lost);
        let report =
            |(job, error, is_mismatch)| Report { job, error, is_mismatch, checksums: Vec::new() };
        let ended = ended.into_iter().map(|ended| (ended.error, ended.is_mismatch));
        let moved = moving.into_iter().zip(ended).map(|(job, (error, is))| (job, error, is));
        Ok(empty.into_iter().map(|job| (job, None, false)).chain(moved).map(report).collect())
    }
}

impl ServedPlane {
    /// Acts on the request of a job; without blocks, that is done.
    fn moving<T: Send>(
        &self,
        py: Python<'_>,
        job: u64,
        done: T,
        act: impl Send + FnOnce(&Request) -> Result<T, ServeError>,
    ) -> PyResult<T> {
        with(py, &self.rank, |rank| if job == NOTHING { Ok(done) } else { act(&*rank.job(job)?) })
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
        with(py, &self.rank, |rank| {
            if files.is_empty() {
                return Ok(NOTHING);
            }
            let request = rank.client.begin(direction, files, arguments::blocks(blocks))?;
            let job = request.number();
            unpoisoned(rank.jobs.lock()).insert(job, Arc::new(request));
            Ok(job)
        })
    }
}

#[pymethods]
impl ServedPlane {
    #[new]
    #[pyo3(signature = (socket, shape, pool, *, engine, ranks = 1, rank = 0, copy = 0))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        shape: arguments::Shape,
        pool: arguments::Pool,
        engine: String,
        ranks: u32,
        rank: u32,
        copy: u32,
    ) -> PyResult<Self> {
        events::start(py)?;
        let (shape, pool) = (shape.check()?, pool.shared()?);
        let placement = format!("the server at {}", socket.display());
        let member = Some(Member { engine, ranks, rank: Some(rank), copy });
        let client = py.detach(|| pool.join(socket, shape, member));
        let (client, jobs, lost) = (client.or_raise()?, Mutex::default(), Mutex::default());
        let rank = Own::new(RwLock::new(Some(Rank { client, jobs, lost })));
        Ok(Self { rank, layers: shape.layers, placement })
    }

    /// False: the server's devices reach the shared memory.
    #[getter]
    fn is_bounced(&self, py: Python<'_>) -> PyResult<bool> {
        with(py, &self.rank, |_| Ok(false))
    }

    /// Names the server.
    #[getter]
    fn placement(&self, py: Python<'_>) -> PyResult<&str> {
        with(py, &self.rank, |_| Ok(&*self.placement))
    }

    /// True if the server decides when layers start: loads before stores, of all engines.
    #[getter]
    fn is_paced(&self, py: Python<'_>) -> PyResult<bool> {
        with(py, &self.rank, |rank| Ok(rank.client.is_paced()))
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
        self.moving(py, job, (), Request::hurry)
    }

    /// Starts layers of a job, by one message. stream: handle of a CUDA stream, as for
    /// Plane.start(), if the pool is on a GPU: nothing accesses the blocks before the stream is
    /// past what is enqueued on it now. It does not wait for the layers: wait() does.
    #[pyo3(signature = (job, layer, stream = None, *, layers = 1))]
    fn start(
        &self,
        py: Python<'_>,
        job: u64,
        layer: u32,
        stream: Option<u64>,
        layers: u32,
    ) -> PyResult<()> {
        let first = arguments::layer(layer, self.layers)?.0;
        let layers = first..first.saturating_add(layers);
        self.moving(py, job, (), |request| match stream {
            Some(stream) => request.start_after(layers, arguments::stream(stream)),
            None => request.start_all(layers),
        })
    }

    /// Waits for a layer that was started. Raises TransferError if it failed, and LostError if the
    /// server died: transfers may use its blocks until end() returns.
    fn wait(&self, py: Python<'_>, job: u64, layer: u32) -> PyResult<()> {
        let layer = arguments::layer(layer, self.layers)?;
        self.moving(py, job, (), |request| request.wait(layer))
    }

    /// Same as wait(), without blocking: False while the layer is in flight.
    fn poll(&self, py: Python<'_>, job: u64, layer: u32) -> PyResult<bool> {
        let layer = arguments::layer(layer, self.layers)?;
        self.moving(py, job, true, |request| request.poll(layer))
    }

    /// Ends jobs: waits for their layers in flight, and makes stored data durable. A layer that was
    /// never started is an error of its job, and so is a server that died.
    fn end(&self, py: Python<'_>, jobs: Vec<u64>) -> PyResult<Vec<Report>> {
        with(py, &self.rank, |rank| rank.end(&jobs))
    }

    /// Returns files that could not be read since the last call. The server has marked them.
    fn take_lost(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        with(py, &self.rank, |rank| Ok(std::mem::take(&mut *unpoisoned(rank.lost.lock()))))
    }

    /// Leaves the server, after transfers in flight. Every later call raises ClosedError, except
    /// another close(). In a forked process every call raises it, and close() does nothing.
    fn close(&self, py: Python<'_>) {
        let Ok(rank) = self.rank.get() else { return };
        py.detach(|| drop(unpoisoned(rank.write()).take()));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }
}
