//! Presence of a function: a removal is permanent, a link taken down by a reset comes back.

use std::sync::OnceLock;

/// Knowledge about the presence of a function.
#[derive(Debug, Default)]
pub(super) struct Presence {
    gone: OnceLock<()>,
    /// Set once the NVM subsystem was reset.
    reset: OnceLock<()>,
}

/// Meaning of a register that reads as all ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// The function is present: the register has that value.
    Present,
    /// A reset took the link down.
    Awaited,
    /// The function is back, without the state that the reset cleared.
    Back,
    /// The function was removed.
    Gone,
}

impl Presence {
    /// Records a reset of the NVM subsystem: the function will be absent for a while.
    pub(super) fn expect_absence(&self) {
        let _ = self.reset.set(());
    }

    /// Judges a register that reads as all ones, given whether configuration space does.
    pub(super) fn seen(&self, is_absent: bool) -> Seen {
        match (is_absent, self.reset.get().is_some()) {
            (true, true) => Seen::Awaited,
            (true, false) => Seen::Gone,
            (false, true) => Seen::Back,
            (false, false) => Seen::Present,
        }
    }

    /// Marks the function as permanently absent. Returns whether this is new.
    pub(super) fn end(&self) -> bool {
        self.gone.set(()).is_ok()
    }

    pub(super) fn is_over(&self) -> bool {
        self.gone.get().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_absent_for_good_unless_a_reset_took_its_link_down() {
        let presence = Presence::default();
        assert_eq!(presence.seen(false), Seen::Present);
        assert_eq!(presence.seen(true), Seen::Gone);
        presence.expect_absence();
        assert_eq!(presence.seen(true), Seen::Awaited, "and as often as it is asked");
        assert_eq!(presence.seen(true), Seen::Awaited);
        assert_eq!(presence.seen(false), Seen::Back);
        assert!(!presence.is_over());
        assert!(presence.end() && presence.is_over() && !presence.end());
    }
}
