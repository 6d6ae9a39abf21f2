//! `cargo xtask mutants`: plants bugs one by one, and expects a test to fail.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;

use crate::EXIT_STEP_FAILED;
use crate::mutants::{self, Copy, Fate};
use crate::needs;
use crate::tally::Tally;

#[derive(Args)]
pub struct MutantsArgs {
    /// Only the list tests/mutants/AREA.toml
    #[arg(long)]
    area: Option<String>,
    /// Only bugs with this text in their name
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

pub fn run(args: &MutantsArgs) -> Result<ExitCode> {
    let start = Instant::now();
    needs::satisfy(&["cxx", "qemu"])?;
    let mut chosen = mutants::load(args.area.as_deref())?;
    chosen.retain(|mutant| args.only.as_ref().is_none_or(|text| mutant.name.contains(text)));
    ensure!(!chosen.is_empty(), "no planted bug in tests/mutants has this area and this name");
    let mut copy = Copy::new()?;
    let (mut tally, mut rows) = (Tally::default(), Vec::new());
    for (index, mutant) in chosen.iter().enumerate() {
        eprintln!("\n==> [{}/{}] {}: {}", index + 1, chosen.len(), mutant.area, mutant.name);
        let fate = match copy.run(mutant)? {
            Fate::Killed(by) => {
                tally.passed += 1;
                format!("killed by {by}")
            }
            Fate::Survived => {
                tally.failed += 1;
                format!("SURVIVED: {}", mutant.consequence)
            }
            Fate::Invalid(why) => {
                tally.failed += 1;
                format!("INVALID: {why}")
            }
        };
        eprintln!("    {fate}");
        rows.push(format!("{:<8} {:<50} {fate}", mutant.area, mutant.name));
    }
    println!("\n{}\n", rows.join("\n"));
    println!("{}", tally.line(start.elapsed()));
    Ok(if tally.failed > 0 { ExitCode::from(EXIT_STEP_FAILED) } else { ExitCode::SUCCESS })
}
