//! Hit rates on a trace: the catalog with each policy, and the optimum.

use std::collections::BTreeSet;

use kv_catalog::{BlockKey, Catalog, FileId, NamespaceId, PolicyKind};
use ripieno_sim::plain_catalog;

use super::trace::{Trace, key};

/// Serves one request: finds its longest stored prefix, stores the rest, and releases the prefix.
/// Returns the files of both.
pub fn request(
    catalog: &mut Catalog,
    namespace: NamespaceId,
    keys: &[BlockKey],
) -> (Vec<FileId>, Vec<FileId>) {
    let prefix = catalog.acquire(namespace, keys).expect("it is registered");
    let write = catalog.begin(namespace, keys).expect("it is registered");
    catalog.written(write.id, 0, &[]).expect("it has begun");
    catalog.commit(write.id).expect("its rank has reported");
    catalog.release(prefix.id).expect("it was acquired");
    let own = write.own().collect();
    (prefix.files, own)
}

/// Serves a trace with a store of `files` files. Returns the blocks found, and the blocks stored.
pub fn served(trace: &Trace, files: u32, policy: PolicyKind) -> (u64, u64) {
    let (mut catalog, namespace) = plain_catalog(files, 1, policy);
    trace.requests.iter().fold((0, 0), |(hits, stored), blocks| {
        let keys: Vec<BlockKey> = blocks.iter().map(|block| key(*block, 0)).collect();
        let (found, own) = request(&mut catalog, namespace, &keys);
        (hits + found.len() as u64, stored + own.len() as u64)
    })
}

/// Belady's bound: after each request, keeps the blocks (of the cache and the request) that are
/// used next, and drops those never used again.
///
/// Keeping the blocks used first is optimal for blocks that count individually (Mattson et al.,
/// 1970, with the choice not to store). A block is used no later than its successors in the prefix,
/// so the cache is closed under prefixes if ties go to the head, and each of its hits belongs to a
/// longest stored prefix: no policy finds more.
pub fn min(trace: &Trace, files: u32) -> f64 {
    let mut uses: Vec<Vec<u32>> = vec![Vec::new(); trace.distinct() as usize + 1];
    for (number, blocks) in trace.requests.iter().enumerate().rev() {
        blocks.iter().for_each(|block| uses[*block as usize].push(number as u32));
    }
    let mut kept: BTreeSet<(u32, usize, u32)> = BTreeSet::new();
    let mut place: Vec<Option<(u32, usize, u32)>> = vec![None; uses.len()];
    let mut hits = 0u64;
    for blocks in &trace.requests {
        let found = blocks.iter().take_while(|block| place[**block as usize].is_some());
        hits += found.count() as u64;
        for (depth, block) in blocks.iter().enumerate() {
            let at = *block as usize;
            if let Some(old) = place[at].take() {
                kept.remove(&old);
            }
            uses[at].pop();
            if let Some(next) = uses[at].last() {
                place[at] = Some((*next, depth, *block));
                kept.insert((*next, depth, *block));
            }
        }
        while kept.len() > files as usize {
            let (_, _, block) = kept.pop_last().expect("it is not empty");
            place[block as usize] = None;
        }
    }
    hits as f64 / trace.blocks() as f64
}
