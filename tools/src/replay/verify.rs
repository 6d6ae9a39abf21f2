//! Selection of the bytes to check, and the mismatches.

use std::fmt;

use gio_kernels::pattern::Difference;
use objstore::BlockKey;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

use crate::config::Verify;
use crate::pool::{PARTS_MAX, Part};

/// `--verify sampled`: one object in this many is checked completely.
pub(crate) const SAMPLE_ONE_IN: u32 = 16;
/// `--verify sampled`: bytes checked at each end of all other objects.
const SAMPLE_END_BYTES: usize = 64;
/// Mismatches to show; the rest is only counted.
const SHOWN_MAX: usize = 5;

/// Selects the bytes to check; deterministic for a seed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sampler {
    verify: Verify,
    seed: u64,
    object_bytes: usize,
}

impl Sampler {
    pub(crate) fn new(verify: Verify, seed: u64, object_bytes: u32) -> Self {
        Self { verify, seed, object_bytes: object_bytes as usize }
    }

    /// Returns the parts of one object to check in this request; other requests check other parts.
    pub(crate) fn parts(
        &self,
        request: u64,
        key: BlockKey,
        row: u32,
    ) -> impl Iterator<Item = Part> + use<> {
        let all = (0, self.object_bytes);
        let parts: [Option<Part>; PARTS_MAX] = match self.verify {
            Verify::Off => [None, None],
            Verify::Full => [Some(all), None],
            Verify::Sampled if self.chosen(request, key, row) => [Some(all), None],
            Verify::Sampled if self.object_bytes <= 2 * SAMPLE_END_BYTES => [Some(all), None],
            Verify::Sampled => {
                // Parts start at multiples of 8 bytes.
                let start = (self.object_bytes - SAMPLE_END_BYTES) / 8 * 8;
                [Some((0, SAMPLE_END_BYTES)), Some((start, self.object_bytes - start))]
            }
        };
        parts.into_iter().flatten()
    }

    fn chosen(&self, request: u64, key: BlockKey, row: u32) -> bool {
        let seed = self.seed ^ (key.seed() as u64) ^ u64::from(row) << 32 ^ request.rotate_left(16);
        SmallRng::seed_from_u64(seed).random_ratio(1, SAMPLE_ONE_IN)
    }
}

/// An object with wrong bytes.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub(crate) struct Mismatch {
    /// Request index from 0; `None` in the final check.
    pub(crate) request: Option<u64>,
    /// Store block of the request, from 0.
    pub(crate) block: u64,
    /// Layer.
    pub(crate) layer: u32,
    /// Segment of the layer.
    pub(crate) segment: u32,
    /// Offset in the object, in bytes.
    pub(crate) offset: usize,
    /// Expected 4-byte word.
    pub(crate) expected: u32,
    /// Word that was found.
    pub(crate) found: u32,
}

impl Mismatch {
    pub(crate) fn new(
        request: Option<u64>,
        block: u64,
        (layer, segment): (u32, u32),
        difference: Difference,
    ) -> Self {
        let Difference { offset, expected, found } = difference;
        Self { request, block, layer, segment, offset, expected, found }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.request {
            Some(request) => write!(f, "request {request}")?,
            None => write!(f, "final check")?,
        }
        write!(
            f,
            ", block {}, layer {}, segment {}, offset {}: expected {:#010x}, found {:#010x}",
            self.block, self.layer, self.segment, self.offset, self.expected, self.found
        )
    }
}

/// Results of the checks.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// Bytes compared.
    pub(crate) bytes: u64,
    /// Objects with wrong bytes.
    pub(crate) mismatches: u64,
    /// The first mismatches.
    pub(crate) shown: Vec<Mismatch>,
}

impl Findings {
    pub(crate) fn add(&mut self, mismatch: Mismatch) {
        self.mismatches += 1;
        if self.shown.len() < SHOWN_MAX {
            self.shown.push(mismatch);
        }
    }
}

#[cfg(test)]
mod tests;
