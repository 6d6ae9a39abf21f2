//! Retrieving and storing blocks, layer by layer.

#![allow(unsafe_code, reason = "the C interface: handles and arrays of callers")]

use objstore::{BlockId, Layer};

use crate::{
    config::array,
    namespace::keys,
    place::{Prefix, Request, Store},
    status::{Failure, Status, guard},
    store::{handle, made, output, outputs, taken},
};

/// Returns a caller's block numbers.
///
/// # Safety
/// `from` must point to `count` numbers, or `count` must be 0.
unsafe fn blocks(from: *const u32, count: usize) -> Result<Vec<BlockId>, Failure> {
    // SAFETY: the caller's contract.
    Ok(unsafe { array(from, count, "blocks")? }.iter().copied().map(BlockId).collect())
}

/// Retrieves those keys that are stored, each into its block, and returns when they have arrived.
/// The other blocks are not written to. An engine that needs only a prefix passes the keys that
/// ripieno_peek finds.
///
/// keys: count keys, see ripieno_peek.
/// blocks: count different blocks of the pool. After a failure their contents are undefined.
/// found: count entries; true for a key that was found.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_BUSY, RIPIENO_STATUS_IO,
/// RIPIENO_STATUS_STALE, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_load(
    store: *const Store,
    keys: *const u8,
    blocks: *const u32,
    count: usize,
    found: *mut bool,
) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let store = unsafe { handle(store, "store")? };
        // SAFETY: as above.
        let (keys, blocks) = unsafe { (self::keys(keys, count)?, self::blocks(blocks, count)?) };
        // SAFETY: as above.
        unsafe { outputs(found, "found", || Ok(store.store.load(&keys, &blocks)?)) }
    })
}

/// Stores blocks under keys, and returns when they are durable and lookups find them.
///
/// keys, blocks, accepted: see ripieno_store_begin.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_BUSY, RIPIENO_STATUS_IO,
/// RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED; see ripieno_commit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_save(
    store: *const Store,
    keys: *const u8,
    blocks: *const u32,
    count: usize,
    accepted: *mut usize,
) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let (store, to) = unsafe { (handle(store, "store")?, output(accepted, "accepted")?) };
        // SAFETY: as above.
        let (keys, blocks) = unsafe { (self::keys(keys, count)?, self::blocks(blocks, count)?) };
        *to = store.store.save(&keys, &blocks)?;
        Ok(())
    })
}

/// Prepares to retrieve blocks of a prefix: the one at position first goes to the first of blocks,
/// and so on. Nothing moves before ripieno_layer_start. Release the request with
/// ripieno_request_end.
///
/// store: any handle of the store in which the prefix was found.
/// blocks: count different blocks of the pool, which belong to the request until its layers were
/// waited for.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_BUSY (bounce buffers), RIPIENO_STATUS_STALE,
/// RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_retrieve_begin(
    store: *const Store,
    prefix: *const Prefix,
    first: usize,
    blocks: *const u32,
    count: usize,
    request: *mut *mut Request,
) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let (store, prefix) = unsafe { (handle(store, "store")?, handle(prefix, "prefix")?) };
        // SAFETY: as the header requires.
        let (to, blocks) = unsafe { (output(request, "request")?, self::blocks(blocks, count)?) };
        *to = made(store.store.retrieve(&**prefix, first, &blocks)?);
        Ok(())
    })
}

/// Makes room for blocks, evicting others if necessary, and prepares to store them. Nothing moves
/// before ripieno_layer_start. Release the request with ripieno_commit or ripieno_request_end.
///
/// A key that is already stored, or being stored by another request, is not stored again: its block
/// is not read.
///
/// keys: count keys, see ripieno_peek.
/// blocks: count blocks of the pool, which must not change until their layers were waited for.
/// accepted: number of leading blocks with room for them, which may be 0; the rest is not stored.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_BUSY (bounce buffers),
/// RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_store_begin(
    store: *const Store,
    keys: *const u8,
    blocks: *const u32,
    count: usize,
    request: *mut *mut Request,
    accepted: *mut usize,
) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let store = unsafe { handle(store, "store")? };
        // SAFETY: as the header requires.
        let (to, room) = unsafe { (output(request, "request")?, output(accepted, "accepted")?) };
        // SAFETY: as the header requires.
        let (keys, blocks) = unsafe { (self::keys(keys, count)?, self::blocks(blocks, count)?) };
        let begun = store.store.store(&keys, &blocks)?;
        *room = begun.accepted();
        *to = made(begun);
        Ok(())
    })
}

/// Starts to move a layer of all blocks of a request. Costs the same for any number of blocks.
/// Waits up to 60 seconds for other transfers if as many are in flight as there may be, and up to 5
/// for a server's limit of bandwidth, and then fails with RIPIENO_STATUS_BUSY. Several layers may
/// be in flight, and end in any order.
///
/// layer: 0 to layers - 1.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_BUSY, RIPIENO_STATUS_IO (a layer of the
/// request failed before), RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_layer_start(request: *const Request, layer: u32) -> Status {
    // SAFETY: as the header requires.
    guard(|| Ok(unsafe { handle(request, "request")? }.start(Layer(layer))?))
}

/// Moves all layers of a request, and waits for them. Replaces ripieno_layer_start and
/// ripieno_layer_wait for each layer if there is no work between layers. On return, nothing
/// accesses the blocks any more, except after RIPIENO_STATUS_FAILED.
///
/// Fails like those functions; some layers were then not moved.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_move_all(request: *const Request) -> Status {
    // SAFETY: as the header requires.
    guard(|| Ok(unsafe { handle(request, "request")? }.move_all()?))
}

/// Waits for a started layer. On return, with any status except RIPIENO_STATUS_FAILED, nothing
/// accesses the layer's blocks any more; after that one a device still may. Only one thread may
/// wait for a layer.
///
/// Fails with RIPIENO_STATUS_INVALID (not started, or already waited for), RIPIENO_STATUS_IO,
/// RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_layer_wait(request: *const Request, layer: u32) -> Status {
    // SAFETY: as the header requires.
    guard(|| Ok(unsafe { handle(request, "request")? }.wait(Layer(layer))?))
}

/// Same as ripieno_layer_wait, but does not wait. done: true if the layer has ended.
///
/// Fails with RIPIENO_STATUS_INVALID (not started, or already waited for), RIPIENO_STATUS_IO,
/// RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_layer_poll(
    request: *const Request,
    layer: u32,
    done: *mut bool,
) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let (request, to) = unsafe { (handle(request, "request")?, output(done, "done")?) };
        *to = request.poll(Layer(layer))?;
        Ok(())
    })
}

/// Makes the stored blocks of a request durable, and visible to lookups. Waits for its layers in
/// flight. After RIPIENO_STATUS_OK, the blocks are found again after a crash or power loss.
/// Otherwise lookups of this process do not find them any more. After RIPIENO_STATUS_READ_ONLY they
/// may be found, whole, when the store is opened again; with a server, also after
/// RIPIENO_STATUS_FAILED.
///
/// Releases the request, also if this fails.
///
/// Fails with RIPIENO_STATUS_INVALID (a layer was not started; not a storing request),
/// RIPIENO_STATUS_IO, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_commit(request: *mut Request) -> Status {
    guard(|| {
        // SAFETY: a handle that was not released, as the header requires.
        unsafe { taken(request, "request")? }.commit()?;
        Ok(())
    })
}

/// Releases a request, after waiting for its layers in flight: its blocks are the engine's again.
/// Blocks stored without a ripieno_commit are lost. Null is allowed. Waits for a device that does
/// not answer until its timeouts; in a forked process, does nothing but free the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_request_end(request: *mut Request) {
    let _ = guard(|| {
        if !request.is_null() {
            // SAFETY: a handle that was not released, as the header requires.
            drop(unsafe { Box::from_raw(request) });
        }
        Ok(())
    });
}
