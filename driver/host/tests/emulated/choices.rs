//! Random numbers of which a fuzzer chooses some.

use bolero::TypeGenerator;
use rand::{RngCore, SeedableRng as _, rand_core::impls, rngs::SmallRng};

/// A seed, and the draws that do not follow from it.
///
/// A generator that takes its numbers from the fuzzer's bytes has nothing left after a short input,
/// and a run that needs thousands of draws ends in zeros. With a seed behind them, one choice
/// changes one draw and the run goes on.
#[derive(Debug, TypeGenerator)]
pub(crate) struct Choices {
    seed: u64,
    changes: Vec<Change>,
}

#[derive(Debug, Clone, Copy, TypeGenerator)]
struct Change {
    /// Draws since the last change that follow from the seed.
    after: u8,
    value: u64,
}

impl Choices {
    pub(crate) fn of(seed: u64) -> Self {
        Self { seed, changes: Vec::new() }
    }

    pub(crate) fn draws(&self) -> Draws {
        let changes = self.changes.iter().rev().copied().collect();
        Draws { random: SmallRng::seed_from_u64(self.seed), changes }
    }
}

/// The generator.
#[derive(Debug)]
pub(crate) struct Draws {
    random: SmallRng,
    /// The next one last.
    changes: Vec<Change>,
}

impl RngCore for Draws {
    fn next_u32(&mut self) -> u32 {
        // Ranges are drawn from the high bits.
        (self.next_u64() >> 32) as u32
    }

    fn next_u64(&mut self) -> u64 {
        let drawn = self.random.next_u64();
        match self.changes.last_mut() {
            Some(Change { after: 0, value }) => {
                let value = *value;
                self.changes.pop();
                value
            }
            Some(Change { after, .. }) => {
                *after -= 1;
                drawn
            }
            None => drawn,
        }
    }

    fn fill_bytes(&mut self, bytes: &mut [u8]) {
        impls::fill_bytes_via_next(self, bytes);
    }
}
