//! A running server.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr},
    num::NonZeroU64,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        mpsc::{self, Sender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use nvme_emu::Emu;
use objstore::{KvShape, Plane};
use ripieno_serve::{
    Client, Control, ControlAddress, PinLimits, RefusalKind, Reload, ServeError, Server,
    ServerOptions, Settings, UserLimits,
    control::Status,
    protocol::{Answer, Call, VERSION},
};
use ripieno_stack::{Builder, PoolMemory, Stack, StackConfig, pace};
use ripieno_testkit::until;
use tempfile::TempDir;

pub const SHAPE: KvShape = KvShape { layers: 3, segments: 2, object_bytes: 4096, block_tokens: 16 };
pub const CAPACITY: u64 = 32 << 20;

/// Settings that a reload reads; `None`: they are wrong.
type Configured = Arc<Mutex<Option<Settings>>>;

/// A running server.
pub struct Rig {
    pub dir: TempDir,
    pub http: Option<SocketAddr>,
    /// The plane of its store.
    pub plane: Plane,
    /// The controllers of its devices.
    pub emus: Vec<Arc<Emu>>,
    configured: Configured,
    stop: Sender<()>,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

impl Rig {
    pub fn new() -> Self {
        Self::on(TempDir::new().unwrap())
    }

    pub fn on(dir: TempDir) -> Self {
        Self::limited(dir, 4, BTreeMap::new())
    }

    /// Runs a server for so many clients, with these limits of bandwidth.
    pub fn limited(dir: TempDir, sessions_max: u32, bandwidth: BTreeMap<u32, NonZeroU64>) -> Self {
        Self::with(dir, |options| {
            options.settings.sessions_max = sessions_max;
            options.settings.limits =
                bandwidth.into_iter().map(|(uid, bytes_s)| (uid, moves(bytes_s))).collect();
        })
    }

    /// Runs a server with changed options.
    pub fn with(dir: TempDir, change: impl FnOnce(&mut ServerOptions)) -> Self {
        Self::serving(dir, 0, change)
    }

    /// Runs a server with a DRAM cache.
    pub fn with_dram(dir: TempDir, bytes: u64) -> Self {
        Self::serving(dir, bytes, |_| ())
    }

    fn serving(dir: TempDir, dram: u64, change: impl FnOnce(&mut ServerOptions)) -> Self {
        let config = StackConfig { dram: Some(dram), ..StackConfig::default() };
        let stack = open(&dir, config);
        Self::of(dir, stack, change)
    }

    /// Runs a server that decides when layers start.
    pub fn paced(dir: TempDir) -> Self {
        let config = StackConfig { pacing: Some(true), ..StackConfig::default() };
        let stack = open(&dir, config);
        Self::of(dir, stack, |_| ())
    }

    /// Runs a server that decides when layers start only while a client waits for one.
    pub fn held(dir: TempDir) -> Self {
        let stack = open(&dir, StackConfig::default());
        pace(stack.store().plane()).unwrap();
        Self::of(dir, stack, |_| ())
    }

    /// Returns the number of layers that wait for their turn.
    pub fn waiting(&self) -> u32 {
        self.plane.stats().unwrap().layers_waiting
    }

    fn of(dir: TempDir, stack: Stack, change: impl FnOnce(&mut ServerOptions)) -> Self {
        let plane = stack.store().plane().clone();
        let emus = stack.emus().to_vec();
        let mut options = options(socket(dir.path()));
        change(&mut options);
        let server = Server::bind(stack, options).unwrap();
        let http = server.http();
        let (stop, stopped) = mpsc::channel();
        let run = move || server.run(|| stopped.try_recv().is_ok());
        let configured = Configured::default();
        Self { dir, http, plane, emus, configured, stop, thread: Some(thread::spawn(run)) }
    }

    /// Runs a server with a port, whose settings can be read again.
    pub fn reloading() -> Self {
        let configured = Configured::default();
        let shared = configured.clone();
        let mut rig = Self::with(TempDir::new().unwrap(), |options| {
            options.http = Some(([127, 0, 0, 1], 0).into());
            options.settings.token = Some("a token of 16 bytes".to_owned());
            *shared.lock().unwrap() = Some(options.settings.clone());
            let reload = move || shared.lock().unwrap().clone().ok_or("it is broken".to_owned());
            options.reload = Some(Reload(Arc::new(reload)));
        });
        rig.configured = configured;
        rig
    }

    /// Changes the settings that a reload reads.
    pub fn configure(&self, change: impl FnOnce(&mut Settings)) {
        change(self.configured.lock().unwrap().as_mut().unwrap());
    }

    pub fn break_configuration(&self) {
        *self.configured.lock().unwrap() = None;
    }

    pub fn socket(&self) -> PathBuf {
        socket(self.dir.path())
    }

    pub fn client(&self) -> Client {
        Client::connect(self.socket(), SHAPE, 16).unwrap()
    }

    pub fn control(&self) -> Control {
        Control::new(ControlAddress::Unix(self.socket()))
    }

    pub fn status(&self) -> Status {
        self.control().get("/status").unwrap()
    }

    /// Waits until nothing of any client is left, and returns the state then.
    pub fn settled(&self) -> Status {
        let mut status = self.status();
        until("no session is left", || {
            status = self.status();
            status.sessions.is_empty()
        });
        status
    }

    pub fn close(self) -> TempDir {
        let (dir, closed) = self.end();
        closed.unwrap();
        dir
    }

    /// Ends the server, and returns the error of that.
    pub fn end(mut self) -> (TempDir, Result<(), ServeError>) {
        self.stop.send(()).unwrap();
        let closed = self.thread.take().unwrap().join().unwrap();
        assert!(!self.socket().exists(), "the socket is removed");
        (std::mem::replace(&mut self.dir, TempDir::new().unwrap()), closed)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = self.stop.send(());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn open(dir: &TempDir, config: StackConfig) -> Stack {
    let (path, capacity) = (Some(dir.path().join("store")), Some(CAPACITY));
    let builder = Builder::new(StackConfig { path, capacity, ..config }, SHAPE);
    builder.pool(PoolMemory::Own { blocks: 2 }).open().unwrap()
}

pub fn socket(dir: &Path) -> PathBuf {
    dir.join("ripieno.sock")
}

/// Returns a limit of bandwidth only.
pub fn moves(bytes_s: NonZeroU64) -> UserLimits {
    UserLimits { bandwidth: Some(bytes_s), ..UserLimits::default() }
}

/// Returns the options of a server for four clients of its own user.
pub fn options(socket: PathBuf) -> ServerOptions {
    let settings = Settings {
        users: Vec::new(),
        sessions_max: 4,
        pool_bytes_max: 64 << 20,
        limits: BTreeMap::new(),
        hold_max: Duration::from_secs(600),
        pins: PinLimits::default(),
        token: None,
    };
    ServerOptions { socket, http: None, settings, reload: None }
}

/// A client without a pool that sends anything.
pub struct Raw(UnixStream);

impl Raw {
    pub fn new(rig: &Rig) -> Self {
        let raw = Self(UnixStream::connect(rig.socket()).unwrap());
        let hello = Call::Hello { version: VERSION, pool: None, after: None, member: None };
        assert!(matches!(raw.call(&hello), Answer::Welcome { .. }));
        raw
    }

    pub fn call(&self, call: &Call) -> Answer {
        (&self.0).write_all(&framed(call)).unwrap();
        let mut len = [0; 4];
        (&self.0).read_exact(&mut len).unwrap();
        let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
        (&self.0).read_exact(&mut bytes).unwrap();
        postcard::from_bytes(&bytes).unwrap()
    }

    /// Sends bytes, and waits until the server has answered all that was in them.
    pub fn send(mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
        self.0.shutdown(Shutdown::Write).unwrap();
        // A connection that is reset was closed with bytes left.
        let _ = self.0.read_to_end(&mut Vec::new());
    }

    pub fn refused(&self, call: &Call) -> RefusalKind {
        match self.call(call) {
            Answer::Refused { kind, .. } => kind,
            other => panic!("{other:?}"),
        }
    }
}

/// Returns a message with its length.
pub fn framed(call: &Call) -> Vec<u8> {
    let bytes = postcard::to_stdvec(call).unwrap();
    [&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat()
}

/// Returns the kind of a refusal.
pub fn kind(error: ServeError) -> RefusalKind {
    match error {
        ServeError::Refused { kind, .. } => kind,
        other => panic!("{other}"),
    }
}
