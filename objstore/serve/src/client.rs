//! The client: a session with a server, and the memory of an engine's blocks.

mod begin;
mod calls;
mod gpu;
mod request;

use std::{
    collections::BTreeSet,
    io,
    net::Shutdown,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use kv_catalog::lock;
use objstore::{BlockId, KvShape, Row};
use ripieno_stack::{GpuMemory, PoolLayout, StackError, http};
use rustix::net::RecvFlags;

use crate::{
    error::{ServeError, reach_hint},
    memory::{self, Mapping},
    protocol::{self, Answer, Bytes, Call, Member, Received, VERSION},
};

use calls::Space;
pub use calls::SpaceId;
use gpu::OnGpu;
pub use request::{Prefix, Request, Reservation};

/// Time for an answer: longer than the server's own limits for a transfer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(90);

/// Unwraps the answer that a call has.
macro_rules! answer {
    ($answered:expr, $answer:pat $(if $is:expr)? => $value:expr) => {
        match $answered {
            Ok($answer) $(if $is)? => Ok($value),
            Ok(other) => Err($crate::client::unexpected(&other)),
            Err(error) => Err(error),
        }
    };
}
use answer;

/// An engine's connection to a server, and the memory of its KV blocks.
///
/// A cheap handle: clones share the session, and any number of threads may use them. A call that
/// waits does not hold up the others: each has a connection of its own.
///
/// When the server ends, calls return [`ServeError::Lost`] at once. The memory stays, and the first
/// call after the server is back begins a new session with it. Prefixes, reservations and requests
/// of an earlier session are [`ServeError::Stale`]; after the death of a server the kernel may
/// finish transfers that it had begun, until the next session has begun: the next server waits.
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
    /// Held while a session begins: sessions with the same memory begin one after the other. If the
    /// last attempt has failed: when the next one may be made.
    beginning: Mutex<Option<Instant>>,
    spaces: Mutex<Vec<Space>>,
    /// Notified when a connection is idle again, or the session is lost.
    returned: Condvar,
}

/// The memory of a client's blocks.
#[derive(Debug)]
struct Pool {
    layout: PoolLayout,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    /// Shared with the server.
    Host(OwnedFd, Mapping),
    /// GPU memory, which the server maps.
    Gpu(OnGpu),
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
    /// True if the engine has ended it: no other one begins by itself.
    is_closed: bool,
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
        let failed = |source| ServeError::Memory { bytes, source };
        let (file, mapping) = memory::make(bytes).map_err(failed)?;
        let memory = Memory::Host(file, mapping);
        Self::first(path.into(), shape, None, Some(Pool { layout, memory }))
    }

    /// Connects as a part of an engine, if it has several. `pool`: the layout of blocks in shared
    /// memory that the engine made, a memfd of whole pages that is sealed against shrinking; a
    /// scheduler has none. The memory must be mapped shared, and not in huge pages.
    ///
    /// # Errors
    /// Same as [`Client::connect`], and [`ServeError::Unshared`] for another file.
    pub fn join(
        path: impl Into<PathBuf>,
        shape: KvShape,
        member: Option<Member>,
        pool: Option<(PoolLayout, OwnedFd)>,
    ) -> Result<Self, ServeError> {
        let pool = pool.map(|(layout, file)| {
            let mapping = memory::take(&file, u64::MAX)?;
            Ok(Pool { layout, memory: Memory::Host(file, mapping) })
        });
        let pool = pool.transpose().map_err(|why| ServeError::Unshared { why })?;
        Self::first(path.into(), shape, member, pool)
    }

    /// Same as [`Client::join`], with blocks in memory of a GPU that the server reaches as well: it
    /// maps the memory. [`Request::start_after`] orders a layer with a stream; a start without a
    /// stream, or by [`Client::load`] and [`Client::save`], is for blocks that no kernel uses.
    ///
    /// # Errors
    /// Same as [`Client::connect`]; [`ServeError::Stack`] if CUDA cannot share the memory, and
    /// [`ServeError::Unshared`] if the server's end could not be noticed.
    pub fn join_gpu(
        path: impl Into<PathBuf>,
        shape: KvShape,
        member: Option<Member>,
        layout: PoolLayout,
        memory: GpuMemory,
    ) -> Result<Self, ServeError> {
        let memory = Memory::Gpu(OnGpu::new(memory)?);
        Self::first(path.into(), shape, member, Some(Pool { layout, memory }))
    }

    /// Ends the session: waits for calls in progress, and until nothing accesses the memory.
    ///
    /// # Errors
    /// Returns [`ServeError::Lost`] if the server is not there, or takes too long, and
    /// [`ServeError::Refused`] if its store failed: then devices may still access the memory.
    pub fn close(&self) -> Result<(), ServeError> {
        let lost = |why: String| ServeError::Lost { why };
        let _beginning = lock(&self.inner.beginning);
        let timed = self.by(Some(Instant::now() + ANSWER_TIMEOUT));
        let is_busy = |links: &mut Links| links.lost.is_none() && links.idle.len() < links.open;
        let waited =
            self.inner.returned.wait_timeout_while(lock(&self.inner.links), timed.left(), is_busy);
        let (mut links, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut links.is_closed, true) {
            return Ok(());
        }
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
    /// Returns [`ServeError::Lost`], or [`StackError::Closed`].
    pub fn check(&self) -> Result<(), ServeError> {
        self.session().1.map_or(Ok(()), Err)
    }

    /// Names the server.
    #[must_use]
    pub fn placement(&self) -> String {
        format!("the server at {}", self.inner.path.display())
    }

    /// Returns the shape of the blocks.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.inner.shape
    }

    /// Returns the memory of the blocks, for an engine that computes in it: its first byte, and its
    /// length in bytes, 0 if it is on a GPU. It lives as long as the last clone of this client.
    /// Between the start of a layer and the end of a wait for it, the devices may access its
    /// blocks.
    #[must_use]
    pub fn memory(&self) -> (NonNull<u8>, usize) {
        let mapping = self.inner.pool.as_ref().and_then(Pool::mapping);
        mapping.map_or((NonNull::dangling(), 0), |memory| (memory.base(), memory.len()))
    }

    /// Returns an error unless objects are whole pages of the memory, which can be replaced: then
    /// nothing writes to the blocks of a request that has ended, however its server has.
    ///
    /// # Errors
    /// Returns [`ServeError::Argument`].
    pub fn check_pages(&self) -> Result<(), ServeError> {
        let page = rustix::param::page_size() as u64;
        // Of a GPU, the end of the server's process is waited for.
        let Some(Pool { layout, memory: Memory::Host(..) }) = &self.inner.pool else {
            return Ok(());
        };
        let sizes = [u64::from(self.inner.shape.object_bytes), layout.block_stride];
        match sizes.iter().chain(&layout.rows).find(|at| !at.is_multiple_of(page)) {
            Some(given) => {
                let what = "bytes of an object, or its place in the memory, in whole pages";
                Err(ServeError::Argument { what, given: *given, expected: page })
            }
            None => Ok(()),
        }
    }

    /// Writes a block in host memory: the objects of all rows, one after the other.
    ///
    /// # Errors
    /// Returns [`ServeError::Argument`] for a block that is not there, or another length.
    pub fn write(&self, block: BlockId, bytes: &[u8]) -> Result<(), ServeError> {
        self.check_block(block, bytes.len())?;
        let objects = bytes.chunks_exact(self.inner.shape.object_bytes as usize);
        for (row, object) in (0..).map(Row).zip(objects) {
            let pool = self.inner.pool.as_ref();
            let written = |pool: &Pool| {
                pool.mapping().is_some_and(|mapping| mapping.write(pool.offset(block, row), object))
            };
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
            let read = |pool: &Pool| {
                let mut into = |mapping: &Mapping| mapping.read(pool.offset(block, row), object);
                pool.mapping().is_some_and(&mut into)
            };
            self.inside(pool.is_some_and(read), block)?;
        }
        Ok(bytes)
    }

    /// Gives layers of blocks new pages, of zeros: what the kernel still reads into the old ones
    /// for a server that has died reaches nobody. Of a GPU's memory, waits until the server's
    /// process has ended, and the driver has ended its copies.
    fn discard(&self, blocks: &[BlockId], layers: &BTreeSet<u32>) -> Result<(), ServeError> {
        let Some(pool) = &self.inner.pool else { return Ok(()) };
        let file = match &pool.memory {
            Memory::Host(file, _) => file,
            Memory::Gpu(on_gpu) => return on_gpu.until_server_ended(self.left()),
        };
        let KvShape { segments, object_bytes, .. } = self.inner.shape;
        let bytes = u64::from(object_bytes);
        for block in blocks {
            let rows = layers.iter().flat_map(|layer| layer * segments..(layer + 1) * segments);
            for row in rows.map(Row) {
                let at = pool.offset(*block, row) as u64;
                memory::discard(file, at, bytes)
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

    /// Returns the number of the session, and the reason if it has ended, also while no call was
    /// made.
    fn session(&self) -> (u64, Option<ServeError>) {
        let (generation, is_closed) = {
            let links = lock(&self.inner.links);
            let is_closed = links.lost.is_none() && links.idle.last().is_some_and(is_closed);
            (links.generation, is_closed)
        };
        if is_closed {
            self.lose(generation, "the server has closed it");
        }
        let links = lock(&self.inner.links);
        (links.generation, links.end())
    }

    /// Returns true if the server decides when layers start.
    #[must_use]
    pub fn is_paced(&self) -> bool {
        lock(&self.inner.links).is_paced
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

    /// Returns a handle of the same session with a deadline for all its calls together.
    fn by(&self, until: Option<Instant>) -> Self {
        Self { until, ..self.clone() }
    }

    /// Returns the time that a wait may take: not zero, which a timeout of a socket cannot be.
    fn left(&self) -> Duration {
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        self.until.map_or(ANSWER_TIMEOUT, left).max(Duration::from_millis(1))
    }

    /// Returns true if its time is over.
    fn is_late(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
    }

    /// Makes a call in a session.
    fn call_in(&self, generation: u64, call: &Call) -> Result<Answer, ServeError> {
        let stream = self.take_link(generation)?;
        let answered = call_on(&stream, call, None, self.left());
        if let Err(ServeError::Lost { why }) = &answered {
            self.lose(generation, why);
        } else {
            let mut links = lock(&self.inner.links);
            if links.generation == generation && links.lost.is_none() {
                links.idle.push(stream);
                self.inner.returned.notify_all();
            }
        }
        answered
    }

    /// Marks a session as ended.
    fn lose(&self, generation: u64, why: &str) {
        let mut links = lock(&self.inner.links);
        if links.generation == generation {
            links.idle.clear();
            links.lost.get_or_insert_with(|| why.to_owned());
            self.remember(&links);
            self.inner.returned.notify_all();
        }
    }
}

impl Links {
    /// Returns the error of calls if the session has ended.
    fn end(&self) -> Option<ServeError> {
        match (&self.lost, self.is_closed) {
            (None, _) => None,
            (Some(_), true) => Some(StackError::Closed.into()),
            (Some(why), false) => Some(ServeError::Lost { why: why.clone() }),
        }
    }
}

impl Pool {
    /// Returns the memory of the blocks, if it is of this process.
    fn mapping(&self) -> Option<&Mapping> {
        match &self.memory {
            Memory::Host(_, mapping) => Some(mapping),
            Memory::Gpu(_) => None,
        }
    }

    fn offset(&self, block: BlockId, row: Row) -> usize {
        let PoolLayout { rows, block_stride, .. } = &self.layout;
        let base = rows.get(row.0 as usize).copied().unwrap_or(u64::MAX);
        let offset = base.saturating_add(u64::from(block.0).saturating_mul(*block_stride));
        usize::try_from(offset).unwrap_or(usize::MAX)
    }
}

fn unexpected(answer: &Answer) -> ServeError {
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
    Err(ServeError::Shape { found, asked })
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

#[cfg(test)]
mod tests;
