//! Layout of rings, IOCBs and explicit areas in the ring's memory.

use crate::{
    abi::{IoCtx, Iocb},
    error::Error,
    ring::{Consumer, SharedWords, SubmitProducer},
    shared::Region,
};

/// Maximum IOCBs per ring.
const DEPTH_MAX: u32 = 1 << 16;
/// Two cache lines: prevents false sharing, also through adjacent-line prefetch.
pub(crate) const APART: usize = 128;

/// Offsets into the ring's memory:
///
/// ```text
///     0  stop word              (caller writes once)
///   128  virtual time           (caller writes)
///   256  submission ring        u64[depth]
///        completion ring        u64[depth]
///        IOCBs                  gio_iocb[depth]
///        explicit areas [depth] gio_ioctx[explicit_max], u32 starts[devices + 1], u32 status[..]
/// ```
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    depth: u32,
    explicit_max: u32,
    devices: u32,
}

impl Layout {
    /// Offset of the stop word.
    pub(crate) const STOP: usize = 0;
    /// Offset of the virtual time.
    pub(crate) const CLOCK: usize = APART;
    const SQ_RING: usize = 2 * APART;

    pub(crate) fn new(depth: u32, explicit_max: u32, devices: u32) -> Result<Self, Error> {
        if !depth.is_power_of_two() || depth > DEPTH_MAX {
            return Err(Error::Argument(format!(
                "a ring of {depth} IOCBs was asked for; the number must be a power of two from 1 \
                 to {DEPTH_MAX}"
            )));
        }
        Ok(Self { depth, explicit_max, devices })
    }

    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    fn ring_bytes(&self) -> usize {
        (self.depth as usize * size_of::<u64>()).next_multiple_of(APART)
    }

    pub(crate) fn sq_ring(&self) -> usize {
        Self::SQ_RING
    }

    pub(crate) fn cq_ring(&self) -> usize {
        Self::SQ_RING + self.ring_bytes()
    }

    /// Returns the offset of IOCB `index`.
    pub(crate) fn iocb(&self, index: u32) -> usize {
        self.cq_ring() + self.ring_bytes() + index as usize * size_of::<Iocb>()
    }

    fn area_bytes(&self) -> usize {
        let words = self.devices as usize + 1 + self.explicit_max as usize;
        let bytes = self.explicit_max as usize * size_of::<IoCtx>() + words * size_of::<u32>();
        bytes.next_multiple_of(APART)
    }

    /// Returns the offset of the explicit contexts of IOCB `index`.
    pub(crate) fn contexts(&self, index: u32) -> usize {
        self.iocb(self.depth) + index as usize * self.area_bytes()
    }

    /// Returns the offset of the first context index per device.
    pub(crate) fn starts(&self, index: u32) -> usize {
        self.contexts(index) + self.explicit_max as usize * size_of::<IoCtx>()
    }

    /// Returns the offset of the contexts' statuses.
    pub(crate) fn statuses(&self, index: u32) -> usize {
        self.starts(index) + (self.devices as usize + 1) * size_of::<u32>()
    }

    /// Returns the total length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.contexts(self.depth)
    }

    /// Returns the caller's ends of both rings.
    pub(crate) fn rings(
        &self,
        region: &Region,
    ) -> (SubmitProducer<SharedWords>, Consumer<SharedWords>) {
        let words = |at| SharedWords(region.slice(at, self.depth as usize * size_of::<u64>()));
        let mask = self.depth - 1;
        (
            SubmitProducer::new(words(self.sq_ring()), mask),
            Consumer::new(words(self.cq_ring()), mask),
        )
    }

    /// Clears the rings and the stop word. The kernel must have ended.
    pub(crate) fn reset(&self, region: &Region) {
        region.zero(0, self.iocb(0));
    }
}
