//! Asynchronous events (Base 2.0, "Asynchronous Event Request command").

use nvme_driver::Nanos;
use nvme_spec::{
    admin::{Abort, AdminOpcode, AsyncEvent, AsyncEventKind, LogPageId},
    ids::QueueId,
    status::Status,
};

use super::{Case, Found, Run, admin::get_log, status, works};
use crate::raw::{Raw, admin};

/// "Asynchronous Event Information - Error Status".
const INVALID_DOORBELL_REGISTER: u8 = 0;
const INVALID_DOORBELL_VALUE: u8 = 1;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "event request waits",
        expected: Found::Silence,
        run: Run::Raw(|raw| {
            request(raw);
            raw.admin_silence()
        }),
    },
    status("one event request too many", Status::AER_LIMIT_EXCEEDED, |raw| {
        for _ in 0..=raw.target.event_requests {
            request(raw);
        }
        raw.next_admin()
    }),
    works("event requests leave room for other commands", |raw| {
        for _ in 0..raw.target.event_requests {
            request(raw);
        }
        raw.create_pair(1, 4)?;
        Ok(Found::OK)
    }),
    status("abort of an event request", Status::ABORTED_BY_REQUEST, |raw| {
        let cid = raw.admin_sq.post(&admin(AdminOpcode::ASYNC_EVENT_REQUEST));
        let mut sqe = admin(AdminOpcode::ABORT);
        Abort { sqid: QueueId(0), cid }.write_to(&mut sqe);
        raw.admin_sq.post(&sqe);
        raw.admin_sq.ring();
        // The two completions may come in either order.
        let mut aborted = Found::Silence;
        for _ in 0..2 {
            if let Some(answer) = raw.admin_completion(Nanos::from_millis(200))?
                && answer.cid == cid
            {
                aborted = Found::Status(answer.status.code());
            }
        }
        Ok(aborted)
    }),
    works("event: a doorbell without a queue", |raw| {
        request(raw);
        raw.ring_doorbell(2 * 9, 1)?;
        event(raw, INVALID_DOORBELL_REGISTER)
    }),
    works("event: a tail outside the queue", |raw| {
        let (sq, _cq) = raw.create_pair(1, 16)?;
        request(raw);
        sq.ring_with(16);
        event(raw, INVALID_DOORBELL_VALUE)
    }),
    works("event: a head outside the queue", |raw| {
        raw.create_pair(1, 16)?;
        request(raw);
        raw.ring_doorbell(2 + 1, 16)?;
        event(raw, INVALID_DOORBELL_VALUE)
    }),
    works("event that came before its request", |raw| {
        raw.ring_doorbell(2 * 9, 1)?;
        raw.settle()?;
        request(raw);
        event(raw, INVALID_DOORBELL_REGISTER)
    }),
    Case {
        name: "event of a kind that was not cleared",
        expected: Found::Silence,
        run: Run::Raw(|raw| {
            request(raw);
            raw.ring_doorbell(2 * 9, 1)?;
            event(raw, INVALID_DOORBELL_REGISTER)?;
            request(raw);
            raw.ring_doorbell(2 * 9, 1)?;
            raw.admin_silence()
        }),
    },
    works("event of a kind that was cleared", |raw| {
        let memory = raw.alloc(4096)?;
        for _ in 0..3 {
            request(raw);
            raw.ring_doorbell(2 * 9, 1)?;
            event(raw, INVALID_DOORBELL_REGISTER)?;
            raw.expect_ok(&get_log(LogPageId::ERROR, 0, 64).with_prps(memory.iova().0, 0))?;
        }
        Ok(Found::OK)
    }),
];

fn request(raw: &mut Raw<'_>) {
    raw.admin_sq.post(&admin(AdminOpcode::ASYNC_EVENT_REQUEST));
    raw.admin_sq.ring();
}

/// Waits for an error event with `info`.
fn event(raw: &mut Raw<'_>, info: u8) -> anyhow::Result<Found> {
    let Some(answer) = raw.admin_completion(Nanos::from_millis(1_000))? else {
        return raw.silence();
    };
    let expected = AsyncEvent { kind: AsyncEventKind::ERROR, info, log_page: LogPageId::ERROR };
    if answer.status.is_success() && AsyncEvent::from_dword(answer.dw0) == expected {
        return Ok(Found::OK);
    }
    Ok(Found::Wrong("another event"))
}
