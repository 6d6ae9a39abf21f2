//! The one wait for a layer.

use gio_uring::Progress;
use nvme_driver::{Clock, Nanos, Waiter};

use crate::{error::StoreError, ids::LayerDone};

/// Result of polling a layer.
#[derive(Debug)]
pub(crate) enum Polled {
    /// The layer is done.
    Done(LayerDone),
    /// The layer is in flight.
    Pending(Progress),
}

/// A step of waiting for a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Look if it is done.
    Poll,
    /// Nothing moved for too long: declare the I/O kernel or a device dead, and recover.
    Overdue,
}

/// Waits for a layer. `step` does one step at a time, and locks the plane for it if that is needed:
/// between steps, other threads use it. After `timeout` in which nothing moved, a last step has the
/// layer end in one way or the other.
pub(super) fn wait_for(
    clock: &dyn Clock,
    timeout: Nanos,
    mut step: impl FnMut(Step) -> Result<Polled, StoreError>,
) -> Result<LayerDone, StoreError> {
    loop {
        let mut waiter = Waiter::new(clock, clock.now() + timeout);
        loop {
            match step(Step::Poll)? {
                Polled::Done(done) => return Ok(done),
                Polled::Pending(Progress::Moved) => waiter.moved(),
                Polled::Pending(Progress::Idle) if waiter.wait() => {}
                Polled::Pending(Progress::Idle) => break,
            }
        }
        step(Step::Overdue)?;
    }
}
