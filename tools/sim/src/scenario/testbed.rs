//! The engine of an experiment, and the machine that it runs on.

use serde::{Deserialize, Deserializer, de::Error as _};

use crate::{
    engine::Setup,
    gpu::{Gpu, LLAMA_3_70B, Model, QWEN3_32B},
    lane::{GBPS, LaneModel},
    machine::Machine,
    parameters::Parameters,
    policy::Policy,
    storage::Storage,
};

/// Qwen2.5-Coder-32B.
const QWEN2_5_32B: Model = Model { name: "qwen2.5-32b", heads: 40, inner: 27_648, ..QWEN3_32B };
/// Qwen2.5-72B.
const QWEN2_5_72B: Model = Model { name: "qwen2.5-72b", inner: 29_568, ..LLAMA_3_70B };

/// Tokens per block.
pub(super) const BLOCK_TOKENS: u32 = 64;
/// Pages of vLLM in a chunk of LMCache, of a layer (section 4.1).
pub(super) const CHUNK_PAGES: u32 = 16;

/// GPUs, memory, drives, and a link to another machine.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Testbed {
    #[serde(deserialize_with = "model")]
    pub(super) model: Model,
    gpu: String,
    pub(super) gpus: u32,
    drives: u32,
    /// Fraction of the drives' bandwidth that is left while reads and writes mix, if it is not that
    /// of the parameters.
    mixed: Option<f64>,
    memory: Room,
    step_tokens: u32,
    requests_max: usize,
    /// Another machine that stores; then host memory is that of the LMCache paper.
    remote: Option<Remote>,
}

/// The GPUs' memory for keys and values.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Room {
    /// The parameter `gpu.kv` for each GPU.
    Tutti,
    /// The rest beside the weights.
    Rest,
    /// As much as it takes, with no cache.
    Unlimited,
}

/// A link to another machine.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Remote {
    /// Its bandwidth; that of NVLink for each GPU, if there is none.
    gbps: Option<f64>,
    /// The parameter with the time per message.
    message: Option<String>,
    by: Unit,
}

/// A message on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Unit {
    /// A chunk, of all layers.
    Chunks,
    /// A page of a layer.
    Pages,
}

impl Unit {
    /// Returns a link on which this is a message. Without it, a message is a layer's chunk.
    pub(super) fn on(self, lane: LaneModel, model: &Model) -> LaneModel {
        match self {
            Self::Chunks => lane.by_messages(model.layers),
            Self::Pages => LaneModel { set_up: lane.set_up * CHUNK_PAGES, ..lane },
        }
    }
}

impl Testbed {
    pub(super) fn setup(&self, parameters: &Parameters) -> Setup<'static> {
        let name =
            Gpu::NAMES.into_iter().find(|it| *it == self.gpu).expect("a GPU with parameters");
        let gpu = Gpu { count: self.gpus, ..parameters.gpu(name) };
        let mut storage = parameters.storage(self.drives, self.gpus);
        storage.direct.mixed = self.mixed.unwrap_or(storage.direct.mixed);
        if let Some(remote) = &self.remote {
            storage = Storage {
                remote: remote.lane(parameters, &self.model, self.gpus),
                host_bytes: parameters.value("lmcache.host") as u64,
                drive_bytes: parameters.value("central.bytes") as u64,
                ..storage
            };
        }
        let kv_bytes = match self.memory {
            Room::Tutti => u64::from(self.gpus) * parameters.value("gpu.kv") as u64,
            Room::Rest => Machine::kv_room(&self.model, &gpu).expect("the GPUs hold the model"),
            Room::Unlimited => u64::MAX,
        };
        Setup {
            model: self.model,
            gpu,
            layers: None,
            storage,
            known: None,
            kv_bytes,
            block_tokens: BLOCK_TOKENS,
            step_tokens: self.step_tokens,
            requests_max: self.requests_max,
        }
    }
}

impl Remote {
    fn lane(&self, parameters: &Parameters, model: &Model, gpus: u32) -> LaneModel {
        let nvlink = || parameters.value("nvlink.bandwidth") * f64::from(gpus);
        let mut lane = parameters.net(self.gbps.map_or_else(nvlink, |gbps| gbps * GBPS));
        if let Some(message) = &self.message {
            lane.set_up = parameters.micros(message);
        }
        self.by.on(lane, model)
    }
}

fn model<'a, D: Deserializer<'a>>(deserializer: D) -> Result<Model, D::Error> {
    let name = String::deserialize(deserializer)?;
    let mut all = Model::ALL.iter().copied().chain([QWEN2_5_32B, QWEN2_5_72B]);
    all.find(|it| it.name == name).ok_or_else(|| D::Error::custom(format!("{name}: no such model")))
}

impl<'a> Deserialize<'a> for Policy {
    /// Reads a policy by its name.
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> Result<Self, D::Error> {
        const ALL: [Policy; 12] = [
            Policy::RECOMPUTE,
            Policy::HBM,
            Policy::DRAM,
            Policy::SSD,
            Policy::SSD_LAYERS,
            Policy::GDS,
            Policy::NAIVE,
            Policy::OURS,
            Policy::AHEAD,
            Policy::ORACLE,
            Policy::REMOTE,
            Policy::REMOTE_WAITS,
        ];
        let name = String::deserialize(deserializer)?;
        let found = ALL.into_iter().find(|it| it.name == name);
        found.ok_or_else(|| D::Error::custom(format!("{name}: no such policy")))
    }
}
