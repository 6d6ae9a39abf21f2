//! `ripieno format`: what it refuses, what it writes, and what `--undo` brings back.

use crate::store_dir;

use std::fs;
use std::os::unix::{
    fs::{OpenOptionsExt as _, PermissionsExt as _},
    process::ExitStatusExt as _,
};
use std::process::Command;

use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};
use store_dir::{FORMAT, Place, REPLAY, is_root, said, skipped};

/// Signatures of other formats: name in the message, offset, bytes.
const FOREIGN: &[(&str, u64, &[u8])] = &[
    ("a partition table (GPT)", 512, b"EFI PART"),
    ("an ext4 filesystem", 0x438, b"\x53\xef"),
    ("an XFS filesystem", 0, b"XFSB"),
    ("an LVM physical volume", 512, b"LABELONE"),
    ("a LUKS volume", 0, b"LUKS\xba\xbe"),
    ("data of an unknown kind", 4096, b"precious"),
];

#[test]
fn a_home_is_made_and_found_by_a_replay() {
    let place = Place::new();
    let plan = place.json(&format!("{FORMAT} --dry-run"), 0);
    assert_eq!((&plan["dry_run"], plan["devices"].as_array().unwrap().len()), (&true.into(), 2));
    assert!(place.files().is_empty(), "a dry run leaves nothing");
    // The first example of its help: a directory that does not exist yet.
    let (new, nowhere) = (place.path().join("new"), place.path().join("no/such"));
    let made = |dir: &std::path::Path, words: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
        command.arg("format").arg("--path").arg(dir);
        said(
            words,
            command.args(words.split_whitespace()).output().unwrap(),
            match () {
                () if dir == new => 0,
                () => 2,
            },
        )
    };
    made(&new, "--capacity 16MiB --dry-run");
    assert!(!new.exists(), "a dry run leaves nothing");
    made(&new, "--capacity 16MiB");
    assert!(new.join("home.json").exists());
    let large = place.path().join("large");
    let refused = made(&large, "--capacity 900TiB --dry-run");
    assert!(refused.contains("are needed, but"), "{refused}");
    let refused = made(&nowhere, "--capacity 16MiB --dry-run");
    assert!(refused.contains("the directory that it would be in is not there"), "{refused}");
    place.refused("format", &["needs a size", "--capacity"]);
    place.refused(&format!("{FORMAT} --undo-file x"), &["overwrites nothing"]);
    let made = place.json(FORMAT, 0);
    assert_eq!(made["undo_file"], serde_json::Value::Null, "nothing was there");
    let found = place.json("inspect", 0);
    assert_eq!(found["store"]["id"], made["store"]);
    assert_eq!(found["store"]["files"], made["files"]);
    assert_eq!(found["devices"][0]["region_bytes"], plan["devices"][0]["region_bytes"]);
    assert_eq!(place.json(REPLAY, 0)["store"], "opened");
    place.refused(&format!("{FORMAT} --devices 3"), &["keep their number and LBA size"]);
}

#[test]
fn the_shape_of_a_server_takes_the_place_of_a_model() {
    let place = Place::new();
    place.json("format --shape 4,1,65536,32 --lba 4096 --capacity 16MiB", 0);
    let found = &place.json("inspect", 0)["store"];
    for (name, expected) in
        [("layers", 4), ("segments", 1), ("object_bytes", 65536), ("block_tokens", 32)]
    {
        assert_eq!(found[name], expected, "{name}");
    }
    for model in ["--block-tokens 32", "--model tiny"] {
        place.run(&format!("format --shape 4,1,65536,32 {model}"), 2);
    }
}

#[test]
fn what_is_there_is_refused_unless_told_and_comes_back_byte_for_byte() {
    let place = Place::new();
    place.run(FORMAT, 0);
    place.run(REPLAY, 0);
    let store = place.json("inspect", 0)["store"]["id"].as_str().unwrap().to_owned();
    let before = place.files();
    let hint = "--overwrite store";
    place.refused("format", &["device-0.img", &format!("it holds store {store}"), hint]);
    assert!(place.run("format --dry-run", 2).contains(&store), "the table has it as well");
    assert_eq!(place.files(), before, "refused, and so untouched");

    // A store directory keeps its size.
    place.refused(
        "format --overwrite store --capacity 64MiB",
        &["--capacity 64 MiB: the devices have room for", "leave it out"],
    );
    assert_eq!(place.files(), before, "refused, and so untouched");
    place.run("format --overwrite store --capacity 16MiB --dry-run", 0);

    let made = place.json("format --overwrite store", 0);
    assert_ne!(place.files(), before);
    let undo = made["undo_file"].as_str().unwrap();
    assert_eq!(undo, format!("ripieno-undo-{}", made["store"].as_str().unwrap()));
    let mode = fs::metadata(place.path().join(undo)).unwrap().permissions().mode();
    assert_eq!(mode & 0o077, 0, "it has what was on the device: {mode:o}");
    assert_eq!(made["devices"][0]["held"], format!("store {store}"));
    let damaged = |at: usize| {
        let mut bytes = fs::read(place.path().join(undo)).unwrap();
        bytes[at] ^= 1;
        fs::write(place.path().join("damaged"), bytes).unwrap();
    };
    damaged(9999);
    place.refused("format --undo damaged", &["it is damaged"]);
    damaged(0);
    place.refused("format --undo damaged", &["it is no undo file"]);
    place.refused("format --undo nowhere", &["No such file"]);
    let back = place.json(&format!("format --undo {undo}"), 0);
    assert_eq!(back["bytes_put_back"], 2 * ((1 << 20) + (64 << 10) + (1 << 20)));
    assert_eq!(place.files(), before);
    // It opens, and has all blocks.
    assert_eq!(place.json(REPLAY, 0)["stored_bytes"], 0);
}

#[test]
fn somebody_elses_data_is_named_and_comes_back() {
    let place = Place::new();
    place.run(FORMAT, 0);
    for (round, (what, at, mark)) in FOREIGN.iter().enumerate() {
        for device in 0..2 {
            place.poke(device, 0, &vec![0; (1 << 20) + (64 << 10)]);
        }
        place.poke(1, *at, mark);
        let before = place.files();
        for overwrite in ["", "--overwrite store"] {
            let line = format!("format {overwrite}");
            place.refused(&line, &["device-1.img", what, "--overwrite anything"]);
        }
        let plan = place.command("format --dry-run").output().unwrap();
        assert!(store_dir::text(&plan.stdout).contains(what), "the table shows what is in the way");
        said("format --dry-run", plan, 2);
        assert_eq!(place.files(), before, "{what}");
        place.run(&format!("format --overwrite anything --undo-file {round}"), 0);
        place.refused(
            &format!("format --overwrite anything --undo-file {round}"),
            &["saving what is overwritten", "File exists", "nothing was formatted"],
        );
        place.run(&format!("format --undo {round}"), 0);
        assert_eq!(place.files(), before, "{what}");
    }
}

#[test]
fn a_store_that_was_used_is_not_undone() {
    let place = Place::new();
    place.run(FORMAT, 0);
    place.run(REPLAY, 0);
    place.run("format --overwrite store --undo-file first", 0);
    // Foreign bytes written since: over a copy of the superblock, and beside it.
    for at in [0, 100 << 10] {
        let before = place.files();
        place.poke(0, at, b"XFSB");
        place.refused("format --undo first", &["device-0.img", "nothing was written"]);
        let (_, device) = &before[0];
        place.poke(0, at, &device[at as usize..][..4]);
        assert_eq!(place.files(), before);
    }
    place.run("format --overwrite store --undo-file second", 0);
    place.refused("format --undo first", &["it holds store", "is to be undone"]);
    place.run(REPLAY, 0);
    place.refused("format --undo second", &["was opened since it was made"]);
    assert_eq!(place.json(REPLAY, 0)["stored_bytes"], 0, "nothing was touched");
}

/// After kill -9 at any time, the next command works, and so does the undo file.
#[test]
fn a_format_that_was_killed_is_done_again_or_undone() {
    let place = Place::new();
    let many = format!("{FORMAT} --devices 24");
    let mut killed = [0, 0];
    let mut random = SmallRng::seed_from_u64(ripieno_testkit::seed());
    // A new store directory.
    for round in 0..12 {
        let after = if round == 0 { 0 } else { random.random_range(1..60) };
        killed[0] += u32::from(kill(&place, &many, after));
        if complete(&place) {
            place.run("inspect", 0);
            fs::remove_dir_all(place.store_dir()).unwrap();
        } else {
            place.refused("inspect", &["create"]);
        }
    }
    place.run(&many, 0);
    place.run(REPLAY, 0);
    // A directory with a store.
    let before = place.files();
    let again = "format --overwrite store --undo-file undo";
    for round in 0..12 {
        let after = if round == 0 { 0 } else { random.random_range(1..120) };
        killed[1] += u32::from(kill(&place, again, after));
        if place.path().join("undo").exists() && place.files() != before {
            place.run("format --undo undo", 0);
        }
        assert_eq!(place.files(), before, "round {round}");
        let _ = fs::remove_file(place.path().join("undo"));
    }
    assert!(killed.iter().all(|killed| *killed > 0), "{killed:?} of them were killed");
    // Formatting again also works without an undo.
    kill(&place, again, 30);
    let _ = fs::remove_file(place.path().join("undo"));
    place.run(again, 0);
    assert_eq!(place.json(REPLAY, 0)["store"], "opened");
}

fn complete(place: &Place) -> bool {
    let manifest = fs::read_to_string(place.store_dir().join("home.json"));
    manifest.is_ok_and(|manifest| manifest.contains("ready"))
}

/// Starts a command and kills it after `ms`. Returns true if that ended it.
fn kill(place: &Place, line: &str, ms: u64) -> bool {
    let mut command = place.command(line);
    let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(ms));
    child.kill().unwrap();
    child.wait().unwrap().signal().is_some()
}

/// A loop device, detached when it is dropped.
struct Loop(String);

impl Loop {
    fn over(path: &std::path::Path) -> Option<Self> {
        let output = Command::new("losetup").args(["-f", "--show"]).arg(path).output().ok()?;
        let name = store_dir::text(&output.stdout).trim().to_owned();
        output.status.success().then_some(Self(name))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}

#[test]
fn block_devices_are_guarded_and_undone() {
    let test = "block_devices_are_guarded_and_undone";
    if !is_root(test) {
        return;
    }
    let place = Place::new();
    let disk = place.path().join("disk");
    fs::write(&disk, vec![0; 48 << 20]).unwrap();
    let Some(device) = Loop::over(&disk) else {
        return skipped(test, "no loop device can be had");
    };
    let line = format!("format --lba 4096 --block {}", device.0);
    fs::write(&device.0, [&[0; 512][..], b"EFI PART"].concat()).unwrap();
    let before = fs::read(&device.0).unwrap();
    place.refused(&line, &[&device.0, "a partition table (GPT)", "--overwrite anything"]);
    assert!(place.files().is_empty(), "nothing half-done is left");
    // O_EXCL, as mkfs and mount open it.
    let busy = fs::File::options().write(true).custom_flags(libc::O_EXCL).open(&device.0).unwrap();
    place.refused(
        &format!("{line} --overwrite anything"),
        &[&device.0, "it is in use: ", "open in all-"],
    );
    drop(busy);
    assert!(place.files().is_empty(), "nothing half-done is left");
    assert_eq!(fs::read(&device.0).unwrap(), before);
    place.run(&format!("{line} --overwrite anything --dry-run"), 0);
    assert!(place.files().is_empty(), "a dry run leaves nothing");
    place.run(&format!("{line} --overwrite anything --undo-file undo"), 0);
    assert_ne!(fs::read(&device.0).unwrap(), before);
    place.run("format --undo undo", 0);
    assert_eq!(fs::read(&device.0).unwrap(), before);
    place.run("format --overwrite anything", 0);
    assert_eq!(place.json(REPLAY, 0)["store"], "opened");
}

/// The end of a block device is looked at, saved and cleared to its last sector, whatever its size.
#[test]
fn what_is_only_at_the_end_of_a_block_device_is_guarded() {
    let test = "what_is_only_at_the_end_of_a_block_device_is_guarded";
    if !is_root(test) {
        return;
    }
    let bytes = (48 << 20) + 5 * 512;
    for (name, from_end, mark) in [
        ("Intel VROC, IMSM", 1024, &b"Intel Raid ISM Cfg Sig. "[..]),
        ("DDF", 512, b"\xde\x11\xde\x11"),
        ("DRBD", (bytes % 4096) + 4096 - 60, b"\x83\x74\x02\x6d"),
        ("ZFS", (bytes % (256 << 10)) + (128 << 10), b"\x0c\xb1\xba\0\0\0\0\0"),
        ("the backup of a partition table", 512, b"EFI PART"),
        ("data of an unknown kind", 7, b"my data"),
        ("data of an unknown kind", 1 << 20, b"my data"),
    ] {
        let place = Place::new();
        let disk = place.path().join("disk");
        let mut before = vec![0; bytes];
        before[bytes - from_end..][..mark.len()].copy_from_slice(mark);
        fs::write(&disk, &before).unwrap();
        let Some(device) = Loop::over(&disk) else {
            return skipped(test, "no loop device can be had");
        };
        let line = format!("format --lba 512 --block {}", device.0);
        for overwrite in ["", "--overwrite store"] {
            let line = format!("{line} {overwrite}");
            place.refused(&line, &[&device.0, name, "--overwrite anything"]);
        }
        assert!(fs::read(&device.0).unwrap() == before, "refused, and so untouched: {name}");
        place.run(&format!("{line} --overwrite anything --undo-file undo"), 0);
        let made = fs::read(&device.0).unwrap();
        assert!(made[bytes - (1 << 20)..].iter().all(|byte| *byte == 0), "{name}");
        place.run("format --undo undo", 0);
        assert!(fs::read(&device.0).unwrap() == before, "byte for byte: {name}");
        let other = Place::new();
        let line = format!("format --lba 4096 --block {}", device.0);
        other.refused(&line, &[&device.0, "no multiple of 4096", "512"]);
    }
}
