//! The worker's half of a store: `ripieno.Plane`.

use std::path::PathBuf;

use gio_uring::IoStatus;
use kv_schedule::{Flow, Scheduler, StepId, StepShape};
use kv_tier::{RequestId, When};
use objstore::{BlockId, Direction, FileId, JobDone, JobId, Move, Order, StoreError, Ticket};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyDict, PyTuple},
};
use ripieno_stack::{Builder, Own, RankStack, Ranks};

use crate::{
    arguments::{self, OrRaise as _},
    error::invalid,
    events,
};

/// Result of a job.
#[pyclass(frozen)]
#[derive(Debug)]
pub struct Report {
    /// The job.
    #[pyo3(get)]
    pub(crate) job: u64,
    /// The error if any of the data did not arrive, or is not durable; None on success.
    #[pyo3(get)]
    pub(crate) error: Option<String>,
    /// True if the error is a checksum mismatch: the data read is not the data stored.
    #[pyo3(get)]
    pub(crate) is_mismatch: bool,
    pub(crate) checksums: Vec<u32>,
}

#[pymethods]
impl Report {
    /// Checksums of the stored data, to be passed to Catalog.written().
    #[getter]
    fn checksums<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        arguments::word_bytes(py, &self.checksums)
    }
}

/// The data of one rank: its devices and its registered memory. Moves files by number, layer by
/// layer.
///
/// Opens the plane of a rank of the store that prepare() created in this directory. rank: the
/// result of Catalog.rank() or prepare() for it. options: see docs/reference/options.md; those of a
/// new store are ignored, so that prepare() and all ranks can be given the same. Opening uses part
/// of the pool for tests and restores its contents.
///
/// copies: the number of planes of the rank, in processes with pools of their own: what one stores,
/// all load. copy: the number of this one. Only that with 0 stores; the devices of the others must
/// be files.
#[pyclass(frozen)]
#[derive(Debug)]
pub struct Plane {
    stack: Own<RankStack>,
}

impl Plane {
    fn plane(&self) -> PyResult<&objstore::Plane> {
        Ok(self.stack.get().or_raise()?.plane())
    }

    /// Returns the stack of a plane that is open.
    fn open(&self) -> PyResult<&RankStack> {
        let stack = self.stack.get().or_raise()?;
        stack.plane().check_open().or_raise()?;
        Ok(stack)
    }

    fn begin(
        &self,
        py: Python<'_>,
        direction: Direction,
        files: &[u32],
        blocks: &[u32],
        expected: &[u8],
    ) -> PyResult<u64> {
        if files.len() != blocks.len() {
            let (files, blocks) = (files.len(), blocks.len());
            return Err(invalid(format!("{files} files and {blocks} blocks; give one for each")));
        }
        let expected = self.expected(files.len(), expected)?;
        let pairs = files.iter().zip(blocks).zip(0..);
        let moves: Vec<Move> = pairs
            .map(|((file, block), position)| Move {
                file: FileId(*file),
                block: BlockId(*block),
                position,
            })
            .collect();
        let plane = self.plane()?;
        Ok(py.detach(|| plane.begin(direction, &moves, &expected)).or_raise()?.0)
    }

    /// Parses the checksums of `files` files.
    fn expected(&self, files: usize, given: &[u8]) -> PyResult<Vec<u32>> {
        let expected = arguments::words(given)?;
        let (found, words) = (expected.len(), files * self.plane()?.shape().rows() as usize);
        if found != 0 && found != words {
            return Err(invalid(format!("{found} checksums were given for {words} objects")));
        }
        Ok(expected)
    }

    fn ticket(&self, job: u64, layer: u32) -> PyResult<Ticket> {
        let layers = self.plane()?.shape().layers;
        Ok(Ticket { job: JobId(job), layer: arguments::layer(layer, layers)? })
    }
}

#[pymethods]
impl Plane {
    #[new]
    #[pyo3(signature = (path, rank, shape, pool, *, copies = 1, copy = 0, **options))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        rank: arguments::Rank,
        shape: arguments::Shape,
        pool: arguments::Pool,
        copies: u32,
        copy: u32,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        if copy >= copies {
            return Err(invalid(format!("copy {copy} was given; there are {copies}, from 0 on")));
        }
        events::start(py)?;
        let (id, shape, pool) = (rank.check()?, shape.check()?, pool.memory()?);
        let config = arguments::config(path.clone(), options)?;
        let stack = py.detach(|| {
            let ranks = Ranks::open(&path)?;
            let devices = match copy {
                0 => ranks.devices(id.rank)?,
                _ => ranks.devices_beside(id.rank)?,
            };
            let builder = Builder::new(config, shape).on(devices).pool(pool);
            builder.check_memory(id.ranks.saturating_mul(copies))?;
            builder.open_rank(id)
        });
        Ok(Self { stack: Own::new(stack.or_raise()?) })
    }

    /// True if the CPU copies blocks, because the devices cannot address their memory.
    #[getter]
    fn is_bounced(&self) -> PyResult<bool> {
        Ok(self.open()?.plane().is_bounced())
    }

    /// The data path: direct, staged or host.
    #[getter]
    fn route(&self) -> PyResult<&'static str> {
        Ok(self.open()?.placement().route.name())
    }

    /// Describes the data path: where queues and pool are, and why no better path is taken.
    #[getter]
    fn placement(&self) -> PyResult<String> {
        Ok(self.open()?.placement().to_string())
    }

    /// Prepares to store blocks of the pool in files. Returns the job.
    fn begin_store(&self, py: Python<'_>, files: Vec<u32>, blocks: Vec<u32>) -> PyResult<u64> {
        self.begin(py, Direction::Write, &files, &blocks, &[])
    }

    /// Prepares to load files into blocks of the pool. checksums: the result of Catalog.checksums()
    /// for these files; a mismatch fails the job. Returns the job.
    ///
    /// With pacing: step, as given to begin_step(), if its layers need the data; else it is needed
    /// as soon as is fair to the other requests. request: the number of the request that it is for.
    #[pyo3(signature = (files, blocks, checksums = None, *, request = 0, step = None))]
    fn begin_load(
        &self,
        py: Python<'_>,
        files: Vec<u32>,
        blocks: Vec<u32>,
        checksums: Option<&[u8]>,
        request: u64,
        step: Option<u64>,
    ) -> PyResult<u64> {
        let job =
            self.begin(py, Direction::Read, &files, &blocks, checksums.unwrap_or_default())?;
        let (flow, step) = (Flow { tenant: 0, request }, step.map(StepId));
        let plane = self.plane()?;
        py.detach(|| plane.assign(JobId(job), flow, step)).or_raise()?;
        Ok(job)
    }

    /// Announces a step of the engine, whose number is larger than those before it.
    fn begin_step(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        let begin = |it: &mut Scheduler, now| it.announce(StepId(step), StepShape::default(), now);
        let plane = self.plane()?;
        py.detach(|| plane.with_scheduler(|it| begin(it, plane.now().duration())))
            .or_raise()
            .map(|_| ())
    }

    /// Ends a step, which took this many seconds.
    fn end_step(&self, py: Python<'_>, step: u64, seconds: f64) -> PyResult<()> {
        let took = arguments::seconds("seconds", seconds)?.duration();
        let plane = self.plane()?;
        py.detach(|| {
            plane.with_scheduler(|it| it.step_ends(StepId(step)))?;
            plane.with_lookahead(|it| it.iteration(took))
        })
        .or_raise()
        .map(|_| ())
    }

    /// Starts the layers of a job that wait for their turn, and later ones at once.
    fn hurry(&self, py: Python<'_>, job: u64) -> PyResult<()> {
        let plane = self.plane()?;
        py.detach(|| plane.hurry(JobId(job))).or_raise()
    }

    /// Announces a request that will load these files after about this many steps. With pacing and
    /// dram, they are read into that memory in time, as long as that delays nothing else.
    /// Calling it again updates the time, and retries files that were late or found no room.
    /// checksums: same as for begin_load().
    #[pyo3(signature = (request, files, checksums = None, steps = 1))]
    fn announce(
        &self,
        py: Python<'_>,
        request: u64,
        files: Vec<u32>,
        checksums: Option<&[u8]>,
        steps: u32,
    ) -> PyResult<()> {
        let expected = self.expected(files.len(), checksums.unwrap_or_default())?;
        let files: Vec<FileId> = files.into_iter().map(FileId).collect();
        let (request, when) = (RequestId(request), When::In(steps));
        let plane = self.plane()?;
        py.detach(|| plane.announce(request, &files, &expected, when)).or_raise()
    }

    /// Drops files from the memory of dram: copy 0 has stored other blocks in them.
    fn forget(&self, py: Python<'_>, files: Vec<u32>) -> PyResult<()> {
        let files: Vec<FileId> = files.into_iter().map(FileId).collect();
        let plane = self.plane()?;
        py.detach(|| plane.forget(&files)).or_raise()
    }

    /// Ends reading ahead for an announced request, which runs now or else was aborted.
    fn withdraw(&self, py: Python<'_>, request: u64, runs: bool) -> PyResult<()> {
        let plane = self.plane()?;
        py.detach(|| plane.withdraw(RequestId(request), runs)).or_raise()
    }

    /// Starts a layer of a job. Blocks while the maximum number of layers is in flight; with
    /// pacing, it waits for its turn instead.
    ///
    /// stream: the handle of a CUDA stream of the pool's GPU
    /// (torch.cuda.current_stream().cuda_stream): the layer's blocks are not accessed before all
    /// work enqueued there so far is done. It must not be destroyed before the plane is closed.
    #[pyo3(signature = (job, layer, stream = None))]
    fn start(&self, py: Python<'_>, job: u64, layer: u32, stream: Option<u64>) -> PyResult<()> {
        let ticket = self.ticket(job, layer)?;
        let order = stream.map_or(Order::Unordered, |at| Order::AfterStream(arguments::stream(at)));
        let plane = self.plane()?;
        py.detach(|| plane.start(ticket, order)).or_raise()
    }

    /// Makes later work on a CUDA stream wait for a layer that was started, and returns
    /// immediately. The stream continues even if the layer fails: end() reports the failure.
    fn join(&self, py: Python<'_>, job: u64, layer: u32, stream: u64) -> PyResult<()> {
        let (ticket, stream) = (self.ticket(job, layer)?, arguments::stream(stream));
        let plane = self.plane()?;
        py.detach(|| plane.join(ticket, stream)).or_raise()
    }

    /// Waits for a layer that was started. Raises TransferError if it failed; then the contents of
    /// the layer's blocks are undefined. Either way, no transfer uses them any more.
    fn wait(&self, py: Python<'_>, job: u64, layer: u32) -> PyResult<()> {
        let ticket = self.ticket(job, layer)?;
        let plane = self.plane()?;
        py.detach(|| plane.wait(ticket)).or_raise().map(|_| ())
    }

    /// Same as wait(), without blocking: False while the layer is in flight.
    fn poll(&self, py: Python<'_>, job: u64, layer: u32) -> PyResult<bool> {
        let ticket = self.ticket(job, layer)?;
        let plane = self.plane()?;
        Ok(py.detach(|| plane.poll(ticket)).or_raise()?.is_some())
    }

    /// Ends jobs: waits for their layers in flight, and flushes the devices once for all stores
    /// among them. A layer that was never started is an error of its job. After a failed flush, all
    /// storing jobs have an error, and begin_store() raises ReadOnlyError: open the plane again.
    fn end(&self, py: Python<'_>, jobs: Vec<u64>) -> PyResult<Vec<Report>> {
        let jobs: Vec<JobId> = jobs.into_iter().map(JobId).collect();
        let plane = self.plane()?;
        let reports = py.detach(|| plane.end(&jobs)).or_raise()?;
        let report = |report: JobDone| Report {
            job: report.job.0,
            is_mismatch: matches!(
                &report.failure,
                Some(StoreError::Transfer { failure }) if failure.status == IoStatus::Checksum
            ),
            error: report.failure.map(|error| error.to_string()),
            checksums: report.checksums,
        };
        Ok(reports.into_iter().map(report).collect())
    }

    /// Returns the files that could not be read, or whose checksums did not match, since the last
    /// call: for Catalog.lost().
    fn take_lost(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        let plane = self.plane()?;
        let lost = py.detach(|| plane.take_lost()).or_raise()?;
        Ok(lost.into_iter().map(|file| file.0).collect())
    }

    /// Returns the device events since the last call: pairs of the device's number and a word
    /// (requested, pcie-error, health, error, namespaces-changed, firmware-activating, paused,
    /// resumed, other). Calling it is optional: the plane reacts to events itself. When the owner
    /// of a drive wants it back (requested), it waits for transfers in flight and closes itself;
    /// later calls raise ClosedError.
    fn poll_events(&self, py: Python<'_>) -> PyResult<Vec<(u32, &'static str)>> {
        let plane = self.plane()?;
        Ok(arguments::events(&py.detach(|| plane.poll_events()).or_raise()?))
    }

    /// Returns the counters since opening, as for a Store, of what a plane has.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let plane = self.plane()?;
        arguments::samples(py, py.detach(|| ripieno_stack::samples(plane, None)).or_raise()?)
    }

    /// Waits for transfers in flight, and releases the directory and the pool. Every later call
    /// raises ClosedError, except another close(). In a forked process every call raises it, and
    /// close() does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(stack) = self.stack.get() else { return Ok(()) };
        py.detach(|| stack.close()).or_raise()
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }
}
