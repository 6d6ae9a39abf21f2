//! Every way in which a drive can be in use, one at a time, on an otherwise free drive.

use super::bind::request;
use super::fixture::{FREE, Fixture};
use super::kernel::{Fault, Kernel};
use crate::command::bind;
use crate::problem::Kind;

/// Sets up one use of `nvme0n1`, with the words that the refusal must contain.
type Case = (fn(&Fixture), &'static [&'static str]);

fn mount(fixture: &Fixture, line: &str) {
    let mounts = fixture.root.text("/proc/mounts").unwrap();
    fixture.file("/proc/mounts", &format!("{mounts}\n{line}\n"));
}

const CASES: &[Case] = &[
    (|f| mount(f, "/dev/nvme0n1 /mnt/a\\040b xfs rw 0 0"), &["nvme0n1: mounted /mnt/a b (xfs)"]),
    (
        // By device number, with a source that is not a path.
        |f| f.file("/proc/self/mountinfo", "36 35 259:0 / /data rw - ext4 /dev/root rw"),
        &["mounted /data"],
    ),
    (
        // In a namespace of its own, as in a container.
        |f| {
            f.link("/proc/self/ns/mnt", "mnt:[1]");
            f.link("/proc/41/ns/mnt", "mnt:[2]");
            f.file("/proc/41/mountinfo", "36 35 259:0 / / rw - ext4 /dev/nvme0n1 rw");
        },
        &["mounted /", "pid 41"],
    ),
    (
        |f| {
            f.file(
                "/proc/swaps",
                "Filename Type Size Used Priority\n/dev/nvme0n1 partition 9 0 -2\n",
            )
        },
        &["nvme0n1: swap"],
    ),
    (
        |f| {
            f.holder("nvme0n1", "md0", "9:0");
            f.file("/sys/devices/virtual/block/md0/md/level", "raid0\n");
        },
        &["md RAID md0 (raid0)"],
    ),
    (
        // An array that is assembled but not running has no holder.
        |f| f.file("/proc/mdstat", "Personalities :\nmd127 : inactive nvme0n1[0](S)\n"),
        &["md127"],
    ),
    (
        |f| {
            f.holder("nvme0n1", "dm-0", "254:0");
            f.file("/sys/devices/virtual/block/dm-0/dm/uuid", "LVM-abc\n");
            f.file("/sys/devices/virtual/block/dm-0/dm/name", "vg-data\n");
        },
        &["LVM dm-0 (vg-data)"],
    ),
    (
        // A mount three levels up: a volume on an encrypted device on the disk.
        |f| {
            f.holder("nvme0n1", "dm-0", "254:0");
            f.file("/sys/devices/virtual/block/dm-0/dm/uuid", "CRYPT-LUKS2-abc\n");
            f.file("/sys/devices/virtual/block/dm-0/dm/name", "secret\n");
            f.holder("dm-0", "dm-1", "254:1");
            f.file("/sys/devices/virtual/block/dm-1/dm/uuid", "LVM-abc\n");
            f.file("/sys/devices/virtual/block/dm-1/dm/name", "vg-data\n");
            f.file("/dev/dm-1", "");
            f.link("/dev/mapper/vg-data", "../dm-1");
            mount(f, "/dev/mapper/vg-data /srv ext4 rw 0 0");
        },
        &["dm-crypt dm-0 (secret)", "LVM dm-1", "mounted /srv (ext4 through dm-1)"],
    ),
    (
        // The mount names another device of the same filesystem.
        |f| {
            for name in ["sda", "nvme0n1"] {
                f.link(&format!("/sys/fs/btrfs/some-id/devices/{name}"), "../none");
            }
            mount(f, "/dev/sda /pool btrfs rw 0 0");
        },
        &["nvme0n1: mounted /pool (btrfs)"],
    ),
    (
        |f| f.link("/sys/fs/btrfs/some-id/devices/nvme0n1", "../none"),
        &["nvme0n1: btrfs is mounted, where is not visible"],
    ),
    (|f| f.file("/sys/block/loop3/loop/backing_file", "/dev/nvme0n1\n"), &["loop device loop3"]),
    (
        |f| {
            let folder = "/sys/kernel/config/nvmet/subsystems/export/namespaces/1";
            f.file(&format!("{folder}/device_path"), "/dev/nvme0n1\n");
        },
        &["NVMe target export"],
    ),
    (|f| f.process(88, "fio", &["/dev/null", "/dev/nvme0n1"]), &["nvme0n1: open in fio (pid 88)"]),
    (|f| f.process(88, "spdk", &["/dev/ng0n1"]), &["ng0n1: open in spdk (pid 88)"]),
    (|f| f.process(88, "nvme", &["/dev/nvme0"]), &["nvme0: open in nvme (pid 88)"]),
    (
        |f| {
            f.folder(&format!("/sys/bus/pci/devices/{FREE}/uio/uio3"));
            f.process(88, "spdk", &["/dev/uio3"]);
        },
        &["uio3: open in spdk (pid 88)"],
    ),
    (
        // Known only to udev, because the device cannot be read.
        |f| {
            std::fs::remove_file(f.root.at("/dev/nvme0n1")).unwrap();
            let text = "S:disk/by-id/x\nE:ID_FS_TYPE=zfs_member\nE:ID_FS_LABEL=tank\n";
            f.file("/run/udev/data/b259:0", text);
            f.folder("/proc/spl/kstat/zfs/tank");
        },
        &["ZFS pool tank"],
    ),
];

#[test]
fn each_use_is_seen_and_refused() {
    for (index, (set_up, words)) in CASES.iter().enumerate() {
        let fixture = Fixture::server();
        set_up(&fixture);
        let before = fixture.snapshot();
        let kernel = Kernel::new(&fixture, Fault::None);
        // No option overrides it.
        let stubborn = bind::Request { ignore_members: true, ..request(&[FREE]) };
        let problem = bind::run(&kernel.host(), &stubborn).expect_err(words[0]);
        assert_eq!(problem.kind, Kind::InUse, "case {index}: {problem}");
        for word in *words {
            let message = &problem.message;
            assert!(message.contains(word), "case {index}: `{word}` is not in: {message}");
        }
        assert_eq!((kernel.operations(), fixture.snapshot()), (0, before), "case {index}");
    }
}

#[test]
fn a_use_of_another_disk_is_not_taken_for_ours() {
    let fixture = Fixture::server();
    // Names with a common prefix, and processes that use other files.
    mount(&fixture, "/dev/nvme0n10 /other ext4 rw 0 0");
    fixture.file("/proc/mdstat", "md1 : active raid0 nvme0n11[0] nvme10n1[1]\n");
    fixture.process(5, "fio", &["/dev/nvme0n12", "/mnt/dev/nvme0n1"]);
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &request(&[FREE])).unwrap();
}

#[test]
fn inactive_members_are_refused_unless_told_otherwise() {
    let mark = |at: usize, text: &[u8]| {
        let mut bytes = vec![0; 256 << 10];
        bytes[at..at + text.len()].copy_from_slice(text);
        bytes
    };
    let uberblock = 0x00ba_b10c_u64.to_le_bytes();
    let raid = 0xa92b_4efc_u32.to_le_bytes();
    let members = [
        ("LVM", mark(512, b"LABELONE")),
        ("md RAID", mark(4096, &raid)),
        ("ZFS", mark(128 << 10, &uberblock)),
    ];
    for (name, bytes) in members {
        let fixture = Fixture::server();
        fixture.bytes("/dev/nvme0n1", &bytes);
        let kernel = Kernel::new(&fixture, Fault::None);
        let problem = bind::run(&kernel.host(), &request(&[FREE])).unwrap_err();
        assert_eq!(problem.kind, Kind::InUse);
        assert!(problem.message.contains(name), "{problem}");
        let given_up = bind::Request { ignore_members: true, ..request(&[FREE]) };
        bind::run(&kernel.host(), &given_up).unwrap();
    }
    // An unused filesystem is only mentioned.
    let fixture = Fixture::server();
    fixture.bytes("/dev/nvme0n1", &mark(0, b"XFSB"));
    let kernel = Kernel::new(&fixture, Fault::None);
    let host = kernel.host();
    bind::run(&host, &request(&[FREE])).unwrap();
    let notes = host.notes.borrow().join("\n");
    assert!(notes.contains("XFS") && notes.contains("untouched"), "{notes}");
}

#[test]
fn what_cannot_be_checked_is_refused_unless_allowed() {
    let breaks: &[fn(&Fixture)] = &[
        // The disk cannot be opened, neither to claim it nor to read its contents.
        |f| std::fs::remove_file(f.root.at("/dev/nvme0n1")).unwrap(),
        |f| {
            std::fs::remove_file(f.root.at("/dev/nvme0n1")).unwrap();
            f.folder("/dev/nvme0n1");
        },
    ];
    for set_up in breaks {
        let fixture = Fixture::server();
        set_up(&fixture);
        let before = fixture.snapshot();
        let kernel = Kernel::new(&fixture, Fault::None);
        let problem = bind::run(&kernel.host(), &request(&[FREE])).unwrap_err();
        assert_eq!(problem.kind, Kind::InUse, "{problem}");
        assert!(problem.message.contains("not checked"), "{problem}");
        assert!(problem.hint.contains("--allow-unchecked"), "{problem}");
        assert_eq!((kernel.operations(), fixture.snapshot()), (0, before));
        let host = kernel.host();
        bind::run(&host, &bind::Request { allow_unchecked: true, ..request(&[FREE]) }).unwrap();
        assert!(host.notes.borrow().iter().any(|note| note.contains("not checked")));
    }
    // It does not override a known use.
    let fixture = Fixture::server();
    mount(&fixture, "/dev/nvme0n1 /mnt xfs rw 0 0");
    let kernel = Kernel::new(&fixture, Fault::None);
    let stubborn = bind::Request { allow_unchecked: true, ..request(&[FREE]) };
    assert_eq!(bind::run(&kernel.host(), &stubborn).unwrap_err().kind, Kind::InUse);
}
