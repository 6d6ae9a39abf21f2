//! The caller's name of a submitted operation.

/// A submitted operation: its IOCB, and how often that IOCB was submitted. It is valid until its
/// completion was taken; a stale one is detected by its generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct IocbId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl IocbId {
    /// Index of the IOCB in the ring.
    #[must_use]
    pub fn index(self) -> u32 {
        self.index
    }
}
