//! Queues and doorbells as safe types: bounds and alignment are checked on construction.
#![allow(unsafe_code, reason = "queue entries and doorbells are memory a device also uses")]

use std::{ptr::NonNull, sync::Arc};

use nvme_spec::{ids::Cid, sqe::Sqe};

use super::mmio::{self, CQE_BYTES, SQE_BYTES};
use crate::{
    bus::{Bus, DoorbellPage},
    dma::DmaSlice,
};

/// Returns the first byte of memory that can serve as a queue, or the reason why it cannot.
fn check(memory: &DmaSlice, depth: u32, entry: usize) -> Result<NonNull<u8>, String> {
    if depth < 2 || !depth.is_power_of_two() {
        return Err(format!(
            "a queue of {depth} entries was asked for; the depth must be a power of two, at least 2"
        ));
    }
    let why = "queue memory is not mapped in this process; the driver must zero and read it";
    let base = memory.host().ok_or(why)?;
    let (address, need) = (base.as_ptr().addr(), depth as usize * entry);
    if memory.len() < need || !address.is_multiple_of(64) {
        let len = memory.len();
        return Err(format!("{len} bytes at {address:#x} cannot hold {need} bytes aligned to 64"));
    }
    Ok(base)
}

/// The entries of a submission queue.
#[derive(Debug)]
pub struct SqRing {
    base: NonNull<u8>,
    mask: u32,
    /// Keeps the entries mapped.
    _memory: DmaSlice,
}

// SAFETY: `_memory` (Send + Sync) keeps what `base` points to mapped; writes need `&mut self`.
unsafe impl Send for SqRing {}

impl SqRing {
    /// Creates a queue of `depth` entries in `memory`.
    ///
    /// # Errors
    /// Returns the reason if the memory is too small, misaligned or not mapped in this process.
    pub fn new(memory: DmaSlice, depth: u32) -> Result<Self, String> {
        let base = check(&memory, depth, SQE_BYTES)?;
        Ok(Self { base, mask: depth - 1, _memory: memory })
    }

    /// Writes `sqe` into entry `index` (taken modulo the depth), with `cid` in place of its own.
    #[inline]
    pub fn write(&mut self, index: u32, sqe: &Sqe, cid: Cid) {
        let at = (index & self.mask) as usize * SQE_BYTES;
        // The CID is inserted on the way, in a register: a store into a copy, read back with a wide
        // load, would stall.
        let words: &[u64; SQE_BYTES / 8] = zerocopy::transmute_ref!(sqe);
        let first = words[0] & !0xFFFF_0000 | u64::from(cid.0) << 16;
        // SAFETY: `check` saw depth * 64 bytes from `base` on, and `at` is below that. The slot
        // lies outside what the last tail doorbell covers: the owner posts at most depth - 1.
        unsafe { mmio::write_sqe(self.base.add(at), first, words) };
    }
}

/// The entries of a completion queue.
#[derive(Debug)]
pub struct CqRing {
    base: NonNull<u32>,
    mask: u32,
    /// Keeps the entries mapped.
    _memory: DmaSlice,
}

// SAFETY: `_memory` (Send + Sync) keeps what `base` points to mapped; reads are atomic.
unsafe impl Send for CqRing {}

impl CqRing {
    /// Creates a queue of `depth` entries in `memory`.
    ///
    /// # Errors
    /// Returns the reason if the memory is too small, misaligned or not mapped in this process.
    pub fn new(memory: DmaSlice, depth: u32) -> Result<Self, String> {
        let base = check(&memory, depth, CQE_BYTES)?.cast();
        Ok(Self { base, mask: depth - 1, _memory: memory })
    }

    /// Loads dword 3 of entry `index` (taken modulo the depth): CID, phase and status. Earlier
    /// writes of the controller are visible afterwards.
    #[must_use]
    #[inline]
    pub fn load_dw3(&self, index: u32) -> u32 {
        // SAFETY: `dword` stays inside the queue; only the device writes there meanwhile.
        unsafe { mmio::load_acquire32(self.dword(index, 3)) }
    }

    /// Loads dword `which` (0 to 2) of entry `index`, after [`CqRing::load_dw3`] showed its phase.
    #[must_use]
    #[inline]
    pub fn load(&self, index: u32, which: u32) -> u32 {
        // SAFETY: as above.
        unsafe { mmio::load_relaxed32(self.dword(index, which & 3)) }
    }

    #[inline]
    fn dword(&self, index: u32, which: u32) -> NonNull<u32> {
        let at = (index & self.mask) as usize * (CQE_BYTES / 4) + which as usize;
        // SAFETY: `check` saw depth * 16 bytes from `base` on; index is masked and which < 4.
        unsafe { self.base.add(at) }
    }
}

/// One doorbell register.
#[derive(Debug)]
pub struct Doorbell {
    register: NonNull<u32>,
    /// Keeps the register mapped.
    _page: DoorbellPage,
}

// SAFETY: the register is only ever stored to, atomically; the page (Send + Sync) keeps it mapped.
unsafe impl Send for Doorbell {}

impl Doorbell {
    /// Returns doorbell `index` of the bus: `2 * qid` is a submission tail, `2 * qid + 1` a
    /// completion head. Returns `None` if the mapped page does not reach that far.
    #[must_use]
    pub fn new(bus: &Arc<dyn Bus>, index: u32) -> Option<Self> {
        let page = bus.doorbells();
        let at = (index as usize).checked_mul(page.stride() as usize)?;
        if at.checked_add(4)? > page.len() || !at.is_multiple_of(4) || !page.host().is_aligned() {
            return None;
        }
        // SAFETY: `at + 4 <= len`, and the page is `len` mapped bytes.
        let register = unsafe { page.host().byte_add(at) };
        Some(Self { register, _page: page })
    }

    /// Rings the doorbell; earlier writes are visible to a controller that sees the value.
    #[inline]
    pub fn ring(&self, value: u32) {
        mmio::device_write_barrier();
        // SAFETY: `new` checked the bounds; `_page` keeps them mapped.
        unsafe { mmio::store_release32(self.register, value) };
    }
}
