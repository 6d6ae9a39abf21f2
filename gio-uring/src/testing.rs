#![allow(unsafe_code, reason = "a stand-in for an executor vouches for the memory it allocates")]
//! An executor for this crate's own tests: reads IOCBs through the kernel's ends of the rings and
//! moves numbers between a model of memory and a model of devices, one word per object.
//!
//! It reaches memory only through the addresses that the engine gave it. They differ from this
//! process's addresses, and each access looks the allocation up again, so a wrong address or freed
//! memory ends the test.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    collections::HashMap,
    mem::offset_of,
    ops::Range,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, Weak},
};

use nvme_driver::{
    Clock, DescriptorMode, DevicePtr, GrantEpoch, Iova, Nanos, Place, QueueGrant, Quiesced,
};

use nvme_spec::ids::{Nsid, QueueId};

use crate::{
    abi::{self, Affine, Args, IoCtx, Iocb, OpProgress, Pool, Warp},
    executor::{ExecutorError, IoExecutor, Progress, SharedMemory},
    ring::{CompleteProducer, Consumer, SharedTail, SharedWords},
    shared::{Plain, Region},
    sync::Ordering,
};

/// Offset of kernel addresses from this process's addresses.
const SHIFT: u64 = 0x1000_0000_0000;
const NAME: &str = "test";
/// Offset of objects' addresses in this process from those of a device.
pub(crate) const POOL_SHIFT: u64 = 0x2000_0000_0000;

/// Checksum function of the model.
pub(crate) fn checksum(object: u64) -> u32 {
    (object ^ object >> 32) as u32 ^ 0x5555_5555
}

/// Memory that detects when it is freed.
#[derive(Debug)]
pub(crate) struct Allocation {
    host: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range; accesses go through Region.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Allocation {
    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, 4096).expect("small")
    }

    fn new(len: usize) -> Self {
        let len = len.max(1).next_multiple_of(4096);
        // SAFETY: the layout is not empty.
        let host = unsafe { alloc_zeroed(Self::layout(len)) };
        Self { host: NonNull::new(host).expect("memory"), len }
    }

    fn address(&self) -> u64 {
        self.host.as_ptr().expose_provenance() as u64 + SHIFT
    }

    fn shared(self: &Arc<Self>) -> SharedMemory {
        let owner = Box::new(self.clone());
        // SAFETY: the owner keeps the bytes; both sides access them volatile or atomically only.
        unsafe { SharedMemory::new(self.host, self.address(), self.len, owner) }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated by new() with this layout.
        unsafe { dealloc(self.host.as_ptr(), Self::layout(self.len)) }
    }
}

/// State that a test sets and inspects outside the engine.
#[derive(Debug, Default)]
pub(crate) struct Model {
    allocations: Vec<Weak<Allocation>>,
    /// Addresses of memory for tables.
    near: Vec<Range<u64>>,
    pub allocated: usize,
    pub starts: usize,
    pub sms: u32,
    run: Option<Run>,
    grants: Vec<GrantEpoch>,
    /// Objects on the devices by (device, LBA), and in memory by IOVA.
    pub disk: HashMap<(u32, u64), u64>,
    pub memory: HashMap<u64, u64>,
    /// Status for contexts whose first LBA on a device is listed.
    pub failing: HashMap<(u32, u64), u32>,
    /// Turns do nothing.
    pub hold: bool,
    /// Stopping fails.
    pub stuck: bool,
    /// Stopping ends the kernel immediately, without cancelling the entries in the ring.
    pub abrupt: bool,
    /// The named part of a grant cannot be reached.
    pub unreachable: Option<u64>,
    /// Omits one object of each operation from the report.
    pub lazy: bool,
    /// Written to the completion ring at the next turn.
    pub nonsense: Option<u32>,
    /// Virtual time last seen by the kernel.
    pub time: u64,
    next_warp: usize,
}

#[derive(Debug)]
struct Run {
    args: Args,
    warps: Vec<(Consumer<SharedWords>, Option<u32>)>,
    done: CompleteProducer<SharedWords, SharedTail>,
}

/// The executor; the test keeps a clone of its model.
#[derive(Debug, Clone, Default)]
pub(crate) struct TestExecutor(pub Arc<Mutex<Model>>);

impl TestExecutor {
    pub(crate) fn model(&self) -> MutexGuard<'_, Model> {
        self.0.lock().unwrap()
    }
}

impl Model {
    /// Returns the number of allocations not freed.
    pub(crate) fn living(&self) -> usize {
        self.allocations.iter().filter(|memory| memory.strong_count() > 0).count()
    }

    /// Makes a warp report that its queue failed.
    pub(crate) fn fail(&mut self, warp: usize, fault: u32) {
        let warps = self.run.as_ref().expect("running").args.warps;
        let failed = Warp { fault, quarantined: 3, ..self.read(warps, warp) };
        self.write(warps, warp, failed);
    }

    /// Returns `len` bytes at `address`.
    fn region(&self, address: u64, len: usize) -> Region {
        let holds = |memory: &Arc<Allocation>| {
            address >= memory.address()
                && address + len as u64 <= memory.address() + memory.len as u64
        };
        let memory = self.allocations.iter().filter_map(Weak::upgrade).find(holds);
        let memory = memory.unwrap_or_else(|| panic!("{len} bytes at {address:#x}: not mapped"));
        Region::whole(memory.shared()).slice((address - memory.address()) as usize, len)
    }

    pub(crate) fn read<T: Plain>(&self, address: u64, index: usize) -> T {
        let at = address + (index * size_of::<T>()) as u64;
        self.region(at, size_of::<T>()).read(0)
    }

    fn write<T: Plain>(&self, address: u64, index: usize, value: T) {
        let at = address + (index * size_of::<T>()) as u64;
        self.region(at, size_of::<T>()).write(0, value);
    }

    fn attach(&self, args: Args) -> Run {
        let bytes = (args.ring_mask as usize + 1) * size_of::<u64>();
        let sq = SharedWords(self.region(args.sq_ring, bytes));
        let cq = SharedWords(self.region(args.cq_ring, bytes));
        let tail = SharedTail(self.region(args.cq_tail, size_of::<u32>()));
        let warp = |_| (Consumer::new(sq.clone(), args.ring_mask), None);
        let warps = (0..args.warp_count).map(warp).collect();
        Run { args, warps, done: CompleteProducer::new(cq, tail, args.ring_mask) }
    }

    /// Runs one warp's turn: at most one operation. The order of the warps varies.
    fn turn(&mut self, refusal: u32) -> Progress {
        let Some(mut run) = self.run.take() else { return Progress::Idle };
        if run.args.clock != 0 {
            self.time = self.read(run.args.clock, 0);
        }
        if let Some(id) = self.nonsense.take() {
            run.done.complete(id);
        }
        let mut progress = Progress::Idle;
        for _ in 0..run.warps.len() {
            let warp = self.next_warp % run.warps.len();
            self.next_warp += 1;
            let (ring, waiting) = &mut run.warps[warp];
            let Some(id) = waiting.take().or_else(|| ring.take()) else { continue };
            let iocb: Iocb = self.read(run.args.iocbs, id as usize);
            if iocb.wait != 0 && refusal == 0 {
                let value: u32 = self.read(iocb.wait, 0);
                if value.wrapping_sub(iocb.wait_value).cast_signed() < 0 {
                    *waiting = Some(id);
                    continue;
                }
            }
            self.part(&run, warp, id, iocb, refusal);
            progress = Progress::Moved;
            // Makes the other warps lag behind occasionally.
            if self.next_warp.is_multiple_of(3) {
                break;
            }
        }
        self.run = Some(run);
        progress
    }

    /// Checks that the tables that the kernel only reads, and nothing else, are near it.
    fn check_places(&self, iocb: &Iocb) {
        let is_near = |address| self.near.iter().any(|near| near.contains(&address));
        let is_affine = iocb.kind == abi::KIND_AFFINE;
        for table in [iocb.pool, iocb.ioctx, iocb.starts] {
            assert_eq!(is_near(table), is_affine && table != 0, "{iocb:?}");
        }
        let expected = iocb.checksums != 0 && iocb.opcode == abi::OP_READ;
        assert_eq!(is_near(iocb.checksums), expected, "{iocb:?}");
        assert!(!is_near(iocb.status), "{iocb:?}");
    }

    /// Runs `warp`'s part of an operation; the last warp completes it.
    fn part(&mut self, run: &Run, warp: usize, id: u32, iocb: Iocb, refusal: u32) {
        let warp: Warp = self.read(run.args.warps, warp);
        self.check_places(&iocb);
        let (mut objects, mut failures) = (0u64, Vec::new());
        let rows = if iocb.kind == abi::KIND_AFFINE { iocb.row_count } else { 1 };
        for row in (0..rows).map(|row| iocb.row_first + row) {
            let class = match iocb.kind {
                abi::KIND_AFFINE => {
                    (warp.device + iocb.devices - row % iocb.devices) % iocb.devices
                }
                _ => warp.device,
            };
            let first: u32 = self.read(iocb.starts, class as usize);
            let end: u32 = self.read(iocb.starts, class as usize + 1);
            let share = |part: u32| first + (end - first) * part / warp.parts;
            for index in share(warp.part)..share(warp.part + 1) {
                let status =
                    if refusal != 0 { refusal } else { self.transfer(&iocb, &warp, row, index) };
                match status {
                    abi::STATUS_OK => objects += 1,
                    status => failures.push((status, index)),
                }
            }
        }
        if self.lazy {
            objects -= 1;
        }
        let size = size_of::<OpProgress>();
        let shared = self.region(run.args.progress + u64::from(id) * size as u64, size);
        let objects_at = offset_of!(OpProgress, objects);
        let sum = shared.load64(objects_at, Ordering::Relaxed) + objects;
        shared.store64(objects_at, sum, Ordering::Relaxed);
        for (status, index) in &failures {
            self.write(iocb.status, *index as usize, *status);
            let error = u64::from(*status) << 32 | u64::from(*index);
            shared.store64(offset_of!(OpProgress, error), error, Ordering::Relaxed);
        }
        let errors_at = offset_of!(OpProgress, errors);
        shared.add32(errors_at, failures.len() as u32, Ordering::Relaxed);
        self.count(run, &warp, objects);
        if shared.add32(offset_of!(OpProgress, warps_left), u32::MAX, Ordering::AcqRel) == 1 {
            let OpProgress { errors, error, objects, .. } = shared.read(0);
            self.write(run.args.iocbs, id as usize, Iocb { errors, error, objects, ..iocb });
            let ready = OpProgress { warps_left: run.args.warp_count, ..OpProgress::default() };
            shared.write(0, ready);
            if iocb.signal != 0 {
                self.region(iocb.signal, 4).store32(0, iocb.signal_value, Ordering::Release);
            }
            run.done.complete(id);
        }
    }

    fn count(&self, run: &Run, warp: &Warp, objects: u64) {
        let of_warp = |index: &usize| self.read::<Warp>(run.args.warps, *index).slots == warp.slots;
        let index = (0..run.args.warp_count as usize).find(of_warp).expect("a warp");
        let mut warp: Warp = self.read(run.args.warps, index);
        warp.objects += objects;
        warp.commands += 1;
        self.write(run.args.warps, index, warp);
    }

    /// Transfers one object of one context; returns its status.
    fn transfer(&mut self, iocb: &Iocb, warp: &Warp, row: u32, index: u32) -> u32 {
        let (iova, lba) = if iocb.kind == abi::KIND_EXPLICIT {
            let context: IoCtx = self.read(iocb.ioctx, index as usize);
            assert_eq!(context.device, warp.device, "grouped by device");
            assert!(context.bytes <= iocb.bytes_max);
            (context.iova, context.lba)
        } else {
            let Affine { block, file } = self.read(iocb.ioctx, index as usize);
            let pool: Pool = self.read(iocb.pool, 0);
            if block >= pool.blocks || file >= pool.files {
                return abi::STATUS_INVALID;
            }
            let (g, k) = (file / pool.group, file % pool.group);
            assert_eq!((k + row) % pool.devices, warp.device, "grouped by class");
            let slot = (g * pool.rows + row) * (pool.group / pool.devices) + k / pool.devices;
            let data_lba: u64 = self.read(pool.data_lba, warp.device as usize);
            let row_iova: u64 = self.read(pool.row_iova, row as usize);
            (
                row_iova + u64::from(block) * pool.block_stride,
                data_lba + u64::from(slot) * u64::from(pool.slot_bytes >> warp.lba_shift),
            )
        };
        let place = (warp.device, lba);
        if let Some(&status) = self.failing.get(&place) {
            return status;
        }
        let (on_disk, in_memory) = (self.disk.get(&place), self.memory.get(&iova));
        let moved = if iocb.opcode == abi::OP_WRITE { in_memory } else { on_disk };
        let moved = moved.copied().unwrap_or(0);
        if iocb.opcode == abi::OP_WRITE {
            self.disk.insert(place, moved);
        } else {
            self.memory.insert(iova, moved);
        }
        if iocb.checksums == 0 {
            return abi::STATUS_OK;
        }
        let pool: Pool = self.read(iocb.pool, 0);
        let row_iova: u64 = self.read(pool.row_iova, row as usize);
        let row_base: u64 = self.read(pool.row_base, row as usize);
        assert_eq!(row_base, row_iova + POOL_SHIFT + SHIFT, "row {row} for the kernel");
        let at = row as usize * iocb.count as usize + index as usize;
        if iocb.opcode == abi::OP_WRITE {
            self.write(iocb.checksums, at, checksum(moved));
        } else if self.read::<u32>(iocb.checksums, at) != checksum(moved) {
            return abi::STATUS_CHECKSUM;
        }
        abi::STATUS_OK
    }
}

impl IoExecutor for TestExecutor {
    fn name(&self) -> &'static str {
        NAME
    }

    fn alloc(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        if len > 1 << 32 {
            let cause = "the model is small".to_owned();
            return Err(ExecutorError::Memory { executor: NAME, len, cause });
        }
        let memory = Arc::new(Allocation::new(len));
        let mut model = self.model();
        model.allocations.push(Arc::downgrade(&memory));
        model.allocated += 1;
        Ok(memory.shared())
    }

    fn alloc_tables(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        let memory = self.alloc(len)?;
        self.model().near.push(memory.address()..memory.address() + memory.len() as u64);
        Ok(memory)
    }

    fn address(&self, place: &Place) -> Option<u64> {
        let host = place.host.filter(|&host| Some(host) != self.model().unreachable)?;
        Some(host + SHIFT)
    }

    fn start(&mut self, args: Args, grants: &[GrantEpoch]) -> Result<(), ExecutorError> {
        let mut model = self.model();
        assert!(model.run.is_none(), "started twice");
        let run = model.attach(args);
        model.grants = grants.to_vec();
        model.run = Some(run);
        model.starts += 1;
        Ok(())
    }

    fn submitted(&mut self, _tail: u32, sms: u32) -> Result<(), ExecutorError> {
        self.model().sms = sms;
        Ok(())
    }

    fn poll(&mut self) -> Result<Progress, ExecutorError> {
        let mut model = self.model();
        if model.hold { Ok(Progress::Idle) } else { Ok(model.turn(0)) }
    }

    fn stop(&mut self, _deadline: Nanos) -> Result<Quiesced, ExecutorError> {
        let mut model = self.model();
        if model.stuck {
            return Err(ExecutorError::StopTimeout { executor: NAME });
        }
        let run = model.run.as_ref().expect("running");
        assert_eq!(model.read::<u64>(run.args.stop, 0), 1, "the stop word comes first");
        while !model.abrupt && model.turn(abi::STATUS_CANCELLED) == Progress::Moved {}
        model.run = None;
        // SAFETY: the model runs in the caller's thread only, and no longer uses the queues.
        Ok(unsafe { Quiesced::assert(std::mem::take(&mut model.grants)) })
    }
}

/// Clock that advances only while a caller waits.
#[derive(Debug, Default)]
pub(crate) struct TestClock(Mutex<u64>);

impl Clock for TestClock {
    fn now(&self) -> Nanos {
        Nanos(*self.0.lock().unwrap())
    }

    fn pause(&self, _idle: u32, until: Nanos) {
        let mut now = self.0.lock().unwrap();
        *now = (*now + 1000).min(until.0.max(*now + 1));
    }
}

/// Returns a grant that passes every check.
pub(crate) fn grant(qid: u16) -> QueueGrant {
    let place = |at: u64| Place {
        host: Some(0x10_0000 * u64::from(qid) + at),
        device: None::<DevicePtr>,
        iova: Iova(0x8000_0000 + 0x10_0000 * u64::from(qid) + at),
    };
    QueueGrant {
        epoch: GrantEpoch::new(),
        qid: QueueId(qid),
        sq: place(0x1000),
        cq: place(0x9000),
        sq_doorbell: place(0xa000),
        cq_doorbell: place(0xa004),
        descriptors: place(0x2_0000),
        descriptor_bytes: 4096,
        depth: 16,
        nsid: Nsid(1),
        lba_shift: 9,
        lbas: 1 << 20,
        boundary_lbas: 0,
        transfer_bytes_max: 128 << 10,
        descriptor_mode: DescriptorMode::Sgl { bit_bucket: true, granularity: 4 },
        placements: nvme_driver::Placements::default(),
    }
}
