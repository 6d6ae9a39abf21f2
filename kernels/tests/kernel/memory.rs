#![allow(unsafe_code, reason = "memory that kernel and controller reach by address")]
//! One arena for queues, rings and KV blocks. The controller sees it at different addresses.

use gio_kernels::InlineExecutor;
use gio_uring::{IoExecutor, SharedMemory};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng, seq::SliceRandom as _};

/// Start of the arena for the controller: no address is the same for both sides.
const IOVA_BASE: u64 = 0x7_0000_0000;

/// A part of the arena that a controller may access.
#[derive(Debug, Clone, Copy)]
pub struct Region {
    pub address: u64,
    pub len: u64,
}

impl Region {
    pub fn at(&self, offset: u64) -> u64 {
        assert!(offset <= self.len);
        self.address + offset
    }
}

pub struct Memory {
    pages: SharedMemory,
    used: u64,
    /// Regions that commands may use for data.
    pub data: Vec<Region>,
}

impl Memory {
    pub fn new(executor: &InlineExecutor, len: usize) -> Self {
        let pages = executor.alloc(len).expect("an arena");
        asan::forbid(pages.address(), pages.len() as u64);
        Self { pages, used: 0, data: Vec::new() }
    }

    /// Allocates zeroed bytes; aligned to `align`, and never adjacent to the previous allocation.
    pub fn take(&mut self, len: u64, align: u64) -> Region {
        let start = (self.used + 64).next_multiple_of(align);
        self.used = start + len;
        assert!(self.used <= self.pages.len() as u64, "the arena is too small");
        let region = Region { address: self.pages.address() + start, len };
        asan::allow(region.address, region.len);
        region
    }

    /// The same, for data of commands.
    pub fn take_data(&mut self, len: u64, align: u64) -> Region {
        let region = self.take(len, align);
        self.data.push(region);
        region
    }

    pub fn iova(&self, address: u64) -> u64 {
        address - self.pages.address() + IOVA_BASE
    }

    /// Returns the address of `len` bytes at `iova`, which must lie inside one of `regions`.
    pub fn translate(&self, iova: u64, len: u64, regions: &[Region]) -> u64 {
        let address = iova.wrapping_sub(IOVA_BASE).wrapping_add(self.pages.address());
        let inside = |r: &&Region| r.address <= address && address + len <= r.address + r.len;
        assert!(regions.iter().any(|r| inside(&r)), "{len} bytes at IOVA {iova:#x} are nobody's");
        address
    }

    fn check(&self, address: u64, len: u64) -> *mut u8 {
        let start = self.pages.address();
        let end = start + self.pages.len() as u64;
        assert!(address >= start && address + len <= end, "{address:#x} is outside the arena");
        std::ptr::with_exposed_provenance_mut(address as usize)
    }

    pub fn peek<T: Copy>(&self, address: u64) -> T {
        let pointer = self.check(address, size_of::<T>() as u64).cast::<T>();
        assert!(pointer.is_aligned());
        // SAFETY: inside the arena and aligned; every T used here is plain data.
        unsafe { pointer.read_volatile() }
    }

    pub fn poke<T: Copy>(&self, address: u64, value: T) {
        let pointer = self.check(address, size_of::<T>() as u64).cast::<T>();
        assert!(pointer.is_aligned());
        // SAFETY: as in peek().
        unsafe { pointer.write_volatile(value) }
    }

    /// Copies an array to fresh memory; returns its address.
    pub fn place<T: Copy>(&mut self, values: &[T]) -> u64 {
        let region = self.take(size_of_val(values) as u64, 64);
        for (index, value) in values.iter().enumerate() {
            self.poke(region.address + (index * size_of::<T>()) as u64, *value);
        }
        region.address
    }

    pub fn read(&self, address: u64, into: &mut [u8]) {
        let pointer = self.check(address, into.len() as u64);
        // SAFETY: inside the arena; one thread runs everything.
        unsafe { std::ptr::copy_nonoverlapping(pointer, into.as_mut_ptr(), into.len()) }
    }

    pub fn write(&self, address: u64, from: &[u8]) {
        let pointer = self.check(address, from.len() as u64);
        // SAFETY: as in read().
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), pointer, from.len()) }
    }

    pub fn bytes(&self, region: Region) -> Vec<u8> {
        let mut bytes = vec![0; region.len as usize];
        self.read(region.address, &mut bytes);
        bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // The next mapping may be at the same address.
        asan::allow(self.pages.address(), self.pages.len() as u64);
    }
}

/// Tells AddressSanitizer what of the arena was taken: to it, an arena is all one allocation.
#[cfg(sanitize_address)]
mod asan {
    unsafe extern "C" {
        fn __asan_poison_memory_region(start: *const u8, len: usize);
        fn __asan_unpoison_memory_region(start: *const u8, len: usize);
    }

    pub fn forbid(address: u64, len: u64) {
        let start = std::ptr::with_exposed_provenance(address as usize);
        // SAFETY: the runtime takes any range of mapped memory.
        unsafe { __asan_poison_memory_region(start, len as usize) }
    }

    pub fn allow(address: u64, len: u64) {
        let start = std::ptr::with_exposed_provenance(address as usize);
        // SAFETY: as above.
        unsafe { __asan_unpoison_memory_region(start, len as usize) }
    }
}

#[cfg(not(sanitize_address))]
mod asan {
    pub fn forbid(_address: u64, _len: u64) {}
    pub fn allow(_address: u64, _len: u64) {}
}

/// A random generator: every failure prints its seed.
#[derive(Debug, Clone)]
pub struct Random(SmallRng);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(SmallRng::seed_from_u64(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0.random()
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0.random_range(0..n)
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        items.shuffle(&mut self.0);
    }
}
