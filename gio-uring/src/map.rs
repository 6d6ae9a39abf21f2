//! The (block, file) map of a request: uploaded once, used by every layer.

use std::{ops::Range, sync::Arc};

use crate::{
    abi::Affine,
    arena::{Arena, Block},
    executor::ExecutorError,
    status::IoStatus,
    sync::Ordering,
};

/// A request's map in executor memory. Clones share the map; the memory is recycled when the last
/// clone is dropped and no operation uses it.
///
/// The entries are grouped by `file % devices` and sorted by file within a group, so that
/// neighbouring files, which are neighbours on the device, become one command. Results are reported
/// in the caller's order.
#[derive(Debug, Clone)]
pub struct BlockMap {
    inner: Arc<MapInner>,
}

#[derive(Debug)]
struct MapInner {
    /// Entries and starts, near the kernel.
    block: Block,
    /// The status of each entry, for the host to read.
    statuses: Block,
    /// `order[i]` is the caller's index of uploaded entry i.
    order: Vec<u32>,
}

impl Drop for MapInner {
    fn drop(&mut self) {
        let order = std::mem::take(&mut self.order);
        self.block.arena().give_back_order(order);
    }
}

/// Returns the offset of the starts behind `count` entries.
fn starts_at(count: usize) -> usize {
    count * size_of::<Affine>()
}

/// Sorts the indices 0 .. `count` into `order` by class, then by `key`; reports the first index of
/// each class through `put(class, first)`. Not stable.
pub(crate) fn group(
    count: usize,
    devices: u32,
    order: &mut Vec<u32>,
    class: impl Fn(usize) -> u32,
    key: impl Fn(usize) -> u64,
    mut put: impl FnMut(usize, u32),
) {
    order.clear();
    order.resize(count, 0);
    let mut first = 0usize;
    // One pass per device: there are few, and it needs no table.
    for device in 0..devices {
        put(device as usize, first as u32);
        let mut end = first;
        for index in (0..count).filter(|&index| class(index) == device) {
            order[end] = index as u32;
            end += 1;
        }
        order[first..end].sort_unstable_by_key(|&index| key(index as usize));
        first = end;
    }
    put(devices as usize, first as u32);
}

impl BlockMap {
    /// Returns the bytes of a map's entries and starts, and of its statuses.
    pub(crate) fn bytes(count: usize, devices: u32) -> [usize; 2] {
        let starts = (devices as usize + 1) * size_of::<u32>();
        [starts_at(count) + starts, count * size_of::<u32>()]
    }

    /// Uploads the map to `block` and `statuses`, which hold at least [`BlockMap::bytes`].
    pub(crate) fn upload(
        entries: &[Affine],
        devices: u32,
        [block, statuses]: [Block; 2],
    ) -> Result<Self, ExecutorError> {
        let region = block.region();
        let starts = starts_at(entries.len());
        let mut order = block.arena().take_order();
        group(
            entries.len(),
            devices,
            &mut order,
            |index| entries[index].file % devices,
            |index| u64::from(entries[index].file),
            |class, first| region.put(starts, class, first),
        );
        for (at, &index) in order.iter().enumerate() {
            region.put(0, at, entries[index as usize]);
        }
        statuses.region().zero(0, entries.len() * size_of::<u32>());
        let uploaded = region.push();
        let map = Self { inner: Arc::new(MapInner { block, statuses, order }) };
        uploaded.map(|()| map)
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.order.len()
    }

    /// Returns true if there are no entries. A map uploaded by a ring is never empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.order.is_empty()
    }

    /// Returns true if the map is a clone of `other`.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns the caller's index of each uploaded entry.
    pub(crate) fn order(&self) -> &[u32] {
        &self.inner.order
    }

    pub(crate) fn is_of(&self, arena: &Arc<Arena>) -> bool {
        self.inner.statuses.is_of(arena)
    }

    /// Returns the addresses of entries, starts and statuses for the kernel.
    pub(crate) fn addresses(&self) -> [u64; 3] {
        let [block, statuses] = [&self.inner.block, &self.inner.statuses].map(Block::region);
        [block.address(0), block.address(starts_at(self.len())), statuses.address(0)]
    }

    /// Returns the caller's index of uploaded entry `at`, or `None` if out of range.
    pub(crate) fn caller_index(&self, at: u32) -> Option<u32> {
        self.inner.order.get(at as usize).copied()
    }

    /// Returns the status of uploaded entry `at`. Ordering: Relaxed; the words are complete only
    /// after the operation's completion was consumed.
    fn status_at(&self, at: usize) -> IoStatus {
        let offset = at * size_of::<u32>();
        IoStatus::decode(self.inner.statuses.region().load32(offset, Ordering::Relaxed))
    }

    /// Returns all failures so far as (index in the caller's order, status), unordered.
    pub fn failures(&self) -> impl Iterator<Item = (u32, IoStatus)> + '_ {
        let order = self.inner.order.iter().enumerate();
        order.map(|(at, &index)| (index, self.status_at(at))).filter(|(_, status)| !status.is_ok())
    }

    /// Returns the status of every entry in the caller's order, as of the last completion waited
    /// for. Statuses are sticky: an entry that failed in one layer stays failed.
    #[must_use]
    pub fn statuses(&self) -> Vec<IoStatus> {
        let mut statuses = vec![IoStatus::Ok; self.len()];
        for (index, status) in self.failures() {
            statuses[index as usize] = status;
        }
        statuses
    }

    /// Sets the status of every `Ok` entry of `range` (uploaded order) to `word`.
    pub(crate) fn mark(&self, range: Range<usize>, word: u32) {
        mark(self.inner.statuses.region(), 0, range, word);
    }
}

/// Sets every `Ok` status word of `range` to `word`. Only for a kernel that has ended.
pub(crate) fn mark(region: &crate::shared::Region, status: usize, range: Range<usize>, word: u32) {
    for at in range {
        let offset = status + at * size_of::<u32>();
        if region.load32(offset, Ordering::Relaxed) == crate::abi::STATUS_OK {
            region.store32(offset, word, Ordering::Relaxed);
        }
    }
}
