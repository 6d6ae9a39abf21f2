//! The scheduler against layer-wise order, with the same requests and drives.

use std::time::Duration;

use super::{Scenario, tutti};
use crate::{
    engine::{Report, Request, Setup, Work, watch},
    outcome::{Bar, Gantt, Line, Outcome, Plot, Table},
    page::number,
    policy::Policy,
};

/// Bubble and TTFT by hit rate, alone and under load.
pub(super) const HIDING: Scenario = Scenario {
    name: "hiding",
    title: "the scheduler against layer-wise order, by hit rate",
    run: hiding,
};

const INPUT: u32 = 32_768;
const SETUP: Setup = Setup { step_tokens: 8192, ..tutti::SETUP };

/// Means of all requests but the first, in milliseconds.
#[derive(Debug, Clone, Copy)]
struct Found {
    ttft: f64,
    bubble: f64,
}

/// Returns prompts that share `hits` percent with the first one, which is alone for a minute; the
/// others arrive at intervals of `every`.
fn requests(hits: f64, every: Duration, count: u64) -> Vec<Request> {
    let blocks = INPUT / SETUP.block_tokens;
    let shared = (f64::from(blocks) * hits / 100.0) as u32;
    let request = |number: u64| {
        let name =
            |at: u32| if at < shared { at.into() } else { ((number + 1) << 32) | u64::from(at) };
        let arrival = if number == 0 { 0.0 } else { 60.0 + every.as_secs_f64() * number as f64 };
        let (arrival, blocks) = (Duration::from_secs_f64(arrival), (0..blocks).map(name).collect());
        Request { arrival, input: INPUT, output: 20, blocks, leaves: None }
    };
    (0..count).map(request).collect()
}

fn served(policy: &Policy, requests: &[Request], watched: usize) -> Report {
    // GPU caching is off to measure the tier below.
    watch(&SETUP, &Policy { keeps_hbm: false, ..*policy }, requests, watched)
}

fn found(policy: &Policy, hits: f64, every: Duration, count: u64) -> Found {
    let Report { served, bubble, .. } = served(policy, &requests(hits, every, count), usize::MAX);
    let others = (count - 1) as f64 / 1e3;
    let ttft: f64 = served[1..].iter().map(|it| it.ttft.as_secs_f64()).sum();
    Found { ttft: ttft / others, bubble: bubble.as_secs_f64() / others }
}

/// Interval between requests, in multiples of the time that one takes alone.
const LOADS: [(&str, f64); 3] =
    [("alone", 20.0), ("half of the time", 2.0), ("nearly always", 1.1)];

/// Returns the results of layer-wise order, the scheduler, and drives that take no time.
fn row(hits: f64, apart: f64, count: u64) -> [Found; 3] {
    let alone = found(&Policy::NAIVE, hits, Duration::from_secs(60), 2);
    let every = Duration::from_secs_f64(alone.ttft / 1e3 * apart);
    [Policy::NAIVE, Policy::OURS, Policy::ORACLE].map(|policy| found(&policy, hits, every, count))
}

fn hiding() -> Outcome {
    const HITS: [f64; 10] = [50.0, 60.0, 70.0, 80.0, 85.0, 90.0, 93.75, 96.875, 98.4375, 100.0];
    let mut outcome = Outcome { setting: tutti::setting(), ..Outcome::default() };
    outcome.setting.pop();
    outcome.setting.push(format!(
        "60 prompts of {INPUT} tokens, of which so many percent were stored by an earlier one, 20 \
         tokens of output, steps of up to 8,192 tokens; at regular times, by how long one of them \
         takes alone"
    ));
    for (name, apart) in LOADS {
        let rows = HITS.map(|hits| (hits, row(hits, apart, 61)));
        let columns = ["hit rate, %", "TTFT, layer-wise", "ours", "ours, %", "oracle"]
            .into_iter()
            .chain(["bubble, layer-wise", "ours", "oracle"]);
        let cells = |(hits, [naive, ours, oracle]): &(f64, [Found; 3])| {
            let more = (ours.ttft / naive.ttft - 1.0) * 100.0;
            [*hits, naive.ttft, ours.ttft]
                .map(number)
                .into_iter()
                .chain([format!("{more:+.1}")])
                .chain([oracle.ttft, naive.bubble, ours.bubble, oracle.bubble].map(number))
                .collect()
        };
        outcome.tables.push(Table {
            title: format!("The GPU is used {name}; means in ms"),
            columns: columns.map(str::to_owned).collect(),
            rows: rows.iter().map(cells).collect(),
        });
        let line = |name: &str, at: usize| Line {
            name: name.to_owned(),
            points: rows.iter().map(|(hits, found)| (*hits, found[at].ttft)).collect(),
        };
        outcome.plots.push(Plot {
            title: format!("TTFT by hit rate; the GPU is used {name}"),
            x: "hit rate, %".to_owned(),
            y: "ms".to_owned(),
            lines: vec![line("layer-wise", 0), line("ours", 1), line("oracle", 2)],
        });
    }
    let every = Duration::from_secs(10);
    for policy in [Policy::NAIVE, Policy::OURS] {
        outcome.gantts.push(gantt(&policy, &requests(90.0, every, 2)));
    }
    outcome
}

/// Returns the timeline of the last request, layer by layer.
fn gantt(policy: &Policy, requests: &[Request]) -> Gantt {
    let watched = requests.len() - 1;
    let arrival = requests[watched].arrival;
    let spans = served(policy, requests, watched).spans;
    let ms = |time: Duration| time.saturating_sub(arrival).as_secs_f64() * 1e3;
    let bar = |work: Work| {
        let of = spans.iter().filter(move |span| span.work == work);
        of.map(move |span| Bar { row: span.layer, from: ms(span.from), to: ms(span.to) }).collect()
    };
    let kinds = [Work::Read, Work::Compute, Work::Write];
    Gantt {
        title: format!("A prompt of 32K tokens, 90 % stored, layer by layer: {}", policy.name),
        x: "ms".to_owned(),
        y: "layer".to_owned(),
        bars: kinds.map(|work| (work, bar(work))).to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheduler_is_never_worse_by_a_hundredth_and_the_oracle_never_worse_at_all() {
        for hits in [50.0, 75.0, 90.0, 96.875, 100.0] {
            for (name, apart) in LOADS {
                let [naive, ours, oracle] = row(hits, apart, 16);
                let what = format!("{name}, {hits} %: {naive:?} {ours:?} {oracle:?}");
                assert!(ours.ttft <= naive.ttft * 1.01, "{what}");
                assert!(ours.bubble <= naive.bubble * 1.01, "{what}");
                assert!(oracle.ttft <= ours.ttft && oracle.bubble <= ours.bubble, "{what}");
            }
        }
    }
}
