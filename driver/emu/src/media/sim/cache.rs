//! Contents of blocks before they were overwritten in a volatile cache.

use std::{collections::BTreeMap, ops::Range};

/// Contents remembered per block: the oldest and the latest ones.
const VERSIONS_MAX: usize = 4;

/// Contents that blocks may revert to: those before each write since the last flush.
#[derive(Debug, Default)]
pub(super) struct Cache {
    pub(super) older: BTreeMap<u64, Vec<Older>>,
}

#[derive(Debug)]
pub(super) struct Older {
    /// Time of the overwrite, in stamps.
    stamp: u64,
    /// Set if a flush of the overwriting data failed.
    stays: bool,
    pub(super) bytes: Box<[u8]>,
}

impl Cache {
    /// Remembers that `block` holds `bytes`, before it is overwritten.
    pub(super) fn remember(&mut self, block: u64, stamp: u64, bytes: Box<[u8]>) {
        let older = self.older.entry(block).or_default();
        if older.len() == VERSIONS_MAX {
            older.remove(1);
        }
        older.push(Older { stamp, stays: false, bytes });
    }

    /// Makes everything overwritten until then durable, except for blocks that an earlier flush
    /// failed to make durable and that were not written since.
    pub(super) fn flush(&mut self, submitted: u64) {
        self.older.retain(|_, older| {
            let is_over = |content: &Older| content.stamp <= submitted && !content.stays;
            if let Some(last) = older.iter().rposition(is_over) {
                older.drain(..=last);
            }
            !older.is_empty()
        });
    }

    /// Excludes blocks overwritten until then from later flushes.
    pub(super) fn flush_failed(&mut self, submitted: u64) {
        let all = self.older.values_mut().flatten();
        all.filter(|content| content.stamp <= submitted).for_each(|content| content.stays = true);
    }

    /// Makes the contents of `blocks` durable.
    pub(super) fn forget(&mut self, blocks: Range<u64>) {
        if self.older.is_empty() {
            return;
        }
        let known: Vec<u64> = self.older.range(blocks).map(|(block, _)| *block).collect();
        for block in known {
            self.older.remove(&block);
        }
    }
}
