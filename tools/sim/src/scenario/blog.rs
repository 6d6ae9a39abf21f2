//! The vLLM blog on tiered offloading: the cost of offloaded blocks in a decode step.

use std::time::Duration;

use kv_schedule::Config;
use kv_tier::{LookaheadConfig, RequestId};
use serde::Deserialize;

use crate::{
    paging::{LowerTiers, Paging},
    parameters::Parameters,
    shown::{Results, results},
};

/// Decode steps, of whose blocks a part is below the GPU.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OffloadedStep {
    lower: LowerTiers,
    /// Time of a step that does not wait.
    step_us: f64,
    /// Blocks of a step.
    blocks: f64,
    /// Part of them that is below the GPU.
    percent: f64,
    /// True if they are on drives, and not in host memory.
    on_drives: bool,
    /// True if they are announced one step ahead, two for the drives; or not at all.
    is_ahead: bool,
}

impl OffloadedStep {
    pub(super) fn run(&self, _: &Parameters) -> Results {
        let blocks = (self.blocks * self.percent / 100.0).round() as u64;
        results([("blocks", blocks as f64), ("ms", self.ms(blocks))])
    }

    /// Returns the mean milliseconds of a step with `blocks` blocks below the GPU.
    fn ms(&self, blocks: u64) -> f64 {
        const STEPS: u32 = 200;
        let computes = Duration::from_secs_f64(self.step_us * 1e-6);
        let window = u32::from(self.is_ahead);
        let lookahead = LookaheadConfig { window, drives_window: 2 * window, batch_blocks: 8 };
        let mut paging = Paging::new(&self.lower, lookahead, Config::default());
        let keys = |step: u32| (0..blocks).map(move |at| u64::from(step) << 16 | at);
        let mut took = Duration::ZERO;
        for step in 0..STEPS {
            let (id, now): (_, Vec<u64>) = (RequestId(step.into()), keys(step).collect());
            // Step times are known from the second step on.
            if step > 2 {
                if self.is_ahead { paging.run(id, &now) } else { paging.read(id, &now) }
            }
            let waited = paging.wait();
            now.into_iter().for_each(|key| paging.forget(key));
            for ahead in 1..=2 {
                let next: Vec<u64> = keys(step + ahead).collect();
                if !self.on_drives {
                    next.iter().for_each(|key| paging.keep(*key));
                }
                if self.is_ahead && step > 0 && step + ahead > 2 {
                    let id = RequestId((step + ahead).into());
                    paging.announce(id, &next, ahead);
                    paging.allocated(id);
                }
            }
            paging.compute(waited, computes);
            took += waited + computes;
        }
        took.as_secs_f64() * 1e3 / f64::from(STEPS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paging::Channel;

    #[test]
    fn what_is_announced_is_hidden_and_what_is_not_is_waited_for() {
        let [drives, link] = [(7e9, 10.0), (24e9, 1.0)].map(|(bandwidth, latency_us)| Channel {
            bandwidth,
            latency_us,
            set_up_us: 0.0,
        });
        let lower = LowerTiers { block_bytes: 1_310_720, host_blocks: 4096.0, drives, link };
        let (step_us, percent) = (14_800.0, 100.0);
        let ms = |blocks: u32, on_drives, is_ahead| {
            let blocks = blocks.into();
            OffloadedStep { lower, step_us, blocks, percent, on_drives, is_ahead }.ms(blocks as u64)
        };
        let alone = 14.8;
        for (blocks, on_drives) in [(8, false), (32, false), (81, false), (8, true), (32, true)] {
            let late = ms(blocks, on_drives, false) - alone;
            let link = f64::from(blocks) * 1_310_720.0 / link.bandwidth * 1e3;
            assert!(late > link * 0.95, "{blocks}: {late} {link}");
            assert!(ms(blocks, on_drives, true) < alone * 1.001, "{blocks}");
        }
        // More than the link can move in a step.
        assert!(ms(400, false, true) > 20.0);
    }
}
