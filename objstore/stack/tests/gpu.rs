//! Stores with a KV pool in an engine's GPU memory, over a mock libcuda.

#![allow(unsafe_code, reason = "hands out an engine's memory and streams")]

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use cuda_mock::{Level, isolated};
use gio_kernels::cuda::{
    CudaDevice, CudaDriver, CudaPattern, CudaStream, DeviceMemory, PatternItem, PinnedMemory,
};
use gio_uring::RawStream;
use nvme_driver::{Clock, ControllerOptions, DescriptorPreference, DevicePtr, MonotonicClock};
use objstore::{
    BlockId, Codec, Direction, FileId, Format, JobDone, JobId, KvShape, Layer, Move, Order,
    StoreError, StoreId, StoreOptions, Ticket,
};
use ripieno_stack::{
    Builder, CudaChoice, Devices, ErrorKind, Executor, GpuMemory, PoolLayout, PoolMemory,
    RankMedia, RankStack, Ranks, RanksOptions, Request, Route, StackConfig, StackError, StoreDir,
    StoreDirMedia, StoreDirOptions,
};
use ripieno_testkit::{WATCHDOG, keys, pattern};

const SHAPE: KvShape = KvShape { layers: 3, segments: 2, object_bytes: 4096, block_tokens: 16 };
const BLOCKS: u32 = 8;
const BYTES: usize = 3 * 2 * 4096 * BLOCKS as usize;
/// Content of the engine's memory beside its KV cache.
const OTHERS: u8 = 0x5A;

/// An engine with a KV cache at some offset of its allocation.
struct Engine {
    device: Arc<CudaDevice>,
    memory: Arc<DeviceMemory>,
    /// Offset of the cache.
    first: usize,
}

impl Engine {
    fn new(first: usize) -> Self {
        let device = CudaDriver::load().unwrap().device(0).unwrap();
        let memory = Arc::new(device.allocate(BYTES + 8192).unwrap());
        memory.write(0, &vec![OTHERS; memory.len()]).unwrap();
        Self { device, memory, first }
    }

    fn pool(&self) -> PoolMemory {
        let base = DevicePtr(self.memory.device().0 + self.first as u64);
        // SAFETY: that many bytes of the allocation, which is kept alive.
        let memory = unsafe { GpuMemory::new(base, BYTES, 0, self.memory.clone()) };
        PoolMemory::Gpu { memory, layout: PoolLayout::contiguous(&SHAPE, BLOCKS) }
    }

    fn offset(&self, block: u32, row: u32) -> usize {
        self.first + ((row * BLOCKS + block) * SHAPE.object_bytes) as usize
    }

    fn fill(&self, block: u32, seed: u64) {
        for row in 0..SHAPE.rows() {
            let bytes = pattern(SHAPE.object_bytes as usize, seed << 8 | u64::from(row));
            self.memory.write(self.offset(block, row), &bytes).unwrap();
        }
    }

    fn holds(&self, block: u32, seed: u64) -> bool {
        (0..SHAPE.rows()).all(|row| {
            let mut found = vec![0; SHAPE.object_bytes as usize];
            self.memory.read(self.offset(block, row), &mut found).unwrap();
            found == pattern(found.len(), seed << 8 | u64::from(row))
        })
    }

    /// Returns true when nothing beside the cache was written.
    fn others_are_well(&self) -> bool {
        let mut found = vec![0; self.memory.len()];
        self.memory.read(0, &mut found).unwrap();
        found.drain(self.first..self.first + BYTES);
        found.iter().all(|byte| *byte == OTHERS)
    }

    /// Returns a layer's objects of a block, for the engine's kernels.
    fn items(&self, block: u32, layer: Layer, seed: u64) -> Vec<PatternItem> {
        let at = |row| DevicePtr(self.memory.device().0 + self.offset(block, row) as u64);
        let item = |row| PatternItem {
            at: at(row),
            seed: seed << 8 | u64::from(row),
            offset: 0,
            len: SHAPE.object_bytes,
        };
        SHAPE.layer_rows(layer).map(item).collect()
    }
}

fn clock() -> Arc<dyn Clock> {
    Arc::new(MonotonicClock::default())
}

fn temporary() -> tempfile::TempDir {
    // Not the temporary directory: that may be a tmpfs without direct I/O.
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// The I/O kernel on the GPU.
const CUDA: Executor = Executor::Cuda(CudaChoice::new(0));
/// The ways of the data to and from GPU memory.
const WAYS: [(Route, Executor); 3] =
    [(Route::Direct, CUDA), (Route::Staged, CUDA), (Route::Staged, Executor::File)];

fn config(devices: Devices, engine: &Engine, executor: Executor, route: Option<Route>) -> Builder {
    let config = StackConfig { route, executor: Some(executor), ..StackConfig::default() };
    Builder::new(config, SHAPE).on(devices).pool(engine.pool())
}

fn store_dir(dir: &Path) -> StoreDir {
    let media = StoreDirMedia::Files { count: 2, bytes: 64 << 20 };
    StoreDir::create(dir, &StoreDirOptions { id: 7, media, lba_bytes: 4096 }).unwrap()
}

fn blocks(range: std::ops::Range<u32>) -> Vec<BlockId> {
    range.map(BlockId).collect()
}

#[test]
fn what_is_stored_from_gpu_memory_is_found_again_on_every_route() {
    let test = "what_is_stored_from_gpu_memory_is_found_again_on_every_route";
    // Copies are late, to detect a missing wait.
    isolated(test, Level::Full, &[("MOCK_COPY_DELAY_US", "300")], || {
        for (route, executor) in WAYS {
            let place = temporary();
            let dir = place.path().join("store");
            // Like PyTorch's allocator: at any offset in a page.
            let engine = Engine::new(512);
            let format = Format::new(StoreId([7; 16]), SHAPE);
            // Fewer than the model has layers.
            let options = StoreOptions { staging_buffers: 2, ..StoreOptions::default() };
            let config =
                |place| config(place, &engine, executor, Some(route)).options(options.clone());
            let stack = config(store_dir(&dir).into()).format(format).open().unwrap();
            assert_eq!(stack.placement().route, route);
            (0..3).for_each(|block| engine.fill(block, block.into()));
            let request = Request::store(stack.store(), &keys(0..3), &blocks(0..3)).unwrap();
            request.move_all().unwrap();
            assert_eq!(request.commit().unwrap().written, 3);
            stack.close().unwrap();

            let stack = config(StoreDir::open(&dir).unwrap().into()).open().unwrap();
            let prefix = stack.store().lookup(&keys(0..3)).unwrap();
            assert_eq!(prefix.len(), 3);
            let request = Request::retrieve(stack.store(), &prefix, 0, &blocks(5..8)).unwrap();
            request.move_all().unwrap();
            for block in 0..3 {
                assert!(
                    engine.holds(block + 5, block.into()),
                    "{route}, {executor}: block {block}"
                );
                assert!(
                    engine.holds(block, block.into()),
                    "{route}, {executor}: block {block} was kept"
                );
            }
            drop((request, prefix));
            stack.close().unwrap();
            assert!(engine.others_are_well(), "{route}, {executor}");
        }
        cuda_mock::assert_thread_clean();
    });
}

#[test]
fn the_best_route_is_taken_and_the_others_are_explained() {
    let test = "the_best_route_is_taken_and_the_others_are_explained";
    isolated(test, Level::Full, &[], || {
        let place = temporary();
        let dir = place.path().join("store");
        let engine = Engine::new(512);
        let format = Format::new(StoreId([7; 16]), SHAPE);
        let stack =
            config(store_dir(&dir).into(), &engine, CUDA, None).format(format).open().unwrap();
        let text = stack.placement().to_string();
        assert!(text.starts_with("direct (queues in pinned host memory, KV pool in GPU"), "{text}");
        stack.close().unwrap();
        // Without an executor, no SM is reserved.
        let stack = Builder::new(StackConfig::at(&dir), SHAPE).pool(engine.pool()).open().unwrap();
        let text = stack.placement().to_string();
        assert!(text.starts_with("staged (queues in host"), "{text}");
        stack.close().unwrap();
        // PRPs have dword granularity; a kernel copies all other objects.
        let odd = Engine::new(510);
        let controller = ControllerOptions {
            descriptors: DescriptorPreference::Prp,
            ..ControllerOptions::default()
        };
        let open = |require| {
            let place = StoreDir::open(&dir).unwrap().into();
            let controller = controller.clone();
            config(place, &odd, CUDA, require).controller(controller).open()
        };
        let stack = open(None).unwrap();
        let text = stack.placement().to_string();
        assert!(text.starts_with("staged (") && text.contains("not direct: objects"), "{text}");
        stack.close().unwrap();
        let error = open(Some(Route::Direct)).unwrap_err();
        assert!(matches!(error, StackError::NoRoute { .. }), "{error}");
        assert!(error.to_string().contains("multiples of 4 bytes"), "{error}");
        let error = open(Some(Route::Host)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("there is direct and staged"), "{error}");
        for (name, text, wanted) in [
            ("executor", "host", "take cuda, on that GPU, or"),
            ("gpu", "1", "the pool is on GPU 0"),
        ] {
            let mut config = StackConfig::at(&dir);
            config.set(name, text).unwrap();
            let error = Builder::new(config, SHAPE).pool(engine.pool()).open().unwrap_err();
            assert!(error.to_string().contains(wanted), "{error}");
        }
    });
}

struct Rank {
    stack: RankStack,
    engine: Engine,
    /// The engine's stream.
    stream: CudaStream,
    work: CudaPattern,
    /// A word that the engine's stream waits for.
    word: PinnedMemory,
}

impl Rank {
    fn open(ranks: &Ranks, way: (Route, Executor)) -> Self {
        Self::open_with(ranks, way, StoreOptions::default())
    }

    fn open_with(
        ranks: &Ranks,
        (route, executor): (Route, Executor),
        options: StoreOptions,
    ) -> Self {
        let engine = Engine::new(4096 + 256);
        let device = &engine.device;
        let (stream, work) = (CudaStream::lowest(device).unwrap(), CudaPattern::new(device));
        let word = device.pinned(4096).unwrap();
        let (route, executor) = (Some(route), Some(executor));
        let config = StackConfig { route, executor, ..StackConfig::default() };
        let stack = Builder::new(config, SHAPE)
            .on(ranks.devices(0).unwrap())
            .pool(engine.pool())
            .options(options)
            .open_rank(ranks.rank(0))
            .unwrap();
        Self { stack, stream, work: work.unwrap(), word, engine }
    }

    fn stream(&self) -> RawStream {
        // SAFETY: it lives as long as the stack.
        unsafe { RawStream::new(self.stream.raw()) }
    }

    /// Pauses the stream until [`Rank::go_on`].
    fn pause(&self) {
        let device = &self.engine.device;
        // SAFETY: the word is kept.
        unsafe { device.stream_wait(self.stream.raw(), self.word.device(), 1, false) }.unwrap();
    }

    fn go_on(&self) {
        // SAFETY: pinned memory, which a stream reads.
        unsafe { self.word.host().cast::<u32>().write_volatile(1) };
    }

    /// Starts a layer after the work enqueued on the stream.
    fn start(&self, job: JobId, layer: Layer) {
        let order = Order::AfterStream(self.stream());
        self.stack.plane().start(Ticket { job, layer }, order).unwrap();
    }

    /// Makes the stream wait for a layer.
    fn join(&self, job: JobId, layer: Layer) {
        self.stack.plane().join(Ticket { job, layer }, self.stream()).unwrap();
    }

    fn begin(&self, direction: Direction, block: u32, sums: &[u32]) -> JobId {
        let moves = [Move { file: FileId(0), block: BlockId(block), position: 0 }];
        self.stack.plane().begin(direction, &moves, sums).unwrap()
    }

    /// Returns true when the engine's kernels find this content in a block, in stream order.
    fn finds(&self, block: u32, seed: u64) -> bool {
        (0..SHAPE.layers).map(Layer).all(|layer| {
            let items = self.engine.items(block, layer, seed);
            // SAFETY: objects of the cache, which is kept.
            let check = unsafe { self.work.check(self.stream(), &items) }.unwrap();
            check.wait(WATCHDOG).unwrap();
            check.differences().unwrap().is_empty()
        })
    }
}

fn ranks(dir: &Path) -> Ranks {
    let media = RankMedia::Files { bytes: 32 << 20, count: 1, lba_bytes: 4096 };
    let options =
        RanksOptions { id: StoreId([3; 16]), ranks: 1, shape: SHAPE, codec: Codec::None, media };
    Ranks::prepare(dir, &options, &clock()).unwrap()
}

#[test]
fn layers_are_stored_after_the_stream_and_used_after_they_were_loaded() {
    let test = "layers_are_stored_after_the_stream_and_used_after_they_were_loaded";
    isolated(test, Level::Full, &[("MOCK_COPY_DELAY_US", "2000")], || {
        for (route, executor) in WAYS {
            let place = temporary();
            let rank = Rank::open(&ranks(place.path()), (route, executor));
            rank.engine.fill(1, 99);
            // The engine computes layers, and saves each as soon as the CPU gets there.
            rank.pause();
            let job = rank.begin(Direction::Write, 1, &[]);
            for layer in (0..SHAPE.layers).map(Layer) {
                let items = rank.engine.items(1, layer, 5);
                // SAFETY: objects of the cache, which is kept.
                unsafe { rank.work.fill(rank.stream(), &items) }.unwrap();
                rank.start(job, layer);
            }
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(100) {
                assert!(
                    rank.stack.plane().poll(Ticket { job, layer: Layer(0) }).unwrap().is_none(),
                    "{route}, {executor}: too early"
                );
            }
            rank.go_on();
            let report = rank.stack.plane().end(&[job]).unwrap().pop().unwrap();
            assert!(report.failure.is_none(), "{report:?}");

            // It loads the layers, and uses each in stream order: the CPU waits for none.
            let job = rank.begin(Direction::Read, 6, &report.checksums);
            for layer in (0..SHAPE.layers).map(Layer) {
                rank.start(job, layer);
            }
            for layer in (0..SHAPE.layers).map(Layer) {
                rank.join(job, layer);
            }
            assert!(rank.finds(6, 5), "{route}, {executor}: used before it was there");
            assert!(rank.stack.plane().end(&[job]).unwrap()[0].failure.is_none());
            let error = rank
                .stack
                .plane()
                .join(Ticket { job, layer: Layer(0) }, rank.stream())
                .unwrap_err();
            assert!(matches!(error, StoreError::Ended { .. }), "{error}");
            rank.stack.close().unwrap();
        }
    });
}

/// Runs all layers of a job.
fn all(rank: &Rank, job: JobId) -> JobDone {
    (0..SHAPE.layers).for_each(|layer| {
        rank.stack.plane().start(Ticket { job, layer: Layer(layer) }, Order::Unordered).unwrap()
    });
    rank.stack.plane().end(&[job]).unwrap().pop().unwrap()
}

/// Stores block 1 layer by layer: each is copied before the stream continues and overwrites it.
fn stored_in_the_streams_order(rank: &Rank) -> JobDone {
    let job = rank.begin(Direction::Write, 1, &[]);
    for layer in (0..SHAPE.layers).map(Layer) {
        let compute = |seed| {
            let items = rank.engine.items(1, layer, seed);
            // SAFETY: objects of the cache, which is kept.
            unsafe { rank.work.fill(rank.stream(), &items) }.unwrap();
        };
        compute(5);
        rank.start(job, layer);
        rank.join(job, layer);
        compute(77);
    }
    let stored = rank.stack.plane().end(&[job]).unwrap().pop().unwrap();
    assert!(stored.failure.is_none(), "{stored:?}");
    stored
}

#[test]
fn blocks_in_host_memory_are_copied_in_the_streams_order() {
    let test = "blocks_in_host_memory_are_copied_in_the_streams_order";
    isolated(test, Level::Full, &[("MOCK_COPY_DELAY_US", "300")], || {
        for (route, executor) in WAYS {
            let place = temporary();
            let options = StoreOptions { dram: 4 * SHAPE.block_bytes(), ..StoreOptions::default() };
            let rank = Rank::open_with(&ranks(place.path()), (route, executor), options);
            let stats = || rank.stack.plane().stats().unwrap();
            let stored = stored_in_the_streams_order(&rank);

            rank.pause();
            let job = rank.begin(Direction::Read, 6, &stored.checksums);
            for layer in (0..SHAPE.layers).map(Layer) {
                rank.start(job, layer);
            }
            let layers = (0..SHAPE.layers).map(Layer);
            layers.for_each(|layer| rank.join(job, layer));
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(100) {
                assert!(
                    rank.stack.plane().poll(Ticket { job, layer: Layer(0) }).unwrap().is_none(),
                    "{route}, {executor}: too early"
                );
            }
            let mut found = [0; 8];
            rank.engine.memory.read(rank.engine.offset(6, 0), &mut found).unwrap();
            assert_eq!(found, [OTHERS; 8], "{route}, {executor}: the stream was not there yet");
            rank.go_on();
            assert!(rank.finds(6, 5), "{route}, {executor}: used before it was there");
            assert!(rank.stack.plane().end(&[job]).unwrap()[0].failure.is_none());
            assert_eq!((stats().retrieved_bytes, stats().dram.hits), (0, 1), "{route}, {executor}");

            // The checksums differ from the cached bytes: the devices may be right.
            let mut others = stored.checksums.clone();
            others[3] ^= 1;
            let failure = all(&rank, rank.begin(Direction::Read, 5, &others)).failure;
            let failure = failure.expect("the bytes are other ones").to_string();
            assert!(
                failure.contains("bytes differ from what was written"),
                "{route}, {executor}: {failure}"
            );
            assert_eq!(rank.stack.plane().take_lost().unwrap(), []);
            // It is read from the devices, and cached again.
            for hits in [2, 3] {
                let loaded = all(&rank, rank.begin(Direction::Read, 4, &stored.checksums));
                assert!(
                    loaded.failure.is_none() && rank.finds(4, 5),
                    "{route}, {executor}: {loaded:?}"
                );
                assert_eq!(stats().retrieved_bytes, SHAPE.block_bytes(), "{route}, {executor}");
                assert_eq!(stats().dram.hits, hits, "{route}, {executor}");
            }
            // A file is cached only when all layers were copied.
            let job = rank.begin(Direction::Read, 4, &stored.checksums);
            rank.stack.plane().start(Ticket { job, layer: Layer(1) }, Order::Unordered).unwrap();
            let failure = rank.stack.plane().end(&[job]).unwrap().pop().unwrap().failure;
            assert!(failure.is_some(), "{route}, {executor}: two layers were never copied");
            // The file gets new content: the old one is no longer served.
            let stored = all(&rank, rank.begin(Direction::Write, 1, &[]));
            let loaded = all(&rank, rank.begin(Direction::Read, 4, &stored.checksums));
            assert!(
                loaded.failure.is_none() && rank.finds(4, 77),
                "{route}, {executor}: {loaded:?}"
            );
            assert_eq!((stats().retrieved_bytes, stats().dram.hits), (SHAPE.block_bytes(), 5));
            assert!(rank.engine.others_are_well(), "{route}, {executor}");
            rank.stack.close().unwrap();
        }
        cuda_mock::assert_thread_clean();
    });
}

#[test]
fn damaged_bytes_are_noticed_on_every_route() {
    let test = "damaged_bytes_are_noticed_on_every_route";
    isolated(test, Level::Full, &[], || {
        for (route, executor) in WAYS {
            let place = temporary();
            let ranks = ranks(place.path());
            let rank = Rank::open(&ranks, (route, executor));
            rank.engine.fill(0, 21);
            let stored = all(&rank, rank.begin(Direction::Write, 0, &[]));
            assert!(stored.failure.is_none(), "{stored:?}");
            rank.stack.close().unwrap();
            drop(rank);

            let file = ranks.rank_dir(0).join("device-0.img");
            let mut media = std::fs::read(&file).unwrap();
            let object = pattern(SHAPE.object_bytes as usize, 21 << 8 | 3);
            let at = media.chunks(512).position(|part| part == &object[..512]).unwrap() * 512;
            media[at + 77] ^= 4;
            std::fs::write(&file, media).unwrap();

            let rank = Rank::open(&ranks, (route, executor));
            // Once, they may have been damaged on their way.
            for lost in [vec![], vec![FileId(0)]] {
                let loaded = all(&rank, rank.begin(Direction::Read, 4, &stored.checksums));
                let failure = loaded.failure.expect("the bytes are other ones").to_string();
                assert!(
                    failure.contains("bytes differ from what was written"),
                    "{route}, {executor}: {failure}"
                );
                assert_eq!(rank.stack.plane().take_lost().unwrap(), lost);
            }
            rank.stack.close().unwrap();
        }
    });
}
