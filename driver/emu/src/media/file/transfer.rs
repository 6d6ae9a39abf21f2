//! The memory of one read or write of a file, as the kernel wants it.
#![allow(
    unsafe_code,
    reason = "copies between DMA memory and bounce buffers, and the kernel's list"
)]

use std::io;

use crate::{
    domain::{HostPiece, Pieces},
    media::{MediaKind, MediaOp},
    memory::{self, HostMap},
};

/// What the file's filesystem asks of direct I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    /// Of addresses in memory.
    pub(super) memory_align: usize,
    /// Of lengths, and of offsets in the file.
    pub(super) offset_align: usize,
}

impl Limits {
    fn allow(self, piece: HostPiece) -> bool {
        let address = piece.host.map_or(0, |host| host.as_ptr().addr());
        address.is_multiple_of(self.memory_align) && piece.len.is_multiple_of(self.offset_align)
    }
}

/// Parts that the kernel takes in one call (`UIO_MAXIOV`).
const PARTS_MAX: usize = 1024;

/// A list of parts, and how far the kernel got in it.
#[derive(Default)]
pub(super) struct Transfer {
    parts: Vec<libc::iovec>,
    /// Parts that are done.
    first: usize,
    /// Bytes that are done.
    moved: u64,
    /// Stands in for memory the kernel cannot address. Its contents are this transfer's only while
    /// `bounced`.
    bounce: Option<HostMap>,
    bounced: bool,
}

// SAFETY: the addresses in `parts` are for the kernel; what they point to is kept by the
// operation's pieces, by `bounce` and by the medium's drain.
unsafe impl Send for Transfer {}

impl Transfer {
    /// Lists the memory of `op`, straight if possible and not forbidden by `bounce`, else through
    /// the bounce buffer.
    pub(super) fn prepare(
        &mut self,
        op: &MediaOp,
        limits: Limits,
        drain: &HostMap,
        bounce: bool,
    ) -> io::Result<()> {
        let reads = op.kind == MediaKind::Read;
        self.rest();
        let straight = !bounce
            && op.pieces.as_slice().iter().all(|piece| {
                // A write has to store zeroes for a hole, and the drain holds anything.
                limits.allow(*piece) && (reads || piece.host.is_some())
            });
        if straight && self.list(&op.pieces, drain) {
            return Ok(());
        }
        self.rest();
        let len = usize::try_from(op.len).map_err(|_| io::ErrorKind::InvalidInput)?;
        if self.bounce.as_ref().is_none_or(|bounce| bounce.len() < len) {
            self.bounce = None;
            self.bounce = Some(HostMap::anonymous(len)?);
        }
        self.bounced = true;
        if !reads {
            self.copy(&op.pieces, Direction::ToBounce);
        }
        if let Some(bounce) = &self.bounce {
            self.parts.push(libc::iovec { iov_base: bounce.ptr().as_ptr().cast(), iov_len: len });
        }
        Ok(())
    }

    /// Lists `pieces` as they are; `false` when there are too many.
    fn list(&mut self, pieces: &Pieces, drain: &HostMap) -> bool {
        for HostPiece { host, mut len } in pieces.as_slice().iter().copied() {
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

    /// What is left: parts, their number, and where in a file that began at `offset`.
    pub(super) fn rest_of(&self, offset: u64) -> (*const libc::iovec, u32, u64) {
        let left = &self.parts[self.first..];
        let count = u32::try_from(left.len()).unwrap_or(u32::MAX);
        (left.as_ptr(), count, offset + self.moved)
    }

    /// Takes note of `moved` more bytes; `true` when all are.
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

    /// Copies what was read from the bounce buffer, if it went there.
    pub(super) fn deliver(&mut self, pieces: &Pieces) {
        if self.bounced {
            self.copy(pieces, Direction::FromBounce);
        }
    }

    /// Whether the kernel works on the operation's own memory.
    pub(super) fn is_straight(&self) -> bool {
        !self.bounced
    }

    /// Forgets all addresses, keeps list and buffer for the next one.
    pub(super) fn rest(&mut self) {
        self.parts.clear();
        (self.first, self.moved, self.bounced) = (0, 0, false);
    }

    fn copy(&self, pieces: &Pieces, direction: Direction) {
        let Some(bounce) = &self.bounce else { return };
        let mut at = 0;
        for HostPiece { host, len } in pieces.as_slice() {
            let place = bounce.at(at, *len);
            match (direction, host) {
                // SAFETY: `at` checked the buffer, `pieces` keeps its memory; they are apart.
                (Direction::ToBounce, Some(host)) => unsafe { memory::copy(*host, place, *len) },
                // SAFETY: as above.
                (Direction::FromBounce, Some(host)) => unsafe { memory::copy(place, *host, *len) },
                // SAFETY: as above.
                (Direction::ToBounce, None) => unsafe { place.write_bytes(0, *len) },
                (Direction::FromBounce, None) => {}
            }
            at += len;
        }
    }
}

#[derive(Clone, Copy)]
enum Direction {
    ToBounce,
    FromBounce,
}
