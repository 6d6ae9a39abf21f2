// gio_scatter_gather: objects between staging memory, where they stand one after another, and their
// blocks, in either direction.
//
// A warp takes a tile of an object at a time, so that 32 threads are at neighbouring addresses on
// either side, and each has four loads under way before its first store.
#pragma once
#include "unit.cuh"

template <class U>
GIO_FN void gio_copy(uint64_t to_at, uint64_t from_at, uint32_t units, uint32_t lane) {
  U *const to = gio_ptr<U>(to_at);
  const U *const from = gio_ptr<const U>(from_at);
  uint32_t i = lane;
  for (; i + 3u * GIO_WARP < units; i += 4u * GIO_WARP) {
    const U a = gio_get(from + i), b = gio_get(from + i + GIO_WARP);
    const U c = gio_get(from + i + 2u * GIO_WARP), d = gio_get(from + i + 3u * GIO_WARP);
    gio_put(to + i, a);
    gio_put(to + i + GIO_WARP, b);
    gio_put(to + i + 2u * GIO_WARP, c);
    gio_put(to + i + 3u * GIO_WARP, d);
  }
  for (; i < units; i += GIO_WARP) gio_put(to + i, gio_get(from + i));
}

// `len` bytes in the widest unit that both addresses allow, and what is left of the last one by the
// byte. All lanes of a warp take the same way through it.
GIO_FN void gio_copy_tile(uint64_t to, uint64_t from, uint32_t len, uint32_t lane) {
  uint32_t done = 0;
  if (gio_fits<gio_u128>(to | from)) {
    gio_copy<gio_u128>(to, from, len / 16u, lane);
    done = len & ~15u;
  } else if (gio_fits<uint64_t>(to | from)) {
    gio_copy<uint64_t>(to, from, len / 8u, lane);
    done = len & ~7u;
  } else if (gio_fits<uint32_t>(to | from)) {
    gio_copy<uint32_t>(to, from, len / 4u, lane);
    done = len & ~3u;
  }
  gio_copy<uint8_t>(to + done, from + done, len - done, lane);
}

// The share of one thread of `threads`, a multiple of a warp.
GIO_FN void gio_scatter_gather_share(const gio_scatter_gather_args &a, uint32_t thread,
                                     uint32_t threads) {
  const uint32_t lane = thread % GIO_WARP;
  const uint32_t each = a.object_bytes / GIO_TILE + (a.object_bytes % GIO_TILE != 0u ? 1u : 0u);
  const uint64_t tiles = static_cast<uint64_t>(a.row_count) * a.count * each;
  for (uint64_t t = thread / GIO_WARP; t < tiles; t += threads / GIO_WARP) {
    const uint64_t object = t / each;
    const uint64_t row = object / a.count, position = object % a.count;
    const uint64_t start = t % each * GIO_TILE;
    const uint64_t left = a.object_bytes - start;
    const uint32_t len = left < GIO_TILE ? static_cast<uint32_t>(left) : GIO_TILE;
    const uint64_t staging = a.staging + row * a.staging_row + position * a.object_bytes + start;
    const uint64_t block = gio_ptr<const uint32_t>(a.blocks)[position];
    const uint64_t pool = gio_ptr<const uint64_t>(a.rows)[row] + block * a.block_stride + start;
    const bool to_pool = a.direction == GIO_SCATTER;
    gio_copy_tile(to_pool ? pool : staging, to_pool ? staging : pool, len, lane);
  }
}
