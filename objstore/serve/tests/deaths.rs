//! Processes that are killed: clients at random points, and the server under its clients.
//!
//! This program is also the processes that are killed: with `RIPIENO_DEATHS_ROLE` it is a client or
//! a server, on the directory `RIPIENO_DEATHS_DIR`. `RIPIENO_KILLS` is the number of clients that
//! are killed, `RIPIENO_SEED` decides which.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "processes report to the one that started them"
)]

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, Read as _},
    ops::Range,
    os::unix::{fs::PermissionsExt as _, process::ExitStatusExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use libtest_mimic::{Arguments, Failed, Trial};
use objstore::{BlockKey, Direction, KvShape, Layer, Namespace};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};
use ripieno_serve::{
    Client, Control, ControlAddress, PinLimits, PoolLayout, RefusalKind, Request, Reservation,
    ServeError, Server, ServerOptions, Settings, control::Status, protocol::Member,
};
use ripieno_stack::{Builder, DeviceChoice, PoolMemory, Stack, StackConfig, pace};
use ripieno_testkit::{blocks, pattern, until};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::process::{Pid, Signal};
use tempfile::TempDir;

const ROLE: &str = "RIPIENO_DEATHS_ROLE";
const DIR: &str = "RIPIENO_DEATHS_DIR";
const SEED: &str = "RIPIENO_DEATHS_SEED";

const SHAPE: KvShape = KvShape { layers: 3, segments: 2, object_bytes: 4096, block_tokens: 16 };
const CLIENTS: usize = 8;
const KILLS: u32 = 200;
/// Keys that the clients store and load: more than the store has room for, so that it evicts.
const KEYS: u64 = 3000;
/// Keys that a client stores before the server is killed; all of them have room.
const STORED: usize = 80;
const CAPACITY: u64 = 32 << 20;

fn main() -> ExitCode {
    match std::env::var(ROLE).as_deref() {
        Ok("client") => return client_main(),
        Ok("saver") => return saver_main(),
        Ok("server") => return server_main(),
        _ => {}
    }
    let tests = vec![
        Trial::test("clients_are_killed_at_random", || clients_are_killed(None)),
        Trial::test("clients_of_a_server_with_pacing_are_killed_at_random", || {
            clients_are_killed(Some(true))
        }),
        Trial::test("a_client_is_killed_while_its_saves_wait", a_saver_is_killed),
        Trial::test("the_server_is_killed_under_its_clients", the_server_is_killed),
        // Only root can be another user.
        Trial::test("a_user_who_is_not_on_the_list_is_refused", a_stranger_is_refused)
            .with_ignored_flag(!rustix::process::geteuid().is_root()),
    ];
    // Descriptors of the process are counted.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, tests).exit_code()
}

fn socket(dir: &Path) -> PathBuf {
    dir.join("ripieno.sock")
}

fn open(dir: &Path, pacing: Option<bool>) -> Stack {
    let (capacity, devices) = (Some(CAPACITY), Some(DeviceChoice::Files(2)));
    let config = StackConfig { capacity, devices, pacing, ..StackConfig::at(dir.join("store")) };
    Builder::new(config, SHAPE).pool(PoolMemory::Own { blocks: 2 }).open().expect("a store")
}

fn serve(dir: &Path, stack: Stack, users: Vec<u32>) -> Server {
    let settings = Settings {
        users,
        // Killed clients count until the server notices it, late on a busy machine.
        sessions_max: 1000,
        pool_bytes_max: 1 << 30,
        limits: BTreeMap::new(),
        hold_max: Duration::from_secs(600),
        pins: PinLimits::default(),
        token: None,
    };
    let options = ServerOptions { socket: socket(dir), http: None, settings, reload: None };
    Server::bind(stack, options).expect("a server")
}

/// A process, killed on drop.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a process, and waits until it is ready.
fn spawn(role: &str, dir: &Path, seed: u64) -> Process {
    let mut child = start(role, dir, seed);
    let mut line = String::new();
    let out = child.0.stdout.as_mut().expect("its output");
    BufReader::new(out).read_line(&mut line).expect("its first line");
    assert_eq!(line, "ready\n", "seed {seed}");
    child
}

fn start(role: &str, dir: &Path, seed: u64) -> Process {
    let child = Command::new(std::env::current_exe().expect("this program"))
        .env(ROLE, role)
        .env(DIR, dir)
        .env(SEED, seed.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    Process(child.expect("a process"))
}

fn directory() -> PathBuf {
    PathBuf::from(std::env::var_os(DIR).expect("a directory"))
}

/// Returns keys, all different.
fn keys(range: Range<u64>) -> Vec<BlockKey> {
    let key = |seed| BlockKey(pattern(32, seed).try_into().expect("32 bytes"));
    range.map(key).collect()
}

fn bytes(key: BlockKey) -> Vec<u8> {
    pattern(SHAPE.block_bytes() as usize, key.seed() as u64)
}

/// Stores and loads until its standard input ends. Exit code 3 after a wrong byte.
fn client_main() -> ExitCode {
    let seed = std::env::var(SEED).expect("a seed").parse().expect("a number");
    let (over, is_over) = mpsc::channel();
    thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = over.send(());
    });
    let client = match Client::connect(socket(&directory()), SHAPE, 16) {
        Ok(client) => client,
        Err(error) => {
            eprintln!("seed {seed}: {error}");
            return ExitCode::from(4);
        }
    };
    println!("ready");
    let mut random = SmallRng::seed_from_u64(seed);
    while is_over.try_recv().is_err() {
        match work(&client, &mut random) {
            Ok(true) => {}
            Ok(false) => {
                eprintln!("seed {seed}: wrong bytes");
                return ExitCode::from(3);
            }
            Err(error) => {
                eprintln!("seed {seed}: {error}");
                return ExitCode::from(4);
            }
        }
    }
    ExitCode::SUCCESS
}

/// Does something. Returns false if a block that was found has other bytes than those of its key.
fn work(client: &Client, random: &mut SmallRng) -> Result<bool, ServeError> {
    let space = client.namespace(&Namespace::default())?;
    let first = random.random_range(0..KEYS / 8) * 8;
    let keys = keys(first..first + random.random_range(1..=8));
    match random.random_range(0..4) {
        0 | 1 => {
            let from = blocks(0, keys.len());
            for (key, block) in keys.iter().zip(&from) {
                client.write(*block, &bytes(*key))?;
            }
            let request = client.allocate(space, &keys, &from)?;
            let layers = random.random_range(0..=SHAPE.layers);
            (0..layers).try_for_each(|layer| request.start(Layer(layer)))?;
            if layers == SHAPE.layers {
                request.commit()?;
            }
        }
        2 => {
            let prefix = client.lookup(space, &keys)?;
            let request = client.retrieve(&prefix, 0, &blocks(8, prefix.len()))?;
            request.start(Layer(random.random_range(0..SHAPE.layers)))?;
        }
        _ => {
            let to = blocks(8, keys.len());
            let found = client.load(space, &keys, &to)?;
            for ((key, block), is_found) in keys.iter().zip(to).zip(found) {
                if is_found && client.read(block)? != bytes(*key) {
                    return Ok(false);
                }
            }
        }
    }
    Ok(true)
}

fn control(dir: &Path) -> Control {
    Control::new(ControlAddress::Unix(socket(dir)))
}

fn status(dir: &Path) -> Status {
    control(dir).get("/status").unwrap()
}

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").expect("the open files").count()
}

fn clients_are_killed(pacing: Option<bool>) -> Result<(), Failed> {
    let kills = std::env::var("RIPIENO_KILLS").map_or(Ok(KILLS), |kills| kills.parse())?;
    let dir = TempDir::new()?;
    let server = serve(dir.path(), open(dir.path(), pacing), Vec::new());
    let (stop, stopped) = mpsc::channel::<()>();
    let running = thread::spawn(move || server.run(|| stopped.try_recv().is_ok()));
    // Before any connection.
    let files = open_files();
    let before = status(dir.path());
    let seed = ripieno_testkit::seed();
    let mut random = SmallRng::seed_from_u64(seed);
    println!("seed {seed}, {kills} kills");
    let mut next = 0;
    let mut another = || {
        next += 1;
        spawn("client", dir.path(), seed.wrapping_add(next))
    };
    let mut clients: Vec<Process> = (0..CLIENTS).map(|_| another()).collect();
    for _ in 0..kills {
        thread::sleep(Duration::from_micros(random.random_range(0..20_000)));
        let client = &mut clients[random.random_range(0..CLIENTS)];
        client.0.kill()?;
        let ended = client.0.wait()?;
        if ended.signal() != Some(libc::SIGKILL) {
            return Err(format!("seed {seed}: a client ended by itself: {ended}").into());
        }
        *client = another();
        // A call that waits is interrupted, and must not fail.
        let paused = Pid::from_child(&clients[random.random_range(0..CLIENTS)].0);
        for signal in [Signal::STOP, Signal::CONT] {
            rustix::process::kill_process(paused, signal)?;
        }
    }
    for mut client in clients {
        drop(client.0.stdin.take());
        let ended = client.0.wait()?;
        if !ended.success() {
            return Err(format!("seed {seed}: a client that lived has {ended}").into());
        }
    }
    // The ledgers: sessions, requests, references, files, memory, descriptors.
    let mut left = status(dir.path());
    until("all sessions have ended", || {
        left = status(dir.path());
        left.sessions_ended > u64::from(kills) + CLIENTS as u64 && left.sessions.is_empty()
    });
    assert_eq!((left.files_writing, left.files_referenced), (0, 0), "seed {seed}");
    assert_eq!(left.refused_calls + left.refused_messages + left.refused_users, 0, "seed {seed}");
    assert!(left.files_stored > 0 && before.files_stored == 0);
    let maps = fs::read_to_string("/proc/self/maps")?;
    assert!(!maps.contains("ripieno-pool"), "seed {seed}: memory of a client is mapped");
    until("no descriptor is left", || open_files() <= files);
    assert_eq!(open_files(), files, "seed {seed}");
    stop.send(())?;
    running.join().expect("it did not panic")?;
    Ok(())
}

/// Hands saves over, as a client and as both parts of an engine, and waits to be killed.
fn saver_main() -> ExitCode {
    match saver() {
        Ok(_held) => {
            println!("ready");
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
        }
        Err(error) => eprintln!("{error}"),
    }
    ExitCode::FAILURE
}

fn saver() -> Result<(Request, Reservation, Request), ServeError> {
    let path = socket(&directory());
    let client = Client::connect(&path, SHAPE, 16)?;
    let space = client.namespace(&Namespace::default())?;
    let request = client.allocate(space, &keys(0..8), &blocks(0, 8))?;
    request.start_all(0..SHAPE.layers)?;
    let file = memfd_create("rank", MemfdFlags::ALLOW_SEALING).expect("memory");
    ftruncate(&file, SHAPE.block_bytes() * 16).expect("memory");
    fcntl_add_seals(&file, SealFlags::SHRINK).expect("memory");
    let part = |rank| Some(Member { engine: "engine".to_owned(), ranks: 1, rank });
    let pool = Some((PoolLayout::contiguous(&SHAPE, 16), file));
    let rank = Client::join(path.clone(), SHAPE, part(Some(0)), pool)?;
    let scheduler = Client::join(path, SHAPE, part(None), None)?;
    let space = scheduler.namespace(&Namespace::default())?;
    let room = scheduler.reserve(space, &keys(8..16))?;
    let job = rank.begin(Direction::Write, &room.places(), blocks(0, 8))?;
    job.start_all(0..SHAPE.layers)?;
    Ok((request, room, job))
}

/// Returns the number of pools that are mapped.
fn pools() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").expect("the mappings");
    maps.lines().filter(|line| line.contains("/memfd:")).count()
}

fn a_saver_is_killed() -> Result<(), Failed> {
    let dir = TempDir::new()?;
    let stack = open(dir.path(), None);
    let plane = stack.store().plane().clone();
    // Nobody advances it: layers wait until a client waits for them.
    pace(&plane)?;
    let waiting = || plane.stats().expect("it is open").layers_waiting;
    let server = serve(dir.path(), stack, Vec::new());
    let (stop, stopped) = mpsc::channel::<()>();
    let running = thread::spawn(move || server.run(|| stopped.try_recv().is_ok()));
    let client = Client::connect(socket(dir.path()), SHAPE, 16)?;
    let space = client.namespace(&Namespace::default())?;
    let (keys, from) = (keys(100..102), blocks(0, 2));
    for (key, block) in keys.iter().zip(&from) {
        client.write(*block, &bytes(*key))?;
    }
    let own = client.allocate(space, &keys, &from)?;
    own.start_all(0..SHAPE.layers)?;
    let (before, mapped) = (status(dir.path()), pools());
    let mut saver = spawn("saver", dir.path(), 0);
    assert_eq!((waiting(), status(dir.path()).files_writing), (9, 18));
    assert!(pools() > mapped);
    saver.0.kill()?;
    saver.0.wait()?;
    until("nothing of the saver is left", || {
        status(dir.path()).sessions.len() <= 1 && pools() <= mapped
    });
    let left = status(dir.path());
    assert_eq!(left.sessions, before.sessions);
    assert_eq!((left.files_writing, left.files_free), (2, before.files_free));
    assert_eq!((waiting(), pools()), (3, mapped));
    assert_eq!(plane.stats()?.stored_bytes, 0, "nobody needed it any more");
    assert_eq!(own.commit()?.written, 2);
    assert_eq!(client.load(space, &keys, &blocks(8, 2))?, [true; 2]);
    for (key, block) in keys.iter().zip(blocks(8, 2)) {
        assert!(client.read(block)? == bytes(*key), "wrong bytes");
    }
    client.close()?;
    let left = status(dir.path());
    assert_eq!((left.files_writing, left.files_referenced, waiting()), (0, 0, 0));
    plane.advance()?;
    assert_eq!(plane.with_scheduler(|it| it.pending())?, Some(0));
    stop.send(())?;
    running.join().expect("it did not panic")?;
    Ok(())
}

/// Calls `act` as another user. Only the calling thread changes.
#[allow(unsafe_code, reason = "the C library changes the user of all threads")]
fn as_user<T: Send>(uid: u32, act: impl FnOnce() -> T + Send) -> T {
    let changed = move || {
        // SAFETY: it changes the effective user of this thread, which ends soon.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) };
        assert_eq!(changed, 0, "{}", std::io::Error::last_os_error());
        act()
    };
    thread::scope(|scope| scope.spawn(changed).join().expect("no panic"))
}

fn is_denied<T>(result: &Result<T, ServeError>) -> bool {
    matches!(result, Err(ServeError::Refused { kind: RefusalKind::Denied, .. }))
}

fn a_stranger_is_refused() -> Result<(), Failed> {
    const LISTED: u32 = 65_533;
    const STRANGER: u32 = 65_534;
    let dir = TempDir::new()?;
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755))?;
    let server = serve(dir.path(), open(dir.path(), None), vec![LISTED]);
    let (stop, stopped) = mpsc::channel::<()>();
    let running = thread::spawn(move || server.run(|| stopped.try_recv().is_ok()));
    let path = socket(dir.path());
    let connect = || Client::connect(&path, SHAPE, 16);
    let stranger = as_user(STRANGER, connect);
    assert!(is_denied(&stranger), "{stranger:?}");
    assert_eq!(status(dir.path()).refused_users, 1);
    // One on the list has a session, and no control.
    let listed = as_user(LISTED, connect)?;
    let sessions = status(dir.path()).sessions;
    assert_eq!(sessions.iter().map(|session| session.uid).collect::<Vec<_>>(), [LISTED]);
    let control = as_user(LISTED, || control(dir.path()).get::<Status>("/status"));
    assert!(is_denied(&control), "{control:?}");
    drop(listed);
    stop.send(())?;
    running.join().expect("it did not panic")?;
    Ok(())
}

/// Serves until it is killed.
fn server_main() -> ExitCode {
    let dir = directory();
    let server = serve(&dir, open(&dir, None), Vec::new());
    println!("ready");
    match server.run(|| false) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Stores until the server is gone. Returns the keys whose commit has returned.
fn store_until_lost(client: &Client, first: u64, begun: &mpsc::Sender<()>) -> Vec<BlockKey> {
    let mut stored = Vec::new();
    let mut next = first;
    loop {
        let keys = keys(next..next + 2);
        let from = blocks(0, 2);
        for (key, block) in keys.iter().zip(&from) {
            client.write(*block, &bytes(*key)).expect("inside the pool");
        }
        let space = client.namespace(&Namespace::default());
        let saved = space.and_then(|space| match stored.len() < STORED {
            true => client.save(space, &keys, &from),
            false => client.peek(space, &keys).map(|_| 0),
        });
        match saved {
            Ok(accepted) => {
                stored.extend(&keys[..accepted]);
                // Nobody listens any more after the first one.
                let _ = begun.send(());
            }
            Err(ServeError::Lost { why }) => {
                assert!(!why.contains("no answer"), "it waited for a server that is gone: {why}");
                return stored;
            }
            Err(error) => panic!("{error}"),
        }
        next += 2;
    }
}

fn the_server_is_killed() -> Result<(), Failed> {
    let dir = TempDir::new()?;
    let mut server = spawn("server", dir.path(), 0);
    let clients: Vec<Client> =
        (0..3).map(|_| Client::connect(socket(dir.path()), SHAPE, 16)).collect::<Result<_, _>>()?;
    for round in 0..4 {
        let all: Vec<Vec<BlockKey>> = thread::scope(|scope| {
            let (begun, has_begun): (Vec<_>, Vec<_>) =
                clients.iter().map(|_| mpsc::channel()).unzip();
            let working: Vec<_> = (0..)
                .zip(clients.iter().zip(begun))
                .map(|(at, (client, begun))| {
                    let first = 1_000_000 * (3 * round + at);
                    scope.spawn(move || store_until_lost(client, first, &begun))
                })
                .collect();
            has_begun.iter().for_each(|client| client.recv().expect("it stores"));
            thread::sleep(Duration::from_millis(20 * round));
            server.0.kill().expect("it runs");
            working.into_iter().map(|client| client.join().expect("no panic")).collect()
        });
        server.0.wait()?;
        server = spawn("server", dir.path(), 0);
        for (client, stored) in clients.iter().zip(&all) {
            client.reconnect()?;
            assert!(!stored.is_empty(), "it had time to store something");
            let space = client.namespace(&Namespace::default())?;
            for key in stored {
                let block = blocks(5, 1);
                assert_eq!(
                    client.load(space, &[*key], &block)?,
                    [true],
                    "a committed block is lost"
                );
                assert!(client.read(block[0])? == bytes(*key), "wrong bytes");
            }
        }
    }
    Ok(())
}
