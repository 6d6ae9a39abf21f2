// The kernels of gio_pool for host threads, and the layout of their structs.
#define GIO_HOST 1
#include "pool/kernel.cuh"

#include <stddef.h>

struct gio_pool_row {
  const char *name;
  uint64_t size;
  uint64_t offset;
};

#define STRUCT(type) {#type, sizeof(type), 0}
#define FIELD(type, field)                                                                         \
  {#type "." #field, sizeof(static_cast<type *>(nullptr)->field), offsetof(type, field)}

// clang-format off
extern "C" const gio_pool_row gio_pool_table[] = {
  STRUCT(gio_move_args),
  FIELD(gio_move_args, staging),
  FIELD(gio_move_args, staging_row),
  FIELD(gio_move_args, rows),
  FIELD(gio_move_args, blocks),
  FIELD(gio_move_args, block_stride),
  FIELD(gio_move_args, row_count),
  FIELD(gio_move_args, count),
  FIELD(gio_move_args, object_bytes),
  FIELD(gio_move_args, way),
  STRUCT(gio_pattern_item),
  FIELD(gio_pattern_item, at),
  FIELD(gio_pattern_item, seed),
  FIELD(gio_pattern_item, offset),
  FIELD(gio_pattern_item, len),
  STRUCT(gio_pattern_args),
  FIELD(gio_pattern_args, items),
  FIELD(gio_pattern_args, found),
  FIELD(gio_pattern_args, count),
  FIELD(gio_pattern_args, tiles),
  FIELD(gio_pattern_args, mode),
  FIELD(gio_pattern_args, reserved),
};
// clang-format on
extern "C" const uint64_t gio_pool_rows = sizeof(gio_pool_table) / sizeof(gio_pool_table[0]);
