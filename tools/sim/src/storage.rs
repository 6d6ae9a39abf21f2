//! The tiers below the GPUs: their channels and capacities.

use crate::{lane::LaneModel, policy::Path};

/// Channels and capacities of the tiers below the GPUs, for all GPUs together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Storage {
    /// Drives, directly to the GPU.
    pub direct: LaneModel,
    /// Drives to the GPU, each I/O started by the CPU.
    pub gds: LaneModel,
    /// Drives through host memory.
    pub cpu: LaneModel,
    /// Host memory.
    pub host: LaneModel,
    /// Another machine, to the GPU.
    pub remote: LaneModel,
    /// Bytes of host memory for KV cache.
    pub host_bytes: u64,
    /// Bytes of all drives, or of another machine.
    pub drive_bytes: u64,
}

impl Storage {
    /// Returns the channel of a path.
    pub fn lane(&self, path: Path) -> LaneModel {
        match path {
            Path::Direct => self.direct,
            Path::Gds => self.gds,
            Path::Cpu => self.cpu,
            Path::Host => self.host,
            Path::Remote => self.remote,
            Path::Instant => LaneModel::INSTANT,
        }
    }

    /// Returns the capacity in bytes of the tier at the end of a path.
    pub fn capacity(&self, path: Path) -> u64 {
        if path == Path::Host { self.host_bytes } else { self.drive_bytes }
    }
}
