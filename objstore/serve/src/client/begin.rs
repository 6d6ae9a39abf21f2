//! Beginning a session, after an earlier one with the same memory has ended, and its connections:
//! each call in progress has one of its own.

use std::{
    collections::HashMap,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{Arc, Condvar, LazyLock, Mutex, PoisonError, TryLockError},
    time::{Duration, Instant},
};

use kv_catalog::lock;
use objstore::KvShape;

use super::{Client, Inner, Links, Memory, Pool, call_on, open, same_shape, unexpected};
use crate::{
    error::{RefusalKind, ServeError},
    protocol::{Answer, Bytes, CONNECTIONS_MAX, Call, Member, VERSION},
};

/// Pause between attempts to connect to a server that is away, and at least as long as the attempt
/// took: one that does not answer takes at most half of the time.
pub(super) const RETRY_EVERY: Duration = Duration::from_millis(100);
/// Pause after an attempt that the server has refused.
pub(super) const REFUSED_PAUSE: Duration = Duration::from_secs(1);

/// A server's socket, and device and inode of a client's memory, or its address on a GPU.
type Place = (PathBuf, u64, u64);

/// The last session with each memory of this process that may not have ended at its server.
static LEFT: LazyLock<Mutex<HashMap<Place, Bytes>>> = LazyLock::new(Mutex::default);

impl Client {
    /// Begins the first session of this client. A session that another client of this process has
    /// lost with the same memory ends first.
    pub(super) fn first(
        path: PathBuf,
        shape: KvShape,
        member: Option<Member>,
        pool: Option<Pool>,
    ) -> Result<Self, ServeError> {
        // No call knows this session.
        let lost = Some("it has not begun".to_owned());
        let (session, idle) = (Bytes(Vec::new()), Vec::new());
        let (open, is_paced, is_closed) = (0, false, false);
        let links = Links { generation: 0, session, idle, open, lost, is_paced, is_closed };
        let (links, returned) = (Mutex::new(links), Condvar::new());
        let (beginning, spaces) = (Mutex::default(), Mutex::default());
        let inner = Inner { path, shape, member, pool, links, beginning, spaces, returned };
        let client = Self { inner: Arc::new(inner), until: None };
        // Before the server gets the memory: it could not map other blocks.
        same_shape(Self::shape_at(&client.inner.path)?, shape)?;
        let after = client.place().and_then(|place| lock(&LEFT).get(&place).cloned());
        *lock(&client.inner.links) = client.hello(after, 0)?;
        Ok(client)
    }

    /// Returns the number of the session. Begins another one if it was lost, unless an attempt has
    /// just failed. With a deadline, it does not wait for another thread that begins one.
    pub(super) fn live(&self) -> Result<u64, ServeError> {
        let (session, lost) = self.session();
        let Some(lost) = lost else { return Ok(session) };
        let mut retry_at = match self.inner.beginning.try_lock() {
            Ok(retry_at) => retry_at,
            Err(TryLockError::WouldBlock) if self.until.is_some() => return Err(lost),
            Err(_) => lock(&self.inner.beginning),
        };
        // Another thread may have done it.
        let (session, lost) = self.session();
        let Some(lost) = lost else { return Ok(session) };
        let begun_at = Instant::now();
        match *retry_at {
            _ if lock(&self.inner.links).is_closed => return Err(lost),
            Some(at) if begun_at < at => return Err(lost),
            None => tracing::warn!(%lost, "a session is lost"),
            Some(_) => {}
        }
        let begun = self.begin_again();
        let took = begun_at.elapsed();
        *retry_at = begun.as_ref().err().map(|error| {
            let pause = match error {
                ServeError::Socket { .. } => RETRY_EVERY,
                _ => {
                    tracing::warn!(%error, "the server is there, and takes no client");
                    REFUSED_PAUSE
                }
            };
            Instant::now() + pause.max(took)
        });
        let session = begun.map_err(|error| ServeError::Lost { why: error.to_string() })?;
        tracing::info!("connected to the server again");
        Ok(session)
    }

    /// Leaves the session, which ends, for another one with the same memory, whose bytes stay. A
    /// call does so by itself if the session was lost.
    ///
    /// # Errors
    /// Same as [`Client::connect`].
    pub fn reconnect(&self) -> Result<(), ServeError> {
        let mut retry_at = lock(&self.inner.beginning);
        self.begin_again()?;
        *retry_at = None;
        Ok(())
    }

    /// Begins another session, for the one that has `beginning`. Returns its number.
    fn begin_again(&self) -> Result<u64, ServeError> {
        let (session, generation) = {
            let mut links = lock(&self.inner.links);
            links.idle.clear();
            links.lost.get_or_insert_with(|| "it was left for another one".to_owned());
            self.inner.returned.notify_all();
            (links.session.clone(), links.generation + 1)
        };
        let begun = self.hello(Some(session), generation)?;
        *lock(&self.inner.links) = begun;
        self.inner.returned.notify_all();
        Ok(generation)
    }

    /// Begins a session, after an earlier one with this memory.
    fn hello(&self, after: Option<Bytes>, generation: u64) -> Result<Links, ServeError> {
        let Inner { path, shape, member, pool, .. } = &*self.inner;
        let stream = open(path, self.left())?;
        let named = pool.as_ref().map(Pool::named);
        let file = pool.as_ref().map(Pool::file);
        let (earlier, member) = (after.clone(), member.clone());
        let call = Call::Hello { version: VERSION, pool: named, after, member };
        match call_on(&stream, &call, file, self.left())? {
            Answer::Welcome { session, shape: found, is_paced } => {
                same_shape(found, *shape)?;
                if let Some(Pool { memory: Memory::Gpu(on_gpu), .. }) = pool {
                    on_gpu.note_server(&stream, self.left())?;
                }
                // The server has ended it.
                earlier.iter().for_each(|earlier| self.forget(earlier));
                let (idle, open, lost, is_closed) = (vec![stream], 1, None, false);
                Ok(Links { generation, session, idle, open, lost, is_paced, is_closed })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Takes an idle connection, makes another one, or waits if there are as many as there may be,
    /// or as the server takes.
    pub(super) fn take_link(&self, generation: u64) -> Result<UnixStream, ServeError> {
        let (mut links, mut is_refused) = (lock(&self.inner.links), false);
        loop {
            if links.generation != generation {
                return Err(ServeError::Stale);
            }
            if let Some(error) = links.end() {
                return Err(error);
            }
            if let Some(stream) = links.idle.pop() {
                return Ok(stream);
            }
            if links.open < CONNECTIONS_MAX && !is_refused {
                links.open += 1;
                let session = links.session.clone();
                drop(links);
                match self.attach(session) {
                    Ok(stream) => return Ok(stream),
                    // The session goes on, with the connections that it has.
                    Err(ServeError::Refused {
                        kind: RefusalKind::Limit | RefusalKind::Denied,
                        ..
                    }) => is_refused = true,
                    Err(error) => {
                        // There is no server any more, or another one.
                        let why = error.to_string();
                        self.lose(generation, &why);
                        return Err(ServeError::Lost { why });
                    }
                }
                links = lock(&self.inner.links);
                if links.generation == generation {
                    links.open -= 1;
                    self.inner.returned.notify_all();
                }
                continue;
            }
            let waited = self.inner.returned.wait_timeout(links, self.left());
            let (after, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() {
                let why = "no other call ended in time".to_owned();
                return Err(ServeError::Lost { why });
            }
            links = after;
        }
    }

    fn attach(&self, session: Bytes) -> Result<UnixStream, ServeError> {
        let stream = open(&self.inner.path, self.left())?;
        match call_on(&stream, &Call::Attach { session }, None, self.left())? {
            Answer::Done => Ok(stream),
            other => Err(unexpected(&other)),
        }
    }

    /// Keeps a session for the next one with this memory: until the server says so, it has not
    /// ended there, and its transfers may access the memory.
    pub(super) fn remember(&self, links: &Links) {
        if let Some(place) = self.place().filter(|_| !links.session.0.is_empty()) {
            lock(&LEFT).insert(place, links.session.clone());
        }
    }

    /// Forgets a session that has ended at the server.
    pub(super) fn forget(&self, session: &Bytes) {
        if let Some(place) = self.place() {
            let mut left = lock(&LEFT);
            if left.get(&place) == Some(session) {
                left.remove(&place);
            }
        }
    }

    /// Returns `None` without memory.
    fn place(&self) -> Option<Place> {
        let path = self.inner.path.clone();
        match &self.inner.pool.as_ref()?.memory {
            Memory::Host(file, _) => {
                let found = rustix::fs::fstat(file).ok()?;
                Some((path, found.st_dev, found.st_ino))
            }
            // No device has this number.
            Memory::Gpu(on_gpu) => Some((path, u64::MAX, on_gpu.address())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::{fd::OwnedFd, unix::net::UnixListener},
        thread,
    };

    use ripieno_stack::PoolLayout;

    use super::*;
    use crate::{
        memory,
        protocol::{self, Received},
    };

    const SHAPE: KvShape = KvShape { layers: 1, segments: 1, object_bytes: 4096, block_tokens: 16 };

    /// Answers a hello; returns its earlier session.
    fn welcome(listener: &UnixListener, session: u8) -> Option<Bytes> {
        let stream = listener.accept().unwrap().0;
        let hello = match protocol::receive(&stream).unwrap() {
            Received::Message(call, _) => call,
            _ => panic!("it sends a call"),
        };
        let session = Bytes(vec![session; 16]);
        let welcome = Answer::Welcome { session, shape: SHAPE, is_paced: false };
        protocol::send(&stream, &welcome, None).unwrap();
        match hello {
            Call::Hello { after, .. } => after,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_session_that_was_lost_ends_before_the_next_one_with_its_memory() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        // Each client asks for the shape first. The connection of its session is closed at once.
        let server = thread::spawn(move || {
            let mut begun = (1..=4).map(|session| {
                welcome(&listener, 0);
                welcome(&listener, session)
            });
            begun.by_ref().collect::<Vec<_>>()
        });
        let connect = |file: &OwnedFd| {
            let layout = PoolLayout::contiguous(&SHAPE, 4);
            let pool = Some((layout, file.try_clone().unwrap()));
            Client::join(&path, SHAPE, None, pool).unwrap()
        };
        let (file, other) = (memory::make(4 * 4096).unwrap().0, memory::make(4 * 4096).unwrap().0);
        let first = connect(&file);
        assert!(first.call_in(0, &Call::Sync).is_err(), "the server has gone");
        assert!(first.close().is_err());
        let apart = connect(&other);
        let second = connect(&file);
        second.close().unwrap();
        let third = connect(&file);
        let after = server.join().unwrap();
        assert_eq!(after, [None, None, Some(Bytes(vec![1; 16])), None]);
        drop((apart, third));
    }
}
