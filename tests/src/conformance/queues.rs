//! Creating and deleting I/O queues (Base 2.0, "Create I/O Completion Queue command" and
//! following).

use nvme_driver::Nanos;
use nvme_spec::{
    admin::{AdminOpcode, CreateIoCq, CreateIoSq},
    sqe::Sqe,
    status::Status,
};

use super::{Case, Found, io, status, works};
use crate::raw::{Raw, create_cq, create_sq, delete_queue};

const DELETE_CQ: AdminOpcode = AdminOpcode::DELETE_IO_CQ;
const DELETE_SQ: AdminOpcode = AdminOpcode::DELETE_IO_SQ;

pub(super) const CASES: &[Case] = &[
    status("create cq 0", Status::INVALID_QUEUE_ID, |raw| cq(raw, |_, at| create_cq(0, 16, at))),
    status("create cq above the number of queues", Status::INVALID_QUEUE_ID, |raw| {
        cq(raw, |raw, at| create_cq(raw.target.qid_max + 1, 16, at))
    }),
    status("create cq twice", Status::INVALID_QUEUE_ID, |raw| {
        raw.create_cq(1, 16)?;
        cq(raw, |_, at| create_cq(1, 16, at))
    }),
    status("create cq of one entry", Status::INVALID_QUEUE_SIZE, |raw| {
        cq(raw, |_, at| create_cq(1, 1, at))
    }),
    status("create cq above MQES", Status::INVALID_QUEUE_SIZE, |raw| {
        cq(raw, |raw, at| create_cq(1, raw.target.entries_max + 1, at))
    }),
    status("create cq at an odd address", Status::INVALID_PRP_OFFSET, |raw| {
        cq(raw, |_, at| create_cq(1, 16, at + 64))
    }),
    status("create cq not contiguous", Status::INVALID_FIELD, |raw| {
        cq(raw, |_, at| cq_with(at, |cq| cq.contiguous = false))
    }),
    status("create cq with a vector too high", Status::INVALID_INTERRUPT_VECTOR, |raw| {
        cq(raw, |raw, at| {
            let vector = raw.target.vectors;
            cq_with(at, |cq| (cq.interrupts, cq.vector) = (true, vector))
        })
    }),
    status("create sq 0", Status::INVALID_QUEUE_ID, |raw| sq(raw, |_, at| create_sq(0, 1, 16, at))),
    status("create sq above the number of queues", Status::INVALID_QUEUE_ID, |raw| {
        sq(raw, |raw, at| create_sq(raw.target.qid_max + 1, 1, 16, at))
    }),
    status("create sq twice", Status::INVALID_QUEUE_ID, |raw| {
        raw.create_pair(2, 16)?;
        sq(raw, |_, at| create_sq(2, 2, 16, at))
    }),
    status("create sq on cq 0", Status::INVALID_QUEUE_ID, |raw| {
        sq(raw, |_, at| create_sq(1, 0, 16, at))
    }),
    status("create sq on a cq above the number of queues", Status::INVALID_QUEUE_ID, |raw| {
        sq(raw, |raw, at| create_sq(1, raw.target.qid_max + 1, 16, at))
    }),
    status("create sq on a cq that is not there", Status::COMPLETION_QUEUE_INVALID, |raw| {
        sq(raw, |_, at| create_sq(1, 3, 16, at))
    }),
    status("create sq of one entry", Status::INVALID_QUEUE_SIZE, |raw| {
        sq(raw, |_, at| create_sq(1, 1, 1, at))
    }),
    status("create sq above MQES", Status::INVALID_QUEUE_SIZE, |raw| {
        sq(raw, |raw, at| create_sq(1, 1, raw.target.entries_max + 1, at))
    }),
    status("create sq at an odd address", Status::INVALID_PRP_OFFSET, |raw| {
        sq(raw, |_, at| create_sq(1, 1, 16, at + 64))
    }),
    status("create sq not contiguous", Status::INVALID_FIELD, |raw| {
        sq(raw, |_, at| sq_with(at, |sq| sq.contiguous = false))
    }),
    status("delete cq 0", Status::INVALID_QUEUE_ID, |raw| raw.admin(&delete_queue(DELETE_CQ, 0))),
    status("delete cq that is not there", Status::INVALID_QUEUE_ID, |raw| {
        raw.admin(&delete_queue(DELETE_CQ, 5))
    }),
    status("delete cq above the number of queues", Status::INVALID_QUEUE_ID, |raw| {
        raw.admin(&delete_queue(DELETE_CQ, raw.target.qid_max + 1))
    }),
    status("delete cq in use", Status::INVALID_QUEUE_DELETION, |raw| {
        raw.create_pair(1, 16)?;
        raw.admin(&delete_queue(DELETE_CQ, 1))
    }),
    status("delete sq 0", Status::INVALID_QUEUE_ID, |raw| raw.admin(&delete_queue(DELETE_SQ, 0))),
    status("delete sq that is not there", Status::INVALID_QUEUE_ID, |raw| {
        raw.create_cq(5, 16)?;
        raw.admin(&delete_queue(DELETE_SQ, 5))
    }),
    status("delete sq above the number of queues", Status::INVALID_QUEUE_ID, |raw| {
        raw.admin(&delete_queue(DELETE_SQ, raw.target.qid_max + 1))
    }),
    status("delete sq twice", Status::INVALID_QUEUE_ID, |raw| {
        raw.create_pair(1, 16)?;
        raw.expect_ok(&delete_queue(DELETE_SQ, 1))?;
        raw.admin(&delete_queue(DELETE_SQ, 1))
    }),
    // Forbidden with CAP.CQR = 1, allowed with CAP.CQR = 0.
    status("queues in scattered pages", Status::INVALID_FIELD, scattered),
    works("create the longest queues", |raw| {
        let depth = raw.target.entries_max;
        raw.create_pair(1, depth)?;
        raw.admin(&delete_queue(DELETE_SQ, 1))
    }),
    works("create as many queues as there are", |raw| {
        for qid in 1..=raw.target.qid_max {
            raw.create_pair(qid, 4)?;
        }
        Ok(Found::OK)
    }),
    works("delete in order and create again", |raw| {
        for _ in 0..3 {
            raw.create_pair(4, 16)?;
            raw.expect_ok(&delete_queue(DELETE_SQ, 4))?;
            raw.expect_ok(&delete_queue(DELETE_CQ, 4))?;
        }
        Ok(Found::OK)
    }),
];

/// Sends the command that `make` returns for newly allocated memory.
fn cq(raw: &mut Raw<'_>, make: fn(&Raw<'_>, u64) -> Sqe) -> anyhow::Result<Found> {
    let memory = raw.alloc(1 << 16)?;
    let sqe = make(raw, memory.iova().0);
    raw.admin(&sqe)
}

/// Same as `cq`, after creating completion queue 1.
fn sq(raw: &mut Raw<'_>, make: fn(&Raw<'_>, u64) -> Sqe) -> anyhow::Result<Found> {
    raw.create_cq(1, 16)?;
    cq(raw, make)
}

fn cq_with(at: u64, change: impl FnOnce(&mut CreateIoCq)) -> Sqe {
    let mut sqe = create_cq(1, 16, at);
    let mut command = CreateIoCq::from_sqe(&sqe);
    change(&mut command);
    command.write_to(&mut sqe);
    sqe
}

fn sq_with(at: u64, change: impl FnOnce(&mut CreateIoSq)) -> Sqe {
    let mut sqe = create_sq(1, 1, 16, at);
    let mut command = CreateIoSq::from_sqe(&sqe);
    change(&mut command);
    command.write_to(&mut sqe);
    sqe
}

/// Creates completion queue 1 of 512 entries in two pages, the second below the first, and sends
/// enough commands to wrap it more than once.
fn scattered(raw: &mut Raw<'_>) -> anyhow::Result<Found> {
    const PAGE: usize = 4096;
    const ENTRIES: u32 = 512;
    let memory = raw.alloc(4 * PAGE)?;
    let list = raw.alloc(PAGE)?;
    let pages = [memory.iova().0 + 3 * PAGE as u64, memory.iova().0];
    for (index, page) in pages.iter().enumerate() {
        io::fill(&list, index * 8, &page.to_le_bytes())?;
    }
    let mut sqe = create_cq(1, ENTRIES, list.iova().0);
    let mut command = CreateIoCq::from_sqe(&sqe);
    command.contiguous = false;
    command.write_to(&mut sqe);
    let created = raw.admin(&sqe)?;
    if created != Found::OK {
        return Ok(created);
    }
    let mut sq = raw.create_sq(1, 1, 16)?;
    // The last dword of each entry, phase included.
    let entry = |index: usize| -> anyhow::Result<u32> {
        let page = [3 * PAGE, 0][index * 16 / PAGE];
        let dword = io::bytes(&memory, page + index * 16 % PAGE + 12, 4)?;
        Ok(u32::from_le_bytes(dword.try_into().expect("four bytes")))
    };
    for turn in 0..ENTRIES as usize + 300 {
        let cid = sq.post(&io::flush(1));
        sq.ring();
        let (index, phase) = (turn % ENTRIES as usize, turn < ENTRIES as usize);
        let wanted = u32::from(cid) | u32::from(phase) << 16;
        let came = raw.until(Nanos::from_millis(1_000), || Ok(entry(index)? == wanted))?;
        if !came {
            return Ok(Found::Wrong("no completion where it should be"));
        }
        raw.ring_doorbell(2 + 1, (turn as u32 + 1) % ENTRIES)?;
    }
    Ok(Found::OK)
}
