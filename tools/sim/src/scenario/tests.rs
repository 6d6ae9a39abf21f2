use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path};

use rayon::prelude::*;

use super::*;

/// Scenarios of seconds in a debug build. A release build checks the others as well.
const SHORT: &[&str] = &[
    "tutti-2",
    "tutti-6",
    "tutti-9",
    "tutti-11",
    "tutti-12",
    "tutti-13",
    "vllm-offload",
    "lmcache-1",
    "lmcache-4",
    "lmcache-7",
    "lmcache-8",
    "lmcache-10",
    "lmcache-12",
];
/// Scenarios that take a minute of CPU time each, in a release build.
const LONG: &[&str] = &["tutti-8", "tutti-14"];

fn number(number: f64) -> String {
    let digits = if number.abs() >= 1000.0 { 0 } else { 2 };
    format!("{number:.digits$}")
}

/// Returns a scenario's lines: an FNV-1a hash of its tables, and all of the paper's numbers.
fn lines(outcome: &Outcome) -> String {
    let tables = format!("{:?}", outcome.tables);
    let digest = tables.bytes().fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    let mut text = format!("{} ({digest:016x})\n", outcome.name);
    for it in &outcome.comparisons {
        let ours = it.ours.map_or_else(|| "none".to_owned(), number);
        let (paper, basis) = (number(it.paper), it.basis.name());
        let unit = if it.unit.is_empty() { String::new() } else { format!(" {}", it.unit) };
        let _ = writeln!(text, "  {}: {paper}, {ours}{unit} ({basis})", it.what);
    }
    text
}

/// Returns the lines of each scenario in the page of results, by name.
fn written(page: &str) -> BTreeMap<&str, String> {
    let text = page.split("```text\n").nth(1).and_then(|rest| rest.split("```").next());
    let mut written = BTreeMap::new();
    let mut name = "";
    for line in text.expect("the list of cells").lines() {
        if !line.starts_with(' ') {
            name = line.split(' ').next().unwrap_or_default();
        }
        let lines: &mut String = written.entry(name).or_default();
        *lines += &format!("{line}\n");
    }
    written
}

#[test]
fn the_page_of_results_has_what_the_scenarios_give() {
    check(|name| !LONG.contains(&name) && (SHORT.contains(&name) || !cfg!(debug_assertions)));
}

#[test]
#[ignore = "slow: two minutes of CPU time"]
fn the_page_of_results_has_what_the_long_scenarios_give() {
    check(|name| LONG.contains(&name));
}

/// Compares the chosen scenarios with the page of results, which has all of them.
fn check(is_chosen: impl Fn(&str) -> bool) {
    let parameters = Parameters::default();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results/sim.md");
    let text = fs::read_to_string(&page).expect("the page of results");
    let written = written(&text);
    let all: Vec<&str> = Scenario::all().iter().map(|it| it.name.as_str()).collect();
    if let Some(name) = written.keys().find(|name| !all.contains(name)) {
        panic!("{}: {name}: no such scenario", page.display());
    }
    let mut checked = all.clone();
    checked.retain(|name| is_chosen(name));
    let found = checked
        .par_iter()
        .map(|name| (*name, lines(&Scenario::named(name).expect("a scenario").run(&parameters))));
    let found: Vec<_> = found.collect();
    let differ = found.iter().filter(|(name, found)| written.get(name) != Some(found));
    let wrong: String = differ.map(|(_, found)| found.as_str()).collect();
    let missing: Vec<_> = all.iter().filter(|name| !written.contains_key(*name)).collect();
    assert!(
        wrong.is_empty() && missing.is_empty(),
        "{} lacks {missing:?} (--release prints them), and has other results than these; copy \
         them, and check its other numbers:\n{wrong}",
        page.display()
    );
}

#[test]
fn scenarios_of_other_papers_follow_their_parameters() {
    for (name, parameter) in [("vllm-offload", "vllm.link"), ("tierkv-4", "host.read")] {
        let scenario = Scenario::named(name).expect("a scenario");
        let mut slower = Parameters::default();
        let value = slower.value(parameter);
        slower.set(parameter, value / 2.0, "a test").expect("in range");
        let [usual, slow] = [&Parameters::default(), &slower].map(|it| scenario.run(it));
        assert_ne!(usual.tables, slow.tables, "{name}");
        assert_ne!(usual.setting[0], slow.setting[0], "{name}");
        assert!(slow.setting.iter().any(|line| line.starts_with(parameter)), "{name}");
    }
}

#[test]
fn a_file_with_an_unknown_key_is_refused() {
    let good = PAPERS[0];
    assert!(basic_toml::from_str::<Paper>(good).is_ok());
    for (key, wrong) in [("paper = ", "papper = "), ("rows = ", "row = "), ("title = ", "titel = ")]
    {
        let error = basic_toml::from_str::<Paper>(&good.replacen(key, wrong, 1));
        let text = error.map(|_| ()).unwrap_err().to_string();
        assert!(text.contains(wrong.trim_end_matches(" = ")), "{text}");
    }
    let set = serde_json::json!({ "kind": "mix", "wirtes": 50.0 });
    let error = serde_json::from_value::<Experiment>(set).unwrap_err().to_string();
    assert!(error.contains("wirtes"), "{error}");
}

/// Returns the parameters of the run whose results begin with `labels`, with some others.
pub(super) fn run_set(scenario: &str, labels: &str, other: &Value) -> Value {
    let scenario = Scenario::named(scenario).expect("a scenario");
    let mut all = scenario.runs.iter().flat_map(Runs::all);
    let (_, mut set) = all.find(|(name, _)| name == labels).expect("a run");
    merge(&mut set, other.as_object().cloned().unwrap_or_default());
    let (parameters, found, ticks) = (&Parameters::default(), &Numbers::new(), &scenario.ticks());
    Shown { found, parameters, texts: &scenario.texts, ticks }.calculate(&mut set);
    Value::Object(set)
}

/// Runs the experiment of this run, with other parameters.
fn results(scenario: &str, labels: &str, other: &Value) -> BTreeMap<String, f64> {
    let set = run_set(scenario, labels, other);
    let experiment: Experiment = serde_json::from_value(set).expect("parameters");
    experiment.run(&Parameters::default()).into_iter().collect()
}

#[test]
fn larger_messages_get_more_of_the_bandwidth_and_smaller_ones_what_table_1_has() {
    let scenario = Scenario::named("lmcache-1").expect("a scenario");
    let outcome = scenario.run(&Parameters::default());
    for it in outcome.comparisons.iter().take(6) {
        assert!(it.difference().unwrap().abs() < 0.05, "{it:?}");
    }
    let mut slow = Parameters::default();
    slow.set("net.message", 30.1, "a test").unwrap();
    let slow = scenario.run(&slow);
    let ours = [&outcome, &slow].map(|it| it.comparisons[0].ours.unwrap());
    assert!((ours[0] / ours[1] - 1.92).abs() < 0.01, "{ours:?}");
}

#[test]
fn a_slow_link_serves_less_than_the_gpus_compute_and_a_fast_one_more() {
    let of = |tier: &str| {
        let found = results("lmcache-7", &format!("llama-3-8b|{tier}"), &serde_json::json!({}));
        (found["requests/s"], found["hits"])
    };
    let [hbm, slow, fast, waits] =
        ["GPU memory alone", "15 Gbps", "128 Gbps", "15 Gbps, the step waits"].map(of);
    let what = format!("{hbm:?} {slow:?} {fast:?} {waits:?}");
    assert!(slow.0 < hbm.0 && hbm.0 < fast.0 && waits.0 < slow.0, "{what}");
    assert!(fast.1 > 2.0 * hbm.1, "{what}");
}

#[test]
fn loads_beside_computation_save_half_of_the_time_at_most() {
    for (link, least, most) in [("15 Gbps", 1.0, 1.3), ("100 Gbps", 1.5, 2.0)] {
        let [beside, waits] = ["remote", "remote, the step waits"].map(|policy| {
            let labels = format!("{link}|95 %|{policy}");
            results("lmcache-10", &labels, &serde_json::json!({}))["took"]
        });
        let gain = waits / beside;
        assert!(least < gain && gain < most, "{link}: {gain}");
    }
}

#[test]
fn pages_cost_the_first_token_and_others_only_if_the_step_waits() {
    let of = |way: &str| {
        let labels = format!("a message of table 1|llama-3-8b|{way}");
        let found = results("lmcache-8", &labels, &serde_json::json!({}));
        (found["TTFT"], found["ITL"])
    };
    let [pages, waits, chunks] = ["pages", "pages, the step waits", "chunks"].map(of);
    let message = Parameters::default().micros("net.message");
    // 32 layers of 512 pages, and with chunks of 32 messages.
    let more = message.as_secs_f64() * 1e3 * f64::from(32 * 512 - 32);
    assert!(pages.0 > chunks.0 + more * 0.95, "{pages:?} {chunks:?}");
    assert!((pages.1 / chunks.1 - 1.0).abs() < 0.01, "{pages:?} {chunks:?}");
    assert!(waits.1 > chunks.1 * 1.5, "{waits:?} {chunks:?}");
}

#[test]
fn the_scheduler_is_never_worse_by_a_hundredth_and_the_oracle_never_worse_at_all() {
    for hits in [50.0, 75.0, 90.0, 96.875, 100.0] {
        for load in ["alone", "half of the time", "nearly always"] {
            let other = serde_json::json!({ "hits": hits, "count": 16 });
            let of = |policy: &str| {
                let found = results("hiding", &format!("{load}|50.0|{policy}"), &other);
                (found["TTFT"], found["bubble"])
            };
            let [naive, ours, oracle] = ["layer-wise", "ours", "oracle"].map(of);
            let what = format!("{load}, {hits} %: {naive:?} {ours:?} {oracle:?}");
            assert!(ours.0 <= naive.0 * 1.01 && ours.1 <= naive.1 * 1.01, "{what}");
            assert!(oracle.0 <= ours.0 && oracle.1 <= ours.1, "{what}");
        }
    }
}

#[test]
fn the_scheduler_saves_what_mixing_costs() {
    let [much, nothing] = ["0.40", "2.00"].map(|mixed| {
        let [ours, naive] = ["ours", "layer-wise"].map(|policy| {
            let labels = format!("mixed|{mixed}|two drives|{policy}");
            results("hiding", &labels, &serde_json::json!({}))["TTFT"]
        });
        (1.0 - ours / naive) * 100.0
    });
    assert!((30.0..45.0).contains(&much), "{much}");
    assert!(nothing.abs() < 1.0, "{nothing}");
}

#[test]
fn a_wrong_table_costs_nothing_here() {
    let of = |table: &str| {
        let few = serde_json::json!({ "count": 4 });
        results("hiding", &format!("{table}|93.8"), &few)["TTFT"]
    };
    let without = of("unknown layer times");
    for factor in ["0.1", "0.5", "1", "2", "10"] {
        let with = of(&format!("{factor} times as long"));
        assert!((with / without - 1.0).abs() < 0.01, "{factor}: {with} {without}");
    }
}

#[test]
fn a_faster_tier_is_no_slower_and_the_largest_one_hits_most() {
    // Twice the capacity of the GPU.
    let few = serde_json::json!({
        "count": 30, "tokens": [3_000, 60_000], "mean": 30_000.0, "spread": 0.4,
        "question": 200, "answer": 150, "questions": 6.7,
    });
    for rate in [0.2, 1.5] {
        let other = serde_json::json!({ "documents": few, "rate": rate });
        let [hbm, ssd, gds, ours] = ["HBM", "SSD", "GDS", "ours"]
            .map(|policy| results("tutti-8", &format!("L-Eval|1.50|{policy}"), &other));
        assert!(ours["TTFT"] < gds["TTFT"] && gds["TTFT"] < ssd["TTFT"], "{ours:?} {gds:?}");
        assert!(hbm["hits"] < ours["hits"], "{hbm:?} {ours:?}");
    }
}
