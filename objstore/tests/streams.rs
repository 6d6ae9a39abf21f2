//! Layers in order with an engine's streams, on a pool that the devices reach and on a staged one.
//! The GPU is a model whose streams and moves follow the documents of the seams, and nothing else.

mod gpu;
mod rig;
mod stack;

use gio_uring::{RawStream, Wait};
use nvme_driver::{Clock, Nanos};
use nvme_emu::FaultAction;
use objstore::{Layer, Order, Path, StoreError};
use rig::{Rig, wait_all};
use stack::{Plan, READ, blocks, keys, on};

/// Both paths on which the pool is on the GPU, with several orders of events each.
fn everywhere(test: impl Fn(&Plan, Path)) {
    for path in [Path::Direct, Path::Staged] {
        for seed in 1..=5 {
            test(&Plan { seed, ..Plan::default() }, path);
        }
    }
}

#[test]
fn every_byte_goes_there_and_back() {
    everywhere(|plan, path| {
        let mut rig = Rig::new(plan, path);
        let keys = keys(0..12);
        assert_eq!(rig.put(&keys, 0), 12);
        assert_eq!(rig.get(&keys, 40), 12, "{path}");
        let stats = rig.store.stats().unwrap();
        assert_eq!(stats.path, path);
        // There and back, and the proof's own.
        let objects = 2 * 12 * u64::from(rig.shape.rows());
        let proof = 2 * 2 * 2 * u64::from(rig.shape.segments);
        let moved = if path == Path::Staged { objects + proof } else { 0 };
        assert_eq!(rig.gpu.moved(), moved, "{path}");
        assert_eq!(rig.domain.refused(), 0);
    });
}

/// The promise of `On`: what is enqueued afterwards sees the layer, with no word from the host.
#[test]
fn what_is_enqueued_after_a_retrieve_sees_it() {
    everywhere(|plan, path| {
        let mut rig = Rig::new(plan, path);
        let keys = keys(0..9);
        rig.put(&keys, 0);
        let transfer = rig.transfer(&keys, 40);
        let compute = rig.gpu.stream(1);
        let mut seen = Vec::new();
        let mut tickets = Vec::new();
        for layer in rig.layers() {
            tickets.push(rig.store.retrieve_layer_on(&transfer, layer, compute).unwrap());
            seen.push(rig.look(compute, 40, &keys, layer));
        }
        assert!(rig.settle());
        for seen in seen {
            assert_eq!(seen.try_recv(), Ok(true), "{path}, seed {}", plan.seed);
        }
        wait_all(&mut rig.store, tickets).unwrap();
    });
}

/// The promise of `After` and `On`: nothing writes to the blocks before.
#[test]
fn what_was_enqueued_before_a_retrieve_comes_first() {
    everywhere(|plan, path| {
        for order in [Order::AfterStream, Order::InStream] {
            let mut rig = Rig::new(plan, path);
            let keys = keys(0..9);
            rig.put(&keys, 0);
            let transfer = rig.transfer(&keys, 40);
            let compute = rig.gpu.stream(1);
            rig.gpu.gate(compute, 1);
            // What still uses the blocks.
            let other = stack::keys(20..29);
            let places = rig.places();
            for layer in rig.layers() {
                let other = other.clone();
                rig.gpu.enqueue(compute, move |memory| {
                    for (key, block) in other.iter().zip(blocks(40, 9)) {
                        places.fill(memory, block, *key, layer);
                    }
                });
            }
            let before: Vec<_> =
                rig.layers().map(|layer| rig.look(compute, 40, &other, layer)).collect();
            let mut tickets = Vec::new();
            for layer in rig.layers() {
                let ticket = rig.store.retrieve_layer_on(&transfer, layer, order(compute));
                tickets.push(ticket.unwrap());
            }
            rig.run(500);
            let wiped = rig.gpu.memory.read(rig.places().at(blocks(40, 1)[0], objstore::Row(0)), 9);
            assert_eq!(wiped, [0xEE; 9], "{path}: a block was written to before its turn");
            rig.gpu.open(1);
            wait_all(&mut rig.store, tickets).unwrap();
            before.iter().for_each(|seen| assert_eq!(seen.try_recv(), Ok(true), "{path}"));
            assert!(rig.layers().all(|layer| rig.holds(40, &keys, layer)), "{path}");
        }
    });
}

/// A layer is computed, stored, and its blocks are used for something else at once.
#[test]
fn a_store_reads_what_was_enqueued_before_and_nothing_later() {
    everywhere(|plan, path| {
        for joined in [false, true] {
            let mut rig = Rig::new(plan, path);
            let keys = keys(0..9);
            let writing = rig.store.allocate(&keys, &blocks(0, 9)).unwrap();
            let (compute, places) = (rig.gpu.stream(1), rig.places());
            rig.gpu.gate(compute, 1);
            let mut tickets = Vec::new();
            for layer in rig.layers() {
                let computed = keys.clone();
                rig.gpu.enqueue(compute, move |memory| {
                    for (key, block) in computed.iter().zip(blocks(0, 9)) {
                        places.fill(memory, block, *key, layer);
                    }
                });
                let order =
                    if joined { Order::AfterStream(compute) } else { Order::InStream(compute) };
                let ticket = rig.store.store_layer_on(&writing, layer, order).unwrap();
                if joined {
                    rig.store.join(&ticket, compute).unwrap();
                }
                rig.gpu.enqueue(compute, move |memory| {
                    blocks(0, 9).into_iter().for_each(|block| places.wipe(memory, block, layer));
                });
                tickets.push(ticket);
            }
            rig.run(300);
            assert!(rig.store.poll(&tickets[0]).unwrap().is_none(), "{path}: stored too early");
            rig.gpu.open(1);
            wait_all(&mut rig.store, tickets).unwrap();
            rig.store.commit(writing).unwrap();
            rig.run(300);
            assert!(rig.gpu.is_idle());
            assert!(!rig.holds(0, &keys, Layer(0)));
            assert_eq!(rig.get(&keys, 40), 9, "{path}");
        }
    });
}

/// All loads are started at once, and each layer is waited for where it is used, as vLLM does it.
#[test]
fn a_load_that_was_started_early_is_joined_where_it_is_used() {
    everywhere(|plan, path| {
        let mut rig = Rig::new(plan, path);
        let keys = keys(0..9);
        rig.put(&keys, 0);
        let transfer = rig.transfer(&keys, 40);
        let (compute, other) = (rig.gpu.stream(1), rig.gpu.stream(2));
        rig.faults(Some(on(READ, FaultAction::Delay { ns: 20_000_000 })));
        let start = |layer| {
            rig.store.retrieve_layer_on(&transfer, layer, Order::AfterStream(compute)).unwrap()
        };
        let tickets: Vec<_> = (0..plan.shape.layers).map(Layer).map(start).collect();
        // Compute goes on meanwhile.
        let nothing = rig.look(compute, 0, &[], Layer(0));
        rig.run(40);
        assert_eq!(nothing.try_recv(), Ok(true));
        assert!(rig.store.poll(&tickets[0]).unwrap().is_none(), "{path}: too fast to tell");
        let mut seen = Vec::new();
        for (ticket, layer) in tickets.iter().zip(rig.layers()) {
            rig.store.join(ticket, compute).unwrap();
            seen.push(rig.look(compute, 40, &keys, layer));
            rig.store.join(ticket, other).unwrap();
            seen.push(rig.look(other, 40, &keys, layer));
        }
        rig.run(10);
        seen.iter().for_each(|seen| assert!(seen.try_recv().is_err(), "{path}: saw it early"));
        assert!(rig.settle());
        seen.iter().for_each(|seen| assert_eq!(seen.try_recv(), Ok(true), "{path}"));
        // A layer that has ended can be joined as well.
        let last = rig.store.retrieve_layer(&transfer, Layer(0)).unwrap();
        let deadline = rig.clock.now() + Nanos::from_millis(1000);
        while rig.store.poll(&last).unwrap().is_none() {
            rig.clock.pause(3, deadline);
        }
        rig.store.join(&last, other).unwrap();
        let seen = rig.look(other, 40, &keys, Layer(0));
        assert!(rig.settle());
        assert_eq!(seen.try_recv(), Ok(true));
        wait_all(&mut rig.store, tickets).unwrap();
    });
}

/// A request with nothing to move holds nobody up.
#[test]
fn an_empty_layer_can_be_put_in_order() {
    everywhere(|plan, path| {
        let mut rig = Rig::new(plan, path);
        let keys = keys(0..4);
        rig.put(&keys, 0);
        let again = rig.store.allocate(&keys, &blocks(0, 4)).unwrap();
        assert_eq!(again.written(), 0);
        let compute = rig.gpu.stream(1);
        for layer in rig.layers() {
            let ticket = rig.store.store_layer_on(&again, layer, compute).unwrap();
            rig.store.join(&ticket, compute).unwrap();
            rig.store.wait(ticket).unwrap();
        }
        rig.store.commit(again).unwrap();
        rig.run(20);
        assert!(rig.gpu.is_idle(), "{path}");
    });
}

#[test]
fn a_word_of_the_host_starts_a_layer() {
    everywhere(|plan, path| {
        let mut rig = Rig::new(plan, path);
        let keys = keys(0..9);
        rig.put(&keys, 0);
        let transfer = rig.transfer(&keys, 40);
        let wait = Wait { event: rig.store.event().unwrap(), value: 3 };
        let ticket = rig.store.retrieve_layer_on(&transfer, Layer(0), &wait).unwrap();
        rig.run(300);
        assert!(!rig.holds(40, &keys, Layer(0)), "{path}");
        wait.event.set(3);
        rig.store.wait(ticket).unwrap();
        assert!(rig.holds(40, &keys, Layer(0)), "{path}");
        // A word of another store.
        let mut foreign = Rig::new(plan, path);
        let wait = Wait { event: foreign.store.event().unwrap(), value: 0 };
        let error = rig.store.retrieve_layer_on(&transfer, Layer(1), &wait).unwrap_err();
        assert!(matches!(error, StoreError::Ring(_)), "{error}");
    });
}

/// Streams and words are not mixed up, however many there are and however often they are used.
#[test]
fn many_streams_take_turns() {
    everywhere(|plan, path| {
        let mut rig = Rig::new(plan, path);
        let all = keys(0..80);
        let writing_keys: Vec<_> = all.chunks(8).collect();
        for keys in &writing_keys {
            rig.put(keys, 0);
        }
        // More streams than are remembered at a time.
        for round in 0..100u32 {
            let keys = writing_keys[round as usize % 10];
            let transfer = rig.transfer(keys, 40);
            let stream: RawStream = rig.gpu.stream(1 + u64::from(round));
            let layer = Layer(round % rig.shape.layers);
            let ticket = rig.store.retrieve_layer_on(&transfer, layer, stream).unwrap();
            let seen = rig.look(stream, 40, keys, layer);
            rig.store.wait(ticket).unwrap();
            while !rig.gpu.is_past(stream) {
                rig.run(1);
            }
            assert_eq!(seen.try_recv(), Ok(true), "{path}, round {round}");
        }
    });
}
