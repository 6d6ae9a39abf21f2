//! The clients of an engine of several processes: its scheduler ([`Finder`]) and its ranks
//! ([`Mover`]).
//!
//! They exchange plain data: the scheduler names a block by a *place*, a number that the server
//! checks against what this engine was granted. When the server is away, the scheduler finds
//! nothing, and transfers fail; both begin a new session when it is back, in which places of the
//! earlier one are unknown.

use std::{
    collections::HashMap,
    ops::Range,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
    time::{Duration, Instant},
};

use objstore::{
    BlockId, BlockKey, CatalogCounts, Direction, KvShape, Layer, Namespace, Outcome, PinAnswer,
    Usage,
};
use ripieno_stack::PoolLayout;

use crate::{
    client::{ANSWER_TIMEOUT, Client, Handle, Request, unexpected},
    error::{RefusalKind, ServeError},
    protocol::{Answer, Call, Ended, Keys, Member},
};

/// Bits of a place that are a position of a prefix or reservation. A message has fewer keys.
const POSITION_BITS: u32 = 16;
/// Pause between attempts to connect to a server that is away, and at least as long as the attempt
/// took: one that does not answer takes at most half of the time.
const RETRY_EVERY: Duration = Duration::from_millis(100);
/// Pause after an attempt that the server has refused.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A thread that panicked leaves tables that are whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn places(number: u64, positions: impl IntoIterator<Item = u32>) -> Vec<u64> {
    positions.into_iter().map(|at| number << POSITION_BITS | u64::from(at)).collect()
}

/// Returns true if a call failed because the server is not there, began anew, or can not serve it
/// now.
fn is_away(error: &ServeError) -> bool {
    use RefusalKind::{Failed, Limit, Transfer};
    match error {
        ServeError::Lost { .. } | ServeError::Stale | ServeError::Socket { .. } => true,
        ServeError::Refused { kind, .. } => matches!(kind, Failed | Limit | Transfer),
        _ => false,
    }
}

/// Returns true if a call was beyond a limit.
fn is_limit(error: &ServeError) -> bool {
    matches!(error, ServeError::Refused { kind: RefusalKind::Limit, .. })
}

/// Returns true if the store takes no writes any more.
fn is_read_only(error: &ServeError) -> bool {
    matches!(error, ServeError::Refused { kind: RefusalKind::ReadOnly, .. })
}

/// A client, and when it may connect again.
#[derive(Debug)]
struct Line {
    client: Client,
    retry_at: Mutex<Option<Instant>>,
}

impl Line {
    fn new(client: Client) -> Self {
        Self { client, retry_at: Mutex::default() }
    }

    /// Returns the number of the session; begins a new one if it was lost. `until`: its deadline,
    /// with which it does not wait for another thread that begins one.
    fn session(&self, until: Option<Instant>) -> Result<u64, ServeError> {
        let (session, lost) = self.client.session();
        let Some(why) = lost else { return Ok(session) };
        let mut retry_at = match self.retry_at.try_lock() {
            Ok(retry_at) => retry_at,
            Err(TryLockError::WouldBlock) if until.is_some() => {
                return Err(ServeError::Lost { why });
            }
            Err(_) => lock(&self.retry_at),
        };
        // Another thread may have done it.
        if let (session, None) = self.client.session() {
            return Ok(session);
        }
        let begun_at = Instant::now();
        match *retry_at {
            Some(at) if begun_at < at => return Err(ServeError::Lost { why }),
            None => tracing::warn!(why, "the connection to the server is lost"),
            Some(_) => {}
        }
        let begun = self.client.by(until).reconnect();
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
        begun.map_err(|error| ServeError::Lost { why: error.to_string() })?;
        tracing::info!("connected to the server again");
        Ok(self.client.session().0)
    }
}

/// Blocks that were found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Names it in [`Finder::release`].
    pub number: u64,
    /// The place of each block, in order.
    pub places: Vec<u64>,
}

/// Room for new blocks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Room {
    /// Names it in [`Finder::report`], [`Finder::publish`] and [`Finder::release`].
    pub number: u64,
    /// Leading keys that lookups find afterwards.
    pub accepted: u32,
    /// Positions, among these, of the blocks to store.
    pub positions: Vec<u32>,
    /// The places to store them at.
    pub places: Vec<u64>,
}

/// The scheduler of an engine: finds blocks, and reserves room for new ones. Any number of threads
/// may use it. While the server is away, nothing is found and there is no room.
#[derive(Debug)]
pub struct Finder {
    line: Line,
    tables: Mutex<Tables>,
}

#[derive(Debug, Default)]
struct Tables {
    /// The namespaces, and their numbers in a session.
    spaces: Vec<(Namespace, Option<(u64, u32)>)>,
    /// Those that only this engine has.
    private: Vec<usize>,
    /// Prefixes and reservations. Those of an earlier session release nothing.
    held: HashMap<u64, Handle>,
}

impl Finder {
    /// Connects to the server as the scheduler of `engine`, which has `ranks` ranks with blocks of
    /// this shape each.
    ///
    /// # Errors
    /// Same as [`Client::connect`].
    pub fn connect(
        path: PathBuf,
        shape: KvShape,
        engine: String,
        ranks: u32,
    ) -> Result<Self, ServeError> {
        let member = Member { engine, ranks, rank: None };
        let line = Line::new(Client::join(path, shape, Some(member), None)?);
        Ok(Self { line, tables: Mutex::default() })
    }

    /// Calls `act` in a session; `None` if the server is away.
    fn there<T>(
        &self,
        act: impl FnOnce(u64) -> Result<T, ServeError>,
    ) -> Result<Option<T>, ServeError> {
        match self.line.session(None).and_then(act) {
            Ok(value) => Ok(Some(value)),
            Err(error) if is_away(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes a call about a namespace; `None` if the server is away.
    fn about(
        &self,
        space: usize,
        call: impl FnOnce(u32) -> Call,
    ) -> Result<Option<(u64, Answer)>, ServeError> {
        self.there(|session| {
            let namespace = self.number(session, space)?;
            Ok((session, self.line.client.call_in(session, &call(namespace))?))
        })
    }

    /// Returns the number that a namespace has in a session.
    fn number(&self, session: u64, space: usize) -> Result<u32, ServeError> {
        let (named, known) = {
            let tables = lock(&self.tables);
            let expected = tables.spaces.len() as u64;
            let wrong =
                ServeError::Argument { what: "namespace below", given: space as u64, expected };
            tables.spaces.get(space).cloned().ok_or(wrong)?
        };
        if let Some((of, number)) = known
            && of == session
        {
            return Ok(number);
        }
        let number = match self.line.client.call_in(session, &Call::Namespace((&named).into()))? {
            Answer::Number(number) => number,
            other => return Err(unexpected(&other)),
        };
        lock(&self.tables).spaces[space].1 = Some((session, number));
        Ok(number)
    }

    /// Returns the number of a namespace, which stays the same for this value.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`], also if the client has as many as it may use.
    pub fn namespace(&self, namespace: &Namespace) -> Result<usize, ServeError> {
        let space = {
            let mut tables = lock(&self.tables);
            let found = tables.spaces.iter().position(|(known, _)| known == namespace);
            found.unwrap_or_else(|| {
                tables.spaces.push((namespace.clone(), None));
                tables.spaces.len() - 1
            })
        };
        self.register(space)?;
        Ok(space)
    }

    /// Registers a namespace, if the server is there: one that takes no more of them is.
    fn register(&self, space: usize) -> Result<(), ServeError> {
        match self.line.session(None).and_then(|session| self.number(session, space)) {
            Err(error) if is_limit(&error) || !is_away(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns how many leading keys are stored.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`] or [`ServeError::Argument`].
    pub fn look_up(&self, space: usize, keys: Vec<BlockKey>) -> Result<usize, ServeError> {
        let keys = Keys(keys);
        match self.about(space, |namespace| Call::Peek { namespace, keys })? {
            Some((_, Answer::Number(blocks))) => Ok(blocks as usize),
            None => Ok(0),
            Some((_, other)) => Err(unexpected(&other)),
        }
    }

    /// Returns a byte for each key: 1 if it is stored.
    ///
    /// # Errors
    /// Same as [`Finder::look_up`].
    pub fn are_stored(&self, space: usize, keys: Vec<BlockKey>) -> Result<Vec<u8>, ServeError> {
        let (count, keys) = (keys.len(), Keys(keys));
        match self.about(space, |namespace| Call::AreStored { namespace, keys })? {
            Some((_, Answer::Flags(flags))) if flags.0.len() == count => Ok(flags.0),
            None => Ok(vec![0; count]),
            Some((_, other)) => Err(unexpected(&other)),
        }
    }

    /// Drops keys for all engines of the namespace, including pinned ones and those in use. Returns
    /// how many were stored; 0 if the server is away.
    ///
    /// # Errors
    /// Same as [`Finder::look_up`].
    pub fn remove(&self, space: usize, keys: Vec<BlockKey>) -> Result<u32, ServeError> {
        let keys = Keys(keys);
        match self.about(space, |namespace| Call::Remove { namespace, keys })? {
            Some((_, Answer::Number(removed))) => Ok(removed),
            None => Ok(0),
            Some((_, other)) => Err(unexpected(&other)),
        }
    }

    /// Finds the longest stored prefix. Its blocks stay stored until it is released.
    ///
    /// # Errors
    /// Same as [`Finder::look_up`].
    pub fn acquire(&self, space: usize, keys: Vec<BlockKey>) -> Result<Found, ServeError> {
        let keys = Keys(keys);
        match self.about(space, |namespace| Call::Lookup { namespace, keys })? {
            Some((session, Answer::Prefix { prefix: number, blocks })) => {
                self.hold(session, number);
                Ok(Found { number, places: places(number, 0..blocks) })
            }
            None => Ok(Found { number: 0, places: Vec::new() }),
            Some((_, other)) => Err(unexpected(&other)),
        }
    }

    fn hold(&self, session: u64, number: u64) {
        let handle = self.line.client.handle(number, session);
        lock(&self.tables).held.insert(number, handle);
    }

    /// Reserves room for blocks: as many leading ones as possible. Pass the whole prefix.
    ///
    /// # Errors
    /// Same as [`Finder::look_up`].
    pub fn reserve(&self, space: usize, keys: Vec<BlockKey>) -> Result<Room, ServeError> {
        let keys = Keys(keys);
        let reserved = match self.about(space, |namespace| Call::Reserve { namespace, keys }) {
            Err(error) if is_read_only(&error) => None,
            other => other?,
        };
        match reserved {
            Some((session, Answer::Reserved { reservation: number, accepted, positions })) => {
                self.hold(session, number);
                let places = places(number, positions.iter().copied());
                Ok(Room { number, accepted, positions, places })
            }
            None => Ok(Room::default()),
            Some((_, other)) => Err(unexpected(&other)),
        }
    }

    /// Releases what was found or reserved.
    pub fn release(&self, number: u64) {
        let held = lock(&self.tables).held.remove(&number);
        // Its drop makes the call.
        drop(held);
    }

    /// Reports that a rank has filled its part of a reservation, or failed to. Returns `None` while
    /// other ranks have not reported, true if it can be published, and false if it has ended.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`].
    pub fn report(
        &self,
        number: u64,
        rank: u32,
        is_filled: bool,
    ) -> Result<Option<bool>, ServeError> {
        let call = Call::Report { reservation: number, rank, is_filled };
        let reported = match self.call_held(number, &call)? {
            Some(Answer::Reported(reported)) => reported,
            None => Some(false),
            Some(other) => return Err(unexpected(&other)),
        };
        if reported == Some(false) {
            self.forget(number);
        }
        Ok(reported)
    }

    /// Makes the blocks of a reservation visible to all engines of the namespace. They are durable
    /// when this returns if that is asked for, or else after [`Finder::sync`]. Returns false if the
    /// server is away, began anew, or takes no writes any more: then they may be lost.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`].
    pub fn publish(&self, number: u64, is_durable: bool) -> Result<bool, ServeError> {
        let call = Call::Publish { reservation: number, requests: Vec::new(), is_durable };
        let published = self.call_held(number, &call)?;
        self.forget(number);
        Ok(published.is_some())
    }

    /// Makes a call about something held; `None` if it is of an earlier session.
    fn call_held(&self, number: u64, call: &Call) -> Result<Option<Answer>, ServeError> {
        let session = lock(&self.tables).held.get(&number).map(|handle| handle.generation);
        match session.map(|session| self.line.client.call_in(session, call)) {
            None => Ok(None),
            Some(Err(error)) if is_away(&error) || is_read_only(&error) => Ok(None),
            Some(answered) => answered.map(Some),
        }
    }

    /// Forgets what the server has ended.
    fn forget(&self, number: u64) {
        if let Some(handle) = lock(&self.tables).held.get(&number) {
            *handle.is_over() = true;
        }
        self.release(number);
    }

    /// Makes everything published so far durable. Does nothing while the server is away.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`].
    pub fn sync(&self) -> Result<(), ServeError> {
        self.there(|session| self.line.client.call_in(session, &Call::Sync)).map(|_| ())
    }

    /// Pins blocks on all ranks for so many seconds; until this or the server ends, at the latest.
    /// The arguments are those of [`Call::Pin`].
    ///
    /// # Errors
    /// Same as [`Finder::look_up`].
    pub fn pin(
        &self,
        space: usize,
        keys: Vec<BlockKey>,
        ttl_s: u64,
        bytes_max: Option<u64>,
        wait: bool,
    ) -> Result<PinAnswer, ServeError> {
        let keys = Keys(keys);
        let call = |namespace| Call::Pin { namespace, keys, ttl_s, bytes_max, wait };
        match self.about(space, call)? {
            Some((_, Answer::Pinned(answer))) => Ok(answer),
            None => {
                let reason = Some("the server is away".to_owned());
                Ok(PinAnswer { outcome: Outcome::Missing, reason, pin: None })
            }
            Some((_, other)) => Err(unexpected(&other)),
        }
    }

    /// Ends a pin, or all of this engine's (`None`). Returns false if there is none, or not any
    /// more.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`].
    pub fn unpin(&self, pin: Option<u64>) -> Result<bool, ServeError> {
        match self.there(|session| self.line.client.call_in(session, &Call::Unpin { pin }))? {
            Some(Answer::Number(ended)) => Ok(ended > 0),
            None => Ok(false),
            Some(other) => Err(unexpected(&other)),
        }
    }

    /// Drops all blocks of a namespace for this engine, whose weights change: others that have the
    /// old weights keep them, and from now on share none with it. `salt` is a random number.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`], also if the client has as many namespaces as it may use, or
    /// [`ServeError::Lost`] if the blocks could not be dropped.
    pub fn renew(&self, space: usize, salt: [u8; 16]) -> Result<(), ServeError> {
        let is_private = lock(&self.tables).private.contains(&space);
        if is_private {
            return match self.about(space, |namespace| Call::Renew { namespace })? {
                Some((_, Answer::Done)) => Ok(()),
                None => Err(ServeError::Lost { why: "the server is away".to_owned() }),
                Some((_, other)) => Err(unexpected(&other)),
            };
        }
        // Blocks of the old weights are not this engine's any more.
        self.unpin(None)?;
        let mut tables = lock(&self.tables);
        let expected = tables.spaces.len() as u64;
        let wrong = ServeError::Argument { what: "namespace below", given: space as u64, expected };
        let (named, number) = tables.spaces.get_mut(space).ok_or(wrong)?;
        named.tenant_salt.extend_from_slice(&salt);
        *number = None;
        tables.private.push(space);
        drop(tables);
        // A refusal is one of this call, and not of the next lookup.
        self.register(space)
    }

    /// Returns the counts of a namespace; zeros if the server is away.
    ///
    /// # Errors
    /// Same as [`Finder::look_up`].
    pub fn usage(&self, space: usize) -> Result<Usage, ServeError> {
        match self.about(space, |namespace| Call::Usage { namespace })? {
            Some((_, Answer::Usage(usage))) => Ok(usage),
            None => Ok(Usage::default()),
            Some((_, other)) => Err(unexpected(&other)),
        }
    }

    /// Returns the counts of the store; zeros if the server is away.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`].
    pub fn counts(&self) -> Result<CatalogCounts, ServeError> {
        match self.there(|session| self.line.client.call_in(session, &Call::Counts))? {
            Some(Answer::Counts(counts)) => Ok(counts),
            None => Ok(CatalogCounts::default()),
            Some(other) => Err(unexpected(&other)),
        }
    }
}

/// Result of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobReport {
    /// The job.
    pub job: u64,
    /// The reason if not all data arrived.
    pub error: Option<String>,
    /// True if the data read is not the data stored.
    pub is_mismatch: bool,
}

/// A rank of an engine: moves blocks between its memory and places. Any number of threads may use
/// it.
#[derive(Debug)]
pub struct Mover {
    line: Line,
    jobs: Mutex<Jobs>,
    /// Places that could not be read.
    lost: Mutex<Vec<u64>>,
}

/// The jobs of a rank.
#[derive(Debug, Default)]
struct Jobs {
    all: HashMap<u64, Arc<Job>>,
    last: u64,
}

/// A request whose end has failed.
#[derive(Debug, Clone, Default)]
struct Unknown {
    why: String,
    /// True if nothing accesses its blocks.
    is_over: bool,
}

/// A job.
#[derive(Debug)]
struct Job {
    direction: Direction,
    /// Prefix or reservation.
    number: u64,
    blocks: Vec<BlockId>,
    /// `None` if there is nothing to move.
    request: Option<Request>,
}

impl Mover {
    /// Connects to the server as rank `rank` of `engine`. `file`: the rank's memory, a memfd of
    /// whole pages that is sealed against shrinking, with blocks in this layout. The memory must be
    /// mapped shared, and not in huge pages. Objects are whole pages.
    ///
    /// # Errors
    /// Same as [`Client::connect`], and [`ServeError::Argument`] for objects that are not whole
    /// pages.
    pub fn connect(
        path: PathBuf,
        shape: KvShape,
        (engine, ranks, rank): (String, u32, u32),
        layout: PoolLayout,
        file: OwnedFd,
    ) -> Result<Self, ServeError> {
        let page = rustix::param::page_size() as u64;
        let sizes = [u64::from(shape.object_bytes), layout.block_stride];
        if let Some(given) = sizes.iter().chain(&layout.rows).find(|at| !at.is_multiple_of(page)) {
            let what = "bytes of an object, or its place in the memory, in whole pages";
            return Err(ServeError::Argument { what, given: *given, expected: page });
        }
        let member = Member { engine, ranks, rank: Some(rank) };
        let line = Line::new(Client::join(path, shape, Some(member), Some((layout, file)))?);
        let (jobs, lost) = (Mutex::default(), Mutex::default());
        Ok(Self { line, jobs, lost })
    }

    /// Returns the shape of the blocks.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        self.line.client.shape()
    }

    /// Returns true if the server decides when layers start.
    #[must_use]
    pub fn is_paced(&self) -> bool {
        self.line.client.is_paced()
    }

    /// Prepares to move blocks from or to places, one for each. The places are of one prefix or
    /// reservation. Returns the job.
    ///
    /// # Errors
    /// Returns [`ServeError::Refused`], [`ServeError::Argument`], or [`ServeError::Lost`].
    pub fn begin(
        &self,
        direction: Direction,
        places: &[u64],
        blocks: Vec<BlockId>,
    ) -> Result<u64, ServeError> {
        let number = places.first().map_or(0, |place| place >> POSITION_BITS);
        if let Some(other) = places.iter().find(|place| *place >> POSITION_BITS != number) {
            let (what, given) = ("places of one prefix or reservation", other >> POSITION_BITS);
            return Err(ServeError::Argument { what, given, expected: number });
        }
        let request = match places {
            [] => None,
            _ => {
                let session = self.line.session(None)?;
                let mask = (1 << POSITION_BITS) - 1;
                let positions = places.iter().map(|place| (place & mask) as u32).collect();
                let blocks = crate::client::numbers(&blocks);
                let call = match direction {
                    Direction::Read => Call::Load { prefix: number, positions, blocks, layers: 0 },
                    Direction::Write => {
                        Call::Fill { reservation: number, positions, blocks, layers: 0 }
                    }
                };
                Some(self.line.client.request(session, &call)?)
            }
        };
        let mut jobs = lock(&self.jobs);
        jobs.last += 1;
        let job = jobs.last;
        jobs.all.insert(job, Arc::new(Job { direction, number, blocks, request }));
        Ok(job)
    }

    fn job(&self, job: u64) -> Result<Arc<Job>, ServeError> {
        let found = lock(&self.jobs).all.get(&job).cloned();
        found.ok_or(ServeError::Argument { what: "job", given: job, expected: 0 })
    }

    /// Starts layers.
    ///
    /// # Errors
    /// Same as [`Request::start_all`].
    pub fn start(&self, job: u64, layers: Range<u32>) -> Result<(), ServeError> {
        self.job(job)?.request.as_ref().map_or(Ok(()), |request| request.start_all(layers))
    }

    /// Waits for layers.
    ///
    /// # Errors
    /// Same as [`Request::wait_all`].
    pub fn wait(&self, job: u64, layers: Range<u32>) -> Result<(), ServeError> {
        self.job(job)?.request.as_ref().map_or(Ok(()), |request| request.wait_all(layers))
    }

    /// Returns true if a layer has ended.
    ///
    /// # Errors
    /// Same as [`Request::wait`].
    pub fn poll(&self, job: u64, layer: Layer) -> Result<bool, ServeError> {
        self.job(job)?.request.as_ref().map_or(Ok(true), |request| request.poll(layer))
    }

    /// Starts the layers of a job that wait for their turn, and later ones at once.
    ///
    /// # Errors
    /// Same as [`Request::start`].
    pub fn hurry(&self, job: u64) -> Result<(), ServeError> {
        self.job(job)?.request.as_ref().map_or(Ok(()), Request::hurry)
    }

    /// Ends jobs: waits for their layers, and makes what they stored durable. On return, nothing
    /// accesses their blocks: if the session was lost, and the server does not confirm its end,
    /// those that were loaded are zeros. On a server that hangs, this takes 90 seconds in all, and
    /// longer if another thread connects to it meanwhile.
    ///
    /// # Errors
    /// Returns [`ServeError::Argument`] for an unknown job, and [`ServeError::Memory`] if blocks
    /// cannot be given new pages.
    pub fn end(&self, jobs: &[u64]) -> Result<Vec<JobReport>, ServeError> {
        self.end_by(Instant::now() + ANSWER_TIMEOUT, jobs)
    }

    fn end_by(&self, until: Instant, jobs: &[u64]) -> Result<Vec<JobReport>, ServeError> {
        let client = self.line.client.by(Some(until));
        jobs.iter().try_for_each(|job| self.job(*job).map(|_| ()))?;
        let ending: Vec<_> = {
            let table = &mut lock(&self.jobs).all;
            jobs.iter().filter_map(|job| Some((*job, table.remove(job)?))).collect()
        };
        let requests = ending.iter().filter_map(|(_, job)| job.request.as_ref());
        let handles: Vec<&Handle> = requests.map(|request| &request.handle).collect();
        let mut sessions: Vec<u64> = handles.iter().map(|handle| handle.generation).collect();
        sessions.sort_unstable();
        sessions.dedup();
        let mut ended: HashMap<u64, Result<Ended, Unknown>> = HashMap::new();
        for session in sessions {
            let of = handles.iter().filter(|handle| handle.generation == session);
            let requests: Vec<u64> = of.map(|handle| handle.numbers[0]).collect();
            let call = Call::End { requests: requests.clone() };
            match client.call_in(session, &call) {
                Ok(Answer::Ended(all)) if all.len() == requests.len() => {
                    ended.extend(requests.into_iter().zip(all.into_iter().map(Ok)));
                }
                Ok(other) => return Err(unexpected(&other)),
                Err(error) => {
                    let is_over = self.is_over(session, &error, until);
                    let unknown = Unknown { why: error.to_string(), is_over };
                    ended.extend(requests.into_iter().map(|number| (number, Err(unknown.clone()))));
                }
            }
        }
        ending.into_iter().map(|(number, job)| self.report(number, job, &mut ended)).collect()
    }

    /// Returns true if nothing accesses the blocks of requests whose end has failed, once they are
    /// dropped: the server lives, and either refused the call, or has ended the session that was
    /// lost before it began the next one.
    fn is_over(&self, session: u64, error: &ServeError, until: Instant) -> bool {
        let confirmed = || self.line.session(Some(until)).is_ok_and(|next| next != session);
        !matches!(error, ServeError::Lost { .. }) || Instant::now() < until && confirmed()
    }

    fn report(
        &self,
        number: u64,
        job: Arc<Job>,
        ended: &mut HashMap<u64, Result<Ended, Unknown>>,
    ) -> Result<JobReport, ServeError> {
        let request = job.request.as_ref().map(|request| request.handle.numbers[0]);
        let nothing = Ok(Ended { error: None, is_mismatch: false, lost: None });
        match request.map_or(Some(nothing), |request| ended.remove(&request)) {
            Some(Ok(Ended { error, is_mismatch, lost })) => {
                if let Some(request) = &job.request {
                    *request.handle.is_over() = true;
                }
                lock(&self.lost).extend(places(job.number, lost));
                Ok(JobReport { job: number, error, is_mismatch })
            }
            lost => {
                let Unknown { why, is_over } = lost.and_then(Result::err).unwrap_or_default();
                // A server that lives would find zeros in place of the block that it reads.
                if let (Direction::Read, false, Some(request)) =
                    (job.direction, is_over, &job.request)
                {
                    self.replace(request.handle.generation, &job.blocks)?;
                }
                Ok(JobReport { job: number, error: Some(why), is_mismatch: false })
            }
        }
    }

    /// Gives blocks that a session was loading new pages, unless the next session has begun: the
    /// earlier one has ended then, and drives of the server know the pages that there are now.
    fn replace(&self, session: u64, blocks: &[BlockId]) -> Result<(), ServeError> {
        // No session begins meanwhile.
        let _retry_at = lock(&self.line.retry_at);
        match self.line.client.session() {
            (current, _) if current == session => self.line.client.discard(blocks),
            _ => Ok(()),
        }
    }

    /// Returns the places that could not be read since the last call. The server has marked them.
    #[must_use]
    pub fn take_lost(&self) -> Vec<u64> {
        std::mem::take(&mut lock(&self.lost))
    }
}

#[cfg(test)]
mod tests;
