//! The table of outstanding commands of one queue: which CID stands for what.
//!
//! A CID is `generation << log2(depth) | slot`. The generation changes each time a slot is taken,
//! so a late or duplicate completion cannot be taken for that of a newer command. The last slot is
//! never used: a queue holds at most `depth - 1` commands, and CID FFFFh, which the error log uses
//! for "no command" (Base, "Error Information"), can then not occur.

use nvme_spec::ids::Cid;

/// Most entries of a queue: leaves four bits of a CID for the generation.
pub const DEPTH_MAX: u32 = 4096;

/// Set in [`Entry::tag`] while the command is outstanding.
const LIVE: u32 = 1 << 16;
/// Set instead once the command is given up, while the controller may still hold it.
const ABANDONED: u32 = 1 << 17;

/// Why a CID in a completion cannot be right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CidFault {
    /// No command of that slot is outstanding.
    Unknown,
    /// The slot is in use by a younger command.
    Stale,
}

/// What a completion's CID stood for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// A command that is waited for: what was given to [`CidTable::take`].
    Live(u64),
    /// A command that had been given up; its slot is free again.
    Late(u64),
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    user: u64,
    /// CID of the slot's current or last command, and the flags above.
    tag: u32,
}

/// Slots and generations of one queue's commands. Nothing is allocated after [`CidTable::new`].
#[derive(Debug)]
pub struct CidTable {
    entries: Box<[Entry]>,
    /// A stack: the youngest slot is reused first, while its memory is still in the cache.
    free: Box<[u16]>,
    free_len: usize,
    mask: u16,
}

impl CidTable {
    /// A table for a queue of `depth` entries, a power of two from 2 to [`DEPTH_MAX`]; other
    /// values are rounded to the nearest one allowed.
    #[must_use]
    pub fn new(depth: u32) -> Self {
        let depth = depth.clamp(2, DEPTH_MAX).next_power_of_two();
        // Depth is at most 4096, so a slot fits.
        let slots = (depth - 1) as u16;
        let entries = (0..depth).map(|slot| Entry { user: 0, tag: slot }).collect();
        let free: Box<[u16]> = (0..slots).rev().collect();
        Self { entries, free_len: free.len(), free, mask: slots }
    }

    /// Takes a slot for a command. `None` when `depth - 1` are outstanding.
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

    /// Ends the command of `cid`, as its completion says.
    ///
    /// # Errors
    /// [`CidFault`] when no such command is outstanding: the controller is not to be trusted.
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

    /// Gives up waiting for `cid`. Its slot stays taken until the completion comes after all.
    /// Whether the command was outstanding.
    pub fn abandon(&mut self, cid: Cid) -> bool {
        let entry = &mut self.entries[(cid.0 & self.mask) as usize];
        let live = entry.tag == u32::from(cid.0) | LIVE;
        if live {
            entry.tag = u32::from(cid.0) | ABANDONED;
        }
        live
    }

    /// Commands the controller has not completed, abandoned ones included.
    #[must_use]
    #[inline]
    pub fn outstanding(&self) -> u32 {
        (self.free.len() - self.free_len) as u32
    }

    /// Commands that may still be posted.
    #[must_use]
    #[inline]
    pub fn free(&self) -> u32 {
        self.free_len as u32
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn depth_minus_one_commands_and_never_ffff() {
        let mut table = CidTable::new(4096);
        let mut cids = Vec::new();
        for _ in 0..40 {
            while let Some(cid) = table.take(7) {
                assert_ne!(cid.0, 0xFFFF);
                cids.push(cid);
            }
            assert_eq!(cids.len(), 4095);
            for cid in cids.drain(..) {
                assert_eq!(table.finish(cid), Ok(Finished::Live(7)));
            }
        }
    }

    #[test]
    fn old_generation_is_refused() {
        let mut table = CidTable::new(4);
        let old = table.take(1).unwrap();
        assert_eq!(table.finish(old), Ok(Finished::Live(1)));
        assert_eq!(table.finish(old), Err(CidFault::Unknown), "duplicate completion");
        let new = table.take(2).unwrap();
        assert_eq!(old.0 & 3, new.0 & 3, "the stack reuses the slot");
        assert_eq!(table.finish(old), Err(CidFault::Stale));
        assert_eq!(table.finish(new), Ok(Finished::Live(2)));
    }

    #[test]
    fn abandoned_slot_stays_taken() {
        let mut table = CidTable::new(2);
        let cid = table.take(9).unwrap();
        assert!(table.abandon(cid));
        assert!(!table.abandon(cid));
        assert_eq!(table.take(10), None);
        assert_eq!(table.finish(cid), Ok(Finished::Late(9)));
        assert!(table.take(10).is_some());
    }

    proptest! {
        /// The table against a map from CID to user word.
        #[test]
        fn behaves_like_a_map(
            log2 in 1u32..7,
            ops in prop::collection::vec(any::<(u8, u16)>(), 1..400),
        ) {
            let depth = 1 << log2;
            let (mut table, mut model) = (CidTable::new(depth), BTreeMap::<u16, u64>::new());
            for (i, (op, pick)) in ops.into_iter().enumerate() {
                match op % 3 {
                    0 => {
                        let cid = table.take(i as u64);
                        prop_assert_eq!(cid.is_some(), model.len() < depth as usize - 1);
                        if let Some(cid) = cid {
                            prop_assert_eq!(model.insert(cid.0, i as u64), None);
                        }
                    }
                    1 if !model.is_empty() => {
                        let (&cid, &user) = model.iter().nth(pick as usize % model.len()).unwrap();
                        model.remove(&cid);
                        prop_assert_eq!(table.finish(Cid(cid)), Ok(Finished::Live(user)));
                    }
                    _ => {
                        if let std::collections::btree_map::Entry::Vacant(_) = model.entry(pick) {
                            prop_assert!(table.finish(Cid(pick)).is_err());
                        }
                    }
                }
                prop_assert_eq!(table.outstanding() as usize, model.len());
                prop_assert_eq!(table.free() as usize, depth as usize - 1 - model.len());
            }
        }
    }
}
