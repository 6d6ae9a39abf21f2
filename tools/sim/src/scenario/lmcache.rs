//! The LMCache paper: messages, a central store, prefill apart from decoding, load or compute.

pub(super) mod apart;
pub(super) mod central;
pub(super) mod messages;
pub(super) mod offload;
pub(super) mod queue;

use std::time::Duration;

// The standard library's function differs by platform.
use libm::{exp2, log as ln};

use super::{calibrated, input, predicted, tutti};
use crate::{
    engine::{Report, Request, Setup, serve},
    gpu::{Gpu, LLAMA_3_8B, LLAMA_3_70B, Model, QWEN3_32B},
    lane::{GBPS, LaneModel},
    machine::Machine,
    outcome::{Outcome, Table, row},
    parameters::Parameters,
    policy::Policy,
    storage::Storage,
};

/// Qwen2.5-Coder-32B.
const QWEN2_5_32B: Model = Model { name: "qwen2.5-32b", heads: 40, inner: 27_648, ..QWEN3_32B };
/// Qwen2.5-72B.
const QWEN2_5_72B: Model = Model { name: "qwen2.5-72b", inner: 29_568, ..LLAMA_3_70B };
/// The paper's dense models, and the number of H100 that hold them with a context of 128K tokens.
const MODELS: [(Model, u32); 4] =
    [(LLAMA_3_8B, 1), (QWEN2_5_32B, 2), (LLAMA_3_70B, 4), (QWEN2_5_72B, 4)];
const MODELS_SAY: &str = "Llama 3 8B on one H100, Qwen2.5 32B on two, Llama 3 70B and Qwen2.5 72B \
    on four, with tensor parallelism: the paper takes as few as can serve a model, and gives no \
    number. Its fifth, a mixture of experts with 8-bit weights, is not modelled";

/// Tokens of a page of vLLM, and pages of a chunk of LMCache in a layer (section 4.1).
const PAGE_TOKENS: u64 = 16;
const CHUNK_PAGES: u32 = 16;
const BLOCK: u32 = 64;

/// Returns a link on which a chunk is one message for all layers.
fn by_chunks(lane: LaneModel, model: &Model) -> LaneModel {
    lane.by_messages(model.layers)
}

/// Returns a link on which each page of a layer is a message.
fn by_pages(lane: LaneModel) -> LaneModel {
    LaneModel { set_up: lane.set_up * CHUNK_PAGES, ..lane }
}

/// Returns the engine, with another machine behind a link.
fn setup(
    parameters: &Parameters,
    gpu: &'static str,
    (model, count): (Model, u32),
    remote: LaneModel,
) -> Setup<'static> {
    let gpu = Gpu { count, ..parameters.gpu(gpu) };
    Setup {
        model,
        gpu,
        storage: Storage {
            remote,
            host_bytes: parameters.value("lmcache.host") as u64,
            drive_bytes: parameters.value("central.bytes") as u64,
            ..parameters.storage(1, count)
        },
        kv_bytes: Machine::kv_room(&model, &gpu).expect("the GPUs hold the model"),
        step_tokens: 8192,
        requests_max: 256,
        ..tutti::setup(parameters)
    }
}

/// Serves requests of whose prompts an earlier pass has stored so many percent. Returns the results
/// of the second pass.
fn serve_stored(setup: &Setup<'_>, policy: &Policy, requests: &[Request], stored: usize) -> Report {
    // GPU caching is off to measure the tier below.
    let policy = Policy { keeps_hbm: false, ..*policy };
    let first = |it: &Request| Request { arrival: Duration::ZERO, output: 1, ..it.clone() };
    let mut all: Vec<Request> = requests.iter().map(first).collect();
    let begins = serve(setup, &policy, &all).took + Duration::from_secs(60);
    let second = |it: &Request| {
        let mut second = Request { arrival: it.arrival + begins, ..it.clone() };
        let new = it.blocks.len() * stored / 100..;
        second.blocks[new].iter_mut().for_each(|name| *name |= 1 << 63);
        second
    };
    all.extend(requests.iter().map(second));
    let Report { mut served, took, .. } = serve(setup, &policy, &all);
    let served = served.split_off(requests.len());
    Report { served, took: took - begins, ..Report::default() }
}

fn mean(numbers: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = numbers.len() as f64;
    numbers.sum::<f64>() / count
}

/// Returns the least and the greatest number.
fn range(numbers: impl Iterator<Item = f64>) -> [f64; 2] {
    numbers
        .fold([f64::INFINITY, f64::NEG_INFINITY], |[least, most], it| [least.min(it), most.max(it)])
}

/// Tokens in units of 1,024.
const KILOS: [u32; 8] = [4, 8, 16, 32, 64, 128, 256, 512];
const LINKS: [f64; 3] = [32.0, 64.0, 128.0];

/// Returns the time of computing a prompt, and of loading it over each link, by length; in ms.
fn load_or_compute(parameters: &Parameters, model: Model) -> Vec<[f64; 4]> {
    let with = |remote| Setup {
        kv_bytes: u64::MAX,
        step_tokens: 1 << 20,
        ..setup(parameters, "B200", (model, 1), remote)
    };
    let of = |kilo: &u32| {
        let tokens = kilo << 10;
        let ttft = |gbps: f64, policy: &Policy| {
            let remote = by_chunks(parameters.net(gbps * GBPS), &model);
            tutti::one(&with(remote), policy, tokens, tokens).ttft
        };
        let [slow, middle, fast] = LINKS.map(|gbps| ttft(gbps, &Policy::REMOTE));
        [ttft(LINKS[0], &Policy::RECOMPUTE), slow, middle, fast]
    };
    KILOS.iter().map(of).collect()
}

/// Returns the length in 1,024 tokens from which on loading is faster, between two of the lengths
/// by the logarithm; 0 if at all of them, and infinite if at none.
fn crossover(found: &[[f64; 4]], link: usize) -> f64 {
    let slower = |it: &[f64; 4]| ln(it[link] / it[0]);
    let at = found.iter().rposition(|it| slower(it) > 0.0).map_or(0, |last| last + 1);
    let (Some(before), Some(after)) = (at.checked_sub(1), found.get(at)) else {
        return if at == 0 { 0.0 } else { f64::INFINITY };
    };
    let (low, high) = (slower(&found[before]), -slower(after));
    f64::from(KILOS[before]) * exp2(low / (low + high))
}

pub(super) fn figure_12(parameters: &Parameters) -> Outcome {
    const SHAPE: &str = "if loading at 64 Gbps wins at all lengths, computing a token takes longer \
        than that at the shortest, and at 256K at most twice as long, or 32 Gbps would win before. \
        But attention over 256K tokens alone has 2 to 5 times the FLOPs of all products";
    let mut outcome = Outcome::of(tutti::setting(parameters));
    outcome.setting.truncate(2);
    outcome.setting[0] = format!(
        "one B200 ({:.0} TFLOP/s), as fast for its peak as the H100; all of the prompt is stored, \
         in 16-bit numbers; the paper names neither model nor number of GPUs. Memory for all \
         lengths",
        parameters.gpu("B200").flops / 1e12
    );
    let models = [LLAMA_3_8B, QWEN2_5_32B, LLAMA_3_70B];
    let columns = ["1,024 tokens", "computed, ms", "32 Gbps", "64 Gbps", "128 Gbps"];
    let mut crossovers = Vec::new();
    for model in models {
        let found = load_or_compute(parameters, model);
        let rows = KILOS.iter().zip(&found).map(|(kilo, it)| row(kilo.to_string(), *it));
        outcome.tables.push(Table::new(model.name, columns, rows));
        let at = [1, 2, 3].map(|link| crossover(&found, link));
        crossovers.push((model.name, at));
        let what = format!("{}: 32 Gbps wins above", model.name);
        outcome.comparisons.push(predicted(&what, "1,024 tokens", 256.0, at[0], SHAPE));
        for (link, gbps) in [(2, 64), (3, 128)] {
            let wins = found.iter().filter(|it| it[link] < it[0]).count() as f64;
            let what = format!("{}: lengths at which {gbps} Gbps wins", model.name);
            let all = KILOS.len() as f64;
            outcome.comparisons.push(predicted(&what, "", all, wins, ""));
        }
    }
    let rows = crossovers.iter().map(|(name, at)| row(*name, *at));
    let columns = ["", "32 Gbps", "64 Gbps", "128 Gbps"];
    let title = "Length from which on loading is faster, 1,024 tokens; 0: all of the above";
    outcome.tables.push(Table::new(title, columns, rows));
    outcome.notes.push(
        "Bytes of a token by FLOPs of a token decide, not the number of parameters alone: the \
         larger the model, the sooner loading wins. An adaptive cache has to know both the link \
         and the GPU."
            .to_owned(),
    );
    outcome
}

#[cfg(test)]
mod tests;
