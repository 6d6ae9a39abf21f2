// The registers of a running warp: the mutable half of its gio_warp, and the addresses
// needed for polling. Loaded when a turn begins, stored when it ends. All of it is
// warp-uniform.
#pragma once
#include "warp.cuh"

// gio_slot.state
#define GIO_SLOT_FREE 0u
#define GIO_SLOT_OUTSTANDING 1u
#define GIO_SLOT_QUARANTINED 2u
// gio_slot.count: this bit marks a split of an object that is not the object's last one.
#define GIO_SLOT_SPLIT 0x80u

// Generation and state of a slot form one word, for which lanes contend. The kernel never accesses
// its halves.
GIO_FN uint32_t *gio_slot_word(gio_slot *slot) { return reinterpret_cast<uint32_t *>(slot); }
GIO_FN uint32_t gio_slot_value(uint32_t generation, uint32_t state) {
  return generation | state << 16;
}
GIO_FN bool gio_slot_outstanding(gio_slot *slot) {
  return *gio_slot_word(slot) >> 16 == GIO_SLOT_OUTSTANDING;
}

// gio_active.state
#define GIO_ACTIVE_UNUSED 0u
#define GIO_ACTIVE_GENERATING 1u
#define GIO_ACTIVE_GENERATED 2u

struct gio_state {
  gio_warp *w;
  const gio_args *args;
  gio_slot *slots;
  uint16_t *free_slots;
  const gio_u128 *cq;
  uint32_t depth_log2;
  uint32_t slot_mask; // depth - 1

  uint32_t sq_tail;
  uint32_t cq_head;
  uint32_t ring_head;
  uint32_t free_count;
  uint32_t outstanding;
  uint32_t quarantined;
  uint32_t cursor_active;
  uint32_t cursor_row;
  uint32_t cursor_at;
  uint32_t fault;
  uint64_t idle_ns;

  uint32_t window;        // one bit per operation in progress
  uint32_t checked;       // operations in progress whose objects have checksums to verify
  uint32_t pending_fault; // GIO_FAULT_* seen in this round, not yet handled
  // Results of gio_look.
  uint32_t polled : 1; // in this round
  uint32_t stopped : 1;
  uint32_t drained : 1; // ... and the ring has no entries that are not in the relay
  uint32_t leaving : 1; // this launch
  uint32_t decided : 1; // warp 0 wrote `exited` in this launch
  uint32_t quiet : 1;   // the last poll of the completion queue found nothing
  uint32_t next : 1;    // the ring has another entry, whose IOCB is `id`
  uint32_t waiting : 1; // that operation, whose IOCB is in w->op, waits for its event
  uint32_t id;
  uint32_t event;
};

// Returns IOCB `id`, and the ring entry at `position`, where the warps read them: in the relay, if
// there is one.
GIO_FN const gio_iocb *gio_iocb_at(const gio_args *args, uint32_t id) {
  const uint64_t at = args->relay != 0u ? args->relay + sizeof(gio_relay) : args->iocbs;
  return gio_ptr<const gio_iocb>(at) + id;
}
GIO_FN uint64_t gio_entry_at(const gio_args *args, uint32_t position) {
  const uint64_t after = sizeof(gio_relay) + (args->ring_mask + 1u) * sizeof(gio_iocb);
  const uint64_t at = args->relay != 0u ? args->relay + after : args->sq_ring;
  return at + (position & args->ring_mask) * sizeof(uint64_t);
}

GIO_FN void gio_load(gio_state &s, const gio_args *args, uint32_t warp) {
  gio_warp *w = gio_ptr<gio_warp>(args->warps) + warp;
  s.w = w;
  s.args = args;
  s.slots = gio_ptr<gio_slot>(w->slots);
  s.free_slots = gio_ptr<uint16_t>(w->free_slots);
  s.cq = gio_ptr<const gio_u128>(w->cq);
  s.depth_log2 = w->depth_log2;
  s.slot_mask = (1u << w->depth_log2) - 1u;
  s.sq_tail = w->sq_tail;
  s.cq_head = w->cq_head;
  s.ring_head = w->ring_head;
  s.free_count = w->free_count;
  s.outstanding = w->outstanding;
  s.quarantined = w->quarantined;
  s.cursor_active = w->cursor_active;
  s.cursor_row = w->cursor_row;
  s.cursor_at = w->cursor_at;
  s.fault = w->fault;
  s.idle_ns = w->idle_ns;
  s.window = w->window;
  s.checked = w->checked;
  s.pending_fault = GIO_FAULT_NONE;
  s.waiting = 0;
  s.polled = 0;
  s.stopped = 0;
  s.drained = 0;
  s.leaving = 0;
  s.decided = 0;
  s.quiet = 0;
  s.next = 0;
  s.id = 0;
  s.event = 0;
}

// Does not store fault, outstanding, quarantined and the counters: the host reads those at any
// time, so gio_st_relaxed_sys stores them when they change.
GIO_FN void gio_store(gio_state &s) {
  GIO_LANES (l, 1) {
    s.w->sq_tail = s.sq_tail;
    s.w->cq_head = s.cq_head;
    s.w->ring_head = s.ring_head;
    s.w->free_count = s.free_count;
    s.w->cursor_active = s.cursor_active;
    s.w->cursor_row = s.cursor_row;
    s.w->cursor_at = s.cursor_at;
    s.w->idle_ns = s.idle_ns;
    s.w->window = s.window;
    s.w->checked = s.checked;
  }
}

// Returns the time in nanoseconds: the ring's virtual time, or else the processor's clock. Only
// lane 0 reads it, so that all lanes see the same time.
GIO_FN uint64_t gio_now(gio_state &s) {
  gio_lane<uint64_t> now;
  GIO_LANES (l, 1) {
    const uint64_t *word = gio_ptr<const uint64_t>(s.args->clock);
    now[l] = word != nullptr ? gio_ld_relaxed_sys(word) : gio_clock_ns();
  }
  return gio_shfl(now, 0);
}

// Returns the status for operations that can no longer be submitted; 0 if they can.
GIO_FN uint32_t gio_refusal(const gio_state &s) {
  return s.fault != GIO_FAULT_NONE ? GIO_STATUS_FAULT : s.stopped != 0u ? GIO_STATUS_CANCELLED : 0u;
}

GIO_FN void gio_set_status(uint64_t statuses, uint32_t index, uint32_t status) {
  gio_st_relaxed_sys(gio_ptr<uint32_t>(statuses) + index, status);
}
