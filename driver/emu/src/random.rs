//! A small random number generator whose sequence is part of the crate: a seed in a bug report must
//! give the same run after any dependency update.

/// `SplitMix64` (Steele, Lea, Flood, 2014): one addition and three mixing steps per number.
#[derive(Debug, Clone)]
pub(crate) struct SplitMix64(u64);

impl SplitMix64 {
    /// Creates the generator of `seed`; different `stream`s are independent.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut mixed = Self(seed ^ stream.wrapping_mul(0xA076_1D64_78BD_642F));
        mixed.next();
        mixed
    }

    /// Returns 64 random bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number below `bound` (0 gives 0). The bias of about `bound / 2^64` is harmless.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        let wide = u128::from(self.next()) * u128::from(bound);
        u64::try_from(wide >> 64).unwrap_or(0)
    }

    /// Returns a number from 0 (inclusive) to 1 (exclusive), with a double's 53 bits of precision.
    #[allow(clippy::cast_precision_loss, reason = "53 bits fit a double exactly")]
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::SplitMix64;

    #[test]
    fn sequence_is_fixed() {
        let mut rng = SplitMix64(1_234_567);
        assert_eq!(rng.next(), 6_457_827_717_110_365_317);
        assert_eq!(rng.next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn ranges_hold() {
        let mut rng = SplitMix64::new(1, 2);
        for _ in 0..1000 {
            assert!(rng.below(7) < 7);
            assert!((0.0..1.0).contains(&rng.unit()));
        }
        assert_eq!(rng.below(0), 0);
    }
}
