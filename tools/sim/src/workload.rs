//! Requests: documents that are asked again and again, at random times.

use std::{f64::consts::LN_2, time::Duration};

use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use crate::engine::Request;

/// Documents and questions about them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Documents {
    /// Documents.
    pub count: u64,
    /// Tokens of the shortest and of the longest one.
    pub tokens: (u32, u32),
    /// Mean of their tokens, about.
    pub mean: f64,
    /// Standard deviation of the logarithm of their tokens.
    pub spread: f64,
    /// Tokens of a question.
    pub question: u32,
    /// Tokens of an answer.
    pub answer: u32,
    /// Questions about each document, in the mean.
    pub questions: f64,
}

impl Documents {
    /// Questions at `rate` a second, Poisson arrivals, each about a document that is drawn anew.
    #[must_use]
    pub fn requests(&self, rate: f64, block_tokens: u32, seed: u64) -> Vec<Request> {
        let mut chance = StdRng::seed_from_u64(seed);
        let lengths: Vec<u32> = (0..self.count).map(|_| self.length(&mut chance)).collect();
        let mut arrival = 0.0;
        let request = |number: u64| {
            arrival -= ln(chance.random_range(f64::MIN_POSITIVE..1.0)) / rate;
            let document = chance.random_range(0..self.count);
            let length = lengths[document as usize];
            let input = length + self.question;
            let name = |at: u32| {
                let whose = if at < length / block_tokens { document } else { self.count + number };
                whose << 24 | u64::from(at)
            };
            let blocks = (0..input / block_tokens).map(name).collect();
            let arrival = Duration::from_secs_f64(arrival);
            Request { arrival, input, output: self.answer, blocks }
        };
        (0..(self.count as f64 * self.questions) as u64).map(request).collect()
    }

    /// Log-normal, cut at both ends.
    fn length(&self, chance: &mut StdRng) -> u32 {
        // Twelve uniform numbers are as good as normal.
        let normal: f64 = (0..12).map(|_| chance.random_range(0.0..1.0)).sum::<f64>() - 6.0;
        let median = ln(self.mean) - self.spread * self.spread / 2.0;
        let tokens = exp(median + self.spread * normal);
        (tokens as u32).clamp(self.tokens.0, self.tokens.1)
    }
}

/// The natural logarithm of a normal number above zero. The standard library's is that of the
/// platform, and the same requests are wanted everywhere.
fn ln(x: f64) -> f64 {
    const FRACTION: u64 = (1 << 52) - 1;
    let exponent = (x.to_bits() >> 52) as f64 - 1023.0;
    let fraction = f64::from_bits((x.to_bits() & FRACTION) | (1023 << 52));
    let z = (fraction - 1.0) / (fraction + 1.0);
    let series = (0..18).rev().fold(0.0, |sum, k| sum * z * z + 1.0 / f64::from(2 * k + 1));
    exponent * LN_2 + 2.0 * z * series
}

/// The inverse, for the same reason; for numbers that are not large.
fn exp(x: f64) -> f64 {
    let whole = (x / LN_2).round();
    let rest = x - whole * LN_2;
    let series = (1..20).rev().fold(1.0, |sum, k| sum * rest / f64::from(k) + 1.0);
    series * f64::from_bits(((1023.0 + whole) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_are_as_good_as_the_platforms() {
        for x in [1e-300, 1e-9, 0.5, 1.0, 1.999_999, 2.0, 3.7, 30_000.0, 1e100] {
            assert!((ln(x) - x.ln()).abs() <= 1e-15 * x.ln().abs(), "{x}");
        }
        for x in [-20.0, -0.3, 0.0, 0.7, 1.0, 10.3, 12.2] {
            assert!((exp(x) / x.exp() - 1.0).abs() <= 1e-14, "{x}");
        }
    }

    #[test]
    fn requests_are_as_many_as_long_and_as_often_as_was_asked() {
        let documents = Documents {
            count: 400,
            tokens: (3_000, 200_000),
            mean: 30_000.0,
            spread: 0.8,
            question: 100,
            answer: 50,
            questions: 6.0,
        };
        let requests = documents.requests(2.0, 64, 1);
        assert_eq!(requests.len(), 2400);
        let took = requests.last().unwrap().arrival.as_secs_f64();
        assert!((1100.0..1300.0).contains(&took), "{took}");
        let mean = requests.iter().map(|it| f64::from(it.input)).sum::<f64>() / 2400.0;
        assert!((27_000.0..33_000.0).contains(&mean), "{mean}");
        let mut blocks: Vec<u64> = requests.iter().flat_map(|it| it.blocks.clone()).collect();
        let all = blocks.len() as f64;
        blocks.sort_unstable();
        blocks.dedup();
        let hits = 1.0 - blocks.len() as f64 / all;
        assert!((0.80..0.86).contains(&hits), "{hits}");
    }
}
