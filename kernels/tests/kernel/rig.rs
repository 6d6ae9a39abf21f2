//! Rings, warps and controllers laid out by hand, and a model of the operations' effects.

use std::sync::Arc;

use gio_kernels::InlineExecutor;
use gio_uring::{
    IoExecutor, Progress,
    abi::{self, Affine, Args, IoCtx, Iocb, OpProgress, Pool, Relay, Slot, Warp},
};
use nvme_driver::MonotonicClock;

use crate::{
    device::{Device, Queue, Rules},
    memory::{Memory, Random, Region},
};

pub const RING: u64 = 64;
/// Start of virtual time.
const EPOCH: u64 = 1_000_000_000;

/// Configuration of a rig. The default is one modern drive with one queue.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    pub devices: u32,
    pub parts: u32,
    pub depth_log2: u32,
    pub sgl: bool,
    pub bit_bucket: bool,
    pub lba_shift: u32,
    pub lbas: u64,
    pub transfer_bytes_max: u32,
    pub descriptor_bytes: u32,
    pub boundary_lbas: u32,
    pub timeout_ns: u64,
    pub event_timeout_ns: u64,
    pub rounds: u32,
    /// Uses the processor's clock instead of virtual time.
    pub real_time: bool,
    /// Passes the host's words on by a relay, as on a GPU.
    pub relayed: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            devices: 1,
            parts: 1,
            depth_log2: 6,
            sgl: true,
            bit_bucket: true,
            lba_shift: 12,
            lbas: 1024,
            transfer_bytes_max: 1 << 17,
            descriptor_bytes: 512,
            boundary_lbas: 0,
            timeout_ns: 1_000_000,
            event_timeout_ns: 5_000_000,
            rounds: 4,
            real_time: false,
            relayed: false,
        }
    }
}

/// The KV pool of a test.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub blocks: u32,
    pub files: u32,
    pub rows: u32,
    pub group: u32,
    pub object_bytes: u32,
    pub slot_bytes: u32,
    pub run_bytes: u32,
    /// Bytes between consecutive blocks' objects.
    pub gap: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            blocks: 64,
            files: 64,
            rows: 3,
            group: 32,
            object_bytes: 4096,
            slot_bytes: 4096,
            run_bytes: 1 << 16,
            gap: 0,
        }
    }
}

/// A registered pool: its memory, and the address of its description for the kernel.
#[derive(Debug, Clone, Copy)]
pub struct Kv {
    pub shape: Shape,
    pub memory: Region,
    pub address: u64,
    pub data_lba: u64,
    devices: u32,
}

impl Kv {
    fn stride(&self) -> u64 {
        u64::from(self.shape.object_bytes + self.shape.gap)
    }

    /// Returns the offset of the object of `block` in `row` in the pool's memory.
    pub fn offset(&self, row: u32, block: u32) -> u64 {
        (u64::from(row) * u64::from(self.shape.blocks) + u64::from(block)) * self.stride()
    }

    /// Returns device and LBA of an object, by the formula of the architecture (decision 4).
    pub fn place(&self, file: u32, row: u32, lba_shift: u32) -> (usize, u64) {
        let (n, group) = (self.devices, self.shape.group);
        let (g, k) = (file / group, file % group);
        let slot = (g * self.shape.rows + row) * (group / n) + k / n;
        let lbas = u64::from(self.shape.slot_bytes >> lba_shift);
        (((k + row) % n) as usize, self.data_lba + u64::from(slot) * lbas)
    }
}

/// A completed operation.
#[derive(Debug, Clone)]
pub struct Done {
    pub id: u32,
    pub iocb: Iocb,
    pub statuses: Vec<u32>,
}

pub struct Rig {
    pub config: Config,
    pub memory: Memory,
    pub args: Args,
    pub executor: InlineExecutor,
    pub devices: Vec<Device>,
    pub random: Random,
    tail: u32,
    seen: u32,
}

impl Rig {
    pub fn new(config: Config, seed: u64) -> Self {
        let mut executor = InlineExecutor::new(Arc::new(MonotonicClock::default()));
        let mut memory = Memory::new(&executor, 32 << 20);
        let mut random = Random::new(seed);
        let mut devices = Vec::new();
        let mut warps = Vec::new();
        for device in 0..config.devices {
            let queues: Vec<Queue> = (0..config.parts)
                .map(|part| {
                    let qid = (device * config.parts + part + 1) as u16;
                    let bytes = u64::from(config.descriptor_bytes);
                    Queue::new(qid, config.depth_log2, &mut memory, bytes)
                })
                .collect();
            for (part, queue) in queues.iter().enumerate() {
                warps.push(warp(&config, &mut memory, device, part as u32, queue));
            }
            let media = (0..config.lbas << config.lba_shift >> 3)
                .flat_map(|_| random.next().to_le_bytes())
                .collect();
            devices.push(Device {
                rules: rules(&config),
                media,
                queues,
                stalled: false,
                at_once: u64::MAX,
                in_order: false,
            });
        }
        let clock = memory.place(&[EPOCH]);
        let args = Args {
            warps: memory.place(&warps),
            iocbs: memory.place(&[Iocb::default(); RING as usize]),
            progress: memory.place(&[ready(warps.len()); RING as usize]),
            sq_ring: memory.place(&[0u64; RING as usize]),
            cq_ring: memory.place(&[0u64; RING as usize]),
            cq_tail: memory.place(&[0u32]),
            stop: memory.place(&[0u64]),
            clock: if config.real_time { 0 } else { clock },
            timeout_ns: config.timeout_ns,
            event_timeout_ns: config.event_timeout_ns,
            warp_count: warps.len() as u32,
            ring_mask: RING as u32 - 1,
            rounds: config.rounds,
            ..Args::default()
        };
        let bytes = size_of::<Relay>() + RING as usize * (size_of::<Iocb>() + size_of::<u64>());
        let relay = memory.place(&vec![0u64; bytes / size_of::<u64>()]);
        let args = Args { relay: if config.relayed { relay } else { 0 }, ..args };
        executor.start(args, &[]).expect("nothing runs yet");
        Self { config, memory, args, executor, devices, random, tail: 0, seen: 0 }
    }

    pub fn kv(&mut self, shape: Shape) -> Kv {
        let stride = u64::from(shape.object_bytes + shape.gap);
        let len = u64::from(shape.rows) * u64::from(shape.blocks) * stride;
        let memory = self.memory.take_data(len, 4096);
        let fill: Vec<u8> = (0..len).map(|i| ((i * 7) >> 3) as u8 ^ 0x5a).collect();
        self.memory.write(memory.address, &fill);
        let pad = u64::from(shape.slot_bytes - shape.object_bytes).max(1);
        let pads = [self.memory.take_data(pad, 64), self.memory.take_data(pad, 64)];
        let mut kv = Kv { shape, memory, address: 0, data_lba: 5, devices: self.config.devices };
        let bases: Vec<u64> =
            (0..shape.rows).map(|row| self.memory.iova(memory.at(kv.offset(row, 0)))).collect();
        let addresses: Vec<u64> = (0..shape.rows).map(|row| memory.at(kv.offset(row, 0))).collect();
        let lbas = vec![kv.data_lba; self.config.devices as usize];
        let pool = Pool {
            row_iova: self.memory.place(&bases),
            data_lba: self.memory.place(&lbas),
            block_stride: stride,
            blocks: shape.blocks,
            files: shape.files,
            rows: shape.rows,
            devices: self.config.devices,
            group: shape.group,
            object_bytes: shape.object_bytes,
            slot_bytes: shape.slot_bytes,
            run_bytes: shape.run_bytes,
            pad_read_iova: self.memory.iova(pads[0].address),
            pad_write_iova: self.memory.iova(pads[1].address),
            row_base: self.memory.place(&addresses),
        };
        kv.address = self.memory.place(&[pool]);
        kv
    }

    /// Returns the IOCB of an affine operation over `map`, which it sorts by class and file.
    pub fn affine(&mut self, kv: &Kv, op: u32, map: &mut [Affine], rows: [u32; 2]) -> Iocb {
        let n = self.config.devices;
        map.sort_by_key(|entry| (entry.file % n, entry.file));
        let classes: Vec<u32> = map.iter().map(|entry| entry.file % n).collect();
        Iocb {
            opcode: op,
            kind: abi::KIND_AFFINE,
            count: map.len() as u32,
            ioctx: self.memory.place(map),
            starts: self.starts(&classes),
            status: self.memory.place(&vec![0u32; map.len().max(1)]),
            pool: kv.address,
            row_first: rows[0],
            row_count: rows[1] - rows[0],
            devices: n,
            ..Iocb::default()
        }
    }

    /// Returns the IOCB of an explicit operation; sorts `list` by device.
    pub fn explicit(&mut self, op: u32, list: &mut [IoCtx]) -> Iocb {
        list.sort_by_key(|entry| entry.device);
        let classes: Vec<u32> = list.iter().map(|entry| entry.device).collect();
        Iocb {
            opcode: op,
            kind: abi::KIND_EXPLICIT,
            count: list.len() as u32,
            ioctx: self.memory.place(list),
            starts: self.starts(&classes),
            status: self.memory.place(&vec![0u32; list.len().max(1)]),
            bytes_max: list.iter().map(|entry| entry.bytes).max().unwrap_or(0),
            devices: self.config.devices,
            ..Iocb::default()
        }
    }

    fn starts(&mut self, classes: &[u32]) -> u64 {
        let below = |class: u32| classes.iter().filter(|c| **c < class).count() as u32;
        let starts: Vec<u32> = (0..=self.config.devices).map(below).collect();
        self.memory.place(&starts)
    }

    /// Publishes an operation; returns its id.
    pub fn issue(&mut self, iocb: Iocb) -> u32 {
        let id = self.tail % RING as u32;
        self.memory.poke(self.args.iocbs + u64::from(id) * 128, iocb);
        let word = u64::from(self.tail + 1) << 32 | u64::from(id);
        self.memory.poke(self.args.sq_ring + u64::from(id) * 8, word);
        self.tail += 1;
        id
    }

    /// Runs the kernel and the controllers once. Returns true if anything moved.
    pub fn step(&mut self) -> bool {
        let moved = self.executor.poll().expect("running") == Progress::Moved;
        let step = |device: &mut Device| device.step(&self.memory, &mut self.random);
        self.devices.iter_mut().map(step).fold(moved, |a, b| a | b)
    }

    /// Returns the next completion of the ring, if any.
    pub fn completion(&mut self) -> Option<Done> {
        let at = self.args.cq_ring + u64::from(self.seen) % RING * 8;
        let word: u64 = self.memory.peek(at);
        if word >> 32 != u64::from(self.seen + 1) {
            return None;
        }
        self.seen += 1;
        let id = word as u32;
        let iocb: Iocb = self.memory.peek(self.args.iocbs + u64::from(id) * 128);
        let progress = self.args.progress + u64::from(id) * size_of::<OpProgress>() as u64;
        let left: OpProgress = self.memory.peek(progress);
        assert_eq!(left, ready(self.args.warp_count as usize), "not ready for the next operation");
        let status = |i| self.memory.peek(iocb.status + u64::from(i) * 4);
        Some(Done { id, iocb, statuses: (0..iocb.count).map(status).collect() })
    }

    /// Runs until `n` more operations have completed; virtual time does not advance.
    pub fn finish(&mut self, n: usize) -> Vec<Done> {
        let mut done = Vec::new();
        let mut idle = 0;
        while done.len() < n {
            let moved = self.step();
            done.extend(std::iter::from_fn(|| self.completion()));
            // The controllers' random choice may be to complete nothing many times.
            idle = if moved { 0 } else { idle + 1 };
            assert!(idle < 1000, "{} of {n} operations completed, and nothing moves", done.len());
        }
        assert_eq!(done.len(), n, "an operation completed twice");
        done
    }

    /// Runs until nothing moves any more, for stalled controllers or dropped completions.
    pub fn settle(&mut self) {
        let mut idle = 0;
        while idle < 200 {
            idle = if self.step() { 0 } else { idle + 1 };
        }
    }

    pub fn pass(&self, ns: u64) {
        let now: u64 = self.memory.peek(self.args.clock);
        self.memory.poke(self.args.clock, now + ns);
    }

    pub fn set_warp(&self, index: u32, warp: Warp) {
        self.memory.poke(self.args.warps + u64::from(index) * size_of::<Warp>() as u64, warp);
    }

    pub fn warp(&self, index: u32) -> Warp {
        self.memory.peek(self.args.warps + u64::from(index) * size_of::<Warp>() as u64)
    }

    /// Returns the number of a warp's slots in `state`.
    pub fn slots(&self, warp: u32, state: u16) -> usize {
        let slots = self.warp(warp).slots;
        let slot = |i: u64| self.memory.peek::<Slot>(slots + i * size_of::<Slot>() as u64);
        (0..1 << self.config.depth_log2).filter(|i| slot(*i).state == state).count()
    }

    /// Asserts the state of a rig with no operation in progress and no failed queue.
    pub fn assert_at_rest(&self) {
        for index in 0..self.args.warp_count {
            let warp = self.warp(index);
            assert_eq!((warp.fault, warp.outstanding, warp.quarantined), (0, 0, 0));
            assert_eq!(warp.free_count, (1 << self.config.depth_log2) - 1);
            assert_eq!(warp.cursor_active, abi::WINDOW as u32);
            assert!(warp.active.iter().all(|active| active.state == 0));
            assert_eq!(self.slots(index, 0), 1 << self.config.depth_log2);
            let mut free: Vec<u16> = (0..u64::from(warp.free_count))
                .map(|i| self.memory.peek(warp.free_slots + i * 2))
                .collect();
            free.sort_unstable();
            free.dedup();
            assert_eq!(free.len(), warp.free_count as usize, "a slot is free twice");
        }
    }

    /// Applies an affine operation to copies of the pool's memory and the media.
    pub fn model(
        &self,
        kv: &Kv,
        op: u32,
        map: &[Affine],
        rows: [u32; 2],
        memory: &mut [u8],
        media: &mut [Vec<u8>],
    ) {
        for (entry, row) in map.iter().flat_map(|e| (rows[0]..rows[1]).map(move |r| (e, r))) {
            let (device, lba) = kv.place(entry.file, row, self.config.lba_shift);
            let (bytes, slot) = (kv.shape.object_bytes as usize, kv.shape.slot_bytes as usize);
            let at = (lba << self.config.lba_shift) as usize;
            let from = kv.offset(row, entry.block) as usize;
            if op == abi::OP_READ {
                memory[from..from + bytes].copy_from_slice(&media[device][at..at + bytes]);
            } else {
                media[device][at..at + bytes].copy_from_slice(&memory[from..from + bytes]);
                media[device][at + bytes..at + slot].fill(0);
            }
        }
    }
}

/// Returns the progress of an operation that no warp has taken.
fn ready(warps: usize) -> OpProgress {
    OpProgress { warps_left: warps as u32, ..OpProgress::default() }
}

fn rules(config: &Config) -> Rules {
    Rules {
        nsid: 3,
        lba_shift: config.lba_shift,
        lbas: config.lbas,
        transfer_bytes_max: u64::from(config.transfer_bytes_max),
        sgl: config.sgl,
        bit_bucket: config.bit_bucket,
        page_bytes: 4096,
    }
}

fn warp(config: &Config, memory: &mut Memory, device: u32, part: u32, queue: &Queue) -> Warp {
    let depth = 1usize << config.depth_log2;
    let free: Vec<u16> = (0..depth as u16 - 1).rev().collect();
    let mut stack = free;
    stack.push(0);
    Warp {
        sq: queue.sq,
        cq: queue.cq,
        sq_doorbell: queue.sq_doorbell,
        cq_doorbell: queue.cq_doorbell,
        descriptors: queue.descriptors.address,
        descriptors_iova: memory.iova(queue.descriptors.address),
        slots: memory.place(&vec![Slot::default(); depth]),
        free_slots: memory.place(&stack),
        descriptor_bytes: config.descriptor_bytes,
        depth_log2: config.depth_log2,
        nsid: 3,
        lba_shift: config.lba_shift,
        lbas: config.lbas,
        transfer_bytes_max: config.transfer_bytes_max,
        descriptor_mode: if config.sgl { abi::DESC_SGL } else { abi::DESC_PRP },
        page_bytes: 4096,
        bit_bucket: u32::from(config.bit_bucket),
        qid: u32::from(queue.qid),
        device,
        part,
        parts: config.parts,
        boundary_lbas: config.boundary_lbas,
        free_count: depth as u32 - 1,
        cursor_active: abi::WINDOW as u32,
        ..Warp::default()
    }
}
