//! `ripieno inspect` and `ripieno fsck`, on a home whose bytes are changed behind its back.

mod home;

use home::{Place, REPLAY};

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
