//! The intention for each drive and its progress: one durable file per drive.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::owner::Owner;
use crate::pci::PciAddress;
use crate::pci::Root;
use crate::plan::{Former, Step};
use crate::problem::{Kind, Problem, Result};

/// Cleared by a reboot, like the bindings.
pub(crate) const RUN: &str = "/run/nvme-bind";
/// Survives a reboot.
pub(crate) const LIB: &str = "/var/lib/nvme-bind";
/// Suffix of the journal's files.
const SUFFIX: &str = ".drive.json";

/// The kernel's boot id; changes with each boot.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";
const VERSION: u32 = 1;
/// Maximum wait for another run of this program, which takes seconds at most.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(30);
const LOCK_WAIT_STEP: Duration = Duration::from_millis(50);

/// State of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Phase {
    /// Binding was started and not finished.
    Binding,
    Bound,
    /// Releasing was started and not finished.
    Releasing,
    /// Released; the next boot binds it again.
    Released,
}

/// The journal of one drive.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) version: u32,
    pub(crate) bdf: PciAddress,
    /// Vendor and device id, to detect another card in the slot.
    pub(crate) ids: String,
    pub(crate) boot: String,
    pub(crate) phase: Phase,
    pub(crate) group: Option<u32>,
    pub(crate) owner: Option<Owner>,
    /// `None` if it was on VFIO when first recorded.
    pub(crate) former: Option<Former>,
    pub(crate) steps: Vec<Step>,
    /// Number of completed steps; one more may be, if the machine stopped in between.
    pub(crate) done: usize,
    /// The files that bind it at each boot.
    #[serde(default)]
    pub(crate) persist: Vec<Step>,
    // Known only to the kernel's driver, and recorded while the drive is away from it.
    pub(crate) model: Option<String>,
    pub(crate) serial: Option<String>,
    pub(crate) bytes: Option<u64>,
}

impl Record {
    pub(crate) fn new(root: &Root, bdf: PciAddress, ids: String) -> Self {
        Self {
            version: VERSION,
            bdf,
            ids,
            boot: boot(root),
            phase: Phase::Binding,
            group: None,
            owner: None,
            former: None,
            steps: Vec::new(),
            done: 0,
            persist: Vec::new(),
            model: None,
            serial: None,
            bytes: None,
        }
    }

    /// Returns true if it was recorded since this boot; the bindings of earlier boots are gone.
    pub(crate) fn is_current(&self, root: &Root) -> bool {
        self.boot == boot(root)
    }

    pub(crate) fn is_half_done(&self, root: &Root) -> bool {
        self.is_current(root) && matches!(self.phase, Phase::Binding | Phase::Releasing)
    }

    /// Returns the files that its steps create or remove: an unfinished release may have left some.
    pub(crate) fn touched(&self) -> Vec<String> {
        self.steps
            .iter()
            .filter_map(|step| step.creates().or(step.removes()))
            .map(str::to_owned)
            .collect()
    }

    /// Returns the files that bind the drive at each boot.
    pub(crate) fn kept(&self) -> Vec<String> {
        self.persist.iter().filter_map(Step::creates).map(str::to_owned).collect()
    }
}

/// Returns the id of this boot; empty if unreadable.
pub(crate) fn boot(root: &Root) -> String {
    root.text(BOOT).unwrap_or_default()
}

/// The directories of the records; new records go to the first.
#[derive(Debug, Clone)]
pub(crate) struct Journal {
    folders: Vec<String>,
}

impl Journal {
    /// Creates a journal; `folder` is from the command line, the default ones are read in any case.
    pub(crate) fn new(folder: Option<&str>) -> Self {
        let mut folders: Vec<String> = folder.into_iter().map(str::to_owned).collect();
        folders.extend([RUN, LIB].map(str::to_owned));
        Self { folders }
    }

    /// Returns the directory given on the command line.
    pub(crate) fn chosen(&self) -> Option<&str> {
        self.folders.first().map(String::as_str).filter(|first| *first != RUN)
    }

    /// Returns the readable records, by address, and messages about the others.
    pub(crate) fn read(&self, root: &Root) -> (Vec<Record>, Vec<String>) {
        let (mut records, mut wrong): (Vec<Record>, Vec<String>) = Default::default();
        for folder in &self.folders {
            let names = root.names(folder).into_iter();
            for name in names.filter(|name| name.ends_with(SUFFIX) && !name.starts_with('.')) {
                let path = format!("{folder}/{name}");
                let text = root.text(&path).unwrap_or_default();
                match serde_json::from_str::<Record>(&text) {
                    Ok(record) if record.version == VERSION => {
                        // A crash between writing one and removing the other leaves both.
                        if !records.iter().any(|known| known.bdf == record.bdf) {
                            records.push(record);
                        }
                    }
                    Ok(record) => wrong.push(format!(
                        "{path} is of version {}, and this program knows {VERSION}",
                        record.version
                    )),
                    Err(error) => wrong.push(format!("{path} cannot be read: {error}")),
                }
            }
        }
        records.sort_by_key(|record| record.bdf);
        (records, wrong)
    }

    pub(crate) fn find(&self, root: &Root, bdf: PciAddress) -> Option<Record> {
        self.read(root).0.into_iter().find(|record| record.bdf == bdf)
    }

    /// Makes the record durable in its directory and removes it from the others.
    pub(crate) fn save(&self, root: &Root, machine: &dyn Machine, record: &Record) -> Result<()> {
        let home = self.home(record);
        let path = file(&home, record.bdf);
        let text = serde_json::to_string_pretty(record)
            .map_err(|error| Problem::new(Kind::Failed, format!("{path}: {error}"), ""))?;
        let failed = |error| Problem::io(format!("writing the journal {path}"), &error);
        machine.note_down(&path, &format!("{text}\n")).map_err(failed)?;
        self.remove_from(root, machine, record.bdf, |folder| *folder != home)
    }

    pub(crate) fn remove(&self, root: &Root, machine: &dyn Machine, bdf: PciAddress) -> Result<()> {
        self.remove_from(root, machine, bdf, |_| true)
    }

    fn remove_from(
        &self,
        root: &Root,
        machine: &dyn Machine,
        bdf: PciAddress,
        which: impl Fn(&String) -> bool,
    ) -> Result<()> {
        for folder in self.folders.iter().filter(|folder| which(folder)) {
            let path = file(folder, bdf);
            if root.exists(&path) {
                let failed = |error| Problem::io(format!("removing the journal {path}"), &error);
                machine.run(&Step::Remove { path: path.clone() }).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn home(&self, record: &Record) -> String {
        let first = self.folders.first().cloned().unwrap_or_default();
        // A record for the next boot cannot be in a directory that is empty after a reboot.
        let is_lost = first == RUN || first.starts_with("/run/") || first.starts_with("/tmp/");
        if is_lost && !record.persist.is_empty() { LIB.into() } else { first }
    }

    /// Rejects directories writable by others: records name the files root writes and removes.
    fn check_owners(&self, root: &Root) -> Result<()> {
        let own = [0, rustix::process::geteuid().as_raw()];
        let groups = [0, rustix::process::getegid().as_raw()];
        for folder in &self.folders {
            // Parent directories too: anyone who can write there can replace the directory.
            for path in Path::new(folder).ancestors() {
                let Some((uid, gid, mode)) = root.owner(path) else { continue };
                let shared = mode & 0o002 != 0 || mode & 0o020 != 0 && !groups.contains(&gid);
                // The sticky bit prevents others from replacing files they do not own.
                let sticky = mode & 0o1000 != 0 && path != Path::new(folder);
                if !own.contains(&uid) || shared && !sticky {
                    let path = path.display();
                    let message = format!(
                        "the journal's folder {folder} is not safe: {path} belongs to user {uid} \
                         with mode {mode:04o}, so that others than root can write the journal"
                    );
                    let hint = "choose a folder that only root can write to, or chown and chmod it";
                    return Err(Problem::new(Kind::Failed, message, hint));
                }
            }
        }
        Ok(())
    }

    /// Locks out other runs of this program until the file is dropped.
    pub(crate) fn lock(&self, root: &Root) -> Result<File> {
        self.check_owners(root)?;
        let path = format!("{RUN}/lock");
        let failed = |error: &std::io::Error| Problem::io(format!("locking {path}"), error);
        fs::create_dir_all(root.at(RUN)).map_err(|error| failed(&error))?;
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).write(true).mode(0o600);
        let lock = options.open(root.at(&path)).map_err(|error| failed(&error))?;
        // At boot the units of several drives start simultaneously.
        let start = Instant::now();
        while rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            if start.elapsed() > LOCK_WAIT_MAX {
                let message = format!("another nvme-bind is at work (it holds {path})");
                return Err(Problem::new(Kind::Failed, message, "wait for it and try again"));
            }
            thread::sleep(LOCK_WAIT_STEP);
        }
        Ok(lock)
    }
}

fn file(folder: &str, bdf: PciAddress) -> String {
    format!("{folder}/{bdf}{SUFFIX}")
}
