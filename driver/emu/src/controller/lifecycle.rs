//! Enable, reset, shutdown, failure (Base, "Controller Initialization", "Resets", "Shutdown").

use nvme_driver::Nanos;
use nvme_spec::reg::{Cc, Csts, ShutdownNotification, ShutdownStatus};

use super::Controller;
use crate::fault::RegisterFaults;

/// Duration of the link loss after a reset of the NVM subsystem.
const LINK_LOSS: Nanos = Nanos::from_millis(500);
/// Time until the platform reports an error that has taken the link down.
const REPORTED_AFTER: Nanos = Nanos::from_millis(20);

/// State of the controller between power-on and removal.
#[derive(Debug, Default)]
pub(super) struct Lifecycle {
    phase: Phase,
    shutdown: Shutdown,
    /// CSTS.CFS.
    pub fatal: bool,
    /// No longer on the bus.
    pub gone: bool,
    /// End of the link loss after a reset of the subsystem or of the link.
    link_back: Nanos,
    /// Set when a reset of the link has cleared the BARs.
    without_bars: bool,
    /// Time of the platform's report of a PCIe error.
    pcie_error: Option<Nanos>,
}

/// CC.EN and the resulting CSTS.RDY. `at` is the time of the change; `None`: never.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    #[default]
    Disabled,
    Enabling {
        at: Option<Nanos>,
    },
    Ready,
    Disabling {
        at: Option<Nanos>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Shutdown {
    #[default]
    None,
    /// Waits until media have nothing in flight.
    Draining {
        flush: bool,
    },
    /// Waits for the flushes.
    Flushing,
    Complete,
}

impl Lifecycle {
    /// Returns CSTS.
    pub(super) fn status(&self) -> Csts {
        let ready = matches!(self.phase, Phase::Ready | Phase::Disabling { .. });
        let shutdown = match self.shutdown {
            Shutdown::None => ShutdownStatus::NORMAL,
            Shutdown::Draining { .. } | Shutdown::Flushing => ShutdownStatus::OCCURRING,
            Shutdown::Complete => ShutdownStatus::COMPLETE,
        };
        Csts::default().with_rdy(ready.into()).with_cfs(self.fatal.into()).with_shst(shutdown.0)
    }

    /// Returns whether commands are fetched and completed.
    #[inline]
    pub(super) fn serving(&self) -> bool {
        self.phase == Phase::Ready
            && !self.fatal
            && !self.gone
            && matches!(self.shutdown, Shutdown::None | Shutdown::Draining { .. })
    }

    /// Returns whether register accesses get through.
    pub(super) fn answers(&self, now: Nanos) -> bool {
        !self.is_absent(now) && !self.without_bars
    }

    /// Returns whether even configuration space does not answer.
    pub(super) fn is_absent(&self, now: Nanos) -> bool {
        self.gone || now < self.link_back
    }

    /// Returns whether a shutdown was requested: fetched commands complete, no more are fetched.
    #[inline]
    pub(super) fn draining(&self) -> bool {
        self.shutdown != Shutdown::None
    }

    /// Returns whether a shutdown is in progress.
    pub(super) fn shutting_down(&self) -> bool {
        !self.gone && !matches!(self.shutdown, Shutdown::None | Shutdown::Complete)
    }

    /// Returns whether the last shutdown completed, so that losing power now is safe.
    pub(super) fn safe(&self) -> bool {
        self.shutdown == Shutdown::Complete
    }

    pub(super) fn next_event(&self) -> Option<Nanos> {
        match self.phase {
            Phase::Enabling { at } | Phase::Disabling { at } => at,
            Phase::Disabled | Phase::Ready => None,
        }
    }

    /// Lets a transition happen that a removed fault was blocking.
    pub(super) fn faults_changed(&mut self, faults: &RegisterFaults) {
        match &mut self.phase {
            Phase::Enabling { at } if !faults.stuck_rdy => *at = at.or(Some(Nanos(0))),
            Phase::Disabling { at } if !faults.rdy_never_clears => *at = at.or(Some(Nanos(0))),
            _ => {}
        }
    }
}

impl Controller {
    /// Lets CSTS.RDY follow CC.EN when due. Returns the number of changes.
    pub(super) fn tick(&mut self, now: Nanos) -> u32 {
        let due = |at: Option<Nanos>| at.is_some_and(|at| at <= now);
        let phase = self.lifecycle.phase;
        match phase {
            Phase::Enabling { at } if due(at) => self.lifecycle.phase = Phase::Ready,
            // RDY = 0 promises "no DMA", and media cannot cancel all operations they have begun.
            Phase::Disabling { at } if due(at) && self.media_idle(now) => {
                self.lifecycle.phase = Phase::Disabled;
                // Enabled again before RDY was 0. A host should wait, but EN is level-triggered.
                if self.registers.cc.en() == 1 {
                    self.enable(now);
                }
            }
            _ => return 0,
        }
        1
    }

    /// Returns whether media have stopped using memory.
    fn media_idle(&mut self, now: Nanos) -> bool {
        self.poll_media(now);
        self.storage.in_flight() == 0
    }

    pub(super) fn write_cc(&mut self, value: u32, now: Nanos) {
        let (old, new) = (self.registers.cc, Cc(value));
        self.registers.cc = match (old.en(), new.en()) {
            // "Controller Configuration": while enabled, only these may change.
            (1, 1) => old.with_shn(new.shn()).with_iosqes(new.iosqes()).with_iocqes(new.iocqes()),
            _ => new,
        };
        match (old.en(), new.en()) {
            (0, 1) => self.enable(now),
            (1, 0) => self.reset(now),
            _ => {}
        }
        let shn = ShutdownNotification(new.shn());
        let asked = shn != ShutdownNotification::NONE && new.shn() != old.shn();
        if asked && self.lifecycle.shutdown == Shutdown::None {
            self.logs.counters.resets += 1;
            let flush = shn == ShutdownNotification::NORMAL;
            self.lifecycle.shutdown = Shutdown::Draining { flush };
        }
    }

    /// Handles CC.EN going to 1: "Controller Initialization".
    fn enable(&mut self, now: Nanos) {
        if self.lifecycle.phase != Phase::Disabled {
            return;
        }
        if let Some(why) = self.registers.refusal() {
            self.fail(why);
            return;
        }
        // A shutdown requested while disabled is over.
        self.lifecycle.shutdown = Shutdown::None;
        self.rules.page_bytes = self.registers.page_bytes();
        self.queues.add_admin(&self.registers);
        let faults = self.faults.registers();
        let at = (!faults.stuck_rdy).then(|| now + Nanos(faults.slow_rdy_ns.unwrap_or(0)));
        self.lifecycle.phase = Phase::Enabling { at };
        self.tick(now);
    }

    /// Handles CC.EN going to 0: "Controller Level Reset". Commands end without completions, I/O
    /// queues are deleted, and no DMA happens once CSTS.RDY is 0.
    fn reset(&mut self, now: Nanos) {
        self.logs.counters.resets += 1;
        self.storage.cancel();
        self.forget();
        self.features.reset();
        self.lifecycle.fatal = false;
        self.lifecycle.shutdown = Shutdown::None;
        let faults = self.faults.registers();
        self.lifecycle.phase = match self.lifecycle.phase {
            Phase::Disabled | Phase::Enabling { .. } => Phase::Disabled,
            Phase::Ready | Phase::Disabling { .. } => {
                let late = Nanos(faults.slow_rdy_ns.unwrap_or(0));
                Phase::Disabling { at: (!faults.rdy_never_clears).then(|| now + late) }
            }
        };
        self.tick(now);
    }

    /// Performs a Function Level Reset (Base, "Controller Level Reset"): like clearing CC.EN, but
    /// all registers return to power-on values, and only copies in progress keep CSTS.RDY at 1.
    pub fn reset_function(&mut self, now: Nanos) -> bool {
        if self.lifecycle.is_absent(now) || self.faults.registers().no_function_reset {
            return false;
        }
        self.lifecycle.without_bars = false;
        self.reset_all(now);
        true
    }

    /// Returns whether the function does not answer at all.
    pub(crate) fn is_absent(&self, now: Nanos) -> bool {
        self.lifecycle.is_absent(now)
    }

    /// Loses the link for `span`, to a platform that recovers from an uncorrectable PCIe error.
    pub(crate) fn lose_link(&mut self, now: Nanos, span: Nanos) {
        self.reset_all(now);
        self.lifecycle.link_back = now + span;
        self.lifecycle.without_bars = true;
        self.report_pcie_error(now + REPORTED_AFTER);
    }

    pub(crate) fn report_pcie_error(&mut self, at: Nanos) {
        self.lifecycle.pcie_error = Some(at);
    }

    /// Returns whether the platform has reported a PCIe error since the last call.
    pub(crate) fn take_pcie_error(&mut self, now: Nanos) -> bool {
        self.lifecycle.pcie_error.take_if(|at| now >= *at).is_some()
    }

    /// Performs an NVM Subsystem Reset: a Function Level Reset plus a link loss.
    pub(super) fn reset_subsystem(&mut self, now: Nanos) {
        self.reset_all(now);
        self.logs.counters.subsystem_resets += 1;
        self.lifecycle.link_back = now + LINK_LOSS;
    }

    /// Resets independently of CC and of its faults.
    fn reset_all(&mut self, now: Nanos) {
        self.registers.clear();
        self.reset(now);
        if let Phase::Disabling { at } = &mut self.lifecycle.phase {
            *at = Some(now);
        }
        self.tick(now);
    }

    /// Loses everything in the controller and in volatile caches.
    pub(super) fn lose_power(&mut self) {
        self.storage.power_loss();
        if !self.lifecycle.safe() {
            self.logs.unsafe_shutdown();
        }
        self.forget();
        self.features.reset();
        self.registers.clear();
        // Cannot be enabled while media use memory.
        let phase = match self.storage.in_flight() {
            0 => Phase::Disabled,
            _ => Phase::Disabling { at: Some(Nanos(0)) },
        };
        self.lifecycle = Lifecycle { gone: self.lifecycle.gone, phase, ..Lifecycle::default() };
    }

    /// Drops all commands and queues.
    fn forget(&mut self) {
        self.commands.clear();
        self.faults.pending = None;
        self.queues.clear();
        self.logs.events.clear();
    }

    /// Sets CSTS.CFS: nothing more happens until a reset.
    #[cold]
    pub(super) fn fail(&mut self, why: &'static str) {
        if !self.lifecycle.fatal {
            tracing::warn!(ctrl = self.identity.id(), "controller fatal status: {why}");
        }
        self.lifecycle.fatal = true;
    }

    /// Advances a "Shutdown": drains commands in flight, flushes, reports completion.
    pub(super) fn advance_shutdown(&mut self, now: Nanos) -> u32 {
        if !self.lifecycle.shutting_down() || self.storage.in_flight() > 0 {
            return 0;
        }
        self.lifecycle.shutdown = match self.lifecycle.shutdown {
            Shutdown::Draining { flush: true } => {
                self.storage.flush_all(now);
                Shutdown::Flushing
            }
            _ => Shutdown::Complete,
        };
        1
    }
}
