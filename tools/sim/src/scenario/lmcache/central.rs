//! A central store: figure 7.

use super::{
    BLOCK, GBPS, LLAMA_3_8B, LLAMA_3_70B, QWEN2_5_32B, by_chunks, predicted, range, setup,
};
use crate::{
    engine::{Report, Setup, serve},
    gpu::Model,
    outcome::{Outcome, Table, row},
    parallel::each,
    parameters::Parameters,
    policy::Policy,
    workload::Documents,
};

/// TriviaQA of LongBench has 200 prompts of 8,209 words in the mean; tokens, spread and questions
/// are ours.
const TRIVIA_QA: Documents = Documents {
    count: 200,
    tokens: (2_000, 32_000),
    mean: 11_500.0,
    spread: 0.4,
    question: 50,
    answer: 32,
    questions: 4.0,
};
const MODELS: [(Model, u32); 3] = [(LLAMA_3_8B, 1), (QWEN2_5_32B, 2), (LLAMA_3_70B, 4)];
const LINKS: [f64; 3] = [15.0, 64.0, 128.0];

/// Requests a second if more arrive than are served, and the hit rate in percent.
pub(super) type Found = (f64, f64);

fn serves(setup: &Setup<'_>, policy: &Policy) -> Found {
    let requests = TRIVIA_QA.requests(1e3, BLOCK, 1);
    let Report { served, took, .. } = serve(setup, policy, &requests);
    let input: f64 = requests.iter().map(|it| f64::from(it.input)).sum();
    let hit: f64 = served.iter().map(|it| f64::from(it.hbm_tokens + it.loaded_tokens)).sum();
    (requests.len() as f64 / took.as_secs_f64(), hit / input * 100.0)
}

/// Returns what the GPU's memory alone, host memory, and a store behind each link serve; the last
/// one for loads that the step waits for as well.
pub(super) fn tiers(parameters: &Parameters, (model, count): (Model, u32)) -> Vec<Found> {
    let behind = |gbps: f64, policy: Policy| {
        let remote = by_chunks(parameters.net(gbps * GBPS), &model);
        serves(&setup(parameters, "H100", (model, count), remote), &policy)
    };
    let mut found = vec![behind(15.0, Policy::HBM), behind(15.0, Policy::DRAM)];
    found.extend(LINKS.map(|gbps| behind(gbps, Policy::REMOTE)));
    found.push(behind(15.0, Policy::REMOTE_WAITS));
    found
}

pub(in crate::scenario) fn figure_7(parameters: &Parameters) -> Outcome {
    const LINK: &str = "all hits come over the link, and GPUs compute more than 15 Gbps bring. A \
        gain in the paper's range takes 64 Gbps or more here; 15 GB/s would be 120";
    let Documents { count, mean, question, answer, questions, .. } = TRIVIA_QA;
    let mut outcome = Outcome::of(vec![
        "Llama 3 8B on one H100, Qwen2.5 32B on two, Llama 3 70B on four".to_owned(),
        format!(
            "{count} prompts of {mean:.0} tokens in the mean (log-normal) and {question} of a \
                 question, {questions} times each, {answer} of output, all at once: the paper \
                 gives none of these but the data set (TriviaQA of LongBench)"
        ),
        "chunks of 256 tokens; loads before a request joins a step, others run meanwhile; \
             all hits are loaded, also those that would be computed sooner"
            .to_owned(),
    ]);
    let found: Vec<Vec<Found>> = each(&MODELS, |model| tiers(parameters, *model));
    let columns = ["", "GPU memory alone", "host memory, 500 GB", "15 Gbps", "64 Gbps", "128 Gbps"];
    let columns = [&columns[..], &["15 Gbps, the step waits"]].concat();
    let of = |part: fn(&Found) -> f64| {
        let each =
            |((model, _), it): (&(Model, u32), &Vec<Found>)| row(model.name, it.iter().map(part));
        MODELS.iter().zip(&found).map(each).collect::<Vec<_>>()
    };
    outcome.tables.push(Table::new("Requests a second", columns.clone(), of(|it| it.0)));
    outcome.tables.push(Table::new("Hits, %", columns.clone(), of(|it| it.1)));
    for at in [2, 4, 5] {
        let name = columns[at + 1];
        let [least, most] = range(found.iter().map(|it| it[at].0 / it[0].0));
        for (end, paper, ours) in [("least", 1.3, least), ("most", 3.0, most)] {
            let what = format!("{name}: throughput by GPU memory alone, {end} of three models");
            outcome.comparisons.push(predicted(&what, "", paper, ours, LINK));
        }
    }
    outcome
}
