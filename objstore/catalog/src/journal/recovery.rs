//! Reading a half of the journal: which groups count, and whether any are missing.

use std::fmt::Display;

use super::{
    DamageProof, JournalError,
    group::{HEADER_BYTES, Series},
};
use crate::{
    block_io::{BlockError, BlockIo},
    planted::{PlantedBug, planted},
    record::{Record, Records},
    superblock::{JournalArea, Superblock},
};

/// Groups that are read at once.
const WINDOW_GROUPS: u64 = 8;

/// How far behind the end a store that opens looks for a group that should not be there: at least
/// one group further than the longest that can be missing.
pub(super) fn search_bytes(area: &JournalArea) -> u64 {
    WINDOW_GROUPS * u64::from(area.group_bytes_max)
}

/// How far a replay got.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Replayed {
    /// Where the next group belongs, from the start of the half.
    pub end: u64,
    /// Where the last group begins.
    pub last: u64,
    /// Groups.
    pub groups: u64,
}

/// Hands every record of the active half to `apply`, in order.
///
/// It ends at the first place without a whole group that belongs there. A whole group of the same
/// series up to `search_bytes` further is proof that a write is missing: groups are written one
/// after the other, each after the one before is permanent.
pub(super) fn replay<E: Display>(
    io: &mut dyn BlockIo,
    superblock: &Superblock,
    search_bytes: u64,
    replayed: &mut Replayed,
    mut apply: impl FnMut(Record<'_>) -> Result<(), E>,
    mut progress: impl FnMut(u64, u64),
) -> Result<(), JournalError> {
    let device = io.name().to_owned();
    let Some(area) = superblock.journal else { return Err(JournalError::None { device }) };
    let series = Series {
        store: superblock.store,
        generation: area.generation,
        lba_bytes: u64::from(io.lba_bytes()),
    };
    let half = area.active;
    let mut window = Window::new(io, area);
    loop {
        let position = replayed.end;
        let bytes = window.at(position)?;
        let found = series.group_in(bytes);
        let belongs = |at: u64| at == position || planted(PlantedBug::NoGroupPosition);
        let Some(group) = found.filter(|group| belongs(group.position)) else { break };
        for record in Records::new(group.payload) {
            let record = record.map_err(|error| JournalError::Record {
                device: device.clone(),
                half,
                position,
                error,
            })?;
            apply(record).map_err(|error| {
                let (device, reason) = (device.clone(), error.to_string());
                JournalError::Refused { device, half, position, reason }
            })?;
        }
        replayed.last = position;
        replayed.end += group.bytes;
        replayed.groups += 1;
        progress(replayed.end, area.half_bytes);
    }
    let end = replayed.end;
    let damaged = |proof| Err(JournalError::Damaged { device: device.clone(), half, end, proof });
    let last = end.saturating_add(search_bytes).min(area.half_bytes);
    for found in (end..last).step_by(series.lba_bytes as usize) {
        if let Some(group) = series.group_in(window.at(found)?) {
            return damaged(DamageProof::Later { found, says: group.position });
        }
    }
    let certain = area.certain_bytes;
    if end < certain { damaged(DamageProof::Superblock { certain }) } else { Ok(()) }
}

/// A part of the half, read in large pieces.
pub(super) struct Window<'a> {
    io: &'a mut dyn BlockIo,
    area: JournalArea,
    bytes: Vec<u8>,
    /// Bytes that were read: the first ones.
    filled: usize,
    /// Where they begin, from the start of the half.
    first: u64,
}

impl<'a> Window<'a> {
    pub fn new(io: &'a mut dyn BlockIo, area: JournalArea) -> Self {
        let window = WINDOW_GROUPS * u64::from(area.group_bytes_max);
        let bytes = vec![0; window.min(area.half_bytes) as usize];
        Self { io, area, bytes, filled: 0, first: 0 }
    }

    /// The bytes of the half from `position` on: those of a whole group at least, or up to the
    /// end. Positions do not go back.
    pub fn at(&mut self, position: u64) -> Result<&[u8], BlockError> {
        let left = self.area.half_bytes.saturating_sub(position);
        let wanted = left.min(u64::from(self.area.group_bytes_max));
        let mut skipped = (position - self.first).min(self.filled as u64) as usize;
        if ((self.filled - skipped) as u64) < wanted {
            self.bytes.copy_within(skipped..self.filled, 0);
            let kept = self.filled - skipped;
            let filled = left.min(self.bytes.len() as u64) as usize;
            let offset = self.area.half_offset(self.area.active) + position + kept as u64;
            // Nothing is known of them if this fails.
            (self.first, self.filled, skipped) = (position, 0, 0);
            self.io.read(offset, &mut self.bytes[kept..filled])?;
            self.filled = filled;
        }
        Ok(&self.bytes[skipped..self.filled])
    }
}

/// Bytes of records that fit into one group.
pub(super) fn payload_bytes_max(area: &JournalArea) -> usize {
    (u64::from(area.group_bytes_max) - HEADER_BYTES) as usize
}
