//! Configuration of a ring.

use nvme_driver::Nanos;

use crate::{abi, error::Error};

/// Configuration of a ring. The defaults suit a store; tests shorten the timeout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UringOptions {
    /// Timeout of one NVMe command, after which its queue fails.
    pub command_timeout: Nanos,
    /// Maximum time that the next operation waits for its event before the kernel fails its queues:
    /// all operations issued so far then complete with errors and signal their events.
    pub event_timeout: Nanos,
    /// Maximum contexts of one explicit IOCB, at most [`abi::IOCTX_MAX`]. Every IOCB reserves
    /// memory for that many (28 bytes each).
    pub explicit_max: u32,
    /// Chunk size in bytes of executor memory, allocated at start and whenever more is needed: as
    /// much near the kernel (maps, pools, expected checksums) as in memory that the host reads, too
    /// (statuses, events).
    pub arena_bytes: usize,
    /// Rounds after which a host thread returns from the kernel ([`abi::Args::rounds`]).
    pub rounds: u32,
    /// Makes the kernel read the ring's [`nvme_driver::Clock`] instead of the processor's clock,
    /// for simulated time. The word is updated whenever the ring polls its executor.
    pub virtual_time: bool,
    /// Time that dropping a running ring waits for the kernel to end before it leaks the memory.
    pub stop_timeout: Nanos,
}

impl Default for UringOptions {
    fn default() -> Self {
        Self {
            command_timeout: Nanos::from_millis(30_000),
            event_timeout: Nanos::from_millis(60_000),
            explicit_max: abi::IOCTX_MAX,
            arena_bytes: 1 << 20,
            rounds: 64,
            virtual_time: false,
            stop_timeout: Nanos::from_millis(45_000),
        }
    }
}

impl UringOptions {
    pub(crate) fn validate(&self) -> Result<(), Error> {
        let wrong = |option, found, hint| Err(Error::Option { option, found, hint });
        if self.command_timeout.0 == 0 {
            return wrong("command_timeout", 0, "give the device some time");
        }
        if self.event_timeout.0 == 0 {
            return wrong("event_timeout", 0, "give the streams some time");
        }
        if self.explicit_max == 0 || self.explicit_max > abi::IOCTX_MAX {
            return wrong("explicit_max", self.explicit_max.into(), "choose 1 to 2048");
        }
        if self.rounds == 0 {
            return wrong("rounds", 0, "choose at least 1");
        }
        if self.arena_bytes > 1 << 40 {
            return wrong("arena_bytes", self.arena_bytes as u64, "choose at most 1 TiB");
        }
        Ok(())
    }
}
