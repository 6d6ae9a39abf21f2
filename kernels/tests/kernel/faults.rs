//! Devices and callers that misbehave: every operation still completes exactly once, no invalid
//! command is sent, and slots that may still be under DMA stay quarantined.

use gio_uring::{
    IoExecutor,
    abi::{self, Affine, IoCtx, Iocb, Warp},
};
use nvme_driver::Nanos;

use crate::{
    device::Mischief,
    rig::{Config, Done, Rig, Shape},
};

fn read(rig: &mut Rig, n: u64) -> u32 {
    let area = rig.memory.take_data(n * 4096, 4096);
    let entry = |i| {
        let iova = rig.memory.iova(area.at(i * 4096));
        IoCtx { iova, lba: i, bytes: 4096, device: 0 }
    };
    let mut list: Vec<IoCtx> = (0..n).map(entry).collect();
    let iocb = rig.explicit(abi::OP_READ, &mut list);
    rig.issue(iocb)
}

/// Returns the number of statuses equal to `status`.
fn count(done: &Done, status: u32) -> usize {
    done.statuses.iter().filter(|found| **found == status).count()
}

fn stop(rig: &mut Rig) {
    rig.memory.poke(rig.args.stop, 1u64);
}

#[test]
fn an_error_of_the_device_is_the_contexts_status() {
    let mut rig = Rig::new(Config::default(), 4);
    // LBA Out of Range with DNR; the completion order determines the affected object.
    let queue = &mut rig.devices[0].queues[0];
    queue.mischief.extend([None, Some(Mischief::Status(0x4080)), None]);
    read(&mut rig, 10);
    let done = rig.finish(1).remove(0);
    let status = abi::STATUS_NVME | 0x4080;
    assert_eq!((count(&done, status), count(&done, 0)), (1, 9));
    assert_eq!((done.iocb.errors, done.iocb.objects), (1, 9));
    let index = done.statuses.iter().position(|s| *s == status).expect("one") as u64;
    assert_eq!(done.iocb.error, u64::from(status) << 32 | index);
    assert_eq!((rig.warp(0).errors, rig.warp(0).bytes_read), (1, 9 * 4096));
    rig.assert_at_rest();
}

/// All objects of a merged command fail together.
#[test]
fn an_error_of_a_merged_command_is_everyones() {
    let mut rig = Rig::new(Config::default(), 4);
    let kv = rig.kv(Shape::default());
    rig.devices[0].queues[0].mischief.push_back(Some(Mischief::Status(0x281)));
    let mut map: Vec<Affine> = (0..16).map(|i| Affine { block: i, file: i }).collect();
    let iocb = rig.affine(&kv, abi::OP_READ, &mut map, [0, 1]);
    rig.issue(iocb);
    let done = rig.finish(1).remove(0);
    assert_eq!(rig.warp(0).commands, 1);
    assert_eq!(count(&done, abi::STATUS_NVME | 0x281), 16);
    assert_eq!((done.iocb.errors, done.iocb.objects), (1, 0));
}

/// If one of an object's several commands fails, exactly that object fails.
#[test]
fn an_error_of_a_split_is_its_objects() {
    let shape = Shape { object_bytes: 16384, slot_bytes: 16384, ..Shape::default() };
    for failing in 0..40 {
        let config = Config { transfer_bytes_max: 4096, depth_log2: 4, ..Config::default() };
        let mut rig = Rig::new(config, failing);
        let kv = rig.kv(shape);
        let mischief = &mut rig.devices[0].queues[0].mischief;
        mischief.extend((0..failing).map(|_| None));
        mischief.push_back(Some(Mischief::Status(0x281)));
        let mut map: Vec<Affine> = (0..10).map(|i| Affine { block: i, file: i }).collect();
        let iocb = rig.affine(&kv, abi::OP_READ, &mut map, [0, 1]);
        rig.issue(iocb);
        let done = rig.finish(1).remove(0);
        assert_eq!((done.iocb.errors, done.iocb.objects), (1, 9), "command {failing}");
        assert_eq!(count(&done, abi::STATUS_NVME | 0x281), 1);
        rig.assert_at_rest();
    }
}

#[test]
fn what_is_out_of_bounds_is_refused_and_the_rest_done() {
    let mut rig = Rig::new(Config { devices: 2, lbas: 300, ..Config::default() }, 4);
    let kv = rig.kv(Shape { files: 512, ..Shape::default() });
    let good = |i| Affine { block: i, file: 2 * i };
    let mut map: Vec<Affine> = (0..8).map(good).collect();
    map.push(Affine { block: 64, file: 20 }); // no such block
    map.push(Affine { block: u32::MAX, file: 22 });
    map.push(Affine { block: 9, file: 512 }); // no such file
    map.push(Affine { block: 9, file: 510 }); // beyond the namespace
    let iocb = rig.affine(&kv, abi::OP_READ, &mut map, [0, 2]);
    rig.issue(iocb);
    let done = rig.finish(1).remove(0);
    assert_eq!((done.iocb.objects, done.iocb.errors), (16, 8));
    let last: u64 = (0..8).map(|file| kv.place(2 * file, 0, 12).1).max().expect("some");
    assert!(rig.devices[0].queues[0].log.iter().all(|c| c.lba() + c.lbas() <= last + 1));
    for (entry, status) in map.iter().zip(&done.statuses) {
        let fine = entry.block < 64 && entry.file < 510;
        assert_eq!(*status, if fine { 0 } else { abi::STATUS_INVALID }, "{entry:?}");
    }
    rig.assert_at_rest();
}

/// A file in the wrong class would be located on the wrong device, in another file's slot.
#[test]
fn files_in_the_wrong_class_are_refused() {
    let mut rig = Rig::new(Config { devices: 2, ..Config::default() }, 4);
    let kv = rig.kv(Shape::default());
    let mut map: Vec<Affine> = (0..8).map(|i| Affine { block: i, file: i }).collect();
    let mut iocb = rig.affine(&kv, abi::OP_WRITE, &mut map, [0, 1]);
    iocb.starts = rig.memory.place(&[0u32, 8, 8]);
    rig.issue(iocb);
    let done = rig.finish(1).remove(0);
    let bad = abi::STATUS_INVALID;
    assert_eq!(done.statuses, [0, 0, 0, 0, bad, bad, bad, bad]);
    assert_eq!((rig.devices[0].queues[0].log.len(), rig.devices[1].queues[0].log.len()), (1, 0));
}

#[test]
fn explicit_contexts_are_checked_too() {
    let mut rig = Rig::new(Config { lbas: 100, ..Config::default() }, 4);
    let area = rig.memory.take_data(1 << 20, 4096);
    let iova = rig.memory.iova(area.address);
    let entry = |lba, bytes| IoCtx { iova, lba, bytes, device: 0 };
    let mut list = vec![
        entry(0, 4096),
        entry(99, 4096),
        entry(100, 4096),
        entry(99, 8192),
        entry(u64::MAX, 4096),
        entry(5, 0),
        entry(5, 4095),
        entry(5, 100),
        entry(2, 262_144),
        IoCtx { device: 7, ..entry(1, 4096) },
    ];
    let mut iocb = rig.explicit(abi::OP_WRITE, &mut list);
    // All in one class, regardless of their device fields.
    iocb.starts = rig.memory.place(&[0, list.len() as u32]);
    rig.issue(iocb);
    let done = rig.finish(1).remove(0);
    let bad = abi::STATUS_INVALID;
    assert_eq!(done.statuses, [0, 0, bad, bad, bad, bad, bad, bad, 0, bad]);
    assert_eq!((done.iocb.errors, done.iocb.objects), (7, 3));
    // 256 KiB are two splits.
    assert_eq!(rig.warp(0).commands, 4);
}

#[test]
fn operations_that_make_no_sense_are_refused_whole() {
    let prp = Config { sgl: false, ..Config::default() };
    let padded = Shape { object_bytes: 4000, ..Shape::default() };
    let cases = [
        (prp, padded),
        (Config { descriptor_bytes: 16, ..Config::default() }, padded),
        (Config::default(), Shape { slot_bytes: 5000, ..Shape::default() }),
        (Config { devices: 3, ..Config::default() }, Shape::default()), // 32 is no multiple
    ];
    for (config, shape) in cases {
        let mut rig = Rig::new(config, 4);
        let kv = rig.kv(shape);
        let mut map: Vec<Affine> = (0..5).map(|i| Affine { block: i, file: i }).collect();
        let iocb = rig.affine(&kv, abi::OP_READ, &mut map, [0, 2]);
        rig.issue(iocb);
        let done = rig.finish(1).remove(0);
        assert_eq!(count(&done, abi::STATUS_INVALID), 5, "{config:?} {shape:?}");
        assert_eq!((done.iocb.objects, done.iocb.errors), (0, 5));
        assert_eq!(rig.warp(0).commands, 0);
        rig.assert_at_rest();
    }
}

/// The contexts of another kind would be of another size.
#[test]
fn operations_of_an_unknown_kind_are_refused_whole() {
    for kind in [2, u32::MAX] {
        let mut rig = Rig::new(Config::default(), 4);
        let area = rig.memory.take_data(8192, 4096);
        let iova = rig.memory.iova(area.address);
        let entry = |lba| IoCtx { iova, lba, bytes: 4096, device: 0 };
        let iocb = rig.explicit(abi::OP_READ, &mut [entry(1), entry(2)]);
        rig.issue(Iocb { kind, ..iocb });
        let done = rig.finish(1).remove(0);
        assert_eq!(done.statuses, [abi::STATUS_INVALID; 2]);
        assert_eq!((done.iocb.objects, rig.warp(0).commands), (0, 0));
        rig.assert_at_rest();
    }
}

/// A failed queue immediately completes all current and later operations with FAULT.
fn assert_failed(rig: &mut Rig, fault: u32) {
    assert_eq!(rig.warp(0).fault, fault);
    let commands = rig.warp(0).commands;
    read(rig, 100);
    let done = rig.finish(1).remove(0);
    assert_eq!(count(&done, abi::STATUS_FAULT), 100);
    assert_eq!((done.iocb.errors, done.iocb.objects), (100, 0));
    assert_eq!(rig.warp(0).commands, commands, "nothing more is submitted");
    let warp = rig.warp(0);
    assert_eq!(rig.slots(0, 2), warp.quarantined as usize);
    assert_eq!(rig.slots(0, 1), 0);
    assert_eq!(warp.outstanding, 0);
}

#[test]
fn completions_that_make_no_sense_fail_the_queue() {
    let cases = [
        (Mischief::Duplicate, abi::FAULT_CID),
        (Mischief::OldGeneration, abi::FAULT_CID),
        (Mischief::Cid(63), abi::FAULT_CID), // never used: one entry stays empty
        (Mischief::Cid(0xffff), abi::FAULT_CID),
        (Mischief::Sqid(9), abi::FAULT_SQID),
        (Mischief::Sqhd(64), abi::FAULT_SQHD),
        (Mischief::Sqhd(0xffff), abi::FAULT_SQHD),
    ];
    for (mischief, fault) in cases {
        for nth in [0, 1, 40, 150] {
            println!("{mischief:?} as completion {nth}");
            let mut rig = Rig::new(Config::default(), nth);
            let queue = &mut rig.devices[0].queues[0];
            queue.mischief.extend((0..nth).map(|_| None));
            queue.mischief.push_back(Some(mischief));
            read(&mut rig, 100);
            read(&mut rig, 100);
            let done = rig.finish(2);
            let ok: usize = done.iter().map(|done| count(done, 0)).sum();
            let failed: usize = done.iter().map(|done| count(done, abi::STATUS_FAULT)).sum();
            assert_eq!(ok + failed, 200);
            // A command is OK only if its completion was correct.
            assert!(ok >= nth as usize && failed >= 1);
            let objects: u64 = done.iter().map(|done| done.iocb.objects).sum();
            assert_eq!(objects, ok as u64);
            assert_failed(&mut rig, fault);
        }
    }
}

#[test]
fn no_completion_in_time_fails_the_queue() {
    let mut rig = Rig::new(Config::default(), 6);
    rig.devices[0].queues[0].mischief.push_back(Some(Mischief::Drop));
    read(&mut rig, 20);
    rig.settle();
    assert!(rig.completion().is_none());
    // A second, later operation: not yet timed out when the first one is.
    rig.pass(900_000);
    rig.devices[0].stalled = true;
    read(&mut rig, 5);
    rig.settle();
    rig.pass(99_999);
    rig.settle();
    assert_eq!(rig.warp(0).fault, 0, "one nanosecond is left");
    // Sweeps are an eighth of the timeout apart.
    rig.pass(125_000);
    let mut done = rig.finish(2);
    done.sort_by_key(|done| done.id);
    assert_eq!((count(&done[0], abi::STATUS_TIMEOUT), count(&done[0], 0)), (1, 19));
    assert_eq!(count(&done[1], abi::STATUS_FAULT), 5);
    assert_eq!(rig.warp(0).quarantined, 6);
    assert_failed(&mut rig, abi::FAULT_TIMEOUT);

    // Late completions free their slots and are counted, but are not reported again.
    rig.devices[0].stalled = false;
    rig.devices[0].queues[0].post_dropped(&rig.memory, 0);
    rig.settle();
    assert_eq!((rig.warp(0).late, rig.warp(0).quarantined), (6, 0));
    assert!(rig.completion().is_none());
    assert_failed(&mut rig, abi::FAULT_TIMEOUT);
}

/// In a queue deeper than a warp has lanes, the command of any slot may be lost.
#[test]
fn no_completion_in_time_of_any_slot_fails_the_queue() {
    for lost in [0, 31, 32, 63, 64, 126] {
        let mut rig = Rig::new(Config { depth_log2: 8, ..Config::default() }, 6);
        rig.devices[0].stalled = true;
        read(&mut rig, 127);
        rig.settle();
        for command in rig.devices[0].queues[0].log.clone() {
            if u32::from(command.cid()) & 255 != lost {
                rig.devices[0].queues[0].post(&rig.memory, command.cid(), 1, 1, 0);
            }
        }
        rig.settle();
        assert_eq!((rig.warp(0).outstanding, rig.warp(0).fault), (1, 0), "slot {lost}");
        rig.pass(2_000_000);
        let done = rig.finish(1).remove(0);
        assert_eq!((count(&done, abi::STATUS_TIMEOUT), count(&done, 0)), (1, 126), "slot {lost}");
        assert_eq!(rig.warp(0).fault, abi::FAULT_TIMEOUT);
    }
}

/// Nothing ran for longer than the command timeout: the process was stopped, and its controllers
/// with it. The timeout of every command restarts, and still applies.
#[test]
fn a_pause_of_the_whole_process_times_nothing_out() {
    // Far longer than a busy machine keeps a thread waiting.
    let timeout_ns = 1_000_000_000;
    let config = Config { real_time: true, timeout_ns, ..Config::default() };
    let mut rig = Rig::new(config, 6);
    rig.devices[0].stalled = true;
    read(&mut rig, 20);
    rig.settle();
    std::thread::sleep(std::time::Duration::from_nanos(timeout_ns * 2));
    rig.settle();
    assert_eq!(rig.warp(0).fault, 0);
    rig.devices[0].stalled = false;
    let done = rig.finish(1).remove(0);
    assert_eq!(count(&done, 0), 20);
    rig.assert_at_rest();

    rig.devices[0].stalled = true;
    read(&mut rig, 1);
    while rig.warp(0).fault == 0 {
        rig.step();
    }
    let done = rig.finish(1).remove(0);
    assert_eq!(count(&done, abi::STATUS_TIMEOUT), 1);
}

/// Issues an operation that starts once `event` is 1 and signals `signal` at its end.
fn read_after(rig: &mut Rig, event: u64, signal: u64) -> u32 {
    let iova = rig.memory.take_data(4096, 4096).address;
    let iova = rig.memory.iova(iova);
    let mut list: Vec<IoCtx> =
        (0..3).map(|lba| IoCtx { iova, lba, bytes: 4096, device: 0 }).collect();
    let mut iocb = rig.explicit(abi::OP_READ, &mut list);
    (iocb.wait, iocb.wait_value) = (event, 1);
    (iocb.signal, iocb.signal_value) = (signal, 7);
    rig.issue(iocb)
}

/// The event is never set, and the operation is not polled: the kernel itself times out, and
/// waiters for this or a later operation proceed.
#[test]
fn an_event_that_does_not_come_fails_the_queue() {
    for relayed in [false, true] {
        event_that_does_not_come(Config { parts: 2, relayed, ..Config::default() });
    }
}

fn event_that_does_not_come(config: Config) {
    let mut rig = Rig::new(config, 6);
    let [event, ends @ ..] = [0; 3].map(|_| rig.memory.place(&[0u32]));
    for end in ends {
        read_after(&mut rig, event, end);
        rig.settle();
    }
    rig.pass(4_999_999);
    rig.settle();
    assert_eq!((rig.warp(0).fault, rig.warp(1).fault), (0, 0), "one nanosecond is left");
    rig.pass(1);
    let done = rig.finish(2);
    for (done, end) in done.iter().zip(ends) {
        assert_eq!((count(done, abi::STATUS_FAULT), done.iocb.errors), (3, 3));
        assert_eq!(rig.memory.peek::<u32>(end), 7, "it is signalled");
    }
    for warp in [rig.warp(0), rig.warp(1)] {
        assert_eq!((warp.fault, warp.commands, warp.quarantined), (abi::FAULT_EVENT, 0, 0));
    }
}

/// One queue gives up waiting for an event before the other one: operations behind are relayed, to
/// be rejected, and the other queue does not take that for the event.
#[test]
fn an_event_that_timed_out_on_one_queue_is_not_reached_on_another() {
    let mut rig = Rig::new(Config { parts: 2, relayed: true, ..Config::default() }, 6);
    let [event, end] = [0; 2].map(|_| rig.memory.place(&[0u32]));
    read_after(&mut rig, event, end);
    rig.settle();
    let warp = rig.warp(1);
    rig.set_warp(1, Warp { waiting_ns: warp.waiting_ns + 1_000_000, ..warp });
    for _ in 0..3 {
        let id = read_after(&mut rig, event, end);
        // These do not wait.
        let at = rig.args.iocbs + u64::from(id) * size_of::<Iocb>() as u64;
        let iocb: Iocb = rig.memory.peek(at);
        rig.memory.poke(at, Iocb { wait: 0, ..iocb });
    }
    rig.pass(5_000_000);
    rig.settle();
    assert_eq!((rig.warp(0).fault, rig.warp(1).fault), (abi::FAULT_EVENT, 0));
    assert_eq!(rig.warp(1).commands, 0, "it started before its event");
    rig.pass(1_000_000);
    rig.finish(4);
    assert_eq!((rig.warp(1).fault, rig.warp(1).commands), (abi::FAULT_EVENT, 0));
}

/// Each operation has the full timeout from the moment it becomes the next one.
#[test]
fn an_event_that_comes_late_enough_is_no_fault() {
    let mut rig = Rig::new(Config::default(), 6);
    let end = rig.memory.place(&[0u32]);
    let events = [0; 3].map(|_| rig.memory.place(&[0u32]));
    for event in events {
        read_after(&mut rig, event, end);
    }
    for event in events {
        rig.settle();
        rig.pass(4_999_999);
        rig.settle();
        rig.memory.poke(event, 1u32);
        assert_eq!(count(&rig.finish(1)[0], 0), 3);
    }
    rig.assert_at_rest();
}

/// The same for events: the threads that set them were stopped as well.
#[test]
fn a_pause_of_the_whole_process_ends_no_wait() {
    let event_timeout_ns = 1_000_000_000;
    let config = Config { real_time: true, event_timeout_ns, ..Config::default() };
    let mut rig = Rig::new(config, 6);
    let [event, end] = [0; 2].map(|_| rig.memory.place(&[0u32]));
    read_after(&mut rig, event, end);
    rig.settle();
    std::thread::sleep(std::time::Duration::from_nanos(event_timeout_ns * 2));
    rig.settle();
    assert_eq!(rig.warp(0).fault, 0);
    rig.memory.poke(event, 1u32);
    assert_eq!(count(&rig.finish(1)[0], 0), 3);
}

#[test]
fn a_late_completion_does_not_count_twice() {
    let mut rig = Rig::new(Config::default(), 6);
    rig.devices[0].stalled = true;
    read(&mut rig, 1);
    rig.settle();
    rig.pass(2_000_000);
    rig.finish(1);
    let command = rig.devices[0].queues[0].log[0];
    for late in [1, 1] {
        let queue = &mut rig.devices[0].queues[0];
        queue.post(&rig.memory, command.cid(), 1, 1, 0);
        rig.settle();
        assert_eq!((rig.warp(0).late, rig.warp(0).quarantined), (late, 0));
    }
}

/// The other queues of an operation continue when one fails.
#[test]
fn one_queue_fails_alone() {
    let mut rig = Rig::new(Config { devices: 2, parts: 2, ..Config::default() }, 8);
    let kv = rig.kv(Shape { run_bytes: 0, ..Shape::default() });
    rig.devices[1].queues[0].mischief.push_back(Some(Mischief::Sqid(77)));
    let mut map: Vec<Affine> = (0..64).map(|i| Affine { block: i, file: i }).collect();
    let iocb = rig.affine(&kv, abi::OP_READ, &mut map, [0, 1]);
    rig.issue(iocb);
    let done = rig.finish(1).remove(0);
    let faults: Vec<u32> = (0..4).map(|i| rig.warp(i).fault).collect();
    assert_eq!(faults, [0, 0, abi::FAULT_SQID, 0]);
    let lost = count(&done, abi::STATUS_FAULT);
    assert!((1..=16).contains(&lost));
    assert_eq!(done.iocb.objects, 64 - lost as u64);
    assert_eq!(done.iocb.errors, lost as u32);
}

#[test]
fn stop_cancels_what_was_not_sent_and_waits_for_the_rest() {
    let mut rig = Rig::new(Config { depth_log2: 5, ..Config::default() }, 6);
    let event = rig.memory.place(&[0u32]);
    rig.devices[0].stalled = true;
    read(&mut rig, 100);
    let mut list = vec![IoCtx { iova: 0, lba: 0, bytes: 4096, device: 0 }; 3];
    let mut iocb = rig.explicit(abi::OP_READ, &mut list);
    (iocb.wait, iocb.wait_value) = (event, 5);
    rig.issue(iocb);
    rig.settle();
    let sent = rig.warp(0).commands as usize;
    assert_eq!(sent, 31);
    stop(&mut rig);
    rig.settle();
    // The waiting operation never started: it completes. The other has commands in flight.
    let done = rig.completion().expect("cancelled");
    assert_eq!((done.id, count(&done, abi::STATUS_CANCELLED)), (1, 3));
    assert!(rig.completion().is_none());
    let now = Nanos(0);
    rig.executor.stop(now).expect_err("commands are outstanding");
    rig.devices[0].stalled = false;
    let done = rig.finish(1).remove(0);
    assert_eq!((count(&done, 0), count(&done, abi::STATUS_CANCELLED)), (sent, 100 - sent));
    assert_eq!((done.iocb.objects, done.iocb.errors), (sent as u64, 100 - sent as u32));
    assert_eq!(rig.warp(0).commands as usize, sent);
    rig.executor.stop(now).expect("nothing is outstanding");
    rig.executor.poll().expect_err("stopped");
    rig.assert_at_rest();
}

#[test]
fn stop_gives_up_after_the_timeout() {
    let mut rig = Rig::new(Config::default(), 6);
    rig.devices[0].stalled = true;
    read(&mut rig, 10);
    rig.settle();
    stop(&mut rig);
    rig.settle();
    assert!(rig.completion().is_none());
    rig.pass(2_000_000);
    let done = rig.finish(1).remove(0);
    assert_eq!(count(&done, abi::STATUS_TIMEOUT), 10);
    rig.executor.stop(Nanos(0)).expect("given up");
    assert_eq!(rig.warp(0).quarantined, 10);
}

/// Partly submitted objects of several commands are not counted when the rest is cancelled.
#[test]
fn stop_in_the_middle_of_an_object() {
    let config = Config { transfer_bytes_max: 4096, depth_log2: 3, ..Config::default() };
    let mut rig = Rig::new(config, 6);
    let kv = rig.kv(Shape { object_bytes: 16384, slot_bytes: 16384, ..Shape::default() });
    rig.devices[0].stalled = true;
    let mut map: Vec<Affine> = (0..5).map(|i| Affine { block: i, file: i }).collect();
    let iocb = rig.affine(&kv, abi::OP_READ, &mut map, [0, 1]);
    rig.issue(iocb);
    rig.settle();
    assert_eq!(rig.warp(0).commands, 7, "one object, and three quarters of the next");
    stop(&mut rig);
    rig.settle();
    rig.devices[0].stalled = false;
    let done = rig.finish(1).remove(0);
    let cancelled = abi::STATUS_CANCELLED;
    assert_eq!(done.statuses, [0, cancelled, cancelled, cancelled, cancelled]);
    assert_eq!((done.iocb.objects, done.iocb.errors), (1, 4));
}

/// All faults at random: each operation completes exactly once, with a correct report.
#[test]
fn random_faults() {
    for seed in 100..160 {
        println!("seed {seed}");
        let mut rig = Rig::new(Config { devices: 2, depth_log2: 4, ..Config::default() }, seed);
        let kv = rig.kv(Shape { rows: 8, ..Shape::default() });
        for device in &mut rig.devices {
            let queue = &mut device.queues[0];
            for _ in 0..60 {
                let mischief = match rig.random.below(40) {
                    0 => Some(Mischief::Drop),
                    1 => Some(Mischief::Duplicate),
                    2 => Some(Mischief::Sqhd(16)),
                    3..20 => Some(Mischief::Status(0x80)),
                    _ => None,
                };
                queue.mischief.push_back(mischief);
            }
        }
        let mut issued = 0;
        let mut done = Vec::new();
        for _ in 0..400 {
            if rig.random.below(3) == 0 && issued < 40 {
                let n = rig.random.below(30) as u32;
                let mut map: Vec<Affine> =
                    (0..n).map(|i| Affine { block: 2 * i % 64, file: 63 - i }).collect();
                let row = rig.random.below(8) as u32;
                let iocb = rig.affine(&kv, abi::OP_READ, &mut map, [row, row + 1]);
                rig.issue(iocb);
                issued += 1;
            }
            rig.step();
            rig.pass(20_000);
            done.extend(std::iter::from_fn(|| rig.completion()));
        }
        rig.pass(2_000_000);
        while done.len() < issued {
            rig.step();
            done.extend(std::iter::from_fn(|| rig.completion()));
        }
        rig.settle();
        assert!(rig.completion().is_none());
        for done in &done {
            let ok = count(done, 0) as u64;
            assert_eq!(done.iocb.objects, ok);
            assert_eq!(done.iocb.error == 0, ok == u64::from(done.iocb.count));
            assert_eq!(done.iocb.error == 0, done.iocb.errors == 0);
        }
    }
}
