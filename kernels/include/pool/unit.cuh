// The unit of one memory access by a thread: 1, 4, 8 or 16 bytes.
//
// On the device an address must be a multiple of its unit, and a unit of 16 bytes is one access. On
// the host units may be unaligned.
#pragma once
#include "abi.h"
#include "gio/order.cuh"

#if GIO_DEVICE

template <class U> GIO_FN U gio_get(const U *p) { return *p; }
template <class U> GIO_FN void gio_put(U *p, U v) { *p = v; }

// "Data Movement and Conversion Instructions: ld", weak, vectorised. The data was written before
// the kernel started.
GIO_FN gio_u128 gio_get(const gio_u128 *p) {
  unsigned long long lo, hi;
  asm volatile("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(lo), "=l"(hi) : "l"(p) : "memory");
  return {lo, hi};
}
GIO_FN void gio_put(gio_u128 *p, gio_u128 v) { gio_st16(p, v); }

#else // host

template <class U> GIO_FN U gio_get(const U *p) {
  U v;
  memcpy(&v, reinterpret_cast<const char *>(p), sizeof v);
  return v;
}
template <class U> GIO_FN void gio_put(U *p, U v) {
  memcpy(reinterpret_cast<char *>(p), &v, sizeof v);
}

#endif

// Returns true if all addresses and lengths in `bits` (or-ed together) are multiples of a U.
template <class U> GIO_FN bool gio_fits(uint64_t bits) { return bits % sizeof(U) == 0u; }
