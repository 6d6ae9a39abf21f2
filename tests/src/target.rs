//! What a conformance run is about: a controller, and what is true of it.

use std::{fmt, sync::Arc};

use nvme_driver::{Bus, Clock, Iova};

use crate::conformance::Difference;

/// Which SGLs a controller takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sgls {
    /// None.
    None,
    /// Any address and length.
    Bytes,
    /// Multiples of four bytes.
    Dwords,
}

/// A namespace and what is true of it.
#[derive(Debug, Clone, Copy)]
pub struct Namespace {
    /// Its identifier.
    pub nsid: u32,
    /// Bytes of a logical block.
    pub lba_bytes: u32,
    /// Blocks.
    pub lbas: u64,
}

/// A controller to be tested, what is true of it, and where it is known to differ.
pub struct Target {
    /// What people call it.
    pub name: &'static str,
    /// Where it is.
    pub bus: Arc<dyn Bus>,
    /// The time it lives in.
    pub clock: Arc<dyn Clock>,
    /// Its namespaces; the first two have different block sizes.
    pub namespaces: Vec<Namespace>,
    /// Bytes that one command may move.
    pub mdts_bytes: u32,
    /// Entries of the longest queue.
    pub entries_max: u32,
    /// The highest queue identifier.
    pub qid_max: u16,
    /// Interrupt vectors of the function.
    pub vectors: u16,
    /// Asynchronous event requests that may wait (AERL, counted from 1).
    pub event_requests: u32,
    /// Which SGLs it takes.
    pub sgls: Sgls,
    /// An address that is not memory.
    pub unmapped: Iova,
    /// Cases in which it is known to do something else than expected.
    pub differences: Vec<Difference>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({})", self.name)
    }
}
