//! Both directions in plain Rust.

use crate::{
    CHUNK, ESCAPE,
    encoded::{Encoded, Room, codes, words},
    table::Table,
};

/// Encodes an object whose escapes fit.
pub(crate) fn encode(table: &Table, raw: &[[u8; 2 * CHUNK]], room: Room) {
    let mut next = 0;
    for ((raw, low), to) in raw.iter().zip(room.low).zip(room.codes) {
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
                room.escapes[next] = exponent;
                next += 1;
            }
        }
        *to = codes(words);
    }
}

/// Decodes an object, or returns `None` if it has more escapes than there is room for.
pub(crate) fn decode(encoded: &Encoded, out: &mut [[u8; 2 * CHUNK]]) -> Option<()> {
    // The exponent of an escape comes last, over zeros.
    let table = encoded.table().map(|exponent| u16::from(exponent) << 7);
    let mut next = 0;
    for ((low, codes), out) in encoded.low.iter().zip(encoded.codes).zip(out) {
        let words = words(codes);
        let (out, _) = out.as_chunks_mut();
        for (i, (low, out)) in low.iter().zip(&mut *out).enumerate() {
            let code = words[0] >> i & 1 | (words[1] >> i & 1) << 1 | (words[2] >> i & 1) << 2;
            let low = u16::from(*low);
            *out = ((low & 0x80) << 8 | low & 0x7f | table[code as usize]).to_le_bytes();
        }
        let mut places = words[0] & words[1] & words[2];
        let window = encoded.window(next);
        next += places.count_ones() as usize;
        if next > encoded.budget {
            return None;
        }
        for exponent in window {
            if places == 0 {
                break;
            }
            let scalar = &mut out[places.trailing_zeros() as usize];
            *scalar = (u16::from_le_bytes(*scalar) | u16::from(*exponent) << 7).to_le_bytes();
            places &= places - 1;
        }
    }
    Some(())
}
