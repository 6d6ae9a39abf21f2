//! Support for memory that only a GPU can address, on top of a medium without it.
//!
//! ```text
//!   read:   submit -> bounce memory -> inner medium -> batch of copies -> fence -> done
//!   write:  submit -> bounce memory -> batch of copies -> fence -> inner medium -> done
//! ```
//!
//! The inner medium, including data faults, sees memory of this process. Each poll copies
//! everything that is ready in one batch. A copy that has begun cannot be aborted: after
//! [`Media::cancel`] it stays in flight, and its memory allocated, until its fence.
#![allow(unsafe_code, reason = "vouches for the memory of copies")]

use std::collections::VecDeque;

use nvme_driver::{CopyDirection, CopyError, CopyFence, DeviceCopy, Nanos};

use super::{Media, MediaDone, MediaError, MediaKind, MediaOp, Overlay, drain};
use crate::{bounce::Copies, domain::SgList};

/// Poll interval of a fence. A driver of the controller in virtual time lets this much of it pass
/// per poll while a GPU works in real time.
const POLL_INTERVAL: Nanos = Nanos(10_000);

/// A medium whose operations may have memory on a GPU. Costs one comparison for those without.
#[derive(Debug)]
pub(crate) struct GpuCopies {
    inner: Overlay,
    /// `None`: GPU memory cannot be mapped.
    copies: Option<Copies>,
    /// Operations that wait for bounce memory.
    waiting: VecDeque<MediaOp>,
    /// Transfers that wait for the next batch.
    ready: Vec<Transfer>,
    /// Transfers that wait for the fence of their batch, in order of the batches.
    begun: VecDeque<(CopyFence, Transfer)>,
    /// All batches up to this one are done.
    reached: Option<CopyFence>,
    batch: Vec<DeviceCopy>,
    polled: Nanos,
    /// Copies started so far.
    pub(crate) started: u64,
    /// Batches started so far.
    pub(crate) batches: u64,
}

/// An operation between the inner medium and a GPU.
#[derive(Debug)]
enum Transfer {
    /// A write before it reaches the inner medium.
    Write(MediaOp),
    /// A read that the inner medium has finished.
    Read(MediaDone),
    /// Cancelled; the memory stays allocated.
    Cancelled(#[allow(dead_code, reason = "held for what its drop does")] SgList),
}

impl Transfer {
    fn copies(&self, to: &mut Vec<DeviceCopy>) {
        match self {
            Self::Write(op) => op.sg_list.copies(CopyDirection::DeviceToHost, to),
            Self::Read(done) => done.sg_list.copies(CopyDirection::HostToDevice, to),
            Self::Cancelled(_) => {}
        }
    }

    /// Returns the failed operation if its copies failed; `None` if it was cancelled.
    fn failed(self, error: MediaError) -> Option<MediaDone> {
        match self {
            Self::Write(op) => Some(op.done(Err(error))),
            Self::Read(done) => Some(MediaDone { result: Err(error), ..done }),
            Self::Cancelled(_) => None,
        }
    }
}

impl GpuCopies {
    pub(crate) fn new(inner: Overlay, copies: Option<Copies>) -> Self {
        let (waiting, ready, begun, reached) = Default::default();
        let (batch, polled, started, batches) = Default::default();
        Self { inner, copies, waiting, ready, begun, reached, batch, polled, started, batches }
    }

    /// Takes the first operation whose copies have ended, with their result.
    fn copied(&mut self) -> Option<(Transfer, Result<(), CopyError>)> {
        let fence = self.begun.front()?.0;
        let mut result = Ok(());
        if self.reached.is_none_or(|reached| reached < fence) {
            match self.copies.as_ref()?.engine.is_done(fence) {
                Ok(true) => self.reached = Some(fence),
                Ok(false) => return None,
                Err(error) => result = Err(error),
            }
        }
        let (_, transfer) = self.begun.pop_front()?;
        Some((transfer, result))
    }

    /// Continues operations whose copies have ended.
    fn finish_copies(&mut self, now: Nanos, done: &mut Vec<MediaDone>) {
        while let Some((transfer, result)) = self.copied() {
            match (transfer, result) {
                (Transfer::Cancelled(_), _) => {}
                (transfer, Err(error)) => done.extend(transfer.failed(MediaError::GpuLost(error))),
                (Transfer::Write(mut op), Ok(())) => {
                    op.sg_list.copied();
                    done.extend(self.inner.submit(op, now));
                }
                (Transfer::Read(mut read), Ok(())) => {
                    read.sg_list.copied();
                    done.push(read);
                }
            }
        }
    }

    /// Assigns bounce memory to waiting operations in order, as long as there is some.
    fn take_bounce_memory(&mut self, now: Nanos, done: &mut Vec<MediaDone>) {
        let Some(copies) = &self.copies else { return };
        while let Some(mut op) = self.waiting.pop_front() {
            match copies.pool.take(op.sg_list.device_bytes()) {
                Ok(None) => return self.waiting.push_front(op),
                Ok(Some(bounce)) => op.sg_list.bounce_through(bounce),
                Err(error) => {
                    done.push(op.done(Err(error.into())));
                    continue;
                }
            }
            if op.kind != MediaKind::Read {
                self.ready.push(Transfer::Write(op));
                continue;
            }
            match self.inner.submit(op, now) {
                Some(read) if read.result.is_ok() => self.ready.push(Transfer::Read(read)),
                failed => done.extend(failed),
            }
        }
    }

    /// Starts the copies of everything that is ready, in one batch.
    fn start_batch(&mut self, done: &mut Vec<MediaDone>) {
        let Some(copies) = self.copies.as_ref().filter(|_| !self.ready.is_empty()) else { return };
        self.batch.clear();
        self.ready.iter().for_each(|transfer| transfer.copies(&mut self.batch));
        // SAFETY: the transfers keep both sides allocated, and go to `begun`, which releases them
        // after the fence or the loss of the GPU. Bounce memory has one user; the GPU's memory
        // belongs to the host, which lends it to the command.
        match unsafe { copies.engine.submit(&self.batch) } {
            Ok(fence) => {
                self.started += self.batch.len() as u64;
                self.batches += 1;
                self.begun.extend(self.ready.drain(..).map(|transfer| (fence, transfer)));
            }
            Err(error) => {
                tracing::debug!(operations = self.ready.len(), %error, "copies were not taken");
                // Refused, or lost: the engine tells which.
                let lost = copies.engine.is_done(self.reached.unwrap_or_default()).err();
                let error = lost.map_or(MediaError::Copy(error), MediaError::GpuLost);
                let failed = self.ready.drain(..);
                done.extend(failed.filter_map(|transfer| transfer.failed(error.clone())));
            }
        }
    }

    /// Drops all operations; keeps the memory of copies that have begun.
    fn forget(&mut self) {
        self.waiting.clear();
        self.ready.clear();
        for (_, transfer) in &mut self.begun {
            let sg_list = match transfer {
                Transfer::Write(op) => std::mem::take(&mut op.sg_list),
                Transfer::Read(done) => std::mem::take(&mut done.sg_list),
                Transfer::Cancelled(_) => continue,
            };
            *transfer = Transfer::Cancelled(sg_list);
        }
    }
}

impl Media for GpuCopies {
    fn capacity_bytes(&self) -> u64 {
        self.inner.capacity_bytes()
    }

    fn granularity_bytes(&self) -> u32 {
        self.inner.granularity_bytes()
    }

    #[inline]
    fn submit(&mut self, op: MediaOp, now: Nanos) -> Option<MediaDone> {
        if !op.sg_list.is_on_device() || self.copies.is_none() {
            return self.inner.submit(op, now);
        }
        self.waiting.push_back(op);
        None
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<MediaDone>) {
        if self.copies.is_none() {
            return self.inner.poll(now, done);
        }
        self.polled = now;
        self.finish_copies(now, done);
        let first = done.len();
        self.inner.poll(now, done);
        // A read is finished once its bytes are on the GPU.
        let read = |done: &mut MediaDone| done.result.is_ok() && done.sg_list.is_on_device();
        self.ready.extend(done.extract_if(first.., read).map(Transfer::Read));
        self.take_bounce_memory(now, done);
        self.start_batch(done);
    }

    fn next_event(&self) -> Option<Nanos> {
        let copies = !(self.waiting.is_empty() && self.begun.is_empty());
        let poll = copies.then(|| self.polled + POLL_INTERVAL);
        poll.into_iter().chain(self.inner.next_event()).min()
    }

    fn set_exclusive(&mut self, exclusive: bool) {
        self.inner.set_exclusive(exclusive);
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.waiting.len() + self.ready.len() + self.begun.len()
    }

    fn cancel(&mut self) {
        self.forget();
        self.inner.cancel();
    }

    fn power_loss(&mut self) {
        self.forget();
        self.inner.power_loss();
    }
}

impl Drop for GpuCopies {
    fn drop(&mut self) {
        self.cancel();
        drain(self);
        if !self.begun.is_empty() {
            tracing::error!(
                operations = self.begun.len(),
                "copies of a GPU have not ended; the memory they may still use is leaked"
            );
            std::mem::forget(std::mem::take(&mut self.begun));
        }
    }
}
