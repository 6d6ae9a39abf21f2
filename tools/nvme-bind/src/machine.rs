//! The trait for all changes to the machine, and its two implementations: real and recorded.

use std::cell::RefCell;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use crate::owner::Owner;
use crate::pci::Root;
use crate::pci::{self, PciAddress};
use crate::plan::Step;

/// Maximum time for a device node or a driver to appear after the write that triggers it.
const SETTLE_MAX: Duration = Duration::from_secs(3);
const SETTLE_STEP: Duration = Duration::from_millis(20);

/// Changes a machine.
pub(crate) trait Machine {
    fn run(&self, step: &Step) -> io::Result<()>;

    /// Writes a file of the journal with [`Step::Put`]; a dry run omits its contents.
    fn note_down(&self, path: &str, contents: &str) -> io::Result<()> {
        let (path, contents) = (path.to_owned(), contents.to_owned());
        self.run(&Step::Put { path, contents, mode: 0o644 })
    }
}

/// This machine.
#[derive(Debug)]
pub(crate) struct Live {
    root: Root,
}

impl Live {
    pub(crate) fn new(root: Root) -> Self {
        Self { root }
    }

    /// Polls `done` until it is true or the timeout expires; returns true on success.
    fn settle(done: impl Fn() -> bool) -> bool {
        let start = Instant::now();
        while !done() {
            if start.elapsed() > SETTLE_MAX {
                return false;
            }
            thread::sleep(SETTLE_STEP);
        }
        true
    }

    fn write(&self, path: &str, value: &str) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).open(self.root.at(path))?;
        // A single write: sysfs takes each write as a separate command.
        file.write_all(format!("{value}\n").as_bytes())
    }

    fn load(&self, module: &str) -> io::Result<()> {
        if !self.root.is_real() {
            return Err(io::Error::other("modules are loaded only into the running kernel"));
        }
        let output = Command::new("modprobe").arg(module).output()?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(io::Error::other(format!("modprobe {module}: {said} ({})", output.status)))
    }

    fn own(&self, path: &str, owner: &Owner) -> io::Result<()> {
        let file = self.root.at(path);
        Self::settle(|| file.exists());
        // Before the mode, so that no unintended group gets access.
        chown(&file, owner.uid, owner.gid)?;
        fs::set_permissions(&file, Permissions::from_mode(owner.mode()))
    }

    fn put(&self, path: &str, contents: &str, mode: u32) -> io::Result<()> {
        let file = self.root.at(path);
        let folder = file.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder)?;
        let fresh = fresh(&file);
        // A leftover of a crash. The new file is created here (O_EXCL), never through a link.
        match fs::remove_file(&fresh) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(mode);
        options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
        let mut out = options.open(&fresh)?;
        out.set_permissions(Permissions::from_mode(mode))?;
        out.write_all(contents.as_bytes())?;
        out.sync_all()?;
        fs::rename(&fresh, &file)?;
        File::open(folder)?.sync_all()
    }

    fn link(&self, path: &str, target: &str) -> io::Result<()> {
        let file = self.root.at(path);
        let folder = file.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder)?;
        self.remove(path)?;
        symlink(target, &file)?;
        File::open(folder)?.sync_all()
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        let file = self.root.at(path);
        // Also the leftover of a crash during `put`.
        for path in [fresh(&file), file.clone()] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        match File::open(file.parent().unwrap_or(Path::new("/"))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            folder => folder?.sync_all(),
        }
    }

    fn expect(&self, bdf: PciAddress, driver: Option<&str>) -> io::Result<()> {
        let now = || self.root.link_name(format!("{}/driver", pci::sysfs(bdf)));
        if Self::settle(|| now().as_deref() == driver) {
            return Ok(());
        }
        let word = |name: Option<String>| name.unwrap_or_else(|| "no driver".into());
        let (found, wanted) = (word(now()), word(driver.map(str::to_owned)));
        let message = format!("{bdf} has {found} and not {wanted}; the kernel log says why");
        Err(io::Error::other(message))
    }
}

impl Machine for Live {
    fn run(&self, step: &Step) -> io::Result<()> {
        match step {
            Step::Load { module } => self.load(module),
            Step::Write { path, value } => self.write(path, value),
            Step::Expect { bdf, driver } => self.expect(*bdf, driver.as_deref()),
            Step::Own { path, owner } => self.own(path, owner),
            Step::Put { path, contents, mode } => self.put(path, contents, *mode),
            Step::Link { path, target } => self.link(path, target),
            Step::Remove { path } => self.remove(path),
        }
    }
}

/// Returns the temporary path of the new contents of `file`.
fn fresh(file: &Path) -> PathBuf {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    file.with_file_name(format!(".{name}.new"))
}

/// Records changes as shell commands instead of performing them.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    lines: RefCell<Vec<String>>,
}

impl Recorder {
    pub(crate) fn lines(self) -> Vec<String> {
        self.lines.into_inner()
    }

    fn note(&self, line: String) {
        self.lines.borrow_mut().push(line);
    }
}

impl Machine for Recorder {
    fn run(&self, step: &Step) -> io::Result<()> {
        match step {
            Step::Load { module } => self.note(format!("modprobe {module}")),
            Step::Write { path, value } => {
                let space = if value.is_empty() { "" } else { " " };
                self.note(format!("echo {value}{space}> {path}"));
            }
            Step::Expect { bdf, driver } => {
                let driver = driver.as_deref().unwrap_or("no driver");
                self.note(format!("# then checked: {bdf} has {driver}"));
            }
            Step::Own { path, owner } => {
                self.note(format!("chown {} {path}", owner.spec()));
                self.note(format!("chmod {:04o} {path}", owner.mode()));
            }
            Step::Put { path, contents, mode } => {
                let body = contents.trim_end_matches('\n');
                self.note(format!("cat > {path} <<'EOF'\n{body}\nEOF"));
                self.note(format!("chmod {mode:04o} {path}"));
            }
            Step::Link { path, target } => self.note(format!("ln -sfn {target} {path}")),
            Step::Remove { path } => self.note(format!("rm -f {path}")),
        }
        Ok(())
    }

    fn note_down(&self, path: &str, _contents: &str) -> io::Result<()> {
        // It is rewritten after each step; one line is enough.
        let line = format!("# journal: {path}");
        if !self.lines.borrow().contains(&line) {
            self.note(line);
        }
        Ok(())
    }
}

impl Step {
    /// Returns the first line of the step as printed by a dry run.
    pub(crate) fn line(&self) -> String {
        let recorder = Recorder::default();
        // A recorder cannot fail.
        let _ = recorder.run(self);
        let lines = recorder.lines();
        let first = lines.first().and_then(|text| text.lines().next());
        first.unwrap_or_default().to_owned()
    }
}

#[cfg(test)]
mod tests;
