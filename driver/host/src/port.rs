//! A controller as its bus shows it: registers, memory, clock and name.

use std::sync::Arc;

use nvme_spec::{
    ids::{Nsid, QueueId},
    reg::{self, Cap, Crto, Csts, Version},
};

use crate::{
    bus::{Bus, DoorbellPage, Interrupt},
    clock::{Clock, Nanos, Waiter},
    dma::{DmaError, DmaSlice},
    error::Error,
    info::Capabilities,
    options::WaitMode,
    platform::buffer::Buffer,
    wait::Env,
};

#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) bus: Arc<dyn Bus>,
    pub(crate) clock: Arc<dyn Clock>,
    /// Display name, for errors and messages.
    pub(crate) id: Arc<str>,
    /// Mapping that contains all granted doorbells.
    pub(crate) doorbells: DoorbellPage,
    pub(crate) caps: Capabilities,
}

impl Port {
    /// Reads the capabilities of the controller behind `bus`.
    pub(crate) fn open(bus: Arc<dyn Bus>, clock: Arc<dyn Clock>) -> Result<Self, Error> {
        let (id, doorbells): (Arc<str>, _) = (Arc::from(bus.id()), bus.doorbells());
        let gone = || Error::Gone { ctrl: id.clone() };
        let read = |offset| bus.read32(offset).map_err(|_| gone());
        let (low, high) = (read(reg::CAP)?, read(reg::CAP + 4)?);
        if (low, high) == (reg::ALL_ONES, reg::ALL_ONES) {
            return Err(gone());
        }
        let cap = Cap(u64::from(low) | u64::from(high) << 32);
        let version = Version(read(reg::VS)?);
        let crto = if cap.crms() == 0 { Crto::default() } else { Crto(read(reg::CRTO)?) };
        let caps = Capabilities::check(cap, crto, version, doorbells.stride())
            .map_err(|what| Error::Implausible { ctrl: id.clone(), what })?;
        Ok(Self { bus, clock, id, doorbells, caps })
    }

    pub(crate) fn read32(&self, offset: u32) -> Result<u32, Error> {
        self.bus.read32(offset).map_err(|_| Error::Gone { ctrl: self.id.clone() })
    }

    pub(crate) fn write32(&self, offset: u32, value: u32) -> Result<(), Error> {
        self.bus.write32(offset, value).map_err(|_| Error::Gone { ctrl: self.id.clone() })
    }

    /// Reads CSTS.
    pub(crate) fn status(&self) -> Result<Csts, Error> {
        let csts = Csts(self.read32(reg::CSTS)?);
        if csts.is_gone() { Err(Error::Gone { ctrl: self.id.clone() }) } else { Ok(csts) }
    }

    /// Waits until CSTS.RDY is `ready`.
    pub(crate) fn wait_ready(&self, ready: u8) -> Result<(), Error> {
        let waited = self.caps.ready_timeout;
        let mut waiter = Waiter::new(&*self.clock, self.clock.now() + waited);
        loop {
            let csts = self.status()?;
            if csts.rdy() == ready {
                return Ok(());
            }
            if ready == 1 && csts.cfs() != 0 {
                return Err(Error::Fatal { ctrl: self.id.clone(), csts: csts.0 });
            }
            if !waiter.wait() {
                let ctrl = self.id.clone();
                return Err(Error::NotReady { ctrl, ready, waited, csts: csts.0 });
            }
        }
    }

    /// Returns the environment of a wait in which pauses of up to `pause_max` do not count.
    pub(crate) fn env(&self, pause_max: Nanos) -> Env<'_> {
        Env { clock: &*self.clock, bus: &*self.bus, pause_max }
    }

    /// Returns interrupt `vector` if the blocking calls wait for interrupts.
    pub(crate) fn interrupt(
        &self,
        mode: WaitMode,
        vector: u16,
    ) -> Result<Option<Interrupt>, Error> {
        if mode == WaitMode::Poll {
            return Ok(None);
        }
        let ctrl = self.id.clone();
        self.bus.interrupt(vector).map(Some).map_err(|source| Error::Interrupt { ctrl, source })
    }

    /// Allocates `len` zeroed bytes, aligned to a page of the controller on the bus.
    pub(crate) fn alloc(&self, len: usize) -> Result<DmaSlice, Error> {
        let page = self.caps.page_bytes as usize;
        // DmaSpace promises alignment to its own pages only; the controller's may be larger.
        let slack = if page > 4096 { page } else { 0 };
        let aligned = || {
            let all = self.bus.dma().alloc_on(len + slack, self.bus.numa_node())?;
            let all = DmaSlice::whole(all)?;
            let past = all.iova().0 as usize % page;
            if past == 0 { all.slice(0, len) } else { all.slice(page - past, len) }
        };
        aligned().map_err(|source| self.dma(source))
    }

    /// Allocates `len` bytes as [`Port::alloc`] does, for the CPU as well.
    pub(crate) fn buffer(&self, len: usize) -> Result<Buffer, Error> {
        self.mapped(self.alloc(len)?)
    }

    /// Returns `memory` for the CPU.
    pub(crate) fn mapped(&self, memory: DmaSlice) -> Result<Buffer, Error> {
        Buffer::new(memory).ok_or_else(|| {
            self.dma(DmaError::Unsupported {
                space: self.bus.dma().name().to_owned(),
                what: "memory that this process cannot reach".into(),
                hint: "the driver needs it mapped in the process, to zero and read it".into(),
            })
        })
    }

    pub(crate) fn dma(&self, source: DmaError) -> Error {
        Error::Dma { ctrl: self.id.clone(), source }
    }

    pub(crate) fn implausible(&self, what: String) -> Error {
        Error::Implausible { ctrl: self.id.clone(), what }
    }

    pub(crate) fn unsupported(&self, what: impl Into<String>, hint: &'static str) -> Error {
        Error::Unsupported { ctrl: self.id.clone(), what: what.into(), hint }
    }

    pub(crate) fn range(&self, nsid: Nsid, what: String) -> Error {
        Error::Range { ctrl: self.id.clone(), nsid, what }
    }

    pub(crate) fn queue_state(&self, qid: QueueId, what: impl Into<String>) -> Error {
        Error::QueueState { ctrl: self.id.clone(), qid, what: what.into() }
    }
}
