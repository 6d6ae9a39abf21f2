//! The bytes of a KV block, made from its key: no copy is kept, and any byte can be checked.
//!
//! Word `i` of an object is a mix of `seed + i * GAMMA`, where the seed is a mix of the block's
//! key, layer and segment. So each word says whose it is and where it belongs: bytes of another
//! block, of another layer, or from another offset are all found.

#![allow(
    unsafe_code,
    reason = "the bytes lie in memory that devices write, where no Rust reference may point"
)]

use std::ptr::NonNull;

/// 2^64 divided by the golden ratio: a step that visits all 64-bit values.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
/// What pool memory holds before a retrieve, so that bytes nobody wrote are found.
const POISON: u64 = 0xDEAD_BEEF_DEAD_BEEF;

/// The seed of one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Contents(u64);

/// The first place where an object has other bytes than it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Difference {
    /// Bytes from the start of the object to the first wrong 4-byte word.
    pub(crate) offset: usize,
    /// The word that should be there.
    pub(crate) expected: u32,
    /// The word that is.
    pub(crate) found: u32,
}

impl Contents {
    /// The contents of `segment` of `layer` of the block with this key.
    pub(crate) fn of(key: u128, layer: u32, segment: u32) -> Self {
        let row = u64::from(layer) << 32 | u64::from(segment);
        let low = finalise(key as u64 ^ finalise(row.wrapping_add(GAMMA)));
        Self(finalise((key >> 64) as u64 ^ low))
    }

    /// Writes bytes `[offset, offset + len)` of the object to `at` and what follows.
    ///
    /// # Safety
    /// `len` bytes at `at` may be written, and nobody else reads or writes them meanwhile.
    pub(crate) unsafe fn write(self, at: NonNull<u8>, offset: usize, len: usize) {
        let (words, tail, first) = parts(offset, len);
        let at = at.as_ptr().cast::<u64>();
        for i in 0..words {
            let word = self.word(first + i as u64);
            // SAFETY: word i is within the `len` bytes, which the caller lets us write.
            unsafe { at.add(i).write_unaligned(word) };
        }
        if tail {
            let word = self.word(first + words as u64) as u32;
            // SAFETY: `tail` says that 4 bytes are left after `words` words.
            unsafe { at.add(words).cast::<u32>().write_unaligned(word) };
        }
    }

    /// Compares bytes `[offset, offset + len)` of the object with those at `at`.
    ///
    /// # Safety
    /// `len` bytes at `at` may be read, and nobody writes them meanwhile.
    pub(crate) unsafe fn check(
        self,
        at: NonNull<u8>,
        offset: usize,
        len: usize,
    ) -> Result<(), Difference> {
        let (words, tail, first) = parts(offset, len);
        let from = at.as_ptr().cast::<u64>();
        let mut difference = 0;
        for i in 0..words {
            // SAFETY: word i is within the `len` bytes, which the caller lets us read.
            difference |= unsafe { from.add(i).read_unaligned() } ^ self.word(first + i as u64);
        }
        if tail {
            // SAFETY: `tail` says that 4 bytes are left after `words` words.
            let found = unsafe { from.add(words).cast::<u32>().read_unaligned() };
            difference |= u64::from(found ^ self.word(first + words as u64) as u32);
        }
        if difference == 0 {
            return Ok(());
        }
        // SAFETY: as the caller promised us.
        unsafe { self.locate(at, offset, len) }
    }

    /// The slow look that finds the word. Memory that changed since is no difference any more,
    /// but still an error: its first word is named then.
    #[cold]
    unsafe fn locate(self, at: NonNull<u8>, offset: usize, len: usize) -> Result<(), Difference> {
        let half = |at: usize| (self.word(at as u64 / 8) >> (at % 8 * 8)) as u32;
        let mut seen = Difference { offset, expected: half(offset), found: half(offset) };
        for i in (0..len).step_by(4) {
            // SAFETY: i + 4 <= len, because `parts` asserted that len is a multiple of 4.
            let found = unsafe { at.as_ptr().add(i).cast::<u32>().read_unaligned() };
            let expected = half(offset + i);
            if found != expected {
                seen = Difference { offset: offset + i, expected, found };
                break;
            }
        }
        Err(seen)
    }

    /// One 32 x 32 bit product a word: what every vector unit has, so that the loops above
    /// vectorise even for the oldest x86-64.
    #[inline(always)]
    fn word(self, index: u64) -> u64 {
        let z = self.0.wrapping_add(index.wrapping_mul(GAMMA));
        let mixed = (z & 0xFFFF_FFFF).wrapping_mul(z >> 32) ^ z.rotate_left(32);
        mixed ^ (mixed >> 29)
    }
}

/// Overwrites memory with what no object holds.
///
/// # Safety
/// `len` bytes at `at` may be written, and nobody else reads or writes them meanwhile.
pub(crate) unsafe fn poison(at: NonNull<u8>, len: usize) {
    let (words, tail, _) = parts(0, len);
    let at = at.as_ptr().cast::<u64>();
    for i in 0..words {
        // SAFETY: word i is within the `len` bytes, which the caller lets us write.
        unsafe { at.add(i).write_unaligned(POISON) };
    }
    if tail {
        // SAFETY: `tail` says that 4 bytes are left after `words` words.
        unsafe { at.add(words).cast::<u32>().write_unaligned(POISON as u32) };
    }
}

/// Whole 8-byte words, whether 4 bytes are left over, and the index of the first word.
fn parts(offset: usize, len: usize) -> (usize, bool, u64) {
    assert!(len.is_multiple_of(4), "objects are made of 4-byte words, not {len} bytes");
    assert!(offset.is_multiple_of(8), "parts of objects start at 8-byte words, not {offset}");
    (len / 8, len % 8 == 4, offset as u64 / 8)
}

/// The end of splitmix64: every bit of the input moves every bit of the output.
fn finalise(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(contents: Contents, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: the vector's own bytes.
        unsafe { contents.write(NonNull::from(&mut bytes[..]).cast(), 0, len) };
        bytes
    }

    fn checked(contents: Contents, bytes: &mut [u8], offset: usize) -> Result<(), Difference> {
        let len = bytes.len();
        // SAFETY: the slice's own bytes.
        unsafe { contents.check(NonNull::from(bytes).cast(), offset, len) }
    }

    #[test]
    fn what_was_written_passes() {
        let contents = Contents::of(1 << 90 | 5, 3, 1);
        for len in [0, 4, 8, 12, 1024, 1028] {
            let mut bytes = made(contents, len);
            assert_eq!(checked(contents, &mut bytes, 0), Ok(()), "{len}");
        }
        let mut bytes = made(contents, 1024);
        assert_eq!(checked(contents, &mut bytes[960..], 960), Ok(()));
        assert_eq!(checked(contents, &mut bytes[64..128], 64), Ok(()));
    }

    #[test]
    fn every_wrong_byte_is_found() {
        let contents = Contents::of(77, 0, 0);
        let good = made(contents, 76);
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 0x10;
            let difference = checked(contents, &mut bytes, 0).unwrap_err();
            assert_eq!(difference.offset, at / 4 * 4);
            let word = |b: &[u8]| u32::from_le_bytes(b[at / 4 * 4..][..4].try_into().unwrap());
            assert_eq!((difference.expected, difference.found), (word(&good), word(&bytes)));
        }
    }

    #[test]
    fn bytes_of_others_are_found() {
        let contents = Contents::of(77, 2, 1);
        for other in [(78, 2, 1), (77 | 1 << 64, 2, 1), (77, 1, 1), (77, 2, 0), (77, 1, 2)] {
            let mut bytes = made(Contents::of(other.0, other.1, other.2), 64);
            for word in 0..8 {
                let part = &mut bytes[8 * word..8 * (word + 1)];
                assert!(checked(contents, part, 8 * word).is_err(), "{other:?}");
            }
        }
        // Right object, wrong offset.
        let mut bytes = made(contents, 4096);
        assert!(checked(contents, &mut bytes[8..16], 0).is_err());
        assert!(checked(contents, &mut bytes[2048..], 0).is_err());
    }

    #[test]
    fn no_two_words_of_many_objects_are_alike() {
        let mut seen = std::collections::HashSet::new();
        for key in 0..64u128 {
            for row in 0..4 {
                let contents = Contents::of(key << 60, row / 2, row % 2);
                for word in 0..128 {
                    assert!(seen.insert(contents.word(word)), "key {key}, row {row}, {word}");
                }
            }
        }
        assert!(!seen.contains(&POISON) && !seen.contains(&0));
    }

    #[test]
    fn poison_is_no_contents() {
        let contents = Contents::of(3, 0, 0);
        let mut bytes = made(contents, 28);
        // SAFETY: the vector's own bytes.
        unsafe { poison(NonNull::from(&mut bytes[..]).cast(), 28) };
        assert_eq!(checked(contents, &mut bytes, 0).unwrap_err().offset, 0);
        assert_eq!(checked(contents, &mut bytes[24..], 24).unwrap_err().found, POISON as u32);
    }
}
