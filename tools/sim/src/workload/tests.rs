use super::*;

#[test]
fn requests_are_as_many_as_long_and_as_often_as_was_asked() {
    let documents = Documents {
        count: 400,
        tokens: (3_000, 200_000),
        mean: 30_000.0,
        spread: 0.8,
        question: 100,
        answer: 50,
        questions: 6.0,
    };
    let requests = documents.requests(2.0, 64, 1);
    assert_eq!(requests.len(), 2400);
    let took = requests.last().unwrap().arrival.as_secs_f64();
    assert!((1100.0..1300.0).contains(&took), "{took}");
    let mean = requests.iter().map(|it| f64::from(it.input)).sum::<f64>() / 2400.0;
    assert!((27_000.0..33_000.0).contains(&mean), "{mean}");
    let mut blocks: Vec<u64> = requests.iter().flat_map(|it| it.blocks.clone()).collect();
    let all = blocks.len() as f64;
    blocks.sort_unstable();
    blocks.dedup();
    let hits = 1.0 - blocks.len() as f64 / all;
    assert!((0.80..0.86).contains(&hits), "{hits}");
}

#[test]
fn as_many_clients_go_away_as_was_asked_and_in_time() {
    let mut requests = Workload::named("uniform").unwrap().requests(4000, 5.0, 16, 3);
    abort(&mut requests, 0.1, Duration::from_secs(8), 3);
    let mut leaves: Vec<_> = requests.iter().filter_map(|it| it.leaves).collect();
    assert!((350..450).contains(&leaves.len()), "{}", leaves.len());
    leaves.sort_unstable();
    let half = leaves[leaves.len() / 2].as_secs_f64();
    assert!((3.5..4.5).contains(&half) && leaves[leaves.len() - 1] < Duration::from_secs(8));
    abort(&mut requests, 0.0, Duration::from_secs(8), 3);
    assert!(requests.iter().all(|it| it.leaves.is_none()));
}

#[test]
fn profiles_are_as_long_as_they_say_and_share_nothing() {
    for Workload { name, generator, .. } in Workload::all() {
        let Generator::Profile(profile) = generator else { continue };
        let requests = profile.requests(4000, 5.0, 16, 3);
        assert_eq!(requests, profile.requests(4000, 5.0, 16, 3));
        let mean = |of: fn(&Request) -> u32| {
            requests.iter().map(|it| f64::from(of(it))).sum::<f64>() / 4000.0
        };
        let (input, output) = (mean(|it| it.input), mean(|it| it.output));
        for (found, lengths) in [(input, profile.input), (output, profile.output)] {
            let exact = lengths.spread == 0.0;
            let off = (found / lengths.mean - 1.0).abs();
            assert!(off <= if exact { 0.0 } else { 0.08 }, "{name}: {found}, {lengths:?}");
        }
        let mut blocks: Vec<u64> = requests.iter().flat_map(|it| it.blocks.clone()).collect();
        let all = blocks.len();
        blocks.sort_unstable();
        blocks.dedup();
        assert_eq!(blocks.len(), all, "{name}");
    }
}

#[test]
fn conversations_go_on_where_they_stopped() {
    let chat = Workload::named("chat").unwrap();
    let requests = chat.requests(3000, 2.0, 64, 5);
    assert_eq!(requests.len(), 3000);
    assert!(requests.is_sorted_by_key(|it| it.arrival));
    assert_eq!(requests, chat.requests(3000, 2.0, 64, 5));
    // After the first minutes, in which there are only first turns.
    let span = (requests[2999].arrival - requests[1500].arrival).as_secs_f64();
    assert!((1.6..2.4).contains(&(1499.0 / span)), "{span}");
    let own = |request: &Request| request.blocks.get(8).copied();
    let mut last = std::collections::HashMap::new();
    let mut turns = 0;
    for request in &requests {
        assert!(request.blocks.starts_with(&[0, 1, 2, 3, 4, 5, 6, 7]), "instructions are shared");
        let Some(name) = own(request) else { continue };
        if let Some(before) = last.insert(name, request.clone()) {
            turns += 1;
            assert!(request.blocks.starts_with(&before.blocks));
            assert!(request.input > before.input + before.output);
        }
    }
    // Of six turns, five are not the first one; the last ones have not come yet.
    assert!((2000..2500).contains(&turns), "{turns}");
}
