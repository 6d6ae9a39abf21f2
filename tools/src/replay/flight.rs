//! The layers of one request that are under way.

use std::collections::VecDeque;

use objstore::{LayerDone, Store, StoreError, Ticket};

use crate::replay::rate::Meter;

/// One layer: its number, and what became of it once that is known.
#[derive(Debug)]
struct Flight {
    layer: u32,
    ticket: Option<Ticket>,
    outcome: Option<Result<LayerDone, StoreError>>,
}

/// Layers in the order they were issued.
#[derive(Debug, Default)]
pub(crate) struct Flights(VecDeque<Flight>);

impl Flights {
    /// How many layers were issued and not given back by [`Flights::next`].
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
        let flight = match issued {
            Ok(ticket) => Flight { layer, ticket: Some(ticket), outcome: None },
            Err(error) => {
                meter.end(0);
                Flight { layer, ticket: None, outcome: Some(Err(error)) }
            }
        };
        self.0.push_back(flight);
    }

    /// Notes what has ended, without waiting: so the time of other work is not counted as time of
    /// transfers, and an executor without threads gets its turn.
    pub(crate) fn look(&mut self, store: &mut Store, meter: &mut Meter) {
        for flight in &mut self.0 {
            let Some(ticket) = &flight.ticket else { continue };
            if let Some(outcome) = store.poll(ticket).transpose() {
                flight.end(outcome, meter);
            }
        }
    }

    /// Waits for the oldest layer. `None` when nothing is under way.
    pub(crate) fn next(
        &mut self,
        store: &mut Store,
        meter: &mut Meter,
    ) -> Option<(u32, Result<LayerDone, StoreError>)> {
        let mut flight = self.0.pop_front()?;
        if let Some(ticket) = flight.ticket.take() {
            let outcome = store.wait(ticket);
            flight.end(outcome, meter);
        }
        Some((flight.layer, flight.outcome?))
    }
}

impl Flight {
    fn end(&mut self, outcome: Result<LayerDone, StoreError>, meter: &mut Meter) {
        meter.end(outcome.as_ref().map_or(0, |done| done.bytes));
        self.ticket = None;
        self.outcome = Some(outcome);
    }
}
