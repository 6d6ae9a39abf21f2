//! GPU memory and events of two processes.
#![allow(unsafe_code, reason = "the driver API is reached by address, over memory of the tests")]

use std::{
    process::{Child, Command},
    time::{Duration, Instant},
};

use cuda_mock::{self as mock, Level, isolated};
use gio_kernels::cuda::{
    CudaStream, Gdr, IpcEventHandle, IpcMemoryHandle, LaunchMode, SharedEvent,
};
use gio_uring::{IoExecutor, RawStream};
use nvme_driver::{Nanos, platform::mmio};

use crate::rig::{self, bare, set_stop};

/// Set in the second process.
const HANDLES: &str = "GIO_CUDA_HANDLES";

fn raw(stream: &CudaStream) -> RawStream {
    // SAFETY: every use is before the stream is dropped.
    unsafe { RawStream::new(stream.raw()) }
}

fn soon(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The other process, in which this test runs once more.
fn second(test: &str, handles: &[u8]) -> Child {
    let text: Vec<String> = handles.iter().map(u8::to_string).collect();
    Command::new(std::env::current_exe().expect("a program knows itself"))
        .args(["--exact", test, "--nocapture"])
        .env(HANDLES, text.join(","))
        .spawn()
        .expect("it starts")
}

fn handles() -> Option<Vec<u8>> {
    let text = std::env::var(HANDLES).ok()?;
    Some(text.split(',').map(|byte| byte.parse().expect("a byte")).collect())
}

/// Opens what the first process made, waits for its event, and answers in its memory.
fn answer(all: &[u8]) {
    let device = rig::gpu();
    let (memory, event) = all.split_at(IpcMemoryHandle::BYTES);
    let memory = IpcMemoryHandle::from_bytes(memory.try_into().expect("the length"));
    let event = IpcEventHandle::from_bytes(event.try_into().expect("the length"));
    // SAFETY: the first process waits for this one to end.
    let opened = unsafe { device.open_memory(&memory) }.expect("opened");
    // SAFETY: as above.
    let again = unsafe { device.open_memory(&memory) }.expect("opened");
    assert_eq!((opened.device(), opened.len()), (again.device(), 5000));
    drop(again);
    // 4 GiB more than were exported.
    let mut more = memory.to_bytes();
    more[IpcMemoryHandle::BYTES - 5] = 1;
    // SAFETY: as above.
    let error = unsafe { device.open_memory(&IpcMemoryHandle::from_bytes(&more)) };
    assert!(error.expect_err("too long").to_string().contains("bytes, not"));
    // SAFETY: as above.
    let event = unsafe { device.open_event(&event) }.expect("opened");
    assert!(!event.is_reached().expect("an event"));
    let stream = CudaStream::new(&device, None).expect("a stream");
    let word = device.pinned(4096).expect("a page");
    // SAFETY: stream, event and word live until the stream is idle.
    unsafe {
        event.make_wait(raw(&stream)).expect("waits");
        device.stream_write(stream.raw(), word.device(), 1).expect("writes");
    }
    assert!(!stream.is_idle().expect("a stream"));
    // The first one goes on when it reads this.
    opened.write(100, b"waiting").expect("inside");
    soon("the event of the other process", || event.is_reached().expect("an event"));
    soon("what is behind it", || stream.is_idle().expect("a stream"));
    // SAFETY: the first word of the page.
    assert_eq!(unsafe { mmio::load_acquire32(word.host().cast()) }, 1);
    let mut bytes = [0; 5];
    opened.read(0, &mut bytes).expect("inside");
    assert_eq!(&bytes, b"first");
    // What was opened can be mapped, too; and it is closed after a kernel ended.
    let mapping = Gdr::open().expect("GDRCopy").map(opened).expect("mapped");
    // SAFETY: inside the mapping.
    unsafe { mapping.host().add(4999).write_volatile(77) };
    let (mut executor, page, args) = bare(&device, LaunchMode::Resident);
    executor.start(args).expect("starts");
    drop(mapping);
    let closed = mock::count("cuIpcCloseMemHandle");
    set_stop(&page);
    executor.stop(Nanos::from_millis(10_000)).expect("stops");
    assert_eq!((closed, mock::count("cuIpcCloseMemHandle")), (2, 3), "after the kernel ended");
    drop((executor, page, event, stream, word, device));
    mock::assert_clean();
}

#[test]
fn two_processes_share_memory_and_an_event() {
    let test = "ipc::two_processes_share_memory_and_an_event";
    isolated(test, Level::Full, &[], || {
        if let Some(all) = handles() {
            return answer(&all);
        }
        let device = rig::gpu();
        let memory = device.allocate(5000).expect("memory");
        memory.write(0, b"first").expect("inside");
        let event = SharedEvent::new(&device).expect("an event");
        let stream = CudaStream::new(&device, None).expect("a stream");
        let word = device.pinned(4096).expect("a page");
        // SAFETY: stream, event and word live until the stream is idle.
        unsafe {
            device.stream_wait(stream.raw(), word.device(), 1, false).expect("waits");
            event.record(raw(&stream)).expect("recorded");
        }
        let mut all = memory.export().expect("a handle").to_bytes().to_vec();
        all.extend(event.export().expect("a handle").to_bytes());
        let mut child = second(test, &all);
        let mut bytes = [0; 7];
        soon("the other process's word", || {
            memory.read(100, &mut bytes).expect("inside");
            &bytes == b"waiting"
        });
        // SAFETY: the first word of the page.
        unsafe { mmio::store_release32(word.host().cast(), 1) };
        assert!(child.wait().expect("it ends").success());
        let mut last = [0];
        memory.read(4999, &mut last).expect("inside");
        assert_eq!(last, [77], "through a mapping in the other process");
        soon("the stream", || stream.is_idle().expect("a stream"));
        drop((memory, event, stream, word, device));
        mock::assert_clean();
    });
}

#[test]
fn handles_that_are_none_are_refused() {
    isolated("ipc::handles_that_are_none_are_refused", Level::Full, &[], || {
        let device = rig::gpu();
        let memory = device.allocate(5000).expect("memory");
        let own = memory.export().expect("a handle");
        assert_eq!(IpcMemoryHandle::from_bytes(&own.to_bytes()), own);
        let nothing = IpcMemoryHandle::from_bytes(&[0; IpcMemoryHandle::BYTES]);
        for handle in [own, nothing] {
            // SAFETY: nothing is opened.
            let error = unsafe { device.open_memory(&handle) }.expect_err("not another process's");
            assert!(error.to_string().contains("cuIpcOpenMemHandle"), "{error}");
        }
        let event = IpcEventHandle::from_bytes(&[1; IpcEventHandle::BYTES]);
        // SAFETY: as above.
        unsafe { device.open_event(&event) }.expect_err("no event");
        mock::inject("cuIpcGetMemHandle", 0, 801);
        memory.export().expect_err("no IPC");
        drop((memory, device));
        mock::assert_clean();
    });
}
