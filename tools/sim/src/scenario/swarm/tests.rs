use super::{
    growth::grown,
    reading::{CACHED, cached, organized, parts, routed},
    *,
};

/// Runs a check for 20 seeds, with fewer entries than the scenarios have.
fn for_all_seeds(entries: u32, check: impl Fn(u64, Law) + Send + Sync) {
    let seeds = Vec::from_iter(1..21_u64);
    each(&seeds, |seed| check(*seed, Law { entries, ..LAW }));
}

#[test]
#[cfg_attr(debug_assertions, ignore = "20 seeds: in release builds")]
fn clusters_beat_blocks_and_k_means() {
    let parameters = Parameters::default();
    for_all_seeds(1024, |seed, law| {
        let layer = Layer::new(law, seed, 32);
        let all = organized(&parameters, &layer);
        let [_, blocks, means, ours] = all.map(|it| (it.budget.recall, it.enough));
        let what = format!("seed {seed}: {blocks:?} {means:?} {ours:?}");
        assert!(ours.0 > means.0 && means.0 > blocks.0, "{what}");
        for at in 0..DRIVES.len() {
            let [blocks, means, ours] = [blocks, means, ours].map(|it| it.1.time[at]);
            assert!(ours < means && means < blocks, "{what}");
        }
    });
}

#[test]
#[cfg_attr(debug_assertions, ignore = "20 seeds: in release builds")]
fn replicas_pay_off_and_so_do_mean_distances_with_a_large_radius() {
    let parameters = Parameters::default();
    for_all_seeds(2048, |seed, law| {
        let layer = Layer::new(law, seed, 32);
        for radius in [RADIUS, 0.8] {
            let all = parts(&parameters, &layer, radius);
            let [medoid, none, ours] =
                all.map(|it| (it.budget.recall, it.enough.time[0], it.copies()));
            let what = format!("seed {seed}: {medoid:?} {none:?} {ours:?}");
            assert!(ours.0 > none.0 && ours.1 < none.1 && ours.2 < medoid.2, "{what}");
            assert!(radius == RADIUS || ours.0 > medoid.0, "{what}");
        }
    });
}

#[test]
#[cfg_attr(debug_assertions, ignore = "20 seeds: in release builds")]
fn retrieval_is_balanced_and_reads_nothing_twice() {
    let parameters = Parameters::default();
    for_all_seeds(2048, |seed, law| {
        let layer = Layer::new(law, seed, 32);
        for drives in [1, 2, 4, 8] {
            let all = routed(&parameters, &layer, drives);
            let what = format!("seed {seed}, {drives} drives: {all:?}");
            let [first, unbalanced, twice, ours] = all;
            assert!(ours.balance <= 1.05, "{what}");
            assert!(ours.time[0] < first.time[0] && ours.time[0] < twice.time[0], "{what}");
            assert!(ours.entries == unbalanced.entries && ours.entries < twice.entries, "{what}");
            assert!(drives == 1 || ours.time[0] < unbalanced.time[0], "{what}");
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
