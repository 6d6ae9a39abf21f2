//! KV objects of bf16 in three quarters of their bytes: without loss, and at a fixed rate.
//!
//! The exponents of a KV object take a handful of values. [`encode`] stores the eight other bits of
//! a scalar as they are, and its exponent as one of the seven most frequent ones of this object, in
//! three bits. A scalar with another exponent is an escape, whose exponent is stored in full. Codes
//! and other bits take 11 bits a scalar; the rest of the encoded object, at least one bit a scalar,
//! has room for the escapes. An object with more of them than that is refused ([`DoesNotFit`]): all
//! encoded objects have the same size, so that their addresses stay computed. Nothing has to be
//! learned or kept beside an object to decode it.
//!
//! Any bytes of the right length that fit are restored as they were, bf16 or not.
//!
//! # Format
//! An object of `n` scalars of 16 bits, little-endian, `n` a multiple of 64, in `m` bytes, at least
//! `n * 3 / 2`:
//!
//! | bytes | content |
//! |---|---|
//! | 0..7 | the table: exponents of the codes 0 to 6 |
//! | 7 | 0 |
//! | 8..`m - n * 11 / 8` | exponents of the escapes, a byte each, in the order of the scalars; 0 behind them |
//! | then `n` | the low byte of each scalar, where its sign (bit 15) has the place of bit 7 |
//! | then `n * 3 / 8` | codes: for each 64 scalars three words of 64 bits, little-endian; bit `i` of word `k` is bit `k` of the code of scalar `i` |
//!
//! Bits 7 to 14 of a scalar are its exponent. Code 7 is an escape. The place of an escape is that
//! of its code: the number of escapes before a scalar is a count of bits, which a warp has with two
//! instructions. [`encode`] sorts the table, and of exponents that are as frequent takes the
//! lower one: the same object always gives the same bytes.
//!
//! # Architecture
//! - `table`: the exponents that get codes, and how many scalars are escapes.
//! - `encoded`: where the parts of an encoded object are.
//! - [`Isa`]: the instruction sets of this CPU that there is code for.
//! - `portable`: both directions in plain Rust, for any CPU, and what the others are compared with.
//! - `x86`: the same with AVX2, and with AVX-512.
//!
//! # Invariants
//! - Every instruction set gives the same bytes, also of damaged objects.
//! - [`decode`] writes to the whole of its output and to nothing else, or returns [`Damaged`].
//!
//! # Not implemented
//! - FP8: its exponents have four bits, of which a fixed rate would save one at most.
//! - A checksum: the store has one of the raw bytes, which it compares after decoding.

mod encoded;
mod isa;
mod portable;
mod table;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use isa::Isa;

/// Lengths of raw objects are multiples of this, in bytes.
pub const RAW_UNIT: usize = 128;

/// Returns the least bytes of an encoded object whose raw one has `raw_len` bytes: three quarters.
///
/// `None` if `raw_len` is zero or no multiple of [`RAW_UNIT`]: such objects have no encoding.
#[must_use]
pub fn encoded_len(raw_len: usize) -> Option<usize> {
    (raw_len > 0 && raw_len.is_multiple_of(RAW_UNIT)).then_some(raw_len / 4 * 3)
}

/// An object has more escapes than its encoded size has room for. It can be stored raw only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the object has {escapes} exponents that are not among its 7 most frequent ones; {budget} fit"
)]
pub struct DoesNotFit {
    /// Scalars whose exponents are not among the seven most frequent ones.
    pub escapes: usize,
    /// Escapes that the encoded object has room for.
    pub budget: usize,
}

/// Bytes that no object is encoded as. The output has any content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Damaged {
    /// Byte 7 is not zero: no encoded object, or one of a later format.
    #[error("byte 7 of the encoded object is {found}, not 0: it is damaged, or of a later format")]
    Format {
        /// The byte.
        found: u8,
    },
    /// More codes are escapes than there is room for.
    #[error("the encoded object is damaged: over {budget} codes are escapes")]
    Escapes {
        /// Escapes that the encoded object has room for.
        budget: usize,
    },
}

/// Encodes `raw` into the whole of `out`, whose length the store chooses: all room beyond
/// [`encoded_len`] is room for escapes.
///
/// # Errors
/// Returns [`DoesNotFit`], and leaves `out` as it is.
///
/// # Panics
/// If `raw` has no encoding (see [`encoded_len`]), or `out` is shorter than that.
pub fn encode(raw: &[u8], out: &mut [u8]) -> Result<(), DoesNotFit> {
    Isa::best().encode(raw, out)
}

/// Decodes `encoded`, as [`encode`] wrote it, into the whole of `out`.
///
/// Whatever `encoded` has, nothing but `out` is written. Not all damage is noticed: that takes a
/// checksum of the raw bytes.
///
/// # Errors
/// Returns [`Damaged`]. `out` has any content then.
///
/// # Panics
/// If objects of `out`'s length have no encoding (see [`encoded_len`]), or `encoded` is shorter.
pub fn decode(encoded: &[u8], out: &mut [u8]) -> Result<(), Damaged> {
    Isa::best().decode(encoded, out)
}

/// Bytes before the escapes.
const HEADER: usize = 8;

/// Scalars whose codes are together.
const CHUNK: usize = 64;

/// The code of a scalar whose exponent is among the escapes.
const ESCAPE: u8 = 7;

#[cfg(test)]
mod tests;
