// Where the generating operation stands, and what its next 32 IOCTXs (or pieces of them) mean.
//
// An operation is rows of runs. On one device, each row of an affine operation is the IOCTXs of one
// class, and an explicit operation is a single row; the device's warps share the run by halves,
// thirds and so on. s.cursor_row counts rows from the operation's first one, s.cursor_at counts
// pieces from the start of this warp's share of the run. An IOCTX longer than a command may be is
// several pieces; all others are one.
#pragma once
#include "descriptor.cuh"
#include "queue.cuh"

#define GIO_LBAS_MAX 65536u // of one command: NLB has 16 bits
#define GIO_ROWS_MAX 65535u // keeps slot numbers within 64 bits

// What generating needs to know. Warp-uniform, read anew for each batch.
struct gio_op {
  gio_iocb *iocb;
  uint64_t ioctx;
  uint32_t affine;
  uint32_t refuse; // GIO_STATUS_* for everything not yet generated; 0 = go on
  uint32_t rows;
  uint32_t begin; // IOCTXs [begin, end) are this warp's share of the row
  uint32_t end;
  uint32_t piece_bytes; // of one command, at the most
  uint32_t pieces;      // of one IOCTX
  uint32_t merge;       // IOCTXs of one command, at the most
  uint32_t prp;
  uint32_t page_bytes;
  uint32_t lba_shift;
  uint64_t lbas;
  // affine
  const gio_pool *pool;
  uint32_t row;
  uint32_t row_class;
  uint32_t group_slots; // slots of one row of a group on one device
  uint32_t slot_lbas;
  uint64_t data_lba;
  uint64_t row_iova;
  gio_padding padding;
};

// The lanes' pieces. verdict: 0 nothing to do, 1 and 2 a command (2: of an object with more to
// come), above that the GIO_STATUS_* to refuse it with.
#define GIO_VERDICT_GO 1u
#define GIO_VERDICT_GO_PIECE 2u
struct gio_pieces {
  gio_lane<uint64_t> lba;
  gio_lane<uint64_t> iova;
  gio_lane<uint32_t> data;
  gio_lane<uint32_t> pad;
  gio_lane<uint32_t> index;
  gio_lane<uint32_t> verdict;
};

// Descriptor space: how many IOCTXs one command may merge.
GIO_FN uint32_t gio_merge_max(const gio_op &op, const gio_pool *pool, uint32_t descriptor_bytes) {
  if (op.pieces != 1u) return 1;
  uint32_t merge = gio_min(gio_min(pool->run_bytes, op.piece_bytes) / pool->slot_bytes, GIO_WARP);
  if (op.prp != 0u) { // only whole pages follow one another
    const uint64_t odd = op.row_iova | pool->block_stride | pool->object_bytes;
    if ((odd & (op.page_bytes - 1u)) != 0u) return 1;
  } else {
    const uint32_t entries = pool->slot_bytes != pool->object_bytes ? 2u : 1u;
    merge = gio_min(merge, descriptor_bytes / (GIO_SGL_BYTES * entries));
  }
  return merge != 0u ? merge : 1u;
}

// Whether a pool makes sense to this warp: what the host got wrong must not become an address.
GIO_FN bool gio_pool_usable(const gio_pool *pool, const gio_iocb *iocb, const gio_warp *w) {
  if (pool->devices == 0u || pool->devices != iocb->devices || w->device >= pool->devices) {
    return false;
  }
  if (pool->group == 0u || pool->group % pool->devices != 0u) return false;
  if (pool->rows > GIO_ROWS_MAX || iocb->row_first > pool->rows) return false;
  if (iocb->row_count > pool->rows - iocb->row_first) return false;
  if (pool->object_bytes == 0u || pool->object_bytes > pool->slot_bytes) return false;
  if ((pool->slot_bytes & ((1u << w->lba_shift) - 1u)) != 0u) return false;
  const bool padded = pool->object_bytes != pool->slot_bytes;
  if (!padded) return true;
  return w->descriptor_mode == GIO_DESC_SGL && w->descriptor_bytes >= 2u * GIO_SGL_BYTES;
}

// Finds this warp's share of the cursor's row.
GIO_FN void gio_op_row(gio_state &s, gio_op &op) {
  const gio_warp *w = s.w;
  op.begin = 0;
  op.end = 0;
  if (s.cursor_row >= op.rows) return;
  uint32_t run = w->device;
  if (op.affine != 0u) {
    op.row = op.iocb->row_first + s.cursor_row;
    const uint32_t shift = op.row % op.pool->devices;
    op.row_class = run >= shift ? run - shift : run + op.pool->devices - shift;
    op.row_iova = gio_ptr<const uint64_t>(op.pool->row_iova)[op.row];
    op.merge = gio_merge_max(op, op.pool, w->descriptor_bytes);
    run = op.row_class;
  }
  if (run >= op.iocb->devices) return;
  const uint32_t *starts = gio_ptr<const uint32_t>(op.iocb->starts);
  const uint32_t first = starts[run];
  const uint64_t length = starts[run + 1u] - first;
  op.begin = first + static_cast<uint32_t>(length * w->part / w->parts);
  op.end = first + static_cast<uint32_t>(length * (w->part + 1u) / w->parts);
}

GIO_FN void gio_op_load(gio_state &s, gio_op &op) {
  const gio_warp *w = s.w;
  op.iocb = s.iocbs + gio_common(&w->active[s.cursor_active].iocb);
  op.ioctx = op.iocb->ioctx;
  op.affine = op.iocb->kind == GIO_KIND_AFFINE ? 1u : 0u;
  op.refuse = gio_refusal(s);
  op.rows = op.affine != 0u ? op.iocb->row_count : 1u;
  op.merge = 1;
  op.prp = w->descriptor_mode == GIO_DESC_PRP ? 1u : 0u;
  op.page_bytes = w->page_bytes;
  op.lba_shift = w->lba_shift;
  op.lbas = w->lbas;
  uint64_t limit = static_cast<uint64_t>(GIO_LBAS_MAX) << w->lba_shift;
  if (limit > w->transfer_bytes_max) limit = w->transfer_bytes_max;
  if (op.prp != 0u) {
    const uint64_t listed = static_cast<uint64_t>(w->descriptor_bytes / GIO_PRP_BYTES);
    if (limit > listed * w->page_bytes) limit = listed * w->page_bytes;
  }
  op.piece_bytes = static_cast<uint32_t>(limit) >> w->lba_shift << w->lba_shift;
  uint32_t longest = op.iocb->bytes_max;
  bool usable = op.piece_bytes != 0u;
  usable = usable && (op.iocb->opcode == GIO_OP_READ || op.iocb->opcode == GIO_OP_WRITE);
  op.pool = gio_ptr<const gio_pool>(op.iocb->pool);
  if (op.affine != 0u) {
    usable = usable && gio_pool_usable(op.pool, op.iocb, w);
    longest = op.pool->slot_bytes;
  }
  if (usable) {
    op.pieces = longest / op.piece_bytes + (longest % op.piece_bytes != 0u ? 1u : 0u);
    if (op.pieces == 0u) op.pieces = 1;
  } else { // refused as one row: each class once, by the device of its number
    if (op.refuse == 0u) op.refuse = GIO_STATUS_INVALID;
    op.pieces = 1;
    op.affine = 0;
    op.rows = 1;
  }
  if (op.affine != 0u) {
    const bool read = op.iocb->opcode == GIO_OP_READ;
    op.group_slots = op.pool->group / op.pool->devices;
    op.slot_lbas = op.pool->slot_bytes >> op.lba_shift;
    op.data_lba = gio_ptr<const uint64_t>(op.pool->data_lba)[w->device];
    op.padding.iova = read ? op.pool->pad_read_iova : op.pool->pad_write_iova;
    op.padding.type = read && w->bit_bucket != 0u ? GIO_SGL_BIT_BUCKET : GIO_SGL_DATA;
  } else {
    op.padding.iova = 0;
    op.padding.type = GIO_SGL_DATA;
  }
  gio_op_row(s, op);
}

GIO_FN bool gio_in_namespace(const gio_op &op, uint64_t lba, uint64_t lbas) {
  return lba <= op.lbas && lbas <= op.lbas - lba;
}

// One lane's piece of an affine IOCTX: `piece` of the IOCTX `index`.
GIO_FN void gio_locate_affine(const gio_op &op, gio_pieces &p, uint32_t l, uint32_t index,
                              uint32_t piece) {
  const gio_pool *pool = op.pool;
  const gio_affine entry = gio_ptr<const gio_affine>(op.ioctx)[index];
  const uint32_t group = entry.file / pool->group;
  const uint32_t k = entry.file - group * pool->group;
  const uint32_t column = k / pool->devices;
  const uint64_t slot =
      (static_cast<uint64_t>(group) * pool->rows + op.row) * op.group_slots + column;
  const uint64_t lba = op.data_lba + slot * op.slot_lbas;
  // The class decides which device holds the file: in a wrong one it would be somebody else's slot.
  const bool right = entry.block < pool->blocks && entry.file < pool->files &&
                     k - column * pool->devices == op.row_class;
  const uint32_t offset = piece * op.piece_bytes;
  const uint32_t bytes = gio_min(pool->slot_bytes - offset, op.piece_bytes);
  const uint32_t left = pool->object_bytes > offset ? pool->object_bytes - offset : 0u;
  const uint64_t iova = op.row_iova + entry.block * pool->block_stride + offset;
  p.index[l] = index;
  p.lba[l] = lba + (offset >> op.lba_shift);
  p.iova[l] = iova;
  p.data[l] = gio_min(left, bytes);
  p.pad[l] = bytes - gio_min(left, bytes);
  if (!right || !gio_in_namespace(op, lba, op.slot_lbas) || (op.prp != 0u && (iova & 3u) != 0u)) {
    p.verdict[l] = piece == 0u ? GIO_STATUS_INVALID : 0u;
  } else {
    p.verdict[l] = piece + 1u < op.pieces ? GIO_VERDICT_GO_PIECE : GIO_VERDICT_GO;
  }
}

// One lane's piece of an explicit IOCTX.
GIO_FN void gio_locate_explicit(const gio_state &s, const gio_op &op, gio_pieces &p, uint32_t l,
                                uint32_t index, uint32_t piece) {
  const gio_ioctx entry = gio_ptr<const gio_ioctx>(op.ioctx)[index];
  const uint32_t lba_mask = (1u << op.lba_shift) - 1u;
  const bool right = entry.device == s.w->device && entry.bytes != 0u &&
                     (entry.bytes & lba_mask) == 0u && entry.bytes <= op.iocb->bytes_max &&
                     (op.prp == 0u || (entry.iova & 3u) == 0u) &&
                     gio_in_namespace(op, entry.lba, entry.bytes >> op.lba_shift);
  const uint64_t offset = static_cast<uint64_t>(piece) * op.piece_bytes;
  const uint32_t left = entry.bytes > offset ? entry.bytes - static_cast<uint32_t>(offset) : 0u;
  p.index[l] = index;
  p.lba[l] = entry.lba + (offset >> op.lba_shift);
  p.iova[l] = entry.iova + offset;
  p.data[l] = gio_min(left, op.piece_bytes);
  p.pad[l] = 0;
  if (!right) {
    p.verdict[l] = piece == 0u ? GIO_STATUS_INVALID : 0u;
  } else if (left == 0u) { // shorter than the longest one
    p.verdict[l] = 0;
  } else {
    p.verdict[l] = left > op.piece_bytes ? GIO_VERDICT_GO_PIECE : GIO_VERDICT_GO;
  }
}

// Pieces of this warp's share of the row that are still to come.
GIO_FN uint32_t gio_pieces_left(const gio_state &s, const gio_op &op) {
  const uint32_t all = (op.end - op.begin) * op.pieces;
  return all > s.cursor_at ? all - s.cursor_at : 0u;
}

// Fills the first n lanes with the pieces from the cursor on.
GIO_FN void gio_locate(gio_state &s, const gio_op &op, gio_pieces &p, uint32_t n) {
  if (op.affine != 0u && op.pieces == 1u) {
    GIO_LANES (l, n) gio_locate_affine(op, p, l, op.begin + s.cursor_at + l, 0);
  } else if (op.affine != 0u) {
    GIO_LANES (l, n) {
      const uint32_t at = s.cursor_at + l;
      gio_locate_affine(op, p, l, op.begin + at / op.pieces, at % op.pieces);
    }
  } else if (op.pieces == 1u) {
    GIO_LANES (l, n) gio_locate_explicit(s, op, p, l, op.begin + s.cursor_at + l, 0);
  } else {
    GIO_LANES (l, n) {
      const uint32_t at = s.cursor_at + l;
      gio_locate_explicit(s, op, p, l, op.begin + at / op.pieces, at % op.pieces);
    }
  }
}
