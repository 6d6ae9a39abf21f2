// Arguments of the benchmark kernel, and its queue state. Each struct exists twice: here and in
// bench/src/gpu/abi.rs; both sides assert the same sizes and offsets.
#pragma once
#include <stddef.h>
#include <stdint.h>

// clang-format off

// One queue pair, from the controller's side.
typedef struct bench_queue {
  uint64_t sq;         // 64-byte entries
  uint64_t cq;         // 16-byte entries, zeroed
  uint64_t doorbells;  // u32 submission tail, u32 completion head; 8-byte aligned
  uint32_t depth_log2;
  uint32_t qid;
  // written by the controller only
  uint32_t head;       // next submission entry
  uint32_t tail;       // next completion entry, free running
  uint32_t ended;      // BENCH_ENDED_*
  uint32_t sm;         // on which it ran
  uint64_t completed;  // commands
  uint64_t looks;      // polls of the doorbells
  uint64_t idle;       // polls that found no command
  uint64_t full;       // polls that found the completion queue full
  uint64_t reserved[6];
} bench_queue;         // 128 bytes: a cache line each

typedef struct bench_instant_args {
  uint64_t queues;     // bench_queue[count]
  uint64_t stop;       // u32: nonzero = end
  uint64_t budget_ns;  // time limit, also without a stop
  uint32_t count;
  uint32_t reserved;
} bench_instant_args;  // 32 bytes

// clang-format on

// bench_queue.ended
#define BENCH_ENDED_NOT 0u
#define BENCH_ENDED_STOPPED 1u
#define BENCH_ENDED_BUDGET 2u // not stopped within budget_ns
#define BENCH_ENDED_BROKEN 3u // a doorbell outside of the queue

static_assert(sizeof(bench_queue) == 128 && offsetof(bench_queue, depth_log2) == 24 &&
                  offsetof(bench_queue, head) == 32 && offsetof(bench_queue, completed) == 48 &&
                  offsetof(bench_queue, full) == 72,
              "as in abi.rs");
static_assert(sizeof(bench_instant_args) == 32 && offsetof(bench_instant_args, count) == 24,
              "as in abi.rs");
