//! AVX2: 32 scalars at a time.

use std::arch::x86_64::*;

use crate::{
    CHUNK,
    encoded::{Encoded, Room, codes, words},
    table::Table,
};

/// For each byte of eight places, which of the next escapes goes where; the others become zero.
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

/// See [`crate::portable::encode`].
#[target_feature(enable = "avx2,popcnt")]
pub(crate) fn encode(table: &Table, raw: &[[u8; 2 * CHUNK]], room: Room) {
    let mut next = 0;
    for ((raw, low), to) in raw.iter().zip(room.low).zip(room.codes) {
        let (raw, _) = raw.as_chunks::<64>();
        let (low, _) = low.as_chunks_mut::<32>();
        let mut exponents = [[0; 32]; 2];
        let mut words = [0u64; 3];
        for half in 0..2 {
            let (these, others) = split(&raw[half]);
            store(&mut exponents[half], these);
            store(&mut low[half], others);
            let mut code = _mm256_set1_epi8(7);
            for (i, &exponent) in table.exponents.iter().enumerate() {
                let found = _mm256_cmpeq_epi8(these, _mm256_set1_epi8(exponent as i8));
                let change = _mm256_and_si256(found, _mm256_set1_epi8(i as i8 ^ 7));
                code = _mm256_xor_si256(code, change);
            }
            // The bit of each byte that `movemask` takes is the uppermost.
            let bits = [
                _mm256_slli_epi16::<7>(code),
                _mm256_slli_epi16::<6>(code),
                _mm256_slli_epi16::<5>(code),
            ];
            for (word, bits) in words.iter_mut().zip(bits) {
                *word |= u64::from(_mm256_movemask_epi8(bits) as u32) << (32 * half);
            }
        }
        let mut places = words[0] & words[1] & words[2];
        let exponents = exponents.as_flattened();
        while places != 0 {
            room.escapes[next] = exponents[places.trailing_zeros() as usize];
            next += 1;
            places &= places - 1;
        }
        *to = codes(words);
    }
}

/// See [`crate::portable::decode`].
#[target_feature(enable = "avx2,popcnt")]
pub(crate) fn decode(encoded: &Encoded, out: &mut [[u8; 2 * CHUNK]]) -> Option<()> {
    let table = _mm256_set1_epi64x(i64::from_le_bytes(encoded.table()));
    let mut next = 0;
    for ((low, codes), out) in encoded.low.iter().zip(encoded.codes).zip(out) {
        let words = words(codes);
        let places = words[0] & words[1] & words[2];
        let window = encoded.window(next);
        next += places.count_ones() as usize;
        if next > encoded.budget {
            return None;
        }
        let expanded = expand(window, places);
        let (low, _) = low.as_chunks::<32>();
        let (out, _) = out.as_chunks_mut::<64>();
        for half in 0..2 {
            let bit = |k: usize| bytes((words[k] >> (32 * half)) as u32, 1 << k);
            let code = _mm256_or_si256(_mm256_or_si256(bit(0), bit(1)), bit(2));
            let exponent = _mm256_shuffle_epi8(table, code);
            join(_mm256_or_si256(exponent, expanded[half]), load(&low[half]), &mut out[half]);
        }
    }
    Some(())
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

/// Returns `value` in each byte whose bit is set, zero in the others.
#[target_feature(enable = "avx2")]
fn bytes(bits: u32, value: i8) -> __m256i {
    let spread =
        _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let byte = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), spread);
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(byte, bit), bit);
    _mm256_and_si256(set, _mm256_set1_epi8(value))
}

/// Returns the next escapes at their places among 64 scalars, and zero everywhere else.
#[target_feature(enable = "avx2,popcnt")]
fn expand(window: &[u8; 64], places: u64) -> [__m256i; 2] {
    let mut expanded = [[0u8; 8]; 8];
    let mut next = 0;
    for (places, to) in places.to_le_bytes().into_iter().zip(&mut expanded) {
        let these: [u8; 8] = window[next..next + 8].try_into().expect("eight");
        let these = _mm_cvtsi64_si128(i64::from_le_bytes(these));
        let order = _mm_cvtsi64_si128(i64::from_le_bytes(EXPAND[usize::from(places)]));
        *to = _mm_cvtsi128_si64(_mm_shuffle_epi8(these, order)).to_le_bytes();
        next += places.count_ones() as usize;
    }
    let (halves, _) = expanded.as_flattened().as_chunks();
    [load(&halves[0]), load(&halves[1])]
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
