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
    let all: Vec<&str> = Scenario::ALL.iter().map(|it| it.name).collect();
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
