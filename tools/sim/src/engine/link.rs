//! A link during a run: its scheduler, and its operations.

use std::{fmt::Debug, hash::Hash, time::Duration};

use kv_schedule::{
    Cancelled, Config, Decision, Direction, Flow, Kind, Op, OpId, Scheduler, SlackTable,
};
use kv_tier::Lookahead;

use super::{
    memory::Memory,
    numbered::Numbered,
    tiers::{Ended, Place, Purpose},
};
use crate::lane::{Lane, LaneModel};

/// A pending or running operation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moving {
    purpose: Purpose,
    request: usize,
    direction: Direction,
    bytes: u64,
    objects: u64,
}

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) scheduler: Scheduler,
    lane: Lane,
    /// Bytes of a unit in a layer.
    pub(crate) unit_layer_bytes: u64,
    /// Objects of a unit in a layer.
    objects: u32,
    /// Maximum bytes of a read.
    part_bytes: u64,
    pub(crate) moving: Numbered<Moving>,
    wake: Option<Duration>,
}

impl Link {
    pub(crate) fn new(
        lane: LaneModel,
        (schedule, table): (Config, SlackTable),
        unit_layer_bytes: u64,
        objects: u32,
    ) -> Self {
        Self {
            scheduler: Scheduler::new(schedule, table),
            lane: Lane::new(lane),
            unit_layer_bytes,
            objects,
            // Two may be in flight, so that the devices have the next one when the first ends.
            part_bytes: schedule.read_depth_bytes / 2,
            moving: Numbered::new(),
            wake: None,
        }
    }

    pub(crate) fn next_event(&self) -> Option<Duration> {
        self.lane.next_event().into_iter().chain(self.wake).min()
    }

    /// Adds an operation to the scheduler; returns false if the write backlog is full.
    pub(crate) fn add(
        &mut self,
        purpose: Purpose,
        kind: Kind,
        request: usize,
        (units, layers): (u64, u32),
        now: Duration,
    ) -> bool {
        let bytes = units * self.unit_layer_bytes * u64::from(layers);
        let objects = units * u64::from(self.objects) * u64::from(layers);
        let direction = if kind == Kind::Write { Direction::Write } else { Direction::Read };
        let id = OpId(self.moving.push(Moving { purpose, request, direction, bytes, objects }));
        let flow = Flow { tenant: 0, request: request as u64 };
        let is_taken = self.scheduler.add(Op { id, flow, bytes, kind }, now).is_ok();
        if !is_taken {
            self.moving.remove(id.0);
        }
        is_taken
    }

    /// Adds reads of a layer for a step, in parts. Returns their number.
    pub(crate) fn add_layer(
        &mut self,
        kind: Kind,
        layer: u32,
        request: usize,
        units: u64,
        now: Duration,
    ) -> u32 {
        let most = (self.part_bytes / self.unit_layer_bytes).max(1);
        let parts = units.div_ceil(most);
        for part in 0..parts {
            let size = (most.min(units - part * most), 1);
            self.add(Purpose::Layer(layer), kind, request, size, now);
        }
        parts as u32
    }

    /// Cancels a whole request's loads that have not started. Returns the bytes of each.
    pub(crate) fn cancel_whole(&mut self, request: usize) -> Vec<u64> {
        let is_its = |it: &Moving| it.request == request && matches!(it.purpose, Purpose::Whole);
        let mut waiting = self.moving.numbers(is_its);
        waiting.retain(|number| self.scheduler.cancel(OpId(*number)) == Cancelled::Pending);
        let taken = waiting.into_iter().filter_map(|number| self.moving.remove(number));
        taken.map(|moving| moving.bytes).collect()
    }

    /// Starts all operations that may start; prefetches go to `memory`.
    pub(crate) fn pump<K: Copy + Eq + Hash + Debug>(
        &mut self,
        now: Duration,
        mut memory: Option<&mut Memory<K>>,
    ) {
        loop {
            match self.scheduler.next(now) {
                Decision::Start(id) if Lookahead::<()>::owns(id) => {
                    let started = memory.as_mut().and_then(|memory| memory.start(id));
                    match started {
                        Some((bytes, blocks)) => {
                            let layers = bytes / self.unit_layer_bytes / blocks;
                            let objects = blocks * layers * u64::from(self.objects);
                            self.lane.push(now, id, Direction::Read, bytes, objects);
                        }
                        None => self.scheduler.ended(id, 0, now),
                    }
                }
                Decision::Start(id) => {
                    let Moving { direction, bytes, objects, .. } =
                        *self.moving.get_mut(id.0).expect("it was added");
                    self.lane.push(now, id, direction, bytes, objects);
                }
                Decision::Drop(id) => {
                    if let Some(memory) = &mut memory {
                        memory.ahead.dropped(id);
                    }
                }
                Decision::Wait(until) => {
                    self.wake = until;
                    return;
                }
            }
        }
    }

    /// Returns the demand in bytes a second for the GPU's link. Prefetches go to host memory and do
    /// not use it.
    pub(crate) fn wanted(&self, direction: Direction) -> f64 {
        let found = self.lane.wanted(direction).filter(|(id, _)| !Lookahead::<()>::owns(*id));
        found.map_or(0.0, |(_, wanted)| wanted)
    }

    /// Sets the granted fractions of the demand of reads and writes.
    pub(crate) fn limit(&mut self, share: [f64; 2]) {
        self.lane.limit(share);
    }

    /// Returns the operations completed until `now`.
    pub(crate) fn ended<K: Copy + Eq + Hash + Debug>(
        &mut self,
        now: Duration,
        mut memory: Option<&mut Memory<K>>,
    ) -> Vec<(OpId, Ended)> {
        self.wake = self.wake.filter(|wake| *wake > now);
        let arrived = self.lane.arrived(now);
        let mut ended = Vec::with_capacity(arrived.len());
        for (id, began) in arrived {
            let (purpose, request, bytes) = match &mut memory {
                Some(memory) if Lookahead::<()>::owns(id) => {
                    (Purpose::Ahead, usize::MAX, memory.ended(id))
                }
                _ => {
                    let op = self.moving.remove(id.0).expect("it was started");
                    (op.purpose, op.request, op.bytes)
                }
            };
            self.scheduler.ended(id, bytes, now);
            ended.push((id, Ended { purpose, request, place: Place::Tier, bytes, began }));
        }
        ended
    }
}
