//! Undo file of `ripieno format`: a line of JSON, then the overwritten bytes.
//!
//! Formatting erases the start and the end of each region and the data outside it, and writes the
//! journal's first group. All of that is saved first, so that it can be restored byte for byte,
//! even after an interrupted format. A store that was opened has rewritten its superblock, and
//! perhaps its data area, and cannot be undone.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::bail;
use kv_catalog::{
    FORMAT_HEAD_BYTES, FORMAT_TAIL_BYTES, SUPERBLOCK_BYTES, Superblock, foreign_signature,
};
use objstore::{Medium, Store, StoreDevice, StoreId};
use ripieno_stack::{edges, namespaces, read_file};
use serde::{Deserialize, Serialize};

use crate::problem::Problem;

/// Superblock writes of a format. Opening the store adds one.
const FORMAT_WRITES: u64 = 2;
/// Ranges, from the region's start, where formatting writes anything but zeroes: superblocks and
/// the journal's first group.
const WRITTEN: [Range<u64>; 3] = [0..64 << 10, 512 << 10..576 << 10, 1 << 20..FORMAT_HEAD_BYTES];
/// Maximum size of an undo file in bytes: less than 5 MiB for each of at most 64 devices.
const BYTES_MAX: u64 = 320 << 20;
/// Unit of comparison in bytes: the smallest LBA.
const SECTOR: usize = 512;

#[derive(Debug, Serialize, Deserialize)]
struct Head {
    ripieno_undo: u32,
    /// ID of the store that was made.
    store: String,
    parts: Vec<Part>,
    crc32c: u32,
}

/// A byte range of a namespace.
#[derive(Debug, Serialize, Deserialize)]
struct Part {
    device: usize,
    identity: String,
    offset: u64,
    bytes: u64,
}

/// Returns the ranges that formatting writes, in bytes of the namespace.
fn parts(whole: &Medium, store: &Medium) -> [Range<u64>; 2] {
    let [first, last] = edges(whole, store);
    let head = (first.end + FORMAT_HEAD_BYTES).min(last.start);
    [0..head, last.start.saturating_sub(FORMAT_TAIL_BYTES).max(head)..last.end]
}

/// Saves the data that formatting is going to overwrite. It is durable on return.
///
/// # Errors
/// Returns an error if a device cannot be read, or if the file exists or cannot be written.
pub(super) fn save(path: &Path, store: StoreId, devices: &[StoreDevice]) -> anyhow::Result<()> {
    let (mut list, mut saved) = (Vec::new(), Vec::new());
    let media = namespaces(devices)?.into_iter().zip(Store::media(devices)?);
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
    // Data of a device is for those alone who may read the device.
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    let written = writeln!(file, "{head}").and_then(|()| file.write_all(&saved));
    if let Err(error) = written.and_then(|()| file.sync_all()) {
        let _ = fs::remove_file(path);
        return Err(error.into());
    }
    Ok(())
}

/// Restores everything. Returns the number of bytes.
///
/// # Errors
/// Returns a [`Problem`] if the file belongs to other devices, or if they were used since.
pub(super) fn put_back(path: &Path, devices: &[StoreDevice]) -> anyhow::Result<u64> {
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
    let mut whole = namespaces(devices)?;
    let mut stores = Store::media(devices)?;
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
    // All devices are checked before the first is written.
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

/// Rejects a device with data that is neither the saved data nor what formatting wrote.
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
        // Sectors that the format did not reach still equal the saved ones.
        let sectors = bytes.chunks_mut(SECTOR).zip(saved.chunks(SECTOR));
        sectors.filter(|(now, then)| now == then).for_each(|(now, _)| now.fill(0));
        found.push(bytes);
    }
    let [first, _] = edges(whole, store);
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
            // Torn by an interrupted format, or other data, which its signature reveals.
            Err(_) => {}
        }
    }
    if let Some(found) = foreign_signature(region, &[], store.region.bytes()) {
        bail!(refused(format!("it holds {} by now", found.what)));
    }
    for area in &WRITTEN {
        region[area.start as usize..area.end as usize].fill(0);
    }
    if [edge, region, &mut tail[0]].iter().any(|bytes| bytes.iter().any(|byte| *byte != 0)) {
        bail!(refused("something else was written to it since it was formatted".to_owned()));
    }
    Ok(())
}
