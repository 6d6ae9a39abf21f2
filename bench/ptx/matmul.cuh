// A large matrix product in bf16 as an engine's layers have them: c = a * transpose(b), both with k
// as the inner dimension. It is what the I/O must not slow down.
//
// On the GPU: mma.sync m16n8k16 on tiles of 128 x 128, four warps of 64 x 64, three stages of 32 k
// filled by cp.async. Not the fastest there is: Hopper's own wgmma does about twice as much. It
// keeps tensor cores, shared memory, L2 and HBM busy on every SM, and that is what matters here.
//
// The elements are whole numbers of at most 15, so that every sum is exact in f32 in whatever order
// it is made, and the result can be compared bit by bit.
#pragma once
#include "abi.h"
#include "gio/warp.cuh"

#define BENCH_STAGES 3u
#define BENCH_THREADS 128u
#define BENCH_GROUP 8u // rows of tiles that are done together: their part of a stays in L2

// The element at position i of a matrix, from -15 to 15. Twin: bench/src/gpu/matmul.rs.
GIO_FN int32_t bench_element(uint64_t seed, uint64_t i) {
  uint64_t x = (seed + i) * 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 32) * 0xD6E8FEB86659FD93u;
  return static_cast<int32_t>((x >> 40) % 31u) - 15;
}

// bf16 is the upper half of f32; exact for so small a whole number.
GIO_FN uint16_t bench_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  bits += 0x7FFFu + (bits >> 16 & 1u); // to nearest, ties to even; no NaN comes here
  return static_cast<uint16_t>(bits >> 16);
}

// Which tile of c the block computes.
GIO_FN void bench_tile(const bench_matmul_args &args, uint32_t block, uint32_t &row,
                       uint32_t &column) {
  const uint32_t rows = args.m / BENCH_TILE, columns = args.n / BENCH_TILE;
  const uint32_t first = block / (BENCH_GROUP * columns) * BENCH_GROUP;
  const uint32_t high = gio_min(BENCH_GROUP, rows - first);
  const uint32_t within = block % (BENCH_GROUP * columns);
  row = (first + within % high) * BENCH_TILE;
  column = within / high * BENCH_TILE;
}

#if GIO_DEVICE

// "Data Movement and Conversion Instructions: cp.async" (.cg: past L1, 16 bytes).
GIO_FN void bench_fetch16(uint32_t to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
GIO_FN void bench_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the newest `N` groups have arrived.
template <int N> GIO_FN void bench_arrived() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// "Warp Level Matrix Instructions: ldmatrix".
GIO_FN void bench_ldmatrix(uint32_t (&r)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

// "Warp Level Matrix Instructions: mma".
GIO_FN void bench_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A row of a stage is 32 elements: four chunks of 16 bytes. They are stored so that the same chunk
// of eight rows lies in eight different groups of banks, as ldmatrix reads them.
GIO_FN uint32_t bench_chunk(uint32_t row, uint32_t chunk) {
  return (row * 4u + (chunk ^ (row >> 1 & 3u))) * 16u;
}

struct bench_shared {
  alignas(128) unsigned char a[BENCH_STAGES][BENCH_TILE * BENCH_STEP * 2u];
  alignas(128) unsigned char b[BENCH_STAGES][BENCH_TILE * BENCH_STEP * 2u];
};

// Starts to fetch step `step` of both tiles.
GIO_FN void bench_fetch(const bench_matmul_args &args, bench_shared &s, uint32_t row,
                        uint32_t column, uint32_t step) {
  const uint32_t stage = step % BENCH_STAGES;
  const uint32_t a = static_cast<uint32_t>(__cvta_generic_to_shared(s.a[stage]));
  const uint32_t b = static_cast<uint32_t>(__cvta_generic_to_shared(s.b[stage]));
  const uint64_t pitch = static_cast<uint64_t>(args.k) * 2u;
  const uint64_t at = static_cast<uint64_t>(step) * BENCH_STEP * 2u;
#pragma unroll
  for (uint32_t i = 0; i < BENCH_TILE * 4u / BENCH_THREADS; ++i) {
    const uint32_t index = i * BENCH_THREADS + threadIdx.x;
    const uint32_t r = index / 4u, chunk = index % 4u;
    const uint32_t to = bench_chunk(r, chunk);
    bench_fetch16(a + to, gio_ptr<const void>(args.a + (row + r) * pitch + at + chunk * 16u));
    bench_fetch16(b + to, gio_ptr<const void>(args.b + (column + r) * pitch + at + chunk * 16u));
  }
}

// One step of one warp: 64 x 64 x 32.
GIO_FN void bench_multiply(bench_shared &s, uint32_t stage, float (&c)[4][8][4]) {
  const uint32_t lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  const uint32_t a = static_cast<uint32_t>(__cvta_generic_to_shared(s.a[stage]));
  const uint32_t b = static_cast<uint32_t>(__cvta_generic_to_shared(s.b[stage]));
  const uint32_t a_row = warp / 2u * 64u + lane % 16u, a_chunk = lane / 16u;
  const uint32_t b_row = warp % 2u * 64u + lane / 16u * 8u + lane % 8u, b_chunk = lane / 8u % 2u;
#pragma unroll
  for (uint32_t half = 0; half < 2u; ++half) {
    uint32_t af[4][4], bf[4][4];
#pragma unroll
    for (uint32_t i = 0; i < 4u; ++i) {
      bench_ldmatrix(af[i], a + bench_chunk(a_row + i * 16u, half * 2u + a_chunk));
      bench_ldmatrix(bf[i], b + bench_chunk(b_row + i * 16u, half * 2u + b_chunk));
    }
#pragma unroll
    for (uint32_t i = 0; i < 4u; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < 8u; ++j) {
        bench_mma(c[i][j], af[i], bf[j / 2u][j % 2u * 2u], bf[j / 2u][j % 2u * 2u + 1u]);
      }
    }
  }
}

GIO_FN void bench_write(const bench_matmul_args &args, uint32_t row, uint32_t column,
                        const float (&c)[4][8][4]) {
  const uint32_t lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  row += warp / 2u * 64u + lane / 4u;
  column += warp % 2u * 64u + lane % 4u * 2u;
#pragma unroll
  for (uint32_t i = 0; i < 4u; ++i) {
#pragma unroll
    for (uint32_t j = 0; j < 8u; ++j) {
#pragma unroll
      for (uint32_t h = 0; h < 2u; ++h) {
        const uint64_t line = row + i * 16u + h * 8u;
        const uint64_t at = line * args.n + column + j * 8u;
        uint32_t pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
            : "=r"(pair)
            : "f"(c[i][j][h * 2u + 1u]), "f"(c[i][j][h * 2u]));
        *gio_ptr<uint32_t>(args.c + at * 2u) = pair;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(BENCH_THREADS, 2)
    bench_matmul(const __grid_constant__ bench_matmul_args args) {
  __shared__ bench_shared s;
  uint32_t row, column;
  bench_tile(args, blockIdx.x, row, column);
  const uint32_t steps = args.k / BENCH_STEP;
  float c[4][8][4] = {};
#pragma unroll
  for (uint32_t step = 0; step + 1u < BENCH_STAGES; ++step) {
    if (step < steps) bench_fetch(args, s, row, column, step);
    bench_commit();
  }
  for (uint32_t step = 0; step < steps; ++step) {
    bench_arrived<BENCH_STAGES - 2>();
    __syncthreads(); // everybody's share of this step is there, and the stage before is free again
    const uint32_t next = step + BENCH_STAGES - 1u;
    if (next < steps) bench_fetch(args, s, row, column, next);
    bench_commit();
    bench_multiply(s, step % BENCH_STAGES, c);
  }
  bench_write(args, row, column, c);
}

extern "C" __global__ void __launch_bounds__(256)
    bench_fill(const __grid_constant__ bench_fill_args args) {
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i < args.count; i += step) {
    gio_ptr<uint16_t>(args.at)[i] = bench_bf16(static_cast<float>(bench_element(args.seed, i)));
  }
}

#else // host: what the stand-in for libcuda runs

static float bench_f32(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static void bench_matmul_host(const bench_matmul_args &args, uint32_t blocks) {
  const uint16_t *a = gio_ptr<const uint16_t>(args.a), *b = gio_ptr<const uint16_t>(args.b);
  for (uint32_t block = 0; block < blocks; ++block) {
    uint32_t row, column;
    bench_tile(args, block, row, column);
    for (uint64_t i = row; i < row + BENCH_TILE; ++i) {
      for (uint64_t j = column; j < column + BENCH_TILE; ++j) {
        float sum = 0;
        for (uint64_t k = 0; k < args.k; ++k) {
          sum += bench_f32(a[i * args.k + k]) * bench_f32(b[j * args.k + k]);
        }
        gio_ptr<uint16_t>(args.c)[i * args.n + j] = bench_bf16(sum);
      }
    }
  }
}

static void bench_fill_host(const bench_fill_args &args) {
  for (uint64_t i = 0; i < args.count; ++i) {
    gio_ptr<uint16_t>(args.at)[i] = bench_bf16(static_cast<float>(bench_element(args.seed, i)));
  }
}

#endif
