//! A server that decides when layers start: loads of all clients before their saves.

use std::{collections::BTreeMap, fs, num::NonZeroU64, sync::mpsc, thread};

use objstore::{BlockKey, Layer, Namespace};
use ripieno_serve::{Client, RefusalKind, Request, SpaceId};
use ripieno_stack::pace;
use ripieno_testkit::{blocks, keys, pattern, until};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    engine::Engine,
    rig::{Rig, SHAPE, kind},
};

/// Loads without a pause, of 0.2 seconds each: for ten minutes, a save that waits for their end has
/// no turn.
const LOADS: u32 = 3000;
/// Blocks that are stored before a server is paced.
const STORED: std::ops::Range<u32> = 0..8;

fn layers() -> impl Iterator<Item = Layer> {
    (0..SHAPE.layers).map(Layer)
}

fn bytes(key: BlockKey) -> Vec<u8> {
    pattern(SHAPE.block_bytes() as usize, key.seed() as u64)
}

fn space(client: &Client) -> SpaceId {
    client.namespace(&Namespace::default()).unwrap()
}

/// Makes a store with some blocks, on a device whose reads are slow, and do not hold up writes.
fn slow() -> TempDir {
    let rig = Rig::new();
    let save = begin_save(&rig.client(), STORED, 0);
    save.move_all().unwrap();
    save.commit().unwrap();
    let dir = rig.close();
    let path = dir.path().join("store/home.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest["speed"] = json!({"read": 1e6, "write": 1e9, "latency_us": 0, "mixed": 2.0});
    fs::write(&path, manifest.to_string()).unwrap();
    dir
}

/// Prepares to save keys from the blocks from `first` on.
fn begin_save(client: &Client, range: std::ops::Range<u32>, first: u32) -> Request {
    let keys = keys(range);
    let from = blocks(first, keys.len());
    for (key, block) in keys.iter().zip(&from) {
        client.write(*block, &bytes(*key)).unwrap();
    }
    client.allocate(space(client), &keys, &from).unwrap()
}

fn start_all(request: &Request) {
    request.start_all(0..SHAPE.layers).unwrap();
}

fn has_ended(request: &Request, layer: Layer) -> bool {
    request.poll(layer).unwrap()
}

fn is_over(request: &Request) -> bool {
    layers().all(|layer| has_ended(request, layer))
}

#[test]
fn loads_go_before_the_saves_of_another_client() {
    let rig = Rig::paced(slow());
    let (saver, loader) = (rig.client(), rig.client());
    let found = loader.lookup(space(&loader), &keys(STORED)).unwrap();
    let load = |first: u32| loader.retrieve(&found, first as usize, &blocks(first, 4)).unwrap();
    let (first, second) = (load(0), load(4));
    start_all(&first);
    let saves: Vec<Request> =
        (0..8).map(|at| begin_save(&saver, 10 + 2 * at..12 + 2 * at, 2 * at)).collect();
    saves.iter().for_each(start_all);
    start_all(&second);
    // On a machine that was busy, the second load may have come when saves had begun.
    let is_behind = !is_over(&first);
    until("the loads have ended", || {
        let saved = saves.iter().any(|save| layers().any(|layer| has_ended(save, layer)));
        let loaded = is_over(&first) && (is_over(&second) || !is_behind);
        assert!(loaded || !saved, "a save has ended before a load");
        loaded
    });
    for save in saves {
        assert_eq!(save.commit().unwrap().written, 2);
    }
    drop((first, second, found));
    for (key, block) in keys(STORED).iter().zip(blocks(0, 8)) {
        assert!(loader.read(block).unwrap() == bytes(*key), "wrong bytes in block {block}");
    }
    assert_eq!(loader.load(space(&loader), &keys(10..26), &blocks(0, 16)).unwrap(), [true; 16]);
    for (key, block) in keys(10..26).iter().zip(blocks(0, 16)) {
        assert!(loader.read(block).unwrap() == bytes(*key), "wrong bytes in block {block}");
    }
    let status = rig.status();
    assert_eq!((status.files_writing, status.files_referenced, rig.waiting()), (0, 0, 0));
    assert_eq!(status.refused_calls, 0);
}

/// Calls `act` while a client loads without a pause, so that no save has its turn before the end of
/// `LOADS` loads.
fn under_loads(rig: &Rig, act: impl FnOnce()) {
    let client = rig.client();
    let found = client.lookup(space(&client), &keys(STORED)).unwrap();
    let load = |first| {
        let load = client.retrieve(&found, 0, &blocks(first, 8)).unwrap();
        start_all(&load);
        load
    };
    let (load, mut last) = (&load, load(0));
    let (done, is_done) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let loader = scope.spawn(move || {
            for at in 0..LOADS {
                if is_done.try_recv().is_ok() {
                    break;
                }
                let next = load(8 * (1 - at % 2));
                layers().for_each(|layer| last.wait(layer).unwrap());
                last = next;
            }
        });
        act();
        assert!(!loader.is_finished(), "saves waited for the end of all loads");
        done.send(()).unwrap();
    });
}

#[test]
fn a_save_starts_under_loads_without_a_pause_when_its_client_waits() {
    let rig = Rig::paced(slow());
    let client = rig.client();
    let engine = Engine::new(&rig, "one", 1);
    assert!(engine.ranks[0].0.is_paced());
    under_loads(&rig, || {
        for number in 1..3 {
            let save = begin_save(&client, 100 * number..100 * number + 2, 0);
            start_all(&save);
            if number == 1 {
                layers().for_each(|layer| save.wait(layer).unwrap());
            }
            assert_eq!(save.commit().unwrap().written, 2);
        }
        // It ends its job without a wait for the layers.
        engine.store(&keys(500..504));
    });
}

#[test]
fn saves_that_are_needed_do_not_wait_for_loads() {
    let rig = Rig::held(slow());
    let (client, loader) = (rig.client(), rig.client());
    let found = loader.lookup(space(&loader), &keys(STORED)).unwrap();
    let load = loader.retrieve(&found, 0, &blocks(0, 8)).unwrap();
    start_all(&load);
    let begun = |first: u32| {
        let save = begin_save(&client, first..first + 2, 0);
        start_all(&save);
        assert_eq!(rig.waiting(), 6);
        save
    };
    let engine = Engine::new(&rig, "one", 1);
    let (room, job) = engine.begin_store(&keys(20..22));
    assert_eq!(rig.waiting(), 6);
    job.hurry().unwrap();
    assert_eq!(rig.waiting(), 3, "of the load");
    let save = begun(10);
    save.hurry().unwrap();
    assert_eq!(rig.waiting(), 3, "of the load");
    let other = begun(12);
    // Half of the requests that a client may have are not there for saves that wait.
    let space = space(&client);
    let one = || client.allocate(space, &[], &[]).unwrap();
    let more: Vec<Request> = (0..126).map(|_| one()).collect();
    assert_eq!(rig.waiting(), 6);
    let last = one();
    assert_eq!(rig.waiting(), 3, "of the load");
    // Neither waits any save that begins now.
    let later = begin_save(&client, 14..16, 0);
    start_all(&later);
    assert_eq!(rig.waiting(), 3);
    drop((more, last));
    for save in [save, other, later] {
        assert_eq!(save.commit().unwrap().written, 2);
    }
    assert_eq!(engine.end(0, &job), None);
    drop((job, room));
    layers().for_each(|layer| load.wait(layer).unwrap());
    assert_eq!(rig.status().refused_calls, 0);
}

#[test]
fn what_waits_is_counted_and_dropped_with_its_client() {
    let rig = Rig::held(slow());
    let free = rig.status().files_free;
    let (client, other) = (rig.client(), rig.client());
    let (save, kept) = (begin_save(&client, 10..14, 0), begin_save(&other, 20..22, 0));
    start_all(&save);
    start_all(&kept);
    let found = client.lookup(space(&client), &keys(STORED)).unwrap();
    let load = client.retrieve(&found, 0, &blocks(8, 8)).unwrap();
    start_all(&load);
    assert_eq!(rig.waiting(), 9);
    let written = rig.plane.stats().unwrap().stored_bytes;
    drop(save);
    assert_eq!((rig.waiting(), rig.status().files_writing), (6, 2));
    // As when its process is killed; the other client has lost nothing.
    client.close().unwrap();
    let status = rig.status();
    assert_eq!((status.sessions.len(), status.files_referenced, rig.waiting()), (1, 0, 3));
    assert_eq!(rig.plane.stats().unwrap().stored_bytes, written, "it was of no use any more");
    assert_eq!(kept.commit().unwrap().written, 2);
    assert_eq!((rig.waiting(), rig.status().files_free), (0, free - 2));
    rig.plane.advance().unwrap();
    assert_eq!(rig.plane.with_scheduler(|it| it.pending()).unwrap(), Some(0));
    drop((load, found));
}

#[test]
fn a_limit_counts_layers_that_wait() {
    let uid = rustix::process::geteuid().as_raw();
    let bandwidth = BTreeMap::from([(uid, NonZeroU64::new(2 << 10).unwrap())]);
    let rig = Rig::limited(TempDir::new().unwrap(), 4, bandwidth);
    pace(&rig.plane).unwrap();
    let client = rig.client();
    let save = begin_save(&client, 0..8, 0);
    save.start(Layer(0)).unwrap();
    // The layer has not moved, and the next one has its turn after half a minute.
    assert_eq!(kind(save.start(Layer(1)).unwrap_err()), RefusalKind::Limit);
    assert_eq!(rig.waiting(), 1);
}
