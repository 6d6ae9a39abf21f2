//! The simulated machine, and the policies on it.

use kv_schedule::{Setting, SlackTable};

use crate::{
    engine::{LayerTimes, Request, Setup},
    gpu::{Gpu, Model},
    lane::LaneModel,
    policy::{DRAM_LINK, Medium, Policy, TWO_DRIVES},
};

/// GPUs that share a model's tensors, host memory and drives.
///
/// Each of several GPUs computes and keeps its part of the heads, and loads its part of each block:
/// bandwidth and memory are those of all of them together. Communication between GPUs is not
/// modelled.
#[derive(Debug, Clone, Copy)]
pub struct Machine<'a> {
    /// The model.
    pub model: Model,
    /// The GPUs.
    pub gpu: Gpu,
    /// Measured layer times of an engine for that model; if `None`, from the GPU's FLOPs and bytes.
    pub layers: Option<&'a SlackTable>,
    /// Bytes for KV cache on all GPUs together.
    pub kv_bytes: u64,
    /// Bytes of host memory for KV cache.
    pub dram_bytes: u64,
    /// Number of drives, shared by all GPUs.
    pub drives: u32,
    /// Bytes per drive.
    pub drive_bytes: u64,
}

/// Tokens per block.
const BLOCK_TOKENS: u32 = 64;

impl Machine<'_> {
    /// Returns 90 % of the GPUs' memory minus the weights of the layers; `None` if they do not fit.
    #[must_use]
    pub fn kv_room(model: &Model, gpu: &Gpu) -> Option<u64> {
        let weights = 2.0 * model.layer_weights() * f64::from(model.layers);
        let bytes = gpu.bytes as f64 * f64::from(gpu.count) * 0.9 - weights;
        (bytes > 0.0).then_some(bytes as u64)
    }

    /// Returns the engine: blocks of 64 tokens, steps of up to 8,192 tokens, up to 256 requests.
    #[must_use]
    pub fn setup(&self) -> Setup<'_> {
        Setup {
            model: self.model,
            gpu: self.gpu,
            layers: self.layers.map(|layers| layers as &dyn LayerTimes),
            kv_bytes: self.kv_bytes,
            block_tokens: BLOCK_TOKENS,
            step_tokens: 8192,
            requests_max: 256,
        }
    }

    /// Returns the policy with this machine's tier: the bandwidth of its drives, limited per GPU to
    /// what software or the link can move.
    #[must_use]
    pub fn policy(&self, policy: Policy) -> Policy {
        let (gpus, drives) = (f64::from(self.gpu.count), f64::from(self.drives));
        let tier = policy.tier.map(|mut tier| {
            let LaneModel { read, write, .. } = tier.lane;
            match tier.medium {
                Medium::Host => {
                    (tier.lane.read, tier.lane.write) = (read * gpus, write * gpus);
                    tier.capacity = self.dram_bytes;
                }
                Medium::Drives => {
                    // A policy that reaches the bandwidth of two drives is limited by the drives.
                    let limit = |of: f64, two: f64, link: f64| {
                        let each = if of >= two { link } else { of };
                        (each * gpus).min(two / 2.0 * drives)
                    };
                    if read <= TWO_DRIVES.read {
                        tier.lane.read = limit(read, TWO_DRIVES.read, DRAM_LINK.read);
                        tier.lane.write = limit(write, TWO_DRIVES.write, DRAM_LINK.write);
                    }
                    tier.capacity = self.drive_bytes.saturating_mul(self.drives.into());
                }
            }
            tier
        });
        let host = policy.host.map(|mut host| {
            let LaneModel { read, write, .. } = host.lane;
            (host.lane.read, host.lane.write) = (read * gpus, write * gpus);
            host.capacity = self.dram_bytes;
            host
        });
        Policy { tier, host, ..policy }
    }

    /// Returns the first of `requests` that alone does not fit into the GPUs' memory.
    #[must_use]
    pub fn too_long(&self, requests: &[Request]) -> Option<usize> {
        let room = self.kv_bytes / (self.model.token_bytes() * u64::from(BLOCK_TOKENS));
        let blocks = |it: &Request| {
            (u64::from(it.input) + u64::from(it.output.max(1))).div_ceil(BLOCK_TOKENS.into())
        };
        requests.iter().position(|request| blocks(request) > room)
    }

    /// Describes the machine in words.
    #[must_use]
    pub fn setting(&self) -> Vec<String> {
        let Self { model, gpu, kv_bytes, .. } = self;
        let speed = match self.layers.map(SlackTable::setting) {
            Some(Setting { model, gpu, engine, .. }) => {
                format!("layers take as long as those of {model} on {gpu} with {engine}")
            }
            None => format!(
                "{:.0} TFLOP/s, of which matrix products reach {:.0} % and attention {:.0} %",
                gpu.flops / 1e12,
                gpu.linear * 100.0,
                gpu.attention * 100.0
            ),
        };
        let (Model { name, .. }, Gpu { count, name: gpus, .. }) = (model, gpu);
        let gb = *kv_bytes as f64 / 1e9;
        let mut setting =
            vec![format!("{name} on {count} {gpus} ({speed}); {gb:.1} GB for KV cache")];
        if gpu.count > 1 {
            setting.push(
                "tensor parallel: each GPU has its part of the heads; what GPUs say to each other \
                 is not modelled"
                    .to_owned(),
            );
        }
        setting.push(
            "blocks of 64 tokens, up to 8,192 tokens a step (chunked prefill), up to 256 requests \
             at a time"
                .to_owned(),
        );
        setting
    }
}

#[cfg(test)]
mod tests;
