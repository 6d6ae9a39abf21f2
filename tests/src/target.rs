//! Target of a conformance run: a controller and its properties.

use std::{fmt, sync::Arc};

use nvme_driver::{Bus, Clock, Iova};

use crate::conformance::Difference;

/// SGLs that a controller accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sgls {
    /// None.
    None,
    /// Any address and length.
    Bytes,
    /// Multiples of four bytes.
    Dwords,
}

/// A namespace and its properties.
#[derive(Debug, Clone, Copy)]
pub struct Namespace {
    /// Its identifier.
    pub nsid: u32,
    /// Bytes of a logical block.
    pub lba_bytes: u32,
    /// Number of logical blocks.
    pub lbas: u64,
}

/// A controller under test, its properties, and its known differences.
pub struct Target {
    /// Its name, for messages.
    pub name: &'static str,
    /// The bus with the controller.
    pub bus: Arc<dyn Bus>,
    /// Clock of the controller.
    pub clock: Arc<dyn Clock>,
    /// Its namespaces; the first two have different block sizes.
    pub namespaces: Vec<Namespace>,
    /// Maximum bytes of one command's transfer.
    pub mdts_bytes: u32,
    /// Entries of the longest queue.
    pub entries_max: u32,
    /// The highest queue identifier.
    pub qid_max: u16,
    /// Interrupt vectors of the function.
    pub vectors: u16,
    /// Asynchronous event requests that may be outstanding (AERL, counted from 1).
    pub event_requests: u32,
    /// SGLs that it accepts.
    pub sgls: Sgls,
    /// An address without memory.
    pub unmapped: Iova,
    /// Cases in which it is known to differ from the expected result.
    pub differences: Vec<Difference>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({})", self.name)
    }
}
