//! Engines of several processes: schedulers that find and reserve, and ranks that move.

use std::{collections::BTreeMap, os::fd::OwnedFd};

use nvme_emu::{FaultAction, FaultRule, FaultWhen};
use objstore::{BlockId, BlockKey, Direction, Namespace, Outcome};
use ripieno_serve::{
    Client, PoolLayout, RefusalKind, Request, Reservation, ServeError, SpaceId, protocol::Member,
};
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
pub fn memory() -> (OwnedFd, PoolLayout) {
    let file = rustix::fs::memfd_create("rank", MemfdFlags::ALLOW_SEALING).unwrap();
    let bytes = SHAPE.block_bytes() * u64::from(BLOCKS);
    rustix::fs::ftruncate(&file, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    (file, PoolLayout::contiguous(&SHAPE, BLOCKS))
}

/// Connects as the scheduler of an engine, or as a rank with this memory.
fn join(
    rig: &Rig,
    engine: &str,
    ranks: u32,
    rank: Option<u32>,
    pool: Option<(PoolLayout, OwnedFd)>,
) -> Result<Client, ServeError> {
    join_copy(rig, engine, ranks, (rank, 0), pool)
}

/// The same, as a copy of a rank.
fn join_copy(
    rig: &Rig,
    engine: &str,
    ranks: u32,
    (rank, copy): (Option<u32>, u32),
    pool: Option<(PoolLayout, OwnedFd)>,
) -> Result<Client, ServeError> {
    let member = Member { engine: engine.to_owned(), ranks, rank, copy };
    Client::join(rig.socket(), SHAPE, Some(member), pool)
}

/// A scheduler with its ranks.
pub struct Engine {
    scheduler: Client,
    space: SpaceId,
    pub ranks: Vec<(Client, OwnedFd)>,
}

impl Engine {
    pub fn new(rig: &Rig, name: &str, ranks: u32) -> Self {
        // Ranks come first, as vLLM starts them.
        let rank = |rank| {
            let (file, layout) = memory();
            let own = file.try_clone().unwrap();
            let client = join(rig, name, ranks, Some(rank), Some((layout, file))).unwrap();
            client.check_pages().unwrap();
            (client, own)
        };
        let all = (0..ranks).map(rank).collect();
        let scheduler = join(rig, name, ranks, None, None).unwrap();
        let space = scheduler.namespace(&Namespace::default()).unwrap();
        Self { scheduler, space, ranks: all }
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

    fn begin(
        &self,
        rank: usize,
        direction: Direction,
        places: &[u64],
    ) -> Result<Request, ServeError> {
        self.ranks[rank].0.begin(direction, places, blocks(0, places.len()))
    }

    /// Starts all layers on a rank.
    fn start(&self, rank: usize, direction: Direction, places: &[u64]) -> Request {
        let job = self.begin(rank, direction, places).unwrap();
        job.start_all(0..SHAPE.layers).unwrap();
        job
    }

    /// Ends a request of a rank, and returns the error.
    pub fn end(&self, rank: usize, job: &Request) -> Option<String> {
        self.ranks[rank].0.end(&[job]).unwrap().remove(0).error
    }

    /// Moves all layers on a rank, and returns the error.
    fn go(&self, rank: usize, direction: Direction, places: &[u64]) -> Option<String> {
        self.end(rank, &self.start(rank, direction, places))
    }

    fn reserve(&self, keys: &[BlockKey]) -> Reservation {
        self.scheduler.reserve(self.space, keys).unwrap()
    }

    /// Starts to store blocks on the first rank.
    pub fn begin_store(&self, keys: &[BlockKey]) -> (Reservation, Request) {
        let room = self.reserve(keys);
        let job = self.start(0, Direction::Write, &room.places());
        (room, job)
    }

    /// Stores blocks on all ranks.
    pub fn store(&self, keys: &[BlockKey]) {
        let room = self.reserve(keys);
        assert_eq!(room.accepted() as usize, keys.len());
        let (places, positions) = (room.places(), room.positions());
        for rank in 0..self.ranks.len() {
            for (block, position) in blocks(0, positions.len()).iter().zip(positions) {
                self.put(rank, *block, &bytes(keys[*position as usize], rank));
            }
            assert_eq!(self.go(rank, Direction::Write, &places), None);
            let is_last = rank + 1 == self.ranks.len();
            let reported = room.report(rank as u32, true).unwrap();
            assert_eq!(reported, is_last.then_some(true));
        }
        room.publish(true).unwrap();
    }

    /// Loads blocks on all ranks, and returns how many were found with their own bytes.
    fn load(&self, keys: &[BlockKey]) -> usize {
        self.try_load(keys).unwrap()
    }

    /// Same as [`Engine::load`]; fails while the server is away.
    fn try_load(&self, keys: &[BlockKey]) -> Result<usize, ServeError> {
        let found = self.scheduler.lookup(self.space, keys)?;
        assert_eq!(self.scheduler.peek(self.space, keys)?, found.len());
        if found.is_empty() {
            return Ok(0);
        }
        for rank in 0..self.ranks.len() {
            let job = self.begin(rank, Direction::Read, &found.places())?;
            job.start_all(0..SHAPE.layers)?;
            assert_eq!(self.end(rank, &job), None);
            for (block, key) in blocks(0, found.len()).iter().zip(keys) {
                assert!(self.get(rank, *block) == bytes(*key, rank), "wrong bytes");
            }
        }
        Ok(found.len())
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
        let asked = [keys[5], BlockKey([9; 32]), keys[0]];
        assert_eq!(one.scheduler.are_stored(one.space, &asked).unwrap(), [true, false, true]);
        assert_eq!(one.scheduler.usage(one.space).unwrap().stored, 6);
        assert_eq!(one.scheduler.remove(one.space, &asked[..2]).unwrap(), 1);
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
fn copies_of_a_rank_load_what_one_has_stored() {
    let rig = rig();
    let mut engine = Engine::new(&rig, "engine", 1);
    let other = Engine::new(&rig, "other", 1);
    let copy = |number| {
        let (file, layout) = memory();
        let own = file.try_clone().unwrap();
        let part = (Some(0), number);
        join_copy(&rig, "engine", 1, part, Some((layout, file))).map(|client| (client, own))
    };
    let keys = keys(0..4);
    engine.store(&keys);
    engine.ranks.push(copy(1).unwrap());
    engine.ranks.push(copy(2).unwrap());
    let found = engine.scheduler.lookup(engine.space, &keys).unwrap();
    for client in 0..3 {
        assert_eq!(engine.go(client, Direction::Read, &found.places()), None);
        for (block, key) in blocks(0, found.len()).iter().zip(&keys) {
            assert!(engine.get(client, *block) == bytes(*key, 0), "wrong bytes");
        }
    }
    // Others find them, too: they are those of a rank by itself.
    assert_eq!(other.load(&keys), 4);
    for (number, expected) in [(2, RefusalKind::Limit), (64, RefusalKind::Argument)] {
        let refused = copy(number).unwrap_err();
        assert!(number != 2 || refused.to_string().contains("has a copy 2 of rank 0 already"));
        assert_eq!(kind(refused), expected);
    }
    let scheduler = join_copy(&rig, "engine", 1, (None, 1), None);
    assert_eq!(kind(scheduler.unwrap_err()), RefusalKind::Argument);
    drop((found, engine, other));
    rig.close();
}

#[test]
fn places_that_an_engine_was_not_given_are_refused_and_counted() {
    let rig = rig();
    let (one, other) = (Engine::new(&rig, "one", 1), Engine::new(&rig, "other", 1));
    let keys = keys(0..4);
    one.store(&keys[..2]);
    let found = one.scheduler.lookup(one.space, &keys).unwrap();
    let room = one.reserve(&keys);
    let (from, to) = (found.places(), room.places());
    let mut refused = 0;
    let mut refuse = |engine: &Engine, direction, places: &[u64]| {
        let begun = engine.begin(0, direction, places);
        assert_eq!(kind(begun.unwrap_err()), RefusalKind::Argument);
        refused += 1;
        assert_eq!(rig.status().refused_calls, refused);
    };
    // Another engine's, of both kinds; one kind for the other; beyond the end; of nobody.
    refuse(&other, Direction::Read, &from);
    refuse(&other, Direction::Write, &to);
    refuse(&one, Direction::Write, &from);
    refuse(&one, Direction::Read, &to);
    refuse(&one, Direction::Read, &[from[0] + 2]);
    refuse(&one, Direction::Write, &[to[0] - 2]);
    refuse(&one, Direction::Read, &[7 << 16]);
    // A place is filled once, also if the first attempt has failed.
    let job = one.begin(0, Direction::Write, &to[..1]).unwrap();
    refuse(&one, Direction::Write, &to);
    assert!(one.end(0, &job).is_some(), "no layer was started");
    refuse(&one, Direction::Write, &to[..1]);
    drop(job);
    // Only a part that was filled is published, whatever the scheduler says.
    assert_eq!(room.report(0, true).unwrap(), Some(false));
    assert_eq!(other.load(&keys), 2);
    drop(room);
    let room = one.reserve(&keys);
    assert_eq!(kind(room.publish(false).unwrap_err()), RefusalKind::Argument);
    drop((room, found));
    // Released ones are unknown.
    let begun = one.begin(0, Direction::Read, &from);
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
        let pool = (layout.clone(), file.try_clone().unwrap());
        let joined = join(&rig, "one", ranks, Some(rank), Some(pool));
        assert_eq!(kind(joined.unwrap_err()), wanted, "{ranks} {rank}");
    }
    let rows = layout.rows.iter().map(|row| row + 512).collect();
    let layout = PoolLayout { rows, blocks: BLOCKS - 1, ..layout };
    let joined = join(&rig, "apart", 1, Some(0), Some((layout, file))).unwrap();
    let error = joined.check_pages().unwrap_err();
    assert!(matches!(error, ServeError::Argument { given: 512, .. }), "{error}");
    drop(joined);
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
    let room = one.reserve(&keys);
    assert_eq!(one.go(0, Direction::Write, &room.places()), None);
    assert_eq!(room.report(0, true).unwrap(), None);
    assert_eq!(room.report(1, false).unwrap(), Some(false));
    assert_eq!(one.load(&keys), 0);
    assert_eq!(rig.status().files_free, free);
    // The scheduler goes while a rank stores.
    let room = one.reserve(&keys);
    let job = one.begin(0, Direction::Write, &room.places()).unwrap();
    job.start_all(0..1).unwrap();
    let Engine { scheduler, ranks, .. } = one;
    scheduler.close().unwrap();
    until("the scheduler's session ends", || rig.status().sessions.len() <= 2);
    assert_eq!(rig.status().files_writing, 4, "a request writes to those of its rank");
    drop((job, ranks, room, scheduler));
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
    let found = one.scheduler.lookup(one.space, &keys).unwrap();
    let room = one.reserve(&more);
    let loading = one.start(0, Direction::Read, &found.places());
    let dir = rig.close();
    one.put(0, BlockId(3), &vec![0xEE; SHAPE.block_bytes() as usize]);
    assert!(one.end(0, &loading).is_some_and(|why| why.contains("lost")));
    drop(loading);
    assert_eq!(one.get(0, BlockId(3)), vec![0; SHAPE.block_bytes() as usize], "new pages");
    for error in [
        one.try_load(&keys).map(drop),
        one.scheduler.reserve(one.space, &more).map(drop),
        room.report(0, true).map(drop),
        room.publish(false),
        one.scheduler.sync(),
        one.begin(0, Direction::Read, &found.places()).map(drop),
    ] {
        assert!(matches!(error, Err(ServeError::Lost { .. })), "{error:?}");
    }

    let rig = on(dir);
    until("it has connected again", || one.try_load(&keys).is_ok_and(|found| found == 4));
    until("the idle one has connected", || idle.try_load(&keys).is_ok_and(|found| found == 4));
    for places in [found.places(), room.places()] {
        let begun = one.begin(0, Direction::Read, &places);
        assert_eq!(kind(begun.unwrap_err()), RefusalKind::Argument, "they are of the old server");
    }
    assert!(matches!(room.publish(true), Err(ServeError::Stale)));
    drop((found, room));
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
    engine.scheduler.peek(engine.space, keys).unwrap()
}

#[test]
fn pins_of_an_engine_end_with_it_and_with_the_server() {
    let rig = rig();
    let (one, other) = (Engine::new(&rig, "one", 2), Engine::new(&rig, "other", 2));
    let keys = keys(0..6);
    one.store(&keys[..4]);
    let try_pin = |engine: &Engine, count: usize, wait| {
        engine.scheduler.pin(engine.space, &keys[..count], 3600, None, wait)
    };
    let pin = |engine: &Engine, count, wait| try_pin(engine, count, wait).unwrap();
    let unpin = |engine: &Engine, pin| engine.scheduler.unpin(Some(pin)).unwrap();
    // On both ranks, and the later blocks with their commit.
    let made = pin(&one, 6, true);
    assert_eq!((made.outcome, made.pin.map(|pin| pin.blocks)), (Outcome::Deferred, Some(4)));
    assert_eq!(left(&rig, &one, &keys), 4);
    one.store(&keys);
    assert_eq!(left(&rig, &one, &keys), 6);
    assert!(!unpin(&other, 1), "it is not this engine's");
    assert!(unpin(&one, 1) && !unpin(&one, 1));
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
    assert!(try_pin(&one, 2, false).unwrap_err().is_away());
    let rig = on(dir);
    until("it has connected again", || one.try_load(&keys).is_ok_and(|found| found == 6));
    assert!(!unpin(&one, 3), "it is the old server's");
    assert_eq!((left(&rig, &one, &keys), rig.status().pins), (0, 0));
    one.store(&keys);
    assert_eq!(pin(&one, 6, false).outcome, Outcome::Accepted);
    assert_eq!(left(&rig, &one, &keys), 6);
    // Other weights: the pins go with the blocks of the old ones.
    one.scheduler.renew(one.space, [7; 16]).unwrap();
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
    one.scheduler.renew(one.space, [7; 16]).unwrap();
    assert_eq!((one.load(&keys), other.load(&keys)), (0, 4));
    one.store(&keys);
    one.scheduler.renew(one.space, [8; 16]).unwrap();
    assert_eq!((one.load(&keys), other.load(&keys)), (0, 4));
    assert_eq!(rig.status().namespaces.len(), 2, "the shared and a private one");
    // A server has no more namespaces for it: that is an error now, and not of a lookup later.
    let named = |salt: u8| Namespace { tenant_salt: vec![salt], ..Namespace::default() };
    let spaces: Vec<_> =
        (2..64).map(|salt| one.scheduler.namespace(&named(salt)).unwrap()).collect();
    assert_eq!(kind(one.scheduler.renew(spaces[0], [9; 16]).unwrap_err()), RefusalKind::Limit);
    assert_eq!(kind(one.scheduler.namespace(&named(64)).unwrap_err()), RefusalKind::Limit);
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
        let filled = one.reserve(&keys(10..12));
        assert_eq!(one.go(0, Direction::Write, &filled.places()), None);
        assert_eq!(filled.report(0, true).unwrap(), Some(true));
        let (room, job) = one.begin_store(&keys(20..22));
        let [first, second] = [30, 40].map(|first| {
            let save = client.allocate(space, &keys(first..first + 2), &blocks(0, 2)).unwrap();
            save.move_all().unwrap();
            save
        });
        assert!(is_healthy(&rig) && rig.status().healthy);
        let when = FaultWhen { opcode: Some(FLUSH), admin: Some(false), ..FaultWhen::default() };
        let fault = FaultAction::Status { code: WRITE_FAULT, dnr: false };
        set_faults(&rig.emus, Some(FaultRule::new(when, fault).limit(1)));
        let flushes = || rig.emus.iter().map(|emu| emu.counters().flushes).sum::<u64>();
        let end = || one.end(0, &job);
        let commit = |save: Request| kind(save.commit().unwrap_err());
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
        assert_eq!(kind(filled.publish(true).unwrap_err()), RefusalKind::ReadOnly);
        assert_eq!(kind(client.sync().unwrap_err()), RefusalKind::ReadOnly);
        let refused = client.allocate(space, &keys(50..51), &blocks(0, 1)).map(drop).unwrap_err();
        assert_eq!(kind(refused), RefusalKind::ReadOnly);
        assert_eq!(flushes(), before, "a drive was asked again");
        assert!(!is_healthy(&rig) && !rig.status().healthy);
        for range in [10..12, 20..22, 30..32, 40..42] {
            assert_eq!(client.peek(space, &keys(range)).unwrap(), 0);
        }
        assert_eq!(one.load(&keys(0..2)), 2, "what is stored is served");
        drop((job, filled, room, one, client));
        assert!(rig.end().1.is_err());
    }
}
