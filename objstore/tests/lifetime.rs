//! Drive lifetime: a store deallocates groups that hold nothing, and keeps data of different
//! lifetimes apart.

use crate::stack;

use std::{
    cell::RefCell,
    sync::{Arc, Mutex},
};

use nvme_driver::Nanos;
use nvme_emu::{
    FaultAction, Media, MediaDone, MediaKind, MediaOp, MemoryMedia, NamespaceConfig,
    PlacementConfig,
};
use objstore::{Namespace, Store};
use stack::{Plan, Stack, keys, on};

/// Operations that change a medium, in order: offset, bytes, and the placement handle of a write.
type Log = Arc<Mutex<Vec<(u64, u64, Option<u16>)>>>;

/// A medium that records its changes.
#[derive(Debug)]
struct Recorder {
    media: MemoryMedia,
    log: Log,
}

impl Media for Recorder {
    fn capacity_bytes(&self) -> u64 {
        self.media.capacity_bytes()
    }

    fn granularity_bytes(&self) -> u32 {
        self.media.granularity_bytes()
    }

    fn submit(&mut self, op: MediaOp, now: Nanos) -> Option<MediaDone> {
        let placement = match op.kind {
            MediaKind::Write { .. } => Some(Some(op.placement)),
            MediaKind::Deallocate => Some(None),
            _ => None,
        };
        if let Some(placement) = placement {
            self.log.lock().unwrap().push((op.offset, op.len, placement));
        }
        self.media.submit(op, now)
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<MediaDone>) {
        self.media.poll(now, done);
    }

    fn next_event(&self) -> Option<Nanos> {
        self.media.next_event()
    }

    fn in_flight(&self) -> usize {
        self.media.in_flight()
    }

    fn cancel(&mut self) {
        self.media.cancel();
    }

    fn power_loss(&mut self) {
        self.media.power_loss();
    }
}

thread_local! {
    /// The logs of the devices that were created last.
    static LOGS: RefCell<Vec<Log>> = const { RefCell::new(Vec::new()) };
}

const DEVICE_BYTES: u64 = 16 << 20;
/// Deallocate.
const DSM: u8 = 9;

/// Returns a plan with groups of 8 files, of 24 KiB each, over two devices.
fn plan() -> Plan {
    let mut plan = Plan { device_bytes: DEVICE_BYTES, ..Plan::default() };
    plan.format.group = Some(8);
    plan.drive = |config| {
        let log = Log::default();
        let media = Recorder { media: MemoryMedia::new(DEVICE_BYTES).unwrap(), log: log.clone() };
        config.namespaces = vec![NamespaceConfig::new(media, 4096)];
        LOGS.with_borrow_mut(|logs| logs.push(log));
    };
    plan
}

fn recorded(plan: &Plan) -> (Stack, Vec<Log>) {
    LOGS.take();
    let stack = Stack::new(plan);
    (stack, LOGS.take())
}

/// Returns what was deallocated since the last call: ranges of files, on each device.
fn deallocated(stack: &Stack, logs: &[Log]) -> Vec<Vec<(u64, u64)>> {
    let data = stack.data_lba() * 4096;
    let group = stack.store.geometry().group_bytes_per_device();
    let files = |(offset, len, placement): (u64, u64, Option<u16>)| {
        let range = ((offset.checked_sub(data)?) / group * 8, (offset + len - data) / group * 8);
        assert_eq!(((offset - data) % group, len % group), (0, 0), "whole groups");
        placement.is_none().then_some(range)
    };
    let take = |log: &Log| std::mem::take(&mut *log.lock().unwrap());
    logs.iter()
        .map(|log| take(log).into_iter().filter(|at| at.2.is_none()).filter_map(files).collect())
        .collect()
}

/// Syncs until nothing is left to deallocate.
fn settle(store: &Store) {
    let told = || store.stats().unwrap().deallocated_bytes;
    let mut before = u64::MAX;
    while std::mem::replace(&mut before, told()) != told() {
        store.sync_journal().unwrap();
    }
}

#[test]
fn groups_that_hold_nothing_are_deallocated_once_and_no_others() {
    let (mut stack, logs) = recorded(&plan());
    let files = u64::from(stack.store.stats().unwrap().files.files);
    let whole = files / 8 * 8;
    assert_eq!(stack.put(&keys(0..28), 0), 28);
    settle(&stack.store);
    let found = deallocated(&stack, &logs);
    // 28 files are in 4 groups. The others may have held data before.
    for device in &found {
        assert_eq!((device[0].0, device[device.len() - 1].1), (32, whole), "{device:?}");
        assert!(device.windows(2).all(|pair| pair[0].1 == pair[1].0), "{device:?}");
    }
    let all = stack.store.stats().unwrap().deallocated_bytes;
    assert_eq!(all, (whole - 32) / 8 * 2 * stack.store.geometry().group_bytes_per_device());

    // Two neighbouring groups, and half of the third.
    stack.store.remove(&keys(0..20)).unwrap();
    assert_eq!(deallocated(&stack, &logs), [[]; 2], "the journal has to know first");
    settle(&stack.store);
    assert_eq!(deallocated(&stack, &logs), [[(0, 16)]; 2], "in one range");
    assert_eq!(stack.get(&keys(20..28), 30), 8, "what is left is whole");

    // In use: not deallocated yet.
    let prefix = stack.store.lookup(&keys(20..28)).unwrap();
    stack.store.clear().unwrap();
    settle(&stack.store);
    assert_eq!(deallocated(&stack, &logs), [[]; 2]);
    stack.read(&prefix, 30).unwrap_err();
    drop(prefix);
    settle(&stack.store);
    assert_eq!(deallocated(&stack, &logs), [[(16, 32)]; 2], "a cleared namespace's, too");

    // Rewritten, and dropped again.
    stack.put(&keys(50..58), 0);
    stack.store.clear().unwrap();
    settle(&stack.store);
    assert_eq!(deallocated(&stack, &logs).concat().len(), 2);
}

#[test]
fn a_drive_that_refuses_is_not_told_again_and_hurts_nothing() {
    let (mut stack, logs) = recorded(&plan());
    let refused = FaultAction::Status { code: 0x06, dnr: true };
    stack.faults(Some(on(DSM, refused)));
    stack.put(&keys(0..16), 0);
    stack.faults(None);
    settle(&stack.store);
    assert_eq!(stack.put(&keys(16..40), 0), 24);
    assert_eq!(stack.get(&keys(0..40), 0), 40);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.deallocated_bytes, stats.deallocations_failed), (0, 2));
    assert_eq!(deallocated(&stack, &logs), [[]; 2]);
    // All files can be used.
    assert_eq!(stats.files_free() + 40, stats.files.files);
}

#[test]
fn nothing_is_deallocated_unless_wanted() {
    let mut plan = plan();
    plan.options.deallocate = false;
    let (mut stack, logs) = recorded(&plan);
    stack.put(&keys(0..16), 0);
    stack.store.clear().unwrap();
    settle(&stack.store);
    assert_eq!(deallocated(&stack, &logs), [[]; 2]);
}

/// Returns the placement handles of writes to data, and of all others.
fn placements(stack: &Stack, logs: &[Log]) -> [Vec<u16>; 2] {
    let data = stack.data_lba() * 4096;
    let mut found = [Vec::new(), Vec::new()];
    for (offset, _, placement) in
        logs.iter().flat_map(|log| std::mem::take(&mut *log.lock().unwrap()))
    {
        found[usize::from(offset < data)].extend(placement);
    }
    for handles in &mut found {
        handles.sort_unstable();
        handles.dedup();
    }
    found
}

#[test]
fn namespaces_and_the_journal_have_placement_handles_of_their_own() {
    let mut plan = plan();
    plan.options.self_test = false;
    plan.drive = |config| {
        (self::plan().drive)(config);
        config.placement = Some(PlacementConfig { handles: 3, reclaim_unit_bytes: 1 << 20 });
    };
    let (mut stack, logs) = recorded(&plan);
    placements(&stack, &logs);
    stack.put(&keys(0..8), 0);
    assert_eq!(placements(&stack, &logs), [vec![1], vec![0]]);
    let first = stack.store.clone();
    for (number, handle) in [(1, 2), (2, 1), (3, 2)] {
        let namespace = Namespace { tenant_salt: vec![number], ..Namespace::default() };
        stack.store = first.within(&namespace).unwrap();
        stack.put(&keys(0..8), 0);
        assert_eq!(placements(&stack, &logs), [vec![handle], vec![0]]);
        assert_eq!(stack.get(&keys(0..8), 20), 8);
    }
    plan.options.placement = false;
    let (mut stack, logs) = recorded(&plan);
    stack.put(&keys(0..8), 0);
    assert_eq!(placements(&stack, &logs), [vec![0], vec![0]]);
}
