// The life of an operation on one warp: taken from the submission ring into the window, credited
// with what its commands did, finished. Every warp takes every operation; the last one to finish it
// tells the host.
#pragma once
#include "state.cuh"

// Takes the next operation of the ring into the window. False when there is none, when it has to
// wait for its event, or when the window is full.
GIO_FN bool gio_accept(gio_state &s) {
  const uint32_t unused = ~s.window & gio_low_bits(GIO_WINDOW);
  if (unused == 0u) return false;
  const uint64_t *ring = gio_ptr<const uint64_t>(s.args->sq_ring);
  const uint64_t entry = gio_common_acquire(ring + (s.ring_head & s.args->ring_mask));
  s.waiting = 0;
  if (static_cast<uint32_t>(entry >> 32) != s.ring_head + 1u) return false;
  const uint32_t id = static_cast<uint32_t>(entry);
  const gio_iocb *iocb = s.iocbs + id;
  // What is going to be refused waits for nothing: its event may never come.
  if (iocb->wait != 0u && gio_refusal(s) == 0u) {
    const uint32_t value = gio_common_acquire(gio_ptr<const uint32_t>(iocb->wait));
    s.waiting = static_cast<int32_t>(value - iocb->wait_value) < 0 ? 1u : 0u;
    if (s.waiting != 0u) return false;
  }
  const uint32_t a = gio_lowest(unused);
  GIO_LANES (l, 1) {
    gio_active *active = s.w->active + a;
    active->iocb = id;
    active->outstanding = 0;
    active->state = GIO_ACTIVE_GENERATING;
    active->errors = 0;
    active->error = 0;
    active->objects = 0;
  }
  s.window |= 1u << a;
  s.ring_head += 1u;
  s.cursor_active = a;
  s.cursor_row = 0;
  s.cursor_at = 0;
  return true;
}

// Tells the host, if this was the last warp working on it. Nothing of the IOCB may be read once the
// completion ring has the entry: the host may fill it anew.
GIO_FN void gio_complete(gio_state &s, uint32_t id) {
  gio_iocb *iocb = s.iocbs + id;
  const uint64_t signal = iocb->signal;
  const uint32_t signal_value = iocb->signal_value;
  if (gio_sub_acq_rel_gpu(&iocb->warps_left, 1) != 1u) return;
  // The signal first: after the ring entry the host may recycle the event's memory, too.
  if (signal != 0u) gio_st_release_sys(gio_ptr<uint32_t>(signal), signal_value);
  const uint32_t position = gio_add_relaxed_gpu(gio_ptr<uint32_t>(s.args->cq_tail), 1);
  uint64_t *ring = gio_ptr<uint64_t>(s.args->cq_ring);
  gio_st_release_sys(ring + (position & s.args->ring_mask),
                     static_cast<uint64_t>(position + 1u) << 32 | id);
}

// Ends this warp's share of window entry `a` once everything is generated and nothing of it is
// outstanding; else does nothing.
GIO_FN void gio_finish_if_done(gio_state &s, uint32_t a) {
  gio_active *active = s.w->active + a;
  if (gio_common(&active->state) != GIO_ACTIVE_GENERATED) return;
  if (gio_common(&active->outstanding) != 0u) return;
  GIO_LANES (l, 1) {
    gio_iocb *iocb = s.iocbs + active->iocb;
    if (active->errors != 0u) {
      gio_add_relaxed_gpu(&iocb->errors, active->errors);
      gio_st_relaxed_sys(&iocb->error, active->error);
    }
    const int64_t objects = static_cast<int64_t>(active->objects);
    // Only now: before its last command, an operation may have credited less than nothing.
    if (objects > 0) {
      gio_add_relaxed_gpu(&iocb->objects, active->objects);
      gio_st_relaxed_sys(&s.w->objects, s.w->objects + active->objects);
    }
    active->state = GIO_ACTIVE_UNUSED;
    gio_complete(s, active->iocb);
  }
  s.window &= ~(1u << a);
}

// Commands that came to an end, one a lane.
struct gio_ended {
  gio_lane<uint32_t> active;
  gio_lane<uint32_t> first; // index of the first IOCTX
  gio_lane<uint32_t> count; // gio_slot.count
  gio_lane<uint32_t> lbas;
  gio_lane<uint32_t> status; // GIO_STATUS_*, 0 = done
};

// Objects that a command's end adds to the sum. An object of several commands counts with its last
// one, and each other one that fails takes one away: exact without errors, else a lower bound.
GIO_FN uint32_t gio_credit(uint32_t count, uint32_t status) {
  const bool piece = (count & GIO_SLOT_PIECE) != 0u;
  if (status == GIO_STATUS_OK) return piece ? 0u : count;
  return piece ? ~0u : 0u;
}

// Records failures of the lanes in `ended` (l < n), credits each operation, finishes what is done.
GIO_FN void gio_settle(gio_state &s, gio_ended &e, uint32_t n, uint32_t ended) {
  gio_lane<uint32_t> credit, flag;
  GIO_LANES (l, n) {
    flag[l] = (ended >> l & 1u) != 0u && e.status[l] != GIO_STATUS_OK ? 1u : 0u;
    credit[l] = gio_credit(e.count[l], e.status[l]);
    if (flag[l] == 0u) continue;
    gio_iocb *iocb = s.iocbs + s.w->active[e.active[l]].iocb;
    const uint32_t count = e.count[l] & ~GIO_SLOT_PIECE;
    for (uint32_t i = 0; i < count; ++i) gio_set_status(iocb, e.first[l] + i, e.status[l]);
  }
  const uint32_t failed = gio_ballot(flag, n);
  if (failed != 0u) gio_count(&s.w->errors, gio_popc(failed));
  while (ended != 0u) {
    const uint32_t a = gio_shfl(e.active, gio_lowest(ended));
    GIO_LANES (l, n) flag[l] = e.active[l] == a ? 1u : 0u;
    const uint32_t group = gio_ballot(flag, n) & ended;
    const uint32_t bad = group & failed;
    const uint32_t one = bad != 0u ? gio_lowest(bad) : 0u;
    const uint64_t error =
        static_cast<uint64_t>(gio_shfl(e.status, one)) << 32 | gio_shfl(e.first, one);
    const uint64_t bytes = static_cast<uint64_t>(gio_sum(e.lbas, group & ~bad)) << s.w->lba_shift;
    const int64_t objects = static_cast<int32_t>(gio_sum(credit, group));
    gio_active *active = s.w->active + a;
    GIO_LANES (l, 1) {
      active->outstanding -= gio_popc(group);
      active->errors += gio_popc(bad);
      if (bad != 0u && active->error == 0u) active->error = error;
      active->objects += static_cast<uint64_t>(objects);
      const bool read = s.iocbs[active->iocb].opcode == GIO_OP_READ;
      uint64_t *moved = read ? &s.w->bytes_read : &s.w->bytes_written;
      gio_st_relaxed_sys(moved, *moved + bytes);
    }
    gio_finish_if_done(s, a);
    ended &= ~group;
  }
}

// `errors` IOCTXs of window entry `a` were refused without a command; one of them is `error`.
GIO_FN void gio_refused(gio_state &s, uint32_t a, uint32_t errors, uint64_t error) {
  gio_count(&s.w->errors, errors);
  GIO_LANES (l, 1) {
    gio_active *active = s.w->active + a;
    active->errors += errors;
    if (active->error == 0u) active->error = error;
  }
}
