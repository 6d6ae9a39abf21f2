//! Every way in which a drive can be in use, one at a time, on an otherwise free drive.

use super::bind::request;
use super::fixture::{Card, FREE, Fixture};
use super::kernel::{Fault, Kernel};
use crate::command::{bind, list, release, status};
use crate::pci::Claim;
use crate::problem::Kind;
use crate::report::Paint;

/// Sets up one use of `nvme0n1`, with the words that the refusal must contain.
type Case = (fn(&Fixture), &'static [&'static str]);

fn export_controller(fixture: &Fixture, path: &str, enable: &str) {
    let folder = "/sys/kernel/config/nvmet/subsystems/export/passthru";
    fixture.file(&format!("{folder}/device_path"), &format!("{path}\n"));
    fixture.file(&format!("{folder}/enable"), &format!("{enable}\n"));
}

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
    (
        // The target holds the controller then, and none of its disks.
        |f| export_controller(f, "/dev/nvme0", "1"),
        &["nvme0: NVMe target export"],
    ),
    (
        |f| f.file("/sys/kernel/config/target/core/iblock_0/lun/udev_path", "/dev/nvme0n1\n"),
        &["SCSI target iblock_0/lun"],
    ),
    (
        |f| {
            let about = "Status: ACTIVATED\n TCM FILEIO ID: 0  File: /dev/nvme0n1  Size: 1\n";
            f.file("/sys/kernel/config/target/core/fileio_1/lun/info", about);
        },
        &["SCSI target fileio_1/lun"],
    ),
    (|f| f.file("/sys/block/zram0/backing_dev", "/dev/nvme0n1\n"), &["compressed memory zram0"]),
    (
        |f| mount(f, "/dev/sda:/dev/nvme0n1 /pool bcachefs rw 0 0"),
        &["nvme0n1: mounted /pool (bcachefs)"],
    ),
    (
        |f| f.link("/sys/fs/bcachefs/some-id/dev-0/block", "../../../class/block/nvme0n1"),
        &["nvme0n1: bcachefs is mounted, where is not visible"],
    ),
    (
        |f| mount(f, "/dev/sda1 /data xfs rw,noatime,logdev=/dev/nvme0n1 0 0"),
        &["nvme0n1: mounted /data (xfs)"],
    ),
    (
        |f| {
            f.process(88, "db", &[]);
            f.file(
                "/proc/88/maps",
                "7f0-7f1 rw-s 0 00:05 372 /dev/shm/x\n8f0-8f1 rw-s 0 00:05 3 \
                                     /dev/nvme0n1\n",
            );
        },
        &["nvme0n1: open in db (pid 88)"],
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
        // The list and the doctor say the same.
        let list = list::run(&kernel.host(), false, Paint(false)).json;
        let drive = list["drives"].as_array().unwrap().iter().find(|drive| drive["bdf"] == FREE);
        assert_eq!(drive.unwrap()["in_use"], true, "case {index}: {list}");
        let found = super::doctor::find(&fixture, "drives").found;
        assert_eq!(found, "3 NVMe drives, 1 of them not in use", "case {index}");
    }
}

#[test]
fn what_is_exported_but_not_enabled_is_free() {
    let fixture = Fixture::server();
    export_controller(&fixture, "/dev/nvme0", "0");
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &request(&[FREE])).unwrap();
}

/// Each way in which a process can have a drive that is bound to VFIO.
const VFIO_USERS: &[Case] = &[
    (|f| f.process(88, "qemu", &["/dev/vfio/12"]), &["/dev/vfio/12: open in qemu (pid 88)"]),
    (
        |f| {
            f.file(&format!("/sys/bus/pci/devices/{FREE}/vfio-dev/vfio0/dev"), "511:0\n");
            f.process(88, "qemu", &["/dev/iommu", "/dev/vfio/devices/vfio0"]);
        },
        &["/dev/vfio/devices/vfio0: open in qemu (pid 88)"],
    ),
    (
        |f| f.process(88, "qemu", &["/dev/vfio/noiommu-12"]),
        &["/dev/vfio/noiommu-12: open in qemu (pid 88)"],
    ),
    (
        // Its group was closed again.
        |f| {
            f.process(88, "qemu", &["anon_inode:[vfio-device]"]);
            let path = format!("/sys/devices/pci0000:64/0000:64:01.0/{FREE}");
            f.file("/proc/88/fdinfo/0", &format!("pos: 0\nvfio-device-syspath: {path}\n"));
        },
        &["0000:67:00.0: open in qemu (pid 88)"],
    ),
];

#[test]
fn a_drive_that_a_process_has_through_vfio_is_left_to_it() {
    for (set_up, words) in VFIO_USERS {
        let words = words[0];
        let fixture = Fixture::server();
        let kernel = Kernel::new(&fixture, Fault::None);
        bind::run(&kernel.host(), &request(&[FREE])).unwrap();
        let operations = kernel.operations();
        set_up(&fixture);
        let release = release::Request { devices: vec![FREE.into()], ..Default::default() };
        let refusals = [
            bind::run(&kernel.host(), &request(&[FREE])),
            release::unbind(&kernel.host(), &release),
            release::restore(&kernel.host(), &release),
            release::unbind(&kernel.host(), &release::Request { dry_run: true, ..release }),
        ];
        for refused in refusals {
            let problem = refused.expect_err(words);
            assert_eq!(problem.kind, Kind::InUse, "{words}: {problem}");
            assert!(problem.message.contains(words), "`{words}` is not in: {problem}");
        }
        assert_eq!(kernel.operations(), operations, "{words}");
        let list = list::run(&kernel.host(), false, Paint(false)).json.to_string();
        assert!(list.contains("qemu (pid 88)"), "{list}");
        let found = super::doctor::find(&fixture, "drives").found;
        assert_eq!(found, "3 NVMe drives, 1 of them not in use", "{words}");
        let status = status::run(&kernel.host(), Paint(false)).text;
        assert!(status.contains("qemu (pid 88)"), "{status}");
    }
}

/// Gives the free drive a second controller, with its own disk for a namespace of this identity.
fn second_path(fixture: &Fixture, wwid: &str) {
    let other = "0000:66:01.0/0000:69:00.0";
    fixture.card(&Card {
        path: format!("pci0000:64/0000:64:01.0/0000:65:00.0/{other}"),
        class: 0x01_0802,
        ids: (0x144d, 0xa80a),
        driver: Some("nvme"),
        group: Some(17),
        numa: 1,
    });
    fixture.disk("0000:69:00.0", "nvme3", "259:30", &[]);
    for name in ["nvme0", "nvme3"] {
        fixture.file(&format!("/sys/class/nvme/{name}/subsysnqn"), "nqn.2026-01.com.acme:1\n");
    }
    fixture.file("/sys/class/block/nvme0n1/wwid", "eui.0011\n");
    fixture.file("/sys/class/block/nvme3n1/wwid", &format!("{wwid}\n"));
}

#[test]
fn a_use_through_another_path_to_the_drive_counts() {
    let uses: &[Case] = &[
        (|f| mount(f, "/dev/nvme3n1 /db xfs rw 0 0"), &["nvme3n1: mounted /db"]),
        (|f| f.process(88, "db", &["/dev/nvme3n1"]), &["nvme3n1: open in db (pid 88)"]),
        (|f| f.process(88, "db", &["/dev/ng3n1"]), &["ng3n1: open in db (pid 88)"]),
        (|f| f.process(88, "nvme", &["/dev/nvme3"]), &["nvme3: open in nvme (pid 88)"]),
        (|f| export_controller(f, "/dev/nvme3", "1"), &["nvme3: NVMe target export"]),
    ];
    for (set_up, words) in uses {
        let fixture = Fixture::server();
        second_path(&fixture, "eui.0011");
        set_up(&fixture);
        let kernel = Kernel::new(&fixture, Fault::None);
        let problem = bind::run(&kernel.host(), &request(&[FREE])).unwrap_err();
        assert_eq!(problem.kind, Kind::InUse, "{problem}");
        assert!(problem.message.contains(words[0]), "{problem}");
        assert!(problem.message.contains("another path, nvme3 at 0000:69:00.0"), "{problem}");
        // Another namespace of the same subsystem is no path to this one.
        let fixture = Fixture::server();
        second_path(&fixture, "eui.0022");
        set_up(&fixture);
        let kernel = Kernel::new(&fixture, Fault::None);
        bind::run(&kernel.host(), &request(&[FREE])).unwrap();
    }
}

/// Two disks of one namespace are claimed once, whatever is bound with what.
#[test]
fn both_paths_to_a_drive_are_bound_together() {
    let fixture = Fixture::server();
    second_path(&fixture, "eui.0011");
    let kernel = Kernel::new(&fixture, Fault::None);
    let reply = bind::run(&kernel.host(), &request(&[FREE, "0000:69:00.0"])).unwrap();
    assert_eq!(reply.text.lines().count(), 2, "{}", reply.text);
}

/// The kernel has a disk for something that no file shows: only a claim tells.
#[test]
fn a_claim_without_a_visible_user_is_a_use() {
    for other in [false, true] {
        let fixture = Fixture::server();
        second_path(&fixture, "eui.0011");
        let disk = if other { "/dev/nvme3n1" } else { "/dev/nvme0n1" };
        let Claim::Held(held) = fixture.root.claim(disk) else { panic!("{disk} is free") };
        let kernel = Kernel::new(&fixture, Fault::None);
        let problem = bind::run(&kernel.host(), &request(&[FREE])).unwrap_err();
        assert_eq!(problem.kind, Kind::InUse, "{problem}");
        assert!(problem.message.contains("claimed by the kernel"), "{problem}");
        let list = list::run(&kernel.host(), false, Paint(false)).text;
        let row = list.lines().find(|row| row.contains(FREE)).unwrap();
        assert!(row.contains("claimed"), "{row}");
        // The system's drive, and both paths.
        let found = super::doctor::find(&fixture, "drives").found;
        assert_eq!(found, "4 NVMe drives, 1 of them not in use");
        drop(held);
        let found = super::doctor::find(&fixture, "drives").found;
        assert_eq!(found, "4 NVMe drives, 3 of them not in use", "no claim of ours is left");
    }
}

#[test]
fn another_path_is_shown_and_noted() {
    let fixture = Fixture::server();
    second_path(&fixture, "eui.0011");
    let kernel = Kernel::new(&fixture, Fault::None);
    let host = kernel.host();
    let list = list::run(&host, false, Paint(false));
    let row = list.text.lines().find(|row| row.contains(FREE)).unwrap();
    assert!(row.contains("nvme0n1 (2 paths)"), "{row}");
    let drives = list.json["drives"].as_array().unwrap();
    let drive = drives.iter().find(|drive| drive["bdf"] == FREE).unwrap();
    assert_eq!(drive["other_paths"][0]["bdf"], "0000:69:00.0");
    bind::run(&host, &request(&[FREE])).unwrap();
    let notes = host.notes.borrow().join("\n");
    assert!(notes.contains("nvme3 at 0000:69:00.0 is another"), "{notes}");
    // A drive on VFIO is known by its record.
    fixture.file("/sys/class/nvme/nvme3/serial", "SN-nvme0\n");
    let host = kernel.host();
    let list = list::run(&host, false, Paint(false)).text;
    let row = list.lines().find(|row| row.contains("0000:69:00.0")).unwrap();
    assert!(row.contains("nvme3n1 (2 paths)"), "{row}");
    bind::run(&host, &request(&["0000:69:00.0"])).unwrap();
    let notes = host.notes.borrow().join("\n");
    assert!(notes.contains(FREE) && notes.contains("has the serial number of"), "{notes}");
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
        ("RAID (md)", mark(4096, &raid)),
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
    // The only sign is at the end, and the head is that of a filesystem on a mirror.
    for (name, from_end, mark) in [
        ("Intel VROC", 1024, &b"Intel Raid ISM Cfg Sig. "[..]),
        ("DDF", 512, b"\xde\x11\xde\x11"),
        ("DRBD", 4096 - 60, b"\x83\x74\x02\x6d"),
        ("ZFS", 128 << 10, &uberblock),
        ("RAID (md)", 8192, &raid),
    ] {
        let fixture = Fixture::server();
        let mut bytes = vec![0; 4 << 20];
        bytes[0x438..0x43a].copy_from_slice(b"\x53\xef");
        let at = bytes.len() - from_end;
        bytes[at..at + mark.len()].copy_from_slice(mark);
        fixture.file("/sys/class/block/nvme0n1/size", &format!("{}\n", bytes.len() / 512));
        fixture.bytes("/dev/nvme0n1", &bytes);
        let kernel = Kernel::new(&fixture, Fault::None);
        let problem = bind::run(&kernel.host(), &request(&[FREE])).unwrap_err();
        assert!(problem.kind == Kind::InUse && problem.message.contains(name), "{problem}");
        let list = list::run(&kernel.host(), false, Paint(false)).text;
        assert!(list.contains("inactive member"), "{list}");
    }
    // An unused filesystem is only mentioned.
    let fixture = Fixture::server();
    fixture.bytes("/dev/nvme0n1", &mark(0, b"XFSB"));
    let kernel = Kernel::new(&fixture, Fault::None);
    let host = kernel.host();
    bind::run(&host, &request(&[FREE])).unwrap();
    let notes = host.notes.borrow().join("\n");
    assert!(notes.contains("XFS") && notes.contains("untouched"), "{notes}");
    for (what, at, text) in [
        ("data of an unknown kind", 9000, &b"my data"[..]),
        ("a store of ripieno", 0, b"RIPIENO\n"),
        ("a store of ripieno", 1 << 20, b"RIPIENO\n"),
    ] {
        let fixture = Fixture::server();
        let mut bytes = vec![0; (1 << 20) + 4096];
        bytes[at..at + text.len()].copy_from_slice(text);
        fixture.bytes("/dev/nvme0n1", &bytes);
        let kernel = Kernel::new(&fixture, Fault::None);
        let host = kernel.host();
        bind::run(&host, &request(&[FREE])).unwrap();
        let notes = host.notes.borrow().join("\n");
        assert!(notes.contains(what) && notes.contains("untouched"), "{notes}");
    }
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
