//! The caller's side of each IOCB: its state and the references it keeps alive.

use crate::{
    abi::Iocb,
    checksums::Checksums,
    completion::Completion,
    error::Error,
    event::{Signal, Wait},
    iocb_id::IocbId,
    map::BlockMap,
    pool::PoolHandle,
    status::IoStatus,
};

/// State of an IOCB. The kernel reads only `Issued` ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Free,
    Issued,
    Done,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Issued => "issued",
            Self::Done => "done",
        }
    }
}

/// Data that the kernel reads on behalf of an IOCB.
#[derive(Debug, Default)]
pub(crate) enum Content {
    #[default]
    Nothing,
    /// The IOCB's own area; `Entry::order` gives the order.
    Explicit,
    /// Kept alive until the completion is consumed.
    Affine { map: BlockMap, _kept: (Option<Checksums>, PoolHandle) },
}

/// One IOCB.
#[derive(Debug)]
pub(crate) struct Entry {
    generation: u32,
    pub phase: Phase,
    pub wait: Option<Wait>,
    pub signal: Option<Signal>,
    pub content: Content,
    /// Explicit: the caller's index of each context in the area. The vector is reused.
    pub order: Vec<u32>,
    /// Objects transferred by a complete success.
    pub expected: u64,
    pub completion: Completion,
}

/// All IOCBs of a ring.
#[derive(Debug)]
pub(crate) struct Table {
    entries: Vec<Entry>,
    free: Vec<u32>,
}

impl Table {
    /// Creates a table of `depth` free IOCBs.
    pub(crate) fn new(depth: u32) -> Self {
        let entry = |_| Entry {
            generation: 0,
            phase: Phase::Free,
            wait: None,
            signal: None,
            content: Content::Nothing,
            order: Vec::new(),
            expected: 0,
            completion: Completion::default(),
        };
        Self { entries: (0..depth).map(entry).collect(), free: (0..depth).rev().collect() }
    }

    /// Returns the number of IOCBs.
    pub(crate) fn len(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Returns the number of free IOCBs.
    #[cfg(test)]
    pub(crate) fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Takes a free IOCB, which the caller publishes next.
    pub(crate) fn take(&mut self) -> Result<(IocbId, &mut Entry), Error> {
        let index = self.free.pop().ok_or(Error::Busy { depth: self.len() })?;
        let entry = &mut self.entries[index as usize];
        entry.generation = entry.generation.wrapping_add(1);
        entry.phase = Phase::Issued;
        Ok((IocbId { index, generation: entry.generation }, entry))
    }

    /// Returns the IOCB of `id` in any phase, unless it was reused.
    fn get(&mut self, id: IocbId) -> Result<&mut Entry, Error> {
        let (index, needed) = (id.index, "taken by the caller from this ring");
        let entry =
            self.entries.get_mut(index as usize).filter(|entry| entry.generation == id.generation);
        entry.ok_or(Error::Id { index, found: "an old or foreign one", needed })
    }

    /// Returns the IOCB of `id`, which must be in one of `phases`.
    pub(crate) fn in_phase(
        &mut self,
        id: IocbId,
        phases: &[Phase],
        needed: &'static str,
    ) -> Result<&mut Entry, Error> {
        let entry = self.get(id)?;
        if !phases.contains(&entry.phase) {
            return Err(Error::Id { index: id.index, found: entry.phase.name(), needed });
        }
        Ok(entry)
    }

    /// Returns the IOCB that the kernel completed, which must be in flight.
    pub(crate) fn issued(&mut self, index: u32) -> Result<&mut Entry, Error> {
        let entry = self.entries.get_mut(index as usize);
        entry.filter(|entry| entry.phase == Phase::Issued).ok_or(Error::Ring { index })
    }

    /// Returns the indices of all IOCBs in flight.
    pub(crate) fn in_flight(&self) -> impl Iterator<Item = u32> + '_ {
        let issued = |(_, entry): &(usize, &Entry)| entry.phase == Phase::Issued;
        self.entries.iter().enumerate().filter(issued).map(|(index, _)| index as u32)
    }

    /// Frees `id`. Its explicit statuses stay readable until the IOCB is reused.
    pub(crate) fn release(&mut self, id: IocbId) {
        let entry = &mut self.entries[id.index as usize];
        entry.phase = Phase::Free;
        entry.release_refs();
        self.free.push(id.index);
    }
}

impl Entry {
    /// Drops references to everything the kernel no longer reads or writes.
    pub(crate) fn release_refs(&mut self) {
        self.wait = None;
        self.signal = None;
        if matches!(self.content, Content::Affine { .. }) {
            self.content = Content::Nothing;
        }
    }

    /// Decodes the result words of `iocb`.
    pub(crate) fn outcome(&self, iocb: &Iocb) -> Completion {
        let Iocb { objects, errors, error, .. } = *iocb;
        let status = match IoStatus::decode((error >> 32) as u32) {
            IoStatus::Ok if errors == 0 && objects == self.expected => None,
            IoStatus::Ok => Some(IoStatus::Incomplete),
            failure => Some(failure),
        };
        let error = status.map(|status| (status, self.caller_index(error as u32)));
        Completion { objects, errors, error }
    }

    /// Returns the caller's index of the kernel's context `at`.
    pub(crate) fn caller_index(&self, at: u32) -> u32 {
        let index = match &self.content {
            Content::Nothing => None,
            Content::Explicit => self.order.get(at as usize).copied(),
            Content::Affine { map, .. } => map.caller_index(at),
        };
        // An index that does not exist is reported unchanged.
        index.unwrap_or(at)
    }
}
