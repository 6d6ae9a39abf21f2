// Kernels that record the SMs they ran on, and the time.
#pragma once
#include "abi.h"
#include "gio/warp.cuh"
#include "instant.cuh"

#if GIO_DEVICE

// Stores the GPU's clock. Two of these around other launches of a stream measure how long those
// took, independent of the host.
extern "C" __global__ void __launch_bounds__(32)
    bench_stamp(const __grid_constant__ bench_stamp_args args) {
  if (threadIdx.x == 0u) gio_st_release_sys(gio_ptr<uint64_t>(args.at), gio_clock_ns());
}

extern "C" __global__ void __launch_bounds__(1024)
    bench_where(const __grid_constant__ bench_where_args args) {
  if (threadIdx.x != 0u) return;
  const uint32_t sm = bench_sm();
  if (sm < args.sms) gio_ptr<uint32_t>(args.at)[sm] = 1u;
  const uint64_t since = gio_clock_ns();
  while (gio_clock_ns() - since < args.hold_ns) gio_nap(1000);
}

#else

static void bench_stamp_host(const bench_stamp_args &args) {
  gio_st_release_sys(gio_ptr<uint64_t>(args.at), gio_clock_ns());
}

static void bench_where_host(const bench_where_args &args, uint32_t blocks) {
  for (uint32_t i = 0; i < gio_min(blocks, args.sms); ++i) gio_ptr<uint32_t>(args.at)[i] = 1u;
}

#endif
