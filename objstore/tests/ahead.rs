//! Reading ahead for requests that run soon, without delaying other transfers.

use crate::{schedule, stack};

use std::time::Duration;

use kv_schedule::Config;
use kv_tier::{RequestId, When};
use nvme_driver::{Clock as _, Nanos};
use objstore::{BlockKey, FileId, Prefix};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use ripieno_testkit::seeds;
use schedule::{ahead, pace, pending};
use stack::{Plan, READ, READ_ERROR, Stack, keys, on};

const MS: Duration = Duration::from_millis(1);

/// Creates a store with this many blocks of DRAM cache, which reads ahead.
fn stack(dram_blocks: u64) -> Stack {
    let mut plan = Plan::default();
    plan.options.dram = dram_blocks * plan.shape.block_bytes();
    let stack = Stack::new(&plan);
    pace(&stack.store, Config::default());
    stack
}

fn now(stack: &Stack) -> Duration {
    stack.clock.now().duration()
}

fn advance(stack: &Stack) -> Option<Nanos> {
    stack.store.plane().advance().unwrap().wake
}

/// Advances the time until nothing is planned or in flight.
fn settle(stack: &Stack) {
    let mut quiet = 0;
    for idle in 0.. {
        advance(stack);
        quiet = if pending(&stack.store) == 0 { quiet + 1 } else { 0 };
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

/// Announces a request that runs in 50 ms.
fn announce(stack: &Stack, keys: &[BlockKey]) -> Prefix {
    let prefix = stack.store.hold_prefix(keys).unwrap();
    stack.store.announce(REQUEST, &prefix, When::At(now(stack) + 50 * MS)).unwrap();
    prefix
}

fn withdraw(stack: &Stack, runs: bool) {
    stack.store.plane().withdraw(REQUEST, runs).unwrap();
}

const REQUEST: RequestId = RequestId(7);

#[test]
fn blocks_of_an_announced_request_are_in_host_memory_when_it_runs() {
    let mut stack = stack(8);
    let (wanted, others) = (keys(0..7), keys(10..18));
    put_away(&mut stack, &wanted, &others);
    let before = stack.store.stats().unwrap();
    let asked = [wanted.clone(), keys(90..92)].concat();
    let prefix = announce(&stack, &asked);
    assert_eq!(prefix.len(), 7);
    settle(&stack);
    let stats = stack.store.stats().unwrap();
    let block = stack.shape.block_bytes();
    assert_eq!((stats.plane.dram.prefetched_bytes, stats.plane.retrieved_bytes), (7 * block, 0));
    // No more commands.
    let commands = stats.plane.ring.total.commands;
    stack.faults(Some(on(READ, READ_ERROR)));
    withdraw(&stack, true);
    drop(prefix);
    assert_eq!(stack.get(&asked, 40), 7);
    let stats = stack.store.stats().unwrap();
    assert_eq!(
        (stats.plane.ring.total.commands, stats.files.active, stats.lookups.files_lost),
        (commands, 0, 0)
    );
    assert_eq!((stats.lookups.hits - before.lookups.hits, stats.plane.dram.wasted_bytes), (7, 0));
    let counts = ahead(&stack.store);
    assert_eq!((counts.drives_bytes, counts.link_bytes, counts.dropped), (7 * block, 0, 0));
    assert_eq!(stack.refused_dma(), 0);
}

#[test]
fn nothing_is_read_ahead_without_host_memory_or_of_files_that_do_not_exist() {
    let mut stack = Stack::new(&Plan::default());
    pace(&stack.store, Config::default());
    stack.put(&keys(0..2), 0);
    let commands = stack.store.stats().unwrap().plane.ring.total.commands;
    let prefix = announce(&stack, &keys(0..2));
    settle(&stack);
    withdraw(&stack, true);
    withdraw(&stack, true);
    assert_eq!(stack.store.stats().unwrap().plane.ring.total.commands, commands);
    drop(prefix);
    let when = When::At(now(&stack) + MS);
    let error = stack.store.plane().announce(REQUEST, &[FileId(1 << 30)], &[], when).unwrap_err();
    assert!(error.to_string().contains("1073741824"), "{error}");
}

#[test]
fn an_aborted_request_leaves_nothing_behind() {
    let mut stack = stack(4);
    put_away(&mut stack, &keys(0..4), &keys(10..14));
    let prefix = announce(&stack, &keys(0..4));
    while ahead(&stack.store).drives_bytes == 0 {
        advance(&stack);
    }
    withdraw(&stack, false);
    drop(prefix);
    // One block is removed while it is being read.
    assert_eq!(stack.store.remove(&keys(0..1)).unwrap(), 1);
    settle(&stack);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.files.active, pending(&stack.store)), (0, 0));
    // Blocks that were read in vain are evicted before all others, and counted.
    stack.put(&keys(20..24), 0);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.plane.dram.blocks, stats.plane.retrieved_bytes), (4, 0));
    assert_eq!(stats.plane.dram.wasted_bytes, ahead(&stack.store).drives_bytes);
    assert_eq!(stack.get(&keys(20..24), 30), 4);
    assert_eq!(stack.store.stats().unwrap().plane.retrieved_bytes, 0, "they had room");
}

#[test]
fn a_block_that_could_not_be_read_ahead_is_read_by_its_request() {
    let mut stack = stack(4);
    put_away(&mut stack, &keys(0..3), &keys(10..14));
    stack.faults(Some(on(READ, READ_ERROR)));
    let prefix = announce(&stack, &keys(0..3));
    settle(&stack);
    withdraw(&stack, true);
    drop(prefix);
    stack.faults(None);
    let stats = stack.store.stats().unwrap();
    assert_eq!(
        (stats.lookups.files_lost, stats.plane.dram.prefetched_bytes, stats.files.active),
        (0, 0, 0)
    );
    assert_eq!(stack.get(&keys(0..3), 30), 3);
}

/// Requests arrive, run or are aborted at random times, while files are evicted and rewritten, also
/// those that are being read ahead. Every byte is compared.
#[test]
fn bytes_are_right_whatever_happens_meanwhile() {
    for seed in seeds(1, 4) {
        let mut random = StdRng::seed_from_u64(seed);
        let mut plan = Plan { seed, ..Plan::default() };
        plan.options.dram = 12 * plan.shape.block_bytes();
        plan.format.capacity_bytes = Some(48 * plan.shape.block_bytes());
        let mut stack = Stack::new(&plan);
        pace(&stack.store, Config::default());
        let all: Vec<_> = (0..12).map(|n| keys(100 * n..100 * n + 8)).collect();
        for id in 0..150 {
            let wanted = &all[random.random_range(0..all.len())];
            if random.random_bool(0.3) {
                stack.put(wanted, 0);
                continue;
            }
            let request = RequestId(id);
            let by = When::At(now(&stack) + MS.mul_f64(random.random_range(0.0..20.0)));
            let prefix = stack.store.hold_prefix(wanted).unwrap();
            stack.store.announce(request, &prefix, by).unwrap();
            // A catalog in another process does not keep the files.
            let _kept = random.random_bool(0.5).then_some(prefix);
            for step in 0..random.random_range(0..200) {
                advance(&stack);
                stack.clock.pause(step, Nanos::MAX);
                if step == 60 && random.random_bool(0.2) {
                    stack.store.remove(&all[random.random_range(0..all.len())]).unwrap();
                }
                if step == 100 && random.random_bool(0.2) {
                    stack.put(&all[random.random_range(0..all.len())], 0);
                }
            }
            let runs = random.random_bool(0.7);
            stack.store.plane().withdraw(request, runs).unwrap();
            if runs {
                stack.get(wanted, 30);
            }
            assert!(stack.store.stats().unwrap().plane.dram.blocks <= 12, "seed {seed}");
        }
        settle(&stack);
        let (stats, counts) = (stack.store.stats().unwrap(), ahead(&stack.store));
        assert_eq!(stats.files.active, 0, "seed {seed}");
        assert!(
            counts.drives_bytes > 0 && stats.plane.dram.wasted_bytes > 0,
            "{counts:?} {stats:?}"
        );
    }
}

#[test]
fn nothing_is_read_ahead_for_a_time_that_is_not_known() {
    let mut stack = stack(8);
    put_away(&mut stack, &keys(0..3), &keys(10..18));
    let prefix = stack.store.hold_prefix(&keys(0..3)).unwrap();
    // No iteration has ended.
    stack.store.announce(REQUEST, &prefix, When::In(1)).unwrap();
    settle(&stack);
    assert_eq!(stack.store.stats().unwrap().plane.dram.prefetched_bytes, 0);
}

#[test]
fn blocks_committed_after_a_request_was_announced_are_read_ahead() {
    let mut stack = stack(8);
    let asked = keys(0..4);
    stack.put(&asked[..1], 0);
    assert_eq!(announce(&stack, &asked).len(), 1);
    put_away(&mut stack, &asked, &keys(10..18));
    assert_eq!(announce(&stack, &asked).len(), 4);
    settle(&stack);
    // The first block is still in host memory: it was announced.
    assert_eq!(ahead(&stack.store).drives_bytes, 3 * stack.shape.block_bytes());
    withdraw(&stack, true);
    let before = stack.store.stats().unwrap().plane.retrieved_bytes;
    assert_eq!(stack.get(&asked, 30), 4);
    assert_eq!(stack.store.stats().unwrap().plane.retrieved_bytes, before, "all of them hit");
    assert_eq!(stack.store.stats().unwrap().files.active, 0);
}

#[test]
fn an_idle_engine_is_told_when_to_look_again() {
    let mut stack = stack(8);
    put_away(&mut stack, &keys(0..3), &keys(10..18));
    let plane = stack.store.plane().clone();
    (0..4).for_each(|_| plane.with_lookahead(|it| it.iteration(MS)).unwrap().unwrap());
    let at = now(&stack) + 500 * MS;
    let prefix = stack.store.hold_prefix(&keys(0..3)).unwrap();
    stack.store.announce(REQUEST, &prefix, When::At(at)).unwrap();
    let then = Nanos((at - 8 * MS).as_nanos() as u64);
    assert_eq!(advance(&stack), Some(then), "8 iterations before");
    while now(&stack) < at - 8 * MS {
        stack.clock.pause(u32::MAX, then);
    }
    settle(&stack);
    assert_eq!(
        stack.store.stats().unwrap().plane.dram.prefetched_bytes,
        3 * stack.shape.block_bytes()
    );
}
