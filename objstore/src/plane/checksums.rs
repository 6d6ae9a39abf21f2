//! Checksums of a job's objects: CRC-32C, computed and compared by whatever moves the objects.
//!
//! On the host and direct paths that is the I/O kernel, which reaches the pool. For a staged pool,
//! which it does not reach, it is the kernel that moves objects between staging memory and pool.

use gio_uring::{BlockMap, Checksums, DeviceArray, IoStatus, MoveChecksums, Uring};
use kv_catalog::Layer;

use crate::{error::StoreError, ids::Move};

/// The checksums of one job.
#[derive(Debug)]
pub(super) enum JobChecksums {
    /// Computed by the I/O kernel.
    Kernel(Checksums),
    /// Computed by moves on streams.
    Moves {
        /// `[row][position]`.
        values: DeviceArray<u32>,
        /// By position: set if one of its objects differed.
        status: DeviceArray<u32>,
        /// Number of objects that differed.
        errors: DeviceArray<u64>,
    },
}

impl JobChecksums {
    /// Allocates the checksums of a write, or uploads `expected`, `[block][row]`, of a read.
    pub(super) fn new(
        ring: &mut Uring,
        map: &BlockMap,
        rows: u32,
        count: usize,
        expected: &[u32],
        is_staged: bool,
    ) -> Result<Self, StoreError> {
        if is_staged {
            return Self::of_copies(ring, rows, count, expected);
        }
        if expected.is_empty() {
            return Ok(Self::Kernel(ring.new_checksums(map, rows)?));
        }
        let at = |row, entry| entry as usize * rows as usize + row as usize;
        let value = |row, entry| expected.get(at(row, entry)).copied().unwrap_or(0);
        Ok(Self::Kernel(ring.upload_checksums(map, rows, value)?))
    }

    /// Same as [`JobChecksums::new`], for `count` blocks that streams move.
    pub(super) fn of_copies(
        ring: &mut Uring,
        rows: u32,
        count: usize,
        expected: &[u32],
    ) -> Result<Self, StoreError> {
        let rows = rows as usize;
        let values = if expected.is_empty() {
            ring.zeroes(rows * count)?
        } else {
            let value = |row, entry| expected.get(entry * rows + row).copied().unwrap_or(0);
            let values = (0..rows).flat_map(|row| (0..count).map(move |entry| value(row, entry)));
            ring.upload(values.collect::<Vec<u32>>().into_iter())?
        };
        Ok(Self::Moves { values, status: ring.zeroes(count)?, errors: ring.zeroes(1)? })
    }

    /// Uploads those of a part of a read, whose entries have these `indices`, for the I/O kernel.
    pub(super) fn of_part(
        &self,
        ring: &mut Uring,
        map: &BlockMap,
        indices: &[u32],
    ) -> Result<Option<Checksums>, StoreError> {
        let Self::Kernel(all) = self else { return Ok(None) };
        let rows: Vec<Vec<u32>> = (0..all.rows()).map(|row| all.row(row)).collect();
        let value = |row: u32, entry: u32| rows[row as usize][indices[entry as usize] as usize];
        Ok(Some(ring.upload_checksums(map, all.rows(), value)?))
    }

    /// Returns the part that a move of `layer` uses.
    pub(super) fn of_moves(&self, layer: Layer, segments: u32) -> Option<MoveChecksums> {
        let Self::Moves { values, status, errors } = self else { return None };
        let first = layer.0 as usize * segments as usize * status.len();
        Some(MoveChecksums {
            values: values.address(first),
            status: status.address(0),
            errors: errors.address(0),
        })
    }

    /// Returns positions with an object that did not match its checksum, from moves that are over.
    pub(super) fn differing(&self) -> Vec<u32> {
        match self {
            Self::Moves { status, errors, .. } if errors.get(0) > 0 => {
                let differs =
                    |at: &u32| IoStatus::decode(status.get(*at as usize)) == IoStatus::Checksum;
                (0..status.len() as u32).filter(differs).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns all of them, `[block][row]`.
    pub(super) fn values(&self, rows: u32, moves: &[Move]) -> Vec<u32> {
        let (rows, count) = (rows as usize, moves.len());
        let mut all = vec![0; rows * count];
        for row in 0..rows {
            match self {
                Self::Kernel(checksums) => {
                    for (at, value) in checksums.row(row as u32).into_iter().enumerate() {
                        all[at * rows + row] = value;
                    }
                }
                Self::Moves { values, .. } => {
                    for at in 0..count {
                        all[at * rows + row] = values.get(row * count + at);
                    }
                }
            }
        }
        all
    }
}
