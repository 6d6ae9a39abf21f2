//! The subcommands: each turns a request into a reply.

pub(crate) mod bind;
pub(crate) mod list;
pub(crate) mod release;
pub(crate) mod status;

use std::cell::RefCell;
use std::fs::File;

use serde_json::Value;

use crate::execute::Site;
use crate::journal::Journal;
use crate::machine::{Machine, Recorder};
use crate::pci::Root;
use crate::problem::{Kind, Problem, Result};

/// Context of a subcommand.
pub(crate) struct Host<'a> {
    pub(crate) root: &'a Root,
    pub(crate) machine: &'a dyn Machine,
    pub(crate) journal: Journal,
    /// Path of this program, for the unit that runs it at boot.
    pub(crate) exe: String,
    /// Remarks for stderr, in order.
    pub(crate) notes: RefCell<Vec<String>>,
}

/// Output for stdout in both forms, and the exit code.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) text: String,
    pub(crate) json: Value,
    pub(crate) code: u8,
}

impl Reply {
    pub(crate) fn new(text: impl Into<String>, json: Value) -> Self {
        Self { text: text.into(), json, code: 0 }
    }
}

impl Host<'_> {
    pub(crate) fn note(&self, text: impl Into<String>) {
        let text = text.into();
        let mut notes = self.notes.borrow_mut();
        if !notes.contains(&text) {
            notes.push(text);
        }
    }

    pub(crate) fn site(&self) -> Site<'_> {
        Site { root: self.root, machine: self.machine, journal: &self.journal }
    }

    /// Runs `work` on a recorder and replies with the recorded changes.
    fn rehearse(&self, work: impl FnOnce(&Site<'_>) -> Result<()>) -> Result<Reply> {
        let recorder = Recorder::default();
        work(&Site { root: self.root, machine: &recorder, journal: &self.journal })?;
        let lines = recorder.lines();
        let json = serde_json::json!({ "dry_run": true, "would_do": lines });
        Ok(Reply::new(lines.join("\n"), json))
    }

    /// Locks out other runs until the file is dropped. Taken before anything is read, as another
    /// run could be about to change it. A dry run changes nothing and needs no lock.
    fn lock(&self, dry_run: bool) -> Result<Option<File>> {
        if dry_run {
            return Ok(None);
        }
        if self.root.is_real() && !rustix::process::geteuid().is_root() {
            let hint = "run it with sudo; --dry-run needs no rights";
            return Err(Problem::new(Kind::Failed, "only root can change drivers", hint));
        }
        self.journal.lock(self.root).map(Some)
    }

    /// Reports unusable files of the journal.
    fn warn_about(&self, wrong: &[String]) {
        for text in wrong {
            self.note(format!("{text}; move it away once the drive is where it should be"));
        }
    }
}
