#![allow(unsafe_code, reason = "GPU memory is read and written through copies")]
//! GPU memory that this process reads and writes through copies.

use std::{any::Any, ptr::NonNull, sync::Arc};

use nvme_driver::{
    Clock, CopyDirection, CopyEngine, CopyError, DeviceCopy, DevicePtr, MonotonicClock, Nanos,
    Waiter,
};

use crate::{config::StoreGpu, registration::KvPool};

/// Time limit of a copy. In wall-clock time: a GPU has no simulated one.
const COPY_TIMEOUT: Nanos = Nanos::from_millis(10_000);

/// The memory of a pool, and a bounce buffer in this process.
pub(in crate::plane) struct DeviceOnlyMemory<'a> {
    copies: &'a dyn CopyEngine,
    host: NonNull<u8>,
    len: usize,
    owner: Arc<dyn Any + Send + Sync>,
    /// Keeps the GPU memory alive.
    pool: &'a KvPool,
}

impl<'a> DeviceOnlyMemory<'a> {
    /// Creates an accessor for copies of up to `len` bytes.
    pub(in crate::plane) fn new(
        gpu: Option<&'a StoreGpu>,
        pool: &'a KvPool,
        len: usize,
    ) -> Result<Self, String> {
        let Some(gpu) = gpu else {
            return Err("only the GPU addresses the pool; set StoreConfig::gpu".to_owned());
        };
        let memory = gpu.copies.host_memory(len).map_err(message)?;
        match memory.into_parts() {
            (Some(host), _, found, owner) if found >= len => {
                Ok(Self { copies: &*gpu.copies, host, len, owner, pool })
            }
            _ => Err("the copy engine gave memory that this process cannot use".to_owned()),
        }
    }

    /// Reads bytes at GPU address `at`.
    pub(in crate::plane) fn read(
        &self,
        at: Option<DevicePtr>,
        bytes: &mut [u8],
    ) -> Result<(), String> {
        self.copy(at, bytes.len(), CopyDirection::DeviceToHost)?;
        // SAFETY: `copy` checked the length, and nothing is copied any more; `owner` keeps it.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(self.host.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Writes `bytes` at GPU address `at`.
    pub(in crate::plane) fn write(
        &self,
        at: Option<DevicePtr>,
        bytes: &[u8],
    ) -> Result<(), String> {
        assert!(bytes.len() <= self.len, "{} bytes for {}", bytes.len(), self.len);
        // SAFETY: checked above; nothing is copied now; `owner` keeps it.
        unsafe { self.host.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        self.copy(at, bytes.len(), CopyDirection::HostToDevice)
    }

    fn copy(
        &self,
        at: Option<DevicePtr>,
        len: usize,
        direction: CopyDirection,
    ) -> Result<(), String> {
        assert!(len <= self.len, "{len} bytes for {}", self.len);
        let device = at.ok_or("the memory has no address on the GPU")?;
        let copy = DeviceCopy { host: self.host, device, len, direction };
        // SAFETY: `owner` and `pool` keep both sides, and neither is used before the copy is done;
        // if it does not end, both are leaked below.
        let fence = unsafe { self.copies.submit(&[copy]) }.map_err(message)?;
        let clock = MonotonicClock::default();
        let mut waiter = Waiter::new(&clock, clock.now() + COPY_TIMEOUT);
        while !self.copies.is_done(fence).map_err(message)? {
            if !waiter.wait() {
                std::mem::forget((self.owner.clone(), self.pool.clone()));
                let millis = COPY_TIMEOUT.0 / 1_000_000;
                return Err(format!(
                    "the GPU did not copy {len} bytes within {millis} ms; the memory is leaked"
                ));
            }
        }
        Ok(())
    }
}

fn message(error: CopyError) -> String {
    error.to_string()
}
