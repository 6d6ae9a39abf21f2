//! The workload as keys: the blocks of each request, and their totals.

use std::collections::HashSet;
use std::time::Duration;

use objstore::{BlockKey, KeyChain};

use crate::model::Shape;
use crate::trace::Request;

/// Arrival and length of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// Arrival after the first one; never before that of the previous request.
    pub(crate) arrival: Duration,
    /// Tokens of the prompt.
    pub(crate) input: u64,
    /// Tokens to generate.
    pub(crate) output: u64,
}

/// All requests of a replay, as keys of their store blocks.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Concatenated keys of all requests.
    keys: Vec<BlockKey>,
    /// End index of each request's keys.
    ends: Vec<usize>,
    /// Arrival and length of each request.
    times: Vec<Times>,
    /// Store blocks per trace block.
    pub(crate) subs: usize,
    /// Distinct store blocks: the capacity at which a store evicts nothing.
    pub(crate) distinct: u64,
    /// Store blocks of the longest request.
    pub(crate) longest: usize,
    /// Trace blocks that a cache without limits would hit.
    pub(crate) ideal_hits: u64,
}

impl Plan {
    /// Derives the block keys of `requests`, up to the request that would raise the distinct store
    /// blocks above `distinct_max`. The first request is always included.
    pub(crate) fn new(
        requests: impl Iterator<Item = Request>,
        shape: &Shape,
        distinct_max: Option<u64>,
    ) -> Self {
        let subs = shape.subs() as usize;
        let salt = format!("ripieno replay: {}, {} tokens", shape.model, shape.block_tokens);
        let root = KeyChain::new(salt.as_bytes());
        let mut seen = HashSet::new();
        let mut plan = Self { subs, ..Self::default() };
        for request in requests {
            let before = plan.keys.len();
            let mut chain = root.clone();
            for &id in &request.hash_ids {
                let (low, high) = (id as u32, (id >> 32) as u32);
                plan.keys.extend((0..subs as u32).map(|sub| chain.next(&[low, high, sub])));
            }
            let new = plan.keys[before..].iter().filter(|key| !seen.contains(*key)).count();
            let distinct = plan.distinct + new as u64;
            if distinct_max.is_some_and(|max| distinct > max) && !plan.ends.is_empty() {
                plan.keys.truncate(before);
                break;
            }
            // Keys are chained, so blocks seen before are always a prefix.
            let old = plan.keys.len() - before - new;
            seen.extend(plan.keys[before + old..].iter().copied());
            plan.distinct = distinct;
            plan.ideal_hits += (old / subs) as u64;
            plan.longest = plan.longest.max(plan.keys.len() - before);
            plan.ends.push(plan.keys.len());
            let before = plan.times.last().map_or(Duration::ZERO, |times| times.arrival);
            plan.times.push(Times {
                arrival: request.arrival.max(before),
                input: request.input_tokens,
                output: request.output_tokens,
            });
        }
        plan
    }

    /// Returns the number of requests.
    pub(crate) fn requests(&self) -> usize {
        self.ends.len()
    }

    /// Returns the keys of a request's store blocks.
    pub(crate) fn keys(&self, request: usize) -> &[BlockKey] {
        let start = if request == 0 { 0 } else { self.ends[request - 1] };
        &self.keys[start..self.ends[request]]
    }

    /// Returns the arrival and length of a request.
    pub(crate) fn times(&self, request: usize) -> Times {
        self.times[request]
    }

    /// Returns the trace blocks of all requests.
    pub(crate) fn trace_blocks(&self) -> u64 {
        (self.keys.len() / self.subs) as u64
    }
}

#[cfg(test)]
mod tests;
