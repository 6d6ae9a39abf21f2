//! The vLLM blog on tiered offloading: the cost of offloaded blocks in a decode step, and the
//! number of sequences that fit.

use std::time::Duration;

use kv_schedule::Config;
use kv_tier::{LookaheadConfig, RequestId};

use super::{calibrated, input, predicted};
use crate::{
    outcome::{Comparison, Outcome, Table, row},
    paging::{Ahead, LowerTiers, Paging, lane},
    parameters::Parameters,
};

/// Bytes of a block of Llama-70B, split over four A100: 80 layers, two of eight KV heads of 128,
/// keys and values, 2 bytes, 16 tokens.
const BLOCK_BYTES: u64 = 80 * 2 * 128 * 2 * 2 * 16;
const BATCH: f64 = 64.0;
const STEPS: u32 = 200;

/// The blog's machine.
#[derive(Debug, Clone, Copy)]
struct Blog {
    lower: LowerTiers,
    /// Time of a step of 64 sequences, all on the GPU.
    step: Duration,
    /// Blocks needed by a step.
    wanted: f64,
}

impl Blog {
    fn of(parameters: &Parameters) -> Self {
        let lane = |name: &str| {
            let of = |what: &str| format!("vllm.{name}{what}");
            lane(parameters.micros(&of(".latency")), parameters.value(&of("")))
        };
        let [drives, link] = ["drive", "link"].map(lane);
        Self {
            lower: LowerTiers { block_bytes: BLOCK_BYTES, host_blocks: 4096, drives, link },
            step: parameters.micros("vllm.step"),
            wanted: parameters.value("vllm.blocks"),
        }
    }

    /// Returns the number of blocks of a step if so many percent of them are below the GPU.
    fn blocks(&self, percent: f64) -> u64 {
        (self.wanted * percent / 100.0).round() as u64
    }
}

/// Returns the mean milliseconds of a step with `blocks` blocks below the GPU, which are announced
/// one step ahead, two for the drives; or not at all.
fn step_ms(blog: &Blog, blocks: u64, on_drives: bool, is_ahead: bool) -> f64 {
    let window = u32::from(is_ahead);
    let lookahead = LookaheadConfig { window, drives_window: 2 * window, batch_blocks: 8 };
    let mut paging = Paging::new(blog.lower, Ahead { lookahead, schedule: Config::default() });
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
        paging.compute(waited, blog.step);
        took += waited + blog.step;
    }
    took.as_secs_f64() * 1e3 / f64::from(STEPS)
}

/// Percentage of offloaded blocks, whether they are on drives, and the blog's step time.
const STEPS_TABLE: [(f64, bool, f64); 5] = [
    (5.0, false, 15.1),
    (20.0, false, 16.4),
    (50.0, false, 19.2),
    (5.0, true, 16.8),
    (20.0, true, 22.5),
];

pub(super) fn tables(parameters: &Parameters) -> Outcome {
    let blog = Blog::of(parameters);
    let Blog { lower, step, wanted } = blog;
    let mut outcome = Outcome::of(vec![
        format!(
            "steps of {step:?}, {} GB/s to the GPU, drives with {} GB/s and {:?}, blocks of \
                 1.31 MB on each of four GPUs; every step wants others that are below",
            lower.link.read / 1e9,
            lower.drives.read / 1e9,
            lower.drives.latency
        ),
        format!(
            "a step wants {wanted} blocks, of which a part is below: so that half of them on \
                 the CPU cost 4.4 ms if nothing is read ahead"
        ),
    ]);
    steps(&blog, &mut outcome);
    outcome.comparisons.extend(transfers(&blog));
    outcome.comparisons.extend(capacity());
    outcome.notes = NOTES.map(str::to_owned).to_vec();
    outcome
}

fn steps(blog: &Blog, outcome: &mut Outcome) {
    let mut rows = Vec::new();
    for (part, on_drives, printed) in STEPS_TABLE {
        let blocks = blog.blocks(part);
        let name = format!("{part} % from {}", if on_drives { "SSD" } else { "CPU" });
        let [late, ahead] =
            [false, true].map(|is_ahead| step_ms(blog, blocks, on_drives, is_ahead));
        let throughput = |ms: f64| BATCH / ms * 1e3;
        rows.push(row(&name, [blocks as f64, printed, late, ahead, throughput(ahead)]));
        let of = if part == 50.0 { calibrated } else { predicted };
        let what = format!("{name}: step, read when wanted");
        outcome.comparisons.push(of(&what, "ms", printed, late, ""));
        if on_drives {
            const WHOLE: &str = "all blocks come to host memory before the first one is copied";
            let LowerTiers { drives, link, .. } = blog.lower;
            let a_byte = drives.read.recip() + link.read.recip();
            let moved = blocks as f64 * BLOCK_BYTES as f64 * a_byte;
            let ms = (blog.step.as_secs_f64() + moved) * 1e3;
            let what = format!("{name}: step, read when wanted, then copied");
            outcome.comparisons.push(predicted(&what, "ms", printed, ms, WHOLE));
        }
        const HIDDEN: &str = "the blog's steps are as long as if nothing was read ahead";
        let what = format!("{name}: step, ours");
        outcome.comparisons.push(predicted(&what, "ms", printed, ahead, HIDDEN));
    }
    let columns = ["", "blocks", "blog, ms", "when wanted, ms", "ours, ms", "ours, tokens/s"];
    outcome.tables.push(Table::new("Time of a decode step", columns, rows));
}

/// Compares transfer times and the blocks that fit into a step.
fn transfers(blog: &Blog) -> Vec<Comparison> {
    const ALONE: &str = "the blog's own time over the link; 0.5 ms are 9 blocks, 10 ms are 41";
    const MANY: &str = "64 sequences of 4,096 tokens have 16,384 blocks: then 5 % of them are 44.7 \
        ms of the link, and not 0.3";
    let block = BLOCK_BYTES as f64;
    let LowerTiers { drives, link, .. } = blog.lower;
    let link = block / link.read * 1e3;
    let drive = block / drives.read * 1e3 + drives.latency.as_secs_f64() * 1e3;
    let fits = (15.0 / link).floor();
    vec![
        input("block over the link", "us", 54.6, link * 1e3, ""),
        input("blocks in 15 ms", "", 274.0, fits, ""),
        input("tokens in 15 ms", "", 4384.0, fits * 16.0, ""),
        input("block from the CPU, alone", "ms", 0.5, link, ALONE),
        input("block from SSD, alone", "ms", 10.0, drive + link, ALONE),
        calibrated("blocks of a step, of which 50 % cost 4.4 ms", "", 16_384.0, blog.wanted, MANY),
    ]
}

/// Compares the blog's numbers of sequences by tier (arithmetic only).
fn capacity() -> Vec<Comparison> {
    const RANKS: &str = "the blog gives each of four GPUs all of the server's memory and drives; a \
        block has a part on each, so there is room for a quarter";
    const SPARE: &str = "weights of 70 billion parameters of 2 bytes are 35 GB a GPU, not 32.5";
    const UNITS: &str = "the blog rounds up, or counts TB of 1,024 GB";
    const DRIVE: &str = "of 4,096 GB; its own table of tiers has drives of 3.84 TB";
    let sequences = |bytes: f64| (bytes / BLOCK_BYTES as f64).floor() / 256.0;
    let gpu = |weights: f64| sequences(80e9 - weights - 2e9);
    let [cpu, ssd] = [sequences(256e9), sequences(1e12)];
    vec![
        input("sequences on the GPU", "", 135.0, gpu(32.5e9).floor(), ""),
        input("sequences on the GPU, weights as they are", "", 135.0, gpu(35.3e9).floor(), SPARE),
        input("sequences in 256 GB", "", 764.0, cpu.floor(), UNITS),
        input("sequences in 256 GB, four GPUs", "", 764.0, (cpu / 4.0).floor(), RANKS),
        input("sequences in 512 GB", "", 1528.0, (2.0 * cpu).floor(), UNITS),
        input("sequences on 1 TB", "", 3051.0, ssd.floor(), UNITS),
        input("sequences on 4 TB", "", 12_204.0, sequences(3.84e12).floor(), DRIVE),
        input(
            "sequences on 4 TB, four GPUs",
            "",
            12_204.0,
            (sequences(3.84e12) / 4.0).floor(),
            RANKS,
        ),
        input("blocks of a request of 128K tokens", "", 8000.0, 131_072.0 / 16.0, ""),
        input("GB of it, on all GPUs", "GB", 40.0, 8192.0 * 4.0 * BLOCK_BYTES as f64 / 1e9, ""),
    ]
}

const NOTES: [&str; 2] = [
    "The blog's five steps follow from one number, the blocks of a step, if reads start when they \
     are wanted and the GPU waits: its pipeline of two steps hides nothing. Announced one step \
     ahead, two for drives, all of them are hidden: the most, 20 % from SSD, is 6.0 of 14.8 ms of \
     a drive.",
    "Beyond 50 % the link is said to be saturated: 81 blocks are 4.4 of 14.8 ms.",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_announced_is_hidden_and_what_is_not_is_waited_for() {
        let blog = Blog::of(&Parameters::default());
        for (part, on_drives, _) in STEPS_TABLE {
            let blocks = blog.blocks(part);
            let alone = blog.step.as_secs_f64() * 1e3;
            let late = step_ms(&blog, blocks, on_drives, false) - alone;
            let link = blocks as f64 * BLOCK_BYTES as f64 / blog.lower.link.read * 1e3;
            assert!(late > link * 0.95, "{part}: {late} {link}");
            assert!(step_ms(&blog, blocks, on_drives, true) < alone * 1.001, "{part}");
        }
        // More than the link can move in a step.
        assert!(step_ms(&blog, 400, false, true) > 20.0);
    }
}
