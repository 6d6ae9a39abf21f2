//! The memory of a file read or write as an iovec list.
#![allow(
    unsafe_code,
    reason = "copies between DMA memory and bounce buffers, and the kernel's list"
)]

use std::io;

use nvme_spec::nvm::Direction;

use super::buffers::{Buffer, Buffers};
use crate::{
    domain::{SgEntry, SgList},
    media::{MediaKind, MediaOp},
    memory::{self, HostMap},
};

/// Alignment that the filesystem requires for direct I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    /// Alignment of memory addresses, and of the lengths of parts.
    pub(super) memory_align: usize,
    /// Alignment of lengths and of file offsets.
    pub(super) offset_align: usize,
}

impl Limits {
    fn allow(self, entry: SgEntry) -> bool {
        let address = entry.host.map_or(0, |host| host.as_ptr().addr());
        let unit = self.memory_align.max(self.offset_align);
        address.is_multiple_of(self.memory_align) && entry.len.is_multiple_of(unit)
    }
}

/// Returns whether the kernel can access the memory of `op` directly, if not in too many parts.
fn is_addressable(op: &MediaOp, limits: Limits) -> bool {
    let reads = op.kind == MediaKind::Read;
    op.sg_list.as_slice().iter().all(|entry| {
        // A write must store zeroes for a hole, and the drain holds arbitrary bytes.
        limits.allow(*entry) && (reads || entry.host.is_some())
    })
}

/// Largest number of parts per call (`UIO_MAXIOV`).
const PARTS_MAX: usize = 1024;

/// A list of parts, and the kernel's progress in it.
#[derive(Default)]
pub(super) struct Transfer {
    parts: Vec<libc::iovec>,
    /// Number of finished parts.
    first: usize,
    /// Number of finished bytes.
    moved: u64,
    /// Replaces memory that the kernel cannot address. Its contents belong to this transfer only
    /// while `bounced` is set.
    bounce: Option<Buffer>,
    bounced: bool,
}

// SAFETY: the addresses in `parts` are for the kernel; the operation's sg_list, `bounce` and the
// medium's drain keep their memory.
unsafe impl Send for Transfer {}

impl Transfer {
    /// Lists the memory of `op`, directly if possible and not forbidden by `bounce`, else through
    /// the bounce buffer.
    pub(super) fn prepare(
        &mut self,
        op: &MediaOp,
        limits: Limits,
        drain: &HostMap,
        buffers: &mut Buffers,
        bounce: bool,
    ) -> io::Result<()> {
        self.rest();
        if !bounce && is_addressable(op, limits) && self.list(&op.sg_list, drain) {
            return Ok(());
        }
        self.rest();
        let len = usize::try_from(op.len).map_err(|_| io::ErrorKind::InvalidInput)?;
        if self.bounce.as_ref().is_none_or(|bounce| bounce.len() < len) {
            self.bounce = Some(buffers.make(len)?);
        }
        self.bounced = true;
        if op.kind != MediaKind::Read {
            self.copy(&op.sg_list, Direction::Write);
        }
        if let Some(bounce) = &self.bounce {
            self.parts
                .push(libc::iovec { iov_base: bounce.at(0, len).as_ptr().cast(), iov_len: len });
        }
        Ok(())
    }

    /// Lists a copy of `bytes`, for a command that has data beside the operation's.
    pub(super) fn carry(&mut self, bytes: &[u8], buffers: &mut Buffers) -> io::Result<()> {
        self.rest();
        let buffer = buffers.make(bytes.len())?;
        let to = buffer.at(0, bytes.len()).as_ptr();
        // SAFETY: `at` checked the buffer, which is new.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        self.parts.push(libc::iovec { iov_base: to.cast(), iov_len: bytes.len() });
        self.bounce = Some(buffer);
        Ok(())
    }

    /// Lists `sg_list` directly. Returns `false` if there are too many parts.
    fn list(&mut self, sg_list: &SgList, drain: &HostMap) -> bool {
        for SgEntry { host, mut len } in sg_list.as_slice().iter().copied() {
            while len > 0 {
                if self.parts.len() == PARTS_MAX {
                    return false;
                }
                let (base, part) = match host {
                    Some(host) => (host, len),
                    None => (drain.ptr(), len.min(drain.len())),
                };
                let iov_base = base.as_ptr().cast();
                self.parts.push(libc::iovec { iov_base, iov_len: part });
                len -= part;
            }
        }
        true
    }

    /// Returns the rest: parts, and their offset in a file that began at `offset`.
    pub(super) fn rest_of(&self, offset: u64) -> (&[libc::iovec], u64) {
        (&self.parts[self.first..], offset + self.moved)
    }

    /// Records `moved` more bytes. Returns `true` once all are done.
    pub(super) fn advance(&mut self, mut moved: usize) -> bool {
        self.moved += moved as u64;
        while let Some(part) = self.parts.get_mut(self.first) {
            if moved < part.iov_len {
                part.iov_base = part.iov_base.wrapping_byte_add(moved);
                part.iov_len -= moved;
                return false;
            }
            moved -= part.iov_len;
            self.first += 1;
        }
        true
    }

    /// Copies read data out of the bounce buffer, if it was used.
    pub(super) fn deliver(&mut self, sg_list: &SgList) {
        if self.bounced {
            self.copy(sg_list, Direction::Read);
        }
    }

    /// Returns whether the kernel accesses the operation's own memory.
    pub(super) fn is_straight(&self) -> bool {
        !self.bounced
    }

    /// Clears all addresses; keeps list and buffer for reuse.
    pub(super) fn rest(&mut self) {
        self.parts.clear();
        (self.first, self.moved, self.bounced) = (0, 0, false);
    }

    fn copy(&self, sg_list: &SgList, direction: Direction) {
        let Some(bounce) = &self.bounce else { return };
        let mut at = 0;
        for SgEntry { host, len } in sg_list.as_slice() {
            let place = bounce.at(at, *len);
            match (direction, host) {
                // SAFETY: `at` checked the buffer, `sg_list` keeps its memory; they do not overlap.
                (Direction::Write, Some(host)) => unsafe { memory::copy(*host, place, *len) },
                // SAFETY: as above.
                (Direction::Read, Some(host)) => unsafe { memory::copy(place, *host, *len) },
                // SAFETY: as above.
                (Direction::Write, None) => unsafe { place.write_bytes(0, *len) },
                (Direction::Read, None) => {}
            }
            at += len;
        }
    }
}

#[cfg(test)]
mod tests;
