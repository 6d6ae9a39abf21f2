//! A strict model of a controller: it rejects no command; any command that violates the kernel's
//! rules fails an assertion.
//!
//! Commands are fetched in order and completed in any order; data pointers are walked only at
//! completion, so an SGL or PRP list that was overwritten too early is detected.

use std::collections::VecDeque;

use crate::memory::{Memory, Random, Region};

/// A faulty completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mischief {
    /// Status field (without phase); no data is transferred.
    Status(u16),
    /// No completion; the command can be completed later.
    Drop,
    /// Posted twice.
    Duplicate,
    /// With this CID.
    Cid(u16),
    /// With the previous generation.
    OldGeneration,
    /// Of another queue.
    Sqid(u16),
    /// With this SQ head.
    Sqhd(u16),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command {
    pub sqe: [u64; 8],
}

impl Command {
    pub fn cid(&self) -> u16 {
        (self.sqe[0] >> 16) as u16
    }
    pub fn opcode(&self) -> u32 {
        (self.sqe[0] & 0xff) as u32
    }
    pub fn lba(&self) -> u64 {
        self.sqe[5]
    }
    pub fn lbas(&self) -> u64 {
        (self.sqe[6] & 0xffff) + 1
    }
    pub fn fua(&self) -> bool {
        self.sqe[6] >> 30 & 1 == 1
    }
    /// Returns the directive type and the directive-specific field.
    pub fn directive(&self) -> (u64, u64) {
        (self.sqe[6] >> 20 & 0xf, self.sqe[6] >> 48)
    }
    pub fn uses_sgl(&self) -> bool {
        self.sqe[0] >> 14 & 3 == 1
    }
}

/// A part of a data pointer: memory, or a bit bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    pub address: Option<u64>,
    pub len: u64,
}

#[derive(Debug)]
pub struct Queue {
    pub qid: u16,
    pub depth_log2: u32,
    pub sq: u64,
    pub cq: u64,
    pub sq_doorbell: u64,
    pub cq_doorbell: u64,
    pub descriptors: Region,
    pub descriptor_bytes: u64,
    pub sq_head: u64,
    pub cq_tail: u64,
    cq_head: u64,
    pub pending: Vec<Command>,
    /// Commands whose completion was dropped.
    pub dropped: Vec<Command>,
    /// Every command, in the order of the queue.
    pub log: Vec<Command>,
    pub mischief: VecDeque<Option<Mischief>>,
}

/// Rules for the commands of a device.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub nsid: u32,
    pub lba_shift: u32,
    pub lbas: u64,
    pub transfer_bytes_max: u64,
    pub sgl: bool,
    pub bit_bucket: bool,
    pub page_bytes: u64,
}

#[derive(Debug)]
pub struct Device {
    pub rules: Rules,
    pub media: Vec<u8>,
    pub queues: Vec<Queue>,
    /// Completes nothing while set.
    pub stalled: bool,
    /// Maximum commands per queue that one step completes.
    pub at_once: u64,
    /// Completes commands in the order in which they came.
    pub in_order: bool,
}

impl Queue {
    pub fn new(qid: u16, depth_log2: u32, memory: &mut Memory, descriptor_bytes: u64) -> Self {
        let depth = 1u64 << depth_log2;
        let descriptors = memory.take(depth * descriptor_bytes, 4096);
        Self {
            qid,
            depth_log2,
            sq: memory.take(depth * 64, 4096).address,
            cq: memory.take(depth * 16, 4096).address,
            sq_doorbell: memory.take(4, 4).address,
            cq_doorbell: memory.take(4, 4).address,
            descriptors,
            descriptor_bytes,
            sq_head: 0,
            cq_tail: 0,
            cq_head: 0,
            pending: Vec::new(),
            dropped: Vec::new(),
            log: Vec::new(),
            mischief: VecDeque::new(),
        }
    }

    fn depth(&self) -> u64 {
        1 << self.depth_log2
    }

    fn fetch(&mut self, memory: &Memory) -> bool {
        let tail = u64::from(memory.peek::<u32>(self.sq_doorbell));
        assert!(tail < self.depth(), "SQ doorbell {tail} of {}", self.depth());
        let before = self.log.len();
        while self.sq_head % self.depth() != tail {
            let at = self.sq + self.sq_head % self.depth() * 64;
            let sqe = std::array::from_fn(|i| memory.peek::<u64>(at + i as u64 * 8));
            let command = Command { sqe };
            let same = |other: &Command| other.cid() == command.cid();
            assert!(!self.pending.iter().any(same), "CID {:#x} is in use", command.cid());
            self.pending.push(command);
            self.log.push(command);
            self.sq_head += 1;
        }
        let held = self.pending.len() + self.dropped.len();
        assert!((held as u64) < self.depth(), "{held} commands in a queue of {}", self.depth());
        self.log.len() != before
    }

    /// Returns the number of entries that may be posted.
    fn room(&mut self, memory: &Memory) -> u64 {
        let head = u64::from(memory.peek::<u32>(self.cq_doorbell));
        assert!(head < self.depth(), "CQ doorbell {head}");
        let moved = head.wrapping_sub(self.cq_head) % self.depth();
        self.cq_head += moved;
        assert!(self.cq_head <= self.cq_tail, "the CQ doorbell passed what was posted");
        self.depth() - 1 - (self.cq_tail - self.cq_head)
    }

    pub fn post(&mut self, memory: &Memory, cid: u16, sqid: u16, sqhd: u16, status: u16) {
        let phase = (self.cq_tail >> self.depth_log2 & 1) ^ 1;
        let at = self.cq + self.cq_tail % self.depth() * 16;
        memory.poke(at + 8, u32::from(sqhd) | u32::from(sqid) << 16);
        let word = u32::from(cid) | (phase as u32) << 16 | u32::from(status) << 17;
        memory.poke(at + 12, word);
        self.cq_tail += 1;
    }

    fn sqhd(&self) -> u16 {
        (self.sq_head % self.depth()) as u16
    }

    /// Posts the completion of a command that was dropped.
    pub fn post_dropped(&mut self, memory: &Memory, index: usize) {
        let command = self.dropped.remove(index);
        self.post(memory, command.cid(), self.qid, self.sqhd(), 0);
    }
}

impl Device {
    /// Fetches commands, and completes some. Returns true if it made progress.
    pub fn step(&mut self, memory: &Memory, random: &mut Random) -> bool {
        let mut moved = false;
        for index in 0..self.queues.len() {
            moved |= self.queues[index].fetch(memory);
            if self.stalled {
                continue;
            }
            let most = self.queues[index].pending.len() as u64;
            let wanted = random.below(most + 1).min(self.at_once);
            for _ in 0..wanted.min(self.queues[index].room(memory)) {
                let at = random.below(self.queues[index].pending.len() as u64) as usize;
                let pending = &mut self.queues[index].pending;
                let command =
                    if self.in_order { pending.remove(0) } else { pending.swap_remove(at) };
                self.complete(memory, index, command);
                moved = true;
            }
        }
        moved
    }

    fn complete(&mut self, memory: &Memory, index: usize, command: Command) {
        let mischief = self.queues[index].mischief.pop_front().flatten();
        if !matches!(mischief, Some(Mischief::Status(_))) {
            self.execute(memory, index, &command);
        }
        let queue = &mut self.queues[index];
        let (cid, qid, sqhd) = (command.cid(), queue.qid, queue.sqhd());
        let post = |queue: &mut Queue, cid, qid, sqhd, status| {
            queue.post(memory, cid, qid, sqhd, status);
        };
        match mischief {
            None => post(queue, cid, qid, sqhd, 0),
            Some(Mischief::Status(status)) => post(queue, cid, qid, sqhd, status),
            Some(Mischief::Drop) => queue.dropped.push(command),
            Some(Mischief::Duplicate) => {
                post(queue, cid, qid, sqhd, 0);
                post(queue, cid, qid, sqhd, 0);
            }
            Some(Mischief::Cid(other)) => post(queue, other, qid, sqhd, 0),
            Some(Mischief::OldGeneration) => {
                post(queue, cid.wrapping_sub(1 << queue.depth_log2), qid, sqhd, 0);
            }
            Some(Mischief::Sqid(other)) => post(queue, cid, other, sqhd, 0),
            Some(Mischief::Sqhd(other)) => post(queue, cid, qid, other, 0),
        }
    }

    /// Transfers the data.
    fn execute(&mut self, memory: &Memory, index: usize, command: &Command) {
        let parts = self.parts(memory, index, command);
        let shift = self.rules.lba_shift;
        let bytes = command.lbas() << shift;
        assert_eq!(parts.iter().map(|p| p.len).sum::<u64>(), bytes, "{command:x?}");
        assert!(bytes <= self.rules.transfer_bytes_max, "{bytes} bytes in one command");
        assert!(command.lba() + command.lbas() <= self.rules.lbas, "beyond the namespace");
        assert_eq!(command.sqe[0] >> 32, u64::from(self.rules.nsid));
        assert_eq!(command.sqe[0] >> 8 & 3, 0, "fused");
        assert_eq!((command.sqe[1], command.sqe[2], command.sqe[7]), (0, 0, 0), "reserved");
        let (kind, specific) = command.directive();
        assert_eq!(command.sqe[6] & !0xffff_0000_40f0_ffff, 0, "reserved in dwords 12 and 13");
        assert!(kind == 2 || (kind, specific) == (0, 0), "a directive that does not exist");
        let mut at = (command.lba() << shift) as usize;
        for part in parts {
            let media = &mut self.media[at..at + part.len as usize];
            match (part.address, command.opcode()) {
                (Some(address), 2) => memory.write(address, media),
                (Some(address), 1) => memory.read(address, media),
                (None, 2) => assert!(self.rules.bit_bucket, "bit bucket"),
                (_, opcode) => panic!("opcode {opcode} with {part:?}"),
            }
            at += part.len as usize;
        }
    }

    /// Walks the data pointer of a command as the specification says.
    pub fn parts(&self, memory: &Memory, index: usize, command: &Command) -> Vec<Part> {
        assert_eq!(command.uses_sgl(), self.rules.sgl);
        assert_eq!(command.sqe[0] >> 15 & 1, 0, "PSDT 10b or 11b");
        let queue = &self.queues[index];
        let slot = u64::from(command.cid()) % queue.depth();
        let address = queue.descriptors.address + slot * queue.descriptor_bytes;
        let area = Region { address, len: queue.descriptor_bytes };
        let pointer = [command.sqe[3], command.sqe[4]];
        if self.rules.sgl {
            sgl(memory, pointer, area)
        } else {
            prp(memory, pointer, area, command.lbas() << self.rules.lba_shift, &self.rules)
        }
    }
}

fn sgl(memory: &Memory, pointer: [u64; 2], area: Region) -> Vec<Part> {
    let entry = |[address, rest]: [u64; 2]| {
        let len = rest & 0xffff_ffff;
        assert_eq!(rest >> 32 & 0xff_ffff, 0, "reserved");
        assert_eq!(rest >> 56 & 0xf, 0, "subtype");
        assert_ne!(len, 0);
        match rest >> 60 {
            0 => Part { address: Some(memory.translate(address, len, &memory.data)), len },
            1 => {
                assert_eq!(address, 0, "a bit bucket has no address");
                Part { address: None, len }
            }
            other => panic!("descriptor type {other}"),
        }
    };
    if pointer[1] >> 60 != 3 {
        return vec![entry(pointer)];
    }
    let len = pointer[1] & 0xffff_ffff;
    assert_eq!(pointer[1] >> 32, 0x3000_0000);
    assert!(len >= 32 && len.is_multiple_of(16), "a segment of {len} bytes");
    let at = memory.translate(pointer[0], len, &[area]);
    assert_eq!(at, area.address);
    (0..len / 16).map(|i| entry([memory.peek(at + i * 16), memory.peek(at + i * 16 + 8)])).collect()
}

fn prp(memory: &Memory, pointer: [u64; 2], area: Region, bytes: u64, rules: &Rules) -> Vec<Part> {
    let page = rules.page_bytes;
    let mut left = bytes;
    let mut parts = Vec::new();
    let mut push = |iova: u64, left: &mut u64| {
        let len = (page - iova % page).min(*left);
        assert_eq!(iova % 4, 0);
        parts.push(Part { address: Some(memory.translate(iova, len, &memory.data)), len });
        *left -= len;
    };
    push(pointer[0], &mut left);
    if left == 0 {
        assert_eq!(pointer[1], 0, "PRP2 without need");
    } else if left <= page {
        assert_eq!(pointer[1] % page, 0);
        push(pointer[1], &mut left);
    } else {
        let entries = left.div_ceil(page);
        let at = memory.translate(pointer[1], entries * 8, &[area]);
        for i in 0..entries {
            let iova: u64 = memory.peek(at + i * 8);
            assert_eq!(iova % page, 0, "list entry {i}");
            push(iova, &mut left);
        }
    }
    parts
}
