//! KV objects of bf16 in three quarters of their bytes: without loss, and at a fixed rate.
//!
//! The exponents of neighbouring KV scalars are close to each other. [`encode`] stores the eight
//! other bits of a scalar as they are, and its exponent in three bits: as its distance from a base
//! that 64 scalars share. A scalar whose exponent is not one of the seven from the base on is an
//! escape, whose exponent is stored in full. All that takes 11 1/8 bits a scalar; the rest of the
//! encoded object, at least 7/8 of a bit a scalar, has room for the escapes of the whole object. An
//! object with more of them than that is refused ([`DoesNotFit`]): all encoded objects have the
//! same size, so that their addresses stay computed. Nothing has to be learned from other objects,
//! or kept beside an object to decode it.
//!
//! Any bytes of the right length that fit are restored as they were, bf16 or not.
//!
//! # Format
//! An object of `n` scalars of 16 bits, little-endian, `n` a multiple of 64, in `m` bytes, at least
//! `n * 3 / 2`:
//!
//! | bytes | content |
//! |---|---|
//! | `m - n * 89 / 64` | escapes: exponents, a byte each, in the order of the scalars; then 0 |
//! | `n / 64` | bases: for each 64 scalars the exponent of code 0 |
//! | `n` | the low byte of each scalar, with its sign (bit 15) in the place of bit 7 |
//! | `n * 3 / 8` | codes: for each 64 scalars three words of 64 bits, little-endian |
//!
//! Bit `i` of word `k` is bit `k` of the code of scalar `i`. Bits 7 to 14 of a scalar are its
//! exponent: base plus code, modulo 256, or for code 7 the next of the escapes. The number of
//! escapes before a scalar is a count of bits, which a warp has with two instructions.
//!
//! [`encode`] takes as base the one of eight that the most of the 64 exponents are close to, the
//! highest of several: from 6 to 13 below the largest exponent, and 0 instead of less than that. So
//! the same object always gives the same bytes; [`decode`] knows nothing of it.
//!
//! # Architecture
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
#[error("{escapes} exponents of the object are far from those beside them, and {budget} fit")]
pub struct DoesNotFit {
    /// Scalars whose exponents have no code.
    pub escapes: usize,
    /// Escapes that the encoded object has room for.
    pub budget: usize,
}

/// More codes are escapes than there is room for: these bytes are no encoded object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the encoded object is damaged: it has room for {budget} escapes, and names more")]
pub struct Damaged {
    /// Escapes that the encoded object has room for.
    pub budget: usize,
}

/// Encodes `raw` into the whole of `out`, whose length the store chooses: all room beyond
/// [`encoded_len`] is room for escapes.
///
/// # Errors
/// Returns [`DoesNotFit`]. `out` has any content then.
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

/// Scalars that share a base, and whose codes are together.
const CHUNK: usize = 64;

/// The code of an escape, and how many exponents have another one.
const ESCAPE: u8 = 7;

#[cfg(test)]
mod tests;
