//! Copies between the process and the GPU: late, beside kernels, rejected, and on a lost GPU.
#![allow(unsafe_code, reason = "hands out memory of the tests for copies")]

use std::{any::Any, ptr::NonNull, sync::Arc};

use cuda_mock::{self as mock, Level, Variables, each, isolated};
use gio_kernels::cuda::{CudaCopies, CudaDevice, DeviceMemory, LaunchMode};
use gio_uring::IoExecutor;
use nvme_driver::{
    Clock, Controller, ControllerOptions, CopyDirection, CopyEngine, CopyFence, DeviceCopy,
    DevicePtr, DmaSlice, DmaSpace, MonotonicClock, platform::p2p::round_trip,
};
use nvme_emu::{Emu, EmuConfig, EmuDomain, EmuRunner, MemoryMedia};
use nvme_spec::ids::{Lba, Nsid};
use ripieno_testkit::{WATCHDOG_NS, until};

use crate::rig::{self, bare, set_stop};

/// One host page per copy, and GPU memory for all of them.
struct Pages {
    host: NonNull<u8>,
    gpu: DeviceMemory,
    _owner: Arc<dyn Any + Send + Sync>,
    count: usize,
}

const PAGE: usize = 4096;

impl Pages {
    fn new(copies: &CudaCopies, device: &Arc<CudaDevice>, count: usize) -> Self {
        let memory = copies.host_memory(count * PAGE).expect("pinned memory");
        let (host, address, len, owner) = memory.into_parts();
        assert!(address.is_some() && len == count * PAGE);
        let gpu = device.allocate(count * PAGE).expect("GPU memory");
        Self { host: host.expect("an address"), gpu, _owner: owner, count }
    }

    fn word(&self, page: usize) -> NonNull<u32> {
        assert!(page < self.count);
        // SAFETY: inside the memory, page aligned.
        unsafe { self.host.add(page * PAGE).cast() }
    }

    fn set(&self, salt: u32) {
        for page in 0..self.count {
            // SAFETY: inside the memory; no copy of it is in flight.
            unsafe { self.word(page).write_volatile(page as u32 ^ salt) };
        }
    }

    fn get(&self, page: usize) -> u32 {
        // SAFETY: inside the memory.
        unsafe { self.word(page).read_volatile() }
    }

    /// Pairs page `n` of one side with page `count - 1 - n` of the other.
    fn crossed(&self, direction: CopyDirection) -> Vec<DeviceCopy> {
        let copy = |page: usize| DeviceCopy {
            host: self.word(page).cast(),
            device: DevicePtr(self.gpu.device().0 + ((self.count - 1 - page) * PAGE) as u64),
            len: PAGE,
            direction,
        };
        (0..self.count).map(copy).collect()
    }

    fn submit(&self, copies: &CudaCopies, direction: CopyDirection) -> CopyFence {
        // SAFETY: every test waits for the fence, or loses the GPU, before `self` is dropped.
        unsafe { copies.submit(&self.crossed(direction)) }.expect("submitted")
    }
}

fn wait(copies: &CudaCopies, fence: CopyFence) {
    until("the copies end", || copies.is_done(fence).expect("the GPU is well"));
}

/// A round trip, crossed both ways, over more copies than one driver call takes.
fn there_and_back(copies: &CudaCopies, pages: &Pages) {
    pages.set(0x5a00_0000);
    let there = pages.submit(copies, CopyDirection::HostToDevice);
    wait(copies, there);
    pages.set(0);
    let mut bytes = [0; 4];
    pages.gpu.read(0, &mut bytes).expect("inside");
    assert_eq!(u32::from_le_bytes(bytes), (pages.count - 1) as u32 ^ 0x5a00_0000);
    let back = pages.submit(copies, CopyDirection::DeviceToHost);
    assert!(back > there);
    wait(copies, back);
    for page in 0..pages.count {
        assert_eq!(pages.get(page), page as u32 ^ 0x5a00_0000, "page {page}");
    }
    assert!(copies.is_done(there).expect("long ago"));
}

fn in_batches(calls: [i64; 2]) {
    let device = rig::gpu();
    let copies = CudaCopies::new(&device).expect("a stream");
    assert!(copies.is_batched());
    there_and_back(&copies, &Pages::new(&copies, &device, 1500));
    let made = ["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"].map(mock::count);
    assert_eq!(made, calls, "1,500 copies in two calls, twice");
    drop((copies, device));
    mock::assert_clean();
}

#[test]
fn bytes_go_there_and_back() {
    isolated("copies::bytes_go_there_and_back", Level::Full, &[], || in_batches([4, 0]));
}

#[test]
fn batches_of_cuda_12() {
    isolated("copies::batches_of_cuda_12", Level::TwelveNine, &[], || in_batches([0, 4]));
}

fn one_by_one() {
    let device = rig::gpu();
    let copies = CudaCopies::new(&device).expect("a stream");
    there_and_back(&copies, &Pages::new(&copies, &device, 30));
    assert!(!copies.is_batched(), "{copies:?}");
    let calls = ["cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"].map(mock::count);
    assert_eq!(calls, [30, 30]);
    drop((copies, device));
    mock::assert_clean();
}

#[test]
fn a_driver_without_batches() {
    isolated("copies::a_driver_without_batches", Level::Twelve, &[], one_by_one);
}

#[test]
fn a_gpu_without_batches() {
    let refused = [("MOCK_CUDA_INJECT", "cuMemcpyBatchAsync_v2:0:801")];
    isolated("copies::a_gpu_without_batches", Level::Full, &refused, one_by_one);
}

/// The fence is delayed as long as the copies; afterwards it is checked without a driver call.
#[test]
fn a_fence_is_behind_its_copies() {
    isolated("copies::a_fence_is_behind_its_copies", Level::Full, &[], || {
        let device = rig::gpu();
        let copies = CudaCopies::new(&device).expect("a stream");
        let pages = Pages::new(&copies, &device, 8);
        assert!(copies.is_done(CopyFence(0)).expect("nothing was submitted"));
        copies.is_done(CopyFence(1)).expect_err("nobody was given this one");
        pages.set(0xabc0_0000);
        mock::hold_copies(true);
        let fence = pages.submit(&copies, CopyDirection::HostToDevice);
        // SAFETY: no copies.
        let nothing = unsafe { copies.submit(&[]) }.expect("nothing to do");
        assert_eq!(nothing, fence, "after what was submitted before");
        for _ in 0..1000 {
            assert!(!copies.is_done(fence).expect("the GPU is well"));
        }
        let asked = mock::count("cuStreamQuery");
        assert!((1..=20).contains(&asked), "asked {asked} times in a thousand");
        mock::hold_copies(false);
        wait(&copies, fence);
        let calls = || mock::count("cuStreamQuery") + mock::count("cuCtxPushCurrent");
        let before = calls();
        for _ in 0..1000 {
            assert!(copies.is_done(fence).expect("done"));
        }
        assert_eq!(calls(), before);
        drop((pages, copies, device));
        mock::assert_clean();
    });
}

/// Neither allocations nor driver waits happen beside a kernel that does not end.
#[test]
fn copies_go_on_beside_a_resident_kernel() {
    isolated("copies::copies_go_on_beside_a_resident_kernel", Level::Full, &[], || {
        let device = rig::gpu();
        let copies = CudaCopies::with_host_memory(&device, 64 * PAGE).expect("a stream");
        let gpu = device.allocate(48 * PAGE).expect("GPU memory");
        let (mut executor, page, args) = bare(&device, LaunchMode::Resident);
        executor.start(args, &[]).expect("starts");
        let allocations = || mock::count("cuMemHostAlloc") + mock::count("cuMemAlloc");
        let before = allocations();
        let memory = copies.host_memory(48 * PAGE).expect("from what there is");
        let error = copies.host_memory(17 * PAGE).expect_err("16 are left").to_string();
        assert!(error.contains("with_host_memory"), "{error}");
        drop(copies.host_memory(16 * PAGE).expect("16 are left"));
        let (host, _, _, owner) = memory.into_parts();
        let pages = Pages { host: host.expect("an address"), gpu, _owner: owner, count: 48 };
        there_and_back(&copies, &pages);
        assert_eq!(allocations(), before);
        // Also dropped beside the kernel.
        drop((pages, copies));
        set_stop(&page);
        executor.stop(WATCHDOG_NS).expect("stops");
        drop((executor, page, device));
        mock::assert_clean();
    });
}

#[test]
fn host_memory_grows_and_is_zeroed_again() {
    isolated("copies::host_memory_grows_and_is_zeroed_again", Level::Full, &[], || {
        let device = rig::gpu();
        let copies = CudaCopies::with_host_memory(&device, 2 * PAGE).expect("a stream");
        for _ in 0..2 {
            let pages = Pages::new(&copies, &device, 2);
            assert_eq!(pages.get(1), 0);
            pages.set(9);
        }
        let before = mock::count("cuMemHostAlloc");
        let large = copies.host_memory(20 << 20).expect("a chunk of its own");
        assert_eq!(mock::count("cuMemHostAlloc"), before + 1);
        copies.host_memory(usize::MAX).expect_err("more than there is");
        mock::inject("cuMemHostAlloc", 0, 2);
        let error = copies.host_memory(17 << 20).expect_err("no memory").to_string();
        assert!(error.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
        // The memory outlives the engine.
        drop((copies, device));
        assert_ne!(mock::live(), 0);
        drop(large);
        mock::assert_clean();
    });
}

#[test]
fn a_lost_gpu_is_noticed() {
    let cases: [Variables<'_>; 2] = [&[], &[]];
    each("copies::a_lost_gpu_is_noticed", Level::Full, &cases, |case| {
        let device = rig::gpu();
        let copies = CudaCopies::new(&device).expect("a stream");
        let pages = Pages::new(&copies, &device, 4);
        let done = pages.submit(&copies, CopyDirection::HostToDevice);
        wait(&copies, done);
        mock::hold_copies(true);
        let fence = pages.submit(&copies, CopyDirection::DeviceToHost);
        mock::lose(700);
        let error = if case == 0 {
            // Detected by polling.
            let found = (0..1000).find_map(|_| copies.is_done(fence).err());
            found.expect("within a thousand looks")
        } else {
            // SAFETY: as in `submit`; the GPU is lost.
            unsafe { copies.submit(&pages.crossed(CopyDirection::DeviceToHost)) }.expect_err("lost")
        };
        assert!(error.cause.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
        device.healthy().expect_err("lost");
        assert_eq!(copies.is_done(fence), Err(error.clone()), "it stays");
        assert!(copies.is_done(done).expect("that one was done"));
        assert_eq!(copies.host_memory(1).expect_err("for what?"), error);
        // SAFETY: as above.
        let again = unsafe { copies.submit(&pages.crossed(CopyDirection::DeviceToHost)) };
        assert_eq!(again, Err(error));
        drop((pages, copies, device));
        mock::assert_thread_clean();
    });
}

/// A rejected batch leaves nothing in flight, wherever it was rejected, and the next one succeeds.
#[test]
fn what_is_refused_is_not_under_way() {
    let calls = ["cuMemcpyBatchAsync_v2", "cuStreamWriteValue32", "cuMemcpyHtoDAsync"];
    let cases: [Variables<'_>; 3] = [&[]; 3];
    each("copies::what_is_refused_is_not_under_way", Level::Full, &cases, |case| {
        let device = rig::gpu();
        let copies = CudaCopies::new(&device).expect("a stream");
        let pages = Pages::new(&copies, &device, 1030);
        if case == 2 {
            mock::inject("cuMemcpyBatchAsync_v2", 0, 801);
        }
        // The second call in the first case, the eleventh in the third.
        mock::inject(calls[case], [1, 0, 10][case], 2);
        pages.set(1);
        // SAFETY: `submit` returns when no copy is in flight.
        let refused = unsafe { copies.submit(&pages.crossed(CopyDirection::HostToDevice)) };
        let error = refused.expect_err("refused").to_string();
        assert!(error.contains(calls[case].trim_end_matches("_v2")), "{error}");
        assert_eq!(device.healthy(), Ok(()));
        // Copies before the failure are done: their source may change.
        pages.set(2);
        let mut bytes = [0; 4];
        let last = (pages.count - 1) * PAGE;
        pages.gpu.read(last, &mut bytes).expect("inside");
        assert_eq!(u32::from_le_bytes(bytes), 1, "page 0 went in the first call");
        there_and_back(&copies, &pages);
        drop((pages, copies, device));
        mock::assert_clean();
    });
}

/// Dropping an engine waits for its copies before the word is freed.
#[test]
fn a_dropped_engine_waits_for_its_copies() {
    let late = [("MOCK_COPY_DELAY_US", "100000")];
    isolated("copies::a_dropped_engine_waits_for_its_copies", Level::Full, &late, || {
        let device = rig::gpu();
        let copies = CudaCopies::new(&device).expect("a stream");
        let pages = Pages::new(&copies, &device, 3);
        pages.set(7);
        pages.submit(&copies, CopyDirection::HostToDevice);
        drop(copies);
        let mut bytes = [0; 4];
        pages.gpu.read(0, &mut bytes).expect("inside");
        assert_eq!(u32::from_le_bytes(bytes), 2 ^ 7);
        drop((pages, device));
        mock::assert_clean();
    });
}

/// A software drive reads and writes memory that only the GPU addresses, also beside a kernel that
/// does not end.
#[test]
fn the_software_controller_reaches_gpu_memory() {
    isolated("copies::the_software_controller_reaches_gpu_memory", Level::Full, &[], || {
        let device = rig::gpu();
        let copies = Arc::new(CudaCopies::new(&device).expect("a stream"));
        let domain = EmuDomain::with_copies("copies", copies.clone());
        let media = MemoryMedia::new(16 << 20).expect("address space");
        let config = EmuConfig::new("emu").namespace(media, 4096);
        let emu = Emu::new(domain.clone(), config).expect("a good drive");
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
        let runner = EmuRunner::spawn(vec![emu.clone()], clock.clone()).expect("threads");
        let attached = Controller::attach(emu.bus(), clock, ControllerOptions::default());
        let mut controller = attached.expect("attaches");
        let memory = device.allocate(64 * PAGE).expect("GPU memory").into_external();
        let memory = DmaSlice::whole(domain.import(memory).expect("imported")).expect("one range");
        let (mut executor, page, args) = bare(&device, LaunchMode::Resident);
        executor.start(args, &[]).expect("starts");
        let allocations = mock::count("cuMemHostAlloc");
        let tried = round_trip(&mut controller, Nsid(1), Lba(3), &memory, Some(&*copies));
        let report = tried.expect("the controller is well");
        assert_eq!(report.why(), None, "{report:?}");
        assert!(mock::count("copies") > 0);
        assert_eq!(mock::count("cuMemHostAlloc"), allocations);
        set_stop(&page);
        executor.stop(WATCHDOG_NS).expect("stops");
        drop((controller, runner, emu, memory, domain, copies, executor, page, device));
        mock::assert_clean();
    });
}

/// The mock's tests on the machine's driver: batches, single copies, beside a resident kernel.
#[test]
#[ignore = "needs an NVIDIA GPU"]
#[allow(clippy::print_stdout, reason = "what the machine has")]
fn bytes_go_there_and_back_on_a_gpu() {
    let device = rig::only_gpu();
    let copies = CudaCopies::new(&device).expect("a stream");
    println!("{copies:?}");
    let pages = Pages::new(&copies, &device, 1500);
    there_and_back(&copies, &pages);
    let (mut executor, page, args) = bare(&device, LaunchMode::Resident);
    executor.start(args, &[]).expect("starts");
    there_and_back(&copies, &pages);
    drop((pages, copies));
    set_stop(&page);
    executor.stop(WATCHDOG_NS).expect("stops");
}
