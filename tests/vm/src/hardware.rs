//! Hardware of the machine: the guest's copy of xtask/src/vm/machine.rs.

/// Backing file of drive A on the host.
pub const FILE_A: &str = "a.img";
/// Backing files of namespaces 1 and 2 of drive B.
pub const FILE_B: [&str; 2] = ["b1.img", "b2.img"];
/// Backing file of the device memory that stands in for a GPU's.
pub const FILE_BAR: &str = "bar.bin";
pub const BAR_BYTES: u64 = 64 << 20;

/// Drive with one namespace of 512-byte LBAs, with faults; behind a hot-plug port.
pub const DRIVE_A: &str = "0000:01:00.0";
/// Drive with two namespaces: of 4096-byte LBAs and of 512-byte ones.
pub const DRIVE_B: &str = "0000:00:03.0";
/// Device with shared memory in its BAR 2.
pub const PEER: &str = "0000:00:04.0";

/// Two controllers with the same namespace; only in the suite `odd`, and so is the next one.
pub const DRIVE_S: [&str; 2] = ["0000:00:06.0", "0000:00:07.0"];
/// Drive with a zoned namespace.
pub const DRIVE_Z: &str = "0000:00:08.0";

/// Port above drive A.
pub const PORT: &str = "0000:00:02.0";

/// LBAs of drive A that fail reads, and that fail writes.
pub const BAD_READ_LBA: u64 = 15_000;
pub const BAD_WRITE_LBA: u64 = 200_000;

pub const SERIAL_A: &str = "RIPIENO-A";
pub const SERIAL_B: &str = "RIPIENO-B";

/// PCI IDs of QEMU's controller; the next line has those of its shared memory.
pub const NVME_IDS: (&str, &str) = ("0x1b36", "0x0010");
pub const PEER_IDS: (&str, &str) = ("0x1af4", "0x1110");
