//! Scatter gather lists (Base 2.0, "Scatter Gather List").

use nvme_driver::platform::buffer::Buffer;
use nvme_spec::{
    sgl::{SglDescriptor, SglKind},
    sqe::Sqe,
    status::Status,
};
use zerocopy::IntoBytes;

use super::{
    Case, Found,
    io::{bytes, expect_ok, fill, read, write},
    status, works,
};
use crate::{pattern, raw::Raw};

const PAGE: usize = 4096;
/// Bytes of the data memory.
const ROOM: usize = 256 << 10;

pub(super) const CASES: &[Case] = &[
    works("sgl: one data block", |raw| transfer(raw, &[(PAGE, 4096)], Shape::Inline)),
    works("sgl: one data block across pages", |raw| transfer(raw, &[(512, 16384)], Shape::Inline)),
    works("sgl: a data block at a multiple of four", |raw| {
        transfer(raw, &[(1028, 4096)], Shape::Inline)
    }),
    works("sgl: a last segment", |raw| {
        transfer(raw, &[(8192, 512), (0, 3072), (65536, 512)], Shape::Last)
    }),
    works("sgl: a last segment of one block", |raw| transfer(raw, &[(0, 4096)], Shape::Last)),
    works("sgl: pieces at multiples of four", |raw| {
        transfer(raw, &[(4, 508), (2048, 3584), (8196, 4)], Shape::Last)
    }),
    works("sgl: 255 pieces", |raw| {
        let mut parts: Vec<_> = (0..254).map(|index| (index * 1000, 516)).collect();
        parts.push((255_000, 512 * 256 - 254 * 516));
        transfer(raw, &parts, Shape::Last)
    }),
    works("sgl: a block of no bytes", |raw| {
        transfer(raw, &[(0, 512), (9000, 0), (4096, 3584)], Shape::Last)
    }),
    works("sgl: a segment and a last segment", |raw| {
        let parts = [(0, 1024), (30000, 1024), (20000, 1024), (10000, 1024)];
        transfer(raw, &parts, Shape::Chain(3))
    }),
    works("sgl: a chain of many segments", |raw| {
        let parts: Vec<_> = (0..64).map(|index| ((63 - index) * 2000, 512)).collect();
        transfer(raw, &parts, Shape::Chain(2))
    }),
    works("sgl: segments of a page", |raw| {
        let parts: Vec<_> = (0..512).map(|index| (index * 500, 128)).collect();
        transfer(raw, &parts, Shape::Chain(256))
    }),
    status("sgl: odd addresses and lengths", ODD_ADDRESSES, |raw| {
        transfer(raw, &[(1, 511), (2051, 3), (4097, 3582)], Shape::Last)
    }),
    status("sgl: a data block at an odd address", ODD_ADDRESSES, |raw| {
        transfer(raw, &[(2051, 4096)], Shape::Inline)
    }),
    status("sgl: too short", Status::DATA_SGL_LENGTH_INVALID, |raw| {
        inline(raw, |at| SglDescriptor::data_block(at, 4096 - 4))
    }),
    status("sgl: too long", Status::DATA_SGL_LENGTH_INVALID, |raw| {
        inline(raw, |at| SglDescriptor::data_block(at, 4096 + 512))
    }),
    status("sgl: pieces too short", Status::DATA_SGL_LENGTH_INVALID, |raw| {
        segment(raw, |at| {
            vec![SglDescriptor::data_block(at, 512), SglDescriptor::data_block(at + 512, 512)]
        })
    }),
    status("sgl: pieces too long", Status::DATA_SGL_LENGTH_INVALID, |raw| {
        segment(raw, |at| {
            vec![SglDescriptor::data_block(at, 4096), SglDescriptor::data_block(at + 4096, 512)]
        })
    }),
    status("sgl: keyed descriptor", Status::SGL_DESCRIPTOR_TYPE_INVALID, |raw| {
        inline(raw, |at| SglDescriptor::new(SglKind::KEYED_DATA_BLOCK, at, 4096))
    }),
    status("sgl: reserved descriptor", Status::SGL_DESCRIPTOR_TYPE_INVALID, |raw| {
        segment(raw, |at| vec![SglDescriptor::new(SglKind(7), at, 4096)])
    }),
    status("sgl: reserved subtype", Status::SGL_DESCRIPTOR_TYPE_INVALID, |raw| {
        inline(raw, |at| {
            let mut descriptor = SglDescriptor::data_block(at, 4096);
            descriptor.identifier |= 5;
            descriptor
        })
    }),
    status("sgl: a segment in a last segment", Status::INVALID_SGL_SEGMENT_DESCRIPTOR, |raw| {
        segment(raw, |at| {
            vec![SglDescriptor::data_block(at, 512), SglDescriptor::last_segment(at, 16)]
        })
    }),
    status("sgl: a segment that leads nowhere", Status::INVALID_SGL_SEGMENT_DESCRIPTOR, |raw| {
        with_segment(raw, SglKind::SEGMENT, 32, |at| {
            vec![SglDescriptor::data_block(at, 2048), SglDescriptor::data_block(at + 2048, 2048)]
        })
    }),
    status("sgl: segments in the middle", Status::INVALID_SGL_DESCRIPTOR_COUNT, |raw| {
        with_segment(raw, SglKind::SEGMENT, 48, |at| {
            let block = SglDescriptor::data_block(at, 2048);
            vec![block, SglDescriptor::segment(at, 16), block]
        })
    }),
    status("sgl: a segment of no bytes", Status::INVALID_SGL_SEGMENT_DESCRIPTOR, |raw| {
        with_segment(raw, SglKind::LAST_SEGMENT, 0, |at| vec![SglDescriptor::data_block(at, 4096)])
    }),
    status("sgl: a segment of one and a half", Status::INVALID_SGL_SEGMENT_DESCRIPTOR, |raw| {
        with_segment(raw, SglKind::LAST_SEGMENT, 24, |at| {
            vec![SglDescriptor::data_block(at, 4096), SglDescriptor::default()]
        })
    }),
    status("sgl: unmapped data", Status::DATA_TRANSFER_ERROR, |raw| {
        let unmapped = raw.target.unmapped.0;
        let ns = raw.target.namespaces[0];
        raw.io(&read(&ns, 0, 8).with_sgl(SglDescriptor::data_block(unmapped, 4096)))
    }),
    status("sgl: unmapped segment", Status::DATA_TRANSFER_ERROR, |raw| {
        let unmapped = raw.target.unmapped.0;
        let ns = raw.target.namespaces[0];
        raw.io(&read(&ns, 0, 8).with_sgl(SglDescriptor::last_segment(unmapped, 16)))
    }),
    works("sgl: a bit bucket swallows what is read", |raw| {
        let ns = raw.target.namespaces[0];
        let (memory, list) = (raw.alloc(ROOM)?, raw.alloc(PAGE)?);
        let (at, data) = (memory.iova().0, pattern(4096, 8));
        fill(&memory, 0, &data)?;
        expect_ok(raw, &write(&ns, 0, 8).with_prps(at, 0))?;
        fill(&memory, 0, &[0xee; 8192])?;
        let parts = [
            SglDescriptor::data_block(at, 512),
            SglDescriptor::bit_bucket(2048),
            SglDescriptor::data_block(at + 512, 1536),
        ];
        fill(&list, 0, parts.as_bytes())?;
        let found = raw.io(&read(&ns, 0, 8).with_sgl(last(&list, 3)))?;
        if found != Found::OK {
            return Ok(found);
        }
        let seen = bytes(&memory, 0, 8192)?;
        let right = seen[..512] == data[..512]
            && seen[512..2048] == data[2560..]
            && seen[2048..].iter().all(|byte| *byte == 0xee);
        Ok(Found::wrong_unless(right, "wrong data"))
    }),
    works("sgl: a bit bucket in a write counts nothing", |raw| {
        let (list, at) = (raw.alloc(PAGE)?, raw.alloc(ROOM)?);
        let ns = raw.target.namespaces[0];
        let parts = [
            SglDescriptor::data_block(at.iova().0, 512),
            SglDescriptor::bit_bucket(2048),
            SglDescriptor::data_block(at.iova().0 + 512, 3584),
        ];
        fill(&list, 0, parts.as_bytes())?;
        raw.io(&write(&ns, 0, 8).with_sgl(last(&list, 3)))
    }),
];

/// Status of commands with odd addresses on controllers with byte granularity.
const ODD_ADDRESSES: Status = Status::SUCCESS;

/// Layout of a transfer's descriptors.
#[derive(Clone, Copy)]
enum Shape {
    /// One data block, in the command.
    Inline,
    /// One Last Segment.
    Last,
    /// Segments of at most this many descriptors, the last of which points to the next segment.
    Chain(usize),
}

/// Writes from and reads into `parts` (offset, length), and compares with plain reads.
fn transfer(raw: &mut Raw<'_>, parts: &[(usize, usize)], shape: Shape) -> anyhow::Result<Found> {
    let ns = raw.target.namespaces[0];
    let (memory, lists) = (raw.alloc(ROOM)?, raw.alloc(64 * PAGE)?);
    let len: usize = parts.iter().map(|(_, len)| len).sum();
    let (data, lbas) = (pattern(len, parts.len() as u64), (len / 512) as u32);
    let descriptor = describe(&memory, &lists, parts, shape)?;
    gather(&memory, parts, &data)?;
    let found = raw.io(&write(&ns, 40, lbas).with_sgl(descriptor))?;
    if found != Found::OK {
        return Ok(found);
    }
    let simple = raw.alloc(PAGE)?;
    for (index, part) in data.chunks(PAGE).enumerate() {
        let sqe = read(&ns, 40 + index as u64 * 8, (part.len() / 512) as u32);
        expect_ok(raw, &sqe.with_prps(simple.iova().0, 0))?;
        if bytes(&simple, 0, part.len())? != part {
            return Ok(Found::Wrong("wrong data written"));
        }
    }
    fill(&memory, 0, &vec![0xee; ROOM])?;
    expect_ok(raw, &read(&ns, 40, lbas).with_sgl(descriptor))?;
    let found = bytes(&memory, 0, ROOM)?;
    let wanted = raw.alloc(ROOM)?;
    fill(&wanted, 0, &vec![0xee; ROOM])?;
    gather(&wanted, parts, &data)?;
    let wanted = bytes(&wanted, 0, ROOM)?;
    Ok(Found::wrong_unless(found == wanted, "wrong data read, or read to a wrong place"))
}

fn gather(memory: &Buffer, parts: &[(usize, usize)], data: &[u8]) -> anyhow::Result<()> {
    let mut left = data;
    for &(offset, len) in parts {
        let (now, later) = left.split_at(len);
        fill(memory, offset, now)?;
        left = later;
    }
    Ok(())
}

fn describe(
    memory: &Buffer,
    lists: &Buffer,
    parts: &[(usize, usize)],
    shape: Shape,
) -> anyhow::Result<SglDescriptor> {
    let data = |&(offset, len): &(usize, usize)| {
        SglDescriptor::data_block(memory.iova().0 + offset as u64, len as u32)
    };
    let size = match shape {
        Shape::Inline => return Ok(data(&parts[0])),
        Shape::Last => parts.len(),
        Shape::Chain(size) => size,
    };
    let mut left: Vec<SglDescriptor> = parts.iter().map(data).collect();
    let mut segments = Vec::new();
    while left.len() > size {
        let rest = left.split_off(size - 1);
        segments.push(std::mem::replace(&mut left, rest));
    }
    segments.push(left);
    // One page each, so that reading on after a short segment does not find the next one.
    let step = (size * 16).next_multiple_of(PAGE).min(PAGE);
    let (mut at, mut next) = (segments.len() * step, None);
    for mut segment in segments.into_iter().rev() {
        at -= step;
        segment.extend(next);
        fill(lists, at, segment.as_bytes())?;
        let (address, len) = (lists.iova().0 + at as u64, (segment.len() * 16) as u32);
        next = Some(match next {
            None => SglDescriptor::last_segment(address, len),
            Some(_) => SglDescriptor::segment(address, len),
        });
    }
    Ok(next.expect("there is at least one segment"))
}

fn last(list: &Buffer, count: u32) -> SglDescriptor {
    SglDescriptor::last_segment(list.iova().0, count * 16)
}

/// Reads 4096 bytes with the descriptor from `make`.
fn inline(raw: &mut Raw<'_>, make: fn(u64) -> SglDescriptor) -> anyhow::Result<Found> {
    let memory = raw.alloc(4 * PAGE)?;
    let sqe = page_read(raw).with_sgl(make(memory.iova().0));
    raw.io(&sqe)
}

/// Same as `inline`, with a Last Segment of the descriptors from `make`.
fn segment(raw: &mut Raw<'_>, make: fn(u64) -> Vec<SglDescriptor>) -> anyhow::Result<Found> {
    let len = make(0).len() as u32 * 16;
    with_segment(raw, SglKind::LAST_SEGMENT, len, make)
}

fn with_segment(
    raw: &mut Raw<'_>,
    kind: SglKind,
    len: u32,
    make: fn(u64) -> Vec<SglDescriptor>,
) -> anyhow::Result<Found> {
    let (memory, list) = (raw.alloc(4 * PAGE)?, raw.alloc(PAGE)?);
    fill(&list, 0, make(memory.iova().0).as_bytes())?;
    let sqe = page_read(raw).with_sgl(SglDescriptor::new(kind, list.iova().0, len));
    raw.io(&sqe)
}

fn page_read(raw: &Raw<'_>) -> Sqe {
    read(&raw.target.namespaces[0], 0, 8)
}
