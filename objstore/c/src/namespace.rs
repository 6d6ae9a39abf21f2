//! What a handle can do in its namespace without moving data.

#![allow(unsafe_code, reason = "the C interface: keys of callers, and names without mangling")]

use nvme_driver::Nanos;
use objstore::{BlockKey, Prefix as Found};

use crate::{
    config::array,
    status::{Failure, Status, guard},
    store::{Store, handle, output},
};

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;

/// Blocks that a lookup found. They are not evicted until it is given back.
#[derive(Debug)]
pub struct Prefix(pub(crate) Found);

/// Keys of the caller's.
///
/// # Safety
/// `keys` points to `count` times 32 bytes, or `count` is 0.
pub(crate) unsafe fn keys(keys: *const u8, count: usize) -> Result<Vec<BlockKey>, Failure> {
    // SAFETY: the caller's promise; an array of bytes has no alignment.
    let keys: &[[u8; KEY_BYTES]] = unsafe { array(keys.cast(), count, "keys")? };
    Ok(keys.iter().copied().map(BlockKey).collect())
}

/// How many leading keys are stored now. Has no effect, and does not keep the blocks: they may be
/// evicted at once.
///
/// keys: count keys of RIPIENO_KEY_BYTES bytes, one behind another: 256-bit digests over a block's
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
    guard(|| {
        // SAFETY: as the header says.
        let (store, to) = unsafe { (handle(store, "store")?, output(found, "found")?) };
        // SAFETY: as above.
        *to = store.handle.peek(&unsafe { self::keys(keys, count)? });
        Ok(())
    })
}

/// Finds the longest run of leading keys that is stored, which may be empty. Does not wait for any
/// I/O. The prefix has to be given back with ripieno_prefix_release.
///
/// keys: as for ripieno_peek.
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
        // SAFETY: as the header says.
        let (store, to) = unsafe { (handle(store, "store")?, output(prefix, "prefix")?) };
        // SAFETY: as above.
        let found = store.handle.lookup(&unsafe { self::keys(keys, count)? })?;
        *to = Box::into_raw(Box::new(Prefix(found)));
        Ok(())
    })
}

/// Starts reading the longest stored run of leading keys into the memory of
/// ripieno_config.dram_bytes, but for what is there: a request that comes soon copies it. It is
/// kept for one for within_ms milliseconds; then it is like other blocks. found: how many leading
/// blocks are there or on their way; 0 without such memory, and none more while half of all that
/// may be in flight is. Waits for nothing, and holds no blocks. What is on its way holds up what is
/// started later: ask for what runs next.
///
/// keys: as for ripieno_peek.
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
    guard(|| {
        // SAFETY: as the header says.
        let (store, to) = unsafe { (handle(store, "store")?, output(found, "found")?) };
        // SAFETY: as above.
        let keys = unsafe { self::keys(keys, count)? };
        *to = store.handle.prefetch(&keys, Nanos::from_millis(within_ms.into()))?;
        Ok(())
    })
}

/// Blocks that were found; 0 for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_prefix_blocks(prefix: *const Prefix) -> usize {
    // SAFETY: as the header says.
    unsafe { prefix.as_ref() }.map_or(0, |prefix| prefix.0.len())
}

/// Gives a prefix back. Requests that were begun with it keep the blocks they need. Null is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_prefix_release(prefix: *mut Prefix) {
    let _ = guard(|| {
        if !prefix.is_null() {
            // SAFETY: a handle that was not given back, as the header says.
            drop(unsafe { Box::from_raw(prefix) });
        }
        Ok(())
    });
}

/// A change of what is stored under some keys, which says how many it found.
///
/// # Safety
/// As the header says of the function that it is for.
unsafe fn change(
    store: *const Store,
    keys: *const u8,
    count: usize,
    found: *mut u32,
    act: impl FnOnce(&objstore::Store, &[BlockKey]) -> Result<u32, objstore::StoreError>,
) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        let (store, to) = unsafe { (handle(store, "store")?, output(found, "found")?) };
        // SAFETY: the caller's promise.
        *to = act(&store.handle, &unsafe { self::keys(keys, count)? })?;
        Ok(())
    })
}

/// Pins those of the keys that are stored: they are not evicted until they are unpinned, also after
/// the store was opened again. found: how many that are.
///
/// keys: as for ripieno_peek.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_pin(
    store: *const Store,
    keys: *const u8,
    count: usize,
    found: *mut u32,
) -> Status {
    // SAFETY: as the header says.
    unsafe { change(store, keys, count, found, objstore::Store::pin) }
}

/// Undoes ripieno_pin. found: how many of the keys are stored.
///
/// keys: as for ripieno_peek.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_unpin(
    store: *const Store,
    keys: *const u8,
    count: usize,
    found: *mut u32,
) -> Status {
    // SAFETY: as the header says.
    unsafe { change(store, keys, count, found, objstore::Store::unpin) }
}

/// Drops the keys, pinned and used ones too. found: how many were stored. Their space is used again
/// when no prefix and no request needs them any more.
///
/// keys: as for ripieno_peek.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_remove(
    store: *const Store,
    keys: *const u8,
    count: usize,
    found: *mut u32,
) -> Status {
    // SAFETY: as the header says.
    unsafe { change(store, keys, count, found, objstore::Store::remove) }
}

/// Drops everything in the namespace, pinned and used blocks too.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_clear(store: *const Store) -> Status {
    // SAFETY: as the header says.
    guard(|| Ok(unsafe { handle(store, "store")? }.handle.clear()?))
}

/// Evicts up to so many blocks of the namespace that are neither pinned nor used. evicted: how many
/// there were.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_evict(
    store: *const Store,
    blocks: u32,
    evicted: *mut u32,
) -> Status {
    guard(|| {
        // SAFETY: as the header says.
        let (store, to) = unsafe { (handle(store, "store")?, output(evicted, "evicted")?) };
        *to = store.handle.evict(blocks)?;
        Ok(())
    })
}

/// Starts a new epoch of the namespace: as ripieno_clear, and what is being stored now will not be
/// found either. For a model, adapter or salt that changed under the same name.
///
/// The new epoch is permanent when the next ripieno_sync has returned: after a crash before that,
/// the blocks of the old one may be found again.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_bump_epoch(store: *const Store, epoch: *mut u64) -> Status {
    guard(|| {
        // SAFETY: as the header says.
        let (store, to) = unsafe { (handle(store, "store")?, output(epoch, "epoch")?) };
        *to = store.handle.bump_epoch()?;
        Ok(())
    })
}

/// Limits the namespace to so many blocks; UINT32_MAX: no limit.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_set_quota(store: *const Store, blocks: u32) -> Status {
    let blocks = (blocks != u32::MAX).then_some(blocks);
    // SAFETY: as the header says.
    guard(|| Ok(unsafe { handle(store, "store")? }.handle.set_quota(blocks)?))
}

/// Says how much longer than those of other namespaces its blocks are kept unused: weight times as
/// long as with 1, which is the default.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_set_weight(store: *const Store, weight: u32) -> Status {
    // SAFETY: as the header says.
    guard(|| Ok(unsafe { handle(store, "store")? }.handle.set_weight(weight)?))
}

/// Makes permanent what was evicted, pinned, removed, cleared or registered so far, and with
/// RIPIENO_DRAM_WRITE_BACK what was committed. Without, that is permanent when ripieno_commit
/// returns.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_sync(store: *const Store) -> Status {
    // SAFETY: as the header says.
    guard(|| Ok(unsafe { handle(store, "store")? }.handle.sync_journal()?))
}
