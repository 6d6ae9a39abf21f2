//! A server and clients in one process: what they may do, and what they are refused.

use std::{
    collections::BTreeMap,
    io::{self, Read as _, Write as _},
    net::TcpListener,
    num::NonZeroU64,
    os::unix::{
        fs::PermissionsExt as _,
        net::{UnixListener, UnixStream},
    },
    thread,
    time::{Duration, Instant},
};

use objstore::{BlockId, BlockKey, KvShape, Layer, Namespace};
use ripieno_serve::{
    Client, Control, ControlAddress, PoolLayout, RefusalKind, RemoteStore, ServeError, Server,
    ServerOptions,
    control::Status,
    protocol::{Answer, Bytes, Call, Keys},
};
use ripieno_stack::{Builder, ErrorKind, KvStore as _, StackConfig, StackError};
use ripieno_testkit::{blocks, keys, pattern, until};
use tempfile::TempDir;

use crate::{
    engine::memory,
    rig::{self, CAPACITY, Raw, Rig, SHAPE, framed, kind},
};

fn space(label: &str) -> Namespace {
    Namespace { layout: label.to_owned(), label: label.to_owned(), ..Namespace::default() }
}

fn bytes(key: BlockKey) -> Vec<u8> {
    pattern(SHAPE.block_bytes() as usize, key.seed() as u64)
}

fn store(client: &Client, label: &str, keys: &[BlockKey]) {
    let space = client.namespace(&space(label)).unwrap();
    let from = blocks(0, keys.len());
    for (key, block) in keys.iter().zip(&from) {
        client.write(*block, &bytes(*key)).unwrap();
    }
    assert_eq!(client.save(space, keys, &from).unwrap(), keys.len());
}

/// Loads keys, and returns how many were found with their own bytes.
fn found(client: &Client, label: &str, keys: &[BlockKey]) -> usize {
    let space = client.namespace(&space(label)).unwrap();
    let to = blocks(8, keys.len());
    let found = client.load(space, keys, &to).unwrap();
    for ((key, block), _) in keys.iter().zip(&to).zip(&found).filter(|(_, is_found)| **is_found) {
        assert!(client.read(*block).unwrap() == bytes(*key), "wrong bytes in block {block}");
    }
    found.into_iter().filter(|is_found| *is_found).count()
}

#[test]
fn clients_share_a_namespace_and_are_apart_in_others() {
    let rig = Rig::new();
    let (one, other) = (rig.client(), rig.client());
    let keys = keys(0..6);
    store(&one, "shared", &keys);
    assert_eq!(found(&other, "shared", &keys), 6);
    assert_eq!(found(&other, "another", &keys), 0);
    let space = other.namespace(&space("shared")).unwrap();
    assert_eq!(other.peek(space, &keys).unwrap(), 6);
    // It survives the server.
    drop((one, other));
    let rig = Rig::on(rig.close());
    assert_eq!(found(&rig.client(), "shared", &keys), 6);
    assert_eq!(rig.status().refused_calls, 0);
}

#[test]
fn a_key_that_is_not_stored_hides_none_behind_it() {
    let rig = Rig::new();
    let client = rig.client();
    store(&client, "gaps", &[keys(0..1), keys(2..4)].concat());
    let (space, keys) = (client.namespace(&space("gaps")).unwrap(), keys(0..5));
    let stored = [true, false, true, true, false];
    assert_eq!(client.are_stored(space, &keys).unwrap(), stored);
    let old = bytes(keys[1]);
    (8..13).for_each(|block| client.write(BlockId(block), &old).unwrap());
    assert_eq!(client.load(space, &keys, &blocks(8, 5)).unwrap(), stored);
    for (at, block) in blocks(8, 5).into_iter().enumerate() {
        let expected = if stored[at] { bytes(keys[at]) } else { old.clone() };
        assert!(client.read(block).unwrap() == expected, "block {block}");
    }
    let store = RemoteStore::new(client, &self::space("gaps")).unwrap();
    assert_eq!(store.are_stored(&keys).unwrap(), stored);
    let (request, found) = store.fetch(&keys, &blocks(8, 5)).unwrap();
    assert_eq!((request.accepted(), &*found), (3, &stored[..]));
    let error = store.fetch(&keys, &blocks(8, 4)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    drop((request, store));
    assert_eq!(rig.status().files_referenced, 0);
}

#[test]
fn threads_of_a_client_do_not_wait_for_each_other() {
    let rig = Rig::new();
    let client = rig.client();
    thread::scope(|scope| {
        // More than it has connections, most of which wait.
        for _ in 0..20 {
            let client = &client;
            scope.spawn(move || {
                let space = client.namespace(&space("threads")).unwrap();
                (0..20).for_each(|_| drop(client.lookup(space, &keys(0..4)).unwrap()));
            });
        }
        for at in 0..4 {
            let client = &client;
            scope.spawn(move || {
                let space = client.namespace(&space("threads")).unwrap();
                for round in 0..5 {
                    let first = 100 * at + 10 * round;
                    let (keys, block) = (keys(first..first + 2), blocks(4 * at, 2));
                    for (key, block) in keys.iter().zip(&block) {
                        client.write(*block, &bytes(*key)).unwrap();
                    }
                    assert_eq!(client.save(space, &keys, &block).unwrap(), 2);
                    let to = blocks(4 * at + 2, 2);
                    assert_eq!(client.load(space, &keys, &to).unwrap(), [true; 2]);
                    for (key, block) in keys.iter().zip(to) {
                        assert!(client.read(block).unwrap() == bytes(*key));
                    }
                }
            });
        }
    });
    assert_eq!(rig.status().refused_calls, 0);
}

#[test]
fn nothing_of_another_client_can_be_named() {
    let rig = Rig::new();
    let (one, other) = (rig.client(), rig.client());
    store(&one, "shared", &keys(0..4));
    let space = one.namespace(&space("shared")).unwrap();
    let _prefix = one.lookup(space, &keys(0..4)).unwrap();
    let _request = one.allocate(space, &keys(4..6), &blocks(0, 2)).unwrap();
    // The numbers of the first client, guessed by the second one.
    let before = rig.status();
    let raw = Raw::new(&rig);
    for handle in 0..20 {
        for call in [
            Call::Load { prefix: handle, positions: vec![0], blocks: vec![0], layers: 0 },
            Call::Start { request: handle, layers: 0..1, after: None },
            Call::Wait { request: handle, layers: 0..1 },
            Call::Publish { reservation: handle, requests: Vec::new(), is_durable: true },
            Call::Release { handles: vec![handle] },
            Call::Peek { namespace: handle as u32, keys: Keys(keys(0..1)) },
        ] {
            assert_eq!(raw.refused(&call), RefusalKind::Argument, "{call:?}");
        }
    }
    let after = rig.status();
    assert_eq!(after.refused_calls - before.refused_calls, 120);
    let (writing, referenced) = (after.files_writing, after.files_referenced);
    assert_eq!((writing, referenced), (before.files_writing, before.files_referenced));
    // Blocks beyond the client's own pool, and layers beyond the shape.
    let space = other.namespace(&self::space("shared")).unwrap();
    let prefix = other.lookup(space, &keys(0..2)).unwrap();
    let twice = other.retrieve(&prefix, 0, &[BlockId(1), BlockId(1)]).unwrap_err();
    assert_eq!(kind(twice), RefusalKind::Argument);
    let request = other.retrieve(&prefix, 0, &blocks(0, 2)).unwrap();
    assert_eq!(kind(request.start(Layer(3)).unwrap_err()), RefusalKind::Argument);
    let many = other.retrieve(&prefix, 0, &blocks(0, 17)).unwrap_err();
    assert_eq!(kind(many), RefusalKind::Argument);
    assert_eq!(rig.status().refused_calls - after.refused_calls, 3);
}

#[test]
fn a_save_that_is_refused_for_its_blocks_evicts_nothing() {
    let rig = Rig::new();
    let client = rig.client();
    let mut first = 0;
    while rig.status().files_free >= 16 {
        store(&client, "full", &keys(first..first + 16));
        first += 16;
    }
    let (space, before) = (client.namespace(&space("full")).unwrap(), rig.status());
    let beyond = [blocks(1, 15), vec![BlockId(16)]].concat();
    for saved in [
        client.save(space, &keys(first..first + 16), &beyond).map(drop),
        client.allocate(space, &keys(first..first + 16), &beyond).map(drop),
    ] {
        let expected = ServeError::Argument { what: "block below", given: 16, expected: 16 };
        assert_eq!(saved.unwrap_err().to_string(), expected.to_string());
    }
    let after = rig.status();
    let files = |status: &Status| (status.files_stored, status.files_free, status.files_writing);
    assert_eq!(files(&after), files(&before));
    assert_eq!(after.refused_calls, before.refused_calls, "no room was asked for");
}

#[test]
fn a_pool_that_does_not_fit_its_memory_is_refused() {
    let rig = Rig::new();
    let whole = PoolLayout::contiguous(&SHAPE, 16);
    let rows = |change: fn(&mut Vec<u64>)| {
        let mut rows = whole.rows.clone();
        change(&mut rows);
        PoolLayout { rows, ..whole.clone() }
    };
    for (wrong, why) in [
        (PoolLayout { blocks: 17, ..whole.clone() }, "the last of its 17 blocks"),
        (PoolLayout { blocks: 0, ..whole.clone() }, "at least one block"),
        (PoolLayout { blocks: u32::MAX, ..whole.clone() }, "objects of"),
        (PoolLayout { block_stride: u64::MAX, ..whole.clone() }, ""),
        (PoolLayout { block_stride: 4094, ..whole.clone() }, "stride"),
        (PoolLayout { block_stride: 0, ..whole.clone() }, "stride"),
        (rows(|rows| rows[5] = u64::MAX), ""),
        (rows(|rows| rows[5] = rows[4]), "overlap"),
        (rows(|rows| rows[1] += 1), "overlap"),
        (rows(|rows| rows.truncate(2)), "rows"),
        (rows(Vec::clear), ""),
    ] {
        let asked = format!("{wrong:?}");
        let pool = Some((wrong, memory().0));
        let error = Client::join(rig.socket(), SHAPE, None, pool);
        let error = error.unwrap_err();
        assert!(error.to_string().contains(why), "{asked}: {error}");
        assert_eq!(kind(error), RefusalKind::Argument, "{asked}");
    }
    let large = Client::connect(rig.socket(), SHAPE, 1 << 20).unwrap_err();
    assert_eq!(kind(large), RefusalKind::Argument);
    let other = KvShape { layers: 2, ..SHAPE };
    let error = Client::connect(rig.socket(), other, 16).unwrap_err();
    assert!(error.to_string().contains("given: 2 layers x "), "{error}");
    let status = rig.settled();
    assert_eq!((status.sessions.len(), status.refused_calls), (0, 12));
}

#[test]
fn text_that_is_no_call_ends_only_its_connection() {
    let rig = Rig::new();
    let client = rig.client();
    let long = u32::MAX.to_le_bytes();
    let frames: [&[u8]; 5] =
        [b"\x02\0\0\0{}", b"\x04\0\0\0\xFF\0\0\0", b"no HTTP/1.1\r\n\r\n", &long, b"\0\0\0\0"];
    for frame in frames {
        let mut stream = UnixStream::connect(rig.socket()).unwrap();
        stream.write_all(frame).unwrap();
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer) {
            Ok(_) => {
                let refused = postcard::from_bytes(&answer[4..]).unwrap();
                assert!(
                    matches!(refused, Answer::Refused { kind: RefusalKind::Message, .. }),
                    "{refused:?}"
                );
            }
            // The server has left something unread.
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
        }
    }
    // A call before the session, and another version.
    for (call, why) in [
        (Call::Counts, "another one than hello"),
        (Call::Hello { version: 0, pool: None, after: None, member: None }, "version 0"),
        (Call::Attach { session: Bytes(vec![0]) }, "no such session"),
    ] {
        let mut stream = UnixStream::connect(rig.socket()).unwrap();
        stream.write_all(&framed(&call)).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert!(String::from_utf8_lossy(&answer).contains(why), "{call:?}");
    }
    assert_eq!(rig.status().refused_messages, 8);
    store(&client, "after", &keys(0..2));
}

#[test]
fn limits_hold() {
    let rig = Rig::new();
    let clients: Vec<Client> = (0..4).map(|_| rig.client()).collect();
    let fifth = Client::connect(rig.socket(), SHAPE, 16).unwrap_err();
    assert_eq!(kind(fifth), RefusalKind::Limit);
    let client = &clients[0];
    let space = client.namespace(&space("limits")).unwrap();
    let requests: Vec<_> = (0..256).map(|_| client.allocate(space, &[], &[]).unwrap()).collect();
    let more = client.allocate(space, &[], &[]).unwrap_err();
    assert_eq!(kind(more), RefusalKind::Limit);
    drop(requests);
    drop(client.allocate(space, &[], &[]).unwrap());
    for at in 1..64 {
        client.namespace(&self::space(&at.to_string())).unwrap();
    }
    let more = client.namespace(&self::space("one more")).unwrap_err();
    assert_eq!(kind(more), RefusalKind::Limit);
    assert_eq!(client.namespace(&self::space("limits")).unwrap(), space, "it has that already");
}

#[test]
fn requests_end_together_or_not_at_all() {
    let rig = Rig::new();
    let raw = Raw::new(&rig);
    let named = Call::Namespace(space("mine"));
    let Answer::Number(namespace) = raw.call(&named) else { panic!("no namespace") };
    let lookup = Call::Lookup { namespace, keys: Keys(Vec::new()) };
    let Answer::Prefix { prefix, .. } = raw.call(&lookup) else { panic!("no prefix") };
    let load = Call::Load { prefix, positions: Vec::new(), blocks: Vec::new(), layers: 0 };
    let Answer::Request { request, .. } = raw.call(&load) else { panic!("no request") };
    for wrong in [vec![request, request + 1], vec![request, request]] {
        assert_eq!(raw.refused(&Call::End { requests: wrong }), RefusalKind::Argument);
    }
    let ended = raw.call(&Call::End { requests: vec![request] });
    assert!(matches!(&ended, Answer::Ended(all) if all.len() == 1), "{ended:?}");
}

#[test]
fn a_connection_that_is_refused_costs_no_session() {
    let rig = Rig::limited(TempDir::new().unwrap(), 1, BTreeMap::new());
    let client = rig.client();
    let space = client.namespace(&space("full")).unwrap();
    // With that of the client, as many as the server takes.
    let others: Vec<_> = (0..32).map(|_| UnixStream::connect(rig.socket()).unwrap()).collect();
    let mut answer = Vec::new();
    UnixStream::connect(rig.socket()).unwrap().read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains("33 of the 33 connections"), "{answer}");
    // A program that controls is told the same, and not that it is no answer.
    let refused = rig.control().get::<Status>("/status").unwrap_err();
    assert!(refused.to_string().contains("33 of the 33 connections"), "{refused}");
    thread::scope(|scope| {
        for _ in 0..8 {
            let lookups = || (0..20).for_each(|_| drop(client.lookup(space, &keys(0..4)).unwrap()));
            scope.spawn(lookups);
        }
    });
    drop(others);
    client.close().unwrap();
}

#[test]
fn clients_that_come_together_stay_within_the_limit() {
    let rig = Rig::limited(TempDir::new().unwrap(), 9, BTreeMap::new());
    let clients: Vec<Client> = (0..8).map(|_| rig.client()).collect();
    let rig = Rig::limited(rig.close(), 1, BTreeMap::new());
    let come = thread::scope(|scope| {
        let come: Vec<_> = clients.iter().map(|one| scope.spawn(|| one.reconnect())).collect();
        come.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(come.iter().filter(|one| one.is_ok()).count(), 1, "{come:?}");
    drop((clients, rig));
}

#[test]
fn a_client_holds_so_many_positions() {
    let rig = Rig::new();
    let client = rig.client();
    store(&client, "held", &keys(0..1));
    let space = client.namespace(&space("held")).unwrap();
    let copies = vec![keys(0..1)[0]; 1 << 15];
    let mut held: Vec<_> = (0..32).map(|_| client.lookup(space, &copies).unwrap()).collect();
    assert_eq!(held[31].len(), copies.len());
    let more = client.lookup(space, &copies[..1]).unwrap_err();
    assert_eq!(kind(more), RefusalKind::Limit);
    drop(held.pop());
    drop(client.lookup(space, &copies[..1]).unwrap());
    drop(held);
    assert_eq!(rig.status().files_referenced, 0);
    // As many as a message has room for.
    let copies = vec![keys(0..1)[0]; 1 << 17];
    let found = client.lookup(space, &copies).unwrap();
    assert!((1 << 15..1 << 16).contains(&found.len()), "{}", found.len());
    assert_eq!(client.peek(space, &copies).unwrap(), found.len());
    assert_eq!(client.are_stored(space, &copies).unwrap(), vec![true; copies.len()]);
    assert!(client.reserve(space, &copies[..1]).unwrap().positions().is_empty());
}

#[test]
fn a_client_with_a_limit_waits_for_its_turns() {
    let uid = rustix::process::geteuid().as_raw();
    // 8 blocks of 24 KiB take 3/4 of a second at a quarter of a MiB.
    let bandwidth = BTreeMap::from([(uid, NonZeroU64::new(256 << 10).unwrap())]);
    let rig = Rig::limited(TempDir::new().unwrap(), 4, bandwidth);
    let client = rig.client();
    let since = Instant::now();
    store(&client, "slow", &keys(0..8));
    assert!(since.elapsed() > Duration::from_millis(450), "{:?}", since.elapsed());
    assert_eq!(found(&client, "slow", &keys(0..8)), 8);
    assert!(since.elapsed() > Duration::from_millis(1150), "{:?}", since.elapsed());
    drop(client);
    // A layer whose turn is far away, here by a minute, is refused, and nothing else is lost.
    let bandwidth = BTreeMap::from([(uid, NonZeroU64::new(2 << 10).unwrap())]);
    let rig = Rig::limited(rig.close(), 4, bandwidth);
    let client = rig.client();
    let space = client.namespace(&space("slow")).unwrap();
    let later: Vec<_> = (1..6)
        .map(|at| client.allocate(space, &keys(16 * at..16 * (at + 1)), &blocks(0, 16)).unwrap())
        .collect();
    thread::scope(|scope| {
        let starts: Vec<_> = later
            .iter()
            .flat_map(|save| (0..3).map(move |layer| (save, Layer(layer))))
            .map(|(save, layer)| scope.spawn(move || save.start(layer)))
            .collect();
        let ends: Vec<_> = starts.into_iter().map(|start| start.join().unwrap()).collect();
        let refused = ends.into_iter().filter_map(Result::err).map(kind);
        let refused: Vec<RefusalKind> = refused.collect();
        assert!(!refused.is_empty());
        assert!(refused.iter().all(|kind| *kind == RefusalKind::Limit), "{refused:?}");
    });
}

#[test]
fn what_a_client_leaves_is_given_back() {
    let rig = Rig::new();
    let free = rig.status().files_free;
    let client = rig.client();
    let space = client.namespace(&space("left")).unwrap();
    let request = client.allocate(space, &keys(0..8), &blocks(0, 8)).unwrap();
    request.start(Layer(0)).unwrap();
    request.start(Layer(1)).unwrap();
    let status = rig.status();
    assert_eq!((status.sessions[0].requests, status.files_writing), (1, 8));
    // The handles are forgotten, as when the process is killed.
    std::mem::forget((request, client.clone()));
    let links = std::mem::ManuallyDrop::new(client);
    links.reconnect().unwrap();
    // The earlier session has ended by now.
    let status = rig.status();
    assert_eq!((status.sessions.len(), status.sessions_ended >= 1), (1, true));
    let left = (status.files_writing, status.files_referenced, status.files_free);
    assert_eq!(left, (0, 0, free));
    assert_eq!(links.peek(space, &keys(0..8)).unwrap(), 0);
}

#[test]
fn a_session_that_is_closed_has_ended() {
    let rig = Rig::new();
    let client = rig.client();
    let space = client.namespace(&space("closed")).unwrap();
    let request = client.allocate(space, &keys(0..8), &blocks(0, 8)).unwrap();
    request.start(Layer(0)).unwrap();
    client.check().unwrap();
    client.close().unwrap();
    let status = rig.status();
    let left = (status.sessions.len(), status.files_writing, status.files_referenced);
    assert_eq!(left, (0, 0, 0));
    client.close().unwrap();
    for error in [client.check(), client.sync(), request.start(Layer(1))] {
        let error = error.unwrap_err();
        assert!(matches!(error, ServeError::Stack(StackError::Closed)), "{error}");
    }
}

#[test]
fn a_server_that_ends_is_an_error_at_once() {
    let rig = Rig::new();
    let client = rig.client();
    store(&client, "kept", &keys(0..4));
    let space = client.namespace(&space("kept")).unwrap();
    let prefix = client.lookup(space, &keys(0..4)).unwrap();
    let dir = rig.close();
    let error = client.peek(space, &keys(0..4)).unwrap_err();
    assert!(matches!(error, ServeError::Lost { .. }), "{error}");
    assert!(matches!(client.retrieve(&prefix, 0, &blocks(0, 4)), Err(ServeError::Lost { .. })));
    assert!(matches!(client.reconnect(), Err(ServeError::Socket { .. })));
    assert!(matches!(client.peek(space, &keys(0..4)), Err(ServeError::Lost { .. })));
    let rig = Rig::on(dir);
    until("it has connected again", || client.peek(space, &keys(0..4)).is_ok_and(|n| n == 4));
    assert!(matches!(client.retrieve(&prefix, 0, &blocks(0, 4)), Err(ServeError::Stale)));
    drop(prefix);
    assert_eq!(found(&client, "kept", &keys(0..4)), 4);
    drop(client);
    drop(rig);
}

#[test]
fn a_second_server_does_not_take_the_socket() {
    let rig = Rig::new();
    let dir = TempDir::new().unwrap();
    let stack = |name: &str| {
        let config = StackConfig::at(dir.path().join(name));
        let config = StackConfig { capacity: Some(CAPACITY), ..config };
        Builder::new(config, SHAPE).open().unwrap()
    };
    let options = |socket| {
        let mut options: ServerOptions = rig::options(socket);
        options.settings.users = vec![4_000_000];
        options
    };
    let refused = Server::bind(stack("one"), options(rig.socket())).unwrap_err();
    assert!(matches!(refused, ServeError::InUse { .. }), "{refused}");
    drop(rig.client());
    // Nor that of one that hangs: it has room for one connection, which it does not take.
    let path = dir.path().join("hung.sock");
    let hung = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&hung, 0).unwrap();
    let _first = UnixStream::connect(&path).unwrap();
    let refused = Server::bind(stack("hung"), options(path)).unwrap_err();
    assert!(matches!(refused, ServeError::InUse { .. }), "{refused}");
    // The socket of a server that was killed is replaced.
    let stale = dir.path().join("stale.sock");
    drop(UnixListener::bind(&stale).unwrap());
    let server = Server::bind(stack("two"), options(stale.clone())).unwrap();
    let mode = std::fs::metadata(&stale).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o666, "others may connect, and are checked then");
    drop(server);
    assert!(!stale.exists());
    // A file that is no socket stays.
    std::fs::write(&stale, "mine").unwrap();
    assert!(Server::bind(stack("three"), options(stale.clone())).is_err());
    assert_eq!(std::fs::read(&stale).unwrap(), b"mine");
}

#[test]
fn an_error_of_a_socket_says_what_helps() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    let stale = path("stale");
    drop(UnixListener::bind(&stale).unwrap());
    let long = path(&"a".repeat(120));
    for (socket, advice) in [
        (path("absent"), "start a server (`ripieno serve`)"),
        (stale, "nobody listens there"),
        (long.clone(), "107 bytes at most"),
    ] {
        let control = Control::new(ControlAddress::Unix(socket.clone()));
        for error in [
            Client::connect(&socket, SHAPE, 16).unwrap_err(),
            control.get::<Status>("/status").unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(text.contains(advice), "{text}");
        }
    }
    let file = path("file");
    std::fs::write(&file, "mine").unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let none = path("none");
    for (socket, http, advice) in [
        (path("no/directory"), None, "make the directory first"),
        (long, None, "107 bytes at most"),
        (file, None, "remove that file"),
        (none.clone(), Some(taken.local_addr().unwrap()), "end the program that listens there"),
        // A block of addresses for documents.
        (none, Some(([192, 0, 2, 1], 0).into()), "an address of this machine"),
    ] {
        let config = StackConfig { capacity: Some(CAPACITY), ..StackConfig::at(path("store")) };
        let stack = Builder::new(config, SHAPE).open().unwrap();
        let options = ServerOptions { http, ..rig::options(socket) };
        let text = Server::bind(stack, options).unwrap_err().to_string();
        assert!(text.contains(advice), "{text}");
    }
}
