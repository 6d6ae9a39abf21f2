//! Clients whose blocks are in GPU memory, over a stand-in for libcuda.
//!
//! A process cannot open its own memory: this program is also the clients (`processes`), and each
//! test's server, which loads the stand-in, in a process of its own.
#![allow(unsafe_code, reason = "streams and GPU memory of the tests")]
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "processes report to the one that started them"
)]

mod processes;

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::fs::FileExt as _,
    path::Path,
    process::{Command, ExitCode},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use cuda_mock::Level;
use gio_kernels::cuda::{CudaDevice, CudaDriver, CudaStream, DeviceMemory, GpuHandle};
use gio_uring::RawStream;
use libtest_mimic::{Arguments, Failed, Trial};
use objstore::{BlockId, BlockKey, Direction, KvShape, Layer, Namespace};
use rand::{Rng as _, rngs::SmallRng};
use ripieno_serve::{Client, PoolLayout, Request, ServeError, Settings, SpaceId, control::Status};
use ripieno_stack::{Builder, GpuMemory, PoolMemory, Stack, StackConfig};
use ripieno_testkit::{blocks, pattern, until};
use tempfile::TempDir;

use self::processes::{
    CAPACITY, KEYS, Process, Serving, directory, exit, keys, kill_at_random, line, mappings,
    open_files, role, serve, settings, socket, start, started, work_until_told,
};

const CASE: &str = "RIPIENO_CASE";

const SHAPE: KvShape = KvShape { layers: 6, segments: 2, object_bytes: 4096, block_tokens: 16 };
const BLOCKS: u32 = 16;
const CLIENTS: usize = 4;
const KILLS: u32 = 30;

type Test = fn() -> Result<(), Failed>;
type Environment = &'static [(&'static str, &'static str)];

/// The tests, and what else is in the environment of server and clients.
const TESTS: &[(&str, Test, Environment)] = &[
    ("bytes_come_back_in_the_order_of_streams", bytes_come_back, &[]),
    ("with_a_dram_cache", with_a_cache, &[]),
    ("what_cuda_refuses_is_said", refusals, &[]),
    ("another_gpu_of_the_server", another_gpu, &[("MOCK_CUDA_DEVICES", "2")]),
    ("a_damaged_block_is_named", a_block_is_damaged, &[]),
    ("layers_begin_while_devices_do_not_answer", devices_do_not_answer, &[]),
    ("a_client_is_killed_while_its_stream_waits", a_waiting_client_is_killed, &[]),
    ("clients_are_killed_at_random", clients_are_killed, &[]),
    ("the_server_is_killed_under_a_client", the_server_is_killed, &[]),
];

fn main() -> ExitCode {
    match role().as_deref() {
        Some("client") => return work_until_told(|| Ok(Engine::new(0)), work),
        Some("orderly") => return exit(orderly(&mut Engine::new(0))),
        Some("other") => return exit(orderly(&mut Engine::new(1))),
        Some("damaging") => return exit(damaging(&Engine::new(0))),
        Some("exporter") => return exporter_main(),
        Some("server") => return server_main(),
        Some("starting") => return exit(starting(&Engine::new(0))),
        Some("waiting") => return exit(waiting(&Engine::new(0))),
        Some("survivor") => return exit(survivor(&Engine::new(0))),
        _ => {}
    }
    if let Ok(case) = std::env::var(CASE) {
        let (_, test, _) = TESTS.iter().find(|(name, ..)| *name == case).expect("a test");
        return exit(test().map_err(|error| format!("{error:?}")));
    }
    let trial = |(name, _, environment): &(&'static str, Test, Environment)| {
        let (name, environment) = (*name, *environment);
        Trial::test(name, move || isolated(name, environment))
    };
    libtest_mimic::run(&Arguments::from_args(), TESTS.iter().map(trial).collect()).exit_code()
}

/// Runs a test in a process that loads the stand-in.
fn isolated(name: &str, environment: Environment) -> Result<(), Failed> {
    let status = Command::new(std::env::current_exe()?)
        .env(CASE, name)
        .env("LD_LIBRARY_PATH", cuda_mock::folder(Level::Full))
        .envs(environment.iter().copied())
        .status()?;
    if status.success() { Ok(()) } else { Err(format!("{name}: {status}").into()) }
}

fn open(dir: &Path, config: StackConfig) -> Stack {
    let config = StackConfig { path: Some(dir.join("store")), capacity: Some(CAPACITY), ..config };
    let pool = PoolMemory::Own { blocks: 2 };
    Builder::new(config, SHAPE).pool(pool).open().expect("a store")
}

fn limits() -> Settings {
    Settings { pool_bytes_max: 64 << 20, ..settings() }
}

fn serving(config: StackConfig) -> Serving {
    Serving::new(|dir| open(dir, config), limits())
}

/// Waits until `ended` sessions have ended and nothing of a client is left.
fn settled(serving: &Serving, ended: u64) -> Status {
    let left = serving.settled(ended);
    until("nothing is mapped", || mappings("mock-gpu") == 0 && cuda_mock::live() == 0);
    left
}

fn bytes(key: BlockKey) -> Vec<u8> {
    pattern(SHAPE.block_bytes() as usize, key.seed() as u64)
}

/// A client with blocks on a GPU, and a stream that waits for a gate.
struct Engine {
    device: Arc<CudaDevice>,
    memory: Arc<DeviceMemory>,
    layout: PoolLayout,
    client: Client,
    space: SpaceId,
    stream: CudaStream,
}

impl Engine {
    fn new(ordinal: u32) -> Self {
        let device = CudaDriver::load().expect("a driver").device(ordinal).expect("a GPU");
        // Not at the beginning of the memory, nor of the allocation.
        let mut layout = PoolLayout::contiguous(&SHAPE, BLOCKS).after(512);
        layout.block_stride = u64::from(SHAPE.object_bytes);
        let len = layout.used(SHAPE.object_bytes).end as usize;
        let memory = Arc::new(device.allocate(len).expect("memory"));
        // SAFETY: the memory lives as long as its owner; the tests order what they do.
        let given = unsafe { GpuMemory::new(memory.device(), len, ordinal, memory.clone()) };
        let path = socket(&directory());
        let client = Client::join_gpu(path, SHAPE, None, layout.clone(), given).expect("a client");
        let space = client.namespace(&Namespace::default()).expect("a namespace");
        let stream = CudaStream::new(&device, None).expect("a stream");
        Self { device, memory, layout, client, space, stream }
    }

    fn raw(&self) -> RawStream {
        // SAFETY: it lives as long as the engine.
        unsafe { RawStream::new(self.stream.raw()) }
    }

    fn each(&self, block: BlockId) -> impl Iterator<Item = usize> + '_ {
        let at = move |row| self.layout.offset(block, objstore::Row(row)).expect("a block");
        (0..SHAPE.rows()).map(move |row| at(row) as usize)
    }

    fn write(&self, block: BlockId, bytes: &[u8]) {
        for (at, object) in self.each(block).zip(bytes.chunks(SHAPE.object_bytes as usize)) {
            self.memory.write(at, object).expect("it is inside");
        }
    }

    fn read(&self, block: BlockId) -> Vec<u8> {
        let mut bytes = vec![0; SHAPE.block_bytes() as usize];
        for (at, object) in self.each(block).zip(bytes.chunks_mut(SHAPE.object_bytes as usize)) {
            self.memory.read(at, object).expect("it is inside");
        }
        bytes
    }
}

/// Holds a stream up until it is opened.
struct Gate(gio_kernels::cuda::PinnedMemory);

impl Gate {
    fn close(engine: &Engine) -> Self {
        let word = engine.device.pinned(4096).expect("memory");
        // SAFETY: the gate is opened before the word is freed.
        let waits =
            unsafe { engine.device.stream_wait(engine.stream.raw(), word.device(), 1, false) };
        waits.expect("a stream");
        Self(word)
    }

    fn open(&self) {
        // SAFETY: a word of the memory, which a stream only reads.
        unsafe { self.0.host().cast::<u32>().write_volatile(1) };
    }
}

/// Stores and loads, with streams that are held up.
fn orderly(engine: &mut Engine) -> Result<(), ServeError> {
    let (keys, all) = (keys(0..8), 0..SHAPE.layers);
    let (from, to) = (blocks(0, 8), blocks(8, 8));
    let stale = vec![0x55; SHAPE.block_bytes() as usize];
    from.iter().for_each(|block| engine.write(*block, &stale));
    let is_still = |request: &Request, layer| {
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(2));
            let ended = request.poll(Layer(layer)).expect("it is in flight");
            assert!(!ended, "it does not wait for the stream");
        }
    };
    // The blocks are computed only when the gate is open.
    let request = engine.client.allocate(engine.space, &keys, &from)?;
    let gate = Gate::close(engine);
    request.start_after(all.clone(), engine.raw())?;
    is_still(&request, 0);
    is_still(&request, 5);
    keys.iter().zip(&from).for_each(|(key, block)| engine.write(*block, &bytes(*key)));
    gate.open();
    request.wait_all(all.clone())?;
    request.commit()?;
    // The blocks are in use until the gate is open.
    to.iter().for_each(|block| engine.write(*block, &stale));
    let (request, found) = engine.client.fetch(engine.space, &keys, &to, 0)?;
    assert_eq!(found, [true; 8]);
    let gate = Gate::close(engine);
    request.start_after(all.clone(), engine.raw())?;
    is_still(&request, 0);
    assert_eq!(engine.read(to[0]), stale, "it was written to before its stream was there");
    gate.open();
    request.wait_all(all)?;
    drop(request);
    for _ in 0..2 {
        for (key, block) in keys.iter().zip(&to) {
            assert_eq!(engine.read(*block), bytes(*key));
            engine.write(*block, &stale);
        }
        // Without a stream; the second time from the cache, if there is one.
        assert_eq!(engine.client.load(engine.space, &keys, &to)?, [true; 8]);
    }
    // One that is dropped while its stream does not get there.
    let (request, _) = engine.client.fetch(engine.space, &keys, &to, 0)?;
    let gate = Gate::close(engine);
    request.start_after(0..2, engine.raw())?;
    drop(request);
    gate.open();
    engine.client.close()
}

fn run_client(role: &str, config: StackConfig, stored: u32) -> Result<(), Failed> {
    let serving = serving(config);
    let mut client = start(role, serving.dir.path(), 0);
    let ended = client.0.wait()?;
    if !ended.success() {
        return Err(format!("the client: {ended}").into());
    }
    let left = settled(&serving, 1);
    assert_eq!(left.files_stored, stored);
    assert_eq!(left.refused_calls + left.refused_messages, 0);
    until("no marks are mapped", || mappings("ripieno-pool") == 0);
    serving.close()
}

fn bytes_come_back() -> Result<(), Failed> {
    run_client("orderly", StackConfig::default(), 8)
}

fn with_a_cache() -> Result<(), Failed> {
    let config = StackConfig { dram: Some(4 << 20), ..StackConfig::default() };
    run_client("orderly", config, 8)
}

fn a_block_is_damaged() -> Result<(), Failed> {
    run_client("damaging", StackConfig::default(), 7)
}

/// Loads blocks of which one was changed on the device.
fn damaging(engine: &Engine) -> Result<(), ServeError> {
    let (keys, from, to) = (keys(0..8), blocks(0, 8), blocks(8, 8));
    keys.iter().zip(&from).for_each(|(key, block)| engine.write(*block, &bytes(*key)));
    assert_eq!(engine.client.save(engine.space, &keys, &from)?, 8);
    let image = directory().join("store/device-0.img");
    let stored = fs::read(&image).expect("the device");
    let object = &bytes(keys[3])[..SHAPE.object_bytes as usize];
    let at = stored.windows(object.len()).position(|bytes| bytes == object).expect("it is stored");
    let file = fs::File::options().write(true).open(&image).expect("the device");
    file.write_all_at(&[!object[0]], at as u64).and_then(|()| file.sync_all()).expect("a write");
    let prefix = engine.client.lookup(engine.space, &keys)?;
    let request = engine.client.begin(Direction::Read, &prefix.places(), to)?;
    request.start_after(0..SHAPE.layers, engine.raw())?;
    let ended = engine.client.end(&[&request])?.remove(0);
    assert!(ended.is_mismatch, "{ended:?}");
    assert_eq!(ended.lost, Some(3), "{ended:?}");
    drop((request, prefix));
    engine.client.close()
}

/// Starts a layer, and then another one, when it is told to.
fn starting(engine: &Engine) -> Result<(), ServeError> {
    let request = engine.client.allocate(engine.space, &keys(0..8), &blocks(0, 8))?;
    println!("allocated");
    std::io::stdin().read_line(&mut String::new()).expect("a line");
    request.start_after(0..1, engine.raw())?;
    // The server's thread gets as far as the devices.
    thread::sleep(Duration::from_millis(50));
    request.start_after(1..2, engine.raw())?;
    println!("started");
    request.wait_all(0..2)?;
    drop(request);
    engine.client.close()
}

/// Devices that do not answer hold up the layers that they move, and no call that starts others.
fn devices_do_not_answer() -> Result<(), Failed> {
    let mut planes = Vec::new();
    let opened = |dir: &Path| {
        let stack = open(dir, StackConfig { pacing: Some(true), ..StackConfig::default() });
        planes.push(stack.store().plane().clone());
        stack
    };
    let serving = Serving::new(opened, limits());
    let mut client = started("starting", serving.dir.path(), 0, "allocated");
    let ((hold, is_held), (release, is_released)) = (mpsc::channel(), mpsc::channel());
    let plane = planes.remove(0);
    // Nothing moves while the plane is locked.
    let holding = thread::spawn(move || {
        plane.with_scheduler(|_| {
            hold.send(()).expect("it is awaited");
            is_released.recv_timeout(Duration::from_secs(10))
        })
    });
    is_held.recv()?;
    client.0.stdin.as_mut().expect("its input").write_all(b"start\n")?;
    assert_eq!(line(&mut client), "started");
    // It may have given up.
    let _ = release.send(());
    let released = holding.join().expect("it did not panic")?.expect("a pacer");
    assert!(released.is_ok(), "a call waited for the devices of another layer");
    assert!(client.0.wait()?.success());
    settled(&serving, 1);
    serving.close()
}

fn another_gpu() -> Result<(), Failed> {
    run_client("other", StackConfig::default(), 8)
}

/// Names memory of its own, and waits to be ended.
fn exporter_main() -> ExitCode {
    let device = CudaDriver::load().expect("a driver").device(0).expect("a GPU");
    let memory = device.allocate(8192).expect("memory");
    let GpuHandle { gpu, handle, offset, bytes } =
        GpuHandle::of(&device, memory.device(), memory.len()).expect("a handle");
    let digits: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{gpu} {digits} {offset} {bytes}");
    let mut input = [0];
    let _ = std::io::stdin().read(&mut input);
    drop(memory);
    println!("freed");
    let _ = std::io::stdin().read(&mut input);
    ExitCode::SUCCESS
}

fn exported(process: &mut Process) -> GpuHandle {
    let line = line(process);
    let mut words = line.split(' ');
    let mut word = || words.next().expect("four words").to_owned();
    let (gpu, digits) = (word(), word());
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).expect("digits");
    let handle = (0..digits.len()).step_by(2).map(byte).collect();
    let mut number = || word().parse().expect("a number");
    GpuHandle { gpu, handle, offset: number(), bytes: number() }
}

fn refusals() -> Result<(), Failed> {
    let dir = TempDir::new()?;
    let device = CudaDriver::load()?.device(0)?;
    let refused = |named: &GpuHandle| named.open(&device).expect_err("refused").to_string();

    let mut exporter = start("exporter", dir.path(), 0);
    let named = exported(&mut exporter);
    assert!(named.offset > 0, "it does not begin with its allocation");
    let (first, again) = (named.open(&device)?, named.open(&device)?);
    assert_eq!(first.device(), again.device());
    drop(first);
    assert_ne!(mappings("mock-gpu"), 0, "it was opened twice");
    drop(again);
    assert_eq!(mappings("mock-gpu"), 0);

    let beyond = GpuHandle { offset: named.offset + (1 << 20), ..named.clone() };
    assert!(refused(&beyond).contains("into an allocation of"), "{}", refused(&beyond));
    let beyond = GpuHandle { offset: u64::MAX, ..named.clone() };
    assert!(refused(&beyond).contains("into an allocation of"));
    let short = GpuHandle { handle: vec![0; 63], ..named.clone() };
    assert!(refused(&short).contains("63 bytes"));
    let other = GpuHandle { handle: vec![7; 64], ..named.clone() };
    assert!(refused(&other).contains("cuIpcOpenMemHandle"));
    assert_eq!(mappings("mock-gpu"), 0);

    // Freed, and then ended.
    exporter.0.stdin.as_mut().expect("its input").write_all(b"\n")?;
    assert_eq!(line(&mut exporter), "freed");
    assert!(refused(&named).contains("(400)"), "{}", refused(&named));
    let mut exporter = start("exporter", dir.path(), 0);
    let named = exported(&mut exporter);
    drop(exporter);
    assert!(refused(&named).contains("(400)"), "{}", refused(&named));

    // Of this process.
    let memory = device.allocate(8192)?;
    let own = GpuHandle::of(&device, memory.device(), memory.len())?;
    assert!(refused(&own).contains("(201)"), "{}", refused(&own));
    drop(memory);
    drop(device);

    // The server says it, too, and goes on.
    let serving = serving(StackConfig::default());
    let device = CudaDriver::load()?.device(0)?;
    let layout = PoolLayout::contiguous(&SHAPE, BLOCKS);
    let len = layout.used(SHAPE.object_bytes).end as usize;
    let memory = Arc::new(device.allocate(len)?);
    let join = |layout: &PoolLayout| {
        // SAFETY: the memory lives as long as its owner.
        let given = unsafe { GpuMemory::new(memory.device(), len, 0, memory.clone()) };
        let path = socket(serving.dir.path());
        Client::join_gpu(path, SHAPE, None, layout.clone(), given).expect_err("refused").to_string()
    };
    assert!(join(&layout).contains("(201)"), "{}", join(&layout));
    let why = join(&layout.clone().after(1));
    assert!(why.contains("refused"), "{why}");
    drop((memory, device));
    let left = settled(&serving, 0);
    assert_eq!(left.sessions.len(), 0);
    serving.close()
}

/// Does something. Returns false if a block that was found has other bytes than those of its key.
fn work(engine: &Engine, random: &mut SmallRng) -> Result<bool, ServeError> {
    let Engine { client, space, .. } = engine;
    let first = random.random_range(0..KEYS / 8) * 8;
    let keys = keys(first..first + random.random_range(1..=8));
    let layers = 0..random.random_range(0..=SHAPE.layers);
    match random.random_range(0..4) {
        0 | 1 => {
            let from = blocks(0, keys.len());
            keys.iter().zip(&from).for_each(|(key, block)| engine.write(*block, &bytes(*key)));
            let request = client.allocate(*space, &keys, &from)?;
            request.start_after(layers.clone(), engine.raw())?;
            if layers.end == SHAPE.layers {
                request.commit()?;
            }
        }
        2 => {
            let prefix = client.lookup(*space, &keys)?;
            let request = client.retrieve(&prefix, 0, &blocks(8, prefix.len()))?;
            request.start_after(layers, engine.raw())?;
        }
        _ => {
            let to = blocks(8, keys.len());
            let (request, found) = client.fetch(*space, &keys, &to, 0)?;
            request.start_after(0..SHAPE.layers, engine.raw())?;
            request.wait_all(0..SHAPE.layers)?;
            for ((key, block), is_found) in keys.iter().zip(to).zip(found) {
                if is_found && engine.read(block) != bytes(*key) {
                    return Ok(false);
                }
            }
        }
    }
    Ok(true)
}

/// Waits for a layer that waits for a stream, from its second line of input on.
fn waiting(engine: &Engine) -> Result<(), ServeError> {
    let request = engine.client.allocate(engine.space, &keys(0..8), &blocks(0, 8))?;
    let gate = Gate::close(engine);
    request.start_after(0..1, engine.raw())?;
    println!("waiting");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a line");
    if line == "look\n" {
        println!("ended: {}", request.poll(Layer(0))?);
    } else {
        println!("now");
        request.wait(Layer(0))?;
    }
    gate.open();
    drop(request);
    engine.client.close()
}

/// The stream of a client that has died gets nowhere: nobody waits for it, or it would end only
/// after that of another client, which began earlier.
fn a_waiting_client_is_killed() -> Result<(), Failed> {
    let serving = serving(StackConfig::default());
    let mut other = started("waiting", serving.dir.path(), 0, "waiting");
    let mut client = started("waiting", serving.dir.path(), 0, "waiting");
    client.0.stdin.as_mut().expect("its input").write_all(b"wait\n")?;
    assert_eq!(line(&mut client), "now");
    thread::sleep(Duration::from_millis(20));
    drop(client);
    until("its session has ended", || serving.status().sessions.len() == 1);
    other.0.stdin.as_mut().expect("its input").write_all(b"look\n")?;
    assert_eq!(line(&mut other), "ended: false");
    assert!(other.0.wait()?.success());
    settled(&serving, 2);
    serving.close()
}

fn server_main() -> ExitCode {
    let dir = directory();
    let server = serve(&dir, open(&dir, StackConfig::default()), limits());
    println!("ready");
    exit(server.run(|| false))
}

/// Loads until a server was lost and another one has served it. Nothing writes to blocks of a load
/// that has failed.
fn survivor(engine: &Engine) -> Result<(), ServeError> {
    let (keys, from, to) = (keys(0..8), blocks(0, 8), blocks(8, 8));
    keys.iter().zip(&from).for_each(|(key, block)| engine.write(*block, &bytes(*key)));
    assert_eq!(engine.client.save(engine.space, &keys, &from)?, 8);
    println!("stored");
    let (mut was_lost, mut again) = (false, 0);
    let stale = vec![0x55; SHAPE.block_bytes() as usize];
    while again < 3 {
        to.iter().for_each(|block| engine.write(*block, &stale));
        match engine.client.load(engine.space, &keys, &to) {
            Ok(found) => {
                assert_eq!(found, [true; 8]);
                keys.iter()
                    .zip(&to)
                    .for_each(|(key, at)| assert_eq!(engine.read(*at), bytes(*key)));
                again += u32::from(was_lost);
            }
            Err(error) if error.is_away() => {
                was_lost = true;
                to.iter().for_each(|block| engine.write(*block, &stale));
                thread::sleep(Duration::from_millis(5));
                to.iter().for_each(|block| assert_eq!(engine.read(*block), stale, "{error}"));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn the_server_is_killed() -> Result<(), Failed> {
    for round in 0..5 {
        let dir = TempDir::new()?;
        let first = started("server", dir.path(), 0, "ready");
        let mut client = started("survivor", dir.path(), 0, "stored");
        thread::sleep(Duration::from_millis(10 + 7 * round));
        drop(first);
        let _second = started("server", dir.path(), 0, "ready");
        let ended = client.0.wait()?;
        if !ended.success() {
            return Err(format!("round {round}: {ended}").into());
        }
    }
    Ok(())
}

fn clients_are_killed() -> Result<(), Failed> {
    let serving = serving(StackConfig::default());
    // Loads the library, which stays.
    drop(CudaDriver::load()?.device(0)?);
    let files = open_files();
    kill_at_random(&serving, (CLIENTS, KILLS), 30_000, |_| Ok(()))?;
    settled(&serving, 0);
    until("no marks are mapped", || mappings("ripieno-pool") == 0);
    until("no descriptor is left", || open_files() <= files);
    serving.close()
}
