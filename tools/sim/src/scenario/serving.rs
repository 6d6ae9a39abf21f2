//! The Tutti paper's serving runs (section 4.1): L-Eval and LooGLE, Poisson arrivals.

use super::{calibrated, predicted, tutti};
use crate::{
    compare::busy,
    engine::{Report, Setup, serve},
    outcome::{Curves, Outcome, Plot, Table, number},
    parallel::each,
    parameters::Parameters,
    policy::Policy,
    summary::Prices,
    workload::{Documents, L_EVAL, LOOGLE},
};

fn setup(parameters: &Parameters) -> Setup<'static> {
    Setup { step_tokens: 8192, requests_max: 256, ..tutti::setup(parameters) }
}

const POLICIES: [Policy; 7] = [
    Policy::HBM,
    Policy::DRAM,
    Policy::SSD,
    Policy::GDS,
    Policy::NAIVE,
    Policy::OURS,
    Policy::AHEAD,
];
const SEED: u64 = 1;
/// Name of the rates in tables and plots.
const RATES: &str = "requests/s";
const L_EVAL_RATES: [f64; 10] = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.25, 3.5, 3.75, 4.0];
const LOADS: &str = "hangs on how near a rate is to what can be served, and that on lengths, which \
    the paper does not give: ours serve L-Eval up to 3 or 4 a second, the paper's 1 or 2";

#[derive(Debug, Clone, Copy)]
struct Point {
    ttft: f64,
    itl: f64,
    hits: f64,
    /// Tokens a second, including prompts and answers.
    throughput: f64,
}

fn point(setup: &Setup<'_>, documents: &Documents, rate: f64, policy: &Policy) -> Point {
    let requests = documents.requests(rate, setup.block_tokens, SEED);
    let Report { served, took, .. } = serve(setup, policy, &requests);
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

fn setting(parameters: &Parameters, documents: &Documents) -> Vec<String> {
    let Documents { count, mean, question, answer, questions, .. } = *documents;
    let mut setting = tutti::setting(parameters);
    setting.pop();
    setting.push(format!(
        "{count} documents of {mean:.0} tokens in the mean (log-normal), {questions} questions of \
         {question} tokens about each, in random order; {answer} tokens are generated. The paper \
         says neither lengths nor order: these give the hit rates of its table 1"
    ));
    setting.push("blocks of 64 tokens, up to 8,192 tokens a step (chunked prefill)".to_owned());
    setting
}

pub(super) fn table_1(parameters: &Parameters) -> Outcome {
    let setup = setup(parameters);
    let mut outcome = Outcome::of(setting(parameters, &L_EVAL));
    let paper =
        [("L-Eval", &L_EVAL, 0.5, [8.0, 53.0, 84.0]), ("LooGLE", &LOOGLE, 0.2, [4.0, 24.0, 86.0])];
    for (name, documents, rate, found) in paper {
        for (policy, paper) in [Policy::HBM, Policy::DRAM, Policy::OURS].into_iter().zip(found) {
            let ours = point(&setup, documents, rate, &policy).hits * 100.0;
            let what =
                format!("{name}, {}", if policy == Policy::OURS { "SSD" } else { policy.name });
            outcome.comparisons.push(calibrated(&what, "%", paper, ours, ""));
        }
    }
    outcome
}

pub(super) fn figure_8(parameters: &Parameters) -> Outcome {
    let setup = setup(parameters);
    let mut outcome = Outcome::of(setting(parameters, &L_EVAL));
    let l_eval = Sweep::run(&setup, "L-Eval", &L_EVAL, &L_EVAL_RATES, &POLICIES);
    let loogle = Sweep::run(&setup, "LooGLE", &LOOGLE, &[0.2, 0.4, 0.5, 0.6, 0.8, 1.2], &POLICIES);
    [&l_eval, &loogle].into_iter().for_each(|sweep| sweep.show(&mut outcome));
    outcome.plots.extend([Policy::GDS, Policy::OURS].map(|policy| use_over_time(&setup, &policy)));
    // Sweep, rate, measure, policy to compare with, and the reduction in percent.
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
        predicted(&what, "%", paper, less * 100.0, LOADS)
    };
    outcome.comparisons = less.map(row).to_vec();
    for (than, paper) in [(Policy::DRAM, 50.0), (Policy::GDS, 100.0)] {
        let what = format!("L-Eval: rate with TTFT below 1 s, more than {}", than.name);
        let more = l_eval.rate_within(1.0, &Policy::OURS) / l_eval.rate_within(1.0, &than) - 1.0;
        outcome.comparisons.push(predicted(&what, "%", paper, more * 100.0, LOADS));
    }
    outcome
}

/// Plots GPU and drive utilisation by minute.
fn use_over_time(setup: &Setup<'_>, policy: &Policy) -> Plot {
    const RATE: f64 = 0.5;
    let requests = LOOGLE.requests(RATE, setup.block_tokens, SEED);
    let report = serve(setup, policy, &requests);
    busy(&format!("LooGLE at {RATE}/s, {}", policy.name), policy, &setup.storage, &report)
}

/// A measured quantity.
#[derive(Debug, Clone, Copy)]
struct Measure {
    name: &'static str,
    unit: &'static str,
    of: fn(&Point) -> f64,
}

const TTFT: Measure = Measure { name: "TTFT", unit: "s", of: |it| it.ttft };
const ITL: Measure = Measure { name: "inter-token latency", unit: "ms", of: |it| it.itl };
const HITS: Measure = Measure { name: "hit rate", unit: "%", of: |it| it.hits * 100.0 };

/// Results of policies at several rates.
#[derive(Debug)]
struct Sweep<'a> {
    name: &'a str,
    rates: &'a [f64],
    policies: &'a [Policy],
    /// By policy, then by rate.
    found: Vec<Vec<Point>>,
}

impl<'a> Sweep<'a> {
    fn run(
        setup: &Setup<'_>,
        name: &'a str,
        documents: &Documents,
        rates: &'a [f64],
        policies: &'a [Policy],
    ) -> Self {
        let points = |policy: &Policy| each(rates, |rate| point(setup, documents, *rate, policy));
        Self { name, rates, policies, found: each(policies, points) }
    }

    fn line(&self, policy: &Policy) -> &[Point] {
        let at = self.policies.iter().position(|it| it == policy);
        &self.found[at.expect("one of the policies")]
    }

    fn at(&self, rate: f64, policy: &Policy, measure: Measure) -> f64 {
        let at = self.rates.iter().position(|it| *it == rate);
        (measure.of)(&self.line(policy)[at.expect("one of the rates")])
    }

    /// Returns the rate at which the mean TTFT reaches `ttft` seconds, interpolated between the
    /// rates.
    fn rate_within(&self, ttft: f64, policy: &Policy) -> f64 {
        let points: Vec<_> = self.rates.iter().copied().zip(self.line(policy)).collect();
        let over = points.partition_point(|(_, it)| it.ttft <= ttft);
        let (Some((low, before)), Some((high, after))) =
            (over.checked_sub(1).map(|at| points[at]), points.get(over))
        else {
            return points[over.saturating_sub(1)].0;
        };
        low + (high - low) * (ttft - before.ttft) / (after.ttft - before.ttft)
    }

    /// Returns a quantity of each policy, by rate.
    fn curves(&self, of: impl Fn(&Policy, &Point) -> f64) -> Curves<'static> {
        let values = |(policy, line): (&Policy, &Vec<Point>)| {
            (policy.name, line.iter().map(|point| of(policy, point)).collect())
        };
        Curves {
            x: self.rates.iter().map(|rate| (number(*rate), *rate)).collect(),
            values: self.policies.iter().zip(&self.found).map(values).collect(),
        }
    }

    fn show(&self, outcome: &mut Outcome) {
        for Measure { name, unit, of } in [TTFT, ITL, HITS] {
            let curves = self.curves(|_, point| of(point));
            let title = format!("{}: {name}", self.name);
            outcome.tables.push(curves.table(format!("{title}, {unit}"), RATES));
            outcome.plots.push(curves.plot(title, RATES, unit));
        }
    }
}

/// Returns dollars per million tokens.
fn cost(parameters: &Parameters, policy: &Policy, point: &Point) -> f64 {
    let hour = parameters.prices().hour(&setup(parameters), policy);
    Prices::million(hour, point.throughput)
}

pub(super) fn figure_14(parameters: &Parameters) -> Outcome {
    let setup = setup(parameters);
    const POLICIES: [Policy; 5] =
        [Policy::HBM, Policy::DRAM, Policy::SSD, Policy::GDS, Policy::OURS];
    // The last rate exceeds the capacity of all policies.
    let sweeps = [
        Sweep::run(&setup, "L-Eval", &L_EVAL, &[0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 16.0], &POLICIES),
        Sweep::run(&setup, "LooGLE", &LOOGLE, &[0.2, 0.4, 0.5, 0.6, 0.8, 1.2, 8.0], &POLICIES),
    ];
    let mut outcome = Outcome::of(setting(parameters, &LOOGLE));
    let Prices { gpu, dram_gb, drive_gb } = parameters.prices();
    outcome.setting.push(format!(
        "${gpu} an hour for a GPU, ${dram_gb} and ${drive_gb} for a gigabyte of DRAM and \
         of drives (section 4.3), for all that a tier has; tokens of prompts and answers, until \
         the last request has ended"
    ));
    for sweep in &sweeps {
        let mut curves = sweep.curves(|policy, point| cost(parameters, policy, point));
        let row = |(at, (rate, _)): (usize, &(String, f64))| {
            let costs = curves.values.iter().map(|(_, costs)| format!("{:.3}", costs[at]));
            std::iter::once(rate.clone()).chain(costs).collect()
        };
        outcome.tables.push(Table::new(
            format!("{}: $ a million tokens", sweep.name),
            std::iter::once(RATES).chain(POLICIES.map(|policy| policy.name)),
            curves.x.iter().enumerate().map(row),
        ));
        curves.x.pop();
        let title = format!("{}: cost of a million tokens", sweep.name);
        outcome.plots.push(curves.plot(title, RATES, "$"));
    }
    let [_, loogle] = &sweeps;
    let less = |rate: f64, than: &Policy| {
        let at = loogle.rates.iter().position(|it| *it == rate).expect("one of the rates");
        let cost = |policy: &Policy| cost(parameters, policy, &loogle.line(policy)[at]);
        (1.0 - cost(&Policy::OURS) / cost(than)) * 100.0
    };
    const SERVED: &str = "who serves what comes has the same cost, whoever it is: a difference \
        needs more requests than the other one can serve";
    outcome.comparisons = vec![
        predicted("LooGLE at 0.5/s: less than SSD", "%", 66.2, less(0.5, &Policy::SSD), ""),
        predicted("LooGLE at 0.5/s: less than GDS", "%", 27.0, less(0.5, &Policy::GDS), SERVED),
    ];
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faster_tier_is_no_slower_and_the_largest_one_hits_most() {
        // Twice the capacity of the GPU.
        let few =
            Documents { count: 30, tokens: (3_000, 60_000), mean: 30_000.0, spread: 0.4, ..L_EVAL };
        let policies = [Policy::HBM, Policy::SSD, Policy::GDS, Policy::OURS];
        let setup = setup(&Parameters::default());
        let sweep = Sweep::run(&setup, "few", &few, &[0.2, 1.5], &policies);
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
