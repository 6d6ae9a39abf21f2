//! The vLLM blog on tiered offloading: the cost of offloaded blocks in a decode step, and the
//! number of sequences that fit.

use std::time::Duration;

use kv_schedule::Config;
use kv_tier::{LookaheadConfig, RequestId};
use serde::Deserialize;

use super::numbers::{Results, results};
use crate::{
    paging::{Ahead, LowerTiers, Paging, lane},
    parameters::Parameters,
};

/// Bytes of a block of Llama-70B, split over four A100: 80 layers, two of eight KV heads of 128,
/// keys and values, 2 bytes, 16 tokens.
const BLOCK_BYTES: u64 = 80 * 2 * 128 * 2 * 2 * 16;

fn lower(parameters: &Parameters) -> LowerTiers {
    let lane = |name: &str| {
        let of = |what: &str| format!("vllm.{name}{what}");
        lane(parameters.micros(&of(".latency")), parameters.value(&of("")))
    };
    let [drives, link] = ["drive", "link"].map(lane);
    LowerTiers { block_bytes: BLOCK_BYTES, host_blocks: 4096, drives, link }
}

/// A decode step of 64 sequences, of whose blocks a part is below the GPU.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OffloadedStep {
    percent: f64,
    /// True if they are on drives, and not in host memory.
    on_drives: bool,
}

impl OffloadedStep {
    pub(super) fn run(&self, parameters: &Parameters) -> Results {
        let (lower, step) = (lower(parameters), parameters.micros("vllm.step"));
        let blocks = (parameters.value("vllm.blocks") * self.percent / 100.0).round() as u64;
        let ms = |is_ahead| step_ms(lower, step, blocks, self.on_drives, is_ahead);
        let (late, ahead) = (ms(false), ms(true));
        let a_byte = lower.drives.read.recip() + lower.link.read.recip();
        let moved = blocks as f64 * BLOCK_BYTES as f64 * a_byte;
        results([
            ("blocks", blocks as f64),
            ("late", late),
            ("ahead", ahead),
            ("tokens/s", 64.0 / ahead * 1e3),
            // All blocks come to host memory before the first one is copied.
            ("late, then copied", (step.as_secs_f64() + moved) * 1e3),
        ])
    }
}

/// Returns the mean milliseconds of a step with `blocks` blocks below the GPU, which are announced
/// one step ahead, two for the drives; or not at all.
fn step_ms(
    lower: LowerTiers,
    computes: Duration,
    blocks: u64,
    on_drives: bool,
    is_ahead: bool,
) -> f64 {
    const STEPS: u32 = 200;
    let window = u32::from(is_ahead);
    let lookahead = LookaheadConfig { window, drives_window: 2 * window, batch_blocks: 8 };
    let mut paging = Paging::new(lower, Ahead { lookahead, schedule: Config::default() });
    let keys = |step: u32| (0..blocks).map(move |at| u64::from(step) << 16 | at);
    let mut took = Duration::ZERO;
    for step in 0..STEPS {
        let (id, now): (_, Vec<u64>) = (RequestId(step.into()), keys(step).collect());
        // Step times are known from the second step on.
        if step > 2 {
            if is_ahead { paging.run(id, &now) } else { paging.read(id, &now) }
        }
        let waited = paging.wait();
        now.into_iter().for_each(|key| paging.forget(key));
        for ahead in 1..=2 {
            let next: Vec<u64> = keys(step + ahead).collect();
            if !on_drives {
                next.iter().for_each(|key| paging.keep(*key));
            }
            if is_ahead && step > 0 && step + ahead > 2 {
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

/// Times of single blocks, and the numbers of sequences of 4,096 tokens that fit: arithmetic.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Capacity {}

impl Capacity {
    pub(super) fn run(&self, parameters: &Parameters) -> Results {
        let LowerTiers { drives, link, .. } = lower(parameters);
        let block = BLOCK_BYTES as f64;
        let link = block / link.read * 1e3;
        let drive = block / drives.read * 1e3 + drives.latency.as_secs_f64() * 1e3;
        let fits = (15.0 / link).floor();
        let sequences = |bytes: f64| (bytes / block).floor() / 256.0;
        let gpu = |weights: f64| sequences(80e9 - weights - 2e9).floor();
        let [cpu, ssd, large] = [256e9, 1e12, 3.84e12].map(sequences);
        results([
            ("link, us", link * 1e3),
            ("fits", fits),
            ("fits, tokens", fits * 16.0),
            ("link", link),
            ("drive", drive + link),
            ("GPU", gpu(32.5e9)),
            ("GPU, all weights", gpu(35.3e9)),
            ("256 GB", cpu.floor()),
            ("256 GB, four GPUs", (cpu / 4.0).floor()),
            ("512 GB", (2.0 * cpu).floor()),
            ("1 TB", ssd.floor()),
            ("4 TB", large.floor()),
            ("4 TB, four GPUs", (large / 4.0).floor()),
            ("128K tokens", 131_072.0 / 16.0),
            ("128K tokens, GB", 8192.0 * 4.0 * block / 1e9),
            ("wanted", parameters.value("vllm.blocks")),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_announced_is_hidden_and_what_is_not_is_waited_for() {
        let parameters = Parameters::default();
        let (lower, step) = (lower(&parameters), parameters.micros("vllm.step"));
        let ms = |blocks, on_drives, is_ahead| step_ms(lower, step, blocks, on_drives, is_ahead);
        let alone = step.as_secs_f64() * 1e3;
        for (blocks, on_drives) in [(8, false), (32, false), (81, false), (8, true), (32, true)] {
            let late = ms(blocks, on_drives, false) - alone;
            let link = blocks as f64 * BLOCK_BYTES as f64 / lower.link.read * 1e3;
            assert!(late > link * 0.95, "{blocks}: {late} {link}");
            assert!(ms(blocks, on_drives, true) < alone * 1.001, "{blocks}");
        }
        // More than the link can move in a step.
        assert!(ms(400, false, true) > 20.0);
    }
}
