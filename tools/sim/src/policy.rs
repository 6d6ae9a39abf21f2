//! Serving policies: the tiers that keep KV cache, and the overlap of loads and computation.

use kv_catalog::PolicyKind;
use kv_schedule::Config;
use kv_tier::LookaheadConfig;

/// Overlap of loads and computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loads {
    /// A layer waits only for its own load.
    Layers,
    /// A step waits for all loads of its requests, then computes.
    Step,
    /// A request joins a step after all its loads; other requests continue meanwhile.
    Whole,
}

/// Path of the data between a tier and the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// From drives, started by the GPU.
    Direct,
    /// From drives, each I/O started by the CPU.
    Gds,
    /// From drives through host memory.
    Cpu,
    /// From host memory.
    Host,
    /// From another machine.
    Remote,
    /// From drives that take no time.
    Instant,
}

/// A tier below the GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tier {
    /// Path to the GPU, which also says where the tier is.
    pub path: Path,
    /// Tokens that move together: a block, or a chunk.
    pub unit_tokens: u32,
    /// Objects of a unit in a layer.
    pub objects: u32,
    /// Eviction policy.
    pub eviction: PolicyKind,
    /// Overlap of its loads and computation.
    pub loads: Loads,
    /// Scheduler settings.
    pub schedule: Config,
}

/// Host memory cache above a tier; holds computed and loaded blocks (write-through).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HostMemory {
    /// Eviction policy.
    pub eviction: PolicyKind,
    /// Scheduler settings of the copies.
    pub schedule: Config,
    /// Prefetching for waiting requests; `None` for none.
    pub lookahead: Option<LookaheadConfig>,
}

/// A serving policy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// Name.
    pub name: &'static str,
    /// True if blocks stay in the GPU's memory after their request has ended.
    pub keeps_hbm: bool,
    /// Tier below the GPU.
    pub tier: Option<Tier>,
    /// Host memory cache between the GPU and the tier.
    pub host: Option<HostMemory>,
}

/// Operations start on arrival: layer-wise without a scheduler.
pub const AT_ONCE: Config = Config {
    read_depth_bytes: u64::MAX,
    write_depth_bytes: u64::MAX,
    backlog_bytes: u64::MAX,
    high_water: 1.0,
    reads_first: false,
};

impl Policy {
    /// Recomputes everything.
    pub const RECOMPUTE: Self =
        Self { name: "recompute", keeps_hbm: false, tier: None, host: None };
    /// Caches in the GPU's memory only.
    pub const HBM: Self = Self { name: "HBM", keeps_hbm: true, tier: None, host: None };
    /// Host memory, layer by layer.
    pub const DRAM: Self = Self::of(
        "DRAM",
        Tier {
            path: Path::Host,
            unit_tokens: 256,
            objects: 1,
            eviction: PolicyKind::Lru,
            loads: Loads::Layers,
            schedule: AT_ONCE,
        },
    );
    /// Drives, through the CPU and host memory, in chunks (LMCache).
    pub const SSD: Self = Self::of("SSD", Tier { path: Path::Cpu, ..CHUNKS });
    /// Same as [`Policy::SSD`], layer by layer.
    pub const SSD_LAYERS: Self =
        Self::of("SSD by layers", Tier { path: Path::Cpu, loads: Loads::Layers, ..CHUNKS });
    /// Drives to GPU, each I/O started by the CPU, in chunks (LMCache with GDS).
    pub const GDS: Self = Self::of("GDS", Tier { path: Path::Gds, ..CHUNKS });
    /// Drives to GPU, layer by layer, without scheduling.
    pub const NAIVE: Self =
        Self::of("layer-wise", Tier { schedule: AT_ONCE, eviction: PolicyKind::Lru, ..DIRECT });
    /// Drives to GPU, layer by layer, with the scheduler.
    pub const OURS: Self = Self::of("ours", DIRECT);
    /// Same as [`Policy::OURS`], but a request joins a step after all its loads.
    pub const AHEAD: Self =
        Self::of("ours, before the step", Tier { loads: Loads::Whole, ..DIRECT });
    /// Same as [`Policy::OURS`], with drives that take no time: a bound for any scheduler.
    pub const ORACLE: Self =
        Self::of("oracle", Tier { path: Path::Instant, schedule: AT_ONCE, ..DIRECT });

    /// A machine that stores, or another engine: chunks, before the step; other requests run
    /// meanwhile (LMCache's asynchronous loads).
    pub const REMOTE: Self = Self::of("remote", REMOTE);
    /// Same as [`Policy::REMOTE`]; the step waits.
    pub const REMOTE_WAITS: Self =
        Self::of("remote, the step waits", Tier { path: Path::Remote, ..CHUNKS });

    /// Same as [`Policy::OURS`], from host memory alone.
    pub const HOST_ALONE: Self =
        Self::of("host memory alone", Tier { path: Path::Host, objects: 1, ..DIRECT });
    /// Same as [`Policy::OURS`], with a host memory cache above the drives.
    pub const WITH_HOST: Self = Self { name: "ours + host memory", host: Some(HOST), ..Self::OURS };
    /// Same as [`Policy::WITH_HOST`], with prefetching for waiting requests.
    pub const LOOKAHEAD: Self = Self {
        name: "ours + host memory, ahead",
        host: Some(HostMemory { lookahead: Some(LOOKAHEAD), ..HOST }),
        ..Self::OURS
    };

    const fn of(name: &'static str, tier: Tier) -> Self {
        Self { name, keeps_hbm: true, tier: Some(tier), host: None }
    }
}

/// TierKV's settings (section 3.4).
const LOOKAHEAD: LookaheadConfig = LookaheadConfig { window: 4, drives_window: 8, batch_blocks: 8 };

/// Chunks of 256 tokens, as in LMCache.
const CHUNKS: Tier = Tier {
    path: Path::Direct,
    unit_tokens: 256,
    objects: 1,
    eviction: PolicyKind::Lru,
    loads: Loads::Step,
    schedule: AT_ONCE,
};

/// Chunks of another machine.
pub(crate) const REMOTE: Tier = Tier { path: Path::Remote, loads: Loads::Whole, ..CHUNKS };

const DIRECT: Tier = Tier {
    path: Path::Direct,
    unit_tokens: 64,
    objects: 2,
    eviction: PolicyKind::ReuseRate,
    loads: Loads::Layers,
    schedule: SCHEDULE,
};

/// Scheduler settings for bandwidths of tens of GB/s.
const SCHEDULE: Config = Config {
    read_depth_bytes: 64 << 20,
    write_depth_bytes: 16 << 20,
    backlog_bytes: 4 << 30,
    high_water: 0.8,
    reads_first: true,
};

const HOST: HostMemory =
    HostMemory { eviction: PolicyKind::ReuseRate, schedule: SCHEDULE, lookahead: None };
