// The entry points: a launch on the GPU, rounds of a host thread.
#pragma once
#include "engine.cuh"

#if GIO_DEVICE

#define GIO_NAP_NS 64u
#define GIO_NAP_NS_MAX 1024u

// One warp per queue pair. Ends after args.linger_ns without work (gio_should_exit), or after the
// stop word: in that case at most one command timeout later, when all outstanding commands have
// completed or timed out.
extern "C" __global__ void __launch_bounds__(128, 3)
    gio_kernel(const __grid_constant__ gio_args args) {
  const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / GIO_WARP;
  if (warp >= args.warp_count) return;
  gio_state s;
  gio_load(s, &args, warp);
  uint32_t idle = 1;
  uint32_t since_poll = 0;
  for (;;) {
    const bool poll = idle != 0u || ++since_poll >= GIO_POLL_EVERY;
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

// For tests: returns the CRC as computed by a warp (`how` 0), or by GIO_CRC_BY_* as far as the
// processor supports it.
extern "C" uint32_t gio_host_crc32c(uint64_t at, uint32_t bytes, uint32_t how) {
  if (how != 0u) return gio_crc_by(gio_min(how, gio_crc_best()), at, bytes);
  gio_crc crc;
  gio_crc_lanes_begin(crc);
  return gio_crc_lanes(crc, at, bytes);
}

#endif
