//! Media of a replay's software controllers.

use std::os::fd::AsRawFd as _;
use std::path::Path;

use anyhow::Context as _;
use nvme_driver::remedy;
use nvme_emu::{BandwidthMedia, EmuConfig, FileMedia, FileOptions, MemoryMedia};
use ripieno_stack::{Devices, FileTarget, StoreDir, file_target};

use crate::devices::EmuChoice;
use crate::problem::Problem;
use crate::size::Size;
use crate::sizing::Sizing;
use crate::stack::Sim;

/// Smallest size of a page of memory.
const PAGE_BYTES: usize = 4096;

/// Returns software controllers with temporary media, or with those of a store directory. With
/// `sim`, they are in memory, in virtual time, and with the bandwidth that it sets.
pub(crate) fn devices(
    choice: &EmuChoice,
    sizing: &Sizing,
    store_dir: Option<StoreDir>,
    sim: Option<&Sim>,
) -> anyhow::Result<Devices> {
    if let Some(store_dir) = store_dir {
        return Ok(Devices::from(store_dir).mdts(choice.mdts));
    }
    if let Some(sim) = sim {
        let controller = |index| {
            let media = BandwidthMedia::new(memory(sizing.device_bytes)?, sim.dial.clone());
            let config = EmuConfig::new(format!("emu{index}")).namespace(media, choice.lba_bytes);
            // Without a volatile write cache, data is durable once written: commits do not wait.
            Ok(EmuConfig { mdts_bytes: Some(choice.mdts), vwc: false, ..config })
        };
        let configs = (0..choice.count).map(controller).collect::<anyhow::Result<Vec<_>>>()?;
        return Ok(Devices::from(configs).simulated(sim.clock.clone()));
    }
    let one = |index| scratch(choice, sizing.device_bytes, sizing.is_filled(), index);
    let all = (0..choice.count).map(one).collect::<anyhow::Result<Vec<_>>>()?;
    let (configs, files): (Vec<_>, Vec<_>) = all.into_iter().unzip();
    let files = files.into_iter().flatten().collect::<Vec<_>>();
    Ok(Devices::from((configs, files)))
}

fn memory(bytes: u64) -> anyhow::Result<MemoryMedia> {
    MemoryMedia::new(bytes).context("reserving addresses for the media")
}

/// Writes to each page, so that the first writes of the replay do not allocate memory.
fn touch(media: &MemoryMedia, bytes: u64) -> anyhow::Result<()> {
    let mut pages = (0..bytes).step_by(PAGE_BYTES);
    Ok(pages.try_for_each(|at| media.poke(at, &[0]))?)
}

/// Returns a temporary software controller of `bytes` bytes, and its file, if it has one. With
/// `is_filled`, its memory is allocated before it is used.
pub(crate) fn scratch(
    choice: &EmuChoice,
    bytes: u64,
    is_filled: bool,
    index: u32,
) -> anyhow::Result<(EmuConfig, Option<FileTarget>)> {
    let mdts_bytes = Some(choice.mdts);
    let config = EmuConfig { mdts_bytes, ..EmuConfig::new(format!("emu{index}")) };
    Ok(match choice.dir() {
        None => {
            let media = memory(bytes)?;
            if is_filled {
                touch(&media, bytes)?;
            }
            (config.namespace(media, choice.lba_bytes), None)
        }
        Some(dir) => {
            let media = file_media(dir, bytes)?;
            let file = file_target(&media);
            (config.namespace(media, choice.lba_bytes), Some(file))
        }
    })
}

/// Opens an unlinked file: it disappears with this process, however that ends.
fn file_media(directory: &Path, bytes: u64) -> anyhow::Result<FileMedia> {
    let open = || {
        let file = tempfile::tempfile_in(directory)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        FileMedia::open(Path::new(&path), bytes, FileOptions::default())
    };
    open().map_err(|error: std::io::Error| {
        let (place, size) = (directory.display(), Size(bytes));
        Problem::new(
            format!("--path {place}: a file of {size} cannot be used: {error}"),
            remedy(&error).unwrap_or(
                "name a directory on a local file system that you may write to and that has direct \
                 I/O, such as --path /var/tmp",
            ),
        )
        .into()
    })
}
