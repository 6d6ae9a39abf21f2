#![allow(unsafe_code, reason = "moves data in memory that the ring laid out")]
//! The memory of a read or write.

use std::ptr::NonNull;

use gio_uring::{ExecutorError, SharedMemory};
use io_uring::{opcode, squeue::Entry128, types};
use nvme_driver::platform::passthrough::Passthrough;
use nvme_spec::nvm::NvmOpcode;

use super::{FileTarget, NAME, op::Object};
use crate::memory;

/// The parts of a read or write, and the kernel's progress in them.
#[derive(Default)]
pub(super) struct Parts {
    parts: Vec<libc::iovec>,
    /// Number of finished parts.
    first: usize,
    offset: u64,
    /// Bytes of the command that a drive has.
    asked: usize,
    /// Replaces memory that direct I/O does not reach, by address or length.
    bounce: Option<SharedMemory>,
    is_bounced: bool,
}

impl Parts {
    /// Lists the memory of neighbours from `offset` on, each of which has `slot_bytes` on the file:
    /// directly, or all of it through a bounce buffer if `bounce`, or if direct I/O asks for that.
    ///
    /// # Errors
    /// Returns [`ExecutorError::Memory`] if there is no memory for a bounce buffer.
    ///
    /// # Safety
    /// The objects' memory is valid and not otherwise used until the transfer has ended.
    pub(super) unsafe fn prepare(
        &mut self,
        objects: impl Iterator<Item = Object> + Clone,
        [offset, slot_bytes]: [u64; 2],
        is_read: bool,
        target: &FileTarget,
        bounce: bool,
    ) -> Result<(), ExecutorError> {
        let slot_bytes = slot_bytes as usize;
        self.parts.clear();
        (self.first, self.offset, self.is_bounced) = (0, offset, false);
        let is_straight = |it: &Object| {
            it.bytes == slot_bytes
                && it.memory.addr().get().is_multiple_of(target.memory_align)
                && it.bytes.is_multiple_of(target.offset_align.max(target.memory_align))
        };
        if !bounce && objects.clone().all(|object| is_straight(&object)) {
            objects.for_each(|object| self.push(object.memory, object.bytes));
            return Ok(());
        }
        self.is_bounced = true;
        let bytes = objects.clone().count() * slot_bytes;
        if self.bounce.as_ref().is_none_or(|bounce| bounce.len() < bytes) {
            // Powers of two: a series of growing requests allocates little more than the last.
            self.bounce = Some(memory::alloc(NAME, bytes.next_power_of_two())?);
        }
        if !is_read {
            for (object, to) in objects.zip(self.slots(slot_bytes)) {
                // SAFETY: the buffer has a slot for each object, and the caller vouches for its
                // memory. The rest of a slot is zero.
                unsafe {
                    to.copy_from_nonoverlapping(object.memory, object.bytes);
                    to.add(object.bytes).write_bytes(0, slot_bytes - object.bytes);
                }
            }
        }
        if let Some(bounce) = &self.bounce {
            self.push(bounce.host(), bytes);
        }
        Ok(())
    }

    /// Returns the places of objects in the bounce buffer.
    fn slots(&self, slot_bytes: usize) -> impl Iterator<Item = NonNull<u8>> + '_ {
        self.bounce.iter().flat_map(move |bounce| {
            let slots = 0..bounce.len() / slot_bytes;
            // SAFETY: the slot is inside.
            slots.map(move |slot| unsafe { bounce.host().add(slot * slot_bytes) })
        })
    }

    /// Adds a part, or prolongs the last one.
    fn push(&mut self, memory: NonNull<u8>, bytes: usize) {
        if let Some(last) = self.parts.last_mut()
            && last.iov_base.addr() + last.iov_len == memory.addr().get()
        {
            last.iov_len += bytes;
            return;
        }
        self.parts.push(libc::iovec { iov_base: memory.as_ptr().cast(), iov_len: bytes });
    }

    /// Returns the rest as an entry of the submission queue. `sync`: a write is durable when it
    /// ends.
    pub(super) fn entry(&self, file: types::Fixed, is_read: bool, sync: bool) -> Entry128 {
        let (parts, at) = (&self.parts[self.first..], self.offset);
        let flags = if sync { libc::RWF_DSYNC } else { 0 };
        // The kernel would copy a list, and allocate memory for it; a single part needs none.
        if let [part] = parts
            && let Ok(len) = u32::try_from(part.iov_len)
        {
            let base = part.iov_base.cast();
            return if is_read {
                opcode::Read::new(file, base, len).offset(at).build().into()
            } else {
                opcode::Write::new(file, base, len).offset(at).rw_flags(flags).build().into()
            };
        }
        let (list, count) = (parts.as_ptr(), parts.len() as u32);
        if is_read {
            opcode::Readv::new(file, list, count).offset(at).build().into()
        } else {
            opcode::Writev::new(file, list, count).offset(at).rw_flags(flags).build().into()
        }
    }

    /// Returns the first of the rest as a command for a drive, which does all of it or nothing.
    /// `placement` of a write is 0, or a Placement Identifier.
    pub(super) fn command(
        &mut self,
        drive: &Passthrough,
        is_read: bool,
        sync: bool,
        placement: u16,
    ) -> Entry128 {
        let (parts, bytes_max) = (&self.parts[self.first..], drive.transfer_bytes_max);
        let mut bytes = 0;
        let fits = |part: &&libc::iovec| {
            let fits = bytes + part.iov_len <= bytes_max;
            bytes += if fits { part.iov_len } else { 0 };
            fits
        };
        let count = parts.iter().take_while(fits).count();
        let begin = libc::iovec { iov_len: bytes_max, ..parts[0] };
        let (parts, bytes) =
            if count == 0 { (&[begin][..], bytes_max) } else { (&parts[..count], bytes) };
        self.asked = bytes;
        let opcode = if is_read { NvmOpcode::READ } else { NvmOpcode::WRITE };
        let sqe = drive.blocks(opcode, [self.offset, bytes as u64], sync, placement);
        drive.entry(&sqe, parts)
    }

    /// Returns the bytes of the last command.
    pub(super) fn asked(&self) -> usize {
        self.asked
    }

    /// Records `moved` more bytes. Returns true once all are done.
    pub(super) fn advance(&mut self, mut moved: usize) -> bool {
        self.offset += moved as u64;
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

    pub(super) fn is_bounced(&self) -> bool {
        self.is_bounced
    }

    /// Copies what was read out of the bounce buffer, if it was used.
    ///
    /// # Safety
    /// The objects are those of [`Parts::prepare`], and the transfer has ended.
    pub(super) unsafe fn deliver(&self, objects: impl Iterator<Item = Object>, slot_bytes: u64) {
        if !self.is_bounced {
            return;
        }
        for (object, from) in objects.zip(self.slots(slot_bytes as usize)) {
            // SAFETY: the caller's promise; the buffer has a slot for each.
            unsafe { object.memory.copy_from_nonoverlapping(from, object.bytes) };
        }
    }
}
