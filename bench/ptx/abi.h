// Arguments of the benchmark kernels, and their queue state. Each struct exists twice: here and in
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

// c = a * transpose(b): bf16, sums in f32. m and n are multiples of 128, k of 32.
typedef struct bench_matmul_args {
  uint64_t a;          // bf16[m][k]
  uint64_t b;          // bf16[n][k]
  uint64_t c;          // bf16[m][n]
  uint32_t m, n, k;
  uint32_t reserved;
} bench_matmul_args;   // 40 bytes

// Small integers, derived from seed and position.
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
  uint64_t at;         // u32[sms]: 1 if a block ran there
  uint64_t hold_ns;    // a block spins for this long, so that the next one gets another SM
  uint32_t sms;
  uint32_t reserved;
} bench_where_args;    // 24 bytes

// Warp w of `warps` computes the CRCs of objects w * objects to (w + 1) * objects - 1.
typedef struct bench_crc_args {
  uint64_t base;       // of object 0; 16-byte aligned
  uint64_t out;        // u32[warps * objects]
  uint32_t bytes;      // per object, a multiple of 16
  uint32_t objects;    // per warp
  uint32_t repeats;    // passes of a warp over its objects
  uint32_t warps;
} bench_crc_args;      // 32 bytes

// Each warp reads one word of host memory again and again.
typedef struct bench_read_args {
  uint64_t base;       // u64 at w * stride for warp w; all zero
  uint64_t out;        // u32[warps]: average clocks a read
  uint32_t stride;     // bytes, a multiple of 8; 0: all read the same word
  uint32_t turns;      // reads per warp
  uint32_t warps;
  uint32_t reserved;
} bench_read_args;     // 32 bytes

// clang-format on

// bench_queue.ended
#define BENCH_ENDED_NOT 0u
#define BENCH_ENDED_STOPPED 1u
#define BENCH_ENDED_BUDGET 2u // not stopped within budget_ns
#define BENCH_ENDED_BROKEN 3u // a doorbell outside of the queue

#define BENCH_TILE 128u // rows and columns of c that one block computes
#define BENCH_STEP 32u  // part of k in one iteration

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
static_assert(sizeof(bench_crc_args) == 32 && offsetof(bench_crc_args, bytes) == 16 &&
                  sizeof(bench_read_args) == 32 && offsetof(bench_read_args, stride) == 16,
              "as in abi.rs");
