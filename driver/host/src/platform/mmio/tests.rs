#![allow(unsafe_code, reason = "calls the accessors on memory of the test")]

use super::*;

/// Long copies, cached and non-temporal.
#[test]
fn long_copies_keep_to_their_bytes_at_every_alignment() {
    const BYTES: usize = 2048;
    let data: Vec<u8> = (0..BYTES as u32).map(|at| (at % 251) as u8 + 1).collect();
    for offset in 0..80 {
        for len in [0, 1, 63, 64, 65, 127, 500, 511, 512, 513, 600, 1024, 1500] {
            let mut expected = vec![0; BYTES];
            expected[offset..offset + len].copy_from_slice(&data[..len]);
            for is_uncached in [false, true] {
                let mut memory = vec![0u8; BYTES];
                let mut back = vec![0; len];
                let base = NonNull::from(&mut memory[..]).cast::<u8>();
                // SAFETY: offset + len < BYTES, used through `base` only until here.
                unsafe {
                    match is_uncached {
                        true => copy_to_uncached(base.add(offset), &data[..len]),
                        false => copy_to(base.add(offset), &data[..len]),
                    }
                    uncached_fence();
                    copy_from(base.add(offset), &mut back);
                }
                assert_eq!(back, data[..len], "{offset} {len}");
                assert_eq!(memory, expected, "{offset} {len}");
            }
        }
    }
}

#[test]
fn copies_keep_to_their_bytes_at_every_alignment() {
    let data: Vec<u8> = (1..=40).collect();
    for offset in 0..8 {
        for len in 0..=data.len() {
            let mut memory = [0u64; 7];
            let base = NonNull::from(&mut memory).cast::<u8>();
            let mut back = vec![0; len];
            // SAFETY: offset + len <= 48 of 56 bytes, used through `base` only until here.
            unsafe {
                copy_to(base.add(offset), &data[..len]);
                copy_from(base.add(offset), &mut back);
            }
            assert_eq!(back, data[..len], "{offset} {len}");
            let mut expected = [0; 56];
            expected[offset..offset + len].copy_from_slice(&data[..len]);
            assert_eq!(zerocopy::IntoBytes::as_bytes(&memory), expected, "{offset} {len}");
            // SAFETY: as above.
            unsafe { zero(NonNull::from(&mut memory).cast::<u8>().add(offset), len) };
            assert_eq!(memory, [0; 7], "{offset} {len}");
        }
    }
}
