//! Builds what a replay drives: software controllers, their threads, the driver, and the store.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use gio_kernels::{HostExecutor, HostOptions, InlineExecutor};
use gio_uring::{ExecutorError, IoExecutor};
use nvme_driver::{Clock, Controller, ControllerOptions, DescriptorPreference, MonotonicClock};
use nvme_emu::{
    Emu, EmuConfig, EmuDomain, EmuError, EmuRunner, FileMedia, FileOptions, MemoryMedia,
    NamespaceConfig,
};
use objstore::{ExecutorFactory, KvPool, Store, StoreConfig, StoreOptions};

use crate::cli::{Descriptors, EMU_DEPTH, EMU_QUEUES, Executor, MediaChoice, ReplayArgs};
use crate::problem::Problem;
use crate::replay::{Pool, Room, kv_shape};

/// Everything below the engine. Fields are dropped in this order: who uses before who is used.
#[derive(Debug)]
pub(crate) struct Stack {
    store: Store,
    runner: EmuRunner,
    emus: Vec<Arc<Emu>>,
}

impl Stack {
    /// Builds controllers, driver, pool and store.
    ///
    /// # Errors
    /// [`Problem`] when the media directory cannot be used; else whatever a layer refuses.
    pub(crate) fn build(args: &ReplayArgs, room: &Room) -> anyhow::Result<(Self, Pool)> {
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
        let domain = EmuDomain::new("replay");
        let mut emus = Vec::new();
        for index in 0..args.devices {
            let config = config(args, room, index)?;
            emus.push(Emu::new(domain.clone(), config).map_err(unfit)?);
        }
        let runner = EmuRunner::spawn(emus.clone(), clock.clone())
            .context("starting the software controllers' threads")?;
        let pool = Pool::new(&*domain, args.shape, room.pool_blocks, args.seed)?;
        let mut devices = Vec::new();
        for emu in &emus {
            let controller = Controller::attach(emu.bus(), clock.clone(), options(args))
                .with_context(|| format!("attaching to {}", emu.id()))?;
            devices.push(controller.into());
        }
        let shape = kv_shape(&args.shape);
        let registered = KvPool::contiguous(pool.memory().clone(), &shape, room.pool_blocks)
            .context("registering the KV pool")?;
        let store = Store::open(StoreConfig {
            devices,
            executor: executor(args.executor, clock.clone()),
            clock,
            shape,
            pool: registered,
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
        Ok((Self { store, runner, emus }, pool))
    }

    /// The store.
    pub(crate) fn store(&mut self) -> &mut Store {
        &mut self.store
    }

    /// The software controllers, for tests that make them misbehave.
    #[cfg(test)]
    pub(crate) fn emus(&self) -> &[Arc<Emu>] {
        &self.emus
    }

    /// Shuts the devices down, then ends the threads that drive them.
    ///
    /// # Errors
    /// When a device does not shut down.
    pub(crate) fn close(self) -> anyhow::Result<()> {
        let Self { store, runner, emus } = self;
        let controllers = store.close().context("closing the store")?;
        for mut controller in controllers {
            controller.shutdown().context("shutting a device down")?;
        }
        drop(runner);
        drop(emus);
        Ok(())
    }
}

fn config(args: &ReplayArgs, room: &Room, index: u32) -> anyhow::Result<EmuConfig> {
    let media: NamespaceConfig = match &args.media {
        MediaChoice::Memory => {
            let media =
                MemoryMedia::new(room.device_bytes).context("reserving addresses for the media")?;
            NamespaceConfig::new(media, args.lba_bytes)
        }
        MediaChoice::File(directory) => {
            NamespaceConfig::new(file_media(directory, room, index)?, args.lba_bytes)
        }
    };
    let mut config = EmuConfig::new(format!("emu{index}"));
    config.namespaces.push(media);
    // One more than offered: the driver takes one for itself.
    config.io_queues_max = EMU_QUEUES + 1;
    config.mqes = EMU_DEPTH as u16;
    config.mdts_bytes = Some(args.mdts);
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

fn options(args: &ReplayArgs) -> ControllerOptions {
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
