//! Events: 32-bit timeline semaphores that operations, streams and the host wait for and signal.

use std::sync::Arc;

use nvme_driver::DevicePtr;

use crate::{
    arena::{Arena, Block},
    sync::Ordering,
};

/// A 32-bit timeline semaphore in memory shared by host and device. Its value only grows: an
/// operation that waits for `value` starts once `current - value` is not negative as a signed
/// number, so the counter may wrap. `cuStreamWaitValue32` with `CU_STREAM_WAIT_VALUE_GEQ` uses the
/// same rule.
///
/// A GPU stream signals it with `cuStreamWriteValue32` at [`Event::address`], the host with
/// [`Event::set`]. Clones are the same semaphore.
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

    /// Returns its address as the kernel (and a GPU stream) sees it.
    #[must_use]
    pub fn address(&self) -> DevicePtr {
        DevicePtr(self.block.region().address(0))
    }

    /// Signals `value`.
    ///
    /// Ordering: Release; a warp that reads the value (acquire) sees all earlier writes of the
    /// caller.
    pub fn set(&self, value: u32) {
        self.block.region().store32(0, value, Ordering::Release);
    }

    /// Returns the current value.
    ///
    /// Ordering: Acquire; a caller that reads a value signalled by an operation sees the
    /// operation's results.
    #[must_use]
    pub fn read(&self) -> u32 {
        self.block.region().load32(0, Ordering::Acquire)
    }

    /// Returns true if an operation that waits for `value` may start.
    #[must_use]
    pub fn reached(&self, value: u32) -> bool {
        self.read().wrapping_sub(value).cast_signed() >= 0
    }
}

/// The start condition of an operation: `event` has reached `value`.
#[derive(Debug, Clone)]
pub struct Wait {
    /// The semaphore.
    pub event: Event,
    /// The value to reach.
    pub value: u32,
}

impl Wait {
    /// Returns true if the event has reached the value.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        self.event.reached(self.value)
    }
}

/// The signal sent when an operation completes, with or without errors: `event` becomes `value`.
/// The completion reports success; the event does not.
#[derive(Debug, Clone)]
pub struct Signal {
    /// The semaphore.
    pub event: Event,
    /// The value to set.
    pub value: u32,
}
