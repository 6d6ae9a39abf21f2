//! Settings of a server that can change while it serves.

use std::{collections::BTreeMap, fmt, num::NonZeroU64, sync::Arc};

use crate::control::PinLimits;

/// Values that a server takes over by [`Reload`].
#[derive(Clone, PartialEq, Eq)]
pub struct Settings {
    /// Users whose processes may connect, besides the server's own and root.
    pub users: Vec<u32>,
    /// Clients at a time.
    pub sessions_max: u32,
    /// Bytes of a client's pool, at most.
    pub pool_bytes_max: u64,
    /// Bytes a second that each client of a user may move; no limit for others.
    pub bandwidth: BTreeMap<u32, NonZeroU64>,
    /// Limits of pins.
    pub pins: PinLimits,
    /// The token that requests over TCP have; without one, all of them are refused.
    pub token: Option<String>,
}

/// Without the token.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { users, sessions_max, pool_bytes_max, bandwidth, pins, token: _ } = self;
        f.debug_struct("Settings")
            .field("users", users)
            .field("sessions_max", sessions_max)
            .field("pool_bytes_max", pool_bytes_max)
            .field("bandwidth", bandwidth)
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
            ("limit", self.bandwidth != other.bandwidth),
            ("pins", self.pins != other.pins),
            ("token", self.token != other.token),
        ];
        let named = differing.into_iter().filter(|(_, is_other)| *is_other);
        named.map(|(name, _)| name.to_owned()).collect()
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
