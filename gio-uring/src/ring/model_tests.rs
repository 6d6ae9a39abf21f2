//! Both rings against `VecDeque`s, over many laps and with wrapping positions.

use std::{collections::VecDeque, sync::Arc};

use proptest::prelude::*;

use super::{CompleteProducer, Consumer, SubmitProducer, Tail, Words};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

#[derive(Clone)]
struct Ring(Arc<[AtomicU64]>);

impl Words for Ring {
    fn load(&self, slot: u32, order: Ordering) -> u64 {
        self.0[slot as usize].load(order)
    }

    fn store(&self, slot: u32, word: u64, order: Ordering) {
        self.0[slot as usize].store(word, order);
    }
}

#[derive(Clone)]
struct Position(Arc<AtomicU32>);

impl Tail for Position {
    fn next(&self, order: Ordering) -> u32 {
        self.0.fetch_add(1, order)
    }
}

/// A pair of rings and the expected contents.
struct World {
    submit: SubmitProducer<Ring>,
    warps: Vec<(Consumer<Ring>, VecDeque<u32>)>,
    producer: CompleteProducer<Ring, Position>,
    complete: Consumer<Ring>,
    completions: VecDeque<u32>,
    /// Number of warps that have not read each id yet.
    unread: Vec<usize>,
    /// Ids read by every warp but not completed.
    read: Vec<u32>,
    free: Vec<u32>,
}

impl World {
    /// Creates rings of `depth` whose positions begin at `first`.
    fn new(depth: u32, warps: usize, first: u32) -> Self {
        let ring = || {
            // The previous content of a slot before `first`: anything other than the next entry.
            let words = (0..depth).map(|_| AtomicU64::new(u64::from(first) << 32));
            Ring(words.collect::<Vec<_>>().into())
        };
        let (sq, cq, mask) = (ring(), ring(), depth - 1);
        let mut submit = SubmitProducer::new(sq.clone(), mask);
        submit.tail = first;
        let consumer = |_| {
            let mut consumer = Consumer::new(sq.clone(), mask);
            consumer.head = first;
            (consumer, VecDeque::new())
        };
        let tail = Position(Arc::new(AtomicU32::new(first)));
        let mut complete = Consumer::new(cq.clone(), mask);
        complete.head = first;
        Self {
            submit,
            warps: (0..warps).map(consumer).collect(),
            producer: CompleteProducer::new(cq, tail, mask),
            complete,
            completions: VecDeque::new(),
            unread: vec![0; depth as usize],
            read: Vec::new(),
            free: (0..depth).collect(),
        }
    }

    fn publish(&mut self) {
        let Some(id) = self.free.pop() else { return };
        self.submit.publish(id);
        self.unread[id as usize] = self.warps.len();
        self.warps.iter_mut().for_each(|(_, queue)| queue.push_back(id));
    }

    fn read(&mut self, warp: usize) {
        let count = self.warps.len();
        let (consumer, queue) = &mut self.warps[warp % count];
        let id = queue.pop_front();
        assert_eq!(consumer.take(), id);
        if let Some(id) = id {
            self.unread[id as usize] -= 1;
            if self.unread[id as usize] == 0 {
                self.read.push(id);
            }
        }
    }

    fn complete(&mut self, choice: usize) {
        if !self.read.is_empty() {
            let id = self.read.swap_remove(choice % self.read.len());
            self.producer.complete(id);
            self.completions.push_back(id);
        }
    }

    fn reap(&mut self) {
        let id = self.completions.pop_front();
        assert_eq!(self.complete.take(), id);
        self.free.extend(id);
    }
}

proptest! {
    // proptest prints the failing case and keeps its seed.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rings_are_queues(
        log2 in 0u32..4,
        warps in 1usize..5,
        first in prop_oneof![Just(0u32), Just(u32::MAX - 5), any::<u32>()],
        steps in proptest::collection::vec((0u8..4, any::<usize>()), 0..400),
    ) {
        let mut world = World::new(1 << log2, warps, first);
        for (what, choice) in steps {
            match what {
                0 => world.publish(),
                1 => world.read(choice),
                2 => world.complete(choice),
                _ => world.reap(),
            }
        }
    }
}

#[test]
fn an_empty_ring_is_zeroed_memory() {
    let ring = Ring((0..4).map(|_| AtomicU64::new(0)).collect::<Vec<_>>().into());
    assert_eq!(Consumer::new(ring.clone(), 3).take(), None);
    assert_eq!(Consumer::new(ring, 3).take(), None);
}
