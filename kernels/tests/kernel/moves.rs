//! Data: for any queue, descriptor format and completion order, an operation transfers exactly the
//! bytes that the layout specifies.

use gio_uring::abi::{self, Affine, IoCtx, Warp};

use crate::{
    memory::Random,
    rig::{Config, Kv, Rig, Shape},
};

/// Returns distinct random blocks and files, some of the files in runs.
pub fn map(kv: &Kv, random: &mut Random, n: usize) -> Vec<Affine> {
    let mut blocks: Vec<u32> = (0..kv.shape.blocks).collect();
    random.shuffle(&mut blocks);
    let first = random.below(u64::from(kv.shape.files)) as u32;
    let mut files: Vec<u32> = (0..kv.shape.files).map(|i| (first + i) % kv.shape.files).collect();
    if random.below(2) == 0 {
        random.shuffle(&mut files);
    }
    blocks.iter().zip(&files).take(n).map(|(&block, &file)| Affine { block, file }).collect()
}

/// Several rounds of concurrent operations, one per row (so that they share no bytes), each checked
/// against the model; everything else must be unchanged.
fn affine_round_trip(config: Config, shape: Shape, seed: u64) {
    println!("seed {seed}, {config:?}, {shape:?}");
    let mut rig = Rig::new(config, seed);
    let kv = rig.kv(shape);
    let mut expected = 0;
    for round in 0..4 {
        let mut memory = rig.memory.bytes(kv.memory);
        let mut media: Vec<Vec<u8>> = rig.devices.iter().map(|d| d.media.clone()).collect();
        let mut random = rig.random.clone();
        for row in 0..shape.rows {
            let op = if (round + row) % 2 == 0 { abi::OP_READ } else { abi::OP_WRITE };
            let n = random.below(u64::from(shape.blocks.min(shape.files)) + 1) as usize;
            let mut map = map(&kv, &mut random, n);
            let iocb = rig.affine(&kv, op, &mut map, [row, row + 1]);
            rig.issue(iocb);
            rig.model(&kv, op, &map, [row, row + 1], &mut memory, &mut media);
            expected += n as u64;
        }
        rig.random = random;
        for done in rig.finish(shape.rows as usize) {
            assert_eq!((done.iocb.errors, done.iocb.error), (0, 0));
            assert_eq!(done.iocb.objects, u64::from(done.iocb.count));
            assert!(done.statuses.iter().all(|status| *status == 0));
        }
        assert!(rig.memory.bytes(kv.memory) == memory, "the pool's memory differs from the model");
        for (device, model) in rig.devices.iter().zip(&media) {
            assert!(device.media == *model, "the media differ from the model");
        }
        rig.assert_at_rest();
    }
    assert_boundary(&rig, shape);
    let counted: u64 = (0..rig.args.warp_count).map(|i| rig.warp(i).objects).sum();
    assert_eq!(counted, expected);
}

/// Asserts that no command crosses a boundary, except for a single object that lies across it.
fn assert_boundary(rig: &Rig, shape: Shape) {
    let boundary = u64::from(rig.config.boundary_lbas);
    if boundary == 0 {
        return;
    }
    let object = u64::from(shape.slot_bytes >> rig.config.lba_shift);
    for command in rig.devices.iter().flat_map(|device| &device.queues).flat_map(|q| &q.log) {
        let (first, last) = (command.lba(), command.lba() + command.lbas() - 1);
        let alone = command.lbas() == object && object <= boundary;
        assert!(first / boundary == last / boundary || alone, "LBAs {first} to {last}");
    }
}

/// Merged and split commands end at a drive's boundaries (NOIOB), wherever its data begins and
/// whether or not objects fit between them.
#[test]
fn commands_end_at_boundaries() {
    for (object_bytes, boundary_lbas) in [(4096, 8), (4096, 7), (12288, 8), (49152, 4), (49152, 6)]
    {
        for (transfer_bytes_max, sgl) in [(1 << 17, true), (20 << 10, true), (1 << 17, false)] {
            let shape = Shape {
                object_bytes,
                slot_bytes: object_bytes,
                blocks: 24,
                files: 24,
                group: 8,
                ..Shape::default()
            };
            let config = Config {
                boundary_lbas,
                transfer_bytes_max,
                sgl,
                descriptor_bytes: 4096,
                devices: 2,
                ..Config::default()
            };
            affine_round_trip(config, shape, u64::from(object_bytes + boundary_lbas));
        }
    }
}

#[test]
fn sgl_over_depths_devices_and_parts() {
    for (depth_log2, devices, parts) in
        [(1, 1, 1), (2, 1, 1), (3, 2, 1), (4, 2, 2), (5, 4, 1), (6, 1, 3), (8, 4, 2)]
    {
        let config = Config { depth_log2, devices, parts, ..Config::default() };
        affine_round_trip(config, Shape::default(), u64::from(depth_log2 * 100 + devices));
    }
}

#[test]
fn sgl_with_padding() {
    for bit_bucket in [true, false] {
        for object_bytes in [18 * 1024, 1152, 4095] {
            let slot_bytes = u32::next_multiple_of(object_bytes, 4096);
            let shape = Shape {
                object_bytes,
                slot_bytes,
                gap: 12,
                blocks: 24,
                files: 40,
                group: 8,
                ..Shape::default()
            };
            let config =
                Config { bit_bucket, devices: 2, depth_log2: 4, lbas: 2048, ..Config::default() };
            affine_round_trip(config, shape, u64::from(object_bytes));
        }
    }
}

#[test]
fn objects_longer_than_a_command_are_split() {
    for (object_bytes, sgl) in [(48 * 1024, true), (40 * 1024 + 100, true), (48 * 1024, false)] {
        let slot_bytes = u32::next_multiple_of(object_bytes, 4096);
        let shape =
            Shape { object_bytes, slot_bytes, blocks: 12, files: 16, group: 4, ..Shape::default() };
        let config = Config {
            transfer_bytes_max: 20 * 1024,
            depth_log2: 4,
            devices: 2,
            sgl,
            ..Config::default()
        };
        affine_round_trip(config, shape, u64::from(object_bytes));
    }
}

#[test]
fn prp_pages_lists_and_offsets() {
    // Whole pages (merged), one page (merged: PRP2 is the neighbour's), and objects whose stride
    // gives every block a different offset into its page.
    for (object_bytes, gap) in [(8192, 0), (4096, 0), (4096, 512), (16384, 1028), (32768, 4)] {
        for descriptor_bytes in [64, 4096] {
            let shape = Shape {
                object_bytes,
                slot_bytes: object_bytes,
                gap,
                blocks: 20,
                files: 32,
                group: 8,
                ..Shape::default()
            };
            let config = Config { sgl: false, descriptor_bytes, ..Config::default() };
            affine_round_trip(config, shape, u64::from(object_bytes + gap + descriptor_bytes));
        }
    }
}

#[test]
fn small_lbas_and_small_descriptor_areas() {
    let shape = Shape { object_bytes: 1536, slot_bytes: 1536, gap: 36, ..Shape::default() };
    for descriptor_bytes in [16, 32, 64, 128] {
        let config = Config { lba_shift: 9, descriptor_bytes, ..Config::default() };
        affine_round_trip(config, shape, u64::from(descriptor_bytes));
    }
}

/// Returns a random rig configuration, and a pool shape that fits it.
pub fn random_rig(seed: u64) -> (Config, Shape) {
    let mut random = Random::new(seed);
    let devices = 1 + random.below(4) as u32;
    let lba_shift = if random.below(2) == 0 { 9 } else { 12 };
    let lba = 1u32 << lba_shift;
    let sgl = random.below(3) != 0;
    let slot_bytes = lba * (1 + random.below(24576 >> lba_shift) as u32);
    let object_bytes =
        if sgl { slot_bytes - random.below(u64::from(lba)) as u32 } else { slot_bytes };
    let shape = Shape {
        object_bytes,
        slot_bytes,
        blocks: 1 + random.below(40) as u32,
        files: 1 + random.below(60) as u32,
        rows: 1 + random.below(9) as u32,
        group: devices * (1 + random.below(8) as u32),
        run_bytes: random.below(1 << 17) as u32,
        gap: random.below(9) as u32 * 4,
    };
    let slots = (60 / shape.group + 1) * shape.rows * (shape.group / devices);
    let config = Config {
        devices,
        parts: 1 + random.below(3) as u32,
        depth_log2: 1 + random.below(7) as u32,
        sgl,
        bit_bucket: random.below(2) == 0,
        lba_shift,
        lbas: u64::from(slots) * u64::from(slot_bytes >> lba_shift) + 5,
        transfer_bytes_max: lba * (1 + random.below(65536 >> lba_shift) as u32),
        descriptor_bytes: 32 << random.below(6),
        boundary_lbas: [0, 1 << random.below(6), random.below(40) as u32][seed as usize % 3],
        rounds: 1 + random.below(20) as u32,
        ..Config::default()
    };
    (config, shape)
}

#[test]
fn random_rigs() {
    for seed in 1..60 {
        let (config, shape) = random_rig(seed);
        affine_round_trip(config, shape, seed);
    }
}

/// Explicit IOCTXs of any length, at addresses of any alignment, over two devices.
#[test]
fn explicit_moves() {
    for (seed, sgl) in [(1, true), (2, false), (3, true), (4, false)] {
        println!("seed {seed}");
        let config = Config {
            devices: 2,
            sgl,
            transfer_bytes_max: 16384,
            depth_log2: 4,
            ..Config::default()
        };
        let mut rig = Rig::new(config, seed);
        for (warp, placements) in [(0, 2), (1, 1)] {
            let placement_ids = [7, 0xfffe, 1, 1, 1, 1, 1, 1];
            rig.set_warp(warp, Warp { placements, placement_ids, ..rig.warp(warp) });
        }
        let area = rig.memory.take_data(4 << 20, 4096);
        let mut random = Random::new(seed);
        let mut memory = rig.memory.bytes(area);
        let mut media: Vec<Vec<u8>> = rig.devices.iter().map(|d| d.media.clone()).collect();
        let mut list = Vec::new();
        let (mut at, mut lbas) = (0u64, [0u64; 2]);
        let write = seed > 2;
        for _ in 0..100 {
            let device = random.below(2) as u32;
            let bytes = 4096 * (1 + random.below(9));
            at += random.below(1000) * 4;
            let lba = lbas[device as usize] + random.below(2);
            lbas[device as usize] = lba + bytes / 4096;
            let iova = rig.memory.iova(area.at(at));
            list.push(IoCtx { iova, lba, bytes: bytes as u32, device });
            let on = (lba * 4096) as usize..(lba * 4096 + bytes) as usize;
            let of = at as usize..(at + bytes) as usize;
            if write {
                media[device as usize][on].copy_from_slice(&memory[of]);
            } else {
                memory[of].copy_from_slice(&media[device as usize][on]);
            }
            at += bytes;
        }
        let op = if write { abi::OP_WRITE } else { abi::OP_READ };
        let mut iocb = rig.explicit(op, &mut list);
        iocb.flags = abi::FLAG_FUA;
        // The second placement handle, which only the first device has.
        iocb.placement = 2;
        rig.issue(iocb);
        let done = rig.finish(1).remove(0);
        assert_eq!((done.iocb.errors, done.iocb.objects), (0, 100));
        assert!(rig.memory.bytes(area) == memory);
        for (device, model) in rig.devices.iter().zip(&media) {
            assert!(device.media == *model);
            // FUA is set on writes only; on a read it would only slow the device down.
            assert!(device.queues[0].log.iter().all(|command| command.fua() == write));
        }
        for (device, directive) in rig.devices.iter().zip([(2, 0xfffe), (0, 0)]) {
            // The same holds for a directive.
            let directive = if write { directive } else { (0, 0) };
            let log = &device.queues[0].log;
            assert!(log.iter().all(|command| command.directive() == directive), "{directive:?}");
        }
        rig.assert_at_rest();
    }
}
