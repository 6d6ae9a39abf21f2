//! Waits with a deadline that detect a dead or paused controller, and delays before retries.

use std::time::Duration;

use nvme_spec::{
    reg::{CSTS, Csts},
    status::Status,
};

use crate::{
    bus::{Bus, Interrupt},
    clock::{Clock, Nanos},
};

/// Interval at which a wait reads CSTS.
const HEALTH_EVERY: Nanos = Nanos::from_millis(50);
/// Longest sleep for an interrupt; the queue is then polled even without one.
const INTERRUPT_NAP: Nanos = Nanos::from_millis(5);

/// Number of retries of a command.
const RETRIES: u32 = 4;
/// Minimum delay before the first retry; doubled each time.
const RETRY_DELAY: Nanos = Nanos::from_millis(10);
/// Maximum delay, whatever the controller asks for.
const RETRY_DELAY_MAX: Nanos = Nanos::from_millis(10_000);

/// Reasons to stop waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dead {
    Gone,
    Fatal(u32),
}

/// A wait on a controller: a [`Waiter`] that also sleeps for an interrupt and watches CSTS.
///
/// Time in which the controller is paused (CSTS.PP, for a firmware activation) does not count
/// against deadlines, up to `pause_max` (Base, "Processing Paused").
#[derive(Debug)]
pub(crate) struct Watch<'a> {
    env: Env<'a>,
    interrupt: Option<&'a Interrupt>,
    last_health: Nanos,
    /// Total time of the controller's pauses.
    paused: Nanos,
    idle: u32,
}

/// Environment of a wait on a controller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Env<'a> {
    pub(crate) clock: &'a dyn Clock,
    pub(crate) bus: &'a dyn Bus,
    /// Limit of the extra time for a paused controller.
    pub(crate) pause_max: Nanos,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(env: Env<'a>, interrupt: Option<&'a Interrupt>) -> Self {
        let now = env.clock.now();
        Self { env, interrupt, last_health: now, paused: Nanos(0), idle: 0 }
    }

    /// Records progress: the next pause is short again.
    pub(crate) fn moved(&mut self) {
        self.idle = 0;
    }

    /// Returns whether `deadline` has passed, not counting pauses of the controller.
    pub(crate) fn is_past(&self, deadline: Nanos) -> bool {
        self.env.clock.now() >= deadline + self.paused
    }

    /// Waits briefly. Returns `false` if `deadline` has passed.
    pub(crate) fn wait(&mut self, deadline: Nanos) -> Result<bool, Dead> {
        let now = self.env.clock.now();
        if now >= self.last_health + HEALTH_EVERY || self.is_past(deadline) {
            if health(self.env.bus)?.pp() == 1 {
                let paused = self.paused + (now - self.last_health);
                self.paused = paused.min(self.env.pause_max);
            }
            self.last_health = now;
        }
        if self.is_past(deadline) {
            return Ok(false);
        }
        let until = deadline + self.paused;
        if let Some(interrupt) = self.interrupt {
            sleep(interrupt, (until - now).min(INTERRUPT_NAP));
        }
        self.env.clock.pause(self.idle, until);
        self.idle = self.idle.saturating_add(1);
        Ok(true)
    }
}

/// Checks that the controller is present and not in a fatal state.
pub(crate) fn health(bus: &dyn Bus) -> Result<Csts, Dead> {
    let csts = Csts(bus.read32(CSTS).map_err(|_| Dead::Gone)?);
    if csts.is_gone() {
        return Err(Dead::Gone);
    }
    if csts.cfs() != 0 {
        return Err(Dead::Fatal(csts.0));
    }
    Ok(csts)
}

/// Sleeps until the interrupt, but at most `span`, and acknowledges it.
fn sleep(interrupt: &Interrupt, span: Nanos) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let span: Duration = span.duration();
    let Ok(timeout) = Timespec::try_from(span) else { return };
    let mut fds = [PollFd::new(&*interrupt.eventfd, PollFlags::IN)];
    // Any failure only means that the queue is polled early.
    if poll(&mut fds, Some(&timeout)).is_ok_and(|ready| ready > 0) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&*interrupt.eventfd, &mut count);
    }
}

/// Returns the delay before retry number `attempt` (from 0) of a command that ended with `status`,
/// or `None` if it must not be retried. `crdt` holds the controller's retry delay times in units of
/// 100 ms, which the CRD field of the status selects (Base, "Command Retry Delay").
#[must_use]
pub fn retry_delay(status: Status, crdt: [u16; 3], attempt: u32) -> Option<Nanos> {
    if attempt >= RETRIES || !status.may_retry() {
        return None;
    }
    let asked = match usize::from(status.crd()) {
        0 => Nanos(0),
        index => Nanos::from_millis(u64::from(crdt[index - 1]) * 100),
    };
    Some(asked.max(Nanos(RETRY_DELAY.0 << attempt)).min(RETRY_DELAY_MAX))
}
