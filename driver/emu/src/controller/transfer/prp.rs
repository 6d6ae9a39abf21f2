//! Physical region pages (Base, "Physical Region Page Entry and List").

use nvme_driver::Iova;
use nvme_spec::{sqe::DataPointer, status::Status};
use zerocopy::IntoBytes;

use super::{Sink, refused};
use crate::domain::DmaAccess;

/// Bytes of a PRP entry.
const ENTRY: u64 = 8;
/// Entries read from a list at a time.
const CHUNK: usize = 64;

/// Passes the `len` bytes that `dptr` names to `sink`, page by page.
#[inline]
pub(in super::super) fn walk(
    dma: &DmaAccess<'_>,
    page_bytes: u64,
    dptr: DataPointer,
    len: u64,
    sink: &mut impl Sink,
) -> Result<(), Status> {
    // "PRP Entry Layout": the offset of the first entry is a multiple of a dword.
    if dptr.prp1 & 3 != 0 {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    let first = len.min(page_bytes - (dptr.prp1 & (page_bytes - 1)));
    give(sink, dptr.prp1, first)?;
    match len - first {
        0 => Ok(()),
        // "Common Command Format", DPTR: PRP2 is a page if the rest fits in one, else a list.
        rest if rest <= page_bytes => give(sink, whole_page(page_bytes, dptr.prp2)?, rest),
        rest => walk_list(dma, page_bytes, dptr.prp2, rest, sink),
    }
}

/// Passes the `len` bytes that the list at `list` names to `sink`. Also used for non-contiguous
/// queues, whose pages are described by such a list.
pub(in super::super) fn walk_list(
    dma: &DmaAccess<'_>,
    page_bytes: u64,
    list: u64,
    len: u64,
    sink: &mut impl Sink,
) -> Result<(), Status> {
    // "PRP List": the pointer to the first list page may have an offset, a multiple of a qword.
    if !list.is_multiple_of(ENTRY) {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    let (mut at, mut left) = (list, len);
    loop {
        let slots = (page_bytes - (at & (page_bytes - 1))) / ENTRY;
        let pages = left.div_ceil(page_bytes);
        // The last entry of a list page points to the next list page if data is left after it.
        let chained = pages > slots;
        let entries = if chained { slots - 1 } else { pages };
        left = walk_entries(dma, page_bytes, at, entries, left, sink)?;
        if !chained {
            return Ok(());
        }
        let next = dma.read_u64(Iova(at.wrapping_add(entries * ENTRY))).map_err(refused)?;
        at = whole_page(page_bytes, next)?;
    }
}

/// Passes `entries` pages named at `at` to the sink. Returns the bytes left.
fn walk_entries(
    dma: &DmaAccess<'_>,
    page_bytes: u64,
    at: u64,
    entries: u64,
    len: u64,
    sink: &mut impl Sink,
) -> Result<u64, Status> {
    let (mut done, mut left) = (0, len);
    let mut chunk = [0u64; CHUNK];
    while done < entries {
        let count = (entries - done).min(CHUNK as u64);
        let part = &mut chunk[..count as usize];
        dma.read(Iova(at.wrapping_add(done * ENTRY)), part.as_mut_bytes()).map_err(refused)?;
        for entry in part {
            let bytes = left.min(page_bytes);
            give(sink, whole_page(page_bytes, *entry)?, bytes)?;
            left -= bytes;
        }
        done += count;
    }
    Ok(left)
}

/// Checks that an entry after the first has offset 0 ("PRP List").
#[inline]
fn whole_page(page_bytes: u64, entry: u64) -> Result<u64, Status> {
    if entry & (page_bytes - 1) != 0 {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    Ok(entry)
}

#[inline]
fn give(sink: &mut impl Sink, address: u64, len: u64) -> Result<(), Status> {
    sink.data(Iova(address), len as usize).map_err(refused)
}
