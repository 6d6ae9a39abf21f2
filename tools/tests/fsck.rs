//! `ripieno inspect` and `ripieno fsck`, on a home whose bytes are changed behind its back.

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// Where half A of the journal begins.
const JOURNAL: u64 = 1 << 20;

fn ripieno(dir: &Path, line: &str) -> Output {
    let mut words = line.split_whitespace();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.arg(words.next().unwrap()).arg("--media").arg(format!("file:{}", dir.display()));
    command.args(words).env_remove("RUST_LOG").output().unwrap()
}

fn run(dir: &Path, line: &str, code: i32) -> String {
    let output = ripieno(dir, line);
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert_eq!(output.status.code(), Some(code), "{line}\n{out}\n{err}");
    out + &err
}

fn json(dir: &Path, line: &str, code: i32) -> Value {
    let text = run(dir, &format!("{line} --json"), code);
    serde_json::from_str(text.lines().find(|line| line.starts_with('{')).unwrap()).unwrap()
}

const REPLAY: &str = "replay --keep --lba 4096 --requests 20 --verify full --quiet";

#[test]
fn damage_is_shown_and_repaired_only_when_asked() {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dir = place.path();
    assert!(run(dir, "inspect", 2).contains("no store's home here"));
    let stored = json(dir, REPLAY, 0)["final_check_blocks"].clone();

    let found = json(dir, "inspect", 0);
    assert_eq!((&found["stored_files"], &found["store"]["state"]), (&stored, &"ready".into()));
    assert_eq!(found["namespaces"][0]["stored_files"], stored);
    assert_eq!(found["journal"]["commit_records"], stored);
    assert_eq!(found["damage"], serde_json::json!([]));
    assert!(run(dir, "inspect", 0).contains("namespace 0"));
    assert!(run(dir, "fsck", 0).contains("clean"));

    // One copy of a superblock.
    let device = |at| std::fs::File::options().write(true).open(dir.join(at)).unwrap();
    device("device-1.img").write_all_at(&[0xee; 64], 100).unwrap();
    assert!(run(dir, "fsck", 1).contains("copy 0 of the superblock: its CRC is wrong"));
    assert!(run(dir, "fsck", 1).contains("copy 0"), "nothing was repaired without being asked");
    assert!(run(dir, "fsck --repair", 0).contains("from the other one"));
    run(dir, "fsck", 0);
    assert_eq!(json(dir, REPLAY, 0)["stored_bytes"], 0);

    // A group in the middle of the journal.
    device("device-0.img").write_all_at(&[0xee; 64], JOURNAL + 2 * 4096 + 60).unwrap();
    assert!(run(dir, "fsck", 1).contains("is missing or damaged"));
    assert!(json(dir, "inspect", 0)["journal"]["damage"].is_string());
    run(dir, REPLAY, 1);
    assert!(run(dir, "fsck --repair", 0).contains("all keys are lost"));
    let again = json(dir, REPLAY, 0);
    assert_eq!((&again["store"], &again["files_found"]), (&"opened".into(), &0.into()));
    assert_eq!(again["final_check_blocks"], stored);
    run(dir, "fsck", 0);
}
