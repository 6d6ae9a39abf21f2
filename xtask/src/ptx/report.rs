//! The checks of all GPUs: a line each, a column for each GPU.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::ptx::checks::{Check, Wanted};
use crate::tally::Tally;

/// The kernel on one GPU.
#[derive(Debug)]
pub struct Target {
    /// Of the PTX.
    pub capability: u32,
    /// Of the GPU.
    pub sm: u32,
    pub checks: Vec<Check>,
}

/// All that is known about the kernel.
#[derive(Debug)]
pub struct Report {
    pub source_hash: String,
    /// Committed files that are not what the sources give.
    pub stale: Vec<String>,
    pub targets: Vec<Target>,
}

impl Report {
    /// A test each: every check on every GPU, and whether what is committed is current.
    pub fn tally(&self) -> Tally {
        let checks = self.targets.iter().flat_map(|target| &target.checks);
        let (passed, failed): (Vec<_>, Vec<_>) = checks.partition(|check| check.passed());
        let (fresh, stale) = if self.stale.is_empty() { (1, 0) } else { (0, 1) };
        Tally {
            passed: passed.len() as u64 + fresh,
            failed: failed.len() as u64 + stale,
            skipped: 0,
        }
    }

    /// For a person. A number that fails has an exclamation mark.
    pub fn table(&self) -> String {
        let mut text = format!("source {}\n\n", self.source_hash);
        let columns = |of: &dyn Fn(&Target) -> String| -> String {
            self.targets.iter().map(|target| format!("{:>13}", of(target))).collect()
        };
        let mut line = |name: &str, wanted: &str, rest: String| {
            let _ = writeln!(text, "{name:<31}{wanted:>9}{rest}");
        };
        line("GPU", "", columns(&|target| format!("sm_{}", target.sm)));
        line("PTX", "wanted", columns(&|target| format!("compute_{}", target.capability)));
        let rows = self.targets.first().map_or(0, |target| target.checks.len());
        for row in 0..rows {
            let check = &self.targets[0].checks[row];
            let wanted = match check.wanted {
                Wanted::AtLeast(least) => format!(">= {least}"),
                Wanted::AtMost(most) => format!("<= {most}"),
            };
            let found = |target: &Target| {
                let check = &target.checks[row];
                format!("{}{}", check.found, if check.passed() { "" } else { "!" })
            };
            line(check.name, &wanted, columns(&found));
        }
        text
    }

    /// What is wrong, a line each.
    pub fn failures(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for file in &self.stale {
            lines.push(format!(
                "{file} is not what the sources give\n  hint: run `cargo xtask ptx`, and commit it"
            ));
        }
        for target in &self.targets {
            for check in target.checks.iter().filter(|check| !check.passed()) {
                let why = match (&check.wrong, check.wanted) {
                    (Some(wrong), _) => wrong.clone(),
                    (None, Wanted::AtLeast(least)) => format!("fewer than {least}"),
                    (None, Wanted::AtMost(most)) => format!("more than {most}"),
                };
                lines.push(format!("sm_{}: {}: {}, {why}", target.sm, check.name, check.found));
            }
        }
        lines
    }

    /// For a program.
    pub fn json(&self) -> Value {
        let check = |check: &Check| {
            let (least, most) = match check.wanted {
                Wanted::AtLeast(least) => (Some(least), None),
                Wanted::AtMost(most) => (None, Some(most)),
            };
            json!({
                "name": check.name, "passed": check.passed(), "found": check.found,
                "at_least": least, "at_most": most, "wrong": check.wrong,
            })
        };
        let target = |target: &Target| {
            json!({
                "sm": target.sm, "compute": target.capability,
                "checks": target.checks.iter().map(check).collect::<Vec<_>>(),
            })
        };
        json!({
            "source_hash": self.source_hash, "stale": self.stale,
            "targets": self.targets.iter().map(target).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(found: u64, stale: Vec<String>) -> Report {
        let check = Check { name: "doorbells", wanted: Wanted::AtLeast(2), found, wrong: None };
        let targets = vec![Target { capability: 90, sm: 90, checks: vec![check] }];
        Report { source_hash: "00".into(), stale, targets }
    }

    #[test]
    fn a_failed_check_is_in_every_form_of_the_report() {
        let bad = report(1, Vec::new());
        assert_eq!(bad.tally(), Tally { passed: 1, failed: 1, skipped: 0 });
        assert!(bad.table().contains("1!"), "{}", bad.table());
        assert_eq!(bad.failures(), ["sm_90: doorbells: 1, fewer than 2"]);
        assert_eq!(bad.json()["targets"][0]["checks"][0]["passed"], false);
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
