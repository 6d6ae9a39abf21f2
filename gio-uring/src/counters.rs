//! Counters kept by the kernel: the only trace of the data plane.

use std::{
    fmt,
    ops::{Add, AddAssign, Sub},
};

use nvme_spec::ids::{Cid, QueueId};

use crate::abi;

/// Counters of one queue, or the sum over all queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Commands submitted.
    pub commands: u64,
    /// Objects transferred (an explicit context counts as one).
    pub objects: u64,
    /// Bytes read from devices.
    pub bytes_read: u64,
    /// Bytes written to devices.
    pub bytes_written: u64,
    /// Submission doorbells rung.
    pub sq_doorbells: u64,
    /// Completion doorbells rung.
    pub cq_doorbells: u64,
    /// Commands and contexts that failed.
    pub errors: u64,
    /// Completions that arrived after their timeout.
    pub late: u64,
}

impl Add for Counters {
    type Output = Self;
    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.commands += other.commands;
        self.objects += other.objects;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
        self.sq_doorbells += other.sq_doorbells;
        self.cq_doorbells += other.cq_doorbells;
        self.errors += other.errors;
        self.late += other.late;
    }
}

impl Sub for Counters {
    type Output = Self;
    /// Returns what was counted since an earlier snapshot.
    fn sub(self, then: Self) -> Self {
        Self {
            commands: self.commands - then.commands,
            objects: self.objects - then.objects,
            bytes_read: self.bytes_read - then.bytes_read,
            bytes_written: self.bytes_written - then.bytes_written,
            sq_doorbells: self.sq_doorbells - then.sq_doorbells,
            cq_doorbells: self.cq_doorbells - then.cq_doorbells,
            errors: self.errors - then.errors,
            late: self.late - then.late,
        }
    }
}

/// Counters of one queue's warp since the last start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueCounters {
    /// Index of the device.
    pub device: u32,
    /// The queue's identifier.
    pub qid: u16,
    /// Commands currently outstanding.
    pub outstanding: u32,
    /// Timed-out commands, which keep their slot until the queue is reclaimed.
    pub quarantined: u32,
    /// Reason why the queue stopped, if it did.
    pub fault: Option<Fault>,
    /// The counters.
    pub counters: Counters,
}

/// A snapshot of all counters.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UringCounters {
    /// Sum over all queues, including previous starts.
    pub total: Counters,
    /// Per queue, since the last start.
    pub queues: Vec<QueueCounters>,
    /// Operations published to the kernel.
    pub issued: u64,
    /// Operations whose completion was consumed.
    pub completed: u64,
    /// Bytes of executor memory allocated for maps, pools and events.
    pub arena_bytes: u64,
    /// Bytes of `arena_bytes` in use.
    pub arena_bytes_used: u64,
    /// Number of chunks allocated: at first two.
    pub arena_growths: u64,
}

/// A command in flight on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Outstanding {
    /// Index of the device.
    pub device: u32,
    /// The queue.
    pub qid: QueueId,
    /// The command identifier.
    pub cid: Cid,
    /// Submission time on the kernel's own clock. Distinguishes the command from a later one that
    /// reuses its identifier.
    pub since_ns: u64,
}

/// Reason why a queue stopped submitting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Fault {
    /// A completion for a command identifier that is not outstanding.
    UnknownCid,
    /// A completion whose submission queue head is outside the queue.
    SqHead,
    /// A completion that names another queue.
    SqId,
    /// A command exceeded the timeout.
    Timeout,
    /// An operation waited for its event for too long.
    Event,
    /// A code that no kernel of this version writes.
    Unknown(u32),
}

impl Fault {
    /// Decodes [`abi::Warp::fault`].
    #[must_use]
    pub fn decode(word: u32) -> Option<Self> {
        match word {
            abi::FAULT_NONE => None,
            abi::FAULT_CID => Some(Self::UnknownCid),
            abi::FAULT_SQHD => Some(Self::SqHead),
            abi::FAULT_SQID => Some(Self::SqId),
            abi::FAULT_TIMEOUT => Some(Self::Timeout),
            abi::FAULT_EVENT => Some(Self::Event),
            other => Some(Self::Unknown(other)),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownCid => f.write_str("a completion for a command that is not outstanding"),
            Self::SqHead => f.write_str("a completion with an impossible submission queue head"),
            Self::SqId => f.write_str("a completion that names another submission queue"),
            Self::Timeout => f.write_str("a command that did not complete in time"),
            Self::Event => f.write_str("an operation whose event did not come in time"),
            Self::Unknown(word) => write!(f, "fault {word:#x}, unknown to this version"),
        }
    }
}

/// A stopped queue and the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultInfo {
    /// Index of the device.
    pub device: u32,
    /// The queue's identifier.
    pub qid: u16,
    /// The cause.
    pub fault: Fault,
    /// Commands that may still be in flight on the device.
    pub quarantined: u32,
}

impl fmt::Display for FaultInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, qid, fault, quarantined } = self;
        write!(f, "device {device} queue {qid}: {fault}; {quarantined} commands quarantined")
    }
}
