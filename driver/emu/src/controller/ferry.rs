//! Data of reads and writes on its way to and from memory that only a GPU addresses.
//!
//! ```text
//!   read:   take_aboard -> bounce memory -> medium -> board -> batch -> fence -> completion
//!   write:  take_aboard -> bounce memory -> batch -> fence -> medium -> completion
//! ```
//!
//! An operation comes here instead of going to its medium, and everything else is as ever: media,
//! overlay and fault plan see memory of this process. At the end of each step all that is ready to
//! be copied goes in one batch. A copy that has begun cannot be called back: a reset or a power
//! loss forgets the command, and its memory stays allocated until the batch is done. Until then
//! CSTS.RDY stays 1, so that a host which sees it 0 knows that nothing writes its memory any more.
#![allow(unsafe_code, reason = "vouches for the memory of copies")]

use std::collections::VecDeque;

use nvme_driver::{Clock, CopyDirection, CopyError, CopyFence, DeviceCopy, MonotonicClock, Nanos};

use super::Controller;
use crate::{
    Progress,
    bounce::Copies,
    domain::SgList,
    media::{MediaDone, MediaError, MediaKind, MediaOp},
};

/// How often a fence is worth a look. Whoever drives the controller in virtual time lets this much
/// of it pass while a GPU that knows no virtual time works.
const LOOK_EVERY: Nanos = Nanos(10_000);
/// How long the end of a controller waits for copies under way, in the machine's time.
const PATIENCE: Nanos = Nanos::from_millis(1_000);

/// Operations between media and a GPU.
#[derive(Debug)]
pub(super) struct Ferry {
    /// None: no memory of a GPU can be mapped, and nothing ever comes here.
    copies: Option<Copies>,
    /// For memory in between, as (namespace, operation).
    waiting: VecDeque<(usize, MediaOp)>,
    /// For the batch of this step.
    boarded: Vec<Cargo>,
    /// For the fence of their batch, in the order of the batches.
    aloft: VecDeque<(CopyFence, Cargo)>,
    /// All batches up to this one are done.
    reached: Option<CopyFence>,
    batch: Vec<DeviceCopy>,
    looked: Nanos,
    /// The GPU is lost, commands ended with that, and the controller has yet to say so.
    lost: Option<CopyError>,
}

/// Whose bytes are copied.
#[derive(Debug)]
enum Cargo {
    /// A write's, for the medium of this namespace.
    Write(usize, MediaOp),
    /// A read's, from the medium.
    Read(MediaDone),
    /// Nobody's any more; the memory stays allocated.
    Forgotten(#[allow(dead_code, reason = "held for what its drop does")] SgList),
}

impl Cargo {
    fn sg_list(&self) -> (&SgList, CopyDirection) {
        match self {
            Self::Write(_, op) => (&op.sg_list, CopyDirection::DeviceToHost),
            Self::Read(done) => (&done.sg_list, CopyDirection::HostToDevice),
            Self::Forgotten(sg_list) => (sg_list, CopyDirection::DeviceToHost),
        }
    }

    /// The operation's end when its copies failed; none for what nobody waits for.
    fn failed(self, error: &CopyError) -> Option<MediaDone> {
        let result = Err(MediaError::Copy(error.clone()));
        match self {
            Self::Write(_, op) => Some(op.done(result)),
            Self::Read(done) => Some(MediaDone { result, ..done }),
            Self::Forgotten(_) => None,
        }
    }
}

impl Ferry {
    pub(super) fn new(copies: Option<Copies>) -> Self {
        let (waiting, boarded, aloft) = Default::default();
        let (reached, batch, looked, lost) = Default::default();
        Self { copies, waiting, boarded, aloft, reached, batch, looked, lost }
    }

    /// Takes a read or write of `namespace` with memory on a GPU.
    pub(super) fn take_aboard(&mut self, namespace: usize, op: MediaOp) {
        self.waiting.push_back((namespace, op));
    }

    /// Takes a read that its medium has finished.
    pub(super) fn board(&mut self, done: MediaDone) {
        self.boarded.push(Cargo::Read(done));
    }

    /// Whether nothing is here.
    pub(super) fn is_empty(&self) -> bool {
        self.aloft.is_empty() && self.waiting.is_empty() && self.boarded.is_empty()
    }

    /// Operations whose copies have begun and not ended.
    pub(super) fn under_way(&self) -> usize {
        self.aloft.len()
    }

    pub(super) fn next_event(&self) -> Option<Nanos> {
        (!self.is_empty()).then(|| self.looked + LOOK_EVERY)
    }

    /// Forgets all operations; keeps the memory of copies under way.
    pub(super) fn cancel(&mut self) {
        self.waiting.clear();
        self.boarded.clear();
        self.lost = None;
        for (_, cargo) in &mut self.aloft {
            let sg_list = match cargo {
                Cargo::Write(_, op) => std::mem::take(&mut op.sg_list),
                Cargo::Read(done) => std::mem::take(&mut done.sg_list),
                Cargo::Forgotten(_) => continue,
            };
            *cargo = Cargo::Forgotten(sg_list);
        }
    }

    /// The first operation whose copies have ended, and how.
    fn landed(&mut self) -> Option<(Cargo, Result<(), CopyError>)> {
        let fence = self.aloft.front()?.0;
        let mut result = Ok(());
        if self.reached.is_none_or(|reached| reached < fence) {
            match self.copies.as_ref()?.engine.is_done(fence) {
                Ok(true) => self.reached = Some(fence),
                Ok(false) => return None,
                Err(error) => result = Err(error),
            }
        }
        let (_, cargo) = self.aloft.pop_front()?;
        if let (Err(error), false) = (&result, matches!(cargo, Cargo::Forgotten(_))) {
            self.lost = Some(error.clone());
        }
        Some((cargo, result))
    }

    /// Starts the copies of all that has boarded.
    fn depart(&mut self) -> Result<(), CopyError> {
        let Some(copies) = &self.copies else { return Ok(()) };
        self.batch.clear();
        for cargo in &self.boarded {
            let (sg_list, way) = cargo.sg_list();
            sg_list.copies(way, &mut self.batch);
        }
        // SAFETY: the lists keep both sides allocated, and go to `aloft`, which lets go of them
        // after the fence or the loss of the GPU. Bounce memory has one user; the GPU's memory is
        // the host's, which the command lends it to.
        match unsafe { copies.engine.submit(&self.batch) } {
            Ok(fence) => {
                self.aloft.extend(self.boarded.drain(..).map(|cargo| (fence, cargo)));
                Ok(())
            }
            Err(error) => {
                // Refused, or lost: the engine says which.
                let last = self.reached.unwrap_or_default();
                if let Err(lost) = copies.engine.is_done(last) {
                    self.lost = Some(lost);
                }
                Err(error)
            }
        }
    }
}

impl Controller {
    /// Lets go on what copies have brought; the number of operations.
    pub(super) fn land(&mut self, now: Nanos) -> u32 {
        self.ferry.looked = now;
        if self.ferry.aloft.is_empty() {
            return 0;
        }
        let mut count = 0;
        while let Some((cargo, result)) = self.ferry.landed() {
            count += 1;
            if let Err(error) = result {
                cargo.failed(&error).into_iter().for_each(|done| self.operation_done(done));
                continue;
            }
            match cargo {
                Cargo::Write(namespace, mut op) if self.lifecycle.serving() => {
                    op.sg_list.landed();
                    let done = self.namespaces[namespace].submit(op, now);
                    done.into_iter().for_each(|done| self.operation_done(done));
                }
                Cargo::Read(mut done) => {
                    done.sg_list.landed();
                    self.operation_done(done);
                }
                Cargo::Write(..) | Cargo::Forgotten(_) => {}
            }
        }
        count
    }

    /// Starts what has come in this step, all copies in one batch. Holds no DMA access: memory
    /// may be asked for, and let go.
    pub(super) fn sail(&mut self, now: Nanos) -> u32 {
        if (self.ferry.waiting.is_empty() && self.ferry.boarded.is_empty())
            || !self.lifecycle.serving()
        {
            return 0;
        }
        let mut count = 0;
        while let Some((namespace, mut op)) = self.ferry.waiting.pop_front() {
            let Some(copies) = &self.ferry.copies else { break };
            match copies.pool.take(op.sg_list.device_bytes()) {
                Ok(None) => {
                    self.ferry.waiting.push_front((namespace, op));
                    break;
                }
                Ok(Some(bounce)) => op.sg_list.bounce_through(bounce),
                Err(error) => {
                    self.operation_done(op.done(Err(error.into())));
                    continue;
                }
            }
            count += 1;
            if op.kind == MediaKind::Read {
                let done = self.namespaces[namespace].submit(op, now);
                done.into_iter().for_each(|done| self.operation_done(done));
            } else {
                self.ferry.boarded.push(Cargo::Write(namespace, op));
            }
        }
        count + self.depart()
    }

    fn depart(&mut self) -> u32 {
        let count = self.ferry.boarded.len() as u32;
        if count == 0 {
            return 0;
        }
        match self.ferry.depart() {
            Ok(()) => {
                self.counters.copies += self.ferry.batch.len() as u64;
                self.counters.copy_batches += 1;
            }
            Err(error) => {
                tracing::debug!(ctrl = self.identity.id(), count, %error, "copies were not taken");
                for cargo in std::mem::take(&mut self.ferry.boarded) {
                    cargo.failed(&error).into_iter().for_each(|done| self.operation_done(done));
                }
            }
        }
        count
    }

    /// Whether no copy is under way any more.
    pub(super) fn copies_ended(&mut self, now: Nanos) -> bool {
        self.land(now);
        self.ferry.aloft.is_empty()
    }

    /// Without the GPU's copies no data gets anywhere. The commands that met with it have ended,
    /// each with its status; then the controller says so.
    pub(super) fn heed_loss(&mut self) {
        if let Some(error) = self.ferry.lost.take() {
            tracing::error!(ctrl = self.identity.id(), %error, "data of commands is lost");
            self.fail("the GPU whose memory it reads and writes is lost");
        }
    }

    /// What a controller still does that is gone: lets go of memory when its copies are done.
    pub(super) fn after_life(&mut self, now: Nanos) -> Progress {
        let work = self.land(now);
        let outstanding = u32::try_from(self.ferry.under_way()).unwrap_or(u32::MAX);
        let next_event = self.ferry.next_event();
        Progress { work, outstanding, next_event, listening: false }
    }
}

impl Drop for Ferry {
    fn drop(&mut self) {
        self.cancel();
        let clock = MonotonicClock::default();
        let deadline = clock.now() + PATIENCE;
        let mut idle = 0;
        while !self.aloft.is_empty() {
            if self.landed().is_some() {
                continue;
            }
            if clock.now() >= deadline {
                tracing::error!(
                    operations = self.aloft.len(),
                    "copies of a GPU have not ended; the memory they may still use is leaked"
                );
                return std::mem::forget(std::mem::take(&mut self.aloft));
            }
            clock.pause(idle, deadline);
            idle = idle.saturating_add(1);
        }
    }
}
