//! Pins: blocks that nothing evicts until a time.
//!
//! A pin is an in-memory reference, like a reader's, and not journaled: it ends with the process,
//! and none is left behind without an end.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::{Catalog, CatalogConfig, CatalogError, ReferenceId};
use crate::{ids::NamespaceId, key::BlockKey};

/// Pins at a time.
pub const PINS_MAX: usize = 4096;

/// Limits of all pins together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinLimits {
    /// Bytes on the devices; `None`: half of the store.
    pub bytes: Option<u64>,
    /// Time after which a pin ends, at most.
    pub ttl: Duration,
}

impl Default for PinLimits {
    fn default() -> Self {
        Self { bytes: None, ttl: Duration::from_secs(24 * 60 * 60) }
    }
}

/// A pin to be made.
#[derive(Debug, Clone, Copy)]
pub struct NewPin<'a> {
    /// A number that [`Catalog::end_pins`] can name, for pins that end together.
    pub owner: u64,
    /// One or more: a block is pinned in all of them, or not at all.
    pub namespaces: &'a [NamespaceId],
    /// Keys, of which the leading ones that are stored are pinned.
    pub keys: &'a [BlockKey],
    /// Time until the pin ends.
    pub ttl: Duration,
    /// Bytes on the devices, at most.
    pub bytes_max: Option<u64>,
    /// True if keys that are not stored yet are to be pinned when they are.
    pub wait: bool,
}

/// Result of a hint, or of a request to pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// All of it was done.
    Accepted,
    /// A part was done: fewer blocks, or for a shorter time.
    Clipped,
    /// The rest is done when the blocks are stored.
    Deferred,
    /// Nothing was done: a limit, or something that is not there to be asked for.
    Rejected,
    /// Nothing was done: there is nothing of that name.
    Missing,
}

impl Outcome {
    /// Returns the word for it, as in JSON.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Clipped => "clipped",
            Self::Deferred => "deferred",
            Self::Rejected => "rejected",
            Self::Missing => "missing",
        }
    }
}

/// Answer to a request to pin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinAnswer {
    /// Result.
    pub outcome: Outcome,
    /// The reason of it, unless all was done.
    pub reason: Option<String>,
    /// The pin, if there is one.
    pub pin: Option<PinStatus>,
}

/// A pin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinStatus {
    /// Its number.
    pub pin: u64,
    /// Number of the namespace in the store; the first one, if it has several.
    pub namespace: u32,
    /// Blocks that are pinned.
    pub blocks: u64,
    /// Blocks that are pinned when they are stored.
    pub awaited_blocks: u64,
    /// Bytes on the devices that count against the limit: of all these blocks.
    pub bytes: u64,
    /// Seconds until it ends, rounded up.
    pub ends_in_s: u64,
}

/// All pins.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinList {
    /// The pins, oldest first.
    pub pins: Vec<PinStatus>,
    /// Bytes of them all; a block that has two pins counts twice.
    pub bytes: u64,
    /// The most there may be.
    pub bytes_max: u64,
}

/// The pins of a catalog.
#[derive(Debug, Default)]
pub(super) struct Pins {
    all: BTreeMap<u64, Pin>,
    last: u64,
    now_ns: u64,
    /// The end of the pin that ends first.
    end_ns: Option<u64>,
}

#[derive(Debug)]
struct Pin {
    owner: u64,
    namespaces: Vec<NamespaceId>,
    held: Vec<ReferenceId>,
    /// Blocks of each reference.
    blocks: usize,
    /// All keys, if some are awaited; else none.
    awaited: Vec<BlockKey>,
    bytes: u64,
    end_ns: u64,
}

impl Pin {
    fn status(&self, number: u64, now_ns: u64) -> PinStatus {
        let left = Duration::from_nanos(self.end_ns.saturating_sub(now_ns));
        PinStatus {
            pin: number,
            namespace: self.namespaces.first().map_or(0, |id| id.0),
            blocks: self.blocks as u64,
            awaited_blocks: self.awaited.len().saturating_sub(self.blocks) as u64,
            bytes: self.bytes,
            ends_in_s: left.as_millis().div_ceil(1000) as u64,
        }
    }
}

impl Pins {
    /// See [`Catalog::pin_for`].
    pub(super) fn add(
        &mut self,
        catalog: &mut Catalog,
        new: &NewPin<'_>,
        limits: &PinLimits,
    ) -> Result<PinAnswer, CatalogError> {
        let NewPin { owner, namespaces, keys, ttl, bytes_max, wait } = *new;
        let refused = |outcome, why| Ok(PinAnswer { outcome, reason: Some(why), pin: None });
        let PinList { pins, bytes, bytes_max: limit } = self.list(&catalog.config, limits);
        let room = limit.saturating_sub(bytes).min(bytes_max.unwrap_or(u64::MAX));
        let block_bytes = (catalog.config.file_bytes * namespaces.len() as u64).max(1);
        let room = usize::try_from(room / block_bytes).unwrap_or(usize::MAX);
        let wanted = &keys[..keys.len().min(room)];
        let stored = stored_in_all(catalog, namespaces, keys)?;
        if keys.is_empty() || (stored == 0 && !wait) {
            return refused(Outcome::Missing, "the first key is not stored".to_owned());
        }
        if wanted.is_empty() || pins.len() >= PINS_MAX {
            let left = PINS_MAX.saturating_sub(pins.len());
            let why = format!("there is room for {room} blocks and {left} pins");
            return refused(Outcome::Rejected, why);
        }
        let blocks = stored.min(wanted.len());
        let mut reasons = Vec::new();
        if wanted.len() < keys.len() {
            reasons.push(format!("there is room for {} of {} blocks", wanted.len(), keys.len()));
        }
        if blocks < wanted.len() && !wait {
            reasons.push(format!("{blocks} of {} blocks are stored", keys.len()));
        }
        if ttl > limits.ttl {
            reasons.push(format!("a pin ends after {} s at most", limits.ttl.as_secs()));
        }
        let mut outcome = if reasons.is_empty() { Outcome::Accepted } else { Outcome::Clipped };
        let mut awaited = Vec::new();
        if blocks < wanted.len() && wait {
            outcome = Outcome::Deferred;
            awaited = wanted.to_vec();
            let count = wanted.len() - blocks;
            reasons.push(format!("{count} blocks are pinned when they are stored"));
        }
        let ttl_ns = u64::try_from(ttl.min(limits.ttl).as_nanos()).unwrap_or(u64::MAX);
        let end_ns = self.now_ns.saturating_add(ttl_ns);
        let held = hold_in_all(catalog, namespaces, &wanted[..blocks])?;
        let bytes = awaited.len().max(blocks) as u64 * block_bytes;
        let namespaces = namespaces.to_vec();
        let pin = Pin { owner, namespaces, held, blocks, awaited, bytes, end_ns };
        self.last += 1;
        let status = pin.status(self.last, self.now_ns);
        self.all.insert(self.last, pin);
        self.end_ns = self.end_ns.min(Some(end_ns)).or(Some(end_ns));
        let reason = (!reasons.is_empty()).then(|| reasons.join("; "));
        Ok(PinAnswer { outcome, reason, pin: Some(status) })
    }

    /// See [`Catalog::end_pins`].
    pub(super) fn end(
        &mut self,
        catalog: &mut Catalog,
        number: Option<u64>,
        owner: Option<u64>,
    ) -> Option<u64> {
        self.end_if(catalog, |found, pin| {
            number.is_none_or(|number| number == found)
                && owner.is_none_or(|owner| owner == pin.owner)
        })
    }

    /// See [`Catalog::pins`].
    pub(super) fn list(&self, config: &CatalogConfig, limits: &PinLimits) -> PinList {
        let half = u64::from(config.files) / 2 * config.file_bytes;
        let status = |(number, pin): (&u64, &Pin)| pin.status(*number, self.now_ns);
        let pins: Vec<PinStatus> = self.all.iter().map(status).collect();
        let bytes = pins.iter().map(|pin| pin.bytes).sum();
        PinList { pins, bytes, bytes_max: limits.bytes.unwrap_or(half) }
    }

    /// See [`Catalog::pins_of`].
    pub(super) fn of(&self, is_owner: impl Fn(u64) -> bool) -> (usize, u64) {
        let own = self.all.values().filter(|pin| is_owner(pin.owner));
        own.fold((0, 0), |(pins, bytes), pin| (pins + 1, bytes + pin.bytes))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Sets the time, and ends the pins whose time is over.
    pub(super) fn expire(&mut self, catalog: &mut Catalog, now_ns: u64) {
        self.now_ns = now_ns.max(self.now_ns);
        let now_ns = self.now_ns;
        if self.end_ns.is_some_and(|end_ns| end_ns <= now_ns) {
            self.end_if(catalog, |_, pin| pin.end_ns <= now_ns);
        }
    }

    /// Returns true if a pin is in a namespace.
    pub(super) fn are_in(&self, namespace: NamespaceId) -> bool {
        self.all.values().any(|pin| pin.namespaces.contains(&namespace))
    }

    /// Ends all pins of a namespace, whose blocks are dropped.
    pub(super) fn end_in(&mut self, catalog: &mut Catalog, namespace: NamespaceId) {
        self.end_if(catalog, |_, pin| pin.namespaces.contains(&namespace));
    }

    fn end_if(
        &mut self,
        catalog: &mut Catalog,
        is_over: impl Fn(u64, &Pin) -> bool,
    ) -> Option<u64> {
        let mut blocks = None;
        self.all.retain(|number, pin| {
            let is_over = is_over(*number, pin);
            if is_over {
                release_all(catalog, &pin.held);
                blocks = Some(blocks.unwrap_or(0) + pin.blocks as u64);
            }
            !is_over
        });
        self.end_ns = self.all.values().map(|pin| pin.end_ns).min();
        blocks
    }

    /// Holds blocks that pins await and that are stored now.
    pub(super) fn complete(&mut self, catalog: &mut Catalog) {
        for pin in self.all.values_mut().filter(|pin| !pin.awaited.is_empty()) {
            // A look at the next one is enough for most.
            let next = std::slice::from_ref(&pin.awaited[pin.blocks]);
            let stored = match stored_in_all(catalog, &pin.namespaces, next) {
                Ok(1) => stored_in_all(catalog, &pin.namespaces, &pin.awaited),
                other => other,
            };
            let Some(blocks) = stored.ok().filter(|stored| *stored > pin.blocks) else { continue };
            let held = hold_in_all(catalog, &pin.namespaces, &pin.awaited[..blocks]);
            let earlier = std::mem::replace(&mut pin.held, held.expect("they were just found"));
            release_all(catalog, &earlier);
            pin.blocks = blocks;
            if blocks == pin.awaited.len() {
                pin.awaited = Vec::new();
            }
        }
    }
}

/// Returns how many leading keys all of the namespaces have.
fn stored_in_all(
    catalog: &Catalog,
    namespaces: &[NamespaceId],
    keys: &[BlockKey],
) -> Result<usize, CatalogError> {
    let stored = namespaces.iter().map(|id| catalog.lookup(*id, keys));
    Ok(stored.collect::<Result<Vec<_>, _>>()?.into_iter().min().unwrap_or(0))
}

/// References keys that all of the namespaces have.
fn hold_in_all(
    catalog: &mut Catalog,
    namespaces: &[NamespaceId],
    keys: &[BlockKey],
) -> Result<Vec<ReferenceId>, CatalogError> {
    namespaces.iter().map(|id| Ok(catalog.hold_prefix(*id, keys)?.id)).collect()
}

fn release_all(catalog: &mut Catalog, held: &[ReferenceId]) {
    for id in held {
        let released = catalog.release(*id);
        assert!(released.is_ok(), "{released:?}");
    }
}
