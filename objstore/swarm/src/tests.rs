use std::{collections::BTreeSet, time::Duration};

use proptest::prelude::*;

use super::*;

const RADIUS: f64 = 0.3;

fn entries(numbers: &[u32]) -> Vec<Entry> {
    numbers.iter().copied().map(Entry).collect()
}

/// Returns the profile of these steps.
fn profile(steps: &[Vec<u32>]) -> Profile {
    let mut profile = Profile::new(steps.len().max(1));
    steps.iter().for_each(|step| profile.record(&entries(step)));
    profile
}

/// Steps that activate some of several overlapping groups of 48 entries, and others.
fn steps() -> impl Strategy<Value = Vec<Vec<u32>>> {
    let groups = prop::collection::vec(prop::collection::vec(0..48_u32, 2..10), 1..8);
    let active = prop::collection::vec((prop::collection::vec(0..8_usize, 0..4), 0..48_u32), 1..80);
    (groups, active).prop_map(|(groups, steps)| {
        let step = |(which, other): (Vec<usize>, u32)| {
            let active = which.iter().filter_map(|at| groups.get(*at)).flatten();
            active.copied().chain([other]).collect()
        };
        steps.into_iter().map(step).collect()
    })
}

fn members(clusters: &Clusters, wanted: &[ClusterId]) -> BTreeSet<Entry> {
    wanted.iter().flat_map(|id| clusters.get(*id).members.clone()).collect()
}

/// Returns the largest difference of two of these numbers.
fn spread(numbers: impl Iterator<Item = usize> + Clone) -> usize {
    numbers.clone().max().unwrap_or(0) - numbers.min().unwrap_or(0)
}

fn by_drive<'a>(places: impl Iterator<Item = &'a Place>, drives: usize) -> Vec<usize> {
    places.fold(vec![0; drives], |mut counts, place| {
        counts[place.drive.0] += 1;
        counts
    })
}

#[test]
fn a_distance_is_of_the_last_steps_only() {
    let mut profile = Profile::new(8);
    let of = |profile: &Profile| {
        let [one, two] = [1, 2].map(Entry);
        (profile.activations(two), profile.distance(one, two), profile.distance(two, one))
    };
    (0..4).for_each(|_| profile.record(&entries(&[1, 2, 2])));
    (0..4).for_each(|_| profile.record(&entries(&[3])));
    // Two of six, by a half.
    let two_of_six = 2.0 / 6.0 / 0.5;
    assert_eq!(of(&profile), (4, two_of_six, two_of_six));
    (0..2).for_each(|_| profile.record(&entries(&[1])));
    // Entry 2 lacks in four of six, and in six of eight by chance; entry 1 in two of four.
    assert_eq!(of(&profile), (2, 4.0 / 6.0 / 0.75, 1.0));
    (0..8).for_each(|_| profile.record(&entries(&[3])));
    assert_eq!(of(&profile), (0, 1.0, 1.0));
    // It is always there, and so with everything.
    assert_eq!(profile.distance(Entry(1), Entry(3)), 1.0);
    assert_eq!(profile.distance(Entry(1), Entry(900)), 1.0);
}

#[test]
fn an_entry_of_two_groups_is_in_the_clusters_of_both() {
    let groups = [vec![0, 1, 2, 9], vec![5, 6, 7, 9]];
    let step = |step: usize| groups.get(step % 3).cloned().unwrap_or_default();
    let steps: Vec<_> = (0..60).map(step).collect();
    let clusters = Clusters::build(&profile(&steps), 10, RADIUS);
    let found: BTreeSet<_> =
        clusters.iter().map(|(id, _)| members(&clusters, &[id]).into_iter().collect()).collect();
    let wanted = [vec![0, 1, 2, 9], vec![5, 6, 7, 9], vec![3], vec![4], vec![8]];
    assert_eq!(found, wanted.iter().map(|it| entries(it)).collect());
    assert_eq!(clusters.of(Entry(9)).len(), 2);
}

#[test]
fn the_best_clusters_are_selected_until_it_is_enough() {
    let mut clusters = Clusters::default();
    for at in 0..5 {
        clusters.open(Cluster { medoid: Entry(at), members: vec![Entry(at)] });
    }
    let scores = [1.0, 3.0, 2.0, 3.0, 0.0];
    let mut left = 3;
    let enough = |_: &Cluster| {
        left -= 1;
        left == 0
    };
    let found = clusters.select(|it| scores[it.medoid.0 as usize], enough);
    assert_eq!(found, [1, 3, 2].map(ClusterId));
}

#[test]
fn entries_on_few_drives_choose_first() {
    // Entry 0 is on drives 0 and 1; 1 and 2 on drive 0 alone, and 3 on drive 1.
    let mut clusters = Clusters::default();
    for numbers in [[0, 3], [1, 0], [2, 9]] {
        clusters.open(Cluster { medoid: Entry(numbers[0]), members: entries(&numbers) });
    }
    let placement = Placement::new(&clusters, 2);
    let wanted = [0, 1, 2].map(ClusterId);
    let batches = retrieve(&clusters, &placement, &wanted, |entry| entry == Entry(9));
    let found = batches.iter().map(|batch| batch.iter().map(|read| read.entry.0).collect());
    assert_eq!(found.collect::<Vec<Vec<u32>>>(), [vec![1, 2], vec![3, 0]]);
}

#[test]
fn the_cache_keeps_what_saves_most_for_its_memory() {
    let mut clusters = Clusters::default();
    let sizes = [1, 8, 2, 2];
    for (at, size) in (0..).zip(sizes) {
        let members: Vec<Entry> = (0..size).map(|of| Entry(at * 10 + of)).collect();
        clusters.open(Cluster { medoid: members[0], members });
    }
    let [latency, transfer] = [10, 1].map(Duration::from_micros);
    let config = CacheConfig { entries: 4, latency, transfer };
    let ids = |cache: &Cache| cache.iter().map(|id| id.0).collect::<Vec<_>>();
    let mut cache = Cache::new(config, &clusters, vec![3, 100, 3, 2]);
    // The large one does not fit, and the last one is worth least.
    assert_eq!(ids(&cache), [0, 2]);
    // Cluster 0 has 1 by 11 us, cluster 2 has 4 by 6, and cluster 3 has 3 by 6.
    cache.step(&clusters, &[ClusterId(2), ClusterId(3)]);
    assert_eq!(ids(&cache), [0, 2]);
    cache.step(&clusters, &[ClusterId(2), ClusterId(3)]);
    assert_eq!(ids(&cache), [2, 3]);
    // A cluster that grows beyond the capacity goes.
    (90..93).for_each(|entry| clusters.join(ClusterId(2), Entry(entry)));
    cache.step(&clusters, &[]);
    assert_eq!(ids(&cache), [3]);
}

#[test]
fn a_new_entry_joins_all_of_its_clusters_when_it_leaves_the_window() {
    let mut clusters = Clusters::default();
    for medoid in 0..3 {
        clusters.open(Cluster { medoid: Entry(medoid), members: vec![Entry(medoid)] });
    }
    let mut placement = Placement::new(&clusters, 2);
    let mut window = Window::new(64);
    let mut joined = Vec::new();
    for step in 0..66 {
        // Entry 100 is activated with the first two medoids, entry 101 never.
        let active: &[u32] = [&[0, 100][..], &[1, 100], &[2], &[2]][step % 4];
        let new = Entry(100 + step as u32);
        let active = entries(active);
        joined.extend(window.step(&active, new, RADIUS, &mut clusters, &mut placement));
        assert_eq!(joined.len(), (step + 1).saturating_sub(64), "after {step}");
    }
    let places = |at: usize| joined[at].places.iter().map(|(id, _)| id.0).collect::<Vec<_>>();
    assert_eq!((joined[0].entry, places(0)), (Entry(100), vec![0, 1]));
    assert_eq!((joined[1].entry, places(1)), (Entry(101), vec![3]));
    // The next drive of each cluster.
    assert_eq!(by_drive(placement.of(ClusterId(0)).iter(), 2), [1, 1]);
}

proptest! {
    #[test]
    fn every_entry_is_in_a_cluster_within_the_radius(steps in steps(), radius in 0.05..0.9_f64) {
        let profile = profile(&steps);
        let clusters = Clusters::build(&profile, 48, radius);
        for entry in (0..48).map(Entry) {
            prop_assert!(!clusters.of(entry).is_empty());
            for (id, at) in clusters.of(entry) {
                prop_assert_eq!(clusters.get(*id).members[*at], entry);
            }
        }
        for (id, cluster) in clusters.iter() {
            prop_assert_eq!(members(&clusters, &[id]).len(), cluster.members.len());
            for (at, member) in cluster.members.iter().enumerate().skip(1) {
                prop_assert!(profile.distance(cluster.medoid, *member) < radius);
                let before = &cluster.members[..at];
                let nearer = |it: &Entry| {
                    profile.distance(*it, *member).min(profile.distance(*member, *it))
                };
                let sum: f64 = before.iter().map(nearer).sum();
                prop_assert!(sum < radius * at as f64);
            }
        }
    }

    #[test]
    fn neighbours_are_all_entries_within_the_radius(steps in steps(), radius in 0.05..1.0_f64) {
        let profile = profile(&steps);
        for entry in (0..48).map(Entry) {
            let near = |other: &Entry| profile.distance(entry, *other) < radius;
            let others = (0..48).map(Entry).filter(|other| *other != entry);
            let wanted: Vec<_> = others.filter(near).collect();
            let found = profile.neighbours(entry, radius);
            prop_assert_eq!(found.iter().map(|(_, other)| *other).collect::<Vec<_>>(), wanted);
            for (distance, other) in found {
                prop_assert_eq!(distance, profile.distance(entry, other));
            }
        }
    }

    #[test]
    fn copies_are_spread_evenly_and_no_slot_has_two(steps in steps(), drives in 1..9_usize) {
        let clusters = Clusters::build(&profile(&steps), 48, RADIUS);
        let placement = Placement::new(&clusters, drives);
        let all: Vec<Place> =
            clusters.iter().flat_map(|(id, _)| placement.of(id)).copied().collect();
        prop_assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
        prop_assert!(spread(by_drive(all.iter(), drives).into_iter()) <= 1);
        for (id, _) in clusters.iter() {
            prop_assert!(spread(by_drive(placement.of(id).iter(), drives).into_iter()) <= 1);
        }
    }

    #[test]
    fn a_retrieval_reads_what_is_wanted_and_not_resident_once(
        steps in steps(),
        drives in 1..9_usize,
        wanted in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        resident in prop::collection::btree_set(0..48_u32, 0..20),
    ) {
        let clusters = Clusters::build(&profile(&steps), 48, RADIUS);
        let placement = Placement::new(&clusters, drives);
        let count = clusters.iter().count();
        let wanted: Vec<_> = wanted.iter().map(|it| ClusterId(it.index(count) as u32)).collect();
        let is_resident = |entry: Entry| resident.contains(&entry.0);
        let batches = retrieve(&clusters, &placement, &wanted, is_resident);
        prop_assert_eq!(batches.len(), drives);
        let reads: Vec<Read> = batches.iter().flatten().copied().collect();
        let found: BTreeSet<Entry> = reads.iter().map(|read| read.entry).collect();
        prop_assert_eq!(found.len(), reads.len());
        let mut asked = members(&clusters, &wanted);
        asked.retain(|entry| !is_resident(*entry));
        prop_assert_eq!(&found, &asked);
        for (drive, batch) in batches.iter().enumerate() {
            for Read { place, entry } in batch {
                prop_assert_eq!(place.drive, Drive(drive));
                prop_assert!(placement.copies(&clusters, *entry).any(|it| it == *place));
            }
        }
    }

    #[test]
    fn a_cluster_without_replicas_is_an_even_batch_for_each_drive(
        sizes in prop::collection::vec(1..30_u32, 1..6),
        drives in 1..9_usize,
        which in any::<prop::sample::Index>(),
    ) {
        let (mut clusters, mut next) = (Clusters::default(), 0);
        for size in &sizes {
            let members: Vec<Entry> = (next..next + size).map(Entry).collect();
            clusters.open(Cluster { medoid: members[0], members });
            next += size;
        }
        let wanted = ClusterId(which.index(sizes.len()) as u32);
        let placement = Placement::new(&clusters, drives);
        let batches = retrieve(&clusters, &placement, &[wanted], |_| false);
        prop_assert!(spread(batches.iter().map(Vec::len)) <= 1);
        for batch in batches {
            // One command: its slots are neighbours.
            prop_assert!(batch.windows(2).all(|it| it[0].place.slot + 1 == it[1].place.slot));
        }
    }

    #[test]
    fn the_cache_keeps_to_its_capacity_and_to_what_it_had_or_was_given(
        steps in steps(),
        capacity in 0..60_usize,
        active in prop::collection::vec(
            prop::collection::vec(any::<prop::sample::Index>(), 0..5), 1..40),
    ) {
        let profile = profile(&steps);
        let clusters = Clusters::build(&profile, 48, RADIUS);
        let count = clusters.iter().count();
        let [latency, transfer] = [80, 1].map(Duration::from_micros);
        let config = CacheConfig { entries: capacity, latency, transfer };
        let frequencies = clusters.iter().map(|(_, it)| profile.activations(it.medoid)).collect();
        let mut cache = Cache::new(config, &clusters, frequencies);
        for step in active {
            let before: BTreeSet<ClusterId> = cache.iter().collect();
            let active: BTreeSet<_> =
                step.iter().map(|it| ClusterId(it.index(count) as u32)).collect();
            cache.step(&clusters, &active.iter().copied().collect::<Vec<_>>());
            let used: usize = cache.iter().map(|id| clusters.get(id).members.len()).sum();
            prop_assert!(used <= capacity);
            prop_assert!(cache.iter().all(|id| before.contains(&id) || active.contains(&id)));
        }
    }
}
