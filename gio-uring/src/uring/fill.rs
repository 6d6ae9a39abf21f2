//! Taking IOCBs and filling them.

use std::ops::Range;

use nvme_spec::nvm::Direction;

use super::{Flags, Uring};
use crate::{
    abi::{self, IoCtx, Iocb},
    error::Error,
    event::{Signal, Wait},
    explicit,
    iocb::{Content, IocbId, Iocbs, Phase},
    map::{self, BlockMap},
    pool::PoolHandle,
};

/// Phases in which an IOCB can be filled (again).
const FILLABLE: &[Phase] = &[Phase::Taken, Phase::Filled];

impl Uring {
    /// Takes `count` IOCBs (at most [`crate::BATCH_MAX`]) whose operations start once `wait` is
    /// reached.
    ///
    /// # Errors
    /// [`Error::Busy`] when fewer are free, [`Error::Batch`], [`Error::Foreign`] for another ring's
    /// event.
    pub fn get_iocb(&mut self, count: u32, wait: Option<&Wait>) -> Result<Iocbs, Error> {
        self.own("event", wait.is_none_or(|wait| wait.event.is_of(&self.arena)))?;
        self.table.take(count, wait)
    }

    /// Gives an IOCB back that will not be issued.
    ///
    /// # Errors
    /// [`Error::Id`] when it was issued, or is not the caller's.
    pub fn release(&mut self, id: IocbId) -> Result<(), Error> {
        self.table.in_phase(id, &[Phase::Taken, Phase::Filled], "taken and not issued")?;
        self.table.release(id);
        Ok(())
    }

    /// Makes the operation that `id` will be filled with signal an event when it completed.
    ///
    /// # Errors
    /// [`Error::Id`] unless it is taken and not yet filled, [`Error::Foreign`].
    pub fn signal(&mut self, id: IocbId, signal: &Signal) -> Result<(), Error> {
        self.own("event", signal.event.is_of(&self.arena))?;
        let entry = self.table.in_phase(id, &[Phase::Taken], "taken and not filled")?;
        entry.signal = Some(signal.clone());
        Ok(())
    }

    /// Fills an IOCB with contexts that name memory and LBAs. They are copied, grouped by device.
    ///
    /// # Errors
    /// [`Error::Count`], [`Error::IoCtx`] for an unknown device, a range outside its namespace, a
    /// length that is not whole LBAs, or misaligned memory; [`Error::Id`].
    pub fn fill_explicit(
        &mut self,
        id: IocbId,
        direction: Direction,
        flags: Flags,
        contexts: &[IoCtx],
    ) -> Result<(), Error> {
        let max = self.options.explicit_max;
        if contexts.is_empty() || contexts.len() > max as usize {
            return Err(Error::Count { what: "the IOCB", found: contexts.len(), max });
        }
        let bytes_max = explicit::check(contexts, &self.queues.devices)?;
        let (layout, region, devices) = (&self.layout, &self.region, self.queues.devices.len());
        let entry = self.table.in_phase(id, FILLABLE, "taken and not issued")?;
        let index = id.index();
        let (at, starts) = (layout.contexts(index), layout.starts(index));
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
        self.fill(id, direction, flags, iocb);
        Ok(())
    }

    /// Fills an IOCB with rows `rows` of every file of `map`. Costs the same for any map.
    ///
    /// # Errors
    /// [`Error::Rows`] outside the pool, [`Error::Foreign`], [`Error::Id`].
    pub fn fill_affine(
        &mut self,
        id: IocbId,
        direction: Direction,
        flags: Flags,
        map: &BlockMap,
        pool: &PoolHandle,
        rows: Range<u32>,
    ) -> Result<(), Error> {
        self.own("map", map.is_of(&self.arena))?;
        self.own("pool", pool.is_of(&self.arena))?;
        pool.check(map.len(), &rows)?;
        let entry = self.table.in_phase(id, FILLABLE, "taken and not issued")?;
        let row_count = rows.end - rows.start;
        entry.content = Content::Affine { map: map.clone(), _pool: pool.clone() };
        entry.expected = map.len() as u64 * u64::from(row_count);
        let [ioctx, starts, status] = map.addresses();
        let iocb = Iocb {
            kind: abi::KIND_AFFINE,
            count: map.len() as u32,
            ioctx,
            starts,
            status,
            pool: pool.address(),
            row_first: rows.start,
            row_count,
            ..Iocb::default()
        };
        self.fill(id, direction, flags, iocb);
        Ok(())
    }

    fn fill(&mut self, id: IocbId, direction: Direction, flags: Flags, mut iocb: Iocb) {
        let devices = self.devices();
        let entry = self.table.get(id).expect("the caller looked it up");
        iocb.opcode = match direction {
            Direction::Read => abi::OP_READ,
            Direction::Write => abi::OP_WRITE,
        };
        iocb.flags = if flags.fua { abi::FLAG_FUA } else { 0 };
        iocb.devices = devices;
        if let Some(Wait { event, value }) = &entry.wait {
            (iocb.wait, iocb.wait_value) = (event.address().0, *value);
        }
        if let Some(Signal { event, value }) = &entry.signal {
            (iocb.signal, iocb.signal_value) = (event.address().0, *value);
        }
        self.region.write(self.layout.iocb(id.index()), iocb);
        entry.phase = Phase::Filled;
    }
}
