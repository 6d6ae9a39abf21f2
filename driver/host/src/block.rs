//! Blocking reads, writes, flushes and deallocation of a namespace.

use nvme_spec::{
    identify::Oncs,
    ids::{Cid, Lba, Nsid},
    nvm::{DatasetManagement, DatasetRange, NvmOpcode},
    sqe::Sqe,
};
use zerocopy::IntoBytes;

use crate::{
    admin::{alloc_aligned, unreachable_by_host},
    controller::Controller,
    descriptor::transfer_bytes_max,
    dma::{DmaError, DmaSlice},
    error::Error,
    grant::DescriptorMode,
    grants::{HOST_QUEUE, QueueShape},
    info::DsmLimits,
    io::{AREA_BYTES, Data, HostMemory, HostQueue, Policy, Work},
    namespace::{LbaRange, NamespaceInfo},
    platform::buffer::Buffer,
    queue::QueuePair,
    quirks::Quirks,
    wait::Env,
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
            let (what, hint) = ("Dataset Management".into(), "see ONCS; overwrite instead");
            return Err(Error::Unsupported { ctrl: self.id.clone(), what, hint });
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
            let (what, hint) = ("Write Zeroes".into(), "see ONCS; write zeroes instead");
            return Err(Error::Unsupported { ctrl: self.id.clone(), what, hint });
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
            return Err(Error::Range { ctrl: self.id.clone(), nsid, what });
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
        Err(Error::Range { ctrl: self.id.clone(), nsid: namespace.nsid, what })
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
            return Err(Error::Implausible { ctrl: self.id.clone(), what });
        }
        Ok(lbas)
    }

    /// Runs `work` on the driver's own queue and turns failures into errors.
    pub(crate) fn run(&mut self, mut work: Work<'_>) -> Result<(), Error> {
        if work.lbas == 0 {
            return Ok(());
        }
        if matches!(work.data, Data::In(_) | Data::Out(_)) {
            self.ensure_bounce()?;
        }
        let (Some(host), Some(memory)) = (self.host.as_mut(), self.host_memory.as_mut()) else {
            return Err(Error::Closed { ctrl: self.id.clone() });
        };
        let page_bytes = self.caps.page_bytes;
        let prp_only = self.quirks.contains(Quirks::NO_SGL_FOR_DSM)
            && work.opcode == NvmOpcode::DATASET_MANAGEMENT;
        let policy = Policy {
            env: Env::new(&self.clock, &self.bus, self.info.pause_max),
            timeout: self.options.command_timeout,
            mode: match self.info.descriptor_mode {
                DescriptorMode::Sgl { .. } if prp_only => DescriptorMode::Prp { page_bytes },
                mode => mode,
            },
            // The device may have dropped the data that a failed Flush could not make permanent;
            // the next one would succeed without it.
            crdt: (work.opcode != NvmOpcode::FLUSH).then_some(self.info.crdt),
        };
        match host.run(&policy, memory, &mut work) {
            Ok(()) => Ok(()),
            Err(fault) => Err(self.io_failed(&work, fault)),
        }
    }

    fn ensure_bounce(&mut self) -> Result<(), Error> {
        let bounce_bytes = self.options.bounce_bytes as usize;
        let Some(memory) = self.host_memory.as_mut() else { return Ok(()) };
        if memory.bounce.is_some() {
            return Ok(());
        }
        let page = self.caps.page_bytes as usize;
        let bytes = bounce_bytes * memory.lanes as usize;
        let made = alloc_aligned(&*self.bus, bytes, page)
            .and_then(|all| Buffer::new(all).ok_or_else(|| unreachable_by_host(&*self.bus)));
        memory.bounce = Some(made.map_err(|source| Error::Dma { ctrl: self.id.clone(), source })?);
        memory.bounce_bytes = bounce_bytes;
        Ok(())
    }

    /// Creates the queue of the blocking calls, reusing its memory if there is some.
    pub(crate) fn create_host_queue(&mut self) -> Result<(), Error> {
        let ctrl = self.id.clone();
        let dma = |source: DmaError| Error::Dma { ctrl: ctrl.clone(), source };
        let memory = match self.host_memory.take() {
            Some(memory) => memory,
            None => self.alloc_host_memory().map_err(dma)?,
        };
        let (sq, cq, depth, lanes) =
            (memory.sq.clone(), memory.cq.clone(), memory.depth, memory.lanes);
        // Stored before the controller learns the addresses, so that the memory is kept on failure.
        self.host_memory = Some(memory);
        for slice in [&sq, &cq] {
            let buffer = Buffer::new(slice.clone());
            buffer.ok_or_else(|| dma(unreachable_by_host(&*self.bus)))?.zero();
        }
        // Vector 0 is the admin queue's; a function with one vector shares it.
        let interrupt = match self.interrupt(1) {
            Ok(interrupt) => interrupt,
            Err(_) => self.interrupt(0)?,
        };
        let qid = HOST_QUEUE;
        let vector = interrupt.as_ref().map(|interrupt| interrupt.vector);
        self.make_on_device(QueueShape { qid, depth, sq: sq.iova(), cq: cq.iova(), vector })?;
        let pair = QueuePair::new(&self.bus, qid, depth, sq, cq)
            .map_err(|source| Error::Queue { ctrl: ctrl.clone(), source })?;
        self.host = Some(HostQueue::new(pair, lanes, interrupt));
        Ok(())
    }

    fn alloc_host_memory(&self) -> Result<HostMemory, DmaError> {
        let page = self.caps.page_bytes as usize;
        let most = 1 << self.caps.entries_max.ilog2();
        let depth = (u32::from(self.options.host_depth) + 1).next_power_of_two().min(most);
        let lanes = self.options.host_depth.min((depth - 1) as u16);
        let part = |len| alloc_aligned(&*self.bus, len, page);
        let descriptors = part(lanes as usize * AREA_BYTES)?;
        Ok(HostMemory {
            depth,
            lanes,
            sq: part(depth as usize * 64)?,
            cq: part(depth as usize * 16)?,
            descriptors: Buffer::new(descriptors).ok_or_else(|| unreachable_by_host(&*self.bus))?,
            bounce: None,
            bounce_bytes: 0,
        })
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
