//! Pacing with streams: a layer that waits keeps its place behind the stream that computes.

use crate::{rig, schedule, stack};

use kv_schedule::Config;
use nvme_driver::{Clock as _, Nanos};
use objstore::{BlockId, Layer, Order, Route};
use rig::Rig;
use schedule::pending;
use stack::{Plan, keys};

/// Runs `test` on both paths with a pool on the GPU; reads go before writes.
fn everywhere(test: impl Fn(Rig, Route)) {
    for (path, seed) in [Route::Direct, Route::Staged].into_iter().flat_map(|p| [(p, 1), (p, 2)]) {
        let mut plan = Plan { seed, ..Plan::default() };
        plan.options.wait_timeout = Nanos::from_millis(2_000);
        let mut rig = Rig::new(&plan, path);
        rig.put(&keys(0..6), 0);
        let config = Config { read_depth_bytes: 1, write_depth_bytes: 1, ..Config::default() };
        schedule::pace(&rig.store, config);
        test(rig, path);
    }
}

/// A layer that is stored is read after the work that the stream had when it was started, and
/// before its blocks may change, however late its turn comes.
#[test]
fn a_write_that_waits_stores_the_bytes_that_its_stream_computed() {
    everywhere(|mut rig, path| {
        let (new, compute) = (keys(20..26), rig.gpu.stream(1));
        let read = rig.load(&keys(0..6), 40);
        // A read is in flight, and others wait: no write has its turn.
        for layer in rig.layers() {
            rig.store.start(&read, layer, Order::Unordered).unwrap();
        }
        rig.wipe(20, 6);
        rig.gpu.gate(compute, 1);
        let (places, all, last) = (rig.places(), new.clone(), Layer(rig.shape.layers - 1));
        let layers = rig.layers();
        rig.gpu.enqueue(compute, move |memory| {
            for (layer, (key, block)) in
                layers.flat_map(|l| all.iter().zip(20..).map(move |p| (l, p)))
            {
                places.fill(memory, BlockId(block), *key, layer);
            }
        });
        let save = rig.store.allocate(&new, &stack::blocks(20, 6)).unwrap();
        for layer in rig.layers() {
            let order = Order::AfterStream(compute);
            rig.store.start(&save, layer, order).unwrap();
        }
        assert!(pending(&rig.store) >= 4, "{path}: writes wait");
        // Work enqueued later sees that the blocks are free only once they were stored.
        rig.store.join(&save.ticket(last), compute).unwrap();
        let places = rig.places();
        rig.gpu.enqueue(compute, move |memory| {
            (20..26).for_each(|block| places.wipe(memory, BlockId(block), last));
        });
        rig.gpu.open(1);
        rig.store.commit(save).unwrap();
        for layer in rig.layers() {
            rig.store.wait(read.ticket(layer)).unwrap();
            assert!(rig.holds(40, &keys(0..6), layer), "{path}, layer {layer}");
        }
        assert!(rig.settle());
        assert_eq!(rig.get(&new, 50), 6, "{path}");
    });
}

/// A stream can wait only for what was issued: such a read starts at once.
#[test]
fn a_read_in_a_stream_does_not_wait_for_its_turn() {
    everywhere(|mut rig, path| {
        let compute = rig.gpu.stream(1);
        let read = rig.load(&keys(0..6), 40);
        for layer in rig.layers() {
            rig.store.start(&read, layer, compute).unwrap();
        }
        let seen: Vec<_> =
            rig.layers().map(|layer| rig.look(compute, 40, &keys(0..6), layer)).collect();
        assert!(rig.settle());
        for layer in rig.layers() {
            rig.store.wait(read.ticket(layer)).unwrap();
        }
        assert!(seen.iter().all(|seen| seen.recv().unwrap()), "{path}");
        let error = rig.store.start(&read, Layer(99), compute).unwrap_err();
        assert!(
            error.to_string().starts_with("layer 99 was asked for, but the model has"),
            "{error}"
        );
        rig.store.plane().advance().unwrap();
        assert_eq!(pending(&rig.store), 0, "{path}");
    });
}

/// A plane that was idle for longer than an operation may take does not take the first one for
/// overdue.
#[test]
fn a_read_in_a_stream_after_a_long_pause_is_not_overdue() {
    everywhere(|mut rig, path| {
        let until = rig.clock.now() + Nanos::from_millis(5_000);
        while rig.clock.now() < until {
            rig.clock.pause(u32::MAX, until);
        }
        let (compute, read) = (rig.gpu.stream(1), rig.load(&keys(0..6), 40));
        rig.gpu.gate(compute, 1);
        rig.store.start(&read, Layer(0), compute).unwrap();
        for _ in 0..3 {
            rig.store.plane().advance().unwrap();
        }
        rig.gpu.open(1);
        rig.store.wait(read.ticket(Layer(0))).unwrap();
        assert!(rig.holds(40, &keys(0..6), Layer(0)), "{path}");
        assert_eq!(rig.store.stats().unwrap().plane.recoveries, 0, "{path}");
    });
}
