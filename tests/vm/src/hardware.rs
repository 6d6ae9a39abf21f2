//! What the machine consists of: the guest's copy of xtask/src/vm/machine.rs.

/// Bytes behind drive A, seen from outside.
pub const FILE_A: &str = "a.img";
/// Bytes behind namespaces 1 and 2 of drive B.
pub const FILE_B: [&str; 2] = ["b1.img", "b2.img"];
/// Bytes of the device whose memory stands in for a GPU's.
pub const FILE_BAR: &str = "bar.bin";
pub const BAR_BYTES: u64 = 64 << 20;

/// One namespace of 512-byte LBAs, with faults; behind a port that it can be pulled from.
pub const DRIVE_A: &str = "0000:01:00.0";
/// Two namespaces: of 4096-byte LBAs and of 512-byte ones.
pub const DRIVE_B: &str = "0000:00:03.0";
/// Shared memory in its BAR 2.
pub const PEER: &str = "0000:00:04.0";

/// The port that drive A is behind.
pub const PORT: &str = "0000:00:02.0";

/// LBAs of drive A that cannot be read, and that cannot be written.
pub const BAD_READ_LBA: u64 = 15_000;
pub const BAD_WRITE_LBA: u64 = 200_000;

pub const SERIAL_A: &str = "RIPIENO-A";
pub const SERIAL_B: &str = "RIPIENO-B";

/// QEMU's controller, and its shared memory.
pub const NVME_IDS: (&str, &str) = ("0x1b36", "0x0010");
pub const PEER_IDS: (&str, &str) = ("0x1af4", "0x1110");
