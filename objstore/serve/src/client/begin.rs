//! Beginning a session, after an earlier one with the same memory has ended.

use std::{
    collections::HashMap,
    os::fd::AsFd as _,
    path::PathBuf,
    sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError},
};

use objstore::KvShape;

use super::{Client, Inner, Links, Pool, call_on, open, same_shape, unexpected};
use crate::{
    error::ServeError,
    protocol::{Answer, Bytes, Call, Member, VERSION},
};

/// A server's socket, and device and inode of a client's memory.
type Place = (PathBuf, u64, u64);

/// The last session with each memory of this process that may not have ended at its server.
static LEFT: LazyLock<Mutex<HashMap<Place, Bytes>>> = LazyLock::new(Mutex::default);

fn left() -> MutexGuard<'static, HashMap<Place, Bytes>> {
    // A thread that panicked leaves a table that is whole.
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Client {
    /// Begins the first session of this client. A session that another client of this process has
    /// lost with the same memory ends first.
    pub(super) fn begin(
        path: PathBuf,
        shape: KvShape,
        member: Option<Member>,
        pool: Option<Pool>,
    ) -> Result<Self, ServeError> {
        // No call knows this session.
        let lost = Some("it has not begun".to_owned());
        let (session, idle) = (Bytes(Vec::new()), Vec::new());
        let links = Links { generation: 0, session, idle, open: 0, lost, is_paced: false };
        let (links, beginning, returned) = (Mutex::new(links), Mutex::default(), Condvar::new());
        let inner = Inner { path, shape, member, pool, links, beginning, returned };
        let client = Self { inner: Arc::new(inner), until: None };
        // Before the server gets the memory: it could not map other blocks.
        same_shape(Self::shape_at(&client.inner.path)?, shape)?;
        let after = client.place().and_then(|place| left().get(&place).cloned());
        *client.links() = client.hello(after, 0)?;
        Ok(client)
    }

    /// Begins a new session after [`ServeError::Lost`], with the same memory, whose bytes stay. A
    /// session that is left ends first.
    /// Prefixes, requests and namespaces of the earlier one are [`ServeError::Stale`].
    ///
    /// After the death of a server the kernel may finish transfers that it had begun: use blocks
    /// that were being loaded only after this has returned, because the next server waits for that.
    ///
    /// # Errors
    /// Same as [`Client::connect`].
    pub fn reconnect(&self) -> Result<(), ServeError> {
        let _beginning = self.beginning();
        let (session, generation) = {
            let mut links = self.links();
            links.idle.clear();
            links.lost.get_or_insert_with(|| "it was left for another one".to_owned());
            self.inner.returned.notify_all();
            (links.session.clone(), links.generation)
        };
        let begun = self.hello(Some(session), generation + 1)?;
        *self.links() = begun;
        self.inner.returned.notify_all();
        Ok(())
    }

    /// Begins a session, after an earlier one with this memory.
    fn hello(&self, after: Option<Bytes>, generation: u64) -> Result<Links, ServeError> {
        let Inner { path, shape, member, pool, .. } = &*self.inner;
        let stream = open(path, self.left())?;
        let layout = pool.as_ref().map(|pool| pool.layout.clone());
        let file = pool.as_ref().map(|pool| pool.file.as_fd());
        let (earlier, member) = (after.clone(), member.clone());
        let call = Call::Hello { version: VERSION, pool: layout, after, member };
        match call_on(&stream, &call, file, self.left())? {
            Answer::Welcome { session, shape: found, is_paced } => {
                same_shape(found, *shape)?;
                // The server has ended it.
                earlier.iter().for_each(|earlier| self.forget(earlier));
                let idle = vec![stream];
                Ok(Links { generation, session, idle, open: 1, lost: None, is_paced })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Keeps a session for the next one with this memory: until the server says so, it has not
    /// ended there, and its transfers may access the memory.
    pub(super) fn remember(&self, links: &Links) {
        if let Some(place) = self.place().filter(|_| !links.session.0.is_empty()) {
            left().insert(place, links.session.clone());
        }
    }

    /// Forgets a session that has ended at the server.
    pub(super) fn forget(&self, session: &Bytes) {
        if let Some(place) = self.place() {
            let mut left = left();
            if left.get(&place) == Some(session) {
                left.remove(&place);
            }
        }
    }

    /// Returns `None` without memory.
    fn place(&self) -> Option<Place> {
        let found = rustix::fs::fstat(&self.inner.pool.as_ref()?.file).ok()?;
        Some((self.inner.path.clone(), found.st_dev, found.st_ino))
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
            Client::connect_shared(&path, SHAPE, layout, file.try_clone().unwrap()).unwrap()
        };
        let (file, other) = (memory::make(4 * 4096).unwrap().0, memory::make(4 * 4096).unwrap().0);
        let first = connect(&file);
        assert!(first.sync().is_err(), "the server has gone");
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
