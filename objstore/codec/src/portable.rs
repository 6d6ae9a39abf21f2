//! Both directions in plain Rust.

use crate::{CHUNK, ESCAPE, table::Table};

/// Encodes an object whose escapes fit into `escapes`.
pub(crate) fn encode(
    table: &Table,
    raw: &[[u8; 2 * CHUNK]],
    escapes: &mut [u8],
    low: &mut [[u8; CHUNK]],
    codes: &mut [[u8; 24]],
) {
    let mut next = 0;
    for ((raw, low), codes) in raw.iter().zip(low).zip(codes) {
        let mut words = [0u64; 3];
        for (i, (scalar, low)) in raw.as_chunks().0.iter().zip(low).enumerate() {
            let scalar = u16::from_le_bytes(*scalar);
            let exponent = (scalar >> 7) as u8;
            *low = (scalar >> 8 & 0x80 | scalar & 0x7f) as u8;
            let code = table.codes[usize::from(exponent)];
            for (bit, word) in words.iter_mut().enumerate() {
                *word |= u64::from(code >> bit & 1) << i;
            }
            if code == ESCAPE {
                escapes[next] = exponent;
                next += 1;
            }
        }
        for (to, word) in codes.as_chunks_mut().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
    }
}

/// Decodes an object, or returns `None` if it has more escapes than `escapes`.
pub(crate) fn decode(
    table: [u8; 8],
    mut escapes: &[u8],
    low: &[[u8; CHUNK]],
    codes: &[[u8; 24]],
    out: &mut [[u8; 2 * CHUNK]],
) -> Option<()> {
    // The exponent of an escape comes last, over zeros.
    let table = table.map(|exponent| u16::from(exponent) << 7);
    for ((low, codes), out) in low.iter().zip(codes).zip(out) {
        let words = words(codes);
        let (out, _) = out.as_chunks_mut();
        for (i, (low, out)) in low.iter().zip(&mut *out).enumerate() {
            let code = words[0] >> i & 1 | (words[1] >> i & 1) << 1 | (words[2] >> i & 1) << 2;
            let low = u16::from(*low);
            *out = ((low & 0x80) << 8 | low & 0x7f | table[code as usize]).to_le_bytes();
        }
        let mut places = words[0] & words[1] & words[2];
        let (these, rest) = escapes.split_at_checked(places.count_ones() as usize)?;
        escapes = rest;
        for exponent in these {
            let scalar = &mut out[places.trailing_zeros() as usize];
            *scalar = (u16::from_le_bytes(*scalar) | u16::from(*exponent) << 7).to_le_bytes();
            places &= places - 1;
        }
    }
    Some(())
}

/// The three words of 64 scalars' codes.
pub(crate) fn words(codes: &[u8; 24]) -> [u64; 3] {
    let (words, _) = codes.as_chunks();
    std::array::from_fn(|bit| u64::from_le_bytes(words[bit]))
}
