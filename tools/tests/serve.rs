//! `ripieno serve` and `ripieno ctl`, as a user would use them.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Child, Command, Output, Stdio},
};

use tempfile::TempDir;

/// A process, killed on drop.
pub(crate) struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn ripieno(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.args(words).env_remove("RUST_LOG");
    command
}

pub(crate) fn config(dir: &Path) -> String {
    let path = dir.join("ripieno.toml");
    let at = dir.display();
    let text = format!(
        "socket = \"{at}/socket\"\n[store]\npath = \"{at}/store\"\ncapacity = \"16MiB\"\n[shape]\n\
         layers = 2\nsegments = 2\nobject_bytes = 4096\nblock_tokens = 16\n"
    );
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Starts a server, and waits until it serves.
pub(crate) fn serve(config: &str) -> Server {
    serve_saying(config).0
}

/// Same as [`serve`], and returns the line that it says.
fn serve_saying(config: &str) -> (Server, String) {
    let child = ripieno(&["serve", "--config", config]).stderr(Stdio::piped()).spawn().unwrap();
    let mut server = Server(child);
    let mut line = String::new();
    BufReader::new(server.0.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("serving at "), "{line}");
    (server, line)
}

fn ctl(dir: &Path, words: &[&str]) -> Output {
    let socket = dir.join("socket");
    let all = [&["ctl", "--socket", socket.to_str().unwrap()], words].concat();
    ripieno(&all).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn a_server_is_asked_and_ended() {
    let dir = TempDir::new().unwrap();
    let config = config(dir.path());
    let checked = ripieno(&["serve", "--check", "--config", &config]).output().unwrap();
    assert!(checked.status.success() && !dir.path().join("store").exists(), "only checked");
    assert!(text(&checked.stdout).starts_with("ok: "), "{}", text(&checked.stdout));
    let mut server = serve(&config);
    let status = ctl(dir.path(), &["status"]);
    assert!(status.status.success(), "{}", text(&status.stderr));
    assert!(text(&status.stdout).starts_with("store: 0 B of "), "{}", text(&status.stdout));
    let json = ctl(dir.path(), &["--json", "status"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["files_stored"], 0);
    assert!(json["files"].as_u64().unwrap() > 500, "{json}");
    let namespace = json["namespaces"][0]["namespace"].to_string();
    let found = ctl(dir.path(), &["lookup", "--namespace", &namespace, &"ab".repeat(32)]);
    assert_eq!(text(&found.stdout), "0\n", "{}", text(&found.stderr));
    let quota = ctl(dir.path(), &["quota", "--namespace", &namespace, "--bytes", "1MiB"]);
    assert!(text(&quota.stdout).ends_with("0 B of 1 MiB\n"), "{}", text(&quota.stderr));
    let nothing = ctl(dir.path(), &["quota", "--namespace", &namespace, "--bytes", "10"]);
    assert!(text(&nothing.stderr).contains("room for no block"), "{}", text(&nothing.stderr));
    assert_eq!(nothing.status.code(), Some(2));
    let quota = ctl(dir.path(), &["quota", "--namespace", &namespace, "--unlimited"]);
    assert!(text(&quota.stdout).ends_with("0 B of no limit\n"), "{}", text(&quota.stderr));
    let refused = ctl(dir.path(), &["clear", "--namespace", "77"]);
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
    // Flags behind the verb; and a store in use is no fault of the configuration.
    let socket = dir.path().join("socket").display().to_string();
    let after = ripieno(&["ctl", "status", "--socket", &socket, "--json"]).output().unwrap();
    assert_eq!(after.status.code(), Some(0), "{}", text(&after.stderr));
    let checked = ripieno(&["serve", "--config", &config, "--check"]).output().unwrap();
    assert!(text(&checked.stdout).contains("in use by process"), "{}", text(&checked.stderr));
    // Refuses what the next start would refuse.
    let good = fs::read_to_string(&config).unwrap();
    let refuse = |from: &str, to: &str, why: &str| {
        fs::write(&config, good.replace(from, to)).unwrap();
        let found = ripieno(&["serve", "--config", &config, "--check"]).output().unwrap();
        fs::write(&config, &good).unwrap();
        assert_eq!(found.status.code(), Some(2), "{}", text(&found.stdout));
        assert!(text(&found.stderr).contains(why), "{}", text(&found.stderr));
    };
    refuse("16MiB", "32MiB", "ask for a capacity of 16MiB");
    // A second one on the same store.
    let second = ripieno(&["serve", "--config", &config]).output().unwrap();
    assert_eq!(second.status.code(), Some(2), "{}", text(&second.stderr));
    let pid = server.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(server.0.wait().unwrap().code(), Some(0));
    assert!(!dir.path().join("socket").exists());
    let none = ctl(dir.path(), &["status"]);
    assert_eq!(none.status.code(), Some(2));
    assert!(text(&none.stderr).contains("start a server"), "{}", text(&none.stderr));
    refuse("block_tokens = 16", "block_tokens = 32", "blocks of another shape");
    drop(serve(&config));
}

fn status(dir: &Path) -> serde_json::Value {
    serde_json::from_str(&done(dir, &["status", "--json"])).unwrap()
}

/// The output of a verb that succeeds.
fn done(dir: &Path, words: &[&str]) -> String {
    let output = ctl(dir, words);
    assert_eq!(output.status.code(), Some(0), "{words:?}: {}", text(&output.stderr));
    text(&output.stdout).to_owned()
}

#[test]
fn every_verb_of_ctl_asks_the_server() {
    let dir = TempDir::new().unwrap();
    let config = config(dir.path());
    let mut server = serve(&config);
    let (dir, key) = (dir.path(), "ab".repeat(32));
    let named = ["--namespace", "0", &key];
    let with = |verb: &[&'static str]| [verb, &named[..]].concat();
    assert_eq!(done(dir, &with(&["delete"])), "0\n");
    let pin = done(dir, &with(&["pin", "--ttl", "60", "--wait", "--bytes", "1MiB"]));
    assert!(pin.starts_with("pin 1 of 0 blocks") && pin.contains("deferred: 1 blocks"), "{pin}");
    assert!(done(dir, &["pins"]).contains("ends in s"));
    let listed: serde_json::Value = serde_json::from_str(&done(dir, &["pins", "--json"])).unwrap();
    assert_eq!(listed["pins"][0]["awaited_blocks"], 1);
    let hints = dir.join("hints.json");
    let action = r#"{"action_id": "a", "action_type": "kv.deref", "action_version": "1.0",
        "payload": {"pin": 1}}"#;
    let all = format!(
        r#"{{"protocol_version": "0.1", "message_id": "m", "actions": [{action}, {action}]}}"#
    );
    fs::write(&hints, all).unwrap();
    let answers = done(dir, &["hints", hints.to_str().unwrap()]);
    assert!(answers.contains("accepted") && answers.contains("there is no pin 1"), "{answers}");
    assert_eq!(ctl(dir, &["unpin", "1"]).status.code(), Some(2));
    assert_eq!(done(dir, &with(&["checksums", "--verify"])), format!("{key} missing\n"));
    assert_eq!(done(dir, &["clear", "--namespace", "0"]), "0\n");
    let all = status(dir)["files"].as_u64().unwrap() * status(dir)["file_bytes"].as_u64().unwrap();
    let dry = done(dir, &["clear", "--namespace", "0", "--erase", "--dry-run", "--json"]);
    let wanted = format!("{{\"blocks\":0,\"dry_run\":true,\"erased_bytes\":{all}}}\n");
    assert_eq!(dry, wanted);
    let erased = done(dir, &["clear", "--namespace", "0", "--erase", "--json"]);
    assert_eq!(erased, wanted.replace("true", "false"));
    assert!(done(dir, &["metrics"]).ends_with("# EOF\n"));
    let refused = ctl(dir, &with(&["prefetch"]));
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("no DRAM cache"), "{}", text(&refused.stderr));
    let mut log = server.0.stderr.take().unwrap();
    drop(server);
    let mut lines = String::new();
    log.read_to_string(&mut lines).unwrap();
    for refused in ["/cache/prefetches", "/cache/pins/1"] {
        let line = lines.lines().find(|line| line.contains(refused));
        assert!(line.is_some_and(|line| line.contains("a request was refused")), "{lines}");
    }
}

#[test]
fn a_configuration_is_read_again_and_a_port_has_a_token() {
    let dir = TempDir::new().unwrap();
    let (config, at) = (config(dir.path()), dir.path());
    let token = at.join("token");
    fs::write(&token, "0123456789abcdef").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let before = fs::read_to_string(&config).unwrap();
    let http = format!("[http]\naddress = \"127.0.0.1:0\"\ntoken_file = {token:?}\n");
    fs::write(&config, before.clone() + &http).unwrap();
    let (server, line) = serve_saying(&config);
    let address = line.trim().rsplit_once("http://").unwrap().1.to_owned();
    let token = token.to_str().unwrap().to_owned();
    let over_tcp = |verb: &str| {
        let words = ["ctl", "--address", &address, "--token-file", &token, verb];
        ripieno(&words).output().unwrap()
    };
    assert_eq!(text(&over_tcp("reload").stdout), "nothing has changed\n");
    fs::write(&config, "clients = 3\n".to_owned() + &before + &http).unwrap();
    assert_eq!(done(at, &["reload"]), "new: clients\n");
    fs::write(&config, "clients = 3\n".to_owned() + &before.replace("16MiB", "17MiB") + &http)
        .unwrap();
    let refused = over_tcp("reload");
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("store cannot change"), "{}", text(&refused.stderr));
    fs::write(&token, "another token 16").unwrap();
    assert_eq!(over_tcp("status").status.code(), Some(2), "blanks");
    fs::write(&token, "another-token-16").unwrap();
    let refused = over_tcp("status");
    assert!(text(&refused.stderr).contains("the token is another"), "{}", text(&refused.stderr));
    fs::write(&config, "clients = 3\n".to_owned() + &before + &http).unwrap();
    assert_eq!(done(at, &["reload"]), "new: token\n");
    assert_eq!(over_tcp("status").status.code(), Some(0));
    // Less than a block: nothing would be stored.
    let limit = "[[limit]]\nuser = 1001\nstored = \"1KiB\"\n";
    let small = "clients = 3\n".to_owned() + &before + &http + limit;
    fs::write(&config, &small).unwrap();
    let refused = over_tcp("reload");
    assert_eq!(refused.status.code(), Some(2));
    let wanted = "stored of user 1001: 1 KiB is too little: a block of this store takes 16 KiB";
    assert!(text(&refused.stderr).contains(wanted), "{}", text(&refused.stderr));
    drop(server);
    let output = ripieno(&["serve", "--config", &config]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains(wanted), "{}", text(&output.stderr));
    fs::write(&config, small.replace("1KiB", "0")).unwrap();
    let (_server, _) = serve_saying(&config);
    // One way to the server, and a token for a port.
    for wrong in [
        &["status"][..],
        &["--address", "127.0.0.1:1", "status"],
        &["status", "--socket", "x", "--address", "127.0.0.1:1", "--token-file", &token],
    ] {
        let output = ripieno(&[&["ctl"], wrong].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn bad_input_is_refused() {
    let dir = TempDir::new().unwrap();
    let config = config(dir.path());
    let good = fs::read_to_string(&config).unwrap();
    let at = dir.path().display().to_string();
    for (from, to, why) in [
        ("16MiB", "900TiB", "are free on this file system"),
        ("capacity = \"16MiB\"", "", "no size for one"),
        (&format!("{at}/store"), "/nowhere/store", "name a directory whose parent exists"),
        (&format!("{at}/socket"), "/nowhere/socket", "make the directory first"),
        ("segments", "segment", "is it segments?"),
        ("[store]", "[http]\naddress = \"localhost\"\n[store]", "give an IP address and a port"),
        ("16MiB", "1KiB", "at least a MiB a device"),
        (&format!("{at}/store"), &at, "the directory holds something else"),
        (&format!("{at}/store"), &config, "it is a file: give a directory"),
        (&format!("{at}/socket"), &config, "a file that is no socket"),
        (&format!("{at}/socket"), &format!("{at}/{}", "x".repeat(108)), "107 bytes at most"),
    ] {
        fs::write(&config, good.replace(from, to)).unwrap();
        let wrong = ripieno(&["serve", "--check", "--config", &config]).output().unwrap();
        assert_eq!(wrong.status.code(), Some(2), "{to}");
        assert!(text(&wrong.stderr).contains(why), "{to}: {}", text(&wrong.stderr));
    }
    fs::write(&config, "socket = 7").unwrap();
    let wrong = ripieno(&["serve", "--config", &config]).output().unwrap();
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("ripieno.toml"), "{}", text(&wrong.stderr));
    let key = ctl(dir.path(), &["pin", "--namespace", "0", "abc"]);
    assert_eq!(key.status.code(), Some(2));
    assert!(text(&key.stderr).contains("64 hexadecimal digits"), "{}", text(&key.stderr));
}

#[test]
fn more_host_memory_than_there_is_is_refused_before_it_is_filled() {
    let dir = TempDir::new().unwrap();
    let config = config(dir.path());
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("[shape]", "dram = \"100TiB\"\n[shape]")).unwrap();
    for flags in [&["--check"][..], &[]] {
        let output = ripieno(&[&["serve", "--config", &config], flags].concat()).output().unwrap();
        let said = self::text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        let wanted = "error: store.dram: 100 TiB were asked for; ";
        assert!(said.starts_with(wanted) && said.contains("are available; give less"), "{said}");
    }
    assert!(!dir.path().join("store").exists());
}

#[test]
fn a_tilde_in_a_configuration_is_the_home_of_the_user() {
    let dir = TempDir::new().unwrap();
    let config = config(dir.path());
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace(dir.path().to_str().unwrap(), "~")).unwrap();
    let mut command = ripieno(&["serve", "--config", &config]);
    let child = command.env("HOME", dir.path()).stderr(Stdio::piped()).spawn().unwrap();
    let mut server = Server(child);
    let mut line = String::new();
    BufReader::new(server.0.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains(dir.path().to_str().unwrap()), "{line}");
    assert!(dir.path().join("store/home.json").exists());
}

/// Returns what a start with this configuration says. It must end with exit code 2 and leave no
/// store, and `--check` must say the same.
fn refused(dir: &Path, config: &str) -> String {
    let [check, start] = [&["--check"][..], &[]].map(|flags| {
        let mut command = ripieno(&[&["serve", "--config", config], flags].concat());
        // Otherwise it would serve for ever.
        let mut server = Server(command.stderr(Stdio::piped()).spawn().unwrap());
        let mut log = BufReader::new(server.0.stderr.take().unwrap());
        let mut said = String::new();
        log.read_line(&mut said).unwrap();
        assert!(said.starts_with("error: "), "{flags:?}: {said}");
        log.read_to_string(&mut said).unwrap();
        assert_eq!(server.0.wait().unwrap().code(), Some(2), "{flags:?}: {said}");
        assert!(!dir.join("store").exists(), "{flags:?}: {said}");
        said
    });
    assert_eq!(check, start);
    start
}

#[test]
fn a_check_refuses_what_a_start_refuses_and_no_store_stays_behind() {
    let dir = TempDir::new().unwrap();
    let at = dir.path();
    let config = config(at);
    let good = fs::read_to_string(&config).unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (token, port) = (at.join("token"), taken.local_addr().unwrap().port());
    fs::write(&token, "0123456789abcdef").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let http = format!("[http]\naddress = \"localhost:{port}\"\ntoken_file = {token:?}\n[store]");
    let limit = |key: &str| format!("[[limit]]\nuser = 1001\n{key}\n[store]");
    for (from, to, why) in [
        ("16MiB", "1MiB", "store.capacity: 1 MiB have no room for a block; give "),
        ("[shape]", "dram = \"1KiB\"\n[shape]", "store.dram: 1 KiB have no room for a block of 16"),
        ("[store]", "pool_max = \"1KiB\"\n[store]", "pool_max: 1 KiB is too little"),
        ("[store]", "[pins]\nbytes = \"1KiB\"\n[store]", "pins.bytes: 1 KiB is too little"),
        ("[store]", &limit("stored = \"1KiB\""), "stored of user 1001: 1 KiB is too little"),
        ("[store]", &limit("bandwidth = \"1B\""), "bandwidth of user 1001: 1 B is too little"),
        ("[store]", &http, "end the program that listens there, or name another port"),
    ] {
        fs::write(&config, good.replace(from, to)).unwrap();
        let said = refused(at, &config);
        assert!(said.contains(why), "{to}: {said}");
    }
    // A server has the socket: it may run during a check, and no second one is started.
    fs::write(&config, good.replace("/store\"", "/other\"")).unwrap();
    let server = serve(&config);
    fs::write(&config, &good).unwrap();
    let checked = ripieno(&["serve", "--check", "--config", &config]).output().unwrap();
    assert_eq!(checked.status.code(), Some(0), "{}", text(&checked.stderr));
    let second = ripieno(&["serve", "--config", &config]).output().unwrap();
    assert!(text(&second.stderr).contains("a server listens on"), "{}", text(&second.stderr));
    assert!(second.status.code() == Some(2) && !at.join("store").exists());
    drop(server);
    drop(serve(&config));
    // Of a store that is there, the limits are looked at, too.
    fs::write(&config, good.replace("[store]", &limit("held = \"1KiB\""))).unwrap();
    let checked = ripieno(&["serve", "--check", "--config", &config]).output().unwrap();
    assert!(text(&checked.stderr).contains("held of user 1001"), "{}", text(&checked.stderr));
}

/// Runs a script in a mount namespace of its own; `None` if this user gets none.
fn with_mounts(test: &str, script: &str) -> Option<Output> {
    let may = Command::new("unshare").args(["-rm", "mount", "-t", "tmpfs", "x", "/mnt"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        crate::store_dir::skipped(test, "no mounts of its own");
        return None;
    }
    Some(Command::new("unshare").args(["-rm", "sh", "-ec", script]).output().unwrap())
}

#[test]
fn a_disk_that_is_full_or_takes_no_writes_is_refused_and_nothing_is_left_on_it() {
    const TEST: &str =
        "a_disk_that_is_full_or_takes_no_writes_is_refused_and_nothing_is_left_on_it";
    let dir = TempDir::new().unwrap();
    let (at, program) = (dir.path().display(), env!("CARGO_BIN_EXE_ripieno"));
    let config = config(dir.path());
    let text_of = fs::read_to_string(&config).unwrap();
    fs::write(&config, text_of.replace("/store\"", "/disk/store\"")).unwrap();
    fs::create_dir(dir.path().join("disk")).unwrap();
    let full = format!(
        "mount -t tmpfs -o size=32M disk {at}/disk; \
         dd if=/dev/zero of={at}/disk/filler 2>/dev/null || true; \
         for check in --check ''; do \
         {program} serve $check --config {config} && exit 1; ls {at}/disk; done; \
         {program} format --path {at}/disk/store --capacity 16MiB --shape 2,2,4096,16 && exit 1; \
         ls {at}/disk"
    );
    let Some(output) = with_mounts(TEST, &full) else { return };
    let said = text(&output.stderr);
    assert_eq!(text(&output.stdout), "filler\nfiller\nfiller\n", "{said}");
    assert_eq!(said.matches("0 B are free on this file system").count(), 3, "{said}");
    // A store that was made before.
    drop(serve(&config));
    let read_only = format!(
        "mount --bind {at}/disk {at}/disk; mount -o remount,ro,bind {at}/disk; \
         for check in --check ''; do {program} serve $check --config {config} && exit 1; done; true"
    );
    let Some(output) = with_mounts(TEST, &read_only) else { return };
    let said = text(&output.stderr);
    assert_eq!(
        said.matches("the file system is read-only: mount it for writing").count(),
        2,
        "{said}"
    );
}

#[test]
fn words_of_ctl_top_and_serve_are_understood_or_have_a_remedy() {
    let dir = TempDir::new().unwrap();
    let config = config(dir.path());
    let token = dir.path().join("token");
    fs::write(&token, "0123456789abcdef").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let http = format!("[http]\naddress = \"127.0.0.1:0\"\ntoken_file = {token:?}\n[store]");
    fs::write(&config, fs::read_to_string(&config).unwrap().replace("[store]", &http)).unwrap();
    let (_server, line) = serve_saying(&config);
    let address = line.trim().rsplit_once("http://").unwrap().1;
    let local = address.replace("127.0.0.1", "localhost");
    let [socket, token] = [dir.path().join("socket"), token].map(|it| it.display().to_string());
    let over_tcp = ["ctl", "--address", &local, "--token-file", &token, "status"];
    assert_eq!(ripieno(&over_tcp).output().unwrap().status.code(), Some(0));
    let on = |words: &[&'static str]| [&["ctl", "--socket", &socket], words].concat();
    for (words, wanted) in [
        (on(&["quota", "--namespace", "foo"]), "expected a number, as ripieno ctl status shows it"),
        (on(&["unpin", "x"]), "expected a number, as ripieno ctl pins shows it"),
        (on(&["unpin", "7"]), "hint: ripieno ctl pins shows them"),
        (on(&["clear", "--namespace", "7"]), "hint: ripieno ctl status shows them"),
        (
            on(&["quota", "--namespace", "0", "--bytes", "10"]),
            "a quota of 10 B has room for no block: one has 16 KiB\n hint: give more",
        ),
        (vec!["ctl", "--address", "127.0.0.1", "status"], "give an IP address and a port"),
        (vec!["ctl", "--socket", &token, "status"], "it is no socket\n hint: name the socket"),
        (vec!["top", "--once", &token], "it is no socket"),
        (vec!["top", "--once", &local], "a server is controlled there, with a token"),
        (vec!["serve", "-q", "--config", "/nowhere"], "/nowhere: No such file"),
    ] {
        let output = ripieno(&words).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(text(&output.stderr).contains(wanted), "{words:?}: {}", text(&output.stderr));
    }
    let before = ripieno(&["--json", "ctl", "status"]).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&before.stdout).unwrap();
    assert_eq!(json["error"]["hint"], "'ctl --json' exists", "{}", text(&before.stderr));
}
