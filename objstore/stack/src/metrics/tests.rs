use std::{collections::HashSet, io::Read as _, io::Write as _, os::unix::net::UnixStream};

use objstore::{BlockId, BlockKey, KvShape};

use super::*;
use crate::{Builder, Stack, StackConfig, address::MetricsAddress};

const SHAPE: KvShape = KvShape { layers: 2, segments: 2, object_bytes: 4096, block_tokens: 16 };

fn open(dir: &tempfile::TempDir, address: &MetricsAddress) -> Result<Stack, crate::StackError> {
    let (path, capacity) = (Some(dir.path().join("store")), Some(64 << 20));
    let metrics = Some(address.clone());
    let config = StackConfig { path, capacity, metrics, ..StackConfig::default() };
    Builder::new(config, SHAPE).open()
}

fn socket(dir: &tempfile::TempDir) -> MetricsAddress {
    MetricsAddress::Unix(dir.path().join("metrics.sock"))
}

fn ask(address: &MetricsAddress, request: &str) -> String {
    let mut answer = String::new();
    match address {
        MetricsAddress::Unix(path) => {
            let mut stream = UnixStream::connect(path).expect("somebody listens");
            stream.write_all(request.as_bytes()).expect("it reads");
            stream.read_to_string(&mut answer).expect("it answers");
        }
        MetricsAddress::Tcp(address) => {
            let mut stream = std::net::TcpStream::connect(address).expect("somebody listens");
            stream.write_all(request.as_bytes()).expect("it reads");
            stream.read_to_string(&mut answer).expect("it answers");
        }
    }
    answer
}

/// Returns a sample of a scrape.
fn value(answer: &str, name: &str) -> f64 {
    let found = answer.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("no {name} in {answer}")).parse().expect("a number")
}

const GET: &str = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";

#[test]
fn names_follow_the_rules_of_openmetrics_and_occur_once() {
    let mut seen = HashSet::new();
    for metric in METRICS {
        let Metric { name, help, .. } = metric;
        assert!(seen.insert(name), "{name} is there twice");
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
        assert!(!name.ends_with("_total") && !name.ends_with("_info"), "{name}: a suffix");
        assert!(help.ends_with('.') && !help.contains(['\\', '\n', '"']), "{name}: {help}");
        let is_time = metric.kind == MetricKind::Histogram;
        assert!(!is_time || metric.unit() == "seconds", "{name} has no unit");
    }
}

#[test]
fn a_scrape_has_the_counters_of_the_store() {
    let dir = tempfile::tempdir().expect("a directory");
    let address = socket(&dir);
    let stack = open(&dir, &address).expect("a store");
    let (keys, blocks) = ([BlockKey([1; 32]), BlockKey([2; 32])], [BlockId(0), BlockId(1)]);
    assert_eq!(stack.save(&keys, &blocks).expect("saved"), 2);
    assert_eq!(stack.load(&keys, &blocks).expect("loaded"), [true; 2]);
    stack.metrics().expect("asked for").compute_saved().add(Duration::from_millis(1500));
    let answer = ask(&address, GET);
    let stats = stack.store().stats().expect("counts");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.contains("Content-Type: application/openmetrics-text; version=1.0.0"));
    assert!(answer.ends_with("# EOF\n"), "{answer}");
    let bytes = 2 * SHAPE.block_bytes();
    for (name, expected) in [
        ("stored_bytes_total", bytes),
        ("loaded_bytes_total", bytes),
        ("read_bytes_total", bytes),
        ("device_commands_total{device=\"0\"}", stats.plane.ring.total.commands),
        ("commands_total", stats.plane.ring.total.commands),
        ("sq_doorbells_total", stats.plane.ring.total.sq_doorbells),
        ("journal_bytes_total", stats.journal_bytes),
        ("hit_tokens_total", 2 * 16),
        ("used_blocks", 2),
        ("capacity_blocks", stats.files.files.into()),
        ("load_seconds_count", 1),
        ("save_seconds_count", 1),
        ("layers_in_flight", 0),
        ("healthy", 1),
        ("device_wear_percent{device=\"0\"}", 0),
        ("device_media_errors_total{device=\"0\"}", 0),
        ("path_info{route=\"host\"}", 1),
        ("compute_saved_seconds_count", 1),
        ("compute_saved_seconds_bucket{le=\"1.0\"}", 0),
        ("compute_saved_seconds_bucket{le=\"3.0\"}", 1),
        ("compute_saved_seconds_bucket{le=\"10.0\"}", 1),
        ("compute_saved_seconds_bucket{le=\"+Inf\"}", 1),
    ] {
        assert_eq!(value(&answer, &format!("ripieno_{name}")), expected as f64, "{name}");
    }
    assert_eq!(value(&answer, "ripieno_compute_saved_seconds_sum"), 1.5);
    assert!(value(&answer, "ripieno_load_seconds_sum") > 0.0);
    assert!(value(&answer, "ripieno_uptime_seconds") > 0.0);
    stack.close().expect("closed");
    let MetricsAddress::Unix(path) = &address else { unreachable!() };
    assert!(!path.exists(), "the socket is left");
}

#[test]
fn the_older_format_is_for_those_who_ask_for_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let address = socket(&dir);
    let _stack = open(&dir, &address).expect("a store");
    let of = |accept| ask(&address, &format!("GET /metrics HTTP/1.1\r\nAccept: {accept}\r\n\r\n"));
    let older = of("text/plain;version=0.0.4;q=0.5");
    assert!(older.contains("Content-Type: text/plain; version=0.0.4"), "{older}");
    for line in ["# TYPE ripieno_commands_total counter", "# TYPE ripieno_path_info gauge"] {
        assert!(older.contains(line), "{line}: {older}");
    }
    assert!(!older.contains("# UNIT") && !older.contains("# EOF"), "{older}");
    assert_eq!(value(&older, "ripieno_healthy"), 1.0);
    let refuses = "text/plain;version=0.0.4;q=0.9, application/openmetrics-text;q=0.0";
    assert!(of(refuses).contains("Content-Type: text/plain"));
    // Prometheus names both.
    for accept in ["application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "*/*"] {
        assert!(of(accept).ends_with("# EOF\n"), "{accept}");
    }
}

#[test]
fn a_closed_plane_is_reported_as_unhealthy() {
    let dir = tempfile::tempdir().expect("a directory");
    let address = socket(&dir);
    let stack = open(&dir, &address).expect("a store");
    stack.store().plane().close("a test").expect("closed");
    let answer = ask(&address, GET);
    assert_eq!(value(&answer, "ripieno_healthy"), 0.0);
    assert!(!answer.contains("ripieno_commands_total"), "{answer}");
}

#[test]
fn other_requests_are_refused_and_a_silent_client_delays_no_other_for_long() {
    let dir = tempfile::tempdir().expect("a directory");
    let address = socket(&dir);
    let _stack = open(&dir, &address).expect("a store");
    let MetricsAddress::Unix(path) = &address else { unreachable!() };
    let _silent = UnixStream::connect(path).expect("somebody listens");
    assert!(ask(&address, GET).ends_with("# EOF\n"));
    assert!(ask(&address, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
    assert!(ask(&address, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
    assert!(ask(&address, "GET /metrics?name=a HTTP/1.1\r\n\r\n").ends_with("# EOF\n"));
}

#[test]
fn an_address_is_used_by_one_store_and_a_stale_socket_by_the_next() {
    let (dir, other) = (tempfile::tempdir().expect("a"), tempfile::tempdir().expect("b"));
    let address = socket(&dir);
    let MetricsAddress::Unix(path) = &address else { unreachable!() };
    // A process that is killed does not remove its socket.
    drop(std::os::unix::net::UnixListener::bind(path).expect("bound"));
    let _stack = open(&dir, &address).expect("the stale socket is replaced");
    let refused = open(&other, &address).expect_err("it is in use").to_string();
    assert!(refused.contains("metrics.sock") && refused.contains("in use"), "{refused}");
    let port = open(&other, &"0".parse().expect("any port")).expect("a store");
    let tcp = port.metrics().expect("asked for").address().clone();
    assert!(ask(&tcp, GET).ends_with("# EOF\n"));
}

#[test]
fn addresses_are_of_this_machine_unless_they_are_called_public() {
    let parse = str::parse::<MetricsAddress>;
    for (text, expected) in [
        ("9400", "127.0.0.1:9400"),
        ("127.0.0.1:9400", "127.0.0.1:9400"),
        ("[::1]:9400", "[::1]:9400"),
        ("public:0.0.0.0:9400", "0.0.0.0:9400"),
        ("./metrics.sock", "./metrics.sock"),
    ] {
        assert_eq!(parse(text).map(|found| found.to_string()).as_deref(), Ok(expected));
    }
    let public = parse("0.0.0.0:9400").expect_err("other machines reach it");
    assert!(public.contains("write public:0.0.0.0:9400"), "{public}");
    for text in ["", "localhost:9400", "9400000", "metrics.sock", "/run/"] {
        let unknown = parse(text).expect_err(text);
        assert!(unknown.contains("is no address"), "{unknown}");
    }
}
