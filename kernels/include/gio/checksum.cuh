// Checksums of objects: stored when an object is written, verified when it was read.
//
// Both read the object in memory, so a read detects any change on the way to the device and back.
// An object transferred by several commands is verified when the last of them has ended, and its
// checksum is stored when the last of them was submitted.
#pragma once
#include "crc32c.cuh"
#include "operation.cuh"

// Returns the checksums of a row.
GIO_FN uint32_t *gio_checksums(uint64_t checksums, uint32_t row, uint32_t count) {
  return gio_ptr<uint32_t>(checksums) + static_cast<uint64_t>(row) * count;
}

// Computes the CRCs of the objects of IOCTXs [first, first + count) in `row`, at most 32. A write
// stores them, a read compares them with the stored ones.
GIO_FN void gio_check(gio_state &s, gio_crc &crc, uint32_t a, uint32_t row, uint32_t first,
                      uint32_t count) {
  gio_active *active = s.w->active + a;
  const bool read = active->opcode == GIO_OP_READ;
  uint32_t *checksums = gio_checksums(active->checksums, row, active->count) + first;
  const gio_affine *entries = gio_ptr<const gio_affine>(active->ioctx) + first;
  const uint64_t base = gio_ptr<const uint64_t>(active->row_base)[row];
  gio_lane<uint64_t> at;
  gio_lane<uint32_t> expected;
  GIO_LANES (l, count) {
    at[l] = base + entries[l].block * active->block_stride;
    expected[l] = read ? checksums[l] : 0u;
  }
  uint32_t wrong = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t found = gio_crc32c<4u>(crc, gio_shfl(at, i), active->object_bytes);
    if (read) {
      if (found != gio_shfl(expected, i)) wrong |= 1u << i;
    } else {
      GIO_LANES (l, 1) gio_st_relaxed_sys(checksums + i, found);
    }
  }
  if (wrong == 0u) return;
  GIO_LANES (l, count) {
    if ((wrong >> l & 1u) != 0u) gio_set_status(active->status, first + l, GIO_STATUS_CHECKSUM);
  }
  const uint64_t error = static_cast<uint64_t>(GIO_STATUS_CHECKSUM) << 32;
  gio_refused(s, a, gio_popc(wrong), error | (first + gio_lowest(wrong)));
  // Settling the command credits all of its objects, including these.
  GIO_LANES (l, 1) active->objects -= gio_popc(wrong);
}

// Returns true if another command of the object is outstanding or not yet submitted.
GIO_FN bool gio_more_of_it(gio_state &s, uint32_t a, uint32_t row, uint32_t first) {
  const gio_op &op = s.w->op;
  if (s.cursor_active == a && s.cursor_at % op.splits != 0u && op.row == row &&
      op.begin + s.cursor_at / op.splits == first) {
    return true;
  }
  for (uint32_t base = 0; base <= s.slot_mask; base += GIO_WARP) {
    const uint32_t n = gio_min(GIO_WARP, s.slot_mask + 1u - base);
    gio_lane<uint32_t> found;
    GIO_LANES (l, n) {
      gio_slot *slot = s.slots + base + l;
      const bool same = slot->active == a && slot->row == row && slot->first == first;
      found[l] = gio_slot_outstanding(slot) && same ? 1u : 0u;
    }
    if (gio_ballot(found, n) != 0u) return true;
  }
  return false;
}

// Returns true if lane `lane`, among the commands that just ended (`ended`) or ended without error
// (`good`), is the last command of a split object, and all its commands succeeded.
GIO_FN bool gio_completes(gio_state &s, gio_ended &e, uint32_t n, uint32_t ended, uint32_t good,
                          uint32_t lane) {
  const uint32_t a = gio_shfl(e.active, lane), row = gio_shfl(e.row, lane);
  const uint32_t first = gio_shfl(e.first, lane);
  gio_lane<uint32_t> flag;
  GIO_LANES (l, n) {
    flag[l] = e.active[l] == a && e.row[l] == row && e.first[l] == first ? 1u : 0u;
  }
  const uint32_t same = gio_ballot(flag, n) & ended;
  if (gio_above(same, lane) != 0u || (same & ~good) != 0u) return false;
  if (gio_more_of_it(s, a, row, first)) return false;
  // A command that failed earlier left its status. (Or one of another row did: this IOCTX has
  // failed regardless of this row's data.)
  const uint64_t status = s.w->active[a].status;
  const uint32_t found = gio_common(gio_ptr<const uint32_t>(status) + first);
  return found == GIO_STATUS_OK || found == GIO_STATUS_CHECKSUM;
}

// Verifies the data read by the commands of the lanes in `ended` (l < n), if they have checksums.
GIO_FN void gio_verify(gio_state &s, gio_ended &e, uint32_t n, uint32_t ended) {
  gio_lane<uint32_t> flag;
  GIO_LANES (l, n) {
    const bool checked = (s.checked >> e.active[l] & 1u) != 0u;
    flag[l] = checked && e.status[l] == GIO_STATUS_OK ? 1u : 0u;
  }
  const uint32_t good = gio_ballot(flag, n) & ended;
  if (good == 0u) return;
  gio_crc crc;
  gio_crc_begin(crc);
  for (uint32_t left = good; left != 0u; left &= left - 1u) {
    const uint32_t lane = gio_lowest(left);
    const uint32_t a = gio_shfl(e.active, lane);
    if (s.w->active[a].splits != 1u && !gio_completes(s, e, n, ended, good, lane)) continue;
    gio_check(s, crc, a, gio_shfl(e.row, lane), gio_shfl(e.first, lane),
              gio_shfl(e.count, lane) & ~GIO_SLOT_SPLIT);
  }
}
