// CRC-32C of objects in GPU memory, by the I/O kernel's code and with as many registers.
#pragma once
#include "abi.h"
#include "gio/crc32c.cuh"

// All passes of one warp.
GIO_FN void bench_crc_warp(const bench_crc_args &args, uint32_t warp) {
  gio_crc c;
  gio_crc_begin(c);
  const uint32_t first = warp * args.objects;
  GIO_ROLLED
  for (uint32_t pass = 0; pass < args.repeats; ++pass) {
    GIO_ROLLED
    for (uint32_t object = first; object < first + args.objects; ++object) {
      const uint64_t at = args.base + uint64_t{object} * args.bytes;
      const uint32_t crc = gio_crc32c(c, at, args.bytes);
      GIO_LANES (l, 1) gio_ptr<uint32_t>(args.out)[object] = crc;
    }
  }
}

#if GIO_DEVICE

extern "C" __global__ void __launch_bounds__(128, 4)
    bench_crc(const __grid_constant__ bench_crc_args args) {
  const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / GIO_WARP;
  if (warp < args.warps) bench_crc_warp(args, warp);
}

#else

static void bench_crc_host(const bench_crc_args &args) {
  for (uint32_t warp = 0; warp < args.warps; ++warp) bench_crc_warp(args, warp);
}

#endif
