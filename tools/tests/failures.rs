//! Faults of a store's directory or disks: the message says what was found and what to do, nothing
//! is left half-done, and the store opens again afterwards. Device faults are in
//! objstore/tests/faults.rs and objstore/stack/tests/failures.rs, kills in keep.rs and format.rs.

use crate::store_dir;

use std::fs;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ripieno_testkit::without_io_uring;
use serde_json::Value;
use store_dir::{FORMAT, Place, REPLAY, is_root, said};

/// All commands that use an existing store directory.
const COMMANDS: [&str; 5] = ["inspect", "fsck", "scrub", "format --overwrite anything", REPLAY];
/// Those of them that look for damage.
const EXAMINE: [&str; 3] = ["inspect", "fsck", "scrub"];

/// Makes a store and stores blocks in it.
fn stored(place: &Place) {
    place.run(FORMAT, 0);
    place.run(REPLAY, 0);
}

/// Checks that the store opens and has all blocks.
fn is_whole(place: &Place) {
    place.run("fsck", 0);
    place.run("scrub", 0);
    assert_eq!(place.json(REPLAY, 0)["stored_bytes"], 0);
}

#[test]
fn one_process_has_a_home_and_the_others_are_told_who() {
    let place = Place::new();
    stored(&place);
    let mut command =
        place.command("replay --model tiny --keep --lba 4096 --verify full --requests 100000");
    let command = command.env("RUST_LOG", "ripieno::replay=debug").stdout(Stdio::null());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stderr.take().unwrap()));
    lines.find(|line| line.as_ref().unwrap().contains("is permanent")).unwrap().unwrap();
    let holder = format!("in use by process {}", child.id());
    // Drain its stderr, so that it does not block on a full pipe.
    let rest = std::thread::spawn(move || lines.map_while(Result::ok).count());
    for line in COMMANDS {
        place.refused(line, &[&holder, "one process at a time"]);
    }
    child.kill().unwrap();
    child.wait().unwrap();
    rest.join().unwrap();
    place.run("fsck", 0);
    place.run("scrub", 0);
    place.run(REPLAY, 0);
}

#[test]
fn of_two_that_make_a_home_at_once_one_does() {
    for _ in 0..4 {
        let place = Place::new();
        place.store_dir();
        let start = || place.command(FORMAT).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let children: Vec<_> = (0..3).map(|_| start().unwrap()).collect();
        let mut codes = Vec::new();
        for child in children {
            let output = child.wait_with_output().unwrap();
            let err = store_dir::text(&output.stderr);
            codes.push(output.status.code().unwrap());
            let told = ["in use by", "is here already", "it holds store", "keep their number"];
            assert!(output.status.success() || told.iter().any(|told| err.contains(told)), "{err}");
        }
        codes.sort_unstable();
        assert_eq!(codes, [0, 2, 2]);
        place.run(REPLAY, 0);
    }
}

#[test]
fn a_device_that_is_not_what_it_was_is_named() {
    let place = Place::new();
    stored(&place);
    let (device, spare) = (place.device(1), place.path().join("spare"));
    fs::rename(&device, &spare).unwrap();
    let refused = |wanted: &[&str]| {
        for line in COMMANDS {
            if EXAMINE.contains(&line) {
                // Damage found by these is a failure (1), not bad input (2).
                let said = place.run(line, 1);
                assert!(wanted.iter().all(|wanted| said.contains(wanted)), "{line}: {said}");
                let error = place.json(line, 1);
                assert_eq!(error["error"]["kind"], "failed", "{line}: {error}");
            } else {
                place.refused(line, wanted);
            }
        }
    };
    refused(&["device-1.img: device 1 of the store is gone", "restore the original"]);
    // Replaced by a device of the same size without a store.
    fs::copy(&spare, &device).unwrap();
    place.blank(1);
    place.refused(REPLAY, &["device-1.img", "there is no store on it", "format all of them again"]);
    assert!(place.run("fsck", 1).contains("device-1.img: there is no store on it"));
    // Replaced by a device of another store.
    let other = Place::new();
    stored(&other);
    fs::copy(other.device(1), &device).unwrap();
    place.refused(REPLAY, &["device-1.img", "belongs to store"]);
    // Truncated.
    fs::copy(&spare, &device).unwrap();
    fs::File::options().write(true).open(&device).unwrap().set_len(5 << 20).unwrap();
    refused(&["device-1.img: device 1 of the store has 5242880 bytes and had"]);
    // Swapped.
    fs::rename(place.device(0), &device).unwrap();
    fs::copy(&spare, place.device(0)).unwrap();
    place.refused(
        REPLAY,
        &["it is device 1 of the store and was given as device 0", "the order is"],
    );
    fs::rename(&device, place.device(0)).unwrap();
    fs::rename(&spare, &device).unwrap();
    is_whole(&place);
}

/// Exit code 1 is for wrong bytes, and never for bad input, also if the report cannot be written.
#[test]
fn wrong_bytes_have_an_exit_code_of_their_own() {
    let place = Place::new();
    place.run(&format!("{FORMAT} --no-checksums"), 0);
    place.run(REPLAY, 0);
    let data = place.json("inspect", 0)["store"]["data_offset"].as_u64().unwrap();
    place.poke(0, data, &vec![0xee; 1 << 20]);
    let report = place.json(REPLAY, 1);
    assert!(report["mismatches"].as_u64().unwrap() > 0, "{report}");
    let (reader, writer) = UnixStream::pair().unwrap();
    reader.shutdown(Shutdown::Both).unwrap();
    assert_eq!(
        place.command(REPLAY).stdout(OwnedFd::from(writer)).status().unwrap().code(),
        Some(1)
    );
    place.refused(&format!("{REPLAY} --seed x"), &["0 or more"]);
}

#[test]
fn a_device_that_was_added_changes_nothing_or_is_refused() {
    let place = Place::new();
    stored(&place);
    // A file that the store directory does not list.
    fs::copy(place.device(1), place.device(2)).unwrap();
    is_whole(&place);
    // One more device in the store directory's parameters, added by hand.
    let path = place.store_dir().join("home.json");
    let good = fs::read_to_string(&path).unwrap();
    let mut store_dir: serde_json::Value = serde_json::from_str(&good).unwrap();
    let devices = store_dir["devices"].as_array_mut().unwrap();
    let mut added = devices[1].clone();
    added["path"] = "device-2.img".into();
    added["serial"] = "added-2".into();
    devices.push(added);
    fs::write(&path, store_dir.to_string()).unwrap();
    place.refused(REPLAY, &["device-1.img and", "both say that they are device 1"]);
    place.blank(2);
    place.refused(REPLAY, &["device-2.img: there is no store on it"]);
    place.refused("scrub", &["device-2.img: there is no store on it"]);
    fs::write(&path, good).unwrap();
    fs::remove_file(place.device(2)).unwrap();
    is_whole(&place);
}

/// A mount, unmounted when it is dropped.
struct Mount(PathBuf);

impl Mount {
    fn new(arguments: &[&str], at: &Path) -> Self {
        let status = Command::new("mount").args(arguments).arg(at).status().unwrap();
        assert!(status.success(), "mount {arguments:?}");
        Self(at.to_owned())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_is_refused_before_and_does_not_matter_after() {
    if !is_root("a_full_disk_is_refused_before_and_does_not_matter_after") {
        return;
    }
    let place = Place::new();
    let _disk = Mount::new(&["-t", "tmpfs", "-o", "size=64M", "disk"], &place.store_dir());
    for line in ["format --lba 4096 --capacity 100MiB", &format!("{REPLAY} --capacity 100MiB")] {
        place.refused(line, &["of files are asked for", "are free", "ask for less"]);
        assert!(place.files().is_empty(), "nothing half-done is left");
    }
    place.run(FORMAT, 0);
    // Other files fill the rest. The store's space is preallocated.
    let filler = place.store_dir().join("filler");
    let full = fs::File::create(&filler)
        .and_then(|mut file| std::io::copy(&mut std::io::repeat(1), &mut file))
        .unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    for line in [REPLAY, "fsck", "scrub", "format --overwrite store", REPLAY, "scrub"] {
        place.run(line, 0);
    }
    is_whole(&place);
}

/// There is enough free space, but the file may not grow (RLIMIT_FSIZE).
#[test]
fn a_file_that_may_not_become_so_large_is_named_and_removed() {
    let place = Place::new();
    let command = place.command(&format!("{FORMAT} --devices 1"));
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -f 4096; exec \"$0\" \"$@\""]).arg(command.get_program());
    shell.args(command.get_args());
    let output = shell.output().unwrap();
    let said = said("format", output, 2);
    assert!(said.contains("device-0.img: allocating its space failed: File too large"), "{said}");
    assert!(place.files().is_empty(), "nothing half-done is left");
    stored(&place);
}

#[test]
fn a_directory_that_became_read_only_is_refused_and_opens_again() {
    if !is_root("a_directory_that_became_read_only_is_refused_and_opens_again") {
        return;
    }
    let place = Place::new();
    stored(&place);
    let before = place.files();
    let store_dir = place.store_dir();
    let read_only = |at: &Path| {
        let mount = Mount::new(&["--bind", &at.display().to_string()], at);
        let again = Command::new("mount").args(["-o", "remount,bind,ro"]).arg(at).status();
        assert!(again.unwrap().success());
        mount
    };
    let mount = read_only(&store_dir);
    let wanted = ["Read-only file system", "the file system is read-only: mount it for writing"];
    for line in ["fsck --repair", "scrub", "format --overwrite anything", REPLAY] {
        place.refused(line, &wanted);
    }
    drop(mount);
    assert!(place.files() == before, "nothing was touched");
    is_whole(&place);
    // No store directory is made in a read-only directory either.
    let empty = Place::new();
    let mount = read_only(&empty.store_dir());
    for line in [FORMAT, REPLAY] {
        empty.refused(line, &wanted);
    }
    drop(mount);
    assert!(empty.files().is_empty());
    stored(&empty);
}

/// As ext4 makes it after an error of its disk: then one wants to look.
#[test]
fn a_store_on_a_read_only_file_system_can_be_looked_at() {
    const TEST: &str = "a_store_on_a_read_only_file_system_can_be_looked_at";
    let place = Place::new();
    stored(&place);
    // A mount of its own, in a namespace of its own: nobody else sees it.
    let run = |line: &str| {
        let dir = place.store_dir();
        let [dir, program] = [dir.to_str().unwrap(), env!("CARGO_BIN_EXE_ripieno")];
        let script = format!(
            "mount --bind {dir} {dir} && mount -o remount,ro,bind {dir} || exit 99; \
             {program} {line} --path {dir}"
        );
        Command::new("unshare").args(["-rm", "sh", "-c", &script]).output()
    };
    match run("inspect") {
        Ok(output) if output.status.code() == Some(0) => {}
        Ok(output) if output.status.code() != Some(99) && is_unshared() => {
            panic!("{}", store_dir::text(&output.stderr))
        }
        other => return store_dir::skipped(TEST, &format!("no mount of its own: {other:?}")),
    }
    let before = place.files();
    for line in ["inspect", "fsck", "fsck --salvage", "scrub --report-only"] {
        let said = said(line, run(line).unwrap(), 0);
        assert!(said.contains("is on a read-only file system: it is only read"), "{line}: {said}");
    }
    assert_eq!(place.files(), before);
    is_whole(&place);
}

/// Returns true if this user gets a mount namespace.
fn is_unshared() -> bool {
    let status = Command::new("unshare").args(["-rm", "true"]).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

#[test]
fn advice_is_about_what_failed_and_not_about_the_call() {
    let place = Place::new();
    let limited = |limit: &str, line: &str| {
        let (dir, program) = (place.store_dir(), env!("CARGO_BIN_EXE_ripieno"));
        let script = format!("ulimit {limit}; {program} {line} --path {}", dir.display());
        said(line, Command::new("sh").args(["-c", &script]).output().unwrap(), 2)
    };
    let format = "format --model tiny --lba 4096 --capacity 64MiB --devices 16";
    let found = limited("-n 16", format);
    assert!(found.contains("ulimit -n") && !found.contains("io_uring_disabled"), "{found}");
}

#[test]
fn a_store_is_used_where_io_uring_is_forbidden_and_the_report_says_so() {
    let place = Place::new();
    let without = |line: &str| {
        let mut command = place.command(line);
        said(line, without_io_uring(&mut command).output().unwrap(), 0)
    };
    without(FORMAT);
    for round in 0..2 {
        let found = without(REPLAY);
        assert!(found.contains("file (threads: io_uring is forbidden)"), "{round}: {found}");
    }
    without("fsck");
    // Reads by io_uring what threads wrote.
    is_whole(&place);
    let mut doctor = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    let doctor = without_io_uring(doctor.args(["doctor", "--json"])).output().unwrap();
    let found: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let checks = found["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["id"] == "io-uring").unwrap();
    assert_eq!(check["verdict"], "warn");
    assert!(check["found"].to_string().contains("(threads: io_uring is forbidden)"), "{check}");
    assert!(check["fix"].to_string().contains("allow io_uring_setup"), "{check}");
}

#[test]
fn a_tilde_that_no_shell_expanded_is_the_home_of_the_user() {
    let place = Place::new();
    for (line, code) in [(FORMAT, 0), (REPLAY, 0), ("fsck", 0), ("inspect", 0)] {
        let mut command = place.bare(line);
        command.args(["--path", "~/kv"]).env("HOME", place.path());
        said(line, command.output().unwrap(), code);
    }
    assert!(place.path().join("kv/home.json").exists() && !place.path().join("~").exists());
}
