//! Scatter gather lists (Base, "Scatter Gather List").

use nvme_driver::Iova;
use nvme_spec::{
    nvm::Direction,
    sgl::{SglDescriptor, SglKind},
    sqe::DataPointer,
    status::Status,
};
use zerocopy::IntoBytes;

use super::{Rules, Sink, refused};
use crate::{config::SglSupport, domain::DmaAccess};

/// Bytes of a descriptor.
const ENTRY: u32 = 16;
/// Descriptors read from a segment at a time.
const CHUNK: usize = 32;
/// Limit of segments per list, which ends cyclic lists.
const SEGMENTS_MAX: u32 = 4096;
/// Limit of descriptors per list; empty ones are legal and would otherwise be unlimited.
const DESCRIPTORS_MAX: u32 = 1 << 17;

/// Passes the `len` bytes that `dptr` names to `sink`, descriptor by descriptor.
#[inline]
pub(in super::super) fn walk(
    dma: &DmaAccess<'_>,
    rules: &Rules,
    dptr: DataPointer,
    direction: Direction,
    len: u64,
    sink: &mut impl Sink,
) -> Result<(), Status> {
    let first = dptr.as_sgl();
    let mut walk = Walk { rules, direction, left: len, sink };
    match first.kind() {
        SglKind::SEGMENT | SglKind::LAST_SEGMENT => walk.segments(dma, first)?,
        _ => walk.item(&first)?,
    }
    // "Data SGL Length Invalid": an SGL too short for the data.
    if walk.left == 0 { Ok(()) } else { Err(Status::DATA_SGL_LENGTH_INVALID) }
}

struct Walk<'a, S> {
    rules: &'a Rules,
    direction: Direction,
    left: u64,
    sink: &'a mut S,
}

impl<S: Sink> Walk<'_, S> {
    fn segments(&mut self, dma: &DmaAccess<'_>, first: SglDescriptor) -> Result<(), Status> {
        let mut pointer = first;
        let (mut segments, mut descriptors) = (0u32, 0u32);
        loop {
            let last = pointer.kind() == SglKind::LAST_SEGMENT;
            let count = segment_entries(&pointer)?;
            segments += 1;
            descriptors = descriptors.saturating_add(count);
            if segments > SEGMENTS_MAX || descriptors > DESCRIPTORS_MAX {
                return Err(Status::INVALID_SGL_DESCRIPTOR_COUNT);
            }
            let items = if last { count } else { count - 1 };
            self.items(dma, pointer.address, items, last)?;
            if last {
                return Ok(());
            }
            // "SGL Segment descriptor": its last descriptor points to the next segment.
            let at = pointer.address.wrapping_add(u64::from(items * ENTRY));
            let mut next = SglDescriptor::default();
            dma.read(Iova(at), next.as_mut_bytes()).map_err(refused)?;
            if !matches!(next.kind(), SglKind::SEGMENT | SglKind::LAST_SEGMENT) {
                return Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
            }
            pointer = next;
        }
    }

    /// Processes `count` descriptors at `address`, none of which may point to a segment.
    fn items(
        &mut self,
        dma: &DmaAccess<'_>,
        address: u64,
        count: u32,
        last: bool,
    ) -> Result<(), Status> {
        let mut chunk = [SglDescriptor::default(); CHUNK];
        let mut done = 0;
        while done < count {
            let now = (count - done).min(CHUNK as u32);
            let part = &mut chunk[..now as usize];
            let at = address.wrapping_add(u64::from(done * ENTRY));
            dma.read(Iova(at), part.as_mut_bytes()).map_err(refused)?;
            for descriptor in part {
                match descriptor.kind() {
                    // "Invalid SGL Segment Descriptor": a segment after the last one;
                    // "Invalid Number of SGL Descriptors": one in the middle of a segment.
                    SglKind::SEGMENT | SglKind::LAST_SEGMENT if last => {
                        return Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
                    }
                    SglKind::SEGMENT | SglKind::LAST_SEGMENT => {
                        return Err(Status::INVALID_SGL_DESCRIPTOR_COUNT);
                    }
                    _ => self.item(descriptor)?,
                }
            }
            done += now;
        }
        Ok(())
    }

    #[inline]
    fn item(&mut self, descriptor: &SglDescriptor) -> Result<(), Status> {
        // "SGL Descriptor Sub Type": 0 is an address; offsets need SGLS bit 20.
        if descriptor.subtype() != 0 {
            return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID);
        }
        match descriptor.kind() {
            SglKind::DATA_BLOCK => self.data_block(descriptor),
            // "SGL Bit Bucket descriptor": advertised by SGLS bit 16. It discards read data; in a
            // source it counts as empty.
            SglKind::BIT_BUCKET if self.rules.bit_bucket => match self.direction {
                Direction::Read => {
                    self.take(descriptor.length)?;
                    if descriptor.length > 0 {
                        self.sink.hole(descriptor.length as usize);
                    }
                    Ok(())
                }
                Direction::Write => Ok(()),
            },
            _ => Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
        }
    }

    #[inline]
    fn data_block(&mut self, descriptor: &SglDescriptor) -> Result<(), Status> {
        let SglDescriptor { address, length, .. } = *descriptor;
        // "SGL Data Block Granularity Invalid", with dword support only (SGLS 1:0 = 10b).
        let odd = address & 3 != 0 || length & 3 != 0;
        if odd && self.rules.sgl == SglSupport::Dword {
            return Err(Status::SGL_DATA_BLOCK_GRANULARITY_INVALID);
        }
        self.take(length)?;
        if length == 0 {
            return Ok(());
        }
        self.sink.data(Iova(address), length as usize).map_err(refused)
    }

    /// Counts `length` bytes; an SGL longer than the data is an error without SGLS bit 18.
    #[inline]
    fn take(&mut self, length: u32) -> Result<(), Status> {
        self.left =
            self.left.checked_sub(u64::from(length)).ok_or(Status::DATA_SGL_LENGTH_INVALID)?;
        Ok(())
    }
}

/// Returns the number of descriptors in the segment at `pointer`; "Invalid SGL Segment Descriptor"
/// if it is empty, not a multiple of a descriptor, or not aligned to a qword.
fn segment_entries(pointer: &SglDescriptor) -> Result<u32, Status> {
    if pointer.subtype() != 0 {
        return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID);
    }
    let SglDescriptor { address, length, .. } = *pointer;
    if length == 0 || !length.is_multiple_of(ENTRY) || !address.is_multiple_of(8) {
        return Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
    }
    Ok(length / ENTRY)
}
