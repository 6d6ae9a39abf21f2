//! Replay of a trace through host memory.

use std::{collections::HashSet, time::Duration};

use kv_catalog::PolicyKind;
use kv_tier::{Admission, Block, HostBlock, Tier, TierConfig, TierCounts};

use super::BLOCK_BYTES;
use crate::catalog::trace::Trace;

/// Returns the virtual time of a request: its number in seconds.
fn time(request: usize) -> Duration {
    Duration::from_secs(request as u64)
}

/// Serves all requests; the drives have every block requested before. The blocks of the next
/// `queue` requests are announced.
pub fn replay(trace: &Trace, blocks: u32, policy: PolicyKind, queue: usize) -> TierCounts {
    let mut tier = Tier::new(TierConfig { blocks, block_bytes: BLOCK_BYTES, policy });
    let mut stored = HashSet::new();
    // Requests in the queue that want each block, the soonest last.
    let mut wanted: Vec<Vec<usize>> = vec![Vec::new(); trace.distinct() as usize + 1];
    let announce = |number: usize, wanted: &mut Vec<Vec<usize>>, tier: &mut Tier<u32>| {
        for block in trace.requests.get(number).into_iter().flatten() {
            wanted[*block as usize].insert(0, number);
            tier.expect(*block, time(*wanted[*block as usize].last().expect("this one")));
        }
    };
    (0..queue).for_each(|number| announce(number, &mut wanted, &mut tier));
    for (number, request) in trace.requests.iter().enumerate() {
        if queue > 0 {
            announce(number + queue, &mut wanted, &mut tier);
            request.iter().for_each(|block| {
                wanted[*block as usize].pop();
            });
        }
        let mut held = Vec::new();
        let mut others = Vec::new();
        for block in request {
            match stored.contains(block).then(|| tier.get(*block)).flatten() {
                Some(memory) => held.push(memory),
                None => others.push(*block),
            }
        }
        // The tail first, so that it is evicted before the blocks it follows.
        for block in others.iter().rev() {
            stored.insert(*block);
            bring(&mut tier, *block, wanted[*block as usize].last().map(|next| time(*next)));
        }
        held.into_iter().for_each(|memory: HostBlock| tier.release(memory));
        for block in request {
            match wanted[*block as usize].last() {
                Some(next) => tier.expect(*block, time(*next)),
                None => tier.forget(*block),
            }
        }
    }
    tier.counts()
}

fn bring(tier: &mut Tier<u32>, key: u32, by: Option<Duration>) {
    let again = Duration::from_millis(10);
    let block = Block { key, again, by };
    if let Admission::Fill(memory) = tier.admit(block) {
        tier.filled(memory, true);
    }
}
