// The entry points of gio_pool: a launch on the GPU, calls on the host.
#pragma once
#include "scatter_gather.cuh"
#include "pattern.cuh"

#if GIO_DEVICE

extern "C" __global__ void __launch_bounds__(GIO_POOL_THREADS_MAX)
    gio_scatter_gather(const __grid_constant__ gio_scatter_gather_args args) {
  const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / GIO_WARP;
  gio_scatter_gather_share(args, warp, gridDim.x * blockDim.x / GIO_WARP);
}

extern "C" __global__ void __launch_bounds__(GIO_POOL_THREADS_MAX)
    gio_pattern(const __grid_constant__ gio_pattern_args args) {
  gio_pattern_share(args, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

#else

// Runs a whole launch of `threads` threads, a multiple of a warp.
extern "C" void gio_host_scatter_gather(const gio_scatter_gather_args *args, uint32_t threads) {
  const uint32_t warps = threads / GIO_WARP;
  for (uint32_t w = 0; w < warps; ++w) gio_scatter_gather_share(*args, w, warps);
}
extern "C" void gio_host_pattern(const gio_pattern_args *args, uint32_t threads) {
  for (uint32_t t = 0; t < threads; ++t) gio_pattern_share(*args, t, threads);
}

// Process bytes [byte, byte + len) of an object anywhere in memory in one pass. A check returns
// true if they are correct, and otherwise reports the first difference.
extern "C" void gio_host_fill(uint64_t at, uint64_t seed, uint64_t byte, uint64_t len) {
  gio_run<gio_u128>({at, seed, byte, 0, 1}, len, GIO_PATTERN_FILL);
}
extern "C" void gio_host_poison(uint64_t at, uint64_t len) {
  gio_run<gio_u128>({at, 0, 0, 0, 1}, len, GIO_PATTERN_POISON);
}
extern "C" bool gio_host_check(uint64_t at, uint64_t seed, uint64_t byte, uint64_t len,
                               uint64_t *first, uint32_t *found) {
  const gio_part part = {at, seed, byte, 0, 1};
  if (gio_run<gio_u128>(part, len, GIO_PATTERN_CHECK) == 0u) return true;
  *first = gio_locate(part, len, found);
  return false;
}

#endif
