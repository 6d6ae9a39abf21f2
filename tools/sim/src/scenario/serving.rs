//! The Tutti paper's serving runs (section 4.1): L-Eval and LooGLE, Poisson arrivals.

use super::{Scenario, predicted, tutti};
use crate::{
    engine::{Report, Run, Setup},
    outcome::{Basis, Comparison, Line, Outcome, Plot, Table},
    page::number,
    policy::Policy,
    workload::Documents,
};

/// What the paper's two workloads are taken for: so many tokens in all that the hit rates of HBM
/// and DRAM are those of table 1, with as many questions a document as give that of the drives.
const L_EVAL: Documents = Documents {
    count: 130,
    tokens: (3_000, 200_000),
    mean: 30_000.0,
    spread: 0.9,
    question: 200,
    answer: 150,
    questions: 6.7,
};
const LOOGLE: Documents = Documents {
    count: 100,
    tokens: (10_000, 125_000),
    mean: 80_000.0,
    spread: 0.5,
    question: 200,
    answer: 150,
    questions: 8.0,
};

const SETUP: Setup = Setup { step_tokens: 8192, requests_max: 256, ..tutti::SETUP };
const POLICIES: [Policy; 6] =
    [Policy::HBM, Policy::DRAM, Policy::SSD, Policy::GDS, Policy::NAIVE, Policy::OURS];
const SEED: u64 = 1;

#[derive(Debug, Clone, Copy)]
struct Point {
    ttft: f64,
    itl: f64,
    hits: f64,
    /// Tokens a second, prompts and answers.
    throughput: f64,
}

fn point(documents: &Documents, rate: f64, policy: &Policy) -> Point {
    let requests = documents.requests(rate, SETUP.block_tokens, SEED);
    let Report { served, took, .. } = Run::serve(&SETUP, policy, &requests);
    let count = served.len() as f64;
    let mean = |of: &dyn Fn(usize) -> f64| (0..served.len()).map(of).sum::<f64>() / count;
    let input: f64 = requests.iter().map(|it| f64::from(it.input)).sum();
    let hit: f64 = served.iter().map(|it| f64::from(it.hbm_tokens + it.loaded_tokens)).sum();
    let tokens = input + count * f64::from(documents.answer);
    Point {
        ttft: mean(&|at| served[at].ttft.as_secs_f64()),
        itl: mean(&|at| served[at].decode.as_secs_f64()) / f64::from(documents.answer - 1) * 1e3,
        hits: hit / input,
        throughput: tokens / took.as_secs_f64(),
    }
}

fn setting(documents: &Documents) -> Vec<String> {
    let Documents { count, mean, question, answer, questions, .. } = *documents;
    let mut setting = tutti::setting();
    setting.pop();
    setting.push(format!(
        "{count} documents of {mean:.0} tokens in the mean (log-normal), {questions} questions of \
         {question} tokens about each, in random order; {answer} tokens are generated. The paper \
         says neither lengths nor order: these give the hit rates of its table 1"
    ));
    setting.push("blocks of 64 tokens, up to 8,192 tokens a step (chunked prefill)".to_owned());
    setting
}

/// Hit rates by tier.
pub(super) const TABLE_1: Scenario =
    Scenario { name: "tutti-table-1", title: "hit rates by tier", run: table_1 };

fn table_1() -> Outcome {
    let mut outcome = Outcome { setting: setting(&L_EVAL), ..Outcome::default() };
    let paper =
        [("L-Eval", &L_EVAL, 0.5, [8.0, 53.0, 84.0]), ("LooGLE", &LOOGLE, 0.2, [4.0, 24.0, 86.0])];
    for (name, documents, rate, found) in paper {
        for (policy, paper) in [Policy::HBM, Policy::DRAM, Policy::OURS].into_iter().zip(found) {
            let ours = point(documents, rate, &policy).hits * 100.0;
            let what =
                format!("{name}, {}", if policy == Policy::OURS { "SSD" } else { policy.name });
            let basis = Basis::Calibrated;
            outcome
                .comparisons
                .push(Comparison { basis, ..predicted(&what, "%", paper, ours, "") });
        }
    }
    outcome
}

/// TTFT and ITL by rate.
pub(super) const FIGURE_8: Scenario = Scenario {
    name: "tutti-8",
    title: "TTFT and inter-token latency by request rate",
    run: figure_8,
};

fn figure_8() -> Outcome {
    let mut outcome = Outcome { setting: setting(&L_EVAL), ..Outcome::default() };
    let l_eval =
        Sweep::run("L-Eval", &L_EVAL, &[0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0], &POLICIES);
    let loogle = Sweep::run("LooGLE", &LOOGLE, &[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], &POLICIES);
    [&l_eval, &loogle].into_iter().for_each(|sweep| sweep.show(&mut outcome));
    // The sweep, its rate, what is compared, with what, and by how many percent it is less.
    let less = [
        (&l_eval, 1.5, TTFT, Policy::DRAM, 69.1),
        (&l_eval, 1.5, TTFT, Policy::GDS, 78.3),
        (&l_eval, 1.5, ITL, Policy::DRAM, 22.0),
        (&l_eval, 1.5, ITL, Policy::GDS, 24.4),
        (&loogle, 0.6, TTFT, Policy::DRAM, 93.2),
        (&loogle, 0.6, TTFT, Policy::GDS, 62.0),
        (&loogle, 0.5, ITL, Policy::GDS, 18.3),
        (&loogle, 0.6, ITL, Policy::GDS, 10.2),
    ];
    let row = |(sweep, rate, measure, than, paper): (&Sweep, f64, Measure, Policy, f64)| {
        let what = format!("{} at {rate}/s: {} less than {}", sweep.name, measure.name, than.name);
        let less = 1.0 - sweep.at(rate, &Policy::OURS, measure) / sweep.at(rate, &than, measure);
        predicted(&what, "%", paper, less * 100.0, "")
    };
    outcome.comparisons = less.map(row).to_vec();
    for (than, paper) in [(Policy::DRAM, 50.0), (Policy::GDS, 100.0)] {
        let what = format!("L-Eval: rate with TTFT below 1 s, more than {}", than.name);
        let more = l_eval.rate_within(1.0, &Policy::OURS) / l_eval.rate_within(1.0, &than) - 1.0;
        outcome.comparisons.push(predicted(&what, "%", paper, more * 100.0, ""));
    }
    outcome
}

/// What is measured.
#[derive(Debug, Clone, Copy)]
struct Measure {
    name: &'static str,
    unit: &'static str,
    of: fn(&Point) -> f64,
}

const TTFT: Measure = Measure { name: "TTFT", unit: "s", of: |it| it.ttft };
const ITL: Measure = Measure { name: "inter-token latency", unit: "ms", of: |it| it.itl };
const HITS: Measure = Measure { name: "hit rate", unit: "%", of: |it| it.hits * 100.0 };

/// Policies at rates.
#[derive(Debug)]
struct Sweep<'a> {
    name: &'a str,
    rates: &'a [f64],
    policies: &'a [Policy],
    /// By policy, then by rate.
    found: Vec<Vec<Point>>,
}

impl<'a> Sweep<'a> {
    fn run(name: &'a str, documents: &Documents, rates: &'a [f64], policies: &'a [Policy]) -> Self {
        let points = |policy| rates.iter().map(|rate| point(documents, *rate, policy)).collect();
        Self { name, rates, policies, found: policies.iter().map(points).collect() }
    }

    fn line(&self, policy: &Policy) -> &[Point] {
        let at = self.policies.iter().position(|it| it == policy);
        &self.found[at.expect("one of the policies")]
    }

    fn at(&self, rate: f64, policy: &Policy, measure: Measure) -> f64 {
        let at = self.rates.iter().position(|it| *it == rate);
        (measure.of)(&self.line(policy)[at.expect("one of the rates")])
    }

    /// The highest rate with a mean TTFT of no more than so many seconds.
    fn rate_within(&self, ttft: f64, policy: &Policy) -> f64 {
        let points = self.rates.iter().zip(self.line(policy));
        points.filter(|(_, it)| it.ttft <= ttft).map(|(rate, _)| *rate).fold(0.0, f64::max)
    }

    fn show(&self, outcome: &mut Outcome) {
        for measure in [TTFT, ITL, HITS] {
            let names = self.policies.iter().map(|policy| policy.name.to_owned());
            let row = |at: usize| {
                let values = self.found.iter().map(|line| number((measure.of)(&line[at])));
                std::iter::once(number(self.rates[at])).chain(values).collect()
            };
            outcome.tables.push(Table {
                title: format!("{}: {}, {}", self.name, measure.name, measure.unit),
                columns: std::iter::once("requests/s".to_owned()).chain(names.clone()).collect(),
                rows: (0..self.rates.len()).map(row).collect(),
            });
            let lines = names.zip(&self.found).map(|(name, line)| {
                let points =
                    self.rates.iter().zip(line).map(|(rate, it)| (*rate, (measure.of)(it)));
                Line { name, points: points.collect() }
            });
            outcome.plots.push(Plot {
                title: format!("{}: {}", self.name, measure.name),
                x: "requests/s".to_owned(),
                y: measure.unit.to_owned(),
                lines: lines.collect(),
            });
        }
    }
}

/// Cost by tier.
pub(super) const FIGURE_14: Scenario =
    Scenario { name: "tutti-14", title: "cost of a million tokens", run: figure_14 };

fn figure_14() -> Outcome {
    let mut outcome = Outcome { setting: setting(&LOOGLE), ..Outcome::default() };
    // Section 4.3: dollars an hour for a GPU, and for a gigabyte.
    let (gpu, dram, ssd) = (5.0, 0.0088, 0.000_082);
    let policies = [
        (Policy::HBM, 0.0, 0.0),
        (Policy::DRAM, 256.0, 0.0),
        (Policy::SSD, 0.0, 14_000.0),
        (Policy::GDS, 0.0, 14_000.0),
        (Policy::OURS, 0.0, 14_000.0),
    ];
    // More requests than it can serve: what it serves then is what is paid for.
    let cost = |(policy, memory, drives): &(Policy, f64, f64)| {
        let tokens = point(&LOOGLE, 4.0, policy).throughput * 3600.0;
        (policy.name, (gpu + memory * dram + drives * ssd) / tokens * 1e6)
    };
    let found: Vec<(&str, f64)> = policies.iter().map(cost).collect();
    outcome.tables.push(Table {
        title: "LooGLE, as many requests as can be served".to_owned(),
        columns: vec![String::new(), "$ a million tokens".to_owned()],
        rows: found
            .iter()
            .map(|(name, cost)| vec![(*name).to_owned(), format!("{cost:.4}")])
            .collect(),
    });
    let [_, _, ssd, gds, ours] = &found[..] else { unreachable!("five policies") };
    let less = |than: f64| (1.0 - ours.1 / than) * 100.0;
    outcome.comparisons = vec![
        predicted("LooGLE: less than SSD", "%", 66.2, less(ssd.1), "the paper's is at 0.5/s"),
        predicted("LooGLE: less than GDS", "%", 27.0, less(gds.1), "as above"),
    ];
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faster_tier_is_no_slower_and_the_largest_one_hits_most() {
        // Twice what the GPU has room for.
        let few = Documents { count: 30, tokens: (3_000, 60_000), spread: 0.4, ..L_EVAL };
        let policies = [Policy::HBM, Policy::SSD, Policy::GDS, Policy::OURS];
        let sweep = Sweep::run("few", &few, &[0.2, 1.5], &policies);
        for rate in [0.2, 1.5] {
            let ttft = |policy| sweep.at(rate, &policy, TTFT);
            assert!(ttft(Policy::OURS) < ttft(Policy::GDS), "{sweep:?}");
            assert!(ttft(Policy::GDS) < ttft(Policy::SSD), "{sweep:?}");
            let hits = |policy| sweep.at(rate, &policy, HITS);
            assert!(hits(Policy::HBM) < hits(Policy::OURS), "{sweep:?}");
        }
        assert!(sweep.rate_within(1.0, &Policy::OURS) >= 0.2, "{sweep:?}");
        let mut outcome = Outcome::default();
        sweep.show(&mut outcome);
        assert_eq!(outcome.tables[0].rows.len(), 2);
        assert_eq!(outcome.plots[0].lines.len(), 4);
    }
}
