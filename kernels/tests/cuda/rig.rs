//! Driver, software controllers, a ring and the CUDA executor.
#![allow(unsafe_code, reason = "the driver API is reached by address, over memory of the tests")]

use std::{
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use gio_kernels::cuda::{
    CudaDevice, CudaDriver, CudaExecutor, CudaOptions, DoorbellKind, LaunchMode, Registration,
};
use gio_uring::{
    Affine, AffineOp, Direction, Fault, IoExecutor, PoolDesc, PoolHandle, SharedMemory, Uring,
    UringOptions,
    abi::{self, Args, Warp},
};
use nvme_driver::{
    Bus, Clock, Controller, ControllerOptions, DmaMemory, DmaSlice, DmaSpace, MonotonicClock,
    Nanos, Place, QueueGrant, QueueMemory, Quiesced,
    platform::{buffer::Buffer, mmio},
};
use nvme_emu::{Emu, EmuConfig, EmuDomain, EmuRunner, MemoryMedia};
use nvme_spec::ids::{Nsid, QueueId};
use ripieno_testkit::{WATCHDOG_NS, until};

const NS: Nsid = Nsid(1);
const OBJECT: u32 = 8192;

pub(crate) fn options(mode: LaunchMode) -> CudaOptions {
    CudaOptions { mode, sms: Some(3), ..CudaOptions::default() }
}

pub(crate) fn gpu() -> Arc<CudaDevice> {
    CudaDriver::load().expect("a driver").device(0).expect("a GPU")
}

/// The machine's GPU, exclusive to one test at a time: freeing, allocating or compiling in one test
/// may wait for the kernel of another.
pub(crate) struct OnlyGpu {
    device: Arc<CudaDevice>,
    _alone: MutexGuard<'static, ()>,
}

impl Deref for OnlyGpu {
    type Target = Arc<CudaDevice>;

    fn deref(&self) -> &Arc<CudaDevice> {
        &self.device
    }
}

pub(crate) fn only_gpu() -> OnlyGpu {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    OnlyGpu { device: gpu(), _alone: alone }
}

pub(crate) struct Rig {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) domain: Arc<EmuDomain>,
    pub(crate) emus: Vec<Arc<Emu>>,
    pub(crate) controllers: Vec<Controller>,
    queues: Vec<Vec<QueueId>>,
    registrations: Vec<Arc<Registration>>,
    pub(crate) runner: Option<EmuRunner>,
    pub(crate) device: Arc<CudaDevice>,
}

impl Rig {
    /// Creates `devices` drives with `parts` queues of `depth` each. The queues of even drives are
    /// in pinned memory imported by the bus, those of odd ones in bus memory registered with the
    /// GPU.
    pub(crate) fn new(device: Arc<CudaDevice>, devices: usize, parts: usize, depth: usize) -> Self {
        let domain = EmuDomain::new("cuda");
        let emu = |index| {
            let media = MemoryMedia::new(64 << 20).expect("address space");
            let config = EmuConfig::new(format!("emu{index}")).namespace(media, 4096);
            Emu::new(domain.clone(), config).expect("a good drive")
        };
        let emus: Vec<Arc<Emu>> = (0..devices).map(emu).collect();
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
        let runner = EmuRunner::spawn(emus.clone(), clock.clone()).expect("threads");
        let mut rig = Self {
            clock,
            domain,
            emus,
            controllers: Vec::new(),
            queues: Vec::new(),
            registrations: Vec::new(),
            runner: Some(runner),
            device,
        };
        for index in 0..devices {
            rig.add_controller(index, parts, depth);
        }
        rig
    }

    fn add_controller(&mut self, index: usize, parts: usize, depth: usize) {
        let bus: Arc<dyn Bus> = self.emus[index].bus();
        let doorbells = self.device.register_doorbells(&bus, DoorbellKind::Memory);
        self.registrations.push(doorbells.expect("doorbells"));
        let options = ControllerOptions { io_queues: parts as u16, ..ControllerOptions::default() };
        let attached = Controller::attach(bus, self.clock.clone(), options);
        let mut controller = attached.expect("attaches");
        let create = |_| {
            let memory = self.queue_memory(index.is_multiple_of(2), depth);
            controller.create_queue_pair_in(memory).expect("a queue")
        };
        let queues = (0..parts).map(create).collect();
        self.queues.push(queues);
        self.controllers.push(controller);
    }

    fn queue_memory(&mut self, pinned: bool, depth: usize) -> QueueMemory {
        let (sq, cq) = (depth * 64, (depth * 16).next_multiple_of(4096));
        let len = sq.next_multiple_of(4096) + cq + depth * 512;
        let memory: Arc<dyn DmaMemory> = if pinned {
            let memory = self.device.pinned(len).expect("pinned memory").into_external();
            self.domain.import(memory).expect("page aligned")
        } else {
            let memory = self.domain.alloc(len).expect("memory");
            self.registrations.push(self.device.register_memory(&memory).expect("registered"));
            memory
        };
        assert_eq!(memory.device().is_some(), pinned);
        let part = |at, len| DmaSlice::new(memory.clone(), at, len).expect("inside");
        let cq_at = sq.next_multiple_of(4096);
        QueueMemory {
            sq: part(0, sq),
            cq: part(cq_at, cq),
            descriptors: part(cq_at + cq, depth * 512),
        }
    }

    pub(crate) fn grants(&mut self) -> Vec<(u32, QueueGrant)> {
        let mut grants = Vec::new();
        for (device, (controller, queues)) in
            self.controllers.iter_mut().zip(&self.queues).enumerate()
        {
            for queue in queues {
                grants.push((device as u32, controller.grant(*queue, NS).expect("a grant")));
            }
        }
        grants
    }

    pub(crate) fn ring(&mut self, cuda: CudaOptions, options: UringOptions) -> Uring {
        self.try_ring(cuda, options).expect("a ring")
    }

    pub(crate) fn try_ring(
        &mut self,
        cuda: CudaOptions,
        options: UringOptions,
    ) -> Result<Uring, gio_uring::Error> {
        let clock = self.clock.clone();
        let executor = CudaExecutor::new(&self.device, cuda, clock.clone()).expect("compiles");
        let grants = self.grants();
        Uring::init_queue(16, Box::new(executor), clock, &grants, options)
    }

    pub(crate) fn pool(&self, ring: &mut Uring, rows: u32, blocks: u32) -> Pool {
        let len = rows as usize * blocks as usize * OBJECT as usize;
        let memory = self.domain.alloc(len).expect("memory");
        self.pool_in(ring, memory, rows, blocks)
    }

    /// Returns memory for a pool that the GPU reaches; call it before a kernel runs.
    pub(crate) fn pinned_pool(&self, rows: u32, blocks: u32) -> Arc<dyn DmaMemory> {
        let len = rows as usize * blocks as usize * OBJECT as usize;
        let memory = self.device.pinned(len).expect("pinned memory").into_external();
        self.domain.import(memory).expect("page aligned")
    }

    pub(crate) fn pool_in(
        &self,
        ring: &mut Uring,
        memory: Arc<dyn DmaMemory>,
        rows: u32,
        blocks: u32,
    ) -> Pool {
        let devices = self.emus.len() as u32;
        let row_bytes = blocks as usize * OBJECT as usize;
        let row = |row| {
            let at = row as usize * row_bytes;
            DmaSlice::new(memory.clone(), at, row_bytes).expect("inside").place()
        };
        let places: Vec<Place> = (0..rows).map(row).collect();
        let memory = DmaSlice::whole(memory).expect("one range");
        let desc = PoolDesc {
            row_iova: places.iter().map(|place| place.iova).collect(),
            row_memory: if memory.device().is_some() { places } else { Vec::new() },
            data_lba: vec![8; devices as usize],
            block_stride: u64::from(OBJECT),
            blocks,
            files: blocks,
            group: devices * 16,
            object_bytes: OBJECT,
            slot_bytes: OBJECT,
            run_bytes: 512 << 10,
            pad_read: None,
            pad_write: None,
        };
        let handle = ring.register_pool(&desc).expect("a pool");
        Pool { handle, memory: Buffer::new(memory).expect("reachable"), rows, blocks }
    }

    /// Recovers all controllers after a stop, and restarts `ring` with new queues.
    pub(crate) fn start_again(&mut self, ring: &mut Uring, proof: &Quiesced) {
        for controller in &mut self.controllers {
            controller.recover(proof).expect("recovers");
        }
        let grants = self.grants();
        ring.restart(&grants).expect("starts again");
    }

    /// Reads all rows of `map` without an error. On a busy machine a good command may time out:
    /// then it recovers, and reads them again.
    pub(crate) fn works_again(&mut self, ring: &mut Uring, pool: &Pool, map: &[Affine]) {
        let all = u64::from(pool.rows) * map.len() as u64;
        until("it works again", || {
            let found = all_rows(ring, pool, Direction::Read, map);
            let Some(faulted) = ring.faulted() else {
                assert_eq!(found, (all, 0));
                return true;
            };
            assert_eq!(faulted.fault, Fault::Timeout);
            let proof = ring.stop(soon(ring)).expect("stops");
            self.start_again(ring, &proof);
            false
        });
    }

    /// Stops `ring` and reclaims its queues.
    pub(crate) fn end(&mut self, ring: &mut Uring) {
        let proof = ring.stop(soon(ring)).expect("stops");
        self.reclaim(&proof);
    }

    /// Returns proof for all grants, if no kernel was ever started with them.
    pub(crate) fn never_ran(&self) -> Quiesced {
        let grants = self.controllers.iter().flat_map(|controller| controller.grants());
        // SAFETY: callers have created no ring that could have started a kernel.
        unsafe { Quiesced::assert(grants.map(|grant| grant.epoch)) }
    }

    pub(crate) fn reclaim(&mut self, proof: &Quiesced) {
        for (controller, queues) in self.controllers.iter_mut().zip(&self.queues) {
            for queue in queues {
                controller.reclaim(*queue, proof).expect("taken back");
            }
        }
    }
}

/// Returns a generous deadline for a test's waits.
pub(crate) fn soon(ring: &Uring) -> Nanos {
    ring.now() + WATCHDOG_NS
}

pub(crate) struct Pool {
    pub(crate) handle: PoolHandle,
    memory: Buffer,
    pub(crate) rows: u32,
    pub(crate) blocks: u32,
}

impl Pool {
    pub(crate) fn fill(&mut self, salt: u32) {
        let len = self.rows as usize * self.blocks as usize * OBJECT as usize;
        for at in (0..len).step_by(512) {
            let word = pattern(at, salt).to_le_bytes();
            self.memory.write(at, &word).expect("in the pool");
        }
    }

    /// Returns the CRC of an object's bytes in memory.
    pub(crate) fn crc(&self, row: u32, block: u32) -> u32 {
        let mut bytes = vec![0; OBJECT as usize];
        let at = (row * self.blocks + block) as usize * bytes.len();
        self.memory.read(at, &mut bytes).expect("in the pool");
        crc32c::crc32c(&bytes)
    }

    /// Returns true if the object at `at` equals object `from` as written by `fill(salt)`.
    fn is(&self, at: (u32, u32), salt: u32, from: (u32, u32)) -> bool {
        let start =
            |(row, block): (u32, u32)| (row * self.blocks + block) as usize * OBJECT as usize;
        (0..OBJECT as usize).step_by(512).all(|offset| {
            let mut word = [0; 4];
            self.memory.read(start(at) + offset, &mut word).expect("in the pool");
            u32::from_le_bytes(word) == pattern(start(from) + offset, salt)
        })
    }
}

fn pattern(at: usize, salt: u32) -> u32 {
    (at as u32 ^ salt).wrapping_mul(0x9e37_79b9)
}

/// Runs every row of `map`, one operation per row, eight of them in flight.
pub(crate) fn all_rows(
    ring: &mut Uring,
    pool: &Pool,
    direction: Direction,
    map: &[Affine],
) -> (u64, u32) {
    let devices = ring.devices();
    let map = ring.upload_map(map, devices).expect("a map");
    let mut sums = (0, 0);
    for first in (0..pool.rows).step_by(8) {
        let submit = |row| {
            let op = AffineOp::new(direction, &map, &pool.handle, row..row + 1);
            ring.submit(&op).expect("submitted")
        };
        let ids: Vec<_> = (first..(first + 8).min(pool.rows)).map(submit).collect();
        let deadline = ring.now() + WATCHDOG_NS;
        for id in ids {
            let done = ring.wait_completion(id, deadline).expect("done in time");
            sums = (sums.0 + done.objects, sums.1 + done.errors);
        }
    }
    sums
}

/// Blocks are written to files in one order and read back in another: every object must match.
pub(crate) fn round_trip(ring: &mut Uring, pool: &mut Pool) {
    pool.fill(7);
    let n = pool.blocks;
    let objects = u64::from(n * pool.rows);
    let to: Vec<Affine> = (0..n).map(|i| Affine { block: i * 37 % n, file: i }).collect();
    assert_eq!(all_rows(ring, pool, Direction::Write, &to), (objects, 0));
    pool.fill(99);
    let back: Vec<Affine> = (0..n).map(|i| Affine { block: i, file: i * 5 % n }).collect();
    assert_eq!(all_rows(ring, pool, Direction::Read, &back), (objects, 0));
    for (row, entry) in (0..pool.rows).flat_map(|row| back.iter().map(move |e| (row, e))) {
        let from = (row, entry.file * 37 % n);
        assert!(pool.is((row, entry.block), 7, from), "row {row}, {entry:?}");
    }
    assert!(ring.faulted().is_none());
}

/// A ring over `devices` drives moves the correct bytes, stops, restarts, and repeats.
pub(crate) fn stack_moves_bytes(
    device: &Arc<CudaDevice>,
    cuda: CudaOptions,
    (devices, parts): (usize, usize),
) -> gio_uring::UringCounters {
    let mut rig = Rig::new(device.clone(), devices, parts, 32);
    let mut ring = rig.ring(cuda, UringOptions::default());
    let mut pool = rig.pool(&mut ring, 12, 96);
    round_trip(&mut ring, &mut pool);
    let proof = ring.stop(soon(&ring)).expect("stops");
    rig.start_again(&mut ring, &proof);
    round_trip(&mut ring, &mut pool);
    let counters = ring.counters();
    rig.end(&mut ring);
    counters
}

/// Creates an executor with an unused ring and queue, in pages of its own.
pub(crate) fn bare(
    device: &Arc<CudaDevice>,
    mode: LaunchMode,
) -> (CudaExecutor, SharedMemory, Args) {
    const RING: u64 = 64;
    const PROGRESS: u64 = 512;
    const WARP: u64 = 1024;
    const QUEUE: u64 = WARP + size_of::<Warp>() as u64;
    const IOCBS: u64 = QUEUE + 1536;
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let options = CudaOptions { mode, ..CudaOptions::default() };
    let executor = CudaExecutor::new(device, options, clock).expect("compiles");
    let pages = executor.alloc(8192).expect("two pages");
    let at = pages.address();
    let queue = at + QUEUE;
    let warp = Warp {
        sq: queue,
        cq: queue,
        sq_doorbell: queue,
        cq_doorbell: queue,
        descriptors: queue,
        slots: queue,
        free_slots: queue,
        depth_log2: 2,
        cursor_active: abi::WINDOW as u32,
        parts: 1,
        ..Warp::default()
    };
    // SAFETY: inside the pages, aligned, and not yet used.
    unsafe { pages.host().byte_add(WARP as usize).cast::<Warp>().write_volatile(warp) };
    let args = Args {
        warps: at + WARP,
        iocbs: at + IOCBS,
        progress: at + PROGRESS,
        sq_ring: at + RING,
        cq_ring: at + RING + 128,
        cq_tail: at + 8,
        stop: at,
        timeout_ns: 1_000_000_000,
        warp_count: 1,
        ring_mask: 15,
        ..Args::default()
    };
    (executor, pages, args)
}

/// Sets the stop word of [`bare`].
pub(crate) fn set_stop(pages: &SharedMemory) {
    // SAFETY: the first word of the pages, which the kernel reads with acquire.
    unsafe { mmio::store_release32(pages.host().cast(), 1) };
}
