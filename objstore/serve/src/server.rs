//! The server: its sockets and its threads.
//!
//! Each connection has a thread, which answers one call after the other. A connection to the socket
//! begins with a message of a client or with a request of HTTP: the first bytes of that would be a
//! length that no message has.

use std::{
    collections::BTreeSet,
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use kv_catalog::lock;
use objstore::{NewPin, StoreError};
use ripieno_stack::{SocketFile, Stack, StackError, http};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    net::RecvFlags,
    process::Rlimit,
    rand::GetRandomFlags,
};

use crate::{
    account::{Charge, Resource},
    control::{
        doors::Door,
        web::{self, Access},
    },
    engine::{self, Engine, EngineKey, Joined},
    error::{RefusalKind, ServeError, listen_hint},
    peer::{Peer, is_cut},
    protocol::{self, Answer, Bytes, Call, ClientPool, Member, Received, VERSION},
    refusal::Refusal,
    session::{Arrival, Session},
    shared::{ServerOptions, Shared},
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

/// A store, and the socket at which clients find it.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    listener: UnixListener,
    web: Option<TcpListener>,
    path: SocketFile,
}

impl Server {
    /// Listens on the socket. Its mode admits the users of the options; each connection is checked
    /// again, by the credentials that the kernel has for it. Raises the process's limit of
    /// descriptors to the most that it may have.
    ///
    /// # Errors
    /// Returns an error of [`Server::try_bind`]; [`StackError::Config`] for a limit that is less
    /// than a block.
    pub fn bind(stack: Stack, options: ServerOptions) -> Result<Self, ServeError> {
        raise_descriptors();
        let (path, action) = (options.socket.clone(), "setting the mode of");
        let (listener, file, web) = listen(&path, options.http)?;
        let shared = Shared::new(stack, options);
        shared.settings().check(shared.stack.store().shape(), shared.totals.file_bytes)?;
        shared.admit(&shared.settings()).map_err(|source| {
            let hint = listen_hint(&source);
            ServeError::Socket { path, action, source, hint }
        })?;
        Ok(Self { shared: Arc::new(shared), listener, web, path: file })
    }

    /// Checks that a server could listen there, before a store is opened for it.
    ///
    /// # Errors
    /// Returns [`ServeError::InUse`], [`ServeError::Socket`] or [`ServeError::Control`].
    pub fn try_bind(socket: &Path, http: Option<SocketAddr>) -> Result<(), ServeError> {
        listen(socket, http).map(drop)
    }

    /// Returns the TCP address for control, with the port that the system chose in place of port 0.
    #[must_use]
    pub fn http(&self) -> Option<SocketAddr> {
        self.web.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    /// Takes clients until `is_over` returns true, which is called a few times a second; then ends
    /// all sessions, and closes the store.
    ///
    /// # Errors
    /// Returns the error of the store if it fails: clients have lost their connections, and may
    /// reconnect to a new server.
    pub fn run(self, mut is_over: impl FnMut() -> bool) -> Result<(), ServeError> {
        let Self { shared, listener, web, path } = self;
        let mut threads: Vec<JoinHandle<()>> = Vec::new();
        let failed = loop {
            if let Some(cause) = shared.look() {
                break Some(cause);
            }
            if is_over() {
                break None;
            }
            threads.retain(|thread| !thread.is_finished());
            let left = shared.expire(shared.now());
            if !left.is_empty() {
                // Layers in flight are waited for.
                threads.push(thread::spawn(move || drop(left)));
            }
            wait_for_any(&listener, web.as_ref());
            // Both are non-blocking.
            let accepted = [
                arrived(listener.accept())
                    .map(|come| come.and_then(|(stream, _)| shared.accept(stream))),
                web.as_ref()
                    .and_then(|web| arrived(web.accept()))
                    .map(|come| come.and_then(|(stream, from)| shared.accept_web(stream, from))),
            ];
            for accepted in accepted.into_iter().flatten() {
                match accepted {
                    Ok(thread) => threads.extend(thread),
                    Err(error) => {
                        if shared.may_log() {
                            tracing::error!(%error, "a client was turned away");
                        }
                        // It may still be there, if descriptors are short.
                        thread::sleep(LOOK_EVERY);
                    }
                }
            }
        };
        // No client finds the socket any more.
        drop((listener, web, path));
        lock(&shared.state).connections.values().for_each(http::hang_up);
        for thread in threads {
            // A panic was reported when it happened.
            let _ = thread.join();
        }
        let shared = Arc::into_inner(shared).expect("all threads that shared it have ended");
        let closed = shared.close();
        match failed {
            Some(cause) => Err(StackError::from(StoreError::Failed { cause }).into()),
            None => Ok(closed?),
        }
    }
}

/// Lets the process open as many descriptors as it may: a connection takes up to three.
fn raise_descriptors() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let most = Rlimit { current: limit.maximum, ..limit };
    if let Err(error) = rustix::process::setrlimit(rustix::process::Resource::Nofile, most) {
        tracing::warn!(%error, "the limit of descriptors stays");
    }
}

/// Returns what was accepted, or the error; `None` if nothing has come.
fn arrived<T>(accepted: io::Result<T>) -> Option<io::Result<T>> {
    match accepted {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        accepted => Some(accepted),
    }
}

/// Waits for a connection, but not for long.
fn wait_for_any(listener: &UnixListener, web: Option<&TcpListener>) {
    let Ok(soon) = Timespec::try_from(LOOK_EVERY) else { return };
    let all = [Some(listener.as_fd()), web.map(|web| web.as_fd())];
    let mut ready: Vec<PollFd<'_>> =
        all.into_iter().flatten().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    // After an error, the next round tries again.
    let _ = rustix::event::poll(&mut ready, Some(&soon));
}

fn listen(
    path: &Path,
    http: Option<SocketAddr>,
) -> Result<(UnixListener, SocketFile, Option<TcpListener>), ServeError> {
    // A client that has gone again must not block it.
    let bound = SocketFile::bind(path)
        .and_then(|(listener, file)| listener.set_nonblocking(true).map(|()| (listener, file)));
    let (listener, file) = bound.map_err(|source| {
        let (path, action, hint) = (path.to_owned(), "listening on", listen_hint(&source));
        match source.kind() {
            io::ErrorKind::AddrInUse => ServeError::InUse { path },
            _ => ServeError::Socket { path, action, source, hint },
        }
    })?;
    let web = |address: SocketAddr| {
        let bound = TcpListener::bind(address);
        let bound = bound.and_then(|it| it.set_nonblocking(true).map(|()| it));
        bound.map_err(|source| {
            let hint = listen_hint(&source);
            ServeError::Control { address: address.to_string(), source, hint }
        })
    };
    Ok((listener, file, http.map(web).transpose()?))
}

/// Returns true if a connection begins with a request of HTTP, and not with a message: waits for
/// its first bytes, and leaves them.
fn is_http(stream: &UnixStream) -> bool {
    let until = Instant::now() + PAUSE_MAX;
    while Instant::now() < until {
        let mut begin = [0; 4];
        match rustix::net::recv(stream, &mut begin, RecvFlags::PEEK) {
            Ok((0, _)) | Err(_) => return false,
            // The letters of a method, as a length, are beyond the limit of messages.
            Ok((4.., _)) => {
                return begin[..3].iter().all(u8::is_ascii_uppercase);
            }
            Ok(_) if is_cut(stream) => return false,
            Ok(_) => thread::sleep(REPLACE_PAUSE),
        }
    }
    false
}

impl Shared {
    /// Starts a thread for a connection, unless its user is refused.
    fn accept(self: &Arc<Self>, stream: UnixStream) -> io::Result<Option<JoinHandle<()>>> {
        let peer = Peer::of(&stream)?;
        self.accept_from(peer, stream)
    }

    fn accept_from(
        self: &Arc<Self>,
        peer: Peer,
        stream: UnixStream,
    ) -> io::Result<Option<JoinHandle<()>>> {
        stream.set_read_timeout(Some(PAUSE_MAX))?;
        stream.set_write_timeout(Some(PAUSE_MAX))?;
        let settings = self.settings();
        let uid = peer.uid;
        // Each user has its own, so that nobody keeps a controller out.
        let admitted = match self.is_controller(uid) || settings.users.contains(&uid) {
            true => self.account(uid).take(Resource::Connections, 1),
            false => Err(Refusal::new(
                RefusalKind::Denied,
                format!(
                    "user {uid} is not on the list of users of this server; add it to `users` of \
                     its configuration, and reload that"
                ),
            )),
        };
        let charge = match admitted {
            Ok(charge) => charge,
            Err(refusal) => {
                self.turn_away(peer, &stream, refusal);
                return Ok(None);
            }
        };
        let number = lock(&self.state).enter(stream.try_clone()?.into());
        self.serve_client(number, peer, stream, charge).map(Some)
    }

    fn turn_away(&self, peer: Peer, stream: &UnixStream, Refusal { kind, message }: Refusal) {
        let mut state = lock(&self.state);
        match kind {
            RefusalKind::Denied => state.counts.users += 1,
            _ => state.counts.calls += 1,
        }
        drop(state);
        if self.may_log() {
            tracing::warn!(uid = peer.uid, pid = peer.pid, message, "a connection was refused");
        }
        // One that does not read it has no use for it.
        let _ = protocol::send(stream, &Answer::Refused { kind, message }, None);
    }

    /// Starts the thread of a connection to the socket.
    fn serve_client(
        self: &Arc<Self>,
        number: u64,
        peer: Peer,
        stream: UnixStream,
        charge: Charge,
    ) -> io::Result<JoinHandle<()>> {
        let shared = self.clone();
        let serve = move || {
            let connection = Connection { shared: &shared, number, peer, stream: &stream };
            let served = match is_http(&stream) {
                true => {
                    let Peer { uid, pid } = peer;
                    let from = format!("process {pid} of user {uid}");
                    web::serve(&shared, &stream, Access::User(uid), &from)
                }
                false => connection.serve(),
            };
            if let Err(error) = served {
                tracing::debug!(%error, uid = peer.uid, pid = peer.pid, "a connection broke");
            }
            lock(&shared.state).connections.remove(&number);
            drop((stream, charge));
        };
        let spawned = thread::Builder::new().name("ripieno client".to_owned()).spawn(serve);
        if spawned.is_err() {
            lock(&self.state).connections.remove(&number);
        }
        spawned
    }

    /// Starts a thread for a connection over TCP, unless there are too many.
    fn accept_web(
        self: &Arc<Self>,
        stream: TcpStream,
        from: SocketAddr,
    ) -> io::Result<Option<JoinHandle<()>>> {
        stream.set_nonblocking(false)?;
        let mut state = lock(&self.state);
        let number = state.enter(stream.try_clone()?.into());
        let door = state.doors.enter(number, from.ip());
        if let Door::Instead(other) = door
            && let Some(connection) = state.connections.remove(&other)
        {
            http::hang_up(&connection);
        }
        if door == Door::Closed {
            state.connections.remove(&number);
        }
        drop(state);
        if door != Door::Open {
            self.log_refusal(&from.to_string(), "a connection", "there are too many");
        }
        if door == Door::Closed {
            // One that does not take it has no use for it.
            let _ = web::turn_away(&stream);
            return Ok(None);
        }
        let shared = self.clone();
        let serve = move || {
            let access = Access::Token(number);
            if let Err(error) = web::serve(&shared, &stream, access, &from.to_string()) {
                tracing::debug!(%error, %from, "a connection broke");
            }
            lock(&shared.state).leave_web(number);
        };
        let spawned = thread::Builder::new().name("ripieno http".to_owned()).spawn(serve);
        if spawned.is_err() {
            lock(&self.state).leave_web(number);
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
                    true => self.begin(pool.map(|pool| (pool, file)), member),
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
            let state = lock(&self.shared.state);
            let is_it = |(_, session): &(&u64, &Arc<Session>)| {
                Some(&session.token) == earlier && session.peer.uid == self.peer.uid
            };
            let number = state.sessions.iter().find(is_it).map(|(number, _)| *number)?;
            // Its first connection.
            state.connections.get(&number).map(http::hang_up)
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
        lock(&self.shared.state).counts.messages += 1;
        let Peer { uid, pid } = self.peer;
        if self.shared.may_log() {
            tracing::warn!(uid, pid, why, "a message was refused");
        }
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
                lock(&self.shared.state).counts.calls += 1;
                *logged += 1;
            }
            RefusalKind::Failed => {
                lock(&self.shared.state).failed.get_or_insert_with(|| message.clone());
            }
            _ => {}
        }
        if *logged <= LOGGED_MAX && self.shared.may_log() {
            tracing::warn!(uid, pid, ?kind, message, "a call was refused");
        }
    }

    /// Begins a session on this connection, serves it, and ends it.
    fn begin(
        &self,
        pool: Option<(ClientPool, Option<OwnedFd>)>,
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
            let mut state = lock(&self.shared.state);
            let joined = state.engines.entry(self.key(member)).or_insert_with(new).join(member);
            drop(state);
            if let Some(engine) = joined? {
                return Ok(engine);
            }
            thread::sleep(REPLACE_PAUSE);
        }
        let Member { engine, rank, copy, .. } = member;
        let part = match (rank, copy) {
            (None, _) => "a scheduler".to_owned(),
            (Some(rank), 0) => format!("a rank {rank}"),
            (Some(rank), copy) => format!("a copy {copy} of rank {rank}"),
        };
        let why = format!("engine {engine} has {part} already; give each engine its own name");
        Err(Refusal::new(RefusalKind::Limit, why))
    }

    fn leave(&self, member: Option<&Member>) {
        let Some(member) = member else { return };
        let (mut state, key) = (lock(&self.shared.state), self.key(member));
        if let Some(joined) = state.engines.get_mut(&key) {
            joined.parts.remove(&(member.rank, member.copy));
            if joined.parts.is_empty() {
                state.engines.remove(&key);
            }
        }
    }

    fn serve_session(
        &self,
        pool: Option<(ClientPool, Option<OwnedFd>)>,
        member: Option<Member>,
        engine: Arc<Engine>,
    ) -> io::Result<()> {
        let (stack, settings) = (&self.shared.stack, self.shared.settings());
        let mut token = vec![0; 16];
        rustix::rand::getrandom(&mut token[..], GetRandomFlags::empty())?;
        let token = Bytes(token);
        let is_full = !lock(&self.shared.state).expect_session(settings.sessions_max);
        let begun = match is_full {
            true => {
                let why =
                    format!("there are {} clients, the most there may be", settings.sessions_max);
                Err(Refusal::new(RefusalKind::Limit, why))
            }
            false => {
                let account = self.shared.account(self.peer.uid);
                let (number, peer, token) = (self.number, self.peer, token.clone());
                let first = self.stream.try_clone()?;
                let arrival = Arrival { number, peer, token, member, engine, pool, account, first };
                Session::begin(stack, arrival, settings.pool_bytes_max)
            }
        };
        let begun = begun.map(Arc::new);
        if !is_full {
            let mut state = lock(&self.shared.state);
            state.arriving -= 1;
            state.sessions.extend(begun.iter().map(|session| (self.number, session.clone())));
        }
        let session = match begun {
            Ok(session) => session,
            Err(refusal) => {
                self.note(&refusal, &mut 0);
                return self.refuse(refusal);
            }
        };
        let Peer { uid, pid } = self.peer;
        tracing::info!(uid, pid, "a client has come");
        let shape = *stack.store().shape();
        let paced = stack.store().plane().with_scheduler(|_| ());
        let is_paced = paced.is_ok_and(|paced| paced.is_some()) && !session.is_on_gpu();
        let welcome = Answer::Welcome { session: token, shape, is_paced };
        let welcomed = protocol::send(self.stream, &welcome, None);
        let served = welcomed.and_then(|()| self.answer_all(&session));
        let ended = session.end();
        let mut state = lock(&self.shared.state);
        state.sessions.remove(&self.number);
        state.counts.sessions_ended += 1;
        if let Err(error) = ended {
            tracing::error!(%error, uid, pid, "memory of a client stays mapped");
            state.failed.get_or_insert_with(|| error.to_string());
            drop(state);
            // One that waits for the end must not take it for a good one.
            let _ = self.refuse(error.into());
        }
        tracing::info!(uid, pid, "a client has gone");
        served
    }

    /// Serves a further connection of a session.
    fn attach(&self, token: &Bytes) -> io::Result<()> {
        let is_it =
            |session: &&Arc<Session>| session.token == *token && session.peer.uid == self.peer.uid;
        let found = lock(&self.shared.state).sessions.values().find(is_it).cloned();
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
            let calling = session.calling();
            let answered = match call {
                Call::Pin { namespace, keys, ttl_s, bytes_max, wait } => {
                    let (keys, ttl) = (&keys.0[..], Duration::from_secs(ttl_s));
                    session.pin(namespace, |owner, namespaces| {
                        let new = NewPin { owner, namespaces, keys, ttl, bytes_max, wait };
                        self.shared.pin_of(session.account(), new)
                    })
                }
                call => session.call(call).unwrap_or_else(|| {
                    Err(Refusal::new(RefusalKind::Argument, "the session has begun already"))
                }),
            };
            drop(calling);
            match answered {
                Ok(answer) => protocol::send(self.stream, &answer, None)?,
                Err(refusal) => {
                    self.note(&refusal, &mut logged);
                    self.refuse(refusal)?;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
