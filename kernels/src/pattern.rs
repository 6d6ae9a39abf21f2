#![allow(
    unsafe_code,
    reason = "the bytes lie in memory that devices write, where no Rust reference may point"
)]
//! The bytes of an object, made from a number: no copy is kept, and any byte can be checked, by the
//! host and (with the feature `cuda`) by a GPU. One source, `include/pool/pattern.cuh`.
//!
//! Each 8-byte word says whose it is and where it belongs: bytes of another object, or from another
//! offset, are found.

use std::ptr::NonNull;

use crate::ffi;

/// The contents of one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pattern(u64);

/// The first place where an object has other bytes than it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Difference {
    /// Bytes from the start of the object to the first wrong 4-byte word.
    pub offset: usize,
    /// The word that should be there.
    pub expected: u32,
    /// The word that is.
    pub found: u32,
}

impl Pattern {
    /// The contents with this seed. Seeds that differ in few bits are not mixed here: take a hash.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The seed.
    #[must_use]
    pub const fn seed(self) -> u64 {
        self.0
    }

    /// Writes bytes `[offset, offset + len)` of the object to `at` and what follows.
    ///
    /// # Safety
    /// `len` bytes at `at` may be written, and nobody else reads or writes them meanwhile.
    ///
    /// # Panics
    /// Unless `offset` is a multiple of 8, and `len` of 4.
    pub unsafe fn write(self, at: NonNull<u8>, offset: usize, len: usize) {
        assert_parts(offset, len);
        // SAFETY: the caller's promise.
        unsafe { ffi::gio_host_fill(address(at), self.0, offset as u64, len as u64) }
    }

    /// Compares bytes `[offset, offset + len)` of the object with those at `at`.
    ///
    /// # Errors
    /// The first difference.
    ///
    /// # Safety
    /// `len` bytes at `at` may be read, and nobody writes them meanwhile.
    ///
    /// # Panics
    /// As [`Pattern::write`].
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

    /// `found` at `offset` instead of what should be there.
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

/// Overwrites memory with what no object holds.
///
/// # Safety
/// `len` bytes at `at` may be written, and nobody else reads or writes them meanwhile.
///
/// # Panics
/// Unless `len` is a multiple of 4.
pub unsafe fn poison(at: NonNull<u8>, len: usize) {
    assert_parts(0, len);
    // SAFETY: the caller's promise.
    unsafe { ffi::gio_host_poison(address(at), len as u64) }
}

/// What the host's build takes for an address.
fn address(at: NonNull<u8>) -> u64 {
    at.as_ptr().expose_provenance() as u64
}

fn assert_parts(offset: usize, len: usize) {
    assert!(len.is_multiple_of(4), "objects are made of 4-byte words, not {len} bytes");
    assert!(offset.is_multiple_of(8), "parts of objects start at 8-byte words, not {offset}");
}
