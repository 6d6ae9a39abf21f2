//! Requests: documents that are asked again and again, at random times.

use std::time::Duration;

// The standard library's are those of the platform, and the same requests are wanted everywhere.
use libm::{exp, log as ln};
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

#[cfg(test)]
mod tests {
    use super::*;

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
