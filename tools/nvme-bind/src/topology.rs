//! PCIe distance between two functions.

use serde::Serialize;

use crate::gpu::Gpu;
use crate::pci::Function;

/// The nearest common ancestor of two functions; nearer is less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Meeting {
    /// In one switch (`PIX` of nvidia-smi).
    SameSwitch,
    /// In a tree of switches below one root port (`PXB`).
    SameRootPort,
    /// In one host bridge (`PHB`).
    SameHostBridge,
    /// In one NUMA node (`NODE`).
    SameNode,
    /// Between the sockets (`SYS`).
    AcrossNodes,
}

impl Meeting {
    pub(crate) fn words(self) -> &'static str {
        match self {
            Meeting::SameSwitch => "same switch",
            Meeting::SameRootPort => "same root port",
            Meeting::SameHostBridge => "same host bridge",
            Meeting::SameNode => "same NUMA node",
            Meeting::AcrossNodes => "across NUMA nodes",
        }
    }
}

/// The path between two functions; shorter is less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Distance {
    pub(crate) meeting: Meeting,
    /// Number of links from one to the other through the common ancestor.
    pub(crate) hops: usize,
}

/// Returns the distance from `a` to `b`.
pub(crate) fn distance(a: &Function, b: &Function) -> Distance {
    let shared = a.chain.iter().zip(&b.chain).take_while(|(a, b)| a == b).count();
    let (below_a, below_b) = (a.chain.len() - shared, b.chain.len() - shared);
    let meeting = if shared > 0 {
        // One bridge on each side (the switch's downstream ports), or none: functions of one card.
        if below_a <= 2 && below_b <= 2 { Meeting::SameSwitch } else { Meeting::SameRootPort }
    } else if a.host_bridge == b.host_bridge {
        Meeting::SameHostBridge
    } else if a.numa.is_some() && a.numa == b.numa {
        Meeting::SameNode
    } else {
        Meeting::AcrossNodes
    };
    Distance { meeting, hops: below_a + below_b }
}

/// Returns the GPU nearest to `function`, the first of equally near ones.
pub(crate) fn nearest<'a>(function: &Function, gpus: &'a [Gpu]) -> Option<(&'a Gpu, Distance)> {
    let ways = gpus.iter().map(|gpu| (gpu, distance(function, &gpu.function)));
    ways.min_by_key(|&(_, distance)| distance)
}
