#![allow(unsafe_code, reason = "moves the warps' state to the GPU's memory")]
//! The CUDA executor with the state of its warps (slots, counters, operations in progress) in the
//! GPU's memory. As built it is in pinned memory of the host, where the host can look at it at any
//! time, and each access of a warp crosses the bus. This shows what that costs.

use std::sync::{Arc, Mutex, PoisonError};

use gio_kernels::cuda::{CudaDevice, CudaExecutor, DeviceMemory};
use gio_uring::{
    ExecutorError, IoExecutor, Progress, SharedMemory,
    abi::{Args, Warp},
};
use nvme_driver::{Nanos, Place, Quiesced, platform::mmio};
use std::ptr::NonNull;

/// Memory that was given out.
#[derive(Debug, Clone, Copy)]
struct Given {
    host: usize,
    address: u64,
    len: usize,
}

/// The executor, and where the state is while it runs.
#[derive(Debug)]
pub struct Local {
    inner: CudaExecutor,
    device: Arc<CudaDevice>,
    given: Mutex<Vec<Given>>,
    state: Option<State>,
}

#[derive(Debug)]
struct State {
    memory: DeviceMemory,
    from: Given,
    count: u32,
}

impl Local {
    pub fn new(inner: CudaExecutor, device: &Arc<CudaDevice>) -> Self {
        Self { inner, device: device.clone(), given: Mutex::default(), state: None }
    }

    fn failed(error: impl std::fmt::Display) -> ExecutorError {
        ExecutorError::Failed { executor: "cuda", cause: error.to_string() }
    }

    /// Copies the state to the GPU; the arguments then lead there.
    fn move_out(&mut self, args: Args) -> Result<Args, ExecutorError> {
        let given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        let holds = |g: &&Given| (g.address..g.address + g.len as u64).contains(&args.warps);
        let from = given.iter().find(holds).copied();
        drop(given);
        let from = from.filter(|from| from.address == args.warps);
        let from = from.ok_or_else(|| Self::failed("the warps are not where they used to be"))?;
        let memory = self.device.allocate(from.len).map_err(Self::failed)?;
        let mut bytes = vec![0; from.len];
        // SAFETY: memory that `alloc` gave out; the ring owns it, and calls this.
        unsafe { mmio::copy_from(host(from), &mut bytes) };
        let moved = |address: u64| memory.device().0 + (address - from.address);
        shift(&mut bytes, args.warp_count, moved);
        memory.write(0, &bytes).map_err(Self::failed)?;
        let args = Args { warps: memory.device().0, ..args };
        self.state = Some(State { memory, from, count: args.warp_count });
        Ok(args)
    }

    /// Brings it back, for who looks at counters and slots.
    fn move_back(&mut self) -> Result<(), ExecutorError> {
        let Some(State { memory, from, count }) = self.state.take() else { return Ok(()) };
        let mut bytes = vec![0; from.len];
        memory.read(0, &mut bytes).map_err(Self::failed)?;
        shift(&mut bytes, count, |address| from.address + (address - memory.device().0));
        // SAFETY: as above; no kernel runs.
        unsafe { mmio::copy_to(host(from), &bytes) };
        Ok(())
    }
}

fn host(given: Given) -> NonNull<u8> {
    let at: *mut u8 = std::ptr::with_exposed_provenance_mut(given.host);
    NonNull::new(at).expect("memory is not at 0")
}

/// Changes the addresses of slots, which lie behind the warps.
fn shift(bytes: &mut [u8], warps: u32, moved: impl Fn(u64) -> u64) {
    for index in 0..warps as usize {
        for field in [std::mem::offset_of!(Warp, slots), std::mem::offset_of!(Warp, free_slots)] {
            let at = index * size_of::<Warp>() + field;
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            let address = moved(u64::from_le_bytes(word));
            bytes[at..at + 8].copy_from_slice(&address.to_le_bytes());
        }
    }
}

impl IoExecutor for Local {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn alloc(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        let memory = self.inner.alloc(len)?;
        let host = memory.host().as_ptr().expose_provenance();
        let given = Given { host, address: memory.address(), len: memory.len() };
        self.given.lock().unwrap_or_else(PoisonError::into_inner).push(given);
        Ok(memory)
    }

    fn address(&self, place: &Place) -> Option<u64> {
        self.inner.address(place)
    }

    fn start(&mut self, args: Args) -> Result<(), ExecutorError> {
        let args = self.move_out(args)?;
        self.inner.start(args)
    }

    fn submitted(&mut self, tail: u32, sms: u32) -> Result<(), ExecutorError> {
        self.inner.submitted(tail, sms)
    }

    fn poll(&mut self) -> Result<Progress, ExecutorError> {
        self.inner.poll()
    }

    fn stop(&mut self, deadline: Nanos) -> Result<Quiesced, ExecutorError> {
        let proof = self.inner.stop(deadline)?;
        self.move_back()?;
        Ok(proof)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_move_with_their_warps() {
        let fields = [std::mem::offset_of!(Warp, slots), std::mem::offset_of!(Warp, free_slots)];
        let mut bytes = vec![0; 2 * size_of::<Warp>() + 64];
        let places: Vec<usize> =
            (0..2).flat_map(|warp| fields.map(|field| warp * size_of::<Warp>() + field)).collect();
        for (number, at) in places.iter().enumerate() {
            bytes[*at..at + 8].copy_from_slice(&(0x1000 + number as u64 * 8).to_le_bytes());
        }
        let before = bytes.clone();
        shift(&mut bytes, 2, |address| address + 0x7000);
        for (number, at) in places.iter().enumerate() {
            let wanted = (0x8000 + number as u64 * 8).to_le_bytes();
            assert_eq!(bytes[*at..at + 8], wanted, "address {number}");
        }
        shift(&mut bytes, 2, |address| address - 0x7000);
        assert_eq!(bytes, before, "nothing else changed");
    }
}
