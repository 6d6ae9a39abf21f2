//! Handles of a store that are left when its stack is dropped, threads that end with it, and
//! processes that were forked.

#![allow(unsafe_code, reason = "forks the process of the test")]

use std::{any::Any, env, mem, path::Path, process::Command, sync::Arc, thread};

use nvme_driver::{Clock, ControllerOptions, MonotonicClock};
use nvme_emu::{EmuConfig, MemoryMedia};
use objstore::{
    BlockId, Codec, Format, KvPool, KvShape, Layer, Namespace, Order, Store, StoreConfig,
    StoreError, StoreId, StoreOptions,
};
use ripieno_stack::{
    Builder, Devices, ErrorKind, Executor, KvStore as _, MetricsAddress, Own, OwnStore, RankMedia,
    Ranks, RanksOptions, Request, Stack, StackConfig, StackError,
};
use ripieno_testkit::keys;

const SHAPE: KvShape = KvShape { layers: 3, segments: 2, object_bytes: 4096, block_tokens: 16 };
/// Seconds after which a child ends that waits for a thread that it does not have.
const WATCHDOG: u32 = 600;

/// A reference to a store.
type Left = Box<dyn Any + Send>;
type Make = fn(&Stack) -> Left;

fn temporary() -> tempfile::TempDir {
    // Not the temporary directory: that may be a tmpfs without direct I/O.
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn open(dir: &Path) -> Stack {
    let config = StackConfig { capacity: Some(32 << 20), ..StackConfig::at(dir) };
    Builder::new(config, SHAPE).open().unwrap()
}

fn blocks(count: u32) -> Vec<BlockId> {
    (0..count).map(BlockId).collect()
}

fn storing(stack: &Stack) -> Request {
    Request::store(stack.store(), &keys(10..12), &blocks(2)).unwrap()
}

fn retrieving(stack: &Stack) -> Request {
    let prefix = stack.store().lookup(&keys(0..2)).unwrap();
    assert_eq!(prefix.len(), 2);
    Request::retrieve(stack.store(), &prefix, 0, &blocks(2)).unwrap()
}

fn started(request: Request) -> Request {
    request.start(Layer(1)).unwrap();
    request
}

fn moved(request: Request) -> Request {
    request.move_all().unwrap();
    request
}

const HANDLES: [(&str, Make); 12] = [
    ("a store", |stack| Box::new(stack.store().clone())),
    ("another namespace", |stack| {
        let namespace = Namespace { adapter: "other".into(), ..Namespace::default() };
        Box::new(stack.store().within(&namespace).unwrap())
    }),
    ("a plane", |stack| Box::new(stack.store().plane().clone())),
    ("a prefix", |stack| Box::new(stack.store().lookup(&keys(0..2)).unwrap())),
    ("a reservation", |stack| Box::new(stack.store().reserve(&keys(10..12)).unwrap())),
    ("a request of the store", |stack| {
        let save = stack.store().allocate(&keys(10..12), &blocks(2)).unwrap();
        stack.store().start(&save, Layer(0), Order::Unordered).unwrap();
        Box::new(save)
    }),
    ("a request that stores", |stack| Box::new(storing(stack))),
    ("one that was started", |stack| Box::new(started(storing(stack)))),
    ("one that was moved", |stack| Box::new(moved(storing(stack)))),
    ("a request that retrieves", |stack| Box::new(retrieving(stack))),
    ("one that was started", |stack| Box::new(started(retrieving(stack)))),
    ("one that was moved", |stack| Box::new(moved(retrieving(stack)))),
];

fn is_closed(error: &StackError) -> bool {
    matches!(error, StackError::Store(StoreError::Failed { .. }))
}

/// Drops a stack while these handles are left. It was closed then: another one finds what only a
/// close makes durable, also while they are there.
fn dropped_before(dir: &Path, which: &[usize]) {
    let stack = open(dir);
    assert_eq!(stack.save(&keys(0..3), &blocks(3)).unwrap(), 3);
    let left: Vec<Left> = which.iter().map(|at| HANDLES[*at].1(&stack)).collect();
    assert_eq!(stack.store().remove(&keys(2..3)).unwrap(), 1);
    drop(stack);
    for (at, handle) in which.iter().zip(&left) {
        let name = HANDLES[*at].0;
        if let Some(request) = handle.downcast_ref::<Request>() {
            assert!(is_closed(&request.start(Layer(0)).unwrap_err()), "{name}");
            assert!(is_closed(&request.move_all().unwrap_err()), "{name}");
        }
        if let Some(store) = handle.downcast_ref::<Store>() {
            assert!(matches!(store.lookup(&keys(0..1)), Err(StoreError::Failed { .. })), "{name}");
        }
    }
    let again = open(dir);
    assert_eq!(again.store().peek(&keys(0..3)), 2, "{which:?}: it was not closed");
    assert_eq!(again.store().peek(&keys(10..12)), 0, "{which:?}: it was not committed");
    drop(left);
    assert_eq!(again.load(&keys(0..2), &blocks(2)).unwrap(), [true; 2]);
    again.close().unwrap();
}

#[test]
fn a_dropped_stack_was_closed_whatever_is_left_of_it() {
    let place = temporary();
    (0..HANDLES.len()).for_each(|at| dropped_before(place.path(), &[at]));
    dropped_before(place.path(), &(0..6).collect::<Vec<_>>());
}

#[test]
fn a_key_that_is_not_stored_hides_none_behind_it() {
    let place = temporary();
    let stack = open(place.path());
    let bytes = |at: u8| vec![at; SHAPE.block_bytes() as usize];
    (0..8).for_each(|at| stack.write(BlockId(at.into()), &bytes(at)).unwrap());
    stack.save(&keys(0..3), &blocks(3)).unwrap();
    stack.store().remove(&keys(1..2)).unwrap();
    let to: Vec<BlockId> = (4..8).map(BlockId).collect();
    let stored = [true, false, true, false];
    assert_eq!(stack.load(&keys(0..4), &to).unwrap(), stored);
    for (block, from) in to.iter().zip([0, 5, 2, 7]) {
        assert!(stack.read(*block).unwrap() == bytes(from), "{block}");
    }
    assert!(stack.load(&keys(0..4), &to[1..]).is_err());
    let store = OwnStore::new(stack);
    assert_eq!(store.are_stored(&keys(0..4)).unwrap(), stored);
    let (request, found) = store.fetch(&keys(0..4), &to).unwrap();
    assert_eq!((request.accepted(), &*found), (2, &stored[..]));
    store.close().unwrap();
    assert_eq!(store.are_stored(&keys(0..1)).unwrap_err().kind(), ErrorKind::Failed);
}

#[test]
fn handles_may_be_dropped_before_the_stack_and_on_any_thread() {
    let place = temporary();
    let stack = open(place.path());
    stack.save(&keys(0..3), &blocks(3)).unwrap();
    for (_, make) in HANDLES {
        drop(make(&stack));
        let left = make(&stack);
        thread::spawn(move || drop(left)).join().unwrap();
    }
    drop(stack);
    assert_eq!(open(place.path()).store().peek(&keys(0..3)), 3);
}

#[test]
fn a_stack_may_be_dropped_while_other_threads_use_its_store() {
    let place = temporary();
    let stack = open(place.path());
    stack.save(&keys(0..2), &blocks(2)).unwrap();
    let (begun, has_begun) = std::sync::mpsc::channel();
    let users: Vec<_> = (0..3)
        .map(|_| {
            let (request, begun) = (retrieving(&stack), begun.clone());
            thread::spawn(move || {
                request.move_all().unwrap();
                begun.send(()).unwrap();
                loop {
                    if let Err(error) = request.wait(Layer(0)).and_then(|_| request.move_all()) {
                        return is_closed(&error) || error.kind() == ErrorKind::Invalid;
                    }
                }
            })
        })
        .collect();
    users.iter().for_each(|_| has_begun.recv().unwrap());
    drop(stack);
    assert!(users.into_iter().all(|user| user.join().unwrap()));
    assert_eq!(open(place.path()).store().peek(&keys(0..2)), 2);
}

#[test]
fn controllers_keep_the_threads_that_answer_for_them() {
    let config = EmuConfig::new("kept").namespace(MemoryMedia::new(32 << 20).unwrap(), 4096);
    let mut below = Devices::from(vec![config]);
    below.attach(&ControllerOptions::default(), None).unwrap();
    let (clock, (devices, space)) = (below.clock(), below.take_attached().unwrap());
    let memory = space.alloc(4 * SHAPE.block_bytes() as usize).unwrap();
    let config = StoreConfig {
        devices,
        executor: Executor::Host.factory(&clock, None),
        clock,
        shape: SHAPE,
        namespace: Namespace::default(),
        pool: KvPool::contiguous(memory, &SHAPE, 4).unwrap(),
        gpu: None,
        options: StoreOptions::default(),
    };
    let store = Store::create(config, &Format::new(StoreId([7; 16]), SHAPE)).unwrap();
    // The wrong order: what the store is on goes first.
    drop(below);
    let request = Request::store(&store, &keys(0..2), &blocks(2)).unwrap();
    request.move_all().unwrap();
    assert_eq!(request.commit().unwrap().written, 2);
    store.close().unwrap();
}

/// Variable that makes `starved` do its work.
const STARVED: &str = "RIPIENO_TEST_STARVED";

/// The process that runs out of descriptors.
#[test]
fn starved() {
    if env::var_os(STARVED).is_none() {
        return;
    }
    // SAFETY: ends this process if it waits for ever.
    unsafe { libc::alarm(WATCHDOG) };
    let place = temporary();
    // A socket's path is short.
    let run = tempfile::tempdir().unwrap();
    let socket = run.path().join("metrics");
    let address = MetricsAddress::Unix(socket.clone());
    let (path, capacity) = (Some(place.path().join("store")), Some(32 << 20));
    let config = StackConfig { path, capacity, metrics: Some(address), ..StackConfig::default() };
    let stack = Builder::new(config, SHAPE).open().unwrap();
    // SAFETY: makes a descriptor.
    let client = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0) };
    assert!(client >= 0);
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads and lowers this process's limit. No other test is in it.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        let none = libc::rlimit { rlim_cur: 0, ..limit };
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none), 0);
    }
    let mut name = libc::sockaddr_un { sun_family: libc::AF_UNIX as u16, sun_path: [0; 108] };
    let path = socket.as_os_str().as_encoded_bytes();
    for (to, from) in name.sun_path.iter_mut().zip(path) {
        *to = *from as libc::c_char;
    }
    let len = mem::size_of_val(&name) as u32;
    // SAFETY: a socket, and an address of that length. The endpoint cannot accept it.
    assert_eq!(unsafe { libc::connect(client, (&raw const name).cast(), len) }, 0);
    drop(stack);
    // SAFETY: as above; for the directories to be removed.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

#[test]
fn an_endpoint_ends_without_descriptors() {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "starved", "--nocapture"]).env(STARVED, "1");
    assert!(command.status().unwrap().success());
}

/// Calls `act` in a forked process, and returns its status; 0 if it returned true.
fn in_a_fork(act: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child has one thread. It takes no lock that another thread may have held, and
    // ends without destructors.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: as above.
            unsafe { libc::alarm(WATCHDOG) };
            let status = i32::from(!act());
            // SAFETY: as above.
            unsafe { libc::_exit(status) }
        }
        child => {
            assert!(child > 0, "{}", std::io::Error::last_os_error());
            let mut status = 0;
            // SAFETY: waits for a child of this process, and writes the status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            status
        }
    }
}

#[test]
fn a_forked_process_is_refused_and_leaves_the_store_alone() {
    let place = temporary();
    let stack = open(place.path());
    stack.save(&keys(0..2), &blocks(2)).unwrap();
    let (save, load) = (started(storing(&stack)), started(retrieving(&stack)));
    let own = Own::new(stack.store().clone());
    let (mut stack, mut requests, mut owned) = (Some(stack), Some((save, load)), Some(own));
    let status = in_a_fork(|| {
        let is_forked = |error: StackError| matches!(error, StackError::Forked { .. });
        let (save, load) = requests.take().unwrap();
        let mut refused = [&save, &load].into_iter().all(|request| {
            request.start(Layer(0)).is_err_and(is_forked)
                && request.wait(Layer(1)).is_err_and(is_forked)
                && request.poll(Layer(1)).is_err_and(is_forked)
                && request.move_all().is_err_and(is_forked)
                && request.hurry().is_err_and(is_forked)
        });
        refused &= owned.as_ref().unwrap().get().is_err_and(is_forked);
        refused &= save.commit().is_err_and(is_forked);
        drop((load, owned.take(), stack.take()));
        refused
    });
    assert_eq!(status, 0, "14: it waited");
    let (stack, (save, load)) = (stack.unwrap(), requests.unwrap());
    load.move_all().unwrap_err();
    for layer in [0, 2] {
        save.start(Layer(layer)).unwrap();
        load.start(Layer(layer)).unwrap();
    }
    for layer in 0..3 {
        save.wait(Layer(layer)).unwrap();
        load.wait(Layer(layer)).unwrap();
    }
    assert_eq!(save.commit().unwrap().written, 2);
    drop((load, owned));
    stack.close().unwrap();
    assert_eq!(open(place.path()).store().peek(&keys(10..12)), 2);
}

#[test]
fn a_forked_process_leaves_a_rank_alone() {
    let place = temporary();
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let media = RankMedia::Files { bytes: 32 << 20, count: 1, lba_bytes: 4096 };
    let options =
        RanksOptions { id: StoreId([7; 16]), ranks: 1, shape: SHAPE, codec: Codec::None, media };
    let ranks = Ranks::prepare(&place.path().join("store"), &options, &clock).unwrap();
    let builder = Builder::new(StackConfig::default(), SHAPE).on(ranks.devices(0).unwrap());
    let rank = builder.open_rank(ranks.rank(0)).unwrap();
    let mut rank = Some(rank);
    let status = in_a_fork(|| {
        let rank = rank.take().unwrap();
        rank.close().is_err_and(|error| matches!(error, StackError::Forked { .. }))
    });
    assert_eq!(status, 0, "14: it waited");
    let rank = rank.unwrap();
    rank.plane().sync().unwrap();
    rank.close().unwrap();
}
