use super::*;

const MB: u64 = 1_000_000;

fn lane(mixed: f64) -> Lane {
    let (latency, object) = (Duration::from_micros(80), Duration::ZERO);
    let set_up = Duration::ZERO;
    let (read, write, window) = (10e9, 5e9, usize::MAX);
    Lane::new(LaneModel { read, write, latency, object, set_up, mixed, window })
}

/// Returns the arrival of each operation in microseconds.
fn run(lane: &mut Lane) -> Vec<(u64, u128)> {
    let mut arrived = Vec::new();
    while let Some(now) = lane.next_event() {
        arrived.extend(lane.arrived(now).into_iter().map(|(id, _)| (id.0, now.as_micros())));
    }
    arrived
}

#[test]
fn bytes_go_one_after_another_and_latencies_overlap() {
    let mut lane = lane(0.4);
    (1..=2).for_each(|id| lane.push(Duration::ZERO, OpId(id), Direction::Read, 10 * MB, 1));
    assert_eq!(run(&mut lane), [(1, 1080), (2, 2080)]);
}

#[test]
fn mixing_costs_what_the_model_says() {
    let mut lane = lane(0.4);
    lane.push(Duration::ZERO, OpId(1), Direction::Read, 10 * MB, 1);
    lane.push(Duration::ZERO, OpId(2), Direction::Write, 10 * MB, 1);
    // 1 ms of reads at a fifth of the bandwidth; 2 ms of writes, of which 1 ms is left then.
    assert_eq!(run(&mut lane), [(1, 5080), (2, 6080)]);
}

#[test]
fn what_is_outside_the_window_mixes_with_nothing() {
    let mut lane = lane(0.4);
    lane.model.window = 1;
    lane.push(Duration::ZERO, OpId(1), Direction::Read, 10 * MB, 1);
    lane.push(Duration::ZERO, OpId(2), Direction::Write, 10 * MB, 1);
    assert_eq!(run(&mut lane), [(1, 1080), (2, 3160)]);
}

#[test]
fn small_objects_cost_their_calls() {
    let mut lane = lane(1.0);
    lane.model.object = Duration::from_micros(10);
    lane.push(Duration::ZERO, OpId(1), Direction::Read, MB, 1000);
    assert_eq!(run(&mut lane), [(1, 10_080)]);
}

#[test]
fn what_a_message_costs_beside_its_bytes_is_not_hidden() {
    let model = LaneModel { read: 1e9, set_up: Duration::from_micros(10), ..LaneModel::INSTANT };
    let mut lane = Lane::new(model);
    // The same bytes as one message, and as 100.
    (1..=2).for_each(|id| {
        lane.push(Duration::ZERO, OpId(id), Direction::Read, MB, [1, 100][id as usize - 1])
    });
    assert_eq!(run(&mut lane), [(1, 1010), (2, 3010)]);
}
