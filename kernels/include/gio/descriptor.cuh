// Data pointers: descriptions of a command's memory (NVMe Base 2.1, "Physical Region Page Entry and
// List" and "Scatter Gather List").
//
// A command that needs more than the 16 bytes in its SQE uses the descriptor area of its CID slot:
// one SGL segment (always the last one), or one PRP list. An area's size is a power of two and at
// most a controller page, so none crosses a page.
#pragma once
#include "warp.cuh"

// SGL descriptor types (figure "SGL Descriptor Type"), as the identifier byte with subtype 0.
#define GIO_SGL_DATA 0x00u
#define GIO_SGL_BIT_BUCKET 0x10u
#define GIO_SGL_LAST_SEGMENT 0x30u

#define GIO_SGL_BYTES 16u
#define GIO_PRP_BYTES 8u

// One lane's contribution to a command: `data` bytes of memory at `iova`, then `pad` bytes of
// padding outside any KV block.
struct gio_segment {
  uint64_t iova;
  uint32_t data;
  uint32_t pad;
};

GIO_FN gio_u128 gio_sgl(uint64_t iova, uint32_t bytes, uint32_t type) {
  return gio_u128{iova, static_cast<uint64_t>(type) << 56 | bytes};
}

GIO_FN uint32_t gio_sgl_entries(const gio_segment &segment) {
  return (segment.data != 0u ? 1u : 0u) + (segment.pad != 0u ? 1u : 0u);
}

GIO_FN gio_u128 gio_sgl_padding(const gio_op &op, uint32_t bytes) {
  return gio_sgl(op.pad_type == GIO_SGL_BIT_BUCKET ? 0u : op.pad_iova, bytes, op.pad_type);
}

// Writes the entries of `segment` to `area`, from entry `at` on.
GIO_FN void gio_sgl_write(gio_u128 *area, uint32_t at, const gio_segment &segment,
                          const gio_op &op) {
  if (segment.data != 0u) gio_st16(area + at++, gio_sgl(segment.iova, segment.data, GIO_SGL_DATA));
  if (segment.pad != 0u) gio_st16(area + at, gio_sgl_padding(op, segment.pad));
}

// Returns the data pointer of a command with one entry in its SQE, or `entries` at `area_iova`.
GIO_FN gio_u128 gio_sgl_pointer(uint32_t entries, const gio_segment &segment,
                                const gio_op &op, uint64_t area_iova) {
  if (entries > 1u) return gio_sgl(area_iova, entries * GIO_SGL_BYTES, GIO_SGL_LAST_SEGMENT);
  if (segment.data != 0u) return gio_sgl(segment.iova, segment.data, GIO_SGL_DATA);
  return gio_sgl_padding(op, segment.pad);
}

// Returns the number of PRP pages in `bytes` from `iova`. The page size is a power of two.
GIO_FN uint32_t gio_prp_pages(uint64_t iova, uint32_t bytes, uint32_t page_bytes) {
  const uint64_t offset = iova & (page_bytes - 1u);
  return static_cast<uint32_t>((offset + bytes + page_bytes - 1u) >> gio_lowest(page_bytes));
}

// Writes the pages of `segment` as pages `at`, at + 1, ... of its command, which has `pages` in
// total. Page 0 is PRP1; page 1 is PRP2 if it is the last one; the others are list entries.
GIO_FN void gio_prp_write(uint64_t *list, uint32_t at, uint32_t pages, const gio_segment &segment,
                          uint32_t page_bytes) {
  if (pages <= 2u) return;
  const uint64_t page = segment.iova & ~(static_cast<uint64_t>(page_bytes) - 1u);
  const uint32_t own = gio_prp_pages(segment.iova, segment.data, page_bytes);
  for (uint32_t i = at == 0u ? 1u : 0u; i < own; ++i) {
    list[at + i - 1u] = page + static_cast<uint64_t>(i) * page_bytes;
  }
}

// Returns the data pointer of a command of `pages` pages: the first at `first` (any offset into the
// page), the second, if it is the last, at `second`; `list_iova` lists all but the first.
GIO_FN gio_u128 gio_prp_pointer(uint32_t pages, uint64_t first, uint64_t second,
                                uint64_t list_iova) {
  return gio_u128{first, pages == 1u ? 0u : pages == 2u ? second : list_iova};
}
