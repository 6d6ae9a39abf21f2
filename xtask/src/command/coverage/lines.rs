//! Counts of lines as lcov has them, less those of tests.

use std::collections::BTreeMap;
use std::fs;
use std::ops::{AddAssign, RangeInclusive};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// How often each line with code was run, by file.
pub type Counts = BTreeMap<PathBuf, BTreeMap<usize, u64>>;

/// Lines with code, and those of them that were run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    pub lines: u64,
    pub covered: u64,
}

impl Lines {
    pub fn percent(self) -> f64 {
        100.0 * self.covered as f64 / self.lines as f64
    }

    pub fn missed(self) -> u64 {
        self.lines - self.covered
    }
}

impl AddAssign for Lines {
    fn add_assign(&mut self, other: Self) {
        self.lines += other.lines;
        self.covered += other.covered;
    }
}

/// Reads a tracefile: `SF:` begins a file, `DA:LINE,COUNT` is a line of it.
pub fn of_lcov(lcov: &str) -> Counts {
    let (mut counts, mut file) = (Counts::new(), PathBuf::new());
    for line in lcov.lines() {
        if let Some(path) = line.strip_prefix("SF:") {
            file = path.into();
        } else if let Some((line, count)) =
            line.strip_prefix("DA:").and_then(|line| line.split_once(','))
            && let (Ok(line), Ok(count)) = (line.parse(), count.parse())
        {
            counts.entry(file.clone()).or_default().insert(line, count);
        }
    }
    counts
}

/// Adds up each file's lines, without those that only a test build has.
pub fn without_tests(counts: Counts) -> Result<BTreeMap<PathBuf, Lines>> {
    let mut files = BTreeMap::new();
    for (file, counts) in counts {
        if is_of_tests(&file)? {
            continue;
        }
        let text = read(&file)?;
        let tests = test_items(&text);
        let counts =
            counts.iter().filter(|(line, _)| !tests.iter().any(|test| test.contains(line)));
        let mut lines = Lines::default();
        for (_, count) in counts {
            lines += Lines { lines: 1, covered: (*count > 0).into() };
        }
        if lines.lines > 0 {
            files.insert(file, lines);
        }
    }
    Ok(files)
}

/// Returns whether `file` is a module that only a test build has, or below one.
fn is_of_tests(file: &Path) -> Result<bool> {
    let (Some(folder), Some(name)) = (file.parent(), file.file_stem()) else { return Ok(false) };
    let declaration = format!("mod {};", name.display());
    let module = folder.with_extension("rs");
    for above in [folder.join("lib.rs"), folder.join("main.rs"), module.clone()] {
        if !above.is_file() {
            continue;
        }
        let text = read(&above)?;
        let lines: Vec<&str> = text.lines().collect();
        let declares = |item: &RangeInclusive<usize>| lines[item.end() - 1].ends_with(&declaration);
        if test_items(&text).iter().any(declares) {
            return Ok(true);
        }
    }
    Ok(module.is_file() && is_of_tests(&module)?)
}

/// Finds the items with `#[cfg(test)]`: their lines, from 1. In source that rustfmt formatted, an
/// item ends at the first brace that is indented as it is.
fn test_items(text: &str) -> Vec<RangeInclusive<usize>> {
    let lines: Vec<&str> = text.lines().collect();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let mut items = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let attribute = line.trim_start();
        if !attribute.starts_with("#[cfg(test") && !attribute.starts_with("#[cfg(all(test") {
            continue;
        }
        let own = |at: &usize| indent(lines[*at]) == indent(line) && !lines[*at].is_empty();
        let is_end = |at: &usize| lines[*at].ends_with([';', ',', '}']);
        let end = (start + 1..lines.len()).filter(own).find(is_end);
        items.push(start + 1..=end.map_or(lines.len(), |end| end + 1));
    }
    items
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

#[cfg(test)]
mod tests;
