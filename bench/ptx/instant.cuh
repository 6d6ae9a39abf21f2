// A controller that completes commands immediately and moves no data, one warp per queue pair. So
// only the I/O kernel's path is measured: build an entry, ring, see the completion, free the slot.
//
// It takes up to 32 entries per poll, in order, and honours both doorbells: it never overruns the
// completion queue. It reads only the dword of an entry that has the CID, and writes only the upper
// half of a completion; the lower half stays zero.
//
// Ordering: (1) the doorbell is read with acquire, before the entries; it pairs with the I/O
// kernel's fence and doorbell. (2) a completion is one 64-bit store that includes the phase. It
// publishes nothing else: no data moved, and the entry was read before, for its CID.
#pragma once
#include "abi.h"
#include "gio/warp.cuh"

// Polls between two reads of stop word and clock: all warps read the same line.
#define BENCH_LOOKS 32768u

struct bench_controller {
  bench_queue *q;
  const uint64_t *doorbells;
  uint64_t sq, cq;
  uint32_t depth_log2, mask, qid;
  uint32_t head, tail, ended;
  uint64_t completed, looks, idle, full;
};

GIO_FN void bench_load(bench_controller &c, bench_queue *q) {
  c.q = q;
  c.doorbells = gio_ptr<const uint64_t>(q->doorbells);
  c.sq = q->sq;
  c.cq = q->cq;
  c.depth_log2 = q->depth_log2;
  c.mask = (1u << q->depth_log2) - 1u;
  c.qid = q->qid;
  c.head = q->head;
  c.tail = q->tail;
  c.ended = BENCH_ENDED_NOT;
  c.completed = q->completed;
  c.looks = q->looks;
  c.idle = q->idle;
  c.full = q->full;
}

GIO_FN void bench_store(bench_controller &c, uint32_t sm) {
  GIO_LANES (l, 1) {
    c.q->head = c.head;
    c.q->tail = c.tail;
    c.q->ended = c.ended;
    c.q->sm = sm;
    c.q->completed = c.completed;
    c.q->looks = c.looks;
    c.q->idle = c.idle;
    c.q->full = c.full;
  }
}

// Completes up to 32 commands. Returns true if there were any.
GIO_FN bool bench_look(bench_controller &c) {
  const uint64_t both = gio_common_acquire(c.doorbells);
  const uint32_t sq_tail = static_cast<uint32_t>(both);
  const uint32_t cq_head = static_cast<uint32_t>(both >> 32);
  c.looks += 1u;
  if (sq_tail > c.mask || cq_head > c.mask) {
    c.ended = BENCH_ENDED_BROKEN;
    return false;
  }
  const uint32_t waiting = (sq_tail - c.head) & c.mask;
  const uint32_t room = c.mask - ((c.tail - cq_head) & c.mask);
  const uint32_t n = gio_min(gio_min(waiting, room), GIO_WARP);
  if (n == 0u) {
    c.idle += waiting == 0u ? 1u : 0u;
    c.full += waiting == 0u ? 0u : 1u;
    return false;
  }
  GIO_LANES (l, n) {
    const uint32_t from = (c.head + l) & c.mask, at = c.tail + l;
    const uint64_t entry = gio_ld_relaxed_sys(gio_ptr<const uint32_t>(c.sq + from * 64u));
    const uint64_t phase = (at >> c.depth_log2 & 1u) ^ 1u;
    const uint64_t sq_head = (c.head + l + 1u) & c.mask;
    const uint64_t cid = entry >> 16;
    uint64_t *to = gio_ptr<uint64_t>(c.cq + (at & c.mask) * 16u + 8u);
    const uint64_t value = sq_head | static_cast<uint64_t>(c.qid) << 16 | cid << 32 | phase << 48;
#if GIO_DEVICE
    gio_st_relaxed_sys(to, value);
#else
    gio_st_release_sys(to, value); // like every store that the I/O kernel on the host waits for
#endif
  }
  c.head = (c.head + n) & c.mask;
  c.tail += n;
  c.completed += n;
  return true;
}

// Returns true if it has to end. Called every BENCH_LOOKS polls; on the host, in each.
GIO_FN bool bench_over(bench_controller &c, const bench_instant_args &args, uint64_t since) {
  if (gio_common_acquire(gio_ptr<const uint32_t>(args.stop)) != 0u) {
    c.ended = BENCH_ENDED_STOPPED;
  } else {
    gio_lane<uint64_t> now;
    GIO_LANES (l, 1) now[l] = gio_clock_ns();
    if (gio_shfl(now, 0) - since >= args.budget_ns) c.ended = BENCH_ENDED_BUDGET;
  }
  return c.ended != BENCH_ENDED_NOT;
}

#if GIO_DEVICE

GIO_FN uint32_t bench_sm() {
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm;
}

// One warp per queue pair. All must be resident at the same time: a block is small, and the host
// launches no more blocks than there are SMs.
extern "C" __global__ void __launch_bounds__(128)
    bench_instant(const __grid_constant__ bench_instant_args args) {
  const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / GIO_WARP;
  if (warp >= args.count) return;
  gio_lane<uint64_t> now;
  GIO_LANES (l, 1) now[l] = gio_clock_ns();
  const uint64_t since = gio_shfl(now, 0);
  bench_controller c;
  bench_load(c, gio_ptr<bench_queue>(args.queues) + warp);
  for (uint32_t round = 0; c.ended == BENCH_ENDED_NOT; ++round) {
    bench_look(c);
    if (round % BENCH_LOOKS == 0u && bench_over(c, args, since)) break;
  }
  bench_store(c, bench_sm());
}

#else // host: run by the mock libcuda

// Polls all queues in turn. `pause` yields to other threads, and returns false to stop.
template <class Pause> static void bench_instant_host(const bench_instant_args &args, Pause pause) {
  const uint64_t since = gio_clock_ns();
  for (bool going = true; going;) {
    going = false;
    bool moved = false;
    for (uint32_t i = 0; i < args.count; ++i) {
      bench_controller c;
      bench_load(c, gio_ptr<bench_queue>(args.queues) + i);
      if (c.q->ended != BENCH_ENDED_NOT) continue;
      moved = bench_look(c) || moved;
      if (c.ended == BENCH_ENDED_NOT) bench_over(c, args, since);
      going = going || c.ended == BENCH_ENDED_NOT;
      bench_store(c, i);
    }
    if (!moved && !pause()) return;
  }
}

#endif
