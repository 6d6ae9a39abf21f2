//! `ripieno inspect` and `ripieno fsck`, on a store directory whose bytes were corrupted.

#![allow(unsafe_code, reason = "hands out an engine's memory")]

use crate::store_dir;

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    path::Path,
    ptr::NonNull,
    sync::{Arc, Mutex},
};

use nvme_driver::{Clock, MonotonicClock};
use objstore::{
    BlockId, BlockKey, Codec, Direction, KvShape, Layer, Move, Namespace, Order, StoreId,
    StoreOptions, Ticket,
};
use ripieno_stack::{
    Builder, CatalogStack, EngineMemory, PoolLayout, PoolMemory, RankMedia, Ranks, RanksOptions,
    StackConfig,
};
use serde_json::{Value, json};
use store_dir::{FORMAT, Place, REPLAY};

/// Offset of half A of the journal.
const JOURNAL: u64 = 1 << 20;

#[test]
fn damage_is_shown_and_repaired_only_when_asked() {
    let place = Place::new();
    assert!(place.run("inspect", 2).contains("no store here"));
    let stored = place.json(REPLAY, 0)["final_check_blocks"].clone();

    let found = place.json("inspect", 0);
    assert_eq!((&found["stored_files"], &found["store"]["state"]), (&stored, &"ready".into()));
    assert_eq!(found["namespaces"][0]["stored_files"], stored);
    assert_eq!(found["journal"]["commit_records"], stored);
    assert_eq!(found["damage"], serde_json::json!([]));
    assert!(place.run("inspect", 0).contains("namespace 0"));
    assert!(place.run("fsck", 0).contains("clean"));

    // One copy of a superblock.
    place.poke(1, 100, &[0xee; 64]);
    assert!(place.run("fsck", 1).contains("copy 0 of the superblock: its CRC is wrong"));
    let again = place.run("fsck", 1);
    assert!(again.contains("copy 0"), "nothing was repaired without being asked");
    assert!(again.contains("--repair rewrites"), "{again}");
    assert!(place.run("fsck --repair", 0).contains("from the other one"));
    place.run("fsck", 0);
    assert_eq!(place.json(REPLAY, 0)["stored_bytes"], 0);

    // A group in the middle of the journal.
    place.poke(0, JOURNAL + 2 * 4096 + 60, &[0xee; 64]);
    assert!(place.run("fsck", 1).contains("is missing or damaged"));
    assert!(place.json("inspect", 0)["journal"]["damage"].is_string());
    place.run(REPLAY, 1);
    assert!(place.run("fsck --repair", 0).contains("all keys are lost"));
    let again = place.json(REPLAY, 0);
    assert_eq!((&again["store"], &again["files_found"]), (&"opened".into(), &0.into()));
    assert_eq!(again["final_check_blocks"], stored);
    place.run("fsck", 0);
}

#[test]
fn blocks_of_a_damaged_journal_are_kept_when_their_data_says_so() {
    let place = Place::new();
    let stored = place.json(REPLAY, 0)["final_check_blocks"].as_u64().unwrap();
    let clean = place.json("fsck --salvage", 0);
    assert_eq!((&clean["salvage"], &clean["stored_files"]), (&Value::Null, &stored.into()));

    // A group in the middle, and a copy of the superblock.
    place.poke(0, JOURNAL + 2 * 4096 + 60, &[0xee; 64]);
    place.poke(1, 100, &[0xee; 64]);
    let refused = place.run(REPLAY, 1);
    assert!(refused.contains("hint: `ripieno fsck --salvage`"), "{refused}");
    assert!(place.run("scrub", 1).contains("hint: `ripieno fsck --salvage`"));
    let before = place.files();
    let seen = place.run("fsck --salvage", 1);
    for wanted in ["blocks can be kept", "1 places of the journal, 4 KiB", "add --repair"] {
        assert!(seen.contains(wanted), "`{wanted}` is not in `{seen}`");
    }
    let found = place.json("fsck --salvage", 1);
    let kept = found["salvage"]["kept"].as_u64().unwrap();
    assert!(kept > 0 && kept < stored, "{kept} of {stored}");
    assert_eq!((&found["salvage"]["lost"], &found["repaired"]), (&json!([]), &json!([])));
    assert!(place.files() == before, "it only reads");

    let done = place.run("fsck --salvage --repair", 0);
    assert!(done.contains("repairing: the journal, with the") && done.contains("clean"), "{done}");
    place.run("fsck", 0);
    assert_eq!(place.json("scrub", 0)["files_read"], kept);
    // The lost blocks are stored again, and the store is complete.
    let again = place.json(REPLAY, 0);
    assert_eq!((&again["store"], &again["files_found"]), (&"opened".into(), &kept.into()));
    assert_eq!((&again["mismatches"], &again["final_check_blocks"]), (&0.into(), &stored.into()));
}

const SHAPE: KvShape = KvShape { layers: 2, segments: 1, object_bytes: 4096, block_tokens: 16 };
const KEYS: u8 = 6;

/// Makes a store of a catalog and two ranks with a block for each key. The bytes of key `n` are
/// all `0x80 + n`.
fn store_on_two_ranks(dir: &Path) {
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let media = RankMedia::Files { bytes: 32 << 20, count: 1, lba_bytes: 4096 };
    let options =
        RanksOptions { id: StoreId([7; 16]), ranks: 2, shape: SHAPE, codec: Codec::None, media };
    let ranks = Ranks::prepare(dir, &options, &clock).unwrap();
    let catalog = CatalogStack::open(&ranks, &StoreOptions::default(), &clock).unwrap();
    let durable = catalog.catalog();
    let space = durable.with(|catalog| catalog.namespace(&Namespace::default())).unwrap();
    let bytes = SHAPE.block_bytes() as usize;
    let open = |rank| {
        let memory = Arc::new(Mutex::new(vec![0_u8; bytes]));
        let base = NonNull::new(memory.lock().unwrap().as_mut_ptr()).unwrap();
        // SAFETY: the memory has `bytes` bytes, and nothing else uses it.
        let memory = unsafe { EngineMemory::new(base, bytes, memory) };
        let layout = PoolLayout::contiguous(&SHAPE, 1);
        let builder = Builder::new(StackConfig::default(), SHAPE)
            .on(ranks.devices(rank).unwrap())
            .pool(PoolMemory::Engine { memory, layout });
        (builder.open_rank(ranks.rank(rank)).unwrap(), base)
    };
    let stacks = [open(0), open(1)];
    for n in 0..KEYS {
        let key = [BlockKey([n; 32])];
        let write = durable.with(|catalog| catalog.begin(space, &key)).unwrap();
        let file = write.own().next().unwrap();
        for (rank, (stack, base)) in (0..).zip(&stacks) {
            // SAFETY: it is the engine's memory, and no job uses it now.
            unsafe { base.write_bytes(0x80 + n, bytes) };
            let moves = [Move { file, block: BlockId(0), position: 0 }];
            let plane = stack.plane();
            let job = plane.begin(Direction::Write, &moves, &[]).unwrap();
            for layer in (0..SHAPE.layers).map(Layer) {
                plane.start(Ticket { job, layer }, Order::Unordered).unwrap();
            }
            let sums = plane.end(&[job]).unwrap().remove(0).checksums;
            durable.with(|catalog| catalog.written(write.id, rank, &sums)).unwrap();
        }
        durable.with(|catalog| catalog.commit(write.id)).unwrap();
        // One journal group per key.
        durable.sync().unwrap();
    }
    stacks.iter().for_each(|(stack, _)| stack.close().unwrap());
    catalog.close().unwrap();
}

#[test]
fn blocks_are_kept_that_are_whole_on_all_ranks() {
    let place = Place::new();
    let dir = place.path().join("store");
    store_on_two_ranks(&dir);
    let fsck = |words: &str, code| {
        let line = format!("fsck --path {}/catalog --json {words}", dir.display());
        let output = place.bare(&line).output().unwrap();
        let said = store_dir::said(&line, output, code);
        serde_json::from_str::<Value>(said.lines().find(|line| line.starts_with('{')).unwrap())
            .unwrap()
    };
    assert_eq!(fsck("--salvage", 0)["stored_files"], KEYS);

    let image =
        |store_dir| File::options().read(true).write(true).open(dir.join(store_dir)).unwrap();
    // A journal group after the first and the namespace's, and a byte of the last block on the
    // second rank.
    image("catalog/device-0.img").write_all_at(&[0xee; 64], JOURNAL + 3 * 4096 + 60).unwrap();
    let rank = image("rank-1/device-0.img");
    let mut object = [0; 4096];
    let is_last = |at: &u64| {
        rank.read_exact_at(&mut object, at * 4096).unwrap();
        object == [0x80 + KEYS - 1; 4096]
    };
    let at = (0..(32 << 20) / 4096).find(is_last).expect("it was stored");
    rank.write_all_at(&[0], at * 4096 + 17).unwrap();

    let found = fsck("--salvage --repair", 0);
    assert_eq!(found["salvage"]["kept"], KEYS - 2);
    let lost = found["salvage"]["lost"].as_array().unwrap();
    assert_eq!((lost.len(), &lost[0]["key"]), (1, &json!("05".repeat(32))));
    assert_eq!(fsck("", 0)["stored_files"], KEYS - 2);
}

#[test]
fn without_checksums_nothing_proves_what_a_file_holds() {
    let place = Place::new();
    place.run(&format!("{FORMAT} --no-checksums"), 0);
    place.run(REPLAY, 0);
    place.poke(0, JOURNAL + 2 * 4096 + 60, &[0xee; 64]);
    place.refused("fsck --salvage", &["keeps none", "fsck --repair"]);
    place.refused("fsck --salvage --repair", &["nothing proves which block a file holds"]);
    assert!(place.run("fsck", 1).contains("missing or damaged"), "it is as it was");
}
