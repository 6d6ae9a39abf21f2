//! Numbers that follow from a scenario's results, plots over time, and timelines.

use std::collections::BTreeMap;

// The standard library's functions differ by platform.
use libm::{exp2, log as ln};

use super::{hiding, numbers::Numbers};
use crate::{
    compare::busy,
    engine::{Setup, serve},
    outcome::Outcome,
    policy::Policy,
    workload::LOOGLE,
};

/// The results of a scenario's runs.
#[derive(Clone, Copy)]
pub(super) struct Axes<'a> {
    /// The labels of each axis, with their values.
    pub(super) ticks: &'a BTreeMap<&'a str, Vec<(String, f64)>>,
    /// The engine of the first run.
    pub(super) setup: &'a dyn Fn() -> Setup<'static>,
}

/// Adds what follows for the scenario of this name.
pub(super) fn add(name: &str, axes: &Axes<'_>, found: &mut Numbers, outcome: &mut Outcome) {
    match name {
        "tutti-8" => {
            rates_within_a_second(axes, found);
            let plot = |policy: Policy| {
                let setup = (axes.setup)();
                let report = serve(&setup, &policy, &LOOGLE.requests(0.5, setup.block_tokens, 1));
                busy(&format!("LooGLE at 0.5/s, {}", policy.name), &policy, &setup.storage, &report)
            };
            outcome.plots = [Policy::GDS, Policy::OURS].map(plot).to_vec();
        }
        "tutti-13" => bubbles_beyond_computation(axes, found),
        "hiding" => outcome.gantts = hiding::gantts(&(axes.setup)()),
        "tierkv-5" => waits_by_the_paper(axes, found),
        "tierkv-blocks" => best_blocks(axes, found),
        "tierkv-patterns" => margins(axes, found),
        "lmcache-12" => loads_before_computation(axes, found),
        _ => {}
    }
}

/// Interpolates where a line through two points crosses zero.
fn crossing([from, to]: [f64; 2], [low, high]: [f64; 2]) -> f64 {
    from + (to - from) * low / (low - high)
}

/// Adds the rates at which the mean TTFT reaches a second, interpolated between the rates.
fn rates_within_a_second(axes: &Axes<'_>, found: &mut Numbers) {
    let rates = &axes.ticks["L-Eval rates"];
    for policy in [Policy::DRAM, Policy::GDS, Policy::OURS].map(|it| it.name) {
        let ttft = |at: usize| found.of(&format!("L-Eval|{}|{policy}|TTFT", rates[at].0));
        let over = (0..rates.len()).find(|at| ttft(*at) > 1.0).unwrap_or(rates.len());
        let rate = |at: usize| rates[at].1;
        let within = if over == 0 || over == rates.len() {
            rate(over.saturating_sub(1))
        } else {
            let (before, after) = (over - 1, over);
            let part = (rate(after) - rate(before)) * (1.0 - ttft(before));
            rate(before) + part / (ttft(after) - ttft(before))
        };
        found.put(format!("{policy}|rate within 1 s"), within);
    }
}

/// Adds the hit rates at which the bubble gets longer than the computation, or 100.
fn bubbles_beyond_computation(axes: &Axes<'_>, found: &mut Numbers) {
    let rates = &axes.ticks["hit rate"];
    for (drives, _) in &axes.ticks["drives"] {
        for (policy, _) in &axes.ticks["policy"] {
            let over = |rate: &str| {
                let of = |what| found.of(&format!("{drives}|{policy}|{rate}|{what}"));
                of("bubble") - of("computation")
            };
            let crosses = rates.windows(2).find_map(|pair| {
                let [(from, low), (to, high)] = pair else { return None };
                let beyond = [over(from), over(to)];
                (beyond[0] < 0.0 && beyond[1] >= 0.0).then(|| crossing([*low, *high], beyond))
            });
            found.put(format!("{drives}|{policy}|crossover"), crosses.unwrap_or(100.0));
        }
    }
}

/// Adds what LRU waits for by the paper's numbers, and what its simulator leaves of it: each
/// iteration waits for the excess of its own reads' time over the window's iterations, as if each
/// had the link to itself for that long.
fn waits_by_the_paper(axes: &Axes<'_>, found: &mut Numbers) {
    const ITERATION: f64 = 1.2;
    const WINDOW: f64 = 4.0;
    for (ratio, _) in &axes.ticks["ratio"] {
        let wait = found.of(&format!("{ratio}|LRU in the paper")) - ITERATION;
        for (what, value) in [
            ("wait", wait),
            ("wait, %", wait / ITERATION * 100.0),
            ("by the rule", ITERATION + (wait - WINDOW * ITERATION).max(0.0)),
            ("at least", ITERATION.max(wait)),
        ] {
            found.put(format!("{ratio}|{what}"), value);
        }
    }
}

/// Adds what blocks of each size lose, and the sizes with the least loss and the most tokens.
fn best_blocks(axes: &Axes<'_>, found: &mut Numbers) {
    let sizes = &axes.ticks["size"];
    let of = |size: &str, way: &str, what: &str| found.of(&format!("{size}|{way}|{what}"));
    let efficiency = |size: &str| of(size, "LRU", "efficiency");
    let lost = |size: &str| (1.0 - efficiency(size) / efficiency("16")).max(0.0) * 100.0;
    let unfilled = |size: &str| of(size, "LRU", "unfilled");
    let best = |of: &dyn Fn(&str) -> f64| {
        let best = sizes.iter().max_by(|(one, _), (other, _)| of(one).total_cmp(&of(other)));
        best.expect("there are sizes").1
    };
    let mut more: Vec<(String, f64)> = Vec::new();
    for (size, _) in sizes {
        more.push((format!("{size}|lost"), lost(size)));
        more.push((format!("{size}|lost or unfilled"), lost(size) + unfilled(size)));
    }
    more.extend([
        ("least loss".to_owned(), best(&|size| -lost(size) - unfilled(size))),
        ("best, prefetches".to_owned(), best(&|size| of(size, "prefetches", "tokens/s"))),
        ("best, ours".to_owned(), best(&|size| of(size, "ours", "tokens/s"))),
    ]);
    found.extend("", &more);
}

/// Adds in how many workloads TierKV's prefetching is before LRU and LFU, and the rank of the first
/// one by the margin.
fn margins(axes: &Axes<'_>, found: &mut Numbers) {
    let (mut nearest, mut margins) = (0.0, Vec::new());
    for (workload, _) in &axes.ticks["workload"] {
        let of = |policy: &str| found.of(&format!("{workload}|{policy}|tokens/s"));
        let [late, lfu, prefetch] =
            ["LRU", "Frequency", "TierKV-Prefetch"].map(|policy| of(policy) / of("Oracle"));
        nearest += f64::from(u8::from(prefetch > late.max(lfu)));
        margins.push(prefetch / late);
    }
    let less = margins[1..].iter().filter(|margin| **margin < margins[0]).count() as f64;
    found.put("nearest".to_owned(), nearest);
    found.put("rank".to_owned(), less + 1.0);
}

/// Adds the length from which loading is faster than computing, by model and link, and the number
/// of lengths at which it is.
fn loads_before_computation(axes: &Axes<'_>, found: &mut Numbers) {
    let lengths = &axes.ticks["length"];
    let [computed, links @ ..] = &axes.ticks["way"][..] else { return };
    for (model, _) in &axes.ticks["model"] {
        for (link, _) in links {
            let ttft =
                |way: &str, at: usize| found.of(&format!("{model}|{way}|{}|TTFT", lengths[at].0));
            let slower = |at: usize| ln(ttft(link, at) / ttft(&computed.0, at));
            let by_length: Vec<(f64, f64)> =
                (0..lengths.len()).map(|at| (lengths[at].1, slower(at))).collect();
            let wins = (0..lengths.len()).filter(|at| ttft(link, *at) < ttft(&computed.0, *at));
            let wins = wins.count() as f64;
            found.put(format!("{model}|{link}|crossover"), crossover(&by_length));
            found.put(format!("{model}|{link}|wins"), wins);
        }
    }
}

/// Returns the length from which loading is faster, between two lengths by the logarithm; 0 if it
/// is at all of them, and infinite if at none. By length: the logarithm of how many times as long
/// loading takes.
fn crossover(slower: &[(f64, f64)]) -> f64 {
    let at = slower.iter().rposition(|it| it.1 > 0.0).map_or(0, |last| last + 1);
    let (Some(before), Some(after)) = (at.checked_sub(1), slower.get(at)) else {
        return if at == 0 { 0.0 } else { f64::INFINITY };
    };
    let ((length, low), high) = (slower[before], -after.1);
    length * exp2(low / (low + high))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crossover_is_between_two_lengths_or_at_none() {
        let of = |loads: fn(f64) -> f64| {
            let lengths = (0..8).map(|at| f64::from(1 << at));
            let slower = lengths.map(|it| (it * 4.0, ln(loads(it) / it))).collect::<Vec<_>>();
            crossover(&slower)
        };
        assert_eq!(of(|_| 0.5), 0.0);
        assert_eq!(of(|computes| computes * 2.0), f64::INFINITY);
        // 8 of 1, 2, 4, 8, ...: the length in the fourth place.
        assert!((of(|_| 8.0) - 32.0).abs() < 1e-9, "{}", of(|_| 8.0));
    }
}
