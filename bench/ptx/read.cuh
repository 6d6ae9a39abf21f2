// Reads of words in host memory by many warps, as the I/O kernel reads words that the host writes.
#pragma once
#include "abi.h"
#include "gio/warp.cuh"

// On the host, of the clock in ns.
GIO_FN uint64_t bench_clock() {
#if GIO_DEVICE
  return static_cast<uint64_t>(clock64());
#else
  return gio_clock_ns();
#endif
}

// All reads of one warp, one after the other: each address depends on the word before, a zero.
GIO_FN void bench_read_warp(const bench_read_args &args, uint32_t warp) {
  const uint64_t first = args.base + uint64_t{warp} * args.stride;
  uint64_t at = first;
  at += gio_ld_relaxed_sys(gio_ptr<const uint64_t>(at)); // has the address translated
  const uint64_t since = bench_clock();
  for (uint32_t i = 0; i < args.turns; ++i) at += gio_ld_relaxed_sys(gio_ptr<const uint64_t>(at));
  const uint64_t took = bench_clock() - since;
  // Adds a zero: the assembler leaves out loads whose values are not used.
  gio_ptr<uint32_t>(args.out)[warp] = static_cast<uint32_t>(took / args.turns + (at - first));
}

#if GIO_DEVICE

// One warp per block.
extern "C" __global__ void __launch_bounds__(32)
    bench_read(const __grid_constant__ bench_read_args args) {
  if (threadIdx.x == 0u && blockIdx.x < args.warps) bench_read_warp(args, blockIdx.x);
}

#else

static void bench_read_host(const bench_read_args &args) {
  for (uint32_t warp = 0; warp < args.warps; ++warp) bench_read_warp(args, warp);
}

#endif
