//! The tiers below the GPU during a run: their indexes, transfers, and stores.

use std::time::Duration;

use kv_catalog::{BlockKey, ReferenceId, WriteId};
use kv_schedule::{Direction, Kind, StepId};
use kv_tier::HostBlock;

use super::{
    Index, Request, Run, Setup, Work,
    host::Host,
    keys,
    way::{Ended, Moving, Numbered, Purpose, Way},
};
use crate::{
    lane::LaneModel,
    policy::{HostMemory, Loads, Tier},
};

/// Blocks being written to the tier.
#[derive(Debug)]
pub(super) struct Store {
    write: WriteId,
    /// Layers that are not written yet.
    left: u32,
    units: u64,
}

/// Units that a request loads.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Load {
    /// Units from the tier.
    pub(super) tier: u64,
    /// Units from the host memory cache.
    pub(super) host: u64,
}

impl Load {
    pub(super) fn is_none(&self) -> bool {
        self.tier + self.host == 0
    }
}

/// Blocks found, pinned until they are loaded.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) load: Load,
    /// Tokens to load.
    pub(super) tokens: u32,
    held: Option<ReferenceId>,
    blocks: Vec<HostBlock>,
}

/// Numbers of a step's writes to each tier.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stores {
    tier: Option<u64>,
    host: Option<u64>,
    request: usize,
}

#[derive(Debug)]
pub(super) struct Below {
    pub(super) tier: Tier,
    pub(super) index: Index,
    pub(super) way: Way,
    pub(super) host: Option<Host>,
    pub(super) stores: Numbered<Store>,
    layers: u32,
}

/// Returns the fraction of its demand that each of two users of a link gets.
fn shares(wanted: [f64; 2], link: f64) -> [f64; 2] {
    let [one, other] = wanted;
    if one + other <= link {
        return [1.0; 2];
    }
    let of = |wanted: f64, other: f64| {
        let has = (link - other.min(link / 2.0)).min(wanted);
        if wanted > 0.0 { has / wanted } else { 1.0 }
    };
    [of(one, other), of(other, one)]
}

impl Below {
    pub(super) fn new(setup: &Setup, tier: Tier, host: Option<&HostMemory>) -> Self {
        let unit_layer_bytes = setup.model.token_layer_bytes() * u64::from(tier.unit_tokens);
        let layers = setup.model.layers;
        let Tier { lane, schedule, objects, capacity, eviction, .. } = tier;
        Self {
            tier,
            index: Index::new(capacity, unit_layer_bytes * u64::from(layers), eviction),
            way: Way::new(lane, schedule, unit_layer_bytes, objects),
            host: host.map(|host| Host::new(host, &lane, unit_layer_bytes, layers)),
            stores: Numbered::new(),
            layers,
        }
    }

    /// Returns the keys of a prompt's units: each is the key of the unit's last block.
    pub(super) fn units(&self, request: &Request, block_tokens: u32) -> Vec<BlockKey> {
        let each = (self.tier.unit_tokens / block_tokens).max(1) as usize;
        keys(request.blocks.chunks_exact(each).map(|unit| unit[each - 1]))
    }

    pub(super) fn units_of(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.tier.unit_tokens))
    }

    pub(super) fn next_event(&self) -> Option<Duration> {
        let link = self.host.as_ref().and_then(|host| host.link.next_event());
        self.way.next_event().into_iter().chain(link).min()
    }

    /// Starts all operations that may start.
    pub(super) fn pump(&mut self, now: Duration) {
        let Some(host) = &mut self.host else { return self.way.pump(now, None) };
        self.way.pump(now, Some(&mut host.memory));
        host.link.pump(now, None);
        self.share_link();
    }

    /// Shares the GPU's link between loads from the drives and copies from host memory, and its
    /// other direction between stores of both. Each gets its demand, or half of the link plus the
    /// other's unused share.
    fn share_link(&mut self) {
        let Some(host) = &mut self.host else { return };
        let LaneModel { read, write, .. } = host.lane;
        let directions = [(Direction::Read, read), (Direction::Write, write)];
        let [reads, writes] = directions.map(|(direction, link)| {
            let wanted = [self.way.wanted(direction), host.link.wanted(direction)];
            shares(wanted, link)
        });
        self.way.limit([reads[0], writes[0]]);
        host.link.limit([reads[1], writes[1]]);
    }

    /// Returns the number of leading units found in the drives, and in both tiers together.
    pub(super) fn find(&self, units: &[BlockKey]) -> [usize; 2] {
        let tier = self.index.find(units);
        [tier, tier + self.host.as_ref().map_or(0, |host| host.find(&units[tier..]))]
    }

    /// Pins the units that a request loads beyond the `in_hbm` tokens on the GPU, up to `most`
    /// tokens.
    pub(super) fn take(&mut self, units: &[BlockKey], in_hbm: u32, most: u32) -> Found {
        let [in_tier, all] = self.find(units);
        let tokens = (all as u32 * self.tier.unit_tokens).min(most).saturating_sub(in_hbm);
        if tokens == 0 {
            return Found::default();
        }
        let held = (in_tier > 0).then(|| self.index.hold(&units[..in_tier]));
        let count = self.units_of(tokens);
        let first = (in_hbm / self.tier.unit_tokens) as usize;
        let wanted = &units[first..(first + count as usize).min(units.len())];
        let blocks = self.host.as_mut().map_or_else(Vec::new, |host| host.take(wanted));
        let host = blocks.len() as u64;
        Found { load: Load { tier: count - host, host }, tokens, held, blocks }
    }

    /// Unpins found blocks after they are loaded or no longer wanted.
    pub(super) fn release(&mut self, found: &mut Found) {
        if let Some(held) = found.held.take() {
            self.index.release(held);
        }
        if let Some(host) = &mut self.host {
            host.release(std::mem::take(&mut found.blocks));
        }
    }

    /// Loads all units for a request outside of steps. Returns the number of operations.
    pub(super) fn load_whole(&mut self, load: Load, request: usize, now: Duration) -> u32 {
        let add = |way: &mut Way, units: u64| {
            units > 0 && way.add(Purpose::Whole, Kind::Soon, request, (units, self.layers), now)
        };
        let link = self.host.as_mut().is_some_and(|host| add(&mut host.link, load.host));
        u32::from(add(&mut self.way, load.tier)) + u32::from(link)
    }

    /// Returns the bytes of a load.
    pub(super) fn bytes(&self, load: Load) -> u64 {
        (load.tier + load.host) * u64::from(self.layers) * self.way.unit_layer_bytes
    }

    /// Cancels the pending operations of [`Self::load_whole`]. Returns their number and bytes.
    /// Operations that have started complete as usual.
    pub(super) fn cancel_whole(&mut self, request: usize) -> (u32, u64) {
        let link = self.host.as_mut().map(|host| &mut host.link);
        let ways = [Some(&mut self.way), link].into_iter().flatten();
        let cancelled = ways.flat_map(|way| way.cancel_whole(request));
        cancelled.fold((0, 0), |(count, sum), bytes| (count + 1, sum + bytes))
    }

    /// Adds the loads of a step; counts the pending loads of each layer in `missing`.
    pub(super) fn load_step(
        &mut self,
        load: Load,
        step: StepId,
        request: usize,
        missing: &mut [u32],
        now: Duration,
    ) {
        if self.tier.loads == Loads::Step {
            let kind = Kind::Layer { step, layer: 0 };
            let size = (load.tier, self.layers);
            self.way.add(Purpose::Layer(0), kind, request, size, now);
            missing[0] += 1;
            return;
        }
        for (layer, missing) in (0..).zip(missing) {
            let kind = Kind::Layer { step, layer };
            *missing += self.way.add_layer(kind, layer, request, load.tier, now);
            if let Some(host) = &mut self.host {
                *missing += host.link.add_layer(kind, layer, request, load.host, now);
            }
        }
    }

    /// Reserves room for the new units among those that are full after a step; the first `offered`
    /// of them were offered to host memory before. Returns `None` if no unit is new.
    pub(super) fn begin_store(
        &mut self,
        units: &[BlockKey],
        offered: usize,
        request: usize,
    ) -> Option<Stores> {
        let (write, _, own) = self.index.begin(units);
        let tier = if own > 0 {
            let store = Store { write, left: self.layers, units: own as u64 };
            Some(self.stores.push(store))
        } else {
            self.index.abort(write);
            None
        };
        let layers = self.layers;
        let fill = |host: &mut Host| host.begin_fill(&units[offered.min(units.len())..], layers);
        let host = self.host.as_mut().and_then(fill);
        (tier.is_some() || host.is_some()).then_some(Stores { tier, host, request })
    }

    /// Stores a computed layer. Returns the number of blocks dropped because of it.
    pub(super) fn store(&mut self, stores: Stores, layer: u32, now: Duration) -> u64 {
        if let (Some(number), Some(host)) = (stores.host, &mut self.host) {
            host.fill(number, layer, stores.request, now);
        }
        let Some(number) = stores.tier else { return 0 };
        // Absent if an earlier layer of it was dropped.
        let Some(store) = self.stores.get_mut(number) else { return 0 };
        let (write, units) = (store.write, store.units);
        let purpose = Purpose::Store { number, layer };
        if self.way.add(purpose, Kind::Write, stores.request, (units, 1), now) {
            return 0;
        }
        // Layers in flight are wasted.
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
        let mut host = below.host.as_mut();
        let ended = below.way.ended(self.now, host.as_mut().map(|host| &mut host.memory));
        let linked = host.map_or_else(Vec::new, |host| host.link.ended(self.now, None));
        for ended in ended {
            match ended {
                Ended::Ahead(bytes) => {
                    self.report.read_bytes += bytes;
                    self.report.ahead_bytes += bytes;
                    self.record.second(self.now).read_bytes += bytes;
                }
                Ended::Op(moved, began) => self.moved(moved, began, false),
            }
        }
        for ended in linked {
            if let Ended::Op(moved, began) = ended {
                self.moved(moved, began, true);
            }
        }
    }

    /// Accounts for a completed operation of host memory or of the tier.
    fn moved(&mut self, moved: Moving, began: Duration, is_host: bool) {
        let Moving { purpose, request, direction, bytes, .. } = moved;
        let second = self.record.second(self.now);
        let (all, part) = match (is_host, direction) {
            (false, Direction::Read) => (&mut self.report.read_bytes, &mut second.read_bytes),
            (false, Direction::Write) => (&mut self.report.write_bytes, &mut second.write_bytes),
            (true, Direction::Read) => {
                (&mut self.report.host_read_bytes, &mut second.host_read_bytes)
            }
            (true, Direction::Write) => {
                (&mut self.report.host_write_bytes, &mut second.host_write_bytes)
            }
        };
        *all += bytes;
        *part += bytes;
        let below = self.below.as_mut().expect("something moved");
        let (work, layer) = match purpose {
            Purpose::Layer(layer) => {
                self.step.as_mut().expect("a step waits for its loads").loaded(layer);
                (Work::Read, layer)
            }
            Purpose::Whole => {
                let mut active = self.active.iter_mut();
                let active = active.find(|active| active.request == request);
                active.expect("it waits for its loads").loading -= 1;
                (Work::Read, 0)
            }
            Purpose::Store { number, layer } => {
                match &mut below.host {
                    Some(host) if is_host => host.filled(number),
                    _ => below.stored(number),
                }
                (Work::Write, layer)
            }
        };
        if self.record.is_watched(request) {
            self.record.span(work, layer, began, self.now);
        }
    }
}
