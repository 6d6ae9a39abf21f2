#![allow(unsafe_code, reason = "moves data in memory that the ring laid out")]
//! Accesses to memory that the ring laid out, by the addresses in [`gio_uring::abi`].
//!
//! All of them need that the address is one of those that the ring passed on, for a value of this
//! type, and that the ring keeps the memory: it does until the executor has stopped.

use std::{
    ptr,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use gio_uring::abi::{Args, Iocb, OpProgress, Warp};
use zerocopy::FromBytes;

/// Reads element `index` of an array.
///
/// # Safety
/// See the module. Nobody writes it at the same time.
pub(super) unsafe fn read<T: FromBytes>(array: u64, index: usize) -> T {
    let first = ptr::with_exposed_provenance::<T>(array as usize);
    // SAFETY: the caller's promise; every bit pattern is a value.
    unsafe { first.add(index).read_volatile() }
}

/// Returns a word that host and executor access at the same time.
///
/// # Safety
/// See the module.
unsafe fn word32<'a>(address: u64) -> &'a AtomicU32 {
    // SAFETY: the caller's promise; others access it atomically only.
    unsafe { AtomicU32::from_ptr(ptr::with_exposed_provenance_mut(address as usize)) }
}

/// Same as [`word32`], of 64 bits.
///
/// # Safety
/// See the module.
unsafe fn word64<'a>(address: u64) -> &'a AtomicU64 {
    // SAFETY: as in word32.
    unsafe { AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(address as usize)) }
}

/// Loads a word that another publishes.
///
/// # Safety
/// See the module.
pub(super) unsafe fn load32(address: u64) -> u32 {
    // SAFETY: the caller's promise. Relaxed: what publishes it orders it.
    unsafe { word32(address) }.load(Ordering::Relaxed)
}

/// Stores a word that a completion publishes.
///
/// # Safety
/// See the module.
pub(super) unsafe fn store32(address: u64, value: u32) {
    // SAFETY: the caller's promise. Relaxed: as above.
    unsafe { word32(address) }.store(value, Ordering::Relaxed);
}

/// Sets the stop word.
///
/// # Safety
/// See the module.
pub(super) unsafe fn set_stop(stop: u64) {
    // SAFETY: the caller's promise.
    unsafe { word64(stop) }.store(1, Ordering::Release);
}

/// The words of the ring and of one warp, which only this thread writes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Words {
    args: Args,
    warp: u64,
}

impl Words {
    /// # Safety
    /// `args` is what [`gio_uring::IoExecutor::start`] was given, and has such a warp.
    pub(super) unsafe fn new(args: Args, warp: u32) -> Self {
        Self { args, warp: args.warps + u64::from(warp) * size_of::<Warp>() as u64 }
    }

    pub(super) fn args(&self) -> &Args {
        &self.args
    }

    /// Reads what the host wrote about the warp.
    pub(super) fn warp(&self) -> Warp {
        // SAFETY: `new`; only this thread writes it while the executor runs.
        unsafe { read(self.warp, 0) }
    }

    pub(super) fn is_stopped(&self) -> bool {
        // SAFETY: `new`. Acquire: orders the reads of entries after it.
        unsafe { word64(self.args.stop) }.load(Ordering::Acquire) != 0
    }

    /// Returns the IOCB at a position of the submission ring, if it is there.
    pub(super) fn entry(&self, position: u32) -> Option<(u32, Iocb)> {
        let slot = u64::from(position & self.args.ring_mask) * size_of::<u64>() as u64;
        // SAFETY: `new`. Acquire: the IOCB and all behind it are visible with its entry.
        let word = unsafe { word64(self.args.sq_ring + slot) }.load(Ordering::Acquire);
        let id = word as u32 & self.args.ring_mask;
        if (word >> 32) as u32 != position.wrapping_add(1) {
            return None;
        }
        // SAFETY: `new`; the host writes an IOCB only before it is published.
        Some((id, unsafe { read(self.args.iocbs, id as usize) }))
    }

    /// Returns true if the event of an operation is reached.
    pub(super) fn is_reached(&self, iocb: &Iocb) -> bool {
        // SAFETY: an event of this ring. Acquire: orders what the operation moves after it.
        let found = || unsafe { word32(iocb.wait) }.load(Ordering::Acquire);
        iocb.wait == 0 || found().wrapping_sub(iocb.wait_value).cast_signed() >= 0
    }

    /// Adds to a counter of the warp.
    pub(super) fn add(&self, counter: usize, more: u64) {
        // SAFETY: `new`. Relaxed: only this thread writes it, and no other memory depends on it.
        let word = unsafe { word64(self.warp + counter as u64) };
        word.store(word.load(Ordering::Relaxed) + more, Ordering::Relaxed);
    }

    /// Sets a value of the warp.
    pub(super) fn set(&self, field: usize, value: u32) {
        // SAFETY: as in add().
        unsafe { word32(self.warp + field as u64) }.store(value, Ordering::Relaxed);
    }

    /// Adds a warp's results to those of the operation. The last warp completes it: then this
    /// returns true, and the IOCB may be another operation's.
    pub(super) fn finish(&self, id: u32, errors: u32, error: u64, objects: u64) -> bool {
        let progress = self.args.progress + u64::from(id) * size_of::<OpProgress>() as u64;
        let at = |field: usize| progress + field as u64;
        use std::mem::offset_of;
        // SAFETY: `new`. Relaxed: `warps_left` orders them.
        unsafe {
            if errors != 0 {
                word32(at(offset_of!(OpProgress, errors))).fetch_add(errors, Ordering::Relaxed);
                word64(at(offset_of!(OpProgress, error))).store(error, Ordering::Relaxed);
            }
            word64(at(offset_of!(OpProgress, objects))).fetch_add(objects, Ordering::Relaxed);
            let left = word32(at(offset_of!(OpProgress, warps_left)));
            // Acquire and release: the last warp sees the results of all.
            if left.fetch_sub(1, Ordering::AcqRel) != 1 {
                return false;
            }
            let sums: OpProgress = read(progress, 0);
            let iocb = self.args.iocbs + u64::from(id) * size_of::<Iocb>() as u64;
            let (signal, value) = {
                let iocb: Iocb = read(iocb, 0);
                (iocb.signal, iocb.signal_value)
            };
            let to = |field: usize| iocb + field as u64;
            word32(to(offset_of!(Iocb, errors))).store(sums.errors, Ordering::Relaxed);
            word64(to(offset_of!(Iocb, error))).store(sums.error, Ordering::Relaxed);
            word64(to(offset_of!(Iocb, objects))).store(sums.objects, Ordering::Relaxed);
            let ready = OpProgress { warps_left: self.args.warp_count, ..OpProgress::default() };
            ptr::with_exposed_provenance_mut::<OpProgress>(progress as usize).write_volatile(ready);
            // The signal first: after the ring entry its memory may be another's.
            if signal != 0 {
                word32(signal).store(value, Ordering::Release);
            }
            // Acquire and release: see the order of positions in gio-uring's ring.rs.
            let position = word32(self.args.cq_tail).fetch_add(1, Ordering::AcqRel);
            let slot = u64::from(position & self.args.ring_mask) * size_of::<u64>() as u64;
            let entry = u64::from(position.wrapping_add(1)) << 32 | u64::from(id);
            word64(self.args.cq_ring + slot).store(entry, Ordering::Release);
        }
        true
    }
}
