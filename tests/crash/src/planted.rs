//! Planted bugs, enabled one at a time: counts the seeds until each is caught, and names the check.

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use kv_catalog::PlantedBug;

use crate::{Args, PART, on_all_cores, outcome::Outcome, run_process};

/// Enables a bug on this thread.
pub fn plant(name: Option<&str>) -> Result<()> {
    let bug = |name: &str| PlantedBug::ALL.iter().find(|bug| format!("{bug:?}") == name).copied();
    let bug = name.map(|name| bug(name).context("no such bug")).transpose()?;
    kv_catalog::plant(bug);
    Ok(())
}

/// Result of the seeds with a bug: the check that caught it, if any did.
struct Caught {
    bug: PlantedBug,
    by: Option<&'static str>,
    first: u64,
    seeds: u64,
}

/// Plants each bug and runs seeds until it is caught.
pub fn run(args: &Args) -> Result<ExitCode> {
    let all = on_all_cores(PlantedBug::ALL.iter().copied(), |bug| Ok(catch(args, bug)))?;
    let missed = all.iter().any(|caught| caught.by.is_none());
    if args.json {
        let row = |Caught { bug, by, first, seeds }: Caught| {
            let bug = format!("{bug:?}");
            serde_json::json!({"bug": bug, "caught_by": by, "first": first, "seeds": seeds})
        };
        println!("{}", all.into_iter().map(row).collect::<serde_json::Value>());
    } else {
        for Caught { bug, by, first, seeds } in all {
            let (bug, by) = (format!("{bug:?}"), by.unwrap_or("NOT CAUGHT"));
            println!("{bug:<28} {by:<28} {seeds} seeds from {first}");
        }
    }
    Ok(ExitCode::from(u8::from(missed)))
}

/// Runs seeds with a bug until it is caught.
fn catch(args: &Args, bug: PlantedBug) -> Caught {
    // Bugs that only a lying device reveals.
    let lies = matches!(bug, PlantedBug::NoGroupPosition | PlantedBug::ChecksumIgnored);
    let args = Args { plant: Some(format!("{bug:?}")), lies, ..args.clone() };
    let start = args.seeds.start;
    let mut outcome = Outcome::default();
    let mut first = start;
    while outcome.is_clean() && first < args.seeds.end {
        let end = args.seeds.end.min(first + PART);
        match run_process(&args, first..end) {
            Ok(found) => outcome.merge(found),
            // An assertion in the store also counts.
            Err(_) => {
                let seeds = end - start;
                return Caught { bug, by: Some("an assertion"), first: start, seeds };
            }
        }
        first = end;
    }
    let by = (!outcome.is_clean()).then(|| outcome.caught_by());
    Caught { bug, by, first: start, seeds: outcome.seeds }
}
