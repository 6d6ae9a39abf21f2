//! The layers of one request that are in flight.

use std::collections::VecDeque;

use objstore::{LayerDone, Store, StoreError, Ticket};

use super::rate::Meter;

/// A layer that was issued, or that the store refused.
#[derive(Debug)]
pub(crate) struct Flight {
    layer: u32,
    state: State,
}

#[derive(Debug)]
enum State {
    /// The result is set once it was polled.
    Issued(Ticket, Option<Result<LayerDone, StoreError>>),
    Refused(StoreError),
}

/// Layers in the order they were issued.
#[derive(Debug, Default)]
pub(crate) struct Flights(VecDeque<Flight>);

impl Flights {
    /// Returns the number of layers that were issued and not taken by [`Flights::pop`].
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Records the result of issuing a layer. `meter` must have begun before that.
    pub(crate) fn push(
        &mut self,
        layer: u32,
        issued: Result<Ticket, StoreError>,
        meter: &mut Meter,
    ) {
        let state = match issued {
            Ok(ticket) => State::Issued(ticket, None),
            Err(error) => {
                meter.end(0);
                State::Refused(error)
            }
        };
        self.0.push_back(Flight { layer, state });
    }

    /// Collects completions without blocking, so that other work does not count as transfer time,
    /// and an executor without threads makes progress.
    pub(crate) fn poll(&mut self, store: &mut Store, meter: &mut Meter) {
        for flight in &mut self.0 {
            if let State::Issued(ticket, ended @ None) = &mut flight.state
                && let Some(outcome) = store.poll(ticket).transpose()
            {
                meter.end(bytes(&outcome));
                *ended = Some(outcome);
            }
        }
    }

    /// Takes the oldest layer, or `None` when nothing is in flight.
    pub(crate) fn pop(&mut self) -> Option<Flight> {
        self.0.pop_front()
    }
}

impl Flight {
    /// Returns the layer.
    pub(crate) fn layer(&self) -> u32 {
        self.layer
    }

    /// Returns the ticket for others that wait on it; `None` if it was never in flight.
    pub(crate) fn ticket(&self) -> Option<&Ticket> {
        match &self.state {
            State::Issued(ticket, _) => Some(ticket),
            State::Refused(_) => None,
        }
    }

    /// Waits for completion and returns the result.
    pub(crate) fn wait(
        self,
        store: &mut Store,
        meter: &mut Meter,
    ) -> Result<LayerDone, StoreError> {
        match self.state {
            State::Refused(error) => Err(error),
            State::Issued(_, Some(outcome)) => outcome,
            State::Issued(ticket, None) => {
                let outcome = store.wait(ticket);
                meter.end(bytes(&outcome));
                outcome
            }
        }
    }
}

/// Returns the bytes that a transfer moved without error.
fn bytes(outcome: &Result<LayerDone, StoreError>) -> u64 {
    outcome.as_ref().map_or(0, |done| done.bytes)
}
