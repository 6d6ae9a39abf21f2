//! What a layer waits for, and what waits for it.

use gio_uring::{RawStream, Wait};

/// When a layer's transfer starts, and what waits for it. See the crate's documentation for how an
/// engine uses this.
#[derive(Debug, Clone, Copy)]
pub enum Order<'a> {
    /// It starts at once. Only a caller that waits for its ticket waits for it.
    Unordered,
    /// It starts once an event ([`crate::Plane::event`]) has a value. The event must be signalled
    /// sooner or later.
    AfterEvent(&'a Wait),
    /// It starts after what was enqueued on this stream before the call. What is enqueued later
    /// does not wait for it.
    AfterStream(RawStream),
    /// It starts after what was enqueued on this stream before the call, and what is enqueued
    /// later waits: until the layer's blocks hold the data, or, for a layer that is stored, until
    /// nothing reads them any more.
    InStream(RawStream),
}

impl From<RawStream> for Order<'_> {
    /// [`Order::InStream`].
    fn from(stream: RawStream) -> Self {
        Self::InStream(stream)
    }
}

impl<'a> From<&'a Wait> for Order<'a> {
    /// [`Order::AfterEvent`].
    fn from(wait: &'a Wait) -> Self {
        Self::AfterEvent(wait)
    }
}
