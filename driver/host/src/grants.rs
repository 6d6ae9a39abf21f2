//! I/O queue pairs: creation, grants to executors, reclaim, recovery.
//!
//! A queue's memory is freed only when neither the device can use it (its queues are deleted or the
//! controller is disabled) nor an executor (the caller presented a [`Quiesced`]).

use nvme_spec::{
    admin::{AdminOpcode, CreateIoCq, CreateIoSq, DeleteQueue},
    ids::{Cid, Nsid, QueueId},
    sqe::Sqe,
};

use crate::{
    admin::AdminFault,
    bus::DoorbellPage,
    clock::Nanos,
    controller::Controller,
    descriptor::transfer_bytes_max,
    dma::{DevicePtr, DmaSlice, Iova, Place},
    error::{Error, FailCause},
    grant::{
        GrantEpoch, HOST_QUEUE, IoQueue, OnDevice, Placements, QueueGrant, QueueMemory, Quiesced,
        Recovered, RecoveryLevel, check_depth,
    },
    state::State,
    wait::health,
};

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
        let checked = check_depth(depth, self.info.entries_max);
        checked.map_err(|what| self.port.queue_state(qid, what))?;
        let depth = depth as usize;
        let memory = QueueMemory {
            sq: self.port.alloc(depth * 64)?,
            cq: self.port.alloc(depth * 16)?,
            descriptors: self.port.alloc(depth * self.options.descriptor_bytes as usize)?,
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
        let checked = memory.check(depth, self.info.entries_max, self.port.caps.page_bytes);
        let descriptor_bytes = checked.map_err(|what| self.port.queue_state(qid, what))?;
        // Kept from here on: the device may know the memory even if creating the queue fails.
        let kept = self.quarantine.len();
        let QueueMemory { sq, cq, descriptors } = memory.clone();
        self.quarantine.extend([sq, cq, descriptors]);
        let created = self.make_queue(qid, depth, [&memory.sq, &memory.cq], None);
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
        free.ok_or_else(|| {
            let what = format!(
                "all {} queue pairs the controller gave are in use; reclaim one, or ask for more \
                 with ControllerOptions::io_queues",
                self.info.io_queues
            );
            self.port.queue_state(QueueId(last), what)
        })
    }

    /// Zeroes the memory of a queue pair (SQ, CQ) and creates it on the device, the CQ first. If
    /// the SQ is refused, the CQ is deleted again.
    pub(crate) fn make_queue(
        &mut self,
        qid: QueueId,
        depth: u32,
        [sq, cq]: [&DmaSlice; 2],
        vector: Option<u16>,
    ) -> Result<(), Error> {
        for slice in [sq, cq] {
            self.port.mapped(slice.clone())?.zero();
        }
        let (sq, cq, qsize_z) = (sq.iova().0, cq.iova().0, (depth - 1) as u16);
        let mut sqe = Sqe::new(AdminOpcode::CREATE_IO_CQ.0, Cid(0), Nsid(0)).with_prps(cq, 0);
        let (interrupts, vector) = (vector.is_some(), vector.unwrap_or(0));
        CreateIoCq { qid, qsize_z, contiguous: true, interrupts, vector }.write_to(&mut sqe);
        self.admin_command("create I/O completion queue", sqe)?;
        let mut sqe = Sqe::new(AdminOpcode::CREATE_IO_SQ.0, Cid(0), Nsid(0)).with_prps(sq, 0);
        CreateIoSq { qid, qsize_z, contiguous: true, priority: 0, cqid: qid }.write_to(&mut sqe);
        let made = self.admin_command("create I/O submission queue", sqe).map(drop);
        if let Err(Error::Command { .. }) = made
            && self.delete_one(AdminOpcode::DELETE_IO_CQ, qid, self.options.admin_timeout).is_err()
        {
            self.fail(FailCause::QueueStuck { qid });
        }
        made
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
        let env = self.port.env(self.info.pause_max);
        match self.admin.execute(env, &sqe, timeout) {
            Ok(completion) if completion.status.is_success() => Ok(()),
            Ok(completion) => {
                let status = completion.status;
                tracing::warn!(ctrl = %self.port.id, qid = qid.0, %opcode, %status, "not deleted");
                Err(())
            }
            Err(fault) => {
                tracing::warn!(ctrl = %self.port.id, qid = qid.0, %opcode, ?fault, "not deleted");
                match fault {
                    // A reset may help.
                    AdminFault::Timeout(cid) => self.admin.forget(cid),
                    AdminFault::Device(source) => self.fail(FailCause::Misbehaved(source)),
                    AdminFault::Ended(..) | AdminFault::Dead(_) | AdminFault::Full => {}
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
            self.make_queue(qid, depth, [&memory.sq, &memory.cq], None)?;
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
        let namespace = self.namespace(nsid)?;
        let (lba_shift, lbas) = (namespace.lba_shift, namespace.lbas);
        let boundary_lbas = u32::from(namespace.boundary_lbas);
        let mut placements = Placements::default();
        for (id, slot) in namespace.placement_ids.iter().zip(&mut placements.ids) {
            *slot = *id;
            placements.count += 1;
        }
        let wrong = |what: &str| self.port.queue_state(qid, what);
        let page = &self.port.doorbells;
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
        };
        queue.granted = Some(grant);
        tracing::debug!(ctrl = %self.port.id, qid = qid.0, nsid = nsid.0, "queue granted");
        Ok(grant)
    }

    /// Returns the outstanding grants.
    pub fn grants(&self) -> impl Iterator<Item = &QueueGrant> + '_ {
        self.queues.values().filter_map(|queue| queue.granted.as_ref())
    }

    /// Returns queues whose grant no longer matches its namespace.
    #[must_use]
    pub fn stale_grants(&self) -> Vec<QueueId> {
        let stale = |grant: &&QueueGrant| {
            let now = self.namespaces.get(grant.nsid);
            now.map_or(true, |n| (n.lbas, n.lba_shift) != (grant.lbas, grant.lba_shift))
        };
        self.grants().filter(stale).map(|grant| grant.qid).collect()
    }

    /// Checks that `proof` covers the grant of `qid`, if it has one.
    pub(crate) fn check_proof(&self, qid: QueueId, proof: &Quiesced) -> Result<(), Error> {
        let grant = self.queues.get(&qid).and_then(|queue| queue.granted);
        if grant.is_none_or(|grant| proof.covers(grant.epoch)) {
            return Ok(());
        }
        let what = "its executor was not shown to have ended: the proof is of other grants";
        Err(self.port.queue_state(qid, what))
    }

    /// Returns an error with `what` if a queue is granted.
    pub(crate) fn refuse_granted(&self, what: &str) -> Result<(), Error> {
        self.grants().next().map_or(Ok(()), |grant| Err(self.port.queue_state(grant.qid, what)))
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
            return Err(self.port.implausible(what));
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
        let unknown = || self.port.queue_state(qid, "there is no such queue");
        let device = self.queues.get(&qid).ok_or_else(unknown)?.device;
        self.check_proof(qid, proof)?;
        if device != OnDevice::Absent && self.may_dma && self.delete_on_device(qid).is_err() {
            let cause = FailCause::QueueStuck { qid };
            self.fail(cause);
            return Err(Error::Failed { ctrl: self.port.id.clone(), cause });
        }
        let unknown = || self.port.queue_state(qid, "there is no such queue");
        self.queues.remove(&qid).map(|queue| queue.memory).ok_or_else(unknown)
    }

    /// Ends all outstanding commands of executors and recreates their queues in the same memory:
    /// first by deleting the queues, and if the controller fails to do so or has failed, by
    /// resetting it. All grants are void afterwards; take new ones.
    ///
    /// Outstanding commands are not aborted individually: their identifiers belong to the executor,
    /// and deleting a queue aborts all of them (Base, "Delete I/O Submission Queue").
    ///
    /// # Errors
    /// Returns [`Error::QueueState`], without any effect, if `proof` does not cover every grant of
    /// this controller. If the reset fails, returns [`Error`]: the controller stays failed, and the
    /// queues' memory is kept by this value and leaked when it is dropped. Returns
    /// [`Error::Closed`] after a shutdown.
    pub fn recover(&mut self, proof: &Quiesced) -> Result<Recovered, Error> {
        let span = tracing::info_span!("recover", ctrl = %self.port.id);
        let _entered = span.enter();
        if self.state == State::Shutdown {
            return Err(Error::Closed { ctrl: self.port.id.clone() });
        }
        for qid in self.queues.keys() {
            self.check_proof(*qid, proof)?;
        }
        let mut level = RecoveryLevel::Queues;
        if !(self.state == State::Ready && health(&*self.port.bus).is_ok() && self.remake_queues())
        {
            level = RecoveryLevel::Controller;
            // The proof covers all grants, and the reset ends all DMA.
            for queue in self.queues.values_mut() {
                queue.granted = None;
            }
            let whole = |c: &Self| {
                let mut queues = c.queues.values();
                c.state == State::Ready && queues.all(|queue| queue.device == OnDevice::Live)
            };
            // An admin timeout on the way may have reset the controller already.
            if !(whole(self) && health(&*self.port.bus).is_ok()) {
                self.reset_controller()?;
            }
        }
        let queues = self.queues.keys().copied().collect();
        tracing::info!(ctrl = %self.port.id, ?level, ?queues, "queues recovered");
        Ok(Recovered { level, queues })
    }

    /// Recreates granted and lost queues. Returns whether all of it worked.
    fn remake_queues(&mut self) -> bool {
        let granted: Vec<QueueId> =
            self.queues.iter().filter(|(_, q)| q.granted.is_some()).map(|(qid, _)| *qid).collect();
        for qid in granted {
            let absent = |c: &Self| c.queues.get(&qid).map(|q| q.device) == Some(OnDevice::Absent);
            let deleted = absent(self) || self.delete_on_device(qid).is_ok();
            let Some(queue) = self.queues.get_mut(&qid) else { continue };
            if !deleted {
                // An admin timeout on the way resets the controller, and then the queue is absent.
                if queue.device == OnDevice::Live {
                    queue.device = OnDevice::Stuck;
                }
                return false;
            }
            queue.device = OnDevice::Absent;
            queue.granted = None;
        }
        self.recreate_idle_queues().is_ok()
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
