//! What was intended with each drive, and how far it got: one durable file per drive.

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

/// Gone after a reboot, as the bindings are.
pub(crate) const RUN: &str = "/run/nvme-bind";
/// For what outlives a reboot.
pub(crate) const LIB: &str = "/var/lib/nvme-bind";
/// How the files of the journal end.
const SUFFIX: &str = ".drive.json";

/// The kernel changes this with each boot.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";
const VERSION: u32 = 1;
/// How long to wait for another run of this program, which takes seconds at most.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(30);
const LOCK_WAIT_STEP: Duration = Duration::from_millis(50);

/// Where a drive is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Phase {
    /// Steps to bind it were begun and not finished.
    Binding,
    Bound,
    /// Steps to give it back were begun and not finished.
    Releasing,
    /// It was given back, and the next boot binds it again.
    Released,
}

/// The journal of one drive.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) version: u32,
    pub(crate) bdf: PciAddress,
    /// Vendor and device, to notice that another card is in the slot.
    pub(crate) ids: String,
    pub(crate) boot: String,
    pub(crate) phase: Phase,
    pub(crate) group: Option<u32>,
    pub(crate) owner: Option<Owner>,
    /// None if it was on VFIO before we first saw it.
    pub(crate) former: Option<Former>,
    pub(crate) steps: Vec<Step>,
    /// So many of the steps are done; one more may be, if the machine stopped in between.
    pub(crate) done: usize,
    /// The files that bind it at each boot.
    #[serde(default)]
    pub(crate) persist: Vec<Step>,
    // What only the kernel's driver can tell, for as long as it is away.
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

    /// Whether it tells of this boot; the bindings of an earlier one are gone.
    pub(crate) fn is_current(&self, root: &Root) -> bool {
        self.boot == boot(root)
    }

    pub(crate) fn is_half_done(&self, root: &Root) -> bool {
        self.is_current(root) && matches!(self.phase, Phase::Binding | Phase::Releasing)
    }

    /// The files that its steps create, or were to remove: an unfinished release has some left.
    pub(crate) fn touched(&self) -> Vec<String> {
        self.steps
            .iter()
            .filter_map(|step| step.creates().or(step.removes()))
            .map(str::to_owned)
            .collect()
    }

    /// The files that bind the drive at each boot.
    pub(crate) fn kept(&self) -> Vec<String> {
        self.persist.iter().filter_map(Step::creates).map(str::to_owned).collect()
    }
}

/// The id of this boot; empty if there is none to be read.
pub(crate) fn boot(root: &Root) -> String {
    root.text(BOOT).unwrap_or_default()
}

/// The folders with the records; new ones go into the first.
#[derive(Debug, Clone)]
pub(crate) struct Journal {
    folders: Vec<String>,
}

impl Journal {
    /// `folder` is what the command line says; the usual ones are looked into anyway.
    pub(crate) fn new(folder: Option<&str>) -> Self {
        let mut folders: Vec<String> = folder.into_iter().map(str::to_owned).collect();
        folders.extend([RUN, LIB].map(str::to_owned));
        Self { folders }
    }

    /// The folder that the command line named.
    pub(crate) fn chosen(&self) -> Option<&str> {
        self.folders.first().map(String::as_str).filter(|first| *first != RUN)
    }

    /// The records that can be read, by address, and what is wrong with the others.
    pub(crate) fn read(&self, root: &Root) -> (Vec<Record>, Vec<String>) {
        let (mut records, mut wrong): (Vec<Record>, Vec<String>) = Default::default();
        for folder in &self.folders {
            let names = root.names(folder).into_iter();
            for name in names.filter(|name| name.ends_with(SUFFIX) && !name.starts_with('.')) {
                let path = format!("{folder}/{name}");
                let text = root.text(&path).unwrap_or_default();
                match serde_json::from_str::<Record>(&text) {
                    Ok(record) if record.version == VERSION => {
                        // A crash between writing the one and removing the other leaves both.
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

    /// Makes the record durable, in the place where it belongs and nowhere else.
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
                machine.remove(&path).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn home(&self, record: &Record) -> String {
        let first = self.folders.first().cloned().unwrap_or_default();
        // What the next boot is to find cannot be where a boot starts empty.
        let is_lost = first == RUN || first.starts_with("/run/") || first.starts_with("/tmp/");
        if is_lost && !record.persist.is_empty() { LIB.into() } else { first }
    }

    /// Refuses folders that others can write to: the records say what root writes and removes.
    fn check_owners(&self, root: &Root) -> Result<()> {
        let own = [0, rustix::process::geteuid().as_raw()];
        let groups = [0, rustix::process::getegid().as_raw()];
        for folder in &self.folders {
            // With the folders above: who can write there can put another one in its place.
            for path in Path::new(folder).ancestors() {
                let Some((uid, gid, mode)) = root.owner(path) else { continue };
                let shared = mode & 0o002 != 0 || mode & 0o020 != 0 && !groups.contains(&gid);
                // The sticky bit keeps others from replacing what is not theirs.
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

    /// Keeps other runs of this program away until the file is dropped.
    pub(crate) fn lock(&self, root: &Root) -> Result<File> {
        self.check_owners(root)?;
        let path = format!("{RUN}/lock");
        let failed = |error: &std::io::Error| Problem::io(format!("locking {path}"), error);
        fs::create_dir_all(root.at(RUN)).map_err(|error| failed(&error))?;
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).write(true).mode(0o600);
        let lock = options.open(root.at(&path)).map_err(|error| failed(&error))?;
        // At boot the units of several drives start at once.
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
