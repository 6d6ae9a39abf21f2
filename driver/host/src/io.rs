//! The driver's own queue and the blocking calls that use it.
//!
//! A transfer is split into commands (MDTS, NOIOB, bounce buffer, descriptor area). Up to
//! [`crate::ControllerOptions::host_depth`] of them are in flight, each in its own lane with a
//! bounce buffer and a descriptor area.

use nvme_spec::{
    ids::{Cid, Lba, Lbas, Nsid},
    nvm::{BlockRange, Directive, DirectiveType, NvmOpcode},
    sqe::Sqe,
    status::Status,
};

use crate::{
    bus::Interrupt,
    clock::Nanos,
    descriptor::{BufferArea, DescriptorError, describe},
    dma::{DmaError, DmaSlice, IovaRange},
    error::Error,
    grant::DescriptorMode,
    options::ControllerOptions,
    platform::buffer::Buffer,
    port::Port,
    queue::{Completion, DeviceError, QueuePair},
    wait::{Dead, Env, Watch, retry_delay},
};

/// Bytes of one lane's descriptor area: a list or segment of one page and a chained second one.
pub(crate) const AREA_BYTES: usize = 8192;
/// Longest SGL segment; longer lists are chained.
const SEGMENT_BYTES: u32 = 4096;

/// Memory of the driver's own queue. Allocated once and reused after each reset.
#[derive(Debug, Clone)]
pub(crate) struct HostMemory {
    pub(crate) depth: u32,
    pub(crate) lanes: u16,
    pub(crate) sq: DmaSlice,
    pub(crate) cq: DmaSlice,
    descriptors: Buffer,
    /// `bounce_bytes` per lane, allocated by the first call that needs it.
    bounce: Option<Buffer>,
    bounce_bytes: usize,
}

impl HostMemory {
    pub(crate) fn new(port: &Port, options: &ControllerOptions) -> Result<Self, Error> {
        let most = 1 << port.caps.entries_max.ilog2();
        let depth = (u32::from(options.host_depth) + 1).next_power_of_two().min(most);
        let lanes = options.host_depth.min((depth - 1) as u16);
        Ok(Self {
            depth,
            lanes,
            sq: port.alloc(depth as usize * 64)?,
            cq: port.alloc(depth as usize * 16)?,
            descriptors: port.buffer(lanes as usize * AREA_BYTES)?,
            bounce: None,
            bounce_bytes: options.bounce_bytes as usize,
        })
    }

    /// Allocates the bounce buffers, if this was not done yet.
    pub(crate) fn ensure_bounce(&mut self, port: &Port) -> Result<(), Error> {
        if self.bounce.is_none() {
            self.bounce = Some(port.buffer(self.bounce_bytes * self.lanes as usize)?);
        }
        Ok(())
    }
}

/// The command in a lane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flight {
    pub(crate) cid: Cid,
    /// Number of retries so far.
    attempt: u32,
    /// Time of the next retry, if the command failed and is to be retried.
    again: Option<Nanos>,
    pub(crate) lba: u64,
    pub(crate) lbas: u64,
    /// Offset and length of its data in the caller's buffer, in bytes.
    offset: usize,
    bytes: usize,
    deadline: Nanos,
}

/// The caller's data.
#[derive(Debug)]
pub(crate) enum Data<'a> {
    None,
    In(&'a mut [u8]),
    Out(&'a [u8]),
    Parts(&'a [DmaSlice]),
}

/// Description of a blocking call.
#[derive(Debug)]
pub(crate) struct Work<'a> {
    pub(crate) what: &'static str,
    pub(crate) opcode: NvmOpcode,
    pub(crate) nsid: Nsid,
    pub(crate) lba_shift: u8,
    pub(crate) lba: u64,
    pub(crate) lbas: u64,
    pub(crate) command_lbas: u64,
    /// No command crosses a multiple of this many LBAs; 0 = no boundary.
    pub(crate) boundary_lbas: u64,
    pub(crate) fua: bool,
    /// Placement Identifier of a write.
    pub(crate) placement: Option<u16>,
    pub(crate) deallocate: bool,
    pub(crate) data: Data<'a>,
    /// A command without an LBA range, sent once and unchanged; its data is all of `data`.
    pub(crate) single: Option<Sqe>,
}

impl<'a> Work<'a> {
    /// Describes one unchanged command.
    pub(crate) fn single(what: &'static str, sqe: Sqe, data: Data<'a>) -> Self {
        Self {
            what,
            opcode: NvmOpcode(sqe.opcode),
            nsid: sqe.nsid(),
            lba_shift: 0,
            lba: 0,
            lbas: 1,
            command_lbas: 1,
            boundary_lbas: 0,
            fua: false,
            placement: None,
            deallocate: false,
            data,
            single: Some(sqe),
        }
    }

    /// Returns the number of LBAs of the command that begins `next` LBAs into the work.
    fn command_len(&self, next: u64) -> u64 {
        let lbas = self.command_lbas.min(self.lbas - next);
        match (self.lba + next).checked_rem(self.boundary_lbas) {
            Some(past) => lbas.min(self.boundary_lbas - past),
            None => lbas,
        }
    }

    /// Returns the LBA range to put into errors.
    pub(crate) fn range(&self, flight: &Flight) -> Option<(Lba, u64)> {
        self.single.is_none().then_some((Lba(flight.lba), flight.lbas))
    }
}

/// Failure of a blocking call.
#[derive(Debug)]
pub(crate) enum IoFault {
    Command(Flight, Status),
    Timeout(Flight),
    Device(DeviceError),
    Dead(Dead),
    Descriptor(DescriptorError),
    Dma(DmaError),
}

/// Parameters of the queue's operation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy<'a> {
    pub(crate) env: Env<'a>,
    pub(crate) timeout: Nanos,
    pub(crate) mode: DescriptorMode,
    /// The controller's Command Retry Delay Times in units of 100 ms; `None` disables retries.
    pub(crate) crdt: Option<[u16; 3]>,
}

#[derive(Debug)]
pub(crate) struct HostQueue {
    pair: QueuePair,
    interrupt: Option<Interrupt>,
    lanes: Box<[Option<Flight>]>,
    free: Vec<u16>,
    parts: Vec<IovaRange>,
    done: Vec<Completion>,
}

impl HostQueue {
    pub(crate) fn new(pair: QueuePair, lanes: u16, interrupt: Option<Interrupt>) -> Self {
        Self {
            pair,
            interrupt,
            lanes: vec![None; lanes as usize].into(),
            free: (0..lanes).rev().collect(),
            parts: Vec::new(),
            done: Vec::with_capacity(lanes as usize),
        }
    }

    /// Returns the number of commands in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.lanes.len() - self.free.len()
    }

    /// Executes all of `work`. After the first failure
    /// nothing more is sent, but commands in flight are waited for. After any fault but `Command`,
    /// commands may still be in flight.
    pub(crate) fn run(
        &mut self,
        policy: &Policy<'_>,
        memory: &mut HostMemory,
        work: &mut Work<'_>,
    ) -> Result<(), IoFault> {
        let (mut next, mut failure) = (0, None);
        let interrupt = self.interrupt.clone();
        let mut waiter = Watch::new(policy.env, interrupt.as_ref());
        loop {
            self.send_again(policy, memory, work, &mut failure);
            while failure.is_none() && next < work.lbas {
                let Some(lane) = self.free.pop() else { break };
                match self.send(policy, memory, work, lane, next, 0) {
                    Ok(lbas) => next += lbas,
                    Err(fault) => {
                        self.free.push(lane);
                        failure = Some(fault);
                    }
                }
            }
            self.pair.update_tail();
            if self.in_flight() == 0 {
                return failure.map_or(Ok(()), Err);
            }
            if self.collect(policy, memory, work, &mut failure)? > 0 {
                waiter.moved();
                continue;
            }
            let due = |flight: &Flight| flight.again.unwrap_or(flight.deadline);
            let deadline = self.lanes.iter().flatten().map(due).min();
            if !waiter.wait(deadline.unwrap_or(Nanos::MAX)).map_err(IoFault::Dead)? {
                // It may have completed while the clock was read.
                self.collect(policy, memory, work, &mut failure)?;
                let late =
                    |flight: &&Flight| flight.again.is_none() && waiter.is_past(flight.deadline);
                if let Some(late) = self.lanes.iter().flatten().find(late) {
                    return Err(IoFault::Timeout(*late));
                }
            }
        }
    }

    /// Resubmits failed commands that are due; drops them if another one failed for good.
    fn send_again(
        &mut self,
        policy: &Policy<'_>,
        memory: &mut HostMemory,
        work: &Work<'_>,
        failure: &mut Option<IoFault>,
    ) {
        for lane in 0..self.lanes.len() {
            let Some(flight @ Flight { again: Some(due), .. }) = self.lanes[lane] else { continue };
            if failure.is_none() && policy.env.clock.now() < due {
                continue;
            }
            self.lanes[lane] = None;
            let (lane, next) = (lane as u16, flight.lba - work.lba);
            let sent = match failure {
                None => self.send(policy, memory, work, lane, next, flight.attempt + 1),
                Some(_) => Ok(0),
            };
            if self.lanes[lane as usize].is_none() {
                self.free.push(lane);
            }
            if let Err(fault) = sent {
                failure.get_or_insert(fault);
            }
        }
    }

    /// Submits the command that begins `next` LBAs into the work. Returns its number of LBAs.
    fn send(
        &mut self,
        policy: &Policy<'_>,
        memory: &mut HostMemory,
        work: &Work<'_>,
        lane: u16,
        next: u64,
        attempt: u32,
    ) -> Result<u64, IoFault> {
        let lbas = work.command_len(next);
        let (mut offset, mut bytes) = (0, 0);
        let mut sqe = match work.single {
            Some(sqe) => sqe,
            None => block_command(work, work.lba + next, lbas),
        };
        match &work.data {
            Data::None => {}
            _ if work.single.is_none() => {
                offset = (next << work.lba_shift) as usize;
                bytes = (lbas << work.lba_shift) as usize;
            }
            Data::Out(all) => bytes = all.len(),
            Data::In(all) => bytes = all.len(),
            Data::Parts(_) => {}
        }
        if bytes > 0 {
            self.locate(memory, work, lane, offset, bytes).map_err(IoFault::Dma)?;
            let at = lane as usize * AREA_BYTES;
            let mut area = BufferArea::new(&mut memory.descriptors, at, AREA_BYTES);
            let descriptor = describe(policy.mode, &self.parts, SEGMENT_BYTES, &mut area)
                .map_err(IoFault::Descriptor)?;
            sqe = descriptor.put_into(sqe);
        }
        // There are fewer lanes than entries, so the queue cannot be full.
        let qid = self.pair.qid();
        let full = |_| IoFault::Device(DeviceError::Overfull { qid });
        let deadline = policy.env.clock.now() + policy.timeout;
        let cid = self.pair.post(&sqe, u64::from(lane)).map_err(full)?;
        let lba = work.lba + next;
        self.lanes[lane as usize] =
            Some(Flight { cid, attempt, again: None, lba, lbas, offset, bytes, deadline });
        Ok(lbas)
    }

    /// Fills `parts` with the data's I/O virtual ranges and, for a write, fills the bounce buffer.
    fn locate(
        &mut self,
        memory: &mut HostMemory,
        work: &Work<'_>,
        lane: u16,
        offset: usize,
        bytes: usize,
    ) -> Result<(), DmaError> {
        self.parts.clear();
        if let Data::Parts(slices) = &work.data {
            collect_parts(slices, offset, bytes, &mut self.parts);
            return Ok(());
        }
        let at = lane as usize * memory.bounce_bytes;
        let outside = DmaError::OutOfRange { offset, len: bytes, total: memory.bounce_bytes };
        let Some(bounce) = memory.bounce.as_mut() else { return Err(outside) };
        if bytes > memory.bounce_bytes {
            return Err(outside);
        }
        if let Data::Out(all) = &work.data {
            bounce.write(at, &all[offset..offset + bytes])?;
        }
        let iova = bounce.iova().offset(at as u64);
        self.parts.push(IovaRange { iova, len: bytes as u64 });
        Ok(())
    }

    /// Reaps completions and returns their number.
    fn collect(
        &mut self,
        policy: &Policy<'_>,
        memory: &HostMemory,
        work: &mut Work<'_>,
        failure: &mut Option<IoFault>,
    ) -> Result<usize, IoFault> {
        self.reap()?;
        let count = self.done.len();
        for Completion { user, status, .. } in self.done.drain(..) {
            let lane = user as usize;
            let Some(flight) = self.lanes.get_mut(lane).and_then(Option::take) else { continue };
            let again = policy.crdt.and_then(|crdt| retry_delay(status, crdt, flight.attempt));
            if let (None, Some(delay)) = (&failure, again) {
                let again = Some(policy.env.clock.now() + delay);
                self.lanes[lane] = Some(Flight { again, ..flight });
                continue;
            }
            self.free.push(lane as u16);
            if !status.is_success() {
                failure.get_or_insert(IoFault::Command(flight, status));
                continue;
            }
            if let (Data::In(all), Some(bounce)) = (&mut work.data, &memory.bounce) {
                let to = &mut all[flight.offset..flight.offset + flight.bytes];
                bounce.read(lane * memory.bounce_bytes, to).map_err(IoFault::Dma)?;
            }
        }
        Ok(count)
    }

    fn reap(&mut self) -> Result<(), IoFault> {
        let Self { pair, done, lanes, .. } = self;
        done.clear();
        let max = lanes.len() as u32;
        pair.reap(max, |completion| done.push(completion)).map_err(IoFault::Device)?;
        Ok(())
    }

    /// Waits until nothing is in flight, without reading the data of completed commands. Returns
    /// false if `deadline` passed first.
    pub(crate) fn drain(&mut self, env: Env<'_>, deadline: Nanos) -> Result<bool, IoFault> {
        let interrupt = self.interrupt.clone();
        let mut waiter = Watch::new(env, interrupt.as_ref());
        for (lane, flight) in self.lanes.iter_mut().enumerate() {
            if flight.is_some_and(|flight| flight.again.is_some()) {
                *flight = None;
                self.free.push(lane as u16);
            }
        }
        loop {
            self.reap()?;
            for Completion { user, .. } in self.done.drain(..) {
                if self.lanes.get_mut(user as usize).and_then(Option::take).is_some() {
                    self.free.push(user as u16);
                }
            }
            if self.in_flight() == 0 {
                return Ok(true);
            }
            if !waiter.wait(deadline).map_err(IoFault::Dead)? {
                return Ok(false);
            }
        }
    }
}

fn block_command(work: &Work<'_>, lba: u64, lbas: u64) -> Sqe {
    let mut sqe = Sqe::new(work.opcode.0, Cid(0), work.nsid);
    // Commands have 1 to 65,536 LBAs.
    if let Some(range) = BlockRange::new(Lba(lba), Lbas(lbas as u32)) {
        BlockRange { fua: work.fua, deac: work.deallocate, ..range }.write_to(&mut sqe);
    }
    if let Some(specific) = work.placement {
        Directive { kind: DirectiveType::DATA_PLACEMENT, specific }.write_to(&mut sqe);
    }
    sqe
}

/// Collects the ranges of `bytes` bytes from `offset` on in the concatenation of all `slices`.
/// Adjacent ranges are merged.
fn collect_parts(slices: &[DmaSlice], offset: usize, bytes: usize, parts: &mut Vec<IovaRange>) {
    let (mut skip, mut left) = (offset, bytes);
    for slice in slices {
        if skip >= slice.len() {
            skip -= slice.len();
            continue;
        }
        let len = (slice.len() - skip).min(left);
        if len == 0 {
            break;
        }
        let iova = slice.iova().offset(skip as u64);
        match parts.last_mut() {
            Some(last) if last.iova.0 + last.len == iova.0 => last.len += len as u64,
            _ => parts.push(IovaRange { iova, len: len as u64 }),
        }
        (skip, left) = (0, left - len);
    }
}
