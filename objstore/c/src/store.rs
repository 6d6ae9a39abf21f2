//! Opening and closing.

#![allow(unsafe_code, reason = "the C interface: handles and outputs of callers")]

use std::{path::Path, sync::Arc};

use nvme_driver::{ControllerOptions, MonotonicClock};
use objstore::{Format, StoreError, StoreId, StoreOptions};
use ripieno_stack::{
    Executor, Home, HomeError, HomeMedia, HomeOptions, Stack, StackConfig, StackError,
};

use crate::{
    config::{self, CREATE, Config, Namespace},
    status::{Failure, Status, guard},
};

/// A handle of a store that works in one namespace. Any number of threads may use it, and any
/// number of handles of one store may exist.
#[derive(Debug)]
pub struct Store {
    pub(crate) handle: objstore::Store,
    /// What the handles of a store share; closed with the last of them.
    pub(crate) stack: Arc<Stack>,
}

/// The caller's handle.
///
/// # Safety
/// `from` is null or a handle that was not given back.
pub(crate) unsafe fn handle<'a, T>(from: *const T, name: &str) -> Result<&'a T, Failure> {
    // SAFETY: the caller's promise.
    unsafe { from.as_ref() }.ok_or_else(|| Failure::invalid(format!("{name}: it is null")))
}

/// Where a result goes.
///
/// # Safety
/// `to` is null or may be written.
pub(crate) unsafe fn output<'a, T>(to: *mut T, name: &str) -> Result<&'a mut T, Failure> {
    // SAFETY: the caller's promise.
    unsafe { to.as_mut() }.ok_or_else(|| Failure::invalid(format!("{name}: it is null")))
}

fn random() -> Result<[u8; 16], Failure> {
    let mut bytes = [0; 16];
    let found = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    match found {
        Ok(16) => Ok(bytes),
        other => Err(Failure::new(Status::System, format!("no random numbers: {other:?}"))),
    }
}

/// Opens the store in a home. With RIPIENO_CREATE, a home that does not exist, or was not
/// completed, is made first.
///
/// Takes as long as reading the journal: see docs/on-disk-format.md.
///
/// Fails with RIPIENO_STATUS_NOT_FOUND, RIPIENO_STATUS_OCCUPIED, RIPIENO_STATUS_LOCKED,
/// RIPIENO_STATUS_NO_SPACE, RIPIENO_STATUS_DAMAGED, RIPIENO_STATUS_SYSTEM, RIPIENO_STATUS_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_open(config: *const Config, store: *mut *mut Store) -> Status {
    guard(|| {
        // SAFETY: as the header says.
        let (config, to) = unsafe { (config::read(config, "config")?, output(store, "store")?) };
        // SAFETY: as above.
        let stack = unsafe { open(&config)? };
        let handle = stack.store().clone();
        *to = Box::into_raw(Box::new(Store { handle, stack: Arc::new(stack) }));
        Ok(())
    })
}

/// # Safety
/// What the configuration points to is as the header says.
unsafe fn open(config: &Config) -> Result<Stack, Failure> {
    // SAFETY: the caller's promise. The pool first: its release is called whatever happens.
    let (pool, dir, namespace) = unsafe { (config.pool()?, config.home()?, config.namespace()?) };
    let (shape, dram_mode) = (config.shape()?, config.dram_mode()?);
    if config.flags & !CREATE != 0 {
        return Err(Failure::invalid(format!("config.flags: {:#x} is unknown", config.flags)));
    }
    let or = |given: u32, default: u32| if given == 0 { default } else { given };
    let (queues, depth) = (or(config.queues_per_device, 1), or(config.queue_depth, 256));
    if !(1..=64).contains(&queues) || !(2..=1024).contains(&depth) || !depth.is_power_of_two() {
        let why = format!(
            "config: {queues} queues of {depth} entries; up to 64, and a power of two from 2 to \
             1024, are possible"
        );
        return Err(Failure::invalid(why));
    }
    let make = config.flags & CREATE != 0 && !Home::exists(&dir);
    let home = if make { create(config, &dir)? } else { Home::open(&dir)? };
    let config = StackConfig {
        place: home.into(),
        executor: Executor::Host,
        require: None,
        shape,
        namespace,
        pool,
        controller: ControllerOptions {
            io_queues: queues as u16,
            io_depth: depth,
            ..ControllerOptions::default()
        },
        options: StoreOptions {
            queues_per_device: queues as u16,
            queue_depth: depth,
            dram_bytes: config.dram_bytes,
            dram_mode,
            ..StoreOptions::default()
        },
    };
    let clock = Arc::new(MonotonicClock::default());
    Ok(if make {
        Stack::create(config, &Format::new(StoreId(random()?), shape), clock).map_err(refused)?
    } else {
        Stack::open(config, clock)?
    })
}

/// A store that cannot be made as it was asked for: nothing is damaged.
fn refused(error: StackError) -> Failure {
    match error {
        StackError::Store(StoreError::Format(_)) => Failure::invalid(error.to_string()),
        error => error.into(),
    }
}

fn create(config: &Config, dir: &Path) -> Result<Home, Failure> {
    let [a, b, c, d, e, f, g, h, ..] = random()?;
    let or = |given: u32, default: u32| if given == 0 { default } else { given };
    let media = HomeMedia::Files { count: or(config.devices, 1), bytes: config.capacity_bytes };
    let id = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
    let made = Home::create(dir, &HomeOptions { id, media, lba_bytes: or(config.lba_bytes, 4096) });
    match made {
        // Another process was faster.
        Err(HomeError::Exists { .. }) => Ok(Home::open(dir)?),
        made => Ok(made?),
    }
}

/// Another handle of the same store, in another namespace. Blocks of one namespace are never found
/// in another one.
///
/// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_FAILED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_within(
    store: *const Store,
    namespace_: *const Namespace,
    other: *mut *mut Store,
) -> Status {
    guard(|| {
        // SAFETY: as the header says.
        let (store, to) = unsafe { (handle(store, "store")?, output(other, "other")?) };
        // SAFETY: as the header says.
        let namespace = unsafe { config::read(namespace_, "namespace")?.check()? };
        let handle = store.handle.within(&namespace)?;
        *to = Box::into_raw(Box::new(Store { handle, stack: store.stack.clone() }));
        Ok(())
    })
}

/// Gives a handle back, also when it fails. The last handle of a store closes it: waits for what is
/// in flight, makes everything permanent, lets go of the home and of the engine's memory. Prefixes
/// and requests that still exist can then only be given back. Null is fine.
///
/// Fails with RIPIENO_STATUS_READ_ONLY when the journal could not be written;
/// RIPIENO_STATUS_FAILED when something did not stop: the engine's memory must then stay where it
/// is until it is released (ripieno_pool.release).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ripieno_close(store: *mut Store) -> Status {
    guard(|| {
        if store.is_null() {
            return Ok(());
        }
        // SAFETY: a handle that was not given back, as the header says.
        let Store { stack, .. } = *unsafe { Box::from_raw(store) };
        match Arc::into_inner(stack) {
            Some(stack) => Ok(stack.close()?),
            None => Ok(()),
        }
    })
}
