//! I/O control blocks: filled by an operation, published, in flight, done. The table has the
//! caller's side of each: its state, and the references that it keeps alive.

use std::ops::Range;

use nvme_spec::nvm::Direction;

use super::{State, Uring};
use crate::{
    abi::{self, IoCtx, Iocb},
    checksums::Checksums,
    completion::Completion,
    error::Error,
    event::{Signal, Wait},
    explicit,
    iocb_id::IocbId,
    map::{self, BlockMap},
    pool::PoolHandle,
    status::IoStatus,
};

/// An operation on a range of rows of every file of a map.
#[derive(Debug, Clone)]
pub struct AffineOp<'a> {
    /// Read (device to memory) or write.
    pub direction: Direction,
    /// Force Unit Access: writes reach non-volatile media before they complete.
    pub fua: bool,
    /// Writes: placement handle of the data, on devices that support placement.
    pub placement: Option<u16>,
    /// The blocks and their files.
    pub map: &'a BlockMap,
    /// The layout of blocks and files.
    pub pool: &'a PoolHandle,
    /// The rows.
    pub rows: Range<u32>,
    /// Checksums of all rows of the map: a write stores those of its rows, a read verifies them.
    pub checksums: Option<&'a Checksums>,
    /// Condition to start the operation.
    pub wait: Option<&'a Wait>,
    /// Signal sent when the operation completes, with or without errors.
    pub signal: Option<&'a Signal>,
    /// Number of SMs that the executor should spend on it; ignored by executors without SMs.
    pub sms: u32,
}

impl<'a> AffineOp<'a> {
    /// Creates an operation on one SM without wait, signal, checksums or Force Unit Access.
    #[must_use]
    pub fn new(
        direction: Direction,
        map: &'a BlockMap,
        pool: &'a PoolHandle,
        rows: Range<u32>,
    ) -> Self {
        let (checksums, wait, signal) = (None, None, None);
        let (fua, placement) = (false, None);
        Self { direction, fua, placement, map, pool, rows, checksums, wait, signal, sms: 1 }
    }
}

/// Checks that the kernel can store or verify `checksums` for objects of `pool`.
fn check_checksums(checksums: &Checksums, map: &BlockMap, pool: &PoolHandle) -> Result<(), Error> {
    let wrong = |problem| Err(Error::Checksums { problem });
    if !checksums.is_of(map) {
        return wrong("they are of another map; make them with the operation's".to_owned());
    }
    if checksums.rows() != pool.rows() {
        let (found, rows) = (checksums.rows(), pool.rows());
        return wrong(format!("they are of {found} rows; the pool has {rows}, all are needed"));
    }
    if !pool.is_reachable() {
        let problem = "the kernel cannot reach the pool's objects; register it with row_memory";
        return wrong(problem.to_owned());
    }
    Ok(())
}

impl Uring {
    /// Submits an operation. The cost is independent of the map's size.
    ///
    /// # Errors
    /// Returns [`Error::Busy`] if every IOCB is in flight, [`Error::Argument`] if rows are outside
    /// the pool, [`Error::Checksums`] for checksums of another map or number of rows or a pool
    /// without [`PoolDesc::row_memory`](crate::PoolDesc::row_memory), [`Error::Foreign`],
    /// [`Error::State`], or [`Error::Submitted`] if the kernel failed: the operation is then in
    /// flight and completes when the ring is stopped.
    pub fn submit(&mut self, op: &AffineOp<'_>) -> Result<IocbId, Error> {
        let AffineOp { map, pool, rows, wait, signal, .. } = op;
        self.own("map", map.is_of(&self.arena))?;
        self.own("pool", pool.is_of(&self.near))?;
        self.own("event", wait.is_none_or(|wait| self.owns(&wait.event)))?;
        self.own("event", signal.is_none_or(|signal| self.owns(&signal.event)))?;
        pool.check(map.len(), rows)?;
        if let Some(checksums) = op.checksums {
            check_checksums(checksums, map, pool)?;
        }
        let row_count = rows.end - rows.start;
        let [ioctx, starts, status] = map.addresses();
        let mut iocb = Iocb {
            kind: abi::KIND_AFFINE,
            count: map.len() as u32,
            ioctx,
            starts,
            status,
            pool: pool.address(),
            row_first: rows.start,
            row_count,
            checksums: op.checksums.map_or(0, Checksums::address),
            placement: op.placement.map_or(0, |handle| u32::from(handle) + 1),
            ..Iocb::default()
        };
        let (id, entry) = self.take()?;
        let kept = (op.checksums.cloned(), (*pool).clone());
        entry.content = Content::Affine { map: (*map).clone(), _kept: kept };
        entry.expected = map.len() as u64 * u64::from(row_count);
        entry.wait = wait.cloned();
        entry.signal = signal.cloned();
        if let Some(Wait { event, value }) = wait {
            (iocb.wait, iocb.wait_value) = (event.address().0, *value);
        }
        if let Some(Signal { event, value }) = signal {
            (iocb.signal, iocb.signal_value) = (event.address().0, *value);
        }
        self.publish(id, op.direction, op.fua, op.sms, iocb)
    }

    /// Submits an operation on explicit contexts (memory and LBAs), which are copied and grouped by
    /// device. It starts without waiting for an event.
    ///
    /// # Errors
    /// Returns [`Error::Argument`] for their number, an unknown device, a range out of bounds, a
    /// length of partial LBAs, or misaligned memory; otherwise same as [`Uring::submit`].
    pub fn submit_explicit(
        &mut self,
        direction: Direction,
        fua: bool,
        contexts: &[IoCtx],
    ) -> Result<IocbId, Error> {
        let max = self.options.explicit_max;
        if contexts.is_empty() || contexts.len() > max as usize {
            return Err(Error::count("the IOCB", contexts.len(), max));
        }
        let bytes_max = explicit::check(contexts, &self.queues.devices)?;
        let (id, _) = self.take()?;
        let (layout, region, devices) = (&self.layout, &self.region, self.queues.devices.len());
        let index = id.index();
        let (at, starts) = (layout.contexts(index), layout.starts(index));
        let entry = self.table.issued(index)?;
        map::group(
            contexts.len(),
            devices as u32,
            &mut entry.order,
            |index| contexts[index].device,
            |index| contexts[index].lba,
            |class, first| region.put(starts, class, first),
        );
        for (slot, &index) in entry.order.iter().enumerate() {
            region.put(at, slot, contexts[index as usize]);
        }
        region.zero(layout.statuses(index), contexts.len() * size_of::<u32>());
        entry.content = Content::Explicit;
        entry.expected = contexts.len() as u64;
        let iocb = Iocb {
            kind: abi::KIND_EXPLICIT,
            count: contexts.len() as u32,
            ioctx: region.address(at),
            starts: region.address(starts),
            status: region.address(layout.statuses(index)),
            bytes_max,
            ..Iocb::default()
        };
        self.publish(id, direction, fua, 1, iocb)
    }

    fn take(&mut self) -> Result<(IocbId, &mut Entry), Error> {
        self.expect(State::Running)?;
        self.table.take()
    }

    fn publish(
        &mut self,
        id: IocbId,
        direction: Direction,
        fua: bool,
        sms: u32,
        mut iocb: Iocb,
    ) -> Result<IocbId, Error> {
        iocb.opcode = match direction {
            Direction::Read => abi::OP_READ,
            Direction::Write => abi::OP_WRITE,
        };
        iocb.flags = if fua { abi::FLAG_FUA } else { 0 };
        iocb.devices = self.devices();
        self.region.write(self.layout.iocb(id.index()), iocb);
        self.submit.publish(id.index());
        self.issued += 1;
        self.write_clock();
        match self.executor.submitted(self.submit.tail(), sms) {
            Ok(()) => Ok(id),
            Err(source) => Err(Error::Submitted { iocb: id, source }),
        }
    }
}

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
