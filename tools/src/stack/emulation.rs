//! Software controllers: their media, their threads, and the driver attached to them.

use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use nvme_driver::{Clock, Controller, ControllerOptions};
use nvme_emu::{
    Emu, EmuConfig, EmuDomain, EmuError, EmuRunner, FileMedia, FileOptions, MemoryMedia,
    NamespaceConfig,
};
use objstore::StoreDevice;
use ripieno_stack::Home;

use crate::devices::{EMU_DEPTH, EMU_QUEUES, EmuChoice, MediaChoice};
use crate::problem::Problem;
use crate::size::Size;
use crate::sizing::Sizing;

/// Software controllers, and the threads that step them.
#[derive(Debug)]
pub(crate) struct Emulation {
    _runner: EmuRunner,
    #[cfg(test)]
    pub(super) emus: Vec<Arc<Emu>>,
}

/// The software controllers that were asked for: those of a home, or such as go with the replay.
///
/// # Errors
/// [`Problem`] when the media directory cannot be used; else whatever a layer refuses.
pub(super) fn configs(
    choice: &EmuChoice,
    sizing: &Sizing,
    home: Option<&Home>,
) -> anyhow::Result<Vec<EmuConfig>> {
    let mut configs = match home {
        Some(home) => in_home(home)?,
        None => (0..choice.count)
            .map(|index| scratch(choice, sizing, index))
            .collect::<anyhow::Result<_>>()?,
    };
    configs.iter_mut().for_each(|config| config.mdts_bytes = Some(choice.mdts));
    Ok(configs)
}

/// The software controllers of a home.
///
/// # Errors
/// [`Problem`] when its media cannot be opened.
pub(crate) fn in_home(home: &Home) -> anyhow::Result<Vec<EmuConfig>> {
    let mut configs = home.controllers().map_err(|error| Problem::new(error.to_string(), ""))?;
    configs.iter_mut().for_each(offer);
    Ok(configs)
}

/// Makes software controllers whose DMA goes through `domain`, and attaches the driver.
///
/// # Errors
/// [`Problem`] when a medium cannot do what is asked of it; else whatever a layer refuses.
pub(crate) fn emulate(
    configs: Vec<EmuConfig>,
    options: &ControllerOptions,
    domain: &Arc<EmuDomain>,
    clock: &Arc<dyn Clock>,
) -> anyhow::Result<(Vec<StoreDevice>, Emulation)> {
    let mut emus = Vec::new();
    for config in configs {
        emus.push(Emu::new(domain.clone(), config).map_err(unfit)?);
    }
    let runner = EmuRunner::spawn(emus.clone(), clock.clone())
        .context("starting the software controllers' threads")?;
    let mut devices = Vec::new();
    for emu in &emus {
        let controller = Controller::attach(emu.bus(), clock.clone(), options.clone())
            .with_context(|| format!("attaching to {}", emu.id()))?;
        devices.push(StoreDevice::new(controller));
    }
    let emulation = Emulation {
        _runner: runner,
        #[cfg(test)]
        emus,
    };
    Ok((devices, emulation))
}

fn scratch(choice: &EmuChoice, sizing: &Sizing, index: u32) -> anyhow::Result<EmuConfig> {
    let media: NamespaceConfig = match &choice.media {
        MediaChoice::Memory => {
            let media = MemoryMedia::new(sizing.device_bytes)
                .context("reserving addresses for the media")?;
            NamespaceConfig::new(media, choice.lba_bytes)
        }
        MediaChoice::File(directory) => {
            NamespaceConfig::new(file_media(directory, sizing)?, choice.lba_bytes)
        }
    };
    let mut config = EmuConfig::new(format!("emu{index}"));
    config.namespaces.push(media);
    offer(&mut config);
    Ok(config)
}

fn offer(config: &mut EmuConfig) {
    // One more than offered: the driver takes one for itself.
    config.io_queues_max = EMU_QUEUES + 1;
    config.mqes = EMU_DEPTH as u16;
}

/// The flags were checked, so what is left is a medium that cannot do what they ask for.
fn unfit(error: EmuError) -> anyhow::Error {
    match error {
        EmuError::Config(error) => {
            Problem::new(error.to_string(), "use --lba 4096, or --media memory").into()
        }
        error => anyhow::Error::new(error).context("making a software controller"),
    }
}

/// A file without a name: it goes when this process does, however that ends.
fn file_media(directory: &Path, sizing: &Sizing) -> anyhow::Result<FileMedia> {
    let open = || {
        let file = tempfile::tempfile_in(directory)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        FileMedia::open(Path::new(&path), sizing.device_bytes, FileOptions::default())
    };
    open().map_err(|error: std::io::Error| {
        let (place, size) = (directory.display(), Size(sizing.device_bytes));
        Problem::new(
            format!("--media file:{place}: a file of {size} cannot be used: {error}"),
            "name a directory on a local file system that you may write to and that has direct \
             I/O, such as --media file:/var/tmp; or allow larger files (ulimit -f) or more of them \
             (ulimit -n)",
        )
        .into()
    })
}
