//! AVX-512 with VBMI2 (Ice Lake, Zen 4): 64 scalars at a time, a mask register for each word.

use std::arch::x86_64::*;

use crate::{
    CHUNK,
    encoded::{Encoded, Room, codes, words},
    table::Table,
};

/// See [`crate::portable::encode`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
pub(crate) fn encode(table: &Table, raw: &[[u8; 2 * CHUNK]], room: Room) {
    let even = load(&std::array::from_fn(|i| 2 * i as u8));
    let mut next = 0;
    for ((raw, low), to) in raw.iter().zip(room.low).zip(room.codes) {
        let (halves, _) = raw.as_chunks();
        let (a, b) = (load(&halves[0]), load(&halves[1]));
        let pack = |a, b| _mm512_permutex2var_epi8(a, even, b);
        let exponent = pack(_mm512_srli_epi16::<7>(a), _mm512_srli_epi16::<7>(b));
        let upper = pack(_mm512_srli_epi16::<8>(a), _mm512_srli_epi16::<8>(b));
        store(low, select_sign(upper, pack(a, b)));
        let found = table.exponents.map(|exponent_of_code| {
            _mm512_cmpeq_epi8_mask(exponent, _mm512_set1_epi8(exponent_of_code as i8))
        });
        let places = !found.into_iter().fold(0, |all, found| all | found);
        let words = [
            found[1] | found[3] | found[5] | places,
            found[2] | found[3] | found[6] | places,
            found[4] | found[5] | found[6] | places,
        ];
        let mut these = [0; CHUNK];
        store(&mut these, _mm512_maskz_compress_epi8(places, exponent));
        let count = places.count_ones() as usize;
        room.escapes[next..next + count].copy_from_slice(&these[..count]);
        next += count;
        *to = codes(words);
    }
}

/// See [`crate::portable::decode`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
pub(crate) fn decode(encoded: &Encoded, out: &mut [[u8; 2 * CHUNK]]) -> Option<()> {
    let table = _mm512_set1_epi64(i64::from_le_bytes(encoded.table()));
    // Byte i of the lower (even) or upper (odd) bytes, which are 64 and more here.
    let order = |from: usize| load(&std::array::from_fn(|i| (from + i / 2 + 64 * (i % 2)) as u8));
    let orders = [order(0), order(32)];
    let mut next = 0;
    for ((low, codes), out) in encoded.low.iter().zip(encoded.codes).zip(out) {
        let words = words(codes);
        let places = words[0] & words[1] & words[2];
        let window = encoded.window(next);
        next += places.count_ones() as usize;
        if next > encoded.budget {
            return None;
        }
        let mut code = _mm512_maskz_set1_epi8(words[0], 1);
        code = _mm512_mask_add_epi8(code, words[1], code, _mm512_set1_epi8(2));
        code = _mm512_mask_add_epi8(code, words[2], code, _mm512_set1_epi8(4));
        let exponent = _mm512_shuffle_epi8(table, code);
        let exponent = _mm512_mask_expand_epi8(exponent, places, load(window));
        let low = load(low);
        let upper = select_sign(low, _mm512_srli_epi16::<1>(exponent));
        let lower = select_sign(_mm512_slli_epi16::<7>(exponent), low);
        for (order, out) in orders.iter().zip(out.as_chunks_mut().0) {
            store(out, _mm512_permutex2var_epi8(lower, *order, upper));
        }
    }
    Some(())
}

/// Returns bit 7 of each byte of `bit`, and the other bits of `rest`.
#[target_feature(enable = "avx512f")]
fn select_sign(bit: __m512i, rest: __m512i) -> __m512i {
    _mm512_ternarylogic_epi64::<0xca>(_mm512_set1_epi8(-128), bit, rest)
}

#[target_feature(enable = "avx512f")]
fn load(from: &[u8; 64]) -> __m512i {
    // SAFETY: 64 bytes are read, and any address will do.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
fn store(to: &mut [u8; 64], value: __m512i) {
    // SAFETY: 64 bytes are written, and any address will do.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), value) }
}
