//! A kernel for a fixture: reacts to writes to these files like Linux. It can crash at any
//! operation, before or after its effect, or reject it.

use std::cell::{Cell, RefCell};
use std::fs;
use std::io;

use super::fixture::{Fixture, PROGRAM};
use crate::command::Host;
use crate::journal::Journal;
use crate::machine::Machine;
use crate::owner::Owner;
use crate::pci::{self, Function, PciAddress};
use crate::plan::Step;

/// A fault and the operation at which it occurs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// Power fails before the operation.
    CrashBefore(usize),
    /// Power fails after it, before its result is reported.
    CrashAfter(usize),
    /// The operation is rejected once.
    Refuse(usize),
}

pub(super) struct Kernel<'a> {
    fixture: &'a Fixture,
    fault: Fault,
    operations: Cell<usize>,
    is_dead: Cell<bool>,
    pub(super) writes: RefCell<Vec<String>>,
}

impl<'a> Kernel<'a> {
    pub(super) fn new(fixture: &'a Fixture, fault: Fault) -> Self {
        Self {
            fixture,
            fault,
            operations: Cell::new(0),
            is_dead: Cell::new(false),
            writes: RefCell::default(),
        }
    }

    pub(super) fn operations(&self) -> usize {
        self.operations.get()
    }

    /// Simulates a reboot: no override remains, and the kernel's own driver owns the drive.
    pub(super) fn reboot(&self, bdf: &str, boot: &str) {
        self.fixture.file("/proc/sys/kernel/random/boot_id", boot);
        let driver = self.function(bdf).unwrap().driver.unwrap();
        self.write(&format!("/sys/bus/pci/devices/{bdf}/driver_override"), "").unwrap();
        self.write(&format!("{}/{driver}/unbind", pci::DRIVERS), bdf).unwrap();
        self.write(pci::PROBE, bdf).unwrap();
    }

    pub(super) fn is_dead(&self) -> bool {
        self.is_dead.get()
    }

    pub(super) fn host(&self) -> Host<'_> {
        Host {
            root: &self.fixture.root,
            machine: self,
            journal: Journal::new(None),
            exe: PROGRAM.into(),
            notes: RefCell::default(),
        }
    }

    fn operate(&self, deed: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        if self.is_dead.get() {
            return Err(io::Error::other("the machine is off"));
        }
        let index = self.operations.get();
        self.operations.set(index + 1);
        match self.fault {
            Fault::CrashBefore(at) if at == index => {
                self.is_dead.set(true);
                Err(io::Error::other("power failed before it"))
            }
            Fault::CrashAfter(at) if at == index => {
                deed()?;
                self.is_dead.set(true);
                Err(io::Error::other("power failed after it"))
            }
            Fault::Refuse(at) if at == index => Err(io::Error::from(io::ErrorKind::InvalidInput)),
            _ => deed(),
        }
    }

    fn function(&self, text: &str) -> io::Result<Function> {
        let bdf: PciAddress = text.parse().map_err(io::Error::other)?;
        Function::read(&self.fixture.root, bdf).ok_or(io::Error::from_raw_os_error(19))
    }

    fn folder(&self, bdf: PciAddress) -> std::path::PathBuf {
        let path = self.fixture.root.resolve(pci::sysfs(bdf)).unwrap();
        self.fixture.root.at(path)
    }

    /// Returns ENODEV if this is not the bound driver, as in `unbind_store`.
    fn unbind(&self, driver: &str, text: &str) -> io::Result<()> {
        let function = self.function(text)?;
        if function.driver.as_deref() != Some(driver) {
            return Err(io::Error::from_raw_os_error(19));
        }
        let folder = self.folder(function.bdf);
        fs::remove_file(folder.join("driver"))?;
        if driver == "nvme" {
            // The kernel's disks disappear with its driver; links to them dangle.
            fs::rename(folder.join("nvme"), folder.join("nvme.away"))?;
        }
        let Some(group) = function.group.filter(|_| driver == pci::VFIO) else { return Ok(()) };
        let members = pci::group_members(&self.fixture.root, group);
        if !members.iter().any(Function::is_vfio) {
            fs::remove_file(self.fixture.root.at(format!("/dev/vfio/{group}")))?;
        }
        Ok(())
    }

    /// As in Linux, it is no error if no driver matches.
    fn probe(&self, text: &str) -> io::Result<()> {
        let function = self.function(text)?;
        if function.driver.is_some() {
            return Ok(());
        }
        let own = match function.class >> 16 {
            0x01 => "nvme",
            0x02 => "mlx5_core",
            _ => "none",
        };
        let driver = function.driver_override.as_deref().unwrap_or(own);
        if !self.fixture.root.exists(format!("{}/{driver}", pci::DRIVERS)) {
            return Ok(());
        }
        let folder = self.folder(function.bdf);
        std::os::unix::fs::symlink(
            format!("/sys/bus/pci/drivers/{driver}"),
            folder.join("driver"),
        )?;
        if driver == "nvme" {
            fs::rename(folder.join("nvme.away"), folder.join("nvme"))?;
        }
        if let Some(group) = function.group.filter(|_| driver == pci::VFIO) {
            self.fixture.file(&format!("/dev/vfio/{group}"), "0:0 0600");
        }
        Ok(())
    }
}

impl Kernel<'_> {
    fn write(&self, path: &str, value: &str) -> io::Result<()> {
        self.operate(|| {
            self.writes.borrow_mut().push(format!("{value} > {path}"));
            let parts: Vec<&str> = path.rsplit('/').collect();
            match (parts[0], parts[1]) {
                ("unbind", driver) => self.unbind(driver, value),
                ("drivers_probe", _) => self.probe(value),
                ("driver_override", bdf) => {
                    let folder = self.folder(self.function(bdf)?.bdf);
                    let text = if value.is_empty() { "(null)" } else { value };
                    fs::write(folder.join("driver_override"), format!("{text}\n"))
                }
                _ => Err(io::Error::from(io::ErrorKind::NotFound)),
            }
        })
    }

    fn load(&self, module: &str) -> io::Result<()> {
        self.operate(|| {
            self.fixture.folder(&format!("/sys/module/{module}"));
            if module == pci::VFIO {
                self.fixture.folder(&format!("{}/{module}", pci::DRIVERS));
            }
            Ok(())
        })
    }

    /// Tests are not root, so the owner is written into the file instead.
    fn own(&self, path: &str, owner: &Owner) -> io::Result<()> {
        self.operate(|| {
            if !self.fixture.root.exists(path) {
                return Err(io::Error::from(io::ErrorKind::NotFound));
            }
            self.fixture.file(path, &format!("{} {:04o}", owner.spec(), owner.mode()));
            Ok(())
        })
    }

    fn put(&self, path: &str, contents: &str, mode: u32) -> io::Result<()> {
        if self.fault == Fault::CrashBefore(self.operations.get()) {
            // Half of the new file exists, under its temporary name.
            let (folder, name) = path.rsplit_once('/').unwrap();
            self.fixture.file(&format!("{folder}/.{name}.new"), &contents[..contents.len() / 2]);
        }
        // Omits the real implementation's syncs, for speed; that one has a test of its own.
        self.operate(|| {
            self.fixture.file(path, contents);
            assert_eq!(mode, 0o644, "{path}");
            Ok(())
        })
    }

    fn link(&self, path: &str, target: &str) -> io::Result<()> {
        self.operate(|| {
            let _ = fs::remove_file(self.fixture.root.at(path));
            self.fixture.link(path, target);
            Ok(())
        })
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        self.operate(|| {
            let (folder, name) = path.rsplit_once('/').unwrap();
            for path in [path, &format!("{folder}/.{name}.new")] {
                let _ = fs::remove_file(self.fixture.root.at(path));
            }
            Ok(())
        })
    }

    fn expect(&self, bdf: PciAddress, driver: Option<&str>) -> io::Result<()> {
        self.operate(|| {
            let found = self.fixture.root.link_name(format!("{}/driver", pci::sysfs(bdf)));
            if found.as_deref() == driver {
                return Ok(());
            }
            Err(io::Error::other(format!("{bdf} has {found:?} and not {driver:?}")))
        })
    }
}

impl Machine for Kernel<'_> {
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
