//! Engines of several processes: schedulers that find and reserve, and ranks that move.

use std::{collections::BTreeMap, os::fd::OwnedFd};

use nvme_emu::{FaultAction, FaultRule, FaultWhen};
use objstore::{BlockId, BlockKey, Direction, KvShape, Namespace, Outcome};
use ripieno_serve::{Finder, Mover, PoolLayout, RefusalKind, ServeError};
use ripieno_testkit::{blocks, keys, pattern, set_faults, until};
use rustix::fs::{MemfdFlags, SealFlags};
use serde_json::json;
use tempfile::TempDir;

use crate::{
    control::{exchange, request},
    rig::{Rig, SHAPE, kind},
};

const BLOCKS: u32 = 16;
/// Opcode of a flush.
const FLUSH: u8 = 0;
/// Status of a write that failed.
const WRITE_FAULT: u16 = 0x280;

/// Returns a server for two engines of several parts.
fn rig() -> Rig {
    on(TempDir::new().unwrap())
}

fn on(dir: TempDir) -> Rig {
    Rig::limited(dir, 8, BTreeMap::new())
}

/// Memory of a rank, as an engine in another language makes it.
fn memory() -> (OwnedFd, PoolLayout) {
    let file = rustix::fs::memfd_create("rank", MemfdFlags::ALLOW_SEALING).unwrap();
    let bytes = SHAPE.block_bytes() * u64::from(BLOCKS);
    rustix::fs::ftruncate(&file, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    (file, PoolLayout::contiguous(&SHAPE, BLOCKS))
}

/// A scheduler with its ranks.
pub struct Engine {
    finder: Finder,
    space: usize,
    pub ranks: Vec<(Mover, OwnedFd)>,
}

impl Engine {
    pub fn new(rig: &Rig, name: &str, ranks: u32) -> Self {
        // Ranks come first, as vLLM starts them.
        let rank = |rank| {
            let (file, layout) = memory();
            let own = file.try_clone().unwrap();
            let part = (name.to_owned(), ranks, rank);
            (Mover::connect(rig.socket(), SHAPE, part, layout, file).unwrap(), own)
        };
        let ranks: Vec<_> = (0..ranks).map(rank).collect();
        let count = ranks.len() as u32;
        let finder = Finder::connect(rig.socket(), SHAPE, name.to_owned(), count).unwrap();
        let space = finder.namespace(&Namespace::default()).unwrap();
        Self { finder, space, ranks }
    }

    /// Writes or checks a block of a rank through its file.
    fn object(&self, rank: usize, block: BlockId, row: u32) -> u64 {
        let layout = PoolLayout::contiguous(&SHAPE, BLOCKS);
        assert!(rank < self.ranks.len());
        layout.rows[row as usize] + u64::from(block.0) * layout.block_stride
    }

    fn put(&self, rank: usize, block: BlockId, bytes: &[u8]) {
        for (row, object) in (0..).zip(bytes.chunks(SHAPE.object_bytes as usize)) {
            let at = self.object(rank, block, row);
            assert_eq!(rustix::io::pwrite(&self.ranks[rank].1, object, at), Ok(object.len()));
        }
    }

    fn get(&self, rank: usize, block: BlockId) -> Vec<u8> {
        let mut bytes = vec![0; SHAPE.block_bytes() as usize];
        for (row, object) in (0..).zip(bytes.chunks_mut(SHAPE.object_bytes as usize)) {
            let at = self.object(rank, block, row);
            assert_eq!(rustix::io::pread(&self.ranks[rank].1, &mut *object, at), Ok(object.len()));
        }
        bytes
    }

    /// Starts all layers on a rank, and returns the job.
    fn start(&self, rank: usize, direction: Direction, places: &[u64]) -> u64 {
        let mover = &self.ranks[rank].0;
        let job = mover.begin(direction, places, blocks(0, places.len())).unwrap();
        mover.start(job, 0..SHAPE.layers).unwrap();
        job
    }

    /// Moves all layers on a rank, and returns the error.
    fn go(&self, rank: usize, direction: Direction, places: &[u64]) -> Option<String> {
        let job = self.start(rank, direction, places);
        self.ranks[rank].0.end(&[job]).unwrap().remove(0).error
    }

    /// Starts to store blocks on the first rank, and returns its job.
    pub fn begin_store(&self, keys: &[BlockKey]) -> u64 {
        let room = self.finder.reserve(self.space, keys.to_vec()).unwrap();
        self.start(0, Direction::Write, &room.places)
    }

    /// Stores blocks on all ranks.
    pub fn store(&self, keys: &[BlockKey]) {
        let room = self.finder.reserve(self.space, keys.to_vec()).unwrap();
        assert_eq!(room.accepted as usize, keys.len());
        for rank in 0..self.ranks.len() {
            for (block, position) in blocks(0, room.positions.len()).iter().zip(&room.positions) {
                self.put(rank, *block, &bytes(keys[*position as usize], rank));
            }
            assert_eq!(self.go(rank, Direction::Write, &room.places), None);
            let is_last = rank + 1 == self.ranks.len();
            let reported = self.finder.report(room.number, rank as u32, true).unwrap();
            assert_eq!(reported, is_last.then_some(true));
        }
        assert!(self.finder.publish(room.number, true).unwrap());
    }

    /// Loads blocks on all ranks, and returns how many were found with their own bytes.
    fn load(&self, keys: &[BlockKey]) -> usize {
        let found = self.finder.acquire(self.space, keys.to_vec()).unwrap();
        assert_eq!(self.finder.look_up(self.space, keys.to_vec()).unwrap(), found.places.len());
        for rank in 0..self.ranks.len() {
            assert_eq!(self.go(rank, Direction::Read, &found.places), None);
            for (block, key) in blocks(0, found.places.len()).iter().zip(keys) {
                assert!(self.get(rank, *block) == bytes(*key, rank), "wrong bytes");
            }
        }
        self.finder.release(found.number);
        found.places.len()
    }
}

/// Returns the contents of a block on a rank.
fn bytes(key: BlockKey, rank: usize) -> Vec<u8> {
    pattern(SHAPE.block_bytes() as usize, (key.seed() as u64).wrapping_add(rank as u64))
}

#[test]
fn engines_share_blocks_of_all_ranks() {
    let rig = rig();
    for ranks in [1, 2] {
        let keys = keys(0..6);
        let one = Engine::new(&rig, "one", ranks);
        let other = Engine::new(&rig, "other", ranks);
        one.store(&keys[..4]);
        assert_eq!(other.load(&keys), 4, "{ranks} ranks");
        other.store(&keys);
        assert_eq!(one.load(&keys), 6);
        let asked = vec![keys[5], BlockKey([9; 32]), keys[0]];
        assert_eq!(one.finder.are_stored(one.space, asked).unwrap(), [1, 0, 1]);
        assert_eq!(one.finder.usage(one.space).unwrap().stored, 6);
        let asked = vec![keys[5], BlockKey([9; 32])];
        assert_eq!(one.finder.remove(one.space, asked).unwrap(), 1);
        assert_eq!(other.load(&keys), 5);
        let status = rig.status();
        assert_eq!(status.sessions.len() as u32, 2 * (ranks + 1));
        let held = |it: &ripieno_serve::control::SessionStatus| it.prefixes + it.reservations;
        assert_eq!(status.sessions.iter().map(held).sum::<u32>(), 0, "all was released");
        drop((one, other));
        let status = rig.settled();
        assert_eq!((status.files_writing, status.files_referenced), (0, 0));
        assert_eq!(status.refused_calls, 0, "ends are said once");
    }
    rig.close();
}

#[test]
fn places_that_an_engine_was_not_given_are_refused_and_counted() {
    let rig = rig();
    let (one, other) = (Engine::new(&rig, "one", 1), Engine::new(&rig, "other", 1));
    let keys = keys(0..4);
    one.store(&keys[..2]);
    let found = one.finder.acquire(one.space, keys.clone()).unwrap();
    let room = one.finder.reserve(one.space, keys.clone()).unwrap();
    let mut refused = 0;
    let mut refuse = |engine: &Engine, direction, places: &[u64]| {
        let begun = engine.ranks[0].0.begin(direction, places, blocks(0, places.len()));
        assert_eq!(kind(begun.unwrap_err()), RefusalKind::Argument);
        refused += 1;
        assert_eq!(rig.status().refused_calls, refused);
    };
    // Another engine's, of both kinds; one kind for the other; beyond the end; of nobody.
    refuse(&other, Direction::Read, &found.places);
    refuse(&other, Direction::Write, &room.places);
    refuse(&one, Direction::Write, &found.places);
    refuse(&one, Direction::Read, &room.places);
    refuse(&one, Direction::Read, &[found.places[0] + 2]);
    refuse(&one, Direction::Write, &[room.places[0] - 2]);
    refuse(&one, Direction::Read, &[7 << 16]);
    // A place is filled once, also if the first attempt has failed.
    let job = one.ranks[0].0.begin(Direction::Write, &room.places[..1], blocks(0, 1)).unwrap();
    refuse(&one, Direction::Write, &room.places);
    assert!(one.ranks[0].0.end(&[job]).unwrap()[0].error.is_some(), "no layer was started");
    refuse(&one, Direction::Write, &room.places[..1]);
    // Only a part that was filled is published, whatever the scheduler says.
    assert_eq!(one.finder.report(room.number, 0, true).unwrap(), Some(false));
    assert_eq!(other.load(&keys), 2);
    let room = one.finder.reserve(one.space, keys.clone()).unwrap();
    assert_eq!(kind(one.finder.publish(room.number, false).unwrap_err()), RefusalKind::Argument);
    one.finder.release(room.number);
    one.finder.release(found.number);
    // Released ones are unknown.
    let begun = one.ranks[0].0.begin(Direction::Read, &found.places, blocks(0, 2));
    assert_eq!(kind(begun.unwrap_err()), RefusalKind::Argument);
    assert_eq!(rig.status().refused_calls, refused + 2);
    one.store(&keys);
    drop((one, other));
    let status = rig.settled();
    assert_eq!((status.files_writing, status.files_referenced), (0, 0));
    rig.close();
}

#[test]
fn a_part_of_an_engine_is_one_client() {
    let rig = rig();
    let one = Engine::new(&rig, "one", 2);
    let (file, layout) = memory();
    for (ranks, rank, wanted) in
        [(2, 1, RefusalKind::Limit), (3, 2, RefusalKind::Argument), (2, 2, RefusalKind::Argument)]
    {
        let part = ("one".to_owned(), ranks, rank);
        let file = file.try_clone().unwrap();
        let joined = Mover::connect(rig.socket(), SHAPE, part, layout.clone(), file);
        assert_eq!(kind(joined.unwrap_err()), wanted, "{ranks} {rank}");
    }
    let shape = KvShape { object_bytes: 512, ..SHAPE };
    let part = ("small".to_owned(), 1, 0);
    let joined = Mover::connect(rig.socket(), shape, part, layout, file);
    assert!(matches!(joined, Err(ServeError::Argument { given: 512, .. })), "{joined:?}");
    // A part that has gone may come again.
    drop(one);
    rig.settled();
    Engine::new(&rig, "one", 3).store(&keys(0..2));
    rig.close();
}

#[test]
fn a_rank_that_fails_or_a_scheduler_that_goes_leaves_nothing() {
    let rig = rig();
    let free = rig.status().files_free;
    let one = Engine::new(&rig, "one", 2);
    let keys = keys(0..4);
    let room = one.finder.reserve(one.space, keys.clone()).unwrap();
    assert_eq!(one.go(0, Direction::Write, &room.places), None);
    assert_eq!(one.finder.report(room.number, 0, true).unwrap(), None);
    assert_eq!(one.finder.report(room.number, 1, false).unwrap(), Some(false));
    assert_eq!(one.load(&keys), 0);
    assert_eq!(rig.status().files_free, free);
    // The scheduler goes while a rank stores.
    let room = one.finder.reserve(one.space, keys.clone()).unwrap();
    let mover = &one.ranks[0].0;
    let job = mover.begin(Direction::Write, &room.places, blocks(0, 4)).unwrap();
    mover.start(job, 0..1).unwrap();
    let Engine { finder, ranks, .. } = one;
    drop(finder);
    until("the scheduler's session ends", || rig.status().sessions.len() <= 2);
    assert_eq!(rig.status().files_writing, 4, "a request writes to those of its rank");
    drop(ranks);
    let status = rig.settled();
    assert_eq!((status.files_writing, status.files_free), (0, free));
    rig.close();
}

#[test]
fn an_engine_goes_on_without_its_server_and_finds_commits_again() {
    let rig = rig();
    let (one, idle) = (Engine::new(&rig, "one", 1), Engine::new(&rig, "idle", 1));
    let (keys, more) = (keys(0..4), keys(4..6));
    one.store(&keys);
    let found = one.finder.acquire(one.space, keys.clone()).unwrap();
    let room = one.finder.reserve(one.space, more.clone()).unwrap();
    let mover = &one.ranks[0].0;
    let loading = mover.begin(Direction::Read, &found.places, blocks(0, 4)).unwrap();
    mover.start(loading, 0..1).unwrap();
    let dir = rig.close();
    one.put(0, BlockId(3), &vec![0xEE; SHAPE.block_bytes() as usize]);
    let report = mover.end(&[loading]).unwrap().remove(0);
    assert!(report.error.is_some_and(|why| why.contains("lost")));
    assert_eq!(one.get(0, BlockId(3)), vec![0; SHAPE.block_bytes() as usize], "new pages");
    assert_eq!(one.load(&keys), 0);
    let none = one.finder.reserve(one.space, more.clone()).unwrap();
    assert_eq!((none.accepted, none.places.len()), (0, 0));
    assert_eq!(one.finder.report(room.number, 0, true).unwrap(), Some(false));
    assert!(!one.finder.publish(room.number, false).unwrap());
    one.finder.sync().unwrap();
    let begun = mover.begin(Direction::Read, &found.places, blocks(0, 4));
    assert!(matches!(begun, Err(ServeError::Lost { .. })), "{begun:?}");

    let rig = on(dir);
    until("it has connected again", || one.load(&keys) == 4);
    assert_eq!(idle.load(&keys), 4, "it has not noticed");
    for places in [&found.places, &room.places] {
        let begun = mover.begin(Direction::Read, places, blocks(0, places.len()));
        assert_eq!(kind(begun.unwrap_err()), RefusalKind::Argument, "they are of the old server");
    }
    one.finder.release(found.number);
    one.store(&more);
    drop((one, idle));
    let status = rig.settled();
    assert_eq!((status.files_writing, status.files_referenced, status.refused_calls), (0, 0, 2));
    rig.close();
}

/// Evicts all that can be evicted of the namespaces of all ranks. Returns the blocks that are left.
fn left(rig: &Rig, engine: &Engine, keys: &[BlockKey]) -> usize {
    for space in rig.status().namespaces {
        for bytes in [json!(0), json!(null)] {
            let quota = json!({ "bytes": bytes });
            let path = format!("/quota/{}", space.namespace);
            rig.control().ask("PUT", &path, Some(&quota)).unwrap();
        }
    }
    engine.finder.look_up(engine.space, keys.to_vec()).unwrap()
}

#[test]
fn pins_of_an_engine_end_with_it_and_with_the_server() {
    let rig = rig();
    let (one, other) = (Engine::new(&rig, "one", 2), Engine::new(&rig, "other", 2));
    let keys = keys(0..6);
    one.store(&keys[..4]);
    let pin = |engine: &Engine, count: usize, wait| {
        let answer = engine.finder.pin(engine.space, keys[..count].to_vec(), 3600, None, wait);
        answer.unwrap()
    };
    // On both ranks, and the later blocks with their commit.
    let made = pin(&one, 6, true);
    assert_eq!((made.outcome, made.pin.map(|pin| pin.blocks)), (Outcome::Deferred, Some(4)));
    assert_eq!(left(&rig, &one, &keys), 4);
    one.store(&keys);
    assert_eq!(left(&rig, &one, &keys), 6);
    assert!(!other.finder.unpin(Some(1)).unwrap(), "it is not this engine's");
    assert!(one.finder.unpin(Some(1)).unwrap());
    assert!(!one.finder.unpin(Some(1)).unwrap());
    assert_eq!((left(&rig, &one, &keys), rig.status().files_referenced), (0, 0));
    // One that goes.
    one.store(&keys);
    assert_eq!(pin(&other, 6, false).outcome, Outcome::Accepted);
    assert_eq!((left(&rig, &one, &keys), rig.status().pins), (6, 1));
    drop(other);
    until("its pin ends with it", || rig.status().pins == 0);
    // The server goes, and no list of pins stays behind.
    assert_eq!(pin(&one, 2, false).pin.map(|pin| pin.pin), Some(3));
    let dir = rig.close();
    let away = pin(&one, 2, false);
    assert_eq!((away.outcome, away.pin), (Outcome::Missing, None));
    assert!(!one.finder.unpin(Some(3)).unwrap());
    let rig = on(dir);
    until("it has connected again", || one.load(&keys) == 6);
    assert!(!one.finder.unpin(Some(3)).unwrap(), "it is the old server's");
    assert_eq!((left(&rig, &one, &keys), rig.status().pins), (0, 0));
    one.store(&keys);
    assert_eq!(pin(&one, 6, false).outcome, Outcome::Accepted);
    assert_eq!(left(&rig, &one, &keys), 6);
    // Other weights: the pins go with the blocks of the old ones.
    one.finder.renew(one.space, [7; 16]).unwrap();
    assert_eq!((rig.status().pins, rig.status().files_referenced), (0, 0));
    drop(one);
    rig.settled();
    rig.close();
}

#[test]
fn an_engine_with_other_weights_shares_no_more() {
    let rig = rig();
    let (one, other) = (Engine::new(&rig, "one", 1), Engine::new(&rig, "other", 1));
    let keys = keys(0..4);
    one.store(&keys);
    one.finder.renew(one.space, [7; 16]).unwrap();
    assert_eq!((one.load(&keys), other.load(&keys)), (0, 4));
    one.store(&keys);
    one.finder.renew(one.space, [8; 16]).unwrap();
    assert_eq!((one.load(&keys), other.load(&keys)), (0, 4));
    assert_eq!(rig.status().namespaces.len(), 2, "the shared and a private one");
    // A server has no more namespaces for it: that is an error now, and not of a lookup later.
    let named = |salt: u8| Namespace { tenant_salt: vec![salt], ..Namespace::default() };
    let spaces: Vec<_> = (2..64).map(|salt| one.finder.namespace(&named(salt)).unwrap()).collect();
    assert_eq!(kind(one.finder.renew(spaces[0], [9; 16]).unwrap_err()), RefusalKind::Limit);
    assert_eq!(kind(one.finder.namespace(&named(64)).unwrap_err()), RefusalKind::Limit);
    rig.close();
}

/// Returns true if the server's metrics say that all is well.
fn is_healthy(rig: &Rig) -> bool {
    let (_, _, text) = exchange(&rig.socket(), request("GET", "/metrics", "").as_bytes());
    text.contains("\nripieno_healthy 1\n")
}

/// The flush of a rank and that of a client that commits are one: after it has failed, both are
/// refused, and the drives are not asked again.
#[test]
fn after_a_failed_flush_of_any_client_nothing_of_any_client_is_acknowledged() {
    for rank_fails in [true, false] {
        let rig = rig();
        let (one, client) = (Engine::new(&rig, "one", 1), rig.client());
        let space = client.namespace(&Namespace::default()).unwrap();
        one.store(&keys(0..2));
        // All of these have begun before.
        let filled = one.finder.reserve(one.space, keys(10..12)).unwrap();
        assert_eq!(one.go(0, Direction::Write, &filled.places), None);
        assert_eq!(one.finder.report(filled.number, 0, true).unwrap(), Some(true));
        let job = one.begin_store(&keys(20..22));
        let [first, second] = [30, 40].map(|first| {
            let save = client.allocate(space, &keys(first..first + 2), &blocks(0, 2)).unwrap();
            save.move_all().unwrap();
            save
        });
        assert!(is_healthy(&rig));
        let when = FaultWhen { opcode: Some(FLUSH), admin: Some(false), ..FaultWhen::default() };
        let fault = FaultAction::Status { code: WRITE_FAULT, dnr: false };
        set_faults(&rig.emus, Some(FaultRule::new(when, fault).limit(1)));
        let flushes = || rig.emus.iter().map(|emu| emu.counters().flushes).sum::<u64>();
        let end = || one.ranks[0].0.end(&[job]).unwrap().remove(0).error;
        let commit = |save: ripieno_serve::Request| kind(save.commit().unwrap_err());
        if rank_fails {
            assert!(end().is_some_and(|why| why.contains("Write Fault")));
        } else {
            assert_eq!(commit(first), RefusalKind::ReadOnly);
        }
        let before = flushes();
        assert_eq!(commit(second), RefusalKind::ReadOnly);
        if !rank_fails {
            assert!(end().is_some_and(|why| why.contains("Write Fault")));
        }
        // A scheduler of an engine goes on without the store.
        assert!(!one.finder.publish(filled.number, true).unwrap());
        assert_eq!(kind(client.sync().unwrap_err()), RefusalKind::ReadOnly);
        let refused = client.allocate(space, &keys(50..51), &blocks(0, 1)).map(drop).unwrap_err();
        assert_eq!(kind(refused), RefusalKind::ReadOnly);
        assert_eq!(flushes(), before, "a drive was asked again");
        assert!(!is_healthy(&rig));
        for range in [10..12, 20..22, 30..32, 40..42] {
            assert_eq!(client.peek(space, &keys(range)).unwrap(), 0);
        }
        assert_eq!(one.load(&keys(0..2)), 2, "what is stored is served");
        drop((one, client));
        assert!(rig.end().1.is_err());
    }
}
