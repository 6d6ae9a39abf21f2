//! Reading ahead for requests that run soon, without delaying other transfers.

mod schedule;
mod stack;

use std::time::Duration;

use kv_tier::{RequestId, When};
use nvme_driver::{Clock as _, Nanos};
use objstore::{BlockKey, PacedStore};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use ripieno_testkit::seeds;
use schedule::looking_ahead;
use stack::{Plan, READ, READ_ERROR, Stack, blocks, keys, on};

const MS: Duration = Duration::from_millis(1);

/// Creates a store with this many blocks of DRAM cache, and its scheduler.
fn stack(dram_blocks: u64) -> (Stack, PacedStore) {
    let mut plan = Plan::default();
    plan.options.dram_bytes = dram_blocks * plan.shape.block_bytes();
    let stack = Stack::new(&plan);
    let store = looking_ahead(&stack.store);
    (stack, store)
}

fn now(stack: &Stack) -> Duration {
    stack.clock.now().duration()
}

/// Advances the time until nothing is planned or in flight.
fn settle(stack: &Stack, store: &mut PacedStore) {
    let mut quiet = 0;
    for idle in 0.. {
        store.poll(now(stack)).unwrap();
        quiet = if store.scheduler().pending() == 0 { quiet + 1 } else { 0 };
        if quiet == 3 {
            break;
        }
        assert!(idle < 100_000, "something never ends");
        stack.clock.pause(idle, Nanos::MAX);
    }
}

/// Stores `keys`, and then enough others to evict all of them from the DRAM cache.
fn put_away(stack: &mut Stack, keys: &[BlockKey], others: &[BlockKey]) {
    stack.put(keys, 0);
    stack.put(others, 0);
}

/// Returns a time 50 ms from now.
fn soon(stack: &Stack) -> When {
    When::At(now(stack) + 50 * MS)
}

const REQUEST: RequestId = RequestId(7);

#[test]
fn what_a_request_needs_is_where_it_is_to_go_before_it_runs() {
    let (mut stack, mut store) = stack(8);
    let (wanted, others) = (keys(0..7), keys(10..18));
    put_away(&mut stack, &wanted, &others);
    let before = stack.store.stats().unwrap();
    let asked = [wanted.clone(), keys(90..92)].concat();
    assert_eq!(store.prefetch(REQUEST, &asked, soon(&stack), now(&stack)).unwrap(), 7);
    settle(&stack, &mut store);
    let stats = stack.store.stats().unwrap();
    let block = stack.shape.block_bytes();
    assert_eq!((stats.dram.prefetched_bytes, stats.retrieved_bytes), (7 * block, 0));
    // No more commands, with blocks allocated before the request runs, and without.
    let commands = stats.commands;
    stack.faults(Some(on(READ, READ_ERROR)));
    let targets = blocks(30, 7);
    targets.iter().for_each(|target| stack.wipe(*target));
    store.allocated(REQUEST, &targets).unwrap();
    settle(&stack, &mut store);
    assert_eq!(store.run(REQUEST).unwrap(), 7);
    for (key, target) in wanted.iter().zip(&targets) {
        assert!(stack.holds(*target, *key), "{target}");
    }
    store.prefetch(REQUEST, &asked, soon(&stack), now(&stack)).unwrap();
    settle(&stack, &mut store);
    assert_eq!(store.run(REQUEST).unwrap(), 0);
    assert_eq!(stack.get(&asked, 40), 7);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.commands, stats.files_referenced, stats.files_lost), (commands, 0, 0));
    assert_eq!((stats.blocks_hit - before.blocks_hit, stats.dram.wasted_bytes), (7, 0));
    let counts = store.lookahead().unwrap();
    assert_eq!((counts.link_bytes, counts.ready_blocks, counts.dropped), (7 * block, 7, 0));
    assert_eq!(stack.refused_dma(), 0);
}

#[test]
fn nothing_is_read_for_what_is_not_stored_or_without_host_memory() {
    let (mut stack, mut store) = stack(4);
    stack.put(&keys(0..2), 0);
    let commands = stack.store.stats().unwrap().commands;
    assert_eq!(store.prefetch(REQUEST, &keys(5..8), soon(&stack), now(&stack)).unwrap(), 0);
    settle(&stack, &mut store);
    assert_eq!(store.run(REQUEST).unwrap(), 0);
    assert_eq!(store.run(REQUEST).unwrap(), 0, "nobody announced it");
    assert_eq!(stack.store.stats().unwrap().commands, commands);

    let mut stack = Stack::new(&Plan::default());
    let mut store = looking_ahead(&stack.store);
    stack.put(&keys(0..2), 0);
    assert_eq!(store.prefetch(REQUEST, &keys(0..2), soon(&stack), now(&stack)).unwrap(), 2);
    settle(&stack, &mut store);
    assert_eq!(store.run(REQUEST).unwrap(), 0);
}

#[test]
fn what_is_aborted_in_flight_leaves_nothing_behind() {
    let (mut stack, mut store) = stack(4);
    put_away(&mut stack, &keys(0..4), &keys(10..14));
    store.prefetch(REQUEST, &keys(0..4), soon(&stack), now(&stack)).unwrap();
    while store.lookahead().unwrap().drives_bytes == 0 {
        store.poll(now(&stack)).unwrap();
    }
    store.abort(REQUEST).unwrap();
    // One block is removed while it is being read.
    assert_eq!(stack.store.stats().unwrap().files_referenced, 4, "as long as they are read");
    assert_eq!(stack.store.remove(&keys(0..1)).unwrap(), 1);
    settle(&stack, &mut store);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.files_referenced, store.scheduler().pending()), (0, 0));
    // Blocks that were read in vain are evicted before all others, and counted.
    stack.put(&keys(20..24), 0);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.dram.blocks, stats.retrieved_bytes), (4, 0));
    assert_eq!(stats.dram.wasted_bytes, store.lookahead().unwrap().drives_bytes);
    assert_eq!(stack.get(&keys(20..24), 30), 4);
    assert_eq!(stack.store.stats().unwrap().retrieved_bytes, 0, "they had room");
}

#[test]
fn what_is_read_when_the_lookahead_goes_ends_by_itself() {
    let (mut stack, mut store) = stack(4);
    put_away(&mut stack, &keys(0..4), &keys(10..14));
    store.prefetch(REQUEST, &keys(0..3), soon(&stack), now(&stack)).unwrap();
    while store.lookahead().unwrap().drives_bytes == 0 {
        store.poll(now(&stack)).unwrap();
    }
    drop(store);
    assert_eq!(stack.store.stats().unwrap().files_referenced, 3);
    stack.store.drain().unwrap();
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.files_referenced, stats.dram.blocks), (0, 4));
    assert_eq!(stack.get(&keys(0..3), 30), 3);
    assert_eq!(stack.store.stats().unwrap().retrieved_bytes, 0);
}

#[test]
fn what_could_not_be_read_ahead_the_request_reads_itself() {
    let (mut stack, mut store) = stack(4);
    put_away(&mut stack, &keys(0..3), &keys(10..14));
    stack.faults(Some(on(READ, READ_ERROR)));
    store.prefetch(REQUEST, &keys(0..3), soon(&stack), now(&stack)).unwrap();
    store.allocated(REQUEST, &blocks(30, 3)).unwrap();
    settle(&stack, &mut store);
    assert_eq!(store.run(REQUEST).unwrap(), 0);
    stack.faults(None);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.files_lost, stats.dram.prefetched_bytes, stats.files_referenced), (0, 0, 0));
    assert_eq!(stack.get(&keys(0..3), 30), 3);
}

/// Requests arrive, run or are aborted at random times, while files are evicted and rewritten.
/// Every byte is compared.
#[test]
fn bytes_are_right_whatever_happens_meanwhile() {
    for seed in seeds(1, 4) {
        let mut random = StdRng::seed_from_u64(seed);
        let mut plan = Plan { seed, ..Plan::default() };
        plan.options.dram_bytes = 12 * plan.shape.block_bytes();
        plan.format.capacity_bytes = Some(48 * plan.shape.block_bytes());
        let mut stack = Stack::new(&plan);
        let mut store = looking_ahead(&stack.store);
        let all: Vec<_> = (0..12).map(|n| keys(100 * n..100 * n + 8)).collect();
        for id in 0..150 {
            let wanted = &all[random.random_range(0..all.len())];
            if random.random_bool(0.3) {
                stack.put(wanted, 0);
                continue;
            }
            let request = RequestId(id);
            let by = When::At(now(&stack) + MS.mul_f64(random.random_range(0.0..20.0)));
            let found = store.prefetch(request, wanted, by, now(&stack)).unwrap();
            let targets = blocks(30, found);
            targets.iter().for_each(|target| stack.wipe(*target));
            for step in 0..random.random_range(0..200) {
                store.poll(now(&stack)).unwrap();
                stack.clock.pause(step, Nanos::MAX);
                if step == 120 {
                    store.allocated(request, &targets).unwrap();
                }
                if step == 60 && random.random_bool(0.2) {
                    stack.store.remove(&all[random.random_range(0..all.len())]).unwrap();
                }
            }
            if random.random_bool(0.3) {
                store.abort(request).unwrap();
            } else {
                let ready = store.run(request).unwrap();
                for (key, target) in wanted.iter().zip(&targets[..ready]) {
                    assert!(stack.holds(*target, *key), "seed {seed}, request {id}: {target}");
                }
                stack.get(wanted, 30);
            }
            assert!(stack.store.stats().unwrap().dram.blocks <= 12, "seed {seed}");
        }
        settle(&stack, &mut store);
        let (stats, counts) = (stack.store.stats().unwrap(), store.lookahead().unwrap());
        assert_eq!(stats.files_referenced, 0, "seed {seed}");
        assert!(counts.ready_blocks > 0 && stats.dram.wasted_bytes > 0, "{counts:?} {stats:?}");
    }
}

#[test]
fn what_is_ready_has_the_bytes_where_the_request_has_its_blocks_now() {
    let (mut stack, mut store) = stack(8);
    let [a, b] = [0, 1].map(|n| keys(n..n + 1)[0]);
    put_away(&mut stack, &[a, b], &keys(10..18));
    // A prompt may contain a block twice, and get different blocks.
    let asked = [a, b, a];
    assert_eq!(store.prefetch(REQUEST, &asked, soon(&stack), now(&stack)).unwrap(), 3);
    let [first, second] = [30, 40].map(|at| blocks(at, 3));
    store.allocated(REQUEST, &first).unwrap();
    settle(&stack, &mut store);
    assert!(first.iter().zip(asked).all(|(block, key)| stack.holds(*block, key)));
    // Another request had the third block meanwhile, and may have written to it.
    store.allocated(REQUEST, &[first[0], first[1], second[2]]).unwrap();
    store.allocated(REQUEST, &first).unwrap();
    settle(&stack, &mut store);
    assert_eq!(store.run(REQUEST).unwrap(), 2);

    store.prefetch(REQUEST, &asked, soon(&stack), now(&stack)).unwrap();
    store.allocated(REQUEST, &first).unwrap();
    settle(&stack, &mut store);
    assert_eq!(store.run(REQUEST).unwrap(), 3);

    // Fewer blocks than keys.
    store.prefetch(REQUEST, &asked, soon(&stack), now(&stack)).unwrap();
    store.allocated(REQUEST, &second[..1]).unwrap();
    settle(&stack, &mut store);
    assert_eq!(store.run(REQUEST).unwrap(), 1);
    assert!(stack.holds(second[0], a));
}

#[test]
fn nothing_is_ready_that_was_not_read_ahead_or_is_not_stored_any_more() {
    let (mut stack, mut store) = stack(8);
    put_away(&mut stack, &keys(0..3), &keys(10..18));
    // No iteration has ended, so the time of the next one is unknown.
    assert_eq!(store.prefetch(REQUEST, &keys(0..3), When::In(1), now(&stack)).unwrap(), 3);
    store.allocated(REQUEST, &blocks(30, 3)).unwrap();
    settle(&stack, &mut store);
    assert_eq!(store.run(REQUEST).unwrap(), 0);

    store.prefetch(REQUEST, &keys(0..3), soon(&stack), now(&stack)).unwrap();
    store.allocated(REQUEST, &blocks(30, 3)).unwrap();
    settle(&stack, &mut store);
    stack.store.bump_epoch().unwrap();
    assert_eq!(store.run(REQUEST).unwrap(), 0, "these are keys and values of the old weights");
}

#[test]
fn what_is_committed_after_a_request_was_announced_is_read_ahead() {
    let (mut stack, mut store) = stack(8);
    let asked = keys(0..4);
    stack.put(&asked[..1], 0);
    assert_eq!(store.prefetch(REQUEST, &asked, soon(&stack), now(&stack)).unwrap(), 1);
    put_away(&mut stack, &asked, &keys(10..18));
    assert_eq!(store.prefetch(REQUEST, &asked, soon(&stack), now(&stack)).unwrap(), 4);
    store.allocated(REQUEST, &blocks(30, 4)).unwrap();
    settle(&stack, &mut store);
    assert_eq!(store.run(REQUEST).unwrap(), 4);
    assert!(blocks(30, 4).iter().zip(asked).all(|(block, key)| stack.holds(*block, key)));
    assert_eq!(stack.store.stats().unwrap().files_referenced, 0);
}

#[test]
fn copies_of_this_process_take_their_turn() {
    let (mut stack, mut store) = stack(8);
    stack.put(&keys(0..8), 0);
    store.prefetch(REQUEST, &keys(0..8), soon(&stack), now(&stack)).unwrap();
    store.allocated(REQUEST, &blocks(30, 8)).unwrap();
    let batch = 3 * stack.shape.block_bytes();
    for copied in [batch, 2 * batch] {
        let (_, again) = store.poll(now(&stack)).unwrap();
        assert_eq!(again, Some(now(&stack)), "there is more");
        assert_eq!(store.lookahead().unwrap().link_bytes, copied);
    }
}

#[test]
fn an_idle_engine_is_told_when_to_look_again() {
    let (mut stack, mut store) = stack(8);
    put_away(&mut stack, &keys(0..3), &keys(10..18));
    (0..4).for_each(|_| store.iteration(MS));
    let at = now(&stack) + 500 * MS;
    store.prefetch(REQUEST, &keys(0..3), When::At(at), now(&stack)).unwrap();
    let (_, again) = store.poll(now(&stack)).unwrap();
    assert_eq!(again, Some(at - 8 * MS), "8 iterations before");
    while now(&stack) < at - 8 * MS {
        stack.clock.pause(u32::MAX, Nanos((at - 8 * MS).as_nanos() as u64));
    }
    settle(&stack, &mut store);
    assert_eq!(stack.store.stats().unwrap().dram.prefetched_bytes, 3 * stack.shape.block_bytes());
}
