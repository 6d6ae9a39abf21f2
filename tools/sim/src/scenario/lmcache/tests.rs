use super::*;

#[test]
fn a_crossover_is_between_two_lengths_or_at_none() {
    let found: Vec<[f64; 4]> =
        (0..8).map(|at| [f64::from(1 << at), 0.5, f64::from(1 << at) * 2.0, 8.0]).collect();
    assert_eq!(crossover(&found, 1), 0.0);
    assert_eq!(crossover(&found, 2), f64::INFINITY);
    // 8 of 1, 2, 4, 8, ...: the length in the fourth place.
    assert!((crossover(&found, 3) - 32.0).abs() < 1e-9, "{}", crossover(&found, 3));
}

#[test]
fn larger_messages_get_more_of_the_bandwidth_and_smaller_ones_what_table_1_has() {
    let outcome = messages::table_1(&Parameters::default());
    for it in outcome.comparisons.iter().take(6) {
        assert!(it.difference().unwrap().abs() < 0.05, "{it:?}");
    }
    let mut slow = Parameters::default();
    slow.set("net.message", 30.1, "a test").unwrap();
    let slow = messages::table_1(&slow);
    let ours = [&outcome, &slow].map(|it| it.comparisons[0].ours.unwrap());
    assert!((ours[0] / ours[1] - 1.92).abs() < 0.01, "{ours:?}");
}

#[test]
fn a_slow_link_serves_less_than_the_gpus_compute_and_a_fast_one_more() {
    let parameters = Parameters::default();
    let found = central::tiers(&parameters, (LLAMA_3_8B, 1));
    let [hbm, _, slow, .., fast, waits] = &found[..] else { panic!("{found:?}") };
    assert!(slow.0 < hbm.0 && hbm.0 < fast.0 && waits.0 < slow.0, "{found:?}");
    assert!(fast.1 > 2.0 * hbm.1, "{found:?}");
}

#[test]
fn loads_beside_computation_save_half_of_the_time_at_most() {
    let parameters = Parameters::default();
    for (gbps, least, most) in [(15.0, 1.0, 1.3), (100.0, 1.5, 2.0)] {
        let gain = queue::gain(&parameters, gbps, 95);
        assert!(least < gain && gain < most, "{gbps}: {gain}");
    }
}

#[test]
fn pages_cost_the_first_token_and_others_only_if_the_step_waits() {
    let parameters = Parameters::default();
    let message = parameters.micros("net.message");
    let [pages, waits, chunks] = apart::ways(&parameters, (LLAMA_3_8B, 1), message);
    // 32 layers of 512 pages, and with chunks of 32 messages.
    let more = message.as_secs_f64() * 1e3 * f64::from(32 * 512 - 32);
    assert!(pages.ttft > chunks.ttft + more * 0.95, "{pages:?} {chunks:?}");
    assert!((pages.itl / chunks.itl - 1.0).abs() < 0.01, "{pages:?} {chunks:?}");
    assert!(waits.itl > chunks.itl * 1.5, "{waits:?} {chunks:?}");
}

#[test]
fn an_allocation_waits_for_copies_of_what_it_takes() {
    let mut pool = offload::Pool::new(4.0, 2.0);
    // Two more are copied in a second, and four are the window.
    let waited = [(0.0, 3.0), (1.0, 3.0), (1.5, 3.0), (9.0, 4.0), (9.0, 1.0), (9.1, 1.0)]
        .map(|(at, pages)| pool.take(at, pages));
    assert_eq!(waited, [0.0, 0.0, 2.0, 0.0, 1.0, 1.0]);
}
