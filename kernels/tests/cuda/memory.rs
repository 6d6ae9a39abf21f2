//! Memory, registrations, and words that order streams.
#![allow(unsafe_code, reason = "the driver API is reached by address, over memory of the tests")]

use cuda_mock::{self as mock, Level, isolated};
use std::{sync::Arc, time::Duration};

use gio_kernels::cuda::{
    CudaDevice, CudaExecutor, CudaStream, DoorbellKind, GpuHandle, LaunchMode, StreamMarks,
    is_reached,
};
use gio_uring::{IoExecutor, RawStream};
use nvme_driver::{
    Bus, DevicePtr, DmaSlice, DmaSpace, ExternalMemory, Iova, MonotonicClock, Place, platform::mmio,
};
use nvme_emu::{Emu, EmuConfig, EmuDomain, MemoryMedia};
use ripieno_testkit::until;

use crate::{rig, vmm::VmmPool};

/// CU_MEMHOSTREGISTER_PORTABLE | DEVICEMAP, and IOMEMORY.
const MAPPED: u32 = 3;
const IO: u32 = 4;

#[test]
fn pinned_memory_is_zeroed_aligned_and_freed() {
    isolated("memory::pinned_memory_is_zeroed_aligned_and_freed", Level::Full, &[], || {
        let device = rig::gpu();
        let memory = device.pinned(5000).expect("two pages");
        assert_eq!((memory.len(), memory.device().0 % 4096), (8192, 0));
        assert!(memory.host().as_ptr().addr().is_multiple_of(4096));
        assert_ne!(memory.host().as_ptr().addr() as u64, memory.device().0, "the mock's two views");
        for offset in 0..memory.len() {
            // SAFETY: inside the memory.
            assert_eq!(unsafe { memory.host().add(offset).read_volatile() }, 0);
        }
        assert_eq!(device.pinned(0).expect("a page").len(), 4096);
        for len in [usize::MAX, usize::MAX / 2] {
            let error = device.pinned(len).expect_err("more than there is").to_string();
            assert!(error.contains(&len.to_string()), "{error}");
        }
        mock::inject("cuMemHostGetDevicePointer", 0, 801);
        device.pinned(1).expect_err("not mapped");
        drop((memory, device));
        mock::assert_clean();
    });
}

#[test]
fn gpu_memory_is_written_and_read_within_its_bounds() {
    isolated("memory::gpu_memory_is_written_and_read_within_its_bounds", Level::Full, &[], || {
        let device = rig::gpu();
        let memory = device.allocate(100).expect("memory");
        memory.write(10, &[1, 2, 3]).expect("inside");
        let mut bytes = [0; 2];
        memory.read(11, &mut bytes).expect("inside");
        assert_eq!(bytes, [2, 3]);
        memory.write(98, &[0; 3]).expect_err("outside");
        memory.read(usize::MAX, &mut bytes).expect_err("outside");
        assert!(memory.device().0.is_multiple_of(65536), "{memory:?}");
        assert!(!mock::is_reachable(memory.device().0 as usize), "the GPU's, not the process's");
        for len in [usize::MAX, usize::MAX / 2] {
            let error = device.allocate(len).expect_err("more than there is").to_string();
            assert!(error.contains(&len.to_string()), "{error}");
        }
        drop((memory, device));
        mock::assert_clean();
    });
}

fn emu() -> Arc<dyn Bus> {
    let media = MemoryMedia::new(16 << 20).expect("address space");
    let config = EmuConfig::new("emu").namespace(media, 4096);
    Emu::new(EmuDomain::new("memory"), config).expect("a good drive").bus()
}

#[test]
fn an_executor_finds_and_keeps_what_was_registered() {
    isolated("memory::an_executor_finds_and_keeps_what_was_registered", Level::Full, &[], || {
        let (device, bus) = (rig::gpu(), emu());
        let memory = bus.dma().alloc(8192).expect("memory");
        let slice = DmaSlice::new(memory.clone(), 4096, 64).expect("inside");
        let clock = Arc::new(MonotonicClock::default());
        let executor = CudaExecutor::new(&device, rig::options(LaunchMode::PerBatch), clock);
        let executor = executor.expect("compiles");
        assert_eq!(executor.address(&slice.place()), None, "not registered");

        let registration = device.register_memory(&memory).expect("registered");
        let again = device.register_memory(&memory).expect("registered");
        assert!(Arc::ptr_eq(&registration, &again), "once is enough");
        let base = registration.device().0;
        assert_eq!(executor.address(&slice.place()), Some(base + 4096));
        let place = |host, device| Place { host, device, iova: Iova(0) };
        let host = memory.host().expect("an address").as_ptr();
        let end = host.addr() as u64 + 8192;
        assert_eq!(executor.address(&place(Some(end), None)), None, "past the end");
        assert_eq!(executor.address(&place(None, None)), None);
        let known = nvme_driver::DevicePtr(77);
        assert_eq!(executor.address(&place(Some(end), Some(known))), Some(77));

        drop((registration, again, memory, slice));
        assert_eq!(mock::registered(host.addr()), MAPPED, "the executor keeps it");
        drop(executor);
        assert_eq!(mock::registered(host.addr()), 0);
        drop(device);
        mock::assert_clean();
    });
}

#[test]
fn doorbells_are_registered_as_what_they_are() {
    isolated("memory::doorbells_are_registered_as_what_they_are", Level::Full, &[], || {
        let device = rig::gpu();
        for (kind, flags) in [(DoorbellKind::Memory, MAPPED), (DoorbellKind::Io, MAPPED | IO)] {
            let bus = emu();
            let host = bus.doorbells().host();
            let bells = device.register_doorbells(&bus, kind).expect("registered");
            assert_eq!(mock::registered(host.as_ptr().addr()), flags);
            assert_ne!(bells.device().0, host.as_ptr().addr() as u64, "the mock's second view");
            drop(bus);
            // The registration keeps the bus, and with it the page.
            // SAFETY: the page is mapped.
            unsafe { mmio::store_release32(host, 1) };
            drop(bells);
            assert_eq!(mock::registered(host.as_ptr().addr()), 0);
        }
        let refused = emu();
        mock::inject("cuMemHostRegister", 0, 800);
        let error = device.register_doorbells(&refused, DoorbellKind::Io).expect_err("refused");
        let text = error.to_string();
        for word in ["doorbells of emu", "800", "PeerMappingOverride=1", "CAP_SYS_ADMIN"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        drop(device);
        mock::assert_clean();
    });
}

/// Memory that reports no address in this process.
#[test]
fn imported_memory_keeps_its_address_on_the_gpu() {
    isolated("memory::imported_memory_keeps_its_address_on_the_gpu", Level::Full, &[], || {
        let (device, domain) = (rig::gpu(), EmuDomain::new("import"));
        let pinned = device.pinned(8192).expect("pinned");
        let address = pinned.device();
        let external: ExternalMemory = pinned.into_external();
        let slice = DmaSlice::whole(domain.import(external).expect("aligned")).expect("one range");
        let part = slice.slice(4096, 4096).expect("inside").place();
        assert_eq!(part.device.map(|at| at.0), Some(address.0 + 4096));
        drop((slice, domain, device));
        mock::assert_clean();
    });
}

#[test]
fn gpu_memory_that_is_mapped_has_an_address_on_the_gpu_only() {
    let test = "memory::gpu_memory_that_is_mapped_has_an_address_on_the_gpu_only";
    isolated(test, Level::Full, &[], || {
        let device = rig::gpu();
        let memory = device.allocate(8192).expect("memory");
        let address = memory.device();
        let (host, gpu, len, owner) = memory.into_external().into_parts();
        assert_eq!((host, gpu, len), (None, Some(address), 8192));
        assert_eq!(mock::count("cuMemFree"), 0);
        drop(owner);
        assert_eq!(mock::count("cuMemFree"), 1);
        drop(device);
        mock::assert_clean();
    });
}

/// Two streams, one with dedicated SMs, wait for a word and for each other.
fn words_order_streams(device: &Arc<CudaDevice>) {
    let word = device.pinned(4096).expect("a page");
    let (first, second) = (CudaStream::new(device, None), CudaStream::new(device, Some(2)));
    let (first, second) = (first.expect("a stream"), second.expect("a stream"));
    // SAFETY: the streams, of this device, and the word live until both streams are idle.
    unsafe {
        device.stream_wait(first.raw(), word.device(), 1, false).expect("waits");
        device.stream_write(first.raw(), word.device(), 2).expect("writes");
        device.stream_wait(second.raw(), word.device(), 2, false).expect("waits");
        device.stream_write(second.raw(), word.device(), 3).expect("writes");
    }
    std::thread::sleep(Duration::from_millis(20));
    assert!(!first.is_idle().expect("a stream") && !second.is_idle().expect("a stream"));
    let host = word.host().cast::<u32>();
    // SAFETY: the first word of the page, which is mapped.
    unsafe { mmio::store_release32(host, 1) };
    let is_idle = |stream: &CudaStream| stream.is_idle().expect("a stream");
    until("both streams end", || is_idle(&first) && is_idle(&second));
    // SAFETY: as above.
    assert_eq!(unsafe { mmio::load_acquire32(host) }, 3);
}

#[test]
fn streams_wait_for_words() {
    isolated("memory::streams_wait_for_words", Level::Full, &[], || {
        let device = rig::gpu();
        words_order_streams(&device);
        drop(device);
        mock::assert_clean();
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn streams_wait_for_words_on_a_gpu() {
    words_order_streams(&rig::only_gpu());
}

/// The warps' state is in GPU memory, and a restarted executor gets the same memory, zeroed.
#[test]
fn the_warps_state_is_near_the_kernel() {
    isolated("memory::the_warps_state_is_near_the_kernel", Level::Full, &[], || {
        let device = rig::gpu();
        let clock = Arc::new(MonotonicClock::default());
        let executor = CudaExecutor::new(&device, rig::options(LaunchMode::Resident), clock);
        let executor = executor.expect("compiles");
        let state = executor.alloc_state(5000).expect("two pages");
        let (address, made) = (state.address(), mock::count("cuMemAlloc"));
        assert!(state.len() >= 5000 && address.is_multiple_of(4096));
        assert!(!mock::is_reachable(address as usize), "the GPU's, not the process's");
        // SAFETY: the state's own bytes, which nothing else uses.
        let (get, put) = (
            |at| unsafe { state.host().add(at).read_volatile() },
            |at, byte| unsafe { state.host().add(at).write_volatile(byte) },
        );
        put(4999, 7);
        state.push(0..5000).expect("copied");
        put(4999, 9);
        assert_eq!(get(4999), 9);
        state.pull(4096..5000).expect("copied");
        assert_eq!(get(4999), 7);
        drop(state);
        let state = executor.alloc_state(4097).expect("the same");
        // SAFETY: as above.
        assert_eq!(unsafe { state.host().add(4999).read_volatile() }, 0);
        assert_eq!((state.address(), mock::count("cuMemAlloc")), (address, made));
        let larger = executor.alloc_state(1 << 20).expect("another one");
        assert_ne!(larger.address(), address);
        mock::lose(719);
        let lost = larger.pull(0..1).expect_err("nothing is copied any more").to_string();
        assert!(lost.contains("719"), "{lost}");
    });
}

/// Tables are in GPU memory, and an upload copies its own bytes only.
#[test]
fn tables_are_near_the_kernel() {
    isolated("memory::tables_are_near_the_kernel", Level::Full, &[], || {
        let device = rig::gpu();
        let clock = Arc::new(MonotonicClock::default());
        let executor = CudaExecutor::new(&device, rig::options(LaunchMode::Resident), clock);
        let executor = executor.expect("compiles");
        let [tables, others] = [(); 2].map(|()| executor.alloc_tables(8192).expect("two pages"));
        assert_ne!(tables.address(), others.address());
        assert!(!mock::is_reachable(tables.address() as usize), "the GPU's, not the process's");
        // SAFETY: the tables' own bytes, which nothing else uses.
        let (get, put) = (
            |at| unsafe { tables.host().add(at).read_volatile() },
            |at, byte| unsafe { tables.host().add(at).write_volatile(byte) },
        );
        put(100, 1);
        put(5000, 2);
        tables.push(0..8192).expect("copied");
        put(100, 3);
        put(5000, 4);
        tables.push(4096..8192).expect("copied");
        tables.pull(0..8192).expect("copied");
        assert_eq!([get(100), get(5000)], [1, 4]);
    });
}

/// A composed pool has no handle for other processes, and is refused with the remedy; parts of an
/// allocation are named by their offset.
#[test]
fn memory_for_another_process_is_of_one_allocation() {
    isolated("memory::memory_for_another_process_is_of_one_allocation", Level::Full, &[], || {
        let device = rig::gpu();
        let pool = VmmPool::new(1);
        let text = GpuHandle::of(&device, DevicePtr(pool.address()), 4096)
            .expect_err("refused")
            .to_string();
        assert!(text.contains("cuMemCreate") && text.contains("expandable_segments"), "{text}");
        assert_eq!(mock::count("cuIpcGetMemHandle"), 0);
        drop(pool);
        let memory = device.allocate(8192).expect("memory");
        let DevicePtr(at) = memory.device();
        let whole = GpuHandle::of(&device, memory.device(), memory.len()).expect("a handle");
        let part = GpuHandle::of(&device, DevicePtr(at + 4096), 4096).expect("a handle");
        assert_eq!((part.offset, part.bytes), (whole.offset + 4096, 4096));
        assert_eq!((&part.handle, &part.gpu), (&whole.handle, &device.report().pci));
        let text =
            GpuHandle::of(&device, memory.device(), 1 << 20).expect_err("too long").to_string();
        assert!(text.contains("1048576 bytes"), "{text}");
        drop((memory, device));
        mock::assert_clean();
    });
}

/// A word per stream, whose values grow in the order of the stream.
#[test]
fn streams_mark_their_positions() {
    isolated("memory::streams_mark_their_positions", Level::Full, &[], || {
        let device = rig::gpu();
        let pages = Arc::new(EmuDomain::new("marks").alloc(4096).expect("a page"));
        let host = pages.host().expect("memory of this process");
        // SAFETY: a new page of zeros, kept by its owner, and read as words only.
        let marks = unsafe { StreamMarks::new(&device, host, 4096, pages.clone()) }.expect("marks");
        // SAFETY: inside the page.
        let word = |at| unsafe { mmio::load_acquire32(host.cast::<u32>().add(at)) };
        let streams = [(); 2].map(|()| CudaStream::new(&device, None).expect("a stream"));
        // SAFETY: they live as long as `streams`.
        let [one, other] = [0, 1].map(|at: usize| unsafe { RawStream::new(streams[at].raw()) });
        let gate = device.pinned(4096).expect("a page");
        // SAFETY: the gate is opened before it is freed.
        unsafe { device.stream_wait(streams[0].raw(), gate.device(), 1, false) }.expect("a wait");
        assert_eq!(marks.mark(one).expect("a mark"), (0, 1));
        assert_eq!(marks.mark(other).expect("a mark"), (1, 1));
        assert_eq!(marks.mark(one).expect("a mark"), (0, 2));
        until("the stream that waits for nothing is there", || word(1) == 1);
        assert!(!is_reached(word(0), 1));
        // SAFETY: a word of the page, which the stream only reads.
        unsafe { gate.host().cast::<u32>().write_volatile(1) };
        until("the other one is there", || is_reached(word(0), 2));
        assert!(is_reached(1, u32::MAX) && !is_reached(u32::MAX, 1), "values wrap");
        drop((marks, streams, gate, pages, device));
        mock::assert_clean();
    });
}
