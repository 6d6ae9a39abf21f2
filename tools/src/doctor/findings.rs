//! Findings of the checks.

use nvme_bind::doctor::{Finding, Report, Verdict};
use ripieno_stack::StackError;

use crate::problem::{Problem, one_line};

/// Findings, printed as they are added.
pub(super) struct Findings<'a> {
    pub(super) report: Report<'a>,
    pub(super) all: Vec<Finding>,
}

impl Findings<'_> {
    pub(super) fn add(&mut self, finding: Finding) -> anyhow::Result<()> {
        self.report.add(&finding)?;
        self.all.push(finding);
        Ok(())
    }
}

pub(super) fn check(id: impl Into<String>, title: impl Into<String>) -> Finding {
    Finding::new(id, title, &[])
}

/// Marks the finding as failed with this error.
pub(super) fn failed(finding: Finding, error: &anyhow::Error) -> Finding {
    let found = one_line(error);
    if let Some(problem) = error.downcast_ref::<Problem>() {
        return finding.says(Verdict::Fail, found).fix(problem.hint());
    }
    if let Some(StackError::NoRoute { tried }) = error.downcast_ref()
        && let [only] = &tried[..]
    {
        return finding.says(Verdict::Fail, only.why.clone()).fix(only.fix.clone());
    }
    finding.says(Verdict::Fail, found)
}
