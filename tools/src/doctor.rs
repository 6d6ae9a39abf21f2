//! `ripieno doctor`: which routes of the data work here, why the others do not, and what would open
//! them. Nothing in here is an error of the program: what goes wrong is what was found.

mod drives;
mod gpu;
mod trials;

use std::io::Write as _;
use std::sync::Arc;

use serde::Serialize;

use crate::cli::{DoctorArgs, Route};
use crate::gpu::Gpu;
use crate::problem::{EXIT_FAILED, Problem, Unfit, one_line};
use crate::stack::NoRoute;
use crate::table::{row, table};

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verdict {
    Works,
    /// It works, but worse than it could.
    Limited,
    Fails,
    /// There is nothing here to judge.
    Skipped,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Works => "works",
            Self::Limited => "limited",
            Self::Fails => "FAILS",
            Self::Skipped => "-",
        }
    }
}

/// What a check says. Field names are those of the JSON object.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Finding {
    id: String,
    title: String,
    /// The route it is about, if it is about one.
    route: Option<&'static str>,
    verdict: Verdict,
    found: String,
    /// What would make it work, or better.
    mend: Option<String>,
}

impl Finding {
    fn new(id: impl Into<String>, title: impl Into<String>) -> Self {
        let (found, mend) = (String::new(), None);
        let (id, title) = (id.into(), title.into());
        Self { id, title, route: None, verdict: Verdict::Skipped, found, mend }
    }

    /// It is about this route.
    fn about(mut self, route: Route) -> Self {
        self.route = Some(route.name());
        self
    }

    fn says(mut self, verdict: Verdict, found: impl Into<String>) -> Self {
        (self.verdict, self.found) = (verdict, found.into());
        self
    }

    fn mend(mut self, how: impl Into<String>) -> Self {
        self.mend = Some(how.into()).filter(|how| !how.is_empty());
        self
    }

    /// It does not work, for this reason.
    fn fails(self, error: &anyhow::Error) -> Self {
        let found = one_line(error);
        if let Some(unfit) = error.downcast_ref::<Unfit>() {
            return self.says(Verdict::Fails, found).mend(unfit.mend.clone());
        }
        if let Some(problem) = error.downcast_ref::<Problem>() {
            return self.says(Verdict::Fails, found).mend(problem.hint());
        }
        if let Some(NoRoute(tried)) = error.downcast_ref()
            && let [only] = &tried[..]
        {
            return self.says(Verdict::Fails, only.why.clone()).mend(only.mend.clone());
        }
        self.says(Verdict::Fails, found)
    }

    fn row(&self) -> [String; 3] {
        let mut note = self.found.clone();
        if let Some(mend) = &self.mend {
            note += &format!("\nmend: {mend}");
        }
        row(&self.title, self.verdict.name(), note)
    }
}

/// Looks, tries, and says what came of it. Returns the exit code.
///
/// # Errors
/// When stdout cannot be written to.
pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<u8> {
    // Before any other thread starts.
    crate::gpu::set_environment();
    let (mut findings, gpu) = gpu::examine(args.gpu);
    let gpu: Option<&Arc<Gpu>> = gpu.as_ref();
    findings.extend(match &args.drives[..] {
        [] => trials::try_all(args.gpu, gpu),
        drives => drives::try_all(drives, gpu),
    });
    let works = works(&findings);
    print(args, &findings, &works)?;
    let answered = !findings.iter().any(|finding| finding.id == drives::UNANSWERED);
    let enough = match args.require {
        Some(route) => works.contains(&route.name()),
        None => !works.is_empty(),
    };
    Ok(if answered && enough { 0 } else { EXIT_FAILED })
}

/// The routes that work, with whatever executor, the best first.
fn works(findings: &[Finding]) -> Vec<&'static str> {
    let is_open = |route: &Route| {
        findings.iter().any(|finding| {
            let good = matches!(finding.verdict, Verdict::Works | Verdict::Limited);
            good && finding.route == Some(route.name())
        })
    };
    Route::ALL.into_iter().filter(is_open).map(Route::name).collect()
}

fn print(args: &DoctorArgs, findings: &[Finding], works: &[&str]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::json!({ "works": works, "checks": findings }))?;
        return Ok(out.flush()?);
    }
    let rows: Vec<_> = findings.iter().map(Finding::row).collect();
    writeln!(out, "ripieno {} doctor\n\n{}\n", env!("CARGO_PKG_VERSION"), table(&rows))?;
    match works.first() {
        None => writeln!(out, "No route works.")?,
        Some(&"host") => writeln!(out, "Best route: host (the KV pool is in host memory)")?,
        Some(best) => writeln!(out, "Best route: {best}, with --executor cuda")?,
    }
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests;
