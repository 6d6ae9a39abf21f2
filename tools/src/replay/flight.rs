//! The layers of one request that are in flight.

use std::collections::VecDeque;

use objstore::{LayerDone, Store, StoreError, Ticket};

use super::rate::Meter;

/// One layer that was issued, or was to be.
#[derive(Debug)]
pub(crate) struct Flight {
    layer: u32,
    state: State,
}

#[derive(Debug)]
enum State {
    /// With how it ended, once it was polled.
    Issued(Ticket, Option<Result<LayerDone, StoreError>>),
    Refused(StoreError),
}

/// Layers in the order they were issued.
#[derive(Debug, Default)]
pub(crate) struct Flights(VecDeque<Flight>);

impl Flights {
    /// How many layers were issued and not taken by [`Flights::pop`].
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Takes what issuing a layer returned. `meter` has to have begun before that.
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

    /// Notes what has ended, without waiting: so the time of other work is not counted as time of
    /// transfers, and an executor without threads gets its turn.
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

    /// Takes the oldest layer. `None` when nothing is in flight.
    pub(crate) fn pop(&mut self) -> Option<Flight> {
        self.0.pop_front()
    }
}

impl Flight {
    /// Which layer it is.
    pub(crate) fn layer(&self) -> u32 {
        self.layer
    }

    /// What others that wait for it name it by; `None` if it was never in flight.
    pub(crate) fn ticket(&self) -> Option<&Ticket> {
        match &self.state {
            State::Issued(ticket, _) => Some(ticket),
            State::Refused(_) => None,
        }
    }

    /// Waits until it has ended, and says how.
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

/// What a transfer moved without error.
fn bytes(outcome: &Result<LayerDone, StoreError>) -> u64 {
    outcome.as_ref().map_or(0, |done| done.bytes)
}
