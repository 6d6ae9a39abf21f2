//! The scheduler's half of a store: `ripieno.Catalog`.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::{Arc, Mutex, RwLock},
    time::Duration,
};

use nvme_driver::{Clock, MonotonicClock};
use objstore::{
    DurableCatalog, FileId, KeyState, NamespaceId, NewPin, PinLimits, ReferenceId, Reported,
    StoreError, StoreId, StoreOptions, WriteId,
};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyDict, PyTuple},
};
use ripieno_stack::{CatalogStack, Own, Ranks, RanksOptions};

use crate::{
    arguments::{self, OrRaise as _, unpoisoned},
    error::{closed, invalid, of_store, refused_in},
    events,
};

/// Creates a store for several processes in a directory, unless there is one: its catalog, and a
/// part for each rank. The first process creates it; the others wait.
///
/// options: see docs/reference/options.md; those of an open store are ignored. capacity is that of
/// all ranks together. devices: files of each rank, or drives, the same number for each rank.
/// Returns the identity of each rank, which opens its plane.
#[pyfunction]
#[pyo3(signature = (path, shape, *, ranks = 1, **options))]
pub fn prepare<'py>(
    py: Python<'py>,
    path: PathBuf,
    shape: arguments::Shape,
    ranks: u32,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    events::start(py)?;
    let shape = shape.check()?;
    let id = StoreId(arguments::random()?);
    let config = arguments::config(path.clone(), options)?;
    let codec = config.codec.unwrap_or_default();
    let options = RanksOptions { id, ranks, shape, codec, media: arguments::media(config)? };
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let made = py.detach(|| Ranks::prepare(&path, &options, &clock)).or_raise()?;
    (0..ranks).map(|rank| arguments::rank_id(py, made.rank(rank))).collect()
}

/// Blocks that were found: they are not evicted until the reference is released.
#[pyclass(frozen, get_all)]
#[derive(Debug, Default)]
pub struct Reference {
    /// Identifies the reference to release().
    pub(crate) id: u64,
    /// The file of each key found, in order.
    pub(crate) files: Vec<u64>,
}

/// Files for new blocks.
#[pyclass(frozen, get_all)]
#[derive(Debug, Default)]
pub struct Write {
    /// Identifies the write in written(), failed(), commit() and abort().
    pub(crate) id: u64,
    /// Number of leading keys that lookups will find after the commit.
    pub(crate) accepted: u32,
    /// Positions, among these, of the keys whose blocks are to be written.
    pub(crate) positions: Vec<u32>,
    /// The files to write them to.
    pub(crate) files: Vec<u64>,
    /// True if more keys would have been accepted with more free files.
    pub(crate) is_short: bool,
}

/// The scheduler's half of a store: keys, files and references, with the journal. The data belongs
/// to the planes of the workers. Opens the catalog of the store that prepare() created in this
/// directory. Once the journal has failed, changes that it would record raise ReadOnlyError.
#[pyclass(frozen)]
#[derive(Debug)]
pub struct Catalog {
    stack: Own<RwLock<Option<CatalogStack>>>,
    ranks: Ranks,
    /// Those that it has given the numbers of.
    namespaces: Mutex<BTreeSet<Arc<NamespaceId>>>,
}

impl Catalog {
    fn with<T>(&self, act: impl FnOnce(&DurableCatalog) -> PyResult<T>) -> PyResult<T> {
        let stack = self.stack.get().or_raise()?;
        act(unpoisoned(stack.read()).as_ref().ok_or_else(closed)?.catalog())
    }

    /// Reads the catalog, or changes what ends with the process.
    fn read<T>(
        &self,
        act: impl FnOnce(&mut objstore::Catalog) -> Result<T, objstore::CatalogError>,
    ) -> PyResult<T> {
        self.with(|durable| durable.with(act).map_err(of_store))
    }

    /// Changes what is to become durable: refused when nothing does any more.
    fn change<T>(
        &self,
        act: impl FnOnce(&mut objstore::Catalog) -> Result<T, objstore::CatalogError>,
    ) -> PyResult<T> {
        self.with(|durable| {
            durable.change(|catalog| act(catalog).map_err(StoreError::from)).map_err(of_store)
        })
    }
}

fn reported(reported: Reported) -> Option<bool> {
    match reported {
        Reported::Waiting => None,
        Reported::All => Some(true),
        Reported::Failed => Some(false),
    }
}

#[pymethods]
impl Catalog {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        events::start(py)?;
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
        let options = StoreOptions::default();
        let ranks = py.detach(|| Ranks::open(&path)).or_raise()?;
        let stack = py.detach(|| CatalogStack::open(&ranks, &options, &clock));
        let stack = stack.map_err(|error| refused_in(error, &ranks.catalog_dir()))?;
        let stack = Own::new(RwLock::new(Some(stack)));
        Ok(Self { stack, ranks, namespaces: Mutex::default() })
    }

    /// Returns a rank's identity, which opens its plane. Send it to its worker.
    fn rank<'py>(&self, py: Python<'py>, rank: u32) -> PyResult<Bound<'py, PyAny>> {
        self.with(|_| Ok(()))?;
        let id = self.ranks.rank(rank);
        if rank >= id.ranks {
            return Err(invalid(format!("rank {rank} was asked for; there are {}", id.ranks)));
        }
        arguments::rank_id(py, id)
    }

    /// Returns the number of a namespace, and registers it if it is new. It is valid until the
    /// catalog is closed.
    fn namespace(&self, namespace: arguments::Namespace) -> PyResult<u32> {
        let namespace = namespace.check()?;
        let kept = self.change(|catalog| {
            let id = catalog.namespace(&namespace)?;
            catalog.keep(id)
        });
        let kept = kept.or_else(|error| {
            // A catalog that takes no writes can still be read.
            let digest = namespace.digest();
            let known = self.read(|catalog| {
                let found = catalog.namespaces().find(|(_, _, other)| *other == digest);
                found.map(|(id, ..)| catalog.keep(id)).transpose()
            })?;
            known.ok_or(error)
        })?;
        let id = kept.0;
        unpoisoned(self.namespaces.lock()).insert(kept);
        Ok(id)
    }

    /// Returns how many leading keys are stored. Has no side effects, and never blocks.
    fn lookup(&self, namespace: u32, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let keys = arguments::keys(keys)?;
        self.read(|catalog| catalog.lookup(NamespaceId(namespace), &keys))
    }

    /// Returns, for each key, True if it is stored. Has no side effects, and never blocks.
    fn are_stored(&self, namespace: u32, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let keys = arguments::keys(keys)?;
        self.read(|catalog| catalog.are_stored(NamespaceId(namespace), &keys))
    }

    /// Returns what is known of a key: "stored", "saving", "evicted" (or not admitted, lately),
    /// "elsewhere" (stored in another namespace), or "unknown".
    fn state_of(&self, namespace: u32, key: &Bound<'_, PyAny>) -> PyResult<&'static str> {
        let keys = arguments::keys(key)?;
        let [key] = keys[..] else { return Err(invalid("key: one was expected")) };
        let state = self.read(|catalog| catalog.state_of(NamespaceId(namespace), &key))?;
        Ok(match state {
            KeyState::Stored => "stored",
            KeyState::Writing => "saving",
            KeyState::Evicted => "evicted",
            KeyState::Elsewhere => "elsewhere",
            KeyState::Unknown => "unknown",
        })
    }

    /// Returns the files of the longest stored prefix of the keys, for Plane.prefetch. Takes no
    /// reference: the files may be reused immediately.
    fn files(&self, namespace: u32, keys: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let keys = arguments::keys(keys)?;
        self.read(|catalog| {
            let held = catalog.hold_prefix(NamespaceId(namespace), &keys)?;
            catalog.release(held.id)?;
            Ok(held.files.iter().map(|file| file.0).collect())
        })
    }

    /// Looks up the longest stored prefix of the keys, and references it until it is released.
    fn acquire(&self, namespace: u32, keys: &Bound<'_, PyAny>) -> PyResult<Reference> {
        let keys = arguments::keys(keys)?;
        let found = self.read(|catalog| catalog.acquire(NamespaceId(namespace), &keys))?;
        let files = found.files.iter().map(|file| u64::from(file.0)).collect();
        Ok(Reference { id: found.id.0, files })
    }

    /// Releases a reference. Call it when all ranks have reported.
    fn release(&self, reference: u64) -> PyResult<()> {
        self.read(|catalog| catalog.release(ReferenceId(reference)))
    }

    /// Returns the checksums of these files' objects on a rank, for Plane.begin_load. The files
    /// must be referenced.
    fn checksums<'py>(
        &self,
        py: Python<'py>,
        files: Vec<u32>,
        rank: u32,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let RankRows { rows, ranks, known } = self.rows();
        if rank >= ranks {
            return Err(invalid(format!("rank {rank} was asked for; there are {ranks}")));
        }
        if let Some(file) = files.iter().find(|file| **file >= known) {
            return Err(invalid(format!("file {file} was given; there are {known}")));
        }
        let words = self.with(|durable| {
            durable.with(|catalog| {
                let of_rank = |file: &u32| {
                    let all = catalog.checksums(FileId(*file));
                    all.chunks(rows).nth(rank as usize).unwrap_or_default()
                };
                Ok(files.iter().flat_map(of_rank).copied().collect::<Vec<u32>>())
            })
        })?;
        Ok(arguments::word_bytes(py, &words))
    }

    /// Allocates files for new blocks. Pass the whole prefix, including the stored part.
    fn begin(&self, namespace: u32, keys: &Bound<'_, PyAny>) -> PyResult<Write> {
        let keys = arguments::keys(keys)?;
        let write = self.change(|catalog| catalog.begin(NamespaceId(namespace), &keys))?;
        let own = (0..).zip(&write.positions).filter(|(_, position)| position.own);
        let (positions, files) = own.map(|(at, position)| (at, u64::from(position.file.0))).unzip();
        let (id, accepted) = (write.id.0, write.positions.len() as u32);
        Ok(Write { id, accepted, positions, files, is_short: write.is_short })
    }

    /// Records that a rank has written and flushed its part, with the checksums of its report.
    /// Returns None while other ranks have not reported, True if the write can be committed, and
    /// False if it has ended because a rank failed.
    fn written(&self, write: u64, rank: u32, checksums: &[u8]) -> PyResult<Option<bool>> {
        let words = arguments::words(checksums)?;
        self.read(|catalog| catalog.written(WriteId(write), rank, &words)).map(reported)
    }

    /// Records that a rank failed to write its part, and that none of it is in flight. Returns the
    /// same as written().
    fn failed(&self, write: u64, rank: u32) -> PyResult<Option<bool>> {
        self.read(|catalog| catalog.failed(WriteId(write), rank)).map(reported)
    }

    /// Makes the blocks of a write visible to lookups. They are durable after the next sync().
    /// Returns True.
    fn commit(&self, write: u64) -> PyResult<bool> {
        self.change(|catalog| catalog.commit(WriteId(write))).map(|_| true)
    }

    /// Ends a write that has nothing in flight on any rank. None of it becomes visible.
    fn abort(&self, write: u64) -> PyResult<()> {
        self.read(|catalog| catalog.abort(WriteId(write)))
    }

    /// Marks files that a plane could not read: their keys are misses from now on.
    fn lost(&self, files: Vec<u32>) -> PyResult<()> {
        self.read(|catalog| {
            files.into_iter().for_each(|file| catalog.lost(FileId(file)));
            Ok(())
        })
    }

    /// Protects the leading ones of these keys that are stored from eviction, for so many seconds,
    /// until their namespace is cleared, or the catalog closed. bytes_max: a limit of their bytes.
    /// wait: the others are protected when they are stored. Returns the outcome (accepted, clipped,
    /// deferred, rejected or missing), the reason of another than the first, and the pin's number.
    #[pyo3(signature = (namespace, keys, seconds, *, bytes_max = None, wait = false))]
    fn pin(
        &self,
        namespace: u32,
        keys: &Bound<'_, PyAny>,
        seconds: u64,
        bytes_max: Option<u64>,
        wait: bool,
    ) -> PyResult<arguments::Pinned> {
        let (namespaces, ttl) = (&[NamespaceId(namespace)], Duration::from_secs(seconds));
        let keys = &arguments::keys(keys)?[..];
        let new = NewPin { owner: 0, namespaces, keys, ttl, bytes_max, wait };
        let limits = PinLimits::default();
        self.with(|durable| durable.pin_for(&new, &limits).map_err(of_store)).map(arguments::pinned)
    }

    /// Ends a pin. Returns False if there is none with this number, or not any more.
    fn unpin(&self, pin: u64) -> PyResult<bool> {
        self.read(|catalog| Ok(catalog.end_pins(Some(pin), None).is_some()))
    }

    /// Drops those of these keys that are stored. Returns their number.
    fn remove(&self, namespace: u32, keys: &Bound<'_, PyAny>) -> PyResult<u32> {
        let keys = arguments::keys(keys)?;
        self.change(|catalog| catalog.remove(NamespaceId(namespace), &keys))
    }

    /// Returns the keys of these namespaces that were evicted, removed or lost since the last call;
    /// not those dropped by clear() and bump_epoch(). They are collected from the first call on.
    /// Keys of other namespaces are discarded.
    fn take_dropped<'py>(
        &self,
        py: Python<'py>,
        namespaces: Vec<u32>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let mut dropped = self.read(|catalog| Ok(catalog.take_dropped()))?;
        dropped.retain(|(of, _)| namespaces.contains(&of.0));
        Ok(dropped.iter().map(|(_, key)| PyBytes::new(py, &key.0)).collect())
    }

    /// Drops all blocks of a namespace.
    fn clear(&self, namespace: u32) -> PyResult<()> {
        self.change(|catalog| catalog.clear(NamespaceId(namespace)))
    }

    /// Evicts up to this many files, of one namespace or of all. Returns the number evicted.
    #[pyo3(signature = (files, namespace = None))]
    fn evict(&self, files: u32, namespace: Option<u32>) -> PyResult<u32> {
        self.change(|catalog| catalog.evict(namespace.map(NamespaceId), files))
    }

    /// Permanently drops all blocks of a namespace, including those being written. Returns the new
    /// epoch.
    fn bump_epoch(&self, namespace: u32) -> PyResult<u64> {
        self.change(|catalog| catalog.bump_epoch(NamespaceId(namespace)))
    }

    /// Limits a namespace to this many files; None: no limit.
    #[pyo3(signature = (namespace, files))]
    fn set_quota(&self, namespace: u32, files: Option<u32>) -> PyResult<()> {
        self.change(|catalog| catalog.set_quota(NamespaceId(namespace), files))
    }

    /// Returns the namespace's counts.
    fn usage<'py>(&self, py: Python<'py>, namespace: u32) -> PyResult<Bound<'py, PyAny>> {
        let usage = self.read(|catalog| catalog.usage(NamespaceId(namespace)))?;
        arguments::counts(py, "Usage", usage)
    }

    /// Returns the counts of all namespaces.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let counts = self.read(|catalog| Ok(catalog.counts()))?;
        arguments::counts(py, "CatalogStats", counts)
    }

    /// Makes all earlier commits, evictions, pins and clears durable. Lookups of other threads do
    /// not wait for it.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.with(|durable| durable.sync().map_err(StoreError::from).or_raise()))
    }

    /// Makes all changes durable, and releases the directory. Every later call raises ClosedError,
    /// except another close(). In a forked process every call raises it, and close() does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(stack) = self.stack.get() else { return Ok(()) };
        py.detach(|| {
            let stack = unpoisoned(stack.write()).take();
            stack.map_or(Ok(()), CatalogStack::close).or_raise()
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

struct RankRows {
    rows: usize,
    ranks: u32,
    known: u32,
}

impl Catalog {
    fn rows(&self) -> RankRows {
        let id = self.ranks.rank(0);
        let rows = self.ranks.shape().rows() as usize;
        RankRows { rows, ranks: id.ranks, known: id.files }
    }
}
