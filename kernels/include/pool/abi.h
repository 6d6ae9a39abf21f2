// The binary interface between host code and the kernels of gio_pool: plain C.
//
// kernels/src/pool/generated.rs is made from it by `cargo xtask abi`. Every address is one that the
// kernel can dereference. Little-endian.
#ifndef GIO_POOL_ABI_H
#define GIO_POOL_ABI_H

#include "gio/abi.h"

#define GIO_TILE 2048u            // bytes that a warp takes at a time
#define GIO_POOL_THREADS_MAX 256u // threads of a block

// gio_scatter_gather_args.direction
#define GIO_SCATTER 0u
#define GIO_GATHER 1u

// gio_pattern_args.mode
#define GIO_PATTERN_FILL 0u
#define GIO_PATTERN_POISON 1u
#define GIO_PATTERN_CHECK 2u

// gio_pattern_args.found of an item without a difference.
#define GIO_PATTERN_NONE 0xffffffffffffffffull

// clang-format off

// Objects of a request: gio_uring::ScatterGather. Object (row r, position p) is at
//   staging + r * staging_row + s * object_bytes, s = staging_blocks[p] or p    and at
//   rows[r] + blocks[p] * block_stride
typedef struct gio_scatter_gather_args {
  uint64_t staging;      // first byte of staging memory
  uint64_t staging_row;  // bytes from one row to the next there
  uint64_t rows;         // u64[row_count]: where block 0 of each row is in the pool
  uint64_t blocks;       // u32[count]: the block of each position
  uint64_t block_stride; // bytes from one block to the next
  uint32_t row_count;
  uint32_t count;
  uint32_t object_bytes;
  uint32_t direction;    // GIO_SCATTER: to the blocks; GIO_GATHER: to staging memory
  uint64_t checksums;    // u32[row_count * count], row * count + position: CRC-32C of the object in
                         //   the pool. A gather stores it, a scatter compares. 0 = none
  uint64_t status;       // scatter: u32[count]: GIO_STATUS_CHECKSUM where an object differs; sticky
  uint64_t errors;       // scatter: u64: objects that differ are added
  uint64_t staging_blocks; // u32[count]: where in a row of staging memory each position is.
                         //   0 = one after another
} gio_scatter_gather_args; // 88 bytes

// Bytes [offset, offset + len) of the object with this seed, at an address.
typedef struct gio_pattern_item {
  uint64_t at;       // a multiple of 4
  uint64_t seed;
  uint32_t offset;   // a multiple of 8
  uint32_t len;      // a multiple of 4; offset + len < 2^32
} gio_pattern_item;  // 24 bytes

typedef struct gio_pattern_args {
  uint64_t items;    // gio_pattern_item[count]
  uint64_t found;    // check: u64[count], GIO_PATTERN_NONE at first; then for what differs the
                     //   lowest offset in its object << 32 | the 4-byte word that is there
  uint32_t count;
  uint32_t tiles;    // of the longest item, rounded up
  uint32_t mode;     // GIO_PATTERN_FILL, GIO_PATTERN_POISON or GIO_PATTERN_CHECK
  uint32_t reserved;
} gio_pattern_args;  // 32 bytes

// clang-format on
#endif
