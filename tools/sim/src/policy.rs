//! Serving policies: the tiers that keep KV cache, and the overlap of loads and computation.

use std::time::Duration;

use kv_catalog::PolicyKind;
use kv_schedule::{Config, Curve, IoCosts, Scheduler, Setting, SlackTable};
use kv_tier::LookaheadConfig;

use crate::lane::LaneModel;

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

/// Medium of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// Host memory.
    Host,
    /// NVMe drives.
    Drives,
}

/// A tier below the GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tier {
    /// Medium.
    pub medium: Medium,
    /// Channel between the tier and the GPU.
    pub lane: LaneModel,
    /// Capacity in bytes.
    pub capacity: u64,
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
    /// Channel between host memory and the GPU.
    pub lane: LaneModel,
    /// Capacity in bytes.
    pub capacity: u64,
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

const GIB: u64 = 1 << 30;
const TB: u64 = 1_000_000_000_000;

/// Operations start on arrival: layer-wise without a scheduler.
const AT_ONCE: Config = Config {
    read_depth_bytes: u64::MAX,
    write_depth_bytes: u64::MAX,
    backlog_bytes: u64::MAX,
    high_water: 1.0,
    reads_first: false,
};

/// Two of the Tutti paper's drives, with the bandwidth that its own path reaches (figure 9; section
/// 2.2). The window is the I/O kernel's: `GIO_WINDOW`.
pub const TWO_DRIVES: LaneModel = LaneModel {
    read: 25.9e9,
    write: 9.8e9,
    latency: Duration::from_micros(80),
    object: Duration::ZERO,
    mixed: 0.4,
    window: 8,
};

/// The same drives through the CPU, which submits everything immediately.
const THROUGH_CPU: LaneModel = LaneModel { window: usize::MAX, ..TWO_DRIVES };

/// Host memory over the link (section 2.2). Read requests travel in the opposite direction: 24
/// bytes for each 512, and so 2.3 of the 13 GB/s that PCIe 5.0 with 16 lanes has beside these 50.
pub(crate) const DRAM_LINK: LaneModel = LaneModel {
    read: 50e9,
    write: 50e9,
    latency: Duration::from_micros(5),
    object: Duration::ZERO,
    mixed: LaneModel::FULL_DUPLEX,
    window: usize::MAX,
};

/// A channel that takes no time.
const NO_TIME: LaneModel = LaneModel {
    read: 1e18,
    write: 1e18,
    latency: Duration::from_nanos(1),
    object: Duration::ZERO,
    mixed: 1.0,
    window: usize::MAX,
};

impl LaneModel {
    /// Returns a scheduler that knows the cost of operations, but no layer times.
    pub(crate) fn scheduler(&self, schedule: Config) -> Scheduler {
        let curve = |bandwidth| Curve::line(self.latency, bandwidth).expect("bandwidths");
        let (read, write) = (curve(self.read), curve(self.write));
        let costs = IoCosts { read, write, mixed: self.mixed };
        let [model, gpu, engine] = [(); 3].map(|()| "simulated".to_owned());
        let setting = Setting { model, gpu, engine, drives: Vec::new() };
        Scheduler::new(schedule, SlackTable::new(setting, costs))
    }
}

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
            medium: Medium::Host,
            lane: DRAM_LINK,
            capacity: 256 * GIB,
            unit_tokens: 256,
            objects: 1,
            eviction: PolicyKind::Lru,
            loads: Loads::Layers,
            schedule: AT_ONCE,
        },
    );
    /// Drives, through the CPU and host memory, in chunks (LMCache).
    pub const SSD: Self = Self::of(
        "SSD",
        Tier { lane: LaneModel { read: 3.4e9, write: 3e9, ..THROUGH_CPU }, ..CHUNKS },
    );
    /// Same as [`Policy::SSD`], layer by layer.
    pub const SSD_LAYERS: Self = Self::of(
        "SSD by layers",
        Tier {
            lane: LaneModel { read: 3.4e9, write: 3e9, ..THROUGH_CPU },
            loads: Loads::Layers,
            ..CHUNKS
        },
    );
    /// Drives to GPU, each I/O started by the CPU, in chunks (LMCache with GDS).
    pub const GDS: Self = Self::of(
        "GDS",
        Tier { lane: LaneModel { read: 11.9e9, write: 7e9, ..THROUGH_CPU }, ..CHUNKS },
    );
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
        Self::of("oracle", Tier { lane: NO_TIME, schedule: AT_ONCE, ..DIRECT });

    /// Same as [`Policy::OURS`], from host memory alone.
    pub const HOST_ALONE: Self = Self::of(
        "host memory alone",
        Tier { medium: Medium::Host, lane: DRAM_LINK, capacity: 256 * GIB, objects: 1, ..DIRECT },
    );
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
    medium: Medium::Drives,
    lane: TWO_DRIVES,
    capacity: 14 * TB,
    unit_tokens: 256,
    objects: 1,
    eviction: PolicyKind::Lru,
    loads: Loads::Step,
    schedule: AT_ONCE,
};

const DIRECT: Tier = Tier {
    medium: Medium::Drives,
    lane: TWO_DRIVES,
    capacity: 14 * TB,
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

/// 256 GiB of host memory, same as the DRAM tier.
const HOST: HostMemory = HostMemory {
    lane: DRAM_LINK,
    capacity: 256 * GIB,
    eviction: PolicyKind::ReuseRate,
    schedule: SCHEDULE,
    lookahead: None,
};
