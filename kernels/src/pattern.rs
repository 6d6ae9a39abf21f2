#![allow(
    unsafe_code,
    reason = "the bytes lie in memory that devices write, where no Rust reference may point"
)]
//! Object contents generated from a seed: any byte can be checked without a reference copy, by the
//! host and (with the feature `cuda`) by a GPU. One source, `include/pool/pattern.cuh`.
//!
//! Each 8-byte word encodes its object and offset, so bytes of another object or from another
//! offset are detected.

use std::ptr::NonNull;

use crate::ffi;

/// The generated contents of one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pattern(u64);

/// The first difference between an object's actual and expected bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Difference {
    /// Bytes from the start of the object to the first wrong 4-byte word.
    pub offset: usize,
    /// The expected word.
    pub expected: u32,
    /// The actual word.
    pub found: u32,
}

impl Pattern {
    /// Creates the contents with this seed. Seeds are not mixed here: pass a hash of similar ones.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the seed.
    #[must_use]
    pub const fn seed(self) -> u64 {
        self.0
    }

    /// Writes bytes `[offset, offset + len)` of the object to memory from `at` on.
    ///
    /// # Safety
    /// `len` bytes at `at` are writable, and not accessed by others during the call.
    ///
    /// # Panics
    /// Panics unless `offset` is a multiple of 8 and `len` of 4.
    pub unsafe fn write(self, at: NonNull<u8>, offset: usize, len: usize) {
        assert_parts(offset, len);
        // SAFETY: the caller's promise.
        unsafe { ffi::gio_host_fill(address(at), self.0, offset as u64, len as u64) }
    }

    /// Compares bytes `[offset, offset + len)` of the object with those at `at`.
    ///
    /// # Errors
    /// Returns the first difference.
    ///
    /// # Safety
    /// `len` bytes at `at` are readable, and not written by others during the call.
    ///
    /// # Panics
    /// Same as [`Pattern::write`].
    pub unsafe fn check(
        self,
        at: NonNull<u8>,
        offset: usize,
        len: usize,
    ) -> Result<(), Difference> {
        assert_parts(offset, len);
        let (at, offset, len) = (address(at), offset as u64, len as u64);
        let (mut first, mut found) = (0, 0);
        // SAFETY: the caller's promise; two numbers are written.
        let same =
            unsafe { ffi::gio_host_check(at, self.0, offset, len, &raw mut first, &raw mut found) };
        if same { Ok(()) } else { Err(self.difference(first as usize, found)) }
    }

    /// Describes the actual word `found` at `offset`.
    pub(crate) fn difference(self, offset: usize, found: u32) -> Difference {
        let mut word = [0; 4];
        let rest = offset % 8;
        let mut whole = [0u8; 8];
        // SAFETY: the array's own bytes.
        unsafe { self.write(NonNull::from(&mut whole).cast(), offset - rest, 8) };
        word.copy_from_slice(&whole[rest / 4 * 4..][..4]);
        Difference { offset, expected: u32::from_le_bytes(word), found }
    }
}

/// Overwrites memory with a pattern that no object contains.
///
/// # Safety
/// `len` bytes at `at` are writable, and not accessed by others during the call.
///
/// # Panics
/// Panics unless `len` is a multiple of 4.
pub unsafe fn poison(at: NonNull<u8>, len: usize) {
    assert_parts(0, len);
    // SAFETY: the caller's promise.
    unsafe { ffi::gio_host_poison(address(at), len as u64) }
}

/// Returns the address in the form the C++ half takes.
fn address(at: NonNull<u8>) -> u64 {
    at.as_ptr().expose_provenance() as u64
}

fn assert_parts(offset: usize, len: usize) {
    assert!(len.is_multiple_of(4), "objects are made of 4-byte words, not {len} bytes");
    assert!(offset.is_multiple_of(8), "parts of objects start at 8-byte words, not {offset}");
}
