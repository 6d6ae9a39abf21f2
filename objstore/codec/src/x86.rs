//! Both directions with AVX2, and with AVX-512.
//!
//! Loads and stores of vectors take arrays of their size, so that no address is computed here.

pub(crate) mod avx2;
pub(crate) mod avx512;
