//! The checks of all GPUs: one line per check, one column per GPU.

use std::fmt::Write;

use crate::ptx::checks::{Check, Wanted};
use crate::tally::Tally;

/// A kernel and its checks.
#[derive(Debug)]
pub struct Checked {
    pub kernel: String,
    pub checks: Vec<Check>,
}

/// A module on one GPU.
#[derive(Debug)]
pub struct Target {
    /// Compute capability of the PTX.
    pub capability: u32,
    /// Architecture of the GPU.
    pub sm: u32,
    pub kernels: Vec<Checked>,
}

/// Report on a module.
#[derive(Debug)]
pub struct Report {
    pub name: &'static str,
    pub source_hash: String,
    /// Committed files that differ from what the sources give.
    pub stale: Vec<String>,
    pub targets: Vec<Target>,
}

impl Report {
    /// Counts as tests: every check on every GPU, and that the module's files are current.
    pub fn tally(&self) -> Tally {
        let mut tally = Tally::default();
        let kernels = self.targets.iter().flat_map(|target| &target.kernels);
        let all = kernels.flat_map(|kernel| &kernel.checks).map(Check::passed);
        all.chain([self.stale.is_empty()]).for_each(|passed| tally.count(passed));
        tally
    }

    /// Formats a table. A failed number has an exclamation mark.
    pub fn table(&self) -> String {
        let mut text = format!("{}, source {}\n\n", self.name, self.source_hash);
        let columns = |of: &dyn Fn(&Target) -> String| -> String {
            self.targets.iter().map(|target| format!("{:>13}", of(target))).collect()
        };
        let mut line = |name: &str, wanted: &str, rest: String| {
            let _ = writeln!(text, "{name:<31}{wanted:>9}{rest}");
        };
        line("GPU", "", columns(&|target| format!("sm_{}", target.sm)));
        line("PTX", "wanted", columns(&|target| format!("compute_{}", target.capability)));
        let kernels = self.targets.first().map_or(&[][..], |target| &target.kernels);
        for (at, Checked { kernel, checks }) in kernels.iter().enumerate() {
            line(&format!("kernel {kernel}"), "", String::new());
            for (row, check) in checks.iter().enumerate() {
                let wanted = match check.wanted {
                    Wanted::AtLeast(least) => format!(">= {least}"),
                    Wanted::AtMost(most) => format!("<= {most}"),
                };
                // The kernels of a module are the same for every GPU, in the same order.
                let found = |target: &Target| {
                    let check = target.kernels.get(at).and_then(|kernel| kernel.checks.get(row));
                    let mark = |check: &Check| if check.passed() { "" } else { "!" };
                    check.map_or("none!".into(), |one| format!("{}{}", one.found, mark(one)))
                };
                line(check.name, &wanted, columns(&found));
            }
        }
        text
    }

    /// Returns the failures, one per line.
    pub fn failures(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for file in &self.stale {
            lines.push(format!(
                "{file} is not what the sources give\n  hint: run `cargo xtask ptx`, and commit it"
            ));
        }
        for target in &self.targets {
            for Checked { kernel, checks } in &target.kernels {
                for check in checks.iter().filter(|check| !check.passed()) {
                    let why = match (&check.wrong, check.wanted) {
                        (Some(wrong), _) => wrong.clone(),
                        (None, Wanted::AtLeast(least)) => format!("fewer than {least}"),
                        (None, Wanted::AtMost(most)) => format!("more than {most}"),
                    };
                    let (sm, name, found) = (target.sm, check.name, check.found);
                    lines.push(format!("sm_{sm}: {kernel}: {name}: {found}, {why}"));
                }
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(found: u64, stale: Vec<String>) -> Report {
        let check = Check { name: "doorbells", wanted: Wanted::AtLeast(2), found, wrong: None };
        let kernels = vec![Checked { kernel: "gio_kernel".into(), checks: vec![check] }];
        let targets = vec![Target { capability: 90, sm: 90, kernels }];
        Report { name: "gio", source_hash: "00".into(), stale, targets }
    }

    #[test]
    fn a_failed_check_is_in_every_form_of_the_report() {
        let bad = report(1, Vec::new());
        assert_eq!(bad.tally(), Tally { passed: 1, failed: 1, skipped: 0 });
        assert!(bad.table().contains("1!"), "{}", bad.table());
        assert_eq!(bad.failures(), ["sm_90: gio_kernel: doorbells: 1, fewer than 2"]);
        let good = report(2, Vec::new());
        assert_eq!(good.tally(), Tally { passed: 2, failed: 0, skipped: 0 });
        assert!(!good.table().contains('!') && good.failures().is_empty());
    }

    #[test]
    fn a_stale_file_fails_and_says_what_to_do() {
        let stale = report(2, vec!["kernels/ptx/gio_kernel.ptx".into()]);
        assert_eq!(stale.tally().failed, 1);
        assert!(stale.failures()[0].contains("cargo xtask ptx"));
    }
}
