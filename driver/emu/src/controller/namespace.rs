//! A namespace: a medium divided into blocks.

use nvme_driver::Nanos;

use crate::{
    bounce::Copies,
    config::NamespaceConfig,
    media::{GpuCopies, Media, MediaDone, MediaOp, Overlay},
};

/// log2 of the supported block sizes, in the order of the LBA formats.
pub(super) const LBA_SHIFTS: [u8; 2] = [9, 12];

/// A medium divided into blocks.
#[derive(Debug)]
pub(super) struct Namespace {
    media: GpuCopies,
    capacity: u64,
    /// log2 of the block size in bytes.
    pub lba_shift: u8,
    /// Size in blocks.
    pub lbas: u64,
    /// Preferred granularity of deallocations in bytes.
    pub deallocate_bytes: Option<u32>,
    /// Set during a format: other commands are rejected.
    pub formatting: bool,
}

impl Namespace {
    pub(super) fn new(config: NamespaceConfig, copies: Option<&Copies>) -> Self {
        let media = GpuCopies::new(Overlay::new(config.media), copies.cloned());
        let capacity = media.capacity_bytes();
        let lba_shift = config.lba_bytes.trailing_zeros() as u8;
        let (lbas, deallocate_bytes) = (capacity >> lba_shift, config.deallocate_bytes);
        Self { media, capacity, lba_shift, lbas, deallocate_bytes, formatting: false }
    }

    /// Returns the total bytes of all blocks of the current size.
    pub(super) fn bytes(&self) -> u64 {
        self.lbas << self.lba_shift
    }

    /// Returns the smallest unit of a torn write.
    pub(super) fn tear_bytes(&self) -> u64 {
        u64::from(self.media.granularity_bytes()).max(512)
    }

    /// Returns whether the medium can hold blocks of `1 << lba_shift` bytes.
    pub(super) fn can_format(&self, lba_shift: u8) -> bool {
        (1u32 << lba_shift).is_multiple_of(self.media.granularity_bytes().max(1))
            && self.capacity >> lba_shift > 0
    }

    /// Changes the block size.
    pub(super) fn format(&mut self, lba_shift: u8) {
        self.lba_shift = lba_shift;
        self.lbas = self.capacity >> lba_shift;
    }

    /// Returns the range in bytes, if it lies inside. NVM, "LBA Out of Range".
    #[inline]
    pub(super) fn range(&self, slba: u64, lbas: u64) -> Option<(u64, u64)> {
        let end = slba.checked_add(lbas)?;
        (end <= self.lbas).then_some((slba << self.lba_shift, lbas << self.lba_shift))
    }

    #[inline]
    pub(super) fn submit(&mut self, op: MediaOp, now: Nanos) -> Option<MediaDone> {
        self.media.submit(op, now)
    }

    pub(super) fn set_exclusive(&mut self, exclusive: bool) {
        self.media.set_exclusive(exclusive);
    }

    /// Returns the number of operations in flight.
    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        self.media.in_flight()
    }

    /// Returns the number of copies to and from a GPU so far, and of their batches.
    pub(super) fn copies(&self) -> (u64, u64) {
        (self.media.started, self.media.batches)
    }

    pub(super) fn poll(&mut self, now: Nanos, done: &mut Vec<MediaDone>) {
        self.media.poll(now, done);
    }

    pub(super) fn cancel(&mut self) {
        self.media.cancel();
        self.formatting = false;
    }

    pub(super) fn power_loss(&mut self) {
        self.media.power_loss();
        self.formatting = false;
    }

    pub(super) fn media_event(&self) -> Option<Nanos> {
        self.media.next_event()
    }
}
