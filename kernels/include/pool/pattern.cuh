// gio_pattern: an object's contents, generated from its seed, so that any byte can be checked
// without a reference copy.
//
// Word i (8 bytes) of an object is a mix of seed + i * GIO_GAMMA. So each word encodes its object
// and offset, and bytes of another object or from another offset are detected.
#pragma once
#include "unit.cuh"

// 2^64 divided by the golden ratio: a step that visits all 64-bit values.
#define GIO_GAMMA 0x9E3779B97F4A7C15ull
// Contents of memory before anything is read into it, so that bytes never written are detected.
#define GIO_POISON 0xDEADBEEFDEADBEEFull

// One 32 x 32 bit product per word, which every vector unit supports.
GIO_FN uint64_t gio_word(uint64_t seed, uint64_t index) {
  const uint64_t z = seed + index * GIO_GAMMA;
  const uint64_t mixed = (z & 0xffffffffu) * (z >> 32) ^ (z << 32 | z >> 32);
  return mixed ^ mixed >> 29;
}

// Returns the 4-byte word at `byte`, a multiple of 4, of the object.
GIO_FN uint32_t gio_half(uint64_t seed, uint64_t byte) {
  return static_cast<uint32_t>(gio_word(seed, byte / 8u) >> byte % 8u * 8u);
}

// Generates unit i from `byte` of the object; `byte` is a multiple of 8, or of 4 for a uint32_t.
GIO_FN void gio_make(uint32_t &u, uint64_t seed, uint64_t byte, uint64_t i) {
  u = gio_half(seed, byte + 4u * i);
}
GIO_FN void gio_make(uint64_t &u, uint64_t seed, uint64_t byte, uint64_t i) {
  u = gio_word(seed, byte / 8u + i);
}
GIO_FN void gio_make(gio_u128 &u, uint64_t seed, uint64_t byte, uint64_t i) {
  const uint64_t first = byte / 8u + 2u * i;
  u = {gio_word(seed, first), gio_word(seed, first + 1u)};
}
GIO_FN void gio_make_poison(uint32_t &u) { u = static_cast<uint32_t>(GIO_POISON); }
GIO_FN void gio_make_poison(uint64_t &u) { u = GIO_POISON; }
GIO_FN void gio_make_poison(gio_u128 &u) { u = {GIO_POISON, GIO_POISON}; }

GIO_FN uint64_t gio_xor(uint32_t a, uint32_t b) { return a ^ b; }
GIO_FN uint64_t gio_xor(uint64_t a, uint64_t b) { return a ^ b; }
GIO_FN uint64_t gio_xor(gio_u128 a, gio_u128 b) { return (a.lo ^ b.lo) | (a.hi ^ b.hi); }

// Bytes of an object; a lane processes every `lanes`-th unit of them from `lane` on.
struct gio_part {
  uint64_t at;
  uint64_t seed;
  uint64_t byte; // offset in the object of the bytes at `at`
  uint32_t lane, lanes;
};

template <class U> GIO_FN void gio_fill(const gio_part &p, uint64_t units) {
  U *const to = gio_ptr<U>(p.at);
  for (uint64_t i = p.lane; i < units; i += p.lanes) {
    U u;
    gio_make(u, p.seed, p.byte, i);
    gio_put(to + i, u);
  }
}
template <class U> GIO_FN void gio_poison(const gio_part &p, uint64_t units) {
  U *const to = gio_ptr<U>(p.at);
  U u;
  gio_make_poison(u);
  for (uint64_t i = p.lane; i < units; i += p.lanes) gio_put(to + i, u);
}
// Returns the differing bits, or-ed over all units.
template <class U> GIO_FN uint64_t gio_differ(const gio_part &p, uint64_t units) {
  const U *const from = gio_ptr<const U>(p.at);
  uint64_t bits = 0;
  for (uint64_t i = p.lane; i < units; i += p.lanes) {
    U u;
    gio_make(u, p.seed, p.byte, i);
    bits |= gio_xor(gio_get(from + i), u);
  }
  return bits;
}

// Processes whole units of U, then the rest in words of 4 bytes.
template <class U> GIO_FN gio_part gio_rest(const gio_part &p, uint64_t len) {
  const uint64_t whole = len / sizeof(U) * sizeof(U);
  return {p.at + whole, p.seed, p.byte + whole, p.lane, p.lanes};
}
template <class U> GIO_FN uint64_t gio_run(const gio_part &p, uint64_t len, uint32_t mode) {
  const gio_part rest = gio_rest<U>(p, len);
  const uint64_t units = len / sizeof(U), words = len % sizeof(U) / 4u;
  if (mode == GIO_PATTERN_FILL) {
    gio_fill<U>(p, units);
    gio_fill<uint32_t>(rest, words);
  } else if (mode == GIO_PATTERN_POISON) {
    gio_poison<U>(p, units);
    gio_poison<uint32_t>(rest, words);
  } else {
    return gio_differ<U>(p, units) | gio_differ<uint32_t>(rest, words);
  }
  return 0;
}

// Searches for the first wrong word, slowly: returns its offset in the object, and its value in
// `found`. If memory has changed since and nothing differs, reports the first word.
GIO_FN uint64_t gio_locate(const gio_part &p, uint64_t len, uint32_t *found) {
  const uint32_t *const from = gio_ptr<const uint32_t>(p.at);
  for (uint64_t i = 0; i < len / 4u; ++i) {
    *found = gio_get(from + i);
    if (*found != gio_half(p.seed, p.byte + 4u * i)) return p.byte + 4u * i;
  }
  *found = gio_half(p.seed, p.byte);
  return p.byte;
}

GIO_FN void gio_pattern_tile(const gio_part &p, uint32_t len, uint32_t mode, uint64_t *first) {
  uint64_t bits;
  if (gio_fits<gio_u128>(p.at)) {
    bits = gio_run<gio_u128>(p, len, mode);
  } else if (gio_fits<uint64_t>(p.at)) {
    bits = gio_run<uint64_t>(p, len, mode);
  } else {
    bits = gio_run<uint32_t>(p, len, mode);
  }
  if (bits == 0u) return;
  // Every lane that saw a difference searches the whole tile, and all find the same.
  uint32_t found;
  const uint64_t byte = gio_locate(p, len, &found);
  gio_min_relaxed_gpu(first, byte << 32 | found);
}

// Runs one thread's share, of `threads` threads, a multiple of a warp.
GIO_FN void gio_pattern_share(const gio_pattern_args &a, uint32_t thread, uint32_t threads) {
  const uint64_t tiles = static_cast<uint64_t>(a.count) * a.tiles;
  for (uint64_t t = thread / GIO_WARP; t < tiles; t += threads / GIO_WARP) {
    const uint64_t index = t / a.tiles;
    const gio_pattern_item item = gio_ptr<const gio_pattern_item>(a.items)[index];
    const uint64_t start = t % a.tiles * GIO_TILE;
    if (start >= item.len) continue;
    const uint64_t left = item.len - start;
    const uint32_t len = left < GIO_TILE ? static_cast<uint32_t>(left) : GIO_TILE;
    const gio_part part = {item.at + start, item.seed, item.offset + start, thread % GIO_WARP,
                           GIO_WARP};
    gio_pattern_tile(part, len, a.mode, gio_ptr<uint64_t>(a.found) + index);
  }
}
