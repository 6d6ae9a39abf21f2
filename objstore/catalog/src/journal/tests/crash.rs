//! Power loss at every write of random histories.

use super::{
    history::{Ended, History, formatted, superblock},
    plain::{evict, open},
};
use crate::{
    block_io::{
        BlockIo as _,
        tests::{Faults, Medium},
    },
    journal::{Journal, Replayed, rewrite_last, scan_journal},
    record::Record,
};

/// Appends before and after each loss of power.
const STEPS: u32 = 60;

/// Runs the history of `seed` with a power loss at write or flush number `at`, and two more later.
/// Returns `None` if the history has fewer.
fn crash(seed: u64, at: u64) -> Option<Result<u64, String>> {
    let mut history = History::new(formatted(), seed);
    let wrong = |ended: Ended| format!("seed {seed}, crash at write {at}: {ended:?}");
    // Formatted media have no fault yet.
    if let Err(ended) = history.open(0) {
        return Some(Err(wrong(ended)));
    }
    let mut crash_at = at;
    for life in 0..3 {
        history.medium.plan(Faults { power_loss: Some(crash_at), ..Faults::default() });
        match history.run(STEPS) {
            Ok(()) if life == 0 => return None,
            Ok(()) | Err(Ended::Found(_)) => {}
            Err(ended) => return Some(Err(wrong(ended))),
        }
        // Errors from here on are not the medium's fault.
        if let Err(ended) = history.recover() {
            return Some(Err(wrong(ended)));
        }
        crash_at = history.numbers.below(40).into();
    }
    let checked = history.run(5).and_then(|()| history.close_and_open());
    Some(checked.map_err(wrong).map(|()| history.compactions))
}

/// Returns the number of crash points of `seeds` up to the first error, and of compactions.
fn search(seeds: std::ops::Range<u64>) -> (u32, u64, Option<String>) {
    let (mut points, mut compactions) = (0, 0);
    for seed in seeds {
        for at in 0.. {
            match crash(seed, at) {
                None => break,
                Some(Ok(done)) => compactions += done,
                Some(Err(wrong)) => return (points, compactions, Some(wrong)),
            }
            points += 1;
        }
    }
    (points, compactions, None)
}

#[test]
fn what_was_acknowledged_survives_power_loss_at_any_write() {
    let (points, compactions, wrong) = search(0..20);
    assert_eq!(wrong, None);
    assert!(points > 1_500 && compactions > u64::from(points), "{points}, {compactions}");
}

/// Records of the active half.
fn records(medium: &Medium) -> Result<u64, String> {
    let nothing = |_: Record<'_>| Ok::<_, String>(());
    let superblock = superblock(medium)?;
    let scan = scan_journal(&mut medium.clone(), &superblock, nothing, |_, _| {});
    let scan = scan.map_err(|error| error.to_string())?;
    scan.damage.map_or(Ok(scan.records.evict), |damage| Err(damage.to_string()))
}

/// Both copies of the superblock revert to their state before an unfinished compaction. The next
/// compaction has a generation of its own unless the random number is 0 again.
#[test]
fn groups_of_a_generation_that_was_forgotten_do_not_count() {
    for chance in [0, 4_711] {
        let medium = formatted();
        let before = superblock(&medium).unwrap();
        let mut journal = open(&medium);
        journal.begin_compaction().unwrap();
        journal.copy(&evict(2_000), 0).unwrap();
        drop(journal);
        before.write(&mut medium.clone()).unwrap();

        let mut superblock = superblock(&medium).unwrap();
        superblock.skip_sequence(chance);
        let nothing = |_: Record<'_>| Ok::<_, String>(());
        let io = Box::new(medium.clone());
        let mut journal = Journal::open(io, superblock, nothing, |_, _| {}).unwrap();
        journal.begin_compaction().unwrap();
        journal.copy(&evict(10), 0).unwrap();
        journal.finish_compaction().unwrap();
        assert_eq!(records(&medium) == Ok(10), chance != 0, "{:?}", records(&medium));
    }
}

/// A device that returns other bytes at the second read must not make them durable.
#[test]
fn a_last_group_that_changed_since_it_was_replayed_is_not_written() {
    let medium = formatted();
    let mut journal = open(&medium);
    journal.append(&evict(1)).unwrap();
    let (superblock, area) = (superblock(&medium).unwrap(), journal.area);
    let end = journal.active.end;
    let replayed = Replayed { end, last: end - u64::from(medium.lba_bytes()), groups: 2 };
    drop(journal);
    medium.plan(Faults::default());
    rewrite_last(&mut medium.clone(), &superblock, &area, &replayed).unwrap();
    medium.corrupt(area.half_offset(area.active) + replayed.last + 50, |bytes| bytes[0] ^= 1);
    let error = rewrite_last(&mut medium.clone(), &superblock, &area, &replayed).unwrap_err();
    assert!(error.to_string().contains("other bytes than at the first read"), "{error}");
    assert_eq!(medium.done().len(), 1, "the first time only");
}
