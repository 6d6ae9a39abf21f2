//! `--device` and what goes with it: software controllers, or real drives, and where memory is.

use std::fmt;
use std::path::{Path, PathBuf};

use nvme_driver::platform::vfio::PciAddress;

use crate::problem::Problem;
use crate::size::Size;

use super::raw::ReplayFlags;

/// Devices a store may have; also the most the layout is tested with.
const DEVICES_MAX: u32 = 64;
/// Software controllers, where nobody asked for a number.
const EMU_DEFAULT: u32 = 2;
/// MDTS of a software controller, where nobody asked for one.
const MDTS_DEFAULT: u64 = 512 << 10;
/// The smallest MDTS there is: 2^1 pages, because 2^0 stands for "no limit".
const MDTS_MIN: u64 = 8 << 10;
/// The largest MDTS that is offered: far more than any drive's.
const MDTS_MAX: u64 = 64 << 20;

/// Where the software controllers keep their bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MediaChoice {
    /// In memory of this process.
    Memory,
    /// In nameless files in this directory.
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
    /// How many.
    pub(crate) count: u32,
    /// Behind them.
    pub(crate) media: MediaChoice,
    /// Bytes of an LBA.
    pub(crate) lba_bytes: u32,
    /// Bytes of the largest transfer.
    pub(crate) mdts: u32,
}

impl EmuChoice {
    /// One, with its bytes in memory.
    pub(super) fn one(lba_bytes: u32) -> Self {
        Self { count: 1, media: MediaChoice::Memory, lba_bytes, mdts: MDTS_DEFAULT as u32 }
    }
}

/// What the objects are spread over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Devices {
    /// Software controllers.
    Emu(EmuChoice),
    /// PCIe functions bound to vfio-pci.
    Vfio(Vec<PciAddress>),
}

impl Devices {
    /// Checks `--device` together with the flags that only software controllers have.
    pub(super) fn check(flags: &ReplayFlags, lba_default: u32) -> Result<Self, Problem> {
        let named = parse(&flags.device)?;
        let drives: Vec<PciAddress> = named.iter().filter_map(|device| device.address()).collect();
        if drives.is_empty() {
            return Self::emu(flags, lba_default);
        }
        if drives.len() < named.len() {
            return Err(mixed());
        }
        let only_emu = [
            ("--devices", flags.devices.is_some()),
            ("--media", flags.media.is_some()),
            ("--lba", flags.lba.is_some()),
            ("--mdts", flags.mdts.is_some()),
        ];
        if let Some((flag, _)) = only_emu.iter().find(|(_, given)| *given) {
            return Err(Problem::new(
                format!("{flag}: a real drive is what it is; only software controllers take this"),
                "leave it out, or use --device emu; ripieno identify shows what a drive has",
            ));
        }
        count("--device", drives.len() as u32)?;
        Ok(Self::Vfio(drives))
    }

    fn emu(flags: &ReplayFlags, lba_default: u32) -> Result<Self, Problem> {
        if flags.overwrite {
            return Err(Problem::new(
                "--overwrite: software controllers start empty",
                "leave it out; it is for drives, --device vfio:...",
            ));
        }
        let devices = flags.devices.unwrap_or(EMU_DEFAULT);
        count("--devices", devices)?;
        Ok(Self::Emu(EmuChoice {
            count: devices,
            media: media(flags.media.as_deref().unwrap_or("memory"))?,
            lba_bytes: lba(flags.lba.unwrap_or(u64::from(lba_default)))?,
            mdts: mdts(flags.mdts.unwrap_or(MDTS_DEFAULT))?,
        }))
    }

    /// Where software controllers keep their bytes.
    pub(crate) fn media(&self) -> Option<String> {
        match self {
            Self::Emu(emu) => Some(emu.media.to_string()),
            Self::Vfio(_) => None,
        }
    }

    /// How many.
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

/// One device, as it is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Named {
    /// A software controller.
    Emu,
    /// A PCIe function bound to vfio-pci.
    Vfio(PciAddress),
}

impl Named {
    /// Where a drive is.
    pub(super) fn address(self) -> Option<PciAddress> {
        match self {
            Self::Emu => None,
            Self::Vfio(address) => Some(address),
        }
    }
}

/// Takes `--device` apart: values may be repeated, and each may be a list; `vfio:` holds for the
/// addresses that follow it.
///
/// # Errors
/// For what is no device, and for a device named twice.
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

/// Software controllers and drives together.
pub(super) fn mixed() -> Problem {
    Problem::new(
        "--device: software controllers and real drives cannot share a store, because their DMA \
         goes through different address spaces",
        "name only emu, or only vfio devices",
    )
}

fn unknown(word: &str) -> Problem {
    Problem::new(
        format!("--device {word}: no such kind of device"),
        "use emu, or vfio:0000:65:00.0 with the PCI address of a drive (see nvme-bind list)",
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

/// Where queues, descriptors and the KV pool live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryChoice {
    /// Memory of this process.
    Host,
    /// A BAR of another function.
    Peer {
        /// The function.
        address: PciAddress,
        /// The BAR's number.
        bar: u8,
    },
}

impl MemoryChoice {
    pub(super) fn check(text: &str, devices: &Devices) -> Result<Self, Problem> {
        if text == "host" {
            return Ok(Self::Host);
        }
        let wrong = |why: String| {
            Problem::new(
                format!("--memory {text}: {why}"),
                "use host, or peer:0000:00:05.0/2 for BAR 2 of a function bound to vfio-pci",
            )
        };
        let peer = text.strip_prefix("peer:").ok_or_else(|| wrong("no such place".to_owned()))?;
        if matches!(devices, Devices::Emu(_)) {
            return Err(wrong("software controllers reach host memory only".to_owned()));
        }
        let (address, bar) =
            peer.rsplit_once('/').ok_or_else(|| wrong("it names no BAR".to_owned()))?;
        let address = address.parse().map_err(|error| wrong(format!("{error}")))?;
        let bar: u8 =
            bar.parse().ok().filter(|bar| *bar < 6).ok_or_else(|| {
                wrong(format!("{bar} is not the number of a BAR, which are 0 to 5"))
            })?;
        Ok(Self::Peer { address, bar })
    }
}

impl fmt::Display for MemoryChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Peer { address, bar } => write!(f, "peer:{address}/{bar}"),
        }
    }
}

fn count(flag: &str, devices: u32) -> Result<(), Problem> {
    if (1..=DEVICES_MAX).contains(&devices) {
        return Ok(());
    }
    Err(Problem::new(
        format!("{flag} {devices}: expected 1 to {DEVICES_MAX}"),
        "one to four devices show all there is to see on a small machine",
    ))
}

fn media(text: &str) -> Result<MediaChoice, Problem> {
    if text == "memory" {
        return Ok(MediaChoice::Memory);
    }
    let Some(directory) = text.strip_prefix("file:") else {
        return Err(Problem::new(
            format!("--media {text}: no such kind of media"),
            "use --media memory, or --media file:DIR for files in a directory",
        ));
    };
    let path = Path::new(directory);
    let found = match path.metadata() {
        Ok(meta) if meta.is_dir() => return Ok(MediaChoice::File(path.to_owned())),
        Ok(_) => "is not a directory".to_owned(),
        Err(error) => format!("cannot be used: {error}"),
    };
    Err(Problem::new(
        format!("--media {text}: the directory {directory:?} {found}"),
        "name a directory that exists and that you may write to, such as --media file:/var/tmp",
    ))
}

fn lba(bytes: u64) -> Result<u32, Problem> {
    match bytes {
        512 => Ok(512),
        4096 => Ok(4096),
        _ => Err(Problem::new(
            format!("--lba {bytes}: the software controller formats LBAs of 512 or 4096 bytes"),
            "use --lba 512 or --lba 4096",
        )),
    }
}

fn mdts(bytes: u64) -> Result<u32, Problem> {
    if bytes.is_power_of_two() && (MDTS_MIN..=MDTS_MAX).contains(&bytes) {
        return Ok(bytes as u32);
    }
    Err(Problem::new(
        format!(
            "--mdts {bytes}: expected a power of two from {} to {}",
            Size(MDTS_MIN),
            Size(MDTS_MAX)
        ),
        "drives report 128KiB to 2MiB",
    ))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::raw::{Command, Raw};

    fn check(line: &str) -> Result<(Devices, MemoryChoice), Problem> {
        let words = ["ripieno", "replay"].into_iter().chain(line.split_whitespace());
        let Command::Replay(flags) = Raw::try_parse_from(words).unwrap().command else {
            panic!("replay was asked for")
        };
        let devices = Devices::check(&flags, 512)?;
        let memory = MemoryChoice::check(&flags.memory, &devices)?;
        Ok((devices, memory))
    }

    #[test]
    fn software_controllers_are_the_default() {
        let (devices, memory) = check("").unwrap();
        let emu =
            EmuChoice { count: 2, media: MediaChoice::Memory, lba_bytes: 512, mdts: 512 << 10 };
        assert_eq!((devices, memory), (Devices::Emu(emu), MemoryChoice::Host));
    }

    #[test]
    fn drives_are_named_in_lists_and_again() {
        let drives =
            |list: &[&str]| Devices::Vfio(list.iter().map(|text| text.parse().unwrap()).collect());
        for line in [
            "--device vfio:0000:65:00.0,vfio:0000:66:00.0",
            "--device vfio:0000:65:00.0,0000:66:00.0",
            "--device vfio:65:00.0 --device vfio:66:00.0",
        ] {
            assert_eq!(check(line).unwrap().0, drives(&["0000:65:00.0", "0000:66:00.0"]), "{line}");
        }
        let (devices, memory) =
            check("--device vfio:65:00.0 --memory peer:0000:00:05.0/2").unwrap();
        assert_eq!(devices.to_string(), "vfio:0000:65:00.0");
        assert_eq!(memory.to_string(), "peer:0000:00:05.0/2");
    }

    #[test]
    fn what_cannot_be_is_refused_with_a_way_out() {
        for (line, wanted) in [
            ("--device tape", "no such kind of device"),
            ("--device vfio:", "--device vfio:"),
            ("--device vfio:65", "--device vfio:65"),
            ("--device 0000:65:00.0", "no such kind of device"),
            ("--device vfio:65:00.0,vfio:0000:65:00.0", "named twice"),
            ("--device emu,vfio:65:00.0", "cannot share a store"),
            ("--device vfio:65:00.0 --devices 2", "--devices"),
            ("--device vfio:65:00.0 --media memory", "--media"),
            ("--device vfio:65:00.0 --lba 512", "--lba"),
            ("--device vfio:65:00.0 --mdts 1MiB", "--mdts"),
            ("--overwrite", "start empty"),
            ("--memory moon", "no such place"),
            ("--memory peer:00:05.0/2", "host memory only"),
            ("--device vfio:65:00.0 --memory peer:00:05.0", "names no BAR"),
            ("--device vfio:65:00.0 --memory peer:00:05.0/7", "0 to 5"),
            ("--devices 0", "expected 1 to 64"),
            ("--devices 65", "expected 1 to 64"),
            ("--lba 520", "512 or 4096"),
            ("--mdts 5000", "a power of two from 8 KiB"),
            ("--mdts 4KiB", "a power of two from 8 KiB"),
            ("--media tape", "no such kind of media"),
            ("--media file:/no/such/place", "No such file"),
            ("--media file:/dev/null", "is not a directory"),
        ] {
            let problem = check(line).unwrap_err();
            assert!(problem.to_string().contains(wanted), "{line}: {problem}");
            assert!(!problem.hint().is_empty(), "{line}");
        }
    }
}
