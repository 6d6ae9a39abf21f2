//! The scheduler against layer-wise order, with the same requests and drives.

use std::time::Duration;

use kv_schedule::{SlackTable, StepShape};

use super::tutti;
use crate::{
    engine::{Report, Request, Setup, Work, watch},
    lane::LaneModel,
    outcome::{Bar, Gantt, Line, Outcome, Plot, Table, number, row},
    parallel::each,
    parameters::Parameters,
    policy::Policy,
};

const INPUT: u32 = 32_768;
const BLOCK_TOKENS: u32 = 64;

fn setup(parameters: &Parameters) -> Setup<'static> {
    Setup { step_tokens: 8192, ..tutti::setup(parameters) }
}

/// Means of all requests but the first, in milliseconds.
#[derive(Debug, Clone, Copy)]
struct Found {
    ttft: f64,
    bubble: f64,
}

/// Returns prompts that share `hits` percent with the first one, which is alone for a minute; the
/// others arrive at intervals of `every`.
fn requests(hits: f64, every: Duration, count: u64) -> Vec<Request> {
    let blocks = INPUT / BLOCK_TOKENS;
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

fn served(setup: &Setup<'_>, policy: &Policy, requests: &[Request], watched: usize) -> Report {
    // GPU caching is off to measure the tier below.
    watch(setup, &Policy { keeps_hbm: false, ..*policy }, requests, watched)
}

fn found(setup: &Setup<'_>, policy: &Policy, hits: f64, (every, count): (Duration, u64)) -> Found {
    let Report { served, bubble, .. } =
        served(setup, policy, &requests(hits, every, count), usize::MAX);
    let others = (count - 1) as f64 / 1e3;
    let ttft: f64 = served[1..].iter().map(|it| it.ttft.as_secs_f64()).sum();
    Found { ttft: ttft / others, bubble: bubble.as_secs_f64() / others }
}

/// Interval between requests, in multiples of the time that one takes alone.
const LOADS: [(&str, f64); 3] =
    [("alone", 20.0), ("half of the time", 2.0), ("nearly always", 1.1)];

/// Returns the results of layer-wise order, the scheduler, and drives that take no time.
fn compared(setup: &Setup<'_>, hits: f64, apart: f64, count: u64) -> [Found; 3] {
    let alone = found(setup, &Policy::NAIVE, hits, (Duration::from_secs(60), 2));
    let every = Duration::from_secs_f64(alone.ttft / 1e3 * apart);
    [Policy::NAIVE, Policy::OURS, Policy::ORACLE]
        .map(|policy| found(setup, &policy, hits, (every, count)))
}

/// Returns the part of the TTFT at 93.75 % in percent that the scheduler saves a request alone.
fn saved(parameters: &Parameters, mixed: f64, drives: u32) -> f64 {
    let mut storage = parameters.storage(drives, 1);
    storage.direct.mixed = mixed;
    let [naive, ours, _] = compared(&Setup { storage, ..setup(parameters) }, 93.75, LOADS[0].1, 8);
    (1.0 - ours.ttft / naive.ttft) * 100.0
}

/// Returns what the scheduler saves by the mixing factor of the drives and their number.
fn by_mixing(parameters: &Parameters) -> Table {
    const DRIVES: [u32; 3] = [1, 2, 4];
    let rows: Vec<Vec<String>> = each(&[0.4, 0.6, 0.8, 1.0, 1.5, 2.0], |mixed| {
        row(number(*mixed), DRIVES.map(|drives| saved(parameters, *mixed, drives)))
    });
    let title = "TTFT at 93.75 % that the scheduler saves, %, by the part of the bandwidth that is \
                 left while reads and writes mix (0.4: Tutti; 2: none is lost), and by drives";
    Table::new(title, ["mixed", "one drive", "two drives", "four drives"], rows)
}

/// Factors by which a table is wrong.
const WRONG: [f64; 5] = [0.1, 0.5, 1.0, 2.0, 10.0];

/// Returns the table of a scheduler that knows all costs and layer times of a set-up, each
/// `factor` times what it is.
fn wrong_table(setup: &Setup<'_>, factor: f64) -> SlackTable {
    let lane = setup.storage.direct;
    let mut table =
        LaneModel { read: lane.read / factor, write: lane.write / factor, ..lane }.table();
    for tokens in [1, 256, 512, 1024, 2048, 4096, 8192] {
        for prefix in [0, 8192, 16_384, 24_576, 30_720] {
            let shape = StepShape::of([(tokens, prefix)]);
            table.learn(shape, setup.gpu.layer(&setup.model, shape).mul_f64(factor));
        }
    }
    table
}

/// Returns TTFT and bubble with tables that are wrong by several factors; the GPU and the drives
/// are the same in all rows.
fn by_table(parameters: &Parameters) -> Table {
    let setup = setup(parameters);
    let every = Duration::from_secs(5);
    let of = |known: Option<&SlackTable>| {
        let setup = Setup { known, ..setup };
        [90.0, 93.75, 96.875].map(|hits| found(&setup, &Policy::OURS, hits, (every, 16)))
    };
    let row = |name: String, found: [Found; 3]| {
        row(name, found.iter().flat_map(|it| [it.ttft, it.bubble]))
    };
    let wrong = |factor: &f64| {
        let table = wrong_table(&setup, *factor);
        row(format!("{factor} times as long"), of(Some(&table)))
    };
    let mut rows = vec![row("unknown layer times".to_owned(), of(None))];
    rows.extend(WRONG.iter().map(wrong));
    let columns = ["times in the scheduler's table", "TTFT at 90 %, ms", "bubble"]
        .into_iter()
        .chain(["TTFT at 93.75 %", "bubble", "TTFT at 96.875 %", "bubble"]);
    Table::new("A scheduler whose table is wrong", columns, rows)
}

pub(super) fn hiding(parameters: &Parameters) -> Outcome {
    let setup = setup(parameters);
    const HITS: [f64; 10] = [50.0, 60.0, 70.0, 80.0, 85.0, 90.0, 93.75, 96.875, 98.4375, 100.0];
    let mut outcome = Outcome::of(tutti::setting(parameters));
    outcome.setting.pop();
    outcome.setting.push(format!(
        "60 prompts of {INPUT} tokens, of which so many percent were stored by an earlier one, 20 \
         tokens of output, steps of up to 8,192 tokens; at regular times, by how long one of them \
         takes alone"
    ));
    for (name, apart) in LOADS {
        let rows = each(&HITS, |hits| (*hits, compared(&setup, *hits, apart, 61)));
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
        let title = format!("The GPU is used {name}; means in ms");
        outcome.tables.push(Table::new(title, columns, rows.iter().map(cells)));
        let line = |(name, at): (&str, usize)| {
            Line::new(name, rows.iter().map(|(hits, found)| (*hits, found[at].ttft)))
        };
        let title = format!("TTFT by hit rate; the GPU is used {name}");
        let lines = [("layer-wise", 0), ("ours", 1), ("oracle", 2)].map(line);
        outcome.plots.push(Plot::new(title, "hit rate, %", "ms", lines));
    }
    let every = Duration::from_secs(10);
    for policy in [Policy::NAIVE, Policy::OURS] {
        outcome.gantts.push(gantt(&setup, &policy, &requests(90.0, every, 2)));
    }
    outcome.tables.extend([by_mixing(parameters), by_table(parameters)]);
    outcome.notes = NOTES.map(str::to_owned).to_vec();
    outcome
}

const NOTES: [&str; 2] = [
    "All that the scheduler saves here is what mixing costs: with drives that lose nothing while \
     they read and write, there is nothing to save. Measure yours with `ripieno bench table`.",
    "Reads go before writes whatever the table says, and a layer's reads before those of later \
     layers: with one request at a time a wrong table changes nothing. Times decide only when \
     something is read ahead into host memory, and when a second batch of writes begins.",
];

/// Returns the timeline of the last request, layer by layer.
fn gantt(setup: &Setup<'_>, policy: &Policy, requests: &[Request]) -> Gantt {
    let watched = requests.len() - 1;
    let arrival = requests[watched].arrival;
    let spans = served(setup, policy, requests, watched).spans;
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
        let setup = setup(&Parameters::default());
        for hits in [50.0, 75.0, 90.0, 96.875, 100.0] {
            for (name, apart) in LOADS {
                let [naive, ours, oracle] = compared(&setup, hits, apart, 16);
                let what = format!("{name}, {hits} %: {naive:?} {ours:?} {oracle:?}");
                assert!(ours.ttft <= naive.ttft * 1.01, "{what}");
                assert!(ours.bubble <= naive.bubble * 1.01, "{what}");
                assert!(oracle.ttft <= ours.ttft && oracle.bubble <= ours.bubble, "{what}");
            }
        }
    }

    #[test]
    fn the_scheduler_saves_what_mixing_costs() {
        let parameters = Parameters::default();
        let [much, nothing] =
            [0.4, LaneModel::FULL_DUPLEX].map(|mixed| saved(&parameters, mixed, 2));
        assert!((30.0..45.0).contains(&much), "{much}");
        assert!(nothing.abs() < 1.0, "{nothing}");
    }

    #[test]
    fn a_wrong_table_costs_nothing_here() {
        let setup = setup(&Parameters::default());
        let of = |known: Option<&SlackTable>| {
            let arrivals = (Duration::from_secs(5), 4);
            found(&Setup { known, ..setup }, &Policy::OURS, 93.75, arrivals)
        };
        let without = of(None);
        for factor in WRONG {
            let table = wrong_table(&setup, factor);
            let with = of(Some(&table));
            let off = with.ttft / without.ttft - 1.0;
            assert!(off.abs() < 0.01, "{factor}: {with:?} {without:?}");
        }
    }
}
