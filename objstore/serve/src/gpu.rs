//! A client's pool on a GPU: its layers go through memory of the server.
//!
//! The plane knows a few pools in pinned memory of the server, each with room for a layer of a
//! request, and moves a layer between one of them and the devices. A thread copies it between that
//! memory and the client's, which is mapped here: of a save before the devices write it, of a load
//! when they have read it. It touches the client's memory only after the stream of the client has
//! reached the layer's [`Mark`]; a stream that does not get there holds up nothing but this layer.
//! All else (checksums, DRAM cache, codec, recovery) is as for memory of the host.

use std::{
    collections::HashSet,
    mem,
    os::unix::net::UnixStream,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use kv_catalog::lock;
use nvme_driver::CopyDirection;
use objstore::{
    BlockId, Direction, KvPool, KvShape, Layer, PoolId, PoolLayout, StoreError, check_layout,
};
use ripieno_stack::{CopyFence, ForeignGpu, GpuHandle, Stack, StackError, is_reached};

use crate::{
    error::RefusalKind,
    memory::Mapping,
    moving::{CopyState, Moving, OnGpu},
    peer::is_cut,
    protocol::{GpuRange, Mark},
    refusal::Refusal,
};

/// Layers of a client that are moved at a time.
const ROOMS: u32 = 4;
/// Pinned memory for a client, at most; but at least a block for each of these layers.
const STAGING_MAX: u64 = 1 << 30;
/// Bytes of the name of a GPU, which a refusal repeats.
const GPU_BYTES_MAX: usize = 32;
/// Time for a stream to reach a mark: it may have a long step to compute. It is less than a client
/// waits for an answer.
const MARK_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for the copies of a layer.
const COPY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which devices that are still at work are waited for.
const POLL_MAX: Duration = Duration::from_secs(5);
/// Time for a layer to end: longer than all of its stages.
const WAIT_MAX: Duration = Duration::from_secs(150);
/// Pauses between looks at layers that are moved.
const PAUSES: (Duration, Duration) = (Duration::from_micros(50), Duration::from_micros(200));

/// A layer that is moved.
#[derive(Debug)]
struct LayerMove {
    moving: Arc<Moving>,
    layer: Layer,
    at: Stage,
    since: Instant,
}

/// The stage of a layer, which it waits for. Rooms are numbers of the plane's pools.
#[derive(Debug, Clone, Copy)]
enum Stage {
    /// The client's stream, and then a room.
    Stream(Option<Mark>),
    /// A copy out of the client's memory.
    Gather(usize, CopyFence),
    /// The devices.
    Devices(usize),
    /// A copy into the client's memory.
    Scatter(usize, CopyFence),
}

/// A client's pool on a GPU.
#[derive(Debug)]
pub(crate) struct Lane {
    inner: Arc<Inner>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Inner {
    gpu: ForeignGpu,
    shape: KvShape,
    layout: PoolLayout,
    marks: Mapping,
    rooms: Vec<PoolId>,
    /// Blocks of a room.
    slots: u32,
    /// Its first connection: once that is closed, its streams get nowhere.
    client: UnixStream,
    queue: Mutex<LaneQueue>,
    /// Notified when a layer begins or ends.
    changed: Condvar,
}

/// Orders for the thread. Not locked while layers wait for devices; only the last handle of a
/// request is dropped with it, before whoever waits for the request is woken.
#[derive(Debug, Default)]
struct LaneQueue {
    /// Layers that the thread has not seen.
    begun: Vec<LayerMove>,
    is_closed: bool,
}

impl Lane {
    /// Maps a client's memory, and adds pools for its layers to the plane. Returns them.
    pub(crate) fn open(
        stack: &Stack,
        (layout, range): (PoolLayout, &GpuRange),
        marks: Mapping,
        bytes_max: u64,
        client: UnixStream,
    ) -> Result<(Self, Vec<PoolId>), Refusal> {
        let GpuRange { gpu, handle, offset, bytes } = range.clone();
        if bytes > bytes_max {
            let why = format!(
                "the pool has {bytes} bytes; up to {bytes_max} are possible: raise `pool_max`"
            );
            return Err(Refusal::argument(why));
        }
        if gpu.len() > GPU_BYTES_MAX {
            let why = format!("the PCI address of the GPU has {} bytes", gpu.len());
            return Err(Refusal::argument(why));
        }
        let shape = *stack.store().shape();
        let len = usize::try_from(bytes).map_err(|error| Refusal::argument(error.to_string()))?;
        check_layout(&shape, &layout, len).map_err(StackError::from)?;
        let each = KvPool::staging_bytes(&shape, 1, ROOMS).max(1);
        let room = u32::try_from(STAGING_MAX.min(bytes_max) / each).unwrap_or(u32::MAX);
        let slots = room.max(1).min(layout.blocks);
        let staging = KvPool::staging_bytes(&shape, slots, ROOMS);
        let staging = usize::try_from(staging).unwrap_or(usize::MAX);
        let named = GpuHandle { gpu, handle: handle.0, offset, bytes };
        let gpu = ForeignGpu::open(&named, staging)?;
        let rooms = stack.add_layers(&gpu.staging(), slots, ROOMS)?;
        let (ids, queue, changed) = (rooms.clone(), Mutex::default(), Condvar::new());
        let inner = Inner { gpu, shape, layout, marks, rooms, slots, client, queue, changed };
        let inner = Arc::new(inner);
        let lane = Self { inner: inner.clone(), thread: Mutex::default() };
        let spawned = thread::Builder::new()
            .name("ripieno gpu".to_owned())
            .spawn(move || inner.run())
            .map_err(|error| Refusal::new(RefusalKind::Limit, error.to_string()));
        match spawned {
            Ok(thread) => *lock(&lane.thread) = Some(thread),
            Err(refusal) => {
                let plane = stack.store().plane();
                ids.into_iter().try_for_each(|id| plane.remove_pool(id).map(drop))?;
                return Err(refusal);
            }
        }
        Ok((lane, ids))
    }

    /// Returns the plane's blocks for those of a request, which may be on the GPU only.
    pub(crate) fn slots(
        &self,
        blocks: &[BlockId],
        are_alone: bool,
    ) -> Result<Vec<BlockId>, Refusal> {
        let (slots, pool) = (self.inner.slots, self.inner.layout.blocks);
        if blocks.len() > slots as usize {
            let given = blocks.len();
            let why = format!(
                "{given} blocks were given; on a GPU a request moves up to {slots}, by \
                 {STAGING_MAX} bytes of the server's memory: use parts"
            );
            return Err(Refusal::argument(why));
        }
        let mut known = HashSet::new();
        for block in blocks {
            if block.0 >= pool || (are_alone && !known.insert(*block)) {
                let why = format!("block {block} is named twice, or is none of {pool}");
                return Err(Refusal::argument(why));
            }
        }
        Ok((0..blocks.len() as u32).map(BlockId).collect())
    }

    /// Moves a layer, once the client's stream has reached a mark.
    pub(crate) fn start(
        &self,
        moving: &Arc<Moving>,
        layer: Layer,
        after: Option<Mark>,
    ) -> Result<(), Refusal> {
        let Inner { marks, changed, shape, .. } = &*self.inner;
        if let Some(Mark { word, .. }) = after.filter(|mark| marks.word(mark.word).is_none()) {
            return Err(Refusal::argument(format!("there is no word {word} for marks of streams")));
        }
        let mut queue = lock(&self.inner.queue);
        match moving.on_gpu.get(layer) {
            _ if queue.is_closed => {
                return Err(Refusal::new(RefusalKind::Limit, "the session has ended"));
            }
            Some(CopyState::InFlight) => return Err(StoreError::InFlight { layer }.into()),
            Some(_) => {}
            None => {
                return Err(StoreError::no_such_layer(layer, shape.layers).into());
            }
        }
        moving.on_gpu.set(layer, CopyState::InFlight);
        let (moving, at) = (moving.clone(), Stage::Stream(after));
        queue.begun.push(LayerMove { moving, layer, at, since: Instant::now() });
        changed.notify_all();
        Ok(())
    }

    /// Returns true if a layer that was started has ended.
    pub(crate) fn poll(&self, moving: &Moving, layer: Layer) -> Result<bool, Refusal> {
        match moving.on_gpu.get(layer) {
            Some(CopyState::InFlight) => Ok(false),
            Some(CopyState::Ended) => Ok(true),
            Some(CopyState::Failed(why)) => Err(StoreError::Stream { cause: why }.into()),
            // An error.
            Some(CopyState::Idle) | None => Ok(moving.request.poll(layer)?.is_some()),
        }
    }

    /// Waits for a layer that was started. Each of its stages has a limit of time.
    pub(crate) fn wait(&self, moving: &Moving, layer: Layer) -> Result<(), Refusal> {
        self.inner.wait_while(|| matches!(moving.on_gpu.get(layer), Some(CopyState::InFlight)))?;
        self.poll(moving, layer).map(drop)
    }

    /// Waits until no layer of a request is moved. `is_left`: those that wait for a stream end now.
    pub(crate) fn settle(&self, moving: &Moving, is_left: bool) -> Result<(), Refusal> {
        if is_left {
            moving.on_gpu.leave();
        }
        self.inner.wait_while(|| moving.on_gpu.is_in_flight())
    }

    /// Ends: copies in flight are over when this returns, and no other ones begin.
    pub(crate) fn close(&self) {
        lock(&self.inner.queue).is_closed = true;
        self.inner.changed.notify_all();
        if let Some(thread) = lock(&self.thread).take() {
            // A panic was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.close();
    }
}

impl Inner {
    fn wait_while(&self, is_so: impl Fn() -> bool) -> Result<(), Refusal> {
        let is_so = |_: &mut LaneQueue| is_so();
        let waited = self.changed.wait_timeout_while(lock(&self.queue), WAIT_MAX, is_so);
        let (_queue, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        match timeout.timed_out() {
            false => Ok(()),
            true => Err(Refusal::new(RefusalKind::Transfer, "a layer on a GPU does not end")),
        }
    }

    fn run(&self) {
        let (mut moves, mut free) = (Vec::new(), (0..self.rooms.len()).collect());
        let (mut pause, mut is_alone) = (PAUSES.0, false);
        loop {
            let is_closed = {
                let mut queue = lock(&self.queue);
                while moves.is_empty() && queue.begun.is_empty() {
                    if queue.is_closed {
                        return;
                    }
                    pause = PAUSES.0;
                    queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
                moves.append(&mut queue.begun);
                queue.is_closed
            };
            if self.advance(&mut moves, &mut free, is_closed || is_alone) {
                pause = PAUSES.0;
                continue;
            }
            is_alone = is_cut(&self.client);
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Looks at each layer that is moved. Those that wait for a stream end if they `are_left`.
    /// Returns true if one has got further.
    fn advance(&self, moves: &mut Vec<LayerMove>, free: &mut Vec<usize>, are_left: bool) -> bool {
        let mut has_moved = false;
        for mut of in mem::take(moves) {
            let before = mem::discriminant(&of.at);
            match self.step(&mut of, free, are_left) {
                Some(ended) => {
                    has_moved = true;
                    let progress = ended.map_or_else(CopyState::Failed, |()| CopyState::Ended);
                    // Whoever waits for the layer finds the request free of it.
                    let _queue = lock(&self.queue);
                    of.moving.on_gpu.set(of.layer, progress);
                    drop(of);
                    self.changed.notify_all();
                }
                None => {
                    has_moved |= mem::discriminant(&of.at) != before;
                    moves.push(of);
                }
            }
        }
        has_moved
    }

    /// Takes a layer as far as it gets. It waits only for devices that do not answer. Returns how
    /// the layer has ended, if it has.
    fn step(
        &self,
        of: &mut LayerMove,
        free: &mut Vec<usize>,
        are_left: bool,
    ) -> Option<Result<(), String>> {
        let (LayerMove { moving, layer, .. }, direction) = (&*of, of.moving.on_gpu.direction);
        let next = match of.at {
            Stage::Stream(_) if are_left || moving.on_gpu.is_left() => {
                return Some(Err("it was left".to_owned()));
            }
            Stage::Stream(mark) => {
                let is_there = |mark: Mark| {
                    self.marks.word(mark.word).is_some_and(|word| is_reached(word, mark.value))
                };
                let Some(room) = mark.is_none_or(is_there).then(|| free.pop()).flatten() else {
                    let late = "the client's stream did not reach the layer in time, or earlier \
                                layers did not end";
                    return (of.since.elapsed() > MARK_TIMEOUT).then(|| Err(late.to_owned()));
                };
                match direction {
                    Direction::Write => {
                        self.copy(moving, *layer, room).map(|fence| Stage::Gather(room, fence))
                    }
                    Direction::Read => self.start(moving, *layer, room),
                }
                .map_err(|error| (room, error))
            }
            Stage::Gather(room, fence) => match self.gpu.is_done(fence) {
                Ok(true) => self.start(moving, *layer, room).map_err(|error| (room, error)),
                Ok(false) => return self.is_late(of),
                // It may still be copied to.
                Err(error) => return Some(Err(error.to_string())),
            },
            Stage::Devices(room) => match self.look(moving, *layer, of.since) {
                Ok(false) => return None,
                Ok(true) if direction == Direction::Read => self
                    .copy(moving, *layer, room)
                    .map(|fence| Stage::Scatter(room, fence))
                    .map_err(|error| (room, error)),
                Ok(true) => {
                    free.push(room);
                    return Some(Ok(()));
                }
                Err(error) => Err((room, error)),
            },
            Stage::Scatter(room, fence) => match self.gpu.is_done(fence) {
                Ok(true) => {
                    free.push(room);
                    return Some(Ok(()));
                }
                Ok(false) => return self.is_late(of),
                Err(error) => return Some(Err(error.to_string())),
            },
        };
        match next {
            Ok(stage) => {
                (of.at, of.since) = (stage, Instant::now());
                None
            }
            Err((room, error)) => {
                free.push(room);
                Some(Err(error.to_string()))
            }
        }
    }

    /// Gives a layer up whose copies do not end; its room stays taken.
    fn is_late(&self, of: &LayerMove) -> Option<Result<(), String>> {
        let late = "copies between the server and the GPU did not end in time";
        (of.since.elapsed() > COPY_TIMEOUT).then(|| Err(late.to_owned()))
    }

    /// Returns true if the devices have moved a layer.
    fn look(&self, moving: &Moving, layer: Layer, since: Instant) -> Result<bool, StackError> {
        if since.elapsed() > POLL_MAX {
            // A wait has the plane find out what does not answer.
            return moving.request.wait(layer).map(|_| true);
        }
        Ok(moving.request.poll(layer)?.is_some())
    }

    fn start(&self, moving: &Moving, layer: Layer, room: usize) -> Result<Stage, StackError> {
        moving.request.start_at(layer, self.rooms[room])?;
        Ok(Stage::Devices(room))
    }

    /// Starts the copies of a layer between a room and the client's blocks.
    fn copy(&self, moving: &Moving, layer: Layer, room: usize) -> Result<CopyFence, StackError> {
        let OnGpu { direction, blocks, .. } = &moving.on_gpu;
        let object = self.shape.object_bytes as usize;
        let room_bytes = KvPool::staging_bytes(&self.shape, self.slots, 1) as usize;
        let row_bytes = room_bytes / self.shape.segments as usize;
        let mut ranges: Vec<(usize, usize, usize)> = Vec::new();
        for (segment, row) in self.shape.layer_rows(layer).map(objstore::Row).enumerate() {
            for (slot, block) in blocks.iter().enumerate() {
                let staged = room * room_bytes + segment * row_bytes + slot * object;
                let at = self.layout.offset(*block, row).expect("checked before") as usize;
                match ranges.last_mut() {
                    Some((from, to, len)) if *from + *len == staged && *to + *len == at => {
                        *len += object;
                    }
                    _ => ranges.push((staged, at, object)),
                }
            }
        }
        let direction = match direction {
            Direction::Write => CopyDirection::DeviceToHost,
            Direction::Read => CopyDirection::HostToDevice,
        };
        self.gpu.copy(direction, ranges.into_iter())
    }
}
