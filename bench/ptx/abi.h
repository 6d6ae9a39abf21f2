// What the host gives to the kernels of the benchmarks. Each struct exists twice: here and in
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
  // the controller's own
  uint32_t head;       // next submission entry
  uint32_t tail;       // next completion entry, free running
  uint32_t ended;      // BENCH_ENDED_*
  uint32_t sm;         // where it ran
  uint64_t completed;  // commands
  uint64_t looks;      // at the doorbells
  uint64_t idle;       // looks that found nothing to do
  uint64_t full;       // looks that found no room in the completion queue
  uint64_t reserved[6];
} bench_queue;         // 128 bytes: a cache line each

typedef struct bench_instant_args {
  uint64_t queues;     // bench_queue[count]
  uint64_t stop;       // u32: nonzero = end
  uint64_t budget_ns;  // end after this time whatever happens
  uint32_t count;
  uint32_t reserved;
} bench_instant_args;  // 32 bytes

// c = a * transpose(b): bf16, sums in f32. m and n are multiples of 128, k of 32.
typedef struct bench_matmul_args {
  uint64_t a;          // bf16[m][k]
  uint64_t b;          // bf16[n][k]
  uint64_t c;          // bf16[m][n]
  uint32_t m, n, k;
  uint32_t reserved;
} bench_matmul_args;   // 40 bytes

// Small whole numbers that follow from seed and position.
typedef struct bench_fill_args {
  uint64_t at;         // bf16[count]
  uint64_t count;
  uint64_t seed;
} bench_fill_args;     // 24 bytes

typedef struct bench_stamp_args {
  uint64_t at;         // u64: the GPU's clock in ns
} bench_stamp_args;    // 8 bytes

// Which SMs the blocks of a launch ran on.
typedef struct bench_where_args {
  uint64_t at;         // u32[sms]: 1 where a block was
  uint64_t hold_ns;    // a block stays for so long, so that the next one goes elsewhere
  uint32_t sms;
  uint32_t reserved;
} bench_where_args;    // 24 bytes

// clang-format on

// bench_queue.ended
#define BENCH_ENDED_NOT 0u
#define BENCH_ENDED_STOPPED 1u
#define BENCH_ENDED_BUDGET 2u // nobody stopped it in time
#define BENCH_ENDED_BROKEN 3u // a doorbell outside of the queue

#define BENCH_TILE 128u // rows and columns of c that one block computes
#define BENCH_STEP 32u  // of k at a time

static_assert(sizeof(bench_queue) == 128 && offsetof(bench_queue, depth_log2) == 24 &&
                  offsetof(bench_queue, head) == 32 && offsetof(bench_queue, completed) == 48 &&
                  offsetof(bench_queue, full) == 72,
              "as in abi.rs");
static_assert(sizeof(bench_instant_args) == 32 && offsetof(bench_instant_args, count) == 24,
              "as in abi.rs");
static_assert(sizeof(bench_matmul_args) == 40 && offsetof(bench_matmul_args, m) == 24,
              "as in abi.rs");
static_assert(sizeof(bench_fill_args) == 24 && sizeof(bench_stamp_args) == 8 &&
                  sizeof(bench_where_args) == 24 && offsetof(bench_where_args, sms) == 16,
              "as in abi.rs");
