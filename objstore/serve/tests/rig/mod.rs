//! A running server.

use std::{
    collections::BTreeMap,
    num::NonZeroU64,
    path::{Path, PathBuf},
    sync::mpsc::{self, Sender},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use objstore::KvShape;
use ripieno_serve::{
    Client, Control, RefusalKind, ServeError, Server, ServerOptions,
    protocol::{Answer, Call, Status},
};
use ripieno_stack::{Builder, PoolMemory};
use tempfile::TempDir;

pub const SHAPE: KvShape = KvShape { layers: 3, segments: 2, object_bytes: 4096, block_tokens: 16 };
pub const CAPACITY: u64 = 32 << 20;

/// A running server.
pub struct Rig {
    pub dir: TempDir,
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

    /// Runs a server for so many clients, with these limits.
    pub fn limited(dir: TempDir, sessions_max: u32, bandwidth: BTreeMap<u32, NonZeroU64>) -> Self {
        let stack = Builder::new(dir.path().join("store"), SHAPE)
            .capacity(CAPACITY)
            .pool(PoolMemory::Own { blocks: 2 })
            .open()
            .unwrap();
        let options = ServerOptions {
            socket: socket(dir.path()),
            users: Vec::new(),
            sessions_max,
            pool_bytes_max: 64 << 20,
            bandwidth,
        };
        let server = Server::bind(stack, options).unwrap();
        let (stop, stopped) = mpsc::channel();
        let run = move || server.run(|| stopped.try_recv().is_ok());
        Self { dir, stop, thread: Some(thread::spawn(run)) }
    }

    pub fn socket(&self) -> PathBuf {
        socket(self.dir.path())
    }

    pub fn client(&self) -> Client {
        Client::connect(self.socket(), SHAPE, 16).unwrap()
    }

    pub fn status(&self) -> Status {
        let control = Control::connect(&self.socket()).unwrap();
        match control.call(&Call::Status).unwrap() {
            Answer::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }

    /// Waits until nothing of any client is left, and returns the state then.
    pub fn settled(&self) -> Status {
        let since = Instant::now();
        loop {
            let status = self.status();
            if status.sessions.is_empty() || since.elapsed() > Duration::from_secs(30) {
                return status;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn close(mut self) -> TempDir {
        self.stop.send(()).unwrap();
        self.thread.take().unwrap().join().unwrap().unwrap();
        assert!(!self.socket().exists(), "the socket is removed");
        std::mem::replace(&mut self.dir, TempDir::new().unwrap())
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = self.stop.send(());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

pub fn socket(dir: &Path) -> PathBuf {
    dir.join("ripieno.sock")
}

/// Returns the kind of a refusal.
pub fn kind(error: ServeError) -> RefusalKind {
    match error {
        ServeError::Refused { kind, .. } => kind,
        other => panic!("{other}"),
    }
}
