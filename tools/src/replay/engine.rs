//! Acts as the serving engine: one request at a time, layer by layer.

use std::collections::HashSet;
use std::sync::Arc;

use anyhow::Context as _;
use objstore::{BlockId, BlockKey, Layer, Prefix, Store, StoreError, StoreEvent, Transfer};
use ripieno_stack::ComputeSaved;

use crate::interrupt::Interrupt;
use crate::model::Shape;
use crate::outcome::ratio;
use crate::plan::Plan;
use crate::pool::{Check, Item, LAYERS_AHEAD, Part, Pool};
use crate::timing;

use super::flight::{Flight, Flights};
use super::rate::Meter;
use super::verify::{Findings, Mismatch, Sampler};

/// Failed transfers after which the replay stops.
const IO_ERRORS_MAX: u64 = 8;

/// Progress of the replay.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Replayed requests.
    pub(crate) requests: u64,
    /// Their trace blocks.
    pub(crate) trace_blocks: u64,
    /// Leading trace blocks of requests for which all store blocks were found.
    pub(crate) trace_blocks_hit: u64,
    /// Store blocks that the store had no room for.
    pub(crate) blocks_left_out: u64,
    /// Store blocks of the final check.
    pub(crate) blocks_checked: u64,
    /// Transfers from devices to the pool.
    pub(crate) retrieve: Meter,
    /// Transfers from the pool to devices.
    pub(crate) store: Meter,
    /// Transfers from devices to the pool in the final check.
    pub(crate) final_check: Meter,
    /// Failed transfers.
    pub(crate) io_errors: u64,
    /// Results of the checks.
    pub(crate) findings: Findings,
}

impl Tally {
    /// Formats a one-line summary.
    pub(crate) fn line(&self) -> String {
        format!(
            "retrieve {:.2} GiB/s, store {:.2} GiB/s, hits {:.1} %",
            self.retrieve.gib_s(),
            self.store.gib_s(),
            100.0 * ratio(self.trace_blocks_hit, self.trace_blocks)
        )
    }
}

/// Use of a window.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// Retrieve, for the request of this number.
    Retrieve(u64),
    /// Retrieve, in the final check.
    Check,
    Store,
}

/// Some blocks of a request and their places in the pool.
struct Window<'a> {
    way: Way,
    /// Index of its first block in the request.
    first: usize,
    keys: &'a [BlockKey],
    blocks: Vec<BlockId>,
}

impl Window<'_> {
    /// Returns the number of the request; `None` in the final check.
    fn request(&self) -> Option<u64> {
        match self.way {
            Way::Retrieve(request) => Some(request),
            Way::Check | Way::Store => None,
        }
    }

    /// Returns the meter for transfers of this window.
    fn meter<'t>(&self, tally: &'t mut Tally) -> &'t mut Meter {
        match self.way {
            Way::Retrieve(_) => &mut tally.retrieve,
            Way::Check => &mut tally.final_check,
            Way::Store => &mut tally.store,
        }
    }
}

/// Parts of the objects of one layer of a window.
#[derive(Debug, Default)]
struct Batch {
    items: Vec<Item>,
    /// Block index in the window and segment of each item.
    objects: Vec<(u32, u32)>,
}

/// A layer to be checked.
struct Announced {
    layer: u32,
    bytes: u64,
    objects: Vec<(u32, u32)>,
    check: Check,
}

/// The engine: a store, a pool and the counters.
#[derive(Debug)]
pub(crate) struct Engine<'a> {
    pub(crate) store: &'a mut Store,
    /// Where hits are counted, if somebody watches.
    pub(crate) saved: Option<Arc<ComputeSaved>>,
    pub(crate) pool: Pool,
    pub(crate) shape: Shape,
    pub(crate) sampler: Sampler,
    pub(crate) interrupt: &'a mut Interrupt,
    pub(crate) tally: Tally,
}

impl Engine<'_> {
    /// Returns true after an interrupt, or when the owner of a device wants it back.
    pub(crate) fn is_interrupted(&mut self) -> bool {
        let requested = self.store.plane().requested_devices();
        self.interrupt.asked() || requested.is_ok_and(|devices| !devices.is_empty())
    }

    /// Returns true when the replay should end: interrupted, or too many failures.
    pub(crate) fn is_over(&mut self) -> bool {
        self.is_interrupted() || self.tally.io_errors >= IO_ERRORS_MAX
    }

    /// Replays one request: looks it up, retrieves the hits, and stores the rest.
    ///
    /// # Errors
    /// Returns an error if the store cannot continue. Failed transfers are only counted.
    pub(crate) fn request(&mut self, index: usize, plan: &Plan) -> anyhow::Result<()> {
        for StoreEvent { device, event } in self.store.plane().poll_events()? {
            tracing::warn!(%device, ?event, "a device reported an event");
        }
        let keys = plan.keys(index);
        let prefix = self.store.lookup(keys).with_context(|| format!("request {index}: lookup"))?;
        let hits = self
            .retrieve(Way::Retrieve(index as u64), 0, keys, &prefix)
            .with_context(|| format!("request {index}: retrieving"))?;
        if let Some(saved) = self.saved.as_ref().filter(|_| hits > 0) {
            let tokens = hits as u32 * self.shape.block_tokens;
            timing::compute(self.shape.model, tokens).inspect(|&time| saved.add(time));
        }
        self.tally.requests += 1;
        self.tally.trace_blocks += (keys.len() / plan.subs) as u64;
        self.tally.trace_blocks_hit += (hits / plan.subs) as u64;
        self.store_rest(keys, hits, prefix).with_context(|| format!("request {index}: storing"))?;
        tracing::debug!(request = index, "all of it that there is room for is permanent");
        Ok(())
    }

    /// Retrieves and checks everything that is still stored, each block once.
    pub(crate) fn check_everything(&mut self, plan: &Plan) -> anyhow::Result<()> {
        let mut seen = HashSet::new();
        for index in 0..plan.requests() {
            if self.is_over() {
                break;
            }
            let keys = plan.keys(index);
            // Keys are chained, so the blocks seen before are always a prefix.
            let start = keys.iter().take_while(|key| seen.contains(*key)).count();
            if start == keys.len() {
                continue;
            }
            let prefix = self.store.lookup(keys).context("the final check: lookup")?;
            let done =
                self.retrieve(Way::Check, start, keys, &prefix).context("the final check")?;
            seen.extend(keys[start..start + done].iter().copied());
            self.tally.blocks_checked += done as u64;
        }
        Ok(())
    }

    /// Retrieves the blocks of `prefix` from `start` on, in windows that fit the pool. Returns the
    /// number of leading blocks that arrived.
    fn retrieve(
        &mut self,
        way: Way,
        start: usize,
        keys: &[BlockKey],
        prefix: &Prefix,
    ) -> anyhow::Result<usize> {
        let mut at = start;
        while at < prefix.len() && (at == start || !self.is_over()) {
            let end = prefix.len().min(at + self.pool.blocks());
            let blocks = self.pool.take(end - at);
            let window = Window { way, first: at, keys: &keys[at..end], blocks };
            if !self.retrieve_window(&window, prefix)? {
                break;
            }
            at = end;
        }
        Ok(at - start)
    }

    fn retrieve_window(&mut self, window: &Window<'_>, prefix: &Prefix) -> anyhow::Result<bool> {
        let load = self.store.retrieve_from(prefix, window.first, &window.blocks)?;
        let failed = self.move_layers(window, &load)?;
        drop(load);
        self.settle(failed)
    }

    /// Moves the layers of a window, several at a time: fills in those to store, and checks those
    /// that were retrieved. Returns the first failure.
    fn move_layers(
        &mut self,
        window: &Window<'_>,
        transfer: &Transfer,
    ) -> anyhow::Result<Option<StoreError>> {
        let is_read = !matches!(window.way, Way::Store);
        let (mut flights, mut failed, mut next) = (Flights::default(), None, 0);
        loop {
            if next < self.shape.layers && failed.is_none() && flights.len() < LAYERS_AHEAD {
                self.prepare(window, next, &mut flights)?;
                window.meter(&mut self.tally).begin();
                let order = self.pool.access().order();
                match self.store.start(transfer, Layer(next), order) {
                    Ok(ticket) => flights.push(next, ticket),
                    Err(error) => {
                        window.meter(&mut self.tally).end(0);
                        failed = Some(error);
                    }
                }
                next += 1;
                continue;
            }
            let Some(flight) = flights.pop() else { return Ok(failed) };
            let check = is_read.then(|| self.announce(window, &flight)).transpose()?;
            match (flight.wait(self.store, window.meter(&mut self.tally)), check) {
                (Ok(_), Some(check)) => self.compare(window, check, &mut flights)?,
                (Ok(_), None) => {}
                (Err(error), _) => {
                    failed.get_or_insert(error);
                }
            }
        }
    }

    /// Fills and stores the blocks from `start` on, as long as there is room.
    fn store_rest(
        &mut self,
        keys: &[BlockKey],
        start: usize,
        mut held: Prefix,
    ) -> anyhow::Result<()> {
        let mut at = start;
        while at < keys.len() && !self.is_over() {
            let end = keys.len().min(at + self.pool.blocks());
            let blocks = self.pool.take(end - at);
            let window = Window { way: Way::Store, first: at, keys: &keys[at..end], blocks };
            let stored = self.store_window(window)?;
            at += stored;
            if at < end {
                self.tally.blocks_left_out += (keys.len() - at) as u64;
                break;
            }
            if at < keys.len() {
                // Pin the request's head so that it is not evicted to make room for its tail.
                held = self.store.lookup(&keys[..at])?;
            }
        }
        drop(held);
        Ok(())
    }

    /// Returns the number of leading blocks of the window that are now stored.
    fn store_window(&mut self, mut window: Window<'_>) -> anyhow::Result<usize> {
        let save = self.store.allocate(window.keys, &window.blocks)?;
        let accepted = save.accepted();
        if accepted == 0 {
            return Ok(0);
        }
        window.blocks.truncate(accepted);
        let failed = match self.move_layers(&window, &save)? {
            None => self.store.commit(save).err(),
            failed => failed,
        };
        Ok(if self.settle(failed)? { accepted } else { 0 })
    }

    /// Counts a failed transfer if the store can continue; returns any other error.
    fn settle(&mut self, failed: Option<StoreError>) -> anyhow::Result<bool> {
        match failed {
            None => Ok(true),
            Some(error @ (StoreError::Transfer { .. } | StoreError::RequestFailed { .. })) => {
                tracing::error!("{error}");
                self.tally.io_errors += 1;
                Ok(false)
            }
            Some(error) => Err(error.into()),
        }
    }

    /// Fills in a layer to store, as the engine's model would. Of one to retrieve, overwrites the
    /// parts that will be checked, so that stale bytes are detected.
    fn prepare(
        &mut self,
        window: &Window<'_>,
        layer: u32,
        flights: &mut Flights,
    ) -> anyhow::Result<()> {
        let whole = (0, self.shape.object_bytes as usize);
        let (is_read, batch) = match window.way {
            Way::Store => (false, self.batch(window, layer, |_, _| [whole])),
            Way::Retrieve(_) | Way::Check => (true, self.sample(window, layer)),
        };
        let poll = &mut || flights.poll(self.store, window.meter(&mut self.tally));
        match is_read {
            true => self.pool.access().poison(&batch.items, poll),
            false => self.pool.access().make(&batch.items, poll),
        }
    }

    /// Announces the check of a layer in flight.
    fn announce(&mut self, window: &Window<'_>, flight: &Flight) -> anyhow::Result<Announced> {
        let layer = flight.layer;
        self.pool.access().join(self.store, &flight.ticket)?;
        let Batch { items, objects } = self.sample(window, layer);
        let bytes = items.iter().map(|item| u64::from(item.len)).sum();
        let check = self.pool.access().check(items)?;
        Ok(Announced { layer, bytes, objects, check })
    }

    /// Checks a layer that has arrived.
    fn compare(
        &mut self,
        window: &Window<'_>,
        announced: Announced,
        flights: &mut Flights,
    ) -> anyhow::Result<()> {
        let Announced { layer, bytes, objects, check } = announced;
        let poll = &mut || flights.poll(self.store, window.meter(&mut self.tally));
        let found = check(poll)?;
        self.tally.findings.bytes += bytes;
        let mut last = None;
        for (item, difference) in found {
            let (index, segment) = objects[item];
            // Report at most one mismatch per object.
            if last.replace((index, segment)) == Some((index, segment)) {
                continue;
            }
            let block = window.first as u64 + u64::from(index);
            let mismatch = Mismatch::new(window.request(), block, (layer, segment), difference);
            self.tally.findings.add(mismatch);
        }
        Ok(())
    }

    /// Returns the parts of a layer to check.
    fn sample(&self, window: &Window<'_>, layer: u32) -> Batch {
        let request = window.request().unwrap_or(u64::MAX);
        self.batch(window, layer, |key, segment| {
            self.sampler.parts(request, key, layer * self.shape.segments + segment)
        })
    }

    /// Returns parts of one layer of the window's blocks.
    fn batch<P: IntoIterator<Item = Part>>(
        &self,
        window: &Window<'_>,
        layer: u32,
        parts: impl Fn(BlockKey, u32) -> P,
    ) -> Batch {
        let mut batch = Batch::default();
        for (index, (&block, &key)) in (0..).zip(window.blocks.iter().zip(window.keys)) {
            for segment in 0..self.shape.segments {
                for part in parts(key, segment) {
                    batch.items.push(self.pool.item(block, key, (layer, segment), part));
                    batch.objects.push((index, segment));
                }
            }
        }
        batch
    }
}
