//! Physical region pages (Base 2.0, "Physical Region Page Entry and List").

use nvme_driver::platform::buffer::Buffer;
use nvme_spec::status::Status;

use super::{
    Case, Found,
    io::{bytes, expect_ok, fill, read, write},
    status, works,
};
use crate::{pattern, raw::Raw};

const PAGE: usize = 4096;
/// Pages of the data memory. Only odd ones are used: an access to the page after one is noticed.
const PAGES: usize = 64;

pub(super) const CASES: &[Case] = &[
    works("prp: one page", |raw| transfer(raw, &[(1, 0)], PAGE, List::None)),
    works("prp: one page from its middle", |raw| transfer(raw, &[(1, 1024)], 2048, List::None)),
    works("prp: an address that is a multiple of four only", |raw| {
        transfer(raw, &[(1, 2052), (3, 0)], PAGE, List::None)
    }),
    works("prp: two pages", |raw| transfer(raw, &[(3, 0), (1, 0)], 2 * PAGE, List::None)),
    works("prp: two pages, both in part", |raw| {
        transfer(raw, &[(3, 3584), (1, 0)], 1024, List::None)
    }),
    works("prp: a list", |raw| transfer(raw, &LONG, LONG.len() * PAGE, List::At(0))),
    works("prp: a list after part of a page", |raw| {
        let mut pages = LONG;
        pages[0].1 = 512;
        transfer(raw, &pages, LONG.len() * PAGE - 512, List::At(0))
    }),
    works("prp: a list in the middle of its page", |raw| {
        transfer(raw, &LONG, LONG.len() * PAGE, List::At(PAGE / 2))
    }),
    works("prp: a list that ends with its page", |raw| {
        transfer(raw, &LONG, LONG.len() * PAGE, List::At(PAGE - (LONG.len() - 1) * 8))
    }),
    works("prp: a list that goes on in another page", |raw| {
        transfer(raw, &LONG, LONG.len() * PAGE, List::At(PAGE - 4 * 8))
    }),
    works("prp: a list whose first entry leads on", |raw| {
        transfer(raw, &LONG, LONG.len() * PAGE, List::At(PAGE - 8))
    }),
    status("prp: odd first entry", Status::INVALID_PRP_OFFSET, |raw| {
        bad(raw, |at, _| (at + 1, at + PAGE as u64), 1)
    }),
    status("prp: second entry inside its page", Status::INVALID_PRP_OFFSET, |raw| {
        bad(raw, |at, _| (at, at + PAGE as u64 + 512), 2)
    }),
    status("prp: list entry inside its page", Status::INVALID_PRP_OFFSET, |raw| {
        bad(raw, |at, list| (at, list + 2048), 4)
    }),
    status("prp: list at an odd address", Status::INVALID_PRP_OFFSET, |raw| {
        bad(raw, |at, list| (at, list + 4), 4)
    }),
    status("prp: unmapped first page", Status::DATA_TRANSFER_ERROR, |raw| {
        let unmapped = raw.target.unmapped.0;
        one_page(raw, unmapped)
    }),
    status("prp: unmapped list", Status::DATA_TRANSFER_ERROR, |raw| {
        let ns = raw.target.namespaces[0];
        let memory = raw.alloc(PAGE)?;
        let unmapped = raw.target.unmapped.0;
        raw.io(&read(&ns, 0, 32).with_prps(memory.iova().0, unmapped))
    }),
];

/// Nine pages: a list of eight entries.
const LONG: [(usize, usize); 9] =
    [(1, 0), (5, 0), (3, 0), (7, 0), (21, 0), (9, 0), (11, 0), (13, 0), (63, 0)];

/// Location of the PRP list.
#[derive(Clone, Copy)]
enum List {
    /// No list.
    None,
    /// At this offset in a page. Entries that do not fit continue in the next page but one.
    At(usize),
}

/// Writes from and reads into the pages of `parts` (page, offset), one page each except for the
/// first, and compares the result with reads of one page at a time.
fn transfer(
    raw: &mut Raw<'_>,
    parts: &[(usize, usize)],
    len: usize,
    list: List,
) -> anyhow::Result<Found> {
    let ns = raw.target.namespaces[0];
    let memory = raw.alloc(PAGES * PAGE)?;
    let lists = raw.alloc(4 * PAGE)?;
    let (prp1, prp2) = describe(&memory, &lists, parts, list)?;
    let (data, lbas) = (pattern(len, parts.len() as u64), (len / 512) as u32);
    scatter(&memory, parts, &data)?;
    expect_ok(raw, &write(&ns, 40, lbas).with_prps(prp1, prp2))?;
    // Read the medium with one PRP per command.
    let simple = raw.alloc(PAGE)?;
    for (index, part) in data.chunks(PAGE).enumerate() {
        let sqe = read(&ns, 40 + index as u64 * 8, (part.len() / 512) as u32);
        expect_ok(raw, &sqe.with_prps(simple.iova().0, 0))?;
        if bytes(&simple, 0, part.len())? != part {
            return Ok(Found::Wrong("wrong data written"));
        }
    }
    fill(&memory, 0, &vec![0xee; PAGES * PAGE])?;
    expect_ok(raw, &read(&ns, 40, lbas).with_prps(prp1, prp2))?;
    let found = bytes(&memory, 0, PAGES * PAGE)?;
    let wanted = raw.alloc(PAGES * PAGE)?;
    fill(&wanted, 0, &vec![0xee; PAGES * PAGE])?;
    scatter(&wanted, parts, &data)?;
    let wanted = bytes(&wanted, 0, PAGES * PAGE)?;
    Ok(Found::wrong_unless(found == wanted, "wrong data read, or read to a wrong place"))
}

fn describe(
    memory: &Buffer,
    lists: &Buffer,
    parts: &[(usize, usize)],
    list: List,
) -> anyhow::Result<(u64, u64)> {
    let address =
        |&(page, offset): &(usize, usize)| memory.iova().0 + (page * PAGE + offset) as u64;
    let (first, rest) = (address(&parts[0]), &parts[1..]);
    let List::At(start) = list else {
        return Ok((first, rest.first().map_or(0, address)));
    };
    let mut at = start;
    for (index, part) in rest.iter().enumerate() {
        let (last_slot, more) = (at % PAGE == PAGE - 8, index + 1 < rest.len());
        if last_slot && more {
            let next = (at / PAGE + 2) * PAGE;
            fill(lists, at, &(lists.iova().0 + next as u64).to_le_bytes())?;
            at = next;
        }
        fill(lists, at, &address(part).to_le_bytes())?;
        at += 8;
    }
    Ok((first, lists.iova().0 + start as u64))
}

fn scatter(memory: &Buffer, parts: &[(usize, usize)], data: &[u8]) -> anyhow::Result<()> {
    let mut left = data;
    for &(page, offset) in parts {
        let (now, later) = left.split_at(left.len().min(PAGE - offset));
        fill(memory, page * PAGE + offset, now)?;
        left = later;
    }
    Ok(())
}

/// Reads `pages` pages with the pointers that `make` derives from the addresses of data and of a
/// list. The list is valid, except for its entry at offset 2048.
fn bad(raw: &mut Raw<'_>, make: fn(u64, u64) -> (u64, u64), pages: u32) -> anyhow::Result<Found> {
    let ns = raw.target.namespaces[0];
    let (memory, list) = (raw.alloc(8 * PAGE)?, raw.alloc(PAGE)?);
    let at = memory.iova().0;
    for entry in 0..PAGE / 8 {
        let page = at + ((1 + entry % 7) * PAGE) as u64;
        fill(&list, entry * 8, &page.to_le_bytes())?;
    }
    fill(&list, 2048, &(at + PAGE as u64 + 512).to_le_bytes())?;
    let (prp1, prp2) = make(at, list.iova().0);
    raw.io(&read(&ns, 0, pages * 8).with_prps(prp1, prp2))
}

fn one_page(raw: &mut Raw<'_>, at: u64) -> anyhow::Result<Found> {
    let ns = raw.target.namespaces[0];
    raw.io(&read(&ns, 0, 8).with_prps(at, 0))
}
