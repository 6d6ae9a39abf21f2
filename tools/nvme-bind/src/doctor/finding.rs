//! What a check says, and a report that is written while the checks run.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Map, Value};

use crate::report::{Paint, wrapped};

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// It will work, but worse than it could, or only for root.
    Warn,
    /// It does not work.
    Fail,
    /// There is nothing here to judge.
    Skip,
}

/// What a check says. Field names are those of the JSON object.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// Its name for programs.
    pub id: String,
    /// Its name for people.
    pub title: String,
    /// The route of the data it is about, if it is about one.
    pub route: Option<&'static str>,
    /// The files it has read, if it has read files.
    pub looked_at: Vec<&'static str>,
    /// How it ended.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What would make it work, or better.
    pub fix: Option<String>,
}

impl Finding {
    /// A check that has not been made yet.
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

    /// It is about this route.
    #[must_use]
    pub fn about(mut self, route: &'static str) -> Self {
        self.route = Some(route);
        self
    }

    /// The result.
    #[must_use]
    pub fn says(mut self, verdict: Verdict, found: impl Into<String>) -> Self {
        (self.verdict, self.found) = (verdict, found.into());
        self
    }

    /// What to do about it; an empty text is none.
    #[must_use]
    pub fn fix(mut self, how: impl Into<String>) -> Self {
        self.fix = Some(how.into()).filter(|how| !how.is_empty());
        self
    }
}

/// Writes each finding when it comes, so that a check that hangs hides none of those before it.
/// With JSON the whole is one object, whose list of checks grows.
pub struct Report<'a> {
    out: &'a mut dyn Write,
    as_json: bool,
    paint: Paint,
    counts: [usize; 4],
}

impl<'a> Report<'a> {
    /// Begins one.
    ///
    /// # Errors
    /// When `out` cannot be written to.
    pub fn new(out: &'a mut dyn Write, as_json: bool, paint: Paint) -> io::Result<Self> {
        if as_json {
            write!(out, "{{\n\"checks\": [")?;
        }
        Ok(Self { out, as_json, paint, counts: [0; 4] })
    }

    /// How many checks ended so.
    #[must_use]
    pub fn count(&self, verdict: Verdict) -> usize {
        self.counts[verdict as usize]
    }

    /// Writes one finding.
    ///
    /// # Errors
    /// When the output cannot be written to.
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

    /// Ends it: with `more` fields of the object, or with `last` lines below the counts.
    ///
    /// # Errors
    /// When the output cannot be written to.
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
