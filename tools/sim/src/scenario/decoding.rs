//! TierKV's simulation: decoding for more requests than fit into the GPU's memory.

use std::time::Duration;

use kv_schedule::Config;
use kv_tier::LookaheadConfig;
use serde::Deserialize;

use super::numbers::{Numbers, Results};
use crate::{
    lane::LaneModel,
    paging::{Ahead, Decode, Decoded, Hbm, LowerTiers, lane},
    parallel::each,
    parameters::Parameters,
    summary,
    workload::{Lengths, Profile},
};

const fn lengths(least: u32, most: u32, mean: f64, spread: f64) -> Lengths {
    Lengths { tokens: (least, most), mean, spread }
}

/// Four kinds of requests. The paper has lengths of the last one only. Its table 6 implies that no
/// other is longer than 1,830 tokens: more do not come over the link in four iterations.
const PROFILES: [Profile; 4] = [
    Profile { input: lengths(16, 512, 160.0, 0.7), output: lengths(16, 512, 150.0, 0.6) },
    Profile { input: lengths(256, 1280, 900.0, 0.3), output: lengths(16, 256, 128.0, 0.4) },
    Profile { input: lengths(32, 1024, 400.0, 0.5), output: lengths(16, 768, 300.0, 0.7) },
    Profile::UNIFORM,
];

/// Bytes of a block of a model of 7 billion parameters (table 2).
const BLOCK_BYTES: u64 = 2 << 20;

/// The paper's engine, three times oversubscribed, with LRU and no prefetching, if nothing else is
/// said.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Decoding {
    oversubscription: f64,
    hbm: Hbm,
    prefetches: Prefetches,
    /// Iterations ahead of which blocks are read.
    window: u32,
    high_water: Option<f64>,
    /// Parameters of the model: iterations are as long as these are many.
    billions: f64,
    /// Time of an iteration, if it is not the paper's.
    iteration_ms: Option<u64>,
    /// Bytes of a block, if they do not follow from its tokens.
    block_bytes: Option<u64>,
    block_tokens: u32,
    /// True if a block takes the latency and its bytes, one after another (equation 1); else
    /// latencies overlap.
    is_alone: bool,
    requests: Requests,
    /// Fraction of the time that the link, or the drives, are busy, by the number of requests that
    /// change places.
    busy: Option<f64>,
    /// For that, the result of another run with the blocks of a returning request.
    blocks: String,
    /// Blocks of host memory, if requests that do not run are on the drives.
    on_drives: Option<u32>,
    /// Fraction of announced requests that lose their turn.
    preempted: f64,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Prefetches {
    /// Missing blocks are there at once.
    Instant,
    /// A request's blocks move together if all of them can be in time.
    Paper,
    /// The store's lookahead.
    Ours,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Requests {
    Chatbot,
    Summarization,
    Code,
    Uniform,
    /// As many of each.
    Mixed,
    /// Summarization of longer prompts than the paper can have.
    Long,
}

impl Default for Decoding {
    fn default() -> Self {
        Self {
            oversubscription: 3.0,
            hbm: Hbm::Lru,
            prefetches: Prefetches::Ours,
            window: 0,
            high_water: None,
            billions: 7.0,
            iteration_ms: None,
            block_bytes: None,
            block_tokens: 16,
            is_alone: false,
            requests: Requests::Mixed,
            busy: None,
            blocks: String::new(),
            on_drives: None,
            preempted: 0.0,
        }
    }
}

impl Requests {
    fn profiles(self) -> &'static [Profile] {
        match self {
            Self::Chatbot => &PROFILES[..1],
            Self::Summarization => &PROFILES[1..2],
            Self::Code => &PROFILES[2..3],
            Self::Uniform => &PROFILES[3..],
            Self::Mixed => &PROFILES,
            Self::Long => &[Profile::SUMMARIZATION],
        }
    }
}

impl Decoding {
    fn ahead(&self) -> Option<Ahead> {
        let batch_blocks = match self.prefetches {
            Prefetches::Instant => return None,
            Prefetches::Paper => 1 << 16,
            Prefetches::Ours => 8,
        };
        let window = self.window;
        let lookahead = LookaheadConfig { window, drives_window: 2 * window, batch_blocks };
        let usual = Config::default();
        let high_water = self.high_water.unwrap_or(usual.high_water);
        Some(Ahead { lookahead, schedule: Config { high_water, ..usual } })
    }

    fn lower(&self, parameters: &Parameters) -> LowerTiers {
        let of = |name: &str| parameters.value(name);
        let mut link = lane(parameters.micros("host.latency"), of("host.read"));
        if self.is_alone {
            let latency = Duration::from_nanos(1);
            link = LaneModel { set_up: link.latency, latency, ..link };
        }
        let tokens = u64::from(self.block_tokens);
        let host_blocks = (of("tierkv.host") / BLOCK_BYTES as f64) as u32;
        let host_blocks = (u64::from(host_blocks) * 16 / tokens) as u32;
        LowerTiers {
            block_bytes: self.block_bytes.unwrap_or(BLOCK_BYTES * tokens / 16),
            host_blocks: self.on_drives.unwrap_or(host_blocks),
            drives: lane(parameters.micros("drive.latency"), of("tierkv.drive")),
            link,
        }
    }

    fn decode(&self, parameters: &Parameters, found: &Numbers) -> Decode<'static> {
        let lower = self.lower(parameters);
        let iteration = match self.iteration_ms {
            Some(ms) => Duration::from_millis(ms),
            None => parameters.micros("tierkv.iteration").mul_f64(self.billions / 7.0),
        };
        let exchanged = match self.busy {
            Some(busy) => {
                let lane = if self.on_drives.is_some() { lower.drives } else { lower.link };
                let returns = found.of(&self.blocks) * lower.block_bytes as f64 / lane.read;
                busy * iteration.as_secs_f64() / returns
            }
            None => (self.oversubscription - 1.0) * parameters.value("tierkv.exchanged"),
        };
        Decode {
            iteration,
            block_tokens: self.block_tokens,
            batch: parameters.value("tierkv.batch") as u32,
            oversubscription: self.oversubscription,
            exchanged,
            profiles: self.requests.profiles(),
            lower,
            on_drives: self.on_drives.is_some(),
            hbm: self.hbm,
            ahead: self.ahead(),
            preempted: self.preempted,
            iterations: 150,
        }
    }

    pub(super) fn run(&self, parameters: &Parameters, found: &Numbers) -> Results {
        let decode = self.decode(parameters, found);
        let LowerTiers { block_bytes, link, .. } = decode.lower;
        let mut found = median(&decode);
        let blocks = found["blocks"];
        let computes = decode.iteration.as_secs_f64() * 1e3;
        let reads = blocks * block_bytes as f64 / link.read * 1e3;
        let bytes = block_bytes as f64 / link.read;
        found.extend([
            ("blocks of a request", blocks / decode.exchanged),
            ("computes", computes),
            ("reads", reads),
            ("beside, %", computes / reads * 100.0),
            // The most that reading beside computing can gain.
            ("bound", (computes + reads) / computes.max(reads)),
            ("efficiency", bytes / (bytes + link.set_up.as_secs_f64())),
        ]);
        found.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// Returns the medians over the paper's five seeds.
fn median(decode: &Decode<'_>) -> Decoded {
    let found = each(&[42, 43, 44, 45, 46], |seed| decode.run(*seed));
    let of = |name: &'static str| {
        let all = found.iter().map(|it| it[name]).collect();
        (name, summary::median(all).expect("there are five"))
    };
    found[0].keys().map(|name| of(name)).collect()
}

#[cfg(test)]
mod tests;
