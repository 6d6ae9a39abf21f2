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
mod tests {
    use super::*;

    fn parts(verify: Verify, object: u32, key: u128, row: u32) -> Vec<Part> {
        let mut name = [0; 32];
        name[..16].copy_from_slice(&key.to_le_bytes());
        Sampler::new(verify, 1, object).parts(3, BlockKey(name), row).collect()
    }

    #[test]
    fn parts_cover_what_is_documented() {
        assert_eq!(parts(Verify::Full, 1024, 9, 1), [(0, 1024)]);
        assert!(parts(Verify::Off, 1024, 9, 1).is_empty());
        assert_eq!(parts(Verify::Sampled, 128, 9, 1), [(0, 128)]);
        for object in [1024, 1028] {
            let mut whole = 0;
            for key in 0..1000u128 {
                for row in 0..16 {
                    match parts(Verify::Sampled, object, key << 17, row)[..] {
                        [all] => {
                            assert_eq!(all, (0, object as usize));
                            whole += 1;
                        }
                        [first, (start, len)] => {
                            assert_eq!(first, (0, 64));
                            assert!(start.is_multiple_of(8) && (64..72).contains(&len));
                            assert_eq!(start + len, object as usize);
                        }
                        _ => panic!("no part of an object is checked"),
                    }
                }
            }
            assert!((800..1200).contains(&whole), "{whole} of 16000 objects as a whole");
        }
    }

    #[test]
    fn only_the_first_mismatches_are_kept() {
        let mut findings = Findings::default();
        let difference = Difference { offset: 8, expected: 1, found: 0xDEAD_BEEF };
        for block in 0..100 {
            findings.add(Mismatch::new(Some(4), block, (1, 0), difference));
        }
        assert_eq!((findings.mismatches, findings.shown.len()), (100, SHOWN_MAX));
        assert_eq!(
            findings.shown[2].to_string(),
            "request 4, block 2, layer 1, segment 0, offset 8: expected 0x00000001, found \
             0xdeadbeef"
        );
    }
}
