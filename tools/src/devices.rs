//! The devices of a command: software controllers or drives, and memory.

use std::fmt;
use std::path::{Path, PathBuf};

use ripieno_stack::{DriveAddress, MemoryPlace, StackConfig, expand_home};

use crate::problem::{Problem, none_of};
use crate::size::{self, Size};

/// Default number of software controllers.
pub(crate) const EMU_DEFAULT: u32 = 2;
/// Default MDTS of a software controller, in bytes.
pub(crate) const MDTS_DEFAULT: u32 = 512 << 10;
/// Smallest MDTS in bytes: 2^1 pages, because 2^0 stands for "no limit".
const MDTS_MIN: u64 = 8 << 10;
/// Largest MDTS offered, in bytes: far above any drive's.
const MDTS_MAX: u64 = 64 << 20;

/// Media of software controllers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Media {
    Memory,
    /// Files in a directory.
    Files(PathBuf),
    /// Block devices, one for each.
    Blocks(Vec<PathBuf>),
}

/// Software controllers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EmuChoice {
    /// Number of controllers.
    pub(crate) count: u32,
    pub(crate) media: Media,
    /// LBA size in bytes.
    pub(crate) lba_bytes: u32,
    /// Largest transfer in bytes (MDTS).
    pub(crate) mdts: u32,
}

impl EmuChoice {
    /// Returns the storage behind them, as a text.
    pub(crate) fn media(&self) -> String {
        match &self.media {
            Media::Memory => "memory".to_owned(),
            Media::Files(dir) => format!("file:{}", dir.display()),
            Media::Blocks(paths) => {
                let names = paths.iter().map(|path| format!("block:{}", path.display()));
                names.collect::<Vec<_>>().join(",")
            }
        }
    }

    /// Returns the directory of their files.
    pub(crate) fn dir(&self) -> Option<&Path> {
        match &self.media {
            Media::Files(dir) => Some(dir),
            Media::Memory | Media::Blocks(_) => None,
        }
    }
}

/// Devices that the objects are striped over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Devices {
    /// Software controllers.
    Emu(EmuChoice),
    /// Drives.
    Drives(Vec<DriveAddress>),
}

impl Devices {
    /// Returns the devices of these options. Software controllers have LBAs of `lba_bytes`, if no
    /// other size is given.
    pub(crate) fn new(
        config: &StackConfig,
        mdts: Option<u32>,
        lba_bytes: u32,
    ) -> Result<Self, Problem> {
        if !config.drives().is_empty() {
            let hint = "leave it out; ripieno identify shows what a drive has";
            none_of(&[("--mdts", mdts.is_some())], "a drive has its own", hint)?;
            return Ok(Self::Drives(config.drives().to_vec()));
        }
        none_of(
            &[("--overwrite", config.overwrite.is_some())],
            "software controllers start empty",
            "leave it out; it is for drives, --devices ng:... or vfio:...",
        )?;
        let files = |dir| Media::Files(expand_home(dir).into_owned());
        let media = config.path.as_deref().map_or(Media::Memory, files);
        let count = config.files().unwrap_or(EMU_DEFAULT);
        let (lba_bytes, mdts) = (config.lba.unwrap_or(lba_bytes), mdts.unwrap_or(MDTS_DEFAULT));
        Ok(Self::Emu(EmuChoice { count, media, lba_bytes, mdts }))
    }

    /// Returns the software controllers; `None` for drives.
    pub(crate) fn emu(&self) -> Option<&EmuChoice> {
        match self {
            Self::Emu(emu) => Some(emu),
            Self::Drives(_) => None,
        }
    }

    /// Returns what they are, for a report.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Emu(emu) if matches!(emu.media, Media::Blocks(_)) => emu.media(),
            Self::Emu(emu) => format!("{} x {self}, media {}", emu.count, emu.media()),
            Self::Drives(_) => self.to_string(),
        }
    }

    /// Returns the number of devices.
    pub(crate) fn count(&self) -> u32 {
        match self {
            Self::Emu(emu) => emu.count,
            Self::Drives(drives) => drives.len() as u32,
        }
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Emu(_) => f.write_str("emu"),
            Self::Drives(drives) => {
                let names: Vec<String> = drives.iter().map(ToString::to_string).collect();
                f.write_str(&names.join(","))
            }
        }
    }
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
