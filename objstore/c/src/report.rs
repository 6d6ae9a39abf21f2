//! Counters and events of a store.

#![allow(unsafe_code, reason = "the C interface: fills what callers point to")]

use std::ffi::c_char;

use nvme_driver::ControllerEvent;
use objstore::{Plane, StoreEvent};
use ripieno_stack::nearest;

use crate::{
    config::text,
    place::Store,
    status::{Failure, Status, guard},
    store::{handle, output},
};

/// A bit of ripieno_poll_events: the owner of a device requests it back, and waits until the store
/// is closed. Stays set.
pub const EVENT_REQUESTED: u64 = 1;
/// The health of a device changed; if its media became read-only, storing fails from now on.
pub const EVENT_HEALTH: u64 = 1 << 1;
/// A device had an uncorrectable PCIe error and was reset. I/O in flight may have failed.
pub const EVENT_PCIE_ERROR: u64 = 1 << 2;
/// A device reported another event; no action is needed.
pub const EVENT_OTHER: u64 = 1 << 3;

/// Usage of a namespace.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Usage {
    /// sizeof(ripieno_usage), set by the caller.
    pub size: usize,
    /// Blocks that lookups find.
    pub stored: u32,
    /// Of these, blocks used by prefixes and requests, or pinned: not evicted.
    pub active: u32,
    /// Of these, blocks neither used nor pinned.
    pub evictable: u32,
    /// Blocks being stored.
    pub writing: u32,
    /// Maximum blocks of the namespace; UINT32_MAX: no limit.
    pub quota: u32,
    /// Zero.
    pub reserved: u32,
    /// Times it was dropped by ripieno_bump_epoch.
    pub epoch: u64,
    /// Blocks looked up since the store was opened.
    pub asked: u64,
    /// Of these, blocks found.
    pub hits: u64,
    /// Blocks committed since the store was opened.
    pub committed: u64,
}

/// Fills a caller's struct up to the size of the caller's version.
///
/// # Safety
/// `to` must be null or point to a `T` of any version, whose first field is its size in bytes.
unsafe fn write<T>(to: *mut T, name: &str, value: T) -> Result<(), Failure> {
    // SAFETY: the caller's contract; a size is the first field.
    let size = unsafe { output(to.cast::<usize>(), name)? };
    let known = size_of::<T>();
    if *size < size_of::<usize>() {
        let why = format!("{name}: its size is {size}; set it to sizeof of the struct");
        return Err(Failure::invalid(why));
    }
    let size = *size;
    let (head, from) = (size_of::<usize>(), std::ptr::from_ref(&value).cast::<u8>());
    // SAFETY: both have that many bytes, and the caller's are not shared. Fields that this library
    // does not know become zero.
    unsafe {
        let to = to.cast::<u8>();
        to.add(head).copy_from_nonoverlapping(from.add(head), size.min(known) - head);
        to.add(size.min(known)).write_bytes(0, size - size.min(known));
    }
    Ok(())
}

/// Reports the usage of this handle's namespace.
///
/// usage: its size must be set; the other fields are filled.
///
/// Fails with RIPIENO_STATUS_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_get_usage(store: *const Store, usage: *mut Usage) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let found = unsafe { handle(store, "store")? }.store.usage()?;
        let value = Usage {
            size: 0,
            stored: found.stored,
            active: found.active,
            evictable: found.evictable,
            writing: found.writing,
            quota: found.quota_files.unwrap_or(u32::MAX),
            reserved: 0,
            epoch: found.epoch,
            asked: found.asked,
            hits: found.hits,
            committed: found.committed,
        };
        // SAFETY: as the header requires.
        unsafe { write(usage, "usage", value) }
    })
}

/// Reports a counter of the whole store, over all namespaces: since it was opened, or as it is.
///
/// name: of a sample in docs/reference/metrics.md, without "ripieno_": "evicted_blocks_total",
/// "flush_seconds_sum", "device_commands_total{device=\"0\"}". There are none of the devices'
/// health, of the time since opening, and of the time that computing would have taken.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_get_stat(
    store: *const Store,
    name: *const c_char,
    value: *mut f64,
) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let (store, to) = unsafe { (handle(store, "store")?, output(value, "value")?) };
        // SAFETY: as the header requires.
        let name = unsafe { text(name, "name")? };
        let all = store.store.stats()?;
        let found = all.iter().find(|(known, _)| *known == name);
        let unknown = || {
            let like = nearest(&name, all.iter().map(|(known, _)| known.as_str()), 0.7);
            let like = like.map_or(String::new(), |known| format!("; is it \"{known}\"?"));
            Failure::invalid(format!("name: this store has no \"{name}\"{like}"))
        };
        *to = found.ok_or_else(unknown)?.1.into();
        Ok(())
    })
}

/// Reports events of the devices since the last call: RIPIENO_EVENT_* combined, 0 for none. The
/// store handles them itself, with one exception: after RIPIENO_EVENT_REQUESTED, end all requests
/// and close the store (ripieno_close) with all its handles. Call it about once a second, also
/// while idle; it costs next to nothing.
///
/// Fails with RIPIENO_STATUS_INVALID; RIPIENO_STATUS_FAILED if a device was removed or cannot be
/// recovered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_poll_events(store: *const Store, events: *mut u64) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let (store, to) = unsafe { (handle(store, "store")?, output(events, "events")?) };
        let found = store.store.poll_events()?;
        let found = found.iter().map(|StoreEvent { event, .. }| bit(event));
        let own = store.store.own().map(objstore::Store::plane);
        let is_wanted = |plane: &Plane| plane.requested_devices().is_ok_and(|all| !all.is_empty());
        let wanted = if own.is_ok_and(is_wanted) { EVENT_REQUESTED } else { 0 };
        *to = found.fold(wanted, |all, bit| all | bit);
        Ok(())
    })
}

fn bit(event: &ControllerEvent) -> u64 {
    match event {
        ControllerEvent::Requested => EVENT_REQUESTED,
        ControllerEvent::Health { .. } => EVENT_HEALTH,
        ControllerEvent::PcieError => EVENT_PCIE_ERROR,
        _ => EVENT_OTHER,
    }
}

#[cfg(test)]
mod tests {
    use nvme_spec::log::CriticalWarning;

    use super::*;

    #[test]
    fn every_event_has_a_bit() {
        let warnings = CriticalWarning::READ_ONLY;
        let health = ControllerEvent::Health { info: 0, warnings };
        let events = [ControllerEvent::Requested, health, ControllerEvent::PcieError];
        let bits = events.map(|event| bit(&event));
        assert_eq!(bits, [EVENT_REQUESTED, EVENT_HEALTH, EVENT_PCIE_ERROR]);
        assert_eq!(bit(&ControllerEvent::Paused), EVENT_OTHER);
    }

    #[test]
    fn structs_are_filled_as_far_as_the_caller_knows_them() {
        let usage = || Usage {
            size: 0,
            stored: 1,
            active: 2,
            evictable: 4,
            writing: 5,
            quota: 6,
            reserved: 0,
            epoch: 7,
            asked: 8,
            hits: 9,
            committed: 10,
        };
        let known = size_of::<Usage>();
        for (size, filled) in [(16, 16), (known, known), (known + 8, known)] {
            let mut words = [0xEEEE_EEEE_EEEE_EEEEu64; 10];
            words[0] = size as u64;
            // SAFETY: the array is longer than any of the sizes.
            unsafe { write(words.as_mut_ptr().cast(), "usage", usage()) }.unwrap();
            assert_eq!(words[0], size as u64, "the size is the caller's");
            assert_eq!(words[1], 2 << 32 | 1);
            let after = words[size / 8];
            assert_eq!(after, 0xEEEE_EEEE_EEEE_EEEE, "nothing is written behind {size} bytes");
            assert!(words[filled / 8..size / 8].iter().all(|word| *word == 0));
        }
        let mut none = 0usize;
        // SAFETY: refused by its size.
        assert!(unsafe { write(std::ptr::from_mut(&mut none).cast(), "usage", usage()) }.is_err());
    }
}
