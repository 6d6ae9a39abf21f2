use std::collections::BTreeMap;

use super::{
    growth::grown,
    reading::{CACHED, Reading, Way, cached},
    *,
};
use crate::swarm::Route;

/// Returns the results of some ways to read.
fn found<const N: usize>(layer: &Layer, of: [Reading; N]) -> [BTreeMap<String, f64>; N] {
    of.map(|it| it.of(&Parameters::default(), layer).into_iter().collect())
}

/// Runs a check for 20 seeds, with fewer entries than the scenarios have.
fn for_all_seeds(entries: u32, check: impl Fn(u64, Law) + Send + Sync) {
    let seeds = Vec::from_iter(1..21_u64);
    each(&seeds, |seed| check(*seed, Law { entries, ..LAW }));
}

#[test]
#[cfg_attr(debug_assertions, ignore = "20 seeds: in release builds")]
fn clusters_beat_blocks_and_k_means() {
    for_all_seeds(1024, |seed, law| {
        let layer = Layer::new(law, seed, 32);
        let ways = [Way::Blocks, Way::KMeans, Way::Clusters];
        let all = found(&layer, ways.map(|way| Reading { way, ..Reading::default() }));
        let what = format!("seed {seed}: {all:?}");
        let recall = all.each_ref().map(|it| it["budget|recall"]);
        assert!(recall.is_sorted_by(|one, next| one < next), "{what}");
        for drive in DRIVES {
            let times = all.each_ref().map(|it| it[&format!("enough|{drive}")]);
            assert!(times.is_sorted_by(|one, next| one > next), "{what}");
        }
    });
}

#[test]
#[cfg_attr(debug_assertions, ignore = "20 seeds: in release builds")]
fn replicas_pay_off_and_so_do_mean_distances_with_a_large_radius() {
    for_all_seeds(2048, |seed, law| {
        let layer = Layer::new(law, seed, 32);
        for radius in [RADIUS, 0.8] {
            let ways = [Way::MedoidOnly, Way::NoReplicas, Way::Clusters];
            let all = found(&layer, ways.map(|way| Reading { way, radius, ..Reading::default() }));
            let what = format!("seed {seed}: {all:?}");
            let [medoid, none, ours] =
                all.map(|it| (it["budget|recall"], it["enough|PM9A3"], it["copies"]));
            assert!(ours.0 > none.0 && ours.1 < none.1 && ours.2 < medoid.2, "{what}");
            assert!(radius == RADIUS || ours.0 > medoid.0, "{what}");
        }
    });
}

#[test]
#[cfg_attr(debug_assertions, ignore = "20 seeds: in release builds")]
fn retrieval_is_balanced_and_reads_nothing_twice() {
    for_all_seeds(2048, |seed, law| {
        let layer = Layer::new(law, seed, 32);
        for drives in [1, 2, 4, 8] {
            let route = |is_distinct, is_balanced| Some(Route { is_distinct, is_balanced });
            let routes = [route(false, false), route(true, false), route(false, true), None];
            let of = routes.map(|route| Reading { route, drives, ..Reading::default() });
            let all = found(&layer, of);
            let what = format!("seed {seed}, {drives} drives: {all:?}");
            let time = all.each_ref().map(|it| it["budget|PM9A3"]);
            let entries = all.each_ref().map(|it| it["budget|entries"]);
            assert!(all[3]["budget|balance"] <= 1.05, "{what}");
            assert!(time[3] < time[0] && time[3] < time[2], "{what}");
            assert!(entries[3] == entries[1] && entries[3] < entries[2], "{what}");
            assert!(drives == 1 || time[3] < time[1], "{what}");
        }
    });
}

#[test]
#[cfg_attr(debug_assertions, ignore = "20 seeds: in release builds")]
fn the_cache_has_three_quarters_more_hits_than_lru_where_memory_is_scarce_and_nothing_stays() {
    let parameters = Parameters::default();
    for_all_seeds(1024, |seed, law| {
        let layer = Layer::new(Law { stays: 0.0, ..law }, seed, CACHED);
        let [lru, ours, _] = cached(&parameters, &layer, 0.05);
        let what = format!("seed {seed}: {lru:?} {ours:?}");
        assert!(ours[0] > lru[0] * 1.74 && ours[1] < lru[1], "{what}");
    });
}

#[test]
#[cfg_attr(debug_assertions, ignore = "20 seeds: in release builds")]
fn clusters_stay_tight_while_they_grow() {
    for_all_seeds(1024, |seed, law| {
        let rows = grown(Layer::new(law, seed, 0));
        let [smallest, similar, ours] = [0, 1, 2].map(|row: usize| rows[row][5]);
        let what = format!("seed {seed}: {smallest} {similar} {ours}");
        assert!(ours < similar && similar < smallest, "{what}");
    });
}

#[test]
fn a_step_activates_whole_groups_up_to_a_tenth() {
    let law = Law { faithful: 1.0, ..LAW };
    let steps = |seed| {
        let mut activations = Activations::new(law, seed);
        (0..100).map(|_| activations.step().active).collect::<Vec<_>>()
    };
    let found = steps(7);
    assert_eq!(found, steps(7));
    assert_ne!(found, steps(8));
    let most = (f64::from(law.entries) * law.active) as usize;
    assert!(found.iter().all(|active| active.len() <= most));
    let mean = found.iter().map(Vec::len).sum::<usize>() / found.len();
    assert!(mean > most * 95 / 100, "{mean} of {most}");
}
