//! Requests at random times: repeated questions about documents, and prompts that share nothing.

use std::{collections::BTreeMap, sync::LazyLock, time::Duration};

// The standard library's functions differ by platform, and the requests must not.
use libm::{exp, log as ln};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use serde::Deserialize;

use crate::engine::Request;

/// Makes a fraction `part` of all clients disconnect, each at a uniformly random time up to
/// `within` after its arrival.
pub fn abort(requests: &mut [Request], part: f64, within: Duration, seed: u64) {
    // A different generator from that of the requests.
    let mut chance = StdRng::seed_from_u64(!seed);
    for request in requests {
        let [goes, when] = [(); 2].map(|()| chance.random_range(0.0..1.0));
        request.leaves = (goes < part).then(|| within.mul_f64(when));
    }
}

/// A workload of `workloads.toml`.
#[derive(Debug, Deserialize)]
pub struct Workload {
    /// Name.
    pub name: String,
    /// Requests a second, if nothing else is said.
    pub rate: f64,
    /// The requests in words.
    pub text: String,
    #[serde(flatten)]
    generator: Generator,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Generator {
    Documents(Documents),
    Conversations(Conversations),
    Profile(Profile),
}

impl Workload {
    /// Returns all workloads.
    /// Panics if the file is wrong, which a test would have found.
    pub fn all() -> &'static [Self] {
        static ALL: LazyLock<Vec<Workload>> = LazyLock::new(|| {
            let text = include_str!("../workloads.toml");
            let mut file: BTreeMap<String, Vec<Workload>> = basic_toml::from_str(text)
                .unwrap_or_else(|error| panic!("workloads.toml: {error}"));
            file.remove("workload").expect("workloads")
        });
        &ALL
    }

    /// Returns the workload of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        Self::all().iter().find(|it| it.name == name)
    }

    /// Returns requests at `rate` a second: `count` of those that are not limited by documents.
    pub fn requests(&self, count: usize, rate: f64, block_tokens: u32, seed: u64) -> Vec<Request> {
        match &self.generator {
            Generator::Documents(it) => it.requests(rate, block_tokens, seed),
            Generator::Conversations(it) => it.steady(count, rate, block_tokens, seed),
            Generator::Profile(it) => it.requests(count as u64, rate, block_tokens, seed),
        }
    }

    /// Returns the documents of this name.
    pub(crate) fn documents(name: &str) -> Documents {
        match Self::named(name).map(|it| &it.generator) {
            Some(Generator::Documents(documents)) => *documents,
            other => panic!("{name}: {other:?} are no documents"),
        }
    }
}

/// Documents and questions about them.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Documents {
    /// Number of documents.
    pub count: u64,
    /// Minimum and maximum tokens of a document.
    pub tokens: (u32, u32),
    /// Approximate mean tokens of a document.
    pub mean: f64,
    /// Standard deviation of the logarithm of their tokens.
    pub spread: f64,
    /// Tokens of a question.
    pub question: u32,
    /// Tokens of an answer.
    pub answer: u32,
    /// Mean number of questions per document.
    pub questions: f64,
}

/// Lengths in tokens: log-normal, cut off at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lengths {
    /// Minimum and maximum.
    pub tokens: (u32, u32),
    /// Approximate mean.
    pub mean: f64,
    /// Standard deviation of the logarithm; 0 for a constant length.
    pub spread: f64,
}

/// Draws an approximately normal number, as the sum of twelve uniform ones.
pub(crate) fn normal(chance: &mut StdRng) -> f64 {
    (0..12).map(|_| chance.random_range(0.0..1.0)).sum::<f64>() - 6.0
}

impl Lengths {
    pub(crate) fn draw(&self, chance: &mut StdRng) -> u32 {
        let median = ln(self.mean) - self.spread * self.spread / 2.0;
        let tokens = exp(median + self.spread * normal(chance));
        // Keeps whole numbers exact after the logarithm and back.
        ((tokens + 1e-6) as u32).clamp(self.tokens.0, self.tokens.1)
    }
}

/// Prompts that share nothing.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Tokens of prompts.
    pub input: Lengths,
    /// Tokens of output.
    pub output: Lengths,
}

impl Profile {
    /// Returns `count` requests at `rate` a second, with Poisson arrivals.
    pub fn requests(&self, count: u64, rate: f64, block_tokens: u32, seed: u64) -> Vec<Request> {
        let mut chance = StdRng::seed_from_u64(seed);
        let mut arrival = 0.0;
        let request = |number: u64| {
            arrival -= ln(chance.random_range(f64::MIN_POSITIVE..1.0)) / rate;
            let input = self.input.draw(&mut chance);
            let output = self.output.draw(&mut chance);
            let blocks = (0..u64::from(input / block_tokens)).map(|at| number << 24 | at).collect();
            let arrival = Duration::from_secs_f64(arrival);
            Request { arrival, input, output, blocks, leaves: None, after: None }
        };
        (0..count).map(request).collect()
    }
}

/// Conversations of several turns: each prompt is all that was said before, and a new message.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conversations {
    /// Tokens of instructions at the beginning of all conversations.
    pub instructions: u32,
    /// Tokens of a message.
    pub message: Lengths,
    /// Tokens of an answer.
    pub answer: Lengths,
    /// Mean number of turns of a conversation, geometrically distributed.
    pub turns: f64,
    /// Mean seconds between two messages of a conversation, exponentially distributed.
    pub pause: f64,
    /// Tokens after which a conversation ends.
    pub most: u32,
}

impl Conversations {
    /// Returns `count` requests at about `rate` a second, of a time when as many conversations end
    /// as begin: what came before is left out.
    fn steady(&self, count: usize, rate: f64, block_tokens: u32, seed: u64) -> Vec<Request> {
        // Of a hundred conversations, one takes longer.
        let ramp = self.turns * self.pause * 5.0;
        let before = (ramp * rate * 1.5) as usize;
        let mut all = self.requests(count + before, rate, block_tokens, seed);
        let ramp = Duration::from_secs_f64(ramp);
        all.retain(|request| request.arrival >= ramp);
        all.truncate(count);
        all.iter_mut().for_each(|request| request.arrival -= ramp);
        all
    }

    /// Returns `count` requests at about `rate` a second, with Poisson arrivals of conversations.
    pub fn requests(&self, count: usize, rate: f64, block_tokens: u32, seed: u64) -> Vec<Request> {
        let mut chance = StdRng::seed_from_u64(seed);
        let exponential = |chance: &mut StdRng, mean: f64| {
            -ln(chance.random_range(f64::MIN_POSITIVE..1.0)) * mean
        };
        let mut requests = Vec::new();
        let mut begins = 0.0;
        for number in 1_u64.. {
            // Later conversations have no turn among the first `count`.
            let now = Duration::from_secs_f64(begins);
            let is_past = |it: &&Request| it.arrival <= now;
            if number.is_power_of_two() && requests.iter().filter(is_past).count() >= count {
                break;
            }
            begins += exponential(&mut chance, self.turns / rate);
            let (mut at, mut before) = (begins, self.instructions);
            loop {
                let message = self.message.draw(&mut chance);
                let (input, output) = (before + message, self.answer.draw(&mut chance));
                let name = |block: u32| {
                    let whose = if block < self.instructions / block_tokens { 0 } else { number };
                    whose << 24 | u64::from(block)
                };
                let blocks = (0..input / block_tokens).map(name).collect();
                let arrival = Duration::from_secs_f64(at);
                requests.push(Request {
                    arrival,
                    input,
                    output,
                    blocks,
                    leaves: None,
                    after: None,
                });
                before = input + output;
                if before > self.most || chance.random_range(0.0..1.0) < 1.0 / self.turns {
                    break;
                }
                at += exponential(&mut chance, self.pause);
            }
        }
        requests.sort_by_key(|request| request.arrival);
        requests.truncate(count);
        requests
    }
}

impl Documents {
    /// Returns questions at `rate` a second, with Poisson arrivals, each about a random document.
    pub fn requests(&self, rate: f64, block_tokens: u32, seed: u64) -> Vec<Request> {
        let mut chance = StdRng::seed_from_u64(seed);
        let Self { tokens, mean, spread, .. } = *self;
        let length = Lengths { tokens, mean, spread };
        let lengths: Vec<u32> = (0..self.count).map(|_| length.draw(&mut chance)).collect();
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
            Request { arrival, input, output: self.answer, blocks, leaves: None, after: None }
        };
        (0..(self.count as f64 * self.questions) as u64).map(request).collect()
    }
}

#[cfg(test)]
mod tests;
