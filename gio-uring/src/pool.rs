//! The registered KV pool: location of each object in memory and on the devices.

use std::{ops::Range, sync::Arc};

use nvme_driver::{DescriptorMode, Iova, Place};

use crate::{
    abi::Pool,
    arena::{Arena, Block},
    error::Error,
    executor::{ExecutorError, IoExecutor},
    queues::Device,
};

/// A KV pool and the layout of its files.
///
/// Object (file f, row r) of KV block b, with `g = f / group` and `k = f % group`, lies in memory
/// at `row_iova[r] + b * block_stride` and on device `(k + r) % N` at LBA
/// `data_lba[device] + ((g * rows + r) * (group / N) + k / N) * slot_bytes / LBA size`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolDesc {
    /// IOVA of block 0's object of each row (rows = layers times segments).
    pub row_iova: Vec<Iova>,
    /// The same memory as the executor's kernel addresses it: block 0's object of each row. Only
    /// needed for checksums, otherwise empty. Leave it empty for memory that the kernel reads
    /// slowly (a PCIe function's BAR, for a CPU).
    pub row_memory: Vec<Place>,
    /// First LBA of the data region of each device.
    pub data_lba: Vec<u64>,
    /// Bytes from one block's object to the next.
    pub block_stride: u64,
    /// KV blocks in the pool.
    pub blocks: u32,
    /// GPU files in the store.
    pub files: u32,
    /// Files per group: a multiple of the number of devices.
    pub group: u32,
    /// Bytes of one object in memory.
    pub object_bytes: u32,
    /// Bytes of one object on a device: `object_bytes` padded to the LBA size.
    pub slot_bytes: u32,
    /// Maximum bytes of a command that merges neighbouring objects.
    pub run_bytes: u32,
    /// Target of the padding of reads: `slot_bytes - object_bytes` bytes that are never read.
    /// Required with padding if a controller has no SGL bit bucket.
    pub pad_read: Option<Iova>,
    /// Source of the padding of writes: `slot_bytes - object_bytes` zeroes. Required with padding.
    pub pad_write: Option<Iova>,
}

/// A registered pool. Clones share the pool.
#[derive(Debug, Clone)]
pub struct PoolHandle {
    inner: Arc<PoolInner>,
}

#[derive(Debug)]
struct PoolInner {
    block: Block,
    rows: u32,
    blocks: u32,
    files: u32,
    /// True when the kernel can read objects.
    reachable: bool,
    /// LBAs per object on the device with the smallest LBAs.
    slot_lbas: u32,
}

/// Maximum rows of a pool: more than any model has, and small enough that slot numbers fit in 64
/// bits (`GIO_ROWS_MAX` of the kernel).
pub const ROWS_MAX: u32 = 65_535;
/// Offset of the tables in the pool's block.
const ROWS_AT: usize = size_of::<Pool>().next_multiple_of(64);

impl PoolHandle {
    /// Returns the bytes of executor memory that a pool needs.
    pub(crate) fn bytes(desc: &PoolDesc) -> usize {
        let words = desc.row_iova.len() + desc.data_lba.len() + desc.row_memory.len();
        ROWS_AT + words * size_of::<u64>()
    }

    /// Uploads a validated pool to `block`, which holds at least [`PoolHandle::bytes`]. `row_base`
    /// is the result of [`PoolDesc::row_addresses`].
    pub(crate) fn write(
        desc: &PoolDesc,
        row_base: &[u64],
        devices: &[Device],
        block: Block,
    ) -> Result<Self, ExecutorError> {
        let region = block.region();
        let lbas_at = ROWS_AT + desc.row_iova.len() * size_of::<u64>();
        let bases_at = lbas_at + desc.data_lba.len() * size_of::<u64>();
        for (row, &base) in row_base.iter().enumerate() {
            region.put(bases_at, row, base);
        }
        let reachable = !row_base.is_empty();
        for (row, iova) in desc.row_iova.iter().enumerate() {
            region.put(ROWS_AT, row, iova.0);
        }
        for (device, &lba) in desc.data_lba.iter().enumerate() {
            region.put(lbas_at, device, lba);
        }
        let rows = desc.row_iova.len() as u32;
        let pool = Pool {
            row_iova: region.address(ROWS_AT),
            data_lba: region.address(lbas_at),
            block_stride: desc.block_stride,
            blocks: desc.blocks,
            files: desc.files,
            rows,
            devices: desc.data_lba.len() as u32,
            group: desc.group,
            object_bytes: desc.object_bytes,
            slot_bytes: desc.slot_bytes,
            run_bytes: desc.run_bytes,
            pad_read_iova: desc.pad_read.map_or(0, |iova| iova.0),
            pad_write_iova: desc.pad_write.map_or(0, |iova| iova.0),
            row_base: if reachable { region.address(bases_at) } else { 0 },
        };
        region.write(0, pool);
        region.push()?;
        let (blocks, files) = (desc.blocks, desc.files);
        let lbas = devices.iter().map(|device| desc.slot_bytes >> device.lba_shift);
        let slot_lbas = lbas.max().unwrap_or(1);
        let inner = PoolInner { block, rows, blocks, files, reachable, slot_lbas };
        Ok(Self { inner: Arc::new(inner) })
    }

    pub(crate) fn is_of(&self, arena: &Arc<Arena>) -> bool {
        self.inner.block.is_of(arena)
    }

    pub(crate) fn address(&self) -> u64 {
        self.inner.block.region().address(0)
    }

    /// Returns true if the kernel can read objects, as checksums require.
    #[must_use]
    pub fn is_reachable(&self) -> bool {
        self.inner.reachable
    }

    /// Returns the rows of each file.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.inner.rows
    }

    /// Returns the number of KV blocks in the pool.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.inner.blocks
    }

    /// Returns the number of GPU files in the store.
    #[must_use]
    pub fn files(&self) -> u32 {
        self.inner.files
    }

    /// Checks the number of files and the rows of an operation.
    pub(crate) fn check(&self, count: usize, rows: &Range<u32>) -> Result<(), Error> {
        // The kernel numbers the pieces of a run with 32 bits, and a piece may be a single LBA.
        let max = u32::MAX / self.inner.slot_lbas;
        if count > max as usize {
            return Err(Error::count("the map", count, max));
        }
        if rows.is_empty() || rows.end > self.rows() {
            let (Range { start, end }, all) = (rows, self.rows());
            return Err(Error::Argument(format!(
                "rows {start}..{end} were asked for, the pool has {all}; ask for at least one of \
                 them"
            )));
        }
        Ok(())
    }
}

fn wrong<T>(problem: String) -> Result<T, Error> {
    Err(Error::Argument(format!("the KV pool cannot be registered: {problem}")))
}

impl PoolDesc {
    /// Checks that no object can lie outside memory or namespaces, and that every controller can
    /// describe one.
    pub(crate) fn validate(&self, devices: &[Device]) -> Result<(), Error> {
        self.check_shape(devices.len())?;
        self.check_memory()?;
        for (index, device) in devices.iter().enumerate() {
            self.check_device(index, device)?;
            self.check_descriptors(index, device)?;
        }
        Ok(())
    }

    /// Returns [`PoolDesc::row_memory`] as the executor's kernel addresses it.
    pub(crate) fn row_addresses(&self, executor: &dyn IoExecutor) -> Result<Vec<u64>, Error> {
        let (places, iovas) = (&self.row_memory, &self.row_iova);
        if !places.is_empty() && places.len() != iovas.len() {
            let (found, rows) = (places.len(), iovas.len());
            return wrong(format!("row_memory has {found} rows; {rows} or none are needed"));
        }
        let mut addresses = Vec::with_capacity(places.len());
        for (row, (place, iova)) in places.iter().zip(iovas).enumerate() {
            if place.iova != *iova {
                let found = place.iova;
                return wrong(format!("row {row} is at IOVA {iova}, and row_memory says {found}"));
            }
            let address = executor.address(place);
            let Some(address) = address.filter(|at| self.end_of_row(*at).is_some()) else {
                let name = executor.name();
                return wrong(format!(
                    "the {name} executor cannot reach row {row} ({place:?}); leave row_memory \
                     empty, and do without checksums"
                ));
            };
            addresses.push(address);
        }
        Ok(addresses)
    }

    /// Returns the end address of a row that begins at `start`, or `None` on overflow.
    fn end_of_row(&self, start: u64) -> Option<u64> {
        let last = u64::from(self.blocks - 1).checked_mul(self.block_stride)?;
        last.checked_add(self.object_bytes.into())?.checked_add(start)
    }

    fn check_shape(&self, devices: usize) -> Result<(), Error> {
        let Self { group, .. } = *self;
        if self.data_lba.len() != devices {
            return Err(Error::devices("the pool", self.data_lba.len(), devices));
        }
        let rows = self.row_iova.len();
        if !(1..=ROWS_MAX as usize).contains(&rows) {
            return wrong(format!("it has {rows} rows; 1 to {ROWS_MAX} work"));
        }
        for (what, found) in [
            ("blocks", self.blocks),
            ("files", self.files),
            ("bytes an object", self.object_bytes),
            ("files a group", group),
        ] {
            if found == 0 {
                return wrong(format!("it has 0 {what}; at least 1 is needed"));
            }
        }
        if !(group as usize).is_multiple_of(devices) {
            return wrong(format!(
                "a group has {group} files; a multiple of the {devices} devices is needed"
            ));
        }
        if self.slot_bytes < self.object_bytes {
            return wrong(format!(
                "a slot of {} bytes cannot hold an object of {}; pad objects up, not down",
                self.slot_bytes, self.object_bytes
            ));
        }
        Ok(())
    }

    fn check_memory(&self) -> Result<(), Error> {
        let (stride, object) = (self.block_stride, u64::from(self.object_bytes));
        if self.blocks > 1 && stride < object {
            return wrong(format!(
                "blocks are {stride} bytes apart, less than an object of {object}; objects would \
                 overlap"
            ));
        }
        for (row, iova) in self.row_iova.iter().enumerate() {
            if self.end_of_row(iova.0).is_none() {
                return wrong(format!(
                    "row {row} from IOVA {iova} with {} blocks {stride} bytes apart leaves the \
                     64-bit address space",
                    self.blocks
                ));
            }
        }
        let padding = u64::from(self.slot_bytes) - object;
        for pad in [self.pad_read, self.pad_write].into_iter().flatten() {
            if pad.0.checked_add(padding).is_none() {
                return wrong(format!("padding at IOVA {pad} leaves the 64-bit address space"));
            }
        }
        Ok(())
    }

    fn check_device(&self, index: usize, device: &Device) -> Result<(), Error> {
        let lba_bytes = 1u32 << device.lba_shift;
        if !self.slot_bytes.is_multiple_of(lba_bytes) {
            return wrong(format!(
                "slots of {} bytes are not whole LBAs of {lba_bytes} bytes on device {index}; pad \
                 them up",
                self.slot_bytes
            ));
        }
        let devices = self.data_lba.len() as u64;
        let (group, rows) = (u64::from(self.group), self.row_iova.len() as u64);
        let last = u64::from(self.files - 1);
        // The last slot in use: row rows - 1 of the last file (or of its neighbour on the device).
        let slots = (last / group)
            .checked_mul(rows)
            .and_then(|before| before.checked_add(rows - 1))
            .and_then(|rows| rows.checked_mul(group / devices))
            .and_then(|slots| slots.checked_add(last % group / devices + 1));
        let lbas = slots
            .and_then(|slots| slots.checked_mul(u64::from(self.slot_bytes >> device.lba_shift)))
            .and_then(|lbas| lbas.checked_add(self.data_lba[index]));
        match lbas {
            Some(end) if end <= device.lbas => Ok(()),
            end => wrong(format!(
                "{} files of {rows} rows from LBA {} on end at LBA {}, device {index} has {}; \
                 register fewer files",
                self.files,
                self.data_lba[index],
                end.map_or("2^64 or more".to_owned(), |end| end.to_string()),
                device.lbas
            )),
        }
    }

    fn check_descriptors(&self, index: usize, device: &Device) -> Result<(), Error> {
        let padding = u64::from(self.slot_bytes - self.object_bytes);
        let unit = match device.mode {
            DescriptorMode::Prp { .. } => {
                if padding > 0 {
                    return wrong(format!(
                        "slots have {padding} bytes of padding, which PRPs (device {index}) cannot \
                         describe; use SGLs or objects of whole LBAs"
                    ));
                }
                // A PRP entry is a multiple of four bytes. Objects that are not whole pages are not
                // merged: only the first entry of a list may begin inside a page.
                4
            }
            DescriptorMode::Sgl { granularity, bit_bucket } => {
                let read = bit_bucket || self.pad_read.is_some();
                if padding > 0 && !(read && self.pad_write.is_some()) {
                    return wrong(format!(
                        "slots have {padding} bytes of padding, but there is no memory for it; \
                         give pad_write{}",
                        if read { "" } else { " and pad_read" }
                    ));
                }
                u64::from(granularity)
            }
        };
        let stride = if self.blocks > 1 { self.block_stride } else { 0 };
        let pads = [self.pad_read, self.pad_write].map(|pad| pad.map_or(0, |iova| iova.0));
        let mut named = vec![
            ("block_stride", stride),
            ("object_bytes", u64::from(self.object_bytes)),
            ("the padding", padding),
            ("pad_read", if padding > 0 { pads[0] } else { 0 }),
            ("pad_write", if padding > 0 { pads[1] } else { 0 }),
        ];
        named.extend(self.row_iova.iter().map(|iova| ("row_iova", iova.0)));
        match named.into_iter().find(|(_, value)| !value.is_multiple_of(unit)) {
            None => Ok(()),
            Some((name, value)) => wrong(format!(
                "{name} is {value:#x}; device {index} describes memory in multiples of {unit} \
                 bytes ({:?})",
                device.mode
            )),
        }
    }
}
