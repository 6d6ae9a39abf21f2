//! The evaluation of the Tutti paper (section 4), with its setup: Llama-3-8B on an H100, two drives
//! per GPU.

use std::time::Duration;

use super::{calibrated, predicted};
use crate::{
    engine::{Report, Request, Setup, serve},
    gpu::{GLM_4_9B_1M, Gpu, LLAMA_3_8B},
    lane::LaneModel,
    outcome::{Curves, Line, Outcome, Plot, Table, number, row},
    parallel::each,
    parameters::Parameters,
    policy::Policy,
};

const BLOCK: u32 = 64;

/// Returns the engine, with the tiers of one GPU: two drives, and half of the host memory.
pub(super) fn setup(parameters: &Parameters) -> Setup<'static> {
    Setup {
        model: LLAMA_3_8B,
        gpu: parameters.gpu("H100"),
        layers: None,
        storage: parameters.storage(2, 1),
        known: None,
        kv_bytes: parameters.value("gpu.kv") as u64,
        block_tokens: BLOCK,
        // A prompt in one step: the paper does not mention chunks.
        step_tokens: 131_072,
        requests_max: 64,
    }
}

/// Result of one request.
#[derive(Debug, Clone, Copy)]
pub(super) struct One {
    pub(super) ttft: f64,
    bubble: f64,
    compute: f64,
}

/// Serves a prompt of which an earlier one has stored `stored` tokens. In milliseconds.
pub(super) fn one(setup: &Setup, policy: &Policy, input: u32, stored: u32) -> One {
    let request = |arrival, own: u64| {
        let name =
            |at: u32| if at < stored / BLOCK { at.into() } else { own << 32 | u64::from(at) };
        let blocks = (0..input / BLOCK).map(name).collect();
        Request { arrival, input, output: 1, blocks, leaves: None }
    };
    // GPU caching is off to measure the tier below.
    let policy = Policy { keeps_hbm: false, ..*policy };
    let first = request(Duration::ZERO, 1);
    let before = serve(setup, &policy, std::slice::from_ref(&first));
    let second = request(before.took + Duration::from_secs(60), 2);
    let report: Report = serve(setup, &policy, &[first, second]);
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let (ttft, compute) = (ms(report.served[1].ttft), ms(report.compute - before.compute));
    One { ttft, compute, bubble: ttft - compute }
}

pub(super) fn setting(parameters: &Parameters) -> Vec<String> {
    let Setup { model, gpu, storage, .. } = setup(parameters);
    let both = |lane: LaneModel| [lane.read, lane.write].map(|it| number(it / 1e9)).join(" and ");
    vec![
        format!("{} on {} ({:.0} TFLOP/s)", model.name, gpu.name, gpu.flops / 1e12),
        format!(
            "matrix products reach {:.0} % of that (assumed), attention {:.0} %: then TTFT with \
             112K of 128K tokens stored is the paper's (3.43 s, section 4.2.3)",
            gpu.linear * 100.0,
            gpu.attention * 100.0
        ),
        format!(
            "GB/s of reads and writes: ours {}, GDS {} (figure 9), SSD through the CPU {} (by its \
             TTFT with 112K of 128K tokens, 7.84 s; writes assumed), DRAM {} (section 2.2)",
            both(storage.direct),
            both(storage.gds),
            both(storage.cpu),
            both(storage.host)
        ),
        format!(
            "reads and writes that mix have {} of the bandwidth (figure 6)",
            storage.direct.mixed
        ),
        "blocks of 64 tokens, one prompt at a time, the whole prompt in one step".to_owned(),
    ]
}

/// Returns the hit rate in percent at which bubble exceeds compute, interpolated.
fn crossover(points: &[(f64, One)]) -> Option<f64> {
    let over = |one: &One| one.bubble - one.compute;
    points.windows(2).find_map(|pair| {
        let [(from, low), (to, high)] = pair else { return None };
        let (low, high) = (over(low), over(high));
        (low < 0.0 && high >= 0.0).then(|| from + (to - from) * low / (low - high))
    })
}

/// Tokens of a prompt.
const INPUT: u32 = 32_768;
const HIT_RATES: [f64; 12] =
    [50.0, 62.5, 75.0, 81.25, 87.5, 90.625, 93.75, 95.0, 96.875, 97.65625, 98.4375, 99.21875];

fn by_hit_rate(setup: &Setup<'_>, policy: &Policy) -> Vec<(f64, One)> {
    let stored = |rate: f64| (f64::from(INPUT) * rate / 100.0) as u32;
    each(&HIT_RATES, |rate| (*rate, one(setup, policy, INPUT, stored(*rate))))
}

/// Crossover in percent, bubble at 93.75 % and mean bubble in milliseconds.
fn in_short(points: &[(f64, One)]) -> [f64; 3] {
    let at = points.iter().find(|point| point.0 == 93.75).map_or(f64::NAN, |it| it.1.bubble);
    let mean = points.iter().map(|point| point.1.bubble).sum::<f64>() / points.len() as f64;
    [crossover(points).unwrap_or(100.0), at, mean]
}

pub(super) fn figure_13(parameters: &Parameters) -> Outcome {
    let setup = setup(parameters);
    let policies = [Policy::SSD_LAYERS, Policy::DRAM, Policy::ORACLE, Policy::NAIVE, Policy::OURS];
    let mut outcome = Outcome::of(setting(parameters));
    let columns = ["hit rate, %", "TTFT, ms", "computation, ms", "bubble, ms"];
    let (mut bubbles, mut two) = (Vec::new(), Vec::new());
    for policy in &policies {
        let points = by_hit_rate(&setup, policy);
        two.push(in_short(&points));
        let rows =
            points.iter().map(|(rate, it)| row(number(*rate), [it.ttft, it.compute, it.bubble]));
        outcome.tables.push(Table::new(policy.name, columns, rows));
        let line = |name: String, of: fn(&One) -> f64| {
            Line::new(name, points.iter().map(|(rate, it)| (*rate, of(it))))
        };
        if bubbles.is_empty() {
            bubbles.push(line("computation".to_owned(), |it| it.compute));
        }
        bubbles.push(line(format!("bubble, {}", policy.name), |it| it.bubble));
    }
    outcome.plots.push(Plot::new("Bubble by hit rate", "hit rate, %", "ms", bubbles));
    let four = Setup { storage: parameters.storage(4, 1), ..setup };
    let four = policies.map(|policy| in_short(&by_hit_rate(&four, &policy))).to_vec();
    let ours = [&two, &four].map(|found| *found.last().expect("ours is the last policy"));
    outcome.tables.push(by_drives(&policies, [&two, &four]));
    const TWO: &str = "4.2 GB take 163 ms at 25.9 GB/s. For a bubble no longer than that, 557 \
        tokens have to compute for 82 ms: 0.146 ms each, 0.7 of the 0.209 ms of figure 11";
    const FOUR: &str = "the paper's server has four drives, and 4.2.5 does not say how many of \
        them it used";
    for (drives, [at, bubble, mean], note) in [(2, ours[0], TWO), (4, ours[1], FOUR)] {
        let what = |what: &str| format!("ours, {drives} drives: {what}");
        const RATES: &str = "the paper's hit rates are not known";
        outcome.comparisons.extend([
            predicted(&what("crossover"), "%", 98.3, at, note),
            predicted(&what("bubble at 93.75 %"), "ms", 6.0, bubble, note),
            predicted(&what("mean bubble"), "ms", 25.0, mean, RATES),
        ]);
    }
    outcome
}

/// Returns the crossovers and the bubbles with two and with four drives.
fn by_drives(policies: &[Policy], found: [&[[f64; 3]]; 2]) -> Table {
    let row =
        |(at, policy): (usize, &Policy)| row(policy.name, found.iter().flat_map(|found| found[at]));
    let columns = ["", "crossover, two drives, %", "bubble at 93.75 %, ms", "mean bubble, ms"]
        .into_iter()
        .chain(["crossover, four drives, %", "bubble at 93.75 %, ms", "mean bubble, ms"]);
    let title = "Hit rate at which the bubble gets longer than the computation, or 100; by drives";
    Table::new(title, columns, policies.iter().enumerate().map(row))
}

/// Returns a time of each policy, by the length of a prefix in units of 1,024 tokens.
fn by_prefix(
    policies: &[Policy],
    kilos: &[u32],
    of: impl Fn(&Policy, u32) -> f64,
) -> Curves<'static> {
    let values =
        |policy: &Policy| (policy.name, kilos.iter().map(|kilo| of(policy, *kilo)).collect());
    Curves {
        x: kilos.iter().map(|kilo| (format!("{kilo}K"), f64::from(*kilo))).collect(),
        values: policies.iter().map(values).collect(),
    }
}

pub(super) fn figure_11(parameters: &Parameters) -> Outcome {
    const INPUT: u32 = 131_072;
    let setup = setup(parameters);
    const PREFIXES: [u32; 8] = [16, 32, 48, 64, 80, 96, 112, 128];
    let policies =
        [Policy::SSD, Policy::GDS, Policy::DRAM, Policy::NAIVE, Policy::OURS, Policy::ORACLE];
    let mut outcome = Outcome::of(setting(parameters));
    let curves = by_prefix(&policies, &PREFIXES, |policy, kilo| {
        one(&setup, policy, INPUT, kilo * 1024).ttft / 1e3
    });
    outcome.tables.push(curves.table("TTFT, s", "prefix"));
    outcome.plots.push(curves.plot("TTFT by stored prefix", "1,024 tokens", "s"));
    let [ssd, gds, dram, _, ours, _] = [0, 1, 2, 3, 4, 5].map(|at: usize| &curves.values[at].1);
    let less = |at: usize, than: &[f64]| (1.0 - ours[at] / than[at]) * 100.0;
    outcome.comparisons = vec![
        calibrated("ours at 112K", "s", 3.43, ours[6], ""),
        calibrated("SSD at 112K", "s", 7.84, ssd[6], ""),
        predicted("ours less than GDS at 32K", "%", 5.8, less(1, gds), ""),
        predicted("ours less than GDS at 128K", "%", 61.4, less(7, gds), ""),
        predicted(
            "ours less than DRAM, 16K to 96K, at most",
            "%",
            13.4,
            (0..6).map(|at| less(at, dram)).fold(f64::MIN, f64::max),
            "a DRAM tier without software costs is never slower here",
        ),
        predicted("ours more than DRAM at 128K", "%", 20.6, -less(7, dram), "as above"),
    ];
    outcome
}

pub(super) fn figure_12(parameters: &Parameters) -> Outcome {
    const KILOS: [u32; 5] = [128, 256, 384, 512, 640];
    // Each GPU has the memory of one for keys and values, and reads half of them from two drives.
    let one_gpu = setup(parameters);
    let setup = Setup {
        model: GLM_4_9B_1M,
        gpu: Gpu { count: 2, ..one_gpu.gpu },
        storage: parameters.storage(4, 2),
        kv_bytes: 2 * one_gpu.kv_bytes,
        step_tokens: 1 << 20,
        ..one_gpu
    };
    let policies = [Policy::SSD, Policy::GDS, Policy::OURS, Policy::ORACLE];
    let mut outcome = Outcome::default();
    outcome.setting.push(format!(
        "{} (40 layers, 4 heads of keys and values of 128: 80 KiB a token), tensors on two {}, \
         two drives each; what GPUs say to each other takes no time",
        setup.model.name, setup.gpu.name
    ));
    outcome.setting.extend(setting(parameters).into_iter().skip(1).take(3));
    outcome.setting.push("the whole prompt but its last block is stored".to_owned());
    // In milliseconds; the stored prefix is as long as the prompt.
    let curves = by_prefix(&policies, &KILOS, |policy, kilo| {
        one(&setup, policy, kilo << 10, kilo << 10).ttft
    });
    outcome.tables.push(curves.table("TTFT, ms", "prefix"));
    let [gds, ours] = [1, 2].map(|at: usize| &curves.values[at].1);
    const PHYSICS: &str = "taken for ms, the paper has s; 5.4 GB a GPU take 207 ms at the 25.9 \
        GB/s of figure 9, and 185 ms at the 29 GB/s that two drives have at the most";
    outcome.comparisons = vec![
        predicted("ours, 128K", "ms", 155.743, ours[0], PHYSICS),
        predicted("GDS, 128K", "ms", 207.12, gds[0], "at its 11.9 GB/s they take 451 ms"),
        predicted("ours less than GDS, 128K", "%", 25.0, (1.0 - ours[0] / gds[0]) * 100.0, ""),
        predicted("ours, 640K", "ms", 1200.0, ours[4], "26.8 GB a GPU take 1,036 ms"),
    ];
    outcome.notes.push(
        "The paper's 128K and 640K do not go together: five times the bytes in 7.7 times the \
         time. GDS runs out of memory at 512K and 640K there, for its staging buffers; here \
         nobody does."
            .to_owned(),
    );
    outcome
}

pub(super) fn figure_2(parameters: &Parameters) -> Outcome {
    let mut outcome = Outcome::of(setting(parameters));
    let setup = setup(parameters);
    let policies = [
        Policy::RECOMPUTE,
        Policy::DRAM,
        Policy::SSD,
        Policy::SSD_LAYERS,
        Policy::GDS,
        Policy::OURS,
        Policy::ORACLE,
    ];
    let found = policies.map(|policy| (policy.name, one(&setup, &policy, 65_536, 49_152)));
    let part = |it: &One| it.bubble / it.ttft * 100.0;
    let columns = ["", "TTFT, ms", "computation, ms", "bubble, ms", "bubble, %"];
    let rows =
        found.iter().map(|(name, it)| row(*name, [it.ttft, it.compute, it.bubble, part(it)]));
    outcome.tables.push(Table::new("Latency", columns, rows));
    const WHY: &str = "contradicts figure 9: at its bandwidth 6.4 GB of GDS take 0.54 s, and 16K \
        tokens behind 48K compute for 1.8 s at the speed of figure 11";
    outcome.comparisons = vec![
        predicted("SSD: bubble, more than", "%", 70.0, part(&found[2].1), WHY),
        predicted("SSD by layers: bubble, about", "%", 80.0, part(&found[3].1), WHY),
        predicted("GDS: bubble, more than", "%", 70.0, part(&found[4].1), WHY),
    ];
    outcome
}
