//! The code for this CPU.
#![allow(unsafe_code, reason = "only on a CPU that has its instructions may code be called")]

use std::fmt;

#[cfg(target_arch = "x86_64")]
use crate::x86::{avx2, avx512};
use crate::{
    CHUNK, Damaged, DoesNotFit, HEADER,
    encoded::{Encoded, Room, budget},
    portable,
    table::Table,
};

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
                is_x86_feature_detected!("avx512bw")
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
        let budget = budget(out.len(), raw.len());
        let (raw, _) = raw.as_chunks();
        let (table, escapes) = Table::of(raw);
        if escapes > budget {
            return Err(DoesNotFit { escapes, budget });
        }
        let (header, rest) = out.split_at_mut(HEADER);
        header.copy_from_slice(&table.header());
        let (room, rest) = rest.split_at_mut(budget);
        room[escapes..].fill(0);
        let (low, codes) = rest.split_at_mut(raw.len() * CHUNK);
        let (low, codes) = (low.as_chunks_mut().0, codes.as_chunks_mut().0);
        let room = Room { escapes: room, low, codes };
        match self.0 {
            Kind::Portable => portable::encode(&table, raw, room),
            // SAFETY: `all` found the instructions.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe { avx2::encode(&table, raw, room) },
            // SAFETY: `all` found the instructions.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => unsafe { avx512::encode(&table, raw, room) },
        }
        Ok(())
    }

    /// Does [`decode`](crate::decode) with these instructions.
    ///
    /// # Errors
    /// Those of [`decode`](crate::decode).
    pub fn decode(self, encoded: &[u8], out: &mut [u8]) -> Result<(), Damaged> {
        let encoded = Encoded::of(encoded, out.len())?;
        let (out, _) = out.as_chunks_mut();
        let done = match self.0 {
            Kind::Portable => portable::decode(&encoded, out),
            // SAFETY: `all` found the instructions.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe { avx2::decode(&encoded, out) },
            // SAFETY: `all` found the instructions.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => unsafe { avx512::decode(&encoded, out) },
        };
        done.ok_or(Damaged::Escapes { budget: encoded.budget })
    }
}
