//! The kernel with its real neighbours: driver, software controller, ring, and each executor.

#![allow(clippy::print_stdout, reason = "a measurement, and the seed of a failure")]

use std::sync::Arc;

use gio_kernels::{HostExecutor, HostOptions, InlineExecutor};
use gio_uring::{Affine, AffineOp, Direction, IoCtx, IoExecutor, UringOptions};
use nvme_driver::{DmaSlice, DmaSpace, Nanos, platform::buffer::Buffer};
use nvme_emu::{EmuDomain, FaultAction, FaultRule, FaultWhen, SimClock};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng, seq::SliceRandom as _};
use ripieno_testkit::{Drives, WATCHDOG_NS, memory_drives, pattern, seeds, set_faults};

mod checksums;
mod files;
mod rig;

use rig::{Stack, lost_command, round_trip};

impl Stack {
    /// Creates `devices` drives of `bytes` each, with `parts` queues of `depth` each. Driven by
    /// `sim` if given, otherwise by threads.
    pub fn new(
        devices: usize,
        parts: usize,
        depth: u32,
        bytes: u64,
        sim: Option<&Arc<SimClock>>,
    ) -> Self {
        let (domain, configs) = (EmuDomain::new("stack"), memory_drives(devices, bytes, 4096));
        let drives = match sim {
            Some(sim) => Drives::simulated(domain, configs, sim),
            None => Drives::threaded(domain, configs),
        };
        Self::over(drives, parts, depth)
    }
}

#[test]
fn host_threads_move_the_right_bytes() {
    for (devices, parts, threads) in [(1, 1, 1), (2, 2, 2), (2, 1, 1)] {
        let stack = Stack::new(devices, parts, 32, 64 << 20, None);
        let options = HostOptions { threads: Some(threads) };
        let executor = HostExecutor::new(options, stack.drives.clock.clone());
        round_trip(stack, Box::new(executor), UringOptions::default());
    }
}

#[test]
fn inline_in_virtual_time_moves_the_right_bytes() {
    for seed in [1, 2, 3] {
        let sim = SimClock::new(seed);
        let stack = Stack::new(3, 1, 16, 64 << 20, Some(&sim));
        let executor = InlineExecutor::new(stack.drives.clock.clone());
        let options = UringOptions { virtual_time: true, ..UringOptions::default() };
        round_trip(stack, Box::new(executor), options);
    }
}
#[test]
fn a_lost_command_is_recovered_from_with_host_threads() {
    let stack = Stack::new(1, 1, 64, 16 << 20, None);
    let executor = HostExecutor::new(HostOptions::default(), stack.drives.clock.clone());
    lost_command(stack, Box::new(executor), false);
}

#[test]
fn a_lost_command_is_recovered_from_in_virtual_time() {
    let sim = SimClock::new(5);
    let stack = Stack::new(1, 1, 64, 16 << 20, Some(&sim));
    let executor = InlineExecutor::new(stack.drives.clock.clone());
    lost_command(stack, Box::new(executor), true);
}

/// Controllers that never answer: the stop fails at its deadline, and succeeds after the commands'
/// own timeout.
#[test]
fn a_stop_that_cannot_succeed_says_so_and_can_be_tried_again() {
    // If the machine is so slow that the commands time out before the first stop, they get more.
    assert!([400, 4_000, 40_000].iter().any(|ms| stops_later(Nanos::from_millis(*ms))));
}

/// Returns false if the first stop came too late.
fn stops_later(command_timeout: Nanos) -> bool {
    let mut stack = Stack::new(1, 2, 16, 16 << 20, None);
    let executor = HostExecutor::new(HostOptions { threads: Some(2) }, stack.drives.clock.clone());
    let options = UringOptions { command_timeout, ..UringOptions::default() };
    let mut ring = stack.ring(Box::new(executor), options);
    stack.drives.runner = None; // the controllers stand still
    let pool = stack.pool(&mut ring, 1, 8, 4096);
    let map = ring.upload_map(&[Affine { block: 0, file: 0 }], 1).expect("a map");
    let op = AffineOp::new(Direction::Read, &map, &pool.handle, 0..1);
    let id = ring.submit(&op).expect("submitted");
    while ring.counters().total.commands == 0 {
        std::thread::yield_now();
    }
    let soon = ring.now() + Nanos::from_millis(20);
    let is_held_up = ring.stop(soon).is_err();
    let later = ring.now() + WATCHDOG_NS;
    if is_held_up {
        ring.stop(later).expect("given up by now");
    }
    let done = ring.wait_completion(id, later).expect("completed");
    assert_eq!((done.objects, done.errors), (0, 1));
    // The controllers must run to be shut down by their driver.
    stack.drives.run();
    is_held_up
}

/// Memory slots of the explicit lists; each drive has as many slots of four LBAs.
const SLOTS: usize = 64;
const SLOT_BYTES: usize = 20 << 10;

/// Random lists of contexts, several in flight, against a model of memory and drives. No two lists
/// of a round share a slot, so their completion order does not matter. `on_files`: by the file
/// executor, and without faults.
fn explicit_lists(seed: u64, on_files: bool) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let (sim, devices) = (SimClock::new(seed), rng.random_range(1..=3));
    let (parts, depth) = (rng.random_range(1..=2), 16 << rng.random_range(0..3));
    let sim = (!on_files).then_some(sim);
    let mut stack = Stack::new(devices, parts, depth, 1 << 20, sim.as_ref());
    let options = UringOptions { virtual_time: !on_files, ..UringOptions::default() };
    let executor: Box<dyn IoExecutor> = match sim {
        Some(sim) => Box::new(InlineExecutor::new(sim)),
        None => Box::new(files::Files::new(devices, 1 << 20).executor(&stack)),
    };
    let mut ring = stack.ring(executor, options);
    let memory = stack.drives.domain.alloc(SLOTS * SLOT_BYTES).expect("memory");
    let slice = DmaSlice::whole(memory).expect("one range");
    let (iova, mut memory) = (slice.iova().0, Buffer::new(slice).expect("reachable"));
    let (mut ram, mut found) = (pattern(SLOTS * SLOT_BYTES, seed), vec![0; SLOTS * SLOT_BYTES]);
    memory.write(0, &ram).expect("inside");
    let mut disks = vec![vec![0; SLOTS * 4 * 4096]; devices];
    let error = FaultAction::Status { code: 0x281, dnr: true };
    let when = FaultWhen { admin: Some(false), probability: Some(0.05), ..FaultWhen::default() };
    set_faults(&stack.drives.emus, Some(FaultRule::new(when, error)));
    let mut failed = 0;
    for round in 0..30 {
        let mut slots: Vec<usize> = (0..SLOTS).collect();
        let mut places: Vec<(u32, u64)> = (0..devices as u32)
            .flat_map(|device| (0..SLOTS as u64).map(move |slot| (device, 4 * slot)))
            .collect();
        slots.shuffle(&mut rng);
        places.shuffle(&mut rng);
        let mut submit = |_| {
            let count = rng.random_range(1..=SLOTS / 4);
            let contexts: Vec<IoCtx> = (0..count)
                .map(|_| {
                    let (slot, (device, lba)) = (slots.pop().unwrap(), places.pop().unwrap());
                    let bytes = rng.random_range(1..=4) * 4096;
                    let spare = (SLOT_BYTES - bytes as usize) / 4;
                    let at = slot * SLOT_BYTES + 4 * rng.random_range(0..=spare);
                    IoCtx { iova: iova + at as u64, lba, bytes, device }
                })
                .collect();
            let direction = [Direction::Read, Direction::Write][rng.random_range(0..2)];
            let id = ring.submit_explicit(direction, rng.random_bool(0.2), &contexts);
            (id.expect("submitted"), direction, contexts)
        };
        let pending: Vec<_> = (0..4).map(&mut submit).collect();
        for (id, direction, contexts) in pending.into_iter().rev() {
            let deadline = ring.now() + WATCHDOG_NS;
            let done = ring.wait_completion(id, deadline).expect("done in time");
            let statuses = ring.iocb_status(id).expect("explicit");
            let moved = statuses.iter().filter(|status| status.is_ok()).count();
            assert_eq!((done.objects, done.is_ok()), (moved as u64, moved == contexts.len()));
            failed += contexts.len() - moved;
            for (context, _) in contexts.iter().zip(statuses).filter(|(_, s)| s.is_ok()) {
                let at = (context.iova - iova) as usize;
                let (ram, disk) = (&mut ram[at..], &mut disks[context.device as usize]);
                let disk = &mut disk[context.lba as usize * 4096..];
                let (ram, disk) =
                    (&mut ram[..context.bytes as usize], &mut disk[..context.bytes as usize]);
                match direction {
                    Direction::Read => ram.copy_from_slice(disk),
                    Direction::Write => disk.copy_from_slice(ram),
                }
            }
        }
        memory.read(0, &mut found).expect("inside");
        assert!(found == ram, "seed {seed}, round {round}");
    }
    assert!((failed > 0) != on_files, "seed {seed}: {failed} contexts failed");
    ring.stop(ring.now() + WATCHDOG_NS).expect("stops");
}

#[test]
fn explicit_lists_do_what_they_say() {
    for seed in seeds(1, 8) {
        println!("seed {seed}");
        explicit_lists(seed, false);
        explicit_lists(seed, true);
    }
}
