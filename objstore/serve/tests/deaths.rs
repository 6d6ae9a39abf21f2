//! Processes that are killed: clients at random points, and the server under its clients.
//!
//! This program is also the processes that are killed (`processes`).

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "processes report to the one that started them"
)]

mod processes;

use std::{
    fs,
    io::Read as _,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Child, ExitCode},
    sync::mpsc,
    thread,
    time::Duration,
};

use libtest_mimic::{Arguments, Failed, Trial};
use objstore::{BlockKey, Direction, KvShape, Layer, Namespace};
use rand::{Rng as _, rngs::SmallRng};
use ripieno_serve::{
    Client, PoolLayout, RefusalKind, Request, Reservation, ServeError, Settings, control::Status,
    protocol::Member,
};
use ripieno_stack::{Builder, DeviceChoice, PoolMemory, Stack, StackConfig, pace};
use ripieno_testkit::{blocks, pattern, until};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::process::{Pid, Signal};
use tempfile::TempDir;

use self::processes::{
    CAPACITY, KEYS, Serving, directory, exit, keys, kill_at_random, mappings, open_files, role,
    serve, settings, socket, started, work_until_told,
};

const SHAPE: KvShape = KvShape { layers: 3, segments: 2, object_bytes: 4096, block_tokens: 16 };
const CLIENTS: usize = 8;
const KILLS: u32 = 200;
/// Keys that a client stores before the server is killed; all of them have room.
const STORED: usize = 80;

fn main() -> ExitCode {
    match role().as_deref() {
        Some("client") => return work_until_told(connect, work),
        Some("saver") => return saver_main(),
        Some("server") => return server_main(),
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

fn open(dir: &Path, pacing: Option<bool>) -> Stack {
    let (capacity, devices) = (Some(CAPACITY), Some(DeviceChoice::Files(2)));
    let config = StackConfig { capacity, devices, pacing, ..StackConfig::at(dir.join("store")) };
    Builder::new(config, SHAPE).pool(PoolMemory::Own { blocks: 2 }).open().expect("a store")
}

fn bytes(key: BlockKey) -> Vec<u8> {
    pattern(SHAPE.block_bytes() as usize, key.seed() as u64)
}

fn connect() -> Result<Client, ServeError> {
    Client::connect(socket(&directory()), SHAPE, 16)
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

fn clients_are_killed(pacing: Option<bool>) -> Result<(), Failed> {
    let serving = Serving::new(|dir| open(dir, pacing), settings());
    // Before any connection.
    let files = open_files();
    assert_eq!(serving.status().files_stored, 0);
    // A call that waits is interrupted, and must not fail.
    let disturb = |client: &Child| {
        for signal in [Signal::STOP, Signal::CONT] {
            rustix::process::kill_process(Pid::from_child(client), signal)?;
        }
        Ok(())
    };
    // The ledgers: sessions, requests, references, files, memory, descriptors.
    kill_at_random(&serving, (CLIENTS, KILLS), 20_000, disturb)?;
    assert_eq!(mappings("ripieno-pool"), 0, "memory of a client is mapped");
    until("no descriptor is left", || open_files() <= files);
    assert_eq!(open_files(), files);
    serving.close()
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
    let part = |rank| Some(Member { engine: "engine".to_owned(), ranks: 1, rank, copy: 0 });
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
    mappings("/memfd:")
}

fn a_saver_is_killed() -> Result<(), Failed> {
    let mut planes = Vec::new();
    let opened = |dir: &Path| {
        let stack = open(dir, None);
        planes.push(stack.store().plane().clone());
        stack
    };
    let serving = Serving::new(opened, settings());
    let plane = planes.remove(0);
    // Nobody advances it: layers wait until a client waits for them.
    pace(&plane)?;
    let waiting = || plane.stats().expect("it is open").layers_waiting;
    let client = Client::connect(socket(serving.dir.path()), SHAPE, 16)?;
    let space = client.namespace(&Namespace::default())?;
    let (keys, from) = (keys(100..102), blocks(0, 2));
    for (key, block) in keys.iter().zip(&from) {
        client.write(*block, &bytes(*key))?;
    }
    let own = client.allocate(space, &keys, &from)?;
    own.start_all(0..SHAPE.layers)?;
    let (before, mapped) = (serving.status(), pools());
    let mut saver = started("saver", serving.dir.path(), 0, "ready");
    assert_eq!((waiting(), serving.status().files_writing), (9, 18));
    assert!(pools() > mapped);
    saver.0.kill()?;
    saver.0.wait()?;
    until("nothing of the saver is left", || {
        serving.status().sessions.len() <= 1 && pools() <= mapped
    });
    let left = serving.status();
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
    let left = serving.status();
    assert_eq!((left.files_writing, left.files_referenced, waiting()), (0, 0, 0));
    plane.advance()?;
    assert_eq!(plane.with_scheduler(|it| it.pending())?, Some(0));
    serving.close()
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
    let settings = Settings { users: vec![LISTED], ..settings() };
    let serving = Serving::new(|dir| open(dir, None), settings);
    fs::set_permissions(serving.dir.path(), fs::Permissions::from_mode(0o755))?;
    let path = socket(serving.dir.path());
    let connect = || Client::connect(&path, SHAPE, 16);
    let stranger = as_user(STRANGER, connect);
    assert!(is_denied(&stranger), "{stranger:?}");
    assert_eq!(serving.status().refused_users, 1);
    // One on the list has a session, and no control.
    let listed = as_user(LISTED, connect)?;
    let sessions = serving.status().sessions;
    assert_eq!(sessions.iter().map(|session| session.uid).collect::<Vec<_>>(), [LISTED]);
    let control = as_user(LISTED, || serving.control().get::<Status>("/status"));
    assert!(is_denied(&control), "{control:?}");
    drop(listed);
    serving.close()
}

/// Serves until it is killed.
fn server_main() -> ExitCode {
    let dir = directory();
    let server = serve(&dir, open(&dir, None), settings());
    println!("ready");
    exit(server.run(|| false))
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
    let mut server = started("server", dir.path(), 0, "ready");
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
        server = started("server", dir.path(), 0, "ready");
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
