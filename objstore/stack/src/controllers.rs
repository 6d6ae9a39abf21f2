//! Attached controllers and their shared memory, before a store takes them.

use std::sync::{Arc, Mutex};

use gio_kernels::cuda::{DoorbellKind, MappingKind, Registration};
use kv_catalog::lock;
use nvme_driver::{Controller, ControllerOptions, DmaMemory, DmaSlice, DmaSpace, platform::p2p};
use nvme_emu::Emu;
use objstore::{StoreDevice, StoreOptions};

use crate::{
    arena::Arena,
    chosen::MemoryPlace,
    drives::{self, Peer},
    emulation::Emulation,
    error::StackError,
    gpu::Gpu,
};

/// Attached controllers of one address space. Fields are dropped in this order.
#[derive(Debug)]
pub(crate) struct Controllers {
    /// The controllers, in the form that a store takes.
    pub(crate) devices: Vec<StoreDevice>,
    backend: Arc<Backend>,
    peer: Option<Peer>,
    /// Their DMA address space.
    pub(crate) space: Arc<dyn DmaSpace>,
    /// Kind of their doorbells.
    doorbells: DoorbellKind,
    /// Location of queues and descriptors.
    pub(crate) queues: String,
    /// True when that is the GPU's memory.
    queues_on_gpu: bool,
}

/// Resources that the controllers need. Whoever shares a controller keeps them, so that the order
/// in which handles are dropped does not matter. Fields are dropped in this order.
#[derive(Debug)]
struct Backend {
    emulation: Option<Arc<Emulation>>,
    /// Memory registered with the GPU; a GPU in use keeps its registrations.
    registrations: Mutex<Vec<Arc<Registration>>>,
}

impl Backend {
    fn keep(&self, registration: Arc<Registration>) {
        lock(&self.registrations).push(registration);
    }
}

impl Controllers {
    fn new(
        devices: Vec<StoreDevice>,
        emulation: Option<Arc<Emulation>>,
        space: Arc<dyn DmaSpace>,
        doorbells: DoorbellKind,
    ) -> Self {
        let queues = MemoryPlace::Host.to_string();
        let backend = Arc::new(Backend { emulation, registrations: Mutex::default() });
        devices.iter().for_each(|device| device.controller.keep(backend.clone()));
        Self { devices, backend, peer: None, space, doorbells, queues, queues_on_gpu: false }
    }

    /// Attaches to software controllers.
    ///
    /// # Errors
    /// Returns [`StackError::Failed`].
    pub(crate) fn emulated(
        emulation: &Arc<Emulation>,
        options: &ControllerOptions,
    ) -> Result<Self, StackError> {
        let attach = |(at, emu): (usize, &Arc<Emu>)| {
            let attached = Controller::attach(emu.bus(), emulation.clock(at), options.clone());
            let failed = |error| StackError::failed(format!("attaching to {}", emu.id()), error);
            attached.map(StoreDevice::new).map_err(failed)
        };
        let devices = emulation.emus.iter().enumerate().map(attach).collect::<Result<_, _>>()?;
        let domain = emulation.domain.clone();
        Ok(Self::new(devices, Some(emulation.clone()), domain, DoorbellKind::Memory))
    }

    /// Takes open drives, and the memory of another function for their queues.
    pub(crate) fn of_drives(
        drives: Vec<StoreDevice>,
        peer: Option<Peer>,
        space: Arc<dyn DmaSpace>,
    ) -> Self {
        Self { peer, ..Self::new(drives, None, space, DoorbellKind::Io) }
    }

    /// Gives every device memory for the queues of these options, unless it has some: from the
    /// peer, or memory that the GPU reaches, which is also given the doorbells.
    ///
    /// # Errors
    /// Returns [`StackError::Drive`] or [`StackError::Unfit`], or [`StackError::Cuda`] if the
    /// GPU cannot map the doorbells.
    pub(crate) fn outfit(
        &mut self,
        options: &StoreOptions,
        gpu: Option<&Gpu>,
    ) -> Result<(), StackError> {
        if self.devices.iter().any(|device| !device.queue_memory.is_empty()) {
            return Ok(());
        }
        let (queues, depth) = (usize::from(options.queues), options.depth);
        let of = |device: &StoreDevice| entries(&device.controller.lock(), depth);
        if let Some(peer) = &mut self.peer {
            for device in &mut self.devices {
                let depth = of(device);
                for _ in 0..queues {
                    device.queue_memory.push(peer.queue(depth)?);
                }
            }
            self.queues = peer.place.to_string();
        }
        let Some(gpu) = gpu else { return Ok(()) };
        let bytes = |device| queues * Arena::queue_bytes(of(device));
        let bytes = self.devices.iter().map(bytes).sum();
        let (memory, place, on_gpu) = self.queue_memory(gpu, bytes)?;
        self.queues_on_gpu = on_gpu;
        let mut arena = Arena::new(memory);
        for device in &mut self.devices {
            let bus = device.controller.lock().bus().clone();
            let doorbells = gpu.device().register_doorbells(&bus, self.doorbells)?;
            self.backend.keep(doorbells);
            let depth = of(device);
            for _ in 0..queues {
                device.queue_memory.push(arena.queue(depth)?);
            }
        }
        self.queues = place;
        Ok(())
    }

    /// Allocates memory for queues and descriptors that GPU, host and controllers reach. Returns it
    /// with its name, and true when it is the GPU's: preferred if the host can map it and the
    /// drives reach it, else pinned host memory. Software controllers write completions with the
    /// CPU, which excludes write-combined mappings.
    fn queue_memory(
        &mut self,
        gpu: &Gpu,
        bytes: usize,
    ) -> Result<(Arc<dyn DmaMemory>, String, bool), StackError> {
        let bytes = bytes.max(self.scratch_bytes());
        let on_gpu = gpu.mapped(&*self.space, bytes).and_then(|(memory, kind)| {
            if self.is_emulated() && kind != MappingKind::Cached {
                return Err(StackError::unfit(format!("the CPU's mapping of it is {kind}"), ""));
            }
            self.prove(&memory)?;
            Ok((memory, format!("GPU memory, mapped by GDRCopy ({kind})"), true))
        });
        match on_gpu {
            Ok(found) => return Ok(found),
            Err(StackError::Unfit { why, .. }) => {
                tracing::info!(why, "no queues in GPU memory");
            }
            Err(error) => return Err(error),
        }
        let memory = gpu.staging(&*self.space, bytes)?;
        self.prove(&memory)?;
        Ok((memory, "pinned host memory".to_owned(), false))
    }

    /// Checks that data in the GPU's memory is visible before its completion. Queues in host memory
    /// could report data that is still on its way: writes to the GPU and to the host take different
    /// paths, and PCIe orders those of one path only. Software controllers copy, and wait for the
    /// copy.
    ///
    /// # Errors
    /// Returns [`StackError::Unfit`] if the order is not guaranteed.
    pub(crate) fn check_order(&self) -> Result<(), StackError> {
        if self.is_emulated() || self.queues_on_gpu {
            return Ok(());
        }
        let why = format!(
            "the queues are not in the GPU's memory but in {}: completions there are in no order \
             with data in the GPU's memory",
            self.queues
        );
        let hint = "leave a few MiB of GPU memory free for the queues, and have GDRCopy map them \
                    (2.5 or later if the GPU is coherent with the host)";
        Err(StackError::unfit(why, hint))
    }

    /// Has threads run software controllers ([`Emulation::run`]).
    ///
    /// # Errors
    /// Returns [`StackError::Failed`] without threads.
    pub(crate) fn run(&self) -> Result<(), StackError> {
        self.backend.emulation.as_ref().map_or(Ok(()), |emulation| emulation.run())
    }

    pub(crate) fn is_emulated(&self) -> bool {
        self.backend.emulation.is_some()
    }

    /// Returns the bytes that [`Controllers::prove`] needs.
    pub(crate) fn scratch_bytes(&self) -> usize {
        let bytes = |device: &StoreDevice| p2p::scratch_bytes(&device.controller.lock());
        self.devices.iter().map(bytes).max().unwrap_or(0)
    }

    /// Proves that every drive reaches `memory`, whose first bytes are overwritten, for every kind
    /// of access it will do. Writes nothing to the drives. Skips software controllers: the store
    /// verifies them when it is opened.
    ///
    /// # Errors
    /// Returns [`StackError::Unfit`], which names the drive, or [`StackError::Failed`].
    pub(crate) fn prove(&mut self, memory: &Arc<dyn DmaMemory>) -> Result<(), StackError> {
        if self.is_emulated() {
            return Ok(());
        }
        for device in &mut self.devices {
            let drive = &mut *device.controller.lock();
            let scratch = DmaSlice::new(memory.clone(), 0, p2p::scratch_bytes(drive))?;
            if let Some(why) = drives::prove_reach(drive, &scratch)? {
                let name = drives::drive_name(drive.id());
                let why = format!("{name} does not reach this memory: {why}");
                return Err(StackError::unfit(why, "see nvme-bind doctor"));
            }
        }
        Ok(())
    }

    /// Allocates memory of the host, or of the chosen peer, for a KV pool; also returns its name.
    ///
    /// # Errors
    /// Returns [`StackError::Drive`] or [`StackError::Memory`].
    pub(crate) fn pool_memory(&mut self, bytes: usize) -> Result<(DmaSlice, String), StackError> {
        if let Some(peer) = &mut self.peer {
            return Ok((peer.take(bytes)?, peer.place.to_string()));
        }
        let first = self.devices.first();
        let node = first.and_then(|drive| drive.controller.lock().bus().numa_node());
        let memory = self.space.alloc_on(bytes, node)?;
        Ok((DmaSlice::new(memory, 0, bytes)?, MemoryPlace::Host.to_string()))
    }

    /// Maps memory for the GPU.
    ///
    /// # Errors
    /// Returns [`StackError::Cuda`] if no more memory can be pinned.
    pub(crate) fn register(
        &self,
        gpu: &Gpu,
        memory: &Arc<dyn DmaMemory>,
    ) -> Result<(), StackError> {
        self.backend.keep(gpu.device().register_memory(memory)?);
        Ok(())
    }
}

/// Returns the entries of a queue: `asked`, limited to the controller's maximum.
fn entries(controller: &Controller, asked: u32) -> u32 {
    asked.min(1 << controller.info().entries_max.ilog2())
}

#[cfg(test)]
mod tests {
    use cuda_mock::{Level, isolated};
    use nvme_emu::{EmuConfig, MemoryMedia};
    use objstore::{KvShape, Route};

    use super::*;
    use crate::{emulation::Time, gpu::CudaChoice, pool::PoolMemory, route::PoolPlan};

    /// Makes controllers that treat their software controller as a drive.
    fn drives() -> (Arc<Emulation>, Controllers) {
        let config = EmuConfig::new("drive").namespace(MemoryMedia::new(1 << 20).unwrap(), 512);
        let time = Time::default();
        let emulation =
            Arc::new(Emulation::new(vec![config], "drives".into(), &time, None).unwrap());
        let options = ControllerOptions::default();
        let attached = Controllers::emulated(&emulation, &options).unwrap();
        let Controllers { devices, space, .. } = attached;
        (emulation, Controllers::new(devices, None, space, DoorbellKind::Memory))
    }

    #[test]
    fn direct_wants_queues_beside_the_pool() {
        let (_emulation, mut controllers) = drives();
        let why = controllers.check_order().unwrap_err().to_string();
        assert!(why.contains("queues") && why.contains("GDRCopy"), "{why}");
        controllers.queues_on_gpu = true;
        controllers.check_order().unwrap();
        // Software controllers wait for their copies.
        let (emulation, controllers) = drives();
        let Controllers { devices, space, .. } = controllers;
        let controllers = Controllers::new(devices, Some(emulation), space, DoorbellKind::Memory);
        controllers.check_order().unwrap();
    }

    /// Also on a GPU that is not coherent with the host.
    #[test]
    fn with_queues_in_host_memory_a_pool_on_the_gpu_is_staged() {
        let test = "controllers::tests::with_queues_in_host_memory_a_pool_on_the_gpu_is_staged";
        isolated(test, Level::Full, &[], || {
            let (_emulation, mut controllers) = drives();
            let gpu = Gpu::open(CudaChoice::new(0)).unwrap();
            assert!(!gpu.device().report().is_coherent);
            let shape = KvShape { layers: 2, segments: 1, object_bytes: 4096, block_tokens: 16 };
            let pool = &PoolMemory::Own { blocks: 4 };
            let (shape, gpu) = (&shape, Some(&gpu));
            let plan = PoolPlan { pool, shape, staging_buffers: 2, gpu };
            let why = plan.register(Route::Direct, &mut controllers).unwrap_err();
            assert!(matches!(why, StackError::Unfit { .. }), "{why:?}");
            assert!(why.to_string().contains("the queues are not in the GPU's memory"), "{why}");
            let (_, place) = plan.register(Route::Staged, &mut controllers).unwrap();
            assert!(place.contains("staged through"), "{place}");
        });
    }
}
