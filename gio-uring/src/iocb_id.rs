//! Identifier of a submitted operation.

/// A submitted operation: its IOCB's index and generation. Valid until its completion is consumed;
/// the generation detects a stale identifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct IocbId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl IocbId {
    /// Returns the index of the IOCB in the ring.
    #[must_use]
    pub fn index(self) -> u32 {
        self.index
    }
}
