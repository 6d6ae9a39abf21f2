//! Scatter gather lists (Base, "Scatter Gather List").
//!
//! One range is a Data Block in the command. Several are a Last Segment of Data Blocks in the area.
//! If they do not fit in one segment, each Segment's last entry points to the next one.

use nvme_spec::{
    sgl::{SglDescriptor, SglKind},
    sqe::{DataPointer, Psdt},
};

use super::{Descriptor, DescriptorArea, DescriptorError, SGL_DESCRIPTOR_BYTES};
use crate::dma::{Iova, IovaRange};

/// Returns a data block; `describe` in the parent checked that the length fits.
fn block(part: &IovaRange) -> SglDescriptor {
    SglDescriptor::data_block(part.iova.0, part.len as u32)
}

fn command(descriptor: SglDescriptor) -> Descriptor {
    Descriptor { dptr: DataPointer::from_sgl(descriptor), psdt: Psdt::SGL_MPTR_ADDRESS }
}

pub(super) fn describe(
    parts: &[IovaRange],
    granularity: u32,
    segment_bytes: u32,
    area: &mut impl DescriptorArea,
) -> Result<Descriptor, DescriptorError> {
    let fine = u64::from(granularity.max(1));
    for (part, &IovaRange { iova, len }) in parts.iter().enumerate() {
        if iova.0 % fine != 0 || len % fine != 0 {
            return Err(DescriptorError::Granularity { part, iova, len, granularity });
        }
    }
    if let [one] = parts {
        return Ok(command(block(one)));
    }
    let per_segment = (segment_bytes / SGL_DESCRIPTOR_BYTES).max(2) as usize;
    let need = entries(parts.len(), per_segment) * SGL_DESCRIPTOR_BYTES as usize;
    if need > area.len() {
        return Err(DescriptorError::AreaTooSmall { need, have: area.len() });
    }
    if !area.iova().0.is_multiple_of(u64::from(SGL_DESCRIPTOR_BYTES)) {
        let align = u64::from(SGL_DESCRIPTOR_BYTES);
        return Err(DescriptorError::AreaUnaligned { iova: area.iova(), align });
    }
    let (mut at, mut rest) = (0, parts);
    let first = pointer(area.iova(), at, rest.len(), per_segment);
    while !rest.is_empty() {
        // All segments but the last give up their last entry for the pointer to the next one.
        let last = rest.len() <= per_segment;
        let blocks = if last { rest.len() } else { per_segment - 1 };
        let (now, later) = rest.split_at(blocks);
        for part in now {
            put(area, &mut at, block(part));
        }
        if !last {
            let next = pointer(area.iova(), at + 1, later.len(), per_segment);
            put(area, &mut at, next);
        }
        rest = later;
    }
    Ok(command(first))
}

/// Returns the number of entries in all segments for `parts` data blocks.
fn entries(parts: usize, per_segment: usize) -> usize {
    let pointers = parts.saturating_sub(2) / (per_segment - 1);
    // A chain of s segments holds up to s * (per_segment - 1) + 1 blocks and s - 1 pointers.
    if parts <= per_segment { parts } else { parts + pointers }
}

/// Returns the descriptor of a segment that begins at entry `at`, with `left` data blocks to go.
fn pointer(area: Iova, at: usize, left: usize, per_segment: usize) -> SglDescriptor {
    let iova = area.offset(at as u64 * u64::from(SGL_DESCRIPTOR_BYTES));
    let (kind, count) = if left <= per_segment {
        (SglKind::LAST_SEGMENT, left)
    } else {
        (SglKind::SEGMENT, per_segment)
    };
    // A segment has at most `segment_bytes` (32 bits) bytes.
    SglDescriptor::new(kind, iova.0, count as u32 * SGL_DESCRIPTOR_BYTES)
}

fn put(area: &mut impl DescriptorArea, at: &mut usize, descriptor: SglDescriptor) {
    let words: [u64; 2] = zerocopy::transmute!(descriptor);
    area.write64(*at * 2, words[0]);
    area.write64(*at * 2 + 1, words[1]);
    *at += 1;
}
