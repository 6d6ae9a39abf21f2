//! A queue pair: submission, doorbells, completion. No allocation, no lock, no clock.
//!
//! The operations are separate so that many commands share one doorbell: [`QueuePair::post`] writes
//! an entry, [`QueuePair::update_tail`] rings the doorbell, [`QueuePair::reap`] takes completions
//! and rings once for all of them.

use std::sync::Arc;

use crate::{
    bus::Bus,
    cid::{CidFault, CidTable, DEPTH_MAX, Finished},
    dma::DmaSlice,
    platform::ring::{CqRing, Doorbell, SqRing},
};
use nvme_spec::{
    ids::{Cid, QueueId},
    sqe::Sqe,
    status::Status,
};

/// An invalid completion. The controller that wrote it is no longer trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The CID is not that of an outstanding command.
    #[error("queue {qid}: completion of CID {:#06x}, which is not outstanding", cid.0)]
    UnknownCid {
        /// The completion queue.
        qid: QueueId,
        /// CID in the completion.
        cid: Cid,
    },
    /// The CID is that of an earlier command in a slot that is in use again.
    #[error(
        "queue {qid}: second or late completion of CID {:#06x}; its slot is in use again", cid.0
    )]
    StaleCid {
        /// The completion queue.
        qid: QueueId,
        /// CID in the completion.
        cid: Cid,
    },
    /// The completion names a submission queue that does not complete here.
    #[error("queue {qid}: completion of CID {:#06x} names submission queue {sqid}", cid.0)]
    WrongSqid {
        /// The completion queue.
        qid: QueueId,
        /// Submission queue in the completion.
        sqid: u16,
        /// CID in the completion.
        cid: Cid,
    },
    /// More commands are outstanding than the driver itself sent.
    #[error("queue {qid}: it is full, though the driver has fewer commands outstanding")]
    Overfull {
        /// The queue.
        qid: QueueId,
    },
    /// The submission queue head lies outside the queue.
    #[error("queue {qid}: completion says submission head {sqhd}, the queue has {depth} entries")]
    SqHeadOutOfRange {
        /// The completion queue.
        qid: QueueId,
        /// Head in the completion.
        sqhd: u16,
        /// Depth of the queue.
        depth: u32,
    },
}

/// Error when `depth - 1` commands are outstanding: reap first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the queue is full; reap completions before posting more")]
pub struct QueueFull;

/// Error when a queue pair cannot be created.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("queue {qid}: {why}")]
pub struct QueueError {
    /// The queue.
    pub qid: QueueId,
    /// The reason: its memory, depth or doorbells.
    pub why: String,
}

/// A completed command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The user word given to [`QueuePair::post`].
    pub user: u64,
    /// Command-specific result (dword 0).
    pub result: u32,
    /// Completion status.
    pub status: Status,
    /// The command's identifier.
    pub cid: Cid,
    /// Set if the command was abandoned ([`QueuePair::abandon`]).
    pub late: bool,
}

/// A submission queue and its completion queue, owned by one thread.
#[derive(Debug)]
pub struct QueuePair {
    tail: u32,
    /// Free running: its bit `log2(depth)` determines the expected phase.
    head: u32,
    mask: u32,
    qid: u16,
    sq: SqRing,
    cq: CqRing,
    cids: CidTable,
    sq_doorbell: Doorbell,
    cq_doorbell: Doorbell,
    // Not on the I/O path.
    rung: u32,
}

impl QueuePair {
    /// Creates a pair of `depth` entries each. `sq` (64 bytes per entry) and `cq` (16 bytes) must
    /// be zeroed, and known to the controller before the first doorbell.
    ///
    /// # Errors
    /// Returns [`QueueError`] if depth, memory or doorbells are unsuitable.
    pub fn new(
        bus: &Arc<dyn Bus>,
        qid: QueueId,
        depth: u32,
        sq: DmaSlice,
        cq: DmaSlice,
    ) -> Result<Self, QueueError> {
        if depth > DEPTH_MAX {
            let why = format!("{depth} entries were asked for; at most {DEPTH_MAX} are supported");
            return Err(QueueError { qid, why });
        }
        let memory = |why| QueueError { qid, why };
        let doorbell = |is_cq: u32| {
            let len = bus.doorbells().len();
            let why = || format!("its doorbells lie outside the {len} bytes that the bus maps");
            Doorbell::new(bus, u32::from(qid.0) * 2 + is_cq).ok_or_else(|| memory(why()))
        };
        Ok(Self {
            tail: 0,
            head: 0,
            mask: depth.wrapping_sub(1),
            qid: qid.0,
            sq: SqRing::new(sq, depth).map_err(memory)?,
            cq: CqRing::new(cq, depth).map_err(memory)?,
            cids: CidTable::new(depth),
            sq_doorbell: doorbell(0)?,
            cq_doorbell: doorbell(1)?,
            rung: 0,
        })
    }

    /// Writes a command into the next entry and replaces its CID. The controller does not see it
    /// before [`QueuePair::update_tail`]. `user` is returned with the completion.
    ///
    /// # Errors
    /// Returns [`QueueFull`] if `depth - 1` commands are outstanding.
    #[inline]
    pub fn post(&mut self, sqe: &Sqe, user: u64) -> Result<Cid, QueueFull> {
        let cid = self.cids.take(user).ok_or(QueueFull)?;
        self.sq.write(self.tail, sqe, cid);
        self.tail = self.tail.wrapping_add(1) & self.mask;
        Ok(cid)
    }

    /// Rings the submission doorbell for everything posted since the last call. Does nothing if
    /// there is nothing new.
    #[inline]
    pub fn update_tail(&mut self) {
        if self.rung != self.tail {
            self.rung = self.tail;
            self.sq_doorbell.ring(self.tail);
        }
    }

    /// Takes at most `max` completions, passes each to `each`, rings the completion doorbell once,
    /// and returns their number.
    ///
    /// # Errors
    /// Returns [`DeviceError`] for an invalid completion. Earlier ones were passed to `each`; the
    /// queue must not be used any more.
    #[inline]
    pub fn reap(&mut self, max: u32, mut each: impl FnMut(Completion)) -> Result<u32, DeviceError> {
        let mut count = 0;
        while count < max {
            match self.next_completion()? {
                Some(completion) => each(completion),
                None => break,
            }
            count += 1;
        }
        if count != 0 {
            self.cq_doorbell.ring(self.head & self.mask);
        }
        Ok(count)
    }

    #[inline]
    fn next_completion(&mut self) -> Result<Option<Completion>, DeviceError> {
        let dw3 = self.cq.load_dw3(self.head);
        // The first pass over the zeroed queue has phase 1, the next one 0, and so on.
        let expected = self.head & (self.mask + 1) == 0;
        if (dw3 & 1 << 16 != 0) != expected {
            return Ok(None);
        }
        let dw2 = self.cq.load(self.head, 2);
        let (sqhd, sqid, cid) = (dw2 & 0xFFFF, dw2 >> 16, Cid(dw3 as u16));
        if sqid != u32::from(self.qid) || sqhd > self.mask {
            return Err(self.wrong_entry(dw2, cid));
        }
        let (user, late) = match self.cids.finish(cid) {
            Ok(Finished::Live(user)) => (user, false),
            Ok(Finished::Late(user)) => (user, true),
            Err(fault) => return Err(self.wrong_cid(cid, fault)),
        };
        let result = self.cq.load(self.head, 0);
        self.head = self.head.wrapping_add(1);
        Ok(Some(Completion { user, result, status: Status((dw3 >> 17) as u16), cid, late }))
    }

    #[cold]
    fn wrong_entry(&self, dw2: u32, cid: Cid) -> DeviceError {
        let (qid, sqid) = (QueueId(self.qid), (dw2 >> 16) as u16);
        if sqid != self.qid {
            return DeviceError::WrongSqid { qid, sqid, cid };
        }
        DeviceError::SqHeadOutOfRange { qid, sqhd: dw2 as u16, depth: self.depth() }
    }

    #[cold]
    fn wrong_cid(&self, cid: Cid, fault: CidFault) -> DeviceError {
        let qid = QueueId(self.qid);
        match fault {
            CidFault::Unknown => DeviceError::UnknownCid { qid, cid },
            CidFault::Stale => DeviceError::StaleCid { qid, cid },
        }
    }

    /// Abandons `cid`. Its slot stays taken until the controller completes it, and
    /// [`QueuePair::reap`] then reports it as `late`. Returns whether it was outstanding.
    pub fn abandon(&mut self, cid: Cid) -> bool {
        self.cids.abandon(cid)
    }

    /// Returns the pair's identifier.
    #[must_use]
    pub fn qid(&self) -> QueueId {
        QueueId(self.qid)
    }

    /// Returns the depth of each queue.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.mask + 1
    }

    /// Returns the number of commands posted and not completed.
    #[must_use]
    #[inline]
    pub fn outstanding(&self) -> u32 {
        self.cids.outstanding()
    }
}
