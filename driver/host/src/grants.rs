//! I/O queue pairs: creation, grants to executors, reclaim.
//!
//! A queue's memory is freed only when neither the device can use it (its queues are deleted or the
//! controller is disabled) nor an executor (the caller presented a [`Quiesced`]).

use nvme_spec::{
    admin::{AdminOpcode, CreateIoCq, CreateIoSq, DeleteQueue},
    ids::{Cid, Nsid, QueueId},
    sqe::Sqe,
};

use crate::{
    Nanos,
    admin::{AdminFault, alloc_aligned, unreachable_by_host},
    bus::DoorbellPage,
    cid::DEPTH_MAX,
    controller::{Controller, State},
    descriptor::transfer_bytes_max,
    dma::{DevicePtr, DmaSlice, Iova, Place},
    error::{Error, FailCause},
    grant::{GrantEpoch, PLACEMENTS_MAX, QueueGrant, Quiesced},
    platform::buffer::Buffer,
};

/// The queue of the driver's own blocking calls.
pub(crate) const HOST_QUEUE: QueueId = QueueId(1);

/// Memory of one queue pair. All three slices are page aligned for the controller.
#[derive(Debug, Clone)]
pub struct QueueMemory {
    /// Submission queue of 64-byte entries; its length sets the depth.
    pub sq: DmaSlice,
    /// Completion queue: at least 16 bytes per entry.
    pub cq: DmaSlice,
    /// Descriptor areas: at least 64 bytes per entry.
    pub descriptors: DmaSlice,
}

/// A queue pair that can be granted.
#[derive(Debug)]
pub(crate) struct IoQueue {
    pub(crate) memory: QueueMemory,
    pub(crate) depth: u32,
    pub(crate) descriptor_bytes: u32,
    /// The grant held by its executor.
    pub(crate) granted: Option<QueueGrant>,
    /// State on the device.
    pub(crate) device: OnDevice,
}

/// State of a queue on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnDevice {
    /// The queue is usable.
    Live,
    /// Its deletion failed: it is unusable, and the device may still access its memory.
    Stuck,
    /// Deleted, or ended by a reset: the device does not access its memory.
    Absent,
}

/// Parameters of a queue to create on the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueShape {
    pub(crate) qid: QueueId,
    pub(crate) depth: u32,
    pub(crate) sq: Iova,
    pub(crate) cq: Iova,
    pub(crate) vector: Option<u16>,
}

impl Controller {
    /// Creates a queue pair of `depth` entries in memory of the bus. A depth of 0 means
    /// [`crate::ControllerOptions::io_depth`], cut to the controller's limit.
    ///
    /// # Errors
    /// Returns [`Error::QueueState`] if the depth is not a power of two that the controller allows
    /// or no queues are left, [`Error::Dma`], and the errors of any admin command.
    pub fn create_queue_pair(&mut self, depth: u32) -> Result<QueueId, Error> {
        self.usable()?;
        let max = 1 << self.info.entries_max.ilog2();
        let depth = if depth == 0 { self.options.io_depth.min(max) } else { depth };
        let qid = self.free_queue_id()?;
        self.check_depth(qid, depth)?;
        let page = self.caps.page_bytes as usize;
        let bytes = depth as usize * self.options.descriptor_bytes as usize;
        let part = |len: usize| {
            alloc_aligned(&*self.bus, len, page)
                .map_err(|source| Error::Dma { ctrl: self.id.clone(), source })
        };
        let memory = QueueMemory {
            sq: part(depth as usize * 64)?,
            cq: part(depth as usize * 16)?,
            descriptors: part(bytes)?,
        };
        self.create_queue_pair_in(memory)
    }

    /// Creates a queue pair in memory of the caller's choice, for instance on a GPU. The length of
    /// `memory.sq` sets the depth.
    ///
    /// # Errors
    /// Same as [`Controller::create_queue_pair`], and [`Error::QueueState`] for memory that is too
    /// small or misaligned.
    pub fn create_queue_pair_in(&mut self, memory: QueueMemory) -> Result<QueueId, Error> {
        self.usable()?;
        let qid = self.free_queue_id()?;
        let depth = u32::try_from(memory.sq.len() / 64).unwrap_or(u32::MAX);
        self.check_depth(qid, depth)?;
        let descriptor_bytes = self.check_memory(qid, depth, &memory)?;
        // Kept from here on: the device may know the memory even if creating the queue fails.
        let kept = self.quarantine.len();
        let QueueMemory { sq, cq, descriptors } = memory.clone();
        self.quarantine.extend([sq, cq, descriptors]);
        let created = self.make_io_queue(qid, depth, &memory);
        if !matches!(self.state, State::Failed(_)) {
            // It was created or refused, or a reset ended all DMA (and emptied the quarantine).
            self.quarantine.truncate(kept);
        }
        created?;
        let queue =
            IoQueue { memory, depth, descriptor_bytes, granted: None, device: OnDevice::Live };
        self.queues.insert(qid, queue);
        Ok(qid)
    }

    fn free_queue_id(&self) -> Result<QueueId, Error> {
        let last = HOST_QUEUE.0 + self.info.io_queues;
        let free = (HOST_QUEUE.0 + 1..=last).map(QueueId).find(|q| !self.queues.contains_key(q));
        free.ok_or_else(|| Error::QueueState {
            ctrl: self.id.clone(),
            qid: QueueId(last),
            what: format!(
                "all {} queue pairs the controller gave are in use; reclaim one, or ask for more \
                 with ControllerOptions::io_queues",
                self.info.io_queues
            ),
        })
    }

    fn check_depth(&self, qid: QueueId, depth: u32) -> Result<(), Error> {
        let max = self.info.entries_max.min(DEPTH_MAX);
        if depth.is_power_of_two() && (2..=max).contains(&depth) {
            return Ok(());
        }
        let what = format!("{depth} entries; a power of two from 2 to {max} is possible");
        Err(Error::QueueState { ctrl: self.id.clone(), qid, what })
    }

    /// Checks a queue's memory and returns the bytes of one descriptor area.
    fn check_memory(&self, qid: QueueId, depth: u32, memory: &QueueMemory) -> Result<u32, Error> {
        let wrong = |what: String| Error::QueueState { ctrl: self.id.clone(), qid, what };
        let page = u64::from(self.caps.page_bytes);
        let named = [("sq", &memory.sq), ("cq", &memory.cq), ("descriptors", &memory.descriptors)];
        for (name, slice) in named {
            if slice.iova().0 % page != 0 {
                let iova = slice.iova();
                return Err(wrong(format!("{name} memory at {iova} is not page aligned ({page})")));
            }
        }
        if memory.cq.len() < depth as usize * 16 {
            let len = memory.cq.len();
            return Err(wrong(format!("{len} bytes cannot hold {depth} completions of 16 bytes")));
        }
        let each = (memory.descriptors.len() / depth as usize).min(page as usize) as u32;
        if each < 64 {
            return Err(wrong(format!("{each} descriptor bytes for each entry; 64 is the least")));
        }
        Ok(1 << each.ilog2())
    }

    /// Zeroes a queue's memory and creates the queue on the device.
    fn make_io_queue(
        &mut self,
        qid: QueueId,
        depth: u32,
        memory: &QueueMemory,
    ) -> Result<(), Error> {
        for slice in [&memory.sq, &memory.cq] {
            let mut buffer = Buffer::new(slice.clone()).ok_or_else(|| Error::Dma {
                ctrl: self.id.clone(),
                source: unreachable_by_host(&*self.bus),
            })?;
            buffer.zero();
        }
        let (sq, cq) = (memory.sq.iova(), memory.cq.iova());
        self.make_on_device(QueueShape { qid, depth, sq, cq, vector: None })
    }

    /// Sends Create I/O CQ, then Create I/O SQ. If the second fails, the CQ is deleted again.
    pub(crate) fn make_on_device(&mut self, shape: QueueShape) -> Result<(), Error> {
        let QueueShape { qid, depth, sq, cq, vector } = shape;
        let qsize_z = (depth - 1) as u16;
        let mut sqe = Sqe::new(AdminOpcode::CREATE_IO_CQ.0, Cid(0), Nsid(0)).with_prps(cq.0, 0);
        let (interrupts, vector) = (vector.is_some(), vector.unwrap_or(0));
        CreateIoCq { qid, qsize_z, contiguous: true, interrupts, vector }.write_to(&mut sqe);
        self.admin_command("create I/O completion queue", sqe, self.options.admin_timeout)?;
        let mut sqe = Sqe::new(AdminOpcode::CREATE_IO_SQ.0, Cid(0), Nsid(0)).with_prps(sq.0, 0);
        CreateIoSq { qid, qsize_z, contiguous: true, priority: 0, cqid: qid }.write_to(&mut sqe);
        let made =
            self.admin_command("create I/O submission queue", sqe, self.options.admin_timeout);
        if let Err(error) = made {
            if matches!(error, Error::Command { .. })
                && self
                    .delete_one(AdminOpcode::DELETE_IO_CQ, qid, self.options.admin_timeout)
                    .is_err()
            {
                self.fail(FailCause::QueueStuck { qid });
            }
            return Err(error);
        }
        Ok(())
    }

    /// Sends Delete I/O SQ, then Delete I/O CQ. The device then holds no command of the queue.
    pub(crate) fn delete_on_device(&mut self, qid: QueueId) -> Result<(), ()> {
        self.delete_within(qid, self.options.admin_timeout)
    }

    /// Same as [`Controller::delete_on_device`] with a timeout.
    pub(crate) fn delete_within(&mut self, qid: QueueId, timeout: Nanos) -> Result<(), ()> {
        self.delete_one(AdminOpcode::DELETE_IO_SQ, qid, timeout)?;
        self.delete_one(AdminOpcode::DELETE_IO_CQ, qid, timeout)
    }

    fn delete_one(&mut self, opcode: AdminOpcode, qid: QueueId, timeout: Nanos) -> Result<(), ()> {
        let mut sqe = Sqe::new(opcode.0, Cid(0), Nsid(0));
        DeleteQueue { qid }.write_to(&mut sqe);
        let result = self.admin_raw(&sqe, timeout);
        match result {
            Ok(completion) if completion.status.is_success() => Ok(()),
            Ok(completion) => {
                let status = completion.status;
                tracing::warn!(ctrl = %self.id, qid = qid.0, %opcode, %status, "not deleted");
                Err(())
            }
            Err(fault) => {
                tracing::warn!(ctrl = %self.id, qid = qid.0, %opcode, ?fault, "not deleted");
                match fault {
                    // A reset may help.
                    AdminFault::Timeout(cid) => self.admin_forget(cid),
                    AdminFault::Device(source) => self.fail(FailCause::Misbehaved(source)),
                    AdminFault::Dead(_) | AdminFault::Full => {}
                }
                Err(())
            }
        }
    }

    /// Recreates queues that are neither on the device nor granted.
    pub(crate) fn recreate_idle_queues(&mut self) -> Result<(), Error> {
        let idle = |(qid, queue): (&QueueId, &IoQueue)| {
            (queue.granted.is_none() && queue.device == OnDevice::Absent)
                .then(|| (*qid, queue.depth, queue.memory.clone()))
        };
        let idle: Vec<_> = self.queues.iter().filter_map(idle).collect();
        for (qid, depth, memory) in idle {
            self.make_io_queue(qid, depth, &memory)?;
            if let Some(queue) = self.queues.get_mut(&qid) {
                queue.device = OnDevice::Live;
            }
        }
        Ok(())
    }

    /// Grants a queue pair to an executor, for one namespace. The queue is empty and its completion
    /// queue zeroed. Its memory stays mapped and allocated until [`Controller::reclaim`] or
    /// [`Controller::recover`], whatever happens.
    ///
    /// # Errors
    /// Returns [`Error::QueueState`] for a queue that is unknown, granted already or lost in a
    /// reset, and [`Error::Namespace`] if the namespace is not usable.
    pub fn grant(&mut self, qid: QueueId, nsid: Nsid) -> Result<QueueGrant, Error> {
        self.usable()?;
        let ctrl = self.id.clone();
        let namespace = self.namespace(nsid)?;
        let (lba_shift, lbas) = (namespace.lba_shift, namespace.lbas);
        let boundary_lbas = u32::from(namespace.boundary_lbas);
        let mut placement_ids = [0; PLACEMENTS_MAX];
        let ids = namespace.placement_ids.iter().take(PLACEMENTS_MAX);
        let placements = ids.zip(&mut placement_ids).map(|(id, slot)| *slot = *id).count() as u32;
        let wrong = |what: &str| Error::QueueState { ctrl: ctrl.clone(), qid, what: what.into() };
        let page = &self.doorbells;
        let sq_doorbell = doorbell(page, u32::from(qid.0) * 2);
        let cq_doorbell = doorbell(page, u32::from(qid.0) * 2 + 1);
        let (Some(sq_doorbell), Some(cq_doorbell)) = (sq_doorbell, cq_doorbell) else {
            return Err(wrong("its doorbells lie outside the page the bus maps"));
        };
        let transfer_bytes_max = self.grant_transfer_bytes(qid, lba_shift)?;
        let mode = self.info.descriptor_mode;
        let queue = self.queues.get_mut(&qid).ok_or_else(|| wrong("there is no such queue"))?;
        if queue.granted.is_some() {
            return Err(wrong("is granted already; reclaim() or recover() it first"));
        }
        if queue.device != OnDevice::Live {
            return Err(wrong("the device lost it in a reset; recover() makes it anew"));
        }
        let grant = QueueGrant {
            epoch: GrantEpoch::new(),
            qid,
            sq: queue.memory.sq.place(),
            cq: queue.memory.cq.place(),
            sq_doorbell,
            cq_doorbell,
            descriptors: queue.memory.descriptors.place(),
            descriptor_bytes: queue.descriptor_bytes,
            depth: queue.depth,
            nsid,
            lba_shift,
            lbas,
            boundary_lbas,
            transfer_bytes_max,
            descriptor_mode: mode,
            placements,
            placement_ids,
        };
        queue.granted = Some(grant);
        tracing::debug!(ctrl = %ctrl, qid = qid.0, nsid = nsid.0, "queue granted");
        Ok(grant)
    }

    /// Returns the outstanding grants.
    pub fn grants(&self) -> impl Iterator<Item = &QueueGrant> + '_ {
        self.queues.values().filter_map(|queue| queue.granted.as_ref())
    }

    /// Returns queues whose grant no longer matches its namespace.
    #[must_use]
    pub fn stale_grants(&self) -> Vec<QueueId> {
        let now = |nsid: Nsid| self.namespaces.iter().find(|namespace| namespace.nsid == nsid);
        let stale = |grant: &&QueueGrant| {
            now(grant.nsid).is_none_or(|n| (n.lbas, n.lba_shift) != (grant.lbas, grant.lba_shift))
        };
        self.grants().filter(stale).map(|grant| grant.qid).collect()
    }

    /// Checks that `proof` covers the grant of `qid`, if it has one.
    pub(crate) fn check_proof(&self, qid: QueueId, proof: &Quiesced) -> Result<(), Error> {
        let grant = self.queues.get(&qid).and_then(|queue| queue.granted);
        if grant.is_none_or(|grant| proof.covers(grant.epoch)) {
            return Ok(());
        }
        let what = "its executor was not shown to have ended: the proof is of other grants".into();
        Err(Error::QueueState { ctrl: self.id.clone(), qid, what })
    }

    fn grant_transfer_bytes(&self, qid: QueueId, lba_shift: u8) -> Result<u32, Error> {
        let area = self.queues.get(&qid).map_or(64, |queue| queue.descriptor_bytes);
        let described = transfer_bytes_max(self.info.descriptor_mode, area).unwrap_or(u64::MAX);
        // NLB encodes at most 65,536 LBAs.
        let counted = 0x1_0000u64 << lba_shift;
        let mdts = self.info.mdts_bytes.unwrap_or(u64::MAX);
        let bytes = described.min(counted).min(mdts).min(1 << 31);
        let whole = bytes >> lba_shift << lba_shift;
        if whole == 0 {
            let what = format!("at most {bytes} bytes a command, but LBAs of 2^{lba_shift} bytes");
            return Err(Error::Implausible { ctrl: self.id.clone(), what });
        }
        Ok(u32::try_from(whole).unwrap_or(1 << 31))
    }

    /// Takes a queue back from an executor that has ended, deletes it, and returns its memory. Also
    /// deletes a queue that was never granted.
    ///
    /// # Errors
    /// Returns [`Error::QueueState`], without any effect, for an unknown queue or if `proof` does
    /// not cover its grant. Returns [`Error::Failed`] if the device does not delete the queue: the
    /// controller is then failed and the memory kept until [`Controller::recover`] or
    /// [`Controller::reset`].
    pub fn reclaim(&mut self, qid: QueueId, proof: &Quiesced) -> Result<QueueMemory, Error> {
        let ctrl = self.id.clone();
        let Some(queue) = self.queues.get(&qid) else {
            return Err(Error::QueueState { ctrl, qid, what: "there is no such queue".into() });
        };
        self.check_proof(qid, proof)?;
        if queue.device != OnDevice::Absent && self.may_dma && self.delete_on_device(qid).is_err() {
            self.fail(FailCause::QueueStuck { qid });
            return Err(Error::Failed { ctrl, cause: FailCause::QueueStuck { qid } });
        }
        match self.queues.remove(&qid) {
            Some(queue) => Ok(queue.memory),
            None => Err(Error::QueueState { ctrl, qid, what: "there is no such queue".into() }),
        }
    }

    /// Returns the existing queues, granted or not.
    pub fn queue_ids(&self) -> impl Iterator<Item = QueueId> + '_ {
        self.queues.keys().copied()
    }
}

/// Returns a doorbell as each side addresses it, if the mapped page reaches that far.
fn doorbell(page: &DoorbellPage, index: u32) -> Option<Place> {
    let at = u64::from(index) * u64::from(page.stride());
    if at + 4 > page.len() as u64 {
        return None;
    }
    Some(Place {
        host: Some(page.host().as_ptr().expose_provenance() as u64 + at),
        device: page.device().map(|base| DevicePtr(base.0 + at)),
        iova: Iova(0),
    })
}
