// The queue pair: command slots, descriptors, submission entries, doorbells, completions, timeouts.
//
// A CID is generation << depth_log2 | slot. Slots are free (on the stack free_slots), outstanding,
// or quarantined: timed out or failed, although the controller may still do DMA for them. Only a
// completion frees a slot. SQE positions follow sq_tail and are independent of the slot.
#pragma once
#include "checksum.cuh"

#define GIO_SQE_BYTES 64u
#define GIO_SQE_SGL (1u << 14)   // PSDT 01b: data by SGL, MPTR an address
#define GIO_SQE_FUA (1u << 30)   // command dword 12 of read and write
#define GIO_SQE_PLACEMENT (2u << 20) // DTYPE in command dword 12: data placement
#define GIO_BATCH_MIN 32u // wait for more room rather than submit fewer commands
// Completions taken per poll when checksums are verified, so that new commands are sent in between.
#define GIO_REAP_CHECKED 8u
#define GIO_CID_RESERVED 0xffffu // "should not be used": means "no command" in the error log

// Returns the number of commands that may be submitted: of `depth` entries one stays empty.
GIO_FN uint32_t gio_room(const gio_state &s) {
  const uint32_t held = s.outstanding + s.quarantined;
  return held >= s.slot_mask ? 0u : gio_min(s.slot_mask - held, s.free_count);
}

// Returns the CID for the next use of a free slot.
GIO_FN uint32_t gio_next_cid(const gio_state &s, uint32_t slot) {
  const uint32_t generations = 0xffffu >> s.depth_log2; // the highest one
  const uint32_t next = (*gio_slot_word(s.slots + slot) + 1u) & generations;
  const uint32_t cid = next << s.depth_log2 | slot;
  return cid == GIO_CID_RESERVED && generations != 0u ? slot : cid;
}

// Data pointers: descriptions of a command's memory (NVMe Base 2.1, "Physical Region Page Entry and
// List" and "Scatter Gather List").
//
// A command that needs more than the 16 bytes in its SQE uses the descriptor area of its CID slot:
// one SGL segment (always the last one), or one PRP list. An area's size is a power of two and at
// most a controller page, so none crosses a page.

// SGL descriptor types (figure "SGL Descriptor Type"), as the identifier byte with subtype 0.
#define GIO_SGL_DATA 0x00u
#define GIO_SGL_BIT_BUCKET 0x10u
#define GIO_SGL_LAST_SEGMENT 0x30u

#define GIO_SGL_BYTES 16u
#define GIO_PRP_BYTES 8u

// One lane's contribution to a command: `data` bytes of memory at `iova`, then `pad` bytes of
// padding outside any KV block.
struct gio_segment {
  uint64_t iova;
  uint32_t data;
  uint32_t pad;
};

GIO_FN gio_u128 gio_sgl(uint64_t iova, uint32_t bytes, uint32_t type) {
  return gio_u128{iova, static_cast<uint64_t>(type) << 56 | bytes};
}

GIO_FN uint32_t gio_sgl_entries(const gio_segment &segment) {
  return (segment.data != 0u ? 1u : 0u) + (segment.pad != 0u ? 1u : 0u);
}

GIO_FN gio_u128 gio_sgl_padding(const gio_op &op, uint32_t bytes) {
  return gio_sgl(op.pad_type == GIO_SGL_BIT_BUCKET ? 0u : op.pad_iova, bytes, op.pad_type);
}

// Writes the entries of `segment` to `area`, from entry `at` on.
GIO_FN void gio_sgl_write(gio_u128 *area, uint32_t at, const gio_segment &segment,
                          const gio_op &op) {
  if (segment.data != 0u) gio_st16(area + at++, gio_sgl(segment.iova, segment.data, GIO_SGL_DATA));
  if (segment.pad != 0u) gio_st16(area + at, gio_sgl_padding(op, segment.pad));
}

// Returns the data pointer of a command with one entry in its SQE, or `entries` at `area_iova`.
GIO_FN gio_u128 gio_sgl_pointer(uint32_t entries, const gio_segment &segment,
                                const gio_op &op, uint64_t area_iova) {
  if (entries > 1u) return gio_sgl(area_iova, entries * GIO_SGL_BYTES, GIO_SGL_LAST_SEGMENT);
  if (segment.data != 0u) return gio_sgl(segment.iova, segment.data, GIO_SGL_DATA);
  return gio_sgl_padding(op, segment.pad);
}

// Returns the number of PRP pages in `bytes` from `iova`. The page size is a power of two.
GIO_FN uint32_t gio_prp_pages(uint64_t iova, uint32_t bytes, uint32_t page_bytes) {
  const uint64_t offset = iova & (page_bytes - 1u);
  return static_cast<uint32_t>((offset + bytes + page_bytes - 1u) >> gio_lowest(page_bytes));
}

// Writes the pages of `segment` as pages `at`, at + 1, ... of its command, which has `pages` in
// total. Page 0 is PRP1; page 1 is PRP2 if it is the last one; the others are list entries.
GIO_FN void gio_prp_write(uint64_t *list, uint32_t at, uint32_t pages, const gio_segment &segment,
                          uint32_t page_bytes) {
  if (pages <= 2u) return;
  const uint64_t page = segment.iova & ~(static_cast<uint64_t>(page_bytes) - 1u);
  const uint32_t own = gio_prp_pages(segment.iova, segment.data, page_bytes);
  for (uint32_t i = at == 0u ? 1u : 0u; i < own; ++i) {
    list[at + i - 1u] = page + static_cast<uint64_t>(i) * page_bytes;
  }
}

// Returns the data pointer of a command of `pages` pages: the first at `first` (any offset into the
// page), the second, if it is the last, at `second`; `list_iova` lists all but the first.
GIO_FN gio_u128 gio_prp_pointer(uint32_t pages, uint64_t first, uint64_t second,
                                uint64_t list_iova) {
  return gio_u128{first, pages == 1u ? 0u : pages == 2u ? second : list_iova};
}

// The fields of a submission entry other than its data pointer and LBAs.
struct gio_command {
  uint32_t dword0; // opcode, PSDT; the CID is added
  uint32_t nsid;
  uint32_t dword12; // FUA, DTYPE; the number of LBAs is added
  uint32_t dword13; // DSPEC
};

GIO_FN void gio_sqe_write(void *sqe, const gio_command &c, uint32_t cid, gio_u128 data,
                          uint64_t lba, uint32_t lbas) {
  gio_u128 *quarter = static_cast<gio_u128 *>(sqe);
  gio_st16(quarter, gio_u128{static_cast<uint64_t>(c.nsid) << 32 | cid << 16 | c.dword0, 0});
  gio_st16(quarter + 1, gio_u128{0, data.lo});
  gio_st16(quarter + 2, gio_u128{data.hi, lba});
  const uint64_t dword13 = c.dword13;
  gio_st16(quarter + 3, gio_u128{dword13 << 32 | c.dword12 | (lbas - 1u), 0});
}

// Submits `n` written entries: one fence, one doorbell.
GIO_FN void gio_ring_sq(gio_state &s, uint32_t n) {
  s.sq_tail = (s.sq_tail + n) & s.slot_mask;
  GIO_LANES (l, 1) {
    gio_fence_release_sys();
    gio_doorbell(gio_ptr<uint32_t>(s.w->sq_doorbell), s.sq_tail);
    gio_st_relaxed_sys(&s.w->commands, s.w->commands + n);
    gio_st_relaxed_sys(&s.w->sq_doorbells, s.w->sq_doorbells + 1u);
    gio_st_relaxed_sys(&s.w->outstanding, s.outstanding);
  }
}

// Reads up to 32 completion entries from the head on; returns the number of new ones. An entry is
// new if its phase is that of this pass: 1 in the first, then alternating.
GIO_FN uint32_t gio_poll_cq(gio_state &s, gio_lane<uint64_t> &cqe) {
  const uint32_t most = s.checked != 0u ? GIO_REAP_CHECKED : GIO_WARP;
  const uint32_t n = gio_min(most, s.slot_mask + 1u);
#if GIO_DEVICE
  // After a poll that found nothing, one entry first: the queue may be behind a link.
  for (uint32_t look = s.quiet != 0u ? 1u : n;; look = n) {
    gio_lane<uint32_t> old;
    GIO_LANES (l, look) {
      const uint32_t at = s.cq_head + l, phase = (at >> s.depth_log2 ^ 1u) & 1u;
      cqe[l] = gio_ld_cqe(s.cq + (at & s.slot_mask), phase);
      old[l] = (static_cast<uint32_t>(cqe[l] >> 48) ^ phase) & 1u;
    }
    const uint32_t stale = gio_ballot(old, look);
    const uint32_t found = stale != 0u ? gio_lowest(stale) : look;
    s.quiet = found == 0u ? 1u : 0u;
    if (found == 0u || look == n) return found;
  }
#else
  // One lane after the other: an idle poll then costs one load instead of 32.
  uint32_t l = 0;
  for (; l < n; ++l) {
    const uint32_t at = s.cq_head + l, phase = (at >> s.depth_log2 ^ 1u) & 1u;
    cqe[l] = gio_ld_cqe(s.cq + (at & s.slot_mask), phase);
    if ((cqe[l] >> 48 & 1u) != phase) break;
  }
  return l;
#endif
}

// Kind of a completion entry.
#define GIO_CQE_DONE 0x10u // of an outstanding command
#define GIO_CQE_LATE 0x20u // of a quarantined command; other values are GIO_FAULT_*

// Frees the slot named by a completion, if valid. Two completions of one CID contend for the slot's
// word, so the second is a fault even if both arrive in one poll.
GIO_FN uint32_t gio_claim(gio_state &s, uint64_t cqe) {
  const uint32_t sqhd = static_cast<uint32_t>(cqe) & 0xffffu;
  const uint32_t sqid = static_cast<uint32_t>(cqe) >> 16;
  const uint32_t cid = static_cast<uint32_t>(cqe >> 32) & 0xffffu;
  if (sqid != s.w->qid) return GIO_FAULT_SQID;
  if (sqhd > s.slot_mask) return GIO_FAULT_SQHD;
  const uint32_t generation = cid >> s.depth_log2;
  uint32_t *word = gio_slot_word(s.slots + (cid & s.slot_mask));
  const uint32_t free = gio_slot_value(generation, GIO_SLOT_FREE);
  const uint32_t outstanding = gio_slot_value(generation, GIO_SLOT_OUTSTANDING);
  const uint32_t quarantined = gio_slot_value(generation, GIO_SLOT_QUARANTINED);
  const uint32_t found = gio_cas_relaxed_cta(word, outstanding, free);
  if (found == outstanding) return GIO_CQE_DONE;
  if (found != quarantined) return GIO_FAULT_CID;
  return gio_cas_relaxed_cta(word, quarantined, free) == quarantined ? GIO_CQE_LATE : GIO_FAULT_CID;
}

GIO_FN void gio_note_fault(gio_state &s, uint32_t fault) {
  if (s.pending_fault == GIO_FAULT_NONE) s.pending_fault = fault;
}

// Takes up to 32 completions: frees their slots, settles their operations, rings the CQ doorbell
// once. Returns their number. Sets s.pending_fault if one of them is invalid.
GIO_FN uint32_t gio_reap(gio_state &s) {
  gio_lane<uint64_t> cqe;
  const uint32_t n = gio_poll_cq(s, cqe);
  if (n == 0u) return 0;
  gio_fence_acq_rel_sys();
  gio_lane<uint32_t> kind, flag;
  gio_ended e;
  GIO_LANES (l, n) {
    kind[l] = gio_claim(s, cqe[l]);
    const gio_slot *slot = s.slots + (static_cast<uint32_t>(cqe[l] >> 32) & s.slot_mask);
    const uint32_t status = static_cast<uint32_t>(cqe[l] >> 49);
    e.active[l] = slot->active;
    e.row[l] = slot->row;
    e.first[l] = slot->first;
    e.count[l] = slot->count;
    e.lbas[l] = slot->bytes >> s.w->lba_shift;
    e.status[l] = status != 0u ? GIO_STATUS_NVME | status : GIO_STATUS_OK;
    flag[l] = kind[l] == GIO_CQE_DONE ? 1u : 0u;
  }
  const uint32_t done = gio_ballot(flag, n);
  uint32_t freed = done;
  if (done != gio_low_bits(n)) { // some are late or invalid
    GIO_LANES (l, n) flag[l] = kind[l] == GIO_CQE_LATE ? 1u : 0u;
    const uint32_t late = gio_ballot(flag, n);
    freed |= late;
    const uint32_t wrong = gio_low_bits(n) & ~freed;
    if (late != 0u) gio_count(&s.w->late, gio_popc(late));
    if (wrong != 0u) gio_note_fault(s, gio_shfl(kind, gio_lowest(wrong)));
    s.quarantined -= gio_popc(late);
  }
  GIO_LANES (l, n) {
    if ((freed >> l & 1u) == 0u) continue;
    s.free_slots[s.free_count + gio_popc(gio_below(freed, l))] =
        static_cast<uint16_t>(static_cast<uint32_t>(cqe[l] >> 32) & s.slot_mask);
  }
  s.free_count += gio_popc(freed);
  s.outstanding -= gio_popc(done);
  s.cq_head += n;
  GIO_LANES (l, 1) {
    gio_doorbell(gio_ptr<uint32_t>(s.w->cq_doorbell), s.cq_head & s.slot_mask);
    gio_st_relaxed_sys(&s.w->cq_doorbells, s.w->cq_doorbells + 1u);
    gio_st_relaxed_sys(&s.w->outstanding, s.outstanding);
    gio_st_relaxed_sys(&s.w->quarantined, s.quarantined);
  }
  if (s.checked != 0u) gio_verify(s, e, n, done);
  gio_settle(s, e, n, done);
  return n;
}

// Returns true if a command submitted at `since` has timed out. A timeout of 0 means none.
GIO_FN bool gio_overdue(const gio_state &s, uint64_t now, uint64_t since) {
  const uint64_t timeout = s.args->timeout_ns;
  return timeout != 0u && static_cast<int64_t>(now - since) >= static_cast<int64_t>(timeout);
}

// Checks for timed-out commands, at most every eighth of the timeout. If the last sweep was longer
// ago than the timeout, this warp did not run meanwhile (the process was stopped, another one had
// the GPU), and perhaps the controller did not run either: then the timeout of every command starts
// anew. Not in virtual time, which jumps.
GIO_FN void gio_sweep(gio_state &s) {
  if (s.outstanding == 0u || s.args->timeout_ns == 0u) return;
  const uint64_t now = gio_now(s);
  const uint64_t pause = now - s.w->swept_ns;
  if (pause < s.args->timeout_ns >> 3) return;
  gio_meet();
  GIO_LANES (l, 1) s.w->swept_ns = now;
  const bool stopped = pause > s.args->timeout_ns && s.args->clock == 0u;
  for (uint32_t base = 0; base <= s.slot_mask; base += GIO_WARP) {
    const uint32_t n = gio_min(GIO_WARP, s.slot_mask + 1u - base);
    gio_lane<uint32_t> late;
    GIO_LANES (l, n) {
      gio_slot *slot = s.slots + base + l;
      if (stopped) slot->since_ns = now;
      const bool out = gio_slot_outstanding(slot);
      late[l] = out && gio_overdue(s, now, slot->since_ns) ? 1u : 0u;
    }
    if (gio_ballot(late, n) != 0u) gio_note_fault(s, GIO_FAULT_TIMEOUT);
  }
}

// Returns true if the next operation's event has timed out. The queue then fails, as for a command:
// that operation, and all after it, complete with errors and signal their events, so that no stream
// waits forever, even if the host's threads are gone. If the last check was longer ago than the
// timeout, this warp did not run meanwhile: then the wait starts anew.
GIO_FN bool gio_waited_out(gio_state &s) {
  const uint64_t most = s.args->event_timeout_ns;
  if (s.waiting == 0u || most == 0u) return false;
  gio_lane<uint32_t> late;
  GIO_LANES (l, 1) {
    const uint64_t *clock = gio_ptr<const uint64_t>(s.args->clock);
    const uint64_t now = clock != nullptr ? gio_ld_relaxed_sys(clock) : gio_clock_ns();
    const bool stopped = now - s.w->waited_ns > most && clock == nullptr;
    if (s.w->waiting_ns == 0u || stopped) s.w->waiting_ns = now;
    s.w->waited_ns = now;
    late[l] = now - s.w->waiting_ns >= most ? 1u : 0u;
  }
  return gio_shfl(late, 0) != 0u;
}

// Fails the queue: all outstanding commands end now, and their slots stay quarantined, because the
// controller may still do DMA for them.
GIO_FN void gio_fail(gio_state &s) {
  const uint32_t fault = s.pending_fault;
  s.fault = fault;
  GIO_LANES (l, 1) {
    gio_st_relaxed_sys(&s.w->fault, fault);
    gio_relay *r = gio_ptr<gio_relay>(s.args->relay);
    if (r != nullptr) gio_add_relaxed_gpu(&r->failed, 1u);
  }
  const uint64_t now = gio_now(s);
  for (uint32_t base = 0; base <= s.slot_mask; base += GIO_WARP) {
    const uint32_t n = gio_min(GIO_WARP, s.slot_mask + 1u - base);
    gio_lane<uint32_t> flag;
    gio_ended e;
    GIO_LANES (l, n) {
      gio_slot *slot = s.slots + base + l;
      const bool out = gio_slot_outstanding(slot);
      if (out) *gio_slot_word(slot) += (GIO_SLOT_QUARANTINED - GIO_SLOT_OUTSTANDING) << 16;
      e.active[l] = slot->active;
      e.first[l] = slot->first;
      e.count[l] = slot->count;
      e.lbas[l] = 0;
      e.status[l] = gio_overdue(s, now, slot->since_ns) ? GIO_STATUS_TIMEOUT : GIO_STATUS_FAULT;
      flag[l] = out ? 1u : 0u;
    }
    const uint32_t ended = gio_ballot(flag, n);
    s.outstanding -= gio_popc(ended);
    s.quarantined += gio_popc(ended);
    gio_settle(s, e, n, ended);
  }
  GIO_LANES (l, 1) {
    gio_st_relaxed_sys(&s.w->outstanding, s.outstanding);
    gio_st_relaxed_sys(&s.w->quarantined, s.quarantined);
  }
}
