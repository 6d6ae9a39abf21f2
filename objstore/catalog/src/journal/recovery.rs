//! Replay of a journal half: finds its valid groups, and detects missing ones.

use std::fmt::Display;

use super::{DamageProof, JournalError, group::Series};
use crate::{
    block_io::{BlockError, BlockIo},
    record::{Record, Records},
    superblock::{GROUP_HEADER_BYTES, JournalArea, Superblock},
};

/// Groups per read.
const WINDOW_GROUPS: u64 = 8;

/// Returns how far behind the end an opening store searches for stray groups: at least one group
/// further than the longest that can be missing.
pub(super) fn search_bytes(area: &JournalArea) -> u64 {
    WINDOW_GROUPS * u64::from(area.group_bytes_max)
}

/// Progress of a replay.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Replayed {
    /// Offset of the next group, from the start of the half.
    pub end: u64,
    /// Offset of the last group.
    pub last: u64,
    /// Groups replayed.
    pub groups: u64,
}

/// Passes every record of the active half to `apply`, in order.
///
/// It ends at the first offset without a whole group that belongs there. A whole group of the same
/// series up to `search_bytes` further proves that a write is missing: each group is written after
/// the one before is durable.
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
        let Some(group) = found.filter(|group| group.position == position) else { break };
        for record in Records::new(group.payload) {
            let refused = |reason: String| JournalError::Record {
                device: device.clone(),
                half,
                position,
                reason,
            };
            let record = record.map_err(|error| refused(error.to_string()))?;
            apply(record).map_err(|error| refused(error.to_string()))?;
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
    /// Valid bytes at the start of `bytes`.
    filled: usize,
    /// Offset of the first one, from the start of the half.
    first: u64,
}

impl<'a> Window<'a> {
    pub fn new(io: &'a mut dyn BlockIo, area: JournalArea) -> Self {
        let window = WINDOW_GROUPS * u64::from(area.group_bytes_max);
        let bytes = vec![0; window.min(area.half_bytes) as usize];
        Self { io, area, bytes, filled: 0, first: 0 }
    }

    /// Returns the bytes of the half from `position` on: at least a whole group, or up to the end.
    /// Positions must not decrease.
    pub fn at(&mut self, position: u64) -> Result<&[u8], BlockError> {
        let left = self.area.half_bytes.saturating_sub(position);
        let wanted = left.min(u64::from(self.area.group_bytes_max));
        let mut skipped = (position - self.first).min(self.filled as u64) as usize;
        if ((self.filled - skipped) as u64) < wanted {
            self.bytes.copy_within(skipped..self.filled, 0);
            let kept = self.filled - skipped;
            let filled = left.min(self.bytes.len() as u64) as usize;
            let offset = self.area.half_offset(self.area.active) + position + kept as u64;
            // The window is empty if the read fails.
            (self.first, self.filled, skipped) = (position, 0, 0);
            self.io.read(offset, &mut self.bytes[kept..filled])?;
            self.filled = filled;
        }
        Ok(&self.bytes[skipped..self.filled])
    }
}

/// Returns the bytes of records that fit into one group.
pub(super) fn payload_bytes_max(area: &JournalArea) -> usize {
    (u64::from(area.group_bytes_max) - GROUP_HEADER_BYTES) as usize
}
