//! Which exponents of an object get codes.

use crate::{CHUNK, ESCAPE, HEADER};

/// The exponents of an object that get codes, in ascending order.
#[derive(Debug)]
pub(crate) struct Table {
    /// The exponent of each code.
    pub exponents: [u8; 7],
    /// The code of each exponent: [`ESCAPE`] if it has none.
    pub codes: [u8; 256],
}

impl Table {
    /// Returns the table of an object, and the scalars of it that are escapes.
    pub(crate) fn of(raw: &[[u8; 2 * CHUNK]]) -> (Self, usize) {
        let counts = counts(raw);
        let mut order: [u8; 256] = std::array::from_fn(|exponent| exponent as u8);
        let (frequent, ..) = order.select_nth_unstable_by_key(7, |&exponent| {
            (std::cmp::Reverse(counts[usize::from(exponent)]), exponent)
        });
        frequent.sort_unstable();
        let exponents: [u8; 7] = std::array::from_fn(|code| frequent[code]);
        let mut codes = [ESCAPE; 256];
        let mut escapes = raw.len() * CHUNK;
        for (code, &exponent) in exponents.iter().enumerate() {
            codes[usize::from(exponent)] = code as u8;
            escapes -= counts[usize::from(exponent)] as usize;
        }
        (Self { exponents, codes }, escapes)
    }

    /// Returns the first bytes of an encoded object.
    pub(crate) fn header(&self) -> [u8; HEADER] {
        std::array::from_fn(|code| self.exponents.get(code).copied().unwrap_or(0))
    }
}

/// Counts the exponents of an object. Neighbours often have the same one: in a single table each
/// would wait for the store of the one before.
fn counts(raw: &[[u8; 2 * CHUNK]]) -> [u32; 256] {
    let mut counts = [[0u32; 256]; 4];
    for quad in raw.as_flattened().as_chunks::<8>().0 {
        let quad = u64::from_le_bytes(*quad);
        for (lane, counts) in counts.iter_mut().enumerate() {
            counts[usize::from((quad >> (16 * lane + 7)) as u8)] += 1;
        }
    }
    std::array::from_fn(|exponent| counts.iter().map(|counts| counts[exponent]).sum())
}
