//! One suite for every controller: cases with the result that the specification requires, and for
//! each target a list of its known differences.

mod admin;
mod driver;
mod events;
mod flow;
mod io;
mod prp;
mod queues;
mod sgl;

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
};

use nvme_spec::status::Status;

use crate::{raw::Raw, target::Target};

/// Observed behaviour of a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// It completed the command with this status, without Do Not Retry and More.
    Status(Status),
    /// It completed nothing.
    Silence,
    /// It set CSTS.CFS.
    Fatal,
    /// It did something that the specification does not allow.
    Wrong(&'static str),
}

impl Found {
    /// The command succeeded.
    pub const OK: Self = Self::Status(Status::SUCCESS);

    /// Returns [`Found::OK`] if `right`, else [`Found::Wrong`] with `what`.
    #[must_use]
    pub const fn wrong_unless(right: bool, what: &'static str) -> Self {
        if right { Self::OK } else { Self::Wrong(what) }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "{status}"),
            Self::Silence => f.write_str("no completion"),
            Self::Fatal => f.write_str("CSTS.CFS"),
            Self::Wrong(what) => write!(f, "wrong: {what}"),
        }
    }
}

/// Function that runs a case.
#[derive(Clone, Copy)]
pub enum Run {
    /// Gets a controller that was just enabled.
    Raw(fn(&mut Raw<'_>) -> anyhow::Result<Found>),
    /// Gets the target, for the real driver or its own initialization.
    Target(fn(&Target) -> anyhow::Result<Found>),
}

/// One test of a controller, and the result that it should have.
#[derive(Clone, Copy)]
pub struct Case {
    /// Its unique name.
    pub name: &'static str,
    /// The result that the specification requires.
    pub expected: Found,
    /// The function to run.
    pub run: Run,
}

/// A case in which a target is known to differ from the expected result.
#[derive(Debug, Clone, Copy)]
pub struct Difference {
    /// Name of the case.
    pub case: &'static str,
    /// The target's result.
    pub found: Found,
    /// The reason why that is accepted.
    pub why: &'static str,
}

/// Makes a case that ends with `status`.
const fn status(
    name: &'static str,
    status: Status,
    run: fn(&mut Raw<'_>) -> anyhow::Result<Found>,
) -> Case {
    Case { name, expected: Found::Status(status), run: Run::Raw(run) }
}

/// Makes a case that succeeds.
const fn works(name: &'static str, run: fn(&mut Raw<'_>) -> anyhow::Result<Found>) -> Case {
    status(name, Status::SUCCESS, run)
}

/// Makes a case with the real driver that succeeds.
const fn driver(name: &'static str, run: fn(&Target) -> anyhow::Result<Found>) -> Case {
    Case { name, expected: Found::OK, run: Run::Target(run) }
}

/// Returns all cases.
#[must_use]
pub fn cases() -> Vec<Case> {
    [
        queues::CASES,
        admin::CASES,
        events::CASES,
        io::CASES,
        prp::CASES,
        sgl::CASES,
        flow::CASES,
        driver::CASES,
    ]
    .concat()
}

impl Case {
    /// Runs the case. Returns a message if the result is neither expected nor a known difference.
    fn check(&self, target: &Target, differences: &[Difference]) -> Option<String> {
        let known = differences.iter().find(|difference| difference.case == self.name);
        let run = || match self.run {
            Run::Raw(run) => run(&mut Raw::enable(target)?),
            Run::Target(run) => run(target),
        };
        let found = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => return Some(format!("could not be run: {error:#}")),
            Err(_) => return Some("panicked".into()),
        };
        let expected = self.expected;
        match known {
            None if found == expected => None,
            None => Some(format!("expected {expected}, found {found}")),
            Some(known) if found == known.found => None,
            Some(known) if found == expected => Some(format!(
                "is as expected now; remove the difference {:?} from the target's list",
                known.why
            )),
            Some(known) => {
                Some(format!("expected {expected}, or as known {}, found {found}", known.found))
            }
        }
    }
}

/// Runs `cases` against `target` and returns what went wrong, one line for each case.
#[must_use]
pub fn run(target: &Target, cases: &[Case]) -> Vec<String> {
    let mut wrong = Vec::new();
    for difference in &target.differences {
        if !cases.iter().any(|case| case.name == difference.case) {
            wrong.push(format!("{}: a difference of a case that is none", difference.case));
        }
        let case = cases.iter().find(|case| case.name == difference.case);
        if case.is_some_and(|case| case.expected == difference.found) {
            wrong.push(format!("{}: a difference that is none", difference.case));
        }
    }
    for case in cases {
        if let Some(what) = case.check(target, &target.differences) {
            wrong.push(format!("{}: {what}", case.name));
        }
    }
    wrong
}

/// Runs all cases and panics with the list of what went wrong.
///
/// # Panics
/// Panics if any case went wrong.
pub fn assert_conforms(target: &Target) {
    let cases = cases();
    let mut names: Vec<_> = cases.iter().map(|case| case.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), cases.len(), "two cases have one name");
    let wrong = run(target, &cases);
    assert!(
        wrong.is_empty(),
        "{}: {} of {} cases went wrong:\n  {}",
        target.name,
        wrong.len(),
        cases.len(),
        wrong.join("\n  ")
    );
}
