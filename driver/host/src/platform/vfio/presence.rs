//! Whether a function is there: a removal is for good, a link that a reset took down comes back.

use std::sync::OnceLock;

/// What is known of whether a function is there.
#[derive(Debug, Default)]
pub(super) struct Presence {
    gone: OnceLock<()>,
    /// The NVM subsystem was reset.
    reset: OnceLock<()>,
}

/// What it means that a register read as all ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// The function is there: the register is like that.
    Present,
    /// A reset took its link down.
    Awaited,
    /// It is there again, without what the reset cleared.
    Back,
    /// It was removed.
    Gone,
}

impl Presence {
    /// The NVM subsystem is being reset: the function will be absent for a while.
    pub(super) fn expect_absence(&self) {
        let _ = self.reset.set(());
    }

    /// A register read as all ones, and configuration space says this.
    pub(super) fn seen(&self, is_absent: bool) -> Seen {
        match (is_absent, self.reset.get().is_some()) {
            (true, true) => Seen::Awaited,
            (true, false) => Seen::Gone,
            (false, true) => Seen::Back,
            (false, false) => Seen::Present,
        }
    }

    /// It counts as absent from now on. Whether it did not before.
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
