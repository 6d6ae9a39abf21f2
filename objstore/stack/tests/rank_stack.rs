//! A store for several processes in one directory; here they are all this process.

#![allow(unsafe_code, reason = "hands out an engine's memory")]

use std::{path::Path, ptr::NonNull, sync::Arc};

use gio_uring::IoStatus;
use nvme_driver::{Clock, ControllerOptions, DescriptorPreference, MonotonicClock, Nanos};
use objstore::{
    BlockId, BlockKey, Codec, Direction, FileId, JobId, KvShape, Layer, Move, Namespace, Order,
    Overwrite, PolicyKind, RankId, StoreError, StoreId, StoreOptions, Ticket,
};
use rand::{Rng as _, TryRngCore as _, rngs::OsRng};
use ripieno_stack::{
    Builder, CatalogStack, EngineMemory, ErrorKind, PoolLayout, PoolMemory, RankMedia, RankStack,
    Ranks, RanksOptions, StackConfig, StackError,
};
use ripieno_testkit::until;

const SHAPE: KvShape = KvShape { layers: 3, segments: 2, object_bytes: 4096, block_tokens: 16 };
const BLOCKS: u32 = 4;
const BYTES: usize = 3 * 2 * 4096 * BLOCKS as usize;

fn clock() -> Arc<dyn Clock> {
    Arc::new(MonotonicClock::default())
}

fn options() -> RanksOptions {
    let id = StoreId(OsRng.unwrap_err().random());
    let media = RankMedia::Files { bytes: 32 << 20, count: 1, lba_bytes: 4096 };
    RanksOptions { id, ranks: 2, shape: SHAPE, codec: Codec::None, media }
}

fn temporary() -> tempfile::TempDir {
    // Not the temporary directory: that may be a tmpfs without direct I/O.
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Opens a rank with memory of an engine, at an unaligned address.
fn open(ranks: &Ranks, rank: u32) -> Result<(RankStack, NonNull<u8>), StackError> {
    open_with(ranks, rank, StoreOptions::default())
}

fn open_with(
    ranks: &Ranks,
    rank: u32,
    options: StoreOptions,
) -> Result<(RankStack, NonNull<u8>), StackError> {
    // PRPs have dword granularity: rank 1 uses bounce buffers.
    let descriptors = [DescriptorPreference::Auto, DescriptorPreference::Prp][rank as usize];
    let memory = Arc::new(std::sync::Mutex::new(vec![0_u8; BYTES + 1]));
    let base = NonNull::new(memory.lock().unwrap()[1..].as_mut_ptr()).unwrap();
    // SAFETY: `memory` has these bytes, and nothing else uses them.
    let memory = unsafe { EngineMemory::new(base, BYTES, memory) };
    let pool = PoolMemory::Engine { memory, layout: PoolLayout::contiguous(&SHAPE, BLOCKS) };
    let stack = Builder::new(StackConfig::default(), SHAPE)
        .on(ranks.devices(rank)?)
        .pool(pool)
        .controller(ControllerOptions { descriptors, ..ControllerOptions::default() })
        .options(options)
        .open_rank(ranks.rank(rank))?;
    assert_eq!(stack.plane().is_bounced(), rank == 1);
    Ok((stack, base))
}

fn begin(stack: &RankStack, direction: Direction, file: FileId, block: u32, sums: &[u32]) -> JobId {
    let moves = [Move { file, block: BlockId(block), position: 0 }];
    let job = stack.plane().begin(direction, &moves, sums).unwrap();
    (0..SHAPE.layers).for_each(|layer| {
        stack.plane().start(Ticket { job, layer: Layer(layer) }, Order::Unordered).unwrap()
    });
    job
}

#[test]
fn a_block_of_all_ranks_is_found_again() {
    let place = temporary();
    let dir = place.path().join("store");
    let ranks = Ranks::prepare(&dir, &options(), &clock()).unwrap();
    let key = [BlockKey([7; 32])];
    let catalog = CatalogStack::open(&ranks, &StoreOptions::default(), &clock()).unwrap();
    assert_eq!(RankId::of(catalog.catalog().superblock(), 1), ranks.rank(1));
    let durable = catalog.catalog();
    let space = durable.with(|catalog| catalog.namespace(&Namespace::default())).unwrap();
    let write = durable.with(|catalog| catalog.begin(space, &key)).unwrap();
    let file = write.own().next().unwrap();
    for rank in 0..2 {
        let (stack, base) = open(&ranks, rank).unwrap();
        // SAFETY: the engine's memory; no job uses it now.
        unsafe { base.write_bytes(0xA0 + rank as u8, BYTES) };
        let job = begin(&stack, Direction::Write, file, 1, &[]);
        let reports = stack.plane().end(&[job]).unwrap();
        assert!(reports[0].failure.is_none(), "{reports:?}");
        let sums = &reports[0].checksums;
        durable.with(|catalog| catalog.written(write.id, rank, sums)).unwrap();
        stack.close().unwrap();
        let closed = stack.plane().end(&[job]).unwrap_err();
        assert!(matches!(closed, StoreError::Failed { .. }), "{closed}");
    }
    durable.with(|catalog| catalog.commit(write.id)).unwrap();
    catalog.close().unwrap();

    let ranks = Ranks::open(&dir).unwrap();
    let catalog = CatalogStack::open(&ranks, &StoreOptions::default(), &clock()).unwrap();
    let found = catalog.catalog().with(|catalog| catalog.acquire(space, &key)).unwrap();
    assert_eq!(found.files, [file]);
    let sums = catalog.catalog().with(|catalog| catalog.checksums(file).to_vec());
    for (rank, sums) in (0..2).zip(sums.chunks(SHAPE.rows() as usize)) {
        let (stack, base) = open(&ranks, rank).unwrap();
        let job = begin(&stack, Direction::Read, file, 2, sums);
        stack.plane().wait(Ticket { job, layer: Layer(2) }).unwrap();
        assert!(stack.plane().end(&[job]).unwrap()[0].failure.is_none());
        for row in 0..SHAPE.rows() as usize {
            // SAFETY: inside the memory; nothing is in flight.
            let block = |block: usize| unsafe {
                base.add((row * BLOCKS as usize + block) * 4096 + 4095).read()
            };
            assert_eq!((block(1), block(2), block(3)), (0, 0xA0 + rank as u8, 0));
        }
        stack.close().unwrap();
    }
    catalog.close().unwrap();
}

#[test]
fn what_is_copied_from_host_memory_is_compared_with_its_checksums() {
    let place = temporary();
    let ranks = Ranks::prepare(&place.path().join("store"), &options(), &clock()).unwrap();
    for rank in 0..2 {
        let dram = 4 * SHAPE.block_bytes();
        let options = StoreOptions { dram, ..StoreOptions::default() };
        let (stack, base) = open_with(&ranks, rank, options).unwrap();
        // SAFETY: the engine's memory; no job uses it now.
        unsafe { base.write_bytes(0xA0, BYTES) };
        let job = begin(&stack, Direction::Write, FileId(0), 1, &[]);
        let sums = stack.plane().end(&[job]).unwrap().remove(0).checksums;
        let mut others = sums.clone();
        others[5] ^= 1;
        for (expected, is_right, hits, misses) in
            [(&sums, true, 1, 0), (&others, false, 2, 0), (&sums, true, 2, 1), (&sums, true, 3, 1)]
        {
            let job = begin(&stack, Direction::Read, FileId(0), 2, expected);
            let failure = stack.plane().end(&[job]).unwrap().remove(0).failure;
            let is_mismatch = matches!(&failure, Some(StoreError::Transfer { failure })
                if failure.status == IoStatus::Checksum && failure.layer == Layer(2));
            assert_eq!((failure.is_none(), is_mismatch), (is_right, !is_right), "{failure:?}");
            let dram = stack.plane().stats().unwrap().dram;
            assert_eq!((dram.hits, dram.misses), (hits, misses), "what differs goes");
        }
        // The devices have the correct data.
        assert_eq!(stack.plane().take_lost().unwrap(), []);
        // A file is overwritten although its old block was never dropped.
        // SAFETY: as above.
        unsafe { base.write_bytes(0xB0, BYTES) };
        let job = begin(&stack, Direction::Write, FileId(0), 1, &[]);
        let sums = stack.plane().end(&[job]).unwrap().remove(0).checksums;
        // SAFETY: as above.
        unsafe { base.write_bytes(0, BYTES) };
        let job = begin(&stack, Direction::Read, FileId(0), 2, &sums);
        assert!(stack.plane().end(&[job]).unwrap()[0].failure.is_none());
        // SAFETY: inside the memory; nothing is in flight.
        assert_eq!(unsafe { base.add(2 * 4096).read() }, 0xB0);
        stack.close().unwrap();
    }
}

#[test]
fn what_is_read_ahead_while_it_is_written_is_not_kept() {
    let place = temporary();
    let ranks = Ranks::prepare(&place.path().join("store"), &options(), &clock()).unwrap();
    let dram = SHAPE.block_bytes();
    let policy = PolicyKind::Lru;
    let options = StoreOptions { dram, policy, ..StoreOptions::default() };
    let (stack, base) = open_with(&ranks, 0, options).unwrap();
    for file in [FileId(0), FileId(1)] {
        let job = begin(&stack, Direction::Write, file, 1, &[]);
        stack.plane().end(&[job]).unwrap();
    }
    // The memory is used for file 1 while the write begins, and for file 0 when that is too late.
    let prefetch = |file, ms| stack.plane().prefetch(&[file], &[], Nanos::from_millis(ms)).unwrap();
    assert_eq!(prefetch(FileId(1), 1_000), 1);
    let moves = [Move { file: FileId(0), block: BlockId(1), position: 0 }];
    let job = stack.plane().begin(Direction::Write, &moves, &[]).unwrap();
    until("file 1 gives the memory up", || prefetch(FileId(0), 600_000) == 1);
    until("file 0 is read", || {
        // Processes completions.
        stack.plane().prefetch(&[], &[], Nanos(0)).unwrap();
        stack.plane().stats().unwrap().dram.prefetched_bytes == dram
    });
    // SAFETY: the engine's memory; no layer was started.
    unsafe { base.write_bytes(0xB0, BYTES) };
    (0..SHAPE.layers).for_each(|layer| {
        stack.plane().start(Ticket { job, layer: Layer(layer) }, Order::Unordered).unwrap()
    });
    let sums = stack.plane().end(&[job]).unwrap().remove(0).checksums;
    let job = begin(&stack, Direction::Read, FileId(0), 2, &sums);
    let failure = stack.plane().end(&[job]).unwrap().remove(0).failure;
    assert!(failure.is_none(), "{failure:?}");
    stack.close().unwrap();
}

#[test]
fn a_layer_that_was_not_started_is_reported() {
    let place = temporary();
    let ranks = Ranks::prepare(place.path(), &options(), &clock()).unwrap();
    let (stack, _) = open(&ranks, 0).unwrap();
    let moves = [Move { file: FileId(0), block: BlockId(0), position: 0 }];
    let job = stack.plane().begin(Direction::Write, &moves, &[]).unwrap();
    stack.plane().start(Ticket { job, layer: Layer(0) }, Order::Unordered).unwrap();
    let report = stack.plane().end(&[job]).unwrap().pop().unwrap();
    assert!(report.failure.unwrap().to_string().contains("layer 1 was not stored"));
    stack.close().unwrap();
}

fn refused(dir: &Path, options: &RanksOptions) -> (ErrorKind, String) {
    let error = Ranks::prepare(dir, options, &clock()).unwrap_err();
    (error.kind(), error.to_string())
}

#[test]
fn what_is_there_is_neither_taken_nor_lost() {
    let place = temporary();
    let dir = place.path();
    let asked = options();
    let made = Ranks::prepare(dir, &asked, &clock()).unwrap();
    let again = Ranks::prepare(dir, &options(), &clock()).unwrap();
    assert_eq!(again.rank(0), made.rank(0), "the store that is there");
    assert_eq!(refused(dir, &RanksOptions { ranks: 3, ..asked.clone() }).0, ErrorKind::Invalid);
    let (kind, message) = refused(&dir.join("rank-0"), &asked);
    assert_eq!(kind, ErrorKind::Occupied, "{message}");
    // Like after a crash during creation: there is no data in it.
    let manifest = dir.join("store.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    let making = text.replace("\"ready\"", "\"making\"");
    std::fs::write(&manifest, &making).unwrap();
    assert_eq!(Ranks::open(dir).unwrap_err().kind(), ErrorKind::NotFound);
    // A number that whoever edited it may have written: nothing is done as often.
    for ranks in [0, u32::MAX] {
        let wrong = making.replace("\"ranks\": 2", &format!("\"ranks\": {ranks}"));
        std::fs::write(&manifest, wrong).unwrap();
        let (kind, message) = refused(dir, &asked);
        assert!(kind == ErrorKind::Damaged && message.contains("1 to 65536"), "{message}");
    }
    std::fs::write(&manifest, making).unwrap();
    let anew = Ranks::prepare(dir, &options(), &clock()).unwrap();
    assert_ne!(anew.rank(0).store, made.rank(0).store);
    let media = RankMedia::Files { bytes: 1 << 50, count: 1, lba_bytes: 4096 };
    let huge = RanksOptions { media, ..asked };
    assert_eq!(refused(&dir.join("other"), &huge).0, ErrorKind::NoSpace);
    assert!(!dir.join("other/store.json").exists(), "nothing is left of it");
}

#[test]
fn a_store_keeps_its_size() {
    let place = temporary();
    let dir = place.path().join("store");
    let files = |bytes, count| RanksOptions {
        media: RankMedia::Files { bytes, count, lba_bytes: 4096 },
        ..options()
    };
    let (kind, message) = refused(&dir, &files(2 << 20, 1));
    assert_eq!(kind, ErrorKind::Invalid, "{message}");
    assert!(message.starts_with("capacity: "), "{message}");
    let made = Ranks::prepare(&dir, &files(32 << 20, 1), &clock()).unwrap();
    for (bytes, count, wanted) in [
        (6 << 30, 1, "has 32 MiB in 1 files a rank, and 6 GiB in 1 were asked for"),
        (16 << 20, 1, "and 16 MiB in 1 were asked for"),
        (32 << 20, 2, "and 32 MiB in 2 were asked for"),
    ] {
        let (kind, message) = refused(&dir, &files(bytes, count));
        assert_eq!(kind, ErrorKind::Invalid, "{message}");
        assert!(message.contains(wanted), "{message}");
    }
    // Files have whole MiB.
    let again = Ranks::prepare(&dir, &files((32 << 20) + 4096, 1), &clock()).unwrap();
    assert_eq!(again.rank(0), made.rank(0));
}

fn drives(names: &[&str]) -> RankMedia {
    let addresses = names.iter().map(|name| name.parse().unwrap()).collect();
    RankMedia::Drives { addresses, bytes: None, overwrite: Overwrite::Nothing }
}

#[test]
fn drives_that_cannot_be_had_are_refused_and_nothing_is_in_the_way_afterwards() {
    let place = temporary();
    let on = |media| RanksOptions { media, ..options() };
    for (names, kind, wanted) in [
        (&["1:00.0", "2:00.0", "3:00.0"][..], ErrorKind::Invalid, "3 drives cannot be divided"),
        (&[], ErrorKind::Invalid, "0 drives cannot be divided among 2 ranks"),
        (&["1:00.0", "1:00.0"], ErrorKind::Invalid, "vfio:0000:01:00.0 is named twice"),
        // On a machine without VFIO, or where there is no such function.
        (&["ffff:ff:1f.6", "ffff:ff:1f.7"], ErrorKind::System, "opening"),
    ] {
        let (found, message) = refused(place.path(), &on(drives(names)));
        assert!(message.contains(wanted), "{message}");
        assert_eq!(found, kind, "{message}");
        assert_eq!(Ranks::open(place.path()).unwrap_err().kind(), ErrorKind::NotFound);
    }
    Ranks::prepare(place.path(), &options(), &clock()).unwrap();
    let (kind, message) = refused(place.path(), &on(drives(&["1:00.0", "2:00.0"])));
    assert_eq!(kind, ErrorKind::Invalid);
    assert!(message.contains("is in files, and on 2 drives was asked for"), "{message}");
}

#[test]
fn drives_that_moved_are_looked_for_where_they_are_named_now() {
    let place = temporary();
    let dir = place.path();
    Ranks::prepare(dir, &options(), &clock()).unwrap();
    let drive =
        |address, serial| format!(r#"{{"address":"{address}","serial":"{serial}","nsid":1}}"#);
    let list = [drive("0000:01:00.0", "S1"), drive("0000:02:00.0", "S2")].join(",");
    let manifest = dir.join("store.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    let text = text.trim_end().trim_end_matches('}').to_owned();
    let text = text + r#","drive_bytes":4096,"drives":["# + &list + "]}";
    std::fs::write(&manifest, text).unwrap();
    let mut moved = RanksOptions { media: drives(&["5:00.0", "6:00.0"]), ..options() };
    let (_, message) = refused(dir, &moved);
    assert!(message.contains("all that fits of the drives were asked for"), "{message}");
    assert!(message.contains("was made with 4096 bytes"), "{message}");
    let RankMedia::Drives { bytes, .. } = &mut moved.media else { unreachable!() };
    *bytes = Some(4096);
    Ranks::prepare(dir, &moved, &clock()).unwrap();
    let text = std::fs::read_to_string(&manifest).unwrap();
    let found: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(found["drives"][1]["address"], "vfio:0000:06:00.0", "{text}");
    assert_eq!(found["drives"][1]["serial"], "S2", "{text}");
    // The identities are for opening only.
    let own = format!("{:?}", Ranks::open(dir).unwrap().devices(1).unwrap());
    assert!(own.matches("serial:").count() == 1 && own.contains(r#"serial: "S2""#), "{own}");
    let (_, message) = refused(dir, &options());
    assert!(message.contains("is on 2 drives, and in files was asked for"), "{message}");
}

#[test]
fn neighbours_in_a_file_are_read_with_large_commands() {
    const SHAPE: KvShape =
        KvShape { layers: 1, segments: 1, object_bytes: 64 << 10, block_tokens: 16 };
    const BLOCKS: u32 = 32;
    let place = temporary();
    let options = RanksOptions { ranks: 1, shape: SHAPE, ..options() };
    let ranks = Ranks::prepare(&place.path().join("store"), &options, &clock()).unwrap();
    let stack = Builder::new(StackConfig::default(), SHAPE)
        .on(ranks.devices(0).unwrap())
        .pool(PoolMemory::Own { blocks: BLOCKS })
        .open_rank(ranks.rank(0))
        .unwrap();
    let plane = stack.plane();
    for direction in [Direction::Write, Direction::Read] {
        let before = plane.stats().unwrap().ring.total.commands;
        let entry = |at| Move { file: FileId(at), block: BlockId(BLOCKS - 1 - at), position: at };
        let moves: Vec<Move> = (0..BLOCKS).map(entry).collect();
        let job = plane.begin(direction, &moves, &[]).unwrap();
        plane.start(Ticket { job, layer: Layer(0) }, Order::Unordered).unwrap();
        assert!(plane.end(&[job]).unwrap()[0].failure.is_none());
        // 2 MiB.
        assert_eq!(plane.stats().unwrap().ring.total.commands - before, 2, "{direction:?}");
    }
    stack.close().unwrap();
}

#[test]
fn devices_are_opened_to_be_read_beside_their_process() {
    let place = temporary();
    let dir = place.path().join("store");
    let ranks = Ranks::prepare(&dir, &options(), &clock()).unwrap();
    let _writer = open(&ranks, 0).unwrap();
    assert!(ranks.devices_beside(0).unwrap().is_read_only());
    assert_eq!(ranks.devices(0).unwrap_err().kind(), ErrorKind::Locked);
    let manifest = dir.join("store.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    let drive = r#"{"address":"vfio:0000:65:00.0","serial":"S1","nsid":1}"#;
    let text = text.replacen('{', &format!(r#"{{"drives":[{drive},{drive}],"#), 1);
    std::fs::write(&manifest, text).unwrap();
    let error = Ranks::open(&dir).unwrap().devices_beside(0).unwrap_err();
    assert!(error.to_string().contains("or use a server"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Invalid);
}
