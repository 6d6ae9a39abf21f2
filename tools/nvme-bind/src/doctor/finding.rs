//! The result of a check, and a report that is written while the checks run.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Map, Value};

use crate::report::{Paint, wrapped};

/// Outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Everything is fine.
    Ok,
    /// Works, but below its potential, or only for root.
    Warn,
    /// Does not work.
    Fail,
    /// Not applicable.
    Skip,
}

/// The result of a check. Field names are those of the JSON object.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// Identifier for programs.
    pub id: String,
    /// Title for people.
    pub title: String,
    /// The data route that the check concerns, if any.
    pub route: Option<&'static str>,
    /// The files that were read, if any.
    pub looked_at: Vec<&'static str>,
    /// Outcome of the check.
    pub verdict: Verdict,
    /// Description of the finding.
    pub found: String,
    /// Suggested fix or improvement.
    pub fix: Option<String>,
}

impl Finding {
    /// Creates the finding of a check that has not run yet.
    #[must_use]
    pub fn new(
        id: impl Into<String>,
        title: impl Into<String>,
        looked_at: &[&'static str],
    ) -> Self {
        let (id, title, looked_at) = (id.into(), title.into(), looked_at.to_vec());
        let (verdict, found) = (Verdict::Skip, String::new());
        Self { id, title, route: None, looked_at, verdict, found, fix: None }
    }

    /// Sets the data route.
    #[must_use]
    pub fn about(mut self, route: &'static str) -> Self {
        self.route = Some(route);
        self
    }

    /// Sets the result.
    #[must_use]
    pub fn says(mut self, verdict: Verdict, found: impl Into<String>) -> Self {
        (self.verdict, self.found) = (verdict, found.into());
        self
    }

    /// Sets the suggested fix; an empty text is none.
    #[must_use]
    pub fn fix(mut self, how: impl Into<String>) -> Self {
        self.fix = Some(how.into()).filter(|how| !how.is_empty());
        self
    }
}

/// Writes each finding immediately, so that a check that hangs does not hide earlier findings. With
/// JSON the output is one object with a list of checks.
pub struct Report<'a> {
    out: &'a mut dyn Write,
    as_json: bool,
    paint: Paint,
    counts: [usize; 4],
}

impl<'a> Report<'a> {
    /// Begins a report.
    ///
    /// # Errors
    /// Returns an error if `out` cannot be written.
    pub fn new(out: &'a mut dyn Write, as_json: bool, paint: Paint) -> io::Result<Self> {
        if as_json {
            write!(out, "{{\n\"checks\": [")?;
        }
        Ok(Self { out, as_json, paint, counts: [0; 4] })
    }

    /// Returns the number of checks with this outcome.
    #[must_use]
    pub fn count(&self, verdict: Verdict) -> usize {
        self.counts[verdict as usize]
    }

    /// Writes one finding.
    ///
    /// # Errors
    /// Returns an error if the output cannot be written.
    pub fn add(&mut self, finding: &Finding) -> io::Result<()> {
        if self.as_json {
            let comma = if self.counts == [0; 4] { "" } else { "," };
            write!(self.out, "{comma}\n{}", serde_json::to_string(finding)?)?;
        } else {
            writeln!(self.out, "{}", self.text(finding))?;
        }
        self.counts[finding.verdict as usize] += 1;
        self.out.flush()
    }

    fn text(&self, finding: &Finding) -> String {
        let paint = self.paint;
        let mark = match finding.verdict {
            Verdict::Ok => paint.bold("ok  ", 32),
            Verdict::Warn => paint.bold("warn", 33),
            Verdict::Fail => paint.bold("FAIL", 31),
            Verdict::Skip => paint.dim("skip"),
        };
        let mut lines = vec![format!("{mark}  {}", paint.bold(&finding.title, 39))];
        if !finding.looked_at.is_empty() {
            let looked = format!("looked at  {}", finding.looked_at.join(", "));
            lines.extend(wrapped(&looked, 17).into_iter().map(|line| paint.dim(&line)));
        }
        lines.extend(wrapped(&format!("found      {}", finding.found), 17));
        if let Some(fix) = &finding.fix {
            lines.extend(wrapped(&format!("fix:       {fix}"), 17));
        }
        lines.join("\n")
    }

    /// Ends the report with `more` fields of the object, or with `last` lines below the counts.
    ///
    /// # Errors
    /// Returns an error if the output cannot be written.
    pub fn finish(self, more: Map<String, Value>, last: &str) -> io::Result<()> {
        if self.as_json {
            write!(self.out, "\n]")?;
            for (name, value) in more {
                write!(self.out, ",\n{}: {value}", Value::from(name))?;
            }
            writeln!(self.out, "\n}}")?;
        } else {
            let [ok, warn, fail, skip] = self.counts;
            let counts = format!("{ok} ok, {warn} warnings, {fail} failed, {skip} skipped");
            writeln!(self.out, "\n{counts}{last}")?;
        }
        self.out.flush()
    }
}
