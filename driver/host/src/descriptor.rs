//! Data pointers of commands (DPTR): scatter gather lists and physical region pages, behind one
//! function.
//!
//! The builders are pure: they read ranges of I/O virtual addresses and write dwords into a
//! [`DescriptorArea`], which is DMA memory in the driver and a vector in tests.

mod prp;
mod sgl;
#[cfg(test)]
mod tests;

use nvme_spec::sqe::{DataPointer, Psdt, Sqe};

use crate::{
    dma::{Iova, IovaRange},
    grant::DescriptorMode,
    platform::buffer::Buffer,
};

/// Bytes of one SGL descriptor.
pub const SGL_DESCRIPTOR_BYTES: u32 = 16;
/// Bytes of one PRP entry.
pub const PRP_ENTRY_BYTES: u32 = 8;

/// The DPTR field of a command and the matching PSDT bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Descriptor {
    /// The data pointer.
    pub dptr: DataPointer,
    /// Interpretation of the data pointer.
    pub psdt: Psdt,
}

impl Descriptor {
    /// Returns `sqe` with this data pointer.
    #[must_use]
    pub fn put_into(self, mut sqe: Sqe) -> Sqe {
        sqe.dptr = self.dptr;
        sqe.with_psdt(self.psdt)
    }
}

/// Memory for the part of a descriptor that does not fit in the command.
pub trait DescriptorArea {
    /// Returns the I/O virtual address of the first byte. Aligned to 8 bytes (PRP) or 16 (SGL).
    fn iova(&self) -> Iova;
    /// Returns the length in bytes.
    fn len(&self) -> usize;
    /// Returns whether the area is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Writes the `index`th group of 8 bytes. The builders stay below `len() / 8`.
    fn write64(&mut self, index: usize, value: u64);
}

/// Part of a DMA buffer as a descriptor area.
#[derive(Debug)]
pub struct BufferArea<'a> {
    buffer: &'a mut Buffer,
    offset: usize,
    len: usize,
}

impl<'a> BufferArea<'a> {
    /// Uses `len` bytes of `buffer` from `offset` on, cut at the buffer's end.
    #[must_use]
    pub fn new(buffer: &'a mut Buffer, offset: usize, len: usize) -> Self {
        let offset = offset.min(buffer.len());
        let len = len.min(buffer.len() - offset);
        Self { buffer, offset, len }
    }
}

impl DescriptorArea for BufferArea<'_> {
    fn iova(&self) -> Iova {
        self.buffer.iova().offset(self.offset as u64)
    }

    fn len(&self) -> usize {
        self.len
    }

    fn write64(&mut self, index: usize, value: u64) {
        let written = self.buffer.write(self.offset + index * 8, &value.to_le_bytes());
        assert!(written.is_ok(), "the builders check the area's length first");
    }
}

/// Reasons for which a transfer cannot be described.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// The transfer has no bytes.
    #[error("the transfer has no bytes, or an empty part (part {part})")]
    Empty {
        /// Index of the part; 0 if there are none.
        part: usize,
    },
    /// One part is longer than a descriptor can express, or wraps around the address space.
    #[error("part {part} of {len} bytes at {iova} is longer than one descriptor can say")]
    TooLong {
        /// Index of the part.
        part: usize,
        /// Its address.
        iova: Iova,
        /// Its length in bytes.
        len: u64,
    },
    /// A part violates the dword granularity of the controller's SGLs.
    #[error(
        "part {part} ({len} bytes at {iova}) is not a multiple of {granularity} bytes, \
         which is all this controller's SGLs can address"
    )]
    Granularity {
        /// Index of the part.
        part: usize,
        /// Its address.
        iova: Iova,
        /// Its length in bytes.
        len: u64,
        /// Required granularity of address and length.
        granularity: u32,
    },
    /// PRP: a part begins or ends inside a page where only whole pages are possible.
    #[error(
        "part {part} ({len} bytes at {iova}) begins or ends inside a page of {page_bytes} bytes; \
         PRPs need whole pages between the first and the last, and dword aligned addresses: use \
         SGLs or aligned memory"
    )]
    NotPages {
        /// Index of the part.
        part: usize,
        /// Its address.
        iova: Iova,
        /// Its length in bytes.
        len: u64,
        /// The controller's page size.
        page_bytes: u32,
    },
    /// The descriptor area is too small for that many parts or pages.
    #[error("the transfer needs {need} descriptor bytes, its area has {have}; split the transfer")]
    AreaTooSmall {
        /// Bytes needed.
        need: usize,
        /// Bytes available.
        have: usize,
    },
    /// The descriptor area itself is misaligned.
    #[error("the descriptor area at {iova} is not aligned to {align} bytes")]
    AreaUnaligned {
        /// Its address.
        iova: Iova,
        /// Alignment needed.
        align: u64,
    },
}

/// Describes `parts`, in order, in the given mode. Overflow from the command goes to `area`;
/// segments of an SGL and pages of a PRP list are at most `segment_bytes` long and chained.
///
/// # Errors
/// Returns [`DescriptorError`]; the contents of the area are then meaningless.
pub fn describe(
    mode: DescriptorMode,
    parts: &[IovaRange],
    segment_bytes: u32,
    area: &mut impl DescriptorArea,
) -> Result<Descriptor, DescriptorError> {
    if parts.is_empty() {
        return Err(DescriptorError::Empty { part: 0 });
    }
    for (part, range) in parts.iter().enumerate() {
        if range.len == 0 {
            return Err(DescriptorError::Empty { part });
        }
        if range.iova.0.checked_add(range.len).is_none() || range.len > u64::from(u32::MAX) {
            return Err(DescriptorError::TooLong { part, iova: range.iova, len: range.len });
        }
    }
    match mode {
        DescriptorMode::Sgl { granularity, .. } => {
            sgl::describe(parts, granularity, segment_bytes, area)
        }
        DescriptorMode::Prp { page_bytes } => prp::describe(parts, page_bytes, area),
    }
}

/// Returns the largest transfer, in bytes, that `area_bytes` of descriptors can describe at any
/// alignment, or `None` if the area sets no limit (an SGL entry can be as long as the transfer).
#[must_use]
pub fn transfer_bytes_max(mode: DescriptorMode, area_bytes: u32) -> Option<u64> {
    match mode {
        DescriptorMode::Sgl { .. } => None,
        // PRP1 may cover as little as four bytes, so only the list counts. Two pages need no list.
        DescriptorMode::Prp { page_bytes } => {
            let chained = area_bytes.div_ceil(page_bytes).saturating_sub(1);
            let entries = u64::from((area_bytes / PRP_ENTRY_BYTES).saturating_sub(chained)).max(1);
            Some(entries * u64::from(page_bytes))
        }
    }
}
