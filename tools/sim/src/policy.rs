//! Ways to serve: where KV cache is kept besides the GPU, and how it moves.

use std::time::Duration;

use kv_catalog::PolicyKind;
use kv_schedule::{Config, Curve, IoCosts, Scheduler, Setting, SlackTable};
use kv_tier::LookaheadConfig;

use crate::lane::LaneModel;

/// How loads and computation go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loads {
    /// The load of a layer has to be there before the layer computes, and not before.
    Layers,
    /// A step waits for all loads of its requests, and then computes.
    Step,
    /// Everything has to be there before a request gets into a step; the others go on meanwhile.
    Whole,
}

/// What a tier consists of.
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
    /// What it consists of.
    pub medium: Medium,
    /// What its bytes go through.
    pub lane: LaneModel,
    /// Bytes.
    pub capacity: u64,
    /// Tokens that move together: a block, or a chunk.
    pub unit_tokens: u32,
    /// Objects that a unit has in a layer.
    pub objects: u32,
    /// What it evicts.
    pub eviction: PolicyKind,
    /// How its loads go.
    pub loads: Loads,
    /// When its operations start.
    pub schedule: Config,
}

/// Host memory before a tier: it keeps what was computed and what was loaded (write-through).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HostMemory {
    /// What its bytes go through.
    pub lane: LaneModel,
    /// Bytes.
    pub capacity: u64,
    /// What it evicts.
    pub eviction: PolicyKind,
    /// When copies start.
    pub schedule: Config,
    /// How far ahead what waits is brought there.
    pub lookahead: Option<LookaheadConfig>,
}

/// A way to serve.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// Its name.
    pub name: &'static str,
    /// Whether blocks stay in the GPU's memory when their request has ended.
    pub keeps_hbm: bool,
    /// What is below.
    pub tier: Option<Tier>,
    /// What is between.
    pub host: Option<HostMemory>,
}

const GIB: u64 = 1 << 30;
const TB: u64 = 1_000_000_000_000;

/// Everything starts when it comes: layer-wise without a scheduler.
const AT_ONCE: Config = Config {
    read_depth_bytes: u64::MAX,
    write_depth_bytes: u64::MAX,
    backlog_bytes: u64::MAX,
    window_share: None,
    margin: 1.0,
    high_water: 1.0,
    is_slack_aware: false,
};

/// Two of the paper's drives, as its own path reaches them (figure 9; section 2.2). The window is
/// the I/O kernel's: `GIO_WINDOW`.
pub const TWO_DRIVES: LaneModel = LaneModel {
    read: 25.9e9,
    write: 9.8e9,
    latency: Duration::from_micros(80),
    object: Duration::ZERO,
    mixed: 0.4,
    window: 8,
};

/// The same drives through the CPU, which asks for everything at once.
const THROUGH_CPU: LaneModel = LaneModel { window: usize::MAX, ..TWO_DRIVES };

/// Host memory over the link (section 2.2). Requests for what is loaded go the other way: 24 bytes
/// for each 512, and so 2.3 of the 13 GB/s that PCIe 5.0 with 16 lanes has beside these 50.
pub(crate) const DRAM_LINK: LaneModel = LaneModel {
    read: 50e9,
    write: 50e9,
    latency: Duration::from_micros(5),
    object: Duration::ZERO,
    mixed: LaneModel::FULL_DUPLEX,
    window: usize::MAX,
};

/// Nothing takes any time.
const NO_TIME: LaneModel = LaneModel {
    read: 1e18,
    write: 1e18,
    latency: Duration::from_nanos(1),
    object: Duration::ZERO,
    mixed: 1.0,
    window: usize::MAX,
};

impl LaneModel {
    /// A scheduler that knows what operations cost, and nothing of layers.
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
    /// Computes everything again.
    pub const RECOMPUTE: Self =
        Self { name: "recompute", keeps_hbm: false, tier: None, host: None };
    /// Keeps what the GPU's memory has room for.
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
    /// As [`Policy::SSD`], layer by layer.
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
    /// Drives to GPU, layer by layer, everything as soon as it can.
    pub const NAIVE: Self =
        Self::of("layer-wise", Tier { schedule: AT_ONCE, eviction: PolicyKind::Lru, ..DIRECT });
    /// Drives to GPU, layer by layer, with the scheduler.
    pub const OURS: Self = Self::of("ours", DIRECT);
    /// As ours, but what is loaded is there before a request gets into a step.
    pub const AHEAD: Self =
        Self::of("ours, before the step", Tier { loads: Loads::Whole, ..DIRECT });
    /// As ours, from drives that take no time: what no scheduler can be better than.
    pub const ORACLE: Self =
        Self::of("oracle", Tier { lane: NO_TIME, schedule: AT_ONCE, ..DIRECT });

    /// As ours, from host memory alone.
    pub const HOST_ALONE: Self = Self::of(
        "host memory alone",
        Tier { medium: Medium::Host, lane: DRAM_LINK, capacity: 256 * GIB, objects: 1, ..DIRECT },
    );
    /// As ours, with host memory before the drives.
    pub const WITH_HOST: Self = Self { name: "ours + host memory", host: Some(HOST), ..Self::OURS };
    /// As that, and what requests need that wait is brought to host memory meanwhile.
    pub const LOOKAHEAD: Self = Self {
        name: "ours + host memory, ahead",
        host: Some(HostMemory { lookahead: Some(LOOKAHEAD), ..HOST }),
        ..Self::OURS
    };

    const fn of(name: &'static str, tier: Tier) -> Self {
        Self { name, keeps_hbm: true, tier: Some(tier), host: None }
    }
}

/// As TierKV has it (section 3.4).
const LOOKAHEAD: LookaheadConfig = LookaheadConfig { window: 4, drives_window: 8, batch_blocks: 8 };

/// Chunks of 256 tokens, as LMCache has them.
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

/// The scheduler's numbers for bandwidths of tens of GB/s.
const SCHEDULE: Config = Config {
    read_depth_bytes: 64 << 20,
    write_depth_bytes: 16 << 20,
    backlog_bytes: 4 << 30,
    window_share: None,
    margin: 1.25,
    high_water: 0.8,
    is_slack_aware: true,
};

/// 256 GiB of host memory, as the DRAM tier has.
const HOST: HostMemory = HostMemory {
    lane: DRAM_LINK,
    capacity: 256 * GIB,
    eviction: PolicyKind::ReuseRate,
    schedule: SCHEDULE,
    lookahead: None,
};
