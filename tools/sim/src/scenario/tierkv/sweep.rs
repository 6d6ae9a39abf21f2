//! Required lookahead: table 6, and section 4.7.

use std::time::Duration;

use super::{NAMES, PROFILES, SATURATED, calibrated, lru, median, ours, predicted, setting};
use crate::{
    outcome::{Basis, Comparison, Curves, Outcome, Table, row},
    paging::{Decode, Found, LowerTiers},
    parameters::Parameters,
    workload::Profile,
};

/// K, and the paper's hit rate and mean TPOT.
const PAPER_6: [(u32, f64, f64); 9] = [
    (0, 0.0, 4.38),
    (1, 42.6, 3.19),
    (2, 76.1, 2.10),
    (4, 100.0, 1.20),
    (6, 100.0, 1.20),
    (8, 100.0, 1.20),
    (10, 100.0, 1.20),
    (12, 100.0, 1.20),
    (16, 100.0, 1.20),
];

/// Returns the cases of the sweep: the paper's, with given link utilisations, with the longer
/// iterations of section 3.5, and from the drives.
fn cases(parameters: &Parameters) -> [(&'static str, Decode<'static>); 6] {
    let paper = lru(parameters, 3.0);
    // Link time of one returning request, in iterations.
    let blocks = median(&paper).blocks / paper.exchanged;
    let lower = paper.lower;
    let seconds = |bandwidth: f64| blocks * lower.block_bytes as f64 / bandwidth;
    let link = |part: f64| {
        let exchanged = part * paper.iteration.as_secs_f64() / seconds(lower.link.read);
        Decode { exchanged, ..paper }
    };
    let iteration = Duration::from_millis(20);
    let long = Decode { iteration, ..paper };
    let exchanged = 0.5 * iteration.as_secs_f64() / seconds(lower.drives.read);
    let lower = LowerTiers { host_blocks: 4096, ..lower };
    let drives = Decode { on_drives: true, exchanged, lower, ..long };
    [
        ("as in table 5", paper),
        ("link 25 % busy", link(0.25)),
        ("link 50 % busy", link(0.5)),
        ("link 75 % busy", link(0.75)),
        ("20 ms", long),
        ("20 ms, drives 50 % busy", drives),
    ]
}

/// Cases in which requests lose their turn.
const PREEMPTED: [usize; 3] = [2, 3, 5];

pub(in crate::scenario) fn table_6(parameters: &Parameters) -> Outcome {
    let mut outcome = Outcome::of(setting(parameters));
    outcome.setting.push(
        "3x; where the link is busy for a part of the time, fewer requests change places; 20 ms: \
         iterations as long as section 3.5 has them, all else as in table 5; drives: what does not \
         run is on the drives, and K_SSD is twice K"
            .to_owned(),
    );
    let cases = cases(parameters);
    let sweep = |decode: &Decode<'static>, preempted: f64| {
        let of = |(window, ..): &(u32, f64, f64)| {
            median(&Decode { ahead: Some(ours(*window)), preempted, ..*decode })
        };
        PAPER_6.iter().map(of).collect::<Vec<Found>>()
    };
    let found: Vec<Vec<Found>> = cases.iter().map(|(_, case)| sweep(case, 0.0)).collect();
    let preempted: Vec<Vec<Found>> = PREEMPTED.iter().map(|at| sweep(&cases[*at].1, 0.1)).collect();
    compare_6(&mut outcome, &found);
    let names = cases.map(|(name, _)| name);
    let preempted_names = PREEMPTED.map(|at| names[at]);
    let curves = |all: &[Vec<Found>], names: &[&'static str], of: fn(&Found) -> f64| Curves {
        x: PAPER_6.map(|(window, ..)| (window.to_string(), window.into())).to_vec(),
        values: names
            .iter()
            .zip(all)
            .map(|(name, found)| (*name, found.iter().map(of).collect()))
            .collect(),
    };
    let table = |title: &str, all: &[Vec<Found>], names: &[&'static str], of: fn(&Found) -> f64| {
        curves(all, names, of).table(title, "K")
    };
    let hits: fn(&Found) -> f64 = |it| it.hits * 100.0;
    outcome.tables = vec![
        table("Blocks that are there in time, %", &found, &names, hits),
        table("Time of an iteration, ms", &found, &names, |it| it.iteration_ms),
        table("One in 10 loses its turn: blocks in time, %", &preempted, &preempted_names, hits),
        table(
            "One in 10 loses its turn: bytes read ahead that nobody used, %",
            &preempted,
            &preempted_names,
            |it| it.wasted * 100.0,
        ),
    ];
    let mut curves = curves(&found, &names, hits);
    curves.values.insert(0, ("the paper", PAPER_6.map(|(_, hits, _)| hits).to_vec()));
    outcome.plots.push(curves.plot("Blocks in time by lookahead", "K, iterations", "%"));
    outcome.notes = notes_6(&cases[0].1, &found[0][0]);
    outcome.tables.push(by_profile(parameters, &mut outcome.comparisons));
    outcome
}

const LENGTHS: &str = "lengths were cut so that all of them are there at K = 4";

/// Compares each profile by itself, and one with longer prompts.
fn by_profile(parameters: &Parameters, comparisons: &mut Vec<Comparison>) -> Table {
    let long = [("summarization, 3,000 tokens", Profile::SUMMARIZATION)];
    let alone = NAMES.into_iter().zip(PROFILES).chain(long);
    let mut rows = Vec::new();
    for (name, profile) in alone {
        let profiles = &[profile];
        let late = Decode { profiles, ..lru(parameters, 3.0) };
        let blocks = median(&late).blocks / late.exchanged;
        let reads = blocks * late.lower.block_bytes as f64 / late.lower.link.read;
        let exchanged = 0.5 * late.iteration.as_secs_f64() / reads;
        let of = |window| median(&Decode { exchanged, ahead: Some(ours(window)), ..late });
        let found = [1, 2, 4, 8].map(|window| of(window).hits * 100.0);
        rows.push(row(name, [blocks].into_iter().chain(found)));
        let what = format!("hit rate at least, K = 4, {name}");
        let note = if found[2] < 80.0 { "8 ms of the link: more than four iterations" } else { "" };
        let is_fitted = NAMES.contains(&name);
        let of = if is_fitted { calibrated } else { predicted };
        let note = if is_fitted { LENGTHS } else { note };
        comparisons.push(of(&what, "%", 80.0, found[2], note));
    }
    let columns = ["", "blocks a request", "K = 1", "K = 2", "K = 4", "K = 8"];
    Table::new("Blocks in time by profile, link 50 % busy, %", columns, rows)
}

/// Returns notes that follow from the results without lookahead.
fn notes_6(paper: &Decode<'_>, late: &Found) -> Vec<String> {
    let reads = late.blocks * paper.lower.block_bytes as f64 / paper.lower.link.read * 1e3;
    let computes = paper.iteration.as_secs_f64() * 1e3;
    vec![
        format!(
            "As in table 5 an iteration wants {:.0} blocks, which are {reads:.2} ms of the link, \
             and computes for {computes} ms: however early reads start, at most {:.0} % of the \
             blocks come beside computation, and an iteration takes {reads:.2} ms. It does, at \
             every K; a batch that is on its way when the iteration begins is late.",
            late.blocks,
            computes / reads * 100.0
        ),
        "The paper's rates by K are those of requests that come one at a time, each of 1.2 to 4.8 \
         ms of the link: K iterations hide K times 1.2 ms of it. That is a link which is idle most \
         of the time, and not the one of its table 5."
            .to_owned(),
    ]
}

fn compare_6(outcome: &mut Outcome, found: &[Vec<Found>]) {
    const LOAD: &str = "lengths are such that none is longer than four iterations of the link; \
        nothing else was fitted";
    const LONG: &str = "a wait of 3.15 ms is within one iteration of 20 ms";
    for (at, (window, hits, tpot)) in PAPER_6.into_iter().enumerate() {
        let what = |what: &str, case: &str| format!("{what}, K = {window}, {case}");
        let [paper, half, long] = [0, 2, 4].map(|case: usize| found[case][at]);
        let hit = |case: &str, found: Found, note| {
            predicted(&what("hit rate", case), "%", hits, found.hits * 100.0, note)
        };
        let half = match window {
            1..4 => hit("link 50 % busy", half, LOAD),
            _ => Comparison { basis: Basis::Calibrated, ..hit("link 50 % busy", half, LENGTHS) },
        };
        let time = what("mean TPOT", "as in table 5");
        if window == 0 {
            // Nothing is in time, as in the paper.
            outcome.comparisons.push(calibrated(&time, "ms", tpot, paper.iteration_ms, ""));
            continue;
        }
        outcome.comparisons.extend([
            hit("as in table 5", paper, SATURATED),
            predicted(&time, "ms", tpot, paper.iteration_ms, SATURATED),
            half,
            hit("iterations of 20 ms", long, if (1..4).contains(&window) { LONG } else { "" }),
        ]);
    }
}
