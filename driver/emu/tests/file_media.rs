//! Kernel requests of a file medium. Its operations go through io_uring, which is invisible to
//! system call traces; the kernel lists the entries waiting in a ring in the `fdinfo` of its
//! descriptor.

use std::{fs, io::Write as _, path::Path};

use nvme_driver::{DmaSpace as _, Iova, Nanos};
use nvme_emu::{
    DataFault, EmuDomain, FileMedia, FileOptions, Media, MediaDone, MediaKind, MediaOp, SgList,
};

const BYTES: u64 = 1 << 20;
const BLOCK: usize = 4096;
/// `RWF_DSYNC` of a write and `IORING_FSYNC_DATASYNC` of an fsync, from `include/uapi/linux/fs.h`
/// and `io_uring.h`.
const DSYNC: u32 = 2;
const DATASYNC: u32 = 1;

fn open(path: &Path) -> FileMedia {
    FileMedia::open(path, BYTES, FileOptions { direct: false, ..FileOptions::default() }).unwrap()
}

/// Returns opcode and flags of an entry waiting in a ring of this process.
fn waiting() -> Option<(String, u32)> {
    let entries = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let rings = entries.filter(|entry| {
        fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().contains("[io_uring]"))
    });
    let found = rings.flat_map(|ring| {
        let path = Path::new("/proc/self/fdinfo").join(ring.file_name());
        let text = fs::read_to_string(path).unwrap_or_default();
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.into_iter().filter(|line| line.contains("opcode:"))
    });
    let found: Vec<String> = found.collect();
    assert!(found.len() <= 1, "{found:?}");
    let field = |name: &str| {
        let (_, rest) = found.first()?.split_once(name)?;
        Some(rest.split([',', ' ']).next()?.to_owned())
    };
    let flags = field("rw_flags:0x")?;
    Some((field("opcode:")?, u32::from_str_radix(&flags, 16).unwrap()))
}

/// Starts an operation on memory in these parts, inspects its entry, and completes it.
fn asked(media: &mut FileMedia, kind: MediaKind, parts: &[Iova], domain: &EmuDomain) -> String {
    let mut sg_list = SgList::new();
    parts.iter().for_each(|part| domain.access().push(&mut sg_list, *part, BLOCK).unwrap());
    let (offset, len) = (0, (parts.len() * BLOCK) as u64);
    let fault = DataFault::None;
    let op = MediaOp { token: 1, kind, offset, len, sg_list, placement: 0, fault };
    assert!(media.submit(op, Nanos(0)).is_none());
    let found = waiting();
    let mut done: Vec<MediaDone> = Vec::new();
    while done.is_empty() {
        media.poll(Nanos(0), &mut done);
        std::thread::yield_now();
    }
    assert!(done[0].result.is_ok(), "{done:?}");
    found.map_or(String::new(), |(opcode, flags)| format!("{opcode} {flags}"))
}

#[test]
fn forced_writes_are_synchronous_and_a_flush_is_an_fdatasync() {
    let dir = tempfile::tempdir().unwrap();
    let mut media = open(&dir.path().join("medium"));
    let domain = EmuDomain::new("test");
    let memory = domain.alloc(4 * BLOCK).unwrap();
    let first = memory.segments()[0].iova;
    let (one, two) = ([first], [first, first.offset(2 * BLOCK as u64)]);
    let mut ask = |kind, parts: &[Iova]| asked(&mut media, kind, parts, &domain);
    if ask(MediaKind::Read, &one).is_empty() {
        let why = "this kernel does not list what waits in a ring";
        let test = "forced_writes_are_synchronous_and_a_flush_is_an_fdatasync";
        writeln!(std::io::stdout(), "SKIPPED {test}: {why}").unwrap();
        return;
    }
    for (parts, write) in [(&one[..], "WRITE"), (&two, "WRITEV")] {
        assert_eq!(ask(MediaKind::Write { fua: true }, parts), format!("{write} {DSYNC}"));
        assert_eq!(ask(MediaKind::Write { fua: false }, parts), format!("{write} 0"));
    }
    assert_eq!(ask(MediaKind::Flush, &[]), format!("FSYNC {DATASYNC}"));
}

#[test]
fn one_medium_at_a_time_has_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("medium");
    let media = open(&path);
    let options = FileOptions { direct: false, ..FileOptions::default() };
    let error = FileMedia::open(&path, BYTES, options).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}");
    assert!(error.to_string().contains("is another controller using it?"), "{error}");
    drop(media);
    open(&path);
}
