//! Media that acknowledge a write but drop or misdirect it; corrupt bytes; failing devices.

use super::{
    history::{Ended, History, formatted, superblock},
    model::Numbers,
};
use crate::{
    block_io::tests::Faults,
    ids::NamespaceId,
    journal::{JournalError, scan_journal},
    record::Record,
};

const STEPS: u32 = 60;

/// Results of lost or misdirected writes.
#[derive(Debug, Default)]
struct Outcomes {
    /// The store did not open.
    found: u32,
    /// No data was lost.
    harmless: u32,
}

/// Fate of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Lost,
    /// Written to the offset of another write of the history.
    Misdirected,
}

/// Applies this fate to every write of the histories of `seeds`, one at a time. The store is closed
/// at the end if `close`, and opened again.
fn search(seeds: std::ops::Range<u64>, fate: Fate, close: bool) -> Result<Outcomes, String> {
    let mut outcomes = Outcomes::default();
    for seed in seeds {
        let places = run(seed, Faults::default(), close).1;
        let writes = || places.iter().enumerate().filter_map(|(at, place)| Some((at, (*place)?)));
        let mut numbers = Numbers(seed);
        for (at, place) in writes() {
            let mut faults = Faults { lost: Some(at as u64), ..Faults::default() };
            if fate == Fate::Misdirected {
                let others: Vec<u64> =
                    writes().map(|(_, at)| at).filter(|at| *at != place).collect();
                let elsewhere = others[numbers.below(others.len() as u32) as usize];
                let misdirected = Some((at as u64, elsewhere));
                faults = Faults { misdirected, ..Faults::default() };
            }
            match run(seed, faults, close).0 {
                Ok(()) => outcomes.harmless += 1,
                Err(Ended::Found(_)) => outcomes.found += 1,
                Err(Ended::Wrong(why)) => return Err(format!("seed {seed}, write {at}: {why}")),
            }
        }
    }
    Ok(outcomes)
}

/// Runs one history, and returns the offsets of its writes.
fn run(seed: u64, faults: Faults, close: bool) -> (Result<(), Ended>, Vec<Option<u64>>) {
    let mut history = History::new(formatted(), seed);
    history.open(0).expect("nothing has happened yet");
    history.medium.plan(faults);
    history.is_honest = false;
    let ended = history.run(STEPS).and_then(|()| match close {
        true => history.close_and_open(),
        false => history.reopen(),
    });
    (ended, history.medium.done())
}

#[test]
fn a_write_that_never_happened_is_found() {
    for close in [false, true] {
        let outcomes = search(0..6, Fate::Lost, close).unwrap();
        eprintln!("lost, close {close}: {outcomes:?}");
        assert!(outcomes.found > 100, "{outcomes:?}");
    }
}

#[test]
fn a_write_that_went_elsewhere_is_found() {
    for close in [false, true] {
        let outcomes = search(0..6, Fate::Misdirected, close).unwrap();
        eprintln!("misdirected, close {close}: {outcomes:?}");
        assert!(outcomes.found > 100, "{outcomes:?}");
    }
}

/// Every bit of the superblocks and of the journal's used part is flipped once, and the store opens
/// with all that was acknowledged, without the last append, or not at all.
#[test]
fn changed_bits_are_found() {
    let mut history = History::new(formatted(), 3);
    history.open(0).unwrap();
    history.run(12).unwrap();
    let (medium, numbers) = (history.medium.clone(), &mut Numbers(4));
    let superblock = superblock(&medium).unwrap();
    let area = superblock.journal.unwrap();
    let nothing = |_: Record<'_>| Ok::<_, String>(());
    let scan = scan_journal(&mut medium.clone(), &superblock, nothing, |_, _| {}).unwrap();
    let journal = area.half_offset(area.active);
    let mut found = 0;
    for byte in (0..300).chain(512 << 10..(512 << 10) + 300).chain(journal..journal + scan.end) {
        history.medium = medium.copy();
        let bit = 1 << numbers.below(8);
        history.medium.corrupt(byte, |bytes| bytes[0] ^= bit);
        history.is_honest = false;
        match history.check() {
            Ok(()) => {}
            Err(Ended::Found(_)) => found += 1,
            Err(Ended::Wrong(why)) => panic!("byte {byte}, bit {bit:#x}: {why}"),
        }
    }
    // The rest is padding, the last group, or in one of two superblocks.
    assert!(found > 2_000, "{found} of {} bytes", scan.end);
}

#[test]
fn after_a_failure_the_journal_takes_no_more() {
    for at in 0..30 {
        let mut history = History::new(formatted(), 5);
        history.open(0).unwrap();
        history.medium.plan(Faults { fail: Some(at), ..Faults::default() });
        let Err(Ended::Found(why)) = history.run(STEPS) else { panic!("write {at} did not fail") };
        if !history.is_open() {
            continue;
        }
        let written = history.medium.done().len();
        let journal = history.journal();
        assert_eq!(journal.failed.as_deref(), Some(why.as_str()));
        let reason = why.clone();
        let failed = JournalError::Failed { reason };
        let mut record = Vec::new();
        Record::Clear { namespace: NamespaceId(0) }.encode(&mut record);
        assert_eq!(journal.append(&record), Err(failed.clone()));
        assert_eq!(journal.begin_compaction(), Err(failed));
        assert!(!journal.wants_compaction() && !journal.copy_due());
        assert_eq!(history.medium.done().len(), written, "nothing is written after a failure");
    }
}
