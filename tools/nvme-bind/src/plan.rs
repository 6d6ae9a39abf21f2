//! What is to be done, as data: steps that can be printed, kept in the journal and carried out.

use std::io;

use serde::{Deserialize, Serialize};

use crate::machine::{Machine, Recorder};
use crate::owner::Owner;
use crate::pci::Root;
use crate::pci::{self, Function, PciAddress, VFIO};

/// One change. Each can be repeated, except `Write`, which the kernel may refuse the second time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub(crate) enum Step {
    Load { module: String },
    Write { path: String, value: String },
    Expect { bdf: PciAddress, driver: Option<String> },
    Own { path: String, owner: Owner },
    Put { path: String, contents: String, mode: u32 },
    Link { path: String, target: String },
    Remove { path: String },
}

impl Step {
    pub(crate) fn run(&self, machine: &dyn Machine) -> io::Result<()> {
        match self {
            Step::Load { module } => machine.load(module),
            Step::Write { path, value } => machine.write(path, value),
            Step::Expect { bdf, driver } => machine.expect(*bdf, driver.as_deref()),
            Step::Own { path, owner } => machine.own(path, owner),
            Step::Put { path, contents, mode } => machine.put(path, contents, *mode),
            Step::Link { path, target } => machine.link(path, target),
            Step::Remove { path } => machine.remove(path),
        }
    }

    /// The first line of the step as a dry run prints it.
    pub(crate) fn line(&self) -> String {
        let recorder = Recorder::default();
        // A recorder does nothing that could fail.
        let _ = self.run(&recorder);
        let lines = recorder.lines();
        let first = lines.first().and_then(|text| text.lines().next());
        first.unwrap_or_default().to_owned()
    }

    /// The file that it creates, if it creates one.
    pub(crate) fn creates(&self) -> Option<&str> {
        match self {
            Step::Put { path, .. } | Step::Link { path, .. } => Some(path),
            _ => None,
        }
    }

    /// The file that it removes, if it removes one.
    pub(crate) fn removes(&self) -> Option<&str> {
        match self {
            Step::Remove { path } => Some(path),
            _ => None,
        }
    }

    fn write(path: impl Into<String>, value: impl ToString) -> Self {
        Step::Write { path: path.into(), value: value.to_string() }
    }
}

/// The driver that had a function before it was bound, and how it got it back.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Former {
    pub(crate) driver: Option<String>,
    pub(crate) driver_override: Option<String>,
    /// The module of the driver, if it is one.
    pub(crate) module: Option<String>,
}

impl Former {
    pub(crate) fn read(root: &Root, function: &Function) -> Self {
        let module = |driver: &String| root.link_name(format!("{}/{driver}/module", pci::DRIVERS));
        Self {
            driver: function.driver.clone(),
            driver_override: function.driver_override.clone(),
            module: function.driver.as_ref().and_then(module),
        }
    }
}

/// The modules to load before anything can be bound.
pub(crate) fn modules(root: &Root) -> Vec<Step> {
    let mut missing = Vec::new();
    if !root.exists(format!("{}/{VFIO}", pci::DRIVERS)) {
        missing.push(VFIO);
    }
    // The container that accepts the memory of other devices; vfio-pci alone does not load it.
    if !root.exists("/sys/module/vfio_iommu_type1") {
        missing.push("vfio_iommu_type1");
    }
    missing.into_iter().map(|module| Step::Load { module: module.into() }).collect()
}

/// From whatever driver it has to vfio-pci.
pub(crate) fn bind(function: &Function) -> Vec<Step> {
    let bdf = function.bdf;
    let mut steps = vec![Step::write(format!("{}/driver_override", pci::sysfs(bdf)), VFIO)];
    steps.extend(let_go(function));
    steps.push(Step::write(pci::PROBE, bdf));
    steps.push(Step::Expect { bdf, driver: Some(VFIO.into()) });
    steps
}

/// From whatever state it is in to the former one; without a former one, to what the kernel picks.
pub(crate) fn release(root: &Root, function: &Function, former: Option<&Former>) -> Vec<Step> {
    let bdf = function.bdf;
    let wanted = former.and_then(|former| former.driver.as_deref());
    let forced = former.and_then(|former| former.driver_override.as_deref());
    // Taken from VFIO and from nobody else: what has another driver was given to it since.
    let is_there = match function.driver {
        Some(_) => !function.is_vfio(),
        None => former.is_some() && wanted.is_none(),
    };
    let mut steps = Vec::new();
    if !is_there {
        steps.extend(let_go(function));
    }
    // An override that names a driver other than the one it has would win at the next probe.
    if function.driver_override.as_deref() != forced {
        let path = format!("{}/driver_override", pci::sysfs(bdf));
        steps.push(Step::write(path, forced.unwrap_or_default()));
    }
    match (former, wanted) {
        _ if is_there => {}
        (Some(former), Some(driver)) => {
            let folder = format!("{}/{driver}", pci::DRIVERS);
            if !root.exists(&folder) {
                let module = former.module.clone().unwrap_or_else(|| driver.to_owned());
                steps.push(Step::Load { module });
            }
            // Loading the module may have bound it already, and binding twice is an error.
            steps.push(Step::write(pci::PROBE, bdf));
            steps.push(Step::Expect { bdf, driver: Some(driver.to_owned()) });
        }
        (Some(_), None) => steps.push(Step::Expect { bdf, driver: None }),
        (None, _) => steps.push(Step::write(pci::PROBE, bdf)),
    }
    steps
}

/// The driver by name and not through the device's link: if another one has taken the device
/// since, the kernel refuses, instead of us pulling it from a driver nobody looked at.
fn let_go(function: &Function) -> Option<Step> {
    let driver = function.driver.as_ref()?;
    Some(Step::write(format!("{}/{driver}/unbind", pci::DRIVERS), function.bdf))
}
