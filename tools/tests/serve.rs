//! `ripieno serve` and `ripieno ctl`, as a user would use them.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Output, Stdio},
};

use tempfile::TempDir;

/// A process, killed on drop.
struct Server(Child);

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

fn config(dir: &Path) -> String {
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
fn serve(config: &str) -> Server {
    let child = ripieno(&["serve", "--config", config]).stderr(Stdio::piped()).spawn().unwrap();
    let mut server = Server(child);
    let mut line = String::new();
    BufReader::new(server.0.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("serving at "), "{line}");
    server
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
    let mut server = serve(&config);
    let status = ctl(dir.path(), &["status"]);
    assert!(status.status.success(), "{}", text(&status.stderr));
    assert!(text(&status.stdout).starts_with("store: 0 B of "), "{}", text(&status.stdout));
    let json = ctl(dir.path(), &["--json", "status"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["status"]["files_stored"], 0);
    assert!(json["status"]["files"].as_u64().unwrap() > 500, "{json}");
    let namespace = json["status"]["namespaces"][0]["namespace"].to_string();
    let found = ctl(dir.path(), &["lookup", "--namespace", &namespace, &"ab".repeat(32)]);
    assert_eq!(text(&found.stdout), "0\n", "{}", text(&found.stderr));
    let quota = ctl(dir.path(), &["quota", "--namespace", &namespace, "--bytes", "1MiB"]);
    assert_eq!(text(&quota.stdout), "done\n", "{}", text(&quota.stderr));
    let refused = ctl(dir.path(), &["clear", "--namespace", "77"]);
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
    // A second one on the same store.
    let second = ripieno(&["serve", "--config", &config]).output().unwrap();
    assert_eq!(second.status.code(), Some(2), "{}", text(&second.stderr));
    let pid = server.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(server.0.wait().unwrap().code(), Some(0));
    assert!(!dir.path().join("socket").exists());
    let none = ctl(dir.path(), &["status"]);
    assert_eq!(none.status.code(), Some(2));
    assert!(text(&none.stderr).contains("is the server running"), "{}", text(&none.stderr));
    drop(serve(&config));
}

#[test]
fn bad_input_is_refused() {
    let dir = TempDir::new().unwrap();
    let config = config(dir.path());
    fs::write(&config, "socket = 7").unwrap();
    let wrong = ripieno(&["serve", "--config", &config]).output().unwrap();
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("ripieno.toml"), "{}", text(&wrong.stderr));
    let key = ctl(dir.path(), &["pin", "--namespace", "0", "abc"]);
    assert_eq!(key.status.code(), Some(2));
    assert!(text(&key.stderr).contains("64 hexadecimal digits"), "{}", text(&key.stderr));
}
