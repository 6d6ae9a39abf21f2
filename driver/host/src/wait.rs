//! Waiting with a deadline, while watching that the controller is still alive.

use std::time::Duration;

use nvme_spec::reg::{CSTS, Csts};

use crate::{
    bus::{Bus, Interrupt},
    clock::{Clock, Nanos},
};

/// How often a waiting call reads CSTS.
const HEALTH_EVERY: Nanos = Nanos::from_millis(50);
/// Longest sleep for an interrupt; then the queue is looked at even without one.
const INTERRUPT_NAP: Nanos = Nanos::from_millis(5);

/// Why there is no point in waiting on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dead {
    Gone,
    Fatal(u32),
}

/// One wait: a loop of "look, then [`Waiter::wait`]".
#[derive(Debug)]
pub(crate) struct Waiter<'a> {
    clock: &'a dyn Clock,
    bus: &'a dyn Bus,
    interrupt: Option<&'a Interrupt>,
    next_health: Nanos,
    idle: u32,
}

impl<'a> Waiter<'a> {
    pub(crate) fn new(
        clock: &'a dyn Clock,
        bus: &'a dyn Bus,
        interrupt: Option<&'a Interrupt>,
    ) -> Self {
        let next_health = clock.now() + HEALTH_EVERY;
        Self { clock, bus, interrupt, next_health, idle: 0 }
    }

    /// There was something to see: the next wait begins with a short one.
    pub(crate) fn moved(&mut self) {
        self.idle = 0;
    }

    /// Waits a little. `false` when `deadline` has passed.
    pub(crate) fn wait(&mut self, deadline: Nanos) -> Result<bool, Dead> {
        let now = self.clock.now();
        if now >= self.next_health || now >= deadline {
            self.next_health = now + HEALTH_EVERY;
            health(self.bus)?;
        }
        if now >= deadline {
            return Ok(false);
        }
        if let Some(interrupt) = self.interrupt {
            sleep(interrupt, (deadline - now).min(INTERRUPT_NAP));
        }
        self.clock.pause(self.idle, deadline);
        self.idle = self.idle.saturating_add(1);
        Ok(true)
    }
}

/// Whether the controller is there and not in a fatal state.
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

/// Sleeps until the interrupt or `span` later, and acknowledges it.
fn sleep(interrupt: &Interrupt, span: Nanos) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let span: Duration = span.duration();
    let Ok(timeout) = Timespec::try_from(span) else { return };
    let mut fds = [PollFd::new(&*interrupt.eventfd, PollFlags::IN)];
    // Any failure only means that the queue is looked at early.
    if poll(&mut fds, Some(&timeout)).is_ok_and(|ready| ready > 0) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&*interrupt.eventfd, &mut count);
    }
}
