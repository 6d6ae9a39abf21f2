//! AVX2: twice 32 scalars.
#![allow(unsafe_code, reason = "loads and stores of vectors take addresses")]

use std::arch::x86_64::*;

use crate::{
    CHUNK, Damaged, DoesNotFit, ESCAPE,
    encoded::{self, Bytes, Codes, Scalars},
    portable,
};

/// For each byte of eight places, which of the next escapes goes where.
static EXPAND: [[u8; 8]; 256] = {
    let mut table = [[0x80; 8]; 256];
    let mut places = 0;
    while places < 256 {
        let (mut place, mut rank) = (0, 0);
        while place < 8 {
            if places >> place & 1 == 1 {
                table[places][place] = rank;
                rank += 1;
            }
            place += 1;
        }
        places += 1;
    }
    table
};

/// Does [`crate::encode`].
#[target_feature(enable = "avx2,popcnt")]
pub(crate) fn encode(raw: &[u8], out: &mut [u8]) -> Result<(), DoesNotFit> {
    encoded::encode(raw, out, |raw, low, escapes| encode_chunk(raw, low, escapes))
}

/// Does [`crate::decode`].
#[target_feature(enable = "avx2,popcnt")]
pub(crate) fn decode(encoded: &[u8], out: &mut [u8]) -> Result<(), Damaged> {
    encoded::decode(encoded, out, |codes, low, escapes, out| {
        decode_chunk(codes, low, escapes, out);
    })
}

/// Encodes 64 scalars.
#[target_feature(enable = "avx2,popcnt")]
fn encode_chunk(raw: &Scalars, low: &mut Bytes, escapes: &mut Bytes) -> Codes {
    let (raw, _) = raw.as_chunks();
    let halves = [split(&raw[0]), split(&raw[1])];
    let code = |half: usize, base| {
        let above = _mm256_sub_epi8(halves[half].0, _mm256_set1_epi8(base as i8));
        _mm256_min_epu8(above, _mm256_set1_epi8(ESCAPE as i8))
    };
    let escape = _mm256_set1_epi8(ESCAPE as i8);
    let base = portable::base(largest(_mm256_max_epu8(halves[0].0, halves[1].0)), |base| {
        let far = |half| upper(_mm256_cmpeq_epi8(code(half, base), escape)).count_ones();
        (CHUNK as u32 - far(0) - far(1)) as u8
    });
    let codes = [code(0, base), code(1, base)];
    // The shifts move the bit to the top of its byte.
    let words = [
        word(codes.map(|code| _mm256_slli_epi16::<7>(code))),
        word(codes.map(|code| _mm256_slli_epi16::<6>(code))),
        word(codes.map(|code| _mm256_slli_epi16::<5>(code))),
    ];
    let mut exponents = [0; CHUNK];
    for (half, (exponent, other)) in halves.into_iter().enumerate() {
        store(&mut exponents.as_chunks_mut().0[half], exponent);
        store(&mut low.as_chunks_mut().0[half], other);
    }
    let codes = Codes { base, words };
    portable::pick(codes, &exponents, escapes);
    codes
}

/// Decodes 64 scalars.
#[target_feature(enable = "avx2,popcnt")]
fn decode_chunk(codes: Codes, low: &Bytes, escapes: &Bytes, out: &mut Scalars) {
    let expanded = expand(escapes, codes.escapes());
    let (low, _) = low.as_chunks();
    for (half, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let bits = |k: usize| bytes((codes.words[k] >> (32 * half)) as u32);
        let [b0, b1, b2] = [bits(0), bits(1), bits(2)];
        // Subtracting all ones adds one.
        let even = _mm256_sub_epi8(_mm256_set1_epi8(codes.base as i8), b0);
        let odd = _mm256_and_si256(b1, _mm256_set1_epi8(2));
        let upper = _mm256_and_si256(b2, _mm256_set1_epi8(4));
        let exponent = _mm256_add_epi8(even, _mm256_or_si256(odd, upper));
        let escaped = _mm256_and_si256(_mm256_and_si256(b0, b1), b2);
        let exponent = _mm256_blendv_epi8(exponent, expanded[half], escaped);
        join(exponent, load(&low[half]), out);
    }
}

/// Returns the largest byte.
#[target_feature(enable = "avx2")]
pub(super) fn largest(bytes: __m256i) -> u8 {
    let x = _mm_max_epu8(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes));
    let x = _mm_max_epu8(x, _mm_srli_epi16::<8>(x));
    // The least word is what the instruction finds; the lower bytes of the words have the maxima.
    let least =
        _mm_minpos_epu16(_mm_or_si128(_mm_xor_si128(x, _mm_set1_epi8(-1)), _mm_set1_epi16(-256)));
    !_mm_cvtsi128_si32(least) as u8
}

/// Returns the uppermost bit of each byte.
#[target_feature(enable = "avx2")]
fn upper(bytes: __m256i) -> u32 {
    _mm256_movemask_epi8(bytes) as u32
}

#[target_feature(enable = "avx2")]
fn word(halves: [__m256i; 2]) -> u64 {
    u64::from(upper(halves[0])) | u64::from(upper(halves[1])) << 32
}

/// Returns the exponents of 32 scalars, and their other bits.
#[target_feature(enable = "avx2")]
fn split(raw: &[u8; 64]) -> (__m256i, __m256i) {
    let (halves, _) = raw.as_chunks();
    let (a, b) = (load(&halves[0]), load(&halves[1]));
    // Packing works on each half of a register: the order is restored behind it.
    let pack = |a, b| _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi16(a, b));
    let exponent = |x| _mm256_and_si256(_mm256_srli_epi16::<7>(x), _mm256_set1_epi16(0xff));
    let other = |x| {
        let sign = _mm256_and_si256(_mm256_srli_epi16::<8>(x), _mm256_set1_epi16(0x80));
        _mm256_or_si256(sign, _mm256_and_si256(x, _mm256_set1_epi16(0x7f)))
    };
    (pack(exponent(a), exponent(b)), pack(other(a), other(b)))
}

/// The inverse of [`split`].
#[target_feature(enable = "avx2")]
fn join(exponent: __m256i, low: __m256i, out: &mut [u8; 64]) {
    let order = |x| _mm256_permute4x64_epi64::<0b11_01_10_00>(x);
    let (exponent, low) = (order(exponent), order(low));
    let upper = select_sign(low, _mm256_srli_epi16::<1>(exponent));
    let lower = select_sign(_mm256_slli_epi16::<7>(exponent), low);
    let (halves, _) = out.as_chunks_mut();
    store(&mut halves[0], _mm256_unpacklo_epi8(lower, upper));
    store(&mut halves[1], _mm256_unpackhi_epi8(lower, upper));
}

/// Returns bit 7 of each byte of `bit`, and the other bits of `rest`.
#[target_feature(enable = "avx2")]
fn select_sign(bit: __m256i, rest: __m256i) -> __m256i {
    let sign = _mm256_set1_epi8(-128);
    _mm256_or_si256(_mm256_and_si256(sign, bit), _mm256_andnot_si256(sign, rest))
}

/// Returns all ones in each byte whose bit is set, zero in the others.
#[target_feature(enable = "avx2")]
fn bytes(bits: u32) -> __m256i {
    let ones = 0x0101_0101_0101_0101;
    let spread = _mm256_setr_epi64x(0, ones, 2 * ones, 3 * ones);
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let byte = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), spread);
    _mm256_cmpeq_epi8(_mm256_and_si256(byte, bit), bit)
}

/// Returns the escapes at their places among 64 scalars.
#[target_feature(enable = "avx2,popcnt")]
fn expand(escapes: &Bytes, places: u64) -> [__m256i; 2] {
    let eight = |i: usize| {
        let before = (places & ((1 << (8 * i)) - 1)).count_ones() as usize;
        let these = escapes[before..].first_chunk().expect("at most 56 are before them");
        let order = &EXPAND[usize::from((places >> (8 * i)) as u8)];
        let load = |bytes: &[u8; 8]| _mm_cvtsi64_si128(i64::from_le_bytes(*bytes));
        _mm_shuffle_epi8(load(these), load(order))
    };
    let pair = |i| _mm_unpacklo_epi64(eight(i), eight(i + 1));
    [0, 4].map(|i| _mm256_set_m128i(pair(i + 2), pair(i)))
}

#[target_feature(enable = "avx2")]
fn load(from: &[u8; 32]) -> __m256i {
    // SAFETY: 32 bytes are read, and any address will do.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[target_feature(enable = "avx2")]
fn store(to: &mut [u8; 32], value: __m256i) {
    // SAFETY: 32 bytes are written, and any address will do.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), value) }
}
