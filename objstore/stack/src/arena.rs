//! A bump allocator over mapped memory.

use std::sync::Arc;

use nvme_driver::{DmaError, DmaMemory, DmaSlice, QueueMemory};

/// Alignment of each part: the largest page that a controller may require here.
const PAGE: usize = 64 << 10;
/// Bytes of a submission queue entry and of a completion queue entry.
const SQE_BYTES: usize = 64;
const CQE_BYTES: usize = 16;
/// Bytes for the descriptors of one command: a list for the largest merged command.
const DESCRIPTOR_BYTES: usize = 4096;

/// A piece of memory, and the bytes of it in use.
#[derive(Debug)]
pub(crate) struct Arena {
    memory: Arc<dyn DmaMemory>,
    used: usize,
}

impl Arena {
    /// Makes an arena of which all of `memory` is free.
    pub(crate) fn new(memory: Arc<dyn DmaMemory>) -> Self {
        Self { memory, used: 0 }
    }

    /// Returns the bytes left.
    pub(crate) fn left(&self) -> usize {
        self.memory.len().saturating_sub(self.used)
    }

    /// Takes the next `bytes` bytes.
    ///
    /// # Errors
    /// Returns [`DmaError`] if fewer bytes are left.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<DmaSlice, DmaError> {
        let slice = DmaSlice::new(self.memory.clone(), self.used, bytes)?;
        self.used += bytes.next_multiple_of(PAGE);
        Ok(slice)
    }

    /// Takes memory for a queue pair of `depth` entries.
    ///
    /// # Errors
    /// Same as [`Arena::take`].
    pub(crate) fn queue(&mut self, depth: u32) -> Result<QueueMemory, DmaError> {
        let [sq, cq, descriptors] = parts(depth);
        Ok(QueueMemory {
            sq: self.take(sq)?,
            cq: self.take(cq)?,
            descriptors: self.take(descriptors)?,
        })
    }

    /// Returns the bytes that [`Arena::queue`] takes.
    pub(crate) fn queue_bytes(depth: u32) -> usize {
        parts(depth).iter().map(|bytes| bytes.next_multiple_of(PAGE)).sum()
    }
}

fn parts(depth: u32) -> [usize; 3] {
    [SQE_BYTES, CQE_BYTES, DESCRIPTOR_BYTES].map(|bytes| bytes * depth as usize)
}

#[cfg(test)]
mod tests {
    use nvme_driver::DmaSpace as _;
    use nvme_emu::EmuDomain;

    use super::*;

    #[test]
    fn queues_take_what_was_announced_and_not_more_than_there_is() {
        let domain = EmuDomain::new("test");
        let mut arena = Arena::new(domain.alloc(2 * Arena::queue_bytes(16)).unwrap());
        let first = arena.queue(16).unwrap();
        let second = arena.queue(16).unwrap();
        assert_eq!(arena.left(), 0);
        assert!(first.descriptors.iova().0 + 16 * 4096 <= second.sq.iova().0);
        assert!(second.sq.iova().0.is_multiple_of(PAGE as u64));
        assert!(arena.take(1).is_err());
    }
}
