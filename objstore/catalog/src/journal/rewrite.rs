//! Rewriting a damaged journal.

use super::{JournalError, payload_bytes_max, series};
use crate::{
    block_io::BlockIo,
    record::Records,
    superblock::{JournalArea, Superblock},
};

/// Writes a fresh journal into the other half of a damaged one. `next` appends whole records to its
/// argument and returns true while there are more; without any, the journal is empty and all keys
/// are lost. The data is not touched. The damaged half stays active until the last write, so an
/// interrupted call has changed nothing and can be repeated.
///
/// # Errors
/// Returns [`JournalError::Block`] or [`JournalError::Outgrown`]: the journal is as damaged as
/// before. Returns [`JournalError::None`] if the device carries no journal.
pub fn rewrite_journal(
    io: &mut dyn BlockIo,
    superblock: &mut Superblock,
    mut next: impl FnMut(&mut Vec<u8>) -> bool,
) -> Result<(), JournalError> {
    let device = io.name().to_owned();
    let area = superblock.journal.ok_or(JournalError::None { device })?;
    // As in a compaction, the generation must be new to the half.
    superblock.sequence += 1;
    superblock.write(io)?;
    let (active, generation) = (area.active.other(), superblock.sequence);
    let (series, longest) = (series(superblock.store, generation, io), payload_bytes_max(&area));
    let (mut end, mut records, mut group) = (0, Vec::new(), Vec::new());
    let mut more = true;
    while more || !records.is_empty() {
        while more && records.len() < longest {
            more = next(&mut records);
        }
        let rest = records.split_off(Records::fitting(&records, longest));
        series.encode(end, &records, &mut group);
        if end + group.len() as u64 > area.half_bytes {
            let (device, half_bytes) = (io.name().to_owned(), area.half_bytes);
            return Err(JournalError::Outgrown { device, half_bytes });
        }
        io.write(area.half_offset(active) + end, &group, false)?;
        end += group.len() as u64;
        records = rest;
    }
    io.flush()?;
    superblock.sequence += 1;
    superblock.journal = Some(JournalArea { active, generation, certain_bytes: end, ..area });
    Ok(superblock.write(io)?)
}
