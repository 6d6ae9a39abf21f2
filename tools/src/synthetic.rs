//! A synthetic workload: conversations of many turns that share system prompts.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::model::TRACE_BLOCK_TOKENS;
use crate::trace::Request;

/// Number of system prompts; the first is used by about half of the conversations.
const PROMPTS: usize = 4;
/// Number of concurrent conversations.
const CONVERSATIONS: usize = 24;
/// Length in trace blocks at which a conversation ends.
const BLOCKS_MAX: usize = 64;

/// Mean number of requests a second; arrivals are a Poisson process.
const RATE: f64 = 2.0;

/// Upper bound of the mean trace blocks per request.
pub(crate) const BLOCKS_MEAN: u64 = 16;

/// Returns `count` requests; deterministic for a `seed`.
///
/// A turn repeats the whole conversation and adds one to four blocks. Its last block is not full:
/// in the next turn that block has another content, hence another ID, as in a real trace.
pub(crate) fn requests(seed: u64, count: usize) -> impl Iterator<Item = Request> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut ids = 0..u64::MAX;
    let prompts: Vec<Vec<u64>> = (0..PROMPTS)
        .map(|_| {
            let blocks = rng.random_range(1..=6);
            ids.by_ref().take(blocks).collect()
        })
        .collect();
    let begin = move |rng: &mut StdRng| {
        let mut prompt = 0;
        while prompt + 1 < PROMPTS && rng.random_bool(0.5) {
            prompt += 1;
        }
        prompts[prompt].clone()
    };
    // A separate generator, so that contents do not depend on arrival times.
    let mut times = StdRng::seed_from_u64(seed.rotate_left(32));
    let mut arrival = Duration::ZERO;
    let mut open: Vec<Vec<u64>> = (0..CONVERSATIONS).map(|_| begin(&mut rng)).collect();
    (0..count).map(move |_| {
        let talk = &mut open[rng.random_range(0..CONVERSATIONS)];
        let added = rng.random_range(1..=4);
        talk.extend(ids.by_ref().take(added));
        let rest = rng.random_range(1..u64::from(TRACE_BLOCK_TOKENS));
        let input_tokens = (talk.len() as u64 - 1) * u64::from(TRACE_BLOCK_TOKENS) + rest;
        let output_tokens = times.random_range(20..=300);
        let hash_ids = talk.as_slice().into();
        let request =
            Request { arrival, input_tokens, output_tokens, hash_ids, ..Request::default() };
        let gap: f64 = -times.random_range(f64::MIN_POSITIVE..1.0).ln();
        arrival += Duration::from_secs_f64(gap / RATE);
        talk.pop();
        if talk.len() >= BLOCKS_MAX || rng.random_bool(0.1) {
            *talk = begin(&mut rng);
        }
        request
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_one_workload() {
        let made = |seed, count| requests(seed, count).collect::<Vec<_>>();
        let first = made(7, 300);
        assert_eq!(first, made(7, 300));
        assert_ne!(first, made(8, 300));
        assert_eq!(first[..100], made(7, 100));
    }

    #[test]
    fn requests_look_like_those_of_a_trace() {
        let made: Vec<_> = requests(1, 2000).collect();
        let blocks = |tokens: u64| tokens.div_ceil(u64::from(TRACE_BLOCK_TOKENS)) as usize;
        assert!(made.iter().all(|it| blocks(it.input_tokens) == it.hash_ids.len()));
        assert!(made.iter().all(|request| (2..=BLOCKS_MAX + 4).contains(&request.hash_ids.len())));
        // Turns share all but their last block with the previous turn.
        let blocks: usize = made.iter().map(|request| request.hash_ids.len()).sum();
        assert!((BLOCKS_MEAN..2 * BLOCKS_MEAN).contains(&(blocks as u64 / 2000)), "{blocks}");
        let ids: std::collections::HashSet<_> =
            made.iter().flat_map(|request| request.hash_ids.iter()).collect();
        let shared = 1.0 - ids.len() as f64 / blocks as f64;
        assert!((0.5..0.95).contains(&shared), "{shared}");
    }
}
