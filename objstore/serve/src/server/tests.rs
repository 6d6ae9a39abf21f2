//! Users of one server are users apart. The credentials of a connection are given, not those of the
//! test's process.

use std::{sync::Mutex, time::Duration};

use kv_catalog::lock;
use objstore::{BlockKey, KvShape, Namespace};
use ripieno_stack::{Builder, PoolLayout, PoolMemory, StackConfig};
use tempfile::TempDir;

use super::*;
use crate::{
    control::{Outcome, PinLimits},
    memory,
    protocol::Keys,
    settings::{Settings, UserLimits},
};

const SHAPE: KvShape = KvShape { layers: 2, segments: 1, object_bytes: 65536, block_tokens: 16 };
const SHAPE_LAYERS: u32 = SHAPE.layers;
const FILE_BYTES: u64 = 2 * 65536;
const CAPACITY: u64 = 32 << 20;
/// Users on the list.
const ALICE: u32 = 4_000_001;
const BOB: u32 = 4_000_002;
const ROOT: u32 = 0;
/// Blocks of a client's pool.
const BLOCKS: u32 = 32;

/// A server whose connections are made by hand.
struct Hall {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Hall {
    /// Opens it with limits for Alice.
    fn open(dir: &TempDir, limits: UserLimits) -> Self {
        let settings = Settings {
            users: vec![ALICE, BOB],
            sessions_max: 9,
            pool_bytes_max: 1 << 30,
            limits: [(ALICE, limits)].into(),
            hold_max: Duration::from_secs(600),
            pins: PinLimits::default(),
            token: None,
        };
        let path = dir.path().join("store");
        let config = StackConfig { capacity: Some(CAPACITY), ..StackConfig::at(path) };
        let stack = Builder::new(config, SHAPE).pool(PoolMemory::Own { blocks: 2 }).open().unwrap();
        let socket = dir.path().join("none");
        let options = ServerOptions { socket, http: None, settings, reload: None };
        Self { shared: Arc::new(Shared::new(stack, options)), threads: Mutex::default() }
    }

    fn connect(&self, uid: u32) -> UnixStream {
        let (own, theirs) = UnixStream::pair().unwrap();
        let thread = self.shared.accept_from(Peer { uid, pid: 7 }, theirs).unwrap();
        self.threads.lock().unwrap().extend(thread);
        own
    }

    fn user(&self, uid: u32) -> User {
        self.greet(uid, None, None).unwrap()
    }

    fn greet(
        &self,
        uid: u32,
        after: Option<Bytes>,
        member: Option<Member>,
    ) -> Result<User, String> {
        let stream = self.connect(uid);
        let layout = PoolLayout::contiguous(&SHAPE, BLOCKS);
        let (file, _) = memory::make(layout.used(SHAPE.object_bytes).end).unwrap();
        let call = Call::Hello {
            version: VERSION,
            pool: Some(ClientPool { layout, gpu: None }),
            after,
            member,
        };
        // One that is refused before its first call does not read it.
        let _ = protocol::send(&stream, &call, Some(file.as_fd()));
        match receive(&stream) {
            Answer::Welcome { session, .. } => Ok(User { stream, session }),
            Answer::Refused { message, .. } => Err(message),
            other => panic!("{other:?}"),
        }
    }

    fn files(&self) -> u32 {
        self.shared.stack.store().counts().unwrap().files
    }

    fn status(&self) -> crate::control::Status {
        self.shared.status().unwrap()
    }

    /// Waits until no session is left but this one.
    fn settle_all_but(&self, user: &User) {
        let is_left = |session: &Arc<Session>| session.token != user.session;
        while lock(&self.shared.state).sessions.values().any(is_left) {
            thread::yield_now();
        }
    }

    fn close(self) {
        lock(&self.shared.state).connections.values().for_each(http::hang_up);
        for thread in self.threads.into_inner().unwrap() {
            thread.join().unwrap();
        }
        Arc::into_inner(self.shared).unwrap().close().unwrap();
    }
}

fn receive(stream: &UnixStream) -> Answer {
    match protocol::receive(stream).unwrap() {
        Received::Message(answer, _) => answer,
        Received::Nothing | Received::End => panic!("no answer"),
        Received::Malformed(why) => panic!("{why}"),
    }
}

struct User {
    stream: UnixStream,
    session: Bytes,
}

impl User {
    fn call(&self, call: &Call) -> Answer {
        protocol::send(&self.stream, call, None).unwrap();
        receive(&self.stream)
    }

    fn refused(&self, call: &Call) -> (RefusalKind, String) {
        match self.call(call) {
            Answer::Refused { kind, message } => (kind, message),
            other => panic!("{call:?}: {other:?}"),
        }
    }

    fn namespace(&self, salt: &str) -> u32 {
        match self.call(&named(salt)) {
            Answer::Number(namespace) => namespace,
            other => panic!("{other:?}"),
        }
    }

    /// Stores blocks, and returns how many.
    fn store(&self, namespace: u32, keys: Keys) -> u32 {
        let (reservation, positions) = match self.call(&Call::Reserve { namespace, keys }) {
            Answer::Reserved { reservation, positions, .. } => (reservation, positions),
            other => panic!("{other:?}"),
        };
        let written = positions.len() as u32;
        let (blocks, layers) = (positions.clone(), SHAPE.layers);
        let answer = self.call(&Call::Fill { reservation, positions, blocks, layers });
        let Answer::Request { request, started: SHAPE_LAYERS } = answer else {
            panic!("{answer:?}")
        };
        let requests = vec![request];
        match self.call(&Call::Publish { reservation, requests, is_durable: true }) {
            Answer::Done => written,
            other => panic!("{other:?}"),
        }
    }

    fn peek(&self, namespace: u32, keys: Keys) -> u32 {
        match self.call(&Call::Peek { namespace, keys }) {
            Answer::Number(blocks) => blocks,
            other => panic!("{other:?}"),
        }
    }

    fn lookup(&self, namespace: u32, keys: Keys) -> (u64, u32) {
        match self.call(&Call::Lookup { namespace, keys }) {
            Answer::Prefix { prefix, blocks } => (prefix, blocks),
            other => panic!("{other:?}"),
        }
    }

    fn reserve(&self, namespace: u32, keys: Keys) -> (u64, u32) {
        match self.call(&Call::Reserve { namespace, keys }) {
            Answer::Reserved { reservation, accepted, .. } => (reservation, accepted),
            other => panic!("{other:?}"),
        }
    }

    fn load(&self, prefix: u64, blocks: u32) -> Answer {
        let (positions, blocks) = ((0..blocks).collect(), (0..blocks).collect());
        self.call(&Call::Load { prefix, positions, blocks, layers: 0 })
    }

    /// Begins a request, and returns its number.
    fn begin(&self, call: &Call) -> u64 {
        match self.call(call) {
            Answer::Request { request, .. } => request,
            other => panic!("{other:?}"),
        }
    }
}

fn named(salt: &str) -> Call {
    let tenant_salt = salt.as_bytes().to_vec();
    Call::Namespace(Namespace { tenant_salt, ..Namespace::default() })
}

fn keys(range: std::ops::Range<u32>) -> Keys {
    let key = |at: u32| {
        let mut key = [0; 32];
        key[..4].copy_from_slice(&at.to_le_bytes());
        BlockKey(key)
    };
    Keys(range.map(key).collect())
}

#[test]
fn fresh_salts_do_not_escape_the_limit_of_stored_bytes() {
    let dir = TempDir::new().unwrap();
    let limits = UserLimits { stored_bytes: Some(16 * FILE_BYTES), ..UserLimits::default() };
    let hall = Hall::open(&dir, limits);
    let bob = hall.user(BOB);
    let kept = bob.namespace("bob");
    assert_eq!(bob.store(kept, keys(0..32)), 32);
    let stored = |hall: &Hall| hall.status().namespaces.iter().map(|it| it.files).sum::<u32>();
    let salts = hall.files() / 8 + 8;
    let fill = |hall: &Hall, name: &str, count: u32| {
        let alice = hall.user(ALICE);
        for salt in 0..count {
            let space = alice.namespace(&format!("{name} {salt}"));
            // Less if the policy takes what is there for more useful.
            assert!(alice.store(space, keys(0..8)) <= 8);
        }
        assert_eq!(stored(hall), 32 + 16, "of {count} namespaces of 8 blocks");
    };
    fill(&hall, "first", salts);
    assert_eq!(bob.peek(kept, keys(0..32)), 32, "nothing of his went for her blocks");
    drop(bob);
    hall.close();
    // A restart does not forget whose they are.
    let hall = Hall::open(&dir, limits);
    fill(&hall, "then", 4);
    let bob = hall.user(BOB);
    assert_eq!(bob.peek(bob.namespace("bob"), keys(0..32)), 32);
    // A lower limit evicts at once.
    let mut settings = (*hall.shared.settings()).clone();
    settings.limits.get_mut(&ALICE).unwrap().stored_bytes = Some(4 * FILE_BYTES);
    hall.shared.apply(settings);
    assert_eq!(stored(&hall), 32 + 4);
    drop(bob);
    hall.close();
}

#[test]
fn a_user_has_its_part_of_the_clients() {
    let dir = TempDir::new().unwrap();
    let hall = Hall::open(&dir, UserLimits::default());
    let all: Vec<User> = (0..3).map(|_| hall.user(ALICE)).collect();
    let refused = hall.greet(ALICE, None, None).err().unwrap();
    assert!(refused.contains(&format!("user {ALICE} has 3 of the 3 clients")), "{refused}");
    assert!(refused.contains("`clients` in the user's [[limit]]"), "{refused}");
    let others = [BOB, BOB, BOB, ROOT, ROOT].map(|uid| hall.user(uid));
    drop((all, others));
    hall.close();
}

#[test]
fn nobody_keeps_a_controller_out() {
    let dir = TempDir::new().unwrap();
    let limits = UserLimits { clients: Some(1), ..UserLimits::default() };
    let hall = Hall::open(&dir, limits);
    // 17 connections of a client, and 16 others, none of which says anything.
    let silent: Vec<UnixStream> = (0..33).map(|_| hall.connect(ALICE)).collect();
    let answer = receive(&hall.connect(ALICE));
    let Answer::Refused { kind: RefusalKind::Limit, message } = answer else {
        panic!("{answer:?}")
    };
    assert!(message.contains(&format!("user {ALICE} has 33 of the 33 connections")), "{message}");
    let own = rustix::process::geteuid().as_raw();
    for uid in [ROOT, own] {
        let mut stream = hall.connect(uid);
        io::Write::write_all(&mut stream, b"GET /status HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        io::Read::read_to_string(&mut stream, &mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    drop(hall.user(BOB));
    drop(silent);
    hall.close();
}

#[test]
fn a_user_takes_its_own_namespaces_only() {
    let dir = TempDir::new().unwrap();
    let limits = UserLimits { namespaces: Some(4), ..UserLimits::default() };
    for restart in 0..2 {
        let hall = Hall::open(&dir, limits);
        let bob = hall.user(BOB);
        let kept = bob.namespace("bob");
        assert_eq!(bob.store(kept, keys(0..2)), if restart == 0 { 2 } else { 0 });
        for round in 0..3 {
            let alice = hall.user(ALICE);
            for salt in 0..4 {
                let space = alice.namespace(&format!("{restart} {round} {salt}"));
                assert_eq!(alice.store(space, keys(0..1)), 1);
            }
            // All of them are in use.
            let (kind, why) = alice.refused(&named("another"));
            assert_eq!(kind, RefusalKind::Limit, "{why}");
            assert!(why.contains(&format!("4 namespaces that user {ALICE} may have")), "{why}");
            drop(alice);
            hall.settle_all_but(&bob);
        }
        let labels = hall.status().namespaces.len();
        assert_eq!(labels, 6 + restart, "the store's own, hers and his");
        assert_eq!(bob.peek(kept, keys(0..2)), 2);
        assert_eq!(bob.namespace("a new one"), 1);
        drop(bob);
        hall.close();
    }
}

#[test]
fn a_user_holds_its_part_of_the_files() {
    let dir = TempDir::new().unwrap();
    let limits = UserLimits { held_bytes: Some(40 * FILE_BYTES), ..UserLimits::default() };
    let hall = Hall::open(&dir, limits);
    let (alice, bob) = (hall.user(ALICE), hall.user(BOB));
    let (hers, his) = (alice.namespace("alice"), bob.namespace("bob"));
    for at in 0..3 {
        assert_eq!(alice.store(hers, keys(at * 32..(at + 1) * 32)), 32);
    }
    let (first, blocks) = alice.lookup(hers, keys(0..96));
    assert_eq!(blocks, 40, "as many as she may hold");
    assert_eq!(alice.lookup(hers, keys(0..40)).1, 40, "those are held already");
    let (kind, why) = alice.refused(&Call::Lookup { namespace: hers, keys: keys(64..96) });
    assert_eq!(kind, RefusalKind::Limit);
    assert!(why.contains(&format!("user {ALICE} holds 40 of the 40 files")), "{why}");
    let (kind, _) = alice.refused(&Call::Reserve { namespace: hers, keys: keys(500..501) });
    assert_eq!(kind, RefusalKind::Limit);
    // A request holds what it moves, after its prefix as well.
    assert!(matches!(alice.load(first, 8), Answer::Request { .. }));
    // Another session of hers does not get more.
    let second = hall.user(ALICE);
    let space = second.namespace("alice");
    let call = Call::Reserve { namespace: space, keys: keys(500..501) };
    assert_eq!(second.refused(&call).0, RefusalKind::Limit);
    assert_eq!(bob.store(his, keys(0..32)), 32);
    drop((alice, second));
    hall.settle_all_but(&bob);
    // And by reservations that are never filled.
    let alice = hall.user(ALICE);
    let hers = alice.namespace("alice");
    assert_eq!(alice.reserve(hers, keys(1000..2000)).1, 40);
    assert_eq!(bob.store(his, keys(32..64)), 32);
    drop((alice, bob));
    hall.close();
}

#[test]
fn what_a_client_holds_ends_after_a_time_without_a_call() {
    let dir = TempDir::new().unwrap();
    let hall = Hall::open(&dir, UserLimits::default());
    let alice = hall.user(ALICE);
    let space = alice.namespace("alice");
    alice.store(space, keys(0..8));
    let (prefix, _) = alice.lookup(space, keys(0..8));
    let Answer::Request { request, .. } = alice.load(prefix, 8) else { panic!("no request") };
    let (reservation, _) = alice.reserve(space, keys(100..104));
    let held = |hall: &Hall| {
        let status = hall.status();
        (status.files_referenced, status.files_writing)
    };
    assert_eq!(held(&hall), (8, 4));
    let now = hall.shared.now();
    let minutes = |count: u64| Duration::from_secs(60 * count);
    assert_eq!(hall.shared.expire(now + minutes(9)).len(), 0);
    assert_eq!(held(&hall), (8, 4));
    assert_eq!(hall.shared.expire(now + minutes(11)).len(), 1);
    assert_eq!(held(&hall), (0, 0));
    let positions = vec![0];
    for call in [
        Call::Load { prefix, positions: positions.clone(), blocks: positions.clone(), layers: 0 },
        Call::Fill { reservation, positions: positions.clone(), blocks: positions, layers: 0 },
        Call::Publish { reservation, requests: Vec::new(), is_durable: false },
        Call::Start { request, layers: 0..1, after: None },
        Call::End { requests: vec![request] },
    ] {
        let (kind, why) = alice.refused(&call);
        assert!(kind == RefusalKind::Limit && why.contains("600 s without a call"), "{why}");
    }
    // The session goes on, and so does what it holds from now on.
    let (prefix, blocks) = alice.lookup(space, keys(0..8));
    assert_eq!((blocks, hall.shared.expire(hall.shared.now()).len()), (8, 0));
    assert!(matches!(alice.load(prefix, 8), Answer::Request { .. }));
    drop(alice);
    hall.close();
}

#[test]
fn a_user_pins_its_part() {
    let dir = TempDir::new().unwrap();
    let limits = UserLimits { pinned_bytes: Some(5 * FILE_BYTES), ..UserLimits::default() };
    let hall = Hall::open(&dir, limits);
    let (alice, bob) = (hall.user(ALICE), hall.user(BOB));
    let pin = |user: &User, blocks: u32| {
        let namespace = user.namespace("shared");
        let call =
            Call::Pin { namespace, keys: keys(0..blocks), ttl_s: 60, bytes_max: None, wait: false };
        match user.call(&call) {
            Answer::Pinned(answer) => answer,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(alice.store(alice.namespace("shared"), keys(0..16)), 16);
    let answer = pin(&alice, 16);
    assert_eq!((answer.outcome, answer.pin.clone().unwrap().blocks), (Outcome::Clipped, 5));
    let answer_2 = pin(&alice, 1);
    let why = answer_2.reason.unwrap();
    assert_eq!(answer_2.outcome, Outcome::Rejected);
    assert!(why.contains(&format!("user {ALICE} has 1 of")) && why.contains("`pins`"), "{why}");
    // Another client of hers neither, others do.
    let second = hall.user(ALICE);
    assert_eq!(pin(&second, 1).outcome, Outcome::Rejected);
    assert_eq!(pin(&bob, 16).outcome, Outcome::Accepted);
    let half = u64::from(hall.files()) / 2 * FILE_BYTES;
    assert!(hall.shared.account(BOB).share().pinned_bytes <= half / 3);
    // And nobody ends hers but she.
    let number = answer.pin.unwrap().pin;
    assert!(matches!(bob.call(&Call::Unpin { pin: Some(number) }), Answer::Number(0)));
    assert!(matches!(alice.call(&Call::Unpin { pin: Some(number) }), Answer::Number(1)));
    drop((alice, second, bob));
    hall.close();
}

#[test]
fn the_clients_of_a_user_share_its_bandwidth() {
    let dir = TempDir::new().unwrap();
    // A layer takes longer than a client may wait.
    let limits = UserLimits { bandwidth: 1.try_into().ok(), ..UserLimits::default() };
    let hall = Hall::open(&dir, limits);
    let start = |user: &User, key: u32| {
        let namespace = user.namespace("any");
        let (reservation, _) = user.reserve(namespace, keys(key..key + 1));
        let (positions, blocks) = (vec![0], vec![0]);
        let request = user.begin(&Call::Fill { reservation, positions, blocks, layers: 0 });
        // As far as there is a turn soon.
        user.call(&Call::Start { request, layers: 0..2, after: None })
    };
    let [one, other, bob] = [ALICE, ALICE, BOB].map(|uid| hall.user(uid));
    assert!(matches!(start(&one, 0), Answer::Number(1)));
    drop(one);
    match start(&other, 1) {
        Answer::Refused { kind: RefusalKind::Limit, message } => {
            assert!(message.contains(&format!("the bandwidth of user {ALICE}")), "{message}");
        }
        more => panic!("{more:?}"),
    }
    assert!(matches!(start(&bob, 2), Answer::Number(2)));
    drop((other, bob));
    hall.close();
}

#[test]
fn tables_of_requests_count_to_their_user() {
    let dir = TempDir::new().unwrap();
    let limits = UserLimits { memory_bytes: Some(20_500), ..UserLimits::default() };
    let hall = Hall::open(&dir, limits);
    let (alice, bob) = (hall.user(ALICE), hall.user(BOB));
    assert_eq!(alice.store(alice.namespace("shared"), keys(0..32)), 32);
    let count = |user: &User| {
        let (prefix, _) = user.lookup(user.namespace("shared"), keys(0..32));
        (0..64).take_while(|_| matches!(user.load(prefix, 32), Answer::Request { .. })).count()
    };
    // 64 bytes for each position of a prefix, and 16 more for a request's.
    assert_eq!(count(&alice), (20_500 - 32 * 64) / (32 * 80));
    let second = hall.user(ALICE);
    let (prefix, blocks) = second.lookup(second.namespace("shared"), keys(0..1));
    assert_eq!(blocks, 1);
    let Answer::Refused { kind: RefusalKind::Limit, message } = second.load(prefix, 32) else {
        let full = second.load(prefix, 1);
        panic!("{full:?}")
    };
    assert!(message.contains("`memory` in the user's [[limit]]"), "{message}");
    assert_eq!(count(&bob), 64);
    drop((alice, second, bob));
    hall.close();
}

#[test]
fn a_lookup_is_cut_to_the_memory_that_is_left() {
    let dir = TempDir::new().unwrap();
    let limits = UserLimits { memory_bytes: Some(24 * 64 + 63), ..UserLimits::default() };
    let hall = Hall::open(&dir, limits);
    let (alice, bob) = (hall.user(ALICE), hall.user(BOB));
    assert_eq!(bob.store(bob.namespace("shared"), keys(0..32)), 32);
    let hers = alice.namespace("shared");
    // More than half of it: the blocks that are kept are not counted beside those that were found.
    let (prefix, blocks) = alice.lookup(hers, keys(0..32));
    assert_eq!(blocks, 24);
    assert_eq!(hall.status().files_referenced, 24, "the rest may be evicted");
    let (kind, why) = alice.refused(&Call::Lookup { namespace: hers, keys: keys(0..1) });
    assert_eq!(kind, RefusalKind::Limit);
    assert!(why.contains("take 1536 of 1599 bytes"), "{why}");
    assert!(matches!(alice.call(&Call::Release { handles: vec![prefix] }), Answer::Done));
    assert_eq!(alice.lookup(hers, keys(8..32)).1, 24, "all of it was given back");
    drop((alice, bob));
    hall.close();
}

#[test]
fn numbers_of_another_user_stand_for_nothing() {
    let dir = TempDir::new().unwrap();
    let hall = Hall::open(&dir, UserLimits::default());
    let member = |rank| Member { engine: "engine".to_owned(), ranks: 1, rank: Some(rank), copy: 0 };
    let alice = hall.greet(ALICE, None, Some(member(0))).unwrap();
    // The same engine and rank of another user is another engine.
    let bob = hall.greet(BOB, None, Some(member(0))).unwrap();
    let space = alice.namespace("alice");
    let call = Call::Reserve { namespace: space, keys: keys(0..4) };
    let Answer::Reserved { reservation, .. } = alice.call(&call) else { panic!("no room") };
    let (positions, blocks) = (vec![0, 1], vec![0, 1]);
    let request = alice.begin(&Call::Fill { reservation, positions, blocks, layers: 0 });
    assert_eq!(alice.store(space, keys(50..52)), 2);
    let (prefix, _) = alice.lookup(space, keys(50..52));
    bob.namespace("bob");
    let numbers = (vec![2], vec![2]);
    for call in [
        Call::Start { request, layers: 0..1, after: None },
        Call::Wait { request, layers: 0..1 },
        Call::Poll { request, layer: 0 },
        Call::Hurry { request },
        Call::End { requests: vec![request] },
        Call::Release { handles: vec![request] },
        Call::Release { handles: vec![prefix, reservation] },
        Call::Release { handles: vec![reservation] },
        Call::Load { prefix, positions: vec![0], blocks: vec![0], layers: 0 },
        Call::Fill { reservation, positions: numbers.0, blocks: numbers.1, layers: 0 },
        Call::Report { reservation, rank: 0, is_filled: false },
        Call::Publish { reservation, requests: vec![request], is_durable: true },
    ] {
        let (kind, why) = bob.refused(&call);
        assert!(kind == RefusalKind::Argument && why.contains("not, or no longer"), "{why}");
    }
    // Her session takes no connection of his, and does not end for his next one.
    let stranger = hall.connect(BOB);
    protocol::send(&stranger, &Call::Attach { session: alice.session.clone() }, None).unwrap();
    assert!(matches!(receive(&stranger), Answer::Refused { kind: RefusalKind::Message, .. }));
    drop(hall.greet(BOB, Some(alice.session.clone()), None).unwrap());
    // Nothing of hers has changed.
    assert!(matches!(alice.load(prefix, 2), Answer::Request { .. }));
    // Nor does one of her own that is no reservation end the request.
    let wrong = Call::Publish { reservation: prefix, requests: vec![request], is_durable: true };
    assert_eq!(alice.refused(&wrong).0, RefusalKind::Argument);
    // All layers there are, and then one too many.
    let start = |layers| alice.call(&Call::Start { request, layers, after: None });
    assert!(matches!(start(0..u32::MAX), Answer::Number(SHAPE_LAYERS)));
    assert_eq!(
        alice.refused(&Call::Start { request, layers: 2..3, after: None }).0,
        RefusalKind::Argument
    );
    assert!(matches!(start(3..3), Answer::Number(0)));
    let Answer::Ended(ended) = alice.call(&Call::End { requests: vec![request] }) else {
        panic!("not ended")
    };
    assert_eq!(ended[0].error, None);
    let (positions, blocks) = (vec![2, 3], vec![2, 3]);
    let rest = Call::Fill { reservation, positions, blocks, layers: 0 };
    assert!(matches!(alice.call(&rest), Answer::Request { .. }));
    drop((alice, bob));
    hall.close();
}
