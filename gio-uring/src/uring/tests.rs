//! The engine against the model executor.

use std::{ops::Range, sync::Arc};

use allocation_counter::measure;
use nvme_driver::{DescriptorMode, Iova, Nanos, Place, QueueGrant};
use proptest::prelude::*;

use super::*;
use crate::{
    Direction, Fault, IoCtx, NvmeStatus, Signal, Wait, abi, map,
    testing::{POOL_SHIFT, TestClock, TestExecutor, checksum, grant},
};

const SECOND: Nanos = Nanos(1_000_000_000);

/// Grants queues 1, 2, ... of devices 0, 1, ..., `queues` per device.
fn grants(devices: u32, queues: u32) -> Vec<(u32, QueueGrant)> {
    let queue = |at: u32| (at % devices, grant(1 + at as u16));
    (0..devices * queues).map(queue).collect()
}

fn options() -> UringOptions {
    UringOptions { explicit_max: 64, arena_bytes: 64 << 10, ..UringOptions::default() }
}

fn ring(depth: u32, devices: u32, queues: u32) -> (Uring, TestExecutor) {
    let executor = TestExecutor::default();
    let clock = Arc::new(TestClock::default());
    let grants = grants(devices, queues);
    let uring =
        Uring::init_queue(depth, Box::new(executor.clone()), clock, &grants, options()).unwrap();
    (uring, executor)
}

/// 64 blocks, 120 files of 6 rows, 4 KiB objects.
fn pool(devices: u32) -> PoolDesc {
    PoolDesc {
        row_iova: (0..6).map(|row| Iova(0x10_0000_0000 + row * 0x100_0000)).collect(),
        row_memory: Vec::new(),
        data_lba: (0..u64::from(devices)).map(|device| 1000 + 24 * device).collect(),
        block_stride: 8192,
        blocks: 64,
        files: 120,
        group: 12,
        object_bytes: 4096,
        slot_bytes: 4096,
        run_bytes: 64 << 10,
        pad_read: None,
        pad_write: None,
    }
}

/// The same pool, reachable by the kernel.
fn reachable_pool(devices: u32) -> PoolDesc {
    let mut desc = pool(devices);
    let place = |iova: &Iova| Place { host: Some(iova.0 + POOL_SHIFT), device: None, iova: *iova };
    desc.row_memory = desc.row_iova.iter().map(place).collect();
    desc
}

fn entry(block: u32, file: u32) -> Affine {
    Affine { block, file }
}

fn iova(desc: &PoolDesc, block: u32, row: u32) -> u64 {
    desc.row_iova[row as usize].0 + u64::from(block) * desc.block_stride
}

/// Submits one affine operation.
fn issue(
    uring: &mut Uring,
    direction: Direction,
    map: &BlockMap,
    pool: &PoolHandle,
    rows: Range<u32>,
) -> IocbId {
    uring.submit(&AffineOp { sms: 2, ..AffineOp::new(direction, map, pool, rows) }).unwrap()
}

fn wait(uring: &mut Uring, id: IocbId) -> Completion {
    let deadline = uring.now() + SECOND;
    uring.wait_completion(id, deadline).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None, cases: 24, ..ProptestConfig::default()
    })]

    /// Written data is read back in every block and row, for any shape of the ring.
    #[test]
    fn what_was_stored_is_retrieved(
        devices in prop_oneof![Just(1u32), Just(2), Just(3), Just(4)],
        queues in 1u32..4,
        files in Just((0u32..120).collect::<Vec<_>>()).prop_shuffle(),
        blocks in Just((0u32..64).collect::<Vec<_>>()).prop_shuffle(),
        count in 1usize..64,
        split in 1u32..6,
    ) {
        let (mut uring, executor) = ring(4, devices, queues);
        let desc = pool(devices);
        let pool = uring.register_pool(&desc).unwrap();
        let value = |file: u32, row: u32| 1_000_000 + u64::from(file) * 1000 + u64::from(row);
        let store: Vec<_> = (0..count).map(|at| entry(blocks[at], files[at])).collect();
        for &Affine { block, file } in &store {
            for row in 0..6 {
                executor.model().memory.insert(iova(&desc, block, row), value(file, row));
            }
        }
        let map = uring.upload_map(&store, devices).unwrap();
        let halves = [0..split, split..6];
        let ids = halves.map(|rows| issue(&mut uring, Direction::Write, &map, &pool, rows));
        for id in ids.into_iter().rev() {
            prop_assert!(wait(&mut uring, id).is_ok());
        }
        prop_assert_eq!(executor.model().disk.len(), count * 6);
        executor.model().memory.clear();

        // Into other blocks, in another order.
        let retrieve: Vec<_> =
            (0..count).rev().map(|at| entry(blocks[63 - at], files[at])).collect();
        let map = uring.upload_map(&retrieve, devices).unwrap();
        let id = issue(&mut uring, Direction::Read, &map, &pool, 0..6);
        let done = wait(&mut uring, id);
        prop_assert_eq!(done.objects, count as u64 * 6);
        prop_assert!(map.statuses().iter().all(|status| status.is_ok()));
        for &Affine { block, file } in &retrieve {
            for row in 0..6 {
                let found = executor.model().memory.get(&iova(&desc, block, row)).copied();
                prop_assert_eq!(found, Some(value(file, row)), "file {} row {}", file, row);
            }
        }
        prop_assert_eq!(uring.counters().total.objects, count as u64 * 12);
    }

    /// Checksums are in the caller's order, independent of the uploaded order, both stored by a
    /// write and verified by a read.
    #[test]
    fn checksums_are_of_the_callers_entries(
        devices in prop_oneof![Just(1u32), Just(2), Just(3), Just(4)],
        queues in 1u32..3,
        files in Just((0u32..120).collect::<Vec<_>>()).prop_shuffle(),
        count in 1usize..64,
        wrong_row in 0u32..6,
        wrong in any::<proptest::sample::Index>(),
    ) {
        let (mut uring, executor) = ring(4, devices, queues);
        let desc = reachable_pool(devices);
        let pool = uring.register_pool(&desc).unwrap();
        let entries: Vec<_> = (0..count).map(|at| entry(at as u32, files[at])).collect();
        let value = |row: u32, entry: u32| u64::from(entry) * 1000 + u64::from(row);
        for (row, at) in (0..6).flat_map(|row| (0..count as u32).map(move |at| (row, at))) {
            executor.model().memory.insert(iova(&desc, at, row), value(row, at));
        }
        let map = uring.upload_map(&entries, devices).unwrap();
        let stored = uring.new_checksums(&map, 6).unwrap();
        let op = AffineOp::new(Direction::Write, &map, &pool, 1..6);
        let id = uring.submit(&AffineOp { checksums: Some(&stored), ..op }).unwrap();
        prop_assert!(wait(&mut uring, id).is_ok());
        prop_assert_eq!(stored.row(0), vec![0; count], "not one of the operation's rows");
        for row in 1..6 {
            let expected: Vec<u32> = (0..count as u32).map(|at| checksum(value(row, at))).collect();
            prop_assert_eq!(stored.row(row), expected, "row {}", row);
        }

        let wrong = wrong.index(count) as u32;
        let expected = |row: u32, at: u32| {
            checksum(value(row, at)) ^ u32::from((row, at) == (wrong_row, wrong))
        };
        let expected = uring.upload_checksums(&map, 6, expected).unwrap();
        let op = AffineOp::new(Direction::Read, &map, &pool, 1..6);
        let id = uring.submit(&AffineOp { checksums: Some(&expected), ..op }).unwrap();
        let done = wait(&mut uring, id);
        let found: Vec<_> = map.failures().collect();
        if wrong_row == 0 {
            prop_assert!(done.is_ok() && found.is_empty());
        } else {
            prop_assert_eq!(done.error, Some((IoStatus::Checksum, wrong)));
            prop_assert_eq!((done.errors, found), (1, vec![(wrong, IoStatus::Checksum)]));
        }
    }

    /// The uploaded order is by class and file, and the permutation inverts it.
    #[test]
    fn grouping_sorts_and_can_be_undone(
        devices in 1u32..6,
        files in proptest::collection::vec(0u32..50, 0..80),
    ) {
        let (mut order, mut starts) = (Vec::new(), Vec::new());
        map::group(
            files.len(),
            devices,
            &mut order,
            |at| files[at] % devices,
            |at| u64::from(files[at]),
            |class, first| {
                assert_eq!(class, starts.len());
                starts.push(first);
            },
        );
        prop_assert_eq!(starts.len() as u32, devices + 1);
        let sorted: Vec<_> =
            order.iter().map(|&at| files[at as usize]).map(|f| (f % devices, f)).collect();
        prop_assert!(sorted.is_sorted());
        for class in 0..devices {
            let range = starts[class as usize] as usize..starts[class as usize + 1] as usize;
            prop_assert!(sorted[range].iter().all(|&(found, _)| found == class));
        }
        let mut indices = order.clone();
        indices.sort_unstable();
        prop_assert!(indices.into_iter().eq(0..files.len() as u32));
    }
}

#[test]
fn failures_are_reported_in_the_callers_order() {
    let (mut uring, executor) = ring(2, 2, 2);
    let pool = uring.register_pool(&pool(2)).unwrap();
    // File 7 is the caller's index 1, but sorts last. Row 0 of it: k = 7, device 1, slot 3, in LBAs
    // of 512 bytes.
    let map = uring.upload_map(&[entry(0, 4), entry(1, 7), entry(99, 2), entry(3, 0)], 2).unwrap();
    let nvme = abi::STATUS_NVME | 0x4281;
    executor.model().failing.insert((1, 1024 + 3 * 8), nvme);
    let id = issue(&mut uring, Direction::Read, &map, &pool, 0..1);
    let done = wait(&mut uring, id);
    assert_eq!((done.objects, done.errors), (2, 2));
    let failed = IoStatus::Nvme(NvmeStatus(0x4281));
    let statuses = [IoStatus::Ok, failed, IoStatus::Invalid, IoStatus::Ok];
    assert_eq!(map.statuses(), statuses);
    let (status, index) = done.error.unwrap();
    assert_eq!(statuses[index as usize], status);
    // Sticky: the next row succeeds on the device, but the file stays failed.
    let id = issue(&mut uring, Direction::Read, &map, &pool, 1..2);
    assert_eq!(wait(&mut uring, id).errors, 1);
    assert_eq!(map.statuses(), statuses);
}

#[test]
fn explicit_contexts_go_to_their_devices_and_report_in_order() {
    let (mut uring, executor) = ring(2, 3, 1);
    let context = |iova, lba, device| IoCtx { iova, lba, bytes: 4096, device };
    let contexts = [
        context(0x4000, 80, 2),
        context(0x1000, 8, 0),
        context(0x2000, 0, 2),
        context(0x3000, 8, 1),
    ];
    executor.model().failing.insert((2, 0), abi::STATUS_TIMEOUT);
    for (value, context) in contexts.iter().enumerate() {
        executor.model().memory.insert(context.iova, value as u64);
    }
    let id = uring.submit_explicit(Direction::Write, true, &contexts).unwrap();
    assert!(uring.iocb_status(id).is_err(), "not before it completed");
    let done = wait(&mut uring, id);
    assert_eq!(done, Completion { objects: 3, errors: 1, error: Some((IoStatus::Timeout, 2)) });
    let (ok, late) = (IoStatus::Ok, IoStatus::Timeout);
    assert_eq!(uring.iocb_status(id).unwrap(), [ok, ok, late, ok]);
    assert_eq!(executor.model().disk.get(&(2, 80)), Some(&0));
    assert_eq!(executor.model().disk.get(&(1, 8)), Some(&3));
    for _ in 0..2 {
        uring.submit_explicit(Direction::Read, false, &contexts).unwrap();
    }
    assert!(uring.iocb_status(id).is_err(), "not after it was taken again");
}

#[test]
fn an_event_holds_operations_back_and_is_signalled() {
    let (mut uring, executor) = ring(4, 1, 2);
    let desc = pool(1);
    let pool = uring.register_pool(&desc).unwrap();
    let map = uring.upload_map(&[entry(0, 0)], 1).unwrap();
    let (start, end) = (uring.event().unwrap(), uring.event().unwrap());
    start.set(u32::MAX);
    let wait_for = Wait { event: start.clone(), value: 1 };
    let signal = Signal { event: end.clone(), value: 77 };
    let op = AffineOp::new(Direction::Write, &map, &pool, 0..6);
    let op = AffineOp { wait: Some(&wait_for), signal: Some(&signal), sms: 4, ..op };
    let id = uring.submit(&op).unwrap();
    assert_eq!(executor.model().sms, 4);
    let deadline = uring.now() + SECOND;
    let error = uring.wait_completion(id, deadline).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert_eq!((end.read(), executor.model().disk.len()), (0, 0));
    // The count wraps: 1 is two steps after u32::MAX.
    start.set(1);
    assert!(start.reached(1) && start.reached(u32::MAX) && !start.reached(2));
    assert!(wait(&mut uring, id).is_ok());
    assert_eq!(end.read(), 77);
}

#[test]
fn ids_are_good_for_one_way_around() {
    let (mut uring, _executor) = ring(2, 1, 1);
    let pool = uring.register_pool(&pool(1)).unwrap();
    let map = uring.upload_map(&[entry(0, 0)], 1).unwrap();
    let is_id = |result: Result<(), Error>| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Id { .. }), "{error}");
    };
    let row = |row: u32| AffineOp::new(Direction::Read, &map, &pool, row..row + 1);
    let [first, second] = [0, 1].map(|at| uring.submit(&row(at)).unwrap());
    let busy = uring.submit(&row(2)).unwrap_err();
    assert!(matches!(busy, Error::Busy { depth: 2 }), "{busy}");
    assert_eq!((uring.counters().issued, uring.table.free()), (2, 0));
    assert!(wait(&mut uring, first).is_ok());
    is_id(uring.try_completion(first).map(drop));
    let again = uring.submit(&row(2)).unwrap();
    assert_eq!(again.index(), first.index());
    is_id(uring.try_completion(first).map(drop));
    assert!(wait(&mut uring, second).is_ok() && wait(&mut uring, again).is_ok());
}

#[test]
fn a_map_in_use_is_not_recycled() {
    let (mut uring, executor) = ring(2, 1, 1);
    let pool = uring.register_pool(&pool(1)).unwrap();
    let map = uring.upload_map(&[entry(0, 1), entry(1, 2)], 1).unwrap();
    let [address, ..] = map.addresses();
    executor.model().hold = true;
    let id = issue(&mut uring, Direction::Read, &map, &pool, 0..1);
    drop(map);
    let other = uring.upload_map(&[entry(5, 5), entry(6, 6)], 1).unwrap();
    assert_ne!(other.addresses()[0], address);
    executor.model().hold = false;
    assert!(wait(&mut uring, id).is_ok());
    let next = uring.upload_map(&[entry(5, 5), entry(6, 6)], 1).unwrap();
    assert_eq!(next.addresses()[0], address);
}

#[test]
fn a_layer_allocates_nothing() {
    let (mut uring, executor) = ring(8, 2, 2);
    let pool = uring.register_pool(&pool(2)).unwrap();
    let entries: Vec<_> = (0..40).map(|at| entry(at, 3 * at)).collect();
    for request in 0..20 {
        let map = uring.upload_map(&entries, 2).unwrap();
        for layer in 0..6 {
            let mut id = None;
            let issuing = measure(|| {
                let issued = issue(&mut uring, Direction::Read, &map, &pool, layer..layer + 1);
                assert_eq!(uring.try_completion(issued).unwrap(), None);
                id = Some(issued);
            });
            // The model executor allocates; it is not part of the measurement.
            while uring.executor.poll().unwrap() == Progress::Moved {}
            let reaping = measure(|| {
                assert!(uring.try_completion(id.unwrap()).unwrap().unwrap().is_ok());
            });
            assert_eq!((issuing.count_total, reaping.count_total), (0, 0), "layer {layer}");
        }
        let counters = uring.counters();
        assert_eq!(counters.arena_growths, 2, "request {request}");
        assert_eq!(executor.model().allocated, 4);
    }
}

#[test]
fn stopping_cancels_and_restarting_goes_on() {
    let (mut uring, executor) = ring(4, 2, 1);
    let desc = pool(2);
    let pool = uring.register_pool(&desc).unwrap();
    let map = uring.upload_map(&[entry(0, 0), entry(1, 1)], 2).unwrap();
    for abrupt in [false, true] {
        let fresh = uring.upload_map(&[entry(0, 0), entry(1, 1)], 2).unwrap();
        let before = issue(&mut uring, Direction::Write, &map, &pool, 0..3);
        assert!(wait(&mut uring, before).is_ok());
        executor.model().hold = true;
        executor.model().abrupt = abrupt;
        let pending =
            [0, 1].map(|row| issue(&mut uring, Direction::Write, &fresh, &pool, row..row + 1));
        let end = uring.event().unwrap();
        let signal = Signal { event: end.clone(), value: 5 };
        let op = AffineOp::new(Direction::Write, &fresh, &pool, 2..3);
        let signalling = uring.submit(&AffineOp { signal: Some(&signal), ..op.clone() }).unwrap();
        let deadline = uring.now() + SECOND;
        uring.stop(deadline).unwrap();
        assert!(uring.stop(deadline).is_err(), "only once");
        assert!(matches!(uring.submit(&op), Err(Error::State { .. })));
        assert_eq!(end.read(), 5);
        for id in [pending[0], pending[1], signalling] {
            let done = wait(&mut uring, id);
            assert_eq!(done.objects, 0);
            assert!(matches!(done.error, Some((IoStatus::Cancelled, _))), "{done:?}");
        }
        let statuses = fresh.statuses();
        assert_eq!(statuses, [IoStatus::Cancelled; 2]);
        assert!(map.statuses().iter().all(|status| status.is_ok()));

        executor.model().hold = false;
        let changed = uring.restart(&grants(1, 1)).unwrap_err();
        assert!(matches!(changed, Error::Grants { .. }), "{changed}");
        // More queues than before.
        uring.restart(&grants(2, 3)).unwrap();
        assert!(uring.restart(&grants(2, 3)).is_err(), "only when stopped");
        let after = issue(&mut uring, Direction::Write, &map, &pool, 0..1);
        assert!(wait(&mut uring, after).is_ok());
        assert!(uring.faulted().is_none());
    }
    let counters = uring.counters();
    assert_eq!((counters.issued, counters.completed), (10, 10));
    assert_eq!(counters.total.objects, 2 * (2 * 3 + 2));
    assert_eq!(counters.queues.len(), 6);
    assert_eq!(executor.model().starts, 3);
    assert_eq!(uring.table.free(), 4);
}

#[test]
fn memory_is_freed_after_a_stop_and_leaked_without_one() {
    let (uring, executor) = ring(2, 1, 1);
    assert!(executor.model().living() >= 3);
    drop(uring);
    assert_eq!(executor.model().living(), 0);

    let (mut uring, executor) = ring(2, 1, 1);
    let pool = uring.register_pool(&pool(1)).unwrap();
    let map = uring.upload_map(&[entry(0, 0)], 1).unwrap();
    executor.model().hold = true;
    let id = issue(&mut uring, Direction::Read, &map, &pool, 0..1);
    executor.model().stuck = true;
    let deadline = uring.now() + SECOND;
    assert!(matches!(uring.stop(deadline), Err(Error::Executor(_))));
    let error = uring.wait_completion(id, deadline).unwrap_err();
    assert!(matches!(error, Error::State { .. }), "{error}");
    let living = executor.model().living();
    drop((uring, map, pool));
    assert_eq!(executor.model().living(), living);
}

#[test]
fn what_waits_for_a_ring_that_is_given_up_goes_on() {
    for explicitly in [true, false] {
        let (mut uring, executor) = ring(4, 1, 1);
        let pool = uring.register_pool(&pool(1)).unwrap();
        let map = uring.upload_map(&[entry(0, 0)], 1).unwrap();
        let event = uring.event().unwrap();
        executor.model().hold = true;
        let signal = Signal { event: event.clone(), value: 7 };
        let op = AffineOp::new(Direction::Read, &map, &pool, 0..1);
        uring.submit(&AffineOp { signal: Some(&signal), ..op }).unwrap();
        executor.model().stuck = true;
        let deadline = uring.now() + SECOND;
        uring.stop(deadline).unwrap_err();
        assert_eq!(event.read(), 0, "its kernel may still complete it");
        if explicitly {
            uring.abandon();
            assert_eq!(event.read(), 7);
            std::mem::forget(uring);
        } else {
            drop(uring);
            assert_eq!(event.read(), 7);
        }
    }
}

#[test]
fn tables_are_where_their_address_says() {
    let (mut uring, executor) = ring(2, 1, 1);
    let narrow = uring.upload((0..40u32).map(|n| n * 7)).unwrap();
    let wide = uring.upload([1u64 << 40, 2, 3].into_iter()).unwrap();
    let empty = uring.upload(std::iter::empty::<u32>()).unwrap();
    assert_eq!((narrow.len(), wide.len(), empty.is_empty()), (40, 3, true));
    assert!(narrow.address(0).0.is_multiple_of(128) && wide.address(0).0.is_multiple_of(128));
    let model = executor.model();
    assert_eq!(model.read::<u32>(narrow.address(0).0, 39), 39 * 7);
    assert_eq!(model.read::<u64>(wide.address(0).0, 0), 1 << 40);
    drop(model);
    // They keep their memory alive, also after the ring is dropped.
    let used = uring.counters().arena_bytes_used;
    drop(narrow.clone());
    assert_eq!(uring.counters().arena_bytes_used, used);
    drop(uring);
    assert!(executor.model().living() > 0);
    drop((narrow, wide, empty));
    assert_eq!(executor.model().living(), 0);
}

#[test]
fn a_stop_that_failed_can_be_tried_again() {
    let (mut uring, executor) = ring(2, 1, 1);
    executor.model().stuck = true;
    let deadline = uring.now() + SECOND;
    assert!(uring.stop(deadline).is_err());
    assert_ne!(uring.state, State::Running);
    executor.model().stuck = false;
    uring.stop(deadline).unwrap();
    drop(uring);
    assert_eq!(executor.model().living(), 0);
}

#[test]
fn a_kernel_that_misbehaves_is_an_error() {
    let (mut uring, executor) = ring(2, 1, 1);
    let pool = uring.register_pool(&pool(1)).unwrap();
    let map = uring.upload_map(&[entry(0, 0)], 1).unwrap();
    executor.model().lazy = true;
    let id = issue(&mut uring, Direction::Read, &map, &pool, 0..2);
    let done = wait(&mut uring, id);
    assert!(!done.is_ok());
    assert_eq!(done.error, Some((IoStatus::Incomplete, 0)));
    for nonsense in [0, 1, 2, u32::MAX] {
        executor.model().nonsense = Some(nonsense);
        let error = uring.poll().unwrap_err();
        assert!(matches!(error, Error::Ring { index } if index == nonsense), "{error}");
    }
}

#[test]
fn a_failed_queue_is_named() {
    let (mut uring, executor) = ring(2, 2, 2);
    assert_eq!(uring.faulted(), None);
    executor.model().fail(3, abi::FAULT_TIMEOUT);
    let fault = uring.faulted().unwrap();
    assert_eq!((fault.device, fault.qid, fault.fault), (1, 4, Fault::Timeout));
    let text = "device 1 queue 4: a command that did not complete in time; 3 commands quarantined";
    assert_eq!(fault.to_string(), text);
    assert_eq!(uring.counters().queues[3].fault, Some(Fault::Timeout));
    let deadline = uring.now() + SECOND;
    uring.stop(deadline).unwrap();
    uring.restart(&grants(2, 2)).unwrap();
    assert_eq!(uring.faulted(), None);
}

#[test]
fn virtual_time_reaches_the_kernel() {
    let executor = TestExecutor::default();
    let clock = Arc::new(TestClock::default());
    let options = UringOptions { virtual_time: true, ..options() };
    let boxed = Box::new(executor.clone());
    let mut uring = Uring::init_queue(1, boxed, clock.clone(), &grants(1, 1), options).unwrap();
    clock.pause(0, SECOND);
    uring.poll().unwrap();
    assert_eq!(executor.model().time, clock.now().0);
    assert!(executor.model().time > 0);
}

#[test]
fn things_of_another_ring_are_refused() {
    let (mut uring, _executor) = ring(2, 1, 1);
    let (mut other, _other_executor) = ring(2, 1, 1);
    let pool_of = [uring.register_pool(&pool(1)).unwrap(), other.register_pool(&pool(1)).unwrap()];
    let map_of = [&mut uring, &mut other].map(|ring| ring.upload_map(&[entry(0, 0)], 1).unwrap());
    let event = other.event().unwrap();
    let mut submit = |map: usize, pool: usize, event: Option<&Event>| {
        let wait = event.map(|event| Wait { event: event.clone(), value: 1 });
        let signal = event.map(|event| Signal { event: event.clone(), value: 1 });
        let op = AffineOp::new(Direction::Read, &map_of[map], &pool_of[pool], 0..1);
        let waits = uring.submit(&AffineOp { wait: wait.as_ref(), ..op.clone() });
        let signals = uring.submit(&AffineOp { signal: signal.as_ref(), ..op });
        waits.and(signals).map(drop)
    };
    assert!(matches!(submit(1, 0, None), Err(Error::Foreign { what: "map" })));
    assert!(matches!(submit(0, 1, None), Err(Error::Foreign { what: "pool" })));
    assert!(matches!(submit(0, 0, Some(&event)), Err(Error::Foreign { what: "event" })));
    submit(0, 0, None).unwrap();
}

mod refused;
