//! The file executor: the same operations, on files.

use std::{
    fs::{self, File, OpenOptions},
    io::{PipeWriter, Write as _, pipe},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::PathBuf,
    process::Command,
    sync::Arc,
};

use gio_kernels::{Ends, EndsClock, FileExecutor, FileTarget, Reach};
use gio_uring::{
    Affine, AffineOp, Completion, Direction, Fault, IoCtx, IoStatus, NvmeStatus, PoolDesc, Signal,
    Uring, UringOptions, Wait,
};
use nvme_driver::{Clock, DmaSlice, DmaSpace as _, Nanos, platform::buffer::Buffer};
use nvme_emu::EmuDomain;
use ripieno_testkit::{WATCHDOG_NS, is_without_io_uring, pattern, until, without_io_uring};
use tempfile::TempDir;

use crate::rig::{Stack, all_rows, round_trip};

/// Alignment of direct I/O, on all file systems: anything else is bounced.
const ALIGN: usize = 4096;

/// Files in the place of drives.
pub(crate) struct Files {
    dir: TempDir,
    count: usize,
}

impl Files {
    pub(crate) fn new(count: usize, bytes: u64) -> Self {
        // Not the temporary directory: that may be a tmpfs without direct I/O.
        let program = std::env::current_exe().expect("this program");
        let dir = tempfile::tempdir_in(program.parent().expect("its directory")).expect("made");
        let files = Self { dir, count };
        for device in 0..count {
            let file = File::create(files.path(device)).expect("a file");
            file.set_len(bytes).expect("its length");
        }
        files
    }

    fn path(&self, device: usize) -> PathBuf {
        self.dir.path().join(device.to_string())
    }

    fn targets(&self, may_write: bool) -> Vec<FileTarget> {
        let open = |device| {
            let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
            let mut options = OpenOptions::new();
            let options = options.read(true).write(may_write).custom_flags(direct);
            target(options.open(self.path(device)).expect("direct I/O"))
        };
        (0..self.count).map(open).collect()
    }

    pub(crate) fn executor(&self, stack: &Stack) -> FileExecutor {
        executor(stack, self.targets(true))
    }
}

fn target(file: impl Into<std::os::fd::OwnedFd>) -> FileTarget {
    FileTarget {
        file: Arc::new(file.into()),
        memory_align: ALIGN,
        offset_align: ALIGN,
        drive: None,
    }
}

fn executor(stack: &Stack, targets: Vec<FileTarget>) -> FileExecutor {
    let reach = reach(&stack.drives.domain);
    FileExecutor::new(targets, reach, Arc::default(), stack.drives.clock.clone())
}

fn reach(domain: &Arc<EmuDomain>) -> Reach {
    let domain = domain.clone();
    Arc::new(move |iova, bytes| domain.access().resolve(iova, bytes).ok()?.host)
}

/// All tests of this file, in a process for which it is forbidden.
#[test]
fn without_io_uring_threads_do_the_same() {
    if is_without_io_uring() {
        return;
    }
    let mut tests = Command::new(std::env::current_exe().expect("this program"));
    let done = without_io_uring(tests.arg("files::")).output().expect("it ran");
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && !said.contains(" 0 passed"), "{said}");
}

/// The name in reports says who moves the data.
#[test]
fn the_name_says_whether_io_uring_is_forbidden() {
    let files = Files::new(1, 16 << 20);
    let mut stack = Stack::new(1, 1, 8, 16 << 20, None);
    let executor = files.executor(&stack);
    let mut ring = stack.ring(Box::new(executor), UringOptions::default());
    let is_by_threads = ring.executor_name() == "file (threads: io_uring is forbidden)";
    assert_eq!(is_by_threads, is_without_io_uring(), "{}", ring.executor_name());
    ring.stop(ring.now() + WATCHDOG_NS).expect("stops");
}

#[test]
fn files_get_the_right_bytes() {
    for (devices, parts) in [(1, 1), (2, 2), (3, 1)] {
        let files = Files::new(devices, 64 << 20);
        let stack = Stack::new(devices, parts, 32, 64 << 20, None);
        let executor = files.executor(&stack);
        round_trip(stack, Box::new(executor), UringOptions::default());
    }
}

/// Objects that direct I/O cannot reach go through a buffer; what follows an object in its slot is
/// zero, whatever was there before.
#[test]
fn objects_of_any_size_and_address() {
    const OBJECT: usize = 5000;
    const SLOT: usize = 8192;
    const BLOCKS: u32 = 40;
    let files = Files::new(1, 16 << 20);
    fs::write(files.path(0), vec![0xee; 16 << 20]).expect("other bytes");
    let mut stack = Stack::new(1, 1, 8, 16 << 20, None);
    let executor = files.executor(&stack);
    let mut ring = stack.ring(Box::new(executor), UringOptions::default());
    let len = BLOCKS as usize * OBJECT;
    let memory = stack.drives.domain.alloc(len.next_multiple_of(ALIGN)).expect("memory");
    let slice = DmaSlice::whole(memory).expect("one range");
    let (iova, place) = (slice.iova(), slice.place());
    let mut memory = Buffer::new(slice).expect("reachable");
    let bytes = pattern(len, 3);
    // With the addresses of this process, and with those of devices only.
    for row_memory in [vec![place], Vec::new()] {
        let desc = PoolDesc {
            row_iova: vec![iova],
            row_memory,
            data_lba: vec![8],
            block_stride: OBJECT as u64,
            blocks: BLOCKS,
            files: BLOCKS,
            group: 16,
            object_bytes: OBJECT as u32,
            slot_bytes: SLOT as u32,
            run_bytes: 64 << 10,
            pad_read: None,
            pad_write: Some(iova),
        };
        let pool = ring.register_pool(&desc).expect("a pool");
        let entries: Vec<Affine> = (0..BLOCKS).map(|i| Affine { block: i, file: i }).collect();
        let map = ring.upload_map(&entries, 1).expect("a map");
        let op = |direction| AffineOp::new(direction, &map, &pool, 0..1);
        // Leaves other bytes in the buffers.
        let id = ring.submit(&op(Direction::Read)).expect("submitted");
        assert!(wait(&mut ring, id).is_ok());
        memory.write(0, &bytes).expect("inside");
        let id = ring.submit(&op(Direction::Write)).expect("submitted");
        assert!(wait(&mut ring, id).is_ok());
        let file = File::open(files.path(0)).expect("the file");
        for block in 0..BLOCKS as usize {
            let (mut slot, mut expected) = (vec![0; SLOT], vec![0; SLOT]);
            expected[..OBJECT].copy_from_slice(&bytes[block * OBJECT..][..OBJECT]);
            file.read_exact_at(&mut slot, (8 * 4096 + block * SLOT) as u64).expect("inside");
            assert!(slot == expected, "block {block}");
        }
        memory.zero();
        let id = ring.submit(&op(Direction::Read)).expect("submitted");
        assert!(wait(&mut ring, id).is_ok());
        let mut found = vec![0; len];
        memory.read(0, &mut found).expect("inside");
        assert!(found == bytes);
    }
    ring.stop(ring.now() + WATCHDOG_NS).expect("stops");
}

fn wait(ring: &mut Uring, id: gio_uring::IocbId) -> Completion {
    ring.wait_completion(id, ring.now() + WATCHDOG_NS).expect("done in time")
}

/// Statuses of a drive: for a read behind the end of the file, and a write to one that takes none.
#[test]
fn errors_of_the_file_are_statuses_of_their_objects() {
    let files = Files::new(1, 16 << 20);
    let mut stack = Stack::new(1, 1, 32, 16 << 20, None);
    let executor = executor(&stack, files.targets(false));
    let mut ring = stack.ring(Box::new(executor), UringOptions::default());
    let pool = stack.pool(&mut ring, 1, 32, 4096);
    // Every other file, so that nothing is merged. The data begins at LBA 8.
    let entries: Vec<Affine> = (0..16).map(|i| Affine { block: i, file: 2 * i }).collect();
    File::options().write(true).open(files.path(0)).unwrap().set_len((8 + 20) * 4096).unwrap();
    let map = ring.upload_map(&entries, 1).expect("a map");
    let id = ring.submit(&AffineOp::new(Direction::Read, &map, &pool.handle, 0..1)).unwrap();
    let done = wait(&mut ring, id);
    assert_eq!((done.objects, done.errors), (10, 6));
    let missing = IoStatus::Nvme(NvmeStatus::UNRECOVERED_READ_ERROR.with_dnr());
    let expected: Vec<_> = (10..16).map(|index| (index, missing)).collect();
    assert_eq!(map.failures().collect::<Vec<_>>(), expected);
    let map = ring.upload_map(&entries, 1).expect("a map");
    let id = ring.submit(&AffineOp::new(Direction::Write, &map, &pool.handle, 0..1)).unwrap();
    let done = wait(&mut ring, id);
    assert_eq!((done.objects, done.errors), (0, 16));
    let refused = IoStatus::Nvme(NvmeStatus::WRITE_FAULT.with_dnr());
    assert!(map.failures().all(|(_, status)| status == refused));
    assert!(ring.faulted().is_none(), "nothing of it is in the kernel");
    ring.stop(ring.now() + WATCHDOG_NS).expect("stops");
}

#[test]
fn other_bytes_in_a_file_are_found_by_their_checksums() {
    let files = Files::new(2, 16 << 20);
    let mut stack = Stack::new(2, 1, 32, 16 << 20, None);
    let executor = files.executor(&stack);
    let mut ring = stack.ring(Box::new(executor), UringOptions::default());
    let mut pool = stack.pool(&mut ring, 1, 32, 8192);
    pool.fill(5);
    let entries: Vec<Affine> = (0..32).map(|i| Affine { block: i, file: i }).collect();
    let map = ring.upload_map(&entries, 2).expect("a map");
    let sums = ring.new_checksums(&map, 1).expect("room");
    let op = AffineOp::new(Direction::Write, &map, &pool.handle, 0..1);
    let id = ring.submit(&AffineOp { checksums: Some(&sums), ..op }).expect("submitted");
    assert!(wait(&mut ring, id).is_ok());
    // File 6 is the fourth of device 0, which merges them into one command.
    let at = 8 * 4096 + 3 * 8192 + 8191;
    File::options().write(true).open(files.path(0)).unwrap().write_all_at(&[1], at).unwrap();
    let expected = sums.row(0);
    let map = ring.upload_map(&entries, 2).expect("a map");
    let value = |_, entry: u32| expected[entry as usize];
    let sums = ring.upload_checksums(&map, 1, value).expect("room");
    let op = AffineOp::new(Direction::Read, &map, &pool.handle, 0..1);
    let id = ring.submit(&AffineOp { checksums: Some(&sums), ..op }).expect("submitted");
    let done = wait(&mut ring, id);
    assert_eq!((done.objects, done.errors), (31, 1));
    assert_eq!(map.failures().collect::<Vec<_>>(), [(6, IoStatus::Checksum)]);
    ring.stop(ring.now() + WATCHDOG_NS).expect("stops");
}

/// Returns a file whose reads wait until something is written to the pipe.
fn hanging() -> (FileTarget, PipeWriter) {
    let (reader, writer) = pipe().expect("a pipe");
    (target(reader), writer)
}

/// The read times out, the executor proves that it ended, and it can be started again.
#[test]
fn a_file_that_hangs_is_given_up() {
    let (file, mut writer) = hanging();
    let mut stack = Stack::new(1, 1, 16, 16 << 20, None);
    let executor = executor(&stack, vec![file]);
    let command_timeout = Nanos::from_millis(200);
    let options = UringOptions { command_timeout, ..UringOptions::default() };
    let mut ring = stack.ring(Box::new(executor), options);
    let pool = stack.pool(&mut ring, 2, 64, 4096);
    let map: Vec<Affine> = (0..32).map(|i| Affine { block: i, file: 2 * i }).collect();
    if is_without_io_uring() {
        // Threads that read it cannot be told to stop: what they write to stays theirs.
        assert_eq!(all_rows(&mut ring, &pool, Direction::Read, &map).0, 0);
        assert_eq!(ring.faulted().expect("it failed").fault, Fault::Timeout);
        let stopped = ring.stop(ring.now() + Nanos::from_millis(200));
        let error = stopped.expect_err("there are reads without a result").to_string();
        assert!(error.contains("did not stop in time"), "{error}");
        writer.write_all(&vec![7; 32 * 4096]).expect("they read it");
        ring.stop(ring.now() + WATCHDOG_NS).expect("they have ended");
        return;
    }
    for _ in 0..2 {
        assert_eq!(all_rows(&mut ring, &pool, Direction::Read, &map).0, 0);
        assert_eq!(ring.faulted().expect("it failed").fault, Fault::Timeout);
        let proof = ring.stop(ring.now() + WATCHDOG_NS).expect("reads of a pipe can be cancelled");
        stack.controllers[0].recover(&proof).expect("recovers");
        let grants = stack.grants();
        ring.restart(&grants).expect("starts again");
    }
    ring.stop(ring.now() + WATCHDOG_NS).expect("stops");
}

/// Its thread may have transfers in the kernel: nothing proves that they have ended, ever.
#[test]
fn a_thread_that_panics_is_no_proof() {
    let files = Files::new(1, 16 << 20);
    let mut stack = Stack::new(1, 1, 16, 16 << 20, None);
    let clock = stack.drives.clock.clone();
    let reach: Reach = Arc::new(|_, _| panic!("for this test"));
    let executor = FileExecutor::new(files.targets(true), reach, Arc::default(), clock);
    let mut ring = stack.ring(Box::new(executor), UringOptions::default());
    let context = IoCtx { iova: 0, lba: 0, bytes: 4096, device: 0 };
    ring.submit_explicit(Direction::Read, false, &[context]).expect("submitted");
    until("the thread ends", || ring.poll().is_err());
    for _ in 0..2 {
        let error = ring.stop(ring.now() + WATCHDOG_NS).expect_err("no proof").to_string();
        assert!(error.contains("panicked"), "{error}");
    }
}

#[test]
fn an_operation_waits_for_its_event_and_signals_the_next() {
    let files = Files::new(1, 16 << 20);
    let mut stack = Stack::new(1, 1, 16, 16 << 20, None);
    let executor = files.executor(&stack);
    let mut ring = stack.ring(Box::new(executor), UringOptions::default());
    let pool = stack.pool(&mut ring, 1, 8, 4096);
    let map = ring.upload_map(&[Affine { block: 0, file: 0 }], 1).expect("a map");
    let (event, other) = (ring.event().expect("an event"), ring.event().expect("an event"));
    let first = Wait { event: event.clone(), value: 3 };
    let signal = Signal { event: other.clone(), value: 1 };
    let second = Wait { event: other.clone(), value: 1 };
    let op = AffineOp::new(Direction::Read, &map, &pool.handle, 0..1);
    let one = AffineOp { wait: Some(&first), signal: Some(&signal), ..op.clone() };
    let one = ring.submit(&one).expect("submitted");
    let two = ring.submit(&AffineOp { wait: Some(&second), ..op.clone() }).expect("submitted");
    let soon = ring.now() + Nanos::from_millis(20);
    ring.wait_completion(one, soon).expect_err("its event is not reached");
    event.set(3);
    assert!(wait(&mut ring, two).is_ok() && wait(&mut ring, one).is_ok());
    // One that never starts is cancelled.
    let never = Wait { event, value: 4 };
    let id = ring.submit(&AffineOp { wait: Some(&never), ..op }).expect("submitted");
    ring.stop(ring.now() + WATCHDOG_NS).expect("stops");
    let status = wait(&mut ring, id).error.expect("an error").0;
    assert_eq!(status, IoStatus::Cancelled);
}

/// Without a poll: the pause ends with the operation, though it was asked for after that.
#[test]
fn a_pause_ends_when_an_operation_has_ended() {
    let files = Files::new(1, 16 << 20);
    let mut stack = Stack::new(1, 1, 16, 16 << 20, None);
    let ends = Arc::new(Ends::default());
    let clock = EndsClock { clock: stack.drives.clock.clone(), ends: ends.clone() };
    let reach = reach(&stack.drives.domain);
    let executor = FileExecutor::new(files.targets(true), reach, ends, stack.drives.clock.clone());
    let mut ring = stack.ring(Box::new(executor), UringOptions::default());
    let pool = stack.pool(&mut ring, 1, 8, 4096);
    let map = ring.upload_map(&[Affine { block: 0, file: 0 }], 1).expect("a map");
    let seen = clock.happened();
    let op = AffineOp::new(Direction::Read, &map, &pool.handle, 0..1);
    let id = ring.submit(&op).expect("submitted");
    until("the operation ends", || {
        clock.pause_since(seen, u32::MAX, clock.now() + WATCHDOG_NS);
        clock.happened() != seen
    });
    let found = ring.try_completion(id).expect("it was submitted");
    assert!(found.is_some_and(|done| done.is_ok()), "it was published before the pause ended");
    ring.stop(ring.now() + WATCHDOG_NS).expect("stops");
}
