//! The simulated machine, and the policies on it.

use kv_schedule::{Setting, SlackTable};

use crate::{
    engine::{LayerTimes, Request, Setup},
    gpu::{Gpu, Model},
    parameters::Parameters,
    policy::Policy,
    storage::Storage,
};

/// GPUs that share a model's tensors, host memory and drives.
///
/// Each of several GPUs computes and keeps its part of the heads, and loads its part of each block:
/// bandwidth and memory are those of all of them together. Communication between GPUs is not
/// modelled.
#[derive(Debug, Clone, Copy)]
pub struct Machine<'a> {
    /// Parameters of drives and links.
    pub parameters: &'a Parameters,
    /// The model.
    pub model: Model,
    /// The GPUs.
    pub gpu: Gpu,
    /// Measured layer times of an engine for that model; if `None`, from the GPU's FLOPs and bytes.
    pub layers: Option<&'a SlackTable>,
    /// Initial table of the scheduler; if `None`, the true costs and no layer times.
    pub known: Option<&'a SlackTable>,
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
    pub fn kv_room(model: &Model, gpu: &Gpu) -> Option<u64> {
        let weights = 2.0 * model.layer_weights() * f64::from(model.layers);
        let bytes = gpu.bytes as f64 * f64::from(gpu.count) * 0.9 - weights;
        (bytes > 0.0).then_some(bytes as u64)
    }

    /// Returns the engine: blocks of 64 tokens, steps of up to 8,192 tokens, up to 256 requests.
    pub fn setup(&self) -> Setup<'_> {
        Setup {
            model: self.model,
            gpu: self.gpu,
            layers: self.layers.map(|layers| layers as &dyn LayerTimes),
            storage: self.storage(),
            known: self.known,
            kv_bytes: self.kv_bytes,
            block_tokens: BLOCK_TOKENS,
            step_tokens: 8192,
            requests_max: 256,
        }
    }

    /// Returns the policy for its tiers: by layers, with the scheduler, and with lookahead if there
    /// are both host memory and drives.
    pub fn policy(&self) -> Policy {
        match (self.dram_bytes, self.drives) {
            (0, 0) => Policy::HBM,
            (0, _) => Policy::OURS,
            (_, 0) => Policy::HOST_ALONE,
            _ => Policy::LOOKAHEAD,
        }
    }

    /// Returns the tiers below the GPUs.
    pub fn storage(&self) -> Storage {
        Storage {
            host_bytes: self.dram_bytes,
            drive_bytes: self.drive_bytes.saturating_mul(self.drives.into()),
            ..self.parameters.storage(self.drives, self.gpu.count)
        }
    }

    /// Returns the first of `requests` that alone does not fit into the GPUs' memory.
    pub fn too_long(&self, requests: &[Request]) -> Option<usize> {
        let room = self.kv_bytes / (self.model.token_bytes() * u64::from(BLOCK_TOKENS));
        let blocks = |it: &Request| {
            (u64::from(it.input) + u64::from(it.output.max(1))).div_ceil(BLOCK_TOKENS.into())
        };
        requests.iter().position(|request| blocks(request) > room)
    }

    /// Describes the machine in words.
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
