use bolero::{TypeGenerator, check};
use proptest::prelude::*;

use super::*;

/// Decodes by the table of the crate's documentation, a scalar at a time.
fn model(encoded: &[u8], scalars: usize) -> Vec<u16> {
    let (m, n) = (encoded.len(), scalars);
    let mut escapes = encoded[8..m - n * 11 / 8].iter();
    let low = &encoded[m - n * 11 / 8..m - n * 3 / 8];
    let codes = &encoded[m - n * 3 / 8..];
    let bit = |i: usize, k: usize| codes[i / 64 * 24 + k * 8 + i % 64 / 8] >> (i % 8) & 1;
    let scalar = |i| {
        let code = bit(i, 0) + 2 * bit(i, 1) + 4 * bit(i, 2);
        let exponent = match code {
            7 => *escapes.next().expect("room for this escape"),
            code => encoded[usize::from(code)],
        };
        let (sign, mantissa) = (low[i] >> 7, low[i] & 0x7f);
        u16::from(sign) << 15 | u16::from(exponent) << 7 | u16::from(mantissa)
    };
    (0..n).map(scalar).collect()
}

fn bytes(scalars: &[u16]) -> Vec<u8> {
    scalars.iter().flat_map(|scalar| scalar.to_le_bytes()).collect()
}

fn scalar(exponent: u8, i: usize) -> u16 {
    let others = (i * 0x9e5) as u16;
    others & 0x807f | u16::from(exponent) << 7
}

/// Scalars with up to `kinds` exponents, and of `escapes` in 1000 any exponent.
fn objects() -> impl Strategy<Value = (Vec<u16>, usize)> {
    let shape = (1usize..40, prop::collection::vec(any::<u8>(), 1..9), 0u32..200, 0usize..700);
    shape.prop_flat_map(|(chunks, common, escapes, more)| {
        let exponent = prop_oneof![
            1000 - escapes => prop::sample::select(common),
            // Zero and subnormals, infinities and NaN.
            escapes / 2 => prop::sample::select(vec![0, 255]),
            escapes - escapes / 2 => any::<u8>(),
        ];
        let scalar = (exponent, any::<u16>())
            .prop_map(|(exponent, others)| others & 0x807f | u16::from(exponent) << 7);
        (prop::collection::vec(scalar, 64 * chunks), Just(more))
    })
}

proptest! {
    /// What fits is restored by all instruction sets, which write the same bytes, those of the
    /// documentation. What does not fit has too many escapes, and nothing was written.
    #[test]
    fn every_object_is_restored((scalars, more) in objects()) {
        let raw = bytes(&scalars);
        let mut counts = [0; 256];
        for scalar in &scalars {
            counts[usize::from(scalar >> 7 & 0xff)] += 1;
        }
        counts.sort_unstable();
        let escapes: usize = counts[..249].iter().sum();
        let m = encoded_len(raw.len()).unwrap() + more;
        let budget = m - 8 - scalars.len() * 11 / 8;
        let mut first = None;
        for isa in Isa::all() {
            let mut encoded = vec![0xa5; m];
            let result = isa.encode(&raw, &mut encoded);
            if escapes > budget {
                prop_assert_eq!(result, Err(DoesNotFit { escapes, budget }));
                prop_assert!(encoded.iter().all(|&byte| byte == 0xa5));
                continue;
            }
            prop_assert_eq!(result, Ok(()));
            prop_assert_eq!(&model(&encoded, scalars.len()), &scalars, "{:?}", isa);
            let mut out = vec![0x5a; raw.len()];
            isa.decode(&encoded, &mut out).unwrap();
            prop_assert_eq!(&out, &raw, "{:?}", isa);
            let first = first.get_or_insert_with(|| encoded.clone());
            prop_assert_eq!(&*first, &encoded, "{:?}", isa);
        }
    }
}

/// Damage of an encoded object.
#[derive(Debug, TypeGenerator)]
struct Damage {
    chunks: u8,
    more: u8,
    /// Exponents of the scalars, repeated.
    exponents: [u8; 7],
    edits: Vec<(u16, u8)>,
    /// Codes of this chunk and the next ones become escapes.
    escapes: Option<(u8, u8)>,
}

/// Whatever the bytes are, all instruction sets say the same of them and write the same, and none
/// writes elsewhere. What they return as decoded is what the documentation says of these bytes.
#[test]
fn damaged() {
    check!(name = "damaged").with_type::<Damage>().with_iterations(2000).for_each(|damage| {
        let n = 64 * (1 + usize::from(damage.chunks) % 40);
        let raw: Vec<u16> = (0..n).map(|i| scalar(damage.exponents[i % 7], i)).collect();
        let mut encoded = vec![0; n * 3 / 2 + usize::from(damage.more)];
        encode(&bytes(&raw), &mut encoded).unwrap();
        let m = encoded.len();
        for (place, byte) in &damage.edits {
            encoded[usize::from(*place) % m] = *byte;
        }
        if let Some((first, count)) = damage.escapes {
            let codes = &mut encoded[m - n * 3 / 8..];
            let range = usize::from(first)..usize::from(first) + usize::from(count);
            codes.chunks_mut(24).enumerate().filter(|(i, _)| range.contains(i)).for_each(|c| {
                c.1.fill(0xff);
            });
        }
        check_damaged(&encoded, n);
    });
}

fn check_damaged(encoded: &[u8], scalars: usize) {
    const GUARD: usize = 64;
    let budget = encoded.len() - 8 - scalars * 11 / 8;
    let codes = &encoded[encoded.len() - scalars * 3 / 8..];
    let escapes: u32 = codes
        .chunks(24)
        .flat_map(|c| (0..8).map(|i| c[i] & c[i + 8] & c[i + 16]))
        .map(u8::count_ones)
        .sum();
    let expected = match encoded[7] {
        0 if escapes as usize > budget => Err(Damaged::Escapes { budget }),
        0 => Ok(()),
        found => Err(Damaged::Format { found }),
    };
    for isa in Isa::all() {
        let mut memory = vec![0x5a; GUARD + 2 * scalars + GUARD];
        let result = isa.decode(encoded, &mut memory[GUARD..][..2 * scalars]);
        assert_eq!(result, expected, "{isa:?}");
        let (before, rest) = memory.split_at(GUARD);
        let (out, behind) = rest.split_at(2 * scalars);
        assert!(before.iter().chain(behind).all(|&byte| byte == 0x5a), "{isa:?}");
        if expected.is_ok() {
            assert_eq!(out, bytes(&model(encoded, scalars)), "{isa:?}");
        }
    }
}

/// Escapes at the last place there is, and one more. The most frequent exponents have 65 scalars
/// each, and zero to seven others are as frequent as each other: the lower ones get codes.
#[test]
fn all_room_is_used() {
    // 640 scalars in 960 bytes: 72 escapes.
    let exponents = |escapes| (0..640 - escapes).map(|i| [9, 8, 200, 254, 1, 100, 30][i % 7]);
    for (escapes, fits) in [(72, true), (73, false)] {
        let rare = (0..escapes).map(|i| [255, 0, 128, 31, 99][i % 5]);
        let scalars: Vec<u16> =
            exponents(escapes).chain(rare).enumerate().map(|(i, e)| scalar(e, i)).collect();
        for isa in Isa::all() {
            let mut encoded = vec![0; 960];
            let result = isa.encode(&bytes(&scalars), &mut encoded);
            assert_eq!(result.is_ok(), fits, "{isa:?} {escapes}");
            if fits {
                assert_eq!(encoded[..8], [1, 8, 9, 30, 100, 200, 254, 0]);
                assert_eq!(model(&encoded, 640), scalars);
            }
        }
    }
}

#[test]
fn lengths() {
    assert_eq!(encoded_len(0), None);
    assert_eq!(encoded_len(64), None);
    assert_eq!(encoded_len(4098), None);
    assert_eq!(encoded_len(128), Some(96));
    assert_eq!(encoded_len(32 << 10), Some(24 << 10));
    assert_eq!(encoded_len(18432), Some(13824), "a page of a latent cache, 16 x 576");
}

#[test]
#[should_panic(
    expected = "an object of 256 bytes is encoded in Some(192) bytes or more, not in 191"
)]
fn a_short_output_is_refused() {
    let _ = encode(&[0; 256], &mut [0; 191]);
}
