//! Slow commands. The controller is asked to abort them one by one, before their queue is abandoned
//! with everything outstanding on it.

use std::collections::BTreeMap;

use gio_uring::Outstanding;
use nvme_driver::Nanos;

use super::Plane;

/// The commands that were outstanding at the last check.
#[derive(Debug, Default)]
pub(super) struct Late {
    seen: BTreeMap<Outstanding, Seen>,
    next: Nanos,
}

#[derive(Debug, Clone, Copy)]
struct Seen {
    /// First check that saw it outstanding; the kernel's clock may differ from ours.
    since: Nanos,
    is_aborted: bool,
}

impl Plane {
    /// Asks controllers to abort commands outstanding for two thirds of the command timeout. Their
    /// completions report the result. Checks eight times per timeout, and never waits.
    pub(super) fn abort_late(&mut self) {
        let now = self.clock.now();
        let timeout = self.options.command_timeout.0;
        let (Some(ring), true) = (&self.ring, now >= self.late.next) else { return };
        self.late.next = now + Nanos(timeout / 8);
        let before = std::mem::take(&mut self.late.seen);
        if self.ops.is_empty() {
            return;
        }
        for command in ring.outstanding() {
            let mut seen =
                before.get(&command).copied().unwrap_or(Seen { since: now, is_aborted: false });
            let Outstanding { device, qid, cid, .. } = command;
            // A waiter for a layer must not wait for a journal.
            if !seen.is_aborted
                && now - seen.since >= Nanos(timeout / 3 * 2)
                && let Some(mut controller) = self.devices[device as usize].controller.try_lock()
            {
                seen.is_aborted = controller.begin_abort(qid, cid);
                tracing::warn!(
                    ctrl = controller.id(),
                    qid = qid.0,
                    cid = cid.0,
                    asked = seen.is_aborted,
                    "a command takes long; aborting it"
                );
            }
            self.late.seen.insert(command, seen);
        }
    }
}
