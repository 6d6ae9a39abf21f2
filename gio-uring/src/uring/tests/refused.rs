//! Invalid input of every kind is refused with a message that names it.

use super::*;
use crate::Affine;

/// Asserts that `result` failed and that its message contains all of `words`.
#[track_caller]
fn says<T>(result: Result<T, Error>, words: &[&str]) {
    let Err(error) = result else { panic!("was accepted; expected {words:?}") };
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
}

fn init(depth: u32, grants: &[(u32, QueueGrant)], options: UringOptions) -> Result<Uring, Error> {
    let executor = Box::new(TestExecutor::default());
    Uring::init_queue(depth, executor, Arc::new(TestClock::default()), grants, options)
}

#[test]
fn rings() {
    for depth in [0, 3, 1 << 17] {
        says(init(depth, &grants(1, 1), options()), &[&depth.to_string(), "power of two"]);
    }
    let with = |change: fn(&mut UringOptions)| {
        let mut options = options();
        change(&mut options);
        init(1, &grants(1, 1), options)
    };
    says(with(|options| options.explicit_max = 0), &["explicit_max"]);
    says(with(|options| options.explicit_max = 2049), &["explicit_max", "2049"]);
    says(with(|options| options.rounds = 0), &["rounds"]);
    says(with(|options| options.command_timeout = Nanos(0)), &["command_timeout"]);
    says(with(|options| options.arena_bytes = usize::MAX), &["arena_bytes"]);
}

#[test]
fn grants_that_make_no_sense() {
    let with = |change: fn(&mut QueueGrant)| {
        let mut grants = grants(2, 1);
        change(&mut grants[1].1);
        init(1, &grants, options())
    };
    says(init(1, &[], options()), &["0 queues"]);
    says(init(1, &[(1, grant(1))], options()), &["device 1", "without holes"]);
    says(init(1, &[(1, grant(1)), (1, grant(2))], options()), &["device 0", "without holes"]);
    says(init(1, &[(u32::MAX, grant(1))], options()), &["device 4294967295"]);
    for depth in [0, 1, 3, 1 << 15] {
        let mut grants = grants(1, 1);
        grants[0].1.depth = depth;
        says(init(1, &grants, options()), &["queue 1", &depth.to_string(), "power of two"]);
    }
    says(with(|grant| grant.lba_shift = 3), &["device 1", "queue 2", "2^3"]);
    says(with(|grant| grant.transfer_bytes_max = 0), &["0 bytes", "512"]);
    says(with(|grant| grant.transfer_bytes_max = 1000), &["1000 bytes", "512"]);
    says(with(|grant| grant.descriptor_bytes = 48), &["descriptor", "48"]);
    says(with(|grant| grant.descriptor_bytes = 16), &["descriptor", "16"]);
    says(with(|grant| grant.descriptors.iova.0 += 64), &["descriptor", "multiple of 4096"]);
    says(with(|grant| grant.sq.host = Some(8)), &["submission queue", "multiple of 64"]);
    says(with(|grant| grant.cq.host = None), &["cannot reach the completion queue of queue 2"]);
    says(with(|grant| grant.sq_doorbell.host = None), &["submission doorbell"]);
    says(
        with(|grant| {
            grant.descriptor_mode = DescriptorMode::Sgl { bit_bucket: true, granularity: 3 };
        }),
        &["granularity is 3"],
    );
    says(
        with(|grant| grant.descriptor_mode = DescriptorMode::Prp { page_bytes: 2048 }),
        &["2048", "4096"],
    );
    let mut two_minds = grants(1, 2);
    two_minds[1].1.lbas += 1;
    says(init(1, &two_minds, options()), &["another queue of the device"]);
}

#[test]
fn pools() {
    let (mut uring, _executor) = ring(1, 2, 1);
    let mut with = |change: fn(&mut PoolDesc)| {
        let mut desc = pool(2);
        change(&mut desc);
        uring.register_pool(&desc)
    };
    says(with(|pool| pool.data_lba.truncate(1)), &["1 devices", "has 2"]);
    says(with(|pool| pool.row_iova.clear()), &["0 rows"]);
    says(with(|pool| pool.row_iova = vec![Iova(0); 65_536]), &["65536 rows"]);
    says(with(|pool| pool.blocks = 0), &["0 blocks"]);
    says(with(|pool| pool.files = 0), &["0 files"]);
    says(with(|pool| pool.group = 0), &["files a group"]);
    says(with(|pool| pool.group = 7), &["7 files", "multiple of the 2 devices"]);
    says(with(|pool| pool.object_bytes = 0), &["0 bytes an object"]);
    says(with(|pool| pool.object_bytes = 5000), &["4096", "5000"]);
    says(with(|pool| pool.slot_bytes = 4100), &["4100", "512"]);
    says(with(|pool| pool.block_stride = 2048), &["2048", "overlap"]);
    says(with(|pool| pool.block_stride = 8194), &["block_stride", "multiples of 4"]);
    says(with(|pool| pool.block_stride = u64::MAX / 63 + 1), &["64-bit address space"]);
    says(with(|pool| pool.row_iova[3].0 = u64::MAX - 4096), &["row 3", "address space"]);
    says(with(|pool| pool.row_iova[5].0 += 2), &["row_iova", "multiples of 4"]);
    says(with(|pool| pool.files = u32::MAX), &["device 0", "fewer files"]);
    says(with(|pool| pool.data_lba[1] = u64::MAX), &["device 1", "2^64"]);
    says(with(|pool| pool.slot_bytes = 4608), &["512 bytes of padding", "pad_write"]);
    says(
        with(|pool| (pool.slot_bytes, pool.pad_write) = (4608, Some(Iova(2)))),
        &["pad_write", "multiples of 4"],
    );
    with(|pool| (pool.slot_bytes, pool.pad_write) = (4608, Some(Iova(0x1000)))).unwrap();
}

#[test]
fn the_last_slot_of_a_pool_fits_exactly() {
    let (mut uring, _executor) = ring(1, 2, 1);
    let mut desc = pool(2);
    // 10 groups of 6 rows and 6 slots of 8 LBAs on each device.
    desc.data_lba = vec![(1 << 20) - 10 * 6 * 6 * 8; 2];
    uring.register_pool(&desc).unwrap();
    desc.data_lba[1] += 1;
    says(uring.register_pool(&desc), &["device 1", "1048577"]);
    // Two files fewer are one slot fewer in the last row of both devices.
    desc.files -= 2;
    uring.register_pool(&desc).unwrap();
}

#[test]
fn pools_for_prp_and_for_controllers_without_a_bit_bucket() {
    let executor = TestExecutor::default();
    let mut grants = grants(2, 1);
    grants[1].1.descriptor_mode = DescriptorMode::Prp { page_bytes: 4096 };
    let clock = Arc::new(TestClock::default());
    let mut uring = Uring::init_queue(1, Box::new(executor), clock, &grants, options()).unwrap();
    let mut desc = pool(2);
    uring.register_pool(&desc).unwrap();
    (desc.slot_bytes, desc.pad_write) = (4608, Some(Iova(0x1000)));
    says(uring.register_pool(&desc), &["padding", "PRPs (device 1)"]);

    grants[1].1.descriptor_mode = DescriptorMode::Sgl { bit_bucket: false, granularity: 1 };
    let mut uring = init(1, &grants, options()).unwrap();
    says(uring.register_pool(&desc), &["pad_write and pad_read"]);
    desc.pad_read = Some(Iova(0x2000));
    uring.register_pool(&desc).unwrap();
}

#[test]
fn maps_and_rows() {
    let (mut uring, _executor) = ring(1, 2, 1);
    says(uring.upload_map(&[entry(0, 0)], 3), &["the map has 3 devices", "has 2"]);
    says(uring.upload_map(&[], 2), &["0 I/O contexts"]);
    let map = uring.upload_map(&[Affine { block: 0, file: 0 }], 2).unwrap();
    let pool = uring.register_pool(&pool(2)).unwrap();
    for rows in [0..0, 3..7, 6..7, 5..u32::MAX] {
        let words = [format!("{}..{}", rows.start, rows.end), "has 6".to_owned()];
        let result = uring.submit(&AffineOp::new(Direction::Read, &map, &pool, rows));
        says(result, &words.each_ref().map(String::as_str));
    }
}

#[test]
fn checksums() {
    let (mut uring, _executor) = ring(1, 2, 1);
    let mut with = |change: fn(&mut PoolDesc)| {
        let mut desc = reachable_pool(2);
        change(&mut desc);
        uring.register_pool(&desc)
    };
    says(with(|pool| pool.row_memory.truncate(5)), &["row_memory has 5 rows", "6 or none"]);
    says(with(|pool| pool.row_memory[4].iova.0 += 4), &["row 4", "row_memory says"]);
    says(with(|pool| pool.row_memory[2].host = None), &["test executor cannot reach row 2"]);
    says(
        with(|pool| pool.row_memory[1].host = Some(u64::MAX - (1 << 44))),
        &["cannot reach row 1", "without checksums"],
    );
    assert!(with(|_| ()).unwrap().is_reachable());

    let unreachable = uring.register_pool(&pool(2)).unwrap();
    let pool = uring.register_pool(&reachable_pool(2)).unwrap();
    let maps = [0, 1].map(|file| uring.upload_map(&[entry(0, file)], 2).unwrap());
    let mut with = |rows, pool: &PoolHandle, at: usize| {
        let checksums = uring.new_checksums(&maps[at], rows).unwrap();
        let op = AffineOp::new(Direction::Write, &maps[0], pool, 0..1);
        uring.submit(&AffineOp { checksums: Some(&checksums), ..op })
    };
    says(with(6, &pool, 1), &["checksums", "another map"]);
    says(with(5, &pool, 0), &["of 5 rows", "the pool has 6"]);
    says(with(6, &unreachable, 0), &["cannot reach", "row_memory"]);
    with(6, &pool, 0).unwrap();
    let (mut other, _executor) = ring(1, 2, 1);
    says(other.upload_checksums(&maps[0], 6, |_, _| 0), &["the map belongs to another ring"]);
}

#[test]
fn explicit_contexts() {
    let (mut uring, _executor) = ring(1, 2, 1);
    let good = IoCtx { iova: 0x1000, lba: 0, bytes: 512, device: 1 };
    let mut with = |change: fn(&mut IoCtx)| {
        let mut contexts = [good; 3];
        change(&mut contexts[2]);
        uring.submit_explicit(Direction::Read, false, &contexts)
    };
    with(|_| ()).unwrap();
    says(with(|context| context.device = 2), &["context 2", "device 2", "2 devices"]);
    says(with(|context| context.bytes = 0), &["0 bytes"]);
    says(with(|context| context.bytes = 700), &["700 bytes", "512"]);
    says(with(|context| context.lba = 1 << 20), &["1048576"]);
    says(with(|context| context.lba = u64::MAX), &["device 1 has 1048576"]);
    says(with(|context| context.iova = 0x1002), &["0x1002", "multiple of 4"]);
    says(with(|context| context.iova = u64::MAX - 3), &["wrap"]);
    says(uring.submit_explicit(Direction::Read, false, &[]), &["0 I/O contexts"]);
    says(uring.submit_explicit(Direction::Read, false, &[good; 65]), &["65", "1 to 64"]);
}
