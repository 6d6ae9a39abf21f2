//! Events: 32-bit timeline semaphores that operations, streams and the host wait for and signal.

use std::sync::Arc;

use nvme_driver::DevicePtr;

use crate::{
    arena::{Arena, Block},
    sync::Ordering,
};

/// A 32-bit timeline semaphore in memory that host and device share. Its value only grows: an
/// operation that waits for `value` starts once `current - value` is not negative as a signed
/// number, so the counter may wrap. That is the rule of `cuStreamWaitValue32` with
/// `CU_STREAM_WAIT_VALUE_GEQ`.
///
/// A GPU stream signals it with `cuStreamWriteValue32` at [`Event::address`]; the host signals it
/// with [`Event::set`]. Clones are the same semaphore.
#[derive(Debug, Clone)]
pub struct Event {
    block: Arc<Block>,
}

impl Event {
    pub(crate) fn new(block: Block) -> Self {
        let event = Self { block: Arc::new(block) };
        event.set(0);
        event
    }

    pub(crate) fn is_of(&self, arena: &Arc<Arena>) -> bool {
        self.block.is_of(arena)
    }

    /// Its address as the kernel (and a GPU stream) sees it.
    #[must_use]
    pub fn address(&self) -> DevicePtr {
        DevicePtr(self.block.region().address(0))
    }

    /// Signals `value`.
    ///
    /// Ordering: Release; a warp that sees the value (acquire) sees everything the caller wrote
    /// before.
    pub fn set(&self, value: u32) {
        self.block.region().store32(0, value, Ordering::Release);
    }

    /// The current value.
    ///
    /// Ordering: Acquire; a caller that sees a value that an operation signalled sees the
    /// operation's results.
    #[must_use]
    pub fn read(&self) -> u32 {
        self.block.region().load32(0, Ordering::Acquire)
    }

    /// Whether an operation that waits for `value` may start.
    #[must_use]
    pub fn reached(&self, value: u32) -> bool {
        self.read().wrapping_sub(value).cast_signed() >= 0
    }
}

/// What an operation waits for before it starts: `event` reaching `value`.
#[derive(Debug, Clone)]
pub struct Wait {
    /// The semaphore.
    pub event: Event,
    /// What it must reach.
    pub value: u32,
}

impl Wait {
    /// Whether the event has the value.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        self.event.reached(self.value)
    }
}

/// What an operation does when it completed, with or without errors: `event` becomes `value`. The
/// completion says whether it succeeded; the event does not.
#[derive(Debug, Clone)]
pub struct Signal {
    /// The semaphore.
    pub event: Event,
    /// What it becomes.
    pub value: u32,
}
