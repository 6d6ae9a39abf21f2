// All fences, atomics, MMIO stores, system-scope loads and clock reads of the I/O kernel.
//
// On the device each function is one PTX instruction; the section of the PTX ISA that defines it is
// named above it. The scope is .sys if a controller or the host is the other side; a comment
// justifies each narrower one.
//
// On the host the same names are __atomic operations. Stores that a controller or the host waits
// for are release stores there although the device uses a relaxed store after a fence:
// ThreadSanitizer does not model fences, and on the supported processors a release store costs
// nothing extra.
//
// Ordering: (1) SQE and descriptor stores -> gio_fence_release_sys -> gio_doorbell, paired with
// the controller's read of the doorbell. (2) the controller's CQE, phase last -> gio_ld_cqe ->
// gio_fence_acq_rel_sys, before the data is read (checksum.cuh), and before anything that
// reports it. (3) status stores and data -> gio_add_acq_rel_gpu of warps_left ->
// gio_st_release_sys of the completion ring, paired with the host's acquire load of the ring.
// (4) exit, by warp 0 for all warps (gio_decides): a store of `exited` -> gio_fence_sc_sys -> a
// load of the ring, against the host's store of the ring -> its own sequentially consistent fence
// -> its load of `exited`. (5) the relay: a load of the ring's entry -> gio_fence_acq_rel_sys ->
// IOCB and entry in the relay -> gio_st_release_gpu, paired with gio_look and the fence of
// gio_accept; `left` likewise, paired with the fence of gio_should_exit.
#pragma once
#include "abi.h"

#if defined(__CUDACC__) && !defined(GIO_HOST)
#define GIO_DEVICE 1
#define GIO_FN __device__ __forceinline__
#else
#define GIO_DEVICE 0
#define GIO_FN static inline __attribute__((always_inline))
#include <stddef.h>
#include <string.h>
#include <time.h>
#endif

// A quarter of an SQE, a CQE, or a descriptor: the unit of one 16-byte access.
struct alignas(16) gio_u128 {
  uint64_t lo, hi;
};

// Converts an address of the ABI to a pointer.
template <class T> GIO_FN T *gio_ptr(uint64_t address) { return reinterpret_cast<T *>(address); }

#if GIO_DEVICE

// "Data Movement and Conversion Instructions: ld" (.relaxed, scope .sys).
GIO_FN uint32_t gio_ld_relaxed_sys(const uint32_t *p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
GIO_FN uint64_t gio_ld_relaxed_sys(const uint64_t *p) {
  unsigned long long v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

// The same for 16 bytes that a device wrote or will read: bypasses the L1 cache.
GIO_FN gio_u128 gio_ld16_sys(const gio_u128 *p) {
  unsigned long long lo, hi;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(lo), "=l"(hi)
               : "l"(p)
               : "memory");
  return {lo, hi};
}

// The same for a word that others change. A fence follows where a new value is used (gio_accept).
GIO_FN uint32_t gio_ld_poll_sys(const uint32_t *p) { return gio_ld_relaxed_sys(p); }
GIO_FN uint64_t gio_ld_poll_sys(const uint64_t *p) { return gio_ld_relaxed_sys(p); }

// "Data Movement and Conversion Instructions: ld" (.acquire, scope .sys).
GIO_FN uint32_t gio_ld_acquire_sys(const uint32_t *p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
GIO_FN uint64_t gio_ld_acquire_sys(const uint64_t *p) {
  unsigned long long v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

// "Data Movement and Conversion Instructions: st" (.relaxed, scope .sys).
GIO_FN void gio_st_relaxed_sys(uint32_t *p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
GIO_FN void gio_st_relaxed_sys(uint64_t *p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// "Data Movement and Conversion Instructions: st" (.release, scope .sys).
GIO_FN void gio_st_release_sys(uint32_t *p, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
GIO_FN void gio_st_release_sys(uint64_t *p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// The same, relaxed, for the second half of a CQE: one single-copy-atomic read of SQ head, SQ, CID,
// phase and status, which therefore belong to the same completion. The first half is not needed;
// ptxas narrows a 128-bit load of the whole to this one.
GIO_FN uint64_t gio_ld_cqe(const gio_u128 *p, uint32_t) { return gio_ld_relaxed_sys(&p->hi); }

// "Data Movement and Conversion Instructions: st", weak, vectorised: a quarter of an SQE or a
// descriptor. gio_fence_release_sys orders it before the doorbell.
GIO_FN void gio_st16(void *p, gio_u128 v) {
  asm volatile("st.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(v.lo), "l"(v.hi) : "memory");
}

// "Parallel Synchronization and Communication Instructions: membar/fence".
GIO_FN void gio_fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// The same section, .sc: for two sides that each write a word and then read the other's.
GIO_FN void gio_fence_sc_sys() { asm volatile("fence.sc.sys;" ::: "memory"); }

// The same section; the .release form (PTX 8.6, sm_90) avoids invalidating the L1.
GIO_FN void gio_fence_release_sys() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.release.sys;" ::: "memory");
#else
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
}

// "Data Movement and Conversion Instructions: st", .mmio: exactly one 32-bit write, never merged,
// split or repeated (PTX 8.2, sm_70).
GIO_FN void gio_doorbell(uint32_t *p, uint32_t v) {
  asm volatile("st.mmio.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// "Parallel Synchronization and Communication Instructions: atom". Scope .gpu: all contenders for
// cq_tail and gio_progress are warps of this GPU. The host reads their results after the completion
// ring's release store, which is .sys and cumulative.
GIO_FN uint32_t gio_add_relaxed_gpu(uint32_t *p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}
GIO_FN uint64_t gio_add_relaxed_gpu(uint64_t *p, uint64_t v) {
  unsigned long long old;
  asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(p), "l"(v)
               : "memory");
  return old;
}
// Contenders are the warps of one launch; other readers read after its end.
GIO_FN void gio_min_relaxed_gpu(uint64_t *p, uint64_t v) {
  asm volatile("red.min.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
GIO_FN uint32_t gio_add_acq_rel_gpu(uint32_t *p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}
GIO_FN uint32_t gio_ld_relaxed_gpu(const uint32_t *p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
GIO_FN void gio_st_relaxed_gpu(uint64_t *p, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// The same section, .cas and "ld", "st" with scope .gpu, for the relay: warps of this GPU only.
GIO_FN uint32_t gio_cas_acquire_gpu(uint32_t *p, uint32_t expected, uint32_t desired) {
  uint32_t old;
  asm volatile("atom.cas.acquire.gpu.global.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(p), "r"(expected), "r"(desired)
               : "memory");
  return old;
}
GIO_FN void gio_st_release_gpu(uint32_t *p, uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
GIO_FN void gio_st_release_gpu(uint64_t *p, uint64_t v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// The same section, .cas. Scope .cta: slots belong to one warp, only its own lanes contend.
GIO_FN uint32_t gio_cas_relaxed_cta(uint32_t *p, uint32_t expected, uint32_t desired) {
  uint32_t old;
  asm volatile("atom.cas.relaxed.cta.global.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(p), "r"(expected), "r"(desired)
               : "memory");
  return old;
}

// "Special Registers: %globaltimer".
GIO_FN uint64_t gio_clock_ns() {
  unsigned long long v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}

// "Miscellaneous Instructions: nanosleep".
GIO_FN void gio_nap(uint32_t ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns) : "memory"); }

#else // host

GIO_FN uint32_t gio_ld_relaxed_sys(const uint32_t *p) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
GIO_FN uint64_t gio_ld_relaxed_sys(const uint64_t *p) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
GIO_FN uint32_t gio_ld_acquire_sys(const uint32_t *p) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
GIO_FN uint64_t gio_ld_acquire_sys(const uint64_t *p) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
// Plain loads: concurrent writes are the caller's concern (a CQE was read with acquire).
GIO_FN gio_u128 gio_ld16_sys(const gio_u128 *p) {
  gio_u128 v;
  memcpy(&v, reinterpret_cast<const char *>(p), sizeof v);
  return v;
}
// Acquire, because fences are empty on the host.
GIO_FN uint32_t gio_ld_poll_sys(const uint32_t *p) { return gio_ld_acquire_sys(p); }
GIO_FN uint64_t gio_ld_poll_sys(const uint64_t *p) { return gio_ld_acquire_sys(p); }
GIO_FN uint32_t gio_ld_relaxed_gpu(const uint32_t *p) { return gio_ld_relaxed_sys(p); }
GIO_FN void gio_st_relaxed_sys(uint32_t *p, uint32_t v) {
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
GIO_FN void gio_st_relaxed_sys(uint64_t *p, uint64_t v) {
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
GIO_FN void gio_st_release_sys(uint32_t *p, uint32_t v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
GIO_FN void gio_st_release_sys(uint64_t *p, uint64_t v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

// Not one atomic access on the host: the word with the phase first, and the other one only if the
// phase is that of a new entry. Until then a controller may be writing it in any order; a new entry
// is not overwritten before the CQ doorbell has released it.
GIO_FN uint64_t gio_ld_cqe(const gio_u128 *p, uint32_t phase) {
  const uint32_t *word = reinterpret_cast<const uint32_t *>(p);
  const uint64_t last = __atomic_load_n(word + 3, __ATOMIC_ACQUIRE);
  if ((last >> 16 & 1u) != phase) return last << 32;
  return last << 32 | __atomic_load_n(word + 2, __ATOMIC_RELAXED);
}
GIO_FN void gio_st16(void *p, gio_u128 v) { memcpy(__builtin_assume_aligned(p, 16), &v, 16); }

// No fence on the host: the doorbell below is a release store, and CQEs are read with
// acquire.
GIO_FN void gio_fence_acq_rel_sys() {}
GIO_FN void gio_fence_sc_sys() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
GIO_FN void gio_fence_release_sys() {}
GIO_FN void gio_doorbell(uint32_t *p, uint32_t v) {
  __atomic_store_n(static_cast<volatile uint32_t *>(p), v, __ATOMIC_RELEASE);
}
GIO_FN uint32_t gio_add_relaxed_gpu(uint32_t *p, uint32_t v) {
  return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
GIO_FN uint64_t gio_add_relaxed_gpu(uint64_t *p, uint64_t v) {
  return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
GIO_FN void gio_min_relaxed_gpu(uint64_t *p, uint64_t v) {
  uint64_t old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (v < old && !__atomic_compare_exchange_n(p, &old, v, true, __ATOMIC_RELAXED,
                                                 __ATOMIC_RELAXED)) {
  }
}
GIO_FN uint32_t gio_add_acq_rel_gpu(uint32_t *p, uint32_t v) {
  return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}
GIO_FN void gio_st_relaxed_gpu(uint64_t *p, uint64_t v) { gio_st_relaxed_sys(p, v); }
GIO_FN uint32_t gio_cas_acquire_gpu(uint32_t *p, uint32_t expected, uint32_t desired) {
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
  return expected;
}
GIO_FN void gio_st_release_gpu(uint32_t *p, uint32_t v) { gio_st_release_sys(p, v); }
GIO_FN void gio_st_release_gpu(uint64_t *p, uint64_t v) { gio_st_release_sys(p, v); }
// The lanes of a host warp run one after the other: no atomic is needed.
GIO_FN uint32_t gio_cas_relaxed_cta(uint32_t *p, uint32_t expected, uint32_t desired) {
  const uint32_t old = *p;
  if (old == expected) *p = desired;
  return old;
}
GIO_FN uint64_t gio_clock_ns() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}
// The executor decides how a host thread waits.
GIO_FN void gio_nap(uint32_t) {}

#endif
