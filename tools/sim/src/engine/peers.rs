//! Other engines of a cluster: the directory of their blocks, and the link to them.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    rc::Rc,
    time::Duration,
};

use kv_catalog::BlockKey;

use super::{Setup, link::Link};
use crate::{
    lane::LaneModel,
    policy::{REMOTE, Tier},
};

/// By block: the engines that have it on the GPU, and in the tier; a bit for each.
type Places = HashMap<BlockKey, [u64; 2]>;

/// A block that an engine stored or dropped, on the GPU (0) or in the tier (1).
#[derive(Debug)]
struct Event {
    at: Duration,
    engine: usize,
    place: usize,
    key: BlockKey,
    is_stored: bool,
}

/// Blocks of all engines, from their events, which come with a delay.
#[derive(Debug, Default)]
pub(super) struct Directory {
    delay: Duration,
    /// Contents as of `delay` ago.
    known: Places,
    /// Contents now: the answers of engines that are asked.
    pub(super) contents: Places,
    /// Events that have not come yet, oldest first.
    coming: VecDeque<Event>,
    pub(super) counts: PeerCounts,
}

/// Blocks that were asked for, and bytes that were sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PeerCounts {
    /// Blocks in the directory which their engine had dropped.
    pub(crate) late: u64,
    /// Blocks that were computed: fetching them takes longer, or nobody knows.
    pub(crate) computed: u64,
    /// Bytes that each engine sent.
    pub(crate) sent: Vec<u64>,
}

fn apply(places: &mut Places, event: &Event) {
    let engines = places.entry(event.key).or_default();
    let (found, bit) = (&mut engines[event.place], 1 << event.engine);
    *found = if event.is_stored { *found | bit } else { *found & !bit };
    if *engines == [0; 2] {
        places.remove(&event.key);
    }
}

/// Returns how many leading blocks one of `engines` has, and those that have so many.
fn leading(
    places: &Places,
    of: fn([u64; 2]) -> u64,
    mut engines: u64,
    keys: &[BlockKey],
) -> (usize, u64) {
    for (count, key) in keys.iter().enumerate() {
        match engines & places.get(key).map_or(0, |found| of(*found)) {
            0 => return (count, engines),
            some => engines = some,
        }
    }
    (keys.len(), engines)
}

impl Directory {
    pub(super) fn new(delay: Duration, engines: usize) -> Self {
        let counts = PeerCounts { sent: vec![0; engines], ..PeerCounts::default() };
        Self { delay, counts, ..Self::default() }
    }

    /// Adds what an engine stored (true) and dropped until the time `at`, on the GPU and in the
    /// tier.
    pub(super) fn publish(
        &mut self,
        at: Duration,
        engine: usize,
        changes: [Vec<(BlockKey, bool)>; 2],
    ) {
        for (place, changes) in changes.into_iter().enumerate() {
            for (key, is_stored) in changes {
                let event = Event { at, engine, place, key, is_stored };
                apply(&mut self.contents, &event);
                self.coming.push_back(event);
            }
        }
    }

    fn advance(&mut self, now: Duration) {
        while let Some(event) = self.coming.front()
            && event.at + self.delay <= now
        {
            apply(&mut self.known, event);
            self.coming.pop_front();
        }
    }

    /// Returns how many leading blocks an engine has by the directory: on the GPU, and there or in
    /// the tier.
    pub(super) fn known(&mut self, now: Duration, engine: usize, keys: &[BlockKey]) -> [usize; 2] {
        self.advance(now);
        let of: [fn([u64; 2]) -> u64; 2] = [|[gpu, _]| gpu, |[gpu, tier]| gpu | tier];
        of.map(|of| leading(&self.known, of, 1 << engine, keys).0)
    }

    /// Asks the engine that has most leading blocks in its tier by the directory; of several the
    /// next one after `me`. Returns it, and how many it has.
    fn ask(&mut self, now: Duration, me: usize, keys: &[BlockKey]) -> (usize, usize) {
        self.advance(now);
        let (named, engines) = leading(&self.known, |[_, tier]| tier, !(1 << me), keys);
        let peer = (engines.rotate_right(me as u32).trailing_zeros() as usize + me) % 64;
        let (there, _) = leading(&self.contents, |[_, tier]| tier, 1 << peer, &keys[..named]);
        self.counts.late += (named - there) as u64;
        (peer, there)
    }
}

/// The other engines, as one of them sees them.
#[derive(Debug)]
pub(super) struct Peers {
    directory: Rc<RefCell<Directory>>,
    /// Number of this engine.
    me: usize,
    pub(super) link: Link,
    /// End of the fetches that were begun.
    busy_until: Duration,
}

impl Peers {
    /// A chunk of LMCache is one message for all layers. Bytes come no faster than tiers are read.
    pub(super) fn new(
        directory: Rc<RefCell<Directory>>,
        me: usize,
        setup: &Setup<'_>,
        tier: &Tier,
        lane: LaneModel,
    ) -> Self {
        let units = (REMOTE.unit_tokens / tier.unit_tokens).max(1);
        let read = lane.read.min(setup.storage.lane(tier.path).read);
        let lane = LaneModel { read, ..lane.by_messages(setup.model.layers * units) };
        let unit_layer_bytes = setup.model.token_layer_bytes() * u64::from(tier.unit_tokens);
        let link = Link::new(lane, (REMOTE.schedule, lane.table()), unit_layer_bytes, 1);
        Self { directory, me, link, busy_until: Duration::ZERO }
    }

    /// Decides how many leading ones of `keys`, of `unit_bytes` each, are fetched: all that an
    /// engine has, if by the table of the link's scheduler they come before they would be computed.
    /// That takes `computes` by their number; `None` if nobody knows, and nothing is fetched.
    pub(super) fn fetch(
        &mut self,
        keys: &[BlockKey],
        unit_bytes: u64,
        computes: impl Fn(u64) -> Option<Duration>,
        now: Duration,
    ) -> u64 {
        let mut directory = self.directory.borrow_mut();
        let (peer, there) = directory.ask(now, self.me, keys);
        if there == 0 {
            return 0;
        }
        let (units, bytes) = (there as u64, there as u64 * unit_bytes);
        let takes = self.link.scheduler.table().costs.read.duration(bytes);
        let ends = self.busy_until.max(now) + takes;
        if computes(units).is_none_or(|computes| now + computes <= ends) {
            directory.counts.computed += units;
            return 0;
        }
        self.busy_until = ends;
        directory.counts.sent[peer] += bytes;
        units
    }
}
