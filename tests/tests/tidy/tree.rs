//! Files visible to a rule: the repository's, or a sample's.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A text file.
pub struct File {
    /// Path from the root of the repository, with `/`.
    pub path: String,
    pub text: String,
}

/// A violation of a rule.
#[derive(Debug)]
pub struct Violation {
    path: String,
    line: usize,
    message: String,
}

impl Violation {
    /// Creates a violation: `message` has the error, its effect and the remedy; lines count from 1.
    pub fn new(file: &File, line: usize, message: impl Into<String>) -> Self {
        Self { path: file.path.clone(), line, message: message.into() }
    }

    pub fn place(&self) -> String {
        format!("{}:{}", self.path, self.line)
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place(), self.message)
    }
}

impl File {
    pub fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or(&self.path)
    }

    /// Returns the folder, without a trailing slash; empty at the root.
    pub fn folder(&self) -> &str {
        self.path.rsplit_once('/').map_or("", |(folder, _)| folder)
    }

    pub fn is(&self, extensions: &[&str]) -> bool {
        self.name().rsplit_once('.').is_some_and(|(_, ext)| extensions.contains(&ext))
    }

    /// Returns the numbered lines.
    pub fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        numbered(&self.text)
    }
}

/// Returns the lines with their numbers, from 1.
pub fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(index, line)| (index + 1, line))
}

/// Returns the number of the line that contains byte `at`.
pub fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n').count()
}

/// All files of a repository.
pub struct Tree {
    files: Vec<File>,
    /// All paths, including those of binary files: links may point to them.
    paths: Vec<String>,
}

impl Tree {
    pub fn of_samples(samples: Vec<(&'static str, String)>) -> Self {
        let files: Vec<File> =
            samples.into_iter().map(|(path, text)| File { path: path.into(), text }).collect();
        let paths = files.iter().map(|file| file.path.clone()).collect();
        Self { files, paths }
    }

    pub fn of_repository() -> Self {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = manifest.parent().expect("this crate is a folder of the workspace");
        let mut paths = listed_by_git(root).unwrap_or_else(|| walked(root));
        paths.sort();
        let mut tree = Self { files: Vec::new(), paths: Vec::new() };
        for path in paths {
            // A file that git lists may have been deleted since.
            let Ok(bytes) = fs::read(root.join(&path)) else { continue };
            if let Ok(text) = String::from_utf8(bytes) {
                tree.files.push(File { path: path.clone(), text });
            }
            tree.paths.push(path);
        }
        tree
    }

    /// Replaces a file of the repository.
    pub fn write(&mut self, path: &str, text: &str) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("it is in a workspace");
        fs::write(root.join(path), text).unwrap_or_else(|error| panic!("{path}: {error}"));
        *self = Self::of_repository();
    }

    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// Returns the files with one of these extensions.
    pub fn with(&self, extensions: &'static [&str]) -> impl Iterator<Item = &File> {
        self.files.iter().filter(|file| file.is(extensions))
    }

    pub fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    /// Returns true if there is such a file or folder; the root is the empty path.
    pub fn contains(&self, path: &str) -> bool {
        let inside = |file: &String| {
            file.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        path.is_empty() || self.paths.iter().any(inside)
    }
}

/// Lists tracked files, and outside CI new ones that are not ignored; `None` outside a checkout.
fn listed_by_git(root: &Path) -> Option<Vec<String>> {
    if !root.join(".git").exists() {
        return None; // An unpacked archive inside another repository.
    }
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached"]);
    if std::env::var_os("CI").is_none() {
        // Contributors get errors before a commit; CI checks the commit.
        git.args(["--others", "--exclude-standard"]);
    }
    let listed = git.current_dir(root).output().ok().filter(|output| output.status.success())?;
    let paths = listed.stdout.split(|&byte| byte == 0).filter(|path| !path.is_empty());
    Some(paths.map(|path| String::from_utf8_lossy(path).into_owned()).collect())
}

/// Lists all files under `root` except build output.
fn walked(root: &Path) -> Vec<String> {
    let (mut folders, mut paths) = (vec![PathBuf::new()], Vec::new());
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(root.join(&folder)).into_iter().flatten().flatten();
        for entry in entries {
            let path = folder.join(entry.file_name());
            let Ok(kind) = entry.file_type() else { continue };
            let name = entry.file_name();
            if kind.is_file() {
                paths.push(path.to_string_lossy().into_owned());
            } else if kind.is_dir()
                && name != ".git"
                && !name.to_string_lossy().starts_with("target")
            {
                folders.push(path);
            }
        }
    }
    paths
}

#[test]
fn both_ways_to_list_the_files_find_the_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let own = "tests/tests/tidy/tree.rs";
    assert!(walked(root).iter().any(|path| path == own));
    if let Some(listed) = listed_by_git(root) {
        assert!(listed.iter().any(|path| path == own));
    }
}

#[test]
fn folders_and_files_are_contained() {
    let tree = Tree::of_samples(vec![("docs/adr/a.md", String::new())]);
    for (path, there) in
        [("docs", true), ("docs/adr/a.md", true), ("doc", false), ("docs/b", false)]
    {
        assert_eq!(tree.contains(path), there, "{path}");
    }
}

#[test]
fn bytes_have_line_numbers() {
    assert_eq!([0, 1, 2].map(|at| line_of("a\nb", at)), [1, 1, 2]);
}
