// gio_scatter_gather: copies objects between staging memory, where they are contiguous or in blocks
// of their own, and blocks of the pool, in either direction.
//
// A warp copies one tile of an object at a time, so that 32 threads access neighbouring addresses
// on either side, each with four loads in flight before its first store. With checksums it copies
// whole objects: the checksum covers the bytes in the pool, so that staging memory, which is behind
// a link, is read only once.
#pragma once
#include "unit.cuh"
#include "gio/crc32c.cuh"

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

// Copies `len` bytes in the widest unit that both addresses allow, and the rest by bytes. All lanes
// of a warp take the same branches.
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

// Addresses of object `object` (row * count + position) in staging memory and in the pool.
struct gio_object {
  uint64_t staging, pool;
  uint32_t position;
};
GIO_FN gio_object gio_object_of(const gio_scatter_gather_args &a, uint64_t object) {
  const uint64_t row = object / a.count, position = object % a.count;
  const uint64_t block = gio_ptr<const uint32_t>(a.blocks)[position];
  const uint64_t base = gio_ptr<const uint64_t>(a.rows)[row];
  const uint32_t *staged = gio_ptr<const uint32_t>(a.staging_blocks);
  const uint64_t at = staged == nullptr ? position : staged[position];
  return {a.staging + row * a.staging_row + at * a.object_bytes,
          base + block * a.block_stride, static_cast<uint32_t>(position)};
}

// Copies tile `tile` of an object in the requested direction.
GIO_FN void gio_move_tile(const gio_scatter_gather_args &a, const gio_object &o, uint32_t tile) {
  const uint32_t start = tile * GIO_TILE;
  const uint32_t len = gio_min(a.object_bytes - start, GIO_TILE);
  const uint64_t staging = o.staging + start, pool = o.pool + start;
  const bool to_pool = a.direction == GIO_SCATTER;
  GIO_LANES (l, GIO_WARP) {
    gio_copy_tile(to_pool ? pool : staging, to_pool ? staging : pool, len, l);
  }
}

// Stores or verifies an object's checksum over its bytes in the pool, copied by this warp.
GIO_FN void gio_check_object(const gio_scatter_gather_args &a, gio_crc &crc, uint64_t object,
                             const gio_object &o) {
  uint32_t *checksum = gio_ptr<uint32_t>(a.checksums) + object;
  const uint32_t found = gio_crc32c<2u>(crc, o.pool, a.object_bytes);
  GIO_LANES (l, 1) {
    if (a.direction == GIO_GATHER) {
      *checksum = found;
    } else if (*checksum != found) {
      gio_ptr<uint32_t>(a.status)[o.position] = GIO_STATUS_CHECKSUM;
      gio_add_relaxed_gpu(gio_ptr<uint64_t>(a.errors), 1);
    }
  }
}

// Runs one warp's share, of `warps` warps: tiles, or whole objects if they have checksums.
GIO_FN void gio_scatter_gather_share(const gio_scatter_gather_args &a, uint32_t warp,
                                     uint32_t warps) {
  const uint32_t each = a.object_bytes / GIO_TILE + (a.object_bytes % GIO_TILE != 0u ? 1u : 0u);
  const uint64_t objects = static_cast<uint64_t>(a.row_count) * a.count;
  if (a.checksums == 0u) {
    for (uint64_t t = warp; t < objects * each; t += warps) {
      gio_move_tile(a, gio_object_of(a, t / each), static_cast<uint32_t>(t % each));
    }
    return;
  }
  gio_crc crc;
  gio_crc_begin(crc);
  for (uint64_t object = warp; object < objects; object += warps) {
    const gio_object o = gio_object_of(a, object);
    for (uint32_t tile = 0; tile < each; ++tile) gio_move_tile(a, o, tile);
    gio_check_object(a, crc, object, o);
  }
}
