//! Planted bugs, enabled one at a time: counts the seeds until each is caught, and names the check.

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use kv_catalog::PlantedBug;

use crate::{Args, PART, outcome::Outcome, run_process};

/// Enables a bug on this thread.
pub fn plant(name: Option<&str>) -> Result<()> {
    let bug = |name: &str| PlantedBug::ALL.iter().find(|bug| format!("{bug:?}") == name).copied();
    let bug = name.map(|name| bug(name).context("no such bug")).transpose()?;
    kv_catalog::plant(bug);
    Ok(())
}

/// Plants each bug and runs seeds until it is caught.
pub fn run(args: &Args) -> Result<ExitCode> {
    let (mut rows, mut missed) = (Vec::new(), 0);
    for bug in PlantedBug::ALL {
        let name = format!("{bug:?}");
        // Bugs that only a lying device reveals.
        let lies = matches!(bug, PlantedBug::NoGroupPosition | PlantedBug::ChecksumIgnored);
        let args = Args { plant: Some(name.clone()), lies, ..args.clone() };
        let mut outcome = Outcome::default();
        let mut crashed = false;
        let mut first = args.seeds.start;
        while outcome.is_clean() && !crashed && first < args.seeds.end {
            let end = args.seeds.end.min(first + PART);
            match run_process(&args, first..end) {
                Ok(found) => outcome.merge(found),
                // An assertion in the store also counts.
                Err(_) => crashed = true,
            }
            first = end;
        }
        let by = match (crashed, outcome.is_clean()) {
            (true, _) => Some("an assertion"),
            (false, false) => Some(outcome.caught_by()),
            (false, true) => None,
        };
        missed += u32::from(by.is_none());
        let seeds = if crashed { first - args.seeds.start } else { outcome.seeds };
        if args.json {
            rows.push(serde_json::json!({"bug": name, "caught_by": by, "seeds": seeds}));
        } else {
            println!("{name:<28} {:<28} {seeds} seeds", by.unwrap_or("NOT CAUGHT"));
        }
    }
    if args.json {
        println!("{}", serde_json::Value::from(rows));
    }
    Ok(ExitCode::from(u8::from(missed > 0)))
}
