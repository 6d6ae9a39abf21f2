//! State of a server that its threads share, and its settings.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::SocketAddr,
    os::{fd::OwnedFd, unix::fs::PermissionsExt as _},
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use kv_catalog::lock;
use ripieno_stack::{MetricsPage, Stack, StackError, http::Reply};

use crate::{
    account::Account,
    control::{NamespaceStatus, PinList, Reloaded, Status, doors::Doors},
    engine::{EngineKey, Joined},
    error::RefusalKind,
    refusal::Refusal,
    session::{Left, Session},
    settings::{Reload, Settings, Totals},
};

/// Refusals that are logged in a minute; more are only counted.
const LOGGED_MAX: u32 = 600;
const MINUTE: Duration = Duration::from_secs(60);

/// Parameters of a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Path of the socket.
    pub socket: PathBuf,
    /// A TCP address for control, where each request needs [`Settings::token`].
    pub http: Option<SocketAddr>,
    /// Values that can change while it serves.
    pub settings: Settings,
    /// Gets new ones.
    pub reload: Option<Reload>,
}

/// State of a server that its threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    socket: PathBuf,
    reload: Option<Reload>,
    settings: Mutex<Arc<Settings>>,
    own_uid: u32,
    pub(crate) totals: Totals,
    /// By user.
    accounts: Mutex<BTreeMap<u32, Arc<Account>>>,
    pub(crate) state: Mutex<State>,
    page: Mutex<MetricsPage>,
    /// The right to use the blocks of the store's own pool.
    pub(crate) own_pool: Mutex<()>,
    /// The last field: the others have handles of the store.
    pub(crate) stack: Stack,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) sessions: BTreeMap<u64, Arc<Session>>,
    /// Sessions that begin.
    pub(crate) arriving: usize,
    pub(crate) connections: BTreeMap<u64, OwnedFd>,
    /// Of these, those over TCP.
    pub(crate) doors: Doors,
    pub(crate) engines: BTreeMap<EngineKey, Joined>,
    last: u64,
    pub(crate) counts: Counts,
    pub(crate) log: LogBudget,
    /// Set when the store has failed.
    pub(crate) failed: Option<String>,
}

#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Counts {
    pub(crate) sessions_ended: u64,
    pub(crate) users: u64,
    pub(crate) messages: u64,
    pub(crate) calls: u64,
    pub(crate) requests: u64,
}

/// Log lines of this minute.
#[derive(Debug, Default)]
pub(crate) struct LogBudget {
    begun: Duration,
    lines: u32,
}

impl LogBudget {
    /// Returns true if a line may be written at the time `now`.
    fn take(&mut self, now: Duration) -> bool {
        if now.saturating_sub(self.begun) >= MINUTE {
            *self = Self { begun: now, lines: 0 };
        }
        self.lines = self.lines.saturating_add(1);
        self.lines <= LOGGED_MAX
    }
}

impl Shared {
    pub(crate) fn new(stack: Stack, options: ServerOptions) -> Self {
        let ServerOptions { socket, http: _, settings, reload } = options;
        let store = stack.store();
        let layout = store.superblock().layout;
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let totals = Totals {
            files: layout.files,
            file_bytes: store.geometry().file_bytes(),
            namespaces: layout.namespaces_max,
            descriptors: limit.current.unwrap_or(u64::MAX),
        };
        let shared = Self {
            page: Mutex::new(MetricsPage::of_store(stack.store())),
            stack,
            socket,
            reload,
            settings: Mutex::new(Arc::new(settings)),
            own_uid: rustix::process::geteuid().as_raw(),
            totals,
            accounts: Mutex::default(),
            state: Mutex::default(),
            own_pool: Mutex::default(),
        };
        shared.set_limits(&shared.settings().limits.keys().copied().collect());
        shared
    }

    /// Returns the account of a user.
    pub(crate) fn account(&self, uid: u32) -> Arc<Account> {
        let share = || self.settings().share(uid, [self.own_uid, 0], &self.totals);
        let mut accounts = lock(&self.accounts);
        accounts.entry(uid).or_insert_with(|| Account::new(uid, share())).clone()
    }

    /// Gives all accounts, and those of `users`, the limits of the settings.
    fn set_limits(&self, users: &BTreeSet<u32>) {
        users.iter().for_each(|uid| drop(self.account(*uid)));
        let accounts = lock(&self.accounts).clone();
        let settings = self.settings();
        for (uid, account) in accounts {
            let share = settings.share(uid, [self.own_uid, 0], &self.totals);
            account.set_share(share);
            // A store that takes no writes has no new blocks either.
            if let Err(error) = self.stack.store().limit_owner(uid, share.stored_files) {
                tracing::warn!(%error, uid, "the limit of stored bytes stays as it is");
            }
        }
    }

    /// Takes what clients hold that have made no call for a time.
    pub(crate) fn expire(&self, now: Duration) -> Vec<Left> {
        let hold_max = self.settings().hold_max;
        let sessions: Vec<Arc<Session>> = lock(&self.state).sessions.values().cloned().collect();
        let mut left = Vec::new();
        for session in sessions {
            if let Some(ended) = session.expire(now, hold_max) {
                let (uid, pid) = (session.peer.uid, session.peer.pid);
                tracing::warn!(uid, pid, ?hold_max, "what a client held ends: it made no call");
                left.push(ended);
            }
        }
        left
    }

    /// Closes the store.
    pub(crate) fn close(self) -> Result<(), StackError> {
        let Self { stack, state, page, .. } = self;
        drop((state, page));
        stack.close()
    }

    pub(crate) fn settings(&self) -> Arc<Settings> {
        lock(&self.settings).clone()
    }

    pub(crate) fn now(&self) -> Duration {
        self.stack.store().plane().now().duration()
    }

    /// Returns true if a user may control the server.
    pub(crate) fn is_controller(&self, uid: u32) -> bool {
        [self.own_uid, 0].contains(&uid)
    }

    /// Gives the socket the mode that lets these users in.
    pub(crate) fn admit(&self, Settings { users, .. }: &Settings) -> io::Result<()> {
        let is_own = users.iter().all(|uid| *uid == self.own_uid);
        let mode = fs::Permissions::from_mode(if is_own { 0o600 } else { 0o666 });
        fs::set_permissions(&self.socket, mode)
    }

    /// Returns the text of the metrics.
    pub(crate) fn metrics(&self, accept: &str) -> Reply {
        let mut page = lock(&self.page);
        let (content_type, text) = page.text(accept);
        Reply::new(200, content_type, text.into_bytes())
    }

    pub(crate) fn pin_list(&self) -> PinList {
        self.stack.store().pins(&self.settings().pins)
    }

    /// Notes that the store has failed, if a refusal says so.
    pub(crate) fn note_failure(&self, kind: RefusalKind, message: &str) {
        if kind == RefusalKind::Failed {
            lock(&self.state).failed.get_or_insert_with(|| message.to_owned());
        }
    }

    /// Serves by other settings from now on.
    pub(crate) fn apply(&self, settings: Settings) {
        let users = settings.limits.keys().copied().collect();
        *lock(&self.settings) = Arc::new(settings);
        self.set_limits(&users);
    }

    /// Gets new settings, and serves by them from now on: all of them, or none.
    pub(crate) fn reload(&self) -> Result<Reloaded, Refusal> {
        let Some(Reload(reload)) = &self.reload else {
            let why = "this server has no configuration to read again";
            return Err(Refusal::new(RefusalKind::Unsupported, why));
        };
        let conflict = |why| Refusal::new(RefusalKind::Conflict, why);
        let settings = reload().map_err(conflict)?;
        let checked = settings.check(self.stack.store().shape(), self.totals.file_bytes);
        checked.map_err(|error| conflict(error.to_string()))?;
        let refused = |error: io::Error| conflict(format!("setting the socket's mode: {error}"));
        let current = lock(&self.settings);
        self.admit(&settings).map_err(refused)?;
        let changed = current.differences(&settings);
        drop(current);
        self.apply(settings);
        tracing::info!(?changed, "the configuration was read again");
        Ok(Reloaded { changed })
    }

    /// Looks at the devices. Returns the cause if the store has failed.
    pub(crate) fn look(&self) -> Option<String> {
        let looked = self.stack.store().plane().sync();
        let mut state = lock(&self.state);
        if let (Err(error), None) = (looked, &state.failed) {
            state.failed = Some(error.to_string());
        }
        state.failed.clone()
    }

    pub(crate) fn status(&self) -> Result<Status, Refusal> {
        let store = self.stack.store();
        let stats = store.stats()?;
        let namespaces = store.namespaces().into_iter().filter_map(|(id, label)| {
            // Another one may have replaced it meanwhile.
            let usage = store.in_namespace(id).ok()?.usage().ok()?;
            let (files, quota_files) = (usage.stored, usage.quota_files);
            Some(NamespaceStatus { namespace: id.0, label, files, quota_files })
        });
        let namespaces = namespaces.collect();
        let PinList { pins, bytes: pinned_bytes, .. } = self.pin_list();
        let state = lock(&self.state);
        let Counts { sessions_ended, users, messages, calls, requests } = state.counts;
        Ok(Status {
            healthy: store.plane().check_writable().is_ok(),
            files: stats.files.files,
            file_bytes: stats.file_bytes,
            files_free: stats.files_free(),
            files_stored: stats.files.stored,
            files_writing: stats.files.writing,
            files_referenced: stats.files.active,
            sessions: state.sessions.values().filter_map(|session| session.status()).collect(),
            sessions_ended,
            refused_users: users,
            refused_messages: messages,
            refused_calls: calls,
            refused_requests: requests,
            pins: pins.len() as u64,
            pinned_bytes,
            namespaces,
        })
    }

    /// Returns true if a line about a refusal may be logged: clients can cause any number.
    pub(crate) fn may_log(&self) -> bool {
        let now = self.now();
        lock(&self.state).log.take(now)
    }

    /// Counts and logs a refused request.
    pub(crate) fn log_refusal(&self, from: &str, what: &str, why: &str) {
        let mut state = lock(&self.state);
        state.counts.requests += 1;
        drop(state);
        if self.may_log() {
            tracing::warn!(from, ?what, why, "a request was refused");
        }
    }
}

impl State {
    /// Takes room for a session that begins. Returns false if there are `most`.
    pub(crate) fn expect_session(&mut self, most: u32) -> bool {
        let has_room = self.sessions.len() + self.arriving < most as usize;
        self.arriving += usize::from(has_room);
        has_room
    }

    /// Keeps a connection, so that it can be ended. Returns its number.
    pub(crate) fn enter(&mut self, connection: OwnedFd) -> u64 {
        self.last += 1;
        self.connections.insert(self.last, connection);
        self.last
    }

    pub(crate) fn leave_web(&mut self, number: u64) {
        self.connections.remove(&number);
        self.doors.leave(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_begins_takes_room() {
        let mut state = State::default();
        assert!(state.expect_session(2) && state.expect_session(2));
        assert!(!state.expect_session(2), "neither has begun yet");
    }

    #[test]
    fn a_minute_has_so_many_lines() {
        let mut log = LogBudget::default();
        let mut lines = |from: u32, to: u32| {
            let seconds = (from..to).map(|second| Duration::from_secs(second.into()));
            seconds.flat_map(|at| [at; 100]).filter(|at| log.take(*at)).count()
        };
        assert_eq!(lines(5, 10), 500);
        assert_eq!(lines(10, 60), 100, "the rest of the first minute");
        assert_eq!(lines(60, 120), 600);
    }
}
