//! Reading ahead copies to an engine's blocks on a GPU before requests run.

mod gpu;
mod rig;
mod schedule;
mod stack;

use std::time::Duration;

use kv_tier::{RequestId, When};
use nvme_driver::{Clock as _, Nanos};
use objstore::{Order, PacedStore, Route};
use rig::Rig;
use schedule::looking_ahead;
use stack::{Plan, READ, READ_ERROR, blocks, keys, on};

const MS: Duration = Duration::from_millis(1);
const REQUEST: RequestId = RequestId(7);

/// Runs `test` on both paths with a pool on the GPU, with six blocks that only the devices have.
fn everywhere(test: impl Fn(Rig, PacedStore, Route)) {
    for (path, seed) in [Route::Direct, Route::Staged].into_iter().flat_map(|p| [(p, 1), (p, 2)]) {
        let mut plan = Plan { seed, ..Plan::default() };
        plan.options.dram_bytes = 8 * plan.shape.block_bytes();
        let mut rig = Rig::new(&plan, path);
        rig.put(&keys(0..6), 0);
        rig.put(&keys(10..18), 0);
        let store = looking_ahead(&rig.store);
        test(rig, store, path);
    }
}

fn now(rig: &Rig) -> Duration {
    rig.clock.now().duration()
}

fn soon(rig: &Rig) -> When {
    When::At(now(rig) + 50 * MS)
}

/// Runs everything for long enough that all operations that can end have ended.
fn settle(rig: &Rig, store: &mut PacedStore) {
    for idle in 0..400 {
        store.poll(now(rig)).unwrap();
        rig.clock.pause(idle % 4, Nanos::MAX);
    }
}

#[test]
fn what_a_request_needs_is_where_it_is_to_go_before_it_runs() {
    everywhere(|mut rig, mut store, path| {
        let (wanted, block) = (keys(0..6), rig.shape.block_bytes());
        assert_eq!(store.prefetch(REQUEST, &wanted, soon(&rig), now(&rig)).unwrap(), 6);
        settle(&rig, &mut store);
        assert_eq!(rig.store.stats().unwrap().dram.prefetched_bytes, 6 * block, "{path}");
        rig.faults(Some(on(READ, READ_ERROR)));
        rig.wipe(30, 6);
        store.allocated(REQUEST, &blocks(30, 6)).unwrap();
        settle(&rig, &mut store);
        assert_eq!(store.run(REQUEST).unwrap(), 6, "{path}");
        for layer in rig.layers() {
            assert!(rig.holds(30, &wanted, layer), "{path}, layer {layer}");
        }
        // Nothing is pinned any more: other blocks replace them.
        rig.faults(None);
        rig.put(&keys(20..28), 0);
        let stats = rig.store.stats().unwrap();
        assert_eq!((stats.retrieved_bytes, stats.dram.evictions), (0, 20), "{path}");
        let counts = store.lookahead().unwrap();
        assert_eq!((counts.link_bytes, counts.ready_blocks), (6 * block, 6), "{path}");
        assert_eq!(store.run(REQUEST).unwrap(), 0, "it has run");
    });
}

/// After a request runs or is aborted, or the store is dropped, nothing is written to its blocks
/// any more, even if the stream that copies was held up.
#[test]
fn nothing_is_copied_to_blocks_of_a_request_that_runs_or_went_away() {
    for end in 0..3 {
        everywhere(|mut rig, mut store, path| {
            let (wanted, new) = (keys(0..6), keys(40..46));
            store.prefetch(REQUEST, &wanted, soon(&rig), now(&rig)).unwrap();
            settle(&rig, &mut store);
            // The store's own stream is blocked behind a layer of another request.
            let late = rig.gpu.stream(1);
            rig.gpu.gate(late, 1);
            let other = rig.load(&keys(10..11), 50);
            let order = Order::AfterStream(late);
            let ticket = rig.store.retrieve_layer_on(&other, objstore::Layer(0), order).unwrap();
            rig.wipe(30, 6);
            store.allocated(REQUEST, &blocks(30, 6)).unwrap();
            for _ in 0..20 {
                store.poll(now(&rig)).unwrap();
                rig.clock.pause(0, Nanos::MAX);
            }
            assert!(!rig.holds(30, &wanted[..1], objstore::Layer(0)), "{path}: it was held up");
            assert_eq!(store.lookahead().unwrap().link_bytes, 6 * rig.shape.block_bytes());
            rig.gpu.open(1);
            let ready = match end {
                0 => store.run(REQUEST).unwrap(),
                1 => store.abort(REQUEST).map(|()| 0).unwrap(),
                _ => {
                    drop(store);
                    0
                }
            };
            assert_eq!(ready, if end == 0 { 6 } else { 0 }, "{path}");
            rig.fill(30, &new);
            assert!(rig.settle());
            for layer in rig.layers() {
                assert!(rig.holds(30, &new, layer), "{path}: written to after end {end}");
            }
            rig.store.wait(ticket).unwrap();
            drop(other);
            // Blocks announced to a dropped store are protected until this time.
            let until = now(&rig) + 60 * MS;
            (0..).take_while(|_| now(&rig) < until).for_each(|idle| {
                rig.clock.pause(idle, Nanos::MAX);
            });
            rig.put(&keys(20..28), 0);
            assert_eq!(rig.store.stats().unwrap().dram.evictions, 20, "{path}, {end}: pinned");
        });
    }
}

#[test]
fn a_stream_that_never_gets_there_is_noticed_by_who_only_polls() {
    everywhere(|mut rig, mut store, path| {
        store.prefetch(REQUEST, &keys(0..6), soon(&rig), now(&rig)).unwrap();
        settle(&rig, &mut store);
        let late = rig.gpu.stream(1);
        rig.gpu.gate(late, 1);
        let other = rig.load(&keys(10..11), 50);
        let order = Order::AfterStream(late);
        let _ticket = rig.store.retrieve_layer_on(&other, objstore::Layer(0), order).unwrap();
        store.allocated(REQUEST, &blocks(30, 6)).unwrap();
        let failed = (0..20_000).find_map(|idle| {
            rig.clock.pause(idle, Nanos::MAX);
            store.poll(now(&rig)).err()
        });
        let failed = failed.map(|error| error.to_string()).unwrap_or_default();
        assert!(failed.contains("did not get there in time"), "{path}: {failed}");
        rig.gpu.open(1);
    });
}
