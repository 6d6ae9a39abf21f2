use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use super::*;
use crate::cost::Curve;

fn setting() -> Setting {
    let [model, gpu, engine] = ["Llama-3-8B", "H100", "vLLM 0.32"].map(str::to_owned);
    Setting { model, gpu, engine, drives: vec!["D7-PS1010".to_owned(); 2] }
}

fn empty() -> SlackTable {
    let curve = |bandwidth| Curve::line(Duration::from_micros(80), bandwidth).unwrap();
    SlackTable::new(setting(), IoCosts { read: curve(28e9), write: curve(10e9), mixed: 0.4 })
}

/// A simulated GPU: the true duration of a layer.
fn truth(shape: StepShape) -> Duration {
    let micros = if shape.is_prefill {
        20.0 + 0.7 * f64::from(shape.tokens) + 7e-6 * shape.attended as f64
    } else {
        180.0 + 0.2 * f64::from(shape.tokens) + 6e-4 * shape.attended as f64
    };
    Duration::from_nanos((micros * 1e3) as u64)
}

fn some(chance: &mut StdRng) -> StepShape {
    if chance.random_bool(0.5) {
        let prefix = chance.random_range(0..32) * 1024;
        StepShape::of([(chance.random_range(64..8192), prefix)])
    } else {
        StepShape::of(
            (0..chance.random_range(1..64)).map(|_| (1, chance.random_range(100..30_000))),
        )
    }
}

/// Returns the sorted relative errors of the predictions for random shapes.
fn errors(table: &SlackTable, chance: &mut StdRng) -> Vec<f64> {
    let mut errors: Vec<f64> = (0..500)
        .map(|_| {
            let shape = some(chance);
            let (said, is) =
                (table.layer(shape).unwrap().as_secs_f64(), truth(shape).as_secs_f64());
            (said / is - 1.0).abs()
        })
        .collect();
    errors.sort_by(f64::total_cmp);
    errors
}

#[test]
fn a_hundred_steps_are_enough_even_if_some_hang() {
    for seed in 0..20 {
        let (mut table, mut chance) = (empty(), StdRng::seed_from_u64(seed));
        for _ in 0..100 {
            let shape = some(&mut chance);
            let jitter =
                if chance.random_bool(0.02) { 20.0 } else { chance.random_range(0.95..1.05) };
            table.learn(shape, truth(shape).mul_f64(jitter));
        }
        let errors = errors(&table, &mut chance);
        assert!(errors[250] < 0.1, "seed {seed}: median {}", errors[250]);
    }
}

#[test]
fn one_hiccup_changes_nothing_and_a_change_is_seen() {
    let (mut table, shape) = (empty(), StepShape::of([(2048, 6144)]));
    (0..9).for_each(|_| table.learn(shape, truth(shape)));
    let before = table.layer(shape).unwrap();
    table.learn(shape, truth(shape) * 30);
    assert_eq!(table.layer(shape).unwrap(), before);
    (0..5).for_each(|_| table.learn(shape, truth(shape) * 2));
    let after = table.layer(shape).unwrap().as_secs_f64() / before.as_secs_f64();
    assert!((1.95..2.05).contains(&after), "{after}");
}

#[test]
fn nothing_is_said_of_steps_that_were_never_seen() {
    let mut table = empty();
    let (prefill, decode) = (StepShape::of([(512, 0)]), StepShape::of([(1, 512)]));
    assert_eq!(table.layer(prefill), None);
    table.learn(prefill, truth(prefill));
    assert!(table.layer(prefill).is_some());
    assert_eq!(table.layer(decode), None);
}

#[test]
fn it_survives_a_file_and_refuses_others() {
    let (mut table, mut chance) = (empty(), StdRng::seed_from_u64(3));
    for _ in 0..200 {
        let shape = some(&mut chance);
        table.learn(shape, truth(shape));
    }
    let text = table.to_json();
    let again = SlackTable::from_json(&text, &setting()).unwrap();
    for _ in 0..100 {
        let shape = some(&mut chance);
        let (one, two) = (table.layer(shape).unwrap(), again.layer(shape).unwrap());
        assert!(one.abs_diff(two) <= one / 1000, "{one:?} {two:?}");
    }
    assert_eq!(SlackTable::parse(&text).unwrap().setting(), &setting());
    let other = Setting { gpu: "H200".to_owned(), ..setting() };
    let refused = |text: &str, setting: Setting| SlackTable::from_json(text, &setting).unwrap_err();
    assert!(matches!(refused(&text, other), TableError::Setting { .. }));
    let newer = text.replace("\"ripieno_slack\":1", "\"ripieno_slack\":2");
    assert!(matches!(refused(&newer, setting()), TableError::Version { found: 2 }));
    assert!(matches!(refused("{}", setting()), TableError::Syntax(_)));
    let none = text.replace("\"mixed\":0.4", "\"mixed\":-1");
    assert!(matches!(refused(&none, setting()), TableError::Curve(_)));
    let first = text.find("{\"is_prefill\"").unwrap();
    let end = first + text[first..].find('}').unwrap() + 1;
    let twice = [&text[..end], ",", &text[first..]].concat();
    let nothing = text.replacen("\"terms\":[1.0,", "\"terms\":[0.0,", 1);
    for bad in [twice, nothing] {
        assert!(matches!(refused(&bad, setting()), TableError::Value { .. }), "{bad}");
    }
}

#[test]
fn a_file_has_the_same_cells() {
    for tokens in 1..=4096 {
        for prefix in [0, 511, 1023, 1024, 8191] {
            let shape = StepShape::of([(tokens, prefix)]);
            let mut table = empty();
            (0..3).for_each(|_| table.learn(shape, truth(shape)));
            let again = SlackTable::parse(&table.to_json()).unwrap();
            assert!(again.cells.keys().eq(table.cells.keys()), "{shape:?}");
        }
    }
}

#[test]
fn a_layer_that_took_no_time_says_nothing() {
    let (mut table, shape) = (empty(), StepShape::of([(2048, 8192)]));
    table.learn(StepShape::of([(100, 100)]), Duration::ZERO);
    assert!(table.is_empty());
    for _ in 0..9 {
        table.learn(shape, truth(shape));
        table.learn(shape, Duration::ZERO);
    }
    assert_eq!(table.layer(shape), Some(truth(shape)));
}
