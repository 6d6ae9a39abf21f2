//! Shape and number of commands: merging, batches, doorbells, concurrent operations.

use gio_uring::abi::{self, Affine, IoCtx};

use crate::{
    device::Part,
    rig::{Config, Kv, RING, Rig, Shape},
};

/// Maps files 0 .. n to blocks 0 .. n.
fn straight(n: u32) -> Vec<Affine> {
    (0..n).map(|i| Affine { block: i, file: i }).collect()
}

fn list(rig: &mut Rig, n: u64, device: u32) -> Vec<IoCtx> {
    let area = rig.memory.take_data(n * 4096, 4096);
    let entry =
        |i| IoCtx { iova: rig.memory.iova(area.at(i * 4096)), lba: i * 2, bytes: 4096, device };
    (0..n).map(entry).collect()
}

#[test]
fn sixty_four_explicit_contexts_ring_few_doorbells() {
    for depth_log2 in [6, 7, 10] {
        let mut rig = Rig::new(Config { depth_log2, ..Config::default() }, 7);
        for _ in 0..10 {
            let mut list = list(&mut rig, 64, 0);
            let iocb = rig.explicit(abi::OP_READ, &mut list);
            rig.issue(iocb);
        }
        rig.finish(10);
        let warp = rig.warp(0);
        let (commands, doorbells) = (warp.commands, warp.sq_doorbells);
        println!("depth {}: {commands} commands, {doorbells} SQ doorbells", 1 << depth_log2);
        assert_eq!(commands, 640);
        assert!(commands / doorbells >= 16);
        assert!(warp.cq_doorbells <= 640);
    }
}

/// One operation of 64, and a controller that fetches all before completing any: two doorbells.
#[test]
fn a_lone_operation_of_64_rings_twice() {
    let mut rig = Rig::new(Config { depth_log2: 7, ..Config::default() }, 3);
    rig.devices[0].stalled = true;
    let mut list = list(&mut rig, 64, 0);
    let iocb = rig.explicit(abi::OP_WRITE, &mut list);
    rig.issue(iocb);
    rig.settle();
    assert_eq!((rig.warp(0).commands, rig.warp(0).sq_doorbells), (64, 2));
    assert_eq!(rig.warp(0).outstanding, 64);
    rig.devices[0].stalled = false;
    rig.finish(1);
    assert_eq!(rig.warp(0).sq_doorbells, 2);
    rig.assert_at_rest();
}

/// Explicit contexts are never merged, even neighbours.
#[test]
fn explicit_contexts_are_never_merged() {
    let mut rig = Rig::new(Config::default(), 5);
    let mut list = list(&mut rig, 8, 0);
    for (i, entry) in list.iter_mut().enumerate() {
        entry.lba = i as u64;
    }
    let iocb = rig.explicit(abi::OP_READ, &mut list);
    rig.issue(iocb);
    rig.finish(1);
    assert_eq!(rig.warp(0).commands, 8);
}

fn one_read(config: Config, shape: Shape, map: &mut [Affine], rows: [u32; 2]) -> (Rig, Kv) {
    let mut rig = Rig::new(config, 11);
    let kv = rig.kv(shape);
    let iocb = rig.affine(&kv, abi::OP_READ, map, rows);
    rig.issue(iocb);
    let done = rig.finish(1).remove(0);
    assert_eq!(done.iocb.errors, 0);
    assert_eq!(done.iocb.objects, map.len() as u64 * u64::from(rows[1] - rows[0]));
    (rig, kv)
}

#[test]
fn runs_are_as_long_as_the_smallest_limit() {
    let base = (Config::default(), Shape::default());
    let group = Shape { group: 64, run_bytes: 1 << 20, ..base.1 };
    let cases = [
        // (config, shape, objects of a command)
        (Config { transfer_bytes_max: 32768, ..base.0 }, group, 8),
        (base.0, Shape { run_bytes: 20480, ..group }, 5),
        (base.0, Shape { run_bytes: 1, ..group }, 1),
        (Config { descriptor_bytes: 64, ..base.0 }, group, 4),
        (base.0, Shape { object_bytes: 4000, ..group }, 16), // two entries an object
        (Config { transfer_bytes_max: 1 << 20, ..base.0 }, group, 32),
    ];
    for (config, shape, objects) in cases {
        let (rig, kv) = one_read(config, shape, &mut straight(64), [1, 2]);
        let log = &rig.devices[0].queues[0].log;
        let lengths: Vec<u64> = log.iter().map(|command| command.lbas()).collect();
        // 64 objects are several chunks: no run may be cut short at the end of a chunk.
        let expected: Vec<u64> =
            (0..64u64).step_by(objects).map(|at| (64 - at).min(objects as u64)).collect();
        assert_eq!(lengths, expected, "{config:?} {shape:?}");
        assert_eq!(log[0].lba(), kv.place(0, 1, 12).1);
    }
}

#[test]
fn a_gap_in_the_files_ends_a_run() {
    let mut map = straight(40);
    map.retain(|entry| ![0, 5, 6, 31, 33].contains(&entry.file));
    let shape = Shape { group: 64, run_bytes: 1 << 20, ..Shape::default() };
    let config = Config { transfer_bytes_max: 1 << 20, ..Config::default() };
    let (rig, _) = one_read(config, shape, &mut map, [0, 1]);
    let log = &rig.devices[0].queues[0].log;
    let runs: Vec<u64> = log.iter().map(|command| command.lbas()).collect();
    // 1-4, 7-30, 32, 34-39.
    assert_eq!(runs, [4, 24, 1, 6]);
}

/// Groups are separate extents: a run ends where a group of several rows ends.
#[test]
fn a_run_ends_with_its_group() {
    let shape = Shape { group: 8, run_bytes: 1 << 20, ..Shape::default() };
    let (rig, _) = one_read(Config::default(), shape, &mut straight(32), [0, 1]);
    let log = &rig.devices[0].queues[0].log;
    assert_eq!(log.iter().map(|c| c.lbas()).collect::<Vec<_>>(), [8, 8, 8, 8]);
}

#[test]
fn padding_goes_to_the_bit_bucket_or_to_its_own_page() {
    for bit_bucket in [true, false] {
        let shape = Shape { object_bytes: 4000, ..Shape::default() };
        let mut rig = Rig::new(Config { bit_bucket, ..Config::default() }, 1);
        let kv = rig.kv(shape);
        rig.devices[0].stalled = true;
        let mut map = straight(2);
        let iocb = rig.affine(&kv, abi::OP_READ, &mut map, [0, 1]);
        rig.issue(iocb);
        rig.settle();
        let device = &rig.devices[0];
        let parts = device.parts(&rig.memory, 0, &device.queues[0].log[0]);
        let object = |i| Part { address: Some(kv.memory.at(kv.offset(0, i))), len: 4000 };
        let pad_address = rig.memory.data[1].address;
        let pad = Part { address: (!bit_bucket).then_some(pad_address), len: 96 };
        assert_eq!(parts, [object(0), pad, object(1), pad]);
    }
}

/// A single object needs no segment: its only entry is in the SQE.
#[test]
fn one_object_is_described_in_the_entry_itself() {
    let (rig, kv) = one_read(Config::default(), Shape::default(), &mut straight(1), [0, 1]);
    let command = rig.devices[0].queues[0].log[0];
    let iova = rig.memory.iova(kv.memory.at(0));
    assert_eq!(&command.sqe[3..5], [iova, 4096], "data block, PSDT 01b");
    assert!(command.uses_sgl());
}

#[test]
fn rows_go_to_all_devices_and_all_queues_alike() {
    let config = Config { devices: 4, parts: 2, ..Config::default() };
    let shape = Shape { run_bytes: 0, rows: 4, ..Shape::default() };
    let (rig, _) = one_read(config, shape, &mut straight(64), [0, 4]);
    let commands: Vec<u64> = (0..8).map(|i| rig.warp(i).commands).collect();
    assert_eq!(commands, [32; 8]);
}

/// At most eight operations are in progress, in ring order; they overlap, and a later one may
/// complete first.
#[test]
fn operations_overlap_within_the_window() {
    let mut rig = Rig::new(Config { depth_log2: 8, ..Config::default() }, 1);
    rig.devices[0].stalled = true;
    for i in 0..12 {
        let mut list = list(&mut rig, 3, 0);
        for entry in &mut list {
            entry.lba += i * 10;
        }
        let iocb = rig.explicit(abi::OP_READ, &mut list);
        rig.issue(iocb);
    }
    rig.settle();
    let log = &rig.devices[0].queues[0].log;
    let lbas: Vec<u64> = log.iter().map(|command| command.lba()).collect();
    let expected: Vec<u64> = (0..8).flat_map(|i| [0, 2, 4].map(|lba| i * 10 + lba)).collect();
    assert_eq!(lbas, expected);
    assert_eq!(rig.warp(0).sq_doorbells, 1, "small operations share a doorbell");
    rig.devices[0].stalled = false;
    let order: Vec<u32> = rig.finish(12).iter().map(|done| done.id).collect();
    let mut sorted = order.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..12).collect::<Vec<_>>());
    assert_ne!(order, sorted, "with this seed they finish out of order");
    rig.assert_at_rest();
}

/// A full queue waits until there is room for a batch worth a doorbell.
#[test]
fn no_small_batches_while_more_remains() {
    let mut rig = Rig::new(Config { depth_log2: 6, rounds: 1, ..Config::default() }, 9);
    let mut list = list(&mut rig, 500, 0);
    let iocb = rig.explicit(abi::OP_READ, &mut list);
    rig.issue(iocb);
    rig.devices[0].at_once = 3;
    let mut before = (0, 0);
    let mut small = 0;
    while rig.completion().is_none() {
        rig.step();
        let warp = rig.warp(0);
        if warp.sq_doorbells != before.1 {
            assert_eq!(warp.sq_doorbells, before.1 + 1, "one round, one doorbell");
            small += u32::from(warp.commands - before.0 < 16);
            before = (warp.commands, warp.sq_doorbells);
        }
    }
    assert!(small <= 1, "{small} batches of fewer than 16 commands; only the last one may be");
    assert_eq!(rig.warp(0).commands, 500);
}

/// Operations of few commands that fill the window wait until half of it is unused.
#[test]
fn small_operations_share_doorbells() {
    let mut rig = Rig::new(Config { depth_log2: 8, ..Config::default() }, 5);
    let kv = rig.kv(Shape { run_bytes: 4096, ..Shape::default() });
    (rig.devices[0].at_once, rig.devices[0].in_order) = (1, true);
    for _ in 0..RING {
        let iocb = rig.affine(&kv, abi::OP_READ, &mut straight(8), [0, 1]);
        rig.issue(iocb);
    }
    rig.finish(RING as usize);
    let warp = rig.warp(0);
    assert_eq!((warp.commands, warp.sq_doorbells), (512, 16), "32 commands a doorbell");
    rig.assert_at_rest();
}

/// Even if the stack has a slot for each entry.
#[test]
fn one_entry_of_the_queue_stays_empty() {
    let mut rig = Rig::new(Config { depth_log2: 3, ..Config::default() }, 1);
    let mut warp = rig.warp(0);
    warp.free_slots = rig.memory.place(&[0u16, 1, 2, 3, 4, 5, 6, 7]);
    warp.free_count = 8;
    rig.set_warp(0, warp);
    let mut list = list(&mut rig, 20, 0);
    let iocb = rig.explicit(abi::OP_READ, &mut list);
    rig.issue(iocb);
    rig.devices[0].stalled = true;
    rig.settle();
    assert_eq!((rig.warp(0).outstanding, rig.warp(0).free_count), (7, 1));
    rig.devices[0].stalled = false;
    rig.finish(1);
    assert_eq!(rig.warp(0).free_count, 8);
}

#[test]
fn empty_operations_complete() {
    let mut rig = Rig::new(Config { devices: 2, ..Config::default() }, 1);
    let kv = rig.kv(Shape::default());
    let none = rig.affine(&kv, abi::OP_READ, &mut [], [0, 3]);
    let no_rows = rig.affine(&kv, abi::OP_READ, &mut straight(4), [2, 2]);
    let nothing = rig.explicit(abi::OP_WRITE, &mut []);
    for iocb in [none, no_rows, nothing] {
        rig.issue(iocb);
        let done = rig.finish(1).remove(0);
        assert_eq!((done.iocb.objects, done.iocb.errors), (0, 0));
    }
    assert_eq!(rig.warp(0).commands, 0);
    rig.assert_at_rest();
}

/// A waiting operation holds back later ones, and starts when its event arrives; it signals after
/// everything is done.
#[test]
fn waits_and_signals() {
    let mut rig = Rig::new(Config::default(), 2);
    let event = rig.memory.place(&[u32::MAX - 1]);
    let signal = rig.memory.place(&[0u32]);
    let mut first = list(&mut rig, 4, 0);
    let mut second = first.clone();
    let mut iocb = rig.explicit(abi::OP_READ, &mut first);
    // Values wrap: 2 comes after u32::MAX - 1.
    (iocb.wait, iocb.wait_value) = (event, 2);
    (iocb.signal, iocb.signal_value) = (signal, 77);
    rig.issue(iocb);
    let iocb = rig.explicit(abi::OP_READ, &mut second);
    rig.issue(iocb);
    for value in [u32::MAX, 0, 1] {
        rig.memory.poke(event, value);
        rig.settle();
        assert_eq!(rig.warp(0).commands, 0);
    }
    rig.devices[0].stalled = true;
    rig.memory.poke(event, 3u32);
    rig.settle();
    assert_eq!(rig.warp(0).commands, 8);
    assert_eq!(rig.memory.peek::<u32>(signal), 0);
    rig.devices[0].stalled = false;
    rig.finish(2);
    assert_eq!(rig.memory.peek::<u32>(signal), 77);
}

/// CIDs of one slot differ between uses, and are never FFFFh.
#[test]
fn generations_change_and_wrap() {
    let mut rig = Rig::new(Config { depth_log2: 10, rounds: 64, ..Config::default() }, 2);
    for _ in 0..700 {
        let mut list: Vec<IoCtx> = Vec::new();
        let area = rig.memory.data.first().copied();
        let area = area.unwrap_or_else(|| rig.memory.take_data(4096, 4096));
        for i in 0..100 {
            let iova = rig.memory.iova(area.address);
            list.push(IoCtx { iova, lba: i, bytes: 4096, device: 0 });
        }
        let iocb = rig.explicit(abi::OP_WRITE, &mut list);
        rig.issue(iocb);
        rig.finish(1);
    }
    let mut last = vec![None; 1024];
    let mut wrapped = false;
    for command in &rig.devices[0].queues[0].log {
        let (slot, generation) = (usize::from(command.cid() & 1023), command.cid() >> 10);
        assert_ne!(command.cid(), 0xffff);
        assert_ne!(last[slot], Some(generation));
        wrapped |= last[slot].is_some_and(|before| before > generation);
        last[slot] = Some(generation);
    }
    assert!(wrapped, "no generation wrapped; more operations are needed");
}

/// A run of neighbours is cut only at a drive's boundaries.
#[test]
fn a_run_ends_at_a_boundary() {
    let mut rig = Rig::new(Config { boundary_lbas: 8, ..Config::default() }, 3);
    let kv = rig.kv(Shape::default());
    let iocb = rig.affine(&kv, abi::OP_READ, &mut straight(24), [0, 1]);
    rig.issue(iocb);
    rig.finish(1);
    let log = &rig.devices[0].queues[0].log;
    let runs: Vec<(u64, u64)> = log.iter().map(|c| (c.lba(), c.lbas())).collect();
    // The data begins at LBA 5.
    assert_eq!(runs, [(5, 3), (8, 8), (16, 8), (24, 5)]);
}
