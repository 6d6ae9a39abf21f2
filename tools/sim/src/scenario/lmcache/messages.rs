//! Sizes of messages: tables 1 and 5.

use std::time::Duration;

use kv_schedule::{Direction, OpId};

use super::{
    CHUNK_PAGES, GBPS, MODELS, MODELS_SAY, PAGE_TOKENS, by_chunks, by_pages, calibrated, predicted,
};
use crate::{
    gpu::{LLAMA_3_8B, Model},
    lane::{Lane, LaneModel},
    outcome::{Outcome, Table, number, row},
    parameters::Parameters,
};

/// Bytes, and the paper's GB/s.
const PAPER: [(&str, u64, f64); 6] = [
    ("64 KiB", 64 << 10, 4.0),
    ("256 KiB", 256 << 10, 13.0),
    ("1 MiB", 1 << 20, 30.0),
    ("10 MiB", 10 << 20, 46.0),
    ("16 MiB", 16 << 20, 49.0),
    ("100 MiB", 100 << 20, 49.0),
];

/// Returns the bytes a second of messages of `bytes`, one after another.
fn throughput(model: LaneModel, bytes: u64) -> f64 {
    const COUNT: u64 = 1000;
    let mut lane = Lane::new(model);
    (0..COUNT).for_each(|id| lane.push(Duration::ZERO, OpId(id), Direction::Read, bytes, 1));
    let mut took = Duration::ZERO;
    while let Some(now) = lane.next_event() {
        took = now;
        lane.arrived(now);
    }
    (bytes * COUNT) as f64 / took.as_secs_f64()
}

/// Returns the milliseconds of so many tokens of a model over a link whose set-up times are those
/// of a layer's chunk.
fn ms(lane: LaneModel, model: &Model, tokens: u64) -> f64 {
    let chunks = tokens / (PAGE_TOKENS * u64::from(CHUNK_PAGES)) * u64::from(model.layers);
    let set_up = lane.set_up.as_secs_f64() * chunks as f64;
    ((tokens * model.token_bytes()) as f64 / lane.read + set_up) * 1e3
}

pub(in crate::scenario) fn table_1(parameters: &Parameters) -> Outcome {
    let net = parameters.net(parameters.value("net.bandwidth"));
    let host = parameters.storage(1, 1).host;
    let copy = LaneModel { set_up: parameters.micros("copy.page"), ..host };
    let mut outcome = Outcome::of(vec![
        format!(
            "a message takes {:?} and its bytes at {} GB/s, one after another: two numbers, \
                 set by the smallest and the largest message of table 1",
            net.set_up,
            net.read / 1e9
        ),
        format!(
            "a copy from host memory takes {:?} and its bytes at {} GB/s: set by table 5",
            copy.set_up,
            host.read / 1e9
        ),
        MODELS_SAY.to_owned(),
    ]);
    let mut rows = Vec::new();
    for (at, (name, bytes, paper)) in PAPER.into_iter().enumerate() {
        let ours = throughput(net, bytes) / 1e9;
        rows.push(row(name, [paper, ours]));
        let of = if at == 0 || at == PAPER.len() - 1 { calibrated } else { predicted };
        outcome.comparisons.push(of(&format!("messages of {name}"), "GB/s", paper, ours, ""));
    }
    outcome.tables.push(Table::new("Throughput, GB/s", ["", "paper", "ours"], rows));
    let saturates = 19.0 * net.read * net.set_up.as_secs_f64() / 1e6;
    let page = PAGE_TOKENS * LLAMA_3_8B.token_layer_bytes();
    let chunk = page * u64::from(CHUNK_PAGES);
    let gbps = |bytes: u64| throughput(copy, bytes) / GBPS;
    let whole = gbps(chunk * u64::from(LLAMA_3_8B.layers));
    outcome.comparisons.extend([
        predicted("messages that reach 95 % of the bandwidth", "MB", 16.0, saturates, ""),
        calibrated("copies of a page, vLLM's own", "Gbps", 88.0, gbps(page), ""),
        predicted("copies of a chunk of all layers", "Gbps", 400.0, whole, ""),
        predicted("copies of a chunk, by layers", "Gbps", 400.0, gbps(chunk), LAYERS),
    ]);
    let mut rows = Vec::new();
    for (model, count) in MODELS {
        let each = |lane: LaneModel| {
            let lane = LaneModel { read: lane.read * f64::from(count), ..lane };
            let ways = [by_pages(lane), lane, by_chunks(lane, &model)];
            ways.map(|lane| ms(lane, &model, 8192))
        };
        let [net, copy] = [net, copy].map(each);
        rows.push(row(model.name, [&net[..], &copy].concat()));
    }
    let columns = ["", "network, by pages", "chunks of a layer", "chunks", "host memory, by pages"];
    let columns = [&columns[..], &["chunks of a layer", "chunks"]].concat();
    let title = "8,192 tokens, ms; each GPU has a link, and a part of each page";
    outcome.tables.push(Table::new(title, columns, rows));
    outcome.notes.push(format!(
        "A page of a layer is {} KiB with one GPU and {} KiB with four: what a message costs \
         beside its bytes weighs most where a model is split.",
        page >> 10,
        number((page >> 12) as f64)
    ));
    outcome
}

const LAYERS: &str = "a chunk of a layer is 1 MiB; section 4.2 loads by layers, and table 5 does \
    not say which";
