//! Commands unknown to the driver, sent unchanged.

use nvme_spec::{
    admin::{AdminOpcode, FeatureId, GetLogPage},
    nvm::{BlockRange, NvmOpcode},
    sqe::Sqe,
};

use crate::{
    admin::{DATA_BYTES, alloc_aligned, unreachable_by_host},
    clock::Nanos,
    controller::{Controller, State},
    descriptor::{BufferArea, describe},
    dma::{DmaError, IovaRange},
    error::{Error, TimeoutOutcome},
    grant::DescriptorMode,
    io::{Data, PASSTHROUGH, Work},
    platform::buffer::Buffer,
};

/// Data of a passthrough command.
#[derive(Debug)]
pub enum PassthroughData<'a> {
    /// No data.
    None,
    /// Buffer for data from the controller.
    In(&'a mut [u8]),
    /// Data for the controller.
    Out(&'a [u8]),
}

impl PassthroughData<'_> {
    fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::In(data) => data.len(),
            Self::Out(data) => data.len(),
        }
    }
}

/// Bits 1:0 of every opcode (Base, "Opcode"): direction of the data.
const TO_CONTROLLER: u8 = 1;
const FROM_CONTROLLER: u8 = 2;
/// Longest data of an admin command if the controller sets no limit.
const ADMIN_BYTES_MAX: u64 = 4 << 20;

impl Controller {
    /// Sends an unchanged admin command, once, and returns dword 0 of its completion. The driver
    /// fills in the command identifier and the data pointer.
    ///
    /// A command that exceeds `timeout` is aborted. If that fails it is abandoned
    /// ([`TimeoutOutcome::Abandoned`]), and its data stays allocated until the next reset.
    ///
    /// ```
    /// # use nvme_driver::{Controller, Error, Nanos, PassthroughData};
    /// # use nvme_spec::{admin::{AdminOpcode, GetLogPage, LogPageId}, ids::{Cid, Nsid}, sqe::Sqe};
    /// /// The first half kibibyte of the drive's own telemetry.
    /// fn telemetry(drive: &mut Controller) -> Result<[u8; 512], Error> {
    ///     let mut page = [0; 512];
    ///     let mut sqe = Sqe::new(AdminOpcode::GET_LOG_PAGE.0, Cid(0), Nsid::ALL);
    ///     let command = GetLogPage { lid: LogPageId(0x08), numd_z: 127, ..Default::default() };
    ///     command.write_to(&mut sqe);
    ///     let timeout = Nanos::from_millis(60_000);
    ///     drive.admin_passthrough(sqe, PassthroughData::In(&mut page), timeout)?;
    ///     Ok(page)
    /// }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Passthrough`], before anything is sent, for data that does not fit the
    /// command, for fields that the driver fills in, and for commands that would take queues,
    /// events, memory or namespaces away from the driver. Otherwise same as any admin command.
    pub fn admin_passthrough(
        &mut self,
        sqe: Sqe,
        mut data: PassthroughData<'_>,
        timeout: Nanos,
    ) -> Result<u32, Error> {
        self.usable()?;
        let max = self.info.mdts_bytes.unwrap_or(ADMIN_BYTES_MAX);
        check(&sqe, &data, max)
            .and_then(|()| check_admin(&sqe, &data))
            .map_err(self.refused(&sqe))?;
        let dma = |ctrl: &Self, source| Error::Dma { ctrl: ctrl.id.clone(), source };
        let (sqe, buffer) = self.admin_buffer(sqe, &data).map_err(|source| dma(self, source))?;
        // Kept before the controller learns the address, until it is known to be done with it.
        let kept = self.abandoned.len();
        self.abandoned.push(buffer.memory().clone());
        let done = self.admin_once(PASSTHROUGH, &sqe, timeout);
        let left = matches!(done, Err(Error::Timeout { outcome: TimeoutOutcome::Abandoned, .. }));
        if !left && !matches!(self.state, State::Failed(_)) {
            self.abandoned.truncate(kept);
        }
        let result = done?.result;
        if let PassthroughData::In(into) = &mut data {
            buffer.read(0, into).map_err(|source| dma(self, source))?;
        }
        Ok(result)
    }

    /// Allocates a buffer for the data, followed by its PRP list, and adds it to the command.
    fn admin_buffer(
        &self,
        sqe: Sqe,
        data: &PassthroughData<'_>,
    ) -> Result<(Sqe, Buffer), DmaError> {
        let page = self.caps.page_bytes as usize;
        // A command that could transfer data gets a page for it.
        let len = data.len().max(DATA_BYTES).next_multiple_of(page);
        let list = (len / page * 8).next_multiple_of(page);
        let memory = alloc_aligned(&*self.bus, len + 2 * list, page)?;
        let mut buffer = Buffer::new(memory).ok_or_else(|| unreachable_by_host(&*self.bus))?;
        if let PassthroughData::Out(from) = data {
            buffer.write(0, from)?;
        }
        if sqe.opcode & 3 == 0 {
            return Ok((sqe, buffer));
        }
        let all = [IovaRange { iova: buffer.iova(), len: data.len().max(DATA_BYTES) as u64 }];
        let mode = DescriptorMode::Prp { page_bytes: self.caps.page_bytes };
        let mut area = BufferArea::new(&mut buffer, len, 2 * list);
        let named = describe(mode, &all, self.caps.page_bytes, &mut area);
        let named = named.map_err(|_| DmaError::OutOfRange { offset: 0, len, total: len })?;
        Ok((named.put_into(sqe), buffer))
    }

    /// Sends an unchanged command to the driver's own I/O queue, once, and returns dword 0 of its
    /// completion. The driver fills in the command identifier and the data pointer.
    ///
    /// [`crate::queue::QueuePair::post`] does the same for the caller's own queue.
    ///
    /// ```
    /// # use nvme_driver::{Controller, Error, Nanos, PassthroughData};
    /// # use nvme_spec::{ids::{Cid, Lba, Lbas, Nsid}, nvm::{BlockRange, NvmOpcode}, sqe::Sqe};
    /// /// Has the drive read 8 blocks and check them, without a transfer.
    /// fn verify(drive: &mut Controller, nsid: Nsid) -> Result<(), Error> {
    ///     let mut sqe = Sqe::new(NvmOpcode::VERIFY.0, Cid(0), nsid);
    ///     BlockRange::new(Lba(0), Lbas(8)).expect("1 to 65,536").write_to(&mut sqe);
    ///     let timeout = Nanos::from_millis(10_000);
    ///     drive.io_passthrough(sqe, PassthroughData::None, timeout).map(|_| ())
    /// }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Passthrough`], before anything is sent, or [`Error::Namespace`]. Otherwise
    /// same as [`Controller::read`].
    pub fn io_passthrough(
        &mut self,
        sqe: Sqe,
        data: PassthroughData<'_>,
        timeout: Nanos,
    ) -> Result<u32, Error> {
        self.usable()?;
        let lba_bytes = self.namespace(sqe.nsid())?.lba_bytes();
        let max = self.info.mdts_bytes.unwrap_or(u64::MAX).min(self.options.bounce_bytes.into());
        check(&sqe, &data, max)
            .and_then(|()| check_io(&sqe, &data, lba_bytes))
            .map_err(self.refused(&sqe))?;
        let data = match data {
            PassthroughData::None => Data::None,
            PassthroughData::In(into) => Data::In(into),
            PassthroughData::Out(from) => Data::Out(from),
        };
        self.run_within(Work::single(PASSTHROUGH, sqe, data), timeout)
    }

    fn refused(&self, sqe: &Sqe) -> impl FnOnce(String) -> Error + use<> {
        let (ctrl, opcode) = (self.id.clone(), sqe.opcode);
        move |what| Error::Passthrough { ctrl, opcode, what }
    }
}

/// Checks the rules common to all commands.
fn check(sqe: &Sqe, data: &PassthroughData<'_>, max: u64) -> Result<(), String> {
    if sqe.flags != 0 || sqe.cid != 0 || sqe.mptr != 0 || sqe.dptr != Default::default() {
        return Err("flags, CID, MPTR and DPTR have to be 0; the driver fills them in".into());
    }
    let (len, way) = (data.len(), sqe.opcode & 3);
    if !len.is_multiple_of(4) || len as u64 > max {
        return Err(format!("{len} bytes of data; at most {max}, in dwords, can be transferred"));
    }
    let fits = match data {
        PassthroughData::None => true,
        PassthroughData::In(_) => way == FROM_CONTROLLER && len > 0,
        PassthroughData::Out(_) => way == TO_CONTROLLER && len > 0,
    };
    if fits {
        Ok(())
    } else {
        Err(format!("its data does not go that way (opcode bits {way:02b}b)"))
    }
}

fn check_admin(sqe: &Sqe, data: &PassthroughData<'_>) -> Result<(), String> {
    const QUEUES: &str = "queues are the driver's; use create_queue_pair() and reclaim()";
    let instead = match AdminOpcode(sqe.opcode) {
        AdminOpcode::CREATE_IO_CQ
        | AdminOpcode::CREATE_IO_SQ
        | AdminOpcode::DELETE_IO_CQ
        | AdminOpcode::DELETE_IO_SQ => QUEUES,
        AdminOpcode::ASYNC_EVENT_REQUEST => "events are the driver's; use poll_events()",
        AdminOpcode::ABORT => "the driver's commands are its own to abort; use abort()",
        AdminOpcode::FORMAT_NVM => "grants name the LBA size; use format()",
        AdminOpcode::DOORBELL_BUFFER_CONFIG => "doorbells are the driver's",
        AdminOpcode::SET_FEATURES => match FeatureId(sqe.cdw10 as u8) {
            FeatureId::NUMBER_OF_QUEUES => QUEUES,
            FeatureId::ASYNC_EVENT_CONFIG => "events are the driver's; use poll_events()",
            FeatureId::HOST_MEMORY_BUFFER => "the driver lends it no memory",
            FeatureId::HOST_BEHAVIOR_SUPPORT => "the driver says what it supports",
            _ => return Ok(()),
        },
        AdminOpcode::IDENTIFY if data.len() != 4096 => "it returns 4096 bytes",
        AdminOpcode::GET_LOG_PAGE => {
            let bytes = (u64::from(GetLogPage::from_sqe(sqe).numd_z) + 1) * 4;
            if bytes == data.len() as u64 {
                return Ok(());
            }
            return Err(format!("NUMD asks for {bytes} bytes, there is room for {}", data.len()));
        }
        _ => return Ok(()),
    };
    Err(instead.into())
}

fn check_io(sqe: &Sqe, data: &PassthroughData<'_>, lba_bytes: u64) -> Result<(), String> {
    if sqe.opcode & 3 != 0 && data.len() == 0 {
        return Err("it transfers data, and there is none".into());
    }
    let blocks = match NvmOpcode(sqe.opcode) {
        NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::COMPARE => {
            u64::from(BlockRange::from_sqe(sqe).lbas().0) * lba_bytes
        }
        _ => return Ok(()),
    };
    if blocks == data.len() as u64 {
        return Ok(());
    }
    Err(format!("NLB means {blocks} bytes, there are {}", data.len()))
}
