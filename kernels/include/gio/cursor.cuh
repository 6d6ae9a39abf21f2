// The next operation of the submission ring, and decoding of its next 32 IOCTXs (or splits).
//
// An operation consists of rows of runs. On one device, each row of an affine operation is the
// IOCTXs of one class, and an explicit operation is a single row; the device's warps divide the run
// evenly. s.cursor_row counts rows from the operation's first one, s.cursor_at counts splits from
// the start of this warp's share of the run. An IOCTX longer than the maximum command (MDTS) takes
// several commands, its splits. All others take one.
#pragma once
#include "queue.cuh"

#define GIO_LBAS_MAX 65536u // per command: NLB has 16 bits
#define GIO_ROWS_MAX 65535u // keeps slot numbers within 64 bits

// The lanes' splits. verdict: 0 nothing to do, 1 and 2 a command (2: more of the object follows),
// otherwise the GIO_STATUS_* that rejects it.
#define GIO_VERDICT_GO 1u
#define GIO_VERDICT_GO_SPLIT 2u
struct gio_splits {
  gio_lane<uint64_t> lba;
  gio_lane<uint64_t> iova;
  gio_lane<uint32_t> data;
  gio_lane<uint32_t> pad;
  gio_lane<uint32_t> index;
  gio_lane<uint32_t> verdict;
};

// Returns the maximum number of IOCTXs that one command may merge, given the descriptor space.
GIO_FN uint32_t gio_merge_max(const gio_op &op, uint32_t descriptor_bytes) {
  if (op.splits != 1u) return 1;
  const gio_pool &pool = op.pool;
  uint32_t merge = gio_min(gio_min(pool.run_bytes, op.split_bytes) / pool.slot_bytes, GIO_WARP);
  if (op.prp != 0u) { // only whole pages can be chained
    const uint64_t odd = op.row_iova | pool.block_stride | pool.object_bytes;
    if ((odd & (op.page_bytes - 1u)) != 0u) return 1;
  } else {
    const uint32_t entries = pool.slot_bytes != pool.object_bytes ? 2u : 1u;
    merge = gio_min(merge, descriptor_bytes / (GIO_SGL_BYTES * entries));
  }
  return merge != 0u ? merge : 1u;
}

// Returns true if a pool is valid for this warp: host errors must not become addresses.
GIO_FN bool gio_pool_usable(const gio_pool &pool, const gio_iocb &iocb, const gio_warp *w) {
  if (pool.devices == 0u || pool.devices != iocb.devices || w->device >= pool.devices) {
    return false;
  }
  if (pool.group == 0u || pool.group % pool.devices != 0u) return false;
  if (pool.rows > GIO_ROWS_MAX || iocb.row_first > pool.rows) return false;
  if (iocb.row_count > pool.rows - iocb.row_first) return false;
  if (pool.object_bytes == 0u || pool.object_bytes > pool.slot_bytes) return false;
  if ((pool.slot_bytes & ((1u << w->lba_shift) - 1u)) != 0u) return false;
  const bool padded = pool.object_bytes != pool.slot_bytes;
  if (!padded) return true;
  return w->descriptor_mode == GIO_DESC_SGL && w->descriptor_bytes >= 2u * GIO_SGL_BYTES;
}

// Finds this warp's share of the cursor's row. Executed by one lane, like the following functions.
GIO_FN void gio_op_row(const gio_state &s, gio_op &op) {
  const gio_warp *w = s.w;
  op.begin = 0;
  op.end = 0;
  if (s.cursor_row >= op.rows) return;
  uint32_t run = w->device;
  if (op.affine != 0u) {
    op.row = op.iocb.row_first + s.cursor_row;
    const uint32_t shift = op.row % op.pool.devices;
    op.row_class = run >= shift ? run - shift : run + op.pool.devices - shift;
    op.row_iova = gio_ptr<const uint64_t>(op.pool.row_iova)[op.row];
    op.merge = gio_merge_max(op, w->descriptor_bytes);
    run = op.row_class;
  }
  if (run >= op.iocb.devices) return;
  const uint32_t *starts = gio_ptr<const uint32_t>(op.iocb.starts);
  const uint32_t first = starts[run];
  const uint64_t length = starts[run + 1u] - first;
  op.begin = first + static_cast<uint32_t>(length * w->part / w->parts);
  op.end = first + static_cast<uint32_t>(length * (w->part + 1u) / w->parts);
}

// Returns the maximum length of a command in LBAs. It divides the boundary or is the boundary, so
// commands that begin or end at its multiples cross no boundary.
GIO_FN uint32_t gio_split_lbas(const gio_op &op, const gio_warp *w) {
  uint64_t limit = static_cast<uint64_t>(GIO_LBAS_MAX) << w->lba_shift;
  if (limit > w->transfer_bytes_max) limit = w->transfer_bytes_max;
  if (op.prp != 0u) {
    const uint64_t listed = static_cast<uint64_t>(w->descriptor_bytes / GIO_PRP_BYTES);
    if (limit > listed * w->page_bytes) limit = listed * w->page_bytes;
  }
  const uint32_t lbas = static_cast<uint32_t>(limit >> w->lba_shift);
  const uint32_t boundary = w->boundary_lbas;
  if (boundary == 0u || lbas == 0u) return lbas;
  if (lbas >= boundary) return boundary;
  if (boundary % lbas == 0u) return lbas;
  return 1u << gio_highest(gio_min(boundary & (0u - boundary), lbas));
}

// Returns the maximum commands per IOCTX. One more if a boundary may cut both ends.
GIO_FN uint32_t gio_split_count(const gio_op &op, uint32_t longest) {
  const uint32_t whole = longest / op.split_bytes + (longest % op.split_bytes != 0u ? 1u : 0u);
  if (whole <= 1u) return 1;
  return op.boundary_lbas != 0u ? whole + 1u : whole;
}

// Copies an IOCB in one access of the warp. On a GPU it is the copy in the relay.
GIO_FN void gio_op_read(gio_state &s, const gio_iocb *iocb) {
  const uint64_t *from = reinterpret_cast<const uint64_t *>(iocb);
  uint64_t *to = reinterpret_cast<uint64_t *>(&s.w->op.iocb);
  gio_meet();
  GIO_LANES (l, sizeof(gio_iocb) / sizeof(uint64_t)) to[l] = from[l];
}

// Derives the operation's other parameters from its IOCB. The cursor is at its first row.
GIO_FN void gio_op_load(const gio_state &s, gio_op &op) {
  const gio_warp *w = s.w;
  op.pool = gio_pool{};
  op.data_lba = 0;
  op.row_iova = 0;
  op.pad_iova = 0;
  op.invalid = 0;
  op.row = 0;
  op.row_class = 0;
  op.slot_lbas = 0;
  op.group_slots = 0;
  op.affine = op.iocb.kind == GIO_KIND_AFFINE ? 1u : 0u;
  op.rows = op.affine != 0u ? op.iocb.row_count : 1u;
  op.merge = 1;
  op.prp = w->descriptor_mode == GIO_DESC_PRP ? 1u : 0u;
  op.page_bytes = w->page_bytes;
  op.lba_shift = w->lba_shift;
  op.lbas = w->lbas;
  op.boundary_lbas = w->boundary_lbas;
  op.pad_type = GIO_SGL_DATA;
  op.split_bytes = gio_split_lbas(op, w) << w->lba_shift;
  const bool read = op.iocb.opcode == GIO_OP_READ;
  uint32_t longest = op.iocb.bytes_max;
  bool usable = op.split_bytes != 0u && (read || op.iocb.opcode == GIO_OP_WRITE);
  if (op.affine != 0u) {
    op.pool = *gio_ptr<const gio_pool>(op.iocb.pool);
    usable = usable && gio_pool_usable(op.pool, op.iocb, w);
    longest = op.pool.slot_bytes;
  } else {
    usable = usable && op.iocb.kind == GIO_KIND_EXPLICIT;
  }
  if (op.iocb.checksums != 0u) usable = usable && op.affine != 0u && op.pool.row_base != 0u;
  if (!usable) { // rejected as one row: each class once, by the device of its number
    op.invalid = GIO_STATUS_INVALID;
    op.splits = 1;
    op.affine = 0;
    op.rows = 1;
  } else if (op.affine != 0u) {
    op.group_slots = op.pool.group / op.pool.devices;
    op.slot_lbas = op.pool.slot_bytes >> op.lba_shift;
    op.data_lba = gio_ptr<const uint64_t>(op.pool.data_lba)[w->device];
    op.pad_iova = read ? op.pool.pad_read_iova : op.pool.pad_write_iova;
    if (read && w->bit_bucket != 0u) op.pad_type = GIO_SGL_BIT_BUCKET;
    op.splits = gio_split_count(op, longest);
  } else {
    op.splits = gio_split_count(op, longest);
  }
  gio_op_row(s, op);
}

GIO_FN uint64_t gio_address(const void *p) { return reinterpret_cast<uint64_t>(p); }

// Looks for news, in the relay if there is one: stop word, next ring entry, the exiting launch, and
// the event that the entry waits for. Reads them in parallel, one word per lane.
GIO_FN void gio_look(gio_state &s) {
  const gio_relay *r = gio_ptr<const gio_relay>(s.args->relay);
  gio_lane<uint64_t> v;
  GIO_LANES (l, 4) {
    if (l == 3u) {
      const uint64_t at = s.waiting != 0u ? s.w->op.iocb.wait : 0u;
      v[l] = at != 0u ? gio_ld_poll_sys(gio_ptr<const uint32_t>(at)) : 0u;
    } else {
      uint64_t at = gio_entry_at(s.args, s.ring_head);
      if (l == 0u) at = r != nullptr ? gio_address(&r->stop) : s.args->stop;
      if (l == 2u) at = r != nullptr ? gio_address(&r->left) : 0u;
      v[l] = at != 0u ? gio_ld_poll_sys(gio_ptr<const uint64_t>(at)) : 0u;
    }
  }
  const uint64_t stop = gio_shfl(v, 0), entry = gio_shfl(v, 1);
  s.stopped = stop != 0u ? 1u : 0u;
  s.drained = r == nullptr || stop == GIO_STOP_DRAINED ? s.stopped : 0u;
  s.next = static_cast<uint32_t>(entry >> 32) == s.ring_head + 1u ? 1u : 0u;
  s.id = static_cast<uint32_t>(entry);
  s.leaving = gio_shfl(v, 2) == s.args->launch ? 1u : 0u;
  s.event = static_cast<uint32_t>(gio_shfl(v, 3));
  s.polled = 1;
}

// Returns true if an event has reached a value.
GIO_FN bool gio_is_at(uint32_t event, uint32_t value) {
  return static_cast<int32_t>(event - value) >= 0;
}

// Copies the relay's next ring entry and its IOCB. An event is replaced by the relay's `reached`.
GIO_FN void gio_relay_entry(gio_state &s, gio_relay *r, uint64_t entry) {
  constexpr uint32_t words = sizeof(gio_iocb) / sizeof(uint64_t);
  constexpr uint32_t wait_at = offsetof(gio_iocb, wait) / sizeof(uint64_t);
  // The signal's value is in the same word.
  constexpr uint32_t value_at = offsetof(gio_iocb, wait_value) / sizeof(uint64_t);
  const uint32_t id = static_cast<uint32_t>(entry), position = static_cast<uint32_t>(entry >> 32);
  const uint64_t *from = reinterpret_cast<const uint64_t *>(gio_ptr<gio_iocb>(s.args->iocbs) + id);
  uint64_t *to = reinterpret_cast<uint64_t *>(reinterpret_cast<gio_iocb *>(r + 1) + id);
  gio_lane<uint64_t> v;
  GIO_LANES (l, words) v[l] = from[l];
  const uint64_t wait = gio_shfl(v, wait_at), values = gio_shfl(v, value_at);
  GIO_LANES (l, words) {
    if (wait != 0u && l == wait_at) v[l] = gio_address(&r->reached);
    if (wait != 0u && l == value_at) v[l] = (values & ~static_cast<uint64_t>(~0u)) | position;
    to[l] = v[l];
  }
  GIO_LANES (l, 1) {
    r->wait = wait;
    r->wait_value = static_cast<uint32_t>(values);
    r->head = position;
    gio_st_release_gpu(gio_ptr<uint64_t>(gio_entry_at(s.args, position - 1u)), entry);
  }
}

// Copies what the host wrote to the relay, unless another warp is doing so: at most one ring entry.
//
// An entry whose event is not reached holds up those behind it, so one event at a time is awaited.
// That ends when the relay is closed: after the stop word, when an event timed out (the queues fail
// one after the other), or when all queues have failed. From then on entries are copied only to be
// rejected, and `reached` stays as it is: an operation that still waits on a healthy queue does not
// start.
GIO_FN void gio_refresh(gio_state &s) {
  gio_relay *r = gio_ptr<gio_relay>(s.args->relay);
  gio_lane<uint32_t> lock;
  GIO_LANES (l, 1) lock[l] = gio_cas_acquire_gpu(&r->lock, 0, 1);
  if (gio_shfl(lock, 0) != 0u) return;
  const uint32_t head = gio_common(&r->head), closed = gio_common(&r->closed);
  const uint32_t waits = gio_common(&r->wait) != 0u ? 1u : 0u;
  gio_lane<uint64_t> v;
  GIO_LANES (l, 3) {
    if (l == 2u) {
      const uint64_t at = closed == 0u ? r->wait : 0u;
      v[l] = at != 0u ? gio_ld_poll_sys(gio_ptr<const uint32_t>(at)) : 0u;
    } else {
      uint64_t at = s.args->stop;
      if (l == 1u) at = s.args->sq_ring + (head & s.args->ring_mask) * sizeof(uint64_t);
      v[l] = gio_ld_poll_sys(gio_ptr<const uint64_t>(at));
    }
  }
  const uint32_t event = static_cast<uint32_t>(gio_shfl(v, 2));
  const bool reached =
      closed == 0u && waits != 0u && gio_is_at(event, gio_common(&r->wait_value));
  const uint64_t entry = gio_shfl(v, 1);
  const bool more = static_cast<uint32_t>(entry >> 32) == head + 1u;
  const bool copy = more && (waits == 0u || closed != 0u);
  // Orders the reads of the IOCB after its entry, and what starts with an event after the event.
  if (copy || reached) gio_fence_acq_rel_sys();
  if (copy) {
    // Every entry before it may start: kept up to date, because positions wrap.
    if (waits == 0u && closed == 0u) {
      GIO_LANES (l, 1) gio_st_release_gpu(&r->reached, head);
    }
    gio_relay_entry(s, r, entry);
  }
  GIO_LANES (l, 1) {
    if (reached) {
      r->wait = 0;
      gio_st_release_gpu(&r->reached, head);
    }
    if (v[l] != 0u) {
      const uint64_t stop = closed != 0u && !more ? GIO_STOP_DRAINED : GIO_STOP_SEEN;
      gio_st_release_gpu(&r->stop, stop);
    }
    // Only from the next time on: the warps see the stop word before an entry that does not wait.
    const uint32_t failed = gio_ld_relaxed_gpu(&r->failed);
    if (v[l] != 0u || s.fault == GIO_FAULT_EVENT || failed == s.args->warp_count) r->closed = 1;
    gio_st_release_gpu(&r->lock, 0);
  }
}

// Looks for news after those of the host were relayed.
GIO_FN void gio_poll(gio_state &s) {
  if (s.args->relay != 0u) gio_refresh(s);
  gio_look(s);
}

// Returns true if the event of the next operation is reached, as of the last poll.
GIO_FN bool gio_reached(gio_state &s) {
  return gio_is_at(s.event, gio_common(&s.w->op.iocb.wait_value));
}

// Takes the next operation of the ring into the window and makes it the generating one. Returns
// false if there is none, if it must wait for its event, or if the window is full. The `first` one
// of a batch waits until half of the window is unused, so that small operations share a doorbell,
// if the controller still has a whole batch to work on.
GIO_FN bool gio_accept(gio_state &s, bool first) {
  const bool hold = first && s.outstanding >= GIO_BATCH_MIN;
  if (gio_popc(s.window) > (hold ? GIO_WINDOW / 2u : GIO_WINDOW - 1u)) return false;
  const uint32_t unused = ~s.window & gio_low_bits(GIO_WINDOW);
  if (s.polled == 0u) gio_look(s);
  if (s.next == 0u) return false;
  // An operation to be rejected does not wait: its event may never arrive.
  const bool go = gio_refusal(s) != 0u;
  if (s.waiting == 0u) {
    gio_fence_acq_rel_sys(); // orders the reads of the IOCB after the new entry
    gio_op_read(s, gio_iocb_at(s.args, s.id));
    const gio_iocb &iocb = s.w->op.iocb;
    if (!go && iocb.wait != 0u) {
      s.event = gio_common_acquire(gio_ptr<const uint32_t>(iocb.wait));
      s.waiting = 1;
    }
  }
  if (!go && s.waiting != 0u) {
    if (!gio_reached(s)) return false;
    gio_fence_acq_rel_sys(); // orders what the operation reads after its event
  }
  const uint32_t a = gio_lowest(unused);
  s.waiting = 0;
  s.polled = 0;
  s.window |= 1u << a;
  s.ring_head += 1u;
  s.cursor_active = a;
  s.cursor_row = 0;
  s.cursor_at = 0;
  gio_meet();
  GIO_LANES (l, 1) {
    s.w->waiting_ns = 0;
    gio_op &op = s.w->op;
    gio_op_load(s, op);
    gio_active *active = s.w->active + a;
    *active = gio_active{s.id, 0, GIO_ACTIVE_GENERATING, 0, 0, 0, op.iocb.status, op.iocb.opcode,
                         op.splits, op.iocb.checksums, op.iocb.ioctx, op.pool.row_base,
                         op.pool.block_stride, op.pool.object_bytes, op.iocb.count};
  }
  const gio_op &op = s.w->op;
  if (op.iocb.opcode == GIO_OP_READ && op.iocb.checksums != 0u) s.checked |= 1u << a;
  return true;
}

// Advances to the next row of the generating operation.
GIO_FN void gio_next_row(gio_state &s) {
  s.cursor_row += 1u;
  s.cursor_at = 0;
  gio_meet();
  GIO_LANES (l, 1) gio_op_row(s, s.w->op);
}

GIO_FN bool gio_in_namespace(const gio_op &op, uint64_t lba, uint64_t lbas) {
  return lba <= op.lbas && lbas <= op.lbas - lba;
}

// Bytes [from, to) of an IOCTX of `bytes` at LBA `lba` that are its split `split`; empty if from ==
// to. With a boundary, splits end at multiples of their length on the device.
struct gio_range {
  uint64_t from, to;
};
GIO_FN gio_range gio_split(const gio_op &op, uint64_t lba, uint32_t bytes, uint32_t split) {
  const uint64_t each = op.split_bytes;
  if (op.splits == 1u) return {0, bytes};
  const uint64_t skew =
      op.boundary_lbas != 0u ? lba % (each >> op.lba_shift) << op.lba_shift : 0u;
  const uint64_t from = split == 0u ? 0u : split * each - skew, to = (split + 1u) * each - skew;
  return {from < bytes ? from : bytes, to < bytes ? to : bytes};
}

// Decodes split `split` of affine IOCTX `index` for one lane.
GIO_FN void gio_locate_affine(const gio_op &op, gio_splits &p, uint32_t l, uint32_t index,
                              uint32_t split) {
  const gio_pool &pool = op.pool;
  const gio_affine entry = gio_ptr<const gio_affine>(op.iocb.ioctx)[index];
  const uint32_t group = entry.file / pool.group;
  const uint32_t k = entry.file - group * pool.group;
  const uint32_t column = k / pool.devices;
  const uint64_t slot =
      (static_cast<uint64_t>(group) * pool.rows + op.row) * op.group_slots + column;
  const uint64_t lba = op.data_lba + slot * op.slot_lbas;
  // The class determines the file's device: in a wrong class, the LBA would be another file's slot.
  const bool right = entry.block < pool.blocks && entry.file < pool.files &&
                     k - column * pool.devices == op.row_class;
  const gio_range part = gio_split(op, lba, pool.slot_bytes, split);
  const uint32_t offset = static_cast<uint32_t>(part.from);
  const uint32_t bytes = static_cast<uint32_t>(part.to - part.from);
  const uint32_t left = pool.object_bytes > offset ? pool.object_bytes - offset : 0u;
  const uint64_t iova = op.row_iova + entry.block * pool.block_stride + offset;
  p.index[l] = index;
  p.lba[l] = lba + (offset >> op.lba_shift);
  p.iova[l] = iova;
  p.data[l] = gio_min(left, bytes);
  p.pad[l] = bytes - gio_min(left, bytes);
  if (!right || !gio_in_namespace(op, lba, op.slot_lbas) || (op.prp != 0u && (iova & 3u) != 0u)) {
    p.verdict[l] = split == 0u ? GIO_STATUS_INVALID : 0u;
  } else if (bytes == 0u) {
    p.verdict[l] = 0;
  } else {
    p.verdict[l] = part.to < pool.slot_bytes ? GIO_VERDICT_GO_SPLIT : GIO_VERDICT_GO;
  }
}

// Decodes split `split` of explicit IOCTX `index` for one lane.
GIO_FN void gio_locate_explicit(const gio_state &s, const gio_op &op, gio_splits &p, uint32_t l,
                                uint32_t index, uint32_t split) {
  const gio_ioctx entry = gio_ptr<const gio_ioctx>(op.iocb.ioctx)[index];
  const uint32_t lba_mask = (1u << op.lba_shift) - 1u;
  const bool right = entry.device == s.w->device && entry.bytes != 0u &&
                     (entry.bytes & lba_mask) == 0u && entry.bytes <= op.iocb.bytes_max &&
                     (op.prp == 0u || (entry.iova & 3u) == 0u) &&
                     gio_in_namespace(op, entry.lba, entry.bytes >> op.lba_shift);
  const gio_range part = gio_split(op, entry.lba, entry.bytes, split);
  p.index[l] = index;
  p.lba[l] = entry.lba + (part.from >> op.lba_shift);
  p.iova[l] = entry.iova + part.from;
  p.data[l] = static_cast<uint32_t>(part.to - part.from);
  p.pad[l] = 0;
  if (!right) {
    p.verdict[l] = split == 0u ? GIO_STATUS_INVALID : 0u;
  } else if (part.from == part.to) { // shorter than the longest IOCTX
    p.verdict[l] = 0;
  } else {
    p.verdict[l] = part.to < entry.bytes ? GIO_VERDICT_GO_SPLIT : GIO_VERDICT_GO;
  }
}

// Returns the number of remaining splits in this warp's share of the row.
GIO_FN uint32_t gio_splits_left(const gio_state &s, const gio_op &op) {
  const uint32_t all = (op.end - op.begin) * op.splits;
  return all > s.cursor_at ? all - s.cursor_at : 0u;
}

// Fills the first n lanes with the splits from the cursor on.
GIO_FN void gio_locate(gio_state &s, const gio_op &op, gio_splits &p, uint32_t n) {
  if (op.affine != 0u && op.splits == 1u) {
    GIO_LANES (l, n) gio_locate_affine(op, p, l, op.begin + s.cursor_at + l, 0);
  } else if (op.affine != 0u) {
    GIO_LANES (l, n) {
      const uint32_t at = s.cursor_at + l;
      gio_locate_affine(op, p, l, op.begin + at / op.splits, at % op.splits);
    }
  } else if (op.splits == 1u) {
    GIO_LANES (l, n) gio_locate_explicit(s, op, p, l, op.begin + s.cursor_at + l, 0);
  } else {
    GIO_LANES (l, n) {
      const uint32_t at = s.cursor_at + l;
      gio_locate_explicit(s, op, p, l, op.begin + at / op.splits, at % op.splits);
    }
  }
}
