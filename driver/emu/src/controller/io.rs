//! Commands of the I/O queues (NVM Command Set).

use nvme_driver::Nanos;
use nvme_spec::{
    ids::Nsid,
    nvm::{BlockRange, DatasetManagement, DatasetRange, Direction, NvmOpcode},
    sqe::Sqe,
    status::Status,
};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    Controller,
    command::{Command, Flow, Outcome, Ticket, Wait},
    transfer::{self, Collect, Gather},
};
use crate::{
    domain::DmaAccess,
    media::{DataFault, MediaDone, MediaError, MediaKind, MediaOp},
};

/// `ENOSPC` of Linux, as [`MediaError::Os`] carries it.
const ENOSPC: i32 = 28;
/// Largest number of ranges in a dataset management command.
const RANGES_MAX: usize = 256;

/// Returns the status of a command whose medium failed.
pub(super) fn status_of(opcode: u8, error: &MediaError) -> Status {
    let reads = matches!(NvmOpcode(opcode), NvmOpcode::READ | NvmOpcode::COMPARE);
    match error {
        // NVM, "Capacity Exceeded".
        MediaError::Os { errno: ENOSPC, .. } => Status::CAPACITY_EXCEEDED,
        MediaError::Os { .. } if reads => Status::UNRECOVERED_READ_ERROR,
        MediaError::Os { .. } => Status::WRITE_FAULT,
        MediaError::Failed { .. } if reads => Status::UNRECOVERED_READ_ERROR.with_dnr(),
        MediaError::Failed { .. } => Status::WRITE_FAULT.with_dnr(),
        // Base, "Data Transfer Error": the data could not be copied to or from GPU memory.
        MediaError::Copy(_) | MediaError::GpuLost(_) => Status::DATA_TRANSFER_ERROR,
        _ => Status::INTERNAL_ERROR,
    }
}

/// Returns the outcome of an operation that its medium finished immediately.
fn outcome(opcode: u8, done: &MediaDone, bytes: u64) -> Outcome {
    match &done.result {
        Ok(()) => Outcome { bytes, ..Outcome::OK },
        Err(error) => Outcome::failed(status_of(opcode, error)),
    }
}

impl Controller {
    #[inline]
    pub(super) fn run_io(
        &mut self,
        dma: &DmaAccess<'_>,
        now: Nanos,
        ticket: Ticket,
        sqe: &Sqe,
        fault: DataFault,
    ) -> Flow {
        // "Fused Operations": FUSES is 0, so none is supported.
        if sqe.fuse() != 0 {
            return Err(Status::INVALID_FIELD).into();
        }
        match NvmOpcode(sqe.opcode) {
            NvmOpcode::READ | NvmOpcode::WRITE => self.read_write(dma, now, ticket, sqe, fault),
            NvmOpcode::FLUSH => self.flush(now, ticket, sqe),
            NvmOpcode::WRITE_ZEROES => self.write_zeroes(now, ticket, sqe),
            NvmOpcode::IO_MANAGEMENT_RECEIVE => self.io_management_receive(dma, sqe),
            NvmOpcode::DATASET_MANAGEMENT => self.dataset_management(dma, now, ticket, sqe),
            _ => Err(Status::INVALID_OPCODE),
        }
        .into()
    }

    /// Returns the index of the namespace of `sqe`.
    #[inline]
    pub(super) fn namespace_index(&self, sqe: &Sqe) -> Result<usize, Status> {
        // "Namespace Identifier": 0 and FFFFFFFFh wrap to nonexistent indices.
        let index = sqe.nsid.wrapping_sub(1) as usize;
        match self.namespaces.get(index) {
            None => Err(Status::INVALID_NAMESPACE),
            Some(namespace) if namespace.formatting => Err(Status::FORMAT_IN_PROGRESS),
            Some(_) => Ok(index),
        }
    }

    /// Executes a read or a write (NVM, "Read command", "Write command").
    #[inline]
    fn read_write(
        &mut self,
        dma: &DmaAccess<'_>,
        now: Nanos,
        ticket: Ticket,
        sqe: &Sqe,
        fault: DataFault,
    ) -> Result<Flow, Status> {
        let index = self.namespace_index(sqe)?;
        let placement = self.placement_handle(sqe)?;
        let namespace = &mut self.namespaces[index];
        let range = BlockRange::from_sqe(sqe);
        let lbas = u64::from(range.lbas().0);
        // "Identify Controller", MDTS: a larger transfer is an Invalid Field.
        if lbas << namespace.lba_shift > self.transfer_bytes_max {
            return Err(Status::INVALID_FIELD);
        }
        let (offset, len) = namespace.range(range.slba, lbas).ok_or(Status::LBA_OUT_OF_RANGE)?;
        let (direction, kind) = if NvmOpcode(sqe.opcode) == NvmOpcode::READ {
            (Direction::Read, MediaKind::Read)
        } else {
            let fua = range.fua || self.write_through;
            (Direction::Write, MediaKind::Write { fua })
        };
        let mut sg_list = self.spare.pop().unwrap_or_default();
        let mut gather = Gather { dma, sg_list: &mut sg_list, holes: 0 };
        let walked = transfer::walk(dma, &self.rules, sqe, direction, len, &mut gather);
        let bytes = len - gather.holes.min(len);
        if let Err(status) = walked {
            // The held access keeps all of them mapped: this frees nothing.
            sg_list.clear();
            self.spare.push(sg_list);
            return Err(status);
        }
        let token = self.commands.next_token();
        let op = MediaOp { token, kind, offset, len, sg_list, placement, fault };
        Ok(match namespace.submit(op, now) {
            Some(mut done) => {
                let outcome = outcome(sqe.opcode, &done, bytes);
                self.logs.media_errors += u64::from(done.result.is_err());
                done.sg_list.clear();
                self.spare.push(done.sg_list);
                Flow::Done(outcome)
            }
            None => {
                let wait = Wait::Media { operations: 1, failed: None, bytes, format: None };
                self.commands.insert(Command { ticket, wait });
                Flow::Pending
            }
        })
    }

    /// Flushes one namespace, or all (Identify Controller, VWC bits 2:1 = 11b).
    fn flush(&mut self, now: Nanos, ticket: Ticket, sqe: &Sqe) -> Result<Flow, Status> {
        let all = sqe.nsid() == Nsid::ALL;
        let targets = if all {
            0..self.namespaces.len()
        } else {
            let index = self.namespace_index(sqe)?;
            index..index + 1
        };
        Ok(self.run_operations(now, ticket, targets.map(|at| (at, MediaKind::Flush, 0, 0))))
    }

    /// Executes a Write Zeroes (NVM, "Write Zeroes command").
    fn write_zeroes(&mut self, now: Nanos, ticket: Ticket, sqe: &Sqe) -> Result<Flow, Status> {
        let index = self.namespace_index(sqe)?;
        let range = BlockRange::from_sqe(sqe);
        let (offset, len) = self.namespaces[index]
            .range(range.slba, u64::from(range.lbas().0))
            .ok_or(Status::LBA_OUT_OF_RANGE)?;
        // DLFEAT bit 3: with DEAC the blocks are deallocated, and still read as zeroes.
        let kind = if range.deac { MediaKind::Deallocate } else { MediaKind::WriteZeroes };
        Ok(self.run_operations(now, ticket, [(index, kind, offset, len)].into_iter()))
    }

    /// Executes a Dataset Management command (NVM, "Dataset Management command").
    fn dataset_management(
        &mut self,
        dma: &DmaAccess<'_>,
        now: Nanos,
        ticket: Ticket,
        sqe: &Sqe,
    ) -> Result<Flow, Status> {
        let index = self.namespace_index(sqe)?;
        let command = DatasetManagement::from_sqe(sqe);
        let mut ranges = [DatasetRange::new_zeroed(); RANGES_MAX];
        let ranges = &mut ranges[..usize::from(command.nr_z) + 1];
        let len = size_of_val(ranges) as u64;
        let mut collect = Collect { dma, to: ranges.as_mut_bytes(), filled: 0 };
        transfer::walk(dma, &self.rules, sqe, Direction::Write, len, &mut collect)?;
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
        Ok(self.run_operations(now, ticket, operations))
    }

    /// Starts operations without data: (namespace, kind, offset, length).
    pub(super) fn run_operations(
        &mut self,
        now: Nanos,
        ticket: Ticket,
        operations: impl Iterator<Item = (usize, MediaKind, u64, u64)>,
    ) -> Flow {
        let token = self.commands.next_token();
        let (mut pending, mut failed) = (0, None);
        for (index, kind, offset, len) in operations {
            // Empty, but still from the pool, because media return it to the pool.
            let sg_list = self.spare.pop().unwrap_or_default();
            let fault = DataFault::None;
            let op = MediaOp { token, kind, offset, len, sg_list, placement: 0, fault };
            match self.namespaces[index].submit(op, now) {
                None => pending += 1,
                Some(done) => {
                    self.spare.push(done.sg_list);
                    if let Err(error) = done.result {
                        self.logs.media_errors += 1;
                        failed.get_or_insert_with(|| status_of(ticket.opcode, &error));
                    }
                }
            }
        }
        if pending == 0 {
            return Flow::Done(failed.map_or(Outcome::OK, Outcome::failed));
        }
        let wait = Wait::Media { operations: pending, failed, bytes: 0, format: None };
        self.commands.insert(Command { ticket, wait });
        Flow::Pending
    }
}
