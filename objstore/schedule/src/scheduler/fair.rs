//! Deadlines for reads that nobody waits for by the clock: each flow gets its share.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use crate::op::{Flow, Kind, Op};

/// Virtual clocks, one a flow (Zhang, SIGCOMM 1990): a read is due when it would be done, had its
/// flow its part of the devices for itself. Every deadline is finite, and what is added later is
/// due later; so none starves.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// When a flow's last read is due.
    last: HashMap<Flow, Duration>,
    /// Reads that wait, by tenant and request.
    waiting: BTreeMap<u32, BTreeMap<u64, usize>>,
}

impl Shares {
    /// When a read is due that takes `cost` alone.
    pub(super) fn due(&mut self, flow: Flow, cost: Duration, now: Duration) -> Duration {
        let requests = self.waiting.entry(flow.tenant).or_default();
        *requests.entry(flow.request).or_default() += 1;
        let requests = requests.len() as u32;
        let parts = requests.saturating_mul(self.waiting.len() as u32);
        let begins = self.last.get(&flow).copied().unwrap_or_default().max(now);
        let due = begins.saturating_add(cost.saturating_mul(parts));
        self.last.insert(flow, due);
        due
    }

    /// A read starts, or was cancelled.
    pub(super) fn leave(&mut self, op: Op) {
        let (Kind::Soon, Flow { tenant, request }) = (op.kind, op.flow) else { return };
        let Some(requests) = self.waiting.get_mut(&tenant) else { return };
        if let Some(count) = requests.get_mut(&request) {
            *count -= 1;
            if *count == 0 {
                requests.remove(&request);
                self.last.remove(&op.flow);
            }
        }
        if requests.is_empty() {
            self.waiting.remove(&tenant);
        }
    }
}
