//! The workload as keys: the blocks of each request, and their totals.

use std::collections::HashSet;
use std::time::Duration;

use objstore::{BlockKey, KeyChain};

use crate::model::Shape;
use crate::trace::Request;

/// Arrival and length of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// Arrival since the trace began; never before that of the previous request.
    pub(crate) arrival: Duration,
    /// Tokens of the prompt.
    pub(crate) input: u64,
    /// Tokens to generate.
    pub(crate) output: u64,
}

/// All requests of a replay, as keys of their store blocks.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Concatenated keys of all requests.
    keys: Vec<BlockKey>,
    /// End index of each request's keys.
    ends: Vec<usize>,
    /// Arrival and length of each request.
    times: Vec<Times>,
    /// Store blocks per trace block.
    subs: usize,
    distinct: u64,
    longest: usize,
    ideal_hits: u64,
    uneven: u64,
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
        let mut plan = Self {
            keys: Vec::new(),
            ends: Vec::new(),
            times: Vec::new(),
            subs,
            distinct: 0,
            longest: 0,
            ideal_hits: 0,
            uneven: 0,
        };
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
            plan.uneven += u64::from(request.is_uneven());
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

    /// Returns the store blocks per trace block.
    pub(crate) fn subs(&self) -> usize {
        self.subs
    }

    /// Returns the distinct store blocks: the capacity at which a store evicts nothing.
    pub(crate) fn distinct(&self) -> u64 {
        self.distinct
    }

    /// Returns the store blocks of the longest request.
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    /// Returns the trace blocks that a cache without limits would hit.
    pub(crate) fn ideal_hits(&self) -> u64 {
        self.ideal_hits
    }

    /// Returns the requests whose number of blocks does not follow from their prompt length.
    pub(crate) fn uneven(&self) -> u64 {
        self.uneven
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::model::MODELS;

    /// Unlimited prefix cache as a tree: an ID names a block only below its parent.
    #[derive(Default)]
    struct Tree {
        children: HashMap<(usize, u64), usize>,
    }

    impl Tree {
        fn hits(&mut self, ids: &[u64]) -> u64 {
            let (mut node, mut hits) = (0, 0);
            for &id in ids {
                let fresh = self.children.len() + 1;
                let next = *self.children.entry((node, id)).or_insert(fresh);
                hits += u64::from(next != fresh);
                node = next;
            }
            hits
        }
    }

    fn plan(requests: &[&[u64]], block_tokens: u32, max: Option<u64>) -> Plan {
        let requests: Vec<Request> = requests
            .iter()
            .map(|ids| Request {
                arrival: Duration::ZERO,
                input_tokens: 512 * ids.len() as u64,
                output_tokens: 1,
                hash_ids: ids.to_vec(),
            })
            .collect();
        Plan::new(requests.into_iter(), &Shape::new(&MODELS[0], block_tokens).unwrap(), max)
    }

    #[test]
    fn the_same_id_behind_another_prefix_is_another_block() {
        let plan = plan(&[&[1, 2, 3], &[4, 2, 3], &[1, 2, 9], &[3], &[], &[4, 2, 3, 1]], 512, None);
        assert_eq!(plan.ideal_hits(), 2 + 3);
        assert_eq!(plan.trace_blocks(), 3 + 3 + 3 + 1 + 4);
        assert_eq!(plan.distinct(), 3 + 3 + 1 + 1 + 1);
        assert_eq!((plan.requests(), plan.longest()), (6, 4));
        assert_eq!(plan.keys(0)[..2], plan.keys(2)[..2]);
        assert_ne!(plan.keys(0)[1], plan.keys(1)[1]);
        assert!(plan.keys(4).is_empty());
    }

    #[test]
    fn ids_are_more_than_32_bits() {
        let plan = plan(&[&[1], &[1 | 1 << 32], &[1 << 32]], 512, None);
        assert_eq!((plan.ideal_hits(), plan.distinct()), (0, 3));
    }

    #[test]
    fn small_blocks_are_parts_of_trace_blocks() {
        let plan = plan(&[&[1, 2], &[1, 3]], 128, None);
        assert_eq!((plan.subs(), plan.keys(0).len(), plan.longest()), (4, 8, 8));
        assert_eq!((plan.ideal_hits(), plan.trace_blocks(), plan.distinct()), (1, 4, 12));
        assert_eq!(plan.keys(0)[..4], plan.keys(1)[..4]);
        assert!(plan.keys(0)[4..].iter().all(|key| !plan.keys(1).contains(key)));
    }

    #[test]
    fn a_plan_ends_where_the_room_does() {
        let requests: [&[u64]; 4] = [&[1, 2, 3], &[1, 2], &[7, 8], &[1]];
        for (max, wanted) in [(0, 1), (3, 2), (4, 2), (5, 4)] {
            let plan = plan(&requests, 512, Some(max));
            assert_eq!(plan.requests(), wanted, "{max}");
            assert_eq!(plan.keys(plan.requests() - 1).len(), requests[wanted - 1].len());
        }
    }

    proptest! {
        #[test]
        fn hits_are_those_of_a_cache_without_limits(
            requests in prop::collection::vec(prop::collection::vec(0u64..4, 0..7), 0..40),
            log2 in 0u32..3,
        ) {
            let mut tree = Tree::default();
            let hits: u64 = requests.iter().map(|ids| tree.hits(ids)).sum();
            let slices: Vec<&[u64]> = requests.iter().map(Vec::as_slice).collect();
            let plan = plan(&slices, 512 >> log2, None);
            prop_assert_eq!(plan.ideal_hits(), hits);
            prop_assert_eq!(plan.distinct(), (tree.children.len() as u64) << log2);
            for (request, ids) in requests.iter().enumerate() {
                prop_assert_eq!(plan.keys(request).len(), ids.len() << log2);
            }
        }
    }
}
