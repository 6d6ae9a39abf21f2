//! Health, stop and restart of a ring.

use nvme_driver::{Nanos, QueueGrant, Quiesced, Waiter};

use super::{
    State, Uring,
    iocb::{Content, Phase},
};
use crate::{
    abi::{self, Iocb},
    completion::Completion,
    counters::{FaultInfo, Outstanding, UringCounters},
    error::Error,
    executor::Progress,
    layout::Layout,
    map,
    queues::{self, Queues},
    status::IoStatus,
    sync::Ordering,
};

impl Uring {
    /// Returns a snapshot of all counters.
    #[must_use]
    pub fn counters(&self) -> UringCounters {
        let queues = self.queues.counters();
        let total = queues.iter().fold(self.before, |sum, queue| sum + queue.counters);
        let [shared, near] = [&self.arena, &self.near].map(|arena| arena.usage());
        UringCounters {
            total,
            queues,
            issued: self.issued,
            completed: self.completed,
            arena_bytes: shared.bytes + near.bytes,
            arena_bytes_used: shared.used + near.used,
            arena_growths: shared.growths + near.growths,
        }
    }

    /// Returns the commands in flight on the devices. The kernel keeps running meanwhile: a command
    /// in flight during the whole call is included, one that ended before it is not.
    #[must_use]
    pub fn outstanding(&self) -> Vec<Outstanding> {
        self.queues.outstanding()
    }

    /// Returns true if no working queue has commands outstanding.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queues.are_idle()
    }

    /// Returns the first queue that stopped because its device misbehaved or timed out. All
    /// operations on it fail from then on; stop the ring, recover the controller, and restart.
    #[must_use]
    pub fn faulted(&self) -> Option<FaultInfo> {
        self.queues.faulted()
    }

    /// Ends the kernel. Waits for commands in flight on a device and cancels everything not sent.
    /// Afterwards every IOCB in flight is complete and can be waited for. The returned token is
    /// used to reclaim the grants.
    ///
    /// # Errors
    /// Returns [`Error::Executor`] if the kernel did not end before `deadline`: the ring is then
    /// stuck, may be stopped again, and leaks its memory when dropped. Returns [`Error::State`] if
    /// it is already stopped.
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
        // An invalid entry in the ring no longer matters: nothing writes to it any more.
        if let Err(error) = self.reap() {
            tracing::error!(%error, "completion ring after the stop");
        }
        self.cancel_the_rest();
        Ok(quiesced)
    }

    /// Completes operations that the kernel did not complete. It is unknown which of their contexts
    /// were done, so every context whose status is Ok is marked.
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

    /// Signals for every operation in flight, whatever its outcome. For a ring that is given up
    /// because its kernel did not end: a GPU stream waiting for a signal would otherwise hang. The
    /// kernel may signal the same value once more.
    ///
    /// Devices may still transfer: afterwards the outcome is unknown, not final.
    pub fn abandon(&mut self) {
        let left: Vec<u32> = self.table.in_flight().collect();
        for index in left {
            let entry = self.table.issued(index).expect("listed as in flight");
            if let Some(signal) = &entry.signal {
                signal.event.set(signal.value);
            }
        }
    }

    /// Restarts the kernel after [`Uring::stop`] on recovered queues: fresh grants of the same
    /// devices. Maps, pools and events remain valid.
    ///
    /// # Errors
    /// Same as [`Uring::init_queue`]; also [`Error::State`] unless stopped, and [`Error::Grants`]
    /// if the devices differ.
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
        // First: the new queues may reuse the memory of the old ones.
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
            // A kernel that may still run must never see this memory reused.
            let arenas = (self.arena.clone(), self.near.clone());
            std::mem::forget((self.region.clone(), self.queues.memory(), arenas));
        }
    }
}
