//! The bytes of a KV block, generated from its key: no copy is kept, and any byte can be checked.
//!
//! [`gio_kernels::pattern`] generates the same bytes on host and GPU. This module derives its seed
//! from the block's key, layer and segment, so that bytes of another block, layer or offset are
//! detected.

use gio_kernels::pattern::Pattern;

/// 2^64 divided by the golden ratio.
pub(crate) const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// Returns the contents of `segment` of `layer` of the block with this key.
pub(crate) fn of(key: u128, layer: u32, segment: u32) -> Pattern {
    let row = u64::from(layer) << 32 | u64::from(segment);
    let low = finalise(key as u64 ^ finalise(row.wrapping_add(GAMMA)));
    Pattern::new(finalise((key >> 64) as u64 ^ low))
}

/// Applies splitmix64's finaliser: every bit of the input affects every bit of the output.
pub(crate) fn finalise(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Applies a bijection of which every bit of the number affects every bit.
pub(crate) fn mix(number: u64) -> u64 {
    finalise(number.wrapping_add(GAMMA))
}

#[cfg(test)]
#[allow(unsafe_code, reason = "contents are made and compared by address")]
mod tests {
    use std::ptr::NonNull;

    use super::*;

    fn made(contents: Pattern, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: the vector's own bytes.
        unsafe { contents.write(NonNull::from(&mut bytes[..]).cast(), 0, len) };
        bytes
    }

    #[test]
    fn bytes_of_others_are_found() {
        let contents = of(77, 2, 1);
        for other in [(78, 2, 1), (77 | 1 << 64, 2, 1), (77, 1, 1), (77, 2, 0), (77, 1, 2)] {
            let mut bytes = made(of(other.0, other.1, other.2), 64);
            for word in 0..8 {
                let part = NonNull::from(&mut bytes[8 * word..8 * (word + 1)]).cast();
                // SAFETY: the slice's own bytes.
                let checked = unsafe { contents.check(part, 8 * word, 8) };
                assert!(checked.is_err(), "{other:?}");
            }
        }
    }

    #[test]
    fn no_two_words_of_many_objects_are_alike() {
        let mut seen = std::collections::HashSet::new();
        for key in 0..64u128 {
            for row in 0..4 {
                let bytes = made(of(key << 60, row / 2, row % 2), 8 * 128);
                for (index, word) in bytes.chunks_exact(8).enumerate() {
                    assert!(seen.insert(word.to_vec()), "key {key}, row {row}, {index}");
                }
            }
        }
    }
}
