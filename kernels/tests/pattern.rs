//! Contents generated and checked by the host: `include/pool/pattern.cuh`, compiled for the host.
#![allow(unsafe_code, reason = "works on raw memory")]

use std::ptr::NonNull;

use gio_kernels::pattern::{Difference, Pattern, poison};

/// Independent implementation of the definition: word `index` of the object with this seed.
fn word(seed: u64, index: u64) -> u64 {
    let z = seed.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mixed = (z & 0xFFFF_FFFF).wrapping_mul(z >> 32) ^ z.rotate_left(32);
    mixed ^ (mixed >> 29)
}

/// Returns bytes `[offset, offset + len)` of the object, by the definition.
fn wanted(seed: u64, offset: usize, len: usize) -> Vec<u8> {
    let words = (offset as u64 / 8..).map(|index| word(seed, index));
    words.take(len.div_ceil(8)).flat_map(u64::to_le_bytes).take(len).collect()
}

fn write(seed: u64, bytes: &mut [u8], offset: usize) {
    let len = bytes.len();
    // SAFETY: the slice's own bytes.
    unsafe { Pattern::new(seed).write(NonNull::from(bytes).cast(), offset, len) };
}

fn check(seed: u64, bytes: &mut [u8], offset: usize) -> Result<(), Difference> {
    let len = bytes.len();
    // SAFETY: the slice's own bytes.
    unsafe { Pattern::new(seed).check(NonNull::from(bytes).cast(), offset, len) }
}

fn poison_all(bytes: &mut [u8]) {
    let len = bytes.len();
    // SAFETY: the slice's own bytes.
    unsafe { poison(NonNull::from(bytes).cast(), len) };
}

/// A deterministic pseudo-random generator.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(1);
        (word(!self.0, self.0) % end as u64) as usize
    }
}

#[test]
fn the_words_are_those_of_the_definition_wherever_they_lie() {
    for round in 0..400 {
        let mut random = Random(round << 32);
        let (seed, at) = (word(round, 1), random.below(17));
        let (offset, len) = (8 * random.below(600), 4 * random.below(700));
        let context = format!("round {round}: {len} bytes from {offset} on, at {at}");
        let mut memory = vec![0x77; at + len + 32];
        write(seed, &mut memory[at..at + len], offset);
        assert!(memory[at..at + len] == wanted(seed, offset, len), "{context}");
        let around = memory[..at].iter().chain(&memory[at + len..]);
        assert!(around.clone().all(|byte| *byte == 0x77), "{context}: wrote past an end");
        assert_eq!(check(seed, &mut memory[at..at + len], offset), Ok(()), "{context}");
        poison_all(&mut memory[at..at + len]);
        let around = memory[..at].iter().chain(&memory[at + len..]);
        assert!(around.clone().all(|byte| *byte == 0x77), "{context}: poisoned past an end");
        let pair = 0xDEAD_BEEF_u32.to_le_bytes();
        assert!(memory[at..at + len].chunks(4).all(|four| four == pair), "{context}");
    }
}

#[test]
fn every_wrong_byte_is_found_and_the_first_is_named() {
    for (at, offset, len) in [(0, 0, 76), (4, 64, 128), (1, 8, 20), (0, 16, 4), (9, 0, 68)] {
        let good = wanted(77, offset, len);
        for wrong in 0..len {
            let mut memory = vec![0; at + len];
            memory[at..].copy_from_slice(&good);
            // A second wrong byte after it must not hide it.
            for byte in [wrong, len - 1] {
                memory[at + byte] = !good[byte];
            }
            let seen = check(77, &mut memory[at..], offset).expect_err("a byte is wrong");
            let half = |bytes: &[u8]| {
                u32::from_le_bytes(bytes[wrong / 4 * 4..][..4].try_into().expect("four"))
            };
            let found = half(&memory[at..]);
            let first = Difference { offset: offset + wrong / 4 * 4, expected: half(&good), found };
            assert_eq!(seen, first, "byte {wrong} of {len} from {offset} on, at {at}");
        }
    }
}

#[test]
fn other_objects_other_offsets_and_poison_differ_in_every_word() {
    let seed = word(9, 9);
    for other in [seed + 1, !seed, 0] {
        let mut bytes = wanted(other, 0, 64);
        for at in (0..64).step_by(8) {
            check(seed, &mut bytes[at..at + 8], at).expect_err("another object's");
        }
    }
    let mut bytes = wanted(seed, 0, 4096);
    check(seed, &mut bytes[8..16], 0).expect_err("from another offset");
    check(seed, &mut bytes[2048..], 0).expect_err("from another offset");
    let mut poisoned = vec![0; 4096];
    poison_all(&mut poisoned);
    for at in (0..4096).step_by(4) {
        let offset = at / 8 * 8;
        let seen = check(seed, &mut poisoned[offset..at + 4], offset).expect_err("poison");
        assert_eq!(seen.found, 0xDEAD_BEEF);
    }
}

#[test]
fn what_is_not_made_of_words_is_a_mistake_of_the_caller() {
    for (offset, len) in [(0, 3), (4, 8), (8, 6), (1, 4)] {
        let caught = std::panic::catch_unwind(|| write(1, &mut vec![0; len], offset));
        caught.expect_err("not made of words");
    }
}
