//! Ordering of a layer's transfer with streams and events.

use gio_uring::{RawStream, Wait};

/// Order of a layer's transfer relative to streams and events. See the crate's documentation for
/// its use in an engine.
#[derive(Debug, Clone, Copy)]
pub enum Order<'a> {
    /// It starts immediately. Only the caller that waits for its ticket waits for it.
    Unordered,
    /// It starts once an event ([`crate::Plane::event`]) reaches a value. The event must be
    /// signalled eventually.
    AfterEvent(&'a Wait),
    /// It starts after the work enqueued on this stream before the call. Work enqueued later does
    /// not wait for it.
    AfterStream(RawStream),
    /// It starts after the work enqueued on this stream before the call. Work enqueued later waits
    /// until the layer's blocks hold the data, or, for a layer that is stored, until nothing reads
    /// them any more.
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
