//! Commands of the I/O queues (NVM Command Set).

use nvme_spec::{
    ids::Nsid,
    nvm::{BlockRange, DatasetManagement, DatasetRange, Direction, NvmOpcode},
    status::Status,
};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    command::{Flow, Operations, Outcome, Wait, status_of},
    storage::Storage,
    transfer::{Collect, Gather, Request},
};
use crate::media::{MediaKind, MediaOp};

/// Largest number of ranges in a dataset management command.
const RANGES_MAX: usize = 256;

impl Storage {
    /// Executes a command of an I/O queue.
    #[inline]
    pub(super) fn run(&mut self, request: &Request<'_>) -> Flow {
        // "Fused Operations": FUSES is 0, so none is supported.
        if request.sqe.fuse() != 0 {
            return Err(Status::INVALID_FIELD).into();
        }
        match NvmOpcode(request.sqe.opcode) {
            NvmOpcode::READ | NvmOpcode::WRITE => self.read_write(request),
            NvmOpcode::FLUSH => self.flush(request),
            NvmOpcode::WRITE_ZEROES => self.write_zeroes(request),
            NvmOpcode::IO_MANAGEMENT_RECEIVE => self.io_management_receive(request),
            NvmOpcode::DATASET_MANAGEMENT => self.dataset_management(request),
            _ => Err(Status::INVALID_OPCODE),
        }
        .into()
    }

    /// Executes a read or a write (NVM, "Read command", "Write command").
    #[inline]
    fn read_write(&mut self, request: &Request<'_>) -> Result<Flow, Status> {
        let sqe = request.sqe;
        let index = self.index(sqe)?;
        let placement = self.placement_handle(sqe)?;
        let namespace = &mut self.namespaces[index];
        let range = BlockRange::from_sqe(sqe);
        let lbas = u64::from(range.lbas().0);
        // "Identify Controller", MDTS: a larger transfer is an Invalid Field.
        if lbas << namespace.lba_shift > request.rules.bytes_max {
            return Err(Status::INVALID_FIELD);
        }
        let (offset, len) = namespace.range(range.slba, lbas).ok_or(Status::LBA_OUT_OF_RANGE)?;
        let (direction, kind) = if NvmOpcode(sqe.opcode) == NvmOpcode::READ {
            (Direction::Read, MediaKind::Read)
        } else {
            (Direction::Write, MediaKind::Write { fua: range.fua || request.write_through })
        };
        let mut sg_list = self.spare.pop().unwrap_or_default();
        let mut gather = Gather { dma: request.dma, sg_list: &mut sg_list, holes: 0 };
        let walked = request.walk(direction, len, &mut gather);
        let bytes = len - gather.holes.min(len);
        if let Err(status) = walked {
            self.release(sg_list);
            return Err(status);
        }
        let (token, fault) = (request.token, request.fault);
        let op = MediaOp { token, kind, offset, len, sg_list, placement, fault };
        let Some(done) = namespace.submit(op, request.now) else {
            let operations = Operations { pending: 1, failed: None, bytes, format: None };
            return Ok(Flow::Wait(Wait::Media(operations)));
        };
        self.media_errors += u64::from(done.result.is_err());
        self.release(done.sg_list);
        match done.result {
            Ok(()) => Ok(Flow::Done(Outcome { bytes, ..Outcome::OK })),
            Err(error) => Err(status_of(sqe.opcode, &error)),
        }
    }

    /// Flushes one namespace, or all (Identify Controller, VWC bits 2:1 = 11b).
    fn flush(&mut self, request: &Request<'_>) -> Result<Flow, Status> {
        let targets = if request.sqe.nsid() == Nsid::ALL {
            0..self.namespaces.len()
        } else {
            let index = self.index(request.sqe)?;
            index..index + 1
        };
        Ok(self.start(request, targets.map(|at| (at, MediaKind::Flush, 0, 0))))
    }

    /// Executes a Write Zeroes (NVM, "Write Zeroes command").
    fn write_zeroes(&mut self, request: &Request<'_>) -> Result<Flow, Status> {
        let index = self.index(request.sqe)?;
        let range = BlockRange::from_sqe(request.sqe);
        let (offset, len) = self.namespaces[index]
            .range(range.slba, u64::from(range.lbas().0))
            .ok_or(Status::LBA_OUT_OF_RANGE)?;
        // DLFEAT bit 3: with DEAC the blocks are deallocated, and still read as zeroes. A drive
        // promises that of other commands than a deallocation.
        let may = range.deac && self.drive.is_none();
        let kind = if may { MediaKind::Deallocate } else { MediaKind::WriteZeroes };
        Ok(self.start(request, [(index, kind, offset, len)].into_iter()))
    }

    /// Executes a Dataset Management command (NVM, "Dataset Management command").
    fn dataset_management(&mut self, request: &Request<'_>) -> Result<Flow, Status> {
        let index = self.index(request.sqe)?;
        let command = DatasetManagement::from_sqe(request.sqe);
        let mut ranges = [DatasetRange::new_zeroed(); RANGES_MAX];
        let ranges = &mut ranges[..usize::from(command.nr_z) + 1];
        let len = size_of_val(ranges) as u64;
        let mut collect = Collect { dma: request.dma, to: ranges.as_mut_bytes(), filled: 0 };
        request.walk(Direction::Write, len, &mut collect)?;
        let namespace = &self.namespaces[index];
        let bytes = |range: &DatasetRange| namespace.range(range.slba, u64::from(range.lbas));
        // All ranges are checked before the first takes effect.
        if ranges.iter().any(|range| bytes(range).is_none()) {
            return Err(Status::LBA_OUT_OF_RANGE);
        }
        if !command.deallocate {
            return Ok(Flow::Done(Outcome::OK));
        }
        let shift = namespace.lba_shift;
        let operations = ranges.iter().filter(|range| range.lbas > 0).map(|range| {
            let len = u64::from(range.lbas) << shift;
            (index, MediaKind::Deallocate, range.slba << shift, len)
        });
        Ok(self.start(request, operations))
    }
}
