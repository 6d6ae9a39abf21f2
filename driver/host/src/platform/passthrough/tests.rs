#![allow(unsafe_code, reason = "looks at the bytes of an entry")]

use std::{fs::File, thread};

use nvme_spec::identify::LbaFormat;

use super::*;
use crate::platform::threads::EntryThreads;

/// Takes no commands.
fn namespace() -> Passthrough {
    let mut data = IdentifyNamespace { nsze: 1 << 18, ..IdentifyNamespace::default() };
    data.lbaf[0] = LbaFormat::new(12, 0);
    let file = File::options().read(true).write(true).open("/dev/null").unwrap();
    Passthrough {
        file: Arc::new(file.into()),
        claims: Vec::new(),
        namespace: NamespaceInfo::check(Nsid(3), &data).unwrap(),
        version: Version(0),
        transfer_bytes_max: 256 << 10,
        pci_id: None,
    }
}

/// The offsets are those of `struct io_uring_sqe` and `struct nvme_uring_cmd`.
#[test]
fn an_entry_is_what_the_kernel_reads() {
    let drive = namespace();
    let part = |at: usize, iov_len| libc::iovec {
        iov_base: std::ptr::without_provenance_mut(at),
        iov_len,
    };
    let sqe = drive.blocks(NvmOpcode::WRITE, [5 << 12, 2 << 12], true, 7);
    let list = [part(0x10_0000, 4096), part(0x30_0000, 4096)];
    for (parts, cmd_op, address, len) in [
        (&list[..1], 0xc048_4e80_u32, 0x10_0000, 4096_u32),
        (&list[..], 0xc048_4e81, list.as_ptr().addr() as u64, 2),
        (&[], 0xc048_4e80, 0, 0),
    ] {
        // SAFETY: bytes of a structure without padding.
        let bytes: [u8; 128] = unsafe { std::mem::transmute(drive.entry(&sqe, parts)) };
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        const CMD: usize = 48;
        assert_eq!((bytes[0], word(8)), (46, cmd_op));
        assert_eq!((bytes[CMD], word(CMD + 4)), (NvmOpcode::WRITE.0, 3));
        assert_eq!((long(CMD + 24), word(CMD + 36)), (address, len));
        // The first LBA; their number less one, FUA, and data placement 7.
        assert_eq!(long(CMD + 40), 5);
        assert_eq!((word(CMD + 48), word(CMD + 52)), (1 | 1 << 30 | 2 << 20, 7 << 16));
        assert_eq!(word(CMD + 64), TIMEOUT_MS);
    }
    let plain = drive.blocks(NvmOpcode::READ, [0, 1 << 12], false, 0);
    assert_eq!((plain.cdw12, plain.cdw13), (0, 0));
}

#[test]
fn threads_send_an_entry_to_its_file() {
    let drive = namespace();
    let mut threads = EntryThreads::new(|| {}).unwrap();
    let sqe = drive.blocks(NvmOpcode::READ, [0, 1 << 12], false, 0);
    // SAFETY: it names no memory.
    unsafe { threads.push(drive.entry(&sqe, &[]).user_data(9), &drive.file) };
    threads.submit();
    let mut results = Vec::new();
    while results.is_empty() {
        threads.take(&mut results);
        thread::yield_now();
    }
    assert_eq!(results, [(9, -libc::ENOTTY)]);
}

#[test]
fn what_is_no_namespace_is_refused_with_what_to_name() {
    for (path, why) in [
        ("/dev/null", "it is no namespace with blocks"),
        ("/dev/ng-none", "opening it failed"),
        ("/dev", "opening it failed"),
    ] {
        let error = Passthrough::open(Path::new(path)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(why) && text.contains("/dev/ng0n1"), "{text}");
        assert!(!error.is_busy);
    }
}
