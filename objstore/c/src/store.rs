//! Opening and closing a store.

#![allow(unsafe_code, reason = "the C interface: handles and outputs of callers")]

use std::{path::PathBuf, sync::Arc};

use ripieno_serve::{Client, RemoteStore};
use ripieno_stack::{Builder, Own, OwnStore, Stack};

use crate::{
    config::{self, Config, Memory, Namespace},
    place::{Handle, Opened, Store},
    status::{Failure, Status, guard},
};

/// Returns the value of a caller's handle.
///
/// # Safety
/// `from` must be null or a handle that was not released.
pub(crate) unsafe fn handle<'a, H: Handle + 'a>(
    from: *const H,
    name: &str,
) -> Result<&'a H::Of, Failure> {
    // SAFETY: the caller's contract.
    let from = unsafe { from.as_ref() };
    let from = from.ok_or_else(|| Failure::invalid(format!("{name}: it is null")))?;
    Ok(from.own().get()?)
}

/// Makes a handle for a caller.
pub(crate) fn made<H: Handle>(of: H::Of) -> *mut H {
    Box::into_raw(Box::new(Own::new(of).into()))
}

/// Takes a handle back that a caller releases.
///
/// # Safety
/// `handle` must be null or a handle that was not released.
pub(crate) unsafe fn taken<H: Handle>(handle: *mut H, name: &str) -> Result<H::Of, Failure> {
    if handle.is_null() {
        return Err(Failure::invalid(format!("{name}: it is null")));
    }
    // SAFETY: the caller's contract.
    let own: Own<H::Of> = (*unsafe { Box::from_raw(handle) }).into();
    Ok(own.into_inner()?)
}

/// Returns a caller's output location.
///
/// # Safety
/// `to` must be null or writable.
pub(crate) unsafe fn output<'a, T>(to: *mut T, name: &str) -> Result<&'a mut T, Failure> {
    // SAFETY: the caller's contract.
    unsafe { to.as_mut() }.ok_or_else(|| Failure::invalid(format!("{name}: it is null")))
}

/// Writes results to a caller's array, unless it is null.
///
/// # Safety
/// `to` must be null, or writable for all of them.
pub(crate) unsafe fn outputs<T: Copy>(
    to: *mut T,
    name: &str,
    results: impl FnOnce() -> Result<Vec<T>, Failure>,
) -> Result<(), Failure> {
    // SAFETY: the caller's contract.
    unsafe { output(to, name)? };
    let results = results()?;
    // SAFETY: as above, and not null.
    unsafe { to.copy_from_nonoverlapping(results.as_ptr(), results.len()) };
    Ok(())
}

/// Opens a store, or connects to that of a server. With a capacity in the options, a missing or
/// incomplete store is made first.
///
/// Takes as long as reading the journal; see docs/reference/on-disk-format.md.
///
/// When a server ends, calls fail with RIPIENO_STATUS_FAILED until one connects to it again: treat
/// all blocks as misses. Until then, blocks that were being retrieved may still be written to. If
/// the store was closed meanwhile, open it with the same memory again, until that succeeds. A
/// session that was lost while its server lives is ended first; RIPIENO_STATUS_BUSY if its
/// transfers do not end.
///
/// Fails with RIPIENO_STATUS_NOT_FOUND, RIPIENO_STATUS_OCCUPIED, RIPIENO_STATUS_LOCKED,
/// RIPIENO_STATUS_NO_SPACE, RIPIENO_STATUS_DAMAGED, RIPIENO_STATUS_SYSTEM, RIPIENO_STATUS_BUSY,
/// RIPIENO_STATUS_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_open(config: *const Config, store: *mut *mut Store) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let (config, to) = unsafe { (config::read(config, "config")?, output(store, "store")?) };
        // SAFETY: as above. The pool comes first: its release is called in any case.
        let (memory, server) = unsafe { (config.pool()?, config.server()?) };
        // SAFETY: as above.
        let namespace = unsafe { config.namespace()? };
        let opened = match server {
            Some(path) => connect(&config, path, memory, &namespace)?,
            None => {
                // SAFETY: as above.
                let stack = unsafe { open(&config, memory, namespace)? };
                Opened { store: Box::new(OwnStore::new(stack)), memory: Arc::new(None) }
            }
        };
        *to = made(opened);
        Ok(())
    })
}

fn connect(
    config: &Config,
    path: PathBuf,
    memory: Memory,
    namespace: &objstore::Namespace,
) -> Result<Opened, Failure> {
    let (shape, layout, file) = (config.shape()?, memory.layout.clone(), memory.file()?);
    let client = Client::join(path, shape, None, Some((layout, file)))?;
    let checked = memory.check(client.memory());
    match checked.and_then(|()| Ok(RemoteStore::new(client.clone(), namespace)?)) {
        Ok(store) => Ok(Opened { store: Box::new(store), memory: Arc::new(Some(memory.owner)) }),
        Err(why) => {
            // The first error is the one that matters.
            let _ = client.close();
            Err(why)
        }
    }
}

/// # Safety
/// All pointers in the configuration must be valid as the header requires.
unsafe fn open(
    config: &Config,
    memory: Memory,
    namespace: objstore::Namespace,
) -> Result<Stack, Failure> {
    // SAFETY: the caller's contract.
    let builder = Builder::new(unsafe { config.options()? }, config.shape()?);
    Ok(builder.namespace(namespace).pool(memory.pool()).open()?)
}

/// Makes another handle of the same store, in another namespace. Blocks of one namespace are never
/// found in another one.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY (the namespace is new, and the store
/// takes no writes any more), RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_within(
    store: *const Store,
    namespace_: *const Namespace,
    other: *mut *mut Store,
) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let (store, to) = unsafe { (handle(store, "store")?, output(other, "other")?) };
        // SAFETY: as the header requires.
        let namespace = unsafe { config::read(namespace_, "namespace")?.check()? };
        let within = store.store.within(&namespace)?;
        *to = made(Opened { store: within, memory: store.memory.clone() });
        Ok(())
    })
}

/// Releases a handle, also if this fails. The last handle of a store closes it: waits for I/O in
/// flight, makes everything durable, and releases directory or server, and the engine's
/// memory. Remaining prefixes and requests can then only be released. Null is allowed.
///
/// Fails with RIPIENO_STATUS_READ_ONLY if the journal could not be written; RIPIENO_STATUS_FAILED
/// if something did not stop: the engine's memory must then stay mapped until it is released
/// (ripieno_pool.release). After the end of its server it is not released: open the store again
/// with the same memory, and close that. In a forked process it fails, and the store stays open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_close(store: *mut Store) -> Status {
    guard(|| {
        if store.is_null() {
            return Ok(());
        }
        // SAFETY: a handle that was not released, as the header requires.
        unsafe { taken(store, "store")? }.close()
    })
}
