//! Settings of a server that can change while it serves.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    num::NonZeroU64,
    sync::Arc,
    time::Duration,
};

use kv_catalog::PINS_MAX;

use crate::{account::Share, control::PinLimits, protocol::CONNECTIONS_MAX};

/// Connections of a user that are not of clients: control, and those that begin.
const OTHER_CONNECTIONS_MAX: u64 = 16;
/// Bytes of memory for tables of prefixes, reservations and requests, of all users together.
const MEMORY_BYTES: u64 = 1 << 30;
/// Descriptors that a connection takes.
const DESCRIPTORS_EACH: u64 = 3;

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

    /// Refuses limits of bytes that no block fits into: nothing would be stored, and nobody told.
    pub(crate) fn check(&self, file_bytes: u64) -> Result<(), String> {
        for (uid, limits) in &self.limits {
            let UserLimits { stored_bytes, held_bytes, pinned_bytes, .. } = *limits;
            for (name, bytes) in
                [("stored", stored_bytes), ("held", held_bytes), ("pins", pinned_bytes)]
            {
                if let Some(bytes) = bytes.filter(|&bytes| 0 < bytes && bytes < file_bytes) {
                    return Err(format!(
                        "{name} of user {uid} is {bytes} bytes, and a block of this store takes \
                         {file_bytes}: give more, or 0 for none"
                    ));
                }
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
