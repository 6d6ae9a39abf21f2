use bolero::{TypeGenerator, check};
use proptest::prelude::*;

use super::*;

/// Decodes by the table of the crate's documentation, a scalar at a time.
fn model(encoded: &[u8], n: usize) -> Vec<u16> {
    let mut rest = encoded;
    let mut take = |bytes: usize| rest.split_off(..bytes).expect("the length is right");
    let mut escapes = take(encoded.len() - n * 89 / 64).iter();
    let (bases, low, codes) = (take(n / 64), take(n), take(n * 3 / 8));
    let bit = |i: usize, k: usize| codes[i / 64 * 24 + k * 8 + i % 64 / 8] >> (i % 8) & 1;
    let scalar = |i| {
        let exponent = match bit(i, 0) + 2 * bit(i, 1) + 4 * bit(i, 2) {
            7 => *escapes.next().expect("room for this escape"),
            code => bases[i / 64].wrapping_add(code),
        };
        let (sign, mantissa) = (low[i] >> 7, low[i] & 0x7f);
        u16::from(sign) << 15 | u16::from(exponent) << 7 | u16::from(mantissa)
    };
    (0..n).map(scalar).collect()
}

/// Returns the escapes of an object, by the rule of the crate's documentation.
fn escapes(scalars: &[u16]) -> usize {
    let of_chunk = |chunk: &[u16]| {
        let exponents = || chunk.iter().map(|scalar| i32::from(scalar >> 7 & 0xff));
        let largest = exponents().max().unwrap();
        let coded = |base: i32| exponents().filter(|e| (base..base + 7).contains(e)).count();
        64 - (6..14).map(|below| coded((largest - below).max(0))).max().unwrap()
    };
    scalars.chunks(64).map(of_chunk).sum()
}

fn bytes(scalars: &[u16]) -> Vec<u8> {
    scalars.iter().flat_map(|scalar| scalar.to_le_bytes()).collect()
}

fn scalar(exponent: u8, i: usize) -> u16 {
    let others = (i * 0x9e5) as u16;
    others & 0x807f | u16::from(exponent) << 7
}

/// Scalars with exponents near a base of each 64, and of `escapes` in 1000 any exponent. And bytes
/// beyond the least length.
fn objects() -> impl Strategy<Value = (Vec<u16>, usize)> {
    (0u32..200, 0usize..700).prop_flat_map(|(escapes, more)| {
        let chunk = (any::<u8>(), 1u8..12).prop_flat_map(move |(base, width)| {
            let exponent = prop_oneof![
                1000 - escapes => (0..width).prop_map(move |above| base.saturating_add(above)),
                // Zero and subnormals, infinities and NaN.
                escapes / 2 => prop::sample::select(vec![0, 255]),
                escapes - escapes / 2 => any::<u8>(),
            ];
            let scalar = (exponent, any::<u16>())
                .prop_map(|(exponent, others)| others & 0x807f | u16::from(exponent) << 7);
            prop::collection::vec(scalar, 64)
        });
        (prop::collection::vec(chunk, 1..24).prop_map(|chunks| chunks.concat()), Just(more))
    })
}

proptest! {
    /// All instruction sets restore an object that fits, and write the same bytes, those of the
    /// documentation. One that does not fit has too many escapes.
    #[test]
    fn every_object_is_restored((scalars, more) in objects()) {
        let raw = bytes(&scalars);
        let escapes = escapes(&scalars);
        let m = encoded_len(raw.len()).unwrap() + more;
        let budget = m - scalars.len() * 89 / 64;
        let mut first = None;
        for isa in Isa::all() {
            let mut encoded = vec![0xa5; m];
            let result = isa.encode(&raw, &mut encoded);
            if escapes > budget {
                prop_assert_eq!(result, Err(DoesNotFit { escapes, budget }));
                continue;
            }
            prop_assert_eq!(result, Ok(()));
            prop_assert_eq!(&model(&encoded, scalars.len()), &scalars, "{:?}", isa);
            prop_assert!(encoded[escapes..budget].iter().all(|&byte| byte == 0), "{:?}", isa);
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
    base: u8,
    edits: Vec<(u16, u8)>,
    /// Codes of this chunk and the next ones become escapes.
    escapes: Option<(u8, u8)>,
}

/// All instruction sets say the same of any bytes and write the same, and none writes elsewhere.
/// Decoded bytes are those that the documentation says.
#[test]
fn damaged() {
    check!(name = "damaged").with_type::<Damage>().with_iterations(2000).for_each(|damage| {
        let n = 64 * (1 + usize::from(damage.chunks) % 40);
        let raw: Vec<u16> =
            (0..n).map(|i| scalar(damage.base.wrapping_add(i as u8 % 7), i)).collect();
        let mut encoded = vec![0; n * 3 / 2 + usize::from(damage.more)];
        // Around exponent 0 it does not fit, and is damaged in another way.
        let _ = encode(&bytes(&raw), &mut encoded);
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
    let budget = encoded.len() - scalars * 89 / 64;
    let codes = &encoded[encoded.len() - scalars * 3 / 8..];
    let escapes: u32 = codes
        .chunks(24)
        .flat_map(|c| (0..8).map(|i| c[i] & c[i + 8] & c[i + 16]))
        .map(u8::count_ones)
        .sum();
    let expected = if escapes as usize > budget { Err(Damaged { budget }) } else { Ok(()) };
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

/// As many escapes as there is room for, and one more.
#[test]
fn all_room_is_used() {
    for (escapes, fits) in [(70, true), (71, false)] {
        // 640 scalars in 960 bytes.
        let far = |i: usize| i % 64 < escapes / 10 + usize::from(i / 64 < escapes % 10);
        let scalars: Vec<u16> =
            (0..640).map(|i| scalar(if far(i) { 3 } else { 120 + i as u8 % 7 }, i)).collect();
        for isa in Isa::all() {
            let mut encoded = vec![0; 960];
            let result = isa.encode(&bytes(&scalars), &mut encoded);
            let expected = if fits { Ok(()) } else { Err(DoesNotFit { escapes, budget: 70 }) };
            assert_eq!(result, expected, "{isa:?}");
            if fits {
                assert_eq!(model(&encoded, 640), scalars, "{isa:?}");
                check_damaged(&encoded, 640);
                // Scalar 63 of the last 64 becomes one escape too many.
                for byte in [7, 15, 23] {
                    encoded[960 - 24 + byte] |= 0x80;
                }
                check_damaged(&encoded, 640);
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
