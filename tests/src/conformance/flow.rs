//! Sequences of commands: full and wrapping queues, resets, shutdowns, failures.

use anyhow::bail;
use nvme_driver::Nanos;
use nvme_spec::{
    admin::{AdminOpcode, FeatureId, FeatureSelect},
    reg::{ShutdownNotification, ShutdownStatus},
    status::Status,
};

use super::{
    Case, Found, Run,
    admin::get_feature,
    io::{bytes, expect_ok, fill, flush, read, write},
    status, works,
};
use crate::{
    pattern,
    raw::{Answer, Cq, Raw, Sq, admin, create_cq, create_sq, delete_queue},
};

const PAGE: usize = 4096;

pub(super) const CASES: &[Case] = &[
    works("queues wrap around", |raw| wrap(raw, 8, 8)),
    works("a completion queue shorter than its submission queue", |raw| wrap(raw, 64, 4)),
    works("a submission queue shorter than its completion queue", |raw| wrap(raw, 4, 64)),
    works("queues of two entries", |raw| wrap(raw, 2, 2)),
    works("a full completion queue holds commands back", full_completion_queue),
    works("two submission queues share a completion queue", shared_completion_queue),
    works("sq head moves with the commands fetched", |raw| {
        let (mut sq, mut cq) = raw.create_pair(1, 8)?;
        for turn in 0..20u16 {
            sq.post(&flush(1));
            sq.ring();
            if raw.answer(&mut cq)?.sqhd != (turn + 1) % 8 {
                return Ok(Found::Wrong("another head"));
            }
        }
        Ok(Found::OK)
    }),
    status("a CID that is in use", Status::CID_CONFLICT, cid_in_use),
    works("a deleted submission queue completes nothing more", deleted_queue_is_silent),
    works("a queue created again starts at its beginning", created_again),
    works("reset with commands in flight", reset_in_flight),
    works("reset forgets the queues", |raw| {
        raw.create_pair(1, 16)?;
        let mut raw = Raw::enable(raw.target)?;
        // Recreates queue 1.
        expect_ok(&mut raw, &flush(1)).map(|()| Found::OK)
    }),
    works("data survives a reset", |raw| {
        let ns = raw.target.namespaces[0];
        let memory = raw.alloc(PAGE)?;
        let at = memory.iova().0;
        fill(&memory, 0, &pattern(PAGE, 21))?;
        expect_ok(raw, &write(&ns, 64, 8).with_prps(at, 0))?;
        let mut raw = Raw::enable(raw.target)?;
        fill(&memory, 0, &[0; PAGE])?;
        expect_ok(&mut raw, &read(&ns, 64, 8).with_prps(at, 0))?;
        Ok(Found::wrong_unless(bytes(&memory, 0, PAGE)? == pattern(PAGE, 21), "wrong data"))
    }),
    works("normal shutdown", |raw| shutdown(raw, ShutdownNotification::NORMAL)),
    works("abrupt shutdown", |raw| shutdown(raw, ShutdownNotification::ABRUPT)),
    Case {
        name: "a page size that CAP does not have",
        expected: Found::Fatal,
        run: Run::Target(|target| {
            let raw = Raw::prepare(target)?;
            raw.write_cc(raw.good_cc().with_mps(15).with_en(1))?;
            not_ready(&raw)
        }),
    },
    Case {
        name: "a command set that CAP does not have",
        expected: Found::Fatal,
        run: Run::Target(|target| {
            let raw = Raw::prepare(target)?;
            raw.write_cc(raw.good_cc().with_css(3).with_en(1))?;
            not_ready(&raw)
        }),
    },
    Case {
        name: "an unmapped admin submission queue",
        expected: Found::Fatal,
        run: Run::Target(|target| {
            let mut raw = Raw::prepare(target)?;
            let memory = raw.alloc(PAGE)?;
            raw.write_admin_queues(target.unmapped.0, memory.iova().0)?;
            raw.write_cc(raw.good_cc().with_en(1))?;
            raw.admin_sq.post(&admin(AdminOpcode::ASYNC_EVENT_REQUEST));
            raw.admin_sq.ring();
            raw.next_admin()
        }),
    },
    Case {
        name: "an unmapped completion queue",
        expected: Found::Fatal,
        run: Run::Raw(|raw| {
            let unmapped = raw.target.unmapped.0;
            raw.expect_ok(&create_cq(1, 16, unmapped))?;
            let mut sq = raw.create_sq(1, 1, 16)?;
            let (_, mut cq) = (raw.create_cq(2, 16)?, raw.create_cq(3, 16)?);
            sq.post(&flush(1));
            sq.ring();
            match raw.take(&mut cq, Nanos::from_millis(2_000))? {
                Some(_) => Ok(Found::Wrong("completed elsewhere")),
                None => raw.silence(),
            }
        }),
    },
    works("a reset ends a fatal status", |raw| {
        let unmapped = raw.target.unmapped.0;
        raw.expect_ok(&create_cq(1, 16, unmapped))?;
        let mut sq = raw.create_sq(1, 1, 16)?;
        sq.post(&flush(1));
        sq.ring();
        raw.settle()?;
        let mut raw = Raw::enable(raw.target)?;
        if raw.csts()?.cfs() != 0 {
            return Ok(Found::Fatal);
        }
        expect_ok(&mut raw, &flush(1)).map(|()| Found::OK)
    }),
];

/// Sends 200 commands through queues of these depths, with as many in flight as fit.
fn wrap(raw: &mut Raw<'_>, sq_depth: u32, cq_depth: u32) -> anyhow::Result<Found> {
    const COMMANDS: u32 = 200;
    let mut cq = raw.create_cq(1, cq_depth)?;
    let mut sq = raw.create_sq(1, 1, sq_depth)?;
    let mut expected = Vec::new();
    let (mut posted, mut done) = (0, 0);
    while done < COMMANDS {
        while posted < COMMANDS && posted - done < sq_depth - 1 {
            expected.push(sq.post(&flush(1)));
            posted += 1;
        }
        sq.ring();
        let answer = raw.answer(&mut cq)?;
        let Some(place) = expected.iter().position(|cid| *cid == answer.cid) else {
            return Ok(Found::Wrong("completed twice, or never sent"));
        };
        expected.remove(place);
        if !answer.status.is_success() {
            return Ok(Found::Status(answer.status.code()));
        }
        done += 1;
    }
    raw.settle()?;
    Ok(Found::wrong_unless(cq.take().is_none(), "more completions than commands"))
}

/// Waits for `count` completions without releasing their slots. Returns these and any that follow.
fn drain(raw: &Raw<'_>, cq: &mut Cq, count: usize) -> anyhow::Result<Vec<Answer>> {
    let mut answers = Vec::new();
    raw.until(Nanos::from_millis(2_000), || {
        answers.extend(std::iter::from_fn(|| cq.take()));
        Ok(answers.len() >= count)
    })?;
    raw.settle()?;
    answers.extend(std::iter::from_fn(|| cq.take()));
    Ok(answers)
}

fn full_completion_queue(raw: &mut Raw<'_>) -> anyhow::Result<Found> {
    let mut cq = raw.create_cq(1, 4)?;
    let mut sq = raw.create_sq(1, 1, 32)?;
    let cids: Vec<u16> = (0..20).map(|_| sq.post(&flush(1))).collect();
    sq.ring();
    let mut seen = Vec::new();
    while seen.len() < cids.len() {
        // One slot stays empty, so three of four are all that fit.
        let fit = 3.min(cids.len() - seen.len());
        let answers = drain(raw, &mut cq, fit)?;
        if answers.len() != fit {
            return Ok(Found::Wrong("not as many completions as fit"));
        }
        seen.extend(answers.iter().map(|answer| answer.cid));
        cq.acknowledge();
    }
    seen.sort_unstable();
    Ok(Found::wrong_unless(seen == cids, "not each command once"))
}

fn shared_completion_queue(raw: &mut Raw<'_>) -> anyhow::Result<Found> {
    let mut cq = raw.create_cq(1, 64)?;
    let mut queues: Vec<(u16, Sq)> = Vec::new();
    for qid in [1, 2, 3] {
        queues.push((qid, raw.create_sq(qid, 1, 16)?));
    }
    let mut sent: Vec<(u16, u16)> = Vec::new();
    for (qid, sq) in &mut queues {
        sent.extend((0..10).map(|_| (*qid, sq.post(&flush(1)))));
        sq.ring();
    }
    let mut seen = Vec::new();
    while seen.len() < sent.len() {
        let answer = raw.answer(&mut cq)?;
        seen.push((answer.sqid, answer.cid));
    }
    seen.sort_unstable();
    // Completion queue 1 cannot be deleted: all three submission queues use it.
    let in_use = raw.admin(&delete_queue(AdminOpcode::DELETE_IO_CQ, 1))?;
    if in_use != Found::Status(Status::INVALID_QUEUE_DELETION) {
        return Ok(Found::Wrong("a completion queue was deleted under its users"));
    }
    Ok(Found::wrong_unless(seen == sent, "not each command once"))
}

/// Sends two commands with one CID; the first cannot complete before the second is fetched.
fn cid_in_use(raw: &mut Raw<'_>) -> anyhow::Result<Found> {
    let harmless = get_feature(FeatureId::NUMBER_OF_QUEUES, FeatureSelect::CURRENT, 0);
    raw.admin_sq.post_with(&admin(AdminOpcode::ASYNC_EVENT_REQUEST), 7);
    raw.admin_sq.post_with(&harmless, 7);
    raw.admin_sq.ring();
    raw.next_admin()
}

fn deleted_queue_is_silent(raw: &mut Raw<'_>) -> anyhow::Result<Found> {
    let mut cq = raw.create_cq(1, 4)?;
    let mut sq = raw.create_sq(1, 1, 32)?;
    for _ in 0..20 {
        sq.post(&flush(1));
    }
    sq.ring();
    let before = drain(raw, &mut cq, 3)?.len();
    let deleted = raw.admin(&delete_queue(AdminOpcode::DELETE_IO_SQ, 1))?;
    if deleted != Found::OK {
        return Ok(deleted);
    }
    cq.acknowledge();
    let after = drain(raw, &mut cq, 0)?.len();
    Ok(Found::wrong_unless(before == 3 && after == 0, "completions after the deletion"))
}

fn created_again(raw: &mut Raw<'_>) -> anyhow::Result<Found> {
    let memory = raw.alloc(4 * PAGE)?;
    let at = memory.iova().0;
    for turn in 0..4u64 {
        fill(&memory, 0, &[0; 2 * PAGE])?;
        raw.expect_ok(&create_cq(1, 16, at))?;
        raw.expect_ok(&create_sq(1, 1, 16, at + PAGE as u64))?;
        let mut cq = raw.cq_at(1, 16, &memory.memory().slice(0, 256)?)?;
        let mut sq = raw.sq_at(1, 16, &memory.memory().slice(PAGE, 1024)?)?;
        // The same number of commands each time, so that the doorbells get the same values.
        for command in 0..5 {
            sq.post(&flush(1));
            sq.ring();
            if !raw.answer(&mut cq)?.status.is_success() {
                bail!("turn {turn}: command {command} failed");
            }
        }
        raw.expect_ok(&delete_queue(AdminOpcode::DELETE_IO_SQ, 1))?;
        raw.expect_ok(&delete_queue(AdminOpcode::DELETE_IO_CQ, 1))?;
    }
    Ok(Found::OK)
}

/// Checks that the controller accesses neither data nor queues after CSTS.RDY went to 0.
fn reset_in_flight(raw: &mut Raw<'_>) -> anyhow::Result<Found> {
    const COMMANDS: usize = 32;
    let ns = raw.target.namespaces[0];
    for _ in 0..4 {
        let mut raw = Raw::enable(raw.target)?;
        let queues = raw.alloc(4 * PAGE)?;
        let data = raw.alloc(COMMANDS * 2 * PAGE)?;
        let at = queues.iova().0;
        raw.expect_ok(&create_cq(1, 64, at))?;
        raw.expect_ok(&create_sq(1, 1, 64, at + PAGE as u64))?;
        let mut sq = raw.sq_at(1, 64, &queues.memory().slice(PAGE, PAGE)?)?;
        for index in 0..COMMANDS {
            let page = data.iova().0 + (index * 2 * PAGE) as u64;
            sq.post(&read(&ns, index as u64 * 16, 16).with_prps(page, page + PAGE as u64));
        }
        sq.ring();
        raw.write_cc(raw.good_cc())?;
        raw.wait_ready(0)?;
        fill(&data, 0, &vec![0xcd; COMMANDS * 2 * PAGE])?;
        let queue = bytes(&queues, 0, PAGE)?;
        raw.settle()?;
        if bytes(&data, 0, COMMANDS * 2 * PAGE)?.iter().any(|byte| *byte != 0xcd) {
            return Ok(Found::Wrong("data moved after the reset"));
        }
        if bytes(&queues, 0, PAGE)? != queue {
            return Ok(Found::Wrong("completions after the reset"));
        }
    }
    Ok(Found::OK)
}

fn shutdown(raw: &mut Raw<'_>, how: ShutdownNotification) -> anyhow::Result<Found> {
    expect_ok(raw, &flush(1))?;
    raw.write_cc(raw.good_cc().with_en(1).with_shn(how.0))?;
    let complete = ShutdownStatus::COMPLETE.0;
    let done = raw.until(Nanos::from_millis(2_000), || Ok(raw.csts()?.shst() == complete))?;
    if !done {
        return Ok(Found::Wrong("CSTS.SHST does not become complete"));
    }
    // The controller can be enabled again.
    let mut raw = Raw::enable(raw.target)?;
    if raw.csts()?.shst() != ShutdownStatus::NORMAL.0 {
        return Ok(Found::Wrong("CSTS.SHST stays complete"));
    }
    expect_ok(&mut raw, &flush(1)).map(|()| Found::OK)
}

/// Returns the result of enabling a controller that should not become ready.
fn not_ready(raw: &Raw<'_>) -> anyhow::Result<Found> {
    raw.settle()?;
    let csts = raw.csts()?;
    let found = if csts.cfs() != 0 {
        Found::Fatal
    } else if csts.rdy() != 0 {
        Found::Wrong("ready")
    } else {
        Found::Silence
    };
    // Restore CC for the next case.
    raw.write_cc(raw.good_cc())?;
    Ok(found)
}
