//! Both directions in plain Rust: the compiler makes vectors of it, as wide as those of the
//! instruction set that it compiles for.

use crate::{
    CHUNK, ESCAPE,
    encoded::{Bytes, Codes, Scalars},
};

/// For each value of eight bits: a byte for each bit.
static SPREAD: [[u8; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut bits = 0;
    while bits < 256 {
        let mut bit = 0;
        while bit < 8 {
            table[bits][bit] = (bits >> bit & 1) as u8;
            bit += 1;
        }
        bits += 1;
    }
    table
};

/// Encodes 64 scalars.
#[inline(always)]
pub(crate) fn encode(raw: &Scalars, low: &mut Bytes, escapes: &mut Bytes) -> Codes {
    let mut exponents = [0; CHUNK];
    for ((scalar, exponent), low) in raw.as_chunks().0.iter().zip(&mut exponents).zip(low) {
        let scalar = u16::from_le_bytes(*scalar);
        *exponent = (scalar >> 7) as u8;
        *low = (scalar >> 8 & 0x80 | scalar & 0x7f) as u8;
    }
    let base = base(exponents.into_iter().fold(0, u8::max), |base| {
        exponents.iter().map(|exponent| u8::from(exponent.wrapping_sub(base) < ESCAPE)).sum()
    });
    let codes = exponents.map(|exponent| exponent.wrapping_sub(base).min(ESCAPE));
    let codes = Codes { base, words: std::array::from_fn(|bit| gather(&codes, bit)) };
    pick(codes, &exponents, escapes);
    codes
}

/// Returns the base that the most exponents have codes for. `count` counts them.
#[inline(always)]
pub(crate) fn base(largest: u8, count: impl Fn(u8) -> u8) -> u8 {
    let mut best = (0, 0);
    for below in ESCAPE - 1..ESCAPE + 7 {
        let base = largest.saturating_sub(below);
        let coded = count(base);
        if coded > best.1 {
            best = (base, coded);
        }
    }
    best.0
}

/// Writes the exponents of the escapes.
#[inline(always)]
pub(crate) fn pick(codes: Codes, exponents: &Bytes, escapes: &mut Bytes) {
    let mut places = codes.escapes();
    for escape in escapes {
        if places == 0 {
            break;
        }
        *escape = exponents[places.trailing_zeros() as usize];
        places &= places - 1;
    }
}

/// Returns bit `bit` of each byte.
#[inline(always)]
fn gather(bytes: &Bytes, bit: usize) -> u64 {
    let mut word = [0; 8];
    for (to, eight) in word.iter_mut().zip(bytes.as_chunks().0) {
        let bits = u64::from_le_bytes(*eight) >> bit & 0x0101_0101_0101_0101;
        // The bit of byte i goes to bit 56 + i of the product, and no two meet.
        *to = (bits.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8;
    }
    u64::from_le_bytes(word)
}

/// Decodes 64 scalars.
#[inline(always)]
pub(crate) fn decode(codes: Codes, low: &Bytes, escapes: &Bytes, out: &mut Scalars) {
    let mut exponents = [0; CHUNK];
    for (i, exponents) in exponents.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let bits = codes.words.map(|word| &SPREAD[usize::from((word >> (8 * i)) as u8)]);
        for (place, exponent) in exponents.iter_mut().enumerate() {
            let code = bits[0][place] | bits[1][place] << 1 | bits[2][place] << 2;
            *exponent = code.wrapping_add(codes.base);
        }
    }
    let (out, _) = out.as_chunks_mut();
    for ((exponent, low), out) in exponents.iter().zip(low).zip(&mut *out) {
        *out = scalar(*exponent, *low);
    }
    let mut places = codes.escapes();
    for &exponent in escapes {
        if places == 0 {
            break;
        }
        let place = places.trailing_zeros() as usize;
        out[place] = scalar(exponent, low[place]);
        places &= places - 1;
    }
}

#[inline(always)]
fn scalar(exponent: u8, low: u8) -> [u8; 2] {
    let (exponent, low) = (u16::from(exponent), u16::from(low));
    ((low & 0x80) << 8 | exponent << 7 | low & 0x7f).to_le_bytes()
}
