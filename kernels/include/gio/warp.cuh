// The warp: 32 lanes in lockstep on the GPU, a loop over lanes on the host.
//
//   GIO_LANES(l, n) { body }   runs body for every lane l < n; then all lanes meet, and what each
//                              wrote is visible to the others.
//
// Rules: no break, return or goto out of a body (continue is fine), and no GIO_LANES or collective
// (except gio_pick) inside one. A value that outlives a body and differs between lanes is a
// gio_lane<T>. A value that is the same for all lanes is a plain local, written only outside of
// bodies from values that are the same for all lanes: arguments, memory that does not change
// meanwhile, and the collectives below. Control flow outside of bodies depends only on such values;
// so on the GPU all 32 lanes always take the same branch. `n` is such a value.
#pragma once
#include "order.cuh"

#if GIO_DEVICE

GIO_FN uint32_t gio_lane_id() {
  uint32_t l;
  asm("mov.u32 %0, %%laneid;" : "=r"(l));
  return l;
}
#define GIO_LANES(l, n)                                                                            \
  for (uint32_t l = gio_lane_id(), once_##l = 1; once_##l; once_##l = 0, __syncwarp())             \
    if (l < (n))
// Required before one lane writes memory that all lanes read.
GIO_FN void gio_meet() { __syncwarp(); }

// Initialized: registers of lanes that a body leaves out are not kept from round to round.
template <class T> struct gio_lane {
  T v{};
  GIO_FN T &operator[](uint32_t) { return v; }
};

GIO_FN uint32_t gio_popc(uint32_t x) { return static_cast<uint32_t>(__popc(static_cast<int>(x))); }
// Returns the index of the lowest and highest bit set; x is not 0.
GIO_FN uint32_t gio_lowest(uint32_t x) {
  return static_cast<uint32_t>(__ffs(static_cast<int>(x))) - 1u;
}
GIO_FN uint32_t gio_highest(uint32_t x) {
  return 31u - static_cast<uint32_t>(__clz(static_cast<int>(x)));
}

// Returns a bit for each lane l < n whose p is not 0.
GIO_FN uint32_t gio_ballot(gio_lane<uint32_t> &p, uint32_t n) {
  return __ballot_sync(0xffffffffu, gio_lane_id() < n && p.v != 0u);
}
// Returns the value of lane `from`, for all lanes.
GIO_FN uint32_t gio_shfl(gio_lane<uint32_t> &p, uint32_t from) {
  return __shfl_sync(0xffffffffu, p.v, static_cast<int>(from));
}
GIO_FN uint64_t gio_shfl(gio_lane<uint64_t> &p, uint32_t from) {
  return __shfl_sync(0xffffffffu, static_cast<unsigned long long>(p.v), static_cast<int>(from));
}
// Sets lane l of `to` to lane l - 1, or lane l + 1, of `from`; undefined at the end.
GIO_FN void gio_from_below(gio_lane<uint64_t> &to, gio_lane<uint64_t> &from, uint32_t) {
  to.v = __shfl_up_sync(0xffffffffu, static_cast<unsigned long long>(from.v), 1);
}
GIO_FN void gio_from_above(gio_lane<uint64_t> &to, gio_lane<uint64_t> &from, uint32_t) {
  to.v = __shfl_down_sync(0xffffffffu, static_cast<unsigned long long>(from.v), 1);
}
// Returns the value of lane `from` modulo 32; each lane chooses its own. The only collective
// allowed in the body of a GIO_LANES: one over all lanes that does not change `p`.
GIO_FN uint32_t gio_pick(gio_lane<uint32_t> &p, uint32_t from) {
  return __shfl_sync(0xffffffffu, p.v, static_cast<int>(from));
}
// Returns the sum over the lanes in `mask`.
GIO_FN uint32_t gio_sum(gio_lane<uint32_t> &p, uint32_t mask) {
  return __reduce_add_sync(0xffffffffu, (mask >> gio_lane_id() & 1u) ? p.v : 0u);
}
// Returns x, hidden from the compiler: nothing derived from it is kept in registers over a loop.
GIO_FN uint32_t gio_anew(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
// Returns the exclusive or of all lanes.
GIO_FN uint32_t gio_xor(gio_lane<uint32_t> &p) { return __reduce_xor_sync(0xffffffffu, p.v); }

#else // host

#define GIO_LANES(l, n) for (uint32_t l = 0, end_##l = (n); l < end_##l; ++l)
GIO_FN void gio_meet() {}

template <class T> struct gio_lane {
  T v[GIO_WARP];
  inline __attribute__((always_inline)) T &operator[](uint32_t l) { return v[l]; }
};

GIO_FN uint32_t gio_popc(uint32_t x) { return static_cast<uint32_t>(__builtin_popcount(x)); }
GIO_FN uint32_t gio_lowest(uint32_t x) { return static_cast<uint32_t>(__builtin_ctz(x)); }
GIO_FN uint32_t gio_highest(uint32_t x) { return 31u - static_cast<uint32_t>(__builtin_clz(x)); }

GIO_FN uint32_t gio_ballot(gio_lane<uint32_t> &p, uint32_t n) {
  uint32_t mask = 0;
  for (uint32_t l = 0; l < n; ++l) mask |= (p.v[l] != 0u ? 1u : 0u) << l;
  return mask;
}
GIO_FN uint32_t gio_shfl(gio_lane<uint32_t> &p, uint32_t from) { return p.v[from]; }
GIO_FN uint64_t gio_shfl(gio_lane<uint64_t> &p, uint32_t from) { return p.v[from]; }
GIO_FN void gio_from_below(gio_lane<uint64_t> &to, gio_lane<uint64_t> &from, uint32_t n) {
  to.v[0] = 0;
  for (uint32_t l = 1; l < n; ++l) to.v[l] = from.v[l - 1u];
}
GIO_FN void gio_from_above(gio_lane<uint64_t> &to, gio_lane<uint64_t> &from, uint32_t n) {
  for (uint32_t l = 1; l < n; ++l) to.v[l - 1u] = from.v[l];
  to.v[n - 1u] = 0;
}
GIO_FN uint32_t gio_pick(gio_lane<uint32_t> &p, uint32_t from) { return p.v[from % GIO_WARP]; }
GIO_FN uint32_t gio_sum(gio_lane<uint32_t> &p, uint32_t mask) {
  uint32_t sum = 0;
  for (; mask != 0u; mask &= mask - 1u) sum += p.v[gio_lowest(mask)];
  return sum;
}
GIO_FN uint32_t gio_anew(uint32_t x) { return x; }
GIO_FN uint32_t gio_xor(gio_lane<uint32_t> &p) {
  uint32_t all = 0;
  for (const uint32_t one : p.v) all ^= one;
  return all;
}

#endif

// Returns a mask of the n lowest bits.
GIO_FN uint32_t gio_low_bits(uint32_t n) { return n >= 32u ? ~0u : (1u << n) - 1u; }
// Return the bits of mask below bit l, and from bit l + 1 on.
GIO_FN uint32_t gio_below(uint32_t mask, uint32_t l) { return mask & ((1u << l) - 1u); }
GIO_FN uint32_t gio_above(uint32_t mask, uint32_t l) { return mask & (~1u << l); }
// Returns the position of the set bit with k set bits below it; there must be more than k.
GIO_FN uint32_t gio_nth_bit(uint32_t mask, uint32_t k) {
  for (; k != 0u; --k) mask &= mask - 1u;
  return gio_lowest(mask);
}
GIO_FN uint32_t gio_min(uint32_t a, uint32_t b) { return a < b ? a : b; }

// Returns lane 0's read of p to all lanes: for words that the warp itself writes occasionally,
// which the lanes must not read at different times.
GIO_FN uint32_t gio_common(const uint32_t *p) {
  gio_lane<uint32_t> v;
  GIO_LANES (l, 1) v[l] = *p;
  return gio_shfl(v, 0);
}
GIO_FN uint64_t gio_common(const uint64_t *p) {
  gio_lane<uint64_t> v;
  GIO_LANES (l, 1) v[l] = *p;
  return gio_shfl(v, 0);
}
// The same with an acquire load, for words that others write.
GIO_FN uint32_t gio_common_acquire(const uint32_t *p) {
  gio_lane<uint32_t> v;
  GIO_LANES (l, 1) v[l] = gio_ld_acquire_sys(p);
  return gio_shfl(v, 0);
}
GIO_FN uint64_t gio_common_acquire(const uint64_t *p) {
  gio_lane<uint64_t> v;
  GIO_LANES (l, 1) v[l] = gio_ld_acquire_sys(p);
  return gio_shfl(v, 0);
}
// Adds to a counter that only this warp writes and the host reads at any time.
GIO_FN void gio_count(uint64_t *counter, uint64_t n) {
  GIO_LANES (l, 1) gio_st_relaxed_sys(counter, *counter + n);
}
