//! Metrics of a replay, and `ripieno top`, as a user would use them.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};

use ripieno_testkit::until;
use serde_json::Value;

fn ripieno(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.args(words).env_remove("RUST_LOG");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A replay that would run for minutes; killed on drop.
struct Replay(Child);

impl Replay {
    fn start(socket: &str) -> Self {
        let line = ["replay", "--model", "mini", "--requests", "50000", "--capacity", "32MiB"];
        let mut command = ripieno(&line);
        command.args(["--metrics", socket, "--quiet"]).stdout(Stdio::null());
        Self(command.spawn().expect("it starts"))
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `top` until the replay serves its metrics, and it has loaded and stored in that second.
fn top(words: &[&str]) -> Output {
    let run = || ripieno(&[&["top"], words].concat()).output().expect("it runs");
    let mut output = run();
    until("it is busy", || {
        output = run();
        let shown = text(&output.stdout);
        let has_loads = shown.contains("worth") && shown.contains("loads");
        let idle = ["\"loads\":0.0", " 0 loads", "\"write_bytes_s\":0.0", "\"commands_s\":0.0"];
        has_loads && !idle.iter().any(|it| shown.contains(it))
    });
    output
}

#[test]
fn top_watches_a_replay_under_load() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("metrics.sock");
    let socket = socket.to_str().unwrap();
    let replay = Replay::start(socket);
    let output = top(&[socket, "--once", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let figures: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{value} in {figures}"));
    assert_eq!((&figures["healthy"], &figures["path"]), (&true.into(), &"host".into()));
    assert!(number(&figures["commands_s"]) > 0.0, "{figures}");
    assert!(number(&figures["write_bytes_s"]) > 0.0, "{figures}");
    assert!((0.0..=1.0).contains(&number(&figures["hit_rate"])), "{figures}");
    assert!(number(&figures["worth"]["load_s"]) > 0.0, "{figures}");
    assert!(figures["worth"]["compute_saved_s"].is_null(), "mini is no real model: {figures}");
    assert_eq!(number(&figures["devices"][0]["wear_percent"]), 0.0, "{figures}");
    assert_eq!(figures["waits"].as_array().map(Vec::len), Some(4), "{figures}");

    let output = top(&[socket, "--once"]);
    let lines = text(&output.stdout);
    for name in ["path", "read", "commands", "errors", "wear", "hits", "layers", "waits", "worth"] {
        assert!(lines.lines().any(|line| line.starts_with(name)), "{name}: {lines}");
    }
    assert!(lines.contains("computing: not reported"), "{lines}");
    assert!(lines.lines().all(|line| line.chars().count() <= 60), "{lines}");
    assert!(!lines.contains('\u{1b}'), "no terminal, no escapes: {lines:?}");
    drop(replay);
}

#[test]
fn without_an_end_it_shows_each_second_until_the_store_ends() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("metrics.sock");
    let socket = socket.to_str().unwrap();
    let replay = Replay::start(socket);
    assert!(top(&[socket, "--once"]).status.success());
    let mut child = ripieno(&["top", socket, "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut shown = BufReader::new(child.stdout.take().expect("its output")).lines();
    for _ in 0..2 {
        shown.next().expect("a line").expect("text");
    }
    drop(replay);
    shown.for_each(drop);
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{output:?}");
    assert!(text(&output.stderr).contains("has ended"), "{output:?}");
}

#[test]
fn wrong_addresses_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let nobody = dir.path().join("nobody");
    let output = ripieno(&["top", nobody.to_str().unwrap()]).output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains("no metrics of a store are at") && err.contains(" hint: "), "{err}");

    // Something else answers.
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port().to_string();
    let answer = std::thread::spawn(move || {
        use std::io::{Read as _, Write as _};
        let (mut stream, _) = other.accept().unwrap();
        let _ = stream.read(&mut [0; 1024]);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nhello\n");
    });
    let output = ripieno(&["top", &port]).output().unwrap();
    answer.join().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("not that of a store"), "{output:?}");

    let dir = dir.path().to_str().unwrap();
    for (address, wanted) in [
        ("0.0.0.0:9400", "public:0.0.0.0:9400"),
        ("metrics.sock", "is no address"),
        (&format!("{dir}/there/is/none"), "No such file or directory"),
    ] {
        let output =
            ripieno(&["replay", "--model", "tiny", "--requests", "5", "--metrics", address])
                .output()
                .unwrap();
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{address}: {err}");
        assert!(err.contains(wanted), "{address}: {err}");
    }
}
