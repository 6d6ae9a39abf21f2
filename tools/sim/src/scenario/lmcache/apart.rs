//! Prefill and decoding on different GPUs: figures 8 and 11.

use std::time::Duration;

use super::{
    BLOCK, MODELS, MODELS_SAY, by_chunks, by_pages, mean, predicted, range, serve_stored, setup,
};
use crate::{
    engine::{Request, Served, Setup, serve},
    gpu::Model,
    lane::LaneModel,
    outcome::{Outcome, Table, row},
    parallel::each,
    parameters::Parameters,
    policy::Policy,
    workload::{Lengths, Profile},
};

const fn exactly(tokens: u32) -> Lengths {
    Lengths { tokens: (tokens, tokens), mean: tokens as f64, spread: 0.0 }
}

/// Section 7.4.
const PROFILE: Profile = Profile { input: exactly(8192), output: exactly(200) };
const COUNT: u64 = 128;
/// Part of the time that the prefill's GPUs compute.
const LOAD: f64 = 0.5;

/// Mean TTFT and inter-token latency in milliseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Apart {
    pub(super) ttft: f64,
    pub(super) itl: f64,
}

/// Serves requests with prefill on some GPUs and decoding on as many others.
fn apart(setup: &Setup<'_>, policy: &Policy) -> Apart {
    let alone = PROFILE.requests(1, 1.0, BLOCK, 1);
    let alone = serve(setup, &Policy::RECOMPUTE, &alone[..]).served[0].ttft;
    let requests = PROFILE.requests(COUNT, LOAD / alone.as_secs_f64(), BLOCK, 1);
    let first = |it: &Request| Request { output: 1, ..it.clone() };
    let first: Vec<Request> = requests.iter().map(first).collect();
    let prefill: Vec<Duration> =
        serve(setup, &Policy::RECOMPUTE, &first).served.iter().map(|it| it.ttft).collect();
    let sent =
        |(it, took): (&Request, &Duration)| Request { arrival: it.arrival + *took, ..it.clone() };
    // Prompts are computed in order of arrival.
    let decoded: Vec<Request> = requests.iter().zip(&prefill).map(sent).collect();
    let served: Vec<Served> = serve_stored(setup, policy, &decoded, 100).served;
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let ttft = served.iter().zip(&prefill).map(|(it, prefill)| ms(it.ttft + *prefill));
    let tokens = PROFILE.output.mean - 1.0;
    Apart { ttft: mean(ttft), itl: mean(served.iter().map(|it| ms(it.decode) / tokens)) }
}

/// Returns the results by pages, by pages that the step waits for, and by chunks.
pub(super) fn ways(
    parameters: &Parameters,
    (model, count): (Model, u32),
    set_up: Duration,
) -> [Apart; 3] {
    let bandwidth = parameters.value("nvlink.bandwidth") * f64::from(count);
    let lane = LaneModel { set_up, ..parameters.net(bandwidth) };
    let with = |remote: LaneModel, policy: Policy| {
        apart(&setup(parameters, "H100", (model, count), remote), &policy)
    };
    [
        with(by_pages(lane), Policy::REMOTE),
        with(by_pages(lane), Policy::REMOTE_WAITS),
        with(by_chunks(lane, &model), Policy::REMOTE),
    ]
}

pub(in crate::scenario) fn figure_8(parameters: &Parameters) -> Outcome {
    const GOES_ON: &str = "a decoder that goes on during transfers has the same steps, however \
        long they take; the paper does not say what makes its baseline's tokens later";
    const ONE: &str = "hangs on what a page costs over NVLink, which the paper does not give";
    let mut outcome = Outcome::of(vec![
        MODELS_SAY.to_owned(),
        format!(
            "{COUNT} prompts of 8,192 tokens that share nothing, 200 of output; Poisson \
                 arrivals, such that prefill's GPUs compute for half of the time: the paper has no \
                 rate"
        ),
        format!(
            "NVLink of {} GB/s between each two GPUs; page by page (vLLM's own), or in chunks \
                 of 256 tokens (LMCache), after the whole prompt is computed, in one step. The \
                 decoder computes the last 64 tokens of a prompt again",
            parameters.value("nvlink.bandwidth") / 1e9
        ),
    ]);
    for (name, parameter) in
        [("a message of table 1", "net.message"), ("a copy of table 5", "copy.page")]
    {
        let set_up = parameters.micros(parameter);
        let found: Vec<[Apart; 3]> = each(&MODELS, |model| ways(parameters, *model, set_up));
        let rows = MODELS.iter().zip(&found).map(|((model, _), [pages, waits, chunks])| {
            let [ttft, itl] =
                [[pages, waits, chunks].map(|it| it.ttft), [pages, waits, chunks].map(|it| it.itl)];
            row(model.name, [&ttft[..], &[ttft[0] / ttft[2]], &itl, &[itl[1] / itl[2]]].concat())
        });
        let columns = ["", "TTFT, pages, ms", "pages, the step waits", "chunks", "pages by chunks"]
            .into_iter()
            .chain(["inter-token latency, pages, ms", "pages, the step waits", "chunks"])
            .chain(["step waits, by chunks"]);
        let title = format!("A page costs {set_up:?} beside its bytes, like {name}");
        outcome.tables.push(Table::new(title, columns, rows));
        let over = |of: fn(&Apart) -> f64, at: usize| {
            range(found.iter().map(|it| of(&it[at]) / of(&it[2])))
        };
        for (measure, paper, of, at, note) in [
            ("TTFT", [1.53, 1.84], (|it| it.ttft) as fn(&Apart) -> f64, 0, ONE),
            ("inter-token latency", [1.12, 1.66], |it| it.itl, 0, GOES_ON),
            ("inter-token latency, the step waits", [1.12, 1.66], |it| it.itl, 1, ONE),
        ] {
            for (end, paper, ours) in
                [("least", paper[0], over(of, at)[0]), ("most", paper[1], over(of, at)[1])]
            {
                let what = format!("{name}: {measure}, pages by chunks, {end} of four models");
                outcome.comparisons.push(predicted(&what, "", paper, ours, note));
            }
        }
    }
    outcome
}
