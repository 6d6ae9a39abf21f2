//! Controllers that are attached, and the memory they share, before a store has them.

use std::sync::Arc;

use anyhow::Context as _;
use gio_kernels::cuda::{DoorbellKind, MappingKind, Registration};
use nvme_driver::platform::p2p;
use nvme_driver::{Clock, Controller, DmaMemory, DmaSlice, DmaSpace};
use objstore::StoreDevice;

use crate::config::ReplayArgs;
use crate::devices::MemoryChoice;
use crate::drives::{self, Drives, Peer};
use crate::gpu::Gpu;
use crate::keep::Keep;
use crate::memory::Arena;
use crate::problem::{Unfit, unfit};
use crate::sizing::Sizing;

use super::emulation::Emulation;

/// What a stack is built from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Build<'a> {
    pub(crate) args: &'a ReplayArgs,
    pub(crate) sizing: &'a Sizing,
    pub(crate) clock: &'a Arc<dyn Clock>,
    pub(crate) gpu: Option<&'a Arc<Gpu>>,
    /// Where the store is kept.
    pub(crate) keep: Option<&'a Keep>,
}

/// Controllers of one address space. Fields are dropped in this order.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) devices: Vec<StoreDevice>,
    pub(crate) emulation: Option<Emulation>,
    /// What the GPU was let reach; a GPU that is used keeps what it uses.
    pub(crate) registrations: Vec<Arc<Registration>>,
    pub(crate) peer: Option<Peer>,
    pub(crate) space: Arc<dyn DmaSpace>,
    /// What their doorbells are.
    pub(crate) doorbells: DoorbellKind,
    /// Where queues and descriptors are.
    pub(crate) queues: String,
}

impl Fleet {
    pub(crate) fn new(
        devices: Vec<StoreDevice>,
        space: Arc<dyn DmaSpace>,
        doorbells: DoorbellKind,
    ) -> Self {
        let queues = MemoryChoice::Host.to_string();
        let (emulation, registrations, peer) = (None, Vec::new(), None);
        Self { devices, emulation, registrations, peer, space, doorbells, queues }
    }

    /// Drives that were opened.
    pub(super) fn of_drives(drives: Drives) -> Self {
        let (devices, peer, space) = drives.into_parts();
        Self { peer, ..Self::new(devices, space, DoorbellKind::Io) }
    }

    /// Gives every device memory for its queues: of a peer, or such as the GPU reaches.
    ///
    /// # Errors
    /// When there is not enough of it, or the GPU does not reach the doorbells.
    pub(super) fn outfit(&mut self, args: &ReplayArgs, gpu: Option<&Gpu>) -> anyhow::Result<()> {
        let queues = usize::from(args.flags.queues);
        if let Some(peer) = &mut self.peer {
            for device in &mut self.devices {
                let depth = depth(&device.controller.lock(), args.flags.depth);
                for _ in 0..queues {
                    device.queue_memory.push(peer.queue(depth)?);
                }
            }
            self.queues = args.flags.memory.to_string();
        }
        let Some(gpu) = gpu else { return Ok(()) };
        let bytes = |device: &StoreDevice| {
            queues * Arena::queue_bytes(depth(&device.controller.lock(), args.flags.depth))
        };
        let bytes = self.devices.iter().map(bytes).sum();
        let (memory, place) = self.queue_memory(gpu, bytes).context("memory for queues")?;
        let mut arena = Arena::new(memory);
        for device in &mut self.devices {
            let bus = device.controller.lock().bus().clone();
            self.registrations.push(gpu.doorbells(&bus, self.doorbells)?);
            let depth = depth(&device.controller.lock(), args.flags.depth);
            for _ in 0..queues {
                device.queue_memory.push(arena.queue(depth).context("memory for queues")?);
            }
        }
        self.queues = place;
        Ok(())
    }

    /// Memory for queues and descriptors, which GPU, host and controllers reach, and its name: the
    /// GPU's where the host has an address for it and the drives find their way there, else pinned
    /// memory of the host. Software controllers write their completions with the CPU: a mapping
    /// that gathers writes is none for them.
    fn queue_memory(
        &mut self,
        gpu: &Gpu,
        bytes: usize,
    ) -> anyhow::Result<(Arc<dyn DmaMemory>, String)> {
        let bytes = bytes.max(self.scratch_bytes());
        let on_gpu = gpu.mapped(&*self.space, bytes).and_then(|(memory, kind)| {
            if self.emulation.is_some() && kind != MappingKind::Cached {
                return Err(unfit(format!("the CPU's mapping of it is {kind}"), ""));
            }
            self.prove(&memory)?;
            Ok((memory, format!("GPU memory, mapped by GDRCopy ({kind})")))
        });
        match on_gpu {
            Ok(found) => return Ok(found),
            Err(error) if error.is::<Unfit>() => {
                tracing::info!("no queues in GPU memory: {error:#}");
            }
            Err(error) => return Err(error),
        }
        let memory = gpu.staging(&*self.space, bytes)?;
        self.prove(&memory)?;
        Ok((memory, "pinned host memory".to_owned()))
    }

    /// Bytes that [`Fleet::prove`] needs.
    pub(super) fn scratch_bytes(&self) -> usize {
        self.devices
            .iter()
            .map(|device| p2p::scratch_bytes(&device.controller.lock()))
            .max()
            .unwrap_or(0)
    }

    /// Makes sure that every drive reaches `memory` in every way it will be used. Nothing is
    /// written to them. Software controllers are not asked: the store verifies that when it is
    /// opened.
    ///
    /// # Errors
    /// [`crate::problem::Unfit`] with the drive that does not.
    pub(super) fn prove(&mut self, memory: &Arc<dyn DmaMemory>) -> anyhow::Result<()> {
        if self.emulation.is_some() {
            return Ok(());
        }
        for device in &mut self.devices {
            let drive = &mut *device.controller.lock();
            let scratch = DmaSlice::new(memory.clone(), 0, p2p::scratch_bytes(drive))?;
            if let Some(why) = drives::prove(drive, &scratch)? {
                let why = format!("vfio:{} does not reach this memory: {why}", drive.id());
                return Err(unfit(why, "see nvme-bind doctor"));
            }
        }
        Ok(())
    }

    /// Memory of the host, or of the peer that was chosen, for the KV pool.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn pool_memory(&mut self, bytes: usize) -> anyhow::Result<DmaSlice> {
        match &mut self.peer {
            Some(peer) => peer.take(bytes),
            None => {
                let first = self.devices.first();
                let node = first.and_then(|drive| drive.controller.lock().bus().numa_node());
                Ok(DmaSlice::new(self.space.alloc_on(bytes, node)?, 0, bytes)?)
            }
        }
    }
}

/// Entries of a queue: what was asked for, cut to what the controller allows.
fn depth(controller: &Controller, asked: u32) -> u32 {
    asked.min(1 << controller.info().entries_max.ilog2())
}
