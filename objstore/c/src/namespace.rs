//! Operations of a handle in its namespace that move no data.

#![allow(unsafe_code, reason = "the C interface: keys of callers, and names without mangling")]

use std::time::Duration;

use nvme_driver::Nanos;
use objstore::{BlockKey, Outcome, PinAnswer};
use ripieno_stack::{KvStore, StackError};
use sha2::{Digest, Sha256};

use crate::{
    config::array,
    place::{Prefix, Store},
    status::{Failure, Status, guard},
    store::{handle, made, output, outputs},
};

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;

/// Returns a caller's keys.
///
/// # Safety
/// `keys` must point to `count` times 32 bytes, or `count` must be 0.
pub(crate) unsafe fn keys(keys: *const u8, count: usize) -> Result<Vec<BlockKey>, Failure> {
    // SAFETY: the caller's contract; an array of bytes has no alignment.
    let keys: &[[u8; KEY_BYTES]] = unsafe { array(keys.cast(), count, "keys")? };
    Ok(keys.iter().copied().map(BlockKey).collect())
}

/// Writes the key of a name: its SHA-256. For engines whose blocks have names of any length.
///
/// name: its bytes; null if there are none.
/// key: RIPIENO_KEY_BYTES bytes.
///
/// Fails with RIPIENO_STATUS_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_key_of_name(
    name: *const u8,
    bytes: usize,
    key: *mut u8,
) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let name = unsafe { array(name, bytes, "name")? };
        // SAFETY: as the header requires; an array of bytes has no alignment.
        *unsafe { output(key.cast::<[u8; KEY_BYTES]>(), "key")? } = Sha256::digest(name).into();
        Ok(())
    })
}

/// Returns the number of leading keys that are stored now. Has no effect, and does not hold the
/// blocks: they may be evicted immediately.
///
/// keys: count keys of RIPIENO_KEY_BYTES bytes each, contiguous: 256-bit digests of a block's
/// tokens and all tokens before them.
///
/// Fails with RIPIENO_STATUS_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_peek(
    store: *const Store,
    keys: *const u8,
    count: usize,
    found: *mut usize,
) -> Status {
    // SAFETY: as the header requires.
    unsafe { about(store, keys, count, found, |store, keys| store.peek(keys)) }
}

/// Reports for each key if it is stored now; like ripieno_peek without effect.
///
/// keys: see ripieno_peek.
/// stored: count entries.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_are_stored(
    store: *const Store,
    keys: *const u8,
    count: usize,
    stored: *mut bool,
) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let (store, keys) = unsafe { (handle(store, "store")?, self::keys(keys, count)?) };
        // SAFETY: as above.
        unsafe { outputs(stored, "stored", || Ok(store.store.are_stored(&keys)?)) }
    })
}

/// Finds the longest stored run of leading keys, which may be empty. Does not wait for I/O. Release
/// the prefix with ripieno_prefix_release.
///
/// keys: see ripieno_peek.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_lookup(
    store: *const Store,
    keys: *const u8,
    count: usize,
    prefix: *mut *mut Prefix,
) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let (store, to) = unsafe { (handle(store, "store")?, output(prefix, "prefix")?) };
        // SAFETY: as above.
        let found = store.store.lookup(&unsafe { self::keys(keys, count)? })?;
        *to = made(found);
        Ok(())
    })
}

/// Starts reading the longest stored run of leading keys into the cache of
/// the option dram, except for cached blocks: a request that follows soon copies them.
/// They are held for such a request for within_ms milliseconds; then they are ordinary blocks.
/// found: number of leading blocks that are cached or in flight; 0 without a cache, as with a
/// server. Starts no further blocks while half of the limit of I/O is in flight. Does not wait, and
/// holds no blocks. Prefetches in flight delay later I/O: prefetch only for the next requests.
///
/// keys: see ripieno_peek.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_prefetch(
    store: *const Store,
    keys: *const u8,
    count: usize,
    within_ms: u32,
    found: *mut usize,
) -> Status {
    let within = Nanos::from_millis(within_ms.into());
    // SAFETY: as the header requires.
    unsafe { about(store, keys, count, found, |store, keys| store.prefetch(keys, within)) }
}

/// Returns the number of blocks found; 0 for null, and in a forked process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_prefix_blocks(prefix: *const Prefix) -> usize {
    // SAFETY: as the header requires.
    unsafe { handle(prefix, "prefix") }.map_or(0, |prefix| prefix.blocks())
}

/// Releases a prefix. Requests begun with it keep the blocks they need. Null is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_prefix_release(prefix: *mut Prefix) {
    let _ = guard(|| {
        if !prefix.is_null() {
            // SAFETY: a handle that was not released, as the header requires.
            drop(unsafe { Box::from_raw(prefix) });
        }
        Ok(())
    });
}

/// Makes a call about some keys, which returns the number of blocks found.
///
/// # Safety
/// Same as the exported function that calls it.
unsafe fn about<T>(
    store: *const Store,
    keys: *const u8,
    count: usize,
    found: *mut T,
    act: impl FnOnce(&dyn KvStore, &[BlockKey]) -> Result<T, StackError>,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (store, to) = unsafe { (handle(store, "store")?, output(found, "found")?) };
        // SAFETY: the caller's contract.
        *to = act(&*store.store, &unsafe { self::keys(keys, count)? })?;
        Ok(())
    })
}

/// Pins the longest stored run of leading keys for a time: they are not evicted before it has
/// passed, or ripieno_pin_end was called, or the store is closed; with a server, its connection or
/// itself has ended. A day at most; with a server, what its configuration allows. All pins together
/// have a limit of bytes, half of the store's: those beyond it take fewer blocks, or fail.
///
/// keys: see ripieno_peek.
/// seconds: 1 or more.
/// pin: names it in ripieno_pin_end; 0 if none of the keys is stored.
/// found: the number of blocks pinned.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_BUSY at the limit, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_pin_for(
    store: *const Store,
    keys: *const u8,
    count: usize,
    seconds: u32,
    pin: *mut u64,
    found: *mut usize,
) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let (store, pin) = unsafe { (handle(store, "store")?, output(pin, "pin")?) };
        // SAFETY: as above.
        let found = unsafe { output(found, "found")? };
        if seconds == 0 {
            return Err(Failure::invalid("seconds: 0 was given; a pin lasts 1 or more"));
        }
        // SAFETY: as above.
        let keys = unsafe { self::keys(keys, count)? };
        (*pin, *found) =
            match store.store.pin(&keys, Duration::from_secs(seconds.into()), None, false)? {
                PinAnswer { pin: Some(pin), .. } => (pin.pin, pin.blocks as usize),
                PinAnswer { outcome: Outcome::Missing, .. } => (0, 0),
                PinAnswer { reason, .. } => {
                    let why = reason.unwrap_or_else(|| "it was refused".into());
                    return Err(Failure::new(Status::Busy, why));
                }
            };
        Ok(())
    })
}

/// Ends a pin of ripieno_pin_for. One that has ended, and 0, are allowed.
///
/// Fails with RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_pin_end(store: *const Store, pin: u64) -> Status {
    // SAFETY: as the header requires.
    guard(|| Ok(unsafe { handle(store, "store")? }.store.unpin(pin).map(drop)?))
}

/// Drops the keys, including pinned ones and those in use. found: the number of keys that were
/// stored. Their space is reused when no prefix and no request needs them any more.
///
/// keys: see ripieno_peek.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_remove(
    store: *const Store,
    keys: *const u8,
    count: usize,
    found: *mut u32,
) -> Status {
    // SAFETY: as the header requires.
    unsafe { about(store, keys, count, found, |store, keys| store.remove(keys)) }
}

/// Drops all blocks of the namespace, including pinned ones and those in use.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_clear(store: *const Store) -> Status {
    // SAFETY: as the header requires.
    guard(|| Ok(unsafe { handle(store, "store")? }.own()?.clear()?))
}

/// Evicts up to the given number of blocks of the namespace that are neither pinned nor in use.
/// evicted: the number evicted.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_evict(
    store: *const Store,
    blocks: u32,
    evicted: *mut u32,
) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let (store, to) = unsafe { (handle(store, "store")?, output(evicted, "evicted")?) };
        *to = store.own()?.evict(blocks)?;
        Ok(())
    })
}

/// Starts a new epoch of the namespace: same as ripieno_clear, and blocks being stored now will not
/// be found either. For a model, adapter or salt that changed under the same name.
///
/// The new epoch is durable when the next ripieno_sync has returned: after a crash before that, the
/// blocks of the old one may be found again.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_bump_epoch(store: *const Store, epoch: *mut u64) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let (store, to) = unsafe { (handle(store, "store")?, output(epoch, "epoch")?) };
        *to = store.own()?.bump_epoch()?;
        Ok(())
    })
}

/// Limits the namespace to the given number of blocks; UINT32_MAX: no limit.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_set_quota(store: *const Store, blocks: u32) -> Status {
    let blocks = (blocks != u32::MAX).then_some(blocks);
    // SAFETY: as the header requires.
    guard(|| Ok(unsafe { handle(store, "store")? }.own()?.set_quota(blocks)?))
}

/// Sets the eviction weight of the namespace: its unused blocks are kept weight times as long as
/// with 1, the default.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_set_weight(store: *const Store, weight: u32) -> Status {
    // SAFETY: as the header requires.
    guard(|| Ok(unsafe { handle(store, "store")? }.own()?.set_weight(weight)?))
}

/// Makes all evictions, removals, clears and registrations so far durable. A commit is
/// durable when ripieno_commit returns.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_sync(store: *const Store) -> Status {
    // SAFETY: as the header requires.
    guard(|| Ok(unsafe { handle(store, "store")? }.store.sync()?))
}
