//! Words that operations wait for and signal.

use std::sync::Arc;

use crate::{
    arena::{Arena, Block},
    sync::Ordering,
};

/// A 32-bit word that both sides reach. It counts: an operation that waits for `value` starts once
/// `word - value` is not negative as a signed number, so a counter may wrap.
///
/// On a GPU the engine's own stream writes it (`cuStreamWriteValue32` at [`Event::address`]); a
/// host sets it with [`Event::set`]. Clones are the same word.
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

    /// The word's address as the kernel (and a GPU stream) sees it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.block.region().address(0)
    }

    /// Sets the word.
    ///
    /// Ordering: Release; a warp that sees the value (acquire) sees everything the caller wrote
    /// before.
    pub fn set(&self, value: u32) {
        self.block.region().store32(0, value, Ordering::Release);
    }

    /// The word.
    ///
    /// Ordering: Acquire; who sees a value that an operation signalled sees the operation's
    /// results.
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
    /// The word.
    pub event: Event,
    /// What it must reach.
    pub value: u32,
}

/// What an operation does when it completed, with or without errors: `event` becomes `value`. Who
/// waits for it still has to look at the completion.
#[derive(Debug, Clone)]
pub struct Signal {
    /// The word.
    pub event: Event,
    /// What it becomes.
    pub value: u32,
}
