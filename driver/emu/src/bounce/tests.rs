#![allow(unsafe_code, reason = "a copy engine whose memory is this process's")]

use nvme_driver::{CopyFence, DeviceCopy};
use proptest::prelude::*;

use super::*;
use crate::memory::HostMap;

/// A copy engine that has memory but copies nothing.
#[derive(Debug)]
struct Memory;

impl CopyEngine for Memory {
    fn host_memory(&self, len: usize) -> Result<ExternalMemory, CopyError> {
        let map = HostMap::anonymous(len).map_err(|e| CopyError { cause: e.to_string() })?;
        let (host, len) = (map.ptr(), map.len());
        // SAFETY: the owner keeps the mapping.
        Ok(unsafe { ExternalMemory::new(Some(host), None, len, Arc::new(map)) })
    }

    unsafe fn submit(&self, _: &[DeviceCopy]) -> Result<CopyFence, CopyError> {
        Ok(CopyFence(0))
    }

    fn is_done(&self, _: CopyFence) -> Result<bool, CopyError> {
        Ok(true)
    }
}

proptest! {
    /// No two users share a byte, and all bytes can be taken again after use.
    #[test]
    fn each_byte_has_one_user(ops in prop::collection::vec((any::<bool>(), 1usize..9), 1..80)) {
        let copies = Copies::new(Arc::new(Memory));
        let mut held: Vec<Bounce> = Vec::new();
        for (takes, size) in ops {
            if !takes && !held.is_empty() {
                held.swap_remove(size % held.len());
                continue;
            }
            // Eighths of the pool, slightly less than whole.
            let len = size * (POOL_BYTES / 8) - 100;
            let taken = copies.pool.take(len).unwrap();
            let used: usize = held.iter().map(Bounce::len).sum();
            prop_assert!(taken.is_some() || used > 0);
            prop_assert!(taken.is_none() || used + len <= POOL_BYTES);
            held.extend(taken);
            let mut ranges: Vec<_> =
                held.iter().map(|b| (b.host().as_ptr().addr(), b.len())).collect();
            ranges.sort_unstable();
            prop_assert!(ranges.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0));
        }
        held.clear();
        prop_assert!(copies.pool.take(POOL_BYTES).unwrap().is_some(), "no hole is left over");
    }
}
