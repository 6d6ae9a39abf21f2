use proptest::prelude::*;

use super::*;
use crate::config::EmuConfig;

const READ: u8 = 2;
const WRITE: u8 = 1;

fn io(opcode: u8, lba: u64) -> CommandView {
    CommandView { admin: false, opcode, nsid: 1, qid: 3, lbas: Some((lba, 8)) }
}

fn engine(rules: Vec<FaultRule>) -> FaultEngine {
    FaultEngine::new(FaultPlan { seed: 42, rules, ..FaultPlan::default() })
}

fn fired(engine: &mut FaultEngine, count: u64) -> Vec<u64> {
    (1..=count).filter(|nth| engine.decide(&io(READ, *nth)).is_some()).collect()
}

#[test]
fn an_empty_plan_is_a_good_device() {
    assert_eq!(engine(Vec::new()).decide(&io(READ, 0)), None);
}

#[test]
fn every_field_has_to_fit() {
    let when = FaultWhen {
        admin: Some(false),
        opcode: Some(WRITE),
        nsid: Some(1),
        qid: Some(3),
        lbas: Some(LbaRange { first: 100, count: 10 }),
        ..FaultWhen::default()
    };
    let mut engine = engine(vec![FaultRule::new(when, FaultAction::Drop)]);
    let hit = io(WRITE, 105);
    assert_eq!(engine.decide(&hit).map(|hit| hit.action), Some(FaultAction::Drop));
    for miss in [
        CommandView { admin: true, ..hit },
        CommandView { opcode: READ, ..hit },
        CommandView { nsid: 2, ..hit },
        CommandView { qid: 4, ..hit },
        CommandView { lbas: None, ..hit },
        io(WRITE, 92),
        io(WRITE, 110),
    ] {
        assert_eq!(engine.decide(&miss), None, "{miss:?}");
    }
    assert!(engine.decide(&io(WRITE, 93)).is_some(), "the last block touches the range");
    assert!(engine.decide(&io(WRITE, 109)).is_some());
}

#[test]
fn counting_rules_count_fitting_commands() {
    let rule = |when| FaultRule::new(when, FaultAction::Drop);
    let nth = FaultWhen { nth: Some(3), ..FaultWhen::default() };
    assert_eq!(fired(&mut engine(vec![rule(nth)]), 10), [3]);
    let every = FaultWhen { every: Some(4), ..FaultWhen::default() };
    assert_eq!(fired(&mut engine(vec![rule(every.clone())]), 10), [4, 8]);
    assert_eq!(fired(&mut engine(vec![rule(every).limit(1)]), 10), [4]);
    let writes = FaultWhen { opcode: Some(WRITE), nth: Some(1), ..FaultWhen::default() };
    let mut engine = engine(vec![rule(writes)]);
    assert_eq!(fired(&mut engine, 5), [0u64; 0]);
    assert!(engine.decide(&io(WRITE, 0)).is_some(), "reads did not count");
}

#[test]
fn fault_rules_without_meaning_are_refused() {
    let any = FaultWhen::default;
    let validate = |when| {
        let rules = [any(), when].map(|when| FaultRule::new(when, FaultAction::Drop));
        let faults = FaultPlan { rules: rules.into(), ..FaultPlan::default() };
        EmuConfig::default().faults(faults).validate()
    };
    let lbas = |count| Some(LbaRange { first: 8, count });
    for (when, word) in [
        (FaultWhen { lbas: lbas(0), ..any() }, "no blocks at 8"),
        (FaultWhen { nth: Some(0), ..any() }, "nth 0"),
        (FaultWhen { every: Some(0), ..any() }, "every 0"),
        (FaultWhen { probability: Some(5.0), ..any() }, "probability 5"),
        (FaultWhen { probability: Some(-0.5), ..any() }, "probability -0.5"),
        (FaultWhen { probability: Some(f64::NAN), ..any() }, "probability NaN"),
    ] {
        let error = validate(when).unwrap_err().to_string();
        assert!(error.contains("rule 1") && error.contains(word), "{word}: {error}");
    }
    for share in [0.0, 1.0] {
        let (nth, every, probability) = (Some(1), Some(1), Some(share));
        validate(FaultWhen { lbas: lbas(1), nth, every, probability, ..any() }).unwrap();
    }
}

#[test]
#[should_panic(expected = "fault rule 0 (counted from 0) has nth 0")]
fn a_plan_counted_from_0_is_a_bug() {
    let when = FaultWhen { nth: Some(0), ..FaultWhen::default() };
    engine(vec![FaultRule::new(when, FaultAction::Drop)]);
}

#[test]
fn the_first_rule_that_fires_wins() {
    let nth = |nth| FaultWhen { nth: Some(nth), ..FaultWhen::default() };
    let always = FaultWhen::default();
    let mut engine = engine(vec![
        FaultRule::new(nth(2), FaultAction::Gone),
        FaultRule::new(always, FaultAction::Drop).limit(2),
    ]);
    let seen: Vec<_> =
        (0..4).map(|_| engine.decide(&io(READ, 0)).map(|hit| (hit.rule, hit.action))).collect();
    let drop = Some((1, FaultAction::Drop));
    assert_eq!(seen, [drop, Some((0, FaultAction::Gone)), drop, None], "losing costs no limit");
}

#[test]
fn plans_are_readable_data() {
    let text = r#"{
        "seed": 7,
        "rules": [
            { "when": { "opcode": 1, "every": 100 }, "then": "torn_write" },
            { "then": { "status": { "code": 641, "dnr": true } }, "limit": 1 }
        ],
        "registers": { "slow_rdy_ns": 1000 },
        "identify": { "mdts": 1, "patches": [{ "cns": 1, "offset": 4095, "bytes": [1, 2] }] }
    }"#;
    let plan: FaultPlan = serde_json::from_str(text).unwrap();
    assert_eq!(plan.rules[1].then, FaultAction::Status { code: 0x281, dnr: true });
    let again = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<FaultPlan>(&again).unwrap(), plan);
    let mut page = [0u8; 4096];
    plan.identify.patch(1, &mut page);
    plan.identify.patch(0, &mut []);
    assert_eq!(page[4095], 1, "and what goes past the end is cut off");
    let typo = serde_json::from_str::<FaultPlan>(r#"{ "rulez": [] }"#);
    assert!(typo.unwrap_err().to_string().contains("rulez"), "typos are not ignored");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn the_same_seed_decides_the_same(seed: u64, percent in 1u32..100) {
        let when = FaultWhen {
            probability: Some(f64::from(percent) / 100.0),
            ..FaultWhen::default()
        };
        let rules = vec![FaultRule::new(when, FaultAction::TornWrite)];
        let plan = FaultPlan { seed, rules, ..FaultPlan::default() };
        let run = |plan: &FaultPlan| {
            let mut engine = FaultEngine::new(plan.clone());
            (0..400).map(|lba| engine.decide(&io(WRITE, lba))).collect::<Vec<_>>()
        };
        let first = run(&plan);
        prop_assert_eq!(&first, &run(&plan));
        // A rule that never fires does not change the others' decisions.
        let mut longer = plan.clone();
        let never = FaultWhen { nth: Some(9999), ..FaultWhen::default() };
        longer.rules.push(FaultRule::new(never, FaultAction::Gone));
        prop_assert_eq!(&first, &run(&longer));
        let hits = u32::try_from(first.iter().flatten().count()).unwrap();
        // Six standard deviations of a binomial with 400 draws, at most 60.
        prop_assert!(hits.abs_diff(4 * percent) <= 60, "{} hits at {} %", hits, percent);
    }
}
