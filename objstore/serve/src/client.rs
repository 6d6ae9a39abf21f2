//! The client: memory for an engine's blocks, and the store's calls.

mod begin;
mod links;
mod request;

use std::{
    io,
    net::Shutdown,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use objstore::{BlockId, BlockKey, KvShape, Namespace, PinAnswer, Row, Usage};
use ripieno_stack::{PoolLayout, http};
use rustix::net::RecvFlags;

use crate::{
    error::{ServeError, reach_hint},
    memory::{self, Mapping},
    protocol::{self, Answer, Bytes, Call, Keys, Member, Received, VERSION},
};

pub use request::Request;
pub(crate) use request::numbers;

/// Time for an answer: longer than the server's own limits for a transfer.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(90);

/// An engine's connection to a server, and the memory of its KV blocks.
///
/// A cheap handle: clones share the session, and any number of threads may use them. A call that
/// waits does not hold up the others: each has a connection of its own.
///
/// When the server ends, calls return [`ServeError::Lost`] at once. The memory stays, and
/// [`Client::reconnect`] begins a new session with it.
#[derive(Debug, Clone)]
pub struct Client {
    inner: Arc<Inner>,
    /// The deadline of all its calls together; without one, each wait has its own.
    until: Option<Instant>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    shape: KvShape,
    member: Option<Member>,
    pool: Option<Pool>,
    links: Mutex<Links>,
    /// Held while a session begins: sessions with the same memory begin one after the other.
    beginning: Mutex<()>,
    /// Notified when a connection is idle again, or the session is lost.
    returned: Condvar,
}

/// The memory of a client's blocks.
#[derive(Debug)]
struct Pool {
    layout: PoolLayout,
    file: OwnedFd,
    memory: Mapping,
}

/// The connections of a session. The first one must live as long as the session.
#[derive(Debug)]
struct Links {
    /// Grows with each session, so that handles of an earlier one are recognised.
    generation: u64,
    session: Bytes,
    /// The first connection, while no call uses it, and others.
    idle: Vec<UnixStream>,
    /// Connections, idle or in use.
    open: usize,
    /// Set when the session has ended, with the reason.
    lost: Option<String>,
    /// True if layers wait for their turn.
    is_paced: bool,
}

/// A namespace of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpaceId {
    number: u32,
    generation: u64,
}

/// Stored blocks that a lookup found. They stay stored until this is dropped.
#[derive(Debug)]
#[must_use = "dropping it gives the blocks back"]
pub struct Prefix {
    handle: Handle,
    number: u64,
    blocks: usize,
}

/// Numbers of a session, which are released on drop.
#[derive(Debug)]
pub(crate) struct Handle {
    client: Client,
    pub(crate) numbers: Vec<u64>,
    pub(crate) generation: u64,
    /// Set when the call that ends them was made.
    is_over: Mutex<bool>,
}

impl Handle {
    /// Returns the mark that says if the call that ends them was made.
    pub(crate) fn is_over(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the numbers of another handle released with these.
    fn join(&mut self, mut other: Self) {
        self.numbers.append(&mut other.numbers);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.numbers.is_empty() && !*self.is_over() {
            let call = Call::Release { handles: std::mem::take(&mut self.numbers) };
            // Of a session that was lost, the server has released it.
            let _ = self.client.call_in(self.generation, &call);
        }
    }
}

impl Client {
    /// Connects to the server, with new memory for `blocks` blocks: one tensor after the other
    /// ([`PoolLayout::contiguous`]). Its bytes are zero.
    ///
    /// # Errors
    /// Returns [`ServeError::Socket`] if no server is there, [`ServeError::Memory`], or
    /// [`ServeError::Refused`]: the user is not on the list, the server has as many clients as it
    /// may have, or its store has another shape.
    pub fn connect(
        path: impl Into<PathBuf>,
        shape: KvShape,
        blocks: u32,
    ) -> Result<Self, ServeError> {
        let bytes = shape.block_bytes().saturating_mul(u64::from(blocks));
        let layout = PoolLayout::contiguous(&shape, blocks);
        Self::connect_with(path, shape, layout, bytes)
    }

    /// Same as [`Client::connect`], with `bytes` bytes of memory in another layout.
    ///
    /// # Errors
    /// Same as [`Client::connect`].
    pub fn connect_with(
        path: impl Into<PathBuf>,
        shape: KvShape,
        layout: PoolLayout,
        bytes: u64,
    ) -> Result<Self, ServeError> {
        let failed = |source| ServeError::Memory { bytes, source };
        let (file, memory) = memory::make(bytes).map_err(failed)?;
        Self::begin(path.into(), shape, None, Some(Pool { layout, file, memory }))
    }

    /// Same as [`Client::connect`], with blocks in shared memory that the engine made: a memfd of
    /// whole pages that is sealed against shrinking.
    ///
    /// # Errors
    /// Same as [`Client::connect`], and [`ServeError::Unshared`] for another file.
    pub fn connect_shared(
        path: impl Into<PathBuf>,
        shape: KvShape,
        layout: PoolLayout,
        file: OwnedFd,
    ) -> Result<Self, ServeError> {
        Self::join(path.into(), shape, None, Some((layout, file)))
    }

    /// Connects as a part of an engine, if there is one. `pool`: the layout of blocks in shared
    /// memory, as for [`Client::connect_shared`].
    pub(crate) fn join(
        path: PathBuf,
        shape: KvShape,
        member: Option<Member>,
        pool: Option<(PoolLayout, OwnedFd)>,
    ) -> Result<Self, ServeError> {
        let pool = pool.map(|(layout, file)| {
            let memory = memory::take(&file, u64::MAX);
            memory.map(|memory| Pool { layout, file, memory })
        });
        let pool = pool.transpose().map_err(|why| ServeError::Unshared { why })?;
        Self::begin(path, shape, member, pool)
    }

    /// Ends the session: waits for calls in progress, and until nothing accesses the memory.
    ///
    /// # Errors
    /// Returns [`ServeError::Lost`] if the server is not there, or takes too long, and
    /// [`ServeError::Refused`] if its store failed: then devices may still access the memory.
    pub fn close(&self) -> Result<(), ServeError> {
        let lost = |why: String| ServeError::Lost { why };
        let _beginning = self.beginning();
        let timed = self.by(Some(Instant::now() + ANSWER_TIMEOUT));
        let is_busy = |links: &mut Links| links.lost.is_none() && links.idle.len() < links.open;
        let waited = self.inner.returned.wait_timeout_while(self.links(), timed.left(), is_busy);
        let (mut links, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        self.remember(&links);
        if let Some(why) = links.lost.replace("it was closed".to_owned()) {
            return Err(lost(why));
        }
        let (idle, session) = (std::mem::take(&mut links.idle), links.session.clone());
        self.inner.returned.notify_all();
        drop(links);
        if timeout.timed_out() {
            return Err(lost("other calls did not end in time".to_owned()));
        }
        let ended = idle.iter().map(|stream| stream.shutdown(Shutdown::Write));
        ended.collect::<io::Result<()>>().map_err(|error| lost(error.to_string()))?;
        // The server closes the first one when the session has ended.
        idle.iter().try_for_each(|stream| until_closed(stream, timed.left()))?;
        self.forget(&session);
        Ok(())
    }

    /// Returns an error if the session has ended, also while no call was made.
    ///
    /// # Errors
    /// Returns [`ServeError::Lost`].
    pub fn check(&self) -> Result<(), ServeError> {
        self.session().1.map_or(Ok(()), |why| Err(ServeError::Lost { why }))
    }

    /// Returns the shape of the blocks.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.inner.shape
    }

    /// Returns the memory of the blocks, for an engine that computes in it: its first byte, and its
    /// length in bytes. It lives as long as the last clone of this client. Between the start of a
    /// layer and the end of a wait for it, the devices may access its blocks.
    #[must_use]
    pub fn memory(&self) -> (NonNull<u8>, usize) {
        let memory = self.inner.pool.as_ref().map(|pool| &pool.memory);
        memory.map_or((NonNull::dangling(), 0), |memory| (memory.base(), memory.len()))
    }

    /// Writes a block: the objects of all rows, one after the other.
    ///
    /// # Errors
    /// Returns [`ServeError::Argument`] for a block that is not there, or another length.
    pub fn write(&self, block: BlockId, bytes: &[u8]) -> Result<(), ServeError> {
        self.check_block(block, bytes.len())?;
        let objects = bytes.chunks_exact(self.inner.shape.object_bytes as usize);
        for (row, object) in (0..).map(Row).zip(objects) {
            let pool = self.inner.pool.as_ref();
            let written = |pool: &Pool| pool.memory.write(pool.offset(block, row), object);
            self.inside(pool.is_some_and(written), block)?;
        }
        Ok(())
    }

    /// Reads a block, as [`Client::write`] writes it.
    ///
    /// # Errors
    /// Same as [`Client::write`].
    pub fn read(&self, block: BlockId) -> Result<Vec<u8>, ServeError> {
        let mut bytes = vec![0; self.inner.shape.block_bytes() as usize];
        self.check_block(block, bytes.len())?;
        let objects = bytes.chunks_exact_mut(self.inner.shape.object_bytes as usize);
        for (row, object) in (0..).map(Row).zip(objects) {
            let pool = self.inner.pool.as_ref();
            let read = |pool: &Pool| pool.memory.read(pool.offset(block, row), object);
            self.inside(pool.is_some_and(read), block)?;
        }
        Ok(bytes)
    }

    /// Gives blocks new pages, of zeros: what the kernel still reads into the old ones for a server
    /// that has died reaches nobody.
    pub(crate) fn discard(&self, blocks: &[BlockId]) -> Result<(), ServeError> {
        let Some(pool) = &self.inner.pool else { return Ok(()) };
        let bytes = u64::from(self.inner.shape.object_bytes);
        for block in blocks {
            for row in (0..self.inner.shape.rows()).map(Row) {
                let at = pool.offset(*block, row) as u64;
                memory::discard(&pool.file, at, bytes)
                    .map_err(|source| ServeError::Memory { bytes, source })?;
            }
        }
        Ok(())
    }

    fn check_block(&self, block: BlockId, len: usize) -> Result<(), ServeError> {
        let expected = self.inner.shape.block_bytes();
        if len as u64 != expected {
            let (what, given) = ("bytes of a block", len as u64);
            return Err(ServeError::Argument { what, given, expected });
        }
        self.inside(block.0 < self.blocks(), block)
    }

    /// Returns the number of blocks.
    fn blocks(&self) -> u32 {
        self.inner.pool.as_ref().map_or(0, |pool| pool.layout.blocks)
    }

    fn inside(&self, is_inside: bool, block: BlockId) -> Result<(), ServeError> {
        let (given, expected) = (u64::from(block.0), u64::from(self.blocks()));
        let error = ServeError::Argument { what: "block below", given, expected };
        is_inside.then_some(()).ok_or(error)
    }

    /// Returns a namespace, which is registered if it is new. Clients that name the same one share
    /// its blocks.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`] or [`ServeError::Lost`].
    pub fn namespace(&self, namespace: &Namespace) -> Result<SpaceId, ServeError> {
        let generation = self.links().generation;
        let number = self.number(generation, &Call::Namespace(namespace.into()))?;
        Ok(SpaceId { number, generation })
    }

    /// Returns how many leading keys are stored now.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`], [`ServeError::Stale`] or [`ServeError::Lost`].
    pub fn peek(&self, space: SpaceId, keys: &[BlockKey]) -> Result<usize, ServeError> {
        let (namespace, keys) = (space.number, Keys(keys.to_vec()));
        Ok(self.number(space.generation, &Call::Peek { namespace, keys })? as usize)
    }

    /// Returns the longest stored run of leading keys.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn lookup(&self, space: SpaceId, keys: &[BlockKey]) -> Result<Prefix, ServeError> {
        let (namespace, keys) = (space.number, Keys(keys.to_vec()));
        match self.call_in(space.generation, &Call::Lookup { namespace, keys })? {
            Answer::Prefix { prefix: number, blocks } => {
                let handle = self.handle(number, space.generation);
                Ok(Prefix { handle, number, blocks: blocks as usize })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Prepares to load the positions of a prefix from `first` on.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn retrieve(
        &self,
        prefix: &Prefix,
        first: usize,
        blocks: &[BlockId],
    ) -> Result<Request, ServeError> {
        self.begin_load(prefix, first, blocks, 0)
    }

    /// Prepares to store blocks, as many leading ones as there is room for.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn allocate(
        &self,
        space: SpaceId,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<Request, ServeError> {
        self.begin_save(space, keys, blocks, 0)
    }

    /// Stores blocks under keys, as many leading ones as there is room for, and returns their
    /// number. They are durable then.
    ///
    /// # Errors
    /// Same as [`Client::allocate`], [`Request::wait`] and [`Request::commit`].
    pub fn save(
        &self,
        space: SpaceId,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<usize, ServeError> {
        let request = self.begin_save(space, keys, blocks, self.inner.shape.layers)?;
        request.move_all()?;
        Ok(request.commit()?.accepted)
    }

    /// Loads the longest stored prefix of the keys into the leading ones of these blocks, and
    /// returns its length.
    ///
    /// # Errors
    /// Same as [`Client::lookup`], [`Client::retrieve`] and [`Request::wait`].
    pub fn load(
        &self,
        space: SpaceId,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<usize, ServeError> {
        let prefix = self.lookup(space, &keys[..keys.len().min(blocks.len())])?;
        let found = prefix.len();
        let mut request = self.begin_load(&prefix, 0, &blocks[..found], self.inner.shape.layers)?;
        // One message ends both.
        request.handle.join(prefix.handle);
        request.move_all()?;
        Ok(found)
    }

    /// Makes all changes so far durable. Commits are durable when they return.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`] or [`ServeError::Lost`].
    pub fn sync(&self) -> Result<(), ServeError> {
        let generation = self.links().generation;
        self.done(generation, &Call::Sync)
    }

    /// Makes a call whose answer is that it is done.
    fn done(&self, generation: u64, call: &Call) -> Result<(), ServeError> {
        match self.call_in(generation, call)? {
            Answer::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Makes a call whose answer is a number.
    fn number(&self, generation: u64, call: &Call) -> Result<u32, ServeError> {
        match self.call_in(generation, call)? {
            Answer::Number(number) => Ok(number),
            other => Err(unexpected(&other)),
        }
    }

    /// Drops keys for all clients of the namespace, including pinned ones and those in use. Returns
    /// how many were stored.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn remove(&self, space: SpaceId, keys: &[BlockKey]) -> Result<u32, ServeError> {
        let (namespace, keys) = (space.number, Keys(keys.to_vec()));
        self.number(space.generation, &Call::Remove { namespace, keys })
    }

    /// Pins the leading keys that are stored for so many seconds; until the session or the server
    /// ends, at the latest. The limits are the server's: its answer says what it did.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn pin(
        &self,
        space: SpaceId,
        keys: &[BlockKey],
        ttl_s: u64,
    ) -> Result<PinAnswer, ServeError> {
        let (namespace, keys) = (space.number, Keys(keys.to_vec()));
        let call = Call::Pin { namespace, keys, ttl_s, bytes_max: None, wait: false };
        match self.call_in(space.generation, &call)? {
            Answer::Pinned(answer) => Ok(answer),
            other => Err(unexpected(&other)),
        }
    }

    /// Ends a pin of this session. Returns false if it has ended.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn unpin(&self, pin: u64) -> Result<bool, ServeError> {
        let generation = self.links().generation;
        Ok(self.number(generation, &Call::Unpin { pin: Some(pin) })? > 0)
    }

    /// Returns the counts of a namespace.
    ///
    /// # Errors
    /// Same as [`Client::peek`].
    pub fn usage(&self, space: SpaceId) -> Result<Usage, ServeError> {
        match self.call_in(space.generation, &Call::Usage { namespace: space.number })? {
            Answer::Usage(usage) => Ok(usage),
            other => Err(unexpected(&other)),
        }
    }

    /// Returns the number of the session, and the reason if it has ended, also while no call was
    /// made.
    pub(crate) fn session(&self) -> (u64, Option<String>) {
        let (generation, is_closed) = {
            let links = self.links();
            if links.lost.is_some() {
                return (links.generation, links.lost.clone());
            }
            (links.generation, links.idle.last().is_some_and(is_closed))
        };
        if is_closed {
            self.lose(generation, "the server has closed it");
        }
        let links = self.links();
        (links.generation, links.lost.clone())
    }

    /// Returns true if the server decides when layers start.
    pub(crate) fn is_paced(&self) -> bool {
        self.links().is_paced
    }

    /// Returns the shape of the blocks of a server.
    ///
    /// # Errors
    /// Same as [`Client::connect`].
    pub fn shape_at(path: &Path) -> Result<KvShape, ServeError> {
        let call = Call::Hello { version: VERSION, pool: None, after: None, member: None };
        let stream = open(path, ANSWER_TIMEOUT)?;
        match call_on(&stream, &call, None, ANSWER_TIMEOUT)? {
            Answer::Welcome { shape, .. } => {
                // As long as it has not ended, this session is one of those that there may be.
                let _ = stream.shutdown(Shutdown::Write);
                until_closed(&stream, ANSWER_TIMEOUT)?;
                Ok(shape)
            }
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) fn handle(&self, number: u64, generation: u64) -> Handle {
        let is_over = Mutex::new(false);
        Handle { client: self.by(None), numbers: vec![number], generation, is_over }
    }

    fn links(&self) -> MutexGuard<'_, Links> {
        // A thread that panicked leaves connections that are whole.
        self.inner.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn beginning(&self) -> MutexGuard<'_, ()> {
        self.inner.beginning.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a handle of the same session with a deadline for all its calls together.
    pub(crate) fn by(&self, until: Option<Instant>) -> Self {
        Self { until, ..self.clone() }
    }

    /// Returns the time that a wait may take: not zero, which a timeout of a socket cannot be.
    fn left(&self) -> Duration {
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        self.until.map_or(ANSWER_TIMEOUT, left).max(Duration::from_millis(1))
    }

    /// Makes a call in a session.
    pub(crate) fn call_in(&self, generation: u64, call: &Call) -> Result<Answer, ServeError> {
        let stream = self.take_link(generation)?;
        let answered = call_on(&stream, call, None, self.left());
        if let Err(ServeError::Lost { why }) = &answered {
            self.lose(generation, why);
        } else {
            let mut links = self.links();
            if links.generation == generation && links.lost.is_none() {
                links.idle.push(stream);
                self.inner.returned.notify_all();
            }
        }
        answered
    }

    /// Marks a session as ended.
    fn lose(&self, generation: u64, why: &str) {
        let mut links = self.links();
        if links.generation == generation {
            links.idle.clear();
            links.lost.get_or_insert_with(|| why.to_owned());
            self.remember(&links);
            self.inner.returned.notify_all();
        }
    }
}

impl Pool {
    fn offset(&self, block: BlockId, row: Row) -> usize {
        let PoolLayout { rows, block_stride, .. } = &self.layout;
        let base = rows.get(row.0 as usize).copied().unwrap_or(u64::MAX);
        let offset = base.saturating_add(u64::from(block.0).saturating_mul(*block_stride));
        usize::try_from(offset).unwrap_or(usize::MAX)
    }
}

impl Prefix {
    /// Returns the number of blocks found.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks
    }

    /// Returns true if not even the first block was found.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks == 0
    }
}

pub(crate) fn unexpected(answer: &Answer) -> ServeError {
    ServeError::Answer { found: format!("{answer:?}") }
}

fn open(path: &Path, within: Duration) -> Result<UnixStream, ServeError> {
    let opened = http::connect(path, within)
        .and_then(|stream| stream.set_write_timeout(Some(ANSWER_TIMEOUT)).map(|()| stream));
    opened.map_err(|source| {
        let hint = reach_hint(&source);
        ServeError::Socket { path: path.to_owned(), action: "connecting to", source, hint }
    })
}

fn same_shape(found: KvShape, asked: KvShape) -> Result<(), ServeError> {
    if found == asked {
        return Ok(());
    }
    Err(ServeError::Shape { found: format!("{found:?}"), asked: format!("{asked:?}") })
}

/// Returns true if the other end has closed a connection on which no answer is due.
fn is_closed(stream: &UnixStream) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let mut byte = [0];
    rustix::net::recv(stream, &mut byte[..], flags) != Err(rustix::io::Errno::AGAIN)
}

/// Waits until the server closes a connection.
fn until_closed(stream: &UnixStream, within: Duration) -> Result<(), ServeError> {
    let lost = |why: String| ServeError::Lost { why };
    let timed = stream.set_read_timeout(Some(within));
    match timed.and_then(|()| protocol::receive(stream)) {
        Ok(Received::End) => Ok(()),
        Ok(Received::Message(Answer::Refused { kind, message }, _)) => {
            Err(ServeError::Refused { kind, message })
        }
        Err(error) => Err(lost(error.to_string())),
        _ => Err(lost("the session did not end in time".to_owned())),
    }
}

/// Makes a call, and returns its answer.
fn call_on(
    stream: &UnixStream,
    call: &Call,
    file: Option<BorrowedFd<'_>>,
    within: Duration,
) -> Result<Answer, ServeError> {
    let lost = |why: String| ServeError::Lost { why };
    let timed = stream.set_read_timeout(Some(within));
    match timed.and_then(|()| protocol::send(stream, call, file)) {
        Ok(()) => {}
        // Nothing was sent.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            let (what, expected) = ("a message's size", protocol::MESSAGE_BYTES_MAX as u64);
            return Err(ServeError::Argument { what, given: expected + 1, expected });
        }
        // The server may have said why, and closed the connection.
        Err(error) => match protocol::receive(stream) {
            Ok(Received::Message(Answer::Refused { kind, message }, _)) => {
                return Err(ServeError::Refused { kind, message });
            }
            _ => return Err(lost(error.to_string())),
        },
    }
    match protocol::receive(stream) {
        Ok(Received::Message(Answer::Refused { kind, message }, _)) => {
            Err(ServeError::Refused { kind, message })
        }
        Ok(Received::Message(answer, _)) => Ok(answer),
        Ok(Received::End) => Err(lost("the server has closed it".to_owned())),
        Ok(Received::Nothing) => Err(lost(format!("no answer came within {within:.1?}"))),
        Ok(Received::Malformed(why)) => Err(lost(format!("the answer is no message: {why}"))),
        Err(error) => Err(lost(error.to_string())),
    }
}
