//! A client: its pool, its handles, and its calls.
//!
//! A client names everything by numbers that the server gave it or another client of its engine, or
//! by blocks of its own pool. It never names a file, an LBA or an address of memory: those are the
//! store's.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    os::fd::OwnedFd,
    os::unix::net::UnixStream,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use gio_uring::IoStatus;
use kv_catalog::lock;
use objstore::{
    BlockId, Direction, JobId, Layer, Namespace, NamespaceId, PinAnswer, PoolId, Store, StoreError,
};
use ripieno_stack::{Request, Stack};

use crate::{
    account::{Account, Charge, Resource, request_bytes},
    control::SessionStatus,
    engine::{Engine, Grant},
    error::RefusalKind,
    gpu::Lane,
    memory,
    moving::{Moving, OnGpu, Taken},
    peer::Peer,
    protocol::{Answer, Bytes, CONNECTIONS_MAX, Call, ClientPool, Ended, Keys, Mark, Member},
    refusal::Refusal,
    settings::TURN_MAX,
};

/// Requests that a client may have at a time.
const REQUESTS_MAX: usize = 256;
/// Namespaces that a client may use.
const NAMESPACES_MAX: usize = 64;
/// Time after which a call about several layers leaves the rest to the next one: with that of the
/// last layer, it is less than a client waits for an answer.
const LAYERS_TIME: Duration = Duration::from_secs(20);

/// The pool of a client, whose memory lives as long as it is registered.
#[derive(Debug)]
struct Pool {
    /// Those of the plane; the first one is that of its requests.
    ids: Vec<PoolId>,
    blocks: u32,
    bytes: u64,
    /// The lane that copies its layers, if it is on a GPU.
    lane: Option<Lane>,
}

/// Things that a client held that has made no call for a time. Their drop waits for layers in
/// flight.
#[derive(Debug)]
pub(crate) struct Left {
    _requests: Vec<Arc<Moving>>,
    _grants: Vec<Grant>,
}

/// A client.
#[derive(Debug)]
pub(crate) struct Session {
    /// Owner of its prefixes, reservations and pins.
    number: u64,
    pub(crate) peer: Peer,
    /// Names it in [`Call::Attach`].
    pub(crate) token: Bytes,
    member: Option<Member>,
    engine: Arc<Engine>,
    /// A handle whose requests name blocks of the client's pool.
    store: Store,
    pool: Option<Pool>,
    account: Arc<Account>,
    tables: Mutex<Tables>,
}

/// A client's handle tables.
#[derive(Debug, Default)]
struct Tables {
    /// By digest; each has a handle for each rank of the engine.
    namespaces: Vec<([u8; 32], Vec<Store>)>,
    requests: HashMap<u64, Arc<Moving>>,
    /// Its other connections.
    connections: HashMap<u64, UnixStream>,
    /// Given back when the session ends, which threads of its connections may outlive.
    client: Option<Charge>,
    is_ended: bool,
}

/// A client that connects.
#[derive(Debug)]
pub(crate) struct Arrival {
    /// Number of its first connection.
    pub(crate) number: u64,
    pub(crate) peer: Peer,
    pub(crate) token: Bytes,
    pub(crate) member: Option<Member>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) pool: Option<(ClientPool, Option<OwnedFd>)>,
    pub(crate) account: Arc<Account>,
    /// Its first connection.
    pub(crate) first: UnixStream,
}

/// A call in progress.
#[derive(Debug)]
pub(crate) struct Calling<'a>(&'a Session);

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        self.0.engine.end_call(self.0.now());
    }
}

impl Session {
    /// Registers the client's pool.
    pub(crate) fn begin(
        stack: &Stack,
        arrival: Arrival,
        pool_bytes_max: u64,
    ) -> Result<Self, Refusal> {
        let Arrival { number, peer, token, member, engine, pool, account, first } = arrival;
        let client = Some(account.take(Resource::Clients, 1)?);
        let mut store = stack.store().clone();
        let mut own = None;
        if let Some((ClientPool { layout, gpu }, file)) = pool {
            let none = || Refusal::argument("no memory came with the pool's layout");
            let file = file.ok_or_else(none)?;
            let mapping = memory::take(&file, pool_bytes_max).map_err(Refusal::argument)?;
            let blocks = layout.blocks;
            let pool = match gpu {
                None => {
                    let bytes = mapping.len() as u64;
                    let id = stack.add_pool(&memory::engine(Arc::new(mapping)), &layout)?;
                    Pool { ids: vec![id], blocks, bytes, lane: None }
                }
                Some(gpu) => {
                    let bytes = gpu.bytes;
                    let (lane, ids) =
                        Lane::open(stack, (layout, &gpu), mapping, pool_bytes_max, first)?;
                    Pool { ids, blocks, bytes, lane: Some(lane) }
                }
            };
            store = store.with_pool(pool.ids[0]);
            own = Some(pool);
        }
        let tables = Mutex::new(Tables { client, ..Tables::default() });
        Ok(Self { number, peer, token, member, engine, store, pool: own, account, tables })
    }

    fn now(&self) -> Duration {
        self.store.plane().now().duration()
    }

    /// Notes a call, until the result is dropped.
    pub(crate) fn calling(&self) -> Calling<'_> {
        self.engine.begin_call();
        Calling(self)
    }

    pub(crate) fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Takes what the client holds if no client of its engine has made a call for the time
    /// `hold_max`; `None` if that is nothing.
    pub(crate) fn expire(&self, now: Duration, hold_max: Duration) -> Option<Left> {
        if !self.engine.is_idle(now, hold_max) {
            return None;
        }
        let requests: Vec<_> =
            lock(&self.tables).requests.drain().map(|(_, moving)| moving).collect();
        let grants = self.engine.expire(hold_max, !requests.is_empty());
        let is_empty = requests.is_empty() && grants.is_empty();
        (!is_empty).then_some(Left { _requests: requests, _grants: grants })
    }

    /// Adds a connection, which is closed when the session ends. Returns its number.
    pub(crate) fn attach(&self, stream: UnixStream) -> Result<u64, Refusal> {
        let mut tables = lock(&self.tables);
        if tables.is_ended || tables.connections.len() >= CONNECTIONS_MAX {
            let why = format!("the session has ended, or has {CONNECTIONS_MAX} connections");
            return Err(Refusal::new(RefusalKind::Limit, why));
        }
        let number = self.engine.next();
        tables.connections.insert(number, stream);
        Ok(number)
    }

    /// Forgets a connection.
    pub(crate) fn detach(&self, number: u64) {
        lock(&self.tables).connections.remove(&number);
    }

    /// Ends the session, after its transfers: nothing refers to files or memory any more.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] if the store failed: the memory stays mapped.
    pub(crate) fn end(&self) -> Result<(), StoreError> {
        let Tables { namespaces, requests, connections, client: _client, .. } = {
            let mut tables = lock(&self.tables);
            let ended = Tables { is_ended: true, ..Tables::default() };
            std::mem::replace(&mut *tables, ended)
        };
        for stream in connections.values() {
            // A connection that is closed already needs no more.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        // No layer is copied any more.
        self.lane().into_iter().for_each(Lane::close);
        // Requests wait for their layers in flight, and free uncommitted files.
        drop((requests, namespaces));
        self.engine.leave(self.number);
        self.store.end_pins(None, Some(self.number));
        // A call that is in progress on another connection may have a request left.
        let ids = self.pool.iter().flat_map(|pool| &pool.ids);
        ids.copied().try_for_each(|id| self.store.plane().remove_pool(id).map(drop))
    }

    /// Returns what copies the client's layers, if its pool is on a GPU.
    fn lane(&self) -> Option<&Lane> {
        self.pool.as_ref()?.lane.as_ref()
    }

    /// Returns true if the client's pool is on a GPU: its layers are moved in the order of its
    /// calls and streams.
    pub(crate) fn is_on_gpu(&self) -> bool {
        self.lane().is_some()
    }

    /// Returns the state; `None` for a client that only controls.
    pub(crate) fn status(&self) -> Option<SessionStatus> {
        let pool_bytes = self.pool.as_ref().map(|pool| pool.bytes);
        let (prefixes, reservations) = self.engine.held(self.number);
        (pool_bytes.is_some() || self.member.is_some()).then(|| SessionStatus {
            uid: self.peer.uid,
            pid: self.peer.pid,
            pool_bytes: pool_bytes.unwrap_or(0),
            requests: lock(&self.tables).requests.len() as u32,
            prefixes,
            reservations,
            member: self.member.clone(),
        })
    }

    /// Carries out a call about blocks; `None` if it is another one.
    pub(crate) fn call(&self, call: Call) -> Option<Result<Answer, Refusal>> {
        Some(match call {
            Call::Namespace(namespace) => self.namespace(&namespace),
            Call::Peek { namespace, keys } => self.peek(namespace, &keys),
            Call::AreStored { namespace, keys } => self.are_stored(namespace, &keys),
            Call::Lookup { namespace, keys } => self.lookup(namespace, &keys),
            Call::Load { prefix, positions, blocks, layers } => {
                self.load(prefix, &positions, &blocks, layers)
            }
            Call::Reserve { namespace, keys } => self.reserve(namespace, &keys),
            Call::Fill { reservation, positions, blocks, layers } => {
                self.fill(reservation, &positions, &blocks, layers)
            }
            Call::Start { request, layers, after } => self.start(request, layers, after),
            Call::Wait { request, layers } => self.wait(request, layers),
            Call::Poll { request, layer } => self.poll(request, Layer(layer)),
            Call::Hurry { request } => self.hurry(request),
            Call::End { requests } => self.end_requests(&requests),
            Call::Report { reservation, rank, is_filled } => {
                let reported = self.engine.report(self.number, reservation, rank, is_filled);
                reported.map(Answer::Reported)
            }
            Call::Publish { reservation, requests, is_durable } => {
                self.publish(reservation, &requests, is_durable)
            }
            Call::Sync => self.store.sync_journal().map(|()| Answer::Done).map_err(Refusal::from),
            Call::Renew { namespace } => self.renew(namespace),
            Call::Remove { namespace, keys } => self.remove(namespace, &keys),
            Call::Unpin { pin } => {
                let ended = self.store.end_pins(pin, Some(self.number));
                Ok(Answer::Number(u32::from(ended.is_some())))
            }
            Call::Usage { namespace } => self.usage(namespace),
            Call::Counts => self.counts(),
            Call::Release { handles } => self.release(&handles),
            _ => return None,
        })
    }

    fn namespace(&self, namespace: &Namespace) -> Result<Answer, Refusal> {
        let digest = namespace.digest();
        let spaces = &mut lock(&self.tables).namespaces;
        if let Some(known) = spaces.iter().position(|(known, _)| *known == digest) {
            return Ok(Answer::Number(known as u32));
        }
        if spaces.len() >= NAMESPACES_MAX {
            let why = format!("a client may use {NAMESPACES_MAX} namespaces");
            return Err(Refusal::new(RefusalKind::Limit, why));
        }
        spaces.push((digest, self.engine.spaces(&self.store, namespace, &self.account)?));
        Ok(Answer::Number(spaces.len() as u32 - 1))
    }

    /// Returns a handle for each rank.
    fn space(&self, number: u32) -> Result<Vec<Store>, Refusal> {
        let found =
            lock(&self.tables).namespaces.get(number as usize).map(|(_, ranks)| ranks.clone());
        found.ok_or_else(|| Refusal::argument(format!("there is no namespace {number}")))
    }

    fn peek(&self, namespace: u32, keys: &Keys) -> Result<Answer, Refusal> {
        let found = self.space(namespace)?.into_iter().map(|store| store.peek(&keys.0));
        Ok(Answer::Number(found.min().unwrap_or(0) as u32))
    }

    fn are_stored(&self, namespace: u32, keys: &Keys) -> Result<Answer, Refusal> {
        let mut flags = vec![1; keys.0.len()];
        for store in self.space(namespace)? {
            let found = store.are_stored(&keys.0)?;
            flags.iter_mut().zip(found).for_each(|(flag, found)| *flag &= u8::from(found));
        }
        Ok(Answer::Flags(Bytes(flags)))
    }

    fn lookup(&self, namespace: u32, keys: &Keys) -> Result<Answer, Refusal> {
        let spaces = self.space(namespace)?;
        let (prefix, blocks) = self.engine.look_up(self.number, &self.account, &spaces, &keys.0)?;
        self.granted()?;
        Ok(Answer::Prefix { prefix, blocks: blocks as u32 })
    }

    fn reserve(&self, namespace: u32, keys: &Keys) -> Result<Answer, Refusal> {
        let spaces = self.space(namespace)?;
        let (reservation, accepted, positions) =
            self.engine.reserve(self.number, &self.account, &spaces, &keys.0)?;
        self.granted()?;
        Ok(Answer::Reserved { reservation, accepted: accepted as u32, positions })
    }

    /// Ends what the session was granted since it has ended.
    fn granted(&self) -> Result<(), Refusal> {
        if lock(&self.tables).is_ended {
            self.engine.leave(self.number);
            self.store.end_pins(None, Some(self.number));
            return Err(Refusal::new(RefusalKind::Limit, "the session has ended"));
        }
        Ok(())
    }

    /// Calls `pin` with the owner of a pin of this session, and with the namespace of each rank.
    pub(crate) fn pin(
        &self,
        namespace: u32,
        pin: impl FnOnce(u64, &[NamespaceId]) -> Result<PinAnswer, Refusal>,
    ) -> Result<Answer, Refusal> {
        let spaces = self.space(namespace)?;
        let spaces: Vec<NamespaceId> = spaces.iter().map(Store::namespace).collect();
        let pinned = pin(self.number, &spaces)?;
        self.granted()?;
        Ok(Answer::Pinned(pinned))
    }

    fn renew(&self, namespace: u32) -> Result<Answer, Refusal> {
        for store in self.space(namespace)? {
            store.bump_epoch()?;
        }
        self.store.sync_journal()?;
        Ok(Answer::Done)
    }

    fn remove(&self, namespace: u32, keys: &Keys) -> Result<Answer, Refusal> {
        let removed = self.space(namespace)?.into_iter().map(|store| store.remove(&keys.0));
        let removed = removed.collect::<Result<Vec<_>, _>>()?;
        Ok(Answer::Number(removed.into_iter().max().unwrap_or(0)))
    }

    fn usage(&self, namespace: u32) -> Result<Answer, Refusal> {
        let space = self.space(namespace)?;
        let first = space.first().ok_or_else(|| Refusal::argument("an engine without ranks"))?;
        Ok(Answer::Usage(first.usage()?))
    }

    fn counts(&self) -> Result<Answer, Refusal> {
        Ok(Answer::Counts(self.store.counts()?))
    }

    /// Returns the client's rank.
    fn rank(&self) -> usize {
        self.member.as_ref().and_then(|member| member.rank).unwrap_or(0) as usize
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

    fn load(
        &self,
        prefix: u64,
        positions: &[u32],
        blocks: &[u32],
        layers: u32,
    ) -> Result<Answer, Refusal> {
        let (found, held) = self.engine.prefix(prefix)?;
        let own = found.get(self.rank());
        let prefix = own.ok_or_else(|| self.engine.unknown("prefix", prefix))?;
        let (blocks, memory) = (self.blocks(blocks)?, self.memory(blocks)?);
        let positions: Vec<usize> = positions.iter().map(|at| *at as usize).collect();
        let of_plane = self.of_plane(&blocks, true)?;
        let request = Request::retrieve_at(&self.store, prefix, &positions, &of_plane)?;
        self.requested(request, (Direction::Read, blocks), (held, memory), layers)
    }

    /// Takes memory for the tables of a request.
    fn memory(&self, blocks: &[u32]) -> Result<Charge, Refusal> {
        let bytes = request_bytes(blocks.len(), self.store.shape().rows());
        self.account.take(Resource::Memory, bytes)
    }

    fn fill(
        &self,
        number: u64,
        positions: &[u32],
        blocks: &[u32],
        layers: u32,
    ) -> Result<Answer, Refusal> {
        let (writing, held) = self.engine.reservation(number)?;
        let own = writing.ranks.get(self.rank());
        let own = own.ok_or_else(|| self.engine.unknown("reservation", number))?;
        let (blocks, memory) = (self.blocks(blocks)?, self.memory(blocks)?);
        if positions.len() != blocks.len() || positions.iter().any(|at| !writing.has(*at)) {
            let why = format!("a block for each position of reservation {number} was expected");
            return Err(Refusal::argument(why));
        }
        // Others may be stored on this rank already.
        let pairs = positions.iter().copied().zip(blocks);
        let (positions, blocks): (Vec<u32>, Vec<BlockId>) =
            pairs.filter(|(at, _)| own.has(*at as usize)).unzip();
        let of_plane = self.of_plane(&blocks, false)?;
        let request = Request::fill(&self.store, own, &positions, &of_plane)?;
        self.requested(request, (Direction::Write, blocks), (held, memory), layers)
    }

    /// Returns the plane's blocks for a request: the client's, or those that its are copied to.
    fn of_plane(&self, blocks: &[BlockId], are_alone: bool) -> Result<Vec<BlockId>, Refusal> {
        match self.lane() {
            Some(lane) => lane.slots(blocks, are_alone),
            None => Ok(blocks.to_vec()),
        }
    }

    /// Keeps a request, and starts its first layers. The client learns its number in any case: what
    /// refuses a layer here refuses it again when the client starts the rest.
    fn requested(
        &self,
        request: Request,
        (direction, blocks): (Direction, Vec<BlockId>),
        taken: Taken,
        layers: u32,
    ) -> Result<Answer, Refusal> {
        let count = blocks.len() as u32;
        let on_gpu = OnGpu::new(direction, blocks, self.store.shape().layers);
        let moving = Arc::new(Moving { request, on_gpu, blocks: count, taken });
        let request = self.keep(moving.clone())?;
        if self.is_on_gpu() {
            // It waits for its copies, which no scheduler knows. The client has to learn the
            // number; if the plane has failed, its next call says so.
            let _ = moving.request.hurry();
        }
        let started = self.each(0..layers, |layer| self.start_layer(&moving, layer, None));
        Ok(Answer::Request { request, started: started.unwrap_or(0) })
    }

    fn keep(&self, request: Arc<Moving>) -> Result<u64, Refusal> {
        // Each client has the same share of the devices.
        request.request.assign(self.number as u32)?;
        let mut tables = lock(&self.tables);
        if tables.is_ended || tables.requests.len() >= REQUESTS_MAX {
            drop(tables);
            let why = format!("a client may have {REQUESTS_MAX} requests; end some");
            return Err(Refusal::new(RefusalKind::Limit, why));
        }
        let number = self.engine.next();
        tables.requests.insert(number, request);
        // Saves that wait would leave no room for loads: all of them start, and then each new one.
        let half = REQUESTS_MAX / 2;
        let is_first = tables.requests.len() == half + 1;
        let is_due = |at: u64| tables.requests.len() > half && (is_first || at == number);
        let due = tables.requests.iter().filter(|(at, _)| is_due(**at));
        let saves = due.filter(|(_, moving)| moving.request.accepted().is_some());
        let jobs: Vec<JobId> = saves.filter_map(|(_, moving)| moving.request.id().ok()).collect();
        drop(tables);
        for job in jobs {
            // The client has to learn the number. If the plane has failed, its next call says so.
            let _ = self.store.plane().hurry(job);
        }
        Ok(number)
    }

    fn request(&self, number: u64) -> Result<Arc<Moving>, Refusal> {
        let found = lock(&self.tables).requests.get(&number).cloned();
        found.ok_or_else(|| self.engine.unknown("request", number))
    }

    /// Takes requests out of the table: all of them, or none if another call uses one. Each has
    /// with it what it has taken, to be given back when it has ended.
    fn take(&self, numbers: &[u64]) -> Result<Vec<(Request, Option<StoreError>, Taken)>, Refusal> {
        let requests = &mut lock(&self.tables).requests;
        let mut known = HashSet::new();
        for number in numbers {
            let found = requests.get(number).filter(|_| known.insert(*number));
            // Others are made under the lock only.
            if Arc::strong_count(found.ok_or_else(|| self.engine.unknown("request", *number))?) > 1
            {
                return Err(Refusal::argument(format!("another call uses request {number}")));
            }
        }
        let taken = numbers.iter().filter_map(|number| requests.remove(number));
        let taken = taken.filter_map(Arc::into_inner);
        let parts = |Moving { request, on_gpu, taken, .. }| (request, on_gpu.failure(), taken);
        Ok(taken.map(parts).collect())
    }

    /// Acts on layers in their order. Returns how many there are before the first that is refused,
    /// or until time is up; or the refusal of the very first.
    fn each(
        &self,
        layers: Range<u32>,
        act: impl Fn(Layer) -> Result<(), Refusal>,
    ) -> Result<u32, Refusal> {
        let (mut done, until) = (0, self.now() + LAYERS_TIME);
        for layer in layers.map(Layer) {
            if done > 0 && self.now() > until {
                break;
            }
            match act(layer) {
                Ok(()) => done += 1,
                Err(refusal) if done == 0 => return Err(refusal),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    fn start(
        &self,
        request: u64,
        layers: Range<u32>,
        after: Option<Mark>,
    ) -> Result<Answer, Refusal> {
        let moving = self.request(request)?;
        self.each(layers, |layer| self.start_layer(&moving, layer, after)).map(Answer::Number)
    }

    fn start_layer(
        &self,
        moving: &Arc<Moving>,
        layer: Layer,
        after: Option<Mark>,
    ) -> Result<(), Refusal> {
        self.wait_for_turn(moving.blocks)?;
        match (self.lane(), after) {
            (Some(lane), _) => lane.start(moving, layer, after),
            (None, None) => Ok(moving.request.start(layer)?),
            (None, Some(_)) => {
                Err(Refusal::argument("the client's pool is in host memory, which has no streams"))
            }
        }
    }

    /// Waits until a client of a user with a limit may move another layer.
    fn wait_for_turn(&self, blocks: u32) -> Result<(), Refusal> {
        let shape = self.store.shape();
        let layer_bytes = u64::from(shape.segments) * u64::from(shape.object_bytes);
        let bytes = u64::from(blocks) * layer_bytes;
        let none = || {
            let uid = self.peer.uid;
            let why = format!(
                "the bandwidth of user {uid} is used up for seconds; start fewer layers at a time, \
                 or raise `bandwidth` in the user's [[limit]]"
            );
            Refusal::new(RefusalKind::Limit, why)
        };
        let wait = self.account.wait_for_turn(bytes, self.now(), TURN_MAX).ok_or_else(none)?;
        if !wait.is_zero() {
            thread::sleep(wait);
        }
        Ok(())
    }

    fn wait(&self, request: u64, layers: Range<u32>) -> Result<Answer, Refusal> {
        let moving = self.request(request)?;
        let waited = self.each(layers, |layer| match self.lane() {
            Some(lane) => lane.wait(&moving, layer),
            None => Ok(moving.request.wait(layer).map(drop)?),
        });
        waited.map(Answer::Number)
    }

    fn poll(&self, request: u64, layer: Layer) -> Result<Answer, Refusal> {
        let moving = self.request(request)?;
        let is_done = match self.lane() {
            Some(lane) => lane.poll(&moving, layer)?,
            None => moving.request.poll(layer)?.is_some(),
        };
        Ok(Answer::Number(u32::from(is_done)))
    }

    fn hurry(&self, request: u64) -> Result<Answer, Refusal> {
        self.request(request)?.request.hurry()?;
        Ok(Answer::Done)
    }

    fn end_requests(&self, numbers: &[u64]) -> Result<Answer, Refusal> {
        let ended = self.end_all(numbers)?.into_iter().map(|failure| {
            let at = match &failure {
                Some(StoreError::Transfer { failure }) => Some(failure),
                _ => None,
            };
            Ended {
                is_mismatch: at.is_some_and(|failure| failure.status == IoStatus::Checksum),
                lost: at.map(|failure| failure.position),
                error: failure.as_ref().map(ToString::to_string),
            }
        });
        Ok(Answer::Ended(ended.collect()))
    }

    /// Ends requests, and returns the failure of each.
    fn end_all(&self, numbers: &[u64]) -> Result<Vec<Option<StoreError>>, Refusal> {
        self.settle(numbers, false)?;
        let (mut requests, mut failures, mut taken) = (Vec::new(), Vec::new(), Vec::new());
        for (request, failure, held) in self.take(numbers)? {
            requests.push(request);
            failures.push(failure);
            taken.push(held);
        }
        // The client waits, and not for long.
        requests.iter().try_for_each(Request::hurry)?;
        let ended = Request::end_all(requests)?;
        // A device's failure names the block. Else, a layer that was not copied has not started.
        let first = |(copy, devices): (Option<_>, _)| match devices {
            Some(StoreError::Transfer { .. }) => devices,
            _ => copy.or(devices),
        };
        Ok(failures.into_iter().zip(ended).map(first).collect())
    }

    /// Waits until no layer of these requests is copied. `are_left`: those that wait for a stream
    /// are not moved any more.
    fn settle(&self, numbers: &[u64], are_left: bool) -> Result<(), Refusal> {
        let Some(lane) = self.lane() else { return Ok(()) };
        let found = numbers.iter().filter_map(|number| self.request(*number).ok());
        found.into_iter().try_for_each(|moving| lane.settle(&moving, are_left))
    }

    fn publish(
        &self,
        reservation: u64,
        requests: &[u64],
        is_durable: bool,
    ) -> Result<Answer, Refusal> {
        // Before requests end: another client's reservation ends none.
        self.engine.own_reservation(self.number, reservation)?;
        if let Some(failure) = self.end_all(requests)?.into_iter().flatten().next() {
            return Err(failure.into());
        }
        self.engine.publish(self.number, reservation, &self.store, is_durable)?;
        Ok(Answer::Done)
    }

    fn release(&self, handles: &[u64]) -> Result<Answer, Refusal> {
        let mut released = Ok(Answer::Done);
        for handle in handles {
            if !self.engine.end(self.number, *handle) {
                // Waits for its layers in flight.
                let settled = self.settle(&[*handle], true);
                let ended = settled.and_then(|()| self.take(&[*handle]).map(drop));
                released = released.and_then(|done| ended.map(|()| done));
            }
        }
        released
    }
}
