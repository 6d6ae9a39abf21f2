//! Doorbell registers as shared memory: the host (or a GPU) stores, the controller polls.
#![allow(unsafe_code, reason = "doorbells are read and cleared by address")]

use std::{io, ptr::NonNull, sync::Arc};

use nvme_driver::{DoorbellPage, platform::mmio};

use crate::memory::HostMap;

/// Doorbells of the admin queue and of every I/O queue. Clones are handles to the same memory.
///
/// Ordering: [`Doorbells::sq_tail`] is an acquire load that pairs with the release store of a ring;
/// the submission entries stored before it are visible after the load.
#[derive(Debug, Clone)]
pub struct Doorbells {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    map: HostMap,
    stride: u32,
    queues: u32,
}

impl Doorbells {
    /// Creates zeroed doorbells for queues 0 to `io_queues`, `4 << dstrd` bytes apart.
    ///
    /// # Errors
    /// Fails if the kernel has no memory left, or `dstrd` exceeds 15, the limit of CAP.DSTRD.
    pub fn new(io_queues: u16, dstrd: u8) -> io::Result<Self> {
        if dstrd > 15 {
            let text = format!("doorbell stride exponent {dstrd} was asked for, at most 15 exist");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let (stride, queues) = (4u32 << dstrd, u32::from(io_queues) + 1);
        let len = 2 * queues as usize * stride as usize;
        let map = HostMap::shared(len)?;
        Ok(Self { shared: Arc::new(Shared { map, stride, queues }) })
    }

    /// Returns the page as the driver addresses it.
    #[must_use]
    pub fn page(&self) -> DoorbellPage {
        let shared = &*self.shared;
        let (host, len, owner) = (shared.map.ptr().cast(), shared.map.len(), self.shared.clone());
        // SAFETY: the mapping is the whole page and lives as long as `shared`; this side, too,
        // accesses it only by address.
        unsafe { DoorbellPage::new(host, None, shared.stride, len, owner) }
    }

    /// Returns the last value of the submission tail of `qid`; 0 for a nonexistent queue.
    #[must_use]
    #[inline]
    pub fn sq_tail(&self, qid: u16) -> u32 {
        self.load(2 * u32::from(qid))
    }

    /// Returns the last value of the completion head of `qid`; 0 for a nonexistent queue.
    #[must_use]
    #[inline]
    pub fn cq_head(&self, qid: u16) -> u32 {
        self.load(2 * u32::from(qid) + 1)
    }

    /// Sets the submission tail of `qid` to 0, as on creation of the queue.
    pub fn clear_sq(&self, qid: u16) {
        self.clear(2 * u32::from(qid));
    }

    /// Sets the completion head of `qid` to 0, as on creation of the queue.
    pub fn clear_cq(&self, qid: u16) {
        self.clear(2 * u32::from(qid) + 1);
    }

    /// Sets every doorbell to 0, as a controller reset does.
    pub fn clear_all(&self) {
        for index in 0..2 * self.shared.queues {
            self.clear(index);
        }
    }

    #[inline]
    fn load(&self, index: u32) -> u32 {
        match self.register(index) {
            // SAFETY: `register` returns an aligned address inside the mapping, which `self` keeps;
            // doorbells are only accessed as whole dwords.
            Some(register) => unsafe { mmio::load_acquire32(register) },
            None => 0,
        }
    }

    fn clear(&self, index: u32) {
        if let Some(register) = self.register(index) {
            // SAFETY: as in `load`.
            unsafe { mmio::store_release32(register, 0) };
        }
    }

    #[inline]
    fn register(&self, index: u32) -> Option<NonNull<u32>> {
        let shared = &*self.shared;
        if index >= 2 * shared.queues {
            return None;
        }
        Some(shared.map.at(index as usize * shared.stride as usize, 4).cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_are_seen_at_the_stride() {
        let bells = Doorbells::new(3, 2).unwrap();
        let page = bells.page();
        assert_eq!(page.stride(), 16);
        assert!(page.len() >= 8 * 16);
        for index in 0..8u32 {
            // SAFETY: inside the page, aligned, accessed as dwords only.
            unsafe {
                let register = page.host().byte_add((index * page.stride()) as usize);
                mmio::store_release32(register, 100 + index);
            }
        }
        assert_eq!((bells.sq_tail(0), bells.cq_head(0)), (100, 101));
        assert_eq!((bells.sq_tail(3), bells.cq_head(3)), (106, 107));
        assert_eq!(bells.sq_tail(4), 0, "no such queue");
        bells.clear_sq(3);
        assert_eq!((bells.sq_tail(3), bells.cq_head(3)), (0, 107));
        bells.clear_all();
        assert_eq!(bells.cq_head(3), 0);
        assert!(Doorbells::new(1, 16).is_err());
    }
}
