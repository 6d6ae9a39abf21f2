//! The model of the tiers below the GPU: their indexes, transfers, and stores.

use std::{convert::Infallible, mem::take, time::Duration};

use kv_catalog::{BlockKey, ReferenceId, WriteId};
use kv_schedule::{Direction, Kind, StepId, StepShape};
use kv_tier::{HostBlock, RequestId};

use super::{
    Index, Request, Setup,
    host::Host,
    keys,
    link::Link,
    memory::Memory,
    numbered::Numbered,
    peers::Peers,
    tiers::{Ended, Hit, Place, Purpose, Tiers},
};
use crate::{
    lane::LaneModel,
    policy::{HostMemory, Loads, Path, Tier},
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
struct Load {
    /// Units from the tier.
    tier: u64,
    /// Units from the host memory cache.
    host: u64,
    /// Units from another engine.
    peer: u64,
}

/// State of a request.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// Keys of its prompt's units.
    units: Vec<BlockKey>,
    /// Loads of its first step.
    to_load: Load,
    /// Units to load, pinned.
    pinned: Option<ReferenceId>,
    blocks: Vec<HostBlock>,
    /// Number of units that were offered to host memory.
    offered: usize,
}

/// Numbers of a step's writes to each tier.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stores {
    tier: Option<u64>,
    host: Option<u64>,
    request: usize,
}

#[derive(Debug)]
pub(super) struct ModelTiers {
    pub(super) tier: Tier,
    pub(super) index: Index,
    /// The link between the tier and the GPU.
    pub(super) link: Link,
    pub(super) host: Option<Host>,
    /// Other engines, to fetch from.
    pub(super) peers: Option<Peers>,
    pub(super) stores: Numbered<Store>,
    layers: u32,
    block_tokens: u32,
    now: Duration,
}

/// No prefetches over a link.
pub(crate) const ALONE: Option<&mut Memory<BlockKey>> = None;

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

impl ModelTiers {
    pub(super) fn new(setup: &Setup, tier: Tier, host: Option<&HostMemory>) -> Self {
        let unit_layer_bytes = setup.model.token_layer_bytes() * u64::from(tier.unit_tokens);
        let layers = setup.model.layers;
        let Tier { path, schedule, objects, eviction, .. } = tier;
        let (lane, capacity) = (setup.storage.lane(path), setup.storage.capacity(path));
        let table = setup.known.cloned().unwrap_or_else(|| lane.table());
        Self {
            tier,
            index: Index::new(capacity, unit_layer_bytes * u64::from(layers), eviction),
            link: Link::new(lane, (schedule, table), unit_layer_bytes, objects),
            host: host.map(|host| Host::new(host, setup, &lane, unit_layer_bytes, layers)),
            peers: None,
            stores: Numbered::new(),
            layers,
            block_tokens: setup.block_tokens,
            now: Duration::ZERO,
        }
    }

    /// Returns `fresh`, with what this tier has if it outlives the engine.
    pub(super) fn restarted(self, fresh: Self) -> Self {
        if fresh.tier.path == Path::Host { fresh } else { Self { index: self.index, ..fresh } }
    }

    /// Returns the bytes that were prefetched to host memory for nothing.
    pub(super) fn wasted_bytes(&self) -> u64 {
        self.host.as_ref().map_or(0, |host| host.memory.tier.counts().wasted_bytes)
    }

    /// Returns the keys of a prompt's units: each is the key of the unit's last block.
    pub(super) fn units(&self, request: &Request) -> Vec<BlockKey> {
        let each = (self.tier.unit_tokens / self.block_tokens).max(1) as usize;
        keys(request.blocks.chunks_exact(each).map(|unit| unit[each - 1]))
    }

    fn units_of(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.tier.unit_tokens))
    }

    /// Returns the tier's link and host memory's.
    fn links(&mut self) -> impl Iterator<Item = &mut Link> {
        let host = self.host.as_mut().map(|host| &mut host.link);
        [Some(&mut self.link), host].into_iter().flatten()
    }

    /// Shares the GPU's link between loads from the drives and copies from host memory, and its
    /// other direction between stores of both. Each gets its demand, or half of the link plus the
    /// other's unused share.
    fn share_link(&mut self) {
        let Some(host) = &mut self.host else { return };
        let LaneModel { read, write, .. } = host.lane;
        let directions = [(Direction::Read, read), (Direction::Write, write)];
        let [reads, writes] = directions.map(|(direction, link)| {
            let wanted = [self.link.wanted(direction), host.link.wanted(direction)];
            shares(wanted, link)
        });
        self.link.limit([reads[0], writes[0]]);
        host.link.limit([reads[1], writes[1]]);
    }

    /// Returns the number of leading units found in the drives, and in both tiers together.
    fn find(&self, units: &[BlockKey]) -> [usize; 2] {
        let tier = self.index.find(units);
        [tier, tier + self.host.as_ref().map_or(0, |host| host.find(&units[tier..]))]
    }

    /// Pins the units that a request loads beyond the `in_hbm` tokens on the GPU, up to `most`
    /// tokens. Returns the number of those tokens.
    fn pin(&mut self, held: &mut Held, in_hbm: u32, most: u32) -> u32 {
        let units = &held.units;
        let [in_tier, all] = self.find(units);
        let first = (in_hbm / self.tier.unit_tokens) as usize;
        let peer = self.fetch(units, all.max(first), most);
        let end = if peer > 0 { all.max(first) + peer as usize } else { all };
        let tokens = (end as u32 * self.tier.unit_tokens).min(most).saturating_sub(in_hbm);
        if tokens == 0 {
            return 0;
        }
        held.pinned = (in_tier > 0).then(|| self.index.hold(&units[..in_tier]));
        let count = self.units_of(tokens) - peer;
        let wanted = &units[first..(first + count as usize).min(units.len())];
        held.blocks = self.host.as_mut().map_or_else(Vec::new, |host| host.take(wanted));
        let host = held.blocks.len() as u64;
        held.to_load = Load { tier: count - host, host, peer };
        tokens
    }

    /// Returns how many units after the first `there`, within `most` tokens, are fetched from
    /// another engine: by the scheduler's table, computing them takes longer.
    fn fetch(&mut self, units: &[BlockKey], there: usize, most: u32) -> u64 {
        let Some(peers) = &mut self.peers else { return 0 };
        let each = self.tier.unit_tokens;
        let end = units.len().min((most / each) as usize);
        let Some(missing) = units.get(there..end) else { return 0 };
        let (table, layers) = (self.link.scheduler.table(), self.layers);
        let computes = |count: u64| {
            let shape = StepShape::of([(count as u32 * each, there as u32 * each)]);
            table.layer(shape).map(|layer| layer * layers)
        };
        let unit_bytes = self.link.unit_layer_bytes * u64::from(layers);
        peers.fetch(missing, unit_bytes, computes, self.now)
    }

    /// Loads all units for a request outside of steps. Returns the number of operations.
    fn load_whole(&mut self, load: Load, request: usize) -> u32 {
        let add = |link: &mut Link, units: u64| {
            units > 0
                && link.add(Purpose::Whole, Kind::Soon, request, (units, self.layers), self.now)
        };
        let host = self.host.as_mut().is_some_and(|host| add(&mut host.link, load.host));
        let peer = self.peers.as_mut().is_some_and(|peers| add(&mut peers.link, load.peer));
        u32::from(add(&mut self.link, load.tier)) + u32::from(host) + u32::from(peer)
    }

    /// Returns the bytes of a load.
    fn bytes(&self, load: Load) -> u64 {
        (load.tier + load.host + load.peer) * u64::from(self.layers) * self.link.unit_layer_bytes
    }

    /// Stores a computed layer. Returns the number of blocks dropped because of it.
    fn store(&mut self, stores: Stores, layer: u32) -> u64 {
        if let (Some(number), Some(host)) = (stores.host, &mut self.host) {
            host.fill(number, layer, stores.request, self.now);
        }
        let Some(number) = stores.tier else { return 0 };
        // Absent if an earlier layer of it was dropped.
        let Some(store) = self.stores.get_mut(number) else { return 0 };
        let (write, units) = (store.write, store.units);
        let purpose = Purpose::Store { number, layer };
        if self.link.add(purpose, Kind::Write, stores.request, (units, 1), self.now) {
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

impl Tiers for ModelTiers {
    type Held = Held;
    type Store = Stores;
    type Error = Infallible;

    /// Contexts grow, and steps get slower.
    const EQUAL_STEPS: u32 = 64;

    fn has_room(&self, _number: usize, _request: &Request) -> bool {
        true
    }

    fn begin(
        &mut self,
        number: usize,
        request: &Request,
        in_hbm: u32,
        most: u32,
    ) -> Result<Hit<Held>, Infallible> {
        let mut held = Held { units: self.units(request), ..Held::default() };
        if let Some(host) = &mut self.host {
            let id = RequestId(number as u64);
            let _ = host.memory.run(id, &mut self.link.scheduler, &mut host.link.scheduler);
        }
        let tokens = self.pin(&mut held, in_hbm, most);
        let Load { host, peer, .. } = held.to_load;
        let [host_tokens, peer_tokens] =
            [host, peer].map(|units| (units as u32 * self.tier.unit_tokens).min(tokens));
        let load = match self.tier.loads {
            Loads::Whole => take(&mut held.to_load),
            Loads::Layers | Loads::Step => {
                Load { peer: take(&mut held.to_load.peer), ..Load::default() }
            }
        };
        let (loading, loading_bytes) = (self.load_whole(load, number), self.bytes(load));
        Ok(Hit { tokens, host_tokens, peer_tokens, loading, loading_bytes, held })
    }

    fn loaded(&mut self, held: &mut Held) {
        if let Some(pinned) = held.pinned.take() {
            self.index.release(pinned);
        }
        if let Some(host) = &mut self.host {
            host.release(take(&mut held.blocks));
        }
    }

    fn end(&mut self, _number: usize, mut held: Held) {
        self.loaded(&mut held);
    }

    fn cancel(&mut self, number: usize) -> (u32, u64) {
        let cancelled = self.links().flat_map(|link| link.cancel_whole(number));
        cancelled.fold((0, 0), |(count, sum), bytes| (count + 1, sum + bytes))
    }

    fn cancel_ahead(&mut self, number: usize) -> Result<(), Infallible> {
        if let Some(host) = &mut self.host {
            let id = RequestId(number as u64);
            host.memory.cancel(id, &mut self.link.scheduler, &mut host.link.scheduler);
        }
        Ok(())
    }

    fn steps_ahead(&self) -> Option<u32> {
        self.host.as_ref()?.steps_ahead
    }

    fn announce(
        &mut self,
        number: usize,
        request: &Request,
        in_hbm: u32,
        when: (Duration, u32),
    ) -> Result<u32, Infallible> {
        let units = self.units(request);
        let [in_tier, all] = self.find(&units);
        let first = (in_hbm / self.tier.unit_tokens) as usize;
        if let Some(host) = &mut self.host
            && first < in_tier
        {
            host.announce(number, &units[first..in_tier], when, self.now);
        }
        Ok(all as u32 * self.tier.unit_tokens)
    }

    fn plan_ahead(&mut self) {
        if let Some(host) = &mut self.host {
            let Host { memory, link, .. } = host;
            memory.plan(&mut self.link.scheduler, &mut link.scheduler, self.now);
        }
    }

    fn step_begins(&mut self, step: StepId, shape: StepShape, _layer: Duration) {
        let now = self.now;
        self.links().for_each(|it| it.scheduler.announce(step, shape, now));
    }

    fn load(
        &mut self,
        held: &mut Held,
        number: usize,
        step: StepId,
        missing: &mut [u32],
    ) -> Result<u64, Infallible> {
        let load = take(&mut held.to_load);
        if load.tier + load.host == 0 {
            return Ok(0);
        }
        if self.tier.loads == Loads::Step {
            let kind = Kind::Layer { step, layer: 0 };
            let size = (load.tier, self.layers);
            self.link.add(Purpose::Layer(0), kind, number, size, self.now);
            missing[0] += 1;
            return Ok(self.bytes(load));
        }
        for (layer, missing) in (0..).zip(missing) {
            let kind = Kind::Layer { step, layer };
            *missing += self.link.add_layer(kind, layer, number, load.tier, self.now);
            if let Some(host) = &mut self.host {
                *missing += host.link.add_layer(kind, layer, number, load.host, self.now);
            }
        }
        Ok(self.bytes(load))
    }

    fn begin_store(
        &mut self,
        held: &mut Held,
        number: usize,
        tokens: u32,
    ) -> Result<Option<Stores>, Infallible> {
        let full = (tokens / self.tier.unit_tokens) as usize;
        let units = &held.units[..full.min(held.units.len())];
        let offered = std::mem::replace(&mut held.offered, units.len());
        if units.is_empty() {
            return Ok(None);
        }
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
        let any = tier.is_some() || host.is_some();
        Ok(any.then_some(Stores { tier, host, request: number }))
    }

    fn layer_begins(&mut self, step: StepId, layer: u32, _waited: Duration, _takes: Duration) {
        let now = self.now;
        self.links().for_each(|it| it.scheduler.layer_begins(step, layer, now));
    }

    fn layer_ends(
        &mut self,
        step: StepId,
        layer: u32,
        stores: &[Stores],
    ) -> Result<u64, Infallible> {
        let now = self.now;
        self.links().for_each(|it| it.scheduler.layer_ends(step, now));
        Ok(stores.iter().map(|stores| self.store(*stores, layer)).sum())
    }

    /// A step that is computed at once stands for several: the scheduler learns nothing from it.
    fn step_ends(&mut self, step: StepId, took: Duration, _first: Option<Duration>) {
        self.links().for_each(|it| it.scheduler.step_ends(step));
        if let Some(host) = &mut self.host {
            host.iteration(took);
        }
    }

    fn ended(&mut self) -> Result<Vec<Ended>, Infallible> {
        let mut host = self.host.as_mut();
        let mut ended = self.link.ended(self.now, host.as_mut().map(|host| &mut host.memory));
        let others = [
            (Place::Host, host.map(|host| &mut host.link)),
            (Place::Peer, self.peers.as_mut().map(|peers| &mut peers.link)),
        ];
        for (place, link) in others {
            let moved = link.map_or_else(Vec::new, |link| link.ended(self.now, ALONE));
            ended.extend(moved.into_iter().map(|(id, it)| (id, Ended { place, ..it })));
        }
        for (_, Ended { purpose, place, .. }) in &ended {
            let Purpose::Store { number, .. } = *purpose else { continue };
            match &mut self.host {
                Some(host) if *place == Place::Host => host.filled(number),
                _ => self.stored(number),
            }
        }
        Ok(ended.into_iter().map(|(_, ended)| ended).collect())
    }

    fn pump(&mut self) -> Result<(), Infallible> {
        self.link.pump(self.now, self.host.as_mut().map(|host| &mut host.memory));
        let host = self.host.as_mut().map(|host| &mut host.link);
        let peers = self.peers.as_mut().map(|peers| &mut peers.link);
        [host, peers].into_iter().flatten().for_each(|link| link.pump(self.now, ALONE));
        self.share_link();
        Ok(())
    }

    fn wait(&mut self, until: Option<Duration>) -> Option<Duration> {
        let host = self.host.as_ref().map(|host| &host.link);
        let peers = self.peers.as_ref().map(|peers| &peers.link);
        let links = [Some(&self.link), host, peers].into_iter().flatten();
        let next = links.filter_map(Link::next_event).chain(until).min()?;
        self.now = self.now.max(next);
        Some(self.now)
    }
}
