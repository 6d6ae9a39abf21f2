//! AVX-512 with VBMI2 (Ice Lake, Zen 4): 64 scalars at a time, a mask register for each word.
#![allow(unsafe_code, reason = "loads and stores of vectors take addresses")]

use std::arch::x86_64::*;

use super::avx2;
use crate::{
    Damaged, DoesNotFit, ESCAPE,
    encoded::{self, Bytes, Codes, Scalars},
    portable,
};

/// Does [`crate::encode`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
pub(crate) fn encode(raw: &[u8], out: &mut [u8]) -> Result<(), DoesNotFit> {
    encoded::encode(raw, out, |raw, low, escapes| encode_chunk(raw, low, escapes))
}

/// Does [`crate::decode`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
pub(crate) fn decode(encoded: &[u8], out: &mut [u8]) -> Result<(), Damaged> {
    encoded::decode(encoded, out, |codes, low, escapes, out| {
        decode_chunk(codes, low, escapes, out);
    })
}

/// Encodes 64 scalars.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
fn encode_chunk(raw: &Scalars, low: &mut Bytes, escapes: &mut Bytes) -> Codes {
    let (halves, _) = raw.as_chunks();
    let (a, b) = (load(&halves[0]), load(&halves[1]));
    let even = load(&std::array::from_fn(|i| 2 * i as u8));
    let pack = |a, b| _mm512_permutex2var_epi8(a, even, b);
    let exponent = pack(_mm512_srli_epi16::<7>(a), _mm512_srli_epi16::<7>(b));
    let upper = pack(_mm512_srli_epi16::<8>(a), _mm512_srli_epi16::<8>(b));
    let code = |base| {
        let above = _mm512_sub_epi8(exponent, _mm512_set1_epi8(base as i8));
        _mm512_min_epu8(above, _mm512_set1_epi8(ESCAPE as i8))
    };
    let escape = _mm512_set1_epi8(ESCAPE as i8);
    let halves = (_mm512_castsi512_si256(exponent), _mm512_extracti64x4_epi64::<1>(exponent));
    let base = portable::base(avx2::largest(_mm256_max_epu8(halves.0, halves.1)), |base| {
        _mm512_cmplt_epu8_mask(code(base), escape).count_ones() as u8
    });
    let code = code(base);
    let words = [1, 2, 4].map(|bit| _mm512_test_epi8_mask(code, _mm512_set1_epi8(bit)));
    let codes = Codes { base, words };
    store(low, select_sign(upper, pack(a, b)));
    store(escapes, _mm512_maskz_compress_epi8(codes.escapes(), exponent));
    codes
}

/// Decodes 64 scalars.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
fn decode_chunk(codes: Codes, low: &Bytes, escapes: &Bytes, out: &mut Scalars) {
    let [b0, b1, b2] = codes.words;
    let mut exponent = _mm512_set1_epi8(codes.base as i8);
    for (word, value) in [(b0, 1), (b1, 2), (b2, 4)] {
        exponent = _mm512_mask_add_epi8(exponent, word, exponent, _mm512_set1_epi8(value));
    }
    let places = codes.escapes();
    let exponent = _mm512_mask_expand_epi8(exponent, places, load(escapes));
    let low = load(low);
    let upper = select_sign(low, _mm512_srli_epi16::<1>(exponent));
    let lower = select_sign(_mm512_slli_epi16::<7>(exponent), low);
    for (half, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        // A lower and an upper byte in turn; those of the second register are 64 and more.
        let order = load(&std::array::from_fn(|i| (32 * half + i / 2 + 64 * (i % 2)) as u8));
        store(out, _mm512_permutex2var_epi8(lower, order, upper));
    }
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
