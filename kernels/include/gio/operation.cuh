// The end of an operation on one warp: credited with the results of its commands, finished. Every
// warp takes every operation; the last to finish completes it.
#pragma once
#include "state.cuh"

// Reports an operation to the host if this was the last warp: totals, signal, ring entry. The IOCB
// is not touched afterwards: the host may reuse it.
GIO_FN void gio_complete(gio_state &s, uint32_t id) {
  gio_progress *progress = gio_ptr<gio_progress>(s.args->progress) + id;
  if (gio_add_acq_rel_gpu(&progress->warps_left, ~0u) != 1u) return;
  gio_iocb *iocb = gio_ptr<gio_iocb>(s.args->iocbs) + id;
  const uint64_t signal = gio_iocb_at(s.args, id)->signal;
  const uint32_t value = gio_iocb_at(s.args, id)->signal_value;
  iocb->errors = progress->errors;
  iocb->error = progress->error;
  iocb->objects = progress->objects;
  // The other warps have finished with it, and take it again only after the host republished it.
  *progress = gio_progress{s.args->warp_count, 0, 0, 0, 0};
  // The signal first: after the ring entry the host may also recycle the event's memory.
  if (signal != 0u) gio_st_release_sys(gio_ptr<uint32_t>(signal), value);
  const uint32_t position = gio_add_acq_rel_gpu(gio_ptr<uint32_t>(s.args->cq_tail), 1);
  uint64_t *ring = gio_ptr<uint64_t>(s.args->cq_ring);
  gio_st_release_sys(ring + (position & s.args->ring_mask),
                     static_cast<uint64_t>(position + 1u) << 32 | id);
}

// Ends this warp's share of window entry `a` if everything is generated and none of its commands is
// outstanding.
GIO_FN void gio_finish_if_done(gio_state &s, uint32_t a) {
  gio_active *active = s.w->active + a;
  if (gio_common(&active->state) != GIO_ACTIVE_GENERATED) return;
  if (gio_common(&active->outstanding) != 0u) return;
  GIO_LANES (l, 1) {
    gio_progress *progress = gio_ptr<gio_progress>(s.args->progress) + active->iocb;
    if (active->errors != 0u) {
      gio_add_relaxed_gpu(&progress->errors, active->errors);
      gio_st_relaxed_gpu(&progress->error, active->error);
    }
    const int64_t objects = static_cast<int64_t>(active->objects);
    // Not earlier: before its last command, an operation's credit may be negative.
    if (objects > 0) {
      gio_add_relaxed_gpu(&progress->objects, active->objects);
      gio_st_relaxed_sys(&s.w->objects, s.w->objects + active->objects);
    }
    active->state = GIO_ACTIVE_UNUSED;
    gio_complete(s, active->iocb);
  }
  s.window &= ~(1u << a);
  s.checked &= ~(1u << a);
}

// Commands that have ended, one per lane.
struct gio_ended {
  gio_lane<uint32_t> active;
  gio_lane<uint32_t> row;
  gio_lane<uint32_t> first; // index of the first IOCTX
  gio_lane<uint32_t> count; // gio_slot.count
  gio_lane<uint32_t> lbas;
  gio_lane<uint32_t> status; // GIO_STATUS_*, 0 = success
};

// Returns the objects credited when a command ends. A split object counts with its last command,
// and each other failed command subtracts one: exact without errors, else a lower bound.
GIO_FN uint32_t gio_credit(uint32_t count, uint32_t status) {
  const bool split = (count & GIO_SLOT_SPLIT) != 0u;
  if (status == GIO_STATUS_OK) return split ? 0u : count;
  return split ? ~0u : 0u;
}

// Records failures of the lanes in `ended` (l < n), credits and finishes operations.
GIO_FN void gio_settle(gio_state &s, gio_ended &e, uint32_t n, uint32_t ended) {
  gio_lane<uint32_t> credit, flag;
  GIO_LANES (l, n) {
    flag[l] = (ended >> l & 1u) != 0u && e.status[l] != GIO_STATUS_OK ? 1u : 0u;
    credit[l] = gio_credit(e.count[l], e.status[l]);
    if (flag[l] == 0u) continue;
    const uint64_t statuses = s.w->active[e.active[l]].status;
    const uint32_t count = e.count[l] & ~GIO_SLOT_SPLIT;
    for (uint32_t i = 0; i < count; ++i) gio_set_status(statuses, e.first[l] + i, e.status[l]);
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
      const bool read = active->opcode == GIO_OP_READ;
      uint64_t *moved = read ? &s.w->bytes_read : &s.w->bytes_written;
      gio_st_relaxed_sys(moved, *moved + bytes);
    }
    gio_finish_if_done(s, a);
    ended &= ~group;
  }
}

// Records `errors` IOCTXs of window entry `a` rejected without a command; `error` is one of them.
GIO_FN void gio_refused(gio_state &s, uint32_t a, uint32_t errors, uint64_t error) {
  gio_count(&s.w->errors, errors);
  GIO_LANES (l, 1) {
    gio_active *active = s.w->active + a;
    active->errors += errors;
    if (active->error == 0u) active->error = error;
  }
}
