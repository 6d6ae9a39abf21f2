//! Blocking reads, writes, flushes and deallocation of a namespace.
//!
//! A command that is not answered in time is aborted, else the driver's own queue is recreated,
//! else the controller is reset. Memory that a command may still use is quarantined until one of
//! these steps has ended the command; if the last one fails, it is kept forever.

use nvme_spec::{
    admin::FdpMode,
    identify::{Ctratt, Oncs},
    ids::{Cid, Lba, Nsid},
    nvm::{DatasetManagement, DatasetRange, NvmOpcode},
    sqe::Sqe,
};
use zerocopy::IntoBytes;

use crate::{
    admin::{AdminFault, DATA_BYTES, abort_sqe},
    controller::Controller,
    descriptor::transfer_bytes_max,
    dma::DmaSlice,
    error::{CommandId, Error, TimeoutOutcome},
    grant::{DescriptorMode, HOST_QUEUE},
    info::DsmLimits,
    io::{AREA_BYTES, Data, Flight, HostMemory, HostQueue, IoFault, Policy, Work},
    namespace::{LbaRange, NamespaceInfo},
    placement,
    queue::QueuePair,
    quirks::Quirks,
    state::State,
};

/// Largest number of LBAs that the NLB field can encode.
const NLB_MAX: u64 = 0x1_0000;

/// Options of a write. A `bool` converts into options that set only FUA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteOptions {
    /// Force unit access: the data is on the medium, not only in a volatile cache, on return.
    pub fua: bool,
    /// Placement handle: an index into [`NamespaceInfo::placement_ids`]. `None` leaves the
    /// placement to the drive.
    pub placement: Option<u16>,
}

impl From<bool> for WriteOptions {
    fn from(fua: bool) -> Self {
        Self { fua, placement: None }
    }
}

impl Controller {
    /// Reads `into.len()` bytes, a multiple of the LBA size, starting at `lba`.
    ///
    /// # Errors
    /// Returns [`Error::Range`] or [`Error::Namespace`] before anything is sent, [`Error::Command`]
    /// if the controller rejects a part, and [`Error::Timeout`] with the recovery that followed.
    /// After the latter two, `into` holds a mix of old and new data.
    pub fn read(&mut self, nsid: Nsid, lba: Lba, into: &mut [u8]) -> Result<(), Error> {
        let len = into.len();
        self.transfer("read", NvmOpcode::READ, nsid, lba, len, Data::In(into), false.into())
    }

    /// Writes `from`, a multiple of the LBA size, starting at `lba`.
    ///
    /// # Errors
    /// Same as [`Controller::read`]; any part of the data may have been written. Returns
    /// [`Error::Unsupported`], before anything is sent, for an unknown placement handle.
    pub fn write(
        &mut self,
        nsid: Nsid,
        lba: Lba,
        from: &[u8],
        options: impl Into<WriteOptions>,
    ) -> Result<(), Error> {
        let (len, options) = (from.len(), options.into());
        self.transfer("write", NvmOpcode::WRITE, nsid, lba, len, Data::Out(from), options)
    }

    /// Reads directly into DMA memory, scattered over `into` in order. SGLs allow any byte address
    /// and length; PRPs need whole pages between the first and the last.
    ///
    /// # Errors
    /// Same as [`Controller::read`], and [`Error::Descriptor`] if the memory cannot be described.
    pub fn read_dma(&mut self, nsid: Nsid, lba: Lba, into: &[DmaSlice]) -> Result<(), Error> {
        let len = into.iter().map(DmaSlice::len).sum();
        self.transfer("read", NvmOpcode::READ, nsid, lba, len, Data::Parts(into), false.into())
    }

    /// Writes directly from DMA memory, gathered from `from` in order.
    ///
    /// # Errors
    /// Same as [`Controller::read_dma`] and [`Controller::write`].
    pub fn write_dma(
        &mut self,
        nsid: Nsid,
        lba: Lba,
        from: &[DmaSlice],
        options: impl Into<WriteOptions>,
    ) -> Result<(), Error> {
        let (len, options) = (from.iter().map(DmaSlice::len).sum(), options.into());
        self.transfer("write", NvmOpcode::WRITE, nsid, lba, len, Data::Parts(from), options)
    }

    /// Moves all completed writes from the volatile cache to the medium.
    ///
    /// # Errors
    /// Same as [`Controller::read`]. Anything written since the last flush may then be lost, and
    /// the success of a later flush does not rule that out. A Flush is never retried.
    pub fn flush(&mut self, nsid: Nsid) -> Result<(), Error> {
        self.usable()?;
        self.namespace(nsid)?;
        let sqe = Sqe::new(NvmOpcode::FLUSH.0, Cid(0), nsid);
        self.single("flush", sqe, Data::None)
    }

    /// Deallocates blocks (Dataset Management). [`NamespaceInfo::deallocated_reads_zero`] tells
    /// what they read as afterwards.
    ///
    /// # Errors
    /// Same as [`Controller::read`], and [`Error::Unsupported`] without that command.
    pub fn deallocate(&mut self, nsid: Nsid, ranges: &[LbaRange]) -> Result<(), Error> {
        self.usable()?;
        let namespace = self.namespace(nsid)?.clone();
        if !self.info.nvm_commands.contains(Oncs::DATASET_MANAGEMENT) {
            let hint = "see ONCS; overwrite instead";
            return Err(self.port.unsupported("Dataset Management", hint));
        }
        for range in ranges {
            self.check_range(&namespace, range.lba, range.lbas)?;
        }
        for ranges in dsm_commands(ranges, self.info.dsm) {
            let mut sqe = Sqe::new(NvmOpcode::DATASET_MANAGEMENT.0, Cid(0), nsid);
            let nr_z = (ranges.len() - 1) as u8;
            DatasetManagement { nr_z, deallocate: true }.write_to(&mut sqe);
            self.single("deallocate", sqe, Data::Out(ranges.as_bytes()))?;
        }
        Ok(())
    }

    /// Makes `range` read as zeroes without transferring data. With `deallocate` the controller may
    /// also free the blocks.
    ///
    /// # Errors
    /// Same as [`Controller::read`], and [`Error::Unsupported`] without that command.
    pub fn write_zeroes(
        &mut self,
        nsid: Nsid,
        range: LbaRange,
        deallocate: bool,
    ) -> Result<(), Error> {
        self.usable()?;
        let namespace = self.namespace(nsid)?.clone();
        let broken = self.quirks.contains(Quirks::NO_WRITE_ZEROES);
        if broken || !self.info.nvm_commands.contains(Oncs::WRITE_ZEROES) {
            return Err(self.port.unsupported("Write Zeroes", "see ONCS; write zeroes instead"));
        }
        self.check_range(&namespace, range.lba, range.lbas)?;
        let limit = self.info.write_zeroes_bytes.unwrap_or(u64::MAX);
        let command_lbas = (limit >> namespace.lba_shift).clamp(1, NLB_MAX);
        self.run(Work {
            what: "write zeroes",
            opcode: NvmOpcode::WRITE_ZEROES,
            nsid,
            lba_shift: namespace.lba_shift,
            lba: range.lba.0,
            lbas: range.lbas,
            command_lbas,
            boundary_lbas: 0,
            fua: false,
            placement: None,
            deallocate,
            data: Data::None,
            single: None,
        })
    }

    #[expect(clippy::too_many_arguments, reason = "one private function behind four public ones")]
    fn transfer(
        &mut self,
        what: &'static str,
        opcode: NvmOpcode,
        nsid: Nsid,
        lba: Lba,
        len: usize,
        data: Data<'_>,
        options: WriteOptions,
    ) -> Result<(), Error> {
        self.usable()?;
        let namespace = self.namespace(nsid)?.clone();
        let placement = self.placement_id(&namespace, options.placement)?;
        let lba_shift = namespace.lba_shift;
        if !len.is_multiple_of(1 << lba_shift) {
            let size = namespace.lba_bytes();
            let what = format!("{len} bytes are not a multiple of the LBA size of {size} bytes");
            return Err(self.port.range(nsid, what));
        }
        let lbas = (len >> lba_shift) as u64;
        self.check_range(&namespace, lba, lbas)?;
        let bounced = !matches!(data, Data::Parts(_));
        let command_lbas = self.command_lbas(lba_shift, bounced)?;
        let (deallocate, single) = (false, None);
        self.run(Work {
            what,
            opcode,
            nsid,
            lba_shift,
            lba: lba.0,
            lbas,
            command_lbas,
            boundary_lbas: u64::from(namespace.boundary_lbas),
            fua: options.fua,
            placement,
            deallocate,
            data,
            single,
        })
    }

    fn single(&mut self, what: &'static str, sqe: Sqe, data: Data<'_>) -> Result<(), Error> {
        self.run(Work::single(what, sqe, data))
    }

    fn check_range(&self, namespace: &NamespaceInfo, lba: Lba, lbas: u64) -> Result<(), Error> {
        if lba.0.checked_add(lbas).is_some_and(|end| end <= namespace.lbas) {
            return Ok(());
        }
        let what = format!("{lbas} LBAs from {lba} on end past its {} LBAs", namespace.lbas);
        Err(self.port.range(namespace.nsid, what))
    }

    /// Returns the most LBAs that one command may transfer.
    fn command_lbas(&self, lba_shift: u8, bounced: bool) -> Result<u64, Error> {
        let bounce =
            if bounced { u64::from(self.options.bounce_bytes) } else { NLB_MAX << lba_shift };
        let area = transfer_bytes_max(self.info.descriptor_mode, AREA_BYTES as u32);
        let mdts = self.info.mdts_bytes.unwrap_or(u64::MAX);
        let bytes = bounce.min(mdts).min(area.unwrap_or(u64::MAX));
        let lbas = (bytes >> lba_shift).min(NLB_MAX);
        if lbas == 0 {
            let what = format!("at most {bytes} bytes a command, but LBAs of 2^{lba_shift} bytes");
            return Err(self.port.implausible(what));
        }
        Ok(lbas)
    }

    /// Runs `work` on the driver's own queue and turns failures into errors.
    pub(crate) fn run(&mut self, mut work: Work<'_>) -> Result<(), Error> {
        if work.lbas == 0 {
            return Ok(());
        }
        if matches!(work.data, Data::In(_) | Data::Out(_)) {
            self.host_memory.ensure_bounce(&self.port)?;
        }
        let Some(host) = self.host.as_mut() else {
            return Err(Error::Closed { ctrl: self.port.id.clone() });
        };
        let page_bytes = self.port.caps.page_bytes;
        let prp_only = self.quirks.contains(Quirks::NO_SGL_FOR_DSM)
            && work.opcode == NvmOpcode::DATASET_MANAGEMENT;
        let policy = Policy {
            env: self.port.env(self.info.pause_max),
            timeout: self.options.command_timeout,
            mode: match self.info.descriptor_mode {
                DescriptorMode::Sgl { .. } if prp_only => DescriptorMode::Prp { page_bytes },
                mode => mode,
            },
            // The device may have dropped the data that a failed Flush could not make permanent;
            // the next one would succeed without it.
            crdt: (work.opcode != NvmOpcode::FLUSH).then_some(self.info.crdt),
        };
        let done = host.run(&policy, &mut self.host_memory, &mut work);
        done.map_err(|fault| self.io_failed(&work, fault))
    }

    /// Creates the queue of the blocking calls in its memory, which is used again after each reset.
    pub(crate) fn create_host_queue(&mut self) -> Result<(), Error> {
        let HostMemory { depth, lanes, sq, cq, .. } = self.host_memory.clone();
        // Vector 0 is the admin queue's; a function with one vector shares it.
        let mode = self.options.wait;
        let interrupt = self.port.interrupt(mode, 1).or_else(|_| self.port.interrupt(mode, 0))?;
        let vector = interrupt.as_ref().map(|interrupt| interrupt.vector);
        self.make_queue(HOST_QUEUE, depth, [&sq, &cq], vector)?;
        let pair = QueuePair::new(&self.port.bus, HOST_QUEUE, depth, sq, cq)
            .map_err(|source| Error::Queue { ctrl: self.port.id.clone(), source })?;
        self.host = Some(HostQueue::new(pair, lanes, interrupt));
        Ok(())
    }

    /// Queries the placement handles of all namespaces. A drive that has none, or rejects the
    /// query, is used without.
    pub(crate) fn discover_placement(&mut self) -> Result<(), Error> {
        if !self.info.attributes.contains(Ctratt::FLEXIBLE_DATA_PLACEMENT) {
            return Ok(());
        }
        for at in 0..self.namespaces.usable.len() {
            let NamespaceInfo { nsid, endurance_group, .. } = self.namespaces.usable[at];
            if endurance_group == 0 {
                continue;
            }
            let found = answered(self.read_placement(nsid, endurance_group))?;
            if let Some((ids, bytes)) = found.flatten() {
                let namespace = &mut self.namespaces.usable[at];
                (namespace.placement_ids, namespace.reclaim_unit_bytes) = (ids, bytes);
            }
        }
        Ok(())
    }

    /// Returns the Placement Identifiers of a namespace, and the size of a reclaim unit (0 if the
    /// log does not report it); `None` if placement is disabled.
    fn read_placement(&mut self, nsid: Nsid, group: u16) -> Result<Option<(Vec<u16>, u64)>, Error> {
        let mode = self.admin_command("get features", placement::get_mode(group))?;
        let FdpMode { enabled, configuration } = FdpMode::from_dword(mode.result);
        if !enabled {
            return Ok(None);
        }
        let mut page = [0; DATA_BYTES];
        let sqe = placement::get_handles(nsid);
        self.single("reclaim unit handle status", sqe, Data::In(&mut page))?;
        let ids = placement::placement_ids(&page);
        let sqe = placement::get_configurations(group);
        let read = answered(self.admin_read("get log page", sqe, &mut page))?;
        let bytes = read.and_then(|()| placement::reclaim_unit_bytes(&page, configuration));
        Ok(Some((ids, bytes.unwrap_or(0))))
    }

    /// Returns the Placement Identifier of `handle` for writes to `namespace`.
    fn placement_id(
        &self,
        namespace: &NamespaceInfo,
        handle: Option<u16>,
    ) -> Result<Option<u16>, Error> {
        let Some(handle) = handle else { return Ok(None) };
        if let Some(id) = namespace.placement_ids.get(usize::from(handle)) {
            return Ok(Some(*id));
        }
        let (nsid, count) = (namespace.nsid, namespace.placement_handles());
        let what = format!("placement handle {handle} of namespace {nsid}, which has {count}");
        let hint = "name one below NamespaceInfo::placement_handles(), or none";
        Err(self.port.unsupported(what, hint))
    }

    /// Turns the failure of a blocking call into an error and recovers from it.
    pub(crate) fn io_failed(&mut self, work: &Work<'_>, fault: IoFault) -> Error {
        if self.host.as_ref().is_some_and(|host| host.in_flight() > 0)
            && let Data::Parts(slices) = &work.data
        {
            self.quarantine.extend(slices.iter().cloned());
        }
        let error = match fault {
            IoFault::Command(flight, status) => {
                Error::Command { command: self.io_id(work, &flight), status }
            }
            IoFault::Timeout(flight) => self.io_timeout(work, &flight),
            IoFault::Device(source) => self.misbehaved(source),
            IoFault::Dead(dead) => self.dead(dead),
            IoFault::Descriptor(source) => Error::Descriptor { ctrl: self.port.id.clone(), source },
            IoFault::Dma(source) => self.port.dma(source),
        };
        if let Some(suppressed) = self.warnings.allow(self.port.clock.now()) {
            let (ctrl, nsid) = (&self.port.id, work.nsid.0);
            tracing::warn!(%ctrl, nsid, %error, suppressed, "I/O failed");
        }
        error
    }

    fn io_id(&self, work: &Work<'_>, flight: &Flight) -> Box<CommandId> {
        Box::new(CommandId {
            ctrl: self.port.id.clone(),
            what: work.what,
            nsid: work.nsid,
            qid: HOST_QUEUE,
            cid: flight.cid,
            range: work.range(flight),
        })
    }

    fn io_timeout(&mut self, work: &Work<'_>, flight: &Flight) -> Error {
        let command = self.io_id(work, flight);
        tracing::warn!(ctrl = %self.port.id, %command, "not answered in time");
        // During set-up there is no recovery here: set-up itself fails.
        let outcome = if self.state != State::Ready {
            TimeoutOutcome::ControllerFailed
        } else if self.abort_host_command(flight) {
            TimeoutOutcome::Aborted
        } else if self.remake_host_queue() {
            TimeoutOutcome::QueueRecreated
        } else if self.reset_controller().is_ok() {
            TimeoutOutcome::ControllerReset
        } else {
            TimeoutOutcome::ControllerFailed
        };
        if outcome != TimeoutOutcome::ControllerFailed {
            // Each of these steps ends all commands of the queue.
            self.quarantine.clear();
        }
        Error::Timeout { command, waited: self.options.command_timeout, outcome }
    }

    /// First step. Returns whether nothing is in flight on the host queue any more.
    fn abort_host_command(&mut self, flight: &Flight) -> bool {
        let sqe = abort_sqe(HOST_QUEUE, flight.cid);
        let env = self.port.env(self.info.pause_max);
        match self.admin.execute(env, &sqe, self.options.command_timeout) {
            // Whatever the status of the Abort, the command may be about to complete.
            Ok(completion) => {
                let status = completion.status;
                tracing::debug!(ctrl = %self.port.id, %status, result = completion.result, "abort");
            }
            Err(fault) => {
                tracing::warn!(ctrl = %self.port.id, ?fault, "abort failed");
                if let AdminFault::Timeout(cid) = fault {
                    self.admin.forget(cid);
                }
                return false;
            }
        }
        let deadline = self.port.clock.now() + self.options.abort_grace;
        self.host.as_mut().is_some_and(|host| host.drain(env, deadline).unwrap_or(false))
    }

    /// Second step: deletes the host queue, which ends its commands, and recreates it.
    fn remake_host_queue(&mut self) -> bool {
        if self.delete_on_device(HOST_QUEUE).is_err() {
            return false;
        }
        self.host = None;
        self.create_host_queue().is_ok()
    }
}

/// Turns a command that the controller rejected into `None`.
fn answered<T>(result: Result<T, Error>) -> Result<Option<T>, Error> {
    match result {
        Err(error @ Error::Command { .. }) => {
            tracing::debug!(%error, "used without placement handles");
            Ok(None)
        }
        result => result.map(Some),
    }
}

/// Splits `ranges` into commands that respect `limits`.
fn dsm_commands(ranges: &[LbaRange], limits: DsmLimits) -> Vec<Vec<DatasetRange>> {
    let (mut commands, mut lbas_left) = (vec![Vec::new()], limits.lbas);
    for range in ranges {
        let (mut slba, mut left) = (range.lba.0, range.lbas);
        while left > 0 {
            if lbas_left == 0 || commands.last().is_some_and(|last| last.len() == limits.ranges) {
                commands.push(Vec::new());
                lbas_left = limits.lbas;
            }
            let lbas = left.min(limits.range_lbas.into()).min(lbas_left) as u32;
            if let Some(last) = commands.last_mut() {
                last.push(DatasetRange { attributes: 0, lbas, slba });
            }
            slba += u64::from(lbas);
            left -= u64::from(lbas);
            lbas_left -= u64::from(lbas);
        }
    }
    commands.retain(|command| !command.is_empty());
    commands
}
