//! Pins: blocks that are held, so that nothing evicts them, until a time.
//!
//! A pin is the server's own reference, as those of clients are, and not a mark in the journal: it
//! ends with the server, and none is left behind without an end.

use std::{collections::BTreeMap, time::Duration};

use objstore::{BlockKey, Prefix, Store, StoreError};

use super::{Outcome, PinList, PinStatus};

/// Pins at a time.
const PINS_MAX: usize = 4096;

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

impl PinLimits {
    /// Returns the bytes that may be pinned in a store.
    pub(crate) fn bytes_of(&self, store: &Store) -> u64 {
        let geometry = store.geometry();
        let half = u64::from(store.superblock().layout.files) / 2 * geometry.file_bytes();
        self.bytes.unwrap_or(half)
    }
}

/// All pins.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    all: BTreeMap<u64, Pin>,
    last: u64,
}

#[derive(Debug)]
struct Pin {
    /// Handle of the namespace.
    store: Store,
    held: Prefix,
    /// All keys, if some are awaited; else none.
    awaited: Vec<BlockKey>,
    until: Duration,
}

/// A pin to be made.
pub(crate) struct Asked<'a> {
    pub(crate) store: &'a Store,
    pub(crate) keys: &'a [BlockKey],
    pub(crate) ttl: Duration,
    pub(crate) bytes_max: Option<u64>,
    pub(crate) wait: bool,
}

/// The result, its reason and the pin.
pub(crate) type Made = (Outcome, Option<String>, Option<PinStatus>);

impl Pin {
    fn blocks(&self) -> usize {
        self.held.len().max(self.awaited.len())
    }

    fn bytes(&self) -> u64 {
        self.blocks() as u64 * self.store.geometry().file_bytes()
    }

    fn status(&self, number: u64, now: Duration) -> PinStatus {
        PinStatus {
            pin: number,
            namespace: self.store.namespace().0,
            blocks: self.held.len() as u64,
            awaited_blocks: (self.blocks() - self.held.len()) as u64,
            bytes: self.bytes(),
            ends_in_s: self.until.saturating_sub(now).as_millis().div_ceil(1000) as u64,
        }
    }
}

impl Pins {
    /// Pins the leading ones of these keys that are stored and within the limits, at the time
    /// `now`. With [`Asked::wait`], it also reserves the room of those that are not stored yet.
    pub(crate) fn add(
        &mut self,
        limits: &PinLimits,
        asked: &Asked<'_>,
        now: Duration,
    ) -> Result<Made, StoreError> {
        let Asked { store, keys, ttl, bytes_max, wait } = *asked;
        let (free, ttl_max) = (limits.bytes_of(store).saturating_sub(self.bytes()), limits.ttl);
        let room = free.min(bytes_max.unwrap_or(u64::MAX)) / store.geometry().file_bytes().max(1);
        let wanted = &keys[..keys.len().min(usize::try_from(room).unwrap_or(usize::MAX))];
        let stored = store.peek(keys);
        if stored == 0 && !wait {
            return Ok((Outcome::Missing, Some("the first key is not stored".to_owned()), None));
        }
        if wanted.is_empty() || self.all.len() >= PINS_MAX {
            let why =
                format!("{free} bytes and {PINS_MAX} pins are the room that is left or given");
            return Ok((Outcome::Rejected, Some(why), None));
        }
        let held = store.hold_prefix(wanted)?;
        let is_whole = held.len() == wanted.len();
        let awaited = if wait && !is_whole { wanted.to_vec() } else { Vec::new() };
        if held.is_empty() && awaited.is_empty() {
            return Ok((Outcome::Missing, Some("it was evicted just now".to_owned()), None));
        }
        let mut reasons = Vec::new();
        if wanted.len() < keys.len() {
            reasons.push(format!("there is room for {} of {} blocks", wanted.len(), keys.len()));
        }
        if !is_whole && !wait {
            reasons.push(format!("{} of {} blocks are stored", held.len(), keys.len()));
        }
        if ttl > ttl_max {
            reasons.push(format!("a pin ends after {} s at most", ttl_max.as_secs()));
        }
        let outcome = match (awaited.is_empty(), reasons.is_empty()) {
            (false, _) => {
                let count = awaited.len() - held.len();
                reasons.push(format!("{count} blocks are pinned when they are stored"));
                Outcome::Deferred
            }
            (true, false) => Outcome::Clipped,
            (true, true) => Outcome::Accepted,
        };
        let pin = Pin {
            store: store.clone(),
            held,
            awaited,
            until: now.saturating_add(ttl.min(ttl_max)),
        };
        self.last += 1;
        let status = pin.status(self.last, now);
        self.all.insert(self.last, pin);
        Ok((outcome, (!reasons.is_empty()).then(|| reasons.join("; ")), Some(status)))
    }

    /// Ends a pin. Returns its blocks.
    pub(crate) fn remove(&mut self, number: u64) -> Option<u64> {
        self.all.remove(&number).map(|pin| pin.held.len() as u64)
    }

    /// Ends all pins of a namespace, whose blocks were deleted.
    pub(crate) fn forget(&mut self, cleared: &Store) {
        self.all.retain(|_, pin| pin.store.namespace() != cleared.namespace());
    }

    /// Ends pins whose time is over, and pins what others await and is stored now.
    pub(crate) fn refresh(&mut self, now: Duration) {
        self.all.retain(|_, pin| now < pin.until);
        for pin in self.all.values_mut().filter(|pin| !pin.awaited.is_empty()) {
            if pin.store.peek(&pin.awaited) <= pin.held.len() {
                continue;
            }
            // A store that has failed ends the server.
            let Ok(held) = pin.store.hold_prefix(&pin.awaited) else { continue };
            // The earlier reference goes only now.
            pin.held = held;
            if pin.held.len() == pin.awaited.len() {
                pin.awaited = Vec::new();
            }
        }
    }

    fn bytes(&self) -> u64 {
        self.all.values().map(Pin::bytes).sum()
    }

    /// Returns the state of all pins.
    pub(crate) fn list(&self, limits: &PinLimits, store: &Store, now: Duration) -> PinList {
        let pins = self.all.iter().map(|(number, pin)| pin.status(*number, now)).collect();
        PinList { pins, bytes: self.bytes(), bytes_max: limits.bytes_of(store) }
    }
}
