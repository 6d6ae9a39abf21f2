use serde::Deserialize as _;
use serde_json::Value;

use super::*;
use crate::scenario::tests::run_set;

#[test]
fn larger_blocks_have_the_same_memory_and_more_of_it_unfilled() {
    let run = |block_tokens: u32| {
        let mut set = run_set("tierkv-blocks", &format!("{block_tokens}|LRU"), &Value::Null);
        set.as_object_mut().expect("parameters").remove("kind");
        let decode = Decode::deserialize(set).expect("parameters");
        let decode = Decode { batch: 24.0, iterations: 40, exchanged: 0.1, ..decode };
        let host_bytes = decode.lower.block_bytes * decode.lower.host_blocks as u64;
        (host_bytes, decode.seeded(42))
    };
    let [small, usual, large] = [4, 16, 64].map(run);
    assert!(small.0.abs_diff(large.0) < 64 << 20, "{small:?} {large:?}");
    // Half a block of each request.
    for (tokens, (_, found)) in [(4.0, &small), (16.0, &usual), (64.0, &large)] {
        let requests = (tokens - 1.0) / 2.0 / found["unfilled"] * 100.0;
        assert!((400.0..900.0).contains(&requests), "{tokens}: {found:?}");
    }
    // Nothing is announced: an iteration waits for each block's latency.
    let waits = |found: &Decoded| found["iteration"] - 1.2;
    let each = |tokens: f64| 0.005 + tokens / 16.0 * 2.097152 / 50.0;
    for (tokens, (_, found)) in [(4.0, &small), (16.0, &usual), (64.0, &large)] {
        let wanted = found["blocks"] * each(tokens);
        assert!((waits(found) / wanted - 1.0).abs() < 0.1, "{tokens}: {found:?} {wanted}");
    }
}
