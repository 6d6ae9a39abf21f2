//! `--device` and related flags: software controllers or drives, and memory.

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use nvme_driver::platform::vfio::PciAddress;
use ripieno_stack::{MemoryPlace, expand_home};

use crate::problem::Problem;
use crate::size::{self, Size};

/// Default number of software controllers.
pub(crate) const EMU_DEFAULT: u32 = 2;
/// Default MDTS of a software controller, in bytes.
pub(crate) const MDTS_DEFAULT: u32 = 512 << 10;
/// Smallest MDTS in bytes: 2^1 pages, because 2^0 stands for "no limit".
const MDTS_MIN: u64 = 8 << 10;
/// Largest MDTS offered, in bytes: far above any drive's.
const MDTS_MAX: u64 = 64 << 20;

/// Storage behind the software controllers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MediaChoice {
    /// Memory of this process.
    Memory,
    /// Unnamed files in this directory.
    File(PathBuf),
}

impl fmt::Display for MediaChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::File(directory) => write!(f, "file:{}", directory.display()),
        }
    }
}

/// Software controllers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EmuChoice {
    /// Number of controllers.
    pub(crate) count: u32,
    /// Storage behind them.
    pub(crate) media: MediaChoice,
    /// LBA size in bytes.
    pub(crate) lba_bytes: u32,
    /// Largest transfer in bytes (MDTS).
    pub(crate) mdts: u32,
}

/// Devices that the objects are striped over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Devices {
    /// Software controllers.
    Emu(EmuChoice),
    /// PCIe functions bound to vfio-pci.
    Vfio(Vec<PciAddress>),
}

impl Devices {
    /// Returns the storage behind the software controllers; `None` for drives.
    pub(crate) fn media(&self) -> Option<&MediaChoice> {
        match self {
            Self::Emu(emu) => Some(&emu.media),
            Self::Vfio(_) => None,
        }
    }

    /// Returns the number of devices.
    pub(crate) fn count(&self) -> u32 {
        match self {
            Self::Emu(emu) => emu.count,
            Self::Vfio(drives) => drives.len() as u32,
        }
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Emu(_) => f.write_str("emu"),
            Self::Vfio(drives) => {
                let names: Vec<String> = drives.iter().map(|at| format!("vfio:{at}")).collect();
                f.write_str(&names.join(","))
            }
        }
    }
}

/// A device named on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Named {
    /// A software controller.
    Emu,
    /// A PCIe function bound to vfio-pci.
    Vfio(PciAddress),
}

/// Parses `--device`: values may be repeated, and each may be a list; `vfio:` applies to the
/// addresses that follow it.
///
/// # Errors
/// Returns a [`Problem`] for a word that is no device, and for a device named twice.
pub(crate) fn parse(values: &[String]) -> Result<Vec<Named>, Problem> {
    let mut devices = Vec::new();
    for value in values {
        let mut vfio = false;
        for word in value.split(',') {
            let word = word.trim();
            let device = match word.strip_prefix("vfio:") {
                None if word == "emu" => Named::Emu,
                None if vfio => Named::Vfio(address(word)?),
                None => return Err(unknown(word)),
                Some(text) => Named::Vfio(address(text)?),
            };
            vfio = device != Named::Emu;
            if vfio && devices.contains(&device) {
                return Err(Problem::new(
                    format!("--device {value}: {word} is named twice"),
                    "name each drive once",
                ));
            }
            devices.push(device);
        }
    }
    Ok(devices)
}

/// Returns the drives that `--device` names; none if it names software controllers, whose number is
/// a separate flag.
pub(crate) fn drives(values: &[String]) -> Result<Vec<PciAddress>, Problem> {
    let named = parse(values)?;
    let address = |device: &Named| match device {
        Named::Emu => None,
        Named::Vfio(address) => Some(*address),
    };
    let drives: Vec<PciAddress> = named.iter().filter_map(address).collect();
    if !drives.is_empty() && drives.len() < named.len() {
        return Err(Problem::new(
            "--device: software controllers and drives cannot share a store, because their DMA \
             uses different address spaces",
            "name only emu, or only vfio devices",
        ));
    }
    if drives.is_empty() && named.len() > 1 {
        return Err(Problem::new(
            format!("--device: emu is named {} times, and stands for all of them", named.len()),
            "name it once",
        ));
    }
    Ok(drives)
}

fn unknown(word: &str) -> Problem {
    Problem::new(
        format!("--device {word}: no such kind of device"),
        "name a drive by its PCI address, as vfio:0000:65:00.0 (nvme-bind list shows it)",
    )
}

fn address(text: &str) -> Result<PciAddress, Problem> {
    text.parse().map_err(|error| {
        Problem::new(
            format!("--device vfio:{text}: {error}"),
            "use domain:bus:device.function in hexadecimal, such as 0000:65:00.0",
        )
    })
}

/// Parses `--memory`.
pub(crate) fn memory(text: &str) -> Result<MemoryPlace, String> {
    if text == "host" {
        return Ok(MemoryPlace::Host);
    }
    let wrong = |why: String| {
        format!("{why}; use host, or peer:0000:00:05.0/2 for BAR 2 of a function bound to vfio-pci")
    };
    let peer = text.strip_prefix("peer:").ok_or_else(|| wrong("no such place".to_owned()))?;
    let (address, bar) =
        peer.rsplit_once('/').ok_or_else(|| wrong("it names no BAR".to_owned()))?;
    let address = address.parse().map_err(|error| wrong(format!("{error}")))?;
    let bar: Option<u8> = bar.parse().ok().filter(|bar| *bar < 6);
    let bar = bar.ok_or_else(|| wrong("BARs have the numbers 0 to 5".to_owned()))?;
    Ok(MemoryPlace::Peer { address, bar })
}

/// Parses `--media`; the directory must exist.
pub(crate) fn media(text: &str) -> Result<MediaChoice, String> {
    media_in(text, false)
}

/// Parses `--media`; the directory or its parent must exist.
pub(crate) fn media_to_be(text: &str) -> Result<MediaChoice, String> {
    media_in(text, true)
}

fn media_in(text: &str, may_be_new: bool) -> Result<MediaChoice, String> {
    if text == "memory" {
        return Ok(MediaChoice::Memory);
    }
    let Some(directory) = text.strip_prefix("file:") else {
        return Err("no such kind of media; use memory, or file:DIR".to_owned());
    };
    let path = &*expand_home(Path::new(directory));
    let found = match path.metadata() {
        Ok(meta) if meta.is_dir() => return Ok(MediaChoice::File(path.to_owned())),
        Ok(_) => "is not a directory".to_owned(),
        // An empty parent is the working directory.
        Err(error) if may_be_new && error.kind() == ErrorKind::NotFound => {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            match (path.file_name(), parent.is_none_or(Path::is_dir)) {
                (Some(_), true) => return Ok(MediaChoice::File(path.to_owned())),
                _ => "cannot be made: the directory that it would be in is not there".to_owned(),
            }
        }
        Err(error) => format!("cannot be used: {error}"),
    };
    Err(format!(
        "the directory {directory:?} {found}; make it, or name another one that you may write to"
    ))
}

/// Parses `--lba`.
pub(crate) fn lba(text: &str) -> Result<u32, String> {
    match size::parse(text)? {
        512 => Ok(512),
        4096 => Ok(4096),
        _ => Err("the logical blocks of a software controller have 512 or 4096 bytes".to_owned()),
    }
}

/// Parses `--mdts`.
pub(crate) fn mdts(text: &str) -> Result<u32, String> {
    let bytes = size::parse(text)?;
    if bytes.is_power_of_two() && (MDTS_MIN..=MDTS_MAX).contains(&bytes) {
        return Ok(bytes as u32);
    }
    Err(format!("expected a power of two from {} to {}", Size(MDTS_MIN), Size(MDTS_MAX)))
}

#[cfg(test)]
mod tests;
