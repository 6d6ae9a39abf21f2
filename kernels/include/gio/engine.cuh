// The I/O kernel: rounds of a warp, each of which reaps, polls, checks for timeouts and submits.
//
// Submission works in chunks: 32 splits are located, neighbours on the device are merged into runs
// of one command each, every lane writes its own part of the descriptors, and the first lane of a
// run writes the SQE. Up to 32 SQEs share one fence and one doorbell.
#pragma once
#include "cursor.cuh"

#define GIO_CHUNKS_MAX 64u // chunks per round: completions are reaped even if little is submitted
#define GIO_POLL_EVERY 64u // busy rounds between polls of stop word and timeouts
#define GIO_RELAY_EVERY 4u // busy rounds without an operation to generate, between two for news

// Return values of gio_host_run.
#define GIO_RUN_MOVED 1u    // something was submitted, completed or rejected
#define GIO_RUN_IDLE 2u     // nothing is in progress: only a new submission changes that
#define GIO_RUN_FINISHED 4u // stopped, or exited

// The commands of one doorbell.
struct gio_batch {
  uint32_t sqes;
  uint32_t room;   // number of commands that may still be added
  uint32_t record; // one bit per command: it writes objects whose checksums are to be stored
  uint64_t now;
};

// Bit masks over a chunk's lanes: the lanes with commands, and the commands' leaders.
struct gio_chunk {
  uint32_t n;       // lanes used
  uint32_t go;      // lanes whose split is submitted
  uint32_t leaders; // the first lane of each command
  uint32_t refused;
};

// Returns true if a command of `lbas` LBAs would cross the boundary.
GIO_FN bool gio_crosses(const gio_op &op, uint64_t lba, uint32_t lbas) {
  if (op.boundary_lbas == 0u) return false;
  return lba / op.boundary_lbas != (lba + lbas - 1u) / op.boundary_lbas;
}

// Returns the lanes that start a run of neighbours, and every merge-th lane of a run.
GIO_FN uint32_t gio_leaders(const gio_op &op, gio_splits &p, uint32_t go, uint32_t n) {
  if (op.merge == 1u) return go;
  gio_lane<uint64_t> before;
  gio_lane<uint32_t> flag;
  gio_from_below(before, p.lba, n);
  GIO_LANES (l, n) {
    const bool neighbour =
        l != 0u && (go >> (l - 1u) & 1u) != 0u && p.lba[l] == before[l] + op.slot_lbas &&
        !gio_crosses(op, before[l], op.slot_lbas * 2u);
    flag[l] = (go >> l & 1u) != 0u && !neighbour ? 1u : 0u;
  }
  const uint32_t heads = gio_ballot(flag, n);
  GIO_LANES (l, n) {
    if ((go >> l & 1u) == 0u) {
      flag[l] = 0;
    } else {
      const uint32_t head = gio_highest(heads & gio_low_bits(l + 1u));
      flag[l] = (l - head) % op.merge == 0u ? 1u : 0u;
    }
  }
  return gio_ballot(flag, n);
}

// Groups the located lanes into commands: no more than there is room for, and without cutting off a
// run at the end of the chunk that could have been longer.
GIO_FN gio_chunk gio_plan(gio_state &s, const gio_op &op, gio_splits &p, uint32_t n,
                          uint32_t room) {
  gio_lane<uint32_t> flag;
  gio_chunk c;
  GIO_LANES (l, n) {
    const uint32_t v = p.verdict[l];
    flag[l] = v == GIO_VERDICT_GO || v == GIO_VERDICT_GO_SPLIT ? 1u : 0u;
  }
  c.go = gio_ballot(flag, n);
  c.refused = 0;
  if (c.go != gio_low_bits(n)) {
    GIO_LANES (l, n) flag[l] = p.verdict[l] > GIO_VERDICT_GO_SPLIT ? 1u : 0u;
    c.refused = gio_ballot(flag, n);
  }
  c.leaders = gio_leaders(op, p, c.go, n);
  c.n = n;
  if (gio_popc(c.leaders) > room) {
    c.n = gio_nth_bit(c.leaders, room);
  } else if (op.merge > 1u && c.leaders != 0u && n < gio_splits_left(s, op)) {
    const uint32_t last = gio_highest(c.leaders);
    const bool open = c.go >> (n - 1u) != 0u && n - last < op.merge;
    if (open && last != 0u) c.n = last;
  }
  const uint32_t used = gio_low_bits(c.n);
  c.go &= used;
  c.leaders &= used;
  c.refused &= used;
  return c;
}

GIO_FN void gio_refuse_lanes(gio_state &s, const gio_op &op, gio_splits &p, const gio_chunk &c) {
  GIO_LANES (l, c.n) {
    if ((c.refused >> l & 1u) != 0u) gio_set_status(op.iocb.status, p.index[l], p.verdict[l]);
  }
  const uint32_t one = gio_lowest(c.refused);
  const uint64_t error = static_cast<uint64_t>(gio_shfl(p.verdict, one)) << 32;
  gio_refused(s, s.cursor_active, gio_popc(c.refused), error | gio_shfl(p.index, one));
}

// Returns the slot, for CID and descriptor area, of the command with the rank-th leader of the
// chunk. Slots are taken off the stack in the order of the ranks.
GIO_FN uint32_t gio_slot_of(const gio_state &s, uint32_t rank) {
  return s.free_slots[s.free_count - 1u - rank];
}

// Returns the number of lanes of the command with leader `lead`.
GIO_FN uint32_t gio_run_length(const gio_chunk &c, uint32_t lead) {
  const uint32_t stops = gio_above(c.leaders | ~c.go, lead);
  return (stops != 0u ? gio_lowest(stops) : GIO_WARP) - lead;
}

// Writes lane l's part of the descriptors; returns the data pointer, which only a leader uses.
// `second` is the address in the next lane.
GIO_FN gio_u128 gio_describe(const gio_state &s, const gio_op &op, const gio_segment &segment,
                             uint64_t second, uint32_t slot, uint32_t at, uint32_t count) {
  const uint64_t offset = static_cast<uint64_t>(slot) * s.w->descriptor_bytes;
  const uint64_t area = s.w->descriptors + offset;
  const uint64_t area_iova = s.w->descriptors_iova + offset;
  if (op.prp != 0u) {
    const uint32_t own = gio_prp_pages(segment.iova, segment.data, op.page_bytes);
    const uint32_t pages = own * count; // merged objects are whole pages, all of the same number
    gio_prp_write(gio_ptr<uint64_t>(area), at * own, pages, segment, op.page_bytes);
    const uint64_t page = segment.iova & ~(static_cast<uint64_t>(op.page_bytes) - 1u);
    if (own == 2u) second = page + op.page_bytes;
    return gio_prp_pointer(pages, segment.iova, second, area_iova);
  }
  const uint32_t own = gio_sgl_entries(segment); // merged objects have equal padding
  if (own * count > 1u) gio_sgl_write(gio_ptr<gio_u128>(area), at * own, segment, op);
  return gio_sgl_pointer(own * count, segment, op, area_iova);
}

// Writes the chunk's descriptors, slots and SQEs after those of the batch.
GIO_FN void gio_emit(gio_state &s, const gio_op &op, gio_splits &p, const gio_chunk &c,
                     gio_batch &batch) {
  gio_command command;
  command.dword0 = op.iocb.opcode | (op.prp != 0u ? 0u : GIO_SQE_SGL);
  command.nsid = s.w->nsid;
  command.dword12 = 0;
  command.dword13 = 0;
  if (op.iocb.opcode == GIO_OP_WRITE) {
    if ((op.iocb.flags & GIO_FLAG_FUA) != 0u) command.dword12 = GIO_SQE_FUA;
    const uint32_t handle = op.iocb.placement - 1u;
    if (handle < gio_min(s.w->placements, GIO_PLACEMENTS)) {
      command.dword12 |= GIO_SQE_PLACEMENT;
      command.dword13 = static_cast<uint32_t>(s.w->placement_ids[handle]) << 16;
    }
  }
  gio_lane<uint64_t> second;
  if (op.prp != 0u && op.merge > 1u) {
    gio_from_above(second, p.iova, c.n);
  } else {
    GIO_LANES (l, c.n) second[l] = 0;
  }
  const uint64_t sq = s.w->sq;
  GIO_LANES (l, c.n) {
    if ((c.go >> l & 1u) == 0u) continue;
    const uint32_t lead = gio_highest(c.leaders & gio_low_bits(l + 1u));
    const uint32_t rank = gio_popc(gio_below(c.leaders, lead));
    const uint32_t count = gio_run_length(c, lead);
    const uint32_t slot = gio_slot_of(s, rank);
    const gio_segment segment{p.iova[l], p.data[l], p.pad[l]};
    const gio_u128 data = gio_describe(s, op, segment, second[l], slot, l - lead, count);
    if (l != lead) continue;
    const uint32_t cid = gio_next_cid(s, slot);
    const uint32_t bytes = (p.data[l] + p.pad[l]) * count;
    gio_slot *entry = s.slots + slot;
    *gio_slot_word(entry) = gio_slot_value(cid >> s.depth_log2, GIO_SLOT_OUTSTANDING);
    const uint32_t part = p.verdict[l] == GIO_VERDICT_GO_SPLIT ? GIO_SLOT_SPLIT : 0u;
    entry->active = static_cast<uint8_t>(s.cursor_active);
    entry->count = static_cast<uint8_t>(count | part);
    entry->row = static_cast<uint16_t>(op.row);
    entry->first = p.index[l];
    entry->bytes = bytes;
    entry->since_ns = batch.now;
    const uint64_t at = (s.sq_tail + batch.sqes + rank) & s.slot_mask;
    gio_sqe_write(gio_ptr<void>(sq + at * GIO_SQE_BYTES), command, cid, data, p.lba[l],
                  bytes >> op.lba_shift);
  }
  const uint32_t n = gio_popc(c.leaders);
  GIO_LANES (l, 1) s.w->active[s.cursor_active].outstanding += n;
  s.free_count -= n;
  s.outstanding += n;
  const bool record = op.iocb.opcode == GIO_OP_WRITE && op.iocb.checksums != 0u;
  if (record) batch.record |= gio_low_bits(n) << batch.sqes;
  batch.sqes += n;
  batch.room -= n;
}

// Rejects up to 32 IOCTXs from the cursor on, each with all its unsubmitted splits.
GIO_FN void gio_refuse(gio_state &s, const gio_op &op, uint32_t status) {
  const uint32_t at = s.cursor_at / op.splits;
  const uint32_t n = gio_min(GIO_WARP, op.end - op.begin - at);
  GIO_LANES (l, n) gio_set_status(op.iocb.status, op.begin + at + l, status);
  gio_refused(s, s.cursor_active, n, static_cast<uint64_t>(status) << 32 | (op.begin + at));
  s.cursor_at = (at + n) * op.splits;
}

// Submits the batch, and while the controller executes it stores the checksums of the objects that
// it writes. Their memory does not change until their operations complete. The commands' slots are
// still above the top of the stack of free ones.
GIO_FN void gio_send(gio_state &s, const gio_batch &batch) {
  gio_ring_sq(s, batch.sqes);
  if (batch.record == 0u) return;
  gio_crc crc;
  gio_crc_begin(crc);
  for (uint32_t left = batch.record; left != 0u; left &= left - 1u) {
    const uint32_t at = s.free_count + batch.sqes - 1u - gio_lowest(left);
    const gio_slot *slot = s.slots + s.free_slots[at];
    if ((slot->count & GIO_SLOT_SPLIT) != 0u) continue;
    gio_check(s, crc, slot->active, slot->row, slot->first, slot->count);
  }
}

// Advances the operation by one chunk.
GIO_FN void gio_advance(gio_state &s, const gio_op &op, gio_batch &batch) {
  gio_splits p;
  const uint32_t n = gio_min(GIO_WARP, gio_splits_left(s, op));
  gio_locate(s, op, p, n);
  const gio_chunk c = gio_plan(s, op, p, n, batch.room);
  if (c.refused != 0u) gio_refuse_lanes(s, op, p, c);
  if (c.leaders != 0u) gio_emit(s, op, p, c, batch);
  s.cursor_at += c.n;
  // An object's last command may be followed by empty splits, which are skipped. In the middle of
  // an object, more of it follows.
  if (op.splits != 1u && gio_shfl(p.verdict, c.n - 1u) == GIO_VERDICT_GO) {
    s.cursor_at += (op.splits - s.cursor_at % op.splits) % op.splits;
  }
}

// Returns true to wait for more room: a doorbell costs the same for few and many commands. The
// controller still has three quarters of a queue to work on.
GIO_FN bool gio_hold(const gio_state &s, uint32_t room) {
  return room < gio_min(GIO_BATCH_MIN, s.slot_mask / 4u + 1u) && s.outstanding != 0u;
}

// Ends the generation of the cursor's operation.
GIO_FN void gio_generated(gio_state &s) {
  const uint32_t a = s.cursor_active;
  GIO_LANES (l, 1) s.w->active[a].state = GIO_ACTIVE_GENERATED;
  s.cursor_active = GIO_WINDOW;
  gio_finish_if_done(s, a);
}

// Moves the cursor past rows in which this warp has nothing left. Returns false at the end.
GIO_FN bool gio_find_row(gio_state &s, const gio_op &op) {
  while (s.cursor_row < op.rows && gio_splits_left(s, op) == 0u) {
    gio_next_row(s);
  }
  return s.cursor_row < op.rows;
}

// Generates and submits one batch. Returns true if anything moved.
GIO_FN bool gio_submit(gio_state &s) {
  bool moved = false;
  gio_batch batch{0, gio_min(gio_room(s), GIO_WARP), 0, 0};
  const gio_op &op = s.w->op;
  for (uint32_t chunk = 0; chunk < GIO_CHUNKS_MAX; ++chunk) {
    if (s.cursor_active == GIO_WINDOW) {
      if (!gio_accept(s, batch.sqes == 0u)) break;
      moved = true;
    }
    if (!gio_find_row(s, op)) {
      gio_generated(s);
      moved = true;
      continue;
    }
    const uint32_t refusal = op.invalid != 0u ? op.invalid : gio_refusal(s);
    if (refusal != 0u) {
      gio_refuse(s, op, refusal);
    } else {
      if (batch.room == 0u || (batch.sqes == 0u && gio_hold(s, batch.room))) break;
      if (batch.sqes == 0u) batch.now = gio_now(s);
      gio_advance(s, op, batch);
    }
    moved = true;
  }
  if (batch.sqes != 0u) gio_send(s, batch);
  return moved;
}

// Returns true if warp 0 exits this launch, for all warps: nothing was left to do for a while.
GIO_FN bool gio_decides(gio_state &s) {
  if (s.decided == 0u) {
    gio_lane<uint32_t> tail;
    GIO_LANES (l, 1) tail[l] = gio_ld_relaxed_gpu(gio_ptr<const uint32_t>(s.args->cq_tail));
    if (gio_shfl(tail, 0) != s.ring_head) return false;
    const uint64_t now = gio_now(s);
    if (s.idle_ns == 0u) s.idle_ns = now;
    if (now - s.idle_ns < s.args->linger_ns) return false;
    GIO_LANES (l, 1) gio_st_relaxed_sys(gio_ptr<uint64_t>(s.args->exited), s.args->launch);
    s.decided = 1;
  }
  gio_fence_sc_sys();
  const uint64_t *at = gio_ptr<const uint64_t>(s.args->sq_ring) + (s.ring_head & s.args->ring_mask);
  if (gio_common_acquire(at) >> 32 == s.ring_head + 1u) return false;
  GIO_LANES (l, 1) gio_st_release_gpu(&gio_ptr<gio_relay>(s.args->relay)->left, s.args->launch);
  return true;
}

// Returns true if the warp can exit this launch. Call it only after a round in which nothing
// moved.
//
// A kernel that never exits would block an engine that waits for the whole GPU, so it exits after
// some time without work, and the host launches it again with the next submission. No submission is
// lost: warp 0 decides, once everything that it took is complete. It writes the number of this
// launch to `exited`, then checks the ring once more; the host writes the ring, then checks
// `exited` (CudaExecutor::submitted).
//
// Ordering: each side has a sequentially consistent fence between its write and its read, so at
// least one of the two sees the other's write: the host launches the next kernel, which starts when
// this one has ended, or warp 0 continues. `exited` is never reset: warp 0 processes the entry that
// it found, and checks again. Only then it writes the launch to the relay's `left`, for the other
// warps: every entry for which the host relied on this launch was complete on warp 0, and so was in
// the relay before. (gio-uring/src/ring/loom_tests.rs models this.)
GIO_FN bool gio_should_exit(gio_state &s) {
  if (s.window != 0u) return false;
  if (s.stopped != 0u) {
    if (s.drained == 0u) return false;
  } else if (s.waiting != 0u) {
    if (gio_waited_out(s)) gio_note_fault(s, GIO_FAULT_EVENT); // handled in the next round
    return false;
  } else if (s.args->exited == 0u) {
    return false;
  } else if (s.w == gio_ptr<gio_warp>(s.args->warps)) {
    return gio_decides(s);
  } else if (s.leaving == 0u) {
    return false;
  }
  // The look that found the reason may have read the ring before.
  gio_fence_acq_rel_sys();
  gio_look(s);
  return s.next == 0u;
}

// Runs one round. Returns true if anything moved.
GIO_FN bool gio_round(gio_state &s, bool poll) {
  bool moved = gio_reap(s) != 0u;
  s.polled = 0;
  if (poll) {
    gio_poll(s);
    gio_sweep(s);
  }
  if (s.pending_fault != GIO_FAULT_NONE && s.fault == GIO_FAULT_NONE) {
    gio_fail(s);
    moved = true;
  }
  moved = gio_submit(s) || moved;
  if (moved) s.idle_ns = 0;
  return moved;
}

// The entry points: a launch on the GPU, rounds of a host thread.

#if GIO_DEVICE

#define GIO_NAP_NS 64u
#define GIO_NAP_NS_MAX 1024u

// One warp per queue pair. Ends after args.linger_ns without work (gio_should_exit), or after the
// stop word: in that case at most one command timeout later, when all outstanding commands have
// completed or timed out.
extern "C" __global__ void __launch_bounds__(128, 4)
    gio_kernel(const __grid_constant__ gio_args args) {
  const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / GIO_WARP;
  if (warp >= args.warp_count) return;
  gio_state s;
  gio_load(s, &args, warp);
  uint32_t idle = 1;
  uint32_t since_poll = 0;
  for (;;) {
    const uint32_t every = s.cursor_active == GIO_WINDOW ? GIO_RELAY_EVERY : GIO_POLL_EVERY;
    const bool poll = idle != 0u || ++since_poll >= every;
    if (poll) since_poll = 0;
    if (gio_round(s, poll)) {
      idle = 0;
      continue;
    }
    if (gio_should_exit(s)) break;
    gio_nap(gio_min(GIO_NAP_NS << gio_min(idle, 8u), GIO_NAP_NS_MAX));
    idle += 1u;
  }
  gio_store(s);
}

#else

// Runs up to args.rounds rounds of one warp, fewer if nothing moves. Returns GIO_RUN_*.
static uint32_t gio_host_rounds(const gio_args *args, uint32_t warp) {
  gio_state s;
  gio_load(s, args, warp);
  uint32_t result = 0;
  for (uint32_t round = 0;; ++round) {
    const bool moved = gio_round(s, round % GIO_POLL_EVERY == 0u);
    if (moved) {
      result |= GIO_RUN_MOVED;
      if (round + 1u < args->rounds) continue;
      break;
    }
    if (gio_should_exit(s)) result |= GIO_RUN_FINISHED;
    // Its event timed out: the next round handles it.
    if (s.pending_fault != GIO_FAULT_NONE && s.fault == GIO_FAULT_NONE) continue;
    if (s.window == 0u && s.waiting == 0u) result |= GIO_RUN_IDLE;
    break;
  }
  gio_store(s);
  return result;
}

// Runs warps [first, first + count) one after the other. Returns MOVED if one of them moved; IDLE
// and FINISHED if all of them report it.
extern "C" uint32_t gio_host_run(const gio_args *args, uint32_t first, uint32_t count) {
  uint32_t moved = 0;
  uint32_t all = GIO_RUN_IDLE | GIO_RUN_FINISHED;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t result = gio_host_rounds(args, first + i);
    moved |= result & GIO_RUN_MOVED;
    all &= result;
  }
  return moved | all;
}

// For tests: returns the CRC as computed by a warp of this kernel (`how` 0) or of the pool's (4),
// or by GIO_CRC_BY_* as far as the processor supports it.
extern "C" uint32_t gio_host_crc32c(uint64_t at, uint32_t bytes, uint32_t how) {
  if (how != 0u && how != 4u) return gio_crc_by(gio_min(how, gio_crc_best()), at, bytes);
  gio_crc crc;
  gio_crc_lanes_begin(crc);
  return how == 0u ? gio_crc_lanes<4u>(crc, at, bytes) : gio_crc_lanes<2u>(crc, at, bytes);
}

#endif
