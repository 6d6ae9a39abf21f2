//! The code for this CPU.
#![allow(unsafe_code, reason = "only on a CPU that has its instructions may code be called")]

use std::fmt;

#[cfg(target_arch = "x86_64")]
use crate::x86::{avx2, avx512};
use crate::{Damaged, DoesNotFit, encoded, portable};

/// An instruction set that this CPU has, and that there is code for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Kind::Portable => "portable code",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "AVX2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "AVX-512",
        })
    }
}

impl Isa {
    /// Returns the fastest one.
    #[must_use]
    pub fn best() -> Self {
        Self::all().next_back().expect("one is for any CPU")
    }

    /// Returns all of them, the fastest one last.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> {
        let kinds = [
            (true, Kind::Portable),
            #[cfg(target_arch = "x86_64")]
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("popcnt"), Kind::Avx2),
            #[cfg(target_arch = "x86_64")]
            (
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vbmi")
                    && is_x86_feature_detected!("avx512vbmi2")
                    && is_x86_feature_detected!("popcnt"),
                Kind::Avx512,
            ),
        ];
        kinds.into_iter().filter_map(|(here, kind)| here.then_some(Self(kind)))
    }

    /// Does [`encode`](crate::encode) with these instructions.
    ///
    /// # Errors
    /// Those of [`encode`](crate::encode).
    pub fn encode(self, raw: &[u8], out: &mut [u8]) -> Result<(), DoesNotFit> {
        match self.0 {
            Kind::Portable => encoded::encode(raw, out, portable::encode),
            // SAFETY: `all` found the instructions.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe { avx2::encode(raw, out) },
            // SAFETY: `all` found the instructions.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => unsafe { avx512::encode(raw, out) },
        }
    }

    /// Does [`decode`](crate::decode) with these instructions.
    ///
    /// # Errors
    /// Those of [`decode`](crate::decode).
    pub fn decode(self, encoded: &[u8], out: &mut [u8]) -> Result<(), Damaged> {
        match self.0 {
            Kind::Portable => encoded::decode(encoded, out, portable::decode),
            // SAFETY: `all` found the instructions.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe { avx2::decode(encoded, out) },
            // SAFETY: `all` found the instructions.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => unsafe { avx512::decode(encoded, out) },
        }
    }
}
