//! Queues, descriptors and data in the memory of another device, which stands in for a GPU. The CPU
//! moves none of the bytes, and the host sees them in the file behind that memory.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use nvme_driver::platform::p2p;
use nvme_driver::platform::vfio::{PeerBar, VfioSpace};
use nvme_driver::{
    Controller, ControllerOptions, DescriptorPreference, DevicePtr, DmaSlice, DmaSpace, IovaRange,
};
use nvme_spec::ids::Lba;
use nvme_spec::nvm::NvmOpcode;

use crate::drive::{
    FIRST, SECOND, alone, attach, bus, bytes_of, fill, options, pattern, range, same, space,
};
use crate::hardware::{BAR_BYTES, DRIVE_A, DRIVE_B, FILE_A, FILE_B, FILE_BAR, PEER};
use crate::host::{self, Host};
use crate::queue::{Queue, queue_bytes, queue_memory};
use crate::runner::{SECONDS_MAX, Suite, tests};
use crate::stray::{NOWHERE, Stray};

pub const SUITE: Suite = Suite {
    name: "peer",
    seconds_max: SECONDS_MAX,
    tests: tests![
        both_drives_are_shown_to_reach_it,
        what_cannot_be_reached_is_not_taken_for_reached,
        data_goes_in_and_out,
        a_part_of_the_bar,
        gpu_memory_is_aligned_like_on_the_gpu,
        queues_and_descriptors_live_there,
        thousands_of_commands_from_there,
        blocks_scattered_all_over,
        from_drive_to_drive_past_main_memory,
        everything_is_given_back,
    ],
};

const BAR: u8 = 2;

/// Both drives and the peer in one address space.
struct Peers {
    space: Arc<VfioSpace>,
    a: Controller,
    b: Controller,
    bar: PeerBar,
}

impl Peers {
    fn open(descriptors: DescriptorPreference) -> Result<Self> {
        let space = space()?;
        let options = ControllerOptions { descriptors, ..options() };
        let a = attach(&bus(&space, DRIVE_A)?, options.clone())?;
        let b = attach(&bus(&space, DRIVE_B)?, options)?;
        let bar = PeerBar::open(&space, PEER.parse()?, BAR, None)?;
        Ok(Self { space, a, b, bar })
    }

    /// Returns `len` bytes of the peer's memory from `offset` on.
    fn slice(&self, offset: usize, len: usize) -> Result<DmaSlice> {
        Ok(DmaSlice::new(self.bar.memory().clone(), offset, len)?)
    }
}

fn both_drives_are_shown_to_reach_it() -> Result<()> {
    for descriptors in [DescriptorPreference::Prp, DescriptorPreference::Sgl] {
        let mut peers = Peers::open(descriptors)?;
        let scratch = peers.slice(0, p2p::scratch_bytes(&peers.a))?;
        for (is_b, nsid) in [(false, FIRST), (true, FIRST), (true, SECOND)] {
            let drive = if is_b { &mut peers.b } else { &mut peers.a };
            let report = p2p::prove(drive, nsid, &scratch)?;
            let all = report.checks.iter().all(|(_, outcome)| *outcome == p2p::Outcome::Works);
            ensure!(report.is_ok() && all && report.checks.len() == 4, "{report}");
        }
    }
    Ok(())
}

/// Ordinary memory at an address unknown to the IOMMU, like a faulty platform. The drive's commands
/// succeed; only the bytes reveal it.
fn what_cannot_be_reached_is_not_taken_for_reached() -> Result<()> {
    let mut peers = Peers::open(DescriptorPreference::Sgl)?;
    let stray = Stray::new(p2p::scratch_bytes(&peers.a), crate::stray::NOWHERE)?;
    let report = p2p::prove(&mut peers.a, FIRST, &stray.slice()?)?;
    ensure!(!report.is_ok(), "{report}");
    ensure!(report.why().is_some_and(|why| !why.is_empty()), "{report}");
    // The drive still works.
    let scratch = peers.slice(0, p2p::scratch_bytes(&peers.a))?;
    ensure!(p2p::prove(&mut peers.a, FIRST, &scratch)?.is_ok());
    Ok(())
}

/// Small and large transfers at odd offsets, as seen by the CPU, the host and the drive.
fn data_goes_in_and_out() -> Result<()> {
    let mut peers = Peers::open(DescriptorPreference::Sgl)?;
    let mut host = Host::open()?;
    for (offset, len, seed) in [(0, 512, 1), (12_345, 4096, 2), (40 << 20, 1 << 20, 3)] {
        let expected = pattern(seed, len);
        let slice = peers.slice(offset, len)?;
        fill(&slice, &expected)?;
        let found = host.hash(FILE_BAR, offset as u64, len)?;
        ensure!(found == host::hash(&expected), "the CPU's bytes are not in the peer's memory");
        peers.a.write_dma(FIRST, Lba(5000), std::slice::from_ref(&slice), false)?;
        let found = host.hash(FILE_A, 5000 * 512, len)?;
        ensure!(found == host::hash(&expected), "{len} bytes at {offset} did not get to the drive");
        fill(&slice, &vec![0; len])?;
        peers.a.read_dma(FIRST, Lba(5000), std::slice::from_ref(&slice))?;
        let found = host.hash(FILE_BAR, offset as u64, len)?;
        ensure!(found == host::hash(&expected), "{len} bytes at {offset} did not come back");
        same("as the CPU sees it", &bytes_of(&slice)?, &expected)?;
    }
    Ok(())
}

fn a_part_of_the_bar() -> Result<()> {
    let space = space()?;
    let mut drive = attach(&bus(&space, DRIVE_A)?, options())?;
    let (from, len) = (3 << 20, 128 << 10);
    let part = PeerBar::open(&space, PEER.parse()?, BAR, Some(from..from + len as u64))?;
    ensure!(part.len() == len, "{part:?}");
    let expected = pattern(10, len);
    drive.write(FIRST, Lba(9000), &expected, false)?;
    drive.read_dma(FIRST, Lba(9000), &[DmaSlice::whole(part.memory().clone())?])?;
    let found = Host::open()?.hash(FILE_BAR, from, len)?;
    ensure!(found == host::hash(&expected), "the bytes are somewhere else");
    let too_far = PeerBar::open(&space, PEER.parse()?, BAR, Some(0..2 * BAR_BYTES));
    ensure!(too_far.is_err(), "twice the BAR");
    ensure!(PeerBar::open(&space, PEER.parse()?, 5, None).is_err(), "a BAR that it does not have");
    Ok(())
}

/// The IOMMU can use large pages only where I/O virtual addresses are aligned like physical ones:
/// for GPU memory, like the GPU's own addresses, whatever the address in this process is.
fn gpu_memory_is_aligned_like_on_the_gpu() -> Result<()> {
    const LARGE: u64 = 2 << 20;
    let (space, _drive) = alone(DRIVE_A, options())?;
    for phase in [0, 64 << 10] {
        let device = DevicePtr((7 << 40) + phase);
        let memory = space.import(Stray::new(4 << 20, NOWHERE)?.on_gpu(device, LARGE / 2))?;
        let iova = memory.segments()[0].iova;
        ensure!(iova.0 % LARGE == phase, "{iova} for {device:?}");
    }
    Ok(())
}

/// No part of a queue pair is in main memory: the drive fetches commands and segments from the
/// peer, moves the data there, and posts its completions there.
fn queues_and_descriptors_live_there() -> Result<()> {
    let mut peers = Peers::open(DescriptorPreference::Sgl)?;
    let memory = queue_memory(&peers.slice(1 << 20, queue_bytes(64))?, 64)?;
    let areas = memory.descriptors.iova();
    let mut queue = Queue::make(&mut peers.a, memory, FIRST)?;
    // More blocks than a segment holds: a chain, in the peer's memory.
    let (blocks, len) = (300, 1024);
    let (base, expected) = (16 << 20, pattern(20, 300 * 1024));
    let mut parts: Vec<IovaRange> = Vec::new();
    for (index, piece) in expected.chunks(len).enumerate() {
        // Odd offsets in reverse order.
        let slice = peers.slice(base + (blocks - 1 - index) * (len + 31) + 1, len)?;
        fill(&slice, piece)?;
        parts.push(range(&slice));
    }
    let lbas = (expected.len() / 512) as u32;
    queue.run(NvmOpcode::WRITE, FIRST, (20_000, lbas), &parts)?;
    let found = Host::open()?.hash(FILE_A, 20_000 * 512, expected.len())?;
    ensure!(found == host::hash(&expected), "what was gathered is not on the drive");
    let back = peers.slice(32 << 20, expected.len())?;
    queue.run(NvmOpcode::READ, FIRST, (20_000, lbas), &[range(&back)])?;
    same("read back", &bytes_of(&back)?, &expected)?;
    let first = peers.bar.memory().segments()[0].iova;
    ensure!(areas.0 >= first.0 && areas.0 < first.0 + BAR_BYTES, "descriptors in main memory");
    queue.give_back(&mut peers.a)
}

/// A small KV pool: many objects, in batches, through rings that wrap many times.
fn thousands_of_commands_from_there() -> Result<()> {
    const OBJECT: usize = 4096;
    const BATCH: u64 = 31;
    let mut peers = Peers::open(DescriptorPreference::Sgl)?;
    let memory = queue_memory(&peers.slice(0, queue_bytes(32))?, 32)?;
    let mut queue = Queue::make(&mut peers.b, memory, FIRST)?;
    let (pool, objects) = (8 << 20, BATCH * 40);
    let all = pattern(30, objects as usize * OBJECT);
    fill(&peers.slice(pool, all.len())?, &all)?;
    for (opcode, to) in [(NvmOpcode::WRITE, pool), (NvmOpcode::READ, 2 * pool)] {
        for batch in 0..objects / BATCH {
            for index in batch * BATCH..(batch + 1) * BATCH {
                // Objects change their order on the way to the drive, and back.
                let lba = objects - 1 - index;
                let slice = peers.slice(to + index as usize * OBJECT, OBJECT)?;
                queue.post(opcode, FIRST, (lba, 1), &[range(&slice)], index)?;
            }
            queue.ring();
            for completion in queue.wait(BATCH as usize)? {
                ensure!(completion.status.is_success(), "{completion:?}");
            }
        }
    }
    let mut host = Host::open()?;
    let found = host.hash(FILE_BAR, 2 * pool as u64, all.len())?;
    ensure!(found == host::hash(&all), "the objects did not come back as they went");
    let turned: Vec<u8> = all.chunks(OBJECT).rev().flatten().copied().collect();
    let found = host.hash(FILE_B[0], 0, turned.len())?;
    ensure!(found == host::hash(&turned), "the drive has something else");
    queue.give_back(&mut peers.b)
}

/// The driver's own queue with parts in both the peer's memory and main memory.
fn blocks_scattered_all_over() -> Result<()> {
    let mut peers = Peers::open(DescriptorPreference::Sgl)?;
    let main = crate::drive::memory(&**peers.a.bus(), 64 << 10)?;
    let (mut parts, mut total) = (Vec::new(), 0);
    for index in 0..40_usize {
        let len = 1000 + index;
        parts.push(match index % 3 {
            0 => main.slice(index * 1100, len)?,
            _ => peers.slice((40 - index) * 100_003, len)?,
        });
        total += len;
    }
    parts.push(peers.slice(60 << 20, total.next_multiple_of(512) - total)?);
    let expected = pattern(40, total.next_multiple_of(512));
    peers.a.write(FIRST, Lba(33_000), &expected, false)?;
    peers.a.read_dma(FIRST, Lba(33_000), &parts)?;
    let mut found = Vec::new();
    for part in &parts {
        found.extend(bytes_of(part)?);
    }
    same("parts in two memories", &found, &expected)
}

fn from_drive_to_drive_past_main_memory() -> Result<()> {
    let mut peers = Peers::open(DescriptorPreference::Prp)?;
    let expected = pattern(50, 2 << 20);
    peers.a.write(FIRST, Lba(0), &expected, false)?;
    let between = peers.slice(20 << 20, expected.len())?;
    peers.a.read_dma(FIRST, Lba(0), std::slice::from_ref(&between))?;
    peers.b.write_dma(SECOND, Lba(100), std::slice::from_ref(&between), true)?;
    let mut host = Host::open()?;
    for (file, offset) in [(FILE_A, 0), (FILE_BAR, 20 << 20), (FILE_B[1], 100 * 512)] {
        let found = host.hash(file, offset, expected.len()).context(file)?;
        ensure!(found == host::hash(&expected), "{file} has something else");
    }
    Ok(())
}

fn everything_is_given_back() -> Result<()> {
    let peers = Peers::open(DescriptorPreference::Auto)?;
    let (space, memory) = (peers.space.clone(), peers.bar.memory().clone());
    drop(peers);
    // The memory's last owner keeps it mapped, and its function open.
    ensure!(space.status().mappings == 1 && space.status().groups == 1, "{:?}", space.status());
    drop(memory);
    ensure!(space.status().mappings == 0 && space.status().groups == 0, "{:?}", space.status());
    Ok(())
}
