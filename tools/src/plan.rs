//! The workload as keys: the blocks of each request, and their totals.

use std::collections::HashSet;
use std::time::Duration;

use objstore::{BlockKey, KeyChain};

use crate::model::Shape;
use crate::trace::Request;

/// Arrival and length of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// Arrival after the first one, in order; of a later turn the earliest one.
    pub(crate) arrival: Duration,
    /// Tokens of the prompt.
    pub(crate) input: u64,
    /// Tokens to generate.
    pub(crate) output: u64,
    /// Number of the turn before, and the time from its end to this arrival at least.
    pub(crate) after: Option<(usize, Duration)>,
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
    /// Store blocks per trace block, or 1 if that is smaller.
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
        let salt = format!("ripieno replay: {}, {} tokens", shape.model, shape.block_tokens);
        let root = KeyChain::new(salt.as_bytes());
        let mut seen = HashSet::new();
        let mut plan = Self { subs: 1, ..Self::default() };
        for request in requests {
            let before = plan.keys.len();
            let subs = (request.block_tokens / shape.block_tokens).max(1) as usize;
            plan.subs = subs;
            let (mut chain, mut words) = (root.clone(), Vec::new());
            request.cut(shape.block_tokens, request.padded(shape.block_tokens), |ids, part| {
                if part == 0 {
                    words.clear();
                    words.extend(ids.iter().flat_map(|id| [*id as u32, (id >> 32) as u32]));
                }
                words.push(part);
                plan.keys.push(chain.next(&words));
                words.pop();
            });
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
            let Request { arrival, input_tokens, output_tokens, after, .. } = request;
            plan.times.push(Times { arrival, input: input_tokens, output: output_tokens, after });
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
