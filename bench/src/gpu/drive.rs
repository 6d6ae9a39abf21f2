#![allow(unsafe_code, reason = "launches a kernel on memory that is laid out here")]
//! A controller that completes immediately and runs on the GPU itself, on other SMs than the I/O
//! kernel: queues and doorbells in the GPU's memory, one warp per queue pair.

use std::{sync::Arc, time::Duration};

use anyhow::{Result, ensure};
use gio_kernels::cuda::{CudaStream, DeviceMemory, PinnedMemory};
use nvme_driver::{DevicePtr, Iova, Place, QueueGrant, Quiesced};
use nvme_spec::ids::QueueId;

use super::{
    abi::{ENDED_BUDGET, ENDED_STOPPED, InstantArgs, Queue},
    device::{Gpu, set_word, wait_idle},
};
use crate::instant::grant;

/// Entries of a queue: enough commands in flight that neither side waits for the other's latency.
pub const DEPTH: u32 = 256;
/// Never written to: each command has one data block, whose descriptor is in the entry.
const DESCRIPTOR_BYTES: u32 = 256;
/// Stride of doorbells in bytes: queues do not share their cache lines.
const DOORBELL_BYTES: usize = 128;
const QUEUES_AT: usize = 128;

/// Queue pairs, and the controller's kernel.
pub struct Drive {
    gpu: Arc<Gpu>,
    /// Stream of the kernel, for the report.
    pub stream: CudaStream,
    /// All queues, then all doorbells.
    memory: DeviceMemory,
    /// The stop word, then a [`Queue`] for each queue pair.
    control: PinnedMemory,
    count: u32,
    running: bool,
}

/// Statistics of the controller.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seen {
    /// Commands completed.
    pub completed: u64,
    /// Fraction of idle polls: near 1, the I/O kernel is the bottleneck; near 0, the controller is.
    pub idle: f64,
    /// SMs that the controller ran on.
    pub sms: usize,
}

impl Drive {
    /// Creates `count` queue pairs, and a stream beside `io_sms` SMs of the I/O kernel.
    pub fn new(gpu: &Arc<Gpu>, count: u32, io_sms: Option<u32>) -> Result<Self> {
        let device = &gpu.device;
        let beside = io_sms.map(|sms| CudaStream::beside(device, sms));
        let stream = match beside {
            Some(Ok(stream)) => stream,
            _ => CudaStream::lowest(device)?,
        };
        let most = u64::from(stream.report().granted) * u64::from(gpu.instant.blocks_per_sm(32)?);
        ensure!(u64::from(count) <= most, "{count} controllers on SMs that hold {most}");
        let queue = (DEPTH * (64 + 16 + DESCRIPTOR_BYTES)) as usize;
        let bytes = count as usize * (queue + DOORBELL_BYTES);
        let memory = device.allocate(bytes)?;
        memory.write(0, &vec![0; bytes])?;
        let control = device.pinned(QUEUES_AT + count as usize * size_of::<Queue>())?;
        let drive = Self { gpu: gpu.clone(), stream, memory, control, count, running: false };
        for index in 0..count {
            let grant = drive.grant(index);
            drive.put(
                index,
                Queue {
                    sq: address(grant.sq),
                    cq: address(grant.cq),
                    doorbells: address(grant.sq_doorbell),
                    depth_log2: DEPTH.ilog2(),
                    qid: u32::from(grant.qid.0),
                    ..Queue::default()
                },
            );
        }
        Ok(drive)
    }

    fn grant(&self, index: u32) -> QueueGrant {
        let at = |offset: u64| -> Place {
            let device = Some(DevicePtr(self.memory.device().0 + offset));
            Place { host: None, device, iova: Iova(0) }
        };
        let (index, count) = (u64::from(index), u64::from(self.count));
        let (depth, descriptors) = (u64::from(DEPTH), u64::from(DESCRIPTOR_BYTES));
        let doorbells = count * depth * (64 + 16 + descriptors) + index * DOORBELL_BYTES as u64;
        let places = [
            at(index * depth * 64),
            at(count * depth * 64 + index * depth * 16),
            at(doorbells),
            at(doorbells + 4),
            at(count * depth * 80 + index * depth * descriptors),
        ];
        grant(QueueId(index as u16 + 1), places, DESCRIPTOR_BYTES, DEPTH)
    }

    /// Returns the grants of all queues, as queues of device 0.
    pub fn grants(&self) -> Vec<(u32, QueueGrant)> {
        (0..self.count).map(|index| (0, self.grant(index))).collect()
    }

    fn slot(index: u32) -> usize {
        QUEUES_AT + index as usize * size_of::<Queue>()
    }

    fn put(&self, index: u32, queue: Queue) {
        // SAFETY: inside the memory, and aligned; the kernel is not running yet.
        unsafe {
            let at = self.control.host().byte_add(Self::slot(index)).cast::<Queue>();
            at.write_volatile(queue);
        }
    }

    fn get(&self, index: u32) -> Queue {
        // SAFETY: same as in `put`; the kernel has ended, and every bit pattern is valid.
        unsafe {
            let at = self.control.host().byte_add(Self::slot(index)).cast::<Queue>();
            at.read_volatile()
        }
    }

    /// Starts the controller, which ends after `budget` at the latest.
    pub fn start(&mut self, budget: Duration) -> Result<()> {
        let control = self.control.device().0;
        let args = InstantArgs {
            queues: control + QUEUES_AT as u64,
            stop: control,
            budget_ns: budget.as_nanos() as u64,
            count: self.count,
            reserved: 0,
        };
        // One warp per block uses as many SMs as possible.
        // SAFETY: the argument's type is that of abi.h; everything it points to lives in `self`,
        // whose drop waits for the kernel.
        unsafe { self.gpu.instant.launch(Gpu::raw(&self.stream), self.count, 32, args)? };
        self.running = true;
        Ok(())
    }

    /// Stops the controller. Requires proof that the I/O kernel has ended, and rings no doorbell.
    pub fn stop(&mut self, _proof: &Quiesced) -> Result<Seen> {
        set_word(&self.control, 0, 1);
        wait_idle(&self.stream, super::device::TIMEOUT)?;
        self.running = false;
        let queues: Vec<Queue> = (0..self.count).map(|index| self.get(index)).collect();
        for queue in &queues {
            let why = match queue.ended {
                ENDED_STOPPED => continue,
                ENDED_BUDGET => "its time was over",
                _ => "a doorbell rang for an entry that does not exist",
            };
            anyhow::bail!("the controller of queue {} gave up: {why}", queue.qid);
        }
        let sum = |of: fn(&Queue) -> u64| queues.iter().map(of).sum::<u64>();
        let mut sms: Vec<u32> = queues.iter().map(|queue| queue.sm).collect();
        sms.sort_unstable();
        sms.dedup();
        let idle = sum(|queue| queue.idle) as f64 / sum(|queue| queue.polls).max(1) as f64;
        Ok(Seen { completed: sum(|queue| queue.completed), idle, sms: sms.len() })
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        if self.running {
            set_word(&self.control, 0, 1);
            // Wait before its memory is freed: the kernel ends after its budget at the latest.
            let _ = wait_idle(&self.stream, super::device::TIMEOUT);
        }
    }
}

fn address(place: Place) -> u64 {
    place.device.map_or(0, |device| device.0)
}
