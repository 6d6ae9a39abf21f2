//! Changes as data: steps that can be printed, kept in the journal and executed.

use serde::{Deserialize, Serialize};

use crate::owner::Owner;
use crate::pci::Root;
use crate::pci::{self, Function, PciAddress, VFIO};

/// One change. All can be repeated, except `Write`, which the kernel may reject the second time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub(crate) enum Step {
    /// Loads a kernel module.
    Load { module: String },
    /// Writes `value` and a newline into a sysfs file.
    Write { path: String, value: String },
    /// Waits until `bdf` is bound to this driver, or to none.
    Expect { bdf: PciAddress, driver: Option<String> },
    /// Sets the owner of a device node; waits for the node to appear.
    Own { path: String, owner: Owner },
    /// Replaces a whole file atomically: after a crash it has either the old or the new contents.
    Put { path: String, contents: String, mode: u32 },
    /// Creates a symbolic link, replacing an existing one.
    Link { path: String, target: String },
    /// Removes a file or link; succeeds if it does not exist.
    Remove { path: String },
}

impl Step {
    /// Returns the file it creates, if any.
    pub(crate) fn creates(&self) -> Option<&str> {
        match self {
            Step::Put { path, .. } | Step::Link { path, .. } => Some(path),
            _ => None,
        }
    }

    /// Returns the file it removes, if any.
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

/// The driver of a function before it was bound, and how to restore it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Former {
    pub(crate) driver: Option<String>,
    pub(crate) driver_override: Option<String>,
    /// The module of the driver, unless built in.
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

/// Returns steps to load the missing modules.
pub(crate) fn modules(root: &Root) -> Vec<Step> {
    let mut missing = Vec::new();
    if !root.exists(format!("{}/{VFIO}", pci::DRIVERS)) {
        missing.push(VFIO);
    }
    // The container that maps the memory of other devices; vfio-pci alone does not load it.
    if !root.exists("/sys/module/vfio_iommu_type1") {
        missing.push("vfio_iommu_type1");
    }
    missing.into_iter().map(|module| Step::Load { module: module.into() }).collect()
}

/// Returns steps from the current driver to vfio-pci.
pub(crate) fn bind(function: &Function) -> Vec<Step> {
    let bdf = function.bdf;
    let mut steps = vec![Step::write(format!("{}/driver_override", pci::sysfs(bdf)), VFIO)];
    steps.extend(let_go(function));
    steps.push(Step::write(pci::PROBE, bdf));
    steps.push(Step::Expect { bdf, driver: Some(VFIO.into()) });
    steps
}

/// Returns steps from any state to the former driver, or to the kernel's choice if there is none.
pub(crate) fn release(root: &Root, function: &Function, former: Option<&Former>) -> Vec<Step> {
    let bdf = function.bdf;
    let wanted = former.and_then(|former| former.driver.as_deref());
    let forced = former.and_then(|former| former.driver_override.as_deref());
    // Unbinds only from VFIO: any other driver was bound since.
    let is_there = match function.driver {
        Some(_) => !function.is_vfio(),
        None => former.is_some() && wanted.is_none(),
    };
    let mut steps = Vec::new();
    if !is_there {
        steps.extend(let_go(function));
    }
    // An override that names another driver would take effect at the next probe.
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

/// Unbinds through the driver's name, not through the device's link: if another driver was bound
/// since, the kernel rejects the write instead of unbinding a driver that was not checked.
fn let_go(function: &Function) -> Option<Step> {
    let driver = function.driver.as_ref()?;
    Some(Step::write(format!("{}/{driver}/unbind", pci::DRIVERS), function.bdf))
}
