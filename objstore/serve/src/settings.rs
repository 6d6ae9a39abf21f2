//! Settings of a server that can change while it serves.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    num::NonZeroU64,
    sync::Arc,
    time::Duration,
};

use kv_catalog::PINS_MAX;
use objstore::KvShape;
use ripieno_stack::{Size, StackError};

use crate::{
    account::{Share, request_bytes},
    control::PinLimits,
    protocol::CONNECTIONS_MAX,
};

/// Connections of a user that are not of clients: control, and those that begin.
const OTHER_CONNECTIONS_MAX: u64 = 16;
/// Bytes of memory for tables of prefixes, reservations and requests, of all users together.
const MEMORY_BYTES: u64 = 1 << 30;
/// Descriptors that a connection takes.
const DESCRIPTORS_EACH: u64 = 3;

/// Longest time until a client's turn, if its bandwidth is limited: its death is noticed only then.
pub(crate) const TURN_MAX: Duration = Duration::from_secs(5);

/// Values that a server takes over by [`Reload`].
#[derive(Clone, PartialEq, Eq)]
pub struct Settings {
    /// Users whose processes may connect, besides the server's own and root.
    pub users: Vec<u32>,
    /// Clients at a time.
    pub sessions_max: u32,
    /// Bytes of a client's pool, at most.
    pub pool_bytes_max: u64,
    /// Limits of users, on all of their clients together.
    pub limits: BTreeMap<u32, UserLimits>,
    /// Time without a call of an engine, or of a client that is none, after which its prefixes,
    /// reservations and requests end.
    pub hold_max: Duration,
    /// Limits of pins.
    pub pins: PinLimits,
    /// The token that requests over TCP have; without one, all of them are refused.
    pub token: Option<String>,
}

/// Limits of a user. Where none is given, a user on the list has an equal part of all: there are
/// as many parts as users on the list, and one for the server's own and root, who may take all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UserLimits {
    /// Clients at a time.
    pub clients: Option<u32>,
    /// Namespaces that the user named first.
    pub namespaces: Option<u32>,
    /// Bytes of blocks that are stored in these; no limit if none is given.
    pub stored_bytes: Option<u64>,
    /// Bytes of files that prefixes, reservations and requests hold.
    pub held_bytes: Option<u64>,
    /// Bytes of pinned blocks.
    pub pinned_bytes: Option<u64>,
    /// Bytes of the server's memory for tables of prefixes, reservations and requests.
    pub memory_bytes: Option<u64>,
    /// Bytes a second that are moved; no limit if none is given.
    pub bandwidth: Option<NonZeroU64>,
}

/// The things that the users of a server share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Totals {
    pub(crate) files: u32,
    pub(crate) file_bytes: u64,
    pub(crate) namespaces: u32,
    pub(crate) descriptors: u64,
}

/// Without the token.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { users, sessions_max, pool_bytes_max, limits, hold_max, pins, token: _ } = self;
        f.debug_struct("Settings")
            .field("users", users)
            .field("sessions_max", sessions_max)
            .field("pool_bytes_max", pool_bytes_max)
            .field("limits", limits)
            .field("hold_max", hold_max)
            .field("pins", pins)
            .finish_non_exhaustive()
    }
}

impl Settings {
    /// Returns the names, as in a configuration, of what is not the same.
    pub(crate) fn differences(&self, other: &Self) -> Vec<String> {
        let differing = [
            ("users", self.users != other.users),
            ("clients", self.sessions_max != other.sessions_max),
            ("pool_max", self.pool_bytes_max != other.pool_bytes_max),
            ("limit", self.limits != other.limits),
            ("hold_max", self.hold_max != other.hold_max),
            ("pins", self.pins != other.pins),
            ("token", self.token != other.token),
        ];
        let named = differing.into_iter().filter(|(_, is_other)| *is_other);
        named.map(|(name, _)| name.to_owned()).collect()
    }

    /// Refuses limits that no block of a store fits into, in memory or on the devices, where each
    /// takes `file_bytes`: nothing would be stored, and nobody told.
    ///
    /// # Errors
    /// Returns [`StackError::Config`], which names the limit.
    pub fn check(&self, shape: &KvShape, file_bytes: u64) -> Result<(), StackError> {
        let block = shape.block_bytes();
        let stored = (file_bytes, "a block of this store takes", ", or 0 for none");
        let tables = (request_bytes(1, shape.rows()), "the tables for a block take", stored.2);
        // A layer that takes longer waits for no turn.
        let turn = (block / u64::from(shape.layers)).div_ceil(TURN_MAX.as_secs());
        let turn = (turn, "a layer that is moved in 5 s needs each second", "");
        let pool = (block, "a block has", "");
        let mut all = vec![
            ("pool_max", String::new(), Some(self.pool_bytes_max), pool),
            ("pins.bytes", String::new(), self.pins.bytes, stored),
        ];
        for (uid, of) in &self.limits {
            let bandwidth = of.bandwidth.map(NonZeroU64::get);
            let limit =
                |name, given, least| ("limit", format!("{name} of user {uid}: "), given, least);
            all.extend([
                limit("stored", of.stored_bytes, stored),
                limit("held", of.held_bytes, stored),
                limit("pins", of.pinned_bytes, stored),
                limit("memory", of.memory_bytes, tables),
                limit("bandwidth", bandwidth, turn),
            ]);
        }
        for (field, name, given, (least, what, or)) in all {
            // Without a pool there is no client.
            let from = u64::from(field != "pool_max");
            if let Some(given) = given.filter(|it| (from..least).contains(it)) {
                let [given, least] = [given, least].map(Size);
                let problem = format!("{name}{given} is too little: {what} {least}; give more{or}");
                return Err(StackError::Config { field, problem });
            }
        }
        Ok(())
    }

    /// Returns the most that a user may have; `controllers` are root and the server's own user.
    pub(crate) fn share(&self, uid: u32, controllers: [u32; 2], totals: &Totals) -> Share {
        let Totals { files, file_bytes, namespaces, descriptors } = *totals;
        let is_controller = controllers.contains(&uid);
        let others: BTreeSet<u32> = self.users.iter().copied().chain([uid]).collect();
        let others = others.iter().filter(|uid| !controllers.contains(uid)).count() as u64;
        // With one user there is nobody else to leave a part to.
        let parts = if is_controller || others == 1 { 1 } else { others + 1 };
        let part = |all: u64| (all / parts).max(1);
        let limits = self.limits.get(&uid).copied().unwrap_or_default();
        let in_files = |bytes: u64| bytes / file_bytes.max(1);
        let clients = limits.clients.map_or_else(|| part(self.sessions_max.into()), u64::from);
        let connections = clients * (CONNECTIONS_MAX as u64 + 1) + OTHER_CONNECTIONS_MAX;
        // A quarter of the descriptors stays for controllers.
        let room = (descriptors - descriptors / 4) / DESCRIPTORS_EACH / (others + 1);
        let half = u64::from(files) / 2 * file_bytes;
        let pins = PINS_MAX / parts as usize;
        Share {
            clients,
            connections: if is_controller { connections } else { connections.min(room) },
            held_files: limits.held_bytes.map_or_else(|| part(files.into()), in_files),
            memory: limits.memory_bytes.unwrap_or_else(|| part(MEMORY_BYTES)),
            namespaces: limits.namespaces.unwrap_or_else(|| part(namespaces.into()) as u32),
            pins,
            pinned_bytes: limits
                .pinned_bytes
                .unwrap_or_else(|| part(self.pins.bytes.unwrap_or(half))),
            stored_files: limits
                .stored_bytes
                .map(|bytes| u32::try_from(in_files(bytes)).unwrap_or(u32::MAX)),
            bandwidth: limits.bandwidth,
        }
    }
}

/// Gets the settings again, or says why they cannot be taken over.
#[derive(Clone)]
pub struct Reload(pub Arc<dyn Fn() -> Result<Settings, String> + Send + Sync>);

impl fmt::Debug for Reload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reload").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_no_block_fits_into_is_refused() {
        let shape = KvShape { layers: 4, segments: 2, object_bytes: 8000, block_tokens: 16 };
        let (block, file) = (shape.block_bytes(), 8 * 8192);
        let settings = |change: &dyn Fn(&mut Settings, &mut UserLimits)| {
            let (mut limits, pins) = (UserLimits::default(), PinLimits::default());
            let (hold_max, limited) = (Duration::from_secs(1), BTreeMap::new());
            let mut all = Settings {
                users: vec![7],
                sessions_max: 1,
                pool_bytes_max: block,
                limits: limited,
                hold_max,
                pins,
                token: None,
            };
            change(&mut all, &mut limits);
            all.limits.insert(7, limits);
            all.check(&shape, file).map_err(|error| error.to_string())
        };
        let bandwidth = |bytes| NonZeroU64::new(bytes);
        type Change<'a> = &'a dyn Fn(&mut Settings, &mut UserLimits, u64);
        let all: [(&str, Change<'_>, u64, bool); 7] = [
            ("pool_max: ", &|it, _, bytes| it.pool_bytes_max = bytes, block, false),
            ("pins.bytes: ", &|it, _, bytes| it.pins.bytes = Some(bytes), file, true),
            ("stored of user 7", &|_, it, bytes| it.stored_bytes = Some(bytes), file, true),
            ("held of user 7", &|_, it, bytes| it.held_bytes = Some(bytes), file, true),
            ("pins of user 7", &|_, it, bytes| it.pinned_bytes = Some(bytes), file, true),
            ("memory of user 7", &|_, it, bytes| it.memory_bytes = Some(bytes), 128, true),
            ("bandwidth of user 7", &|_, it, bytes| it.bandwidth = bandwidth(bytes), 3200, false),
        ];
        for (name, change, least, or_none) in all {
            let with = |bytes| settings(&|all, limits| change(all, limits, bytes));
            assert_eq!(with(least), Ok(()), "{name}");
            for little in [1, least - 1] {
                let why = with(little).unwrap_err();
                let remedy = if or_none { "give more, or 0 for none" } else { "give more" };
                assert!(why.contains(name) && why.ends_with(remedy), "{why}");
            }
            // A bandwidth of 0 is none.
            assert_eq!(with(0).is_ok(), !name.starts_with("pool_max"), "{name}");
        }
    }
}
