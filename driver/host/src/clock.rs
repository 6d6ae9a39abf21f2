//! Time as a parameter, so that the whole stack can run in virtual time under a seed.

use std::{
    ops::{Add, Sub},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// A point in time or a duration, in nanoseconds since the clock's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Nanos(pub u64);

impl Nanos {
    /// The latest time.
    pub const MAX: Self = Self(u64::MAX);

    /// Converts milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// Converts to a standard duration.
    #[must_use]
    pub const fn duration(self) -> Duration {
        Duration::from_nanos(self.0)
    }
}

impl Add for Nanos {
    type Output = Self;
    fn add(self, span: Self) -> Self {
        Self(self.0.saturating_add(span.0))
    }
}

impl Sub for Nanos {
    type Output = Self;
    fn sub(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
}

/// A source of time that also decides how to wait.
///
/// Every wait is a loop of "poll, then [`Clock::pause`]" with a deadline; see [`Waiter`]. A
/// simulated clock steps the software controllers inside `pause` and advances virtual time, so one
/// thread can drive the whole stack.
pub trait Clock: Send + Sync + std::fmt::Debug {
    /// Returns the time since the clock's start. Never goes backwards.
    fn now(&self) -> Nanos;

    /// Yields before the caller polls again; returns at `until` at the latest, usually much
    /// earlier. `idle` counts the caller's fruitless polls so far, so that an implementation can
    /// spin first and sleep later.
    fn pause(&self, idle: u32, until: Nanos);

    /// Returns a number that grows with each event that wakes pauses; a constant if there are none.
    fn happened(&self) -> u64 {
        0
    }

    /// Same as [`Clock::pause`], but returns at once if something happened since
    /// [`Clock::happened`] returned `seen`, which was before the last poll.
    fn pause_since(&self, _seen: u64, idle: u32, until: Nanos) {
        self.pause(idle, until);
    }
}

/// A wait with a deadline: a loop of "poll, then [`Waiter::wait`]".
///
/// ```
/// # use nvme_driver::{Clock, MonotonicClock, Nanos, Waiter};
/// let clock = MonotonicClock::default();
/// let mut polls = 0;
/// let mut waiter = Waiter::new(&clock, clock.now() + Nanos::from_millis(1_000));
/// while polls < 3 && waiter.wait() {
///     polls += 1;
/// }
/// assert_eq!(polls, 3);
/// ```
#[derive(Debug)]
pub struct Waiter<'a> {
    clock: &'a dyn Clock,
    deadline: Nanos,
    idle: u32,
    /// Value of [`Clock::happened`] before the last poll.
    seen: u64,
}

impl<'a> Waiter<'a> {
    /// Creates a wait that ends at `deadline`.
    #[must_use]
    pub fn new(clock: &'a dyn Clock, deadline: Nanos) -> Self {
        Self { clock, deadline, idle: 0, seen: clock.happened() }
    }

    /// Records that the last poll found something: the next pause is short again.
    pub fn moved(&mut self) {
        self.idle = 0;
    }

    /// Pauses. Returns `false`, without pausing, if the deadline has passed.
    pub fn wait(&mut self) -> bool {
        if self.clock.now() >= self.deadline {
            return false;
        }
        self.clock.pause_since(self.seen, self.idle, self.deadline);
        self.seen = self.clock.happened();
        self.idle = self.idle.saturating_add(1);
        true
    }
}

/// Polls until `done`, or until `deadline` has passed. Returns the last result of `done`.
pub fn wait_until(clock: &dyn Clock, deadline: Nanos, mut done: impl FnMut() -> bool) -> bool {
    let mut waiter = Waiter::new(clock, deadline);
    loop {
        if done() {
            return true;
        }
        if !waiter.wait() {
            // It may have become true while the clock was read.
            return done();
        }
    }
}

/// Time that [`join`] waits: longer than a recovery of controllers that do not answer.
const JOIN_TIMEOUT: Nanos = Nanos::from_millis(180_000);

/// Joins a thread that was told to end, for a drop: waits three minutes at most. Returns false, and
/// leaves the thread alone, if it does not end in that time.
pub fn join(thread: JoinHandle<()>) -> bool {
    let clock = MonotonicClock::default();
    let (name, deadline) = (thread.thread().name().map(str::to_owned), clock.now() + JOIN_TIMEOUT);
    let ended = wait_until(&clock, deadline, || thread.is_finished());
    if !ended {
        tracing::error!(thread = name, "it does not end, and is left alone");
    } else if thread.join().is_err() {
        tracing::error!(thread = name, "it panicked");
    }
    ended
}

/// The system's monotonic clock; pauses spin, then yield, then sleep.
#[derive(Debug)]
pub struct MonotonicClock {
    start: Instant,
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self { start: Instant::now() }
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Nanos {
        Nanos(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    fn pause(&self, idle: u32, until: Nanos) {
        const SPINS: u32 = 64;
        const YIELDS: u32 = 512;
        const NAP: Duration = Duration::from_micros(50);
        // Naps grow with the wait, of which they stay a small part: most of the CPU time of a long
        // wait is that of waking up.
        const GROWTH: u32 = 16;
        const NAP_MAX: Duration = Duration::from_micros(500);
        if idle < SPINS {
            std::hint::spin_loop();
        } else if idle < YIELDS {
            std::thread::yield_now();
        } else {
            let nap = (NAP * (idle - YIELDS + GROWTH) / GROWTH).min(NAP_MAX);
            let left = (until - self.now()).duration();
            std::thread::sleep(left.min(nap));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_wakes_up_rarely_and_ends_in_time() {
        let clock = MonotonicClock::default();
        let mut polls = 0;
        let end = clock.now() + Nanos::from_millis(100);
        let mut waiter = Waiter::new(&clock, end);
        while waiter.wait() {
            polls += 1;
        }
        // 512 without a nap; then 144 that grow to half a millisecond, 41 ms in all, and 120 more.
        assert!(polls <= 512 + 144 + 120, "{polls} polls in 100 ms");
        assert!(clock.now() >= end);
        // A pause that was counted as often as can be ends at its deadline, too.
        clock.pause(u32::MAX, clock.now() + Nanos(1_000));
    }
}
