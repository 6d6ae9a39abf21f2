//! A command in execution, and the translation of its data pointer to memory ranges.

pub(super) mod prp;
pub(super) mod sgl;

use nvme_driver::{Iova, Nanos};
use nvme_spec::{
    identify::Sgls,
    nvm::Direction,
    sqe::{Psdt, Sqe},
    status::Status,
};

use super::command::Ticket;
use crate::{
    config::SglSupport,
    domain::{DmaAccess, DmaFault, SgList},
    media::DataFault,
};

/// Data pointers that the enabled controller accepts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// Bytes of a memory page (CC.MPS).
    pub page_bytes: u64,
    /// SGL support.
    pub sgl: SglSupport,
    /// Set if bit buckets are supported.
    pub bit_bucket: bool,
    /// Largest transfer of one command in bytes.
    pub bytes_max: u64,
}

impl Rules {
    /// Returns SGLS of the identify data.
    pub(super) fn sgls(&self) -> Sgls {
        let kinds = match self.sgl {
            SglSupport::None => return Sgls(0),
            SglSupport::Byte => 1,
            SglSupport::Dword => 2,
        };
        Sgls(kinds | if self.bit_bucket { Sgls::BIT_BUCKET } else { 0 })
    }
}

/// A command in execution.
pub(super) struct Request<'a> {
    pub dma: &'a DmaAccess<'a>,
    pub rules: Rules,
    pub now: Nanos,
    pub ticket: Ticket,
    pub sqe: &'a Sqe,
    /// Token of its media operations.
    pub token: u64,
    pub fault: DataFault,
    /// Set if writes must reach stable media before they complete (no write cache).
    pub write_through: bool,
}

/// Consumer of the byte ranges that a data pointer names, in order.
pub(super) trait Sink {
    /// Consumes `len` bytes at `iova`.
    fn data(&mut self, iova: Iova, len: usize) -> Result<(), DmaFault>;
    /// Consumes `len` bytes without memory (bit bucket).
    fn hole(&mut self, len: usize);
}

impl Request<'_> {
    /// Passes `len` bytes as the command describes them to `sink`.
    ///
    /// # Errors
    /// Returns the status for the command if its description is invalid. The sink may have seen a
    /// part.
    #[inline]
    pub(super) fn walk(
        &self,
        direction: Direction,
        len: u64,
        sink: &mut impl Sink,
    ) -> Result<(), Status> {
        let Self { dma, rules, sqe, .. } = self;
        // Base, "Common Command Format": PSDT. SGLs need SGLS; 10b needs MPTR SGLs, which this
        // controller lacks; 11b is reserved.
        match sqe.psdt() {
            Psdt::PRP => prp::walk(dma, rules.page_bytes, sqe.dptr, len, sink),
            Psdt::SGL_MPTR_ADDRESS if rules.sgl != SglSupport::None => {
                sgl::walk(dma, rules, sqe.dptr, direction, len, sink)
            }
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Copies `from` to the host, followed by zeroes up to `len` bytes.
    ///
    /// # Errors
    /// Like [`Request::walk`].
    pub(super) fn deliver(&self, from: &[u8], len: u64) -> Result<(), Status> {
        self.walk(Direction::Read, len, &mut Deliver { dma: self.dma, from })
    }
}

/// Maps an access refused by the domain to a status (Base, "Generic Command Status").
pub(super) fn refused(_: DmaFault) -> Status {
    Status::DATA_TRANSFER_ERROR
}

/// Collects an [`SgList`] for the media.
pub(super) struct Gather<'a, 'b> {
    pub dma: &'a DmaAccess<'b>,
    pub sg_list: &'a mut SgList,
    /// Bytes of holes so far.
    pub holes: u64,
}

impl Sink for Gather<'_, '_> {
    #[inline]
    fn data(&mut self, iova: Iova, len: usize) -> Result<(), DmaFault> {
        self.dma.push(self.sg_list, iova, len)
    }

    fn hole(&mut self, len: usize) {
        self.sg_list.push_hole(len);
        self.holes += len as u64;
    }
}

/// Copies bytes from the controller to the host: identify data, log pages. Pads with zeroes past
/// the end of `from`.
struct Deliver<'a, 'b> {
    dma: &'a DmaAccess<'b>,
    from: &'a [u8],
}

impl Sink for Deliver<'_, '_> {
    fn data(&mut self, iova: Iova, len: usize) -> Result<(), DmaFault> {
        let (now, later) = self.from.split_at(len.min(self.from.len()));
        self.from = later;
        // One check of the whole range, so that the address of the zeroes cannot overflow.
        self.dma.resolve(iova, len)?;
        if !now.is_empty() {
            self.dma.write(iova, now)?;
        }
        if now.len() < len {
            self.dma.fill(iova.offset(now.len() as u64), 0, len - now.len())?;
        }
        Ok(())
    }

    fn hole(&mut self, len: usize) {
        self.from = &self.from[len.min(self.from.len())..];
    }
}

/// Copies `to.len()` bytes from the host to the controller: range lists.
pub(super) struct Collect<'a, 'b> {
    pub dma: &'a DmaAccess<'b>,
    pub to: &'a mut [u8],
    pub filled: usize,
}

impl Sink for Collect<'_, '_> {
    fn data(&mut self, iova: Iova, len: usize) -> Result<(), DmaFault> {
        let start = self.filled.min(self.to.len());
        let end = (start + len).min(self.to.len());
        self.filled = end;
        self.dma.read(iova, &mut self.to[start..end])
    }

    fn hole(&mut self, _len: usize) {}
}
