//! A GPU server as a directory: the parts of /sys, /proc, /dev and /etc that the program reads.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::pci::Root;

/// Two drives and a GPU below one switch, a drive with the root filesystem on the other socket, and
/// a drive that shares its group with a network card.
pub(super) struct Fixture {
    folder: TempDir,
    pub(super) root: Root,
}

/// Free, below the GPU's switch, group 12.
pub(super) const FREE: &str = "0000:67:00.0";
/// `nvme1n1`, with the root filesystem on its second partition.
pub(super) const SYSTEM: &str = "0000:17:00.0";
/// In group 15, with the card of the next line.
pub(super) const SHARED: &str = "0000:6a:00.0";
pub(super) const NETWORK: &str = "0000:6a:00.1";
pub(super) const GPU: &str = "0000:68:00.0";

/// This program.
pub(super) const PROGRAM: &str = "/usr/bin/nvme-bind";

const SWITCH: &str = "pci0000:64/0000:64:01.0/0000:65:00.0";

/// A function to create.
pub(super) struct Card {
    pub(super) path: String,
    pub(super) class: u32,
    pub(super) ids: (u16, u16),
    pub(super) driver: Option<&'static str>,
    pub(super) group: Option<u32>,
    pub(super) numa: i32,
}

impl Fixture {
    /// Creates a machine without devices.
    pub(super) fn bare() -> Self {
        // In memory if possible: the tests create many small files.
        let memory = Path::new("/dev/shm");
        let folder = match tempfile::tempdir_in(memory) {
            Ok(folder) => folder,
            Err(_) => tempfile::tempdir().unwrap(),
        };
        let root = Root::new(folder.path()).unwrap();
        let fixture = Self { folder, root };
        fixture.file("/proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/nvme1n1p2 iommu=pt");
        fixture.file("/proc/sys/kernel/osrelease", "6.1.0-test");
        fixture.file("/proc/sys/kernel/random/boot_id", "boot-1");
        fixture.file("/proc/swaps", "Filename Type Size Used Priority\n");
        fixture.file("/proc/mdstat", "Personalities :\nunused devices: <none>\n");
        fixture.file("/proc/mounts", "proc /proc proc rw 0 0\n");
        fixture.file(PROGRAM, "");
        // Independent of the umask.
        for path in ["/usr", "/usr/bin", PROGRAM] {
            fixture.mode(path, 0o755);
        }
        fixture.file("/etc/passwd", "root:x:0:0::/:/bin/sh\nalice:x:1000:1001::/:/bin/sh\n");
        fixture.file("/etc/group", "root:x:0:\nkvcache:x:3000:alice\n");
        for driver in ["nvme", "pcieport", "mlx5_core", "nvidia"] {
            let target = format!("../../../../module/{driver}");
            fixture.link(&format!("/sys/bus/pci/drivers/{driver}/module"), &target);
        }
        fixture
    }

    pub(super) fn server() -> Self {
        let fixture = Self::bare();
        let bridge = |path: &str, group| Card {
            path: path.into(),
            class: 0x06_0400,
            ids: (0x10b5, 0x9797),
            driver: Some("pcieport"),
            group: Some(group),
            numa: 1,
        };
        fixture.card(&bridge("pci0000:64/0000:64:01.0", 1));
        fixture.card(&bridge(SWITCH, 2));
        for (port, group) in [("0000:66:00.0", 3), ("0000:66:01.0", 4), ("0000:66:02.0", 5)] {
            fixture.card(&bridge(&format!("{SWITCH}/{port}"), group));
        }
        fixture.card(&bridge("pci0000:16/0000:16:01.0", 6));
        let drive = |path: String, group| Card {
            path,
            class: 0x01_0802,
            ids: (0x144d, 0xa80a),
            driver: Some("nvme"),
            group: Some(group),
            numa: 1,
        };
        fixture.card(&drive(format!("{SWITCH}/0000:66:00.0/{FREE}"), 12));
        fixture.card(&Card { numa: 0, ..drive(format!("pci0000:16/0000:16:01.0/{SYSTEM}"), 14) });
        fixture.card(&drive(format!("{SWITCH}/0000:66:02.0/{SHARED}"), 15));
        fixture.card(&Card {
            path: format!("{SWITCH}/0000:66:02.0/{NETWORK}"),
            class: 0x02_0000,
            ids: (0x15b3, 0x101d),
            driver: Some("mlx5_core"),
            group: Some(15),
            numa: 1,
        });
        fixture.card(&Card {
            path: format!("{SWITCH}/0000:66:01.0/{GPU}"),
            class: 0x03_0200,
            ids: (0x10de, 0x2330),
            driver: Some("nvidia"),
            group: Some(13),
            numa: 1,
        });
        fixture.disk(FREE, "nvme0", "259:0", &[]);
        fixture.disk(SYSTEM, "nvme1", "259:1", &[("p1", "259:2"), ("p2", "259:3")]);
        fixture.disk(SHARED, "nvme2", "259:4", &[]);
        let mounts = "/dev/nvme1n1p2 / ext4 rw 0 0\n/dev/nvme1n1p1 /boot/efi vfat rw 0 0\n";
        fixture.file("/proc/mounts", mounts);
        fixture.file("/sys/class/iommu/dmar0/.keep", "");
        fixture
    }

    pub(super) fn mode(&self, path: &str, mode: u32) {
        fs::set_permissions(self.root.at(path), fs::Permissions::from_mode(mode)).unwrap();
    }

    pub(super) fn file(&self, path: &str, text: &str) {
        self.bytes(path, text.as_bytes());
    }

    pub(super) fn bytes(&self, path: &str, bytes: &[u8]) {
        let path = self.root.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    pub(super) fn folder(&self, path: &str) {
        fs::create_dir_all(self.root.at(path)).unwrap();
    }

    pub(super) fn link(&self, path: &str, target: &str) {
        let path = self.root.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    pub(super) fn card(&self, card: &Card) {
        let bdf = card.path.rsplit('/').next().unwrap();
        let real = format!("/sys/devices/{}", card.path);
        self.link(
            &format!("/sys/bus/pci/devices/{bdf}"),
            &format!("../../../devices/{}", card.path),
        );
        self.file(&format!("{real}/class"), &format!("{:#08x}\n", card.class));
        self.file(&format!("{real}/vendor"), &format!("{:#06x}\n", card.ids.0));
        self.file(&format!("{real}/device"), &format!("{:#06x}\n", card.ids.1));
        self.file(&format!("{real}/numa_node"), &format!("{}\n", card.numa));
        self.file(&format!("{real}/driver_override"), "(null)\n");
        if let Some(driver) = card.driver {
            self.link(&format!("{real}/driver"), &format!("/sys/bus/pci/drivers/{driver}"));
        }
        if let Some(group) = card.group {
            let groups = "/sys/kernel/iommu_groups";
            self.link(&format!("{real}/iommu_group"), &format!("{groups}/{group}"));
            self.file(&format!("{groups}/{group}/type"), "DMA-FQ\n");
            self.link(&format!("{groups}/{group}/devices/{bdf}"), &format!("/sys/devices/{bdf}"));
        }
    }

    /// Creates a controller with one namespace of 1.92 TB, and partitions with their numbers.
    pub(super) fn disk(&self, bdf: &str, name: &str, number: &str, parts: &[(&str, &str)]) {
        let real = self.root.resolve(format!("/sys/bus/pci/devices/{bdf}")).unwrap();
        let folder = format!("{}/nvme/{name}", real.display());
        self.link(&format!("/sys/class/nvme/{name}"), &format!("../../..{folder}"));
        self.file(&format!("{folder}/model"), "ACME DC 1920\n");
        self.file(&format!("{folder}/serial"), &format!("SN-{name}\n"));
        let disk = format!("{name}n1");
        self.block(&format!("{folder}/{disk}"), number, 3_750_748_848);
        self.bytes(&format!("/dev/{disk}"), &[0; 4096]);
        self.file(&format!("/dev/{name}"), "");
        for (part, number) in parts {
            let part = format!("{disk}{part}");
            self.block(&format!("{folder}/{disk}/{part}"), number, 1 << 20);
            self.file(&format!("{folder}/{disk}/{part}/partition"), "1\n");
            self.bytes(&format!("/dev/{part}"), &[0; 4096]);
        }
    }

    /// Creates a block device at `path` below /sys/devices, with its class links.
    pub(super) fn block(&self, path: &str, number: &str, sectors: u64) {
        let name = path.rsplit('/').next().unwrap();
        let inside = path.strip_prefix("/sys/").unwrap();
        self.file(&format!("{path}/dev"), &format!("{number}\n"));
        self.file(&format!("{path}/size"), &format!("{sectors}\n"));
        self.link(&format!("/sys/class/block/{name}"), &format!("../../{inside}"));
        if !path.contains(&format!("n1/{name}")) {
            self.link(&format!("/sys/block/{name}"), &format!("../{inside}"));
        }
    }

    /// Creates a device on top of another one: `dm-0` on `nvme0n1`.
    pub(super) fn holder(&self, below: &str, name: &str, number: &str) {
        let path = format!("/sys/devices/virtual/block/{name}");
        if !self.root.exists(&path) {
            self.block(&path, number, 1 << 20);
        }
        let real = self.root.resolve(format!("/sys/class/block/{below}")).unwrap();
        self.link(&format!("{}/holders/{name}", real.display()), &format!("{path}/"));
    }

    pub(super) fn process(&self, pid: u32, command: &str, opened: &[&str]) {
        self.file(&format!("/proc/{pid}/comm"), &format!("{command}\n"));
        self.folder(&format!("/proc/{pid}/fd"));
        for (index, path) in opened.iter().enumerate() {
            self.link(&format!("/proc/{pid}/fd/{index}"), path);
        }
    }

    /// Unloads the modules of VFIO, as after a reboot.
    pub(super) fn unload(&self) {
        for folder in ["bus/pci/drivers/vfio-pci", "module/vfio-pci", "module/vfio_iommu_type1"] {
            let _ = fs::remove_dir(self.root.at(format!("/sys/{folder}")));
        }
    }

    /// Returns all files and links with their contents, except the lock and temporary files (which
    /// a crash may leave) in the journal's directories.
    pub(super) fn snapshot(&self) -> BTreeMap<PathBuf, String> {
        let mut all = BTreeMap::new();
        walk(self.folder.path(), self.folder.path(), &mut all);
        all.retain(|path, _| {
            let ours = path.starts_with("run/nvme-bind") || path.starts_with("var/lib/nvme-bind");
            let name = path.file_name().unwrap().to_string_lossy();
            !(ours && (name == "lock" || name.starts_with('.')))
        });
        all
    }
}

fn walk(base: &Path, folder: &Path, all: &mut BTreeMap<PathBuf, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let kind = fs::symlink_metadata(&path).unwrap().file_type();
        let inside = path.strip_prefix(base).unwrap().to_owned();
        if kind.is_dir() {
            walk(base, &path, all);
        } else if kind.is_symlink() {
            all.insert(inside, format!("-> {}", fs::read_link(&path).unwrap().display()));
        } else {
            all.insert(inside, String::from_utf8_lossy(&fs::read(&path).unwrap()).into());
        }
    }
}
