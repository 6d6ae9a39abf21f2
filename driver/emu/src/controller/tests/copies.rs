//! Data in memory that only a GPU can address: correctness and timing of the copies.
#![allow(unsafe_code, reason = "offers memory that is not there")]

mod faults;

use std::time::{Duration, Instant};

use nvme_driver::{DevicePtr, DmaError};
use nvme_spec::sgl::{SglDescriptor, SglKind};
use proptest::prelude::*;

use super::{
    gpu::{Engine, Gpu},
    *,
};
use crate::{
    DmaFaultKind, FileMedia, FileOptions, Latency, SimMedia, SimOptions, bounce::POOL_BYTES,
};

const POOL: usize = 16 * PAGE;

/// A host with memory on a GPU.
struct Rig {
    host: Host,
    gpu: Arc<Gpu>,
    memory: Arc<dyn DmaMemory>,
    device: DevicePtr,
}

impl Rig {
    fn with(change: impl FnOnce(EmuConfig) -> EmuConfig) -> Self {
        let gpu = Gpu::new();
        let domain = EmuDomain::with_copies("test", Arc::new(Engine(gpu.clone())));
        let mut host = Host::off_in(domain, change);
        host.enable(ADMIN_ENTRIES, ADMIN_ENTRIES);
        host.create_pair(1, 16, 16);
        let (memory, device) = gpu.alloc(POOL);
        let memory = host.domain.import(memory).unwrap();
        assert_eq!((memory.host(), memory.device()), (None, Some(device)));
        Self { host, gpu, memory, device }
    }

    fn new() -> Self {
        Self::with(|config| config)
    }

    /// Uses a medium with latency.
    fn slow(options: SimOptions) -> Self {
        Self::with(|mut config| {
            config.namespaces.clear();
            config.namespace(SimMedia::new(media(1 << 20), options), 512)
        })
    }

    /// Transfers one page between `offset` of the GPU's memory and block `lba`.
    fn page(&self, opcode: NvmOpcode, lba: u64, offset: u64) -> Sqe {
        nvm(opcode, lba, 8).with_prps(at(&self.memory).0 + offset, 0)
    }

    fn on_gpu(&self, offset: u64, len: usize) -> Vec<u8> {
        self.gpu.read(DevicePtr(self.device.0 + offset), len)
    }

    /// Posts, rings, and steps until the copies have begun.
    fn send(&mut self, sqe: Sqe) -> u16 {
        let cid = self.host.send(1, sqe);
        self.host.step();
        cid
    }

    /// Steps and copies until nothing changes any more.
    fn settle(&mut self) {
        for _ in 0..4 {
            self.host.now = self.host.now + Nanos(1_000_000);
            self.host.step();
            self.gpu.finish();
        }
        self.host.step();
    }

    /// Posts, rings, and runs everything to completion; returns the command's status.
    fn io(&mut self, sqe: Sqe) -> Status {
        let cid = self.host.send(1, sqe);
        self.settle();
        let found = self.host.reap_all(1);
        assert_eq!(found.iter().map(|cqe| cqe.cid).collect::<Vec<_>>(), [cid]);
        found[0].status().code()
    }
}

fn fixed(ns: u64) -> SimOptions {
    let latency = Latency { min_ns: ns, mean_ns: ns, tail_ns: ns, tail_ppm: 0 };
    let (read, write, flush) = (latency, latency, latency);
    SimOptions { seed: 1, read, write, flush, lba_bytes: 512, ..SimOptions::default() }
}

#[test]
fn a_read_completes_after_its_copy_and_not_before() {
    let mut rig = Rig::new();
    rig.host.media.poke(0, &pattern(2 * PAGE, 1)).unwrap();
    let base = at(&rig.memory).0;
    let cid = rig.send(nvm(NvmOpcode::READ, 0, 16).with_prps(base, base + 8192));
    for _ in 0..10 {
        let progress = rig.host.step();
        assert_eq!((progress.work, progress.outstanding), (0, 1));
        assert!(progress.next_event.is_some(), "it is worth looking again");
        assert!(rig.host.reap(1).is_none(), "completed before the data was there");
    }
    assert_eq!(rig.gpu.pending(), 2, "two pages apart");
    rig.gpu.run(1);
    rig.host.step();
    assert!(rig.host.reap(1).is_none(), "half of the data is not the data");
    rig.gpu.run(1);
    let found = [rig.on_gpu(0, PAGE), rig.on_gpu(8192, PAGE)].concat();
    assert_eq!(found, pattern(2 * PAGE, 1));
    rig.host.step();
    let cqe = rig.host.reap(1).unwrap();
    assert_eq!((cqe.cid, cqe.status()), (cid, Status::SUCCESS));
    let counters = rig.host.controller.counters();
    assert_eq!((counters.bytes_read, counters.copies, counters.copy_batches), (8192, 2, 1));
    assert_eq!(rig.host.step().next_event, None);
}

#[test]
fn a_write_reaches_its_medium_after_its_copy() {
    let mut rig = Rig::new();
    rig.gpu.write(rig.device, &pattern(PAGE, 2));
    let cid = rig.send(rig.page(NvmOpcode::WRITE, 8, 0));
    rig.host.step();
    assert!(rig.host.reap(1).is_none());
    assert_eq!(rig.host.stored(4096, PAGE), vec![0; PAGE], "nothing has been copied");
    rig.gpu.finish();
    rig.host.step();
    assert_eq!(rig.host.stored(4096, PAGE), pattern(PAGE, 2));
    let cqe = rig.host.reap(1).unwrap();
    assert_eq!((cqe.cid, cqe.status()), (cid, Status::SUCCESS));
    assert_eq!(rig.host.controller.counters().bytes_written, 4096);
}

#[test]
fn what_finishes_in_one_step_is_one_batch() {
    for options in [None, Some(fixed(1000))] {
        let mut rig = options.map_or_else(Rig::new, Rig::slow);
        for page in 0..6 {
            let opcode = if page % 2 == 0 { NvmOpcode::READ } else { NvmOpcode::WRITE };
            let sqe = rig.page(opcode, page * 8, page * 8192);
            rig.host.post(1, sqe);
        }
        rig.host.ring_sq(1);
        rig.host.step();
        rig.host.step();
        rig.gpu.finish();
        rig.host.now = Nanos(1000);
        rig.host.step();
        // The slow medium's reads are ready only now; the writes of both were in the first batch.
        let expected: &[usize] = if options.is_some() { &[3, 3] } else { &[6] };
        assert_eq!(rig.gpu.batches(), expected);
        rig.settle();
        assert_eq!(rig.host.reap_all(1).len(), 6);
    }
}

#[test]
fn batches_land_in_any_number_of_steps() {
    let mut rig = Rig::new();
    for round in 0..3 {
        let sqe = rig.page(NvmOpcode::READ, 0, round * 8192);
        rig.send(sqe);
    }
    assert_eq!(rig.gpu.batches(), [1, 1, 1]);
    for left in [2, 1] {
        rig.gpu.run(1);
        rig.host.step();
        assert_eq!((rig.host.reap_all(1).len(), rig.host.step().outstanding), (1, left));
    }
    rig.gpu.run(1);
    rig.host.step();
    assert_eq!(rig.host.reap_all(1).len(), 1);
}

#[test]
fn transfers_wait_for_memory_in_between() {
    let big = 24 << 20;
    let bytes = media(4 * big as u64);
    let mut rig = Rig::with(|mut config| {
        config.namespaces.clear();
        EmuConfig { mdts_bytes: None, ..config }.namespace(bytes.clone(), 4096)
    });
    let (memory, device) = rig.gpu.alloc(4 * big);
    let memory = rig.host.domain.import(memory).unwrap();
    let read = |index: u64, len: usize| {
        let to = SglDescriptor::data_block(at(&memory).0 + index * big as u64, len as u32);
        nvm(NvmOpcode::READ, index * big as u64 / 4096, len as u32 / 4096).with_sgl(to)
    };
    for index in 0..4 {
        bytes.poke(index * big as u64, &vec![index as u8 + 1; big]).unwrap();
        rig.host.post(1, read(index, big));
    }
    rig.host.ring_sq(1);
    rig.host.step();
    let progress = rig.host.step();
    assert_eq!((rig.gpu.batches(), progress.outstanding), (vec![2], 4), "two fit into 64 MiB");
    rig.settle();
    assert_eq!(rig.host.reap_all(1).len(), 4);
    // Longer than the pool: it gets its own memory.
    const { assert!(POOL_BYTES < 4 * (24 << 20)) };
    assert_eq!(rig.io(read(0, 4 * big)), Status::SUCCESS);
    for index in 0..4u64 {
        let found = rig.gpu.read(DevicePtr(device.0 + index * big as u64), big);
        assert!(found == vec![index as u8 + 1; big], "{index}");
    }
}

#[test]
fn only_data_of_reads_and_writes_may_be_there() {
    let mut rig = Rig::new();
    let iova = at(&rig.memory);
    let mut byte = [0];
    let fault = rig.host.domain.access().read(iova, &mut byte).unwrap_err();
    assert_eq!(fault.kind, DmaFaultKind::DeviceOnly);
    assert!(fault.to_string().contains("GPU"), "{fault}");
    assert!(rig.host.domain.access().load_acquire32(iova).is_err());
    // Descriptors.
    let host = rig.host.alloc(4 * PAGE);
    let list = nvm(NvmOpcode::READ, 0, 24).with_prps(at(&host).0, iova.0);
    assert_eq!(rig.host.io(list), Status::DATA_TRANSFER_ERROR);
    let segment = nvm(NvmOpcode::READ, 0, 8).with_sgl(SglDescriptor::last_segment(iova.0, 32));
    assert_eq!(rig.host.io(segment), Status::DATA_TRANSFER_ERROR);
    // Admin data.
    let mut identify = command(AdminOpcode::IDENTIFY, 0).with_prps(iova.0, 0);
    Identify { cns: nvme_spec::admin::Cns(1), ..Default::default() }.write_to(&mut identify);
    assert_eq!(rig.host.admin_status(identify), Status::DATA_TRANSFER_ERROR);
    assert_eq!(rig.host.controller.counters().refused_dma, 3);
    // Queues: treated like unmapped memory.
    let cq = rig.host.alloc(PAGE);
    assert_eq!(rig.host.admin_status(create_cq(2, 15, at(&cq))), Status::SUCCESS);
    assert_eq!(rig.host.admin_status(create_sq(2, 15, 2, iova)), Status::SUCCESS);
    rig.host.store_bell(4, 1);
    rig.host.step();
    assert_eq!(rig.host.csts().cfs(), 1);
    assert!(rig.gpu.batches().is_empty(), "nothing was copied");
}

#[test]
fn what_cannot_be_mapped_is_explained() {
    let gpu = Gpu::new();
    let plain = EmuDomain::new("plain");
    let error = plain.import(gpu.alloc(PAGE).0).unwrap_err();
    assert!(matches!(error, DmaError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("with_copies"), "{error}");
    let domain = EmuDomain::with_copies("gpu", Arc::new(Engine(gpu.clone())));
    // SAFETY: it names no memory.
    let nowhere = unsafe { nvme_driver::ExternalMemory::new(None, None, PAGE, Arc::new(())) };
    assert!(matches!(domain.import(nowhere), Err(DmaError::Unsupported { .. })));
    assert!(matches!(domain.import(gpu.alloc(PAGE + 1).0), Err(DmaError::Unaligned { .. })));
    assert_eq!(gpu.allocations(), 0, "refused memory is given back");
    let mapped = domain.import(gpu.alloc(PAGE).0).unwrap();
    assert_eq!(gpu.allocations(), 1);
    drop(mapped);
    assert_eq!(gpu.allocations(), 0);
}

/// Location of a part of a transfer.
#[derive(Debug, Clone, Copy)]
enum Where {
    Host,
    Gpu,
    Nowhere,
}

/// Generates parts of a transfer: location and length.
fn parts() -> impl Strategy<Value = Vec<(Where, usize)>> {
    let place = prop_oneof![Just(Where::Host), Just(Where::Gpu), Just(Where::Nowhere)];
    prop::collection::vec((place, 1usize..3000), 1..12)
}

/// Creates a descriptor per part, scattered over both memories in descending order.
fn scatter(rig: &Rig, host: &Arc<dyn DmaMemory>, parts: &[(Where, usize)]) -> Vec<SglDescriptor> {
    let mut place = POOL as u64;
    let mut describe = |(kind, len): &(Where, usize)| {
        // Sometimes adjacent.
        place -= *len as u64 + u64::from(*len % 3 != 0) * 13;
        let length = *len as u32;
        match kind {
            Where::Host => SglDescriptor::data_block(at(host).0 + place, length),
            Where::Gpu => SglDescriptor::data_block(at(&rig.memory).0 + place, length),
            Where::Nowhere => SglDescriptor {
                identifier: SglKind::BIT_BUCKET.0 << 4,
                length,
                ..SglDescriptor::default()
            },
        }
    };
    parts.iter().map(&mut describe).collect()
}

fn with_medium(kind: u8, dir: &tempfile::TempDir) -> Rig {
    Rig::with(|mut config| {
        config.namespaces.clear();
        let (path, options) = (dir.path().join("medium"), FileOptions::default());
        match kind {
            0 => config.namespace(media(1 << 20), 512),
            1 => config.namespace(SimMedia::new(media(1 << 20), fixed(1000)), 512),
            _ => config.namespace(FileMedia::open(&path, 1 << 20, options).unwrap(), 512),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// For any parts, the bytes arrive in order, and no others are touched.
    #[test]
    fn mixed_transfers_move_the_right_bytes(mut parts in parts(), kind in 0u8..3) {
        let dir = tempfile::tempdir().unwrap();
        let mut rig = with_medium(kind, &dir);
        let host = rig.host.alloc(POOL);
        let total: usize = parts.iter().map(|(_, len)| len).sum();
        // Whole blocks.
        parts.push((Where::Gpu, total.next_multiple_of(512) + 512 - total));
        let lbas = (total.next_multiple_of(512) + 512) as u32 / 512;
        let data = pattern(lbas as usize * 512, kind);

        // A write gathers; a bit bucket in a source counts as empty, so there is none.
        let sources: Vec<_> =
            parts.iter().map(|(kind, len)| match kind {
                Where::Nowhere => (Where::Gpu, *len),
                _ => (*kind, *len),
            }).collect();
        let list = rig.host.alloc(PAGE);
        let descriptors = scatter(&rig, &host, &sources);
        let mut from = 0;
        for ((place, len), descriptor) in sources.iter().zip(&descriptors) {
            let bytes = &data[from..from + len];
            from += len;
            match place {
                Where::Host => rig.host.write(Iova(descriptor.address), bytes),
                _ => {
                    let offset = descriptor.address - at(&rig.memory).0;
                    rig.gpu.write(DevicePtr(rig.device.0 + offset), bytes);
                }
            }
        }
        rig.host.write(at(&list), descriptors.as_bytes());
        let last = SglDescriptor::last_segment(at(&list).0, 16 * descriptors.len() as u32);
        let write = nvm(NvmOpcode::WRITE, 3, lbas).with_sgl(last);
        let read = nvm(NvmOpcode::READ, 3, lbas);
        prop_assert_eq!(rig.io_polled(write), Status::SUCCESS);

        // A plain read returns the gathered bytes.
        let plain = rig.host.alloc(POOL);
        let all = SglDescriptor::data_block(at(&plain).0, lbas * 512);
        prop_assert_eq!(rig.io_polled(read.with_sgl(all)), Status::SUCCESS);
        prop_assert!(rig.host.read(at(&plain), data.len()) == data);

        // A read scatters.
        rig.host.write(at(&host), &[0x55; POOL]);
        rig.gpu.write(rig.device, &[0x55; POOL]);
        let descriptors = scatter(&rig, &host, &parts);
        rig.host.write(at(&list), descriptors.as_bytes());
        let last = SglDescriptor::last_segment(at(&list).0, 16 * descriptors.len() as u32);
        let (mut on_host, mut on_gpu) = (vec![0x55; POOL], vec![0x55; POOL]);
        let mut from = 0;
        for ((place, len), descriptor) in parts.iter().zip(&descriptors) {
            let bytes = &data[from..from + len];
            from += len;
            let (to, base) = match place {
                Where::Host => (&mut on_host, at(&host).0),
                Where::Gpu => (&mut on_gpu, at(&rig.memory).0),
                Where::Nowhere => continue,
            };
            let offset = (descriptor.address - base) as usize;
            to[offset..offset + len].copy_from_slice(bytes);
        }
        prop_assert_eq!(rig.io_polled(read.with_sgl(last)), Status::SUCCESS);
        prop_assert!(rig.on_gpu(0, POOL) == on_gpu, "on the GPU");
        prop_assert!(rig.host.read(at(&host), POOL) == on_host, "on the host");
    }

    /// GPU pages named by PRPs: a list of pages in any order, half of them on the host.
    #[test]
    fn pages_in_any_order(order in Just((0..16u64).collect::<Vec<_>>()).prop_shuffle()) {
        let mut rig = Rig::new();
        let (host, list) = (rig.host.alloc(POOL), rig.host.alloc(PAGE));
        rig.host.media.poke(0, &pattern(POOL, 7)).unwrap();
        let address = |page: &u64| {
            let memory = if page.is_multiple_of(2) { &host } else { &rig.memory };
            at(memory).0 + page * PAGE as u64
        };
        let entries: Vec<u64> = order.iter().map(address).collect();
        rig.host.write(at(&list), entries[1..].as_bytes());
        let lbas = POOL as u32 / 512;
        let sqe = nvm(NvmOpcode::READ, 0, lbas).with_prps(entries[0], at(&list).0);
        prop_assert_eq!(rig.io(sqe), Status::SUCCESS);
        for (index, page) in order.iter().enumerate() {
            let offset = page * PAGE as u64;
            let found = match page % 2 {
                0 => rig.host.read(at(&host).offset(offset), PAGE),
                _ => rig.on_gpu(offset, PAGE),
            };
            let from = index * PAGE;
            prop_assert!(found == pattern(POOL, 7)[from..from + PAGE], "page {}", page);
        }
    }
}

impl Rig {
    /// Same as [`Rig::io`] for media that work on their own, in real time.
    fn io_polled(&mut self, sqe: Sqe) -> Status {
        let cid = self.host.send(1, sqe);
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(600) {
            self.settle();
            if let Some(cqe) = self.host.reap(1) {
                self.host.ring_cq(1);
                assert_eq!(cqe.cid, cid);
                return cqe.status().code();
            }
            std::thread::yield_now();
        }
        panic!("no completion");
    }
}
