//! Drives, their driver, a ring and a pool; and what is done with them by each executor.

#![allow(clippy::print_stdout, reason = "a measurement")]

use gio_uring::{
    Affine, AffineOp, Direction, Fault, IoExecutor, PoolDesc, PoolHandle, Uring, UringOptions,
};
use nvme_driver::{
    Controller, ControllerOptions, DmaSlice, DmaSpace, Nanos, Place, QueueGrant,
    platform::buffer::Buffer,
};
use nvme_emu::{FaultAction, FaultPlan, FaultRule, FaultWhen};
use nvme_spec::ids::{Nsid, QueueId};
use ripieno_testkit::{Drives, WATCHDOG_NS, until};

const NS: Nsid = Nsid(1);

pub struct Stack {
    // Dropped first: the driver shuts the controllers down, which must still be running.
    pub controllers: Vec<Controller>,
    pub drives: Drives,
    queues: Vec<Vec<QueueId>>,
}

impl Stack {
    /// With `parts` queues of `depth` each on every drive.
    pub fn over(drives: Drives, parts: usize, depth: u32) -> Self {
        let options = ControllerOptions { io_queues: parts as u16, ..ControllerOptions::default() };
        let mut controllers = drives.attach(&options);
        let create = |controller: &mut Controller| {
            let create = |_| controller.create_queue_pair(depth).expect("a queue");
            (0..parts).map(create).collect()
        };
        let queues = controllers.iter_mut().map(create).collect();
        Self { drives, controllers, queues }
    }

    pub fn grants(&mut self) -> Vec<(u32, QueueGrant)> {
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

    pub fn ring(&mut self, executor: Box<dyn IoExecutor>, options: UringOptions) -> Uring {
        let grants = self.grants();
        Uring::init_queue(16, executor, self.drives.clock.clone(), &grants, options)
            .expect("a ring")
    }

    pub fn pool(&self, ring: &mut Uring, rows: u32, blocks: u32, object_bytes: u32) -> Pool {
        let devices = self.drives.emus.len() as u32;
        let len = rows as usize * blocks as usize * object_bytes as usize;
        let memory =
            DmaSlice::whole(self.drives.domain.alloc(len).expect("memory")).expect("one range");
        let row_bytes = blocks as usize * object_bytes as usize;
        let row = |row| {
            let at = row as usize * row_bytes;
            DmaSlice::new(memory.memory().clone(), at, row_bytes).expect("inside").place()
        };
        let row_memory: Vec<Place> = (0..rows).map(row).collect();
        let desc = PoolDesc {
            row_iova: row_memory.iter().map(|place| place.iova).collect(),
            row_memory,
            data_lba: vec![8; devices as usize],
            block_stride: u64::from(object_bytes),
            blocks,
            files: blocks,
            group: devices * 16,
            object_bytes,
            slot_bytes: object_bytes,
            run_bytes: 512 << 10,
            pad_read: None,
            pad_write: None,
        };
        let handle = ring.register_pool(&desc).expect("a pool");
        Pool { handle, memory: Buffer::new(memory).expect("reachable"), rows, blocks, object_bytes }
    }
}

pub struct Pool {
    pub handle: PoolHandle,
    pub memory: Buffer,
    pub rows: u32,
    pub blocks: u32,
    pub object_bytes: u32,
}

impl Pool {
    pub fn fill(&mut self, salt: u32) {
        let len = self.rows as usize * self.blocks as usize * self.object_bytes as usize;
        for (index, at) in (0..len).step_by(4096).enumerate() {
            let word = (index as u32 ^ salt).wrapping_mul(0x9e37_79b9).to_le_bytes();
            self.memory.write(at, &word).expect("in the pool");
        }
    }

    pub fn word(&self, row: u32, block: u32) -> u32 {
        let object = row as usize * self.blocks as usize + block as usize;
        let mut word = [0; 4];
        self.memory.read(object * self.object_bytes as usize, &mut word).expect("in the pool");
        u32::from_le_bytes(word)
    }
}

/// Runs every row of `map`, one operation per row, all of them in flight.
pub fn all_rows(ring: &mut Uring, pool: &Pool, direction: Direction, map: &[Affine]) -> (u64, u32) {
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
pub fn round_trip(mut stack: Stack, executor: Box<dyn IoExecutor>, options: UringOptions) {
    let mut ring = stack.ring(executor, options);
    let mut pool = stack.pool(&mut ring, 12, 96, 8192);
    pool.fill(7);
    let n = pool.blocks;
    let objects = u64::from(n * pool.rows);
    let written = |row: u32, block: u32| {
        let page = (row * n + block) * 2;
        (page ^ 7).wrapping_mul(0x9e37_79b9)
    };
    let to: Vec<Affine> = (0..n).map(|i| Affine { block: i * 37 % n, file: i }).collect();
    assert_eq!(all_rows(&mut ring, &pool, Direction::Write, &to), (objects, 0));
    pool.fill(99);
    let back: Vec<Affine> = (0..n).map(|i| Affine { block: i, file: i * 5 % n }).collect();
    assert_eq!(all_rows(&mut ring, &pool, Direction::Read, &back), (objects, 0));
    for (row, entry) in (0..pool.rows).flat_map(|row| back.iter().map(move |e| (row, e))) {
        let from = entry.file * 37 % n;
        assert_eq!(pool.word(row, entry.block), written(row, from), "row {row}, {entry:?}");
    }
    assert!(ring.faulted().is_none());
    let counters = ring.counters();
    let deadline = ring.now() + WATCHDOG_NS;
    let proof = ring.stop(deadline).expect("stops");
    for (controller, queues) in stack.controllers.iter_mut().zip(&stack.queues) {
        for queue in queues {
            controller.reclaim(*queue, &proof).expect("taken back");
        }
    }
    println!("{counters:?}");
}

/// A command is lost; its queue fails; driver and ring recover; the same operation then succeeds.
/// With either executor.
pub fn lost_command(mut stack: Stack, executor: Box<dyn IoExecutor>, virtual_time: bool) {
    let options = UringOptions {
        command_timeout: Nanos::from_millis(200),
        virtual_time,
        ..UringOptions::default()
    };
    let mut ring = stack.ring(executor, options);
    let pool = stack.pool(&mut ring, 2, 64, 4096);
    let when = FaultWhen { admin: Some(false), nth: Some(3), ..FaultWhen::default() };
    let rules = vec![FaultRule::new(when, FaultAction::Drop).limit(1)];
    stack.drives.emus[0].set_faults(FaultPlan { seed: 1, rules, ..FaultPlan::default() });
    // Every other file, so that nothing is merged and there are enough commands.
    let map: Vec<Affine> = (0..32).map(|i| Affine { block: i, file: 2 * i }).collect();
    let (objects, errors) = all_rows(&mut ring, &pool, Direction::Read, &map);
    assert!(errors > 0 && objects < 64, "{objects} objects, {errors} errors");
    assert!(ring.faulted().is_some());
    let deadline = ring.now() + WATCHDOG_NS;
    let proof = ring.stop(deadline).expect("stops, because nothing is waited for any more");
    stack.controllers[0].recover(&proof).expect("recovers");
    let grants = stack.grants();
    ring.restart(&grants).expect("starts again");
    // On a busy machine a good command may time out: then it recovers again.
    until("the same operation succeeds", || {
        let found = all_rows(&mut ring, &pool, Direction::Read, &map);
        let Some(faulted) = ring.faulted() else {
            assert_eq!(found, (64, 0));
            return true;
        };
        assert_eq!(faulted.fault, Fault::Timeout);
        let proof = ring.stop(ring.now() + WATCHDOG_NS).expect("stops");
        stack.controllers[0].recover(&proof).expect("recovers");
        let grants = stack.grants();
        ring.restart(&grants).expect("starts again");
        false
    });
}
