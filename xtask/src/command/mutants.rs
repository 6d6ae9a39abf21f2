//! `cargo xtask mutants`: plants bugs, which tests must detect.
//!
//! `tests/mutants/AREA.toml` lists them. Each is one replacement in one file, with the test that
//! has to fail. They run in a copy of the work tree, in `target/mutants`, one at a time. Those with
//! a switch ([`SWITCH`]) are built together: a release build for each would take minutes.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Deserialize;

use crate::deadline::Deadline;
use crate::step::{Outcome, Step, Verdict};
use crate::tally::Tally;
use crate::{folder, needs};

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
    let mut chosen = load(args.area.as_deref())?;
    chosen.retain(|mutant| args.only.as_ref().is_none_or(|text| mutant.name.contains(text)));
    ensure!(!chosen.is_empty(), "no planted bug in tests/mutants has this area and this name");
    let (together, alone): (Vec<Mutant>, Vec<Mutant>) =
        chosen.into_iter().partition(Mutant::has_switch);
    let tests_in_qemu = if alone.is_empty() { &[][..] } else { &["qemu"] };
    needs::satisfy(&[&["cxx"], tests_in_qemu].concat())?;
    let count = together.len() + alone.len();
    let groups = alone.into_iter().map(|mutant| vec![mutant]).chain([together]);
    let mut copy = Copy::new()?;
    let (mut tally, mut rows) = (Tally::default(), Vec::new());
    for group in groups.filter(|group| !group.is_empty()) {
        eprintln!("\n==> [{} to {} of {count}]", rows.len() + 1, rows.len() + group.len());
        for (Mutant { area, name, consequence, .. }, fate) in copy.run(&group)? {
            tally.count(matches!(fate, Fate::Killed(_)));
            rows.push(match fate {
                Fate::Survived => format!("{area:<8} {name:<50} {fate}: {consequence}"),
                _ => format!("{area:<8} {name:<50} {fate}"),
            });
        }
    }
    println!("\n{}\n", rows.join("\n"));
    println!("{}", tally.line(start.elapsed()));
    Ok(tally.exit_code())
}

/// A test with a planted bug may hang; its timeout is this plus three times its normal duration.
const TIMEOUT_MIN: Duration = Duration::from_secs(60);

/// Stands in a replacement for an expression that is true while the bug is switched on.
const SWITCH: &str = "PLANTED";

/// Variable with the name of the bug that is switched on.
const SWITCHED_ON: &str = "RIPIENO_PLANTED";

/// A planted bug.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutant {
    /// Name of its list.
    #[serde(skip)]
    area: String,
    name: String,
    /// Effect of the bug on a user.
    consequence: String,
    /// Path from the root of the repository.
    file: String,
    /// Text that occurs exactly once in the file.
    find: String,
    replace: String,
    /// Command that has to fail.
    test: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    mutant: Vec<Mutant>,
}

/// Result of a planted bug.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// Detected by this test.
    Killed(String),
    Survived,
    /// The list is wrong, for this reason.
    Invalid(String),
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Killed(by) => write!(f, "killed by {by}"),
            Self::Survived => f.write_str("SURVIVED"),
            Self::Invalid(why) => write!(f, "INVALID: {why}"),
        }
    }
}

/// Returns the planted bugs of `area`, or of all areas.
///
/// # Errors
/// Returns an error if a list cannot be read.
fn load(area: Option<&str>) -> Result<Vec<Mutant>> {
    let lists = folder::workspace().join("tests/mutants");
    let mut paths: Vec<PathBuf> =
        fs::read_dir(&lists)?.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut all = Vec::new();
    for path in paths {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if area.is_some_and(|area| area != name) {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        let list: List =
            basic_toml::from_str(&text).with_context(|| format!("in {}", path.display()))?;
        all.extend(list.mutant.into_iter().map(|mutant| Mutant { area: name.clone(), ..mutant }));
    }
    Ok(all)
}

/// A copy of the work tree with its own build folder.
#[derive(Debug)]
struct Copy {
    tree: PathBuf,
    target: PathBuf,
    /// Commands that pass without a bug, and their durations.
    baseline: Vec<(String, Result<Duration, String>)>,
}

impl Copy {
    /// Updates the copy of an earlier run.
    fn new() -> Result<Self> {
        let folder = folder::target("mutants");
        let (tree, target, old) = (folder.join("tree"), folder.join("target"), folder.join("old"));
        if tree.exists() {
            let _ = fs::remove_dir_all(&old);
            fs::rename(&tree, &old)?;
        }
        let root = folder::workspace();
        let mut git = Command::new("git");
        git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
        let listed = git.current_dir(root).output().context("cannot run git")?;
        ensure!(listed.status.success(), "`git ls-files` failed: this is no git checkout");
        let listed = String::from_utf8(listed.stdout)?;
        for path in listed.split('\0').filter(|path| !path.is_empty()) {
            // Git also lists files deleted since the last commit.
            let Ok(bytes) = fs::read(root.join(path)) else { continue };
            let (old, new) = (old.join(path), tree.join(path));
            fs::create_dir_all(new.parent().unwrap_or(&tree))?;
            if fs::read(&old).is_ok_and(|found| found == bytes) {
                // Keeps its time stamp, so that cargo does not rebuild it.
                fs::rename(&old, &new)?;
            } else {
                fs::write(&new, bytes)?;
            }
        }
        let _ = fs::remove_dir_all(&old);
        Ok(Self { tree, target, baseline: Vec::new() })
    }

    /// Plants bugs, runs the test of each, and removes them. Of several, each has a switch.
    fn run<'a>(&mut self, mutants: &'a [Mutant]) -> Result<Vec<(&'a Mutant, Fate)>> {
        let (mut wrong, mut planted, mut fates) = (BTreeMap::new(), Vec::new(), Vec::new());
        for mutant in mutants {
            let path = self.tree.join(&mutant.file);
            let text = wrong.get(&path).cloned().map_or_else(|| fs::read_to_string(&path), Ok);
            let text = text.with_context(|| mutant.file.clone());
            match text.and_then(|text| mutant.plant(&text)) {
                Ok(text) => match self.baseline(&mutant.test)? {
                    Ok(took) => {
                        wrong.insert(path, text);
                        planted.push((mutant, took));
                    }
                    Err(why) => {
                        fates.push((mutant, Fate::Invalid(format!("without the bug: {why}"))));
                    }
                },
                Err(error) => fates.push((mutant, Fate::Invalid(format!("{error:#}")))),
            }
        }
        let mut right = Vec::new();
        for (path, text) in &wrong {
            right.push((path, fs::read_to_string(path)?));
            fs::write(path, text)?;
        }
        for (mutant, took) in planted {
            let fate = self.judge(mutant, took)?;
            eprintln!("    {}: {fate}", mutant.name);
            fates.push((mutant, fate));
        }
        right.into_iter().try_for_each(|(path, text)| fs::write(path, text))?;
        Ok(fates)
    }

    fn judge(&self, mutant: &Mutant, baseline: Duration) -> Result<Fate> {
        let Mutant { name, test, .. } = mutant;
        if let Err(why) = self.build(test)? {
            return Ok(Fate::Invalid(why));
        }
        let timeout = TIMEOUT_MIN + 3 * baseline;
        let (outcome, output) = self.execute(test, name, Deadline::after(timeout));
        Ok(match outcome.verdict {
            Verdict::Ok | Verdict::Skipped(_) => Fate::Survived,
            // Commands other than `cargo test` build by themselves.
            Verdict::Failed(_) if output.contains("error: could not compile") => {
                Fate::Invalid("it does not compile".into())
            }
            Verdict::Failed(why) => Fate::Killed(failed_test(&output).unwrap_or(why)),
        })
    }

    /// Returns the test's duration without a bug, or the reason for its failure.
    fn baseline(&mut self, test: &str) -> Result<Result<Duration, String>> {
        if let Some((_, known)) = self.baseline.iter().find(|(known, _)| known == test) {
            return Ok(known.clone());
        }
        let found = match self.build(test)? {
            Err(why) => Err(why),
            Ok(()) => {
                let (outcome, output) = self.execute(test, "", Deadline::never());
                match outcome.verdict {
                    Verdict::Ok => Ok(outcome.took),
                    Verdict::Failed(why) => {
                        eprint!("{output}");
                        Err(failed_test(&output).unwrap_or(why))
                    }
                    Verdict::Skipped(why) => Err(why),
                }
            }
        };
        self.baseline.push((test.to_owned(), found.clone()));
        Ok(found)
    }

    /// Builds first, so that the timeout applies only to the test.
    fn build(&self, test: &str) -> Result<Result<(), String>> {
        let Some(rest) = test.strip_prefix("cargo test ") else { return Ok(Ok(())) };
        let args = rest.split(" -- ").next().unwrap_or(rest);
        let output = self.shell(&format!("cargo test --no-run {args}")).output()?;
        if output.status.success() {
            return Ok(Ok(()));
        }
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        Ok(Err("it does not compile".into()))
    }

    fn shell(&self, line: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", line]).current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.target);
        command
    }

    /// Runs the test with a bug switched on. Returns the outcome and the output. A command that ran
    /// no test has failed.
    fn execute(&self, test: &str, bug: &str, deadline: Deadline) -> (Outcome, String) {
        let line = format!("cd '{}' && {test} 2>&1", self.tree.display());
        let mut output = Vec::new();
        let outcome = Step::new("test", "sh")
            .args(["-c", &line])
            .env("CARGO_TARGET_DIR", self.target.to_string_lossy())
            .env(SWITCHED_ON, bug)
            .tests_at_least(1)
            .run(deadline, &mut output, None);
        (outcome, String::from_utf8_lossy(&output).into_owned())
    }
}

impl Mutant {
    /// Returns true if it can be built together with others.
    pub fn has_switch(&self) -> bool {
        self.replace.contains(SWITCH)
    }

    fn plant(&self, text: &str) -> Result<String> {
        let Self { name, .. } = self;
        let on = format!("std::env::var_os({SWITCHED_ON:?}).is_some_and(|bug| bug == {name:?})");
        match text.matches(&self.find).count() {
            1 => Ok(text.replacen(&self.find, &self.replace.replace(SWITCH, &on), 1)),
            count => bail!("`find` occurs {count} times in {}", self.file),
        }
    }
}

/// Returns the first test that libtest reports as failed.
fn failed_test(output: &str) -> Option<String> {
    let name = |line: &str| Some(line.strip_prefix("test ")?.split_once(" ... FAILED")?.0.into());
    output.lines().find_map(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bug_is_planted_at_the_only_place() {
        let list = "[[mutant]]\nname = 'n'\nconsequence = 'c'\nfile = 'f'\n\
                    find = '''\na < b'''\nreplace = 'a > b'\ntest = 't'\n";
        let list: List = basic_toml::from_str(list).unwrap();
        let mutant = &list.mutant[0];
        assert_eq!(mutant.plant("if a < b {").unwrap(), "if a > b {");
        assert!(mutant.plant("a < b, a < b").unwrap_err().to_string().contains("2 times"));
        assert!(mutant.plant("").unwrap_err().to_string().contains("0 times"));
    }

    #[test]
    fn a_bug_with_a_switch_is_off_unless_it_is_named() {
        let list = "[[mutant]]\nname = 'n'\nconsequence = 'c'\nfile = 'f'\n\
                    find = 'a < b'\nreplace = 'a < b && !PLANTED'\ntest = 't'\n";
        let list: List = basic_toml::from_str(list).unwrap();
        let mutant = &list.mutant[0];
        assert!(mutant.has_switch());
        let on = r#"std::env::var_os("RIPIENO_PLANTED").is_some_and(|bug| bug == "n")"#;
        assert_eq!(mutant.plant("if a < b {").unwrap(), format!("if a < b && !{on} {{"));
    }

    #[test]
    fn the_failed_test_is_named() {
        let output = "test a ... ok\ntest b::c ... FAILED\ntest d ... FAILED\n";
        assert_eq!(failed_test(output).unwrap(), "b::c");
        assert_eq!(failed_test("test result: FAILED. 0 passed"), None);
    }

    #[test]
    fn the_lists_can_be_read() {
        assert!(load(Some("xtask")).unwrap().iter().all(|mutant| mutant.area == "xtask"));
        assert!(!load(None).unwrap().is_empty());
    }
}
