//! Control over HTTP: what each request does.

use std::{
    collections::HashSet,
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    ops::Range,
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::PathBuf,
    time::{Duration, Instant},
};

use objstore::{BlockKey, Namespace};
use ripieno_serve::{Client, Control, ControlAddress, RefusalKind, ServeError, SpaceId};
use ripieno_testkit::{blocks, keys, pattern, until};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    openapi::Description,
    rig::{Rig, SHAPE, kind, moves},
};

/// Bytes of a stored block: its objects are whole pages.
const FILE_BYTES: u64 = 6 * 4096;

/// Keys as they are written in JSON.
pub fn keys_of(range: Range<u32>) -> Vec<String> {
    let hex = |key: &BlockKey| key.0.iter().map(|byte| format!("{byte:02x}")).collect();
    keys(range).iter().map(hex).collect()
}

fn bytes(key: BlockKey) -> Vec<u8> {
    pattern(SHAPE.block_bytes() as usize, key.seed() as u64)
}

/// Sends a request, and returns status, head and body of the answer.
pub fn exchange(socket: &PathBuf, request: &[u8]) -> (u16, String, String) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    split(&answer)
}

pub fn split(answer: &[u8]) -> (u16, String, String) {
    let text = String::from_utf8(answer.to_vec()).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text}"));
    let status = head.strip_prefix("HTTP/1.1 ").unwrap()[..3].parse().unwrap();
    (status, head.to_owned(), body.to_owned())
}

pub fn request(method: &str, path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
}

/// A client, and control whose answers are held against their description.
pub struct Store<'a> {
    rig: &'a Rig,
    client: Client,
    pub description: Description,
}

impl<'a> Store<'a> {
    pub fn new(rig: &'a Rig) -> Self {
        Self { rig, client: rig.client(), description: Description::read() }
    }

    fn space(&self, label: &str) -> SpaceId {
        let space = Namespace { layout: label.into(), label: label.into(), ..Namespace::default() };
        self.client.namespace(&space).unwrap()
    }

    /// Stores blocks in a namespace, and returns its number.
    pub fn fill(&self, label: &str, range: Range<u32>) -> u32 {
        let space = self.space(label);
        let (keys, from) = (keys(range.clone()), blocks(0, keys(range).len()));
        for (key, block) in keys.iter().zip(&from) {
            self.client.write(*block, &bytes(*key)).unwrap();
        }
        assert_eq!(self.client.save(space, &keys, &from).unwrap(), keys.len());
        self.number(label)
    }

    fn number(&self, label: &str) -> u32 {
        let status = self.rig.status();
        let found = status.namespaces.iter().find(|space| space.label == label);
        found.unwrap().namespace
    }

    pub fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let (status, _, answer) =
            exchange(&self.rig.socket(), request(method, path, body).as_bytes());
        (status, answer)
    }

    /// Asks, and returns the answer, which must have this status and be as described.
    pub fn expect(&mut self, method: &str, path: &str, body: &Value, status: u16) -> Value {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (found, answer) = self.ask(method, path, &body);
        assert_eq!(found, status, "{method} {path} {body}: {answer}");
        self.description.check(method, path, &body, found, &answer);
        serde_json::from_str(&answer).unwrap_or(Value::Null)
    }

    fn post(&mut self, path: &str, body: &Value) -> Value {
        self.expect("POST", path, body, 200)
    }

    fn found(&mut self, namespace: u32, range: Range<u32>) -> u64 {
        let named = json!({"namespace": namespace, "keys": keys_of(range)});
        self.post("/directory/lookup", &named)["blocks"].as_u64().unwrap()
    }

    fn pin(&mut self, namespace: u32, range: Range<u32>, more: Value) -> Value {
        let mut asked = json!({"namespace": namespace, "keys": keys_of(range), "ttl_s": 60});
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.post("/cache/pins", &asked)
    }

    /// Evicts all blocks of a namespace that can be evicted.
    fn evict(&mut self, namespace: u32) {
        let path = format!("/quota/{namespace}");
        self.expect("PUT", &path, &json!({"bytes": 0}), 200);
        self.expect("PUT", &path, &json!({"bytes": null}), 200);
    }
}

#[test]
fn prefetched_blocks_are_loaded_from_memory() {
    let rig = Rig::new();
    Store::new(&rig).fill("mine", 0..8);
    let rig = Rig::with_dram(rig.close(), 1 << 20);
    let mut store = Store::new(&rig);
    let (space, mine) = (store.space("mine"), store.number("mine"));
    let named = json!({"namespace": mine, "keys": keys_of(0..9)});
    assert_eq!(store.post("/cache/prefetches", &named)["blocks"], 8, "the last one is not stored");
    let hint = json!({"action_id": "a", "action_type": "kv.prefetch", "action_version": "1.0",
        "payload": named});
    let hints = json!({"protocol_version": "0.1", "message_id": "m", "actions": [hint]});
    let answer = &store.post("/hints", &hints)["answers"][0];
    assert_eq!(
        (&answer["outcome"], &answer["reason"]),
        (&json!("clipped"), &json!("8 of 9 blocks"))
    );
    let read = format!("dram_prefetched_bytes_total {}\n", 8 * FILE_BYTES);
    until("they are read", || store.ask("GET", "/metrics", "").1.contains(&read));
    assert_eq!(store.client.load(space, &keys(0..8), &blocks(0, 8)).unwrap(), [true; 8]);
    for (key, block) in keys(0..8).iter().zip(blocks(0, 8)) {
        assert_eq!(store.client.read(block).unwrap(), bytes(*key));
    }
    let (_, metrics) = store.ask("GET", "/metrics", "");
    assert!(metrics.contains("dram_hit_blocks_total 8\n"), "{metrics}");
}

#[test]
fn a_pin_protects_until_it_ends() {
    let rig = Rig::new();
    let mut store = Store::new(&rig);
    let mine = store.fill("mine", 0..8);
    let made = store.pin(mine, 0..4, json!({}));
    assert_eq!((made["outcome"].as_str(), &made["reason"]), (Some("accepted"), &Value::Null));
    assert_eq!(made["pin"]["bytes"], 4 * FILE_BYTES);
    store.evict(mine);
    assert_eq!(store.found(mine, 0..8), 4);
    let list = store.expect("GET", "/cache/pins", &Value::Null, 200);
    assert_eq!(list["pins"].as_array().unwrap().len(), 1);
    assert_eq!((&list["bytes"], rig.status().pins), (&json!(4 * FILE_BYTES), 1));
    // It ends by hand, with time, and by a deletion.
    let pin = made["pin"]["pin"].as_u64().unwrap();
    assert_eq!(
        store.expect("DELETE", &format!("/cache/pins/{pin}"), &json!(null), 200)["blocks"],
        4
    );
    store.evict(mine);
    assert_eq!((store.found(mine, 0..4), rig.status().files_referenced), (0, 0));
    store.fill("mine", 0..4);
    let since = Instant::now();
    store.pin(mine, 0..4, json!({"ttl_s": 2}));
    until("the pin ends", || rig.status().pins == 0);
    assert!(since.elapsed() >= Duration::from_secs(2), "it ended after {:?}", since.elapsed());
    store.evict(mine);
    assert_eq!(store.found(mine, 0..4), 0);
    store.fill("mine", 0..4);
    store.pin(mine, 0..4, json!({}));
    assert_eq!(store.post("/cache/clear", &json!({"namespace": mine}))["blocks"], 4);
    let status = rig.status();
    assert_eq!((status.pins, status.files_referenced, store.found(mine, 0..4)), (0, 0, 0));
    // A server that ends with a pin closes its store.
    store.fill("mine", 0..4);
    store.pin(mine, 0..4, json!({}));
    drop(store);
    rig.close();
}

#[test]
fn pins_stay_within_their_limits() {
    let rig = Rig::with(TempDir::new().unwrap(), |options| {
        options.settings.pins.bytes = Some(5 * FILE_BYTES);
        options.settings.pins.ttl = Duration::from_secs(100);
    });
    let mut store = Store::new(&rig);
    let mine = store.fill("mine", 0..6);
    let outcome = |made: &Value| made["outcome"].as_str().unwrap().to_owned();
    let missing = store.pin(mine, 50..52, json!({}));
    assert_eq!((outcome(&missing), &missing["pin"]), ("missing".into(), &Value::Null));
    let own = store.pin(mine, 0..2, json!({"bytes_max": FILE_BYTES + 1}));
    assert_eq!((outcome(&own), &own["pin"]["blocks"]), ("clipped".into(), &json!(1)));
    let long = store.pin(mine, 1..2, json!({"ttl_s": u64::MAX}));
    assert_eq!((outcome(&long), &long["pin"]["ends_in_s"]), ("clipped".into(), &json!(100)));
    // One is not stored yet: its room counts, and it is pinned later.
    let later = store.pin(mine, 5..7, json!({"wait": true}));
    assert_eq!(outcome(&later), "deferred", "{later}");
    assert_eq!((&later["pin"]["blocks"], &later["pin"]["awaited_blocks"]), (&json!(1), &json!(1)));
    let short = store.pin(mine, 2..5, json!({}));
    assert_eq!((outcome(&short), &short["pin"]["blocks"]), ("clipped".into(), &json!(1)));
    let full = store.pin(mine, 3..5, json!({}));
    assert_eq!((outcome(&full), &full["pin"]), ("rejected".into(), &Value::Null));
    store.fill("mine", 6..7);
    let awaited = |store: &mut Store<'_>| {
        let list = store.expect("GET", "/cache/pins", &Value::Null, 200);
        list["pins"][2]["awaited_blocks"].as_u64().unwrap()
    };
    until("it is pinned", || awaited(&mut store) == 0);
    store.evict(mine);
    assert_eq!((store.found(mine, 0..7), store.found(mine, 5..7)), (3, 2), "what is pinned");
    assert_eq!(rig.status().pinned_bytes, 5 * FILE_BYTES);
}

#[test]
fn each_hint_has_an_answer_of_its_own() {
    let rig = Rig::new();
    let mut store = Store::new(&rig);
    let mine = store.fill("mine", 0..4);
    let pin = |range, more: Value| {
        let mut asked = json!({"namespace": mine, "keys": keys_of(range), "ttl_s": 60});
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        asked
    };
    let actions = [
        ("kv.pin", "1.0", pin(0..4, json!({})), "accepted"),
        ("kv.pin", "1", pin(0..6, json!({})), "clipped"),
        ("kv.pin", "1.2", pin(0..6, json!({"wait": true})), "deferred"),
        ("kv.pin", "1.0", pin(9..12, json!({})), "missing"),
        ("kv.pin", "2.0", pin(0..4, json!({})), "rejected"),
        ("kv.pin", "1.0", json!({"session": "s"}), "rejected"),
        ("kv.pin", "1.0", pin(0..1, json!({"namespace": 99})), "missing"),
        ("kv.deref", "1.0", json!({"pin": 1}), "accepted"),
        ("kv.deref", "1.0", json!({"pin": 1}), "missing"),
        ("kv.retain", "1.0", json!({}), "rejected"),
        ("kv.prefetch", "1.0", json!({}), "rejected"),
        ("kv.demote", "1.0", json!({}), "rejected"),
        ("other", "1.0", json!({}), "rejected"),
    ];
    let sent: Vec<Value> = (0..)
        .zip(&actions)
        .map(|(at, (kind, version, payload, _))| {
            json!({"action_id": format!("{at}"), "action_type": kind, "action_version": version,
                "payload": payload, "a field of a later vLLM": 1})
        })
        .collect();
    let hints = json!({"protocol_version": "0.1", "message_id": "m", "actions": sent});
    let before = rig.status().refused_requests;
    let answered = store.post("/hints", &hints);
    assert_eq!(answered["message_id"], "m");
    let answers = answered["answers"].as_array().unwrap();
    assert_eq!(answers.len(), actions.len());
    for (at, (answer, (kind, .., outcome))) in answers.iter().zip(&actions).enumerate() {
        assert_eq!(answer["action_id"], at.to_string());
        assert_eq!(answer["outcome"], *outcome, "{kind} {at}: {answer}");
        assert_eq!(answer["reason"].is_null(), *outcome == "accepted", "{answer}");
    }
    assert_eq!(rig.status().refused_requests - before, 6, "the rejected ones");
    assert_eq!(rig.status().pins, 2);
    let many = json!({"protocol_version": "0.1", "message_id": "m", "actions": vec![&sent[9]; 65]});
    store.expect("POST", "/hints", &many, 400);
}

#[test]
fn checksums_tell_of_damage() {
    check_damage(&Rig::new());
}

#[test]
fn checksums_tell_of_damage_behind_the_dram_cache() {
    check_damage(&Rig::with_dram(TempDir::new().unwrap(), 1 << 20));
}

fn check_damage(rig: &Rig) {
    let mut store = Store::new(rig);
    let mine = store.fill("mine", 0..3);
    let mut asked = json!({"namespace": mine, "keys": keys_of(0..4)});
    let states = |answer: &Value| -> Vec<String> {
        let blocks = answer["blocks"].as_array().unwrap();
        blocks.iter().map(|block| block["state"].as_str().unwrap().to_owned()).collect()
    };
    let stored = store.post("/cache/checksums", &asked);
    assert_eq!(states(&stored), ["stored", "stored", "stored", "missing"]);
    let sums = |at: usize| stored["blocks"][at]["checksums"].as_array().unwrap().clone();
    assert_eq!((sums(0).len(), sums(3).len()), (6, 0), "one of each object");
    assert_ne!(sums(0), sums(1));
    asked["verify"] = json!(true);
    let read = store.post("/cache/checksums", &asked);
    assert_eq!(states(&read), ["intact", "intact", "intact", "missing"]);
    // A byte of the second block changes on the device.
    let object = &bytes(keys(1..2)[0])[..4096];
    let mut changed = 0;
    for file in fs::read_dir(rig.dir.path().join("store")).unwrap() {
        let path = file.unwrap().path();
        let mut media = fs::read(&path).unwrap();
        if let Some(at) = media.chunks(4096).position(|page| page == object) {
            media[at * 4096 + 5] ^= 1;
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            use std::os::unix::fs::FileExt as _;
            file.write_all_at(&media[at * 4096..][..4096], at as u64 * 4096).unwrap();
            file.sync_all().unwrap();
            changed += 1;
        }
    }
    assert_eq!(changed, 1);
    let read = store.post("/cache/checksums", &asked);
    assert_eq!(states(&read), ["intact", "damaged", "intact", "missing"]);
    assert_eq!(states(&store.post("/cache/checksums", &asked))[1], "missing", "it was dropped");
    asked["keys"] = json!(vec!["00".repeat(32); 1025]);
    store.expect("POST", "/cache/checksums", &asked, 400);
}

#[test]
fn quota_and_deletion_change_what_they_name() {
    let rig = Rig::new();
    let mut store = Store::new(&rig);
    let (mine, other) = (store.fill("mine", 0..6), store.fill("other", 0..6));
    let path = format!("/quota/{mine}");
    let quota = store.expect("PUT", &path, &json!({"bytes": 3 * FILE_BYTES + 1}), 200);
    assert_eq!(quota["quota_bytes"], 3 * FILE_BYTES, "whole files");
    assert_eq!((&quota["label"], &quota["stored_bytes"]), (&json!("mine"), &json!(3 * FILE_BYTES)));
    assert_eq!(store.expect("GET", &path, &Value::Null, 200), quota);
    assert_eq!(store.found(other, 0..6), 6);
    let named = json!({"namespace": other, "keys": keys_of(4..8)});
    assert_eq!(store.post("/cache/delete", &named)["blocks"], 2);
    assert_eq!(store.found(other, 0..6), 4);
    assert_eq!(store.post("/cache/clear", &json!({"namespace": other}))["blocks"], 4);
    assert_eq!(store.found(other, 0..6), 0);
    assert_eq!(store.found(mine, 0..1), 1);
}

/// Returns how many pages of these blocks the media have.
fn pages_on_media(rig: &Rig, range: Range<u32>) -> usize {
    let wanted: Vec<u8> = keys(range).iter().flat_map(|key| bytes(*key)).collect();
    let wanted: HashSet<&[u8]> = wanted.chunks(4096).collect();
    let media = fs::read_dir(rig.dir.path().join("store")).unwrap();
    let media: Vec<Vec<u8>> = media.map(|file| fs::read(file.unwrap().path()).unwrap()).collect();
    let pages = media.iter().flat_map(|bytes| bytes.chunks(4096));
    pages.filter(|page| wanted.contains(page)).count()
}

#[test]
fn nothing_of_what_was_erased_is_on_the_media() {
    let rig = Rig::new();
    let mut store = Store::new(&rig);
    let (mine, other) = (store.fill("mine", 0..12), store.fill("other", 100..104));
    store.fill("mine", 12..20);
    // These are evicted, and on the media like those that are cleared.
    store.expect("PUT", &format!("/quota/{mine}"), &json!({"bytes": 15 * FILE_BYTES}), 200);
    let clear = json!({"namespace": mine, "unused": true});
    let pin = store.pin(mine, 19..20, json!({}))["pin"]["pin"].as_u64().unwrap();
    let refused = store.expect("POST", "/cache/clear", &clear, 409);
    assert!(refused["message"].as_str().unwrap().starts_with("1 blocks of"), "{refused}");
    store.expect("DELETE", &format!("/cache/pins/{pin}"), &json!(null), 200);
    let held = store.client.lookup(store.space("mine"), &keys(19..20)).unwrap();
    store.expect("POST", "/cache/clear", &clear, 409);
    drop(held);
    until("the client holds nothing", || rig.status().files_referenced == 0);
    assert_eq!(store.post("/cache/clear", &clear)["blocks"], 15);
    assert_eq!(pages_on_media(&rig, 0..20), 20 * 6, "clearing overwrites nothing");
    let (mut next, mut erased) = (json!(0), 0);
    while !next.is_null() {
        let part = store.post("/cache/erase", &json!({"first": next}));
        erased += part["bytes"].as_u64().unwrap();
        next = part["next"].clone();
    }
    assert_eq!(erased, u64::from(rig.status().files_free) * FILE_BYTES);
    assert_eq!((pages_on_media(&rig, 0..20), pages_on_media(&rig, 100..104)), (0, 4 * 6));
    // Other blocks are whole, and the erased files are written again.
    assert_eq!(store.found(other, 100..104), 4);
    store.fill("mine", 0..12);
    assert_eq!(store.found(mine, 0..12), 12);
    let space = store.space("mine");
    assert_eq!(store.client.load(space, &keys(0..12), &blocks(0, 12)).unwrap(), [true; 12]);
}

#[test]
fn metrics_are_those_of_the_store() {
    let rig = Rig::new();
    let store = Store::new(&rig);
    store.fill("mine", 0..3);
    let (status, head, text) =
        exchange(&rig.socket(), request("GET", "/metrics?name=x", "").as_bytes());
    assert_eq!(status, 200);
    assert!(head.contains("application/openmetrics-text"), "{head}");
    assert!(text.contains("\nripieno_used_blocks 3\n") && text.ends_with("# EOF\n"), "{text}");
    let plain = b"GET /metrics HTTP/1.1\r\nAccept: text/plain\r\nConnection: close\r\n\r\n";
    let (_, head, text) = exchange(&rig.socket(), plain);
    assert!(head.contains("text/plain; version=0.0.4") && !text.contains("# EOF"), "{head}");
}

/// Asks over TCP, with a token.
fn over_tcp(address: SocketAddr, token: &str) -> Result<String, ServeError> {
    Control::new(ControlAddress::Tcp(address, token.to_owned())).ask("GET", "/status", None::<&()>)
}

#[test]
fn a_port_needs_the_token_of_the_time() {
    let rig = Rig::reloading();
    let address = rig.http.unwrap();
    over_tcp(address, "a token of 16 bytes").unwrap();
    let none = TcpStream::connect(address).and_then(|mut stream| {
        stream.write_all(b"GET /status HTTP/1.1\r\nConnection: close\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).map(|_| split(&answer))
    });
    let (status, head, _) = none.unwrap();
    assert!(status == 401 && head.contains("WWW-Authenticate: Bearer"), "{head}");
    for wrong in ["", "a token", "a token of 16 bytes!", "another token!!!!!!"] {
        assert_eq!(kind(over_tcp(address, wrong).unwrap_err()), RefusalKind::Denied, "{wrong}");
    }
    assert!(rig.status().refused_requests >= 5);
    rig.configure(|settings| settings.token = Some("another token!!!!!!".to_owned()));
    rig.control().ask("POST", "/reload", None::<&()>).unwrap();
    over_tcp(address, "another token!!!!!!").unwrap();
    assert_eq!(kind(over_tcp(address, "a token of 16 bytes").unwrap_err()), RefusalKind::Denied);
}

#[test]
fn settings_are_read_again_while_clients_are_served() {
    let rig = Rig::reloading();
    let store = Store::new(&rig);
    let uid = rustix::process::geteuid().as_raw();
    rig.configure(|settings| {
        settings.users = vec![4_000_000];
        settings.sessions_max = 1;
        settings.limits.insert(uid, moves((256 << 10).try_into().unwrap()));
    });
    let (status, answer) = store.ask("POST", "/reload", "");
    assert_eq!((status, &*answer), (200, r#"{"changed":["users","clients","limit"]}"#));
    let mode = fs::metadata(rig.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o666, "the new user can connect");
    let second = Client::connect(rig.socket(), SHAPE, 16).unwrap_err();
    assert_eq!(kind(second), RefusalKind::Limit);
    // 8 blocks of 24 KiB take 3/4 of a second, also for a client that came before.
    let since = Instant::now();
    store.fill("slow", 0..8);
    assert!(since.elapsed() > Duration::from_millis(450), "{:?}", since.elapsed());
    // A wrong one changes nothing.
    rig.break_configuration();
    let (status, answer) = store.ask("POST", "/reload", "");
    assert!(status == 409 && answer.contains("broken"), "{answer}");
    assert_eq!(kind(Client::connect(rig.socket(), SHAPE, 16).unwrap_err()), RefusalKind::Limit);
}
