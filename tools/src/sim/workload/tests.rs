use std::io::Write as _;

use super::*;

fn flags(rate: Option<f64>) -> WorkloadFlags {
    WorkloadFlags {
        rate,
        stretch: true,
        requests: None,
        seed: 1,
        warm_up: None,
        jitter: None,
        abort: None,
        abort_within: 10.0,
    }
}

fn read(text: &str, rate: Option<f64>) -> Result<Workload, Problem> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    Workload::read(file.path().to_str().unwrap(), &flags(rate), 1, 64)
}

fn line(time: u64, input: u64, ids: &str) -> String {
    format!(
        "{{\"timestamp\": {time}, \"input_length\": {input}, \"output_length\": 5, \
         \"hash_ids\": {ids}}}\n"
    )
}

#[test]
fn blocks_are_equal_where_all_before_them_are() {
    let text =
        [line(0, 1100, "[1, 2, 3]"), line(500, 1100, "[1, 2, 4]"), line(1000, 1100, "[5, 2, 3]")];
    let requests = read(&text.concat(), None).unwrap().counted.requests;
    let [first, second, third] = &requests[..] else { panic!("{requests:?}") };
    // 1,100 tokens are 17 full blocks, of which 16 are in the first two trace blocks.
    assert_eq!(first.blocks.len(), 17);
    assert_eq!(first.blocks[..16], second.blocks[..16]);
    assert_ne!(first.blocks[16], second.blocks[16]);
    assert!(first.blocks.iter().all(|name| !third.blocks.contains(name)));
}

#[test]
fn a_rate_stretches_the_times_and_says_so() {
    let text = [line(2000, 70, "[1]"), line(0, 80, "[2]"), line(1000, 90, "[3]")].concat();
    let recorded = read(&text, None).unwrap();
    // They are sorted by arrival.
    assert_eq!(
        recorded.counted.requests.iter().map(|it| it.input).collect::<Vec<_>>(),
        [80, 90, 70]
    );
    let slower = read(&text, Some(0.5)).unwrap();
    assert_eq!(slower.counted.requests[2].arrival, Duration::from_secs(4));
    assert!(slower.setting[1].contains("2.000 times"), "{:?}", slower.setting);
    let at_once = read(&line(7, 70, "[1]"), Some(1.0)).unwrap_err().to_string();
    assert!(at_once.contains("come at once"), "{at_once}");
}

#[test]
fn requests_that_are_none_are_named() {
    let good = line(0, 70, "[1]");
    let empty = read(&(good + &line(0, 0, "[]")), None).unwrap_err().to_string();
    assert!(empty.contains("request 2: its prompt has no tokens"), "{empty}");
}

#[test]
fn a_rate_is_that_of_the_intervals() {
    for (times, wanted) in [
        (&[0, 1000][..], "2 requests, 1.00 a second"),
        (&[0, 1000, 2000, 3000], "4 requests, 1.00 a second"),
        (&[5, 5, 5], "3 requests, all at once"),
        (&[5], "1 requests, all at once"),
    ] {
        let text: String = times.iter().map(|time| line(*time, 70, "[1]")).collect();
        let found = read(&text, None).unwrap();
        assert!(found.setting.iter().any(|it| it.starts_with(wanted)), "{:?}", found.setting);
    }
    let text = line(0, 70, "[1]") + &line(1000, 70, "[2]") + &line(2000, 70, "[3]");
    let faster = read(&text, Some(2.0)).unwrap();
    assert_eq!(faster.counted.requests[2].arrival, Duration::from_secs(1));
}

#[test]
fn names_are_workloads() {
    for name in names() {
        let workload = Workload::read(name, &flags(Some(2.0)), 1, 64).unwrap();
        let found = rate(&workload.counted.requests).unwrap();
        // Conversations have only their first turns at the beginning.
        let least = if name == "chat" { 1.4 } else { 1.8 };
        assert!((least..2.2).contains(&found), "{name}: {found}");
    }
}

#[test]
fn rounded_times_are_spread_and_others_are_not() {
    let lines = |every: u64| (0..40).map(|at| line(at / 4 * every, 70, "[1]")).collect::<String>();
    let spread = read(&lines(3000), None).unwrap();
    assert!(spread.is_random);
    assert!(spread.setting[1].contains("up to 3 s of the trace later"), "{:?}", spread.setting);
    let is_rounded = |it: &&Request| it.arrival.subsec_nanos() == 0;
    assert!(spread.counted.requests.iter().filter(is_rounded).count() < 3);
    // As the clock of Mooncake's trace: 2999, 5999, 8999, ...
    let off: String =
        (0..40).map(|at| line((at / 4 * 3000_u64).saturating_sub(1), 70, "[1]")).collect();
    let spread = read(&off, None).unwrap();
    assert!(spread.setting[1].contains("up to 3 s of the trace later"), "{:?}", spread.setting);
    let exact = read(&lines(250), None).unwrap();
    assert!(!exact.is_random && exact.setting[1].contains("40 requests"), "{:?}", exact.setting);
    assert_eq!(exact.counted.requests[39].arrival, Duration::from_millis(2250));
}

#[test]
fn jitter_moves_each_arrival_by_less_than_it_may() {
    let every = Duration::from_secs(3);
    let before: Vec<trace::Request> = (0..500_u32)
        .map(|at| trace::Request {
            arrival: every * (at / 10),
            input_tokens: u64::from(at) + 1,
            after: (at % 2 == 1).then(|| (at as usize - 1, Duration::ZERO)),
            ..trace::Request::default()
        })
        .collect();
    let mut after = before.clone();
    jitter(&mut after, every, 1);
    assert!(after.is_sorted_by_key(|it| it.arrival));
    let mut moved = 0.0;
    for request in &after {
        let by = request.arrival - before[request.input_tokens as usize - 1].arrival;
        assert!(by < every);
        moved += by.as_secs_f64() / 500.0;
        if let Some((of, _)) = request.after {
            assert_eq!(after[of].input_tokens, request.input_tokens - 1);
            assert!(after[of].arrival <= request.arrival);
        }
    }
    assert!((1.4..1.9).contains(&moved), "{moved}");
}

#[test]
fn sessions_without_times_begin_at_random() {
    let line = |session: u32, more: &str| {
        format!(
            "{{\"session_id\": {session}, \"input_length\": 700, \"output_length\": 5, \
             \"hash_ids\": [{session}, 1]{more}}}\n"
        )
    };
    let turns =
        |session: u32| line(session, "") + &line(session, ", \"delay\": 60000").replace("[", "[7");
    let text: String = (0..400).map(turns).collect();
    let found = read(&text, Some(2.0)).unwrap();
    assert!(found.is_random && found.setting.iter().any(|it| it.contains("Poisson")));
    let requests = &found.counted.requests;
    assert!(requests.is_sorted_by_key(|it| it.arrival));
    let begins: Vec<f64> = requests
        .iter()
        .filter(|it| it.after.is_none())
        .map(|it| it.arrival.as_secs_f64())
        .collect();
    let every = begins[399] / 400.0;
    assert!((0.8..1.2).contains(&every), "one session a second, of two requests: {every}");
    for request in requests {
        if let Some((of, thinks)) = request.after {
            assert_eq!(request.arrival, requests[of].arrival + thinks);
            assert_eq!(thinks, Duration::from_secs(60));
        }
    }
}
