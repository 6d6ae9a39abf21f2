//! Health, stopping, starting again.

use nvme_driver::{Nanos, QueueGrant, Quiesced, Waiter};

use super::{State, Uring};
use crate::{
    abi::{self, Iocb},
    completion::Completion,
    counters::{FaultInfo, Outstanding, UringCounters},
    error::Error,
    executor::Progress,
    iocb::{Content, Phase},
    layout::Layout,
    map,
    queues::{self, Queues},
    status::IoStatus,
    sync::Ordering,
};

impl Uring {
    /// What was counted so far.
    #[must_use]
    pub fn counters(&self) -> UringCounters {
        let queues = self.queues.counters();
        let total = queues.iter().fold(self.before, |sum, queue| sum + queue.counters);
        let usage = self.arena.usage();
        UringCounters {
            total,
            queues,
            issued: self.issued,
            completed: self.completed,
            arena_bytes: usage.bytes,
            arena_bytes_used: usage.used,
            arena_growths: usage.growths,
        }
    }

    /// Commands that devices have and the kernel waits for. It goes on meanwhile: only what is
    /// outstanding all the time is surely among them, and nothing that ended before is.
    #[must_use]
    pub fn outstanding(&self) -> Vec<Outstanding> {
        self.queues.outstanding()
    }

    /// Returns whether the kernel waits for no command of any queue that works.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queues.are_idle()
    }

    /// The first queue that stopped because its device misbehaved or timed out. Everything on it
    /// fails from then on; stop the ring, recover the controller, and restart.
    #[must_use]
    pub fn faulted(&self) -> Option<FaultInfo> {
        self.queues.faulted()
    }

    /// Ends the kernel. Commands that a device already has are waited for; what was not sent is
    /// cancelled. Every IOCB in flight is done afterwards, and can be waited for. The token takes
    /// the grants back.
    ///
    /// # Errors
    /// [`Error::Executor`] when the kernel did not end before `deadline`: the ring is stuck, may be
    /// stopped again, and leaks its memory when dropped. [`Error::State`] when it is stopped
    /// already.
    pub fn stop(&mut self, deadline: Nanos) -> Result<Quiesced, Error> {
        if self.state == State::Stopped {
            self.expect(State::Running)?;
        }
        // Release: a warp that sees the word sees everything published before it.
        self.region.store64(Layout::STOP, 1, Ordering::Release);
        self.state = State::Stuck;
        // Polled first: an executor without threads (or time) of its own cannot wait in `stop`.
        let clock = self.clock.clone();
        let mut waiter = Waiter::new(&*clock, deadline);
        while !self.queues.are_idle() && clock.now() < deadline {
            match self.poll_executor() {
                Ok(Progress::Moved) => waiter.moved(),
                Ok(Progress::Idle) => {
                    waiter.wait();
                }
                Err(error) => {
                    tracing::debug!(%error, "polling while stopping");
                    break;
                }
            }
        }
        self.write_clock();
        let quiesced = self.executor.stop(deadline)?;
        self.state = State::Stopped;
        // A ring that holds nonsense is of no further interest: nothing writes it any more.
        if let Err(error) = self.reap() {
            tracing::error!(%error, "completion ring after the stop");
        }
        self.cancel_the_rest();
        Ok(quiesced)
    }

    /// Completes what the kernel did not. Which of its contexts were done is not known, so all of
    /// them that say Ok are marked.
    fn cancel_the_rest(&mut self) {
        let left: Vec<u32> = self.table.in_flight().collect();
        for index in left {
            let iocb: Iocb = self.region.read(self.layout.iocb(index));
            let statuses = self.layout.statuses(index);
            let entry = self.table.issued(index).expect("listed as in flight");
            match &entry.content {
                Content::Affine { map, .. } => map.mark(0..map.len(), abi::STATUS_CANCELLED),
                Content::Explicit => {
                    let all = 0..entry.order.len();
                    map::mark(&self.region, statuses, all, abi::STATUS_CANCELLED);
                }
                Content::Nothing => {}
            }
            let outcome = entry.outcome(&iocb);
            entry.completion = match outcome.error {
                Some((status, _)) if status != IoStatus::Incomplete => outcome,
                _ => Completion { errors: 1, error: Some((IoStatus::Cancelled, 0)), ..outcome },
            };
            // Who waits for the event, perhaps on a GPU, must not wait forever.
            if let Some(signal) = &entry.signal {
                signal.event.set(signal.value);
            }
            entry.phase = Phase::Done;
            entry.release_refs();
            self.completed += 1;
        }
    }

    /// Signals for every operation in flight, without knowing what became of it. For a ring that is
    /// given up because its kernel did not end: what waits for a signal on a GPU would keep its
    /// stream forever. The kernel may signal the same once more.
    ///
    /// Devices may still transfer: this says that nothing will be known, not that all is over.
    pub fn abandon(&mut self) {
        let left: Vec<u32> = self.table.in_flight().collect();
        for index in left {
            let entry = self.table.issued(index).expect("listed as in flight");
            if let Some(signal) = &entry.signal {
                signal.event.set(signal.value);
            }
        }
    }

    /// Starts the kernel again after a [`Uring::stop`], on queues that were recovered: fresh grants
    /// of the same devices. Maps, pools and events stay good.
    ///
    /// # Errors
    /// As [`Uring::init_queue`]; [`Error::State`] unless stopped; [`Error::Grants`] when the
    /// devices are not the same.
    pub fn restart(&mut self, grants: &[(u32, QueueGrant)]) -> Result<(), Error> {
        self.expect(State::Stopped)?;
        let devices = queues::devices(grants)?;
        if devices != self.queues.devices {
            let problem = format!(
                "the devices changed from {:?} to {devices:?}; open a new ring",
                self.queues.devices
            );
            return Err(Error::Grants { problem });
        }
        // First: the new queues may get the memory of the old ones.
        let counted = self.queues.counters();
        self.queues = Queues::lay_out(grants, self.depth(), self.executor.as_ref())?;
        for queue in counted {
            self.before += queue.counters;
        }
        self.layout.reset(&self.region);
        (self.submit, self.complete) = self.layout.rings(&self.region);
        self.start()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        if self.state == State::Stopped {
            return;
        }
        let deadline = self.clock.now() + self.options.stop_timeout;
        if let Err(error) = self.stop(deadline) {
            tracing::error!(%error, "dropping a ring whose kernel runs on; its memory is leaked");
            self.abandon();
            // A kernel that may still run must never see this memory used for something else.
            std::mem::forget((self.region.clone(), self.queues.memory(), self.arena.clone()));
        }
    }
}
