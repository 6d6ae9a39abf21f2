//! A client: its pool, its handles, and its calls.
//!
//! A client names everything by numbers that the server gave it, or by blocks of its own pool. It
//! never names a file, an LBA or an address of memory: those are the store's.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    os::unix::net::UnixStream,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use objstore::{BlockId, Layer, PoolId, Prefix, Store, StoreError};
use ripieno_stack::{PoolLayout, Request, Stack, StackError};

use crate::{
    error::RefusalKind,
    limit::Limit,
    memory::{self, Mapping},
    peer::Peer,
    protocol::{Answer, Bytes, CONNECTIONS_MAX, Call, Keys, Layout, SessionStatus, Space},
};

/// Requests that a client may have at a time.
const REQUESTS_MAX: usize = 256;
/// Prefixes that a client may hold at a time.
const PREFIXES_MAX: usize = 4096;
/// Namespaces that a client may use.
const NAMESPACES_MAX: usize = 64;
/// Time that a layer waits for others to end before it is refused.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause between attempts to start a layer.
const START_PAUSE: Duration = Duration::from_micros(200);
/// Longest time until a client's turn, if its bandwidth is limited: its death is noticed only then.
const TURN_MAX: Duration = Duration::from_secs(5);

/// A refused call.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) kind: RefusalKind,
    pub(crate) message: String,
}

impl Refusal {
    pub(crate) fn new(kind: RefusalKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    fn argument(message: impl Into<String>) -> Self {
        Self::new(RefusalKind::Argument, message)
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        let kind = match &error {
            StoreError::NoSuchBlock { .. }
            | StoreError::NoSuchLayer { .. }
            | StoreError::NoSuchJob { .. }
            | StoreError::NoSuchPool { .. }
            | StoreError::DuplicateBlock { .. }
            | StoreError::Positions { .. }
            | StoreError::NotStarted { .. }
            | StoreError::InFlight { .. }
            | StoreError::Ended { .. }
            | StoreError::Config { .. }
            | StoreError::Catalog { .. } => RefusalKind::Argument,
            StoreError::Busy { .. } | StoreError::Ring { .. } => RefusalKind::Limit,
            StoreError::JournalFailed { .. } | StoreError::ReadOnly { .. } => RefusalKind::ReadOnly,
            StoreError::Failed { .. } => RefusalKind::Failed,
            _ => RefusalKind::Transfer,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<StackError> for Refusal {
    fn from(error: StackError) -> Self {
        match error {
            StackError::Store(error) => error.into(),
            error => Self::argument(error.to_string()),
        }
    }
}

/// The pool of a client. The memory outlives its registration.
#[derive(Debug)]
struct Pool {
    id: PoolId,
    blocks: u32,
    memory: Arc<Mapping>,
}

/// A request, and the blocks that it moves.
#[derive(Debug)]
struct Moving {
    request: Request,
    blocks: u32,
}

/// A client.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) peer: Peer,
    /// Names it in [`Call::Attach`].
    pub(crate) token: Bytes,
    /// A handle whose requests name blocks of the client's pool.
    store: Store,
    pool: Option<Pool>,
    limit: Option<Mutex<Limit>>,
    tables: Mutex<Tables>,
}

/// The things that the numbers of a client stand for.
#[derive(Debug, Default)]
struct Tables {
    namespaces: Vec<Store>,
    prefixes: HashMap<u64, Arc<Prefix>>,
    requests: HashMap<u64, Arc<Moving>>,
    /// Its other connections.
    connections: HashMap<u64, UnixStream>,
    last: u64,
    is_ended: bool,
}

impl Tables {
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

impl Session {
    /// Registers the client's pool.
    pub(crate) fn begin(
        stack: &Stack,
        peer: Peer,
        token: Bytes,
        pool: Option<(Layout, Option<OwnedFd>)>,
        pool_bytes_max: u64,
        limit: Option<Limit>,
    ) -> Result<Self, Refusal> {
        let mut store = stack.store().clone();
        let mut own = None;
        if let Some((Layout { rows, block_stride, blocks }, file)) = pool {
            let none = || Refusal::argument("no memory came with the pool's layout");
            let file = file.ok_or_else(none)?;
            let memory = memory::take(&file, pool_bytes_max).map_err(Refusal::argument)?;
            let memory = Arc::new(memory);
            let layout = PoolLayout { rows, block_stride, blocks };
            let id = stack.add_pool(&memory::engine(memory.clone()), &layout)?;
            store = store.with_pool(id);
            own = Some(Pool { id, blocks, memory });
        }
        let limit = limit.map(Mutex::new);
        Ok(Self { peer, token, store, pool: own, limit, tables: Mutex::default() })
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        // A thread that panicked leaves tables that are whole.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection, which is closed when the session ends. Returns its number.
    pub(crate) fn attach(&self, stream: UnixStream) -> Result<u64, Refusal> {
        let mut tables = self.tables();
        if tables.is_ended || tables.connections.len() >= CONNECTIONS_MAX {
            let why = format!("the session has ended, or has {CONNECTIONS_MAX} connections");
            return Err(Refusal::new(RefusalKind::Limit, why));
        }
        let number = tables.next();
        tables.connections.insert(number, stream);
        Ok(number)
    }

    /// Forgets a connection.
    pub(crate) fn detach(&self, number: u64) {
        self.tables().connections.remove(&number);
    }

    /// Ends the session, after its transfers: nothing refers to files or memory any more.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] if the store failed: the memory stays mapped.
    pub(crate) fn end(&self) -> Result<(), StoreError> {
        let Tables { namespaces, prefixes, requests, connections, .. } = {
            let mut tables = self.tables();
            let ended = Tables { is_ended: true, ..Tables::default() };
            std::mem::replace(&mut *tables, ended)
        };
        for stream in connections.values() {
            // A connection that is closed already needs no more.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        // Requests wait for their layers in flight, and free uncommitted files.
        drop((requests, prefixes, namespaces));
        // A call that is in progress on another connection may have a request left.
        self.pool
            .as_ref()
            .map_or(Ok(()), |pool| self.store.plane().remove_pool(pool.id).map(|_| ()))
    }

    /// Returns the state; `None` without a pool.
    pub(crate) fn status(&self) -> Option<SessionStatus> {
        let pool_bytes = self.pool.as_ref()?.memory.len() as u64;
        let tables = self.tables();
        Some(SessionStatus {
            uid: self.peer.uid,
            pid: self.peer.pid,
            pool_bytes,
            requests: tables.requests.len() as u32,
            prefixes: tables.prefixes.len() as u32,
        })
    }

    /// Carries out a call about blocks; `None` if it is another one.
    pub(crate) fn call(&self, call: Call) -> Option<Result<Answer, Refusal>> {
        Some(match call {
            Call::Namespace(space) => self.namespace(space),
            Call::Peek { namespace, keys } => {
                self.space(namespace).map(|store| Answer::Number(store.peek(&keys.0) as u32))
            }
            Call::Lookup { namespace, keys } => self.lookup(namespace, &keys),
            Call::Load { prefix, first, blocks } => self.load(prefix, first, &blocks),
            Call::Store { namespace, keys, blocks } => self.store(namespace, &keys, &blocks),
            Call::Start { request, layer } => self.start(request, Layer(layer)),
            Call::Wait { request, layer } => self.wait(request, Layer(layer)),
            Call::Commit { request } => self.commit(request),
            Call::Release { handle } => self.release(handle),
            _ => return None,
        })
    }

    fn namespace(&self, space: Space) -> Result<Answer, Refusal> {
        let wrong = || Refusal::argument("the digest of the weights has 32 bytes");
        let namespace = space.namespace().ok_or_else(wrong)?;
        if self.tables().namespaces.len() >= NAMESPACES_MAX {
            let why = format!("a client may use {NAMESPACES_MAX} namespaces");
            return Err(Refusal::new(RefusalKind::Limit, why));
        }
        let store = self.store.within(&namespace)?;
        let mut tables = self.tables();
        let spaces = &mut tables.namespaces;
        let found = spaces.iter().position(|known| known.namespace() == store.namespace());
        let number = found.unwrap_or_else(|| {
            spaces.push(store);
            spaces.len() - 1
        });
        Ok(Answer::Number(number as u32))
    }

    fn space(&self, number: u32) -> Result<Store, Refusal> {
        let found = self.tables().namespaces.get(number as usize).cloned();
        found.ok_or_else(|| Refusal::argument(format!("there is no namespace {number}")))
    }

    fn lookup(&self, namespace: u32, keys: &Keys) -> Result<Answer, Refusal> {
        let prefix = self.space(namespace)?.lookup(&keys.0)?;
        let blocks = prefix.len() as u32;
        let mut tables = self.tables();
        if tables.is_ended || tables.prefixes.len() >= PREFIXES_MAX {
            let why = format!("a client may hold {PREFIXES_MAX} prefixes; release some");
            return Err(Refusal::new(RefusalKind::Limit, why));
        }
        let number = tables.next();
        tables.prefixes.insert(number, Arc::new(prefix));
        Ok(Answer::Prefix { prefix: number, blocks })
    }

    /// Refuses more blocks than the pool has: each request's tables take memory of the server.
    fn blocks(&self, blocks: &[u32]) -> Result<Vec<BlockId>, Refusal> {
        let pool = self.pool.as_ref().map_or(0, |pool| pool.blocks);
        if blocks.len() > pool as usize {
            let given = blocks.len();
            let why = format!("{given} blocks were given; the client's pool has {pool}");
            return Err(Refusal::argument(why));
        }
        Ok(blocks.iter().map(|block| BlockId(*block)).collect())
    }

    fn load(&self, prefix: u64, first: u32, blocks: &[u32]) -> Result<Answer, Refusal> {
        let found = self.tables().prefixes.get(&prefix).cloned();
        let prefix = found.ok_or_else(|| unknown("prefix", prefix))?;
        let blocks = self.blocks(blocks)?;
        let request = Request::retrieve(&self.store, &prefix, first as usize, &blocks)?;
        let moved = blocks.len() as u32;
        let request = self.keep(Moving { request, blocks: moved })?;
        Ok(Answer::Request { request, accepted: moved, moved })
    }

    fn store(&self, namespace: u32, keys: &Keys, blocks: &[u32]) -> Result<Answer, Refusal> {
        let (store, blocks) = (self.space(namespace)?, self.blocks(blocks)?);
        let request = Request::store(&store, &keys.0, &blocks)?;
        let (accepted, moved) = request.accepted().unwrap_or_default();
        let (accepted, moved) = (accepted as u32, moved as u32);
        let request = self.keep(Moving { request, blocks: moved })?;
        Ok(Answer::Request { request, accepted, moved })
    }

    fn keep(&self, request: Moving) -> Result<u64, Refusal> {
        let mut tables = self.tables();
        if tables.is_ended || tables.requests.len() >= REQUESTS_MAX {
            drop(tables);
            let why = format!("a client may have {REQUESTS_MAX} requests; end some");
            return Err(Refusal::new(RefusalKind::Limit, why));
        }
        let number = tables.next();
        tables.requests.insert(number, Arc::new(request));
        Ok(number)
    }

    fn request(&self, number: u64) -> Result<Arc<Moving>, Refusal> {
        let found = self.tables().requests.get(&number).cloned();
        found.ok_or_else(|| unknown("request", number))
    }

    /// Takes a request out of the table, unless another call uses it.
    fn take(&self, number: u64) -> Result<Request, Refusal> {
        let mut tables = self.tables();
        let request = tables.requests.remove(&number).ok_or_else(|| unknown("request", number))?;
        let taken = Arc::try_unwrap(request).map_err(|request| {
            tables.requests.insert(number, request);
            Refusal::argument(format!("another call uses request {number}"))
        });
        taken.map(|moving| moving.request)
    }

    fn start(&self, request: u64, layer: Layer) -> Result<Answer, Refusal> {
        let moving = self.request(request)?;
        self.wait_for_turn(moving.blocks)?;
        let since = Instant::now();
        loop {
            match moving.request.start(layer) {
                // As many layers are in flight, of all clients, as there may be.
                Err(StackError::Store(StoreError::Busy { .. }))
                    if since.elapsed() < START_TIMEOUT =>
                {
                    self.store.plane().sync()?;
                    thread::sleep(START_PAUSE);
                }
                started => return Ok(started.map(|()| Answer::Done)?),
            }
        }
    }

    /// Waits until a client with a limit may move another layer.
    fn wait_for_turn(&self, blocks: u32) -> Result<(), Refusal> {
        let Some(limit) = &self.limit else { return Ok(()) };
        let shape = self.store.shape();
        let layer_bytes = u64::from(shape.segments) * u64::from(shape.object_bytes);
        let now = self.store.plane().now().duration();
        let wait = {
            // A thread that panicked leaves a limit that is whole.
            let mut limit = limit.lock().unwrap_or_else(PoisonError::into_inner);
            limit.take(u64::from(blocks) * layer_bytes, now, TURN_MAX)
        };
        let none = || {
            let why = "the client's bandwidth is used up for seconds; start fewer layers at a time";
            Refusal::new(RefusalKind::Limit, why)
        };
        thread::sleep(wait.ok_or_else(none)?);
        Ok(())
    }

    fn wait(&self, request: u64, layer: Layer) -> Result<Answer, Refusal> {
        self.request(request)?.request.wait(layer)?;
        Ok(Answer::Done)
    }

    fn commit(&self, request: u64) -> Result<Answer, Refusal> {
        if self.request(request)?.request.accepted().is_none() {
            return Err(Refusal::argument(format!("request {request} loads, and stores nothing")));
        }
        let done = self.take(request)?.commit()?;
        let (accepted, written) = (done.accepted as u32, done.written as u32);
        Ok(Answer::Committed { accepted, written })
    }

    fn release(&self, handle: u64) -> Result<Answer, Refusal> {
        if self.tables().prefixes.remove(&handle).is_none() {
            // Waits for its layers in flight.
            drop(self.take(handle)?);
        }
        Ok(Answer::Done)
    }
}

fn unknown(what: &str, number: u64) -> Refusal {
    Refusal::argument(format!("{what} {number} is not, or no longer, one of this client"))
}
