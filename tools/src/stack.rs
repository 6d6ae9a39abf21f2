//! Builds what a replay drives: software controllers, their threads, the driver, and the store.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use gio_kernels::{HostExecutor, HostOptions, InlineExecutor};
use gio_uring::{ExecutorError, IoExecutor};
use nvme_driver::{
    Clock, Controller, ControllerOptions, DescriptorPreference, DmaSlice, DmaSpace as _,
};
use nvme_emu::{
    Emu, EmuConfig, EmuDomain, EmuError, EmuRunner, FileMedia, FileOptions, MemoryMedia,
    NamespaceConfig,
};
use objstore::{ExecutorFactory, Store, StoreConfig, StoreDevice, StoreOptions};

use crate::cli::{
    Descriptors, Devices, EMU_DEPTH, EMU_QUEUES, EmuChoice, Executor, MediaChoice, ReplayArgs,
};
use crate::drives::Drives;
use crate::problem::Problem;
use crate::replay::{Pool, Room, kv_shape};

/// Everything below the engine. Fields are dropped in this order: who uses before who is used.
#[derive(Debug)]
pub(crate) struct Stack {
    store: Store,
    emulation: Option<Emulation>,
}

/// Software controllers, and the threads that step them.
#[derive(Debug)]
struct Emulation {
    _runner: EmuRunner,
    #[cfg(test)]
    emus: Vec<Arc<Emu>>,
}

impl Stack {
    /// Builds controllers (or takes the drives that were opened), driver, pool and store.
    ///
    /// # Errors
    /// [`Problem`] when the media directory cannot be used; else whatever a layer refuses.
    pub(crate) fn build(
        args: &ReplayArgs,
        room: &Room,
        clock: &Arc<dyn Clock>,
        drives: Option<Drives>,
    ) -> anyhow::Result<(Self, Pool)> {
        let bytes = usize::try_from(Pool::bytes(&args.shape, room.pool_blocks))
            .context("the KV pool does not fit the address space")?;
        let (devices, memory, emulation) = match (&args.devices, drives) {
            (Devices::Emu(choice), None) => {
                let domain = EmuDomain::new("replay");
                let memory = DmaSlice::whole(domain.alloc(bytes)?)?;
                let (devices, emulation) = emulate(args, choice, room, &domain, clock)?;
                (devices, memory, Some(emulation))
            }
            (_, Some(mut drives)) => {
                let memory = drives.pool_memory(bytes)?;
                (drives.into_devices(args.queues, args.depth)?, memory, None)
            }
            (Devices::Vfio(_), None) => anyhow::bail!("the drives were not opened"),
        };
        let pool = Pool::new(memory, args.shape, room.pool_blocks, args.seed)?;
        let store = Store::open(StoreConfig {
            devices,
            executor: executor(args.executor, clock.clone()),
            clock: clock.clone(),
            shape: kv_shape(&args.shape),
            pool: pool.register().context("registering the KV pool")?,
            options: StoreOptions {
                queues_per_device: args.queues,
                queue_depth: args.depth,
                capacity_bytes: Some(room.capacity_bytes()),
                group: Some(room.group),
                run_bytes: args.coalesce,
                ..StoreOptions::default()
            },
        })
        .context("opening the store")?;
        Ok((Self { store, emulation }, pool))
    }

    /// The store.
    pub(crate) fn store(&mut self) -> &mut Store {
        &mut self.store
    }

    /// The software controllers, for tests that make them misbehave.
    #[cfg(test)]
    pub(crate) fn emus(&self) -> &[Arc<Emu>] {
        self.emulation.as_ref().map_or(&[], |emulation| &emulation.emus)
    }

    /// Shuts the devices down, then ends the threads that drive them.
    ///
    /// # Errors
    /// When a device does not shut down.
    pub(crate) fn close(self) -> anyhow::Result<()> {
        let Self { store, emulation } = self;
        let controllers = store.close().context("closing the store")?;
        for mut controller in controllers {
            controller.shutdown().context("shutting a device down")?;
        }
        drop(emulation);
        Ok(())
    }
}

fn emulate(
    args: &ReplayArgs,
    choice: &EmuChoice,
    room: &Room,
    domain: &Arc<EmuDomain>,
    clock: &Arc<dyn Clock>,
) -> anyhow::Result<(Vec<StoreDevice>, Emulation)> {
    let mut emus = Vec::new();
    for index in 0..choice.count {
        let config = config(choice, room, index)?;
        emus.push(Emu::new(domain.clone(), config).map_err(unfit)?);
    }
    let runner = EmuRunner::spawn(emus.clone(), clock.clone())
        .context("starting the software controllers' threads")?;
    let mut devices = Vec::new();
    for emu in &emus {
        let controller = Controller::attach(emu.bus(), clock.clone(), options(args))
            .with_context(|| format!("attaching to {}", emu.id()))?;
        devices.push(controller.into());
    }
    let emulation = Emulation {
        _runner: runner,
        #[cfg(test)]
        emus,
    };
    Ok((devices, emulation))
}

fn config(choice: &EmuChoice, room: &Room, index: u32) -> anyhow::Result<EmuConfig> {
    let media: NamespaceConfig = match &choice.media {
        MediaChoice::Memory => {
            let media =
                MemoryMedia::new(room.device_bytes).context("reserving addresses for the media")?;
            NamespaceConfig::new(media, choice.lba_bytes)
        }
        MediaChoice::File(directory) => {
            NamespaceConfig::new(file_media(directory, room, index)?, choice.lba_bytes)
        }
    };
    let mut config = EmuConfig::new(format!("emu{index}"));
    config.namespaces.push(media);
    // One more than offered: the driver takes one for itself.
    config.io_queues_max = EMU_QUEUES + 1;
    config.mqes = EMU_DEPTH as u16;
    config.mdts_bytes = Some(choice.mdts);
    Ok(config)
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
fn file_media(directory: &Path, room: &Room, index: u32) -> anyhow::Result<FileMedia> {
    let path = media_path(directory, index);
    let cannot = |error: std::io::Error| {
        Problem::new(
            format!("--media file:{}: {error}", directory.display()),
            "name a directory on a local file system that you may write to and that has direct \
             I/O, such as --media file:/var/tmp",
        )
    };
    // FileMedia takes what is there; a file of somebody else must not be it.
    std::fs::File::create_new(&path).map_err(cannot)?;
    let media = FileMedia::open(&path, room.device_bytes, FileOptions::default());
    std::fs::remove_file(&path).map_err(cannot)?;
    Ok(media.map_err(cannot)?)
}

fn media_path(directory: &Path, index: u32) -> PathBuf {
    directory.join(format!(".ripieno-replay-{}-{index}.media", std::process::id()))
}

/// How controllers are attached to.
pub(crate) fn options(args: &ReplayArgs) -> ControllerOptions {
    ControllerOptions {
        io_queues: args.queues,
        io_depth: args.depth,
        descriptors: match args.descriptors {
            Descriptors::Auto => DescriptorPreference::Auto,
            Descriptors::Sgl => DescriptorPreference::Sgl,
            Descriptors::Prp => DescriptorPreference::Prp,
        },
        ..ControllerOptions::default()
    }
}

fn executor(choice: Executor, clock: Arc<dyn Clock>) -> ExecutorFactory {
    Box::new(move || -> Result<Box<dyn IoExecutor>, ExecutorError> {
        let clock = clock.clone();
        Ok(match choice {
            Executor::Host => Box::new(HostExecutor::new(HostOptions::default(), clock)),
            Executor::Inline => Box::new(InlineExecutor::new(clock)),
        })
    })
}
