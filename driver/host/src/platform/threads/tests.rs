#![allow(unsafe_code, reason = "gives threads addresses to read to")]

use std::{
    io::{PipeReader, PipeWriter, Read as _, Write as _, pipe},
    os::fd::OwnedFd,
    sync::Arc,
};

use io_uring::types::Fd;

use super::*;

const READS: u64 = 16;
/// No descriptor of an entry is used.
const NO_FILE: Fd = Fd(-1);

/// Threads of which each one waits to read a byte.
fn reading(into: &mut [u8]) -> (EntryThreads, PipeWriter, Arc<OwnedFd>) {
    let (reader, writer): (PipeReader, PipeWriter) = pipe().unwrap();
    let reader = Arc::new(OwnedFd::from(reader));
    let mut threads = EntryThreads::new(|| {}).unwrap();
    for (at, byte) in into.iter_mut().enumerate() {
        let entry = opcode::Read::new(NO_FILE, &raw mut *byte, 1).build().user_data(at as u64);
        // SAFETY: the test keeps the byte until nobody has the pipe any more.
        unsafe { threads.push(entry.clone(), &reader) };
    }
    threads.submit();
    (threads, writer, reader)
}

/// Returns the result of a write of `bytes` at offset 0 with these flags.
fn write(file: impl Into<OwnedFd>, bytes: &[u8], flags: i32) -> i32 {
    let (file, mut results) = (Arc::new(file.into()), Vec::new());
    let mut threads = EntryThreads::new(|| {}).unwrap();
    let entry = opcode::Write::new(NO_FILE, bytes.as_ptr(), bytes.len() as u32);
    // SAFETY: the bytes live until the result is there.
    unsafe { threads.push(entry.rw_flags(flags).build(), &file) };
    threads.submit();
    while results.is_empty() {
        threads.take(&mut results);
        thread::yield_now();
    }
    results[0].1
}

#[test]
fn a_durable_write_is_flushed_where_the_kernel_has_no_flag_for_it() {
    // No kernel knows this flag, and all answer as an old one does to RWF_DSYNC.
    const UNKNOWN: i32 = 1 << 30;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    assert_eq!(write(file.reopen().unwrap(), b"durable", UNKNOWN), 7);
    let mut found = String::new();
    file.read_to_string(&mut found).unwrap();
    assert_eq!(found, "durable");
    // Bytes that cannot be flushed are not durable.
    let null = || std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
    assert_eq!(write(null(), b"durable", 0), 7);
    assert_eq!(write(null(), b"durable", UNKNOWN), -libc::EINVAL);
    // The error is that of the write, if it fails as well.
    assert_eq!(write(std::fs::File::open(file.path()).unwrap(), b"x", UNKNOWN), -libc::EBADF);
}

/// After a panic its memory is gone.
#[test]
fn what_was_not_begun_is_not_begun_after_the_end() {
    let mut into = [0; READS as usize];
    let (mut threads, mut writer, reader) = reading(&mut into);
    // Not a pipe, which cannot be written to at an offset.
    let late = tempfile::NamedTempFile::new().unwrap();
    let file = Arc::new(OwnedFd::from(late.reopen().unwrap()));
    let byte = [7u8];
    let entry = opcode::Write::new(NO_FILE, byte.as_ptr(), 1).build();
    // SAFETY: the byte lives to the end.
    unsafe { threads.push(entry.clone(), &file) };
    threads.submit();
    drop(threads);
    writer.write_all(&[7; READS as usize]).unwrap();
    drop(writer);
    while Arc::strong_count(&reader) > 1 {
        thread::yield_now();
    }
    while Arc::strong_count(&file) > 1 {
        thread::yield_now();
    }
    assert_eq!(late.as_file().metadata().unwrap().len(), 0);
}

#[test]
fn only_what_no_thread_has_begun_is_given_up() {
    let mut into = [0; READS as usize];
    let (mut threads, mut writer, reader) = reading(&mut into);
    let mut one_more = 0;
    let entry = opcode::Read::new(NO_FILE, &raw mut one_more, 1).build().user_data(READS);
    // SAFETY: the byte lives to the end.
    unsafe { threads.push(entry.clone(), &reader) };
    threads.submit();
    threads.cancel(READS);
    let mut results = Vec::new();
    threads.take(&mut results);
    assert_eq!(results, [(READS, -libc::ECANCELED)]);
    writer.write_all(&[7; READS as usize]).unwrap();
    while results.len() as u64 <= READS {
        threads.take(&mut results);
        thread::yield_now();
    }
    results.sort_unstable();
    let read = (0..READS).map(|at| (at, 1));
    assert!(results.into_iter().eq(read.chain([(READS, -libc::ECANCELED)])));
    assert_eq!((into, one_more), ([7; READS as usize], 0));
}
