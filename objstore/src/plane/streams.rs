#![allow(unsafe_code, reason = "streams get addresses of events and blocks")]
//! Events between the engine's streams, the store and the I/O kernel.
//!
//! Each stream has one event, signalled only by that stream, with a value that grows by one each
//! time. Such a *mark* means that the stream is past everything enqueued before it: operations of
//! the ring wait for it, other streams do, and the host polls it. Each operation in flight has an
//! event that the I/O kernel signals at its end. The next operation with this event starts later,
//! so its value grows, too. A late value, of an operation that was cancelled meanwhile, is never
//! mistaken for that of a later one, and no event has to be renewed after a recovery.
//!
//! The time when a stream reads an event that it waits for is not known. So every wait is followed
//! by a mark, and the events are kept until all marks have been reached, or for good.

use std::sync::Arc;

use gio_uring::{RawStream, ScatterGather, StreamError, StreamOps, Uring, Wait};

use crate::{config::StoreGpu, error::StoreError};

/// Number of remembered streams above which idle ones are forgotten.
const STREAMS_MAX: usize = 64;

/// The events, and the GPU.
#[derive(Debug)]
pub(super) struct Streams {
    gpu: StoreGpu,
    /// Events that no operation in flight signals, and the last value of each.
    ends: Vec<Wait>,
    seen: Vec<Seen>,
}

/// A stream with enqueued work of the store.
#[derive(Debug)]
struct Seen {
    stream: RawStream,
    /// Its event, and the value of its last mark.
    mark: Wait,
    /// Set if work is enqueued that no mark follows.
    open: bool,
}

impl Seen {
    fn is_past(&self) -> bool {
        !self.open && self.mark.is_reached()
    }
}

/// Error of a stream that refused an operation.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) error: StoreError,
    /// True when the objects will be copied nevertheless, at an unknown time.
    pub(super) moving: bool,
}

fn refused(error: StreamError) -> StoreError {
    StoreError::Stream { cause: error.cause }
}

impl Streams {
    /// Creates an event for each IOCB of `ring`.
    pub(super) fn new(gpu: StoreGpu, ring: &mut Uring) -> Result<Self, StoreError> {
        let mut ends = Vec::with_capacity(ring.depth() as usize);
        for _ in 0..ring.depth() {
            ends.push(Wait { event: ring.event()?, value: 0 });
        }
        Ok(Self { gpu, ends, seen: Vec::with_capacity(STREAMS_MAX) })
    }

    /// Returns the GPU.
    pub(super) fn gpu(&self) -> &StoreGpu {
        &self.gpu
    }

    /// Returns the store's own stream.
    pub(super) fn own(&self) -> RawStream {
        self.gpu.streams.own_stream()
    }

    /// Returns the event that the next operation signals. There is one for each IOCB.
    pub(super) fn take_end(&mut self) -> Wait {
        let mut end = self.ends.pop().expect("fewer operations than IOCBs are in flight");
        end.value = end.value.wrapping_add(1);
        end
    }

    /// Returns the event of an operation that is over, for use by another one.
    pub(super) fn return_end(&mut self, end: Wait) {
        self.ends.push(end);
    }

    fn seen(&mut self, ring: &mut Uring, stream: RawStream) -> Result<&mut Seen, StoreError> {
        if let Some(at) = self.seen.iter().position(|seen| seen.stream == stream) {
            return Ok(&mut self.seen[at]);
        }
        if self.seen.len() >= STREAMS_MAX {
            self.seen.retain(|seen| !seen.is_past());
        }
        let mark = Wait { event: ring.event()?, value: 0 };
        self.seen.push(Seen { stream, mark, open: false });
        Ok(self.seen.last_mut().expect("pushed above"))
    }

    /// Marks the current position of `stream`, reached once everything enqueued so far is done.
    pub(super) fn mark(&mut self, ring: &mut Uring, stream: RawStream) -> Result<Wait, StoreError> {
        let streams = self.gpu.streams.clone();
        let seen = self.seen(ring, stream)?;
        let value = seen.mark.value.wrapping_add(1);
        // SAFETY: the event is kept until it has the value, or for good (`Streams::is_past`).
        unsafe { streams.write_word(stream, seen.mark.event.address(), value) }.map_err(refused)?;
        seen.mark.value = value;
        seen.open = false;
        Ok(seen.mark.clone())
    }

    /// Makes `stream` wait.
    fn wait(&mut self, ring: &mut Uring, stream: RawStream, wait: &Wait) -> Result<(), StoreError> {
        let streams = self.gpu.streams.clone();
        let seen = self.seen(ring, stream)?;
        // SAFETY: `ends` and marks are kept until every stream is past; an engine's
        // own event is kept by the buffer that its operation uses, until the mark behind it.
        unsafe { streams.wait_word(stream, wait.event.address(), wait.value) }.map_err(refused)?;
        seen.open = true;
        Ok(())
    }

    /// Makes work enqueued on `stream` from now on wait.
    pub(super) fn follow(
        &mut self,
        ring: &mut Uring,
        stream: RawStream,
        wait: &Wait,
    ) -> Result<(), StoreError> {
        self.wait(ring, stream, wait)?;
        self.mark(ring, stream).map(|_| ())
    }

    /// Copies objects on `stream` once all of `waits` are reached; returns the mark behind it.
    ///
    /// The memory that `moves` names must be kept until that mark, and for good if there is none.
    pub(super) fn copy_objects(
        &mut self,
        ring: &mut Uring,
        stream: RawStream,
        waits: [Option<&Wait>; 2],
        moves: &ScatterGather,
    ) -> Result<Wait, Refused> {
        let before = |error| Refused { error, moving: false };
        for wait in waits.into_iter().flatten() {
            self.wait(ring, stream, wait).map_err(before)?;
        }
        let streams: Arc<dyn StreamOps> = self.gpu.streams.clone();
        let seen = self.seen(ring, stream).map_err(before)?;
        // SAFETY: the staging buffer, both tables and the pool are kept until the mark, or for good
        // (`Staging::hold`, `Plane::fail`); nothing else uses the buffer before that, and the
        // engine's blocks are in the order that it asked for.
        let moved = unsafe { streams.scatter_gather(stream, moves) };
        moved.map_err(|error| before(refused(error)))?;
        seen.open = true;
        self.mark(ring, stream).map_err(|error| Refused { error, moving: true })
    }

    /// Returns true if no stream will use any event or object any more.
    pub(super) fn is_past(&self) -> bool {
        self.seen.iter().all(Seen::is_past)
    }
}
