//! The outcome of an operation.

use crate::status::IoStatus;

/// The outcome of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Completion {
    /// Objects (rows of affine contexts, or explicit contexts) transferred without error.
    pub objects: u64,
    /// Commands and contexts that failed.
    pub errors: u32,
    /// One of the failures and the index of its context in the caller's order.
    pub error: Option<(IoStatus, u32)>,
}

impl Completion {
    /// Returns true if nothing failed.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.errors == 0 && self.error.is_none()
    }
}
