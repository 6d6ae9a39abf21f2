//! `ripieno inspect` and `ripieno fsck`, on a home whose bytes are changed behind its back.

mod home;

use home::{FORMAT, Place, REPLAY};
use serde_json::{Value, json};

/// Where half A of the journal begins.
const JOURNAL: u64 = 1 << 20;

#[test]
fn damage_is_shown_and_repaired_only_when_asked() {
    let place = Place::new();
    assert!(place.run("inspect", 2).contains("no store's home here"));
    let stored = place.json(REPLAY, 0)["final_check_blocks"].clone();

    let found = place.json("inspect", 0);
    assert_eq!((&found["stored_files"], &found["store"]["state"]), (&stored, &"ready".into()));
    assert_eq!(found["namespaces"][0]["stored_files"], stored);
    assert_eq!(found["journal"]["commit_records"], stored);
    assert_eq!(found["damage"], serde_json::json!([]));
    assert!(place.run("inspect", 0).contains("namespace 0"));
    assert!(place.run("fsck", 0).contains("clean"));

    // One copy of a superblock.
    place.poke(1, 100, &[0xee; 64]);
    assert!(place.run("fsck", 1).contains("copy 0 of the superblock: its CRC is wrong"));
    assert!(place.run("fsck", 1).contains("copy 0"), "nothing was repaired without being asked");
    assert!(place.run("fsck --repair", 0).contains("from the other one"));
    place.run("fsck", 0);
    assert_eq!(place.json(REPLAY, 0)["stored_bytes"], 0);

    // A group in the middle of the journal.
    place.poke(0, JOURNAL + 2 * 4096 + 60, &[0xee; 64]);
    assert!(place.run("fsck", 1).contains("is missing or damaged"));
    assert!(place.json("inspect", 0)["journal"]["damage"].is_string());
    place.run(REPLAY, 1);
    assert!(place.run("fsck --repair", 0).contains("all keys are lost"));
    let again = place.json(REPLAY, 0);
    assert_eq!((&again["store"], &again["files_found"]), (&"opened".into(), &0.into()));
    assert_eq!(again["final_check_blocks"], stored);
    place.run("fsck", 0);
}

#[test]
fn blocks_of_a_damaged_journal_are_kept_when_their_data_says_so() {
    let place = Place::new();
    let stored = place.json(REPLAY, 0)["final_check_blocks"].as_u64().unwrap();
    let clean = place.json("fsck --salvage", 0);
    assert_eq!((&clean["salvage"], &clean["stored_files"]), (&Value::Null, &stored.into()));

    // A group in the middle, and a copy of the superblock.
    place.poke(0, JOURNAL + 2 * 4096 + 60, &[0xee; 64]);
    place.poke(1, 100, &[0xee; 64]);
    let refused = place.run(REPLAY, 1);
    assert!(refused.contains("hint: `ripieno fsck --salvage`"), "{refused}");
    assert!(place.run("scrub", 1).contains("hint: `ripieno fsck --salvage`"));
    let before = place.files();
    let seen = place.run("fsck --salvage", 1);
    for wanted in ["blocks can be kept", "1 places of the journal, 4 KiB", "add --repair"] {
        assert!(seen.contains(wanted), "`{wanted}` is not in `{seen}`");
    }
    let found = place.json("fsck --salvage", 1);
    let kept = found["salvage"]["kept"].as_u64().unwrap();
    assert!(kept > 0 && kept < stored, "{kept} of {stored}");
    assert_eq!((&found["salvage"]["lost"], &found["repaired"]), (&json!([]), &json!([])));
    assert!(place.files() == before, "it only reads");

    let done = place.run("fsck --salvage --repair", 0);
    assert!(done.contains("repairing: the journal, with the") && done.contains("clean"), "{done}");
    place.run("fsck", 0);
    assert_eq!(place.json("scrub", 0)["files_read"], kept);
    // What was lost is stored again, and all is what it was.
    let again = place.json(REPLAY, 0);
    assert_eq!((&again["store"], &again["files_found"]), (&"opened".into(), &kept.into()));
    assert_eq!((&again["mismatches"], &again["final_check_blocks"]), (&0.into(), &stored.into()));
}

#[test]
fn without_checksums_nothing_proves_what_a_file_holds() {
    let place = Place::new();
    place.run(&format!("{FORMAT} --no-checksums"), 0);
    place.run(REPLAY, 0);
    place.poke(0, JOURNAL + 2 * 4096 + 60, &[0xee; 64]);
    place.refused("fsck --salvage", &["keeps none", "fsck --repair"]);
    place.refused("fsck --salvage --repair", &["nothing proves which block a file holds"]);
    assert!(place.run("fsck", 1).contains("missing or damaged"), "it is as it was");
}
