//! Power is lost at every write of random histories.

use super::history::{Ended, History, formatted};
use crate::{
    block_io::simulated::Faults,
    planted::{PlantedBug, plant},
};

/// Appends before and after each loss of power.
const STEPS: u32 = 60;

/// Runs the history of `seed` and lets power fail in write or flush number `at`, and twice more
/// later. `None` when the history has fewer.
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
        // Whatever is found now is not the medium's fault.
        if let Err(ended) = history.recover() {
            return Some(Err(wrong(ended)));
        }
        crash_at = history.numbers.below(40).into();
    }
    let checked = history.run(5).and_then(|()| history.close_and_open());
    Some(checked.map_err(wrong).map(|()| history.compactions))
}

/// Crash points of `seeds`, until something is wrong, and compactions that they had.
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

/// Each bug that power loss can show is found, so the test above would find it.
#[test]
fn planted_bugs_are_found() {
    for bug in [
        PlantedBug::NoFlushBeforeSwitch,
        PlantedBug::SwitchBeforeSnapshot,
        PlantedBug::StaleSuperblock,
        PlantedBug::NoGroupCrc,
    ] {
        plant(Some(bug));
        let (points, _, wrong) = search(0..20);
        plant(None);
        let wrong = wrong.unwrap_or_else(|| panic!("{bug:?} is not found in {points} crashes"));
        // Shown with --nocapture.
        eprintln!("{bug:?}: found after {points} crashes: {wrong}");
    }
}
