//! `ripieno scrub`: blocks with flipped bits are found, and are misses afterwards.

use crate::store_dir;

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;
use store_dir::{FORMAT, Place, REPLAY};

/// Returns the files named in a report.
fn files(report: &Value) -> BTreeSet<u64> {
    let damaged = report["damaged"].as_array().unwrap();
    damaged.iter().map(|damaged| damaged["file"].as_u64().unwrap()).collect()
}

fn count(report: &Value, field: &str) -> u64 {
    report[field].as_u64().unwrap_or_else(|| panic!("{field} is no count in {report}"))
}

/// Flips a bit of each of these objects in a device's data area; slots of `tiny` are one LBA.
fn rot(place: &Place, device: u32, data: u64, slots: &[u64]) {
    let bytes = fs::read(place.device(device)).unwrap();
    for slot in slots {
        let at = data + slot * 4096 + 77;
        place.poke(device, at, &[bytes[at as usize] ^ 0x10]);
    }
}

#[test]
fn bits_that_rot_are_found_and_are_misses_afterwards() {
    let place = Place::new();
    place.refused("scrub", &["no store here"]);
    place.refused("scrub --rate 0", &["expected more than 0 bytes"]);
    place.run(FORMAT, 0);
    assert_eq!(count(&place.json("scrub", 0), "files_read"), 0);
    let stored = count(&place.json(REPLAY, 0), "final_check_blocks");
    let clean = place.json("scrub", 0);
    assert_eq!((count(&clean, "files"), count(&clean, "files_read")), (stored, stored));
    assert_eq!(clean["damaged"], serde_json::json!([]));

    let store = place.json("inspect", 0)["store"].clone();
    let (data, group) = (count(&store, "data_offset"), count(&store, "group_files"));
    // In the first row, and in the last one: another layer of another file.
    rot(&place, 0, data, &[0, 3]);
    rot(&place, 1, data, &[1, 3 * group / 2 + 2]);
    let seen = place.json("scrub --report-only", 1);
    let damaged = files(&seen);
    assert_eq!((damaged.len(), &seen["dropped"]), (4, &false.into()), "{seen}");
    assert!(damaged.iter().all(|file| *file < 8), "these are the first slots: {seen}");
    let layers = seen["damaged"].as_array().unwrap().iter().map(|damaged| count(damaged, "layer"));
    assert_eq!(layers.sum::<u64>(), 1, "one of them is in layer 1: {seen}");
    let first = &seen["damaged"][0];
    assert!(first["what"].as_str().unwrap().contains("differ"), "{first}");
    assert_eq!(first["key"].as_str().unwrap().len(), 64);
    assert_eq!(count(&place.json("inspect", 0), "stored_files"), stored, "nothing was dropped");
    assert!(place.run("scrub --dry-run", 1).contains("nothing was dropped"));

    assert_eq!(files(&place.json("scrub", 1)), damaged);
    assert_eq!(count(&place.json("inspect", 0), "stored_files"), stored - 4);
    assert!(place.run("scrub", 0).contains("every byte"));
    // These are misses, and can be stored again.
    let again = place.json(REPLAY, 0);
    assert_eq!((count(&again, "mismatches"), count(&again, "final_check_blocks")), (0, stored));
    assert!(count(&again, "stored_bytes") > 0);
    place.run("scrub", 0);
    // All blocks are damaged.
    place.poke(0, data, &vec![0xee; count(&store, "data_bytes") as usize]);
    assert_eq!(files(&place.json("scrub", 1)).len() as u64, stored);
    assert_eq!(count(&place.json("inspect", 0), "stored_files"), 0);
}

#[test]
fn a_store_without_checksums_is_refused_and_a_rate_is_kept() {
    let place = Place::new();
    place.run(&format!("{FORMAT} --no-checksums"), 0);
    place.run(REPLAY, 0);
    place.refused("scrub", &["keeps no checksums", "format it again"]);
    place.run("format --overwrite store --no-undo", 0);
    place.run(REPLAY, 0);
    let bytes = count(&place.json("scrub", 0), "bytes_read");
    let slow = place.json(&format!("scrub --rate {}", 2 * bytes), 0);
    assert!(slow["seconds"].as_f64().unwrap() >= 0.5, "{slow}");
}
