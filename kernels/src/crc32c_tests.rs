#![allow(unsafe_code, reason = "calls into the C++ half on memory of the tests")]
//! All implementations of the kernel's CRC-32C against published vectors and another library.

use proptest::prelude::*;

use crate::ffi;

/// Warp, lookup table, CRC instruction, wide (carry-less) products, warp of the pool's kernel.
const FORMS: [u32; 5] = [0, 1, 2, 3, 4];

/// CRC of a part of `bytes`, with at least 16 bytes before and after: a warp loads whole units.
fn crc(bytes: &[u8], from: usize, len: usize, form: u32) -> u32 {
    assert!(from >= 16 && from + len + 16 <= bytes.len());
    let at = bytes.as_ptr().expose_provenance() + from;
    // SAFETY: inside the slice, including the units that a warp loads around the range.
    unsafe { ffi::gio_host_crc32c(at as u64, len as u32, form) }
}

/// RFC 3720, appendix B.4, and the check value of the catalogue of parametrised CRCs.
#[test]
fn published_vectors() {
    let read_10 = [
        0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0, 0, 0x04, 0, 0, 0,
        0, 0x14, 0, 0, 0, 0x18, 0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0, 0,
    ];
    let vectors: [(Vec<u8>, u32); 7] = [
        (vec![0; 32], 0x8a91_36aa),
        (vec![0xff; 32], 0x62a8_ab43),
        ((0..32).collect(), 0x46dd_794e),
        ((0..32).rev().collect(), 0x113f_db5c),
        (read_10.to_vec(), 0xd996_3a56),
        (b"123456789".to_vec(), 0xe306_9283),
        (Vec::new(), 0),
    ];
    for (message, expected) in vectors {
        for from in 16..48 {
            let mut bytes = vec![0xa5; from];
            bytes.extend(&message);
            bytes.extend([0xa5; 16]);
            for form in FORMS {
                let found = crc(&bytes, from, message.len(), form);
                assert_eq!(found, expected, "form {form}, from {from}: {message:x?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None, cases: 400, ..ProptestConfig::default()
    })]

    #[test]
    fn any_bytes_anywhere(
        bytes in proptest::collection::vec(any::<u8>(), 12_000),
        from in 16usize..600,
        len in prop_oneof![0usize..70, 0usize..5000, 0usize..11_000],
    ) {
        let expected = crc32c::crc32c(&bytes[from..from + len]);
        for form in FORMS {
            prop_assert_eq!(crc(&bytes, from, len, form), expected, "form {}", form);
        }
    }

    /// A warp loads batches of them ahead.
    #[test]
    fn whole_units(
        bytes in proptest::collection::vec(any::<u8>(), 12_000),
        from in 1usize..40,
        units in 0usize..690,
    ) {
        let from = from * 16 + bytes.as_ptr().align_offset(16);
        let len = units * 16;
        let expected = crc32c::crc32c(&bytes[from..from + len]);
        for form in FORMS {
            prop_assert_eq!(crc(&bytes, from, len, form), expected, "form {}", form);
        }
    }
}
