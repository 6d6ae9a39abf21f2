#![allow(unsafe_code, reason = "moves data in memory that the ring laid out")]
//! An operation on one warp: which objects are its share, and where each is.
//!
//! Does what `include/gio/cursor.cuh` does for NVMe commands.

use std::ptr::{self, NonNull};

use gio_uring::abi::{self, Affine, IoCtx, Iocb, Pool, Warp};
use nvme_driver::Iova;

use super::{Reach, words::read};

/// More parts than this are refused by the kernel (`UIO_MAXIOV`); an object has at most two.
const OBJECTS_MAX: u32 = 512;
/// Keeps slot numbers within 64 bits.
const ROWS_MAX: u32 = 65_535;

/// Neighbours on the file: one read or write.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// Index of the first IOCTX.
    pub(super) first: u32,
    pub(super) count: u32,
    /// Affine: row of the pool.
    pub(super) row: u32,
    /// Offset in the file.
    pub(super) offset: u64,
    /// Bytes of each object on the file.
    pub(super) slot_bytes: u32,
}

impl Extent {
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.count) * u64::from(self.slot_bytes)
    }

    /// Returns the indices of the IOCTXs.
    pub(super) fn indices(&self) -> std::ops::Range<u32> {
        self.first..self.first + self.count
    }
}

/// The next part of an operation.
#[derive(Debug, Clone, Copy)]
pub(super) enum Next {
    Extent(Extent),
    /// An IOCTX that names no place.
    Invalid(u32),
}

/// Memory of an object, and its place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Object {
    pub(super) memory: NonNull<u8>,
    /// Bytes in memory. On the file, zeroes follow up to the length of a slot.
    pub(super) bytes: usize,
    offset: u64,
    slot_bytes: u32,
}

/// An operation in progress on one warp.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) id: u32,
    pub(super) iocb: Iocb,
    pool: Pool,
    device: u32,
    part: u32,
    parts: u32,
    lba_shift: u32,
    lbas: u64,
    /// It makes no sense as a whole.
    is_invalid: bool,
    /// Rows left, with the current one.
    rows: std::ops::Range<u32>,
    /// IOCTXs left of the current row.
    left: std::ops::Range<u32>,
    /// Reads and writes in the kernel.
    pub(super) outstanding: u32,
    pub(super) errors: u32,
    pub(super) error: u64,
    pub(super) objects: u64,
}

impl Op {
    /// # Safety
    /// `iocb` is that of IOCB `id` of the ring, and `warp` one of its warps; the addresses in it
    /// are valid until the operation completes.
    pub(super) unsafe fn new(id: u32, iocb: Iocb, warp: &Warp) -> Self {
        let is_affine = iocb.kind == abi::KIND_AFFINE;
        // SAFETY: the caller's promise.
        let pool = if is_affine { unsafe { read(iocb.pool, 0) } } else { Pool::default() };
        let Warp { device, part, parts, lba_shift, lbas, .. } = *warp;
        let mut op = Self {
            id,
            iocb,
            pool,
            device,
            part,
            parts,
            lba_shift,
            lbas,
            is_invalid: false,
            rows: 0..if is_affine { iocb.row_count } else { 1 },
            left: 0..0,
            outstanding: 0,
            errors: 0,
            error: 0,
            objects: 0,
        };
        op.is_invalid = !op.is_usable();
        if op.is_invalid {
            // Rejected as one row, by the number of the device.
            op.rows = 0..1;
        }
        op.left = op.share();
        op
    }

    pub(super) fn is_read(&self) -> bool {
        self.iocb.opcode == abi::OP_READ
    }

    fn is_affine(&self) -> bool {
        self.iocb.kind == abi::KIND_AFFINE
    }

    /// Errors of the host must not become addresses.
    fn is_usable(&self) -> bool {
        let Self { iocb, pool, .. } = self;
        let known = [abi::OP_READ, abi::OP_WRITE].contains(&iocb.opcode);
        if !self.is_affine() {
            return known && iocb.kind == abi::KIND_EXPLICIT && iocb.checksums == 0;
        }
        let lba_bytes = 1u32 << self.lba_shift;
        known
            && pool.devices != 0
            && pool.devices == iocb.devices
            && self.device < pool.devices
            && pool.group != 0
            && pool.group.is_multiple_of(pool.devices)
            && pool.rows <= ROWS_MAX
            && iocb.row_first <= pool.rows
            && iocb.row_count <= pool.rows - iocb.row_first
            && pool.object_bytes != 0
            && pool.object_bytes <= pool.slot_bytes
            && pool.slot_bytes.is_multiple_of(lba_bytes)
            && (iocb.checksums == 0 || pool.row_base != 0)
    }

    /// Returns the current row of the pool, or its first one.
    fn row(&self) -> u32 {
        self.iocb.row_first + self.rows.start
    }

    /// Returns the class of files whose objects of a row are on this device.
    fn class(&self, row: u32) -> u32 {
        let devices = self.pool.devices;
        (self.device + devices - row % devices) % devices
    }

    /// Returns this warp's share of the current row.
    fn share(&self) -> std::ops::Range<u32> {
        if self.rows.is_empty() {
            return 0..0;
        }
        let by_row = self.is_affine() && !self.is_invalid;
        let run = if by_row { self.class(self.row()) } else { self.device };
        if run >= self.iocb.devices {
            return 0..0;
        }
        // SAFETY: `new`: it has one more entry than devices.
        let [first, end]: [u32; 2] =
            [run, run + 1].map(|at| unsafe { read(self.iocb.starts, at as usize) });
        let (length, parts) = (u64::from(end - first), u64::from(self.parts));
        let at = |part: u32| first + (length * u64::from(part) / parts) as u32;
        at(self.part)..at(self.part + 1)
    }

    /// Returns true if all of it was returned by [`Op::next`].
    pub(super) fn is_generated(&self) -> bool {
        self.rows.is_empty()
    }

    /// Goes on to the next row that has something to do.
    fn settle(&mut self) {
        while self.left.is_empty() && !self.rows.is_empty() {
            self.rows.start += 1;
            self.left = self.share();
        }
    }

    /// Returns the next part; `None` at the end.
    pub(super) fn next(&mut self, reach: &Reach) -> Option<Next> {
        self.settle();
        if self.left.is_empty() {
            return None;
        }
        let (row, first) = (self.row(), self.left.start);
        let object = if self.is_invalid { None } else { self.object(row, first, reach) };
        self.left.start += 1;
        let Some(Object { offset, slot_bytes, .. }) = object else {
            self.settle();
            return Some(Next::Invalid(first));
        };
        let mut run = Extent { first, count: 1, row, offset, slot_bytes };
        while self.is_affine()
            && !self.left.is_empty()
            && run.count < OBJECTS_MAX
            && run.bytes() + u64::from(slot_bytes) <= u64::from(self.pool.run_bytes)
            && let Some(object) = self.object(row, self.left.start, reach)
            && object.offset == offset + run.bytes()
        {
            run.count += 1;
            self.left.start += 1;
        }
        self.settle();
        Some(Next::Extent(run))
    }

    /// Finds an object.
    pub(super) fn object(&self, row: u32, index: u32, reach: &Reach) -> Option<Object> {
        if !self.is_affine() {
            return self.explicit(index, reach);
        }
        let pool = &self.pool;
        // SAFETY: `new`: IOCTXs, and tables of devices and rows.
        let Affine { block, file } = unsafe { read(self.iocb.ioctx, index as usize) };
        let (group, k) = (file / pool.group, file % pool.group);
        // In a wrong class, the place would be another file's.
        let is_right = block < pool.blocks
            && file < pool.files
            && k % pool.devices == self.class(row)
            && row < pool.rows;
        if !is_right {
            return None;
        }
        let in_row = u64::from(pool.group / pool.devices);
        let slot = (u64::from(group) * u64::from(pool.rows) + u64::from(row)) * in_row
            + u64::from(k / pool.devices);
        // SAFETY: as above.
        let data_lba: u64 = unsafe { read(pool.data_lba, self.device as usize) };
        let slot_lbas = u64::from(pool.slot_bytes >> self.lba_shift);
        let lba = data_lba + slot * slot_lbas;
        let offset = self.offset(lba, slot_lbas)?;
        let (bytes, from) = (pool.object_bytes as usize, u64::from(block) * pool.block_stride);
        let memory = if pool.row_base != 0 {
            // SAFETY: as above.
            let base: u64 = unsafe { read(pool.row_base, row as usize) };
            NonNull::new(ptr::with_exposed_provenance_mut((base + from) as usize))
        } else {
            // SAFETY: as above.
            let base: u64 = unsafe { read(pool.row_iova, row as usize) };
            reach(Iova(base + from), bytes)
        };
        Some(Object { memory: memory?, bytes, offset, slot_bytes: pool.slot_bytes })
    }

    fn explicit(&self, index: u32, reach: &Reach) -> Option<Object> {
        // SAFETY: `new`.
        let IoCtx { iova, lba, bytes, device } = unsafe { read(self.iocb.ioctx, index as usize) };
        let lba_bytes = 1u32 << self.lba_shift;
        let is_right = device == self.device
            && bytes != 0
            && bytes.is_multiple_of(lba_bytes)
            && bytes <= self.iocb.bytes_max;
        if !is_right {
            return None;
        }
        let offset = self.offset(lba, u64::from(bytes >> self.lba_shift))?;
        let memory = reach(Iova(iova), bytes as usize)?;
        Some(Object { memory, bytes: bytes as usize, offset, slot_bytes: bytes })
    }

    /// Returns the offset of LBAs in the file, if the namespace has them.
    fn offset(&self, lba: u64, lbas: u64) -> Option<u64> {
        let end = lba.checked_add(lbas)?;
        (end <= self.lbas).then_some(lba << self.lba_shift)
    }

    /// Returns the address of an object's checksum, if there are any.
    pub(super) fn checksum(&self, row: u32, index: u32) -> Option<u64> {
        let at = u64::from(row) * u64::from(self.iocb.count) + u64::from(index);
        let address = self.iocb.checksums + at * size_of::<u32>() as u64;
        (self.iocb.checksums != 0).then_some(address)
    }
}
