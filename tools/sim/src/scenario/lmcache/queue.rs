//! Loads for requests that wait: figure 10.

use std::time::Duration;

use super::{BLOCK, GBPS, LLAMA_3_8B, by_chunks, predicted, range, serve_stored, setup};
use crate::{
    engine::{Request, Setup},
    outcome::{Outcome, Table, row},
    parallel::each,
    parameters::Parameters,
    policy::Policy,
};

const LINKS: [f64; 6] = [15.0, 32.0, 64.0, 100.0, 200.0, 400.0];
const STORED: [usize; 3] = [50, 75, 95];

/// Returns 100 prompts of 10,240 tokens that come at once.
fn requests() -> Vec<Request> {
    let request = |number: u64| Request {
        arrival: Duration::ZERO,
        input: 10_240,
        output: 100,
        blocks: (0..u64::from(10_240 / BLOCK)).map(|at| number << 32 | at).collect(),
        leaves: None,
    };
    (0..100).map(request).collect()
}

/// Returns how many times as long all requests take if the step waits for its loads.
pub(super) fn gain(parameters: &Parameters, gbps: f64, stored: usize) -> f64 {
    let remote = by_chunks(parameters.net(gbps * GBPS), &LLAMA_3_8B);
    let setup = Setup { requests_max: 50, ..setup(parameters, "H100", (LLAMA_3_8B, 1), remote) };
    let took = |policy: &Policy| serve_stored(&setup, policy, &requests(), stored).took;
    took(&Policy::REMOTE_WAITS).as_secs_f64() / took(&Policy::REMOTE).as_secs_f64()
}

pub(in crate::scenario) fn figure_10(parameters: &Parameters) -> Outcome {
    const BOUND: &str = "both beside each other take the longer of the two: the gain is 2 at most, \
        where they take as long";
    let mut outcome = Outcome::of(vec![
        "Llama 3 8B on one H100; 100 prompts of 10,240 tokens come at once and 50 run at a \
             time (section 4.2), 100 tokens of output; the paper names neither model, link nor \
             lengths of its figure"
            .to_owned(),
        "the step waits: loads of all requests that join it come first; beside: a request \
             joins a step after its loads, while others compute"
            .to_owned(),
    ]);
    let found = each(&LINKS, |gbps| STORED.map(|stored| gain(parameters, *gbps, stored)));
    let rows = LINKS.iter().zip(&found).map(|(gbps, it)| row(format!("{gbps} Gbps"), *it));
    let columns = ["", "50 % stored", "75 %", "95 %"];
    let title = "Time of all requests: the step waits, by loads beside it";
    outcome.tables.push(Table::new(title, columns, rows));
    let [_, most] = range(found.iter().flatten().copied());
    outcome.comparisons.push(predicted(
        "delay, sequential by beside, at most",
        "",
        1.46,
        most,
        BOUND,
    ));
    outcome
}
