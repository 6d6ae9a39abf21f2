//! A power supply shared by several controllers, which fails at a chosen moment.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The power of all controllers that have this switch in [`EmuConfig::power`]. It is on until it is
/// cut, and then stays off: the controllers are gone, and data in volatile caches or in flight may
/// be lost ([`Media::power_loss`]). The remaining bytes ([`MemoryMedia`] handles) are available to
/// new controllers with a new switch.
///
/// So that a test can enumerate crash points, *moments* are counted over all controllers. There is
/// one before each I/O command that does more than return data, and one when each media operation
/// of such a command has taken effect but is not yet reported to the host. In virtual time
/// ([`SimClock`]) on one thread, the same seeds give the same moments.
///
/// Clones are handles to the same switch.
///
/// [`EmuConfig::power`]: crate::EmuConfig::power
/// [`Media::power_loss`]: crate::Media::power_loss
/// [`MemoryMedia`]: crate::MemoryMedia
/// [`SimClock`]: crate::SimClock
#[derive(Debug, Clone, Default)]
pub struct PowerSwitch(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    moments: u64,
    cut_at: Option<u64>,
    off: bool,
}

impl PowerSwitch {
    /// Cuts the power at this moment, counted from 0 since the switch was created, or at the next
    /// one if it has passed.
    pub fn cut_at(&self, moment: u64) {
        self.state().cut_at = Some(moment);
    }

    /// Cuts the power now.
    pub fn cut(&self) {
        self.state().off = true;
    }

    /// Returns whether the power is off.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.state().off
    }

    /// Returns the number of moments so far.
    #[must_use]
    pub fn moments(&self) -> u64 {
        self.state().moments
    }

    /// Counts a moment. Returns whether the power is off.
    pub(crate) fn pass_moment(&self) -> bool {
        let mut state = self.state();
        if !state.off {
            state.off = state.cut_at.is_some_and(|at| at <= state.moments);
            state.moments += 1;
        }
        state.off
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::PowerSwitch;

    #[test]
    fn the_power_fails_at_its_moment_and_stays_off() {
        let power = PowerSwitch::default();
        power.cut_at(2);
        let passed = [(); 4].map(|()| power.clone().pass_moment());
        assert_eq!(passed, [false, false, true, true]);
        assert_eq!((power.moments(), power.is_cut()), (3, true), "none pass without power");
        let power = PowerSwitch::default();
        assert!(!power.pass_moment() && !power.pass_moment());
        power.cut_at(0);
        assert!(!power.is_cut(), "a moment that has passed");
        assert!(power.pass_moment());
        let power = PowerSwitch::default();
        power.cut();
        assert!(power.pass_moment());
    }
}
