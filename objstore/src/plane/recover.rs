//! Recovery from a timeout or a fault: nothing continues before no device can access anything.
//!
//! The order matters. Let operations end that the fault does not affect; stop the I/O kernel, so
//! that no doorbell is rung; then recover the controllers, so that no old command is executed any
//! more; only then report to callers that their blocks are free, free files, and start the kernel
//! on new queues. If any step fails, memory that a device might still reach is never freed, and
//! the store has failed.
//!
//! A fault affects one queue: commands outstanding on others, and on other devices, complete
//! first. All queues are then recreated, which resets no controller that responds normally.

use gio_uring::{Completion, IoStatus, Progress, Uring};
use nvme_driver::{Nanos, Waiter};

use super::{LayerState, Plane, Target, open, streams::Streams};
use kv_catalog::Layer;

use crate::error::{Failure, StoreError};

/// Idle time after which the queues are taken to have completed everything.
const SETTLED: Nanos = Nanos::from_millis(10);

impl Plane {
    /// Recovers controllers and kernel. Everything in flight has failed afterwards.
    pub(super) fn recover(&mut self, cause: &str) -> Result<(), StoreError> {
        tracing::warn!(cause, "stopping the I/O kernel and recovering the controllers");
        self.check()?;
        let deadline = self.clock.now() + self.options.stop_timeout;
        self.let_others_end(deadline);
        let quiesced = match self.ring()?.stop(deadline) {
            Ok(quiesced) => quiesced,
            Err(error) => return Err(self.fail(format!("{cause}; then {error}"))),
        };
        for at in 0..self.devices.len() {
            let must_reset = std::mem::take(&mut self.devices[at].must_reset);
            let mut controller = self.devices[at].controller.lock();
            let reset = if must_reset { controller.reset() } else { Ok(()) };
            let recovered = reset.and_then(|()| controller.recover(&quiesced));
            drop(controller);
            if let Err(error) = recovered {
                return Err(self.fail(format!("{cause}; then {error}")));
            }
            self.check_region(at, cause)?;
        }
        self.collect();
        self.fault = None;
        if let Err(error) = self.restart() {
            return Err(self.fail(format!("{cause}; then {error}")));
        }
        self.tally.recoveries += 1;
        Ok(())
    }

    /// Lets working queues complete their commands. Operations that wait for an event do not delay
    /// this, and are cancelled.
    fn let_others_end(&mut self, deadline: Nanos) {
        let clock = self.clock.clone();
        let mut waiter = Waiter::new(&*clock, deadline);
        let mut moved_at = clock.now();
        loop {
            let Some(ring) = &mut self.ring else { return };
            match ring.poll() {
                Ok(Progress::Moved) => waiter.moved(),
                Ok(Progress::Idle) if ring.is_idle() => {
                    // A warp may be about to take an operation.
                    if clock.now() >= moved_at + SETTLED || !waiter.wait() {
                        return;
                    }
                    continue;
                }
                Ok(Progress::Idle) if waiter.wait() => {}
                // The deadline, or a kernel that cannot go on.
                _ => return,
            }
            moved_at = clock.now();
        }
    }

    /// Records the end of everything that was in flight when the kernel was stopped.
    fn collect(&mut self) {
        for at in 0..self.ops.len() {
            if self.ops[at].outcome.is_some() {
                continue;
            }
            let ring = self.ring.as_mut().zip(self.ops[at].iocb);
            let found = ring.and_then(|(ring, iocb)| ring.try_completion(iocb).ok().flatten());
            // Without a completion the command may have got as far as the device.
            let lost = Completion { errors: 1, error: Some((IoStatus::Fault, 0)), objects: 0 };
            self.arrived(at, found.unwrap_or(lost));
        }
        // Operations that a stream has yet to get past stay: the signal was sent, so it gets there.
        for at in (0..self.ops.len()).rev() {
            if self.ops[at].is_over() {
                self.complete(at);
            }
        }
    }

    /// Starts the kernel on new grants; on a new executor if the old one cannot be restarted.
    fn restart(&mut self) -> Result<(), StoreError> {
        let grants = open::grant_all(&mut self.devices)?;
        let error = match self.ring()?.restart(&grants) {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        tracing::warn!(%error, "the executor cannot go on; making a new one");
        let executor = (self.executor.0)()?;
        let (clock, options) = (self.clock.clone(), open::ring_options(&self.options));
        let mut ring = Uring::init_queue(self.options.iocbs, executor, clock, &grants, options)?;
        let regions: Vec<_> = self.devices.iter().map(|device| device.region).collect();
        let desc =
            open::describe(&self.geometry, &regions, self.files, self.pads.as_ref(), &self.options);
        let target =
            open::target(&mut ring, &self.pool, &self.shape, &desc, self.checksums, &self.options)?;
        if let Some(memory) = &mut self.memory {
            memory.register(&mut ring, &desc, self.checksums)?;
        }
        let gpu = self.streams.as_ref().map(|streams| streams.gpu().clone());
        let streams = gpu.map(|gpu| Streams::new(gpu, &mut ring)).transpose()?;
        let mut target = std::mem::replace(&mut self.target, target);
        if let (Target::Staged(new), Target::Staged(old)) = (&mut self.target, &mut target) {
            new.inherit(old);
        }
        let streams = std::mem::replace(&mut self.streams, streams);
        if !streams.as_ref().is_none_or(Streams::is_past) {
            // They still use events and tables in the old executor's memory.
            std::mem::forget((streams, target));
        }
        self.ring = Some(ring);
        // Maps and tables live in the old executor's memory: jobs that have them must start over.
        for job in self.jobs.values_mut() {
            let hits = job.hits.iter().map(|(entry, _)| entry);
            let first = job.moves.iter().chain(hits).next();
            let has_some = job.map.is_some() || job.is_on_streams();
            if let Some(first) = first.filter(|_| has_some) {
                job.failure.get_or_insert(Failure {
                    direction: job.direction,
                    layer: Layer(0),
                    position: first.position,
                    file: first.file,
                    status: IoStatus::Cancelled,
                    errors: 1,
                });
            }
        }
        Ok(())
    }

    /// Fails the store: every later call returns the cause. Memory that a device or kernel might
    /// still reach is leaked; the controllers do the same with their queues.
    pub(super) fn fail(&mut self, cause: String) -> StoreError {
        tracing::error!(cause, "the store has failed");
        let mut ring = self.ring.take();
        if let Some(ring) = &mut ring {
            // No stream may wait forever for a kernel that was abandoned.
            ring.abandon();
        }
        // The ring owns events, maps and tables: its memory is never freed.
        let memory = self.memory.as_ref().map(|memory| memory.own.clone());
        std::mem::forget((ring, self.pads.take(), self.pool.clone(), memory));
        self.ops.clear();
        for job in self.jobs.values_mut() {
            for state in &mut job.layers {
                if matches!(state, LayerState::InFlight) {
                    *state = LayerState::Idle;
                }
            }
        }
        self.failed = Some(cause.clone());
        StoreError::Failed { cause }
    }
}
