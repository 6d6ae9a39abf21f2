//! The tier, while a run goes on: its index, what moves, and what is stored.

use std::{collections::VecDeque, time::Duration};

use kv_catalog::{BlockKey, WriteId};
use kv_schedule::{Decision, Direction, Flow, Kind, Op, OpId, Scheduler};

use super::{Index, Request, Run, Setup, Work, keys};
use crate::{lane::Lane, policy::Tier};

/// What an operation is for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Purpose {
    /// A layer of the step that runs.
    Layer(u32),
    /// A request that waits.
    Whole,
    /// A layer of a write.
    Store {
        /// The write's number.
        number: u64,
        layer: u32,
    },
}

/// An operation that waits or moves.
#[derive(Debug, Clone, Copy)]
struct Moving {
    purpose: Purpose,
    request: usize,
    direction: Direction,
    bytes: u64,
    objects: u64,
}

/// Blocks on their way to the tier.
#[derive(Debug)]
struct Store {
    write: WriteId,
    /// Layers that are not written yet.
    left: u32,
    units: u64,
}

/// Values by number, of which the oldest go first, about.
#[derive(Debug)]
struct Numbered<T> {
    /// The number of the first one.
    first: u64,
    values: VecDeque<Option<T>>,
}

impl<T> Numbered<T> {
    const fn new() -> Self {
        Self { first: 0, values: VecDeque::new() }
    }

    fn push(&mut self, value: T) -> u64 {
        self.values.push_back(Some(value));
        self.first + self.values.len() as u64 - 1
    }

    fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let at = number.checked_sub(self.first)?;
        self.values.get_mut(at as usize)?.as_mut()
    }

    fn remove(&mut self, number: u64) -> Option<T> {
        let at = number.checked_sub(self.first)?;
        let value = self.values.get_mut(at as usize)?.take();
        while let Some(None) = self.values.front() {
            self.values.pop_front();
            self.first += 1;
        }
        value
    }
}

#[derive(Debug)]
pub(super) struct Below {
    pub(super) tier: Tier,
    pub(super) index: Index,
    pub(super) scheduler: Scheduler,
    lane: Lane,
    /// Bytes of a unit in a layer.
    unit_layer_bytes: u64,
    moving: Numbered<Moving>,
    stores: Numbered<Store>,
    wake: Option<Duration>,
}

impl Below {
    pub(super) fn new(setup: &Setup, tier: Tier) -> Self {
        let unit_layer_bytes = setup.model.token_layer_bytes() * u64::from(tier.unit_tokens);
        let layers = u64::from(setup.model.layers);
        Self {
            tier,
            index: Index::new(tier.capacity, unit_layer_bytes * layers),
            scheduler: tier.scheduler(),
            lane: Lane::new(tier.lane),
            unit_layer_bytes,
            moving: Numbered::new(),
            stores: Numbered::new(),
            wake: None,
        }
    }

    /// Keys of the units of a prompt: that of the last block of each.
    pub(super) fn units(&self, request: &Request, block_tokens: u32) -> Vec<BlockKey> {
        let each = (self.tier.unit_tokens / block_tokens).max(1) as usize;
        keys(request.blocks.chunks_exact(each).map(|unit| unit[each - 1]))
    }

    pub(super) fn units_of(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.tier.unit_tokens))
    }

    /// Units of each part of a layer's read: two of them may be in flight, so that the devices have
    /// the next one when one has ended.
    pub(super) fn parts(&self, units: u64) -> impl Iterator<Item = u64> + use<> {
        let bytes = self.tier.schedule.read_depth_bytes / 2;
        let most = (bytes / self.unit_layer_bytes).max(1);
        (0..units.div_ceil(most)).map(move |part| most.min(units - part * most))
    }

    pub(super) fn next_event(&self) -> Option<Duration> {
        self.lane.next_event().into_iter().chain(self.wake).min()
    }

    /// Starts what may be started.
    pub(super) fn pump(&mut self, now: Duration) {
        loop {
            match self.scheduler.next(now) {
                Decision::Start(id) => {
                    let Moving { direction, bytes, objects, .. } =
                        *self.moving.get_mut(id.0).expect("it was added");
                    self.lane.push(now, id, direction, bytes, objects);
                }
                Decision::Drop(_) => {}
                Decision::Wait(until) => {
                    self.wake = until;
                    return;
                }
            }
        }
    }

    /// Hands an operation to the scheduler; false if there are too many writes.
    pub(super) fn add(
        &mut self,
        purpose: Purpose,
        kind: Kind,
        request: usize,
        (units, layers): (u64, u32),
        now: Duration,
    ) -> bool {
        let bytes = units * self.unit_layer_bytes * u64::from(layers);
        let objects = units * u64::from(self.tier.objects) * u64::from(layers);
        let direction = if kind == Kind::Write { Direction::Write } else { Direction::Read };
        let id = OpId(self.moving.push(Moving { purpose, request, direction, bytes, objects }));
        let flow = Flow { tenant: 0, request: request as u64 };
        let is_taken = self.scheduler.add(Op { id, flow, bytes, kind }, now).is_ok();
        if !is_taken {
            self.moving.remove(id.0);
        }
        is_taken
    }

    /// Room for units, as far as they are not there: a write's number, and how many are new.
    pub(super) fn begin_store(&mut self, units: &[BlockKey], layers: u32) -> Option<(u64, u64)> {
        let (write, _, own) = self.index.begin(units);
        if own == 0 {
            self.index.abort(write);
            return None;
        }
        let units = own as u64;
        Some((self.stores.push(Store { write, left: layers, units }), units))
    }

    /// A layer of a store has been computed. Blocks that are dropped for it.
    pub(super) fn store(&mut self, number: u64, layer: u32, request: usize, now: Duration) -> u64 {
        // Not if a layer of it was dropped.
        let Some(store) = self.stores.get_mut(number) else { return 0 };
        let (write, units) = (store.write, store.units);
        let purpose = Purpose::Store { number, layer };
        if self.add(purpose, Kind::Write, request, (units, 1), now) {
            return 0;
        }
        // Layers that are on their way are for nothing.
        self.stores.remove(number);
        self.index.abort(write);
        units
    }

    fn stored(&mut self, number: u64) {
        let Some(store) = self.stores.get_mut(number) else { return };
        store.left -= 1;
        if store.left == 0 {
            let write = store.write;
            self.stores.remove(number);
            self.index.commit(write);
        }
    }
}

impl Run<'_> {
    pub(super) fn io_ends(&mut self) {
        let Some(below) = &mut self.below else { return };
        below.wake = below.wake.filter(|wake| *wake > self.now);
        for (id, began) in below.lane.arrived(self.now) {
            below.scheduler.ended(id, self.now);
            let moved = below.moving.remove(id.0).expect("it was started");
            let is_read = moved.direction == Direction::Read;
            let report = &mut self.report;
            *(if is_read { &mut report.read_bytes } else { &mut report.write_bytes }) +=
                moved.bytes;
            self.record.moved(is_read, moved.bytes, self.now);
            let (work, layer) = match moved.purpose {
                Purpose::Layer(layer) => {
                    self.step.as_mut().expect("a step waits for its loads").loaded(layer);
                    (Work::Read, layer)
                }
                Purpose::Whole => {
                    let mut active = self.active.iter_mut();
                    let active = active.find(|active| active.request == moved.request);
                    active.expect("it waits for its loads").is_loading = false;
                    (Work::Read, 0)
                }
                Purpose::Store { number, layer } => {
                    below.stored(number);
                    (Work::Write, layer)
                }
            };
            if self.record.is_watched(moved.request) {
                self.record.span(work, layer, began, self.now);
            }
        }
    }
}
