//! The server: its socket, its threads, and the calls of control.
//!
//! Each connection has a thread, which answers one call after the other.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::Shutdown,
    num::NonZeroU64,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{FileTypeExt as _, PermissionsExt as _},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use objstore::{NamespaceId, StoreError};
use ripieno_stack::{Stack, StackError};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    rand::GetRandomFlags,
};

use crate::{
    engine::{self, Engine, EngineKey, Joined},
    error::{RefusalKind, ServeError},
    limit::Limit,
    peer::Peer,
    protocol::{
        self, Answer, Bytes, Call, Layout, Member, Named, NamespaceStatus, Received, Status,
        VERSION,
    },
    refusal::Refusal,
    session::{Arrival, Session},
};

/// Longest pause inside a message, and the time for the first one.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Time between looks at the devices.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Time for an earlier session of a client to end: longer than a transfer may take.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(80);
/// Pause between looks at it.
const REPLACE_PAUSE: Duration = Duration::from_millis(2);
/// Refusals of a session that are logged; more are only counted.
const LOGGED_MAX: u32 = 100;

/// Parameters of a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Users whose processes may connect, besides the server's own.
    pub users: Vec<u32>,
    /// Clients at a time.
    pub sessions_max: u32,
    /// Bytes of a client's pool, at most.
    pub pool_bytes_max: u64,
    /// Bytes a second that each client of a user may move; no limit for others.
    pub bandwidth: BTreeMap<u32, NonZeroU64>,
}

/// A store, and the socket at which clients find it.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    listener: UnixListener,
    path: Unlink,
}

#[derive(Debug)]
struct Shared {
    stack: Stack,
    options: ServerOptions,
    own_uid: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    sessions: BTreeMap<u64, Arc<Session>>,
    connections: BTreeMap<u64, UnixStream>,
    engines: BTreeMap<EngineKey, Joined>,
    last: u64,
    counts: Counts,
    /// Set when the store has failed.
    failed: Option<String>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    sessions_ended: u64,
    users: u64,
    messages: u64,
    calls: u64,
}

/// The path of a socket, removed on drop.
#[derive(Debug)]
struct Unlink(PathBuf);

impl Drop for Unlink {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            tracing::warn!(%error, path = %self.0.display(), "the socket stays");
        }
    }
}

impl Server {
    /// Listens on the socket. Its mode admits the users of the options; each connection is checked
    /// again, by the credentials that the kernel has for it.
    ///
    /// # Errors
    /// Returns [`ServeError::InUse`] or [`ServeError::Socket`].
    pub fn bind(stack: Stack, options: ServerOptions) -> Result<Self, ServeError> {
        let path = options.socket.clone();
        let failed = |action, hint| {
            let path = path.clone();
            move |source| ServeError::Socket { path, action, source, hint }
        };
        remove_stale(&path)?;
        let hint = "name a path in a directory that you may write to";
        let listener = UnixListener::bind(&path).map_err(failed("listening on", hint))?;
        let unlink = Unlink(path.clone());
        // A client that has gone again must not block it.
        listener.set_nonblocking(true).map_err(failed("listening on", hint))?;
        let own_uid = rustix::process::geteuid().as_raw();
        let is_own = options.users.iter().all(|uid| *uid == own_uid);
        let mode = fs::Permissions::from_mode(if is_own { 0o600 } else { 0o666 });
        fs::set_permissions(&path, mode).map_err(failed("setting the mode of", hint))?;
        Ok(Self { shared: Shared::new(stack, options, own_uid), listener, path: unlink })
    }

    /// Takes clients until `is_over` returns true, which is called a few times a second; then ends
    /// all sessions, and closes the store.
    ///
    /// # Errors
    /// Returns the error of the store if it fails: clients have lost their connections, and may
    /// reconnect to a new server.
    pub fn run(self, mut is_over: impl FnMut() -> bool) -> Result<(), ServeError> {
        let Self { shared, listener, path } = self;
        let mut threads: Vec<JoinHandle<()>> = Vec::new();
        let failed = loop {
            if let Some(cause) = shared.look() {
                break Some(cause);
            }
            if is_over() {
                break None;
            }
            threads.retain(|thread| !thread.is_finished());
            if let Some(stream) = next(&listener) {
                match shared.accept(stream) {
                    Ok(thread) => threads.extend(thread),
                    Err(error) => tracing::error!(%error, "a client was turned away"),
                }
            }
        };
        // No client finds the socket any more.
        drop((listener, path));
        for stream in shared.state().connections.values() {
            // A connection that is closed already needs no more.
            let _ = stream.shutdown(Shutdown::Both);
        }
        for thread in threads {
            // A panic was reported when it happened.
            let _ = thread.join();
        }
        let shared = Arc::into_inner(shared).expect("all threads that shared it have ended");
        let closed = shared.stack.close();
        match failed {
            Some(cause) => Err(StackError::from(StoreError::Failed { cause }).into()),
            None => Ok(closed?),
        }
    }
}

/// Returns the next connection, if one arrives soon.
fn next(listener: &UnixListener) -> Option<UnixStream> {
    let soon = Timespec::try_from(LOOK_EVERY).ok()?;
    let mut ready = [PollFd::new(listener, PollFlags::IN)];
    // After an error of poll or accept, the next round tries again.
    let found = rustix::event::poll(&mut ready, Some(&soon)).ok().filter(|found| *found > 0);
    found.and_then(|_| listener.accept().ok()).map(|(stream, _)| stream)
}

/// Removes the socket of a server that was killed.
fn remove_stale(path: &Path) -> Result<(), ServeError> {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if !is_socket {
        return Ok(());
    }
    if UnixStream::connect(path).is_ok() {
        return Err(ServeError::InUse { path: path.to_owned() });
    }
    fs::remove_file(path).map_err(|source| ServeError::Socket {
        path: path.to_owned(),
        action: "removing the socket of an earlier server,",
        source,
        hint: "remove it by hand",
    })
}

impl Shared {
    fn new(stack: Stack, options: ServerOptions, own_uid: u32) -> Arc<Self> {
        Arc::new(Self { stack, options, own_uid, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panicked leaves state that is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the devices. Returns the cause if the store has failed.
    fn look(&self) -> Option<String> {
        let looked = self.stack.store().plane().sync();
        let mut state = self.state();
        if let (Err(error), None) = (looked, &state.failed) {
            state.failed = Some(error.to_string());
        }
        state.failed.clone()
    }

    /// Starts a thread for a connection, unless its user is refused.
    fn accept(self: &Arc<Self>, stream: UnixStream) -> io::Result<Option<JoinHandle<()>>> {
        let peer = Peer::of(&stream)?;
        stream.set_read_timeout(Some(PAUSE_MAX))?;
        stream.set_write_timeout(Some(PAUSE_MAX))?;
        if peer.uid != self.own_uid && !self.options.users.contains(&peer.uid) {
            let Peer { uid, pid } = peer;
            self.state().counts.users += 1;
            tracing::warn!(uid, pid, "a user who is not on the list was refused");
            let message = format!("user {uid} is not on the list of users of this server");
            let refused = Answer::Refused { kind: RefusalKind::Denied, message };
            // A user who does not read it has no use for it.
            let _ = protocol::send(&stream, &refused, None);
            return Ok(None);
        }
        let connections_max = 4 * self.options.sessions_max as usize + 16;
        let number = {
            let mut state = self.state();
            if state.connections.len() >= connections_max {
                let why = format!("there are {connections_max} connections already");
                return Err(io::Error::other(why));
            }
            state.last += 1;
            let number = state.last;
            state.connections.insert(number, stream.try_clone()?);
            number
        };
        let shared = self.clone();
        let serve = move || {
            let connection = Connection { shared: &shared, number, peer, stream: &stream };
            if let Err(error) = connection.serve() {
                tracing::debug!(%error, uid = peer.uid, pid = peer.pid, "a connection broke");
            }
            shared.state().connections.remove(&number);
        };
        let spawned = thread::Builder::new().name("ripieno client".to_owned()).spawn(serve);
        if spawned.is_err() {
            self.state().connections.remove(&number);
        }
        spawned.map(Some)
    }
}

/// A connection, served by a thread of its own.
struct Connection<'a> {
    shared: &'a Arc<Shared>,
    number: u64,
    peer: Peer,
    stream: &'a UnixStream,
}

impl Connection<'_> {
    fn serve(&self) -> io::Result<()> {
        let (call, file) = match protocol::receive(self.stream)? {
            Received::Message(call, file) => (call, file),
            Received::End => return Ok(()),
            Received::Nothing => return self.malformed("nothing came in time"),
            Received::Malformed(why) => return self.malformed(&why),
        };
        match call {
            Call::Hello { version: VERSION, pool, after, member } => {
                match self.replace(after.as_ref()) {
                    true => self.begin(pool.map(|layout| (layout, file)), member),
                    false => {
                        let why = "the client's earlier session has transfers that do not end";
                        self.refuse(Refusal::new(RefusalKind::Limit, why))
                    }
                }
            }
            Call::Hello { version, .. } => {
                self.malformed(&format!("version {version} of the messages; this is {VERSION}"))
            }
            Call::Attach { session } => self.attach(&session),
            _ => self.malformed("the first call is another one than hello or attach"),
        }
    }

    /// Ends an earlier session of the client, if there is one, so that nothing of it accesses its
    /// memory. Returns false if it does not end.
    fn replace(&self, earlier: Option<&Bytes>) -> bool {
        let find = || {
            let state = self.shared.state();
            let is_it = |(_, session): &(&u64, &Arc<Session>)| {
                Some(&session.token) == earlier && session.peer.uid == self.peer.uid
            };
            let number = state.sessions.iter().find(is_it).map(|(number, _)| *number)?;
            // Its first connection.
            state.connections.get(&number).map(|stream| stream.shutdown(Shutdown::Both))
        };
        let since = Instant::now();
        while find().is_some() {
            if since.elapsed() > REPLACE_TIMEOUT {
                return false;
            }
            thread::sleep(REPLACE_PAUSE);
        }
        true
    }

    /// Refuses a message, and ends the connection.
    fn malformed(&self, why: &str) -> io::Result<()> {
        self.shared.state().counts.messages += 1;
        let Peer { uid, pid } = self.peer;
        tracing::warn!(uid, pid, why, "a message was refused");
        self.refuse(Refusal::new(RefusalKind::Message, why))
    }

    fn refuse(&self, Refusal { kind, message }: Refusal) -> io::Result<()> {
        protocol::send(self.stream, &Answer::Refused { kind, message }, None)
    }

    /// Counts and logs a refusal that is the client's fault.
    fn note(&self, refusal: &Refusal, logged: &mut u32) {
        let Peer { uid, pid } = self.peer;
        let Refusal { kind, message } = refusal;
        match kind {
            RefusalKind::Argument | RefusalKind::Limit | RefusalKind::Denied => {
                self.shared.state().counts.calls += 1;
                *logged += 1;
            }
            RefusalKind::Failed => {
                self.shared.state().failed.get_or_insert_with(|| message.clone());
            }
            _ => {}
        }
        if *logged <= LOGGED_MAX {
            tracing::warn!(uid, pid, ?kind, message, "a call was refused");
        }
    }

    /// Begins a session on this connection, serves it, and ends it.
    fn begin(
        &self,
        pool: Option<(Layout, Option<OwnedFd>)>,
        member: Option<Member>,
    ) -> io::Result<()> {
        let engine = match self.join(member.as_ref()) {
            Ok(engine) => engine,
            Err(refusal) => {
                self.note(&refusal, &mut 0);
                return self.refuse(refusal);
            }
        };
        let served = self.serve_session(pool, member.clone(), engine);
        self.leave(member.as_ref());
        served
    }

    fn key(&self, Member { engine, .. }: &Member) -> EngineKey {
        (self.peer.uid, engine.clone())
    }

    /// Returns the client's engine. Waits for an earlier client that was the same part.
    fn join(&self, member: Option<&Member>) -> Result<Arc<Engine>, Refusal> {
        let mut chance = [0; 8];
        let random = rustix::rand::getrandom(&mut chance[..], GetRandomFlags::empty());
        random.map_err(|error| Refusal::new(RefusalKind::Limit, error.to_string()))?;
        let chance = u64::from_le_bytes(chance);
        let Some(member) = member else { return Ok(Arc::new(Engine::new(1, chance))) };
        engine::check(member)?;
        let new = || {
            let engine = Arc::new(Engine::new(member.ranks, chance));
            Joined { engine, parts: BTreeSet::new() }
        };
        let since = Instant::now();
        while since.elapsed() < PAUSE_MAX {
            let mut state = self.shared.state();
            let joined = state.engines.entry(self.key(member)).or_insert_with(new).join(member);
            drop(state);
            if let Some(engine) = joined? {
                return Ok(engine);
            }
            thread::sleep(REPLACE_PAUSE);
        }
        let Member { engine, rank, .. } = member;
        let part = rank.map_or_else(|| "a scheduler".to_owned(), |rank| format!("a rank {rank}"));
        let why = format!("engine {engine} has {part} already; give each engine its own name");
        Err(Refusal::new(RefusalKind::Limit, why))
    }

    fn leave(&self, member: Option<&Member>) {
        let Some(member) = member else { return };
        let (mut state, key) = (self.shared.state(), self.key(member));
        if let Some(joined) = state.engines.get_mut(&key) {
            joined.parts.remove(&member.rank);
            if joined.parts.is_empty() {
                state.engines.remove(&key);
            }
        }
    }

    fn serve_session(
        &self,
        pool: Option<(Layout, Option<OwnedFd>)>,
        member: Option<Member>,
        engine: Arc<Engine>,
    ) -> io::Result<()> {
        let Shared { stack, options, .. } = &**self.shared;
        let mut token = vec![0; 16];
        rustix::rand::getrandom(&mut token[..], GetRandomFlags::empty())?;
        let token = Bytes(token);
        let is_full = self.shared.state().sessions.len() >= options.sessions_max as usize;
        let begun = match is_full {
            true => {
                let why =
                    format!("there are {} clients, the most there may be", options.sessions_max);
                Err(Refusal::new(RefusalKind::Limit, why))
            }
            false => {
                let limit =
                    options.bandwidth.get(&self.peer.uid).map(|bytes_s| Limit::new(*bytes_s));
                let (number, peer, token) = (self.number, self.peer, token.clone());
                let arrival = Arrival { number, peer, token, member, engine, pool, limit };
                Session::begin(stack, arrival, options.pool_bytes_max)
            }
        };
        let session = match begun {
            Ok(session) => Arc::new(session),
            Err(refusal) => {
                self.note(&refusal, &mut 0);
                return self.refuse(refusal);
            }
        };
        self.shared.state().sessions.insert(self.number, session.clone());
        let Peer { uid, pid } = self.peer;
        tracing::info!(uid, pid, "a client has come");
        let shape = (*stack.store().shape()).into();
        let welcomed =
            protocol::send(self.stream, &Answer::Welcome { session: token, shape }, None);
        let served = welcomed.and_then(|()| self.answer_all(&session));
        let ended = session.end();
        let mut state = self.shared.state();
        state.sessions.remove(&self.number);
        state.counts.sessions_ended += 1;
        if let Err(error) = ended {
            tracing::error!(%error, uid, pid, "memory of a client stays mapped");
            state.failed.get_or_insert_with(|| error.to_string());
        }
        tracing::info!(uid, pid, "a client has gone");
        served
    }

    /// Serves a further connection of a session.
    fn attach(&self, token: &Bytes) -> io::Result<()> {
        let is_it =
            |session: &&Arc<Session>| session.token == *token && session.peer.uid == self.peer.uid;
        let found = self.shared.state().sessions.values().find(is_it).cloned();
        let Some(session) = found else {
            return self.malformed("there is no such session of this user");
        };
        let number = match session.attach(self.stream.try_clone()?) {
            Ok(number) => number,
            Err(refusal) => {
                self.note(&refusal, &mut 0);
                return self.refuse(refusal);
            }
        };
        let served = protocol::send(self.stream, &Answer::Done, None)
            .and_then(|()| self.answer_all(&session));
        session.detach(number);
        served
    }

    fn answer_all(&self, session: &Session) -> io::Result<()> {
        let mut logged = 0;
        loop {
            let call = match protocol::receive(self.stream)? {
                Received::Message(call, _) => call,
                Received::Nothing => continue,
                Received::End => return Ok(()),
                Received::Malformed(why) => return self.malformed(&why),
            };
            let answered = match &call {
                Call::Status
                | Call::Find(_)
                | Call::Pin(_)
                | Call::Unpin(_)
                | Call::Clear { .. }
                | Call::Quota { .. } => self.control(call),
                _ => session.call(call).unwrap_or_else(|| {
                    Err(Refusal::new(RefusalKind::Argument, "the session has begun already"))
                }),
            };
            match answered {
                Ok(answer) => protocol::send(self.stream, &answer, None)?,
                Err(refusal) => {
                    self.note(&refusal, &mut logged);
                    self.refuse(refusal)?;
                }
            }
        }
    }

    /// Carries out a call of control.
    fn control(&self, call: Call) -> Result<Answer, Refusal> {
        if ![self.shared.own_uid, 0].contains(&self.peer.uid) {
            let why = format!("user {} does not control this server", self.peer.uid);
            return Err(Refusal::new(RefusalKind::Denied, why));
        }
        let store = self.shared.stack.store();
        let within = |namespace| store.in_namespace(NamespaceId(namespace));
        let counted = match call {
            Call::Status => return self.shared.status().map(Box::new).map(Answer::Status),
            Call::Find(Named { namespace, keys }) => within(namespace)?.peek(&keys.0) as u32,
            Call::Pin(Named { namespace, keys }) => within(namespace)?.pin(&keys.0)?,
            Call::Unpin(Named { namespace, keys }) => within(namespace)?.unpin(&keys.0)?,
            Call::Clear { namespace } => {
                within(namespace)?.clear()?;
                store.sync_journal()?;
                return Ok(Answer::Done);
            }
            Call::Quota { namespace, bytes } => {
                let each = store.geometry().file_bytes().max(1);
                let files = bytes.map(|bytes| u32::try_from(bytes / each).unwrap_or(u32::MAX));
                within(namespace)?.set_quota(files)?;
                store.sync_journal()?;
                return Ok(Answer::Done);
            }
            _ => return Err(Refusal::new(RefusalKind::Argument, "it is no call of control")),
        };
        store.sync_journal()?;
        Ok(Answer::Number(counted))
    }
}

impl Shared {
    fn status(&self) -> Result<Status, Refusal> {
        let store = self.stack.store();
        let stats = store.stats()?;
        let namespaces = store.namespaces().into_iter().map(|(id, label)| {
            let usage = store.in_namespace(id)?.usage()?;
            let (files, quota_files) = (usage.stored, usage.quota_files);
            Ok(NamespaceStatus { namespace: id.0, label, files, quota_files })
        });
        let namespaces = namespaces.collect::<Result<_, StoreError>>()?;
        let state = self.state();
        let Counts { sessions_ended, users, messages, calls } = state.counts;
        Ok(Status {
            files: stats.files,
            file_bytes: stats.file_bytes,
            files_free: stats.files_free,
            files_stored: stats.files_stored,
            files_writing: stats.files_writing,
            files_referenced: stats.files_referenced,
            sessions: state.sessions.values().filter_map(|session| session.status()).collect(),
            sessions_ended,
            refused_users: users,
            refused_messages: messages,
            refused_calls: calls,
            namespaces,
        })
    }
}
