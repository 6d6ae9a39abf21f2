//! Physical region pages (Base, "Physical Region Page Entry and List").
//!
//! PRP1 may begin inside a page; everything after it is whole pages, except for the end of the
//! last. Two entries fit in the command. More go to a list; the last entry of each list page points
//! to the next page if the list continues.

use nvme_spec::sqe::{DataPointer, Psdt};

use super::{Descriptor, DescriptorArea, DescriptorError, PRP_ENTRY_BYTES};
use crate::dma::IovaRange;

pub(super) fn describe(
    parts: &[IovaRange],
    page_bytes: u32,
    area: &mut impl DescriptorArea,
) -> Result<Descriptor, DescriptorError> {
    let page = u64::from(page_bytes);
    check(parts, page_bytes)?;
    let count: u64 = parts.iter().map(|part| pages(part, page)).sum();
    let mut entries = parts.iter().flat_map(|part| {
        let first = part.iova.0;
        let rest = (1..pages(part, page)).map(move |i| (first - first % page) + i * page);
        std::iter::once(first).chain(rest)
    });
    let prp1 = entries.next().unwrap_or_default();
    if count <= 2 {
        let prp2 = entries.next().unwrap_or_default();
        return Ok(command(prp1, prp2));
    }
    let list = area.iova();
    if !list.0.is_multiple_of(u64::from(PRP_ENTRY_BYTES)) {
        let align = u64::from(PRP_ENTRY_BYTES);
        return Err(DescriptorError::AreaUnaligned { iova: list, align });
    }
    let mut left = count - 1;
    let need = list_bytes(list.0, left, page);
    if need > area.len() as u64 {
        let need = usize::try_from(need).unwrap_or(usize::MAX);
        return Err(DescriptorError::AreaTooSmall { need, have: area.len() });
    }
    let mut at = 0;
    for entry in entries {
        let here = list.0 + at as u64 * 8;
        if here % page == page - 8 && left > 1 {
            // The last entry of a list page chains to the next one, which follows it in the area.
            area.write64(at, here + 8);
            at += 1;
        }
        area.write64(at, entry);
        at += 1;
        left -= 1;
    }
    Ok(command(prp1, list.0))
}

fn command(prp1: u64, prp2: u64) -> Descriptor {
    Descriptor { dptr: DataPointer::from_prps(prp1, prp2), psdt: Psdt::PRP }
}

/// Returns the number of pages that `part` touches.
fn pages(part: &IovaRange, page: u64) -> u64 {
    (part.iova.0 % page + part.len).div_ceil(page)
}

/// Returns the bytes of a list of `entries` entries at `list`, including the chain pointers.
fn list_bytes(list: u64, entries: u64, page: u64) -> u64 {
    let first = (page - list % page) / 8;
    if entries <= first {
        return entries * 8;
    }
    // Every page but the last spends one entry on the pointer to the next.
    let later = entries - (first - 1);
    let per_page = page / 8;
    let chained = (later - 1).saturating_sub(1) / (per_page - 1);
    (first + later + chained) * 8
}

/// Checks that all boundaries between parts are page boundaries.
fn check(parts: &[IovaRange], page_bytes: u32) -> Result<(), DescriptorError> {
    let page = u64::from(page_bytes);
    for (part, &IovaRange { iova, len }) in parts.iter().enumerate() {
        let begins = part == 0 || iova.0 % page == 0;
        let ends = part + 1 == parts.len() || (iova.0 + len) % page == 0;
        if !begins || !ends || iova.0 % 4 != 0 {
            return Err(DescriptorError::NotPages { part, iova, len, page_bytes });
        }
    }
    Ok(())
}
