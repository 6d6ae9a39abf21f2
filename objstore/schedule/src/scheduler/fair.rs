//! Fair deadlines for reads that have none of their own: each flow gets its share.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use crate::op::{Flow, Kind, Op};

/// Virtual clocks, one per flow (Zhang, SIGCOMM 1990): a read is due when it would be done if its
/// flow had its share of the devices to itself. Every deadline is finite, and later reads are due
/// later; so none starves.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// Deadline of a flow's last read.
    last: HashMap<Flow, Duration>,
    /// Waiting reads, by tenant and request.
    waiting: BTreeMap<u32, BTreeMap<u64, usize>>,
}

impl Shares {
    /// Returns the deadline of a read that takes `cost` alone.
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

    /// Removes a read that starts or is cancelled.
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
