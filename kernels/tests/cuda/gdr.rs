//! GPU memory with an address in this process: our own, and an engine's.
#![allow(unsafe_code, reason = "the driver API is reached by address, over memory of the tests")]

use std::{
    ptr::NonNull,
    sync::{Arc, Mutex},
};

use cuda_mock::{self as mock, Level, each, folder_without_gdrcopy, isolated};
use gio_kernels::cuda::{CudaDevice, DeviceMemory, Gdr, GdrError, LaunchMode, MappingKind};
use gio_uring::IoExecutor;
use nvme_driver::{DevicePtr, DmaSlice, DmaSpace, ExternalMemory, platform::buffer::Buffer};
use nvme_emu::EmuDomain;
use ripieno_testkit::WATCHDOG_NS;

use crate::{
    rig::{self, bare, set_stop},
    vmm::{CHUNK, VmmPool},
};

const PAGE: usize = 64 << 10;

/// An engine's pool; records when it is freed, and asserts that none of it is mapped then.
struct Engine {
    _pool: DeviceMemory,
    freed: Arc<Mutex<bool>>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        assert_eq!(pinned(), 0, "freed below a mapping");
        *self.freed.lock().expect("nobody panicked") = true;
    }
}

/// Returns the number of active pins.
fn pinned() -> i64 {
    mock::count("gdr_pin_buffer") - mock::count("gdr_unpin_buffer")
}

/// Wraps `len` bytes at `offset` of an engine's pool, as an engine passes them to a store.
fn lend(pool: DeviceMemory, offset: u64, len: usize) -> (ExternalMemory, Arc<Mutex<bool>>) {
    let freed = Arc::new(Mutex::new(false));
    let at = DevicePtr(pool.device().0 + offset);
    let owner = Arc::new(Engine { _pool: pool, freed: freed.clone() });
    // SAFETY: the owner keeps the pool.
    (unsafe { ExternalMemory::new(None, Some(at), len, owner) }, freed)
}

#[test]
fn a_mapping_is_the_same_memory() {
    isolated("gdr::a_mapping_is_the_same_memory", Level::Full, &[], || {
        let device = rig::gpu();
        let gdr = Gdr::open().expect("GDRCopy");
        assert_eq!(gdr.to_string(), "GDRCopy 2.5 with driver 2.4");
        let memory = device.allocate(3 * PAGE - 4096).expect("memory");
        memory.write(0, &[7; 16]).expect("inside");
        let mapping = gdr.map(&device, memory.into_external()).expect("mapped");
        assert_eq!((mapping.len(), mapping.kind()), (3 * PAGE - 4096, MappingKind::WriteCombining));
        let (host, address) = (mapping.host(), mapping.device());
        assert!(!mock::is_reachable(address.0 as usize), "only through the mapping");
        // SAFETY: inside the mapping.
        assert_eq!(unsafe { host.cast::<u64>().read_volatile() }, 0x0707_0707_0707_0707);

        // A DMA space gets both addresses, and a device's writes go to GPU memory.
        let domain = EmuDomain::new("gdr");
        let space = domain.import(mapping.into_external()).expect("page aligned");
        let slice = DmaSlice::whole(space).expect("one range");
        assert_eq!(slice.device(), Some(address));
        let mut buffer = Buffer::new(slice.clone()).expect("reachable");
        buffer.write(2 * PAGE, &[9, 8, 7]).expect("inside");
        let mut bytes = [0u8; 3];
        // SAFETY: inside the mapping, which the slice keeps.
        unsafe { host.add(2 * PAGE).copy_to_nonoverlapping(NonNull::from(&mut bytes).cast(), 3) };
        assert_eq!(bytes, [9, 8, 7]);

        // The order is: mapping, pin, memory.
        assert_eq!((mock::count("gdr_unmap"), mock::count("cuMemFree")), (0, 0));
        drop((slice, buffer, gdr));
        let undone = ["gdr_unmap", "gdr_unpin_buffer", "cuMemFree", "gdr_close"].map(mock::count);
        assert_eq!(undone, [1, 1, 1, 1]);
        assert!(!mock::is_reachable(host.as_ptr().addr()));
        drop((domain, device));
        mock::assert_clean();
    });
}

/// Memory in the middle of another allocation: the enclosing GPU pages are pinned, the mapping has
/// the exact range, and the memory is returned once unmapped.
#[test]
fn memory_of_an_engine_is_unmapped_before_it_goes_back() {
    let test = "gdr::memory_of_an_engine_is_unmapped_before_it_goes_back";
    isolated(test, Level::Full, &[], || {
        let device = rig::gpu();
        let gdr = Gdr::open().expect("GDRCopy");
        let whole = device.allocate(4 * PAGE).expect("memory");
        whole.write(PAGE + 8192, &[5; 8]).expect("inside");
        let (engine, freed) = lend(whole, PAGE as u64 + 8192, PAGE);
        let mapping = gdr.map(&device, engine).expect("mapped");
        assert!(mapping.host().as_ptr().addr().is_multiple_of(4096));
        // SAFETY: inside the mapping.
        assert_eq!(unsafe { mapping.host().read_volatile() }, 5);
        let external = mapping.into_external();
        assert!(!*freed.lock().expect("nobody panicked"));
        // Immediately, also while an executor is started: nothing here waits for kernels.
        let (mut executor, page, args) = bare(&device, LaunchMode::Resident);
        executor.start(args, &[]).expect("starts");
        drop(external);
        assert!(*freed.lock().expect("nobody panicked"));
        assert_eq!((pinned(), mock::count("cuMemFree")), (0, 0));
        set_stop(&page);
        executor.stop(WATCHDOG_NS).expect("stops");
        drop((executor, page, gdr, device));
        mock::assert_clean();
    });
}

#[test]
fn without_the_library() {
    let folder = folder_without_gdrcopy(Level::Full);
    let bare = [("LD_LIBRARY_PATH", folder.to_str().expect("text"))];
    isolated("gdr::without_the_library", Level::Full, &bare, || {
        drop(rig::gpu());
        // SAFETY: opens the machine's own library, if present.
        if unsafe { libloading::Library::new("libgdrapi.so.2") }.is_ok() {
            return; // the loader finds it in any case
        }
        let error = Gdr::open().expect_err("no library");
        assert!(matches!(error, GdrError::NoLibrary { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("install libgdrapi") && text.contains("staged"), "{text}");
    });
}

#[test]
fn without_the_kernel_module() {
    let off = [("MOCK_GDR", "off")];
    isolated("gdr::without_the_kernel_module", Level::Full, &off, || {
        let error = Gdr::open().expect_err("no driver");
        let text = error.to_string();
        assert!(text.contains("/dev/gdrdrv") && text.contains("staged"), "{text}");
        let there = std::path::Path::new("/dev/gdrdrv").exists();
        assert!(there || text.contains("modprobe gdrdrv"), "{text}");
    });
}

/// If a mapping fails, no pin remains, and the memory's owner is dropped.
#[test]
fn what_is_refused_is_not_kept() {
    let calls = ["cuPointerSetAttribute", "gdr_pin_buffer", "gdr_map", "gdr_get_info_v2"];
    let words = ["cuPointerSetAttribute", "BAR1", "mapping", "mapping"];
    let cases = [[].as_slice(); 4];
    each("gdr::what_is_refused_is_not_kept", Level::Full, &cases, |case| {
        let device = rig::gpu();
        let gdr = Gdr::open().expect("GDRCopy");
        let memory = device.allocate(PAGE).expect("memory");
        mock::inject(calls[case], 0, 12);
        let text = gdr.map(&device, memory.into_external()).expect_err("refused").to_string();
        assert!(text.contains(words[case]), "{text}");
        assert!(case == 0 || text.contains("Cannot allocate memory"), "ENOMEM: {text}");
        assert_eq!(mock::count("cuMemFree"), 1);
        drop((gdr, device));
        mock::assert_clean();
    });
}

#[test]
fn memory_that_other_devices_cannot_reach() {
    let incapable = [("MOCK_CUDA_NO_RDMA", "1"), ("MOCK_CUDA_INJECT", "gdr_pin_buffer:0:22")];
    isolated("gdr::memory_that_other_devices_cannot_reach", Level::Full, &incapable, || {
        let device = rig::gpu();
        let gdr = Gdr::open().expect("GDRCopy");
        let memory = device.allocate(PAGE).expect("memory");
        let refused = gdr.map(&device, memory.into_external());
        let text = refused.expect_err("refused").to_string();
        assert!(text.contains("gpuDirectRDMACapable"), "{text}");
    });
}

/// A pool of several allocations, like PyTorch's expandable segments. One of them is mapped for
/// drives, although SYNC_MEMOPS cannot be set for it; two at once are rejected with the reason.
/// Runs on a GPU or over the mock.
fn pool_of_allocations(device: &Arc<CudaDevice>, gdr: &Gdr) {
    let pool = Arc::new(VmmPool::new(2));
    let part = |allocations: usize| {
        let (at, len) = (DevicePtr(pool.address()), allocations * CHUNK);
        // SAFETY: the owner keeps the pool.
        unsafe { ExternalMemory::new(None, Some(at), len, pool.clone()) }
    };
    let mapping = gdr.map(device, part(1)).expect("one allocation");
    // SAFETY: inside the mapping.
    let word = unsafe { mapping.host().add(CHUNK - 8).cast::<u64>() };
    // SAFETY: as above.
    unsafe { word.write_volatile(7) };
    // SAFETY: as above.
    assert_eq!(unsafe { word.read_volatile() }, 7);
    let text = gdr.map(device, part(2)).expect_err("two allocations").to_string();
    assert!(text.contains("first allocation is 2097152 bytes"), "{text}");
    assert!(text.contains("expandable segments"), "{text}");
}

#[test]
fn a_pool_of_allocations() {
    isolated("gdr::a_pool_of_allocations", Level::Full, &[], || {
        let device = rig::gpu();
        let gdr = Gdr::open().expect("GDRCopy");
        pool_of_allocations(&device, &gdr);
        // Only for the first mapping.
        assert_eq!(mock::count("cuCtxSetFlags"), 1);
        drop((gdr, device));
        mock::assert_clean();
    });
}

/// Without GDRCopy it only reports why.
#[test]
#[ignore = "needs an NVIDIA GPU"]
#[allow(clippy::print_stdout, reason = "what the machine has")]
fn a_pool_of_allocations_on_a_gpu() {
    let device = rig::only_gpu();
    match Gdr::open() {
        Ok(gdr) => pool_of_allocations(&device, &gdr),
        Err(error) => println!("{error}"),
    }
}

/// A GPU that is coherent with the host maps its memory over PCIe, or not at all.
#[test]
fn on_a_coherent_gpu_memory_is_mapped_over_pcie() {
    const COHERENT: (&str, &str) = ("MOCK_CUDA_ATTRIBUTE", "100:1");
    let test = "gdr::on_a_coherent_gpu_memory_is_mapped_over_pcie";
    let cases: [&[(&str, &str)]; 3] =
        [&[COHERENT, ("MOCK_GDR", "cached")], &[COHERENT, ("MOCK_GDR", "stubborn")], &[]];
    each(test, Level::Full, &cases, |case| {
        let device = rig::gpu();
        assert_eq!(device.report().is_coherent, case != 2);
        let gdr = Gdr::open().expect("GDRCopy");
        let memory = device.allocate(PAGE).expect("memory").into_external();
        match gdr.map(&device, memory) {
            Ok(mapping) => assert_eq!(mapping.kind(), MappingKind::WriteCombining, "case {case}"),
            Err(error) => {
                assert_eq!(case, 1, "{error}");
                assert!(error.to_string().contains("is not over PCIe"), "{error}");
            }
        }
        assert_eq!(mock::count("gdr_pin_buffer_v2"), i64::from(case != 2));
        drop((gdr, device));
        mock::assert_clean();
    });
}

#[test]
fn on_a_coherent_gpu_an_old_gdrcopy_is_refused() {
    let test = "gdr::on_a_coherent_gpu_an_old_gdrcopy_is_refused";
    isolated(test, Level::Twelve, &[("MOCK_CUDA_ATTRIBUTE", "100:1")], || {
        let device = rig::gpu();
        let memory = device.allocate(PAGE).expect("memory").into_external();
        let gdr = Gdr::open().expect("GDRCopy");
        let error = gdr.map(&device, memory).expect_err("not over PCIe").to_string();
        assert!(error.contains("gdr_pin_buffer_v2") && error.contains("staged path"), "{error}");
        assert_eq!(mock::count("gdr_pin_buffer"), 0);
    });
}

/// Memory that is still mapped is never freed.
#[test]
fn a_mapping_that_cannot_be_undone_leaks() {
    let calls = ["gdr_unmap", "gdr_unpin_buffer"];
    let cases = [[].as_slice(); 2];
    each("gdr::a_mapping_that_cannot_be_undone_leaks", Level::Full, &cases, |case| {
        let device = rig::gpu();
        let gdr = Gdr::open().expect("GDRCopy");
        let memory = device.allocate(PAGE).expect("memory").into_external();
        let mapping = gdr.map(&device, memory).expect("mapped");
        mock::inject(calls[case], 0, 22);
        drop(mapping);
        assert_eq!(mock::count("cuMemFree"), 0);
        assert_eq!(mock::count("freed while pinned"), 0);
    });
}

/// With the machine's driver. Without GDRCopy it only reports why.
#[test]
#[ignore = "needs an NVIDIA GPU"]
#[allow(clippy::print_stdout, reason = "what the machine has")]
fn a_mapping_is_the_same_memory_on_a_gpu() {
    let device = rig::only_gpu();
    let memory = device.allocate(PAGE).expect("memory");
    memory.write(4096, &[7; 16]).expect("inside");
    // SAFETY: `memory` is kept until the end.
    let same = unsafe { ExternalMemory::new(None, Some(memory.device()), PAGE, Arc::new(())) };
    let mapping = match Gdr::open() {
        Ok(gdr) => gdr.map(&device, same).expect("mapped"),
        Err(error) => return println!("{error}"),
    };
    println!("{mapping:?}");
    // SAFETY: inside the mapping.
    let word = unsafe { mapping.host().add(4096).cast::<u64>() };
    // SAFETY: as above.
    assert_eq!(unsafe { word.read_volatile() }, 0x0707_0707_0707_0707);
    // SAFETY: as above.
    unsafe { word.write_volatile(0x0505_0505_0505_0505) };
    // Reading through the mapping flushes earlier writes.
    // SAFETY: as above.
    assert_eq!(unsafe { word.read_volatile() }, 0x0505_0505_0505_0505);
    let mut bytes = [0; 8];
    memory.read(4096, &mut bytes).expect("inside");
    assert_eq!(bytes, [5; 8]);
}
