//! The layers of one request that are in flight.

use std::collections::VecDeque;

use objstore::{LayerDone, Store, StoreError, Ticket};

use super::rate::Meter;

/// A layer that was started.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) layer: u32,
    pub(crate) ticket: Ticket,
    /// Set once it was polled.
    ended: Option<Result<LayerDone, StoreError>>,
}

/// Layers in the order in which they were started.
#[derive(Debug, Default)]
pub(crate) struct Flights(VecDeque<Flight>);

impl Flights {
    /// Returns the number of layers that were started and not taken by [`Flights::pop`].
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Adds a layer. Its meter must have begun before it was started.
    pub(crate) fn push(&mut self, layer: u32, ticket: Ticket) {
        self.0.push_back(Flight { layer, ticket, ended: None });
    }

    /// Collects completions without blocking, so that other work does not count as transfer time,
    /// and an executor without threads makes progress.
    pub(crate) fn poll(&mut self, store: &mut Store, meter: &mut Meter) {
        for flight in self.0.iter_mut().filter(|flight| flight.ended.is_none()) {
            flight.ended = store.poll(&flight.ticket).transpose();
            flight.ended.iter().for_each(|outcome| meter.end(bytes(outcome)));
        }
    }

    /// Takes the oldest layer, or `None` when nothing is in flight.
    pub(crate) fn pop(&mut self) -> Option<Flight> {
        self.0.pop_front()
    }
}

impl Flight {
    /// Waits for completion and returns the result.
    pub(crate) fn wait(
        self,
        store: &mut Store,
        meter: &mut Meter,
    ) -> Result<LayerDone, StoreError> {
        self.ended.unwrap_or_else(|| {
            let outcome = store.wait(self.ticket);
            meter.end(bytes(&outcome));
            outcome
        })
    }
}

/// Returns the bytes that a transfer moved without error.
fn bytes(outcome: &Result<LayerDone, StoreError>) -> u64 {
    outcome.as_ref().map_or(0, |done| done.bytes)
}
