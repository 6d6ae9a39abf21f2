//! A catalog in this process and a plane in each of two others, like an engine with tensor
//! parallelism. They communicate by lines of JSON.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
};

use nvme_driver::{Clock, ControllerOptions, MonotonicClock};
use nvme_emu::EmuDomain;
use objstore::{
    BlockId, BlockKey, Direction, DurableCatalog, FileId, Format, KvShape, Layer, Move, Namespace,
    NamespaceId, Part, Plane, RankId, Store, StoreConfig, StoreDevice, StoreError, StoreId,
    StoreOptions, Ticket, open_catalog,
};
use rand::{Rng as _, TryRngCore as _, rngs::OsRng};
use ripieno_stack::{Executor, StoreDir, StoreDirMedia, StoreDirOptions};
use ripieno_testkit::{Drives, KvMemory, format, keys};
use serde::{Deserialize, Serialize};

const SHAPE: KvShape = KvShape { layers: 3, segments: 1, object_bytes: 4096, block_tokens: 16 };
const BLOCKS: u32 = 16;
const RANKS: u32 = 2;
const FILES: u32 = 64;
const LAYERS: std::ops::Range<u32> = 0..SHAPE.layers;

/// A block of a job: file, block of the pool, and the key of the expected content.
type Piece = (u32, u32, [u8; 32]);

#[derive(Serialize, Deserialize)]
enum Task {
    Store {
        parts: Vec<Piece>,
        breaks: bool,
    },
    /// Includes the checksums of each block's objects on this rank.
    Retrieve {
        parts: Vec<Piece>,
        expected: Vec<u32>,
    },
}

#[derive(Debug, Serialize, Deserialize, PartialEq)]
enum Report {
    Open(Result<(), String>),
    /// The checksums, if it is durable on this rank.
    Stored(Option<Vec<u32>>),
    /// For each block, true if it has the content of its key on this rank.
    Retrieved(Vec<bool>),
}

fn options() -> StoreOptions {
    StoreOptions { deallocate: false, ..StoreOptions::default() }
}

/// Makes a part of the store in its own store directory.
fn make(dir: &Path, format: &Format) {
    let media = StoreDirMedia::Files { count: 1, bytes: 32 << 20 };
    let options = StoreDirOptions { id: OsRng.unwrap_err().random(), media, lba_bytes: 4096 };
    let mut store_dir = StoreDir::create(dir, &options).unwrap();
    let (_emulation, devices, _) = attach(&store_dir);
    Store::format(&devices, format).unwrap();
    store_dir.set_ready().unwrap();
}

fn attach(store_dir: &StoreDir) -> (Drives, Vec<StoreDevice>, Arc<EmuDomain>) {
    let domain = EmuDomain::new("ranks");
    let drives = Drives::threaded(domain.clone(), store_dir.controllers().unwrap().0);
    let controllers = drives.attach(&ControllerOptions::default());
    (drives, controllers.into_iter().map(StoreDevice::new).collect(), domain)
}

fn open_plane(
    id: RankId,
    devices: Vec<StoreDevice>,
    memory: &KvMemory,
) -> Result<Plane, StoreError> {
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    Plane::open_rank(
        id,
        StoreConfig {
            devices,
            namespace: Namespace::default(),
            executor: Executor::Host.factory(&clock, None),
            clock,
            shape: SHAPE,
            pool: memory.pool.clone(),
            gpu: None,
            options: options(),
        },
    )
}

/// A worker's process: this test program runs as one when requested.
#[test]
fn worker() {
    let Ok(line) = std::env::var("RIPIENO_TEST_RANK") else { return };
    let (dir, store, rank): (String, [u8; 16], u32) = serde_json::from_str(&line).unwrap();
    let store_dir = StoreDir::open(dir.as_ref()).unwrap();
    let (_emulation, devices, domain) = attach(&store_dir);
    let mut memory = KvMemory::new(&*domain, SHAPE, BLOCKS);
    let id = RankId { store: StoreId(store), rank, ranks: RANKS, files: FILES };
    let opened = open_plane(id, devices, &memory);
    let say = |report: &Report| {
        writeln!(std::io::stdout(), "{}", serde_json::to_string(report).unwrap()).unwrap();
    };
    let plane = match opened {
        Ok(plane) => plane,
        Err(error) => return say(&Report::Open(Err(error.to_string()))),
    };
    say(&Report::Open(Ok(())));
    let version = u64::from(rank);
    for line in std::io::stdin().lines() {
        let task: Task = serde_json::from_str(&line.unwrap()).unwrap();
        let (direction, parts, expected, layers) = match task {
            Task::Store { parts, breaks } => {
                for (_, block, key) in &parts {
                    memory.fill(BlockId(*block), BlockKey(*key), version);
                }
                // A layer that is never started.
                let layers = if breaks { 0..SHAPE.layers - 1 } else { LAYERS };
                (Direction::Write, parts, Vec::new(), layers)
            }
            Task::Retrieve { parts, expected } => {
                parts.iter().for_each(|(_, block, _)| memory.wipe(BlockId(*block)));
                (Direction::Read, parts, expected, LAYERS)
            }
        };
        let moves: Vec<Move> = (0..)
            .zip(&parts)
            .map(|(position, (file, block, _))| Move {
                file: FileId(*file),
                block: BlockId(*block),
                position,
            })
            .collect();
        let job = plane.begin(direction, &moves, &expected).unwrap();
        for layer in layers.map(Layer) {
            plane.start(Ticket { job, layer }, objstore::Order::Unordered).unwrap();
            plane.wait(Ticket { job, layer }).unwrap();
        }
        let done = plane.end(&[job]).unwrap().remove(0);
        say(&match direction {
            Direction::Write => Report::Stored(done.failure.is_none().then_some(done.checksums)),
            Direction::Read => {
                let holds = |(_, block, key): &Piece| {
                    let block = BlockId(*block);
                    LAYERS
                        .map(Layer)
                        .all(|layer| memory.holds(block, layer, BlockKey(*key), version))
                };
                Report::Retrieved(parts.iter().map(holds).collect())
            }
        });
    }
    plane.close("it was closed").unwrap();
}

struct Worker {
    child: Child,
    tasks: Option<ChildStdin>,
    reports: BufReader<ChildStdout>,
}

impl Worker {
    fn start(dir: &Path, store: StoreId, rank: u32) -> (Self, Result<(), String>) {
        let line = serde_json::to_string(&(dir.to_str().unwrap(), store.0, rank)).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["worker", "--exact", "--nocapture"])
            .env("RIPIENO_TEST_RANK", line)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let tasks = child.stdin.take();
        let reports = BufReader::new(child.stdout.take().unwrap());
        let mut worker = Self { child, tasks, reports };
        match worker.report() {
            Some(Report::Open(opened)) => (worker, opened),
            other => panic!("{other:?}"),
        }
    }

    fn tell(&mut self, task: &Task) {
        let line = serde_json::to_string(task).unwrap();
        writeln!(self.tasks.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Returns the next report; `None` if the worker has ended.
    fn report(&mut self) -> Option<Report> {
        for line in self.reports.by_ref().lines().map_while(Result::ok) {
            // The test harness may print before it on the same line.
            if let Some(at) = line.find("{\"") {
                return Some(serde_json::from_str(&line[at..]).unwrap());
            }
        }
        None
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn end(mut self) {
        drop(self.tasks.take());
        assert!(self.child.wait().unwrap().success());
    }
}

/// The scheduler's process, with its workers.
struct Engine<'a> {
    dir: &'a Path,
    catalog: DurableCatalog,
    namespace: NamespaceId,
    workers: Vec<Worker>,
    _emulation: Drives,
    _store_dir: StoreDir,
}

impl<'a> Engine<'a> {
    fn open(dir: &'a Path) -> Self {
        let store_dir = StoreDir::open(&dir.join("catalog")).unwrap();
        let (emulation, devices, _) = attach(&store_dir);
        let catalog = open_catalog(&devices[0], &options(), |_, _| {}).unwrap();
        drop(devices);
        let namespace = catalog.with(|catalog| catalog.namespace(&Namespace::default())).unwrap();
        let store = catalog.superblock().store;
        let workers = (0..RANKS).map(|rank| {
            let (worker, opened) = Worker::start(&rank_dir(dir, rank), store, rank);
            opened.unwrap();
            worker
        });
        let workers = workers.collect();
        Self { dir, catalog, namespace, workers, _emulation: emulation, _store_dir: store_dir }
    }

    /// Stores keys, if all ranks succeed; rank `breaks` does not finish, rank `dies` ends.
    fn store(&mut self, keys: &[BlockKey], breaks: Option<usize>, dies: Option<usize>) -> bool {
        let write = self.catalog.with(|catalog| catalog.begin(self.namespace, keys)).unwrap();
        let parts: Vec<Piece> = write
            .own()
            .zip(0..)
            .zip(keys)
            .map(|((file, block), key)| (file.0, block, key.0))
            .collect();
        for (rank, worker) in self.workers.iter_mut().enumerate() {
            if dies == Some(rank) {
                worker.kill();
            } else {
                worker.tell(&Task::Store { parts: parts.clone(), breaks: breaks == Some(rank) });
            }
        }
        for (rank, worker) in (0..).zip(&mut self.workers) {
            let report = worker.report();
            self.catalog
                .with(|catalog| match report {
                    Some(Report::Stored(Some(checksums))) => {
                        catalog.written(write.id, rank, &checksums)
                    }
                    _ => catalog.failed(write.id, rank),
                })
                .unwrap();
        }
        let committed = self.catalog.with(|catalog| catalog.commit(write.id)).is_ok();
        self.catalog.sync().unwrap();
        committed
    }

    /// Retrieves the stored prefix of `keys`; returns its length, and true if all ranks match.
    fn retrieve(&mut self, keys: &[BlockKey]) -> (usize, bool) {
        let (reference, expected) = self.catalog.with(|catalog| {
            let reference = catalog.acquire(self.namespace, keys).unwrap();
            // [file][rank][row]: each worker gets its own part.
            let words: Vec<Vec<u32>> =
                reference.files.iter().map(|file| catalog.checksums(*file).to_vec()).collect();
            (reference, words)
        });
        let parts: Vec<Piece> = reference
            .files
            .iter()
            .zip((0..BLOCKS).rev())
            .zip(keys)
            .map(|((file, block), key)| (file.0, block, key.0))
            .collect();
        let rows = SHAPE.rows() as usize;
        for (rank, worker) in self.workers.iter_mut().enumerate() {
            let own = expected.iter().flat_map(|words| &words[rank * rows..][..rows]);
            let expected = own.copied().collect();
            worker.tell(&Task::Retrieve { parts: parts.clone(), expected });
        }
        let right = Report::Retrieved(vec![true; parts.len()]);
        let reports: Vec<_> = self.workers.iter_mut().map(Worker::report).collect();
        self.catalog.with(|catalog| catalog.release(reference.id)).unwrap();
        (parts.len(), reports.iter().all(|report| report.as_ref() == Some(&right)))
    }

    /// Simulates a crash of all processes: none is shut down.
    fn crash(mut self) -> &'a Path {
        self.workers.iter_mut().for_each(Worker::kill);
        self.dir
    }

    fn close(self) {
        self.workers.into_iter().for_each(Worker::end);
        self.catalog.close().unwrap();
    }
}

fn rank_dir(dir: &Path, rank: u32) -> std::path::PathBuf {
    dir.join(format!("rank{rank}"))
}

/// Makes a catalog and its ranks, each in a subdirectory.
fn made() -> tempfile::TempDir {
    // Not the temporary directory: that may be a tmpfs without direct I/O.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let format = format(SHAPE);
    let part = |part| Format { part, ..format.clone() };
    make(&dir.path().join("catalog"), &part(Part::Catalog { ranks: RANKS, files: FILES }));
    for rank in 0..RANKS {
        make(&rank_dir(dir.path(), rank), &part(Part::Rank { rank, ranks: RANKS }));
    }
    dir
}

#[test]
fn blocks_of_all_ranks_survive_the_processes() {
    let dir = made();
    let mut engine = Engine::open(dir.path());
    let keys = keys(0..8);
    assert!(engine.store(&keys, None, None));
    assert_eq!(engine.retrieve(&keys), (8, true));
    let mut engine = Engine::open(engine.crash());
    assert_eq!(engine.retrieve(&keys), (8, true));
    engine.close();
    let mut engine = Engine::open(dir.path());
    assert_eq!(engine.retrieve(&keys), (8, true));
    engine.close();
}

#[test]
fn what_one_rank_did_not_store_nobody_finds() {
    let dir = made();
    let mut engine = Engine::open(dir.path());
    let keys = keys(0..8);
    assert!(!engine.store(&keys[..4], Some(1), None), "rank 1 did not start a layer");
    assert_eq!(engine.retrieve(&keys), (0, true));
    assert!(engine.store(&keys[..4], None, None));
    assert!(!engine.store(&keys[4..], None, Some(0)), "rank 0 died");
    let mut engine = Engine::open(engine.crash());
    assert_eq!(engine.retrieve(&keys), (4, true));
    let free = engine.catalog.with(|catalog| catalog.counts().free);
    assert_eq!(free, FILES - 4, "nothing is lost");
    engine.close();
}

#[test]
fn a_part_that_is_another_one_is_refused() {
    let (dir, other) = (made(), made());
    let open = |dir: &Path| {
        let store_dir = StoreDir::open(dir).unwrap();
        let (emulation, devices, _) = attach(&store_dir);
        let opened = open_catalog(&devices[0], &options(), |_, _| {});
        drop(devices);
        let result = opened.map(|catalog| catalog.superblock().store);
        drop(emulation);
        result
    };
    let store = open(&dir.path().join("catalog")).unwrap();
    let error = open(&rank_dir(dir.path(), 0)).unwrap_err();
    assert!(matches!(error, StoreError::Config { field: "device", .. }), "{error}");
    for (place, rank, wanted) in [
        (rank_dir(dir.path(), 0), 1, "rank 1 was asked for"),
        (rank_dir(other.path(), 0), 0, "it belongs to store"),
        (dir.path().join("catalog"), 0, "a catalog without data"),
    ] {
        let (mut worker, opened) = Worker::start(&place, store, rank);
        worker.kill();
        let error = opened.unwrap_err();
        assert!(error.contains(wanted), "{error}");
    }
}
