//! Table of the outstanding commands of one queue, indexed by CID.
//!
//! A CID is `generation << log2(depth) | slot`. The generation changes each time a slot is taken,
//! so a late or duplicate completion is never mistaken for that of a newer command. The last slot
//! is never used: a queue holds at most `depth - 1` commands, and CID FFFFh, the error log's "no
//! command" (Base, "Error Information"), cannot occur.

use nvme_spec::ids::Cid;

/// Largest queue depth; leaves four bits of a CID for the generation.
pub const DEPTH_MAX: u32 = 4096;

/// Set in [`Entry::tag`] while the command is outstanding.
const LIVE: u32 = 1 << 16;
/// Set instead once the command is abandoned, while the controller may still execute it.
const ABANDONED: u32 = 1 << 17;

/// Reasons for which the CID of a completion is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CidFault {
    /// No command in that slot is outstanding.
    Unknown,
    /// A newer command occupies the slot.
    Stale,
}

/// The command that a completion's CID names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// A live command: the user word given to [`CidTable::take`].
    Live(u64),
    /// An abandoned command; its slot is free again.
    Late(u64),
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    user: u64,
    /// CID of the slot's current or last command, and the flags above.
    tag: u32,
}

/// Slots and generations of one queue's commands. Allocates nothing after [`CidTable::new`].
#[derive(Debug)]
pub struct CidTable {
    entries: Box<[Entry]>,
    /// A stack: the last freed slot is reused first, while its memory is still in the cache.
    free: Box<[u16]>,
    free_len: usize,
    mask: u16,
}

impl CidTable {
    /// Creates a table for a queue of `depth` entries, a power of two from 2 to [`DEPTH_MAX`].
    /// Other values are rounded up to a power of two and clamped.
    #[must_use]
    pub fn new(depth: u32) -> Self {
        let depth = depth.clamp(2, DEPTH_MAX).next_power_of_two();
        // The depth is at most 4096, so a slot fits.
        let slots = (depth - 1) as u16;
        let entries = (0..depth).map(|slot| Entry { user: 0, tag: slot }).collect();
        let free: Box<[u16]> = (0..slots).rev().collect();
        Self { entries, free_len: free.len(), free, mask: slots }
    }

    /// Takes a slot for a command. Returns `None` if `depth - 1` are outstanding.
    #[inline]
    pub fn take(&mut self, user: u64) -> Option<Cid> {
        let top = self.free_len.checked_sub(1)?;
        let slot = *self.free.get(top)?;
        let entry = self.entries.get_mut((slot & self.mask) as usize)?;
        self.free_len = top;
        // Adding the depth increments the generation and wraps it around within 16 bits.
        let cid = (entry.tag as u16).wrapping_add(self.mask).wrapping_add(1);
        *entry = Entry { user, tag: u32::from(cid) | LIVE };
        Some(Cid(cid))
    }

    /// Frees the slot of a completed command.
    ///
    /// # Errors
    /// Returns [`CidFault`] if no such command is outstanding: the controller misbehaves.
    #[inline]
    pub fn finish(&mut self, cid: Cid) -> Result<Finished, CidFault> {
        let slot = cid.0 & self.mask;
        let Some(entry) = self.entries.get_mut(slot as usize) else {
            return Err(CidFault::Unknown);
        };
        if entry.tag == u32::from(cid.0) | LIVE {
            entry.tag = u32::from(cid.0);
            let user = entry.user;
            self.give_back(slot);
            return Ok(Finished::Live(user));
        }
        self.finish_other(cid)
    }

    #[cold]
    fn finish_other(&mut self, cid: Cid) -> Result<Finished, CidFault> {
        let slot = cid.0 & self.mask;
        let entry = &mut self.entries[slot as usize];
        if entry.tag == u32::from(cid.0) | ABANDONED {
            entry.tag = u32::from(cid.0);
            let user = entry.user;
            self.give_back(slot);
            return Ok(Finished::Late(user));
        }
        if entry.tag & (LIVE | ABANDONED) != 0 {
            Err(CidFault::Stale)
        } else {
            Err(CidFault::Unknown)
        }
    }

    #[inline]
    fn give_back(&mut self, slot: u16) {
        if let Some(place) = self.free.get_mut(self.free_len) {
            *place = slot;
            self.free_len += 1;
        }
    }

    /// Abandons `cid`. Its slot stays taken until the completion arrives. Returns whether the
    /// command was live.
    pub fn abandon(&mut self, cid: Cid) -> bool {
        let entry = &mut self.entries[(cid.0 & self.mask) as usize];
        let live = entry.tag == u32::from(cid.0) | LIVE;
        if live {
            entry.tag = u32::from(cid.0) | ABANDONED;
        }
        live
    }

    /// Returns the number of commands not yet completed, including abandoned ones.
    #[must_use]
    #[inline]
    pub fn outstanding(&self) -> u32 {
        (self.free.len() - self.free_len) as u32
    }
}

#[cfg(test)]
mod tests;
