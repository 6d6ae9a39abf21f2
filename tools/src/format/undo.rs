//! What formatting overwrites, in a file: a line of JSON, and the bytes.
//!
//! Formatting erases the start and the end of each region, what is beside it, and writes the
//! journal's first group. All of that is saved first, so that it can come back byte for byte also
//! after a formatting that was interrupted. A store that was opened has written its superblock
//! again, and perhaps its data area: there is no way back from that.

use std::fs::{self, File};
use std::io::Write as _;
use std::ops::Range;
use std::path::Path;

use anyhow::bail;
use kv_catalog::{SUPERBLOCK_BYTES, Superblock, foreign_signature};
use objstore::{Medium, StoreId};
use ripieno_stack::read_file;
use serde::{Deserialize, Serialize};

use crate::offline::Offline;
use crate::problem::Problem;

/// What formatting writes at a region's start: the superblocks' MiB, and the journal's first group,
/// without records: one LBA of at most 64 KiB.
const HEAD_BYTES: u64 = (1 << 20) + (64 << 10);
/// What it writes at a region's end.
const TAIL_BYTES: u64 = 128 << 10;
/// Writes of a superblock that formatting makes: opening a store makes one more.
const FORMAT_WRITES: u64 = 2;
/// Where formatting writes other bytes than zeroes, from the region's start: superblocks and the
/// journal's first group.
const WRITTEN: [Range<u64>; 3] = [0..64 << 10, 512 << 10..576 << 10, 1 << 20..HEAD_BYTES];
/// Bytes of a file: less than 4 MiB for each of at most 64 devices.
const BYTES_MAX: u64 = 256 << 20;
/// Bytes that are compared at a time: of the smallest LBA.
const SECTOR: usize = 512;

#[derive(Debug, Serialize, Deserialize)]
struct Head {
    ripieno_undo: u32,
    /// The store that was made.
    store: String,
    parts: Vec<Part>,
    crc32c: u32,
}

/// Bytes of a namespace.
#[derive(Debug, Serialize, Deserialize)]
struct Part {
    device: usize,
    identity: String,
    offset: u64,
    bytes: u64,
}

/// Where formatting writes, in bytes of the namespace.
fn parts(whole: &Medium, store: &Medium) -> [Range<u64>; 2] {
    let [first, last] = super::edges(whole, store);
    let head = (first.end + HEAD_BYTES).min(last.start);
    [0..head, last.start.saturating_sub(TAIL_BYTES).max(head)..last.end]
}

/// Saves what formatting is going to overwrite. It is permanent on return.
///
/// # Errors
/// When a device cannot be read, or the file is there already or cannot be written.
pub(super) fn save(path: &Path, store: StoreId, offline: &Offline) -> anyhow::Result<()> {
    let (mut list, mut saved) = (Vec::new(), Vec::new());
    let media = offline.namespaces()?.into_iter().zip(offline.media()?);
    for (device, (mut whole, store)) in media.enumerate() {
        for range in parts(&whole, &store) {
            let (offset, bytes) = (range.start, range.end - range.start);
            let mut part = vec![0; bytes as usize];
            whole.io.read(offset, &mut part)?;
            saved.extend(part);
            list.push(Part { device, identity: whole.identity.to_string(), offset, bytes });
        }
    }
    let (store, crc32c) = (store.to_string(), crc32c::crc32c(&saved));
    let head = serde_json::to_string(&Head { ripieno_undo: 1, store, parts: list, crc32c })?;
    let mut file = File::create_new(path)?;
    let written = writeln!(file, "{head}").and_then(|()| file.write_all(&saved));
    if let Err(error) = written.and_then(|()| file.sync_all()) {
        let _ = fs::remove_file(path);
        return Err(error.into());
    }
    Ok(())
}

/// Puts everything back. Returns how many bytes.
///
/// # Errors
/// [`Problem`] when the file is not about these devices, or they were used since.
pub(super) fn put_back(path: &Path, offline: &Offline) -> anyhow::Result<u64> {
    let file = read_file(path, BYTES_MAX).map_err(|error| {
        let what = format!("--undo {}: it cannot be read: {error}", path.display());
        Problem::new(what, "name the file that formatting these devices saved")
    })?;
    let wrong = |why: &str| {
        let hint = "nothing was written; name the file that formatting these devices saved";
        Problem::new(format!("{}: {why}", path.display()), hint)
    };
    let end = file.iter().position(|byte| *byte == b'\n');
    let (head, saved) = file.split_at(end.ok_or_else(|| wrong("it is no undo file"))?);
    let saved = &saved[1..];
    let head: Head = serde_json::from_slice(head).map_err(|_| wrong("it is no undo file"))?;
    let bytes = head.parts.iter().try_fold(0_u64, |sum, part| sum.checked_add(part.bytes));
    if head.ripieno_undo != 1 {
        bail!(wrong("another version of ripieno wrote it"));
    }
    if bytes != Some(saved.len() as u64) || crc32c::crc32c(saved) != head.crc32c {
        bail!(wrong("it is damaged"));
    }
    let mut whole = offline.namespaces()?;
    let mut stores = offline.media()?;
    let expected = whole.iter().zip(&stores).enumerate().flat_map(|(device, (whole, store))| {
        parts(whole, store).map(|range| (device, whole.identity.to_string(), range))
    });
    let found = head.parts.iter().map(|part| {
        let end = part.offset.saturating_add(part.bytes);
        (part.device, part.identity.clone(), part.offset..end)
    });
    if !expected.eq(found) {
        bail!(wrong("it is about other devices, or about another order of them"));
    }
    let mut rest = saved;
    let mut piece = |part: &Part| {
        let (bytes, after) = rest.split_at(part.bytes as usize);
        rest = after;
        (part.offset, bytes)
    };
    let pairs = head.parts.chunks_exact(2);
    let pieces: Vec<_> = pairs.map(|pair| [piece(&pair[0]), piece(&pair[1])]).collect();
    // All of them are looked at before the first is written.
    for (at, (medium, store)) in whole.iter_mut().zip(&mut stores).enumerate() {
        check_untouched(medium, store, &head.store, pieces[at].map(|(_, bytes)| bytes))?;
    }
    for (medium, pieces) in whole.iter_mut().zip(pieces) {
        for (offset, bytes) in pieces {
            medium.io.write(offset, bytes, false)?;
        }
        medium.io.flush()?;
    }
    Ok(saved.len() as u64)
}

/// Refuses a device that has anything but what was saved, and what formatting made of it.
fn check_untouched(
    whole: &mut Medium,
    store: &mut Medium,
    id: &str,
    saved: [&[u8]; 2],
) -> anyhow::Result<()> {
    let name = whole.io.name().to_owned();
    let refused = |why: String| {
        let hint = "nothing was written; what was there before cannot come back";
        Problem::new(format!("{name}: {why}"), hint)
    };
    let mut found = Vec::new();
    for (range, saved) in parts(whole, store).into_iter().zip(saved) {
        let mut bytes = vec![0; saved.len()];
        whole.io.read(range.start, &mut bytes)?;
        // What formatting did not reach.
        let sectors = bytes.chunks_mut(SECTOR).zip(saved.chunks(SECTOR));
        sectors.filter(|(now, then)| now == then).for_each(|(now, _)| now.fill(0));
        found.push(bytes);
    }
    let [first, _] = super::edges(whole, store);
    let (head, tail) = found.split_at_mut(1);
    let (edge, region) = head[0].split_at_mut(first.end as usize);
    for (copy, area) in Superblock::read_copies(&mut *store.io)?.iter().zip(&WRITTEN) {
        let area = &mut region[area.start as usize..area.end as usize];
        match copy {
            Ok(_) if area.iter().all(|byte| *byte == 0) => {}
            Ok(copy) if copy.store.to_string() != id => {
                bail!(refused(format!("it holds store {}, and {id} is to be undone", copy.store)))
            }
            Ok(copy) if copy.sequence > FORMAT_WRITES => {
                bail!(refused(format!("store {id} was opened since it was made")))
            }
            Ok(_) => area[..SUPERBLOCK_BYTES].fill(0),
            // Torn, when formatting was interrupted; or something else, which the marks tell.
            Err(_) => {}
        }
    }
    if let Some(what) = foreign_signature(region, &[], store.region.bytes()) {
        bail!(refused(format!("it holds {what} by now")));
    }
    for area in &WRITTEN {
        region[area.start as usize..area.end as usize].fill(0);
    }
    if [edge, region, &mut tail[0]].iter().any(|bytes| bytes.iter().any(|byte| *byte != 0)) {
        bail!(refused("something else was written to it since it was formatted".to_owned()));
    }
    Ok(())
}
